"""The daemon's main thread: checks the other threads, reports to systemd, and waits for a stop request.

It feeds the watchdog only after a check without problems, so systemd kills and restarts a daemon that hangs. A daemon that
lost an essential part exits, so that systemd restarts it too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from honed.daemon.process.notify import Heartbeat, Notifier
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings

log = structlog.get_logger("honed.serve")

EXIT_OK = 0
EXIT_FAILED = 1
CHECK_S = 5.0


def supervise(
    service: Service, is_asked: threading.Event, notifier: Notifier, listeners: Callable[[], list[str]] = list
) -> int:
    """Report to systemd until asked to stop. A dead part ends the process, so that systemd restarts it.

    Args:
        listeners: returns problems of the HTTP listeners.

    Returns:
        the exit code.
    """
    sockets = [service.settings.paths.engine_socket, service.settings.paths.admin_socket]
    identities = [_identity(path) for path in sockets]
    heart = Heartbeat(notifier)
    heart.beat("serving")
    log.info("serving", pid=os.getpid(), **_ways_in(service.settings))
    interval_s = min(notifier.watchdog_interval_s or CHECK_S, CHECK_S)
    code = EXIT_OK
    while not is_asked.wait(interval_s):
        dead = listeners()
        dead += [
            f"{path} was removed or replaced, so nobody can connect"
            for path, identity in zip(sockets, identities, strict=True)
            if identity is not None and _identity(path) != identity
        ]
        if problems := [*service.problems, *dead]:
            log.error("not healthy", problems=problems)
            heart.say(f"not healthy: {'; '.join(problems)}")
            if dead or not service.store.is_alive or not service.router.is_alive:
                code = EXIT_FAILED
                break
        else:
            heart.beat(what_it_does(service))
    heart.stop()
    log.info("stopping")
    return code


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def what_it_does(service: Service) -> str:
    """One line for `systemctl status`. Takes no lock, since its holder may hang and this thread must notice it."""
    now_s = service.monotonic()
    engines = list(service.engines.by_id.values())
    connected = sum(service.engines.is_connected(engine, now_s) for engine in engines)
    known = f"{len(engines)} engine{'' if len(engines) == 1 else 's'}"
    parts = [f"{connected} of {known} connected" if connected < len(engines) else known]
    operation = service.rollout.current
    if operation is not None:
        parts.append(f"{operation.kind} {operation.operation_id}: {operation.stage}")
    else:
        parts.append("trainer connected" if service.trainer.is_connected else "no trainer")
    if service.store.is_failing:
        parts.append(f"the database refuses: {service.store.last_error}")
    return "serving; " + ", ".join(parts)


def _ways_in(settings: Settings) -> dict[str, str]:
    """Where the daemon is reached, for the log."""
    http = settings.http
    found = {"engine_socket": str(settings.paths.engine_socket), "admin_socket": str(settings.paths.admin_socket)}
    if http.metrics_listen:
        scheme = "http" if http.metrics_web_config is None else "https"
        found |= {"page": f"{scheme}://{http.metrics_listen}/", "metrics": f"{scheme}://{http.metrics_listen}/metrics"}
    return found | ({"admin_api": f"http://{http.admin_listen}"} if http.admin_listen else {})
