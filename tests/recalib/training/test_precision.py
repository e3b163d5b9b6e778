"""bfloat16 for products, float32 for what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from honed.recalib.training.precision import compute_dtype

QUICK = TrainingSettings(anchors_per_micro_step=8, micro_steps_per_update=1, warmup_updates=1, learning_rate=1e-2)


def test_a_cpu_computes_in_float32_unless_told_otherwise() -> None:
    cpu = torch.device("cpu")
    assert compute_dtype(cpu, "auto") == torch.float32
    assert compute_dtype(cpu, "bfloat16") == torch.bfloat16
    with pytest.raises(ValueError, match="no bfloat16: use"):
        compute_dtype(torch.device("meta"), "bfloat16")


def test_a_gpu_that_only_emulates_bfloat16_computes_in_float32_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    assert compute_dtype(gpu, "auto") == torch.float32
    assert compute_dtype(gpu, "bfloat16") == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: True)
    assert compute_dtype(gpu, "auto") == torch.bfloat16


@pytest.mark.parametrize("is_checkpointing", [False, True])
def test_bfloat16_learns_with_float32_masters(
    is_checkpointing: bool, make_drafter: Callable[..., DFlashDrafter], make_sample: Callable[..., TrainingSample]
) -> None:
    drafter, sample = make_drafter(), make_sample()
    trainer = MicroTrainer(drafter, replace(QUICK, precision="bfloat16", gradient_checkpointing=is_checkpointing))
    products = []
    drafter.layers[0].mlp.gate_proj.register_forward_hook(lambda _module, _given, out: products.append(out.dtype))
    figures = [trainer.step([sample]) for _ in range(60)]
    assert set(products) == {torch.bfloat16}
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert {t.dtype for name, t in trainer.state().items() if name.startswith("adam/exp")} == {torch.float32}
    assert figures[-1].loss < 0.5 * figures[0].loss
    # A change far below bfloat16's steps is kept all the same: 1 + 1e-4 is 1 in bfloat16.
    trained = [p.detach() for p in drafter.parameters() if p.requires_grad]
    assert not any(torch.equal(p, p.bfloat16().float()) for p in trained)
