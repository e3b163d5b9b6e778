"""Train the tiny pair's target: a Qwen3 of 5.8 M parameters, on both domains, within a given time on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.make_tiny.muon import has_fast_bfloat16, make_muon
from benchmarks.make_tiny.tokens import END_TOKEN_ID, VOCAB_SIZE

# Letters: B sequences in a batch, T tokens of each, V vocabulary.


@dataclass(frozen=True)
class TargetTraining:
    """Length and rates of training. The rates fall with the share of elapsed time, so the end is always annealed."""

    minutes: float = 25.0
    """Processor time of one thread. Other programs on the machine don't change it."""
    sequence_tokens: int = 384
    batch_sequences: int = 10
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    warmup_share: float = 0.02
    decay_share: float = 0.5
    save_every_s: float = 150.0
    seed: int = 0


def target_config() -> Qwen3Config:
    """Six layers of width 256: big enough for text of the domain, small enough for a repository."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        bos_token_id=END_TOKEN_ID,
        eos_token_id=END_TOKEN_ID,
        attn_implementation="sdpa",
    )


def matrix_products() -> torch.autocast:
    """Matrix products in bfloat16 where the CPU has units for it; elsewhere float32 is ten times as fast."""
    return torch.autocast("cpu", torch.bfloat16, enabled=has_fast_bfloat16())


def next_token_loss(model: PreTrainedModel, tokens: Tensor) -> Tensor:  # tokens [B, T + 1] -> []
    """Mean cross-entropy; master weights are float32."""
    with matrix_products():
        logits = model.lm_head(model.model(tokens[:, :-1]).last_hidden_state)  # [B, T, V]
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].reshape(-1))


def make_optimizers(model: PreTrainedModel, settings: TargetTraining) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices inside the layers, AdamW for the embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        make_muon(matrices, settings.matrix_lr),
        torch.optim.AdamW(others, lr=settings.other_lr, weight_decay=0.0, betas=(0.9, 0.95)),
    ]


def rate_factor(progress: float, settings: TargetTraining) -> float:
    """Linear warm-up, a plateau, and a linear fall to 2 % over the last `decay_share` of the time."""
    falling = (1.0 - progress) / settings.decay_share
    return max(0.02, min(1.0, progress / settings.warmup_share, falling))


def crop_batch(streams: list[Tensor], settings: TargetTraining, generator: torch.Generator) -> Tensor:  # [B, T + 1]
    """Cut random crops, the same number from each domain."""
    length = settings.sequence_tokens + 1
    rows = []
    for index in range(settings.batch_sequences):
        stream = streams[index % len(streams)]
        start = int(torch.randint(0, len(stream) - length, (1,), generator=generator))
        rows.append(stream[start : start + length])
    return torch.stack(rows)


def fresh_target(seed: int) -> Qwen3ForCausalLM:
    """Make the target with random weights."""
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(target_config())


def train_target(
    model: PreTrainedModel, streams: list[Tensor], settings: TargetTraining, save: Callable[[], None], *, compiles: bool = True
) -> None:
    """Train until the time is over; `save` is called from time to time, and with the final weights."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizers = make_optimizers(model, settings)
    loss_of = torch.compile(next_token_loss) if compiles else next_token_loss
    began_s = saved_s = time.process_time()
    step = 0
    while (progress := (time.process_time() - began_s) / (60 * settings.minutes)) < 1.0:
        for optimizer, full in zip(optimizers, (settings.matrix_lr, settings.other_lr), strict=True):
            optimizer.param_groups[0]["lr"] = full * rate_factor(progress, settings)
        loss = loss_of(model, crop_batch(streams, settings, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % 25 == 0:
            print(f"target step {step} progress {progress:.3f} loss {loss.item():.3f}", flush=True)
        if time.process_time() - saved_s > settings.save_every_s:
            save()
            saved_s = time.process_time()
    save()


def save_target(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write the checkpoint in bfloat16, in files below 6 MB."""
    weights = {name: value.detach().to(torch.bfloat16) for name, value in model.state_dict().items()}
    rounded = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    rounded.load_state_dict(weights)
    rounded.generation_config = GenerationConfig(eos_token_id=END_TOKEN_ID, bos_token_id=END_TOKEN_ID)
    for old in folder.glob("*.safetensors"):
        old.unlink()
    rounded.save_pretrained(folder, max_shard_size="5MB")
