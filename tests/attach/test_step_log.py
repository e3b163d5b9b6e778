"""Steps become columns, and nothing of a step gets lost on the way."""

from __future__ import annotations

from honed.attach.outbox import Losses
from honed.attach.request_book import Tracked
from honed.attach.step_log import BatchBuilder, Round, Step, StepLog, losses_of


def a_round(workload: str = "a", k: int = 3, accepted: int = 2, tokens: bool = False) -> Round:
    emitted = [7, 8, 9][: accepted + 1] if tokens else []
    return Round(Tracked(11, workload, 0.5), 40, k, accepted, 0, accepted + 1, emitted, [7, 8, 5][:k] if tokens else [])


def a_step(number: int, version: str = "v1", rounds: list[Round] | None = None) -> Step:
    return Step(number, 1000 * number, 50, 1, 4, 0, 3, 40, 7, "policy", version, rounds if rounds is not None else [a_round()])


def test_columns_have_one_entry_a_step_and_a_round() -> None:
    first = [a_round("a", tokens=True), a_round("b", k=1, accepted=0, tokens=True)]
    steps = [a_step(1, rounds=first), a_step(2, rounds=[a_round("a")])]
    builder = BatchBuilder()
    for step in steps:
        builder.add(step)
    workloads, step_columns, rounds = builder.take()
    assert workloads == ["a", "b"]
    assert step_columns.step == [1, 2]
    assert rounds.step == [1, 1, 2]
    assert rounds.workload == [0, 1, 0]
    assert rounds.request == [11, 11, 11]
    assert rounds.temperature == [0.5, 0.5, 0.5]
    assert rounds.num_emitted == [3, 1, 3]
    assert rounds.emitted == [7, 8, 9, 7]
    assert rounds.draft == [7, 8, 5, 7]
    assert all(len(getattr(step_columns, f)) == 2 for f in step_columns.__struct_fields__)


def test_one_batch_has_one_drafter_version_and_a_builder_starts_anew() -> None:
    builder = BatchBuilder()
    for number in (1, 2):
        assert builder.fits(a_step(number, "v1"))
        builder.add(a_step(number, "v1"))
    assert not builder.fits(a_step(3, "v2"))
    assert builder.drafter_version == "v1"
    assert builder.take()[1].step == [1, 2]
    assert builder.num_steps == 0
    assert builder.fits(a_step(3, "v2"))
    builder.add(a_step(3, "v2", rounds=[a_round("z")]))
    workloads, steps, rounds = builder.take()
    assert (workloads, steps.step, rounds.workload) == (["z"], [3], [0])


def test_a_batch_is_bounded_but_a_big_step_still_goes() -> None:
    builder = BatchBuilder()
    big = a_step(1, rounds=[a_round()] * (BatchBuilder.MAX_ROUNDS + 1))
    assert builder.fits(big)
    builder.add(big)
    assert builder.is_full
    assert not builder.fits(a_step(2))
    builder.take()
    for number in range(BatchBuilder.MAX_STEPS):
        builder.add(a_step(number, rounds=[]))
    assert builder.is_full
    assert not builder.fits(a_step(2))


def test_a_full_log_counts_what_it_refuses() -> None:
    log = StepLog(max_steps=1)
    log.append(a_step(1))
    log.append(a_step(2, rounds=[a_round(k=3, accepted=2), a_round(k=0, accepted=0)]))
    assert log.lost == Losses(rounds=1, draft_tokens=3, accepted_tokens=2)
    assert log.take() == a_step(1)
    assert log.take() is None


def test_what_a_batch_holds_is_counted_as_vllm_counts() -> None:
    struck_out = a_round(k=3, accepted=1)._replace(num_invalid_tokens=2)
    rounds = [a_round(k=3, accepted=2), struck_out, a_round(k=0, accepted=0)]
    assert losses_of(rounds) == Losses(rounds=2, draft_tokens=4, accepted_tokens=3)
    builder = BatchBuilder()
    builder.add(a_step(1, rounds=rounds))
    builder.add(a_step(2, rounds=[struck_out]))
    assert builder.holds == Losses(rounds=3, draft_tokens=5, accepted_tokens=4)
