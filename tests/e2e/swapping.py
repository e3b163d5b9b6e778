"""Other weights for the tiny drafter, and a running engine asked to take them."""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from honed.adapt.protocol import wire
from tests.e2e.engine import DRAFTER, TestEngine


def perturbed_drafter(folder: Path) -> Path:
    """The tiny drafter with every weight moved, as a checkpoint."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(DRAFTER, folder)
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: (t.float() + 0.1 * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
        if t.numel() > 256
        else t
        for name, t in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def renamed_drafter(source: Path, folder: Path) -> Path:
    """The same drafter under other names that vLLM reads, and with tensors that it ignores."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, folder)
    tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for ours, theirs in (("fc.", "encoder.fc."), ("hidden_norm.", "encoder.output_norm_enc."), ("layers.0.", "midlayer.")):
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        tensors[name] = tensor
    tensors["layers.1.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    tensors["layers.1.self_attn.o_proj.bias"] = torch.ones(4)
    tensors["t2d"] = torch.ones(4, dtype=torch.bool)
    save_file(tensors, folder / "model.safetensors")
    return folder


def swap(
    running: TestEngine, version: str, folder: Path, sha256: str = "", step: Callable[[], object] | None = None, **more: Any
) -> wire.CommandResult:
    """Ask for a swap as the daemon does, and let the engine's thread get on with it.

    Args:
        step: what that does again and again; None: it begins to schedule a step.
    """
    results: list[wire.CommandResult] = []
    commands = running.honed.commands
    commands._report = results.append
    weights = wire.DrafterWeights(version=version, path=str(folder), sha256=sha256)
    about = {"drops_cache": False, **more}
    commands.put(wire.SwapCommand(command_id=secrets.token_hex(8), weights=weights, **about))
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        (step or running.honed.before_schedule)()
        if results:
            return results[0]
        time.sleep(0.005)
    raise AssertionError("the swap never ended")


def worker_of(running: TestEngine) -> Any:
    """vLLM's worker object, in this process."""
    worker = running.core.model_executor.driver_worker
    return getattr(worker, "worker", worker)


def wait_until_compiled(running: TestEngine) -> None:
    """Until requests would be captured: on a GPU a thread compiles what that needs."""
    running.honed.before_schedule()
    wait_for(lambda: all(running.core.model_executor.collective_rpc(is_compiled)), 120)


def is_compiled(worker: Any) -> bool:
    """Whether this worker would capture, if it is the one that does."""
    capturer = worker._honed_side.capturer
    return capturer is None or capturer.is_ready


def wait_until_trees_may_grow(running: TestEngine) -> None:
    """Until trees would be verified, if this engine can: on a GPU a thread compiles what they need."""
    running.honed.before_schedule()
    trees = worker_of(running)._honed_trees
    wait_for(lambda: trees is None or trees._warm_up.is_over, 120)


def wait_until_written(running: TestEngine) -> None:
    """Until what was captured is in the ring: on a GPU a thread writes it."""
    wait_for(lambda: all(running.core.model_executor.collective_rpc(is_written)))


def is_written(worker: Any) -> bool:
    """Whether all that this worker captured is in the ring."""
    capturer = worker._honed_side.capturer
    return capturer is None or capturer.writer.is_done


def wait_for(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Until it holds."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


class Drafts:
    """Every block that the drafter proposes while this listens, with what made it.

    The version is noted where weights are really copied, not where honed says which it runs.
    """

    def __init__(self, running: TestEngine, version: str = "") -> None:
        side = worker_of(running)._honed_side
        self._drafter, self._swapper, self._version = side.runner.drafter, side.swapper, version
        self.seen: list[tuple[str, list[int]]] = []
        """(version, token ids [K])"""

    def __enter__(self) -> Drafts:
        propose, apply = self._drafter.propose, self._swapper.apply
        self._before = propose, apply

        def listening(*args: Any, **kwargs: Any) -> Any:
            drafted = propose(*args, **kwargs)
            self.seen += [(self._version, block) for block in drafted.tolist()]
            return drafted

        def applying(version: str, *args: Any) -> Any:
            figures = apply(version, *args)
            self._version = version
            return figures

        self._drafter.propose, self._swapper.apply = listening, applying
        return self

    def __exit__(self, *_: object) -> None:
        self._drafter.propose, self._swapper.apply = self._before

    def of(self, version: str) -> list[list[int]]:
        """What that version drafted."""
        return [block for by, block in self.seen if by == version]
