"""The disk of the state directory: what may still be written to it, and whether that finds space."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from honed.daemon.doctor import disk
from honed.daemon.doctor.disk import Growth, check_room, growth
from honed.daemon.settings.settings import Settings, load

GIB = 1 << 30


@pytest.fixture
def settings(tmp_path: Path) -> Callable[..., Settings]:
    def make(**sections: Any) -> Settings:
        return load(flags={"paths": {"state_dir": tmp_path}} | sections, env={})

    return make


def write(path: Path, num_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(num_bytes)


def test_an_8b_targets_drafter_takes_sixty_gibibytes(settings: Callable[..., Settings]) -> None:
    found = growth(settings(), None, has_trainer=True)
    assert found.events == 6 * GIB, "4 of raw batches, 2 of sums"
    assert found.versions / GIB == pytest.approx(19 * 1.95, abs=0.1), "16 newest, active, previous and floor"
    assert found.training / GIB == pytest.approx(2 * 10.3, abs=0.1), "12 bytes a trained parameter, twice"


def test_what_is_there_already_is_not_asked_for_again(settings: Callable[..., Settings], tmp_path: Path) -> None:
    write(tmp_path / "honed.db", 5 * GIB)
    for version in ("v0001-aaaaaaaa", "v0002-bbbbbbbb"):
        write(tmp_path / "registry" / "versions" / version / "model.safetensors", GIB)
    before = growth(settings(), None, has_trainer=True)
    assert (before.events, before.versions) == (GIB, 17 * GIB), "versions as large as those that are there"
    write(tmp_path / "training" / "operation.safetensors", 5 * GIB)
    assert growth(settings(), None, has_trainer=True).training == before.training - 5 * GIB
    assert growth(settings(registry={"keep_versions": 0}), None, has_trainer=True).versions == GIB, "one more, and so on"


def test_only_what_the_settings_allow_is_asked_for(settings: Callable[..., Settings]) -> None:
    assert growth(settings(), None, has_trainer=False) == Growth(6 * GIB)
    shared = growth(settings(registry={"url": "file:///mnt/honed"}), None, has_trainer=False)
    assert shared.versions > 30 * GIB
    assert shared.training == 0
    found = growth(settings(trainer={"save_state_s": 0, "spill_bytes": 7 * GIB}), None, has_trainer=True)
    assert found.training == 7 * GIB


@pytest.mark.parametrize(
    ("free", "wanted", "guess", "level"),
    [
        (100, Growth(4 * GIB, 37 * GIB, 20 * GIB), "", "ok"),
        (60, Growth(4 * GIB, 37 * GIB, 20 * GIB), "", "warning"),
        (60, Growth(4 * GIB, 37 * GIB, 20 * GIB), "no version is active yet", "unknown"),
        (3, Growth(4 * GIB, 37 * GIB, 20 * GIB), "no version is active yet", "warning"),
        (2, Growth(0), "", "ok"),
        (0.5, Growth(0), "", "error"),
    ],
)
def test_room_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: float, wanted: Growth, guess: str, level: str
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: SimpleNamespace(free=int(free * GIB)))
    (found,) = check_room(tmp_path, wanted, guess)
    assert found.level == level
    assert guess in found.text
    if level in ("warning", "unknown"):
        assert "61.0 GiB (4.0 GiB for events, 37.0 GiB for drafter versions, 20.0 GiB for a training)" in found.text
