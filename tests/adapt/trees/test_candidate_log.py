import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.trees.candidate_log import CandidateLogError, CandidateRequest, read_candidates, render_line
from honed.adapt.trees.node_scores import UNKNOWN


def make_request(seed=0, tokens=9, depths=3, width=2, every=1, workload="chat", temperature=0.8):
    rng = np.random.default_rng(seed)
    starts = np.arange(0, tokens, every)
    shape = (len(starts), depths, width)
    candidates = np.argsort(rng.random((len(starts), depths, 5)), axis=2)[:, :, :width]
    log_probs = -np.sort(rng.exponential(2.0, shape), axis=2)
    return CandidateRequest(
        f"{seed:016x}", workload, temperature, rng.integers(0, 5, tokens), starts, candidates, log_probs, 64
    )


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_what_is_written_is_read(seed, tokens, depths, width, every):
    written = make_request(seed, tokens, depths, width, every)
    (read,) = read_candidates([render_line(written), b"\n"])
    for name in ("request", "workload", "temperature", "first_position"):
        assert getattr(read, name) == getattr(written, name)
    for name in ("tokens", "starts", "candidates"):
        assert (getattr(read, name) == getattr(written, name)).all()
    assert np.allclose(read.log_probs, written.log_probs, atol=1e-4)


@given(st.integers(0, 2**32 - 1), st.integers(1, 12), st.integers(1, 3))
def test_taken_is_the_candidate_that_the_text_has(seed, tokens, every):
    request = make_request(seed, tokens, depths=4, width=3, every=every)
    for row, start in enumerate(request.starts.tolist()):
        for depth in range(4):
            if start + depth >= tokens:
                assert request.taken[row, depth] == UNKNOWN
            else:
                offered = request.candidates[row, depth].tolist()
                token = int(request.tokens[start + depth])
                assert request.taken[row, depth] == (offered.index(token) if token in offered else 3)


def test_a_position_without_candidates_leads_to_the_next_that_has_them():
    assert make_request(tokens=7, every=3).row_at.tolist() == [0, 1, 1, 1, 2, 2, 2]


def change(**fields):
    return json.dumps(json.loads(render_line(make_request())) | fields).encode()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"nonsense\n", "line 2"),
        (b'{"request": "torn\n', "line 2"),
        (b"{}", "line 2"),
        (change(tokens="text"), "tokens"),
        (change(log_probs=[]), "must both be"),
        (change(candidates=[[[1], [2, 3]]] * 9), "tables"),
        (change(positions=[5] * 9), "must rise"),
        (change(positions=[*range(65, 74)]), "must rise and lie"),
        (change(log_probs=[[[-2.0, -1.0]] * 3] * 9), "most likely first"),
        (change(log_probs=[[[0.5, -1.0]] * 3] * 9), "numbers ≤ 0"),
        (change(temperature=-1.0), "temperature"),
        (change(tokens=[1 << 63] * 9), r"line 2: .*9223372036854775807 - at `\$.tokens"),
        (change(candidates=[[[-(1 << 70), 1]] * 3] * 9), r"line 2: .*9223372036854775808 - at `\$.candidates"),
        (change(first_position=1 << 64), r"line 2: .*first_position"),
    ],
)
def test_a_wrong_line_is_named(line, said):
    with pytest.raises(CandidateLogError, match=said):
        read_candidates([render_line(make_request()), line])


def test_unknown_fields_are_passed_over():
    assert len(read_candidates([change(added_later=1)])) == 1


@given(st.data())
def test_a_torn_last_line_costs_that_request_only(data):
    lines = [render_line(make_request(seed)) for seed in range(3)]
    log, notes = b"".join(lines), []
    cut = data.draw(st.integers(len(lines[0]), len(log)))
    whole = sum(cut >= end - 1 for end in np.cumsum([*map(len, lines)]))  # but for the end of the line
    read = read_candidates(io.BytesIO(log[:cut]), notes)
    assert [one.request for one in read] == [f"{seed:016x}" for seed in range(whole)]
    is_torn = log[:cut].rpartition(b"\n")[2] not in (b"", *(line.rstrip() for line in lines))
    assert bool(notes) == is_torn
    assert all(f"line {whole + 1} is torn" in note for note in notes)


def test_an_empty_log_and_two_drafters_in_one_are_refused():
    with pytest.raises(CandidateLogError, match="no request"):
        read_candidates([])
    with pytest.raises(CandidateLogError, match="different depths"):
        read_candidates([render_line(make_request()), render_line(make_request(depths=2))])
    with pytest.raises(CandidateLogError, match=r"different numbers of candidates \(2, 3\)"):
        read_candidates([render_line(make_request()), render_line(make_request(width=3))])
