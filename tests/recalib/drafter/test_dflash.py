"""The drafter's function: what a block sees, what it doesn't, and that packing changes nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from honed.recalib.drafter.dflash import DFlashDrafter, DrafterConfig
from honed.recalib.drafter.layers import rotary_tables, rotate
from honed.recalib.samples.sample import TrainingSample, pack
from tests.recalib.conftest import SMALL

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]


def draft(drafter: DFlashDrafter, sample: TrainingSample, anchors: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = drafter(sample.features, sample.positions, sample.token_ids, torch.tensor(anchors))
    return logits


def test_one_row_of_logits_for_each_mask(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    assert draft(make_drafter(), make_sample(), [3, 9]).shape == (2, 3, 50)


def test_context_is_strictly_before_the_anchor(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    before = draft(drafter, sample, [9])
    sample.features[9:] += 1.0
    assert torch.equal(draft(drafter, sample, [9]), before)
    sample.features[8] += 1.0
    assert not torch.allclose(draft(drafter, sample, [9]), before)


def test_of_the_tokens_only_the_anchor_is_seen(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    before = draft(drafter, sample, [9])
    sample.token_ids[:9] = 7
    sample.token_ids[10:] = 7
    assert torch.equal(draft(drafter, sample, [9]), before)
    sample.token_ids[9] = 7
    assert not torch.allclose(draft(drafter, sample, [9]), before)


def test_blocks_do_not_see_each_other(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(), make_sample()
    together = draft(drafter, sample, [5, 6, 20])
    for row, anchor in enumerate([5, 6, 20]):
        assert torch.allclose(together[row], draft(drafter, sample, [anchor])[0], atol=1e-5)


def test_a_block_looks_both_ways(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """The first draft token depends on how many masks follow, so attention in the block is not causal."""
    drafter, sample = make_drafter(), make_sample()
    arguments = (sample.features, sample.positions, sample.token_ids, torch.tensor([9]))
    short, full = drafter(*arguments, num_draft_tokens=1), drafter(*arguments)
    assert not torch.allclose(short[:, 0], full[:, 0], atol=1e-4)


SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "use_sliding_window": True}


@pytest.mark.parametrize(("changes", "first_seen"), [({}, 0), (SLIDING, 20 - 5)])
def test_a_window_ends_what_a_layer_sees_of_the_context(
    changes: dict[str, object], first_seen: int, make_drafter: MakeDrafter, make_sample: MakeSample
) -> None:
    """Query i sees the positions from p + i - 5 on: the anchor at 20 five rows, the last of three masks two."""
    drafter, sample = make_drafter(**changes), make_sample()
    before = draft(drafter, sample, [20])
    for row in range(20):
        sample.features[row] += 1.0
        assert torch.equal(draft(drafter, sample, [20]), before) == (row < first_seen), row
        sample.features[row] -= 1.0


def test_a_causal_drafter_looks_back_only(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, sample = make_drafter(is_causal=True), make_sample()
    arguments = (sample.features, sample.positions, sample.token_ids, torch.tensor([9]))
    short, full = drafter(*arguments, num_draft_tokens=1), drafter(*arguments)
    torch.testing.assert_close(short[:, 0], full[:, 0])


def test_layers_of_several_kinds_see_each_its_own(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """The first layer's window hides a row from it, but not from the second, which is full."""
    mixed = SLIDING | {"layer_types": ["sliding_attention", "full_attention"]}
    drafter, sample = make_drafter(**mixed), make_sample()
    assert [(kind.window, kind.is_causal) for kind in drafter.config.attention] == [(6, True), (None, False)]
    before = draft(drafter, sample, [20])
    sample.features[3] += 1.0
    assert not torch.equal(draft(drafter, sample, [20]), before)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if name.startswith("layers.1.self_attn"):
                parameter.zero_()
    silent = draft(drafter, sample, [20])
    sample.features[3] -= 1.0
    assert torch.equal(draft(drafter, sample, [20]), silent)


def test_of_a_partly_rotated_head_the_rest_stays() -> None:
    x, positions = torch.randn(5, 2, 8), torch.arange(5)
    rotated = rotate(x, rotary_tables(positions, 4, 10_000.0))
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    torch.testing.assert_close(rotated[..., :4], rotate(x[..., :4], rotary_tables(positions, 4, 10_000.0)))


def test_values_are_scaled(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    scaled = make_drafter(dflash_config=SMALL["dflash_config"] | {"attention_value_scale": 0.5})
    plain, sample = make_drafter(), make_sample()
    with torch.no_grad():
        for layer in plain.layers:
            layer.self_attn.v_proj.weight.mul_(0.5)
    torch.testing.assert_close(draft(scaled, sample, [9]), draft(plain, sample, [9]))


def test_a_reduced_vocabulary_drafts_its_words_alone(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter, full, sample = make_drafter(draft_vocab_size=20), make_drafter(), make_sample()
    logits, wanted = draft(drafter, sample, [9]), draft(full, sample, [9])
    assert drafter.words is not None
    assert logits.shape == wanted.shape
    torch.testing.assert_close(logits[..., drafter.words], wanted[..., drafter.words])
    others = torch.tensor([i for i in range(50) if i not in drafter.words.tolist()])
    assert torch.isinf(logits[..., others]).all()
    assert torch.equal(drafter.to_words(drafter.words), torch.arange(20))
    assert torch.equal(drafter.to_target(torch.arange(20)), drafter.words)
    assert (drafter.to_words(others) == -1).all()
    assert torch.equal(full.to_words(others), others)


def test_packed_samples_do_not_see_each_other(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    drafter = make_drafter()
    first, second = make_sample(20, seed=1), make_sample(25, seed=2, first_position=100)
    packed = pack([first, second])
    anchors = torch.tensor([7, 20 + 11])
    logits = drafter(packed.features, packed.positions, packed.token_ids, anchors, packed.segments)
    assert torch.allclose(logits[0], draft(drafter, first, [7])[0], atol=1e-5)
    assert torch.allclose(logits[1], draft(drafter, second, [11])[0], atol=1e-5)


def test_only_distances_between_positions_matter(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """So a stretch cut out of a long request, with its absolute positions, is a sound sample."""
    drafter = make_drafter()
    near, far = make_sample(), make_sample(first_position=500)
    assert torch.allclose(draft(drafter, near, [9]), draft(drafter, far, [9]), atol=1e-3)


def test_misaligned_rows_are_refused(make_sample: MakeSample) -> None:
    good = make_sample()
    with pytest.raises(ValueError, match="features has 29 rows, not 30"):
        TrainingSample(good.features[:-1], good.token_ids, good.positions, "s", "w")
    with pytest.raises(ValueError, match="positions do not rise by one"):
        TrainingSample(good.features, good.token_ids, good.positions.flip(0), "s", "w")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization"),
        ({"layer_types": ["sliding_attention"]}, "without a window size"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "scaled RoPE"),
    ],
)
def test_variants_it_cannot_train_are_refused(change: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        DrafterConfig.from_json(change)


def test_a_config_of_another_kind_names_the_missing_field() -> None:
    with pytest.raises(ValueError, match="'vocab_size'; is this a DFlash drafter"):
        DrafterConfig.from_json({"dflash_config": {}})


DFLASH2 = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": SMALL["dflash_config"]
    | {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5},
}


def test_a_convolution_is_vllms(make_drafter: MakeDrafter) -> None:
    theirs = pytest.importorskip("vllm.model_executor.models.qwen3_dflash2", reason="vLLM is not installed")
    conv = make_drafter(**DFLASH2).layers[0].attention_conv
    x = torch.randn(5, 4, 16)
    before, kernels = conv.prepare(x)
    flat = x.flatten(0, 1)
    coefficients = conv.kernel_projection(flat).reshape(len(flat), 2, 2, 4)
    about = {"block_size": 4, "num_groups": 4, "group_size": 4, "taps": 2}
    wanted = theirs._grouped_conv(flat, coefficients[:, 0], conv.base_kernel[0], **about)
    torch.testing.assert_close(before.flatten(0, 1), wanted)
    wanted = theirs._grouped_conv(flat, coefficients[:, 1], conv.base_kernel[1], **about)
    torch.testing.assert_close(conv.finish(x, kernels).flatten(0, 1), wanted)


def test_a_selector_s_walk_is_vllms(make_drafter: MakeDrafter) -> None:
    """Each position's best candidate after the one that was chosen before it, by vLLM's scores of pairs."""
    theirs = pytest.importorskip("vllm.model_executor.models.qwen3_dflash2", reason="vLLM is not installed")
    drafter = make_drafter(**DFLASH2)
    with torch.no_grad():
        for parameter in drafter.candidate_selector.parameters():
            parameter.mul_(20.0)
    hidden, anchors, selector = torch.randn(6, 3, 16), torch.arange(6), drafter.candidate_selector
    with torch.no_grad():
        unary, candidates = (hidden @ drafter.lm_head.T).topk(5)
        books = selector.predecessor_codebook, selector.successor_codebook
        scores = theirs._score_edges(*books, candidates, unary, selector.hidden_projection(hidden), anchors, 5)
    wanted = []
    for row in range(6):
        previous, tokens = 0, []
        for k in range(3):
            previous = int(scores[row, k, previous].argmax())
            tokens.append(int(candidates[row, k, previous]))
        wanted.append(tokens)
    assert drafter.best_drafts(hidden, anchors).tolist() == wanted
    assert wanted != (hidden @ drafter.lm_head.T).argmax(-1).tolist(), "the selector chose nothing: this shows nothing"
    found, likely = drafter.candidates(hidden, anchors, 3), scores.log_softmax(-1).topk(3)
    torch.testing.assert_close(found.log_probs, likely.values)
    assert torch.equal(found.places, likely.indices)
    assert torch.equal(found.ids, candidates[:, :, None].expand(-1, -1, 5, -1).gather(-1, likely.indices))
    assert found.chain().tolist() == wanted


def test_scored_rows_give_the_scores_of_pairs(make_drafter: MakeDrafter) -> None:
    drafter = make_drafter(**DFLASH2)
    hidden, previous, selector = torch.randn(2, 3, 16), torch.randint(50, (2, 3)), drafter.candidate_selector
    rows, head = drafter.scored(hidden, previous)
    edges = selector.hidden_projection(hidden) * selector.predecessor_codebook[previous]
    torch.testing.assert_close(rows @ head.T, hidden @ drafter.lm_head.T + edges @ selector.successor_codebook.T)
    plain = make_drafter()
    assert plain.scored(hidden, previous)[0] is hidden


def test_a_convolution_looks_back_only(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Beside causal attention a later token changes nothing."""
    drafter, sample = make_drafter(**DFLASH2, is_causal=True), make_sample()
    arguments = (sample.features, sample.positions, sample.token_ids, torch.tensor([9]))
    short, full = drafter.draft_hidden(*arguments, num_draft_tokens=1), drafter.draft_hidden(*arguments)
    torch.testing.assert_close(short[:, 0], full[:, 0])


DSPARK = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 3, "block_size": 3}
"""Three rows that all predict, as the plain small drafter's three masks do."""


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_a_markov_head_scores_each_word_after_the_token_before(make_drafter: MakeDrafter, draft_vocab_size: int | None) -> None:
    drafter = make_drafter(**DSPARK, draft_vocab_size=draft_vocab_size)
    head = drafter.markov_head
    hidden, previous = torch.randn(2, 3, 16), torch.randint(50, (2, 3))
    rows, weights = drafter.scored(hidden, previous)
    biases = head.markov_w1.weight[previous] @ head.markov_w2.weight.T
    torch.testing.assert_close(rows @ weights.T, hidden @ drafter.lm_head.T + biases)


@pytest.mark.parametrize("draft_vocab_size", [None, 20])
def test_a_markov_head_drafts_each_token_after_its_own(make_drafter: MakeDrafter, draft_vocab_size: int | None) -> None:
    """As vLLM's `_sample_sequential`, request by request."""
    drafter = make_drafter(**DSPARK, draft_vocab_size=draft_vocab_size)
    with torch.no_grad():
        for parameter in drafter.markov_head.parameters():
            parameter.mul_(4.0)
    hidden, anchors, head = torch.randn(6, 3, 16), torch.arange(6), drafter.markov_head
    wanted = []
    for row, anchor in zip(hidden, anchors.tolist(), strict=True):
        previous, tokens = anchor, []
        for step in range(3):
            scores = drafter.lm_head @ row[step] + head.markov_w2.weight @ head.markov_w1.weight[previous]
            previous = int(drafter.to_target(scores.argmax()))
            tokens.append(previous)
        wanted.append(tokens)
    assert drafter.best_drafts(hidden, anchors).tolist() == wanted
    assert wanted != drafter.to_target((hidden @ drafter.lm_head.T).argmax(-1)).tolist(), (
        "it changed nothing: this shows nothing"
    )


def test_the_anchor_s_row_predicts_in_dspark_s_own_form(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """The same rows in both forms; in speculators' one the anchor's predicts nothing."""
    own, theirs, sample = make_drafter(**DSPARK), make_drafter(**DSPARK, sample_from_anchor=False), make_sample()
    assert (own.config.num_draft_tokens, theirs.config.num_draft_tokens) == (3, 2)
    arguments = (sample.features, sample.positions, sample.token_ids, torch.tensor([5, 9]))
    hidden = own.draft_hidden(*arguments)
    assert hidden.shape == (2, 3, 16)
    torch.testing.assert_close(hidden[:, 1:], theirs.draft_hidden(*arguments))
