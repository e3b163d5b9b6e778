"""The target's embedding, head and last norm are found under every published name."""

from __future__ import annotations

from typing import Any

import pytest

from honed.adapt.models.target_tensor_names import head_names, text_config

LAYER = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("backbone", "head"),
    [
        ("model.", "lm_head.weight"),
        ("model.language_model.", "lm_head.weight"),
        ("language_model.model.", "language_model.lm_head.weight"),
        ("thinker.model.", "thinker.lm_head.weight"),
    ],
)
def test_every_published_prefix(backbone: str, head: str) -> None:
    embed, norm = f"{backbone}embed_tokens.weight", f"{backbone}norm.weight"
    others = ["model.visual.norm.weight", "mtp.norm.weight", LAYER]
    assert head_names({"tie_word_embeddings": False}, [embed, norm, head, *others]) == (embed, head, norm, f"{backbone}layers.")
    assert head_names({"tie_word_embeddings": True}, [embed, norm, head, *others]).lm_head == embed
    assert head_names({"text_config": {"tie_word_embeddings": True}}, [embed, norm]).lm_head == embed


def test_nemotron_has_names_of_its_own() -> None:
    names = ["backbone.embeddings.weight", "lm_head.weight", "backbone.norm_f.weight"]
    assert head_names({"tie_word_embeddings": False}, names) == (*names, "backbone.layers.")


@pytest.mark.parametrize(("config", "has_head", "is_tied"), [({}, False, True), ({}, True, False)])
def test_where_the_config_says_nothing_the_files_tell_whether_the_head_is_tied(
    config: dict[str, Any], has_head: bool, is_tied: bool
) -> None:
    """Gemma's class ties by default, and Transformers writes no defaults."""
    names = ["model.embed_tokens.weight", "model.norm.weight", *(["lm_head.weight"] if has_head else [])]
    assert (head_names(config, names).lm_head == names[0]) == is_tied


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "no tensor model.embed_tokens.weight and no lm_head.weight and no model.norm.weight"),
        (["language_model.model.embed_tokens.weight", "language_model.model.norm.weight"], "no tensor language_model.lm_head"),
        (["model.embed_tokens.weight", "model.norm.weight", "lm_head.qweight"], r"quantised \(lm_head.qweight\)"),
        (
            ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "lm_head.weight_scale"],
            r"quantised \(lm_head.weight_scale\)",
        ),
    ],
)
def test_what_is_missing_or_quantised_is_named(names: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_names({"tie_word_embeddings": False}, names)


def test_the_text_models_part_of_a_config() -> None:
    text = {"hidden_size": 8}
    assert text_config({"thinker_config": {"text_config": text}}) == text
    assert text_config({"text_config": text}) == text
    assert text_config(text) == text
