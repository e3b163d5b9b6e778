"""New drafter weights for a running server: staged beside it, then copied in place between two steps.

vLLM's own reload path breaks DFlash. Here parameters keep their storage, since captured CUDA graphs hold its address. So does
the fused context-K/V projection that vLLM builds for DFlash at load. The drafter shares the target's `embed_tokens` and
`lm_head`; they are never touched. On a CPU vLLM packs linear weights away; they are made anew and packed again.

Staging checks everything that could fail (file, checksum, names, shapes), so applying only copies. A rank stages its own part
of each tensor. Several versions can be held on the device at once: two that take turns are read once and swapped any number of
times.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from honed.adapt.models.drafter_tensor_names import IGNORED, is_shared, name_of, names_of
from honed.attach.swap.checkpoint_file import load_file
from honed.attach.swap.device_reserve import DeviceReserve
from honed.attach.swap.live_checksum import LiveChecksum
from honed.attach.swap.shard import Shard, shard_of
from honed.attach.swap.staging import Staging, num_bytes, use_device


class SwapError(ValueError):
    """Weights that can't be used; the text gives the reason and the remedy."""


class Swapper:
    """Swaps the weights of one rank's drafter.

    Args:
        draft_model: vLLM's `DFlashQwen3ForCausalLM`, `Eagle3LlamaForCausalLM` or a like class.
        device: the weights' device.
        reserve: what vLLM will still want of it; None: nothing is known.
    """

    def __init__(self, draft_model: Any, device: torch.device, reserve: DeviceReserve | None = None) -> None:
        self._model = draft_model
        self._device = device
        self._staging = Staging(device, reserve)
        self._held: dict[str, dict[str, torch.Tensor]] = {}
        self._state = ""
        self._thread: threading.Thread | None = None
        self._num_calls = 0
        """Calls of `stage`: a thread of an earlier one leaves everything as it is."""
        self._lock = threading.Lock()
        """Held to change `_held` and `_state`."""
        self._checksum: LiveChecksum | None = None
        self._unpacked: list[Any] = []
        """Layers that a CPU build has to pack again; some are left over where a copy failed half way."""
        self._shards: dict[str, Shard] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        with torch.inference_mode():
            for name, part, shard in self._live():
                self._shards[name], self._shapes[name] = shard, shard.whole_shape(part.shape)
                self._dtypes[name] = part.dtype

    @property
    def most_staged_bytes(self) -> int:
        """Most bytes that were staged on the device at once."""
        return self._staging.most_bytes

    def row_bytes(self, feature_kind: str) -> int:
        """Bytes of a captured row's features, by the shape of what fuses them; 0: unknown."""
        shape, dtype = self._shapes.get("fc.weight"), self._dtypes.get("fc.weight")
        return 0 if shape is None or dtype is None else shape[0 if feature_kind == "fused" else 1] * dtype.itemsize

    def stage(self, wanted: Sequence[tuple[str, str, str]]) -> str:
        """Begin to read, check and copy to the device the versions not held yet; drop all others. Return at once.

        What is still being read for an earlier call, which the engine's sleep may have ended, is waited for and dropped.

        Args:
            wanted: (version, path, sha256) of each.

        Returns:
            as `staged`: "" when all of them are held already.

        Raises:
            SwapError: the running drafter has no weights; what is held can be freed then, too.
        """
        if wanted:
            self._check_live()
        names = {version for version, _, _ in wanted}
        with self._lock:
            self._held = {version: tensors for version, tensors in self._held.items() if version in names}
            missing = [one for one in wanted if one[0] not in self._held]
            self._state = "staging" if missing else ""
            self._num_calls += 1
        if missing:
            task = missing, self._num_calls, self._thread
            self._thread = threading.Thread(target=self._stage, args=task, name="honed-stage", daemon=True)
            self._thread.start()
        return self._state

    def rest(self, is_asleep: bool) -> None:
        """vLLM falls asleep, or is awake again: nothing is staged on the device meanwhile, so its memory stays free.

        A checksum ends first: its thread would read weights that vLLM is about to unmap.
        """
        if is_asleep:
            self._drop_checksum()
        self._staging.rest(is_asleep)
        if is_asleep and self._device.type == "cuda":
            with self._lock:
                self._held = {version: _in_host_memory(tensors) for version, tensors in self._held.items()}

    def staged(self, version: str) -> str:
        """ "" when `version` is ready to apply, "staging" while it is being staged, else the error."""
        if self._state or version in self._held:
            return self._state
        return f"version {version} was never staged"

    def _stage(self, wanted: Sequence[tuple[str, str, str]], call: int, earlier: threading.Thread | None) -> None:
        try:
            if earlier is not None:
                earlier.join()
            use_device(self._device)
            for version, path, sha256 in wanted:
                self._hold(version, self._read(Path(path), sha256), call)
            state = ""
        except Exception as error:
            state = " ".join(str(error).split())[:400] or type(error).__name__
        with self._lock:
            if call == self._num_calls:
                self._state = state

    def _hold(self, version: str, tensors: dict[str, torch.Tensor], call: int) -> None:
        """Hold what was read, unless others were asked for meanwhile."""
        with self._lock:
            if call != self._num_calls:
                return
            if self._staging.is_device_away and self._device.type == "cuda":  # vLLM fell asleep while it was being brought
                tensors = _in_host_memory(tensors)
            self._held[version] = tensors

    def _read(self, path: Path, sha256: str) -> dict[str, torch.Tensor]:
        file = path / "model.safetensors" if path.is_dir() else path
        found, whole = load_file(file)
        if sha256 and found != sha256:
            raise SwapError(f"{file} has sha256 {found[:12]}…, expected {sha256[:12]}…: the file is damaged, not used")
        tensors = self._swapped(whole)
        self._check(tensors)
        tensors = {n: self._shards[n].cut(tensor).to(self._dtypes[n]).contiguous() for n, tensor in tensors.items()}
        held = sum(num_bytes(one) for one in self._held.values())
        return self._staging.bring(tensors, held)

    def _swapped(self, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Select what a swap changes, by our names: not the target's, and nothing that vLLM ignores."""
        try:
            names = names_of(whole)
        except ValueError as error:
            raise SwapError(f"the checkpoint isn't sound: {error}") from error
        ignored = {name for name in names if is_shared(name) or (name.endswith(".bias") and name not in self._shapes)}
        return {ours: whole[theirs] for ours, theirs in names.items() if ours not in ignored}

    def _check(self, tensors: dict[str, torch.Tensor]) -> None:
        live = self._shapes
        missing, unknown = sorted(live.keys() - tensors.keys()), sorted(tensors.keys() - live.keys())
        if missing or unknown:
            what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which the running drafter lacks"
            raise SwapError(f"the checkpoint {what}: it is for another drafter architecture")
        for name, tensor in tensors.items():
            self._check_tensor(name, tensor)

    def _check_live(self) -> None:
        """Raise SwapError if parameters have no memory: copying into them would do nothing, and say so to nobody."""
        if any(parameter.is_meta for parameter in self._model.model.parameters()):
            raise SwapError(
                "an update of the drafter through vLLM's own endpoint is under way, or failed and left it without weights: "
                "finish one, or restart vLLM"
            )

    def _check_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            raise SwapError(f"{name} is on the device `meta`, without values: send the tensor itself")
        if tensor.shape != self._shapes[name]:
            raise SwapError(
                f"{name} is {list(tensor.shape)} in the checkpoint, {list(self._shapes[name])} in the running drafter: "
                "it was trained for another drafter"
            )
        if not torch.isfinite(tensor).all():
            raise SwapError(f"{name} holds NaN or infinity: the training run was broken")

    @torch.inference_mode()
    def apply(self, version: str, is_held_on: bool = False) -> dict[str, float]:
        """Copy a staged version into the live parameters; the caller ensures that no step is running.

        Args:
            is_held_on: keep the staged weights for the next swap; each version takes a drafter's memory.

        Returns:
            copy_ms: duration of the copy, the device's part included.
        """
        tensors = self._held.get(version)
        if tensors is None or self._state:
            raise SwapError(f"version {version} is not staged")
        self._check_live()
        began = time.perf_counter()
        self._copy(tensors)
        if not is_held_on:
            with self._lock:
                self._held = {}
        return {"copy_ms": (time.perf_counter() - began) * 1e3}

    def live_parts(self) -> Iterator[torch.Tensor]:
        """Views of this rank's parameters that a swap sets, but for layers that a CPU build packed away."""
        return (part for _, part, _ in self._live())

    @torch.inference_mode()
    def part_of(self, name: str, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """Cut this rank's part from a tensor of another source, in host memory, by its name; empty for one that isn't swapped.

        Raises:
            SwapError: this drafter has no such tensor.
        """
        parts = {}
        for ours, tensor in self._swapped({name: whole}).items():
            if ours not in self._shapes:
                raise SwapError(f"the running drafter has no {ours}: it was trained for another drafter")
            self._check_tensor(ours, tensor)
            part = self._shards[ours].cut(tensor)
            parts[ours] = torch.empty(part.shape, dtype=self._dtypes[ours]).copy_(part)
        return parts

    @torch.inference_mode()
    def overwrite(self, parts: dict[str, torch.Tensor]) -> None:
        """Copy such parts into the live parameters; the caller ensures that no step is running. The others stay.

        Raises:
            SwapError: the running drafter has no weights.
        """
        self._check_live()
        kept = {}
        if any(_packed_linears(self._model.model)):  # these are made anew
            kept = {name: live.clone() for name, live, _ in self._live() if name not in parts}
        self._copy(parts | kept)

    def _copy(self, tensors: dict[str, torch.Tensor]) -> None:
        self._drop_checksum()
        inner = self._model.model
        for layer in list(_packed_linears(inner)):
            self._unpacked.append(layer)
            _unpack(layer)
        for name, live, _ in self._live():
            if name in tensors:
                live.copy_(tensors[name], non_blocking=True)  # the sources are kept until all has arrived
        self._refresh_fused(inner)
        for layer in (*self._unpacked, *_packed_tables(inner)):
            layer.quant_method.process_weights_after_loading(layer)
        self._unpacked = []
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    @staticmethod
    def _refresh_fused(inner: Any) -> None:
        """Update vLLM's fused context-K/V projection of DFlash in place: captured graphs hold its address.

        It goes layer by layer: allocating memory could fail here, with half of the weights new.
        """
        if not hasattr(inner, "_fused_kv_weight"):
            return
        attention = [layer.self_attn for layer in inner.layers]
        for name, fused in (("weight", inner._fused_kv_weight), ("bias", inner._fused_kv_bias)):
            if fused is not None:
                for part, a in zip(fused.chunk(len(attention)), attention, strict=True):
                    part.copy_(getattr(a.qkv_proj, name)[a.q_size :])
        for part, a in zip(inner._k_norm_weights, attention, strict=True):
            part.copy_(a.k_norm.weight.data)

    def _live(self) -> Iterator[tuple[str, torch.Tensor, Shard]]:
        """This rank's part of each live tensor under its checkpoint name, as a view of the parameter that holds it.

        Linear layers that a CPU build packed away are recovered by multiplying with the identity: exact, and no view.
        """
        inner = self._model.model
        packed = {id(layer) for layer in _packed_linears(inner)}
        own = f"mtp_layers.{getattr(inner, 'mtp_start_layer_idx', 0)}."  # vLLM counts MiMo's from the target's on
        for module_name, module in inner.named_modules():
            if is_shared(module_name) or any(part in module_name for part in IGNORED):
                continue
            for parameter_name, parameter in module.named_parameters(recurse=False):
                name = name_of(f"{module_name}.{parameter_name}" if module_name else parameter_name)
                name = name.replace(own, "mtp_layers.0.", 1)
                if name == "mask_embedding" and not inner.has_separate_mask_embedding:
                    continue
                value = _dense_weight(module) if id(module) in packed and parameter_name == "weight" else parameter.data
                if hasattr(module, "org_vocab_size"):
                    value = value[: module.org_vocab_size]  # vLLM pads a table of words
                yield from _split(name, parameter_name, value, module)

    @torch.inference_mode()
    def begin_checksum(self) -> None:
        """Begin a checksum of the live weights. No rank may take a part in before all ranks have begun."""
        from vllm.distributed import tensor_model_parallel_all_gather

        self._drop_checksum()
        self._checksum = LiveChecksum(self._live(), tensor_model_parallel_all_gather, self._device)

    @torch.inference_mode()
    def checksum(self, part: int) -> tuple[str, bool, int]:
        """SHA-256 of the live weights, whole: take in the part of that number, or only look (−1).

        A swap ends it, and vLLM's sleep. `LiveChecksum.take` describes the result.

        Raises:
            RuntimeError: none was begun, or it failed.
        """
        if self._checksum is None:
            raise RuntimeError("no checksum is under way: the weights have changed since")
        return self._checksum.take(part)

    def _drop_checksum(self) -> None:
        if self._checksum is not None:
            self._checksum.stop()
            self._checksum = None


def _in_host_memory(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor if tensor.is_pinned() else tensor.cpu().pin_memory() for name, tensor in tensors.items()}


def _packed_linears(inner: Any) -> Iterator[Any]:
    """Linear layers whose weight a CPU build packed away."""
    for module in inner.modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.numel() == 0 and hasattr(module, "quant_method"):
            yield module


def _packed_tables(inner: Any) -> Iterator[Any]:
    """Tables of words that a CPU build multiplies with a packed copy of: DSpark's Markov head."""
    for module in inner.modules():
        if hasattr(module, "cpu_linear") and hasattr(module, "org_vocab_size"):
            yield module


def _dense_weight(layer: Any) -> torch.Tensor:  # [out, in]
    identity = torch.eye(layer.input_size_per_partition if hasattr(layer, "input_size_per_partition") else layer.input_size)
    dtype = getattr(layer, "params_dtype", torch.float32)
    return layer.quant_method.apply(layer, identity.to(dtype), None).t().contiguous()  # type: ignore[no-any-return]


def _unpack(layer: Any) -> None:
    """Give a packed linear layer an ordinary weight again, to be filled.

    Every name was found in the checkpoint, so all of it is overwritten: the packed values needn't be recovered.
    """
    inputs = getattr(layer, "input_size_per_partition", layer.input_size)
    outputs = getattr(layer, "output_size_per_partition", layer.output_size)
    layer.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=layer.params_dtype), requires_grad=False)


def _split(name: str, parameter: str, value: torch.Tensor, module: Any) -> Iterator[tuple[str, torch.Tensor, Shard]]:
    """Undo vLLM's stacking: qkv_proj -> q, k, v; gate_up_proj -> gate, up."""
    if ".qkv_proj." in name:
        sizes = [module.num_heads * module.head_size, *[module.num_kv_heads * module.head_size] * 2]
        stack, parts = "qkv_proj", dict(zip(("q_proj", "k_proj", "v_proj"), torch.split_with_sizes(value, sizes), strict=True))
    elif ".gate_up_proj." in name:
        stack, parts = "gate_up_proj", dict(zip(("gate_proj", "up_proj"), value.chunk(2), strict=True))
    else:
        stack, parts = "", {"": value}
    for one, part in parts.items():
        yield name.replace(stack, one) if stack else name, part, shard_of(module, parameter, one)
