"""What honed hears of an engine's start, and of new weights that come through vLLM's own endpoints."""

from __future__ import annotations

import inspect
import queue
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.engine import engine_hook
from honed.attach.engine.engine_hook import RANK_ERROR, EngineHook, RankError
from honed.attach.engine.guard import Errors, guarded
from honed.attach.worker import HonedWorkerExtension
from honed.recalib.config.engine_gpus import EngineGpus, engine_gpus

START, UPDATE, FINISH = "start_weight_update", "update_weights", "finish_weight_update"
TARGET, DRAFTER = False, True


class Core:
    """The part of vLLM's EngineCore that calls of the workers come through."""

    def __init__(self) -> None:
        self.failing = ""
        self.model_executor: Any = None
        self.input_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        if method == self.failing:
            raise RuntimeError("half way")
        return [(method, timeout, args, kwargs)]


@pytest.mark.parametrize(
    ("methods", "heard"),
    [
        ([START, UPDATE, UPDATE, FINISH], [TARGET]),
        (["start_draft_weight_update", UPDATE, FINISH], [DRAFTER]),
        (["start_draft_weight_update", UPDATE, FINISH, START, UPDATE, FINISH], [DRAFTER, TARGET]),
        (["start_draft_weight_update", "reload_weights", FINISH], [TARGET, DRAFTER]),
        (["reload_weights"], [TARGET]),
        ([START, UPDATE], []),
        (["save_sharded_state", print, "honed_apply"], []),
    ],
)
def test_an_update_is_heard_of_when_it_is_over(methods: list[Any], heard: list[bool]) -> None:
    core, found = Core(), list[bool]()
    EngineHook(core).watch_weights(lambda: None, found.append)
    for method in methods:
        core.collective_rpc(method)
    assert found == heard


@pytest.mark.parametrize(("start", "heard"), [(START, [TARGET]), ("start_draft_weight_update", [])])
@pytest.mark.parametrize("failing", [UPDATE, FINISH])
def test_a_target_may_have_got_half_of_its_weights_a_drafter_gets_all_or_none(
    start: str, heard: list[bool], failing: str
) -> None:
    core, found = Core(), list[bool]()
    EngineHook(core).watch_weights(lambda: None, found.append)
    core.failing = failing
    core.collective_rpc(start)
    if failing == FINISH:
        core.collective_rpc(UPDATE)
    with pytest.raises(RuntimeError, match="half way"):
        core.collective_rpc(failing)
    assert found == heard


@pytest.mark.parametrize("failing", ["start_draft_weight_update", UPDATE, FINISH])
def test_a_drafter_that_is_loaded_in_place_may_have_got_half_of_its_weights(failing: str) -> None:
    """EAGLE-3 and MTP heads: honed took the version of before for what they run."""
    core, found = Core(), list[bool]()
    EngineHook(core).watch_weights(lambda: None, found.append, True)
    core.failing = failing
    for method in ("start_draft_weight_update", UPDATE, FINISH):
        if method == failing:
            with pytest.raises(RuntimeError, match="half way"):
                core.collective_rpc(method)
            break
        core.collective_rpc(method)
    assert found == [DRAFTER]
    core.failing = ""
    core.collective_rpc("save_sharded_state")
    assert found == [DRAFTER]


def test_a_drafters_update_is_over_when_its_end_fails() -> None:
    core, found = Core(), list[bool]()
    EngineHook(core).watch_weights(lambda: None, found.append)
    core.collective_rpc("start_draft_weight_update")
    core.failing = FINISH
    with pytest.raises(RuntimeError, match="half way"):
        core.collective_rpc(FINISH)
    core.failing = ""
    core.collective_rpc(UPDATE)
    core.collective_rpc(FINISH)
    assert found == [TARGET]


@pytest.mark.parametrize(("saved", "are_lost"), [((), True), (("draft.*",), False), (("model.norm.weight",), True)])
def test_device_memory_that_vllm_gives_away_is_watched(saved: tuple[str, ...], are_lost: bool) -> None:
    """In a sleep, and where only the K/V cache is released."""
    core, heard, refuses = Core(), list[Any](), False

    class Executor:
        model_config = SimpleNamespace(sleep_preserve_parameter_names=saved)
        is_sleeping, sleeping_tags = False, frozenset[str]()

        def sleep(self, level: int = 1) -> None:
            heard.append(f"level {level}")
            if refuses:
                raise ValueError("not now")
            self.is_sleeping, self.sleeping_tags = True, frozenset(("weights", "kv_cache"))

        def discard(self, tags: tuple[str, ...]) -> None:
            heard.append(tags)
            self.is_sleeping = True

        def wake_up(self, tags: list[str] | None = None) -> None:
            self.is_sleeping, self.sleeping_tags = False, frozenset()

    core.model_executor = Executor()
    EngineHook(core).watch_sleep(lambda: heard.append("asleep"), lambda lost: heard.append(lost))
    core.model_executor.sleep(2)
    core.model_executor.wake_up()
    core.model_executor.discard(("kv_cache",))
    core.model_executor.wake_up(["kv_cache"])
    assert heard == ["asleep", "level 2", are_lost, "asleep", ("kv_cache",), False]
    heard.clear()
    core.model_executor.sleep(1)
    core.model_executor.sleep(2)  # vLLM ignores it: it is asleep already
    core.model_executor.wake_up()
    assert heard[-1] is False
    heard.clear()
    refuses = True
    with pytest.raises(ValueError, match="not now"):
        core.model_executor.sleep(2)
    assert heard == ["asleep", "level 2", False], "it is awake"
    refuses = False
    core.model_executor.sleep(1)
    core.model_executor.wake_up()
    assert heard[-1] is False, "nothing was lost in the sleep that failed"


def test_what_failed_on_a_rank_is_raised_once_all_have_answered() -> None:
    core, answers = Core(), [{"rows": 1}, {RANK_ERROR: "SwapError: not staged"}, ""]
    core.model_executor = SimpleNamespace(collective_rpc=lambda method, timeout, args: answers)
    with pytest.raises(RankError, match=r"^SwapError: not staged$"):
        EngineHook(core).rpc("honed_apply", "v2", False)
    del answers[1]
    assert EngineHook(core).rpc("honed_apply", "v2", False) == [{"rows": 1}, ""]


def test_the_workers_have_as_long_for_a_call_as_vllm_gives_them_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "7")
    core = Core()
    core.model_executor = SimpleNamespace(collective_rpc=lambda method, timeout, args: [timeout])
    assert EngineHook(core).rpc("honed_staged", "v2") == [7]


@pytest.mark.fault("a hung worker that hung the engine for good")
def test_a_worker_that_hangs_ends_the_engine() -> None:
    """Also where vLLM takes what is raised for the answer to a call of its own, such as a sleep, and goes on."""
    core_of_vllm = pytest.importorskip("vllm.v1.engine.core")

    def hung(method: str, timeout: float, args: tuple[Any, ...]) -> None:
        raise TimeoutError(f"RPC call to {method} timed out.")

    class Attached:
        errors = Errors()

        @guarded
        def call(self) -> None:
            EngineHook(core).rpc("honed_staged", "v2")

    core = Core()
    core.model_executor = SimpleNamespace(collective_rpc=hung)
    with pytest.raises(TimeoutError, match="didn't answer honed_staged within"):
        Attached().call()
    assert Attached.errors.count == 0
    with pytest.raises(RuntimeError, match="Executor failed"):
        core_of_vllm.EngineCoreProc._handle_client_request(core, *core.input_queue.get_nowait())


def test_no_method_of_a_worker_raises() -> None:
    """VLLM's executor would leave the other ranks' answers unread, and take them for the next call's."""
    bare: Any = HonedWorkerExtension()
    arguments = {"honed_attach": ({},), "honed_stage": ([],), "honed_staged": ("v",), "honed_apply": ("v", False)}
    answers = {name: getattr(bare, name)(*given) for name, given in arguments.items()}
    answers |= {"honed_begin_checksum": bare.honed_begin_checksum(), "honed_checksum": bare.honed_checksum(0)}
    answers |= {"honed_begin": bare.honed_begin()}
    assert all(set(answer) == {RANK_ERROR} for answer in answers.values()), answers
    methods = [name for name in vars(HonedWorkerExtension) if name.startswith("honed_")]
    assert all(hasattr(getattr(HonedWorkerExtension, name), "__wrapped__") for name in methods), methods


def test_it_is_heard_of_before_anything_arrives() -> None:
    core, begun = Core(), list[str]()
    EngineHook(core).watch_weights(lambda: begun.append("begun"), lambda is_draft: begun.append("changed"))
    core.failing = UPDATE
    core.collective_rpc("start_draft_weight_update")
    with pytest.raises(RuntimeError, match="half way"):
        core.collective_rpc(UPDATE)
    core.failing = ""
    core.collective_rpc(START)
    core.collective_rpc(FINISH)
    assert begun == ["begun", "begun", "changed"]


def test_an_update_that_never_began_is_none() -> None:
    core, found = Core(), list[bool]()
    EngineHook(core).watch_weights(lambda: None, found.append)
    core.failing = START
    with pytest.raises(RuntimeError, match="half way"):
        core.collective_rpc(START)
    assert found == []


def test_vllm_gets_its_answer_as_before() -> None:
    core = Core()
    signature = inspect.signature(core.collective_rpc)
    EngineHook(core).watch_weights(lambda: None, lambda is_draft: None)
    assert inspect.signature(core.collective_rpc) == signature, "vLLM decodes arguments by it"
    assert core.collective_rpc(UPDATE, 1.0, (2,), {"three": 3}) == [(UPDATE, 1.0, (2,), {"three": 3})]
    assert core.collective_rpc(FINISH, timeout=1.0) == [(FINISH, 1.0, (), None)]


@pytest.mark.parametrize("is_blocked", [False, True])
def test_the_trainer_hears_of_an_engine_before_its_workers_look_for_free_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_blocked: bool
) -> None:
    """What keeps honed from telling it keeps no engine from starting."""
    abstract = pytest.importorskip("vllm.v1.executor.abstract")
    found: list[list[EngineGpus]] = []

    class Executor(abstract.Executor):  # type: ignore[misc]
        def _init_executor(self) -> None:
            found.append(engine_gpus(tmp_path / "engines"))

    Executor.__abstractmethods__ = frozenset()
    names = ("model", "cache", "lora", "load", "scheduler", "device", "speculative", "observability")
    parallel = SimpleNamespace(data_parallel_index=1)
    config = SimpleNamespace(parallel_config=parallel, **{f"{name}_config": None for name in names})
    monkeypatch.setenv("HONED_ENGINE_ID", "chat")
    engine_hook.install()
    monkeypatch.delenv("HONED_RUNTIME_DIR", raising=False)
    Executor(config)
    monkeypatch.setenv("HONED_RUNTIME_DIR", str(tmp_path))
    if is_blocked:
        (tmp_path / "engines").write_text("")
    Executor(vllm_config=config)
    assert found == [[], [] if is_blocked else [EngineGpus("chat-1", False, None)]]
