"""Notifies systemd: READY, WATCHDOG, STATUS, STOPPING, as datagrams to $NOTIFY_SOCKET. Without it, sends nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping


class Notifier:
    """sd_notify(3) in a few lines. A name beginning with "@" is in the abstract namespace."""

    def __init__(self, env: Mapping[str, str] = os.environ) -> None:
        name = env.get("NOTIFY_SOCKET", "")
        self._address = "\0" + name[1:] if name.startswith("@") else name
        # Kept open, so that the watchdog works even if the process runs out of file descriptors.
        self._channel = _datagrams() if name else None
        pid = env.get("WATCHDOG_PID", "")
        usec = env.get("WATCHDOG_USEC", "")
        is_ours = not pid or pid == str(os.getpid())
        self.watchdog_interval_s = int(usec) / 2e6 if usec.isdecimal() and is_ours else 0.0
        """Interval of `watchdog` calls: half of systemd's limit. 0: no watchdog."""

    def ready(self) -> bool:
        return self._send("READY=1")

    def stopping(self) -> bool:
        return self._send("STOPPING=1")

    def watchdog(self) -> bool:
        return self._send("WATCHDOG=1")

    def status(self, text: str) -> bool:
        return self._send(f"STATUS={' '.join(text.split())}")

    def _send(self, line: str) -> bool:
        """Send to systemd; True if sent. A failure is ignored."""
        if self._channel is None:
            return False
        try:
            self._channel.sendto(line.encode(), self._address)
        except OSError:
            return False
        return True


def _datagrams() -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    channel.setblocking(False)
    return channel


class Heartbeat:
    """READY with the first beat, WATCHDOG as often as systemd needs it, STATUS on a change.

    Call `beat` only right after seeing the work itself progress.
    """

    def __init__(self, notifier: Notifier, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._notifier, self._monotonic = notifier, monotonic
        self._status = ""
        self._next_s = float("-inf")
        self._is_ready = False

    def beat(self, status: str) -> None:
        """Report health; `status` is the current work."""
        if not self._is_ready:
            self._is_ready = True
            self._notifier.ready()
        self.say(status)
        interval_s = self._notifier.watchdog_interval_s
        if interval_s and (now_s := self._monotonic()) >= self._next_s:
            self._next_s = now_s + interval_s
            self._notifier.watchdog()

    def say(self, status: str) -> None:
        """Report only the status, not health."""
        if status != self._status:
            self._status = status
            self._notifier.status(status)

    def stop(self) -> None:
        """Report stopping."""
        self._notifier.stopping()
