"""Where an engine's models are, and whether they can be trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from honed.adapt.models.trainable import drafter_reasons
from honed.attach.contract.compatibility import check_features
from honed.attach.contract.model_files import content_crc, draft_folder, folder_of, tensor_names
from tests.tools import ROOT

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def config(model: str, revision: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(model=model, revision=revision)


@pytest.fixture
def cache(tmp_path: Path) -> SimpleNamespace:
    """A Hugging Face cache as a download leaves it, and vLLM's configuration of where it is."""
    snapshot = tmp_path / "hub" / "models--org--drafter" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return SimpleNamespace(download_dir=str(tmp_path / "hub"), snapshot=str(snapshot))


def test_a_folder_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drafter").mkdir()
    monkeypatch.chdir(tmp_path)
    assert folder_of(config("drafter"), SimpleNamespace(download_dir=None)) == str(tmp_path / "drafter")


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_a_name_on_the_hub_is_where_it_was_downloaded_to(cache: SimpleNamespace, revision: str | None) -> None:
    assert folder_of(config("org/drafter", revision), cache) == cache.snapshot


@pytest.mark.parametrize(
    ("model", "revision"), [("org/other", None), ("org/drafter", "other"), ("/nowhere/at/all", None), ("s3://bucket/x", None)]
)
def test_what_is_not_there_keeps_its_name(cache: SimpleNamespace, model: str, revision: str | None) -> None:
    assert folder_of(config(model, revision), cache) == model


@pytest.mark.parametrize(
    ("speculative", "found"),
    [
        (None, ""),
        (SimpleNamespace(method="suffix", draft_model_config=None), ""),
        (SimpleNamespace(method="ngram", draft_model_config=config("/nowhere/target")), ""),
        (SimpleNamespace(method="mtp", draft_model_config=config("/nowhere/target")), "/nowhere/target"),
        (SimpleNamespace(method="eagle3", draft_model_config=config("/nowhere/head")), "/nowhere/head"),
    ],
)
def test_only_a_draft_model_with_files_of_its_own_is_named(speculative: SimpleNamespace | None, found: str) -> None:
    """vLLM names the target where a method has none. An MTP head is in the target's files."""
    given = SimpleNamespace(speculative_config=speculative, model_config=config("/nowhere/target"), load_config=None)
    assert draft_folder(given) == found


TINY = ROOT / "benchmarks" / "tiny"


def configured(drafter: Path | None, **speculative: Any) -> Any:
    """What vLLM makes of a command, without starting an engine."""
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    given = {"num_speculative_tokens": 7, **({"model": str(drafter), "method": "dflash"} if drafter else {}), **speculative}
    engine = arguments.EngineArgs(model=str(TINY / "target"), speculative_config=given, max_model_len=256)
    return engine.create_engine_config()


@pytest.mark.parametrize(
    ("changes", "reasons"),
    [
        ({}, []),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "layer_types": None}, []),
        (
            {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0, "layer_types": None},
            ["a sliding window of 4"],
        ),
        ({"partial_rotary_factor": 0.5, "draft_vocab_size": 512}, []),
        ({"dflash_config.attention_sink_bias": True, "logit_scale": 0.5}, ["an attention sink", "logit_scale"]),
    ],
)
def test_a_pair_is_judged_as_vllm_resolves_it_and_as_its_files_are(
    tmp_path: Path, changes: dict[str, Any], reasons: list[str]
) -> None:
    raw = json.loads((TINY / "drafter" / "config.json").read_text())
    raw["dflash_config"] |= {name.removeprefix("dflash_config."): changes.pop(name) for name in list(changes) if "." in name}
    raw |= changes
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = check_features(configured(tmp_path))
    assert ("capture" in found.capabilities, "swap" in found.capabilities) == (not reasons, True)
    assert len(found.untrained) == len(reasons)
    assert all(part in reason for part, reason in zip(reasons, found.untrained, strict=True))
    assert list(found.untrained) == drafter_reasons(raw), "the trainer's answer, and doctor's"


@pytest.mark.parametrize("whose", ["drafter", "target"])
def test_an_engine_captures_nothing_for_pickled_weights(tmp_path: Path, whose: str) -> None:
    shutil.copytree(TINY, tmp_path / "tiny")
    for file in (tmp_path / "tiny" / whose).glob("*.safetensors*"):
        file.rename(file.with_name("pytorch_model.bin"))
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    given = {"num_speculative_tokens": 7, "model": str(tmp_path / "tiny" / "drafter"), "method": "dflash"}
    engine = arguments.EngineArgs(model=str(tmp_path / "tiny" / "target"), speculative_config=given, max_model_len=256)
    found = check_features(engine.create_engine_config())
    assert "capture" not in found.capabilities
    (reason,) = found.untrained
    assert reason.startswith(f"the {whose}'s weights are in pytorch_model.bin, and honed reads safetensors only")


def test_an_engine_without_a_drafter_names_none() -> None:
    ngram = configured(None, method="ngram", prompt_lookup_max=4)
    assert ngram.speculative_config.draft_model_config.model == ngram.model_config.model, "vLLM names the target"
    assert draft_folder(ngram) == ""
    (reason,) = check_features(ngram).untrained
    assert reason == "training is for method 'dflash' or 'dspark' or 'eagle3' or 'mtp', this engine runs method 'ngram'"


def test_a_fine_tuned_model_is_told_from_its_base_and_a_copy_is_not(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    base.mkdir()
    for name in ("a", "b"):
        (base / f"{name}.safetensors").write_bytes(rng.bytes(1 << 20))
    shutil.copytree(base, tmp_path / "copy")
    shutil.copytree(base, tuned)
    changed = bytearray((tuned / "b.safetensors").read_bytes())
    changed[1 << 19 :] = rng.bytes(1 << 19)
    (tuned / "b.safetensors").write_bytes(changed)
    crcs = [content_crc(str(folder)) for folder in (base, tmp_path / "copy", tuned)]
    assert crcs[0] == crcs[1] != crcs[2]
    assert content_crc("org/name") != content_crc("org/other")


def test_names_of_tensors_come_from_one_file_or_an_index(tmp_path: Path) -> None:
    assert "model.embed_tokens.weight" in (tensor_names(str(TINY / "target")) or ())
    assert tensor_names(str(tmp_path)) is None
    (tmp_path / "one.safetensors").write_bytes(b"\xff" * 8)
    assert tensor_names(str(tmp_path)) is None, "its header can't be that long"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors"}}))
    assert tensor_names(str(tmp_path)) == {"a"}
