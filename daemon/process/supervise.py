"""The main thread of the daemon: looks at the other threads, tells systemd what it saw, and waits to be asked to stop.

The watchdog is fed only after a look that found nothing wrong. A daemon that hangs is therefore killed and started again by
systemd; one that lost a part it can't do without ends itself, for the same.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import structlog

from honed.daemon.process.notify import Heartbeat, Notifier
from honed.daemon.service import Service

log = structlog.get_logger("honed.serve")

EXIT_OK = 0
EXIT_FAILED = 1
CHECK_S = 5.0


def supervise(
    service: Service, is_asked: threading.Event, notifier: Notifier, listeners: Callable[[], list[str]] = list
) -> int:
    """Tell systemd how it goes, until asked to stop. A part that has died ends the process, so that it is restarted.

    Args:
        listeners: what is wrong with the HTTP listeners.

    Returns:
        the exit code.
    """
    heart = Heartbeat(notifier)
    heart.beat("serving")
    log.info("serving", runtime_dir=str(service.settings.paths.runtime_dir), pid=os.getpid())
    interval_s = min(notifier.watchdog_interval_s or CHECK_S, CHECK_S)
    code = EXIT_OK
    while not is_asked.wait(interval_s):
        dead = listeners()
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


def what_it_does(service: Service) -> str:
    """One line for `systemctl status`. Waits for no lock: whoever holds it may hang, and that must be seen, not shared."""
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
