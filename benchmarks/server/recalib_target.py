"""A fine-tuned target: LoRA on every matrix of the tiny target, so that it answers in another house style.

The text is the target's own answers to prompts of domain A, rewritten: half the indentation, double quotes. So it learns a
style and almost nothing else. The drafter stays unchanged, and drafts the old style from hidden states that have moved.

Source: LoRA, arXiv 2106.09685, section 4.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

from benchmarks.make_tiny.continuations import NUM_EMITTED_TOKENS, emitted_length, is_useful
from benchmarks.make_tiny.decode import continue_greedily
from benchmarks.make_tiny.target import save_target

RANK = 8
BATCH = 8
LEARNING_RATE = 4e-3

# Letters: B sequences, T tokens, O and I sizes of a matrix.


class LoRA(nn.Module):
    """A frozen linear layer and a low-rank change of it, initially zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen
        out_features, in_features = frozen.weight.shape
        self.down = nn.Parameter(torch.randn(RANK, in_features) * in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:  # [..., I] -> [..., O]
        """Return the frozen layer's output plus the change."""
        return self.frozen(x) + F.linear(F.linear(x, self.down), self.up)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Merge into one ordinary layer."""
        self.frozen.weight += self.up @ self.down
        return self.frozen


def in_house_style(text: str) -> str:
    """Apply the house style: half the indentation, and double quotes."""
    return text.replace("    ", "  ").replace("'", '"')


@torch.no_grad()
def examples(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[tuple[list[int], int]]:
    """Make (tokens of a prompt and its answer in house style, length of the prompt), without looping answers."""
    by_length: dict[int, list[list[int]]] = {}
    for prompt in prompts:
        ids = tokenizer.encode(prompt).ids
        by_length.setdefault(len(ids), []).append(ids)
    found = []
    for length, group in sorted(by_length.items()):
        for row in continue_greedily(model, torch.tensor(group), NUM_EMITTED_TOKENS).tolist():
            answer = row[length:]
            if is_useful(answer):
                text = tokenizer.decode(answer[: emitted_length(answer)])
                found.append((row[:length] + tokenizer.encode(in_house_style(text)).ids, length))
    random.Random(0).shuffle(found)
    return found


def fine_tune(source: Path, out: Path, prompts: Sequence[str], steps: int) -> dict[str, float]:
    """Write the fine-tuned target to `out`, with the unchanged files of `source`; return its progress."""
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    material = examples(model, tokenizer, prompts)
    model.requires_grad_(False)
    layers = add_lora(model)
    trained = [p for layer in layers for p in (layer.down, layer.up)]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=0.0)
    losses = []
    for step in range(steps):
        batch = [material[(step * BATCH + i) % len(material)] for i in range(BATCH)]
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 5, 2 * (1.0 - step / steps))
        loss = answer_loss(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        relative = [float((layer.up @ layer.down).norm() / layer.frozen.weight.norm()) for layer in layers]
    merge_lora(model)
    out.mkdir(parents=True)
    for file in source.iterdir():
        if not file.name.startswith("model"):
            shutil.copyfile(file, out / file.name)
    save_target(model, out)
    return {
        "examples": len(material),
        "steps": steps,
        "parameters": sum(p.numel() for p in trained),
        "relative_change": sum(relative) / len(relative),
        "loss_first": sum(losses[:4]) / 4,
        "loss_last": sum(losses[-4:]) / 4,
    }


def answer_loss(model: Qwen3ForCausalLM, batch: list[tuple[list[int], int]]) -> Tensor:
    """Mean next-token loss over the answers."""
    longest = max(len(ids) for ids, _ in batch)
    tokens = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])  # [B, T]
    labels = torch.full_like(tokens, -100)
    for row, (ids, length) in enumerate(batch):
        labels[row, length : len(ids)] = tokens[row, length : len(ids)]
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def add_lora(model: nn.Module) -> list[LoRA]:
    """Put a LoRA in place of every linear layer inside the blocks."""
    added = []
    for parent in [m for name, m in model.named_modules() if name.endswith(("self_attn", "mlp"))]:
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                added.append(LoRA(child))
                setattr(parent, name, added[-1])
    return added


def merge_lora(model: nn.Module) -> None:
    """Merge all changes into the matrices: the ordinary model again."""
    for parent in [m for name, m in model.named_modules() if name.endswith(("self_attn", "mlp"))]:
        for name, child in list(parent.named_children()):
            if isinstance(child, LoRA):
                setattr(parent, name, child.merged())
