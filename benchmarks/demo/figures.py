"""The demo's arithmetic: figures of a phase, the result, the promises, the settings file. Pure: documents in and out."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from benchmarks.server.vllm_server import Counters

Document = dict[str, Any]

MIN_GAIN_B = 1.25
"""Required growth of B's acceptance length."""
MIN_KEPT_A = 0.97
"""Required remaining share of A's."""
MIN_GAIN_OF_TREES = 1.1
"""Required acceptance length of trees over that of chains, of the same drafter."""
SPEEDS = {"a": "reference_a", "b": "reference_traffic_b", "b_tuned": "traffic_b", "b_healed": "traffic_b_after"}
"""Figure -> the phase that it is of. The first two are vLLM alone, which always drafts 7 tokens."""
FEW_STEPS = 1200
"""With fewer micro-steps no such gain is promised."""


def honed_figures(before: Document, after: Document) -> Document:
    """Compute rounds, tokens, and conditional acceptance by position that honed stored between two views of an engine.

    A round that drafts k tokens has tried position j ≤ k only if the drafts before j were accepted: tried_1 = drafted_1,
    tried_j ≈ min(drafted_j, accepted_{j−1}), exact while k doesn't change within the phase.
    """
    drafts, draft_tokens, accepted = (after[k] - before.get(k, 0) for k in ("rounds", "draft_tokens", "accepted_tokens"))
    drafted = _difference(before, after, "drafted_by_position")
    accepted_at = _difference(before, after, "accepted_by_position")
    tried = [min(d, a) for d, a in zip(drafted, [drafts, *accepted_at], strict=False)]
    length = 1 + accepted / drafts if drafts else 0.0
    honed = {"drafts": drafts, "draft_tokens": draft_tokens, "accepted_tokens": accepted, "acceptance_length": length}
    return {"honed": honed, "by_position": [a / t for a, t in zip(accepted_at, tried, strict=True) if t]}


def drafted_share(phase: Document) -> float:
    """Share of a phase's output from rounds with drafts; the rest is from steps in which a request had none."""
    counted = phase["vllm"]
    return min((counted["drafts"] + counted["accepted_tokens"]) / phase["tokens"], 1.0) if phase.get("tokens") else 0.0


def result_of(phases: list[Document], engine: Document, totals: Counters, operation: Document) -> Document:
    """The last line of the demo."""
    length = {p["key"]: p["vllm"]["acceptance_length"] for p in phases}
    detail = operation.get("detail") or {}
    keys = ("a_before", "b_before", "b_after", "a_after", "b_trees")
    speed = {p["key"]: p.get("tokens_per_s", 0.0) for p in phases}
    return {
        "tokens_per_s": {name: round(speed.get(key, 0.0), 1) for name, key in SPEEDS.items()},
        "speedup": {
            "tuned": round(_ratio(speed.get("traffic_b", 0.0), speed.get("reference_traffic_b", 0.0)), 3),
            "healed": round(_ratio(speed.get("traffic_b_after", 0.0), speed.get("reference_traffic_b_after", 0.0)), 3),
        },
        "acceptance_length": {key: round(length.get(key, 0.0), 4) for key in keys},
        "verify_rounds_logged": engine["rounds"],
        "verify_rounds_lost": engine["lost_rounds"],
        "vllm_num_drafts": totals.drafts,
        "draft_tokens_logged": engine["draft_tokens"],
        "vllm_num_draft_tokens": totals.draft_tokens,
        "accepted_tokens_logged": engine["accepted_tokens"],
        "vllm_num_accepted_tokens": totals.accepted_tokens,
        "swap_pause_ms": _rounded(detail.get("pause_ms"), 3),
        "train_seconds": _rounded(detail.get("train_seconds"), 1),
        "requests_failed": sum(p["failed"] for p in phases),
        "greedy_identical": all(p["identical"] for p in phases if "identical" in p),
        "requests_compared": sum(p["requests"] for p in phases if "identical" in p),
    }


def headline(result: Document) -> str:
    """What drift costs and what honed brings back, in tokens per second."""
    speed, gain = result["tokens_per_s"], result["speedup"]
    return (
        f"Tokens per second: {speed['a']:.0f} on the old workload; the new one brings vLLM alone to {speed['b']:.0f}. "
        f"With honed: {speed['b_tuned']:.0f} by drafting less (× {gain['tuned']:.2f} on the same prompts), "
        f"{speed['b_healed']:.0f} with the retrained drafter (× {gain['healed']:.2f} on the same prompts)."
    )


def promises_of(result: Document, operation: Document, is_same_process: bool) -> list[Document]:
    """List each promise, its measured value, and whether it was kept."""
    length = result["acceptance_length"]
    pairs = [
        ("verify rounds", "verify_rounds_logged", "vllm_num_drafts"),
        ("draft tokens", "draft_tokens_logged", "vllm_num_draft_tokens"),
        ("accepted tokens", "accepted_tokens_logged", "vllm_num_accepted_tokens"),
    ]
    counts = ", ".join(f"{result[ours]:,} of {result[theirs]:,} {name}" for name, ours, theirs in pairs)
    are_equal = all(result[ours] == result[theirs] for _, ours, theirs in pairs) and not result["verify_rounds_lost"]
    is_swapped = operation.get("state") == "succeeded" and result["swap_pause_ms"] is not None
    gain_b, kept_a = _ratio(length["b_after"], length["b_before"]), _ratio(length["a_after"], length["a_before"])
    trees = _ratio(length["b_trees"], length["b_after"])
    gained = f"{gain_b:.3f}" + (_too_few_steps(operation) if gain_b < MIN_GAIN_B else "")
    compared = f"{result['requests_compared']:,} answers"
    identical = f"{compared} are equal, token by token" if result["greedy_identical"] else f"of {compared} NOT all are equal"
    swapped = "swapped, same process" if is_swapped and is_same_process else operation.get("error") or "not swapped"
    return [
        _promise(f"the new workload gains: B after / before ≥ {MIN_GAIN_B}", gained, gain_b >= MIN_GAIN_B),
        _promise(f"the old one doesn't suffer: A after / before ≥ {MIN_KEPT_A}", f"{kept_a:.3f}", kept_a >= MIN_KEPT_A),
        _promise(
            f"trees accept more: B with trees / B after ≥ {MIN_GAIN_OF_TREES}", f"{trees:.3f}", trees >= MIN_GAIN_OF_TREES
        ),
        _promise("every verify round is logged once", counts, are_equal),
        _promise("greedy output is that of vLLM alone", identical, result["greedy_identical"]),
        _promise("no request fails", f"{result['requests_failed']} failed", not result["requests_failed"]),
        _promise("the drafter is swapped without a restart", str(swapped), is_swapped and is_same_process),
    ]


def shell_line(name: str, environment: dict[str, str], words: list[str]) -> str:
    """Format a command for pasting into a shell, below its name."""
    variables = [f"{variable}={shlex.quote(value)}" for variable, value in environment.items()]
    return f"# {name}\n" + " ".join([*variables, shlex.join(words)])


def toml(sections: Document) -> str:
    """Format a settings file: sections of plain values."""
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{name} = {json.dumps(str(v) if isinstance(v, Path) else v)}" for name, v in values.items()]
        lines.append("")
    return "\n".join(lines)


def _difference(before: Document, after: Document, key: str) -> list[int]:
    then = before.get(key) or []
    return [now - (then[i] if i < len(then) else 0) for i, now in enumerate(after.get(key) or [])]


def _promise(text: str, found: str, kept: bool) -> Document:
    return {"text": text, "found": found, "kept": bool(kept)}


def _too_few_steps(operation: Document) -> str:
    """Explain a missing gain if a slow or busy machine's clock cut training short."""
    detail = operation.get("detail") or {}
    steps, seconds = detail.get("steps") or 0, detail.get("train_seconds") or 0.0
    if not 0 < steps < FEW_STEPS:
        return ""
    longer = f"make demo TRAIN_SECONDS={round(4 * seconds, -1):.0f}"
    return (
        f"; only {steps:,} micro-steps fitted into {seconds:.0f} s of training, too few to learn from: repeat it on an idle "
        f"machine, or with `{longer}`"
    )


def _ratio(after: float, before: float) -> float:
    return after / before if before else 0.0


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(float(value), digits)
