"""Calibrates a drafter from nothing: an operator's prompts replace traffic that hasn't come yet.

    tokenise     each prompt by the server's own /tokenize; too long prompts are left out, too little text is refused
    collect      the prompts are sent with every request captured (an override that ends by itself); the hidden states come
                 from the serving engine, through the same ring as live traffic's
    recalibrate  the trainer trains, compares on held-out sessions and registers; then the version has a trial like any other

The prompts are sent before the recalibration starts, so its time limit covers training only. This module only talks to the
served target and the daemon; it trains nothing. It checks what each step needs before sending the first prompt.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from honed.daemon.calibration.prompts_file import Prompt
from honed.daemon.calibration.served_target import Played, Reply, Sampling, ServedTarget
from honed.daemon.client.client import EXIT_FAILED, EXIT_USAGE, FINISHED, AdminClient, part
from honed.daemon.client.held_override import Held
from honed.daemon.errors import START_TRAINER

View = dict[str, Any]

WORKLOAD = "calibration"
"""Label of prompts without a class."""
REGISTERED = ("canary", "swapping", "watching", "done")
"""Stages of an operation whose version is in the registry."""
MAX_FAILED_SHARE = 0.1
MOST_FAILING = 0.01
"""Chance that too few sessions are held out of the fewest that are accepted."""
STUCK_S = 60.0
"""Collecting for this long after all prompts were answered: no more will come."""
STEADY_S, STEADY_TIMES = 1.2, 25
"""Engines report their captured rows once a second."""


class CalibrationError(RuntimeError):
    """Calibrating failed; `cure` says what to do."""

    def __init__(self, message: str, *, cure: str = "", exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.cure = cure
        self.exit_code = exit_code


@dataclass(frozen=True)
class Needed:
    """A training's needs by the daemon's settings, and the engine's kind of captures."""

    scope: str
    min_tokens: int
    min_sessions: int
    held_out_share: float


@dataclass(frozen=True)
class Fitting:
    """The prompts that the server can answer, with their token counts."""

    prompts: list[Prompt]
    tokens: int
    too_long: list[int] = field(default_factory=list)
    """Line numbers of the others."""


@dataclass(frozen=True)
class Collected:
    """Sent prompts and captured samples."""

    engine_id: str
    captured_rows: int
    lost_records: int
    """Samples that the ring overwrote before the trainer read them."""
    played: Played

    def view(self) -> View:
        """JSON."""
        played = self.played
        return {
            "engine_id": self.engine_id,
            "captured_rows": self.captured_rows,
            "lost_records": self.lost_records,
            "prompts": len(played.replies),
            "failed": len(played.errors),
            "prompt_tokens": played.prompt_tokens,
            "completion_tokens": played.completion_tokens,
            "seconds": round(played.seconds, 2),
        }


def look(client: AdminClient, engine_id: str, scope: str) -> Needed:
    """Check that a recalibration is possible at all. Raises CalibrationError, AdminError."""
    status, config = client.get("/v1/status"), client.get("/v1/config")
    engines = [one for one in status["engines"] if one["connected"] and engine_id in ("", one["engine_id"])]
    capturing = [one for one in engines if "capture" in one["capabilities"]]
    if not capturing:
        which = f"engine {engine_id!r}" if engine_id else "an engine"
        raise CalibrationError(
            f"{which} that captures samples must be connected" + "".join(f"; {one}" for e in engines for one in e["limits"]),
            cure="Start vLLM with what `honed vllm-args` prints; `honed engines` and `honed doctor` show the problem.",
        )
    if status["trainer"] is None:
        raise CalibrationError("no trainer is connected", cure=START_TRAINER)
    if status["training_paused"]:
        raise CalibrationError("training is paused", cure="`honed resume`")
    running = status["operation"] or status["canary"]
    if running:
        named = running["operation_id"]
        raise CalibrationError(f"operation {named} is running", cure=f"Wait for its end, or `honed cancel {named}`.")
    captures = {one["captures"] for one in capturing}
    if scope == "full" and captures == {"fused"}:
        raise CalibrationError(
            "the engine captures fused features, which scope 'full' can't train on",
            cure="Start vLLM with HONED_FEATURES=layers in its environment, or use --scope kv-frozen.",
        )
    return Needed(
        scope or ("full" if captures == {"layers"} else "kv-frozen"),
        int(config["trainer"]["min_training_tokens"]),
        int(config["gate"]["min_sessions"]),
        float(config["trainer"]["held_out_share"]),
    )


def fitting(
    target: ServedTarget, prompts: Sequence[Prompt], max_tokens: int, on_prompt: Callable[[], None] = lambda: None
) -> Fitting:
    """Tokenise the prompts and leave out those that don't fit the server's context. Raises TargetError, CalibrationError."""
    kept, tokens, too_long, longest = [], 0, [], 0
    for prompt in prompts:
        count, longest = target.count_tokens(prompt)
        if count + max_tokens > longest:
            too_long.append(prompt.line)
        else:
            kept.append(prompt)
            tokens += count
        on_prompt()
    if not kept:
        raise CalibrationError(
            f"no prompt fits the server's {longest:,} tokens with {max_tokens:,} to generate",
            cure="Lower --max-tokens, or use shorter prompts.",
            exit_code=EXIT_USAGE,
        )
    return Fitting(kept, tokens, too_long)


def check_enough(found: Fitting, max_tokens: int, needed: Needed) -> None:
    """Refuse too few prompts for training and comparison. Raises CalibrationError."""
    sessions = len({prompt.session for prompt in found.prompts})
    tokens = int(len(found.prompts) * (max_tokens - 1) * (1.0 - needed.held_out_share))  # vLLM computes no row of the last
    if tokens < needed.min_tokens:
        raise CalibrationError(
            f"{len(found.prompts)} prompts give at most {tokens:,} tokens for training, {needed.min_tokens:,} are needed",
            cure="Give more prompts, or a larger --max-tokens; trainer.min_training_tokens is the minimum.",
            exit_code=EXIT_USAGE,
        )
    if needed.held_out_share <= 0.0:
        raise CalibrationError(
            "no session is held out, so nothing can be compared",
            cure="Set trainer.held_out_share above 0.",
            exit_code=EXIT_USAGE,
        )
    least = sessions_for(needed.min_sessions, needed.held_out_share)
    if sessions < least:
        raise CalibrationError(
            f"of {sessions} sessions about {needed.held_out_share:.0%} are held out, by a hash; a comparison needs "
            f"{needed.min_sessions}, which fewer than {least} sessions may not give",
            cure=f"Give prompts of at least {least} sessions; each prompt is a session unless its line names one.",
            exit_code=EXIT_USAGE,
        )


def sessions_for(held_out: int, share: float) -> int:
    """Sessions of which so many are held out with a probability of 99 %, each with this share as its own."""

    def fails(count: int) -> float:
        return sum(math.comb(count, k) * share**k * (1.0 - share) ** (count - k) for k in range(held_out))

    return next(count for count in itertools.count(math.ceil(held_out / share)) if fails(count) <= MOST_FAILING)


def labels(prompt: Prompt) -> Mapping[str, str | int]:
    """A request's labels for honed."""
    return {"honed_workload": prompt.name or WORKLOAD, "honed_session": prompt.session}


def collect(
    client: AdminClient,
    target: ServedTarget,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    *,
    concurrency: int,
    engine_id: str = "",
    on_reply: Callable[[Reply], None] = lambda reply: None,
) -> Collected:
    """Send the prompts while every request is captured. Raises CalibrationError, TargetError, AdminError."""
    before, lost_before = captured_rows(client), _lost_records(client)
    with Held(client, "capture_share", 1.0, f"calibrate: {len(prompts)} prompts") as held:

        def answered(reply: Reply) -> None:
            held.renew()
            on_reply(reply)

        played = target.play(prompts, sampling, labels, concurrency=concurrency, on_reply=answered)
    errors = played.errors
    if len(errors) > MAX_FAILED_SHARE * len(prompts):
        raise CalibrationError(f"{len(errors)} of {len(prompts)} prompts failed; the first: {errors[0]}")
    grown = {one: rows - before.get(one, 0) for one, rows in _steady_rows(client).items() if engine_id in ("", one)}
    best = max(grown, key=lambda one: grown[one], default="")
    if not best or grown[best] <= 0:
        raise CalibrationError(
            f"nothing was captured while {target.url} answered {len(prompts) - len(errors)} prompts",
            cure="Check that honed is attached to it (`honed engines`) and that HONED_CAPTURE isn't 0.",
        )
    return Collected(best, grown[best], _lost_records(client) - lost_before, played)


def captured_rows(client: AdminClient) -> dict[str, int]:
    """Rows captured by each connected engine since its start."""
    return {one["engine_id"]: one["captured_rows"] for one in client.get("/v1/engines") if one["connected"]}


def _lost_records(client: AdminClient) -> int:
    trainer = client.get("/v1/status")["trainer"] or {}
    return int(trainer.get("lost_records", 0))


def _steady_rows(client: AdminClient) -> dict[str, int]:
    last = captured_rows(client)
    for _ in range(STEADY_TIMES):
        time.sleep(STEADY_S)
        if (now := captured_rows(client)) == last:
            break
        last = now
    return last


def ask(client: AdminClient, engine_id: str, scope: str, max_seconds: float | None, reason: str) -> str:
    """Start the recalibration; return its operation's id. All sessions together must gain, and no class may lose."""
    body: View = {"engine_id": engine_id, "scope": scope, "reason": reason or "calibrate"}
    view = client.post("/v1/recalibrations", body if max_seconds is None else body | {"max_seconds": max_seconds})
    return str(view["operation_id"])


def until_registered(
    client: AdminClient, views: Iterable[View], monotonic: Callable[[], float] = time.monotonic
) -> Iterator[View]:
    """Yield the operation's views until its version is in the registry, or it has ended without one.

    Raises:
        CalibrationError: collecting doesn't end; the operation is cancelled.
    """
    since_s: float | None = None
    for view in views:
        yield view
        detail = view.get("detail") or {}
        if view["state"] in FINISHED or (view["stage"] in REGISTERED and detail.get("version")):
            return
        is_collecting = view["stage"] == "collecting" and detail.get("state") == "collecting"
        if not is_collecting:
            since_s = None
        elif since_s is None:
            since_s = monotonic()
        elif monotonic() - since_s > STUCK_S:
            named = view["operation_id"]
            client.post(f"/v1/operations/{part(named)}:cancel", {"reason": "calibrate: too little was captured"})
            raise CalibrationError(
                "too little was captured for training and comparison",
                cure="Give more prompts or a larger --max-tokens. Loops and texts under trainer.min_rows tokens don't count.",
            )


def promote(client: AdminClient, version: str, reason: str) -> str:
    """Swap a version in at once, without trial or monitoring; return the operation's id. Raises AdminError."""
    view = client.post(f"/v1/drafters/{part(version)}:promote", {"reason": reason or "calibrate", "force": True})
    return str(view["operation_id"])
