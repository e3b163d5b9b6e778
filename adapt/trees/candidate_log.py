"""Log of drafters' candidates: each request's emitted tokens, and the drafter's candidates at each depth of some positions.

It has JSON lines, one request a line: a writer appends a line when a request is over, and a torn last line costs only that
request:

    {"request": "9f…", "workload": "chat", "temperature": 0.8, "first_position": 64, "tokens": [17, 4, …],
     "positions": [64, 66, …], "candidates": [[[17, 3, …], …], …], "log_probs": [[[-0.11, -2.4, …], …], …]}

`tokens[i]` is the target's token at position `first_position + i`, greedy or sampled by `temperature`. Position p of
`positions` is that of the first drafted token: depth d of its candidates is for position p + d − 1. `candidates` and
`log_probs` are [P, D, m], most likely first, with the drafter's log-probabilities at temperature 1.

A log made by running a drafter over finished texts has every position; a running engine's log has those where a round began.
Request ids are keyed hashes, but tokens and candidates are text: protect the file as you would protect prompts.

Letters: T = tokens emitted, P = positions, D = depths, m = candidates a depth.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, TypeAlias

import msgspec
import numpy as np

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.trees.node_scores import UNKNOWN


class CandidateLogError(ValueError):
    """An invalid line; the text names the line and the defect."""


Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class CandidateLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line as written."""

    request: str
    tokens: list[Int64]
    positions: list[Int64]
    candidates: list[list[list[Int64]]]
    log_probs: list[list[list[float]]]
    first_position: Int64 = 0
    workload: str = "default"
    temperature: float = 0.0


@dataclass(frozen=True, eq=False)
class CandidateRequest:
    """One request's text and candidates."""

    request: str
    workload: str
    temperature: float
    tokens: Ints  # [T]
    starts: Ints  # [P] index into `tokens` of the first drafted token, ascending
    candidates: Ints  # [P, D, m]
    log_probs: Floats  # [P, D, m]
    first_position: int = 0
    """Tokens before the emitted ones."""

    @cached_property
    def taken(self) -> Ints:
        """Rank of the text's token among the candidates, [P, D]; m: none of them, UNKNOWN: the text ends before."""
        index = self.starts[:, None] + np.arange(self.candidates.shape[1])
        is_known = index < len(self.tokens)
        token = self.tokens[np.minimum(index, len(self.tokens) - 1)]
        is_same = self.candidates == token[:, :, None]
        rank = np.where(is_same.any(axis=2), is_same.argmax(axis=2), self.candidates.shape[2])
        return np.where(is_known, rank, UNKNOWN)

    @cached_property
    def row_at(self) -> Ints:
        """Row of the first position at or after each index of `tokens`; P where there is none, [T]."""
        return np.searchsorted(self.starts, np.arange(len(self.tokens))).astype(np.int64)


def render_line(request: CandidateRequest) -> bytes:
    """Write a request as a line; log-probabilities with four decimals."""
    line = CandidateLine(
        request=request.request,
        workload=request.workload,
        temperature=request.temperature,
        first_position=request.first_position,
        tokens=request.tokens.tolist(),
        positions=(request.starts + request.first_position).tolist(),
        candidates=request.candidates.tolist(),
        log_probs=np.round(np.maximum(request.log_probs, -99.0), 4).tolist(),
    )
    return msgspec.json.encode(line) + b"\n"


def read_candidates(lines: Iterable[bytes], notes: list[str] | None = None) -> list[CandidateRequest]:
    """Read a log; skip empty lines and requests without a position.

    Args:
        lines: with their ends: a torn last line is left out.
        notes: gets a note about it.

    Raises:
        CandidateLogError: a line is invalid (the first one is named), or no request has candidates.
    """
    decoder = msgspec.json.Decoder(CandidateLine)
    requests: list[CandidateRequest] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            request = _request(decoder.decode(line))
        except (ValueError, msgspec.MsgspecError) as error:
            if _is_torn(line, error):
                torn = f"line {number} is torn and was left out; its writer may have been stopped"
                (notes if notes is not None else []).append(torn)
                continue
            raise CandidateLogError(f"line {number}: {error}") from error
        if len(request.starts):
            requests.append(request)
    if not requests:
        raise CandidateLogError("no request has candidates")
    for axis, what in ((1, "depths"), (2, "numbers of candidates")):
        found = sorted({request.candidates.shape[axis] for request in requests})
        if len(found) > 1:
            listed = ", ".join(map(str, found))
            raise CandidateLogError(f"requests have different {what} ({listed}): give one drafter's log at a time")
    return requests


def _is_torn(line: bytes, error: Exception) -> bool:
    is_whole = isinstance(error, msgspec.ValidationError) or not isinstance(error, msgspec.DecodeError)
    return not is_whole and not line.endswith(b"\n")


def _request(line: CandidateLine) -> CandidateRequest:
    tokens = np.array(line.tokens, dtype=np.int64)
    starts = np.array(line.positions, dtype=np.int64) - line.first_position
    try:
        candidates, log_probs = np.array(line.candidates, dtype=np.int64), np.array(line.log_probs, dtype=np.float64)
    except ValueError as error:
        raise ValueError("candidates and log_probs must be tables of [positions, depths, candidates]") from error
    if not len(starts):
        return CandidateRequest(line.request, line.workload, line.temperature, tokens, starts, candidates, log_probs)
    if candidates.ndim != 3 or candidates.shape != log_probs.shape or len(candidates) != len(starts) or not candidates.size:
        raise ValueError(
            f"candidates {list(candidates.shape)} and log_probs {list(log_probs.shape)} must both be "
            f"[{len(starts)} positions, depths, candidates]"
        )
    if (np.diff(starts) <= 0).any() or starts[0] < 0 or starts[-1] >= len(tokens):
        raise ValueError(f"positions must rise and lie within the {len(tokens)} tokens from {line.first_position} on")
    if not (log_probs <= 1e-6).all() or (log_probs[:, :, 1:] > log_probs[:, :, :-1]).any():
        raise ValueError("log_probs must be numbers ≤ 0, most likely first")
    if not 0.0 <= line.temperature < float("inf"):
        raise ValueError(f"temperature must be a finite number ≥ 0, not {line.temperature}")
    return CandidateRequest(
        line.request, line.workload, line.temperature, tokens, starts, candidates, log_probs, line.first_position
    )
