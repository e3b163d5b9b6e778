"""Tree rows in the target's layers: vLLM's own backend computes all rows, then those of trees are overwritten.

Where a step has no other rows, the backend's own attention is left out. Where the others come after them, FlashAttention and
the CPU's backend are given those alone. V2 puts trees that fill all slots first. Smaller trees are sorted by their rows, and
chains of fewer rows come before them: then the backend reads the trees' keys as well.

`impl.forward` is wrapped on each layer's instance, which vLLM looks up when it runs. So one wrap serves every backend that
keeps K and V in a known layout (`cache_views`). A row of a tree attends to the prefix in the cache up to its anchor, and to
the rows of its own ancestors, of this very step. A sliding window is counted by depth, as it would be in the text. A sink is
one more score of each head, which takes its share of the softmax and has no value (gpt-oss; arXiv 2309.17453).

Recurrent layers are in `recurrent_layers`.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from honed.attach.trees.cache_views import Views, views_of
from honed.attach.trees.recurrent_layers import RecurrentLayers, is_recurrent
from honed.attach.trees.tree_step import TreeStep
from honed.kernels.cache import reference as cache_reference
from honed.kernels.cache.compact_kv import KvPlanes, compact_kv
from honed.kernels.trees import reference, tree_attention
from honed.kernels.trees.cached_attention import cached_attention
from honed.kernels.trees.reference import MAX_DEPTHS
from honed.kernels.trees.tree_attention_inputs import HEAD_SIZES, PagedPrefix
from honed.kernels.trees.warm_up import Run, attention_runs

_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN", "FLEX_ATTENTION")
"""Those whose metadata say where a request's keys are."""

_OTHERS_ALONE = ("CPU_ATTN", "FLASH_ATTN")
"""Backends that can be given the requests after those with trees alone."""

_KNOWN_METADATA = {
    "num_actual_tokens",
    "max_query_len",
    "query_start_loc",
    "max_seq_len",
    "seq_lens",
    "block_table",
    "slot_mapping",
    "scheduler_metadata",
    "max_num_splits",
    "causal",
}
"""Fields of these backends' metadata of which honed knows what they are for a part of the requests."""

_CACHE_DTYPES = ("auto", "float32", "float16", "bfloat16")


class TreeLayers:
    """The target's layers that look at other rows than their own.

    Args:
        layers: by name.
        groups: of KV caches, for each layer: layers of a group keep a request's tokens in the same slots.
        on_error: called in a failing forward pass; the step's trees are then not to be used.
        num_slots: N, most nodes of a tree.
        cache_config: vLLM's.

    Raises:
        TypeError: a layer can't compute tree rows; the text says why.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        groups: Mapping[str, int],
        on_error: Callable[[str], None],
        num_slots: int,
        cache_config: Any,
    ) -> None:
        if not layers:
            raise TypeError("the target has no attention layer that honed knows")
        self.step: TreeStep | None = None
        """Trees of the step under way."""
        self._num_slots = num_slots
        self.has_failed = False
        """Whether the pass for this step failed: its rows may have attended to others than their ancestors."""
        self._layers = {name: layer for name, layer in layers.items() if not is_recurrent(layer)}
        recurrent = {name: layer for name, layer in layers.items() if is_recurrent(layer)}
        self._recurrent = RecurrentLayers(recurrent, self._guarded, num_slots, cache_config)
        self._on_error = on_error
        self._views: dict[str, Views] = {}
        for name, layer in self._layers.items():
            if reason := _misfit(layer):
                raise TypeError(f"{name}: {reason}")
            views = views_of(layer)
            if views is None:
                raise TypeError(f"{name}: honed doesn't know the layout of {type(layer.impl).__name__}'s cache")
            self._views[name] = views
        planes: dict[Any, list[torch.Tensor]] = {}
        for name, views in self._views.items():
            for plane in views:
                planes.setdefault((groups[name], plane.shape, plane.stride()), []).append(plane)
        self._planes = [(of[0], KvPlanes.of(held) if held[0].is_cuda else held) for of, held in planes.items()]

    def kernels(self, most_requests: int, most_tokens: int, depth: int) -> Iterator[Run]:
        """What compiles the device's kernels for all steps of so many requests, and changes nothing.

        Args:
            most_tokens: of a request.
            depth: most nodes on a path.
        """
        seen = set()
        for name, layer in self._layers.items():
            views = self._views[name]
            window, has_sinks = _window_of(layer.impl), getattr(layer.impl, "sinks", None) is not None
            kind = layer.num_heads, views[0].shape[1:], views[0].stride(), views[0].dtype, window, has_sinks
            if kind not in seen:
                seen.add(kind)
                yield from attention_runs(
                    *views,
                    num_heads=layer.num_heads,
                    num_slots=self._num_slots,
                    most_requests=most_requests,
                    most_tokens=most_tokens,
                    window=window,
                    is_float_out=has_sinks,
                )
        for _, planes in self._planes:
            if isinstance(planes, KvPlanes):
                yield functools.partial(_compact_nothing, planes, self._num_slots + 1, depth)
        yield from self._recurrent.kernels(depth)

    def begin(self) -> None:
        """Forget the last step."""
        self.step, self.has_failed = None, False
        self._recurrent.begin()

    def _guarded(self, where: str, run: Callable[[TreeStep], Any]) -> Any:
        if self.step is None or self.has_failed:
            return None
        try:
            return run(self.step)
        except Exception:
            self.has_failed = True
            self._on_error(where)
        return None

    def wrap(self) -> None:
        """Overwrite tree rows from now on."""
        self._recurrent.wrap()
        for name, layer in self._layers.items():
            layer.impl.forward = self._overwriting(layer, self._views[name], layer.impl.forward)

    def _overwriting(self, layer: Any, views: Views, forward: Callable[..., Any]) -> Callable[..., Any]:
        def forward_with_trees(
            of: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, *more: Any, **others: Any
        ) -> Any:
            def attend(step: TreeStep) -> bool:
                if any(others.get(name) is not None for name in ("output_scale", "output_block_scale")):
                    raise TypeError("the attention's output is quantised")
                self._attend(layer, views, step, query, key, value, metadata, output)
                return True

            if metadata is None or self.step is None:
                return forward(of, query, key, value, cache, metadata, output, *more, **others)
            num_rows = len(self.step.rows)
            has_others = getattr(metadata, "num_actual_tokens", num_rows + 1) > num_rows
            of_others = None
            if has_others:
                of_others = self._guarded("other rows", lambda step: _of_others(layer, step, metadata, query.dtype))
            if (of_others is not None or not has_others) and self._guarded("tree attention", attend):
                if of_others is not None:
                    rest = (rows[num_rows:] for rows in (query, key, value))
                    forward(of, *rest, cache, of_others, output[num_rows:], *more, **others)
                return output
            result = forward(of, query, key, value, cache, metadata, output, *more, **others)
            self._guarded("tree attention", attend)
            return result

        return forward_with_trees

    def _attend(
        self, layer: Any, views: Views, step: TreeStep, query: Any, key: Any, value: Any, metadata: Any, output: Any
    ) -> None:
        heads, width = layer.num_heads, layer.head_size
        masks, scale, sinks = step.trees.row_masks, float(layer.impl.scale), getattr(layer.impl, "sinks", None)
        window, table = _window_of(layer.impl), step.block_table(metadata.block_table)
        made_of, by_head = query.view(len(query), heads, width), output.view(len(output), heads, width)
        at = step.rows_at
        if not query.is_cuda and sinks is None:
            where = step.cached_rows(table, views[0].shape[1], heads // layer.num_kv_heads, window)
            by_head[at] = cached_attention(made_of, *views, where, scale)
            return
        q = made_of[at]
        k, v = (x.view(len(x), layer.num_kv_heads, width)[at] for x in (key, value))
        prefix = PagedPrefix(*views, table, step.prefix, firsts=step.firsts(window) if window else None)
        shape = step.row_starts, masks, step.max_rows
        if q.is_cuda:
            is_in_place = sinks is None and isinstance(at, slice)
            dtype = q.dtype if sinks is None else torch.float32
            made = by_head[at] if is_in_place else torch.empty(q.shape, dtype=dtype, device=q.device)
            lse, most = step.log_sums(heads), table.shape[1] * views[0].shape[1]
            most = min(window, most) if window else most
            # Not by way of the registered op, whose dispatch takes the host some 0.1 ms in every layer.
            tree_attention.launch(q, k, v, *shape, scale, prefix, most, made, lse)
            if is_in_place:
                return
        else:  # keys in a CPU's cache have no unit stride
            pages = -(-int(step.prefix.max()) // views[0].shape[1])
            prefix = prefix._replace(block_table=prefix.block_table[:, : max(pages, 1)])
            made, lse = reference.tree_attention(q, k, v, *shape, scale, prefix)
        if sinks is not None:
            made = made * (lse - sinks.float()).sigmoid()[..., None]
        by_head[at] = made.to(output.dtype)

    def compact(
        self, step: TreeStep, slots_of: Callable[[int], torch.Tensor], path: torch.Tensor, num_accepted: torch.Tensor
    ) -> None:  # [B, I], [B, P], [B]
        """Leave what the accepted rows would have left as a chain, in every layer.

        Their K and V move to the slots that follow the anchors'. States become those after the last of them.

        Args:
            slots_of: slots of each request's rows in a group of KV caches.
            path: rows of the accepted nodes in their requests.
        """
        self._recurrent.commit(step, path, num_accepted)
        for group, planes in self._planes:
            if isinstance(planes, KvPlanes):
                compact_kv(planes, slots_of(group), path, num_accepted)
            else:
                cache_reference.compact_kv(planes, slots_of(group), path, num_accepted)


def _compact_nothing(planes: KvPlanes, num_rows: int, depth: int) -> None:
    device = planes.table.device
    slots, path = (torch.full((1, size), -1, device=device) for size in (num_rows, depth))
    compact_kv(planes, slots, path, torch.zeros(1, dtype=torch.int64, device=device))


def target_layers(kv_cache_config: Any, of_drafter: set[str]) -> dict[str, int]:
    """Names of the target's attention layers, each with the number of its group of KV caches."""
    groups = enumerate(kv_cache_config.kv_cache_groups)
    return {name: number for number, group in groups for name in group.layer_names if name not in of_drafter}


def _of_others(layer: Any, step: TreeStep, metadata: Any, dtype: torch.dtype) -> Any:
    """Metadata of the requests after those with trees; None where the layer's backend needs those of all."""
    backend = layer.attn_backend.get_name()
    if backend not in _OTHERS_ALONE or not step.is_first:
        return None
    is_on_cpu = backend == "CPU_ATTN"
    window = _window_of(layer.impl) if is_on_cpu else 0

    def make() -> Any:
        made = _of_last_requests(metadata, len(step.request_ids), len(step.rows))
        if made is not None and is_on_cpu:
            made.scheduler_metadata = _cpu_schedule(layer, made, dtype)
        return made

    return step.of_others(metadata, window, make)


def _of_last_requests(metadata: Any, num_requests: int, num_rows: int) -> Any:
    """Metadata without the first requests and their rows; None where they hold more than honed knows.

    K and V of all rows are in the cache already. The longest lengths stay: they are bounds. Without a schedule FlashAttention
    divides its work itself.
    """
    held = vars(metadata)
    unknown = (held[name] for name in held.keys() - _KNOWN_METADATA)
    if held["causal"] is not True or not all(x is None or (isinstance(x, int) and x == 0) for x in unknown):
        return None
    made = copy.copy(metadata)
    made.num_actual_tokens = metadata.num_actual_tokens - num_rows
    made.query_start_loc = metadata.query_start_loc[num_requests:] - num_rows
    made.seq_lens, made.block_table = metadata.seq_lens[num_requests:], metadata.block_table[num_requests:]
    made.slot_mapping = metadata.slot_mapping[num_rows:]
    made.scheduler_metadata = None
    return made


def _cpu_schedule(layer: Any, metadata: Any, dtype: torch.dtype) -> torch.Tensor:
    """How threads of a CPU share the work of an attention."""
    ops, settings = (importlib.import_module(name) for name in ("vllm._custom_ops", "vllm.envs"))
    found: torch.Tensor = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=len(metadata.seq_lens),
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_size,
        seq_lens=metadata.seq_lens,
        dtype=dtype,
        query_start_loc=metadata.query_start_loc,
        causal=True,
        sliding_window_size=layer.impl.sliding_window,
        isa=layer.isa,
        enable_kv_split=getattr(settings, "VLLM_CPU_ATTN_SPLIT_KV", True),
    )
    return found


def _window_of(impl: Any) -> int:
    """Tokens that a row attends to, its own among them; 0: all."""
    held = getattr(impl, "sliding_window", None)
    left = held[0] if isinstance(held, tuple) else -1 if held is None else held - 1
    return max(int(left) + 1, 0)


def _misfit(layer: Any) -> str:
    """Reason why tree rows of a layer can't be computed here; empty if they can."""
    impl, backend = layer.impl, layer.attn_backend.get_name()
    if type(layer).__name__ != "Attention" or backend not in _BACKENDS:
        return f"honed doesn't know the attention of {type(layer).__name__} by {backend}"
    if layer.head_size not in HEAD_SIZES and backend != "CPU_ATTN":
        return f"its heads are {layer.head_size} wide"
    for name, wanted in (("attn_type", "decoder"), ("kv_sharing_target_layer_name", None)):
        if getattr(impl, name, wanted) not in (wanted, None):
            return f"its attention is of another kind ({name})"
    if layer.attn_backend.forward_includes_kv_cache_update:
        return "its attention writes the cache itself"
    if 0 < _window_of(impl) <= MAX_DEPTHS:
        return f"its window of {_window_of(impl)} tokens is shorter than a tree is deep"
    if getattr(impl, "alibi_slopes", None) is not None:
        return "it has ALiBi"
    if getattr(impl, "logits_soft_cap", None):
        return "its scores are capped"
    if getattr(impl, "kv_cache_dtype", "auto") not in _CACHE_DTYPES:
        return "its cache is quantised"
    if getattr(impl, "chunk_lookback", -1) > -1:
        return "its window is of aligned chunks"
    return ""
