"""Which versions the aliases of a registry name, as engines say hello."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.daemon.lifecycle import drafters as module
from honed.daemon.lifecycle.drafters import Drafters
from honed.recalib.registry import registry
from honed.recalib.registry.access import User
from honed.recalib.registry.registry import Registry, RegistryError
from honed.recalib.registry.target_digest import digest_of_target
from tests.daemon.fake_engine import make_hello
from tests.daemon.lifecycle.test_lifecycle import write_checkpoint


@pytest.fixture
def drafters(tmp_path: Path) -> Drafters:
    return Drafters(Registry(tmp_path / "registry"), on_move=lambda: None)


def damage_alias(registry: Registry, name: str) -> Path:
    """Cut its text off."""
    path = registry.root / "aliases" / name
    path.unlink()
    path.symlink_to("v00")
    return path


def identify(drafters: Drafters, folder: Path, value: float) -> str:
    """The version that an engine with this checkpoint gets."""
    write_checkpoint(folder, value)
    return drafters.identify(make_hello(drafter_path=str(folder)), User(os.getuid(), os.getgid()))


def test_each_alias_is_set_once(drafters: Drafters, tmp_path: Path) -> None:
    first = identify(drafters, tmp_path / "one", 1.0)
    identify(drafters, tmp_path / "two", 2.0)
    assert drafters.aliases() == {"active": first, "candidate": None, "previous": None, "floor": first}


@pytest.mark.fault("a damaged alias that is set anew without a word")
@pytest.mark.parametrize("name", ["active", "floor"])
def test_a_damaged_alias_is_left_alone_and_named(drafters: Drafters, tmp_path: Path, name: str) -> None:
    """The next engine's own checkpoint became active and the floor, and the trained version was forgotten."""
    first = identify(drafters, tmp_path / "one", 1.0)
    trained = drafters.registry.create(lambda folder: write_checkpoint(folder, 2.0), parent=first).version
    drafters.move({"previous": first, "active": trained})
    before = drafters.aliases()
    damage_alias(drafters.registry, name)
    assert list(drafters.faults()) == [name]
    assert "is damaged" in drafters.faults()[name]
    identify(drafters, tmp_path / "three", 3.0)
    assert drafters.aliases() == before | {name: None}
    for number in range(4, 8):
        drafters.registry.create(lambda folder, value=float(number): write_checkpoint(folder, value))
    drafters.registry.sync_aliases()
    with pytest.raises(RegistryError, match="no old version is removed"):
        drafters.registry.prune(keep=1)
    assert {first, trained} <= {one.version for one in drafters.registry.versions()}


def test_a_floor_whose_file_was_removed_is_set_again(drafters: Drafters, tmp_path: Path) -> None:
    first = identify(drafters, tmp_path / "one", 1.0)
    damage_alias(drafters.registry, "floor").unlink()
    assert identify(drafters, tmp_path / "one", 1.0) == first
    assert drafters.aliases()["floor"] == first
    assert drafters.faults() == {}


def test_of_a_target_a_new_drafter_has_one_reading(drafters: Drafters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    for one in (module, registry):
        monkeypatch.setattr(one, "digest_of_target", lambda path: (read.append(path), digest_of_target(path))[1])
    target = str(tmp_path / "target")
    write_checkpoint(tmp_path / "target", 1.0)
    write_checkpoint(tmp_path / "one", 1.0)
    hello = make_hello(drafter_path=str(tmp_path / "one"), target_path=target)
    version = drafters.identify(hello, User(os.getuid(), os.getgid()))
    assert read == [target]
    assert drafters.manifest(version).target_sha256 == digest_of_target(target)


def test_the_drafter_of_a_target_that_was_replaced_is_another_version(drafters: Drafters, tmp_path: Path) -> None:
    """After a fine-tuning in the same folder an engine got the version that is for the old target, and wasn't trained."""
    target = tmp_path / "target"
    write_checkpoint(target, 1.0)
    write_checkpoint(tmp_path / "one", 1.0)
    hello, user = make_hello(drafter_path=str(tmp_path / "one"), target_path=str(target)), User(os.getuid(), os.getgid())
    first = drafters.identify(hello, user)
    assert drafters.identify(hello, user) == first
    write_checkpoint(target, 2.0)
    second = drafters.identify(hello, user)
    assert second != first
    assert [drafters.is_for(version, hello) for version in (first, second)] == [False, True]


@pytest.mark.fault("a drafter that couldn't be read once is never looked at again")
def test_a_target_that_could_not_be_read_is_read_again(
    drafters: Drafters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files hadn't changed since, so its digest stayed unknown: no version for it was fetched from other hosts."""
    target = tmp_path / "target"
    write_checkpoint(target, 1.0)
    with monkeypatch.context() as patch:
        patch.setattr(module, "digest_of_target", lambda path: "")
        assert not drafters.learn_target(str(target))
    assert drafters.digest_of(str(target)) == ""
    assert drafters.learn_target(str(target))
    assert drafters.digest_of(str(target)) != ""
    assert not drafters.learn_target(str(tmp_path / "nowhere"))
