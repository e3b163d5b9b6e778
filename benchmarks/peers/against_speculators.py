"""honed's training of drafters against speculators' 0.9: acceptance and speed on the same samples.

Both start from the same drafter, which knows domain A, and learn domain B's text as the target emitted it: the same samples,
the same anchors, the same number of updates, AdamW with honed's rates. honed learns the emitted tokens ("ce"), its default.
speculators learns the target's distribution there ("kl_div"), its default; and "ce" once more. honed also trains in its own
default scope, `kv-frozen`, which leaves out what cached keys and values depend on. Then honed's evaluator counts both
drafters' acceptance on held-out texts.

    acceptance_ratio   acceptance length of honed's (all weights) over that of speculators', with its default loss
    speed_ratio        tokens trained per second, by the medians of the micro-steps, which take turns
    gradients          largest difference of the first micro-step's gradients of "ce", over the largest gradient of the tensor,
                       for DFlash with all words; speculators' are scaled by the number of positions over their weights' sum
    logits             largest difference of logits in any unrolled step before training, in standard deviations; for EAGLE-3

The pairs: DFlash with the target's whole vocabulary, and with a head of its own of its most frequent words; and EAGLE-3, where
every emitted token is an anchor, if `python -m benchmarks.make_pairs eagle3` has made the pair in build/pairs. A bar is missed
where a ratio's median over the seeds is below `BARS`. The last line of stdout is JSON.
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
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.make_pairs.kinds import reduce_vocabulary
from benchmarks.make_tiny.continuations import NUM_EMITTED_TOKENS
from benchmarks.make_tiny.prompts import read_prompts, samples_of
from benchmarks.peers.speculators_side import VERSION, Speculators, SpeculatorsDFlash, SpeculatorsEagle3
from benchmarks.server.measured import commit, hardware, keep
from benchmarks.server.processes import ROOT, ProcessError
from honed.recalib.config.training import TrainingSettings
from honed.recalib.drafter.checkpoint import load_drafter
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.drafter.eagle3 import Eagle3Drafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.samples.sample import TrainingSample, pack
from honed.recalib.training.micro_step import MicroTrainer
from honed.recalib.training.objective import position_weights

TINY = ROOT / "benchmarks" / "tiny"
EAGLE3 = ROOT / "build" / "pairs" / "eagle3" / "drafter"
BARS = {"acceptance_ratio": 0.98, "speed_ratio": 1.0}
WORDS_SHARE = 0.25
"""The reduced vocabulary's share of the target's."""
ANCHORS, SAMPLES = 32, 4
"""Anchors and samples of a micro-step."""
EAGLE3_TOKENS = 5
"""Draft tokens that the EAGLE-3 drafter is served with."""


def anchors_of(samples: Sequence[TrainingSample], k: int) -> Tensor:  # [N] rows of the packed samples
    """Find the anchors in the emitted text that have a whole block after them."""
    rows, start = [], 0
    for sample in samples:
        rows.append(torch.arange(start + sample.num_prompt_tokens, start + sample.num_tokens - k - 1))
        start += sample.num_tokens
    return torch.cat(rows)


class Ours:
    """honed's trainer, on as many of the features' columns as the drafter reads."""

    def __init__(self, drafter: Drafter, settings: TrainingSettings) -> None:
        self.model, self._trainer = drafter, MicroTrainer(drafter, settings)

    def step(self, samples: Sequence[TrainingSample], anchors: Tensor, remaining: float) -> int:
        """Do one micro-step; return the trained tokens."""
        read = [read_by(self.model, sample) for sample in samples]
        return self._trainer.step(read, anchors.tolist(), remaining=remaining).num_tokens


def read_by(drafter: Drafter, sample: TrainingSample) -> TrainingSample:
    """The sample as this drafter's engine would have captured it."""
    return replace(sample, features=sample.features[:, : drafter.config.feature_size])


class Trained:
    """One contender's drafter in training; it is honed's where there is no loss of speculators'."""

    def __init__(self, drafter: Drafter, settings: TrainingSettings, model: Qwen3ForCausalLM, loss: str = "") -> None:
        self._drafter, self._rates = drafter, list[float]()
        theirs = SpeculatorsEagle3 if isinstance(drafter, Eagle3Drafter) else SpeculatorsDFlash
        self._side: Ours | Speculators = theirs(drafter, model, settings, loss) if loss else Ours(drafter, settings)

    def step(self, samples: Sequence[TrainingSample], anchors: Tensor, remaining: float) -> None:
        """Do a micro-step, and time it."""
        began_s = time.perf_counter()
        num_tokens = self._side.step(samples, anchors, remaining)
        self._rates.append(num_tokens / (time.perf_counter() - began_s))

    @property
    def tokens_per_s(self) -> float:
        """Tokens trained per second in the median micro-step."""
        return statistics.median(self._rates)

    def acceptance_length(self, held_out: Sequence[TrainingSample]) -> float:
        """Count the trained drafter's acceptance."""
        if isinstance(self._side, Speculators):
            self._side.copy_to(self._drafter)
        return acceptance_length(self._drafter, held_out)

    def gradients(self) -> dict[str, Tensor]:
        """Gradients of an unfinished update, by name, which both sides share."""
        return {name: p.grad for name, p in self._side.model.named_parameters() if p.grad is not None}


def acceptance_length(drafter: Drafter, held_out: Sequence[TrainingSample]) -> float:
    """Count a drafter's acceptance on held-out texts."""
    return expected_acceptance_length(drafter, [read_by(drafter, sample) for sample in held_out]).acceptance_length()


def compare(
    folder: Path,
    model: Qwen3ForCausalLM,
    learned: list[TrainingSample],
    held_out: list[TrainingSample],
    updates: int,
    seed: int,
) -> dict[str, Any]:
    """Train all contenders from the drafter in this folder; return acceptance lengths and rates."""

    def load() -> Drafter:
        return load_drafter(folder, TINY / "target", num_draft_tokens=EAGLE3_TOKENS if folder == EAGLE3 else 0)

    start = load()
    k, trains_all = start.config.num_draft_tokens, isinstance(start, Eagle3Drafter)
    most = SAMPLES * NUM_EMITTED_TOKENS if trains_all else ANCHORS
    settings = TrainingSettings(scope="full", anchors_per_micro_step=most, break_share=1.0, seed=seed)
    contenders = {
        "honed": Trained(load(), settings, model),
        "speculators": Trained(load(), settings, model, "kl_div"),
        "honed, kv-frozen": Trained(load(), replace(settings, scope="kv-frozen"), model),
        "speculators, ce": Trained(load(), settings, model, "ce"),
    }
    generator, gradients = torch.Generator().manual_seed(seed), None
    micro_steps = updates * settings.micro_steps_per_update
    for number in range(micro_steps):
        chosen = [learned[i] for i in torch.randint(len(learned), (SAMPLES,), generator=generator).tolist()]
        anchors = anchors_of(chosen, k)
        anchors = anchors[torch.randperm(len(anchors), generator=generator)[:most]].sort().values
        names = [*contenders][number % len(contenders) :] + [*contenders][: number % len(contenders)]
        for name in names:
            contenders[name].step(chosen, anchors, 1.0 - number / micro_steps)
        if not number and start.words is None:
            scale = k / float(position_weights(k, settings.decay_tokens).sum())
            gradients = difference(contenders["honed"].gradients(), contenders["speculators, ce"].gradients(), scale)
    samples = learned[:SAMPLES]
    logits = difference_of_logits(load(), model, samples, anchors_of(samples, k)) if trains_all else None
    found = {name: one.acceptance_length(held_out) for name, one in contenders.items()}
    return {
        "before": round(acceptance_length(start, held_out), 4),
        "acceptance": {name: round(length, 4) for name, length in found.items()},
        "tokens_per_s": {name: round(one.tokens_per_s) for name, one in contenders.items()},
        "acceptance_ratio": round(found["honed"] / found["speculators"], 4),
        "speed_ratio": round(contenders["honed"].tokens_per_s / contenders["speculators"].tokens_per_s, 4),
        "gradients": gradients,
        "logits": logits,
    }


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], scale: float) -> float:
    """Largest difference of gradients over the largest gradient of the tensor, theirs scaled."""
    assert ours.keys() == theirs.keys()
    apart = max(float((ours[name] - scale * theirs[name]).abs().max() / ours[name].abs().max()) for name in ours)
    return float(f"{apart:.2g}")


@torch.no_grad()
def difference_of_logits(
    drafter: Drafter, model: Qwen3ForCausalLM, samples: Sequence[TrainingSample], anchors: Tensor
) -> float:
    """Largest difference of logits in any unrolled step, in standard deviations of the logits."""
    packed = pack([read_by(drafter, sample) for sample in samples])
    hidden = drafter.draft_hidden(drafter.fuse(packed.features), packed.positions, packed.token_ids, anchors, packed.segments)
    ours = F.linear(hidden, drafter.lm_head)
    theirs = SpeculatorsEagle3(drafter, model, TrainingSettings(), "ce").logits(samples, anchors)
    return float(f"{float((ours - theirs).abs().max() / ours.std()):.2g}")


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
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    files = TINY / "traffic_b.jsonl", TINY / "prompts_b.jsonl"
    learned, held_out = (samples_of(model, None, read_prompts(path, tokenizer)[:most], "b") for path in files)
    print(f"{len(learned)} samples, {len(held_out)} held out, {updates} updates of {2 * ANCHORS} blocks", flush=True)
    pairs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as scratch:
        folders = {"dflash": TINY / "drafter", "dflash, reduced vocabulary": reduced(Path(scratch) / "reduced", learned)}
        if EAGLE3.exists():
            folders["eagle3"] = EAGLE3
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
    parser.add_argument("--updates", type=int, default=60, help="updates of each training")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each pair")
    parser.add_argument("--prompts", type=int, default=96, help="most prompts to learn from, and held out")
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
    keep(result, "against-speculators", arguments.out)
    shown = {name: {key: one[key] for key in (*BARS, "spread")} for name, one in pairs.items()}
    print(json.dumps({"pairs": shown}))
    return 0 if all(one[bar] >= least for one in pairs.values() for bar, least in BARS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
