"""What to add to a vLLM command so that honed attaches: environment, flags, and the limits that go with them.

Pure: names in, texts out. The same list is rendered as shell lines to paste, as a systemd drop-in, or as JSON.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

SCHEDULER = "honed.attach.scheduler.make_scheduler"
WORKER_EXTENSION = "honed.attach.worker.HonedWorkerExtension"
SERVER = "python -m vllm.entrypoints.openai.api_server"

LIMITS = (
    "vLLM 0.32 and 0.33 are known; with others honed only observes, and says so in `honed engines`",
    "capture and swap are for speculative method dflash; draft lengths and events work with every method",
    "pipeline parallelism: no capture, no swap (hidden states are spread over processes)",
    "don't set enable_adaptive_verification: vLLM's own rule and honed's would cut the same drafts",
    "a --scheduler-cls or --worker-extension-cls of your own can't be combined with honed's",
    "vLLM's Python environment must also hold honed, and the user that runs vLLM must be in the daemon's group",
)

Format = Literal["shell", "systemd", "json"]


@dataclass(frozen=True)
class VllmArgs:
    """Environment variables and flags for one vLLM server."""

    environment: dict[str, str]
    flags: list[str]
    limits: tuple[str, ...] = LIMITS

    def render(self, format: Format) -> str:
        """The text to paste, or the JSON to read."""
        if format == "json":
            return json.dumps(asdict(self), indent=2)
        return _systemd(self) if format == "systemd" else _shell(self)


def make(runtime_dir: Path, *, model: str = "", drafter: str = "", num_draft_tokens: int = 0, engine_id: str = "") -> VllmArgs:
    """Name what a vLLM server needs to find this daemon.

    Args:
        runtime_dir: the daemon's runtime folder, where its sockets are.
        model: target model; left out when empty.
        drafter: drafter checkpoint; without it no --speculative-config is printed (keep your own).
        num_draft_tokens: K; 0 leaves it to the block size of the drafter's own config.json.
        engine_id: tells engines of one host apart; vLLM's data-parallel rank is appended.

    Raises:
        ValueError: K isn't given and the drafter's config.json doesn't tell it.
    """
    environment = {"HONED_RUNTIME_DIR": str(runtime_dir)}
    if engine_id:
        environment["HONED_ENGINE_ID"] = engine_id
    flags = ["--model", model] if model else []
    if drafter:
        speculative = {
            "method": "dflash",
            "model": drafter,
            "num_speculative_tokens": num_draft_tokens or block_size_of(drafter) - 1,
        }
        flags += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    flags += ["--scheduler-cls", SCHEDULER, "--worker-extension-cls", WORKER_EXTENSION]
    return VllmArgs(environment, flags)


def block_size_of(drafter: str) -> int:
    """Block length (anchor included) that a drafter checkpoint was trained for."""
    path = Path(drafter) / "config.json"
    try:
        block_size = json.loads(path.read_text()).get("block_size")
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read ({error}): say how many tokens to draft with --draft-tokens") from error
    if not isinstance(block_size, int) or block_size < 2:
        raise ValueError(f"{path} has no block_size: say how many tokens to draft with --draft-tokens")
    return block_size


def _pairs(flags: list[str]) -> list[str]:
    """Each flag and its value as one shell word group."""
    return [f"{name} {shlex.quote(value)}" for name, value in zip(flags[::2], flags[1::2], strict=True)]


def _shell(args: VllmArgs) -> str:
    lines = [f"export {name}={shlex.quote(value)}" for name, value in args.environment.items()]
    lines.append(" \\\n  ".join([SERVER, *_pairs(args.flags)]))
    lines += [f"# {limit}" for limit in args.limits]
    return "\n".join(lines)


def _systemd(args: VllmArgs) -> str:
    """A drop-in for vLLM's unit: it wants honed, but runs without it."""
    lines = ["[Unit]", "Wants=honed.service", "After=honed.service", "", "[Service]"]
    lines += [f'Environment="{name}={_unit_text(value)}"' for name, value in args.environment.items()]
    words = " ".join(_pairs(args.flags)).replace("%", "%%").replace("$", "$$")
    lines += [f"# Add to ExecStart: {words}"]
    lines += [f"# {limit}" for limit in args.limits]
    return "\n".join(lines)


def _unit_text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
