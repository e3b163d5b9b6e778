"""The store: bounded, fair, split by session."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from honed.adapt.protocol import workloads
from honed.adapt.protocol.workloads import MAX_WORKLOADS, RECENT_S
from honed.recalib.config.trainer import SampleSettings
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.reservoir import Stratum
from honed.recalib.samples.selection import Selection
from honed.recalib.samples.store import SampleStore
from honed.recalib.samples.stretch import Stretch
from honed.recalib.training.mixture import WorkloadMix

HOLD_OUT = HoldOut(b"k" * 16)
ROWS, F = 40, 8
BYTES = ROWS * (4 + 2 * F)


def stretch(session, workload="w", rows=ROWS, ids=None, first=0, seed=None):
    rng = np.random.default_rng(abs(hash(session)) % 2**32 if seed is None else seed)
    ids = rng.permutation(5000)[:rows].astype(np.int32) if ids is None else np.asarray(ids, np.int32)
    return Stretch(session, workload, "", first, ids, np.zeros((len(ids), F), np.uint16), num_prompt_tokens=3)


def store(capacity=1000 * BYTES, **more):
    return SampleStore(SampleSettings(sample_bytes=capacity, **more), HOLD_OUT)


def test_sessions_are_split_whole():
    held = store()
    for i in range(300):
        for first in (0, 100):
            held.add(stretch(f"s{i}", first=first))
    training, judging = ({s.session for s in held.stretches("w", side)} for side in (False, True))
    assert training.isdisjoint(judging)
    assert 30 < len(judging) < 90
    assert held.num_stretches == 600
    assert held.num_sessions == 300


def test_memory_stays_under_the_cap_and_is_accounted_for():
    held = store(50 * BYTES, max_session_share=1.0)
    for i in range(400):
        held.add(stretch(f"s{i}", workload="ab"[i % 2]))
        assert held.num_bytes <= 50 * BYTES
    everything = [s for w in held.workloads() for side in (False, True) for s in held.stretches(w, side)]
    assert held.num_bytes == sum(s.num_bytes for s in everything)
    assert held.num_sessions == len({s.session for s in everything})
    assert held.num_stretches == len(everything)


def test_busy_workload_does_not_push_a_small_one_out():
    held = store(100 * BYTES, max_session_share=1.0)
    for i in range(20):
        held.add(stretch(f"small{i}", "small"))
    for i in range(2000):
        held.add(stretch(f"busy{i}", "busy"))
    assert sum(len(held.stretches("small", side)) for side in (False, True)) == 20
    assert len(held.stretches("busy", False)) > len(held.stretches("busy", True)) > 5


def test_old_and_new_are_both_kept():
    held = store(100 * BYTES, max_session_share=1.0)
    for i in range(3000):
        held.add(stretch(f"s{i}"))
    ages = sorted(int(s.session[1:]) for s in held.stretches("w", False))
    assert sum(age >= 2900 for age in ages) >= 30  # the newest, nearly all of them
    assert sum(age < 1500 for age in ages) >= 5
    assert sum(1500 <= age < 2900 for age in ages) >= 5


def test_older_half_is_a_fair_choice():
    """Algorithm R: over many runs each age is kept about equally often."""
    kept = np.zeros(200)
    for seed in range(150):
        stratum = Stratum(np.random.default_rng(seed))
        for i in range(200):
            stratum.add(stretch(str(i), seed=0))
            if stratum.num_bytes > 40 * BYTES:
                stratum.drop_one()
        for s in stratum.stretches():
            kept[int(s.session)] += 1
    first, second = kept[:80].sum(), kept[80:160].sum()
    assert first == pytest.approx(second, rel=0.15)
    assert kept[185:].min() == 150


def test_no_session_takes_more_than_its_share():
    held = store(100 * BYTES, max_session_share=0.1)
    for i in range(50):
        held.add(stretch("greedy", workload="ab"[i % 2], first=100 * i, seed=i))
    everything = [s for w in held.workloads() for side in (False, True) for s in held.stretches(w, side)]
    assert len(everything) == 10
    assert max(s.first_position for s in everything) == 4900


def test_short_and_repetitive_stretches_are_kept_out():
    held = store()
    assert not held.add(stretch("short", rows=10))
    assert not held.add(stretch("loop", ids=np.tile([1, 2, 3], 100)))
    text = np.random.default_rng(0).permutation(4000)[:200]
    assert held.add(stretch("mixed", ids=np.concatenate([text, np.tile([7, 8], 60)])))
    (kept,) = held.stretches("w", HOLD_OUT.is_held_out("mixed"))
    assert (kept.num_rows, kept.num_prompt_tokens) == (202, 3)
    assert not held.add(replace(stretch("asks"), num_prompt_tokens=ROWS)), "nothing was emitted"
    assert held.num_refused == 3


def test_loops_before_what_is_kept_are_context_wherever_they_are():
    """A prompt may hold tables and rules. The answer isn't lost for them, and what the target repeated isn't learned."""
    held, text = store(), np.random.default_rng(0).permutation(4000)
    assert held.add(replace(stretch("table", ids=np.concatenate([np.tile([7], 300), text[:60]])), num_prompt_tokens=310))
    (kept,) = held.stretches("w", HOLD_OUT.is_held_out("table"))
    assert (kept.num_rows, kept.num_prompt_tokens) == (360, 310)
    loop = np.tile([7, 8], 20)
    assert held.add(stretch("looped", workload="v", ids=np.concatenate([text[:20], loop, text[20:120], loop])))
    (kept,) = held.stretches("v", HOLD_OUT.is_held_out("looped"))
    assert (kept.num_rows, kept.num_prompt_tokens) == (162, 60)


def test_windows_of_long_prompts_hold_their_answers():
    held = store(10_000 * BYTES)
    for i in range(40):
        held.add(replace(stretch(f"s{i}", rows=400), num_prompt_tokens=350))
    drawn = [s for _ in range(100) for s in WorkloadMix(Selection(held, lambda s: True), [], 0.4, rows=80, seed=_).draw()]
    assert {s.num_rows for s in drawn} == {80}
    assert min(s.num_judged for s in drawn) == 40
    assert max(s.num_judged for s in drawn) == 50


def test_labels_beyond_the_limit_are_other(monkeypatch):
    monkeypatch.setattr(workloads, "MAX_WORKLOADS", 4)
    held = store()
    for i in range(40):
        held.add(stretch(f"s{i}", workload=f"label{i}"))
    assert len(held.workloads()) <= 4
    assert "other" in held.workloads()
    assert all({one.workload for side in (False, True) for one in held.stretches(w, side)} == {w} for w in held.workloads())


@pytest.mark.fault("labels that run out")
def test_a_new_label_takes_the_place_of_the_workload_that_was_silent_longest():
    now_s = 0.0
    held = SampleStore(SampleSettings(sample_bytes=1000 * BYTES), HOLD_OUT, monotonic=lambda: now_s)
    for number in range(MAX_WORKLOADS - 2):
        now_s += 1.0
        for i in range(3):
            held.add(stretch(f"s{number}-{i}", f"w{number}"))
    held.add(stretch("s", "w0"))
    now_s = RECENT_S + 1.0
    held.add(stretch("early", "early"))
    assert held.workloads() == sorted([*(f"w{number}" for number in range(MAX_WORKLOADS - 2)), "other"])
    now_s = RECENT_S + 2.0  # w1 came at 2 s
    held.add(stretch("late", "late"))
    assert held.workloads() == sorted({"late", "other", *(f"w{number}" for number in range(MAX_WORKLOADS - 2))} - {"w1"})
    everything = [s for w in held.workloads() for side in (False, True) for s in held.stretches(w, side)]
    assert (held.num_stretches, held.num_sessions) == (len(everything), len({s.session for s in everything}))
    assert held.num_bytes == sum(s.num_bytes for s in everything)
    assert len(everything) == 3 * (MAX_WORKLOADS - 3) + 3
    now_s = 1e9
    held.add(stretch("more", "w0"))
    assert "w5" in held.workloads(), "while nobody needs its name, what is old stays"


def test_forget_leaves_nothing():
    held = store()
    held.add(stretch("s"))
    held.forget()
    assert (held.num_bytes, held.num_sessions, held.num_stretches, held.workloads()) == (0, 0, 0, [])


def test_what_was_forgotten_keeps_no_name(monkeypatch):
    monkeypatch.setattr(workloads, "MAX_WORKLOADS", 3)
    held = store()
    held.add(stretch("s", "a"))
    held.forget()
    held.add(stretch("s", "b"))
    assert held.workloads() == ["b"]


def test_stretch_becomes_tensors_bit_for_bit():
    values = torch.randn(6, 4).to(torch.bfloat16)
    cut = Stretch("s", "w", "v", 10, np.arange(6, dtype=np.int32), values.view(torch.uint16).numpy(), 2, (13, 15))
    sample = cut.to_training_sample(is_fused=True)
    assert torch.equal(sample.features, values)
    assert sample.positions.tolist() == list(range(10, 16))
    assert (sample.num_prompt_tokens, sample.break_positions) == (2, (13, 15))
    part = cut.cut(slice(1, 5))
    assert (part.first_position, part.num_prompt_tokens, part.breaks) == (11, 1, (13,))


def test_the_mixture_is_by_share_and_fits_the_row_limit():
    held = store(100_000 * BYTES)
    for i in range(300):
        held.add(stretch(f"new{i}", "new"))
        held.add(stretch(f"old{i}", "old"))
        held.add(stretch(f"long{i}", "long", rows=90))
    mix = WorkloadMix(Selection(held, lambda s: True), ["new"], 0.6, rows=70)
    drawn = [s for _ in range(400) for s in mix.draw()]
    share = sum(s.workload == "new" for s in drawn) / len(drawn)
    assert 0.5 < share < 0.7
    assert {s.workload for s in drawn} == {"new", "old", "long"}
    assert max(s.num_rows for s in drawn) == 70
    assert not any(HOLD_OUT.is_held_out(s.session) for s in drawn)


def test_the_mixture_uses_only_what_is_usable_and_nothing_when_there_is_none():
    held = store()
    for i in range(50):
        held.add(stretch(f"s{i}", "ab"[i % 2]))
    only_b = WorkloadMix(Selection(held, lambda s: s.workload == "b"), ["a"], 0.6, rows=70)
    assert {s.workload for s in only_b.draw()} == {"b"}
    assert WorkloadMix(Selection(held, lambda s: False), [], 0.6, rows=70).draw() == []


def test_a_workload_that_drifted_is_divided_at_the_time_of_its_change():
    held = store()
    for i in range(60):
        held.add(replace(stretch(f"s{i}", "ab"[i % 2]), taken_s=100.0 + i, earliest_s=100.0 + i))
    whole = Selection(held, lambda s: True, ["a"])
    assert whole.workloads() == ["a", "b"]
    parts = Selection(held, lambda s: s.taken_s != 159.0, ["a"], since_s=120.0)
    assert parts.workloads() == ["a", "b", "a (earlier)"]
    for side in (False, True):
        new, others, old = (parts.stretches(workload, side) for workload in parts.workloads())
        assert new
        assert old
        assert {one.workload for one in old} == {"a (earlier)"}
        assert min(one.taken_s for one in new) >= 120.0 > max(one.taken_s for one in old)
        assert len(new) + len(old) == len(held.stretches("a", side))
        assert [one.taken_s for one in others] == [one.taken_s for one in held.stretches("b", side) if one.taken_s != 159.0]
    mix = WorkloadMix(parts, ["a"], 0.4, rows=70)
    drawn = [s for _ in range(300) for s in mix.draw()]
    assert 0.3 < sum(s.workload == "a" for s in drawn) / len(drawn) < 0.5
