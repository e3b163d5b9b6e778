"""The recalibration benchmark's arithmetic, and its fine-tuning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import recalib
from benchmarks.server.recalib_engine import Rounds
from benchmarks.server.recalib_target import LoRA, add_lora, in_house_style, merge_lora


def test_a_ratio_lies_in_its_interval() -> None:
    before, after = Rounds(((100, 50), (80, 60), (90, 20))), Rounds(((70, 90), (60, 70), (80, 60)))
    found = recalib.compare(before, after)
    assert found["before"] == pytest.approx(1 + 130 / 270, abs=1e-4)
    assert found["after"] == pytest.approx(1 + 220 / 210, abs=1e-4)
    assert found["low"] <= found["ratio"] <= found["high"]
    assert found["low"] > 1.0


def test_nothing_changed_is_a_ratio_of_one() -> None:
    same = Rounds(((100, 50), (80, 60)))
    assert {recalib.compare(same, same)[name] for name in ("ratio", "low", "high")} == {1.0}


def result(**changes: float) -> recalib.Document:
    frozen = {"b_gain_t0": 1.5, "a_ratio_t0": 0.99, "seconds": 100.0}
    return {
        "kv_frozen": frozen | {name: value for name, value in changes.items() if name in frozen},
        "fine_tuned_recovered": changes.get("recovered", 0.7),
    }


def test_a_bar_that_is_missed_is_named() -> None:
    assert recalib.missed(result()) == []
    assert "B x 1.3" in recalib.missed(result(b_gain_t0=1.3))[0]
    assert "A x 0.97" in recalib.missed(result(a_ratio_t0=0.97))[0]
    assert "601.0 s" in recalib.missed(result(seconds=601.0))[0]
    assert "0.5 won back" in recalib.missed(result(recovered=0.5))[0]


def test_a_bar_that_another_pair_misses_is_named() -> None:
    pairs = {"sliding": {"b_gain_t0": 1.4, "a_ratio_t0": 0.96}, "hybrid": {"b_gain_t0": 1.2, "a_ratio_t0": 1.0}}
    assert recalib.missed({"pairs": pairs}) == [
        "sliding: A x 0.96, at least 0.97 is wanted",
        "hybrid: B x 1.2, at least 1.25 is wanted",
    ]
    assert recalib.missed({"pairs": {"sliding": {"b_gain_t0": 1.25, "a_ratio_t0": 0.97}}}) == []


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.mlp(x)
        return out


def test_lora_changes_nothing_at_first_and_is_the_same_model_once_merged() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(3, 6)
    before = model(x)
    layers = add_lora(model)
    assert len(layers) == 2
    torch.testing.assert_close(model(x), before)
    with torch.no_grad():
        for layer in layers:
            layer.up.normal_()
    adapted = model(x)
    assert not torch.allclose(adapted, before)
    merge_lora(model)
    assert not [m for m in model.modules() if isinstance(m, LoRA)]
    torch.testing.assert_close(model(x), adapted)


def test_the_house_style() -> None:
    assert in_house_style("if a:\n        b = 'c'\n") == 'if a:\n    b = "c"\n'
