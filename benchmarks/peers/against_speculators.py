"""honed's training of a DFlash drafter against speculators' 0.9: acceptance and speed on the same samples.

Both start from the tiny drafter, which knows domain A, and learn domain B's text as the target emitted it: the same samples,
the same anchors, the same number of updates, AdamW with honed's rates. honed learns the emitted tokens ("ce"), its default.
speculators learns the target's distribution there ("kl_div"), its default; and "ce" once more. honed also trains in its own
default scope, `kv-frozen`, which leaves out what cached keys and values depend on. Then honed's evaluator counts both
drafters' acceptance on held-out texts.

    acceptance_ratio   acceptance length of honed's (all weights) over that of speculators', with its default loss
    speed_ratio        tokens trained per second, by the median of the micro-steps, which take turns
    gradients          largest difference of the first micro-step's gradients of "ce", over the largest gradient of the tensor.
                       speculators' loss is scaled by the sum of the positions' weights over their number

The pairs: the target's whole vocabulary, and a drafter's own head of its most frequent words. A bar is missed where a ratio's
median over the seeds is below `BARS`. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.make_pairs.kinds import reduce_vocabulary
from benchmarks.make_tiny.continuations import aux_hidden_states, told
from benchmarks.make_tiny.prompts import read_prompts
from benchmarks.peers.speculators_dflash import VERSION, SpeculatorsDFlash
from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import ROOT, ProcessError
from honed.recalib.config.training import TrainingSettings
from honed.recalib.drafter.checkpoint import load_drafter
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.samples.sample import TrainingSample, pack
from honed.recalib.training import losses
from honed.recalib.training.micro_step import MicroTrainer

TINY, RESULTS = ROOT / "benchmarks" / "tiny", ROOT / "benchmarks" / "results"
BARS = {"acceptance_ratio": 0.98, "speed_ratio": 1.0}
WORDS_SHARE = 0.25
"""The reduced vocabulary's share of the target's."""
ANCHORS, SAMPLES = 32, 4
"""Of a micro-step."""


@torch.inference_mode()
def samples_of(model: Qwen3ForCausalLM, path: Path, most: int) -> list[TrainingSample]:
    """The target's answers to the first prompts of a file, with unfused features."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    by_length: dict[int, list[Any]] = {}
    for prompt in read_prompts(path, tokenizer)[:most]:
        by_length.setdefault(len(prompt.token_ids), []).append(prompt)
    found = []
    for prompts in by_length.values():
        for prompt, emitted in told(model, prompts):
            ids = torch.tensor([*prompt.token_ids, *emitted])
            features = aux_hidden_states(model, ids[None])[0].clone()
            count = len(prompt.token_ids)
            found.append(
                TrainingSample(
                    features, ids, torch.arange(len(ids)), prompt.session, "b", num_prompt_tokens=count, is_fused=False
                )
            )
    return found


def anchors_of(
    samples: Sequence[TrainingSample], k: int, generator: torch.Generator
) -> Tensor:  # [N] rows of the packed samples
    """Draw anchors in the emitted text, each with a whole block after it."""
    rows, start = [], 0
    for sample in samples:
        rows.append(torch.arange(start + sample.num_prompt_tokens, start + sample.num_tokens - k - 1))
        start += sample.num_tokens
    eligible = torch.cat(rows)
    return eligible[torch.randperm(len(eligible), generator=generator)[:ANCHORS]].sort().values


class Trained:
    """One contender's drafter in training."""

    def __init__(self, drafter: DFlashDrafter, settings: TrainingSettings, model: Qwen3ForCausalLM, loss: str) -> None:
        self.seconds: list[float] = []
        self.drafter, self.k = drafter, drafter.config.num_draft_tokens
        is_ours = loss == ""
        self.ours = MicroTrainer(drafter, settings) if is_ours else None
        self.theirs = None if is_ours else SpeculatorsDFlash(drafter, model, settings, loss)

    def step(self, samples: Sequence[TrainingSample], anchors: Tensor, remaining: float) -> None:
        """Do a micro-step, and time it."""
        began_s = time.perf_counter()
        if self.ours is not None:
            self.ours.step(samples, anchors.tolist(), remaining=remaining)
        elif self.theirs is not None:
            self.theirs.step(pack(list(samples)), anchors, remaining)
        self.seconds.append(time.perf_counter() - began_s)

    def finished(self) -> DFlashDrafter:
        """Return the drafter as trained."""
        if self.theirs is not None:
            self.theirs.copy_to(self.drafter)
        return self.drafter

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of an unfinished update, by name."""
        if self.theirs is not None:
            return self.theirs.gradients()
        return {name: p.grad for name, p in self.drafter.named_parameters() if p.grad is not None}


def compare(
    folder: Path,
    model: Qwen3ForCausalLM,
    learned: list[TrainingSample],
    held_out: list[TrainingSample],
    updates: int,
    seed: int,
) -> dict[str, Any]:
    """Train all contenders from the drafter in this folder; return acceptance lengths and seconds a micro-step."""
    settings = TrainingSettings(scope="full", anchors_per_micro_step=ANCHORS, break_share=1.0, seed=seed)

    def load() -> DFlashDrafter:
        drafter = load_drafter(folder, TINY / "target")
        assert isinstance(drafter, DFlashDrafter)
        return drafter

    contenders = {
        "honed": Trained(load(), settings, model, ""),
        "speculators": Trained(load(), settings, model, "kl_div"),
        "honed, kv-frozen": Trained(load(), replace(settings, scope="kv-frozen"), model, ""),
        "speculators, ce": Trained(load(), settings, model, "ce"),
    }
    before = expected_acceptance_length(load(), held_out).acceptance_length()
    generator = torch.Generator().manual_seed(seed)
    micro_steps = updates * settings.micro_steps_per_update
    gradients: float | None = None
    for number in range(micro_steps):
        chosen = [learned[i] for i in torch.randint(len(learned), (SAMPLES,), generator=generator).tolist()]
        anchors = anchors_of(chosen, contenders["honed"].k, generator)
        names = [*contenders][number % len(contenders) :] + [*contenders][: number % len(contenders)]
        for name in names:
            contenders[name].step(chosen, anchors, 1.0 - number / micro_steps)
        if not number:
            gradients = difference(contenders["honed"], contenders["speculators, ce"], settings.decay_tokens)
    found = {name: expected_acceptance_length(one.finished(), held_out).acceptance_length() for name, one in contenders.items()}
    seconds = {name: statistics.median(one.seconds) for name, one in contenders.items()}
    tokens = ANCHORS * contenders["honed"].k
    return {
        "before": round(before, 4),
        "acceptance": {name: round(length, 4) for name, length in found.items()},
        "tokens_per_s": {name: round(tokens / spent) for name, spent in seconds.items()},
        "acceptance_ratio": round(found["honed"] / found["speculators"], 4),
        "speed_ratio": round(seconds["speculators"] / seconds["honed"], 4),
        "gradients": gradients,
    }


def difference(ours: Trained, theirs: Trained, decay_tokens: float) -> float | None:
    """Largest difference of gradients over the largest gradient of the tensor; None where the two losses differ.

    With words of its own a drafter learns nothing of others from honed, and their most likely replacement from speculators.
    """
    if ours.drafter.words is not None:
        return None
    scale = ours.k / float(losses.position_weights(ours.k, decay_tokens).sum())
    found, others = ours.gradients(), theirs.gradients()
    assert found.keys() == others.keys()
    apart = max(float((found[name] - scale * others[name]).abs().max() / found[name].abs().max()) for name in found)
    return float(f"{apart:.2g}")


def reduced(folder: Path, learned: Sequence[TrainingSample]) -> Path:
    """Give a copy of the tiny drafter a head of its own, of the most frequent words."""
    shutil.copytree(TINY / "drafter", folder)
    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    counts = Counter(token for sample in learned for token in sample.token_ids.tolist())
    words = sorted(word for word, _ in counts.most_common(round(WORDS_SHARE * size)))
    reduce_vocabulary(folder, TINY / "target", torch.tensor(words))
    return folder


def run(seeds: Sequence[int], updates: int, most: int) -> dict[str, Any]:
    """Compare both pairs, once a seed."""
    model = Qwen3ForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
    learned = samples_of(model, TINY / "traffic_b.jsonl", most)
    held_out = samples_of(model, TINY / "prompts_b.jsonl", most)
    print(f"{len(learned)} samples, {len(held_out)} held out, {updates} updates of {2 * ANCHORS} blocks", flush=True)
    pairs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as scratch:
        folders = {"full": TINY / "drafter", "reduced": reduced(Path(scratch) / "reduced", learned)}
        for name, folder in folders.items():
            runs = []
            for seed in seeds:
                runs.append(compare(folder, model, learned, held_out, updates, seed))
                print(f"{name}, seed {seed}: {runs[-1]}", flush=True)
            ratios = {bar: [one[bar] for one in runs] for bar in BARS}
            pairs[name] = {bar: statistics.median(values) for bar, values in ratios.items()} | {"runs": runs}
            pairs[name]["spread"] = {bar: [min(values), max(values)] for bar, values in ratios.items()}
    return pairs


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100, help="updates of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each pair")
    parser.add_argument("--prompts", type=int, default=160, help="most prompts to learn from, and held out")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    arguments = parser.parse_args()
    try:
        pairs = run(range(arguments.seeds), arguments.updates, arguments.prompts)
    except ProcessError as error:
        print(f"against_speculators: {error}", file=sys.stderr)
        return 1
    result = {
        "pairs": pairs,
        "bars": BARS,
        "plan": {"updates": arguments.updates, "seeds": arguments.seeds, "prompts": arguments.prompts, "anchors": ANCHORS},
        "speculators": VERSION,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    out = arguments.out or RESULTS / f"against-speculators-{time.strftime('%Y-%m-%d')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    shown = {name: {key: one[key] for key in (*BARS, "spread")} for name, one in pairs.items()}
    print(json.dumps({"pairs": shown}))
    return 0 if all(one[bar] >= least for one in pairs.values() for bar, least in BARS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
