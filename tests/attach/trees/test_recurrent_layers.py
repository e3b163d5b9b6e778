"""What wraps recurrent layers does beside a running engine's tests: refusals, and what happens when it fails."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.trees import recurrent_layers
from honed.attach.trees.grow import grow
from honed.attach.trees.recurrent_layers import RecurrentLayers
from honed.attach.trees.tree_step import tree_step


class Base:
    """As much of a layer of vLLM's as is looked at; its tensors are on no device, so that it counts as a GPU's."""

    activation, head_k_dim, head_v_dim = "silu", 128, 128
    is_failing = False

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.kv_cache = [torch.empty(1, device="meta"), torch.empty(1, dtype=dtype, device="meta")]

    def _forward_core(self, mixed_qkv: Any, b: Any, a: Any, core_attn_out: Any) -> str:
        if self.is_failing:
            raise RuntimeError("of vLLM's own")
        return "done"

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
        return True


class QwenGatedDeltaNetAttention(Base): ...


class MambaMixer2(Base): ...


NONE = SimpleNamespace(mamba_cache_mode="none", mamba_block_size=None)


class Guard:
    """A step's."""

    def __init__(self, step: Any) -> None:
        self.step, self.errors = step, list[str]()

    def __call__(self, where: str, run: Callable[[Any], Any]) -> Any:
        if self.step is None:
            return None
        try:
            return run(self.step)
        except Exception:
            self.errors.append(where)
        return None


def test_layers_whose_state_isnt_known_are_refused() -> None:
    for layer, reason in (
        (MambaMixer2(), "doesn't know the state of MambaMixer2"),
        (QwenGatedDeltaNetAttention(torch.float8_e4m3fn), "quantised"),
    ):
        with pytest.raises(TypeError, match=reason):
            RecurrentLayers({"layer": layer}, Guard(None), 15, NONE)
    odd = QwenGatedDeltaNetAttention()
    odd.activation = "gelu"
    with pytest.raises(TypeError, match="gelu"):
        RecurrentLayers({"layer": odd}, Guard(None), 15, NONE)
    with pytest.raises(TypeError, match="200 rows"):
        RecurrentLayers({"layer": QwenGatedDeltaNetAttention()}, Guard(None), 199, NONE)
    with pytest.raises(TypeError, match="mamba_cache_mode all"):
        RecurrentLayers({"layer": QwenGatedDeltaNetAttention()}, Guard(None), 15, SimpleNamespace(mamba_cache_mode="all"))


def test_steps_without_trees_are_vllms_own() -> None:
    layer, guard = QwenGatedDeltaNetAttention(), Guard(None)
    RecurrentLayers({"layer": layer}, guard, 15, NONE).wrap()
    assert layer._can_use_fused_gdn_mtp_decode(None)
    assert layer._forward_core(mixed_qkv=None, b=None, a=None, core_attn_out=None) == "done"
    assert not guard.errors


def test_a_step_with_trees_doesnt_norm_in_vllms_kernel_and_fails_alone() -> None:
    layer, guard = QwenGatedDeltaNetAttention(), Guard(SimpleNamespace(rows=[0]))
    layers = RecurrentLayers({"layer": layer}, guard, 15, NONE)
    layers.wrap()
    assert not layer._can_use_fused_gdn_mtp_decode(None)
    assert layer._forward_core(None, None, None, None) == "done"  # inputs that can't be read
    assert guard.errors == ["recurrent layers"]
    layer.is_failing = True
    with pytest.raises(RuntimeError, match="of vLLM's own"):
        layer._forward_core(None, None, None, None)
    nothing = torch.zeros(0, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="0 of 1 recurrent layers"):
        layers.commit(guard.step, nothing, nothing)


@pytest.mark.fault("another kernel for each number of nodes")
def test_a_tree_of_fewer_nodes_than_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its outputs are those of an engine with as many slots as nodes."""
    heads, key_heads, width, taps, depth, nodes, generator = 4, 2, 16, 4, 5, 12, torch.Generator().manual_seed(4)
    channels = (2 * key_heads + heads) * width

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    layer: Any = QwenGatedDeltaNetAttention()
    layer.kv_cache = [randn(9, channels, taps - 1), randn(9, heads, width, width)]
    layer.conv1d = SimpleNamespace(weight=randn(channels, 1, taps), bias=None)
    layer.A_log, layer.dt_bias = randn(heads), randn(heads)
    sizes = [key_heads * width, key_heads * width, heads * width]
    layer.rearrange_mixed_qkv = lambda mixed: [part.view(1, len(mixed), -1, width) for part in mixed.split(sizes, -1)]
    monkeypatch.setattr(recurrent_layers, "_views", lambda of: tuple(of.kv_cache))
    monkeypatch.setattr(RecurrentLayers, "_slots_of", lambda *_: torch.tensor([[3, 4], [7, 8]]))
    logits, rows = randn(2, depth, 40), 2 * (nodes + 1)
    mixed, b, a = randn(rows, channels), randn(rows, heads), randn(rows, heads)
    found = []
    for slots in (31, nodes):
        trees = grow(logits, None, nodes, slots)
        assert trees.num_nodes.tolist() == [nodes, nodes]
        guard = Guard(tree_step(["a", "b"], [0, 1], [0, nodes + 1], torch.tensor([40, 7]), [nodes, nodes], trees))
        out = torch.zeros(rows, heads, width)
        RecurrentLayers({"layer": layer}, guard, slots, NONE)._run("layer", mixed, b, a, out, lambda: None)
        assert not guard.errors
        found.append(out)
    torch.testing.assert_close(*found)
    assert found[0].flatten(1).any(1).sum() == rows - 2  # those of all nodes
