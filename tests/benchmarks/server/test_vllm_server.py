"""vLLM's counters are read as they are written, and subtracted as counters."""

import pytest

from benchmarks.server.vllm_server import Counters, parse_counters, server_environment, server_flags

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 100.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="tiny"} 20.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="tiny"} 700.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 1.5e+02
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="0"} 90.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="10"} 2.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="2"} 58.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="tiny"} 1.7e+09
vllm:num_requests_running{engine="0"} 3.0
"""


def test_counters_are_summed_over_engines_and_ordered_by_position() -> None:
    assert parse_counters(METRICS) == Counters(120, 700, 150, (90, 58, 2))


def test_a_difference_has_its_own_acceptance_length() -> None:
    phase = Counters(30, 210, 45, (30, 15)) - Counters(10, 70, 15, (10, 5))
    assert phase == Counters(20, 140, 30, (20, 10))
    assert phase.acceptance_length == 2.5


def test_the_first_reading_may_lack_positions() -> None:
    assert (Counters(1, 7, 2, (1, 1)) - Counters()).accepted_by_position == (1, 1)


def test_no_rounds_have_no_acceptance_length() -> None:
    assert Counters().acceptance_length == 0.0


def test_a_server_without_speculation_is_noticed() -> None:
    with pytest.raises(ValueError, match="speculate"):
        parse_counters("vllm:num_requests_running{} 0.0\n")


def test_the_plain_server_knows_nothing_of_honed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONED_RUNTIME_DIR", "/somewhere")
    monkeypatch.setenv("https_proxy", "http://proxy")
    environment = server_environment()
    assert not [name for name in environment if name.startswith("HONED_")]
    assert "https_proxy" not in environment
    assert environment["HF_HUB_OFFLINE"] == "1"
    assert not [flag for flag in server_flags(1) if "honed" in flag]
    assert "127.0.0.1" in server_flags(1)
