"""The target's recurrent layers in steps with tree requests: Gated DeltaNet, as Qwen3-Next and Qwen3.5 have it.

vLLM takes a tree's rows for a chain. It keeps the state after each of a request's rows, and goes on from that of the last
accepted one. Here vLLM's own code runs first. What it did for the anchor is right, and stays: the state after it is what the
tree starts from. Then the nodes' outputs are overwritten with those that follow from their ancestors alone
(`kernels.recurrent`). No node's state is made. After the walk, the state after the accepted path is written where vLLM will
look for it, and the path's inputs of the convolution are written after the anchor's. Where vLLM caches prefixes, it also looks
for the state at the last block's end, in the midst of the path.

What vLLM has for the anchor is never written to. So if anything fails here, a round of the anchor alone finds its state.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from honed.attach.trees.tree_step import TreeStep
from honed.kernels.recurrent.reference import TreeUpdates
from honed.kernels.recurrent.tree_conv import tree_conv
from honed.kernels.recurrent.tree_delta_rule import commit, misfit, tree_delta_rule
from honed.kernels.trees.reference import words_of
from honed.kernels.trees.warm_up import Run

_OF_LAYER = "honed_recurrent"
"""Attribute of a layer on a CPU: what is done after vLLM's own code."""
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_KINDS = ("QwenGatedDeltaNetAttention",)

Guard = Callable[[str, Callable[[TreeStep], Any]], Any]
"""Runs something with the step under way, if it has trees and nothing failed; None if it didn't run, or raised."""


class _Rows(NamedTuple):
    """A layer's inputs at tree rows, taken before vLLM's code overwrites them."""

    mixed: Tensor  # [R, C]
    b: Tensor  # [R, H]
    a: Tensor  # [R, H]


class _Made(NamedTuple):
    """What one layer leaves for the commit."""

    inputs: Tensor  # [R + B (X − 1), C], of tree rows, then those that lead up to each anchor
    slots: Tensor  # [B, N + 1], where a request's states are held
    updates: TreeUpdates


class RecurrentLayers:
    """The target's recurrent layers.

    Args:
        layers: by name.
        guard: see `Guard`.
        num_slots: N, most nodes of a tree.
        cache_config: vLLM's.

    Raises:
        TypeError: a layer can't go on along a tree; the text says why.
    """

    def __init__(self, layers: Mapping[str, Any], guard: Guard, num_slots: int, cache_config: Any) -> None:
        self._layers, self._guard, self._max_rows = dict(layers), guard, num_slots + 1
        self._made: dict[str, _Made] = {}
        self._slots: dict[int, Tensor] = {}
        for name, layer in self._layers.items():
            if reason := _misfit(layer, self._max_rows):
                raise TypeError(f"{name}: {reason}")
        self._block_size = _block_size(cache_config) if layers else 0
        """Tokens of a block at whose end vLLM caches a state; 0: it doesn't."""

    def kernels(self, depth: int) -> Iterator[Run]:
        """What compiles the device's kernels, and changes nothing; `depth` is the most nodes on a path."""
        kinds = {}
        for layer in self._layers.values():
            conv, states = _views(layer)
            kinds[conv.dtype, states.shape[1:], states.stride(), states.dtype, _weight_of(layer).shape] = layer
        yield from (functools.partial(self._run_on_nothing, layer, depth) for layer in kinds.values())

    def _run_on_nothing(self, layer: Any, depth: int) -> None:
        """Two rows of one request, on states of its own."""
        states = _views(layer)[1]
        weight, dtype = _weight_of(layer), layer.conv1d.weight.dtype
        channels, taps = weight.shape
        heads, width, key_width = states.shape[1:]
        device, rows = states.device, 2
        mixed = tree_conv(
            torch.zeros((rows + taps - 1, channels), dtype=dtype, device=device),
            torch.zeros((rows, taps), dtype=torch.int64, device=device),
            weight,
            layer.conv1d.bias,
        )
        query, key, value = layer.rearrange_mixed_qkv(mixed)
        own = torch.empty_strided((2, heads, width, key_width), states.stride(), dtype=states.dtype, device=device).zero_()
        gates = torch.zeros((rows, heads), device=device)
        root = torch.zeros(1, dtype=torch.int64, device=device)
        starts = torch.tensor([0, rows], dtype=torch.int32, device=device)
        masks = torch.zeros((1, self._max_rows, words_of(self._max_rows - 1)), dtype=torch.int32, device=device)
        shape = own, root, starts, masks, self._max_rows
        _, updates = tree_delta_rule(query[0], key[0], value[0], gates, gates.sigmoid(), *shape)
        commit(own, root, root, updates, starts, torch.zeros((1, depth), dtype=torch.int64, device=device), root)

    def wrap(self) -> None:
        """Overwrite tree rows from now on."""
        for name, layer in self._layers.items():
            if layer.kv_cache[0].device.type == "cpu":
                setattr(layer, _OF_LAYER, functools.partial(self._run, name))
                _wrap_cpu()
            else:
                self._wrap_core(name, layer)

    def begin(self) -> None:
        """Forget the last step."""
        self._made.clear()
        self._slots.clear()

    def _wrap_core(self, name: str, layer: Any) -> None:
        core, can_fuse = layer._forward_core, layer._can_use_fused_gdn_mtp_decode

        def forward_core(mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor) -> Any:
            return self._run(name, mixed_qkv, b, a, core_attn_out, lambda: core(mixed_qkv, b, a, core_attn_out))

        def can_use_fused_gdn_mtp_decode(metadata: Any) -> Any:
            has_trees = self._guard("recurrent layers", lambda _: True)
            return not has_trees and can_fuse(metadata)  # fused, a row's output is normed before it could be overwritten

        layer._forward_core, layer._can_use_fused_gdn_mtp_decode = forward_core, can_use_fused_gdn_mtp_decode

    def _run(self, name: str, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor, stock: Callable[[], Any]) -> Any:
        """Run vLLM's code, then ours over it."""
        taken = self._guard("recurrent layers", lambda step: _Rows(*(x[step.rows] for x in (mixed, b, a))))
        result = stock()
        if taken is not None:
            self._guard("recurrent layers", lambda step: self._overwrite(name, step, taken, out))
        return result

    def _overwrite(self, name: str, step: TreeStep, taken: _Rows, out: Tensor) -> None:
        layer = self._layers[name]
        slots = self._slots_of(layer, step)
        conv, states = _views(layer)
        weight = _weight_of(layer)
        taps = weight.shape[1]
        before = conv[slots[:, 0], :, : taps - 1].transpose(1, 2).flatten(0, 1)
        inputs = torch.cat([taken.mixed, before.to(taken.mixed.dtype)])
        mixed = tree_conv(inputs, step.followed(taps), weight, layer.conv1d.bias)
        query, key, value = layer.rearrange_mixed_qkv(mixed)
        log_decay = -layer.A_log.float().exp() * torch.nn.functional.softplus(taken.a.float() + layer.dt_bias.float())
        found, updates = tree_delta_rule(
            query[0],
            key[0],
            value[0],
            log_decay,
            taken.b.float().sigmoid(),
            states,
            slots[:, 0],
            step.row_starts,
            step.trees.row_masks,
            self._max_rows,  # the same in each step: one compiled kernel
        )
        is_node = (step.place > 0)[:, None, None]
        out[step.rows] = torch.where(is_node, found.to(out.dtype), out[step.rows])
        self._made[name] = _Made(inputs, slots, updates)

    def _slots_of(self, layer: Any, step: TreeStep) -> Tensor:  # [B, N + 1]
        """Where the states of tree requests are; the layers of a group share this."""
        context = importlib.import_module("vllm.forward_context").get_forward_context()
        metadata = context.attn_metadata[layer.prefix]
        if (found := self._slots.get(id(metadata))) is None:
            is_speculative, slots = metadata.spec_sequence_masks, metadata.spec_state_indices_tensor
            if is_speculative is None or slots is None:
                raise RuntimeError("vLLM takes no request of this step for a speculative one")
            row = is_speculative.cumsum(0)[step.batch_index] - 1
            found = self._slots[id(metadata)] = slots[row].long()
        return found

    def commit(self, step: TreeStep, path: Tensor, num_accepted: Tensor) -> None:  # [B, P], [B]
        """Write the states after accepted paths, and the inputs of their rows.

        Args:
            path: rows of the accepted nodes in their requests.

        Raises:
            RuntimeError: a layer's rows were computed without this code.
        """
        if len(self._made) < len(self._layers):
            raise RuntimeError(f"tree rows were seen in {len(self._made)} of {len(self._layers)} recurrent layers")
        counts = [num_accepted]
        if self._block_size:
            held = step.prefix.long() + 1  # tokens in the state after the anchor
            at_end = (held + num_accepted) // self._block_size * self._block_size - held
            counts.append(torch.where(at_end < num_accepted, at_end, 0).clamp(min=0))
        rows = step.row_starts[:-1, None].long() + path.clamp(min=0)  # [B, P]
        for name, made in self._made.items():
            conv, states = _views(self._layers[name])
            for count in counts:
                target = made.slots.gather(1, count[:, None])[:, 0]
                commit(states, made.slots[:, 0], target, made.updates, step.row_starts, path, count)
            place = _weight_of(self._layers[name]).shape[1] - 1 + torch.arange(path.shape[1], device=path.device)
            conv[made.slots[:, :1], :, place] = made.inputs[rows].to(conv.dtype)  # past the path, nothing is read
        self._made.clear()


def _wrap_cpu() -> None:
    """Let vLLM's CPU code for speculative steps run what a layer asks for; once in a process."""
    module: Any = importlib.import_module("vllm.model_executor.layers.mamba.ops.cpu.gdn_attention")
    aware = module._cpu_gdn_attention_spec_aware
    if getattr(aware, "is_honed", False):
        return

    @functools.wraps(aware)
    def spec_aware(layer: Any, metadata: Any, mixed: Tensor, b: Tensor, a: Tensor, out: Tensor, *others: Any) -> Any:
        def stock() -> Any:
            return aware(layer, metadata, mixed, b, a, out, *others)

        run = getattr(layer, _OF_LAYER, None)
        return stock() if run is None else run(mixed, b, a, out, stock)

    spec_aware.is_honed = True  # type: ignore[attr-defined]
    module._cpu_gdn_attention_spec_aware = spec_aware


def _views(layer: Any) -> tuple[Tensor, Tensor]:  # [S, C, L], [S, H, V, K]
    """Views of a layer's caches: inputs of the convolution, the oldest first, and states."""
    conv, states = layer.kv_cache[:2]
    is_first = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils").is_conv_state_dim_first()
    if states.device.type == "cpu":  # that code keeps them as [K, V], in the same shape
        states = states.view(*states.shape[:2], states.shape[3], states.shape[2]).transpose(-1, -2)
    return conv if is_first else conv.transpose(-1, -2), states


def _weight_of(layer: Any) -> Tensor:  # [C, X]
    """A layer's convolution. A CPU's may be packed, and then there is a copy that isn't."""
    weight = getattr(layer.conv1d, "_cpu_unpacked_conv_weight", None)
    if weight is None:
        weight = layer.conv1d.weight
    return weight.view(len(weight), -1)  # type: ignore[no-any-return]


def is_recurrent(layer: Any) -> bool:
    """Whether a layer keeps a state in place of keys and values."""
    return hasattr(layer, "get_state_shape")


def _block_size(cache_config: Any) -> int:
    """Tokens of a block at whose end vLLM caches a state; 0: it doesn't. Raises TypeError for ways that aren't known."""
    mode = cache_config.mamba_cache_mode
    if mode not in ("none", "align"):
        raise TypeError(f"honed doesn't know how vLLM caches states with mamba_cache_mode {mode}")
    return int(cache_config.mamba_block_size) if mode == "align" else 0


def _misfit(layer: Any, max_rows: int) -> str:
    """Reason why a recurrent layer can't go on along a tree here; empty if it can."""
    if type(layer).__name__ not in _KINDS:
        return f"honed doesn't know the state of {type(layer).__name__}"
    if layer.activation not in ("silu", "swish"):
        return f"its convolution ends in {layer.activation}"
    if any(cache.dtype not in _DTYPES for cache in layer.kv_cache[:2]):
        return "its state is quantised"
    return misfit(layer.head_k_dim, layer.head_v_dim, max_rows) if layer.kv_cache[1].device.type != "cpu" else ""
