"""Passes of an EAGLE-3 drafter on vLLM's V2 runner: those of tokens that nobody verifies are left out.

Collected where V2 runs only (conftest.py).
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed")

from benchmarks.make_pairs.kinds import eagle3_json, fresh_eagle3, write_eagle3
from honed.daemon.install.vllm_args import table_for
from tests.e2e.engine import IS_CUDA, TARGET, engine, held_out
from tests.e2e.logged import set_policy
from tests.e2e.swapping import worker_of
from tests.e2e.test_engine_modes import completions, grammar
from tests.e2e.test_runner_contract import MAX_TOKENS, NUM_PROMPTS, prompts
from tests.e2e.test_v2_only import drafted_at

pytestmark = [pytest.mark.e2e, pytest.mark.runners]
MOST = 4


@pytest.fixture
def speculative(tmp_path: Path) -> dict[str, Any]:
    """vLLM's options for a drafter with random weights."""
    raw = eagle3_json(TARGET, eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    torch.manual_seed(0)
    write_eagle3(fresh_eagle3(TARGET, raw), tmp_path / "drafter", raw, torch.float32)
    return {"method": "eagle3", "model": str(tmp_path / "drafter"), "num_speculative_tokens": MOST}


def test_an_eagle3_drafter_makes_no_pass_for_tokens_that_nobody_verifies(
    speculative: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token's pass fills its cache, so it runs in every step; drafts stay the same whatever was drafted before."""
    drafter_dir = Path(speculative["model"])
    with engine(tmp_path / "run", drafter=drafter_dir, max_num_seqs=NUM_PROMPTS, speculative_config=speculative) as running:
        running.honed._recorder.is_logging_token_ids = True
        assert running.honed._hello().shortens_block
        drafter = worker_of(running).model_runner.speculator
        propose, run_model, passes = drafter.propose, drafter._run_model, list[int]()

        def proposing(*args: Any, **kwargs: Any) -> Any:
            passes.append(0)
            return propose(*args, **kwargs)

        def passing(*args: Any, **kwargs: Any) -> Any:
            passes[-1] += 1
            return run_model(*args, **kwargs)

        monkeypatch.setattr(drafter, "propose", proposing)
        monkeypatch.setattr(drafter, "_run_model", passing)
        found = {}
        for lengths in ([MOST], [1], [0], [2, 0, MOST, 1]):
            found[tuple(lengths)] = drafted_at(running, lengths)
            assert set(passes) == {max(k, 1) for k in lengths}
            passes.clear()
    always, mixed, ones = found[MOST,], found[2, 0, MOST, 1], found[1,]
    assert not found[0,]
    assert {len(draft) for draft in mixed.values()} == {1, 2, MOST}
    for others in (mixed, ones):
        both = always.keys() & others.keys()
        assert len(both) >= 6
        assert [others[at] for at in both] == [always[at][: len(others[at])] for at in both]


def test_a_grammar_holds_while_blocks_grow_and_shrink(speculative: dict[str, Any], tmp_path: Path) -> None:
    from vllm import SamplingParams

    asked = [SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **grammar())] * NUM_PROMPTS
    with engine(None, max_num_seqs=NUM_PROMPTS, speculative_config=None) as stock:
        plain = completions(stock, prompts(), asked)
    drafter_dir = Path(speculative["model"])
    with engine(tmp_path / "run", drafter=drafter_dir, max_num_seqs=NUM_PROMPTS, speculative_config=speculative) as running:
        assert completions(running, prompts(), asked, itertools.cycle((MOST, 1, 0, 2))) == plain
        assert running.honed.errors.count == 0


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="no CUDA device")
def test_they_are_left_out_of_cuda_graphs_too(
    speculative: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one graph holds all passes after the first, there is one for each length of vLLM's table."""
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 48, "ignore_eos": True}
    prompts, lengths = held_out(6, 300), [MOST, 2, 0]
    graphs: dict[str, Any] = {
        "enforce_eager": False,
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32],
        },
    }
    with engine(None, max_num_seqs=8, **graphs, speculative_config=None) as stock:
        plain = stock.generate(prompts, **asked)
    speculative |= {"num_speculative_tokens_per_batch_size": table_for(lengths, 8)}
    drafter_dir = Path(speculative["model"])
    with engine(tmp_path / "run", drafter=drafter_dir, max_num_seqs=8, **graphs, speculative_config=speculative) as running:
        set_policy(running, static_k=MOST, max_k=MOST)
        captured = running.honed._workers.graphs.block_lengths
        assert captured in ([], [2, MOST]), "[]: a graph for each pass"
        manager, replayed = worker_of(running).model_runner.speculator.decode_cudagraph_manager, list[Any]()
        run = manager.run_fullgraph
        monkeypatch.setattr(manager, "run_fullgraph", lambda desc, *args: replayed.append(desc) or run(desc, *args))
        for k in (*lengths, 1):
            replayed.clear()
            set_policy(running, static_k=k, max_k=MOST)
            assert running.generate(prompts, **asked) == plain
            found = {desc.num_speculative_tokens for desc in replayed} if captured else set[int]()
            print(f"k={k}: {len(replayed)} graphs of the drafter, of lengths {found or 1}")
            assert bool(replayed) == (k > 1)
            assert found <= {length for length in captured if length <= k}
