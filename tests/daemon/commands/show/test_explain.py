"""`honed explain` shows what a real controller believes, also before it believes anything."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import numpy as np
import pytest
from rich.console import Console

from honed.adapt.control.controller import EngineController
from honed.adapt.control.settings import ControllerSettings
from honed.adapt.protocol.wire import EventBatch, RoundColumns, StepColumns
from honed.daemon.commands.show.explain import bar, curve, explain

K = 3


def shown(document: dict[str, object]) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(explain(document))
    return console.export_text()


def batch(seq: int, rng: np.random.Generator, second: float = 0.5) -> EventBatch:
    count = 40
    drafted = rng.integers(0, K + 1, count)
    accepted = np.minimum((rng.random((count, K)) < [0.9, second, 0.5]).cumprod(axis=1).sum(axis=1), drafted)
    numbers = list(range(seq * count, (seq + 1) * count))
    steps = StepColumns(
        step=numbers,
        end_ns=[n * 10_000_000 for n in numbers],
        duration_us=[(5000 + 900 * int(k)) for k in drafted],
        num_requests=[1] * count,
        num_tokens=[1 + int(k) for k in drafted],
        num_prefill_tokens=[0] * count,
        num_draft_tokens=drafted.tolist(),
        context_tokens=[500] * count,
        num_drafting=drafted.tolist(),
        decision=["policy"] * count,
    )
    rounds = RoundColumns(
        step=numbers,
        request=[number // 10 for number in numbers],
        workload=[0] * count,
        position=[0] * count,
        num_draft_tokens=drafted.tolist(),
        num_accepted_tokens=accepted.tolist(),
        num_invalid_tokens=[0] * count,
        temperature=[0.0] * count,
        num_emitted=(accepted + 1).tolist(),
    )
    return EventBatch(
        engine_id="e",
        boot_id="b",
        seq=seq + 1,
        sent_unix_ns=0,
        sent_mono_ns=0,
        drafter_version="v",
        workloads=["[chat]"],
        steps=steps,
        rounds=rounds,
    )


def test_a_controller_that_has_seen_nothing_can_be_explained() -> None:
    text = shown(EngineController("e", K, 4).beliefs())
    assert "unknown yet" in text
    assert "typical requests" not in text


def steps_of(length: int, count: int) -> EventBatch:
    """A batch of steps that all drafted so much."""
    drafted, numbers = [length] * count, list(range(count))
    steps = StepColumns(
        step=numbers,
        end_ns=[n * 10_000_000 for n in numbers],
        duration_us=[5000 + 900 * length] * count,
        num_requests=[1] * count,
        num_tokens=[1 + length] * count,
        num_prefill_tokens=[0] * count,
        num_draft_tokens=drafted,
        context_tokens=[500] * count,
        num_drafting=drafted,
        decision=["cold"] * count,
    )
    return EventBatch(
        engine_id="e",
        boot_id="b",
        seq=1,
        sent_unix_ns=0,
        sent_mono_ns=0,
        drafter_version="v",
        workloads=[],
        steps=steps,
        rounds=RoundColumns(),
    )


def test_what_step_times_are_waiting_for_is_named_and_how_to_bring_it_about() -> None:
    def said() -> str:
        controller.propose(0.0)
        return " ".join(shown(controller.beliefs()).split())

    controller = EngineController("e", K, 4, ControllerSettings(explore_share=0.0))
    assert "0 steps seen, of 32 needed; lengths are fixed until then" in said()
    controller.observe(steps_of(K, 2000))
    text = said()
    assert "2,000 steps seen, all drafted 3 tokens a request" in text
    assert "controller.explore_share above 0" in text
    found = re.search(r"honed override set draft_tokens (\d) --ttl 1m", text)
    assert found is not None
    controller.observe(steps_of(int(found[1]), 10))
    assert "unknown yet" not in said(), "the cure that was named cures it"


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "Other lengths are being tried"),
        ({"mode": "static"}, "draft_tokens 1 --ttl"),
        ({"mode": "off"}, "draft_tokens 1 --ttl"),
    ],
)
def test_what_step_times_are_waiting_for_depends_on_what_is_tried(settings: dict[str, Any], says: str) -> None:
    controller = EngineController("e", K, 4, ControllerSettings(**settings))
    controller.observe(steps_of(K, 2000))
    assert "honed doesn't decide on this engine" in shown(controller.beliefs()), "it was sent no policy"
    controller.propose(0.0)
    text = " ".join(shown(controller.beliefs()).split())
    assert says in text
    assert ("lengths are fixed until then" in text) == (not settings)


def test_an_engine_without_a_controller_gets_a_sentence_and_no_empty_tables() -> None:
    text = shown({})
    assert "nothing is known about this engine yet, or it doesn't speculate" in text
    assert len(text.strip().splitlines()) == 1


def test_beliefs_are_shown_with_what_they_lead_to() -> None:
    controller, rng = EngineController("e", K, 4), np.random.default_rng(0)
    for seq in range(30):
        controller.observe(batch(seq, rng))
        controller.propose(float(seq))
    beliefs = controller.beliefs()
    text = shown(beliefs)
    assert "[chat]" in text
    plan = beliefs["draft_tokens_by_batch"][0]  # type: ignore[index]
    assert f"x {plan['speedup']:.2f}" in text
    assert "k 3" in text
    assert "policy 100.0 %" in text
    changes = beliefs["changes"]
    assert changes[0]["reason"] == "first policy"  # type: ignore[index]
    assert str(changes[-1]["reason"])[:30] in text  # type: ignore[index]


def taught(**settings: Any) -> dict[str, Any]:
    """What a controller believes that has seen lengths of all kinds."""
    controller, rng = EngineController("e", K, 4, ControllerSettings(**settings)), np.random.default_rng(0)
    for seq in range(3):
        controller.observe(batch(seq, rng))
    controller.propose(0.0)
    return controller.beliefs()


def tree_batch(seq: int, rng: np.random.Generator) -> EventBatch:
    """Trees of up to 9 nodes whose step takes 1 ms more; the chain in each is its first nodes."""
    made = batch(seq, rng)
    sizes = np.where(np.array(made.rounds.num_draft_tokens) > 0, 3 * np.array(made.rounds.num_draft_tokens), 0)
    hit = (rng.random((len(sizes), 9)) < 0.8 * 0.8 ** np.arange(9)) & (np.arange(9) < sizes[:, None])
    chain, kept = np.minimum(sizes, K), np.logical_and.accumulate(hit[:, :K], axis=1).sum(1)
    rounds = msgspec.structs.replace(
        made.rounds,
        num_draft_tokens=sizes.tolist(),
        num_accepted_tokens=hit.sum(1).tolist(),
        chain_tokens=chain.tolist(),
        chain_accepted=np.minimum(kept, chain).tolist(),
        nodes=np.nonzero(hit)[1].tolist(),
        num_emitted=(hit.sum(1) + 1).tolist(),
    )
    steps = msgspec.structs.replace(
        made.steps,
        num_tokens=(1 + sizes).tolist(),
        num_draft_tokens=sizes.tolist(),
        num_drafting=sizes.tolist(),
        duration_us=[4000 + (1000 + 100 * int(n)) * (n > 0) for n in sizes],
    )
    return msgspec.structs.replace(made, rounds=rounds, steps=steps)


def test_prices_of_chains_and_of_trees_are_shown_and_which_of_them_is_verified() -> None:
    controller, rng = EngineController("e", 9, 4, ControllerSettings(), chain_tokens=K), np.random.default_rng(0)
    for seq in range(60):
        controller.observe(tree_batch(seq, rng) if seq % 2 else batch(seq, rng))
    controller.propose(0.0)
    document = controller.beliefs()
    text = shown(document)
    assert "predicted ms of a step, by requests" in text
    assert "with draft trees, by requests" in text
    assert "nodes 9" in text
    assert "trees" in text.partition("verifies")[2]
    assert all(plan["has_trees"] for plan in document["draft_tokens_by_batch"])  # type: ignore[attr-defined]
    controller.has_trees = False
    assert "with draft trees" not in shown(controller.beliefs())


def test_lengths_that_vllm_decides_are_said_to_be_its() -> None:
    assert "honed doesn't decide" in shown(taught(mode="off"))
    assert "honed doesn't decide" not in shown(taught())


def test_an_alarm_is_shown_with_the_positions_that_it_names() -> None:
    controller, rng, alarms = EngineController("e", K, 4), np.random.default_rng(1), []
    for seq in range(60):
        alarms += controller.observe(batch(seq, rng, 0.5 if seq < 40 else 0.05))
    assert [alarm.positions for alarm in alarms] == [(2,)]
    text = " ".join(shown(controller.beliefs()).split())
    assert "acceptance of workload '[chat]' fell below its reference" in text
    assert "most at draft position 2, e-value" in text


def test_bars_are_as_long_as_their_values() -> None:
    assert curve([1.0, 0.5, 0.0]) == "█▄ "
    assert len(bar(1.0, 2.0)) * 2 == len(bar(2.0, 2.0))
    assert bar(0.0, 2.0) == ""


def test_what_acceptance_is_worth_by_depth_is_shown_where_it_isnt_taken_as_it_is() -> None:
    text = shown({"workloads": {"[chat]": {"reliability": {"by_depth": [[0.0, 1.0], [0.77, 0.59]]}}, "code": {}}})
    assert "by depth" in text
    assert ["[chat]", "+0.00", "+0.77", "1.00", "0.59"] in [line.split() for line in text.splitlines()]
    assert "by depth" not in shown({"workloads": {"[chat]": {"reliability": {"by_depth": []}}}})


def test_what_the_context_does_to_acceptance_is_shown_where_it_does_something() -> None:
    rows = [[0, 0.5], [128, 1.0], [256, 2.25]]
    text = shown({"engine": {"context_shift": []}, "workloads": {"[chat]": {"context_shift": rows}, "code": {}}})
    assert "failure odds by context length" in text
    shift = next(line for line in text.splitlines() if "2.25 256" in line)
    assert "1.00 128" in shift
    assert "context length" not in shown({"engine": {"context_shift": []}, "workloads": {"[chat]": {"context_shift": []}}})
