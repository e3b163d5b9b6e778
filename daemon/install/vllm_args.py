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

from honed.adapt.models.trainable import is_eagle3, is_mtp
from honed.recalib.config.drafter import EAGLE3_TOKENS, MTP_TOKENS

SCHEDULER = "honed.attach.scheduler.make_scheduler"
WORKER_EXTENSION = "honed.attach.worker.HonedWorkerExtension"
SERVER = "python -m vllm.entrypoints.openai.api_server"

LIMITS = (
    "vLLM 0.32 and 0.33 are supported; on others honed only logs events, and `honed engines` says so",
    "capture and swap need speculative method dflash, eagle3 or mtp; draft lengths and events work with every method",
    "pipeline parallelism: no capture, no swap (hidden states are spread over processes)",
    "draft trees need --enforce-eager, which on a GPU costs speed; `honed engines` says where they are off",
    "with enable_adaptive_verification vLLM sets draft lengths: honed logs verified drafts and captures nothing",
    "a --scheduler-cls or --worker-extension-cls of your own can't be combined with honed's",
    "vLLM's Python environment must also hold honed, and the user that runs vLLM must be in the daemon's group",
)

MOST_TREE_SLOTS = 128
"""Of vLLM 0.32's `v1/sample/rejection_sampler.py`, MAX_SPEC_LEN."""
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
    method: str = "",
    num_draft_tokens: int = 0,
    engine_id: str = "",
    graphs: Sequence[int] = (),
    max_num_seqs: int = 256,
    tree_slots: int = 0,
) -> VllmArgs:
    """Make the arguments that a vLLM server needs to find this daemon.

    Args:
        runtime_dir: the daemon's runtime folder, where its sockets are.
        model: target model; omitted if empty.
        drafter: drafter checkpoint; without it and `method` no --speculative-config is printed (keep your own).
        method: vLLM's; empty: by the drafter. Methods without a drafter checkpoint need it: mtp, ngram, suffix.
        num_draft_tokens: K; 0: from the drafter's config.json, a DFlash drafter's block size less 1 or what an EAGLE-3 one is
            for; 3 for an MTP head.
        engine_id: distinguishes engines of one host; vLLM's data-parallel rank is appended.
        graphs: draft lengths besides K for which vLLM captures full CUDA graphs; needs `drafter`.
        max_num_seqs: the server's most requests a step, for `graphs`.
        tree_slots: most nodes of a draft tree, in the place of K; 0: no trees. Needs `drafter`.

    Raises:
        ValueError: K is neither given nor known; graphs don't fit; trees of another drafter than DFlash's.
    """
    environment = {"HONED_RUNTIME_DIR": str(runtime_dir)}
    if engine_id:
        environment["HONED_ENGINE_ID"] = engine_id
    flags = ["--model", model] if model else []
    if (graphs or tree_slots) and not drafter and not method:
        raise ValueError("graphs and tree slots are part of --speculative-config: give --drafter or --method too")
    if graphs and tree_slots:
        raise ValueError("draft trees aren't in CUDA graphs yet: give either --graphs or --tree-slots")
    if tree_slots > MOST_TREE_SLOTS:
        raise ValueError(f"{tree_slots} tree slots, but vLLM's V1 sampler takes {MOST_TREE_SLOTS} drafts a request at most")
    if drafter or method:
        method = method or method_of(drafter)
        if tree_slots and method != "dflash":
            raise ValueError("draft trees are grown from DFlash drafters only: leave --tree-slots out")
        k = tree_slots or num_draft_tokens or (MTP_TOKENS if method == "mtp" else 0)
        if not k and not drafter:
            raise ValueError(f"method {method} has no drafter that tells how many tokens it drafts: set --draft-tokens")
        speculative: dict[str, Any] = {"method": method} | ({"model": drafter} if drafter else {})
        speculative["num_speculative_tokens"] = k = k or draft_tokens_of(drafter)
        if graphs:
            if max(graphs) > k:
                raise ValueError(f"a graph for {max(graphs)} draft tokens, but at most {k} are drafted")
            speculative["num_speculative_tokens_per_batch_size"] = table_for([*{*graphs, k}], max_num_seqs)
            flags += ["--max-num-seqs", str(max_num_seqs)]
        flags += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    flags += ["--scheduler-cls", SCHEDULER, "--worker-extension-cls", WORKER_EXTENSION]
    if tree_slots:
        environment["HONED_TREES"] = "1"
        flags.append("--enforce-eager")
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


def method_of(drafter: str) -> str:
    """vLLM's method for a drafter, by its config.json, or by its name if it isn't a folder on this machine."""
    try:
        raw = _read_config(drafter)
        return "eagle3" if _is_eagle3(raw) else "mtp" if is_mtp(raw) else "dflash"
    except ValueError:
        return "eagle3" if "eagle3" in drafter.lower() else "dflash"  # as vLLM goes by a name


def _is_eagle3(raw: dict[str, Any]) -> bool:
    return raw.get("speculators_model_type") == "eagle3" or is_eagle3(raw)


def draft_tokens_of(drafter: str) -> int:
    """Draft tokens of a round that a drafter checkpoint was trained for. Raises ValueError."""
    raw = _read_config(drafter)
    if _is_eagle3(raw):
        methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
        return int(methods[0].get("speculative_tokens") or EAGLE3_TOKENS)
    block_size = raw.get("block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise ValueError(f"{Path(drafter) / 'config.json'} has no block_size: set the draft length with --draft-tokens")
    return block_size - 1


def _read_config(drafter: str) -> dict[str, Any]:
    path = Path(drafter) / "config.json"
    try:
        return dict(json.loads(path.read_text()))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"there is no {path}: {drafter!r} is misspelt, or not a folder on this machine (hub names aren't looked up); "
            "if vLLM will find it, set the draft length with --draft-tokens"
        ) from error
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} can't be read ({error}): set the draft length with --draft-tokens") from error


def _pairs(flags: list[str]) -> list[str]:
    """Each flag and its value, if it has one, as one shell word group."""
    groups: list[str] = []
    for word in flags:
        if word.startswith("--"):
            groups.append(word)
        else:
            groups[-1] += f" {shlex.quote(word)}"
    return groups


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
