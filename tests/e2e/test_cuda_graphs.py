"""What has to hold on a CUDA device, where vLLM's steps are CUDA graphs and its scheduler runs ahead. Collected on one only.

The graphs are vLLM's full ones for decode steps, without its compiler: for each draft length that `honed vllm-args --graphs`
was asked for, and the drafter's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.install.vllm_args import table_for
from tests.e2e.device_waits import device_waits, of_honed
from tests.e2e.engine import DRAFTER, IS_V2, K, TestEngine, engine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches
from tests.e2e.swapping import perturbed_drafter, swap, wait_until_compiled, wait_until_written, worker_of

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.skipif(not IS_V2, reason="V1 has graphs of its own, which nothing reads"),
]
SEQS = 8
LENGTHS = [K, 3, 0]
PROMPTS = held_out(6, 300)
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
GRAPHS: dict[str, Any] = {
    "enforce_eager": False,
    "compilation_config": {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 48, 64],
    },
    "speculative_config": {
        "method": "dflash",
        "model": str(DRAFTER),
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": table_for(LENGTHS, SEQS),
    },
}


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    """The answers without speculation."""
    with engine(None, max_num_seqs=SEQS, **{**GRAPHS, "speculative_config": None}) as running:
        return running.generate(PROMPTS, **ASKED)


@pytest.fixture(scope="module")
def graphed(plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    """An engine with honed in it whose steps are CUDA graphs."""
    with engine(tmp_path_factory.mktemp("run"), max_num_seqs=SEQS, **GRAPHS) as running:
        assert running.honed is not None
        running.honed._recorder.is_logging_token_ids = True
        yield running


def test_the_captured_lengths_are_known(graphed: TestEngine) -> None:
    set_policy(graphed)  # the workers have told by then
    hello = graphed.honed._hello()
    graphs = graphed.honed._workers.graphs
    print(f"graphs: {graphs}")
    assert hello.runner == "v2"
    assert hello.captured_tokens == graphs.token_counts != []
    assert hello.captured_lengths in ([], sorted(LENGTHS)), "[]: this attention backend takes any mix"


def graphs_replayed(running: TestEngine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the target's graph manager replays from here on."""
    manager, replayed = worker_of(running).model_runner.cudagraph_manager, []
    run = manager.run_fullgraph
    monkeypatch.setattr(manager, "run_fullgraph", lambda desc, *args, **kw: replayed.append(desc) or run(desc, *args, **kw))
    return replayed


@pytest.mark.parametrize("k", LENGTHS)
def test_each_length_runs_in_its_graph_and_changes_no_token(
    graphed: TestEngine, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, k: int
) -> None:
    replayed = graphs_replayed(graphed, monkeypatch)
    # One length for all, as the daemon's policy says where lengths were captured: near its end a request has fewer drafts.
    set_policy(graphed, static_k=k, equal_lengths=True, captured_lengths=sorted(LENGTHS))
    take_batches(graphed)
    before = graphed.counters()
    assert graphed.generate(PROMPTS, **ASKED) == plain
    rows, after = rounds(take_batches(graphed)), graphed.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    lengths = Counter(row["k"] for row in rows)
    assert lengths.most_common(1)[0][0] == k
    steps = len({row["step"] for row in rows})
    print(f"k={k}: {len(replayed)} of {steps} steps in a graph, lengths {dict(lengths)}")
    # Near a request's end fewer drafts fit, and have a shorter graph.
    assert {desc.uniform_token_count for desc in replayed} <= {None, *(length + 1 for length in LENGTHS if length <= k)}
    assert len(replayed) >= 0.8 * steps


def test_mixed_lengths_change_no_token(graphed: TestEngine, plain: list[list[int]]) -> None:
    set_policy(graphed)
    take_batches(graphed)
    ceilings = [0, 1, 3, 7, 2, 5]
    extra = [{"honed_max_draft_tokens": c, "honed_workload": f"k{c}"} for c in ceilings]
    assert graphed.generate(PROMPTS, **ASKED, extra=extra) == plain
    longest: dict[str, int] = {}
    for row in rounds(take_batches(graphed)):
        longest[row["workload"]] = max(longest.get(row["workload"], 0), row["k"])
    assert longest == {f"k{c}": c for c in ceilings}


def test_a_swap_under_graphs_is_seen_by_them(graphed: TestEngine, plain: list[list[int]], tmp_path: Path) -> None:
    """Copied in place, so the graphs, which hold addresses, draft with the new weights; and the old ones come back exactly."""
    set_policy(graphed)
    parameters = dict(worker_of(graphed).model_runner.speculator.model.named_parameters())
    addresses = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    graphed.honed.before_schedule()
    first = graphed.checksum()

    def drafted() -> list[Any]:
        take_batches(graphed)
        assert graphed.generate(PROMPTS, **ASKED) == plain
        return sorted((r["position"], *r["draft"]) for r in rounds(take_batches(graphed)))

    stock = drafted()
    done = swap(graphed, "other", perturbed_drafter(tmp_path / "other"))
    print(f"swap: {done.figures}")
    assert done.ok, done.error
    assert {name: parameter.data_ptr() for name, parameter in parameters.items()} == addresses
    assert graphed.checksum() != first
    assert drafted() != stock
    assert swap(graphed, "stock", DRAFTER).ok
    assert graphed.checksum() == first
    assert drafted() == stock
    assert graphed.honed.errors.count == 0


def test_honed_never_waits_for_the_device(graphed: TestEngine) -> None:
    """While it captures, too."""
    set_policy(graphed)
    wait_until_compiled(graphed)
    before = graphed.rpc("honed_capture", 1.0, "v-test")["rows"]
    graphed.generate(PROMPTS, **ASKED)  # what is set up once is set up
    with device_waits() as waited:
        graphed.generate(PROMPTS, **ASKED)
    wait_until_written(graphed)
    assert graphed.rpc("honed_capture", 0.0, "v-test")["rows"] > before, "nothing was captured: this test shows less"
    print(f"waits: {Counter(f'{f.filename}:{f.lineno}' for f in waited)}")
    assert of_honed(waited) == []
    assert graphed.honed.errors.count == 0
