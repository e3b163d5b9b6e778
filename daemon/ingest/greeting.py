"""Answers an engine's hello with the committed number and the engine's registered version.

An engine sends nothing before its welcome, which needs its version, if its drafter is one that honed trains. Reading an unknown
checkpoint takes long, so it happens in the background: one after another of the same folder, those of several folders at the
same time. What couldn't be read is looked at again with growing pauses: the disk may have room by then, or the mount answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import structlog

from honed.adapt.models.drafter_tensor_names import METHODS
from honed.adapt.protocol import wire
from honed.daemon.ingest.engines import Boot, Engine
from honed.daemon.store import batch_tables
from honed.daemon.store.store import Store
from honed.recalib.registry.access import User
from honed.recalib.registry.registry import RegistryError

log = structlog.get_logger("honed.greeting")

READABLE = "daemon and trainer read it at vLLM's path, and their units can't see /home and /root"


class Greeting:
    """Welcomes engines. Guarded by the service's lock, which the background takes itself.

    Args:
        user_of: returns the user of the process at a connection's other end.
        in_background: runs a job; those that touch the same thing, its second argument, one after another.
        identify: returns the registry's version of the checkpoint of a user's hello; may read all of it, and its target.
        is_kept: whether a version is in the registry.
        learn_target: reads what tells a target from others; returns whether it is known then.
        on_hello: called before the version is known.
        on_welcome: called after the welcome.
        keep: stores a boot's own version.
    """

    def __init__(
        self,
        store: Store,
        send: Callable[[bytes, wire.Welcome], None],
        *,
        daemon_id: str,
        log_token_ids: bool,
        clock: Callable[[], float],
        lock: threading.RLock,
        in_background: Callable[[Callable[[], None], str], object],
        user_of: Callable[[bytes], User | None],
        identify: Callable[[wire.EngineHello, User | None], str],
        is_kept: Callable[[str], bool],
        learn_target: Callable[[str], bool],
        on_hello: Callable[[Engine, wire.EngineHello], None],
        on_welcome: Callable[[Engine], None],
        keep: Callable[[Boot], None],
    ) -> None:
        self._store, self._send = store, send
        self._daemon_id, self._log_token_ids, self._clock = daemon_id, log_token_ids, clock
        self._lock, self._in_background = lock, in_background
        self._user_of, self._identify, self._is_kept, self._learn_target = user_of, identify, is_kept, learn_target
        self._on_hello, self._on_welcome, self._keep = on_hello, on_welcome, keep
        self._awaited: set[tuple[str, str, str]] = set()
        """Engines whose version will be looked for, and their paths. They say hello every second meanwhile."""

    def greet(self, engine: Engine) -> None:
        """Store the engine's hello and welcome it, at once if it needs no version."""
        hello = engine.hello
        assert hello is not None
        engine.boot.user = self._user_of(engine.peer)  # now: it is unknown once the connection has ended
        text = msgspec.json.encode(hello).decode()
        now_ns = int(self._clock() * 1e9)
        state = ("hello", hello.engine_id)
        self._store.keep(state, lambda db: batch_tables.save_hello(db, hello.engine_id, hello.boot_id, text, now_ns))
        log.info("engine says hello", engine_id=hello.engine_id, boot_id=hello.boot_id, model=hello.model_name)
        engine.is_welcome = False
        self._on_hello(engine, hello)
        if self._needs_no_version(engine):
            self._welcome(engine)
            self._learn_soon(engine, hello)
        else:
            self._look_for_version(engine, hello)

    def tick(self, engines: list[Engine], now_s: float) -> None:
        """Look again for what couldn't be read of connected engines, where that is due."""
        for engine in engines:
            if (hello := engine.hello) is None or not engine.reading.is_due(now_s):
                continue
            if self._needs_no_version(engine) and not engine.drafter_note:
                self._learn_soon(engine, hello)
            else:
                self._look_for_version(engine, hello)

    def _needs_no_version(self, engine: Engine) -> bool:
        """Whether the registry has the version that an engine names, or its weights can be nobody's version."""
        live, hello = engine.live_version, engine.hello
        if live in (wire.LOST_DRAFTER, wire.FOREIGN_DRAFTER) or (live != "" and self._is_kept(live)):
            return True
        return hello is None or not hello.drafter_path or hello.method not in METHODS

    def _learn_soon(self, engine: Engine, hello: wire.EngineHello) -> None:
        self._in_background(lambda: self._learn(engine, hello), hello.target_path)

    def _learn(self, engine: Engine, hello: wire.EngineHello) -> None:
        if not self._learn_target(hello.target_path):
            with self._lock:
                engine.reading.is_wanted = True

    def _look_for_version(self, engine: Engine, hello: wire.EngineHello) -> None:
        awaited = (engine.engine_id, *_paths(hello))
        if awaited not in self._awaited:
            self._awaited.add(awaited)
            touches = hello.drafter_path or hello.target_path
            self._in_background(lambda: self._identify_and_welcome(engine, awaited), touches)

    def _identify_and_welcome(self, engine: Engine, awaited: tuple[str, str, str]) -> None:
        version = note = ""
        is_read = False
        with self._lock:
            self._awaited.discard(awaited)  # a hello from now on may come from files that changed
            hello, user = engine.hello, engine.boot.user
        assert hello is not None
        if (engine.engine_id, *_paths(hello)) != awaited:
            return  # another job looks for what it has named since
        try:
            version = self._identify(hello, user)
            is_read = True
        except RegistryError as error:
            cure = f"; {READABLE}" if isinstance(error.__cause__, OSError) else ""
            note = f"its drafter can't be retrained: {error}{cure}"
            if note != engine.drafter_note:
                log.error("the engine's drafter can't be registered", path=hello.drafter_path, error=str(error))
        except Exception as error:
            log.exception("the engine's drafter can't be registered", error=str(error))
        with self._lock:
            assert engine.hello is not None
            if _paths(engine.hello) != _paths(hello):
                return
            if version and not self._is_kept(version):  # removed since it was found
                self._look_for_version(engine, engine.hello)
                return
            engine.drafter_note, engine.reading.is_wanted = note, not is_read
            if version and version != engine.boot.own_version:
                engine.boot.own_version = version
                self._keep(engine.boot)
            is_news = version != "" and not self._needs_no_version(engine)
            if is_news:
                engine.live_version = version
            if is_news or not engine.is_welcome:
                self._welcome(engine)
            self._learn_soon(engine, hello)

    def _welcome(self, engine: Engine) -> None:
        boot, engine.is_welcome = engine.boot, True
        boot.sequence.welcome(engine.peer)
        welcome = wire.Welcome(
            daemon_id=self._daemon_id,
            boot_id=boot.boot_id,
            committed_seq=boot.committed_seq,
            drafter_version=engine.live_version,
            log_token_ids=self._log_token_ids,
        )
        self._send(engine.peer, welcome)
        engine.policy_sent_s = float("-inf")
        self._on_welcome(engine)


def _paths(hello: wire.EngineHello) -> tuple[str, str]:
    return hello.drafter_path, hello.target_path
