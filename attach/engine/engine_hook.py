"""Access to vLLM's EngineCore, to run workers' methods and to run code while the engine is idle.

vLLM has no supported interface for either. This relies on four private parts. `EngineCore._initialize_kv_caches` is the first
method that runs after plugins are loaded: it lets us note the instance. `EngineCore._idle_state_callbacks` are called on the
engine's thread when there is no work. A WAKEUP in `EngineCoreProc.input_queue` ends the idle wait. An `Executor` is made, once
in each engine, before its workers look for free memory. An upstream `EngineCore.call_soon(callback)` would replace this module,
with events for the start, for sleep and for new weights.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from honed.attach.engine.busy_flag import tell_start
from honed.attach.engine.environment import from_environment
from honed.attach.engine.guard import NoAnswer

logger = logging.getLogger("honed.attach")

RANK_ERROR = "honed_error"
"""Key of a rank's answer when one of honed's methods failed there.

A method that raised would leave the other ranks' answers unread in vLLM's executor (`MultiprocExecutor.collective_rpc`). It
stops reading at the first failure, and would take them for the answers to the next call.
"""

_BEGINS = ("start_weight_update", "start_draft_weight_update")
_ENDS = ("finish_weight_update", "reload_weights")
_WRITES = ("update_weights", *_ENDS)
"""Methods of vLLM's workers that are called through `EngineCore.collective_rpc`."""

_current: weakref.ref[Any] | None = None


class RankError(RuntimeError):
    """A method failed on a rank; the text names the error there."""


def install() -> None:
    """Make EngineCore note its instance, and its executor tell of the start. May be called several times; raises nothing."""
    try:
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor.abstract import Executor
    except Exception:
        logger.warning("honed: vLLM's EngineCore can't be imported; swaps are off", exc_info=True)
        return
    original = getattr(EngineCore, "_initialize_kv_caches", None)
    if original is None or getattr(original, "is_honed", False):
        return

    @functools.wraps(original)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _current
        _current = weakref.ref(self)
        return original(self, *args, **kwargs)

    noting.is_honed = True  # type: ignore[attr-defined]
    EngineCore._initialize_kv_caches = noting
    make_executor = Executor.__init__

    @functools.wraps(make_executor)
    def telling(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(Exception):  # the scheduler's process says what is wrong
            settings = from_environment(os.environ, vllm_config.parallel_config.data_parallel_index)
            if settings is not None:
                tell_start(settings.busy_path)
        make_executor(self, vllm_config, *args, **kwargs)

    Executor.__init__ = telling


def current() -> EngineHook | None:
    """The engine of this process; None when none was noted."""
    core = _current() if _current is not None else None
    return EngineHook(core) if core is not None else None


class EngineHook:
    """An EngineCore, held weakly: the attachment must not keep a dead engine's memory."""

    def __init__(self, core: Any) -> None:
        self._core = weakref.ref(core)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Engine thread: run a method of the worker extension on every rank, between two steps; one result a rank.

        Raises:
            RuntimeError: the engine is gone.
            RankError: the method failed on a rank; the others have run it.
            NoAnswer: a worker hangs, and the engine ends.
        """
        from vllm.envs import VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS as limit_s

        core = self._core()
        if core is None:
            raise RuntimeError("the engine is gone")
        try:
            results: list[Any] = core.model_executor.collective_rpc(method, timeout=limit_s, args=args)
        except TimeoutError as error:
            _end(core)
            raise NoAnswer(f"honed: the workers didn't answer {method} within {limit_s} s: the engine ends") from error
        for result in results:
            if isinstance(result, dict) and RANK_ERROR in result:
                raise RankError(result[RANK_ERROR])
        return results

    def skip_draft_fetch(self, is_needed: Callable[[], bool]) -> None:
        """Once: don't fetch a step's drafts from the workers when `is_needed`, on the engine's thread, returns False.

        A synchronous engine fetches them after every step. With workers in other processes that is another round trip.
        """
        executor = getattr(self._core(), "model_executor", None)
        take = getattr(executor, "take_draft_token_ids", None)
        if take is not None:
            executor.take_draft_token_ids = lambda: take() if is_needed() else None  # type: ignore[union-attr]

    def watch_sleep(self, on_sleep: Callable[[], None], on_wake: Callable[[bool], None]) -> None:
        """Once: watch vLLM's sleep mode, on the engine's thread: before device memory goes, and when all of it is back.

        A release of the K/V cache alone gives memory away, too. If vLLM stays awake, it is back at once.

        Args:
            on_wake: gets whether the drafter's weights were discarded (level 2), rather than offloaded or saved.
        """
        executor = getattr(self._core(), "model_executor", None)
        if executor is None:
            return
        sleep, wake_up, discard, are_lost = executor.sleep, executor.wake_up, executor.discard, False
        saved = getattr(getattr(executor, "model_config", None), "sleep_preserve_parameter_names", None) or ()
        is_saved = not {"draft.*", "*"}.isdisjoint(saved)

        @contextlib.contextmanager
        def giving_away() -> Iterator[None]:
            on_sleep()
            try:
                yield
            finally:
                if not executor.is_sleeping:  # it failed
                    on_wake(False)

        def sleeping(level: int = 1, *args: Any, **kwargs: Any) -> None:
            nonlocal are_lost
            is_awake = "weights" not in executor.sleeping_tags  # else vLLM ignores the call
            with giving_away():
                sleep(level, *args, **kwargs)
            are_lost |= level > 1 and not is_saved and is_awake

        def waking(*args: Any, **kwargs: Any) -> None:
            nonlocal are_lost
            wake_up(*args, **kwargs)
            if not executor.is_sleeping:  # else only part of the memory is back
                were_lost, are_lost = are_lost, False
                on_wake(were_lost)

        def discarding(*args: Any, **kwargs: Any) -> None:
            with giving_away():
                discard(*args, **kwargs)

        executor.sleep, executor.wake_up, executor.discard = sleeping, waking, discarding

    def watch_weights(
        self, on_begin: Callable[[], None], on_change: Callable[[bool], None], is_draft_in_place: bool = False
    ) -> None:
        """Once: watch vLLM's own endpoints, on the engine's thread, for new weights of a model.

        Args:
            on_begin: called before anything arrives.
            on_change: gets True for the drafter, False for the target. The target's weights may be half new.
            is_draft_in_place: whether the drafter's may be, too, as vLLM loads them into the live parameters. Else they are all
                in place, or none (`arriving_weights`).
        """
        core = self._core()
        call, is_draft = getattr(core, "collective_rpc", None), False
        if core is None or call is None:
            return

        @functools.wraps(call)
        def watching(method: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_draft
            if method in _BEGINS:
                is_draft = method == "start_draft_weight_update"
                on_begin()
            is_of_draft = is_draft and method != "reload_weights"
            try:
                results = call(method, *args, **kwargs)
            except BaseException:
                if is_of_draft and is_draft_in_place and method in (*_BEGINS, *_WRITES):
                    on_change(True)
                elif not is_of_draft and method in _WRITES:
                    on_change(False)
                raise
            finally:
                is_draft &= method != "finish_weight_update"
            if method in _ENDS:
                on_change(is_of_draft)
            return results

        core.collective_rpc = watching

    def call_when_idle(self, callback: Callable[[], None]) -> bool:
        """Any thread: run `callback` on the engine's thread, now if it is idle, else once it is.

        Returns:
            whether it will run: an engine in the caller's own process, or one still starting, has no idle loop.
        """
        core = self._core()
        queue = getattr(core, "input_queue", None)
        callbacks = getattr(core, "_idle_state_callbacks", None)
        if queue is None or callbacks is None:
            return False
        from vllm.v1.engine import EngineCoreRequestType

        callbacks.append(lambda _core: callback())
        queue.put_nowait((EngineCoreRequestType.WAKEUP, None))
        return True


def _end(core: Any) -> None:
    """Have the engine end before its next step, as when a worker process dies.

    A call within one of vLLM's own, such as a sleep, needs it: vLLM answers these with what was raised, and goes on.
    """
    queue = getattr(core, "input_queue", None)
    if queue is not None:
        from vllm.v1.engine import EngineCoreRequestType

        queue.put_nowait((EngineCoreRequestType.EXECUTOR_FAILED, b""))
