"""Additions to a vLLM command so that honed attaches: environment, flags and their limits.

Pure: names in, texts out. The list is rendered as shell lines to paste, as a systemd drop-in or as JSON.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

SCHEDULER = "honed.attach.scheduler.make_scheduler"
WORKER_EXTENSION = "honed.attach.worker.HonedWorkerExtension"
SERVER = "python -m vllm.entrypoints.openai.api_server"

LIMITS = (
    "vLLM 0.32 and 0.33 are supported; on others honed only logs events, and `honed engines` says so",
    "capture and swap need speculative method dflash; draft lengths and events work with every method",
    "pipeline parallelism: no capture, no swap (hidden states are spread over processes)",
    "with enable_adaptive_verification vLLM sets draft lengths: honed logs verified drafts and captures nothing",
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


def make(
    runtime_dir: Path,
    *,
    model: str = "",
    drafter: str = "",
    num_draft_tokens: int = 0,
    engine_id: str = "",
    graphs: Sequence[int] = (),
    max_num_seqs: int = 256,
) -> VllmArgs:
    """Make the arguments that a vLLM server needs to find this daemon.

    Args:
        runtime_dir: the daemon's runtime folder, where its sockets are.
        model: target model; omitted if empty.
        drafter: drafter checkpoint; without it no --speculative-config is printed (keep your own).
        num_draft_tokens: K; 0: from the block size in the drafter's config.json.
        engine_id: distinguishes engines of one host; vLLM's data-parallel rank is appended.
        graphs: draft lengths besides K for which vLLM captures full CUDA graphs; needs `drafter`.
        max_num_seqs: the server's most requests a step, for `graphs`.

    Raises:
        ValueError: K is neither given nor in the drafter's config.json; graphs don't fit.
    """
    environment = {"HONED_RUNTIME_DIR": str(runtime_dir)}
    if engine_id:
        environment["HONED_ENGINE_ID"] = engine_id
    flags = ["--model", model] if model else []
    if graphs and not drafter:
        raise ValueError("graphs are part of --speculative-config: give --drafter too")
    if drafter:
        k = num_draft_tokens or block_size_of(drafter) - 1
        speculative: dict[str, Any] = {"method": "dflash", "model": drafter, "num_speculative_tokens": k}
        if graphs:
            if max(graphs) > k:
                raise ValueError(f"a graph for {max(graphs)} draft tokens, but at most {k} are drafted")
            speculative["num_speculative_tokens_per_batch_size"] = table_for([*{*graphs, k}], max_num_seqs)
            flags += ["--max-num-seqs", str(max_num_seqs)]
        flags += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    flags += ["--scheduler-cls", SCHEDULER, "--worker-extension-cls", WORKER_EXTENSION]
    return VllmArgs(environment, flags)


def table_for(lengths: list[int], max_num_seqs: int) -> list[tuple[int, int, int]]:
    """A `num_speculative_tokens_per_batch_size` with all these lengths, the longest for the smallest batches.

    vLLM's V2 runner captures full graphs for its lengths. The runner follows the table only while honed doesn't decide. Batch
    sizes double from one length to the next.

    Raises:
        ValueError: there are more lengths than batch sizes, or equal or negative lengths.
    """
    chosen = sorted(set(lengths), reverse=True)
    if len(chosen) != len(lengths) or not chosen or chosen[-1] < 0:
        raise ValueError(f"draft lengths to capture graphs for must be different and not negative, not {lengths}")
    if len(chosen) > max_num_seqs:
        raise ValueError(f"{len(chosen)} draft lengths need as many batch sizes, and --max-num-seqs is {max_num_seqs}")
    rows, start = [], 1
    for index, length in enumerate(chosen):
        after = len(chosen) - index - 1
        end = max_num_seqs if not after else min(2 * start - 1, max_num_seqs - after)
        rows.append((start, end, length))
        start = end + 1
    return rows


def block_size_of(drafter: str) -> int:
    """Block length (anchor included) of a drafter checkpoint's training."""
    path = Path(drafter) / "config.json"
    try:
        block_size = json.loads(path.read_text()).get("block_size")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"there is no {path}: {drafter!r} is misspelt, or not a folder on this machine (hub names aren't looked up); "
            "if vLLM will find it, set the draft length with --draft-tokens"
        ) from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} can't be read ({error}): set the draft length with --draft-tokens") from error
    if not isinstance(block_size, int) or block_size < 2:
        raise ValueError(f"{path} has no block_size: set the draft length with --draft-tokens")
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
    """A drop-in for vLLM's unit, which wants honed but runs without it."""
    lines = ["[Unit]", "Wants=honed.service", "After=honed.service", "", "[Service]"]
    lines += [f'Environment="{name}={_unit_text(value)}"' for name, value in args.environment.items()]
    words = " ".join(_pairs(args.flags)).replace("%", "%%").replace("$", "$$")
    lines += [f"# Add to ExecStart: {words}"]
    lines += [f"# {limit}" for limit in args.limits]
    return "\n".join(lines)


def _unit_text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
