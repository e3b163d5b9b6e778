"""Attention that tree rows can't have, refused before anything is written; and what a layer asks of the device in a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from honed.attach.trees.tree_layers import TreeLayers
from honed.attach.trees.tree_step import TreeStep, tree_step
from honed.kernels.trees import reference, tree_attention

HEADS, KV_HEADS, SIZE, PAGE, ROOM = 4, 2, 16, 8, 6
COUNTS = [3, 6]
NUM_ROWS, PADDED = 11, 16


class Attention:
    """As vLLM's, of a backend that honed knows."""

    head_size = 64

    def __init__(self, *, writes_cache: bool = False, **impl: Any) -> None:
        self.attn_backend = SimpleNamespace(get_name=lambda: "TRITON_ATTN", forward_includes_kv_cache_update=writes_cache)
        self.impl = SimpleNamespace(do_kv_cache_update=lambda *_: pytest.fail("something was written"), **impl)


@pytest.mark.fault("attention of trees by layers that attend otherwise")
@pytest.mark.parametrize(
    ("impl", "said"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "its cache is quantised"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "its cache is quantised"),
        ({"chunk_lookback": 0, "sliding_window": (8191, 0)}, "its window is of aligned chunks"),
        ({"sliding_window": (7, 0)}, "its window of 8 tokens is shorter than a tree is deep"),
        ({"alibi_slopes": [1.0]}, "it has ALiBi"),
        ({"logits_soft_cap": 30.0}, "its scores are capped"),
        ({"kv_sharing_target_layer_name": "first"}, "its attention is of another kind"),
        ({"writes_cache": True}, "its attention writes the cache itself"),
    ],
)
def test_a_layer_that_tree_rows_cannot_have_is_refused(impl: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        TreeLayers({"layer": Attention(**impl)}, {"layer": 0}, lambda _: None, 31, None)


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Attending(Attention):
    """A layer that keeps K and V of a token beside each other; its own attention marks all rows of the output."""

    num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, SIZE

    def __init__(self, sinks: torch.Tensor | None = None, window: int = 0) -> None:
        super().__init__(scale=0.3, sinks=sinks, sliding_window=(window - 1, 0) if window else None)
        generator = torch.Generator().manual_seed(0)
        self.kv_cache = torch.randn(9, KV_HEADS, PAGE, 2 * SIZE, generator=generator)
        self.num_passes = 0
        self.impl.do_kv_cache_update, self.impl.forward = self.update, self.forward

    def update(self, _: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        rows = cache.transpose(1, 2)
        rows[slots // PAGE, slots % PAGE] = torch.cat([keys, values], -1)

    def forward(self, *given: Any, **_: Any) -> None:
        self.num_passes += 1
        given[6].fill_(7.0)


Attending.__name__ = "Attention"


def step_of(first_rows: list[int]) -> TreeStep:
    """Two requests with trees of `COUNTS` nodes, whose prefixes are of 10 and 5 tokens."""
    log_probs = -torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1)).cumsum(-1)
    ids = torch.arange(24, dtype=torch.int32).view(2, 4, 3)
    trees = reference.tree_build(log_probs, ids, torch.tensor(COUNTS), ROOM)
    return tree_step(["a", "b"], [0, 1], first_rows, torch.tensor([10, 5]), COUNTS, trees)


def inputs() -> list[torch.Tensor]:
    """Query, key, value, as parts of one projection of padded rows."""
    rows = torch.randn(PADDED, HEADS + 2 * KV_HEADS, SIZE, generator=torch.Generator().manual_seed(2))
    return [part.as_subclass(OnDevice) for part in rows.split([HEADS, KV_HEADS, KV_HEADS], 1)]


def attend(layer: Any, layers: TreeLayers, step: TreeStep, given: list[torch.Tensor], num_tokens: int = NUM_ROWS) -> Any:
    layers.begin()
    layers.step = step
    table = torch.tensor([[3, 8, 1], [7, 2, 0]], dtype=torch.int32)
    metadata = SimpleNamespace(num_actual_tokens=num_tokens, block_table=table)
    output = torch.full((PADDED, HEADS, SIZE), 5.0)
    layer.impl.forward(layer, *given, layer.kv_cache, metadata, output)
    assert not layers.has_failed
    return output


def by_twin(*given: Any) -> None:
    *inputs, _, out, lse = given
    for place, made in zip((out, lse), reference.tree_attention(*inputs), strict=True):
        place.copy_(made)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_beside_each_other_attend_in_place_as_gathered_ones_do(
    has_sinks: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "launch", by_twin)
    layer = Attending(torch.arange(float(HEADS)) if has_sinks else None, window)
    layers = TreeLayers({"layer": layer}, {"layer": 0}, lambda _: None, ROOM, None)
    layers.wrap()
    step, given = step_of([0, 4]), inputs()
    assert step.rows_at == slice(0, NUM_ROWS)
    in_place = attend(layer, layers, step, given)
    assert layer.num_passes == 0
    assert torch.equal(in_place, attend(layer, layers, dataclasses.replace(step, rows_at=step.rows), given))
    assert (in_place[NUM_ROWS:] == 5.0).all()
    assert (in_place[:NUM_ROWS] != 5.0).all()

    # Elsewhere in the step, with rows of others around them: those keep what vLLM made.
    moved = [torch.cat([part[NUM_ROWS:], part[:NUM_ROWS]]).as_subclass(OnDevice) for part in given]
    later = step_of([5, 9])
    assert later.rows_at == slice(5, PADDED)
    beside = attend(layer, layers, later, moved, PADDED)
    assert layer.num_passes == 1
    assert torch.equal(beside[5:], in_place[:NUM_ROWS])
    assert (beside[:5] == 7.0).all()


def test_rows_with_others_between_them_or_in_another_order_are_gathered() -> None:
    for first_rows in ([0, 5], [7, 0]):
        step = step_of(first_rows)
        assert step.rows_at is step.rows


class Counting(TorchDispatchMode):
    """Counts what is asked of the device: all operations that aren't views."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.asked[func.name()] += 1
        return func(*args, **kwargs or {})


def test_a_layer_of_a_step_of_trees_alone_asks_for_its_attention_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = list[Any]()
    monkeypatch.setattr(tree_attention, "launch", lambda *given, **_: launches.append(given))
    held = {name: Attending() for name in ("first", "second", "third")}
    layers = TreeLayers(held, dict.fromkeys(held, 0), lambda _: None, ROOM, None)
    layers.wrap()
    step, given = step_of([0, 4]), inputs()
    attend(held["first"], layers, step, given)  # what a step does once is done
    table = torch.zeros((2, 3), dtype=torch.int32)
    output = torch.empty(PADDED, HEADS, SIZE)
    metadata = SimpleNamespace(num_actual_tokens=NUM_ROWS, block_table=table)
    layers.step = step
    held["second"].impl.forward(held["second"], *given, held["second"].kv_cache, metadata, output)
    with Counting() as counted:
        held["third"].impl.forward(held["third"], *given, held["third"].kv_cache, metadata, output)
    assert len(launches) == 3
    assert counted.asked == {}
