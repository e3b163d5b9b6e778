"""Compares a drafter's gain on two targets, base and fine-tuned, served with the same drafter.

Each class of prompts is sent by itself, with and without drafts in turns, several times:

    acceptance length   tau = 1 + accepted / rounds, by vLLM's own counters before and after
    speed-up            tokens per second with drafts / without, of the same repetition
    retained            the tuned target's figure / the base's

The baseline without drafts uses requests that ask honed for none (`honed_max_draft_tokens` 0), or a server of the same target
started without speculation. vLLM's V2 model runner drafts even if nothing is verified, so its baseline needs such a server.
The servers must have no other load meanwhile, since counters cover all requests; other load is detected and reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from honed.daemon.calibration.prompts_file import Prompt, classes, digest
from honed.daemon.calibration.served_target import Counters, Played, Sampling, ServedTarget, TargetError
from honed.daemon.client.client import EXIT_USAGE

Document = dict[str, Any]

WORKLOAD = "retention"
ALL = ""
"""Name of the row for all classes together."""
NONE = "(none)"
"""Class of unclassified prompts if others have a class."""
SAME_SHARE = 0.05
"""Acceptance lengths are incomparable if draft lengths differ by more."""


@dataclass(frozen=True)
class Servers:
    """One target: its server and, if there is one, its server without speculation."""

    name: str
    target: ServedTarget
    plain: ServedTarget | None = None


@dataclass
class ClassFigures:
    """Counts and times of one class on one target; a run is (tokens, seconds)."""

    num_prompts: int = 0
    counters: Counters = field(default_factory=Counters)
    drafted: list[tuple[int, float]] = field(default_factory=list)
    plain: list[tuple[int, float]] = field(default_factory=list)

    def view(self) -> Document:
        """JSON form; unknown values: None."""
        rounds, drafted = self.counters.rounds, _speeds(self.drafted)
        # A speed-up needs both runs of the same repetition.
        plain = _speeds(self.plain) if len(self.plain) == len(self.drafted) else []
        pairs = zip(drafted, plain, strict=True) if plain else ()
        return {
            "prompts": self.num_prompts,
            "rounds": rounds,
            "draft_tokens_per_round": self.counters.draft_tokens / rounds if rounds else None,
            "acceptance_length": 1.0 + self.counters.accepted_tokens / rounds if rounds else None,
            "tokens_per_s": _median(drafted),
            "tokens_per_s_without": _median(plain),
            "speedup": spread([fast / slow for fast, slow in pairs if slow]) if self.counters.draft_tokens else None,
        }


def _speeds(runs: Sequence[tuple[int, float]]) -> list[float]:
    return [tokens / seconds if seconds else 0.0 for tokens, seconds in runs]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def spread(values: Sequence[float]) -> Document | None:
    """Median, lowest and highest; None without values."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)} if values else None


class Measurement:
    """Sends prompts to targets and keeps the figures."""

    def __init__(self, prompts: Sequence[Prompt], sampling: Sampling, concurrency: int) -> None:
        self._sampling, self._concurrency = sampling, concurrency
        without = NONE if len(classes(prompts)) > 1 else ALL
        self._classes: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            self._classes.setdefault(prompt.name or without, []).append(prompt)
        self._digest = digest(prompts)
        self._figures: dict[str, dict[str, ClassFigures]] = {}
        self.notes: list[str] = []

    @property
    def num_prompts(self) -> int:
        """Prompts of one pass."""
        return sum(map(len, self._classes.values()))

    def run(self, servers: Sequence[Servers], repeats: int, on_reply: Callable[[], None] = lambda: None) -> dict[str, Document]:
        """Measure all targets in turns, equally often; documents by name. Raises TargetError."""
        for one in servers:
            self._figures[one.name] = {name: ClassFigures(len(found)) for name, found in self._classes.items()}
            for server in (one.target, one.plain):
                if server is not None:  # warm-up: compiling and loading must not be timed
                    self._play(server, self._first(), 0, lambda: None)
        for repetition in range(repeats):
            # The first run finds a cooler machine, so the order alternates.
            for one in servers if repetition % 2 == 0 else servers[::-1]:
                for name, found in self._classes.items():
                    for is_drafted in (True, False) if repetition % 2 == 0 else (False, True):
                        self._measure(one, name, found, is_drafted, on_reply)
        return {one.name: self._document(one) for one in servers}

    def _first(self) -> list[Prompt]:
        return [found[0] for found in self._classes.values()]

    def _measure(
        self, one: Servers, name: str, prompts: Sequence[Prompt], is_drafted: bool, on_reply: Callable[[], None]
    ) -> None:
        figures = self._figures[one.name][name]
        if is_drafted:
            played, counted = self._counted(one.target, prompts, -1, on_reply)
            figures.counters += counted
            figures.drafted.append((played.completion_tokens, played.seconds))
            if not counted.draft_tokens:
                self._note(
                    f"{one.target.url} drafted nothing, so there is no speed-up: check its --speculative-config, "
                    "and that no override forbids drafts (`honed override list`)"
                )
            return
        played, counted = self._counted(one.plain or one.target, prompts, 0, on_reply)
        if counted.rounds:
            where = (one.plain or one.target).url
            self._note(f"{where} ignores draft limits, so the speed without drafts is unknown: is honed attached to it?")
        else:
            figures.plain.append((played.completion_tokens, played.seconds))

    def _counted(
        self, server: ServedTarget, prompts: Sequence[Prompt], draft_tokens: int, on_reply: Callable[[], None]
    ) -> tuple[Played, Counters]:
        before = server.counters()
        played = self._play(server, prompts, draft_tokens, on_reply)
        counted = server.counters() - before
        if counted.generated_tokens != played.completion_tokens:
            self._note(f"{server.url} served others meanwhile: its counters and times include their requests")
        return played, counted

    def _play(self, server: ServedTarget, prompts: Sequence[Prompt], draft_tokens: int, on_reply: Callable[[], None]) -> Played:
        def labels(prompt: Prompt) -> Mapping[str, str | int]:
            own: dict[str, str | int] = {"honed_workload": prompt.name or WORKLOAD, "honed_capture": 0}
            return own if draft_tokens < 0 else own | {"honed_max_draft_tokens": draft_tokens}

        played = server.play(prompts, self._sampling, labels, concurrency=self._concurrency, on_reply=lambda reply: on_reply())
        if played.errors:
            raise TargetError(f"{len(played.errors)} of {len(prompts)} prompts failed; the first: {played.errors[0]}")
        return played

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _document(self, one: Servers) -> Document:
        by_class = self._figures[one.name]
        rows = {name: figures.view() for name, figures in by_class.items()}
        if ALL not in rows:
            rows = {ALL: _together(list(by_class.values())).view()} | rows
        return {
            "url": one.target.url,
            "model": one.target.model,
            "prompts": self._digest,
            "sampling": self._sampling.body(),
            "concurrency": self._concurrency,
            "classes": rows,
        }


def _together(parts: Sequence[ClassFigures]) -> ClassFigures:
    """All classes as one: adds the counts and the runs of each repetition."""
    whole = ClassFigures()
    for part in parts:
        whole.num_prompts += part.num_prompts
        whole.counters += part.counters
    for name in ("drafted", "plain"):
        runs = [getattr(part, name) for part in parts]
        if len({len(one) for one in runs}) == 1:
            setattr(whole, name, [(sum(t for t, _ in turn), sum(s for _, s in turn)) for turn in zip(*runs, strict=True)])
    return whole


def compare(base: Document, tuned: Document) -> list[Document]:
    """Share of the base's figures that the tuned target keeps, by class; None if the base has none.

    Raises:
        TargetError: they were measured with different prompts or sampling.
    """
    for name in ("prompts", "sampling", "concurrency"):
        if base.get(name) != tuned[name]:
            raise TargetError(
                f"base and tuned target were measured with different {name} ({base.get(name)} and {tuned[name]})",
                cure="Measure both with the same prompts and options.",
                exit_code=EXIT_USAGE,
            )
    rows = []
    for name, now in tuned["classes"].items():
        was = base["classes"].get(name, ClassFigures().view())
        speedups = [(one["speedup"] or {}).get("median") for one in (was, now)]
        rows.append(
            {
                "class": name,
                "acceptance_length_retained": _ratio(now["acceptance_length"], was["acceptance_length"]),
                "speedup_retained": _ratio(speedups[1], speedups[0]),
            }
        )
    return rows


def length_note(base: Document, tuned: Document) -> str:
    """Note if draft lengths differ too much to compare acceptance lengths; else ""."""
    for name, now in tuned["classes"].items():
        was = base["classes"].get(name, ClassFigures().view())
        ratio = _ratio(now["draft_tokens_per_round"], was["draft_tokens_per_round"])
        if ratio is not None and abs(ratio - 1.0) > SAME_SHARE:
            return "draft lengths differ, so acceptance lengths can't be compared: --draft-tokens fixes the length meanwhile"
    return ""


def _ratio(now: float | None, was: float | None) -> float | None:
    return now / was if now is not None and was else None
