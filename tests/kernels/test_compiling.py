"""Every kernel compiles for Hopper, at the sizes and types that a GPU would be given."""

from __future__ import annotations

import importlib.util
import os

import pytest
from compiling import machine_code

from honed.kernels import block_loss_goal, block_loss_labels, context_features

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(bool(os.environ.get("TRITON_INTERPRET")), reason="this process interprets its kernels"),
]


def test_context_features() -> None:
    assert machine_code(
        context_features._context_features_kernel, {"BLOCK": 4096}, 16,
        states_ptr="*bf16", rows_ptr="*i64", weight_ptr="*fp32", out_ptr="*bf16", states_stride="i32", hidden="i32", eps="fp32",
    )  # fmt: skip


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_block_loss_of_labels(dtype: str, with_gradient: bool) -> None:
    sums = dict.fromkeys(("scores_ptr", "gradient_ptr", "reference_ptr", "peak_ptr", "total_ptr", "label_score_ptr"), "*fp32")
    assert machine_code(
        block_loss_labels._fold_tile_kernel, {"WITH_GRADIENT": with_gradient, "TILE": 8192, "BLOCK_H": 2048}, 8,
        weights_ptr=f"*{dtype}", labels_ptr="*i64", top_ptr="*i64", start="i32", width="i32", hidden="i32",
        slack="fp32", **sums,
    )  # fmt: skip


@pytest.mark.parametrize("kind", block_loss_goal.KINDS.values())
def test_block_loss_of_goals(kind: int) -> None:
    assert machine_code(
        block_loss_goal._distance_kernel, {"KIND": kind, "WITH_GRADIENT": True, "BLOCK": 4096}, 8,
        scores_ptr="*fp32", goal_scores_ptr="*fp32", gradient_ptr="*bf16", losses_ptr="*fp32", top_ptr="*i64",
        vocabulary="i32", decay="fp32",
    )  # fmt: skip
