"""Which draft lengths keep a step in a captured graph, and vLLM's own table, which stands aside while honed decides."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from honed.attach.engine.graphs import Captured, LengthTable, captured, padded_to_with_trees


class Shape(NamedTuple):
    """What is read of vLLM's `BatchExecutionDescriptor`."""

    num_tokens: int
    uniform_token_count: int | None = None
    num_active_loras: int = 0
    num_ubatches: int = 1


def runner(*shapes: Shape) -> Any:
    return SimpleNamespace(cudagraph_manager=SimpleNamespace(graphs=dict.fromkeys(shapes)))


def test_lengths_are_those_that_all_requests_of_a_graph_have() -> None:
    found = captured(
        runner(
            Shape(8, 8), Shape(16, 8), Shape(4, 4), Shape(1, 1), Shape(32, 4, num_active_loras=2), Shape(64, 8, num_ubatches=2)
        )
    )
    assert found == Captured([1, 4, 8, 16], [0, 3, 7], [])


def test_graphs_that_take_any_mix_leave_the_lengths_open() -> None:
    assert captured(runner(Shape(8), Shape(16), Shape(4, 4))) == Captured([4, 8, 16], [], [])


@pytest.mark.parametrize(
    "without",
    [SimpleNamespace(), SimpleNamespace(cudagraph_manager=None), SimpleNamespace(cudagraph_manager=SimpleNamespace())],
)
def test_without_graphs_there_are_none(without: Any) -> None:
    assert captured(without) == Captured([], [], [])


@pytest.mark.parametrize(
    ("mode", "found"),
    [("FULL_AND_PIECEWISE", [1, 8, 16]), ("PIECEWISE", [1, 8, 16]), ("FULL_DECODE_ONLY", []), ("FULL", []), ("NONE", [])],
)
def test_steps_with_trees_are_padded_to_piecewise_graphs(mode: str, found: list[int]) -> None:
    from vllm.config.compilation import CompilationConfig, CUDAGraphMode

    config = CompilationConfig(cudagraph_capture_sizes=[16, 1, 8])
    manager = SimpleNamespace(cudagraph_mode=CUDAGraphMode[mode], compilation_config=config)
    assert padded_to_with_trees(SimpleNamespace(cudagraph_manager=manager)) == found
    assert padded_to_with_trees(SimpleNamespace(cudagraph_manager=None)) == []
    assert padded_to_with_trees(SimpleNamespace()) == []


@pytest.mark.parametrize(
    ("holds_all_passes", "lengths", "found"),
    [(True, (None,), [7]), (True, (3, 7), [3, 7]), (False, (None,), []), (True, (), [])],
    ids=["one length", "the table's lengths", "a graph for each pass", "no graphs"],
)
def test_blocks_are_of_lengths_that_the_drafters_graphs_hold(
    holds_all_passes: bool, lengths: tuple[int | None, ...], found: list[int]
) -> None:
    """vLLM's own shapes: a length is named where its table has several."""
    pytest.importorskip("vllm")
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
    from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorBatchDescriptor

    shape = BatchExecutionDescriptor(CUDAGraphMode.FULL, num_tokens=8, num_reqs=8, uniform_token_count=1)
    shapes = [shape if k is None else SpeculatorBatchDescriptor(**vars(shape), num_speculative_tokens=k) for k in lengths]
    drafter = SimpleNamespace(
        num_speculative_steps=7,
        supports_decode_metadata_update=holds_all_passes,
        decode_cudagraph_manager=SimpleNamespace(graphs=dict.fromkeys(shapes)),
    )
    assert captured(SimpleNamespace(speculator=drafter)).block_lengths == found


@pytest.mark.parametrize(
    ("lengths", "wanted"),
    [([], [0, 1, 2, 3, 4, 7]), ([3, 7], [0, 1, 3, 3, 7, 7]), ([7], [0, 1, 7, 7, 7, 7]), ([3], [0, 1, 3, 3, 7, 7])],
)
def test_a_block_is_no_shorter_than_what_is_verified(lengths: list[int], wanted: list[int]) -> None:
    """The first token needs no further pass, and K tokens are what vLLM drafts by itself."""
    assert [Captured([], [], lengths).block_for(length, 7) for length in (0, 1, 2, 3, 4, 7)] == wanted


def test_vllms_table_stands_aside_and_comes_back() -> None:
    lookup = [0, 7, 3, 3, 1]
    scheduler = SimpleNamespace(dynamic_sd_lookup=lookup)
    table = LengthTable(scheduler, 7)
    table.set_aside(True)
    assert lookup == [7] * 5
    assert scheduler.dynamic_sd_lookup is lookup
    table.set_aside(True)
    table.set_aside(False)
    assert lookup == [0, 7, 3, 3, 1]


@pytest.mark.parametrize("scheduler", [SimpleNamespace(), SimpleNamespace(dynamic_sd_lookup=None)])
def test_no_table_is_fine(scheduler: Any) -> None:
    LengthTable(scheduler, 7).set_aside(True)
    assert getattr(scheduler, "dynamic_sd_lookup", None) is None
