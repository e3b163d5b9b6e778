"""Which rows of a step become samples: committed ones, of chosen requests, in place, marked where there is a hole."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from honed.adapt.protocol.capture_limit import MOST_CAPTURED
from honed.adapt.protocol.sample_ring import FLAG_GAP, FLAG_PREFILL, FLAG_REJECTED
from honed.attach.capture.capture import Capturer
from honed.attach.capture.captured_rows import CapturedRows
from honed.attach.capture.ring_writer import RingWriter
from honed.attach.runner.runner import StepView
from honed.attach.runner.top_tokens import TopTokens
from honed.kernels.capture.reference import context_features

H = 8


class Recorder:
    """Stands where the ring is; the ring itself has tests of its own."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.ended: list[str] = []

    def write_rows(
        self,
        request: str,
        workload: str,
        version: str,
        first: int,
        tokens: Any,
        features: Any,
        flags: int,
        session: str,
        likely: Any,
    ) -> None:
        row = {"request": request, "workload": workload, "version": version, "first": first, "tokens": tokens.tolist()}
        self.rows.append(row | {"features": features, "flags": flags, "session": session, "likely": likely})

    def write_end(self, request: str, workload: str) -> None:
        self.ended.append(request)


@pytest.fixture
def ring() -> Recorder:
    return Recorder()


@pytest.fixture
def capturer(ring: Recorder) -> Capturer:
    norm = lambda: (torch.ones(H), 1e-6)  # noqa: E731
    made = Capturer(lambda size, dtype: ring, norm, "fused", b"key", TopTokens())  # type: ignore[arg-type, return-value]
    made.set_share(1.0, "v1")
    return made


EOS, STOP = 90, 91


def schedule(new: dict[str, list[int]] | None = None, finished: tuple[str, ...] = (), **extra: Any) -> SimpleNamespace:
    params = SimpleNamespace(extra_args=extra or None, eos_token_id=EOS, stop_token_ids=[STOP])
    requests = [
        SimpleNamespace(req_id=name, prompt_token_ids=tokens, sampling_params=params, mm_features=[])
        for name, tokens in (new or {}).items()
    ]
    scheduled = {name: len(tokens) for name, tokens in (new or {}).items()}
    return SimpleNamespace(scheduled_new_reqs=requests, finished_req_ids=set(finished), num_scheduled_tokens=scheduled)


def view(requests: dict[str, list[tuple[int, int]]], rejected: list[int] | None = None, seed: int = 0) -> StepView:
    """requests: id -> rows (position, token)."""
    rows = [row for each in requests.values() for row in each]
    states = torch.randn(len(rows), H, generator=torch.Generator().manual_seed(seed))
    return StepView(
        req_ids=list(requests),
        row_starts=np.cumsum([0] + [len(each) for each in requests.values()]),
        token_ids=torch.tensor([t for _, t in rows]),
        positions=torch.tensor([p for p, _ in rows]),
        states=lambda: states,
        aux=None,
        fuse=lambda aux: aux,
        num_rejected=torch.tensor(rejected, dtype=torch.int32) if rejected is not None else None,
    )


def test_rejected_rows_are_cut_off_and_features_belong_to_their_rows(capturer: Capturer, ring: Recorder) -> None:
    capturer.on_schedule(schedule({"x": [5, 6], "y": [7]}))
    step = view({"x": [(0, 5), (1, 6)], "y": [(0, 7)]})
    capturer.on_step(step)
    capturer.on_step(view({"x": [(2, 9), (3, 8), (4, 3)], "y": [(1, 4), (2, 4)]}, rejected=[1, 1]))
    assert [(r["first"], r["tokens"]) for r in ring.rows] == [(0, [5, 6]), (0, [7]), (2, [9, 8]), (1, [4])]
    expected = context_features(step.states(), torch.tensor([2]), torch.ones(H), 1e-6)
    np.testing.assert_allclose(ring.rows[1]["features"], expected.numpy())


def test_rounds_whose_drafts_were_rejected_are_marked_however_many_there_were(capturer: Capturer, ring: Recorder) -> None:
    capturer.on_schedule(schedule({"x": [5], "y": [7]}))
    capturer.on_step(view({"x": [(0, 5)], "y": [(0, 7)]}))
    capturer.on_step(view({"x": [(1, 9), (2, 8)], "y": [(1, 4), (2, 4)]}, rejected=[0, 1]))
    capturer.on_step(view({"x": [(3, 9)], "y": [(2, 6)]}))  # nothing was drafted
    assert [r["flags"] for r in ring.rows] == [FLAG_PREFILL, FLAG_PREFILL, 0, FLAG_REJECTED, 0, 0]


def test_prompt_rows_are_marked(capturer: Capturer, ring: Recorder) -> None:
    capturer.on_schedule(schedule({"x": [5, 6]}))
    capturer.on_step(view({"x": [(0, 5), (1, 6)]}))
    capturer.on_step(view({"x": [(2, 9)]}))
    assert [r["flags"] for r in ring.rows] == [FLAG_PREFILL, 0]


@pytest.mark.parametrize(
    ("given", "is_sampled"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 1}, True),
        ({"temperature": 0.7, "repetition_penalty": 1.1}, False),
        ({"temperature": 0.7, "logit_bias": {7: 5.0}}, False),
        ({"temperature": 0.7, "structured_outputs": StructuredOutputsParams(json="{}")}, False),
    ],
)
def test_the_target_s_most_likely_tokens_are_captured_where_it_samples(
    capturer: Capturer, ring: Recorder, given: dict[str, Any], is_sampled: bool
) -> None:
    output = schedule({"x": [5, 6], "greedy": [7]})
    output.scheduled_new_reqs[0].sampling_params = SamplingParams(**({"temperature": 0.0} | given))
    output.scheduled_new_reqs[1].sampling_params = SamplingParams(temperature=0.0)
    capturer.on_schedule(output)
    assert capturer._top_tokens.is_wanted == is_sampled
    prompt = view({"x": [(0, 5), (1, 6)], "greedy": [(0, 7)]})
    capturer.on_step(replace(prompt, top_tokens=torch.tensor([-1, 8, 3], dtype=torch.int32)))
    output.num_scheduled_tokens, output.scheduled_new_reqs = {"greedy": 1}, []
    capturer.on_schedule(output)
    assert not capturer._top_tokens.is_wanted, "its own tokens are the most likely ones"
    output.num_scheduled_tokens = {"x": 3}
    capturer.on_schedule(output)
    assert capturer._top_tokens.is_wanted == is_sampled
    verified = view({"x": [(2, 9), (3, 1), (4, 2)]}, rejected=[1])
    capturer.on_step(replace(verified, top_tokens=torch.tensor([1, 4, 5], dtype=torch.int32)))
    found = [None if r["likely"] is None else r["likely"].tolist() for r in ring.rows]
    assert found == ([[-1, 8], None, [1, 4]] if is_sampled else [None] * 3)


def test_where_drafts_are_drawn_at_random_the_emitted_tokens_are_to_be_learned(ring: Recorder) -> None:
    norm = lambda: (torch.ones(H), 1e-6)  # noqa: E731
    capturer = Capturer(lambda size, dtype: ring, norm, "fused", b"key", None)  # type: ignore[arg-type, return-value]
    capturer.set_share(1.0, "v1")
    output = schedule({"x": [5, 6]})
    output.scheduled_new_reqs[0].sampling_params = SamplingParams(temperature=0.7)
    capturer.on_schedule(output)
    capturer.on_step(replace(view({"x": [(0, 5), (1, 6)]}), top_tokens=torch.tensor([-1, 8], dtype=torch.int32)))
    assert [r["likely"] for r in ring.rows] == [None]


def test_a_hole_is_marked(capturer: Capturer, ring: Recorder) -> None:
    capturer.on_schedule(schedule({"x": [5, 6, 7, 8]}))
    capturer.on_step(view({"x": [(2, 7), (3, 8)]}))  # a prefix-cache hit: rows 0 and 1 were never computed
    capturer.on_step(view({"x": [(4, 1)]}))
    capturer.on_step(view({"x": [(6, 1)]}))
    assert [r["flags"] for r in ring.rows] == [FLAG_PREFILL | FLAG_GAP, 0, FLAG_GAP]


def test_rows_that_are_not_consecutive_are_refused_and_counted(capturer: Capturer, ring: Recorder) -> None:
    capturer.on_schedule(schedule({"x": [5, 6], "y": [7]}))
    with pytest.raises(ValueError, match="not consecutive"):
        capturer.on_step(view({"x": [(0, 5), (2, 6)], "y": [(0, 7)]}))
    assert (capturer.writer.num_skipped, capturer.writer.num_rows) == (2, 1)
    assert [row["tokens"] for row in ring.rows] == [[7]], "others' rows are"


@pytest.mark.parametrize("value", [0, "0", False])
def test_opting_out(capturer: Capturer, ring: Recorder, value: Any) -> None:
    capturer.on_schedule(schedule({"x": [5]}, honed_capture=value))
    capturer.on_step(view({"x": [(0, 5)]}))
    assert ring.rows == []


def test_the_share_of_requests_is_about_what_was_asked(capturer: Capturer) -> None:
    capturer.set_share(0.25, "v1")
    names, taken = [f"r{i}" for i in range(2000)], 0
    for at in range(0, 2000, 20):
        capturer.on_schedule(schedule({name: [1] for name in names[at : at + 20]}, finished=tuple(names[at - 20 : at])))
        taken += len(capturer._requests)
    assert 400 < taken < 600


def test_so_many_requests_are_captured_at_once_that_they_are_whole(capturer: Capturer) -> None:
    """With 128 running ones, the trainer got a fortieth of each answer."""
    capturer.on_schedule(schedule({f"r{i}": [1] for i in range(128)}))
    first = list(capturer._requests)
    assert len(first) == MOST_CAPTURED
    capturer.on_schedule(schedule({"late": [1], "again": [1], first[1]: [1]}, finished=(first[0],)))
    assert list(capturer._requests) == [*first[1:], "late"]


def test_names_are_hashed_and_the_end_is_said(capturer: Capturer, ring: Recorder) -> None:
    capturer.on_schedule(schedule({"secret-id": [5]}, honed_session="secret-session"))
    capturer.on_step(view({"secret-id": [(0, 5)]}))
    capturer.on_schedule(schedule(finished=("secret-id",)))
    assert ring.ended == [ring.rows[0]["request"]]
    assert "secret" not in ring.rows[0]["request"]
    assert capturer._requests == {}


def test_without_a_label_equal_prompts_are_one_session(capturer: Capturer, ring: Recorder) -> None:
    """Retries and load tests send copies: on both sides of the hold-out they would flatter every candidate."""
    capturer.on_schedule(schedule({"first": [5, 6], "again": [5, 6], "other": [5, 7]}))
    capturer.on_schedule(schedule({"labelled": [5, 6]}, honed_session="s"))
    capturer.on_step(view({name: [(0, 5), (1, 6)] for name in ("first", "again", "other", "labelled")}))
    first, again, other, labelled = (row["session"] for row in ring.rows)
    assert first == again
    assert len({first, other, labelled}) == 3
    assert "" not in (first, other, labelled)


def test_rows_of_the_layers_kind_are_the_aux_states(ring: Recorder) -> None:
    capturer = Capturer(lambda size, dtype: ring, lambda: (torch.ones(H), 1e-6), "layers", b"key", TopTokens())  # type: ignore[arg-type, return-value]
    capturer.set_share(1.0, "v1")
    capturer.on_schedule(schedule({"x": [5]}))
    plain = view({"x": [(0, 5)]})
    layers = [torch.full((1, 2), float(i)) for i in range(3)]
    capturer.on_step(replace(plain, aux=layers))
    assert ring.rows[0]["features"].tolist() == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0]]


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_a_drafter_has_overwritten_with_its_own_states_is_not_captured(ring: Recorder, is_whole: bool) -> None:
    """On V2 the first rows of its buffer hold its own output once it has drafted; the target's states are still there."""
    capturer = Capturer(lambda size, dtype: ring, None, "fused", b"key", TopTokens())  # type: ignore[arg-type, return-value]
    capturer.set_share(1.0, "v1")
    capturer.on_schedule(schedule({"x": [5, 6]}))
    layers = [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0]])]
    capturer.on_step(
        replace(
            view({"x": [(0, 5), (1, 6)]}),
            aux=torch.cat(layers, dim=1) if is_whole else layers,
            fuse=lambda aux: aux.sum(dim=1, keepdim=True),
        )
    )
    assert ring.rows[0]["features"].tolist() == [[11.0], [22.0]]


def test_rows_bear_the_version_that_computed_them(capturer: Capturer, ring: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they arrive when another one serves already."""
    capturer.on_schedule(schedule({"r": [5, 6]}))
    with monkeypatch.context() as patch:
        patch.setattr(capturer, "_commit", lambda: None)  # the copy is under way
        capturer.on_step(view({"r": [(0, 5), (1, 6)]}))
    capturer.set_share(1.0, "v2")
    capturer.on_step(view({"r": [(2, 7)]}))
    assert [row["version"] for row in ring.rows] == ["v1", "v2"]


def test_where_no_ring_can_be_made_nothing_is_captured_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []

    def make(size: int, dtype: str) -> Any:
        tries.append(size)
        raise OSError("no space left on device")

    made = Capturer(make, lambda: (torch.ones(H), 1e-6), "fused", b"key", TopTokens())
    made.set_share(1.0, "v1")
    made.on_schedule(schedule({"r": [5], "s": [6]}))
    with pytest.raises(OSError, match="no space"):
        made.on_step(view({"r": [(0, 5)], "s": [(0, 6)]}))
    made.set_share(1.0, "v1")
    for number in range(3):
        made.on_schedule(schedule({f"t{number}": [5]}, finished=("r", "s")))
        made.on_step(view({f"t{number}": [(0, 5)]}))
    assert (len(tries), made.share, made._requests, list(made._pending)) == (1, 0.0, {}, [])
    assert made.writer.num_skipped == 2
    monkeypatch.setattr("honed.attach.capture.capture.time.monotonic", lambda: 1e12)
    made.set_share(1.0, "v1")
    made.on_schedule(schedule({"u": [5]}))
    with pytest.raises(OSError, match="no space"):
        made.on_step(view({"u": [(0, 5)]}))


def test_a_real_ring_takes_what_the_capturer_writes(tmp_path: Path) -> None:
    made: list[RingWriter] = []

    def make(size: int, dtype: str) -> RingWriter:
        made.append(RingWriter(tmp_path / "ring", 1 << 20, size, dtype))
        return made[0]

    capturer = Capturer(make, lambda: (torch.ones(H), 1e-6), "fused", b"key", TopTokens())
    capturer.set_share(1.0, "v1")
    capturer.on_schedule(schedule({"x": [5, 6]}))
    capturer.on_step(view({"x": [(0, 5), (1, 6)]}))
    assert made[0]._num_records == 1
    assert capturer.writer.num_rows == 2


def test_what_runs_while_the_target_is_updated_is_dropped(capturer: Capturer, ring: Recorder) -> None:
    """Its rows are of both targets."""
    for token in (5, 8):
        capturer.on_schedule(schedule({f"r{token}": [token]}))
        capturer.on_step(view({f"r{token}": [(0, token)]}))
        capturer.begin_anew()
        capturer.on_step(view({f"r{token}": [(1, token + 1)]}))
    assert [row["tokens"] for row in ring.rows] == [[5], [8]]


class LateEvent:
    """Has passed once the given number of steps were begun after it, as copies from a GPU arrive beside later steps."""

    def __init__(self, clock: list[int], steps: int) -> None:
        self._clock, self._due = clock, clock[0] + steps

    def query(self) -> bool:
        return self._clock[0] >= self._due


@pytest.mark.fault("no request ends while steps are captured")
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_ends_are_told_behind_the_last_rows_though_these_arrive_late(
    capturer: Capturer, ring: Recorder, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy server has no step without captured rows, so there are always some under way."""
    clock, to_host = [0], capturer._to_host
    monkeypatch.setattr(
        capturer,
        "_to_host",
        lambda *given: replace(cast("CapturedRows", to_host(*given)), arrived=LateEvent(clock, steps)),
    )

    def step(number: int, finished: tuple[str, ...]) -> None:
        clock[0] += 1
        capturer.on_schedule(schedule({f"r{number}": [number, 6]}, finished))
        capturer.on_step(view({f"r{number - 1}": [(2, 7)], f"r{number}": [(0, number), (1, 6)]}))

    for number in range(1, 41):
        step(number, (f"r{number - 2}",) if number > 2 else ())
    written_by = time.monotonic() + 30
    while not capturer.writer.is_done:
        assert time.monotonic() < written_by
    first = [row["request"] for row in ring.rows if row["first"] == 0]
    assert ring.ended == first[: len(ring.ended)]
    assert len(ring.ended) >= 38 - steps
    clock[0] += steps
    capturer.on_schedule(schedule(finished=("r39", "r40")))
    capturer.set_share(1.0, "v1")  # said when the engine becomes idle
    while not capturer.writer.is_done:
        assert time.monotonic() < written_by
    assert sorted(ring.ended) == sorted(row["request"] for row in ring.rows if row["first"] == 0)
    assert len(ring.rows) == 79


@pytest.mark.fault("what vLLM computed behind the answer's end captured as the target's words")
@pytest.mark.parametrize("end", [EOS, STOP])
def test_nothing_is_taken_from_behind_the_token_that_ends_an_answer(capturer: Capturer, ring: Recorder, end: int) -> None:
    """Accepted drafts behind it, and a round that was scheduled before vLLM saw it. A prompt may contain such tokens."""
    capturer.on_schedule(schedule({"x": [5, end, 6]}))
    capturer.on_step(view({"x": [(0, 5), (1, end), (2, 6)]}))
    capturer.on_step(view({"x": [(3, 9), (4, end), (5, end), (6, 8)]}, rejected=[1]))
    capturer.on_step(view({"x": [(6, end), (7, end)]}, rejected=[0]))
    capturer.on_schedule(schedule(finished=("x",)))
    assert [row["tokens"] for row in ring.rows] == [[5, end, 6], [9, end]]
    assert ring.rows[-1]["flags"] == 0, "no draft before the end was rejected"
    assert len(ring.ended) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_nothing_is_captured_before_the_kernel_is_compiled(
    ring: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    weight = torch.ones(H, device="cuda")
    capturer = Capturer(lambda size, dtype: ring, lambda: (weight, 1e-6), "fused", b"key", TopTokens())  # type: ignore[arg-type, return-value]
    capturer.prepare(weight.device)
    capturer.set_share(1.0, "v1")
    with monkeypatch.context() as compiling:
        compiling.setattr(Capturer, "is_ready", False)
        capturer.on_schedule(schedule({"early": [5]}))
    assert capturer._preparing is not None
    capturer._preparing.join(120)
    assert capturer.is_ready
    assert caplog.text == "", "it can't be compiled"
    capturer.on_schedule(schedule({"late": [5]}))
    seen = view({"early": [(0, 5)], "late": [(0, 5)]})
    moved = [tensor.cuda() for tensor in (seen.token_ids, seen.positions, seen.states())]
    on_device = replace(seen, token_ids=moved[0], positions=moved[1], states=lambda: moved[2])
    capturer.on_step(on_device)
    torch.cuda.synchronize()
    capturer.on_schedule(schedule())
    capturer.on_step(replace(on_device, req_ids=[], row_starts=np.array([0])))
    deadline_s = time.monotonic() + 30
    while not capturer.writer.is_done:
        assert time.monotonic() < deadline_s, "never written"
    assert [row["tokens"] for row in ring.rows] == [[5]]


def test_capture_goes_on_once_there_is_room_again(capturer: Capturer) -> None:
    """Under constant traffic the daemon says the share once: the capturer must remember it."""
    capturer._give_up()
    capturer.on_schedule(schedule({"a": [1, 2]}))
    assert capturer.share == 0.0
    capturer._retry_at_s = time.monotonic()
    capturer.on_schedule(schedule({"b": [1, 2]}))
    assert capturer.share == 1.0
    assert list(capturer._requests) == ["b"]


@pytest.mark.fault("a session's later input captured as the target's words")
def test_a_sessions_further_input_ends_its_capture(capturer: Capturer, ring: Recorder) -> None:
    """vLLM schedules it as a new request of the same id, with a longer prompt. One that was preempted has the same prompt."""
    capturer.on_schedule(schedule({"x": [5, 6]}))
    capturer.on_step(view({"x": [(0, 5), (1, 6)]}))
    capturer.on_schedule(schedule({"x": [5, 6]}))
    capturer.on_step(view({"x": [(2, 7)]}))
    capturer.on_schedule(schedule({"x": [5, 6, 7, 8, 9]}))
    capturer.on_step(view({"x": [(3, 8), (4, 9)]}))
    for _ in range(3):
        capturer.on_schedule(schedule())
        capturer.on_step(view({}))
    assert [row["tokens"] for row in ring.rows] == [[5, 6], [7]]
    assert len(ring.ended) == 1


def test_a_swap_while_there_is_no_room_for_a_ring_leaves_the_share_that_is_wanted(
    capturer: Capturer, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturer._give_up()
    capturer.label("v2")
    assert capturer.share == 0.0
    monkeypatch.setattr(time, "monotonic", lambda: 1e9)
    capturer.on_schedule(schedule())
    assert capturer.share == 1.0
