"""Findings: problems in a status answer that an operator should know, worst first.

Pure: a `/v1/status` document in, findings out. No further requests to the daemon.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from honed.adapt.protocol.workloads import MAX_WORKLOADS, OTHER_WORKLOAD, RECENT_S
from honed.daemon.settings.filesystem import IN_MEMORY, folder_in_memory

LAG_S = 5.0
"""Age of events at their commit above which a finding warns: the store or the daemon is behind."""

LONG_JOB_S = 60.0
"""Age of a job in the background above which a finding warns."""

LATELY_S = 3600.0
"""Time for which findings report losses and disk errors; the figures stay."""

TOO_MANY_LABELS = f"more than {MAX_WORKLOADS} workload labels within {RECENT_S / 60:.0f} minutes"
FEWER_LABELS = "Label kinds of traffic, not users or requests: `honed_workload` in the requests' `vllm_xargs`."

NONFINITE = "The target computes such values: look at its answers, and serve it in bfloat16 if it is in float16 now."

FALLBACKS = {
    "no_policy": "has had no policy from the daemon yet and drafts its configured static length",
    "stale_policy": "has had no message from the daemon for too long and drafts its static length",
    "observe_only": "only logs events: honed can't choose draft lengths there",
    "error": "caught too many errors of honed and drafts vLLM's own lengths until vLLM restarts",
}


@dataclass(frozen=True)
class Finding:
    """One sentence about a problem. `level` is "error" or "warning"."""

    level: str
    text: str
    cure: str = ""
    """Cure, if the text doesn't name it."""


def findings(status: dict[str, Any]) -> list[Finding]:
    """All findings of a status document, errors before warnings."""
    parts = (_of_daemon, _of_events, _of_engines, _of_drafters, _of_training)
    found = [finding for part in parts for finding in part(status)]
    return sorted(found, key=lambda f: f.level != "error")


def _of_daemon(status: dict[str, Any]) -> Iterator[Finding]:
    for problem in status.get("problems") or []:
        yield Finding("error", f"the daemon: {problem}")
    if problem := status.get("web_config_problem"):
        yield Finding("warning", f"the metrics' listener keeps the last web config that it could use: {problem}")
    job = status.get("background") or {}
    if (age_s := job.get("oldest_job_s") or 0.0) > LONG_JOB_S:
        text = f"a job in the background has not ended after {age_s:.0f} s: it touches {job.get('oldest_job')}"
        cure = "If that is on a network mount, see that it answers (`stat`). A new engine is welcome once its files were read."
        yield Finding("warning", text, cure)
    log = status.get("log") or {}
    if (errors := log.get("errors")) and _was_lately(log.get("error_age_s")):
        text = f"the daemon's log could not be written {errors:,} times (last: {log.get('last_error')})"
        cure = "Make room on the disk that stderr goes to. If it goes to a pipe whose reader has ended, restart the daemon."
        yield Finding("warning", text, cure)
    runtime = status.get("runtime") or {}
    if (filesystem := runtime.get("filesystem")) and filesystem not in IN_MEMORY and _may_capture(status):
        place = f"the runtime directory {runtime.get('dir')} is on {filesystem}, not on a tmpfs"
        cure = f"set HONED_RUNTIME_DIR to {folder_in_memory()}, for vLLM as well"
        yield Finding("warning", f"{place}: samples, which reveal prompts, reach the disk; {cure}")


def _of_events(status: dict[str, Any]) -> Iterator[Finding]:
    events, store = status.get("events") or {}, status.get("store") or {}
    if (lost := events.get("lost_rounds")) and _was_lately(events.get("loss_age_s")):
        yield Finding("error", f"{lost:,} verify rounds were lost: an engine's queue ran full")
    if (errors := store.get("errors")) and _was_lately(store.get("error_age_s")):
        last = f" (last: {store['last_error']})" if store.get("last_error") else ""
        yield Finding("error", f"the database failed {errors:,} times{last}: check the disk under the state folder")
    if (rejected := events.get("rejected_frames")) and _was_lately(events.get("rejected_age_s")):
        cure = "honed_frames_rejected_total says why. An engine with another honed version is one reason."
        yield Finding("warning", f"{rejected:,} frames of engines or trainers were not taken", cure)
    if events.get("pooled_labels"):
        text = f"all engines together send {TOO_MANY_LABELS}: the rest counts as {OTHER_WORKLOAD!r}"
        yield Finding("warning", text, FEWER_LABELS)
    if pooled := events.get("pooled_rounds"):
        text = f"the metrics count {pooled:,} rounds as workload {OTHER_WORKLOAD!r}: too many engines, workloads and versions"
        yield Finding("warning", text, "`honed workloads` has them apart. " + FEWER_LABELS)
    if cuts := status.get("cut_sums"):
        kept = ", ".join(f"{name} for {_span(back_s)}" for name, back_s in cuts.items())
        cure = "Raise store.max_rollup_bytes, or shorten store.max_age_1s_s and its like. Fewer workload labels take less."
        yield Finding("warning", f"store.max_rollup_bytes is reached, so sums are kept for less than their age: {kept}", cure)
    if (lag := events.get("lag_s") or 0.0) > LAG_S and _was_lately(events.get("batch_age_s")):
        yield Finding("warning", f"events are {lag:.1f} s old when they are stored")


def _of_engines(status: dict[str, Any]) -> Iterator[Finding]:
    engines = status.get("engines") or []
    if not engines:
        yield Finding("warning", "no engine has attached: start vLLM with what `honed vllm-args` prints")
    for engine in engines:
        name = engine.get("engine_id", "?")
        if not engine.get("connected"):
            cure = "Start vLLM. If it runs, the checks of its process here show why it doesn't reach the daemon."
            if not (is_late := _was_lately(engine.get("silent_s", 0.0))):
                cure += " If it is gone for good, it is forgotten after a day."
            yield Finding("error" if is_late else "warning", f"engine {name} is not connected", cure)
            continue
        fallback = (engine.get("policy") or {}).get("fallback") or ""
        if fallback:
            level = "error" if fallback == "error" else "warning"
            yield Finding(level, f"engine {name} {FALLBACKS.get(fallback, f'is in fallback {fallback}')}")
        is_lately = _was_lately(engine.get("loss_age_s"))
        if (missing := engine.get("missing_batches")) and is_lately:
            yield Finding("error", f"engine {name}: {missing:,} batches never arrived and weren't reported as lost")
        if (malformed := engine.get("malformed_batches")) and is_lately:
            yield Finding("error", f"engine {name}: {malformed:,} batches were inconsistent or couldn't be stored; not counted")
        if errors := engine.get("errors"):
            yield Finding("warning", f"engine {name}: {errors:,} errors of honed were caught inside vLLM: see its log")
        if pooled := engine.get("pooled_requests"):
            text = f"engine {name}: {pooled:,} requests counted as workload {OTHER_WORKLOAD!r}"
            yield Finding("warning", f"{text}: clients send {TOO_MANY_LABELS}", FEWER_LABELS)
        if nonfinite := engine.get("nonfinite_rows"):
            text = f"engine {name}: {nonfinite:,} captured rows held NaN or infinity and were dropped"
            yield Finding("warning", text, NONFINITE)
        for remark in [engine.get("note"), *(engine.get("limits") or [])]:
            if remark:
                yield Finding("warning", f"engine {name}: {remark}")


def _of_drafters(status: dict[str, Any]) -> Iterator[Finding]:
    for role, why in (status.get("drafter_problems") or {}).items():
        text = f"the {role} drafter version can't be used: {why}"
        if role == "active":
            yield Finding("error", text, "`honed rollback` goes back to a whole version, `honed promote VERSION` to any other.")
        else:
            yield Finding("warning", text, "`honed rollback` goes past it, and `honed drafters` lists the versions.")
    if why := status.get("verdict_problem"):
        yield Finding("error", why, "honed tries again every half minute, and begins no recalibration before.")


def _span(span_s: float) -> str:
    size, unit = next((one for one in ((86400, "days"), (3600, "hours")) if span_s >= 2 * one[0]), (60, "minutes"))
    return f"{span_s / size:.0f} {unit}"


def _was_lately(age_s: float | None) -> bool:
    return age_s is not None and 0.0 <= age_s < LATELY_S


def _of_training(status: dict[str, Any]) -> Iterator[Finding]:
    if status.get("trainer") is None and status.get("recalibrates") and _may_capture(status):
        yield Finding("warning", "no trainer is connected: nothing is retrained (start `honed train`)")
    trainer = status.get("trainer") or {}
    if nonfinite := trainer.get("nonfinite_rows"):
        text = f"{nonfinite:,} rows with NaN or infinity came to the trainer, which dropped them"
        yield Finding("warning", text, "Capture drops them: see that engines and trainer have the same honed version.")
    if dropped := trainer.get("dropped_updates"):
        text = f"{dropped:,} updates of the training were dropped: their loss or gradient wasn't finite"
        yield Finding("warning", text, "When many are, lower trainer.learning_rate.")
    for pattern in trainer.get("yields_to") or []:
        if (names := [e.get("engine_id", "") for e in status.get("engines") or []]) and not fnmatch.filter(names, pattern):
            text = f"trainer.yields_to names {pattern!r}, which matches no engine: training doesn't yield to it"
            yield Finding("warning", text, f"Engines are named {', '.join(names)}.")
    if rings := (status.get("trainer") or {}).get("defective_rings"):
        yield Finding(
            "warning", f"{rings:,} sample rings can't be read, or not all of them: the trainer's log has cause and cure"
        )
    if status.get("training_paused"):
        yield Finding("warning", "training is paused: `honed resume` resumes it")
    if error := (status.get("shared_registry") or {}).get("last_error"):
        yield Finding("warning", f"versions can't be shared with other hosts: {error}")
    for alarm in status.get("drift_alarms") or []:
        if (hindrance := alarm.get("hindrance")) and not alarm.get("answers"):
            yield _unanswered(alarm, hindrance)
    if not (status.get("drafters") or {}).get("active") and "active" not in (status.get("drafter_problems") or {}):
        yield Finding("warning", "no drafter version is active: the first engine whose drafter can be trained registers one")
    for override in status.get("overrides") or []:
        name, value = override.get("name"), override.get("value")
        less = _drafting_less(status, value) if name == "draft_tokens" else ""
        yield Finding("warning", f"override {name} = {value} is in force{less}: `honed override clear {name}` ends it")


def _unanswered(alarm: dict[str, Any], hindrance: str) -> Finding:
    place = f"workload {alarm.get('workload')!r} of engine {alarm.get('engine_id')} drifted"
    if not (times := alarm.get("failed_attempts") or 0):
        return Finding("warning", f"{place}, but no recalibration can start: {hindrance}")
    tried = "its recalibration failed" if times == 1 else f"{times} recalibrations of it failed"
    if (due_in_s := alarm.get("due_in_s")) is None:
        again = "No further one starts automatically: remove the cause, then `honed recalibrate`."
    else:
        again = f"Another starts in {due_in_s / 60.0:.0f} min; `honed recalibrate` starts it now."
    return Finding("warning", f"{place}, and {tried}: {hindrance}", again)


def _drafting_less(status: dict[str, Any], value: Any) -> str:
    """Engines that can't draft as many tokens as an override sets."""
    if not isinstance(value, int | float):
        return ""
    found = [
        f"engine {engine.get('engine_id')} drafts at most {most}"
        for engine in status.get("engines") or []
        if engine.get("connected") and (most := engine.get("num_spec_tokens") or 0) and value > most
    ]
    return f" ({', '.join(found)})" if found else ""


def _may_capture(status: dict[str, Any]) -> bool:
    """True if an engine captures samples, or none has attached yet."""
    engines = status.get("engines") or []
    return not engines or any("capture" in (engine.get("capabilities") or ()) for engine in engines)
