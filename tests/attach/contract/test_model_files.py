"""Where an engine's models are."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from honed.attach.contract.model_files import draft_folder, folder_of

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
        (SimpleNamespace(method="mtp", draft_model_config=config("/nowhere/target")), ""),
        (SimpleNamespace(method="eagle3", draft_model_config=config("/nowhere/head")), "/nowhere/head"),
    ],
)
def test_only_a_draft_model_with_files_of_its_own_is_named(speculative: SimpleNamespace | None, found: str) -> None:
    """vLLM names the target where a method has none."""
    given = SimpleNamespace(speculative_config=speculative, model_config=config("/nowhere/target"), load_config=None)
    assert draft_folder(given) == found
