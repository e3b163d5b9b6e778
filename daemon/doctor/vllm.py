"""Checks that honed attaches to a vLLM server as started, and that its drafter belongs to its target.

Pure except for the argument `read_config` and reads of the registry. It checks commands as well as running processes, so that
a command can be checked before it is run.
"""

from __future__ import annotations

import contextlib
import grp
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from honed.adapt.models.trainable import Pair, why_untrained
from honed.adapt.protocol import attach_variables
from honed.daemon.doctor.check import Check
from honed.daemon.doctor.vllm_command import VllmCommand
from honed.daemon.doctor.vllm_processes import VllmProcess
from honed.daemon.install.drafter_config import draft_tokens_of
from honed.daemon.install.vllm_args import MOST_TREE_SLOTS, SCHEDULER, WORKER_EXTENSION
from honed.recalib.config.speculators import flat

PLUGIN = "honed"
"""Its entry point in vLLM's group of plugins."""

SUPPORTED = ((0, 32), (0, 34))
"""vLLM releases from the first up to, not including, the second. A test compares them with the attachment's check."""
PRINT_ARGS = "`honed vllm-args` prints what to add to vLLM's command; restart vLLM once."

WITHOUT_MTP = ("gemma2", "gemma3", "gemma3_text", "gpt_oss", "llama", "mixtral", "phi3", "qwen2", "qwen3")
"""Model types of which vLLM 0.32 makes no MTP head (`config/speculative.py`, `hf_config_override`), though not all of them."""

UNTRAINED = "docs/training.md lists drafters that are trained; lengths are tuned whatever the drafter."

ReadConfig = Callable[[str], dict[str, Any] | None]
"""A checkpoint's config.json; None if it isn't a folder on this machine."""
ListFiles = Callable[[str], Collection[str]]
"""Names of the files in a checkpoint's folder; empty if it isn't one on this machine."""


def wants_trees(environment: Mapping[str, str]) -> bool:
    """Whether a vLLM with this environment is to verify draft trees."""
    with contextlib.suppress(ValueError):  # `check_environment` says so
        return attach_variables.wants_trees(environment)
    return False


def check_environment(environment: Mapping[str, str], subject: str) -> Iterator[Check]:
    """Check the values of honed's variables."""
    for fault in attach_variables.faults(environment):
        yield Check(subject, "error", f"honed doesn't attach: {fault}", "Set it so in vLLM's environment, and restart vLLM.")


def check_command(
    command: VllmCommand, subject: str, read_config: ReadConfig, list_files: ListFiles, *, has_trees: bool | None = False
) -> Iterator[Check]:
    """Check a command's flags and its drafter.

    Args:
        has_trees: HONED_TREES is set for it; None: unknown.
    """
    command = command.resolved(read_config(command.model)) if command.model else command
    target = read_config(command.model) if command.model else None
    drafter = read_config(command.drafter) if command.drafter else None
    found = [*_attaches(command, subject), *_speculates(command, subject, target)]
    found += _trains(command, subject, target, drafter, list_files)
    if has_trees is False and drafter is not None:
        found += _fits_block(command, subject, drafter)
    if has_trees:
        found += _fits_trees(command, subject, drafter)
    yield from found
    if command.is_model_named_twice:
        text = f"names a model twice: once with --model ({command.model}), once without. vLLM refuses that"
        found.append(Check(subject, "error", text, "Leave --model out."))
        yield found[-1]
    for text in command.unreadable:
        found.append(Check(subject, "error", text, 'Quote it for the shell: --speculative-config \'{"method":"dflash",…}\'.'))
        yield found[-1]
    if command.method == "mtp" and not command.drafter and command.model and target is None:
        text = f"whether {command.model} has an MTP head isn't known: it isn't a folder on this machine"
        found.append(Check(subject, "unknown", text))
        yield found[-1]
    if not found:
        yield Check(subject, "ok", f"has honed's flags and drafts with {command.method}")
    if command.drafter and command.model:
        if target is None or drafter is None:
            unseen = command.model if target is None else command.drafter
            yield Check(subject, "unknown", f"drafter and target not compared: {unseen} isn't a folder on this machine")
        else:
            yield from check_pair(target, drafter, subject, command.drafter, command.max_model_len)


def _is_without_honed(process: VllmProcess) -> bool:
    """Tell whether nothing of a server's command or known environment names honed."""
    flags = (process.command.scheduler_cls, process.command.worker_extension_cls)
    named = any(flag.startswith("honed.") for flag in flags if flag)
    return not named and not _runtime_dir(process) and not process.command.config_file


def others(processes: Sequence[VllmProcess], user: int, runtime_dir: str) -> list[tuple[VllmProcess, Check]]:
    """Find the servers that aren't this honed's to tune, and what to say of them.

    They belong to another daemon that is there; or they are without honed, beside one that has it or of another user.

    Args:
        user: who asks; 0, root, may ask for any user's server.
    """
    without = [process for process in processes if _is_without_honed(process)]
    found = []
    for process in processes:
        subject, theirs = f"vLLM (process {process.pid})", _runtime_dir(process)
        if process in without and (len(without) < len(processes) or user not in (0, process.uid)):
            text, cure = f"runs without honed, as user {process.uid}", f"If it is to be tuned: {PRINT_ARGS}"
            found.append((process, Check(subject, "warning", text, cure)))
        elif theirs not in ("", runtime_dir.rstrip("/")) and os.path.exists(process.at(Path(theirs) / "engine.sock")):
            found.append((process, Check(subject, "ok", f"belongs to the honed in {theirs}")))
    return found


def _loads_plugin(environment: dict[str, str], subject: str) -> Iterator[Check]:
    plugins = environment.get("VLLM_PLUGINS")
    if plugins is not None and PLUGIN not in plugins.split(","):
        cure = f"Add {PLUGIN} to VLLM_PLUGINS in its environment, and restart it."
        yield Check(subject, "error", f"VLLM_PLUGINS={plugins} leaves honed's plugin out: no capture, no swap", cure)


def _runtime_dir(process: VllmProcess) -> str:
    """Absolute path of a server's HONED_RUNTIME_DIR; "" if it has none."""
    named = (process.environment or {}).get("HONED_RUNTIME_DIR", "").strip()
    return str((process.cwd or Path("/")) / named) if named else ""


def check_process(
    process: VllmProcess, runtime_dir: str, group: int | None, registry: Path, read_config: ReadConfig, list_files: ListFiles
) -> Iterator[Check]:
    """Check a running server: versions, environment, rights, command."""
    subject = f"vLLM (process {process.pid})"
    yield from check_version(process.vllm_version, subject)
    if (site := process.site_packages) is not None and not process.honed_version:
        is_systems = site.name == "dist-packages"
        python = "PIP_BREAK_SYSTEM_PACKAGES=1 python3" if is_systems else f"{site.parents[2]}/bin/python"
        text = f"honed isn't installed in vLLM's own environment ({site})"
        yield Check(subject, "error", text, f"{python} -m pip install --no-deps /path/to/honed, then restart vLLM.")
    if process.environment is None:
        yield Check(subject, "unknown", "its environment belongs to another user", "`sudo honed doctor` checks it too.")
    else:
        yield from _finds_daemon(process, subject, runtime_dir)
        yield from check_environment(process.environment, subject)
        yield from _loads_plugin(process.environment, subject)
    if group is not None and process.uid != 0 and group not in process.groups:
        yield Check(
            subject,
            "error",
            f"runs as user {process.uid}, who is not in the group of {runtime_dir}",
            f"{_join(group)}, then restart vLLM: it reads groups at its start.",
        )
    yield from check_registry(process, registry, subject)
    has_trees = None if process.environment is None else wants_trees(process.environment)
    yield from check_command(process.command, subject, read_config, list_files, has_trees=has_trees)


def check_registry(process: VllmProcess, registry: Path, subject: str) -> Iterator[Check]:
    """Check that a server can open new weights at the daemon's path. Only file modes are checked."""
    if process.environment is None:
        return  # its "/" can't be read either
    cure = f"Mount the daemon's there, e.g. `-v {registry}:{registry}:ro`, and restart vLLM."
    try:
        ours = registry.stat()
    except OSError:
        return  # no daemon has made it yet, or we may not see it
    try:
        theirs = process.at(registry).stat()
    except PermissionError:
        return
    except OSError:
        yield Check(subject, "error", f"can't see {registry}, where it reads new weights: every swap fails", cure)
        return
    if not os.path.samestat(ours, theirs):
        text = f"sees another {registry} than the daemon's, where it reads new weights: every swap fails"
        yield Check(subject, "error", text, cure)
        return
    for folder in (registry, *registry.parents):
        if not _may_enter(process, folder):
            text = f"runs as user {process.uid}, who may not enter {folder}: it reads new weights there, so every swap fails"
            cure = (
                f"Put that user into the folder's group (`stat -c %G {folder}`) and restart vLLM; or set HONED_STATE_DIR, for"
            )
            yield Check(subject, "error", text, f"{cure} the daemon and the trainer, to a folder that it may enter.")
            return


def _join(group: int) -> str:
    try:
        return f"usermod -aG {grp.getgrgid(group).gr_name} USER"
    except KeyError:  # the group has no name
        return f"groupadd -g {group} honed, usermod -aG honed USER"


def _may_enter(process: VllmProcess, folder: Path) -> bool:
    try:
        found = process.at(folder).stat()
    except OSError:
        return True  # we may not see it
    bit = 0o100 if found.st_uid == process.uid else 0o010 if found.st_gid in process.groups else 0o001
    return process.uid == 0 or bool(found.st_mode & bit)


def check_version(version: str, subject: str) -> Iterator[Check]:
    """Check that honed supports this release of vLLM."""
    low, high = (".".join(map(str, v)) for v in SUPPORTED)
    release = _release(version)
    if release is None:
        yield Check(subject, "unknown", "its vLLM release can't be read")
    elif release < SUPPORTED[0]:
        yield Check(
            subject,
            "error",
            f"vLLM {version} is older than honed supports (>={low},<{high}): honed only logs events there",
            f"pip install 'vllm>={low},<{high}' in vLLM's environment, then restart vLLM.",
        )
    elif release >= SUPPORTED[1]:
        yield Check(
            subject,
            "warning",
            f"vLLM {version} is newer than honed supports (>={low},<{high}): honed only logs events there",
            f"Install a newer honed, or vllm<{high}.",
        )
    else:
        yield Check(subject, "ok", f"vLLM {version} is supported")


def check_pair(
    target: dict[str, Any], drafter: dict[str, Any], subject: str, name: str, max_model_len: int = 0
) -> Iterator[Check]:
    """Compare a drafter's config.json with its target's, to see that it was trained for it.

    Args:
        max_model_len: vLLM's longest context; 0: the target's own.
    """
    target = target.get("text_config") or target
    layers = target.get("num_hidden_layers")
    ids = (drafter.get("dflash_config") or {}).get("target_layer_ids") or []
    width = drafter.get("target_hidden_size") or drafter.get("hidden_size")
    pairs = (
        ("layers of its target", drafter.get("num_target_layers"), layers),
        ("vocabulary", drafter.get("vocab_size"), target.get("vocab_size")),
        ("hidden size of its target", width, target.get("hidden_size")),
    )
    wrong = [f"{what} {ours}, the target has {theirs}" for what, ours, theirs in pairs if ours and theirs and ours != theirs]
    if layers and ids and max(ids) >= layers:
        wrong.append(f"it reads target layer {max(ids)}, the target's last is {layers - 1}")
    mask = (drafter.get("dflash_config") or drafter).get("mask_token_id")
    vocabulary = drafter.get("vocab_size") or target.get("vocab_size")
    if mask is not None and vocabulary and not 0 <= mask < vocabulary:
        wrong.append(f"its mask token {mask} is outside the vocabulary of {vocabulary}")
    if wrong:
        cure = "Serve the drafter that was trained for this target, or train one for it; recalibration can't fix this."
        yield Check(subject, "error", f"drafter {name} was trained for another target: {'; '.join(wrong)}", cure)
    else:
        yield Check(subject, "ok", f"drafter {name} has its target's shapes")
    ours, theirs = drafter.get("max_position_embeddings"), max_model_len or target.get("max_position_embeddings")
    if ours and theirs and ours < theirs:
        text = f"drafter {name} knows {ours:,} positions, the target serves {theirs:,}: later ones get no drafts, or bad ones"
        cure = f"Start vLLM with --max-model-len {ours}, or use a drafter for long contexts, where such requests matter."
        yield Check(subject, "warning", text, cure)


def _fits_block(command: VllmCommand, subject: str, drafter: dict[str, Any]) -> Iterator[Check]:
    """Without draft trees, slots beyond the drafter's block are drafts that no drafter was trained for."""
    made_for, slots = draft_tokens_of(command.drafter, drafter), command.speculative.get("num_speculative_tokens")
    if command.method in ("dflash", "dspark") and isinstance(slots, int) and slots > made_for > 0:
        text = f"drafts {slots} tokens, but the drafter's block has {made_for}: those beyond are hardly ever accepted"
        trees = "; or HONED_TREES=1 for vLLM, if they are slots for draft trees" if command.method == "dflash" else ""
        yield Check(subject, "warning", text, f"Set num_speculative_tokens to {made_for}{trees}.")


def _fits_trees(command: VllmCommand, subject: str, drafter: dict[str, Any] | None) -> Iterator[Check]:
    """Warn of what keeps a command from draft trees. `honed engines` tells what only a running engine shows."""
    slots, chain = command.speculative.get("num_speculative_tokens"), draft_tokens_of(command.drafter, drafter)
    parallel, reason, cure = command.pipeline_parallel_size * command.tensor_parallel_size, "", "Leave HONED_TREES out."
    if command.method != "dflash":
        reason = "trees grow from DFlash and DFlash2 drafters only"
    elif parallel > 1:
        reason = f"there are {parallel} ranks"
    elif command.speculative.get("enable_adaptive_verification"):
        reason, cure = "vLLM's own adaptive verification is on", "Leave one of the two out."
    elif isinstance(slots, int) and slots > MOST_TREE_SLOTS:
        reason = f"{slots} slots, but vLLM's V1 sampler takes {MOST_TREE_SLOTS} drafts a request at most"
        cure = f"Set num_speculative_tokens to {MOST_TREE_SLOTS} or less."
    elif isinstance(slots, int) and 0 < slots <= chain:
        reason = f"{slots} slots hold no more than the drafter's chain of {chain}"
        cure = f"Set num_speculative_tokens above {chain}, or leave HONED_TREES out."
    if reason:
        yield Check(subject, "warning", f"HONED_TREES is set, but it verifies chains only: {reason}", cure)


def _attaches(command: VllmCommand, subject: str) -> Iterator[Check]:
    scheduler, extension = command.scheduler_cls, command.worker_extension_cls
    if command.config_file and not (scheduler and extension):
        text = f"missing flags may be in {command.config_file}, which isn't read"
        yield Check(subject, "unknown", text, "`honed engines` shows whether honed is attached.")
    elif not scheduler and not extension:
        text = f"has none of honed's flags (--scheduler-cls {SCHEDULER}, --worker-extension-cls {WORKER_EXTENSION})"
        yield Check(subject, "error", text, PRINT_ARGS)
    elif scheduler != SCHEDULER:
        text = f"has --scheduler-cls {scheduler}, not honed's" if scheduler else "has no --scheduler-cls"
        cure = f"Use --scheduler-cls {SCHEDULER}: vLLM's own scheduler with honed in it. It can't be combined with another."
        yield Check(subject, "error", f"{text}: no events, no draft lengths", cure)
    elif not extension:
        text = "has no --worker-extension-cls: no samples are captured, nothing is retrained or swapped"
        yield Check(subject, "warning", text, f"Use --worker-extension-cls {WORKER_EXTENSION}.")
    elif extension != WORKER_EXTENSION:
        text = f"samples are captured and drafters swapped only if {extension} is derived from {WORKER_EXTENSION}"
        yield Check(subject, "unknown", text, "`honed engines` says whether they are on once vLLM runs.")


def _speculates(command: VllmCommand, subject: str, target: dict[str, Any] | None) -> Iterator[Check]:
    if not command.speculative:
        text, cure = "has no --speculative-config", "`honed vllm-args --model … --drafter …` prints a command with it."
        if command.config_file or command.unreadable:
            return
        if command.model and target is None:
            text += f", and {command.model} isn't a folder on this machine: only a model in speculators' format brings its own"
            yield Check(subject, "unknown", text, f"If it is in that format, all is well. Else {cure}")
        else:
            yield Check(subject, "error", f"{text}: there is nothing to tune", cure)
        return
    kind = (target or {}).get("model_type")
    if command.method == "mtp" and command.drafter in ("", command.model) and kind in WITHOUT_MTP:
        text = f"drafts with mtp, but a target of model type {kind!r} has no MTP head: vLLM refuses to start"
        yield Check(subject, "error", text, "Name a drafter that was trained for it: `honed vllm-args --model … --drafter …`.")
    is_adaptive = command.speculative.get("enable_adaptive_verification") is True
    cure = "Take enable_adaptive_verification out of --speculative-config: honed chooses the draft lengths"
    if is_adaptive and command.is_lora:
        text = "asks for adaptive verification together with LoRA: vLLM refuses to start"
        yield Check(subject, "error", text, f"{cure}, with LoRA as without.")
    elif is_adaptive:
        text = "vLLM's own adaptive verification is on: honed doesn't set draft lengths"
        yield Check(subject, "warning", text, f"{cure}.")


def _trains(
    command: VllmCommand,
    subject: str,
    target: dict[str, Any] | None,
    drafter: dict[str, Any] | None,
    list_files: ListFiles,
) -> Iterator[Check]:
    """Give the engine's answer in advance, as far as files and flags tell."""
    if not command.speculative:
        return
    if command.method == "mtp" and drafter is None:
        drafter = target  # the head is part of it
    try:
        pair = Pair(
            method=command.method,
            drafter=flat(drafter) if drafter is not None else None,
            target=target,
            drafter_files=list_files(command.drafter) if command.drafter not in ("", command.model) else (),
            target_files=list_files(command.model) if command.model else (),
            pipeline_parallel_size=command.pipeline_parallel_size,
            is_adaptive=command.speculative.get("enable_adaptive_verification") is True,
        )
        reasons = why_untrained(pair)
    except (AttributeError, TypeError, ValueError) as error:  # it is somebody else's JSON
        reasons = [str(error)]
    for reason in reasons:
        yield Check(subject, "warning", f"nothing is captured or retrained: {reason}", UNTRAINED)


def _finds_daemon(process: VllmProcess, subject: str, runtime_dir: str) -> Iterator[Check]:
    theirs = _runtime_dir(process)
    if not theirs:
        cure = f"Set HONED_RUNTIME_DIR={runtime_dir} for vLLM (`honed vllm-args`), and restart it."
        yield Check(subject, "error", "HONED_RUNTIME_DIR isn't set for it: honed isn't loaded", cure)
    elif theirs != runtime_dir.rstrip("/"):
        cure = f"Set both to the same folder: HONED_RUNTIME_DIR={runtime_dir} for vLLM, or --runtime-dir {theirs} for honed."
        yield Check(subject, "error", f"looks for the daemon in {theirs}, but it is in {runtime_dir}", cure)


def _release(version: str) -> tuple[int, int] | None:
    parts = version.partition("+")[0].split(".")
    try:
        return int(parts[0]), int(parts[1])
    except (IndexError, ValueError):
        return None
