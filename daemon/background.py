"""Long jobs on threads of their own, which hold up neither their callers nor the end of the process."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import structlog

log = structlog.get_logger("honed.background")

Job = Callable[[], object]


class Background:
    """Runs jobs that touch one thing in their order, and jobs that touch different things at the same time. Thread-safe.

    Its threads are daemonic: reading from a network mount that hangs can't be interrupted.

    Args:
        name: of its threads.
        most: threads at a time; jobs that touch further things wait for one.
    """

    def __init__(self, name: str, most: int = 1, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name, self._most, self._monotonic = name, most, monotonic
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[tuple[float, Job]]] = {}
        """Maps what jobs touch to those that wait, and since when."""
        self._running: dict[str, float] = {}
        """Maps what a running job touches to the time when it was submitted."""
        self._num_threads = 0
        self._is_stopping = False

    def submit(self, job: Job, touches: str) -> None:
        """Run a job soon; what it raises is logged. After `stop` it is dropped.

        Args:
            touches: names what it reads or writes, for an operator too.
        """
        with self._changed:
            if self._is_stopping:
                return
            self._waiting.setdefault(touches, deque()).append((self._monotonic(), job))
            if touches not in self._running and self._num_threads < self._most:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._num_threads += 1

    def oldest(self) -> tuple[float, str] | None:
        """Return when the oldest job that isn't done was submitted, and what it touches; None without one."""
        with self._changed:
            waiting = [(jobs[0][0], touches) for touches, jobs in self._waiting.items()]
            running = [(submitted_s, touches) for touches, submitted_s in self._running.items()]
        return min(waiting + running, default=None)

    def stop(self, timeout_s: float) -> None:
        """Drop the jobs that wait, and wait for the running ones, but not for longer than this."""
        with self._changed:
            self._is_stopping = True
            self._waiting.clear()
            if not self._changed.wait_for(lambda: not self._running, timeout_s):
                log.warning("a job in the background is left unfinished", touches=sorted(self._running))

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            touches, job = taken
            try:
                job()
            except Exception as error:
                log.exception("a job in the background failed", error=str(error))
            finally:
                with self._changed:
                    del self._running[touches]
                    self._changed.notify_all()

    def _take(self) -> tuple[str, Job] | None:
        """Take the job that has waited longest of those that may run; None, and the thread ends, if there is none."""
        with self._changed:
            able = [(jobs[0][0], touches) for touches, jobs in self._waiting.items() if touches not in self._running]
            if not able:
                self._num_threads -= 1
                return None
            submitted_s, touches = min(able)
            _, job = self._waiting[touches].popleft()
            if not self._waiting[touches]:
                del self._waiting[touches]
            self._running[touches] = submitted_s
            return touches, job
