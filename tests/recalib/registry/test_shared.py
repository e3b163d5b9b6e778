"""Two registries and a place between them, on fsspec's own file systems."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import ssl
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.adapt.monitor.evidence import BETS_SHAPE
from honed.recalib.registry.durable import MAX_DOCUMENT_BYTES
from honed.recalib.registry.manifest import Figures, Manifest
from honed.recalib.registry.registry import Registry, RegistryError
from honed.recalib.registry.shared import DAMAGED_S, MOST_TRIALS, SharedRegistry, UrlError, open_url
from tests.recalib.registry.test_registry import checkpoint
from tests.shut_out import shut_out


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 4}')
    return folder


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/shared" if request.param == "file" else f"memory://{secrets.token_hex(4)}/shared"


@pytest.fixture
def here(tmp_path: Path, url: str) -> tuple[Registry, SharedRegistry]:
    registry = Registry(tmp_path / "here")
    return registry, SharedRegistry(url, registry)


@pytest.fixture
def there(tmp_path: Path, url: str) -> tuple[Registry, SharedRegistry]:
    registry = Registry(tmp_path / "there")
    registry.create(checkpoint(99))  # numbers are each registry's own
    return registry, SharedRegistry(url, registry)


Side = tuple[Registry, SharedRegistry]


def pushed(side: Side, target: Path) -> Manifest:
    """Make a version, and push it."""
    registry, shared = side
    made = registry.create(checkpoint(1), target_path=str(target))
    shared.push(made.version)
    return made


def test_what_is_pushed_here_can_be_fetched_there(here: Side, there: Side, target: Path) -> None:
    registry, shared = here
    made = registry.create(
        checkpoint(1),
        parent="v0001-00000000",
        scope="kv-frozen",
        figures=Figures(steps=12),
        data_window={"rows": {"b": 3}},
        target_path=str(target),
        vllm_version="0.32.0",
        note="drift",
    )
    assert shared.listing() == []
    assert shared.push(made.version)
    assert not shared.push(made.version), "it was there"
    assert shared.missing([(made.target_sha256, made.method)]) == []

    other_registry, other = there
    assert other.missing([("0" * 64, made.method), (made.target_sha256, "eagle3")]) == [], "for others"
    (found,) = other.missing([(made.target_sha256, made.method)])
    time.sleep(0.01)  # it isn't newer for having come later
    fetched = other.fetch(found, "/models/here/it/is/called/otherwise")
    assert fetched.version == f"v0002-{made.sha256[:8]}"
    assert other_registry.verify(fetched.version) == fetched
    same = (
        "sha256",
        "created_unix_s",
        "config_sha256",
        "parent",
        "scope",
        "figures",
        "data_window",
        "vllm_version",
        "note",
        "kv_sha256",
    )
    assert {name: getattr(fetched, name) for name in same} == {name: getattr(made, name) for name in same}
    assert fetched.origin.endswith(f":{made.version}")
    assert fetched.target_path == "/models/here/it/is/called/otherwise"
    assert other.missing([(made.target_sha256, made.method)]) == []
    assert not other.push(fetched.version)


def test_versions_come_in_the_order_in_which_they_were_made(here: Side, there: Side, target: Path) -> None:
    registry, shared = here
    made = [registry.create(checkpoint(i), target_path=str(target)) for i in range(4)]
    for manifest in reversed(made):
        shared.push(manifest.version)
    assert [m.sha256 for m in there[1].missing([(made[0].target_sha256, made[0].method)])] == [m.sha256 for m in made]


@pytest.mark.fault("a version from a host whose clock is ahead")
def test_versions_of_a_host_whose_clock_is_ahead_are_as_old_as_they_are_known(here: Side, tmp_path: Path, target: Path) -> None:
    registry, shared = here
    now_s = time.time()
    there = SharedRegistry(shared.url, Registry(tmp_path / "there"), clock=lambda: now_s)

    def push(value: int, created_unix_s: float) -> Manifest:
        made = registry.create(checkpoint(value), target_path=str(target), created_unix_s=created_unix_s)
        shared.push(made.version)
        return made

    ahead = [push(i, now_s + 86400.0 + i) for i in range(4)]
    found = there.missing([(ahead[0].target_sha256, ahead[0].method)])
    assert [m.sha256 for m in found] == [m.sha256 for m in ahead], "they stay in their order"
    assert {m.created_unix_s for m in found} == {now_s}
    fetched = there.fetch(found[-1], str(target))
    assert fetched.created_unix_s == now_s
    now_s += 100.0
    later = push(9, now_s - 50.0)
    found = there.missing([(later.target_sha256, later.method)])
    assert [m.sha256 for m in found] == [later.sha256], "a later one is newer, and the others are older than what was fetched"
    assert found[-1].created_unix_s == later.created_unix_s > fetched.created_unix_s


def test_a_version_without_its_manifest_is_not_there_yet(here: Side, there: Side, target: Path) -> None:
    _, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}"
    shared._fs.rm(f"{place}/manifest.json")
    assert there[1].listing() == []
    for cut_off in (b'{"version": "v00', b""):  # its host or its disk failed while it was written
        shared._fs.pipe_file(f"{place}/manifest.json", cut_off)
        assert there[1].listing() == []
        assert shared.push(made.version)
        assert not shared.push(made.version)
    assert [m.sha256 for m in there[1].listing()] == [made.sha256]


@pytest.mark.fault("a damaged upload that nobody repairs")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_file_that_is_gone_or_cut_off_there_is_pushed_again(
    here: Side, there: Side, target: Path, name: str, is_there: bool
) -> None:
    _, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}/{name}"
    data = shared._fs.cat_file(place)
    shared._fs.rm(place)
    if is_there:
        shared._fs.pipe_file(place, data[:-1])
    (found,) = there[1].missing([(made.target_sha256, made.method)])
    wrong = "has .* its manifest says" if is_there and name == "config.json" else "has .* bytes" if is_there else "is missing"
    refused(there[1], found, target, f"{name} {wrong}.*: remove .*; the host that made it writes it again")
    assert shared.push(made.version)
    assert not shared.push(made.version)
    assert there[1].fetch(found, str(target)).sha256 == made.sha256


@pytest.mark.fault("a damaged upload that nobody repairs")
@pytest.mark.parametrize("damage", [{"bytes": 7}, {"config_sha256": "0" * 64}])
def test_a_manifest_of_other_files_is_pushed_again_and_read_again(
    here: Side, there: Side, target: Path, damage: dict[str, Any]
) -> None:
    _, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}/manifest.json"
    shared._fs.pipe_file(place, json.dumps(json.loads(shared._fs.cat_file(place)) | damage).encode())
    (found,) = there[1].missing([(made.target_sha256, made.method)])
    refused(there[1], found, target, "the host that made it writes it again")
    time.sleep(0.01)  # the file system's clock has steps
    assert shared.push(made.version)
    (found,) = there[1].missing([(made.target_sha256, made.method)])
    assert there[1].fetch(found, str(target)).sha256 == made.sha256


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_was_changed_there_is_refused_and_leaves_nothing_here(here: Side, there: Side, target: Path, name: str) -> None:
    _, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}/{name}"
    data = shared._fs.cat_file(place)
    shared._fs.pipe_file(place, data[:-2] + b" }" if name == "config.json" else data[:-1] + b"\x01")
    other_registry, other = there
    before = other_registry.versions()
    (found,) = other.missing([(made.target_sha256, made.method)])
    with pytest.raises(RegistryError, match=rf"{name} has sha256 .* writes it again"):
        other.fetch(found, str(target))
    assert other_registry.versions() == before
    assert [p.name for p in (other_registry.root / "versions").iterdir() if p.name.startswith(".")] == []


def test_a_manifest_of_other_weights_is_no_version(here: Side, target: Path) -> None:
    registry, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}/manifest.json"
    told = json.loads(shared._fs.cat_file(place)) | {"sha256": "../../evil"}
    shared._fs.pipe_file(place, json.dumps(told).encode())
    assert SharedRegistry(shared.url, registry).listing() == []


@pytest.mark.fault("headers and manifests without end")
def test_a_manifest_without_end_is_no_version(here: Side, target: Path) -> None:
    registry, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}/manifest.json"
    shared._fs.pipe_file(place, b" " * MAX_DOCUMENT_BYTES + shared._fs.cat_file(place))
    assert SharedRegistry(shared.url, registry).listing() == []


@pytest.mark.fault("headers and manifests without end")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_longer_than_their_manifest_says_are_not_fetched(here: Side, there: Side, target: Path, name: str) -> None:
    _, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}/{name}"
    shared._fs.pipe_file(place, shared._fs.cat_file(place) + b" " * MAX_DOCUMENT_BYTES)
    (found,) = there[1].missing([(made.target_sha256, made.method)])
    with pytest.raises(RegistryError, match=rf"{name} has \d+ bytes, (at most )?\d+ are expected"):
        there[1].fetch(found, str(target))


def downloads(shared: SharedRegistry, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Places that files are copied from."""
    copied: list[str] = []
    get_file = shared._fs.get_file

    def noting(place: str, *more: Any) -> None:
        copied.append(place)
        get_file(place, *more)

    monkeypatch.setattr(shared._fs, "get_file", noting)
    return copied


def refused(shared: SharedRegistry, manifest: Manifest, target: Path, why: str) -> None:
    with pytest.raises(RegistryError, match=why):
        shared.fetch(manifest, str(target))


def test_what_is_damaged_is_downloaded_again_once_it_was_written_anew_or_after_an_hour(
    here: Side, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shared = here
    made = pushed(here, target)
    place, now_s = f"{shared._versions}/{made.sha256}/model.safetensors", 7.0
    data = shared._fs.cat_file(place)
    shared._fs.pipe_file(place, data[:-1] + b"\x01")
    other = SharedRegistry(shared.url, Registry(tmp_path / "there"), lambda: now_s)
    (found,) = other.missing([(made.target_sha256, made.method)])
    copied = downloads(other, monkeypatch)
    refused(other, found, target, "model.safetensors has sha256 .* writes it again")
    now_s = 6.0 + DAMAGED_S
    refused(other, found, target, "model.safetensors has sha256 .* writes it again")
    assert copied == [place]
    now_s = 7.0 + DAMAGED_S
    refused(other, found, target, "has sha256")
    assert copied == [place, place]
    time.sleep(0.01)  # the file system's clock has steps
    shared._fs.pipe_file(place, data)
    assert other.fetch(found, str(target)).sha256 == made.sha256


def test_what_is_no_drafter_is_downloaded_once(here: Side, there: Side, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a kind that only a newer honed knows."""
    _, shared = here
    made = pushed(here, target)
    place, odd = f"{shared._versions}/{made.sha256}", b"of another kind"
    told = json.loads(shared._fs.cat_file(f"{place}/manifest.json"))
    told |= {"sha256": hashlib.sha256(odd).hexdigest(), "bytes": len(odd)}
    anew = f"{shared._versions}/{told['sha256']}"
    shared._fs.makedirs(anew)
    for name, data in (("model.safetensors", odd), ("config.json", shared._fs.cat_file(f"{place}/config.json"))):
        shared._fs.pipe_file(f"{anew}/{name}", data)
    shared._fs.pipe_file(f"{anew}/manifest.json", json.dumps(told).encode())
    found = next(m for m in there[1].missing([(made.target_sha256, made.method)]) if m.sha256 == told["sha256"])
    copied = downloads(there[1], monkeypatch)
    for _ in range(3):
        refused(there[1], found, target, "is not a sound safetensors file")
    assert copied == [f"{anew}/model.safetensors", f"{anew}/config.json"]


def test_what_is_cut_off_there_is_not_downloaded(
    here: Side, there: Side, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, shared = here
    made = pushed(here, target)
    place = f"{shared._versions}/{made.sha256}/model.safetensors"
    shared._fs.pipe_file(place, shared._fs.cat_file(place)[:-1])
    (found,) = there[1].missing([(made.target_sha256, made.method)])
    copied = downloads(there[1], monkeypatch)
    refused(there[1], found, target, f"has {made.bytes - 1} bytes, {made.bytes} are expected: remove .* writes it again")
    assert copied == []


def test_what_was_cut_off_on_its_way_is_tried_again_at_once(
    here: Side, there: Side, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pushed(here, target)
    (found,) = there[1].missing([(made.target_sha256, made.method)])
    with monkeypatch.context() as line:
        line.setattr(there[1]._fs, "get_file", lambda place, path: Path(path).write_bytes(b"only this"))
        refused(there[1], found, target, "cut off after 9 bytes")
    assert there[1].fetch(found, str(target)).sha256 == made.sha256


def test_what_is_damaged_here_is_not_pushed(here: Side) -> None:
    registry, shared = here
    made = registry.create(checkpoint(1))
    path = registry.path(made.version) / "model.safetensors"
    path.chmod(0o640)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(RegistryError, match="the file was changed"):
        shared.push(made.version)
    assert shared.listing() == []


def test_a_place_that_fails_is_one_clear_error(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "here")
    made = registry.create(checkpoint(1))
    (tmp_path / "shared").write_text("not a folder")
    shared = SharedRegistry(f"file://{tmp_path}/shared", registry)
    with pytest.raises(RegistryError, match=r"^shared registry file://.*shared: \w+Error: "):
        shared.push(made.version)


def test_a_place_that_this_user_may_not_enter_is_no_empty_one(tmp_path: Path) -> None:
    """Such as the one that a host made whose user honed has another uid."""
    place = tmp_path / "shared"
    (place / "versions").mkdir(parents=True)
    (place / "evidence" / "a" / "b").mkdir(parents=True)
    shared = SharedRegistry(f"file://{place}", Registry(tmp_path / "here"))
    with shut_out(place):
        with pytest.raises(RegistryError, match=r"PermissionError: .*shared.*the user honed must have the same uid and gid"):
            shared.listing()
        with pytest.raises(RegistryError, match="same uid and gid"):
            shared.heard("a", "b", "mine")


def test_a_protocol_that_nobody_speaks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UrlError, match=r"registry.url = 'nope://x' can't be used: .*nope"):
        SharedRegistry("nope://x", Registry(tmp_path / "here"))


@pytest.mark.fault("a misspelt place to share that becomes a local folder")
def test_a_place_that_its_file_system_refuses_is_named(tmp_path: Path) -> None:
    with pytest.raises(UrlError, match=r"registry.url = 'github://' can't be used: .*argument"):
        SharedRegistry("github://", Registry(tmp_path / "here"))


@pytest.mark.parametrize("error", [ConnectionRefusedError(111, "it refuses"), ssl.SSLCertVerificationError(1, "it refuses")])
def test_a_place_that_is_away_is_no_wrong_url(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    """Some protocols connect at once, and the place may come back."""

    def refuse(url: str, **options: object) -> None:
        raise error

    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(RegistryError, match="it refuses") as raised:
        open_url("sftp://host/honed")
    assert not isinstance(raised.value, UrlError)


@pytest.mark.fault("odd figures in a peer's manifest")
@pytest.mark.parametrize("figures", [{"gate": 7}, {"gate": [{"workload": "a"}]}, {"gate": [[]]}, [], "x", {"steps": "many"}])
def test_a_manifest_with_odd_figures_is_no_version(here: Side, target: Path, figures: object) -> None:
    """They would end the commands and the page that show them."""
    registry, shared = here
    made = registry.create(checkpoint(1), target_path=str(target))
    assert shared.push(made.version)
    place = f"{shared._versions}/{made.sha256}/manifest.json"
    document = json.loads(shared._fs.cat_file(place)) | {"figures": figures}
    shared._fs.pipe_file(place, json.dumps(document).encode())
    assert SharedRegistry(shared.url, registry).listing() == []


@pytest.mark.fault("a pipe in place of a checkpoint")
@pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])
def test_a_pipe_in_the_shared_place_blocks_nobody(tmp_path: Path, target: Path, name: str) -> None:
    registry = Registry(tmp_path / "here")
    shared = SharedRegistry(f"file://{tmp_path}/shared", registry)
    made = registry.create(checkpoint(1), target_path=str(target))
    assert shared.push(made.version)
    place = Path(f"{shared._versions}/{made.sha256}/{name}")
    place.unlink()
    os.mkfifo(place)
    other = SharedRegistry(shared.url, Registry(tmp_path / "there"))
    if name == "manifest.json":
        assert other.listing() == []
    else:
        with pytest.raises(RegistryError, match="is missing, or no file"):
            other.fetch(made, str(target))


OLD, NEW = "a" * 64, "b" * 64


def bets(value: float) -> np.ndarray:
    return np.full(BETS_SHAPE, value)


def test_trials_add_up_and_a_host_hears_all_but_its_own(here: Side, there: Side) -> None:
    assert here[1].heard(OLD, NEW, "1" * 32) == ({}, 0)
    here[1].tell(OLD, NEW, "1" * 32, 40, {"": bets(1.0), "code": bets(2.0)})
    there[1].tell(OLD, NEW, "2" * 32, 40, {"": bets(-3.0)})
    there[1].tell(OLD, NEW, "3" * 32, 40, {"": bets(0.5), "code": bets(0.25)})
    there[1].tell(NEW, OLD, "4" * 32, 40, {"": bets(9.0)})
    sums, number = here[1].heard(OLD, NEW, "1" * 32)
    assert number == 2
    assert {name: found[0, 0] for name, found in sums.items()} == {"": -2.5, "code": 0.25}
    assert there[1].heard(OLD, NEW, "2" * 32)[0]["code"][0, 0] == 2.25


def test_what_a_trial_tells_anew_takes_its_former_place(here: Side, there: Side) -> None:
    for pairs in (10, 11):
        here[1].tell(OLD, NEW, "1" * 32, pairs, {"": bets(0.1 * pairs)})
        sums, number = there[1].heard(OLD, NEW, "2" * 32)
        assert (number, sums[""][0, 0]) == (1, pytest.approx(0.1 * pairs))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"pairs": 3, "log_bets": {"": [[1.0]]}}',
        '{"pairs": 3, "log_bets": {"": 7}}',
        json.dumps({"pairs": 3, "log_bets": {"": np.full(BETS_SHAPE, 3.0).tolist()}}),
        json.dumps({"pairs": -1, "log_bets": {"": np.zeros(BETS_SHAPE).tolist()}}),
        json.dumps({"pairs": 10**12, "log_bets": {"": np.full(BETS_SHAPE, 1e9).tolist()}}),
        json.dumps({"pairs": 3, "log_bets": {"": np.full(BETS_SHAPE, -1e300).tolist()}}),
        json.dumps({"pairs": 3, "log_bets": {str(i): np.zeros(BETS_SHAPE).tolist() for i in range(100)}}),
        json.dumps({"pairs": 3, "log_bets": {}, "more": " " * MAX_DOCUMENT_BYTES}),
        '{"pairs": 3, "log_bets": {"": ' + json.dumps(np.full(BETS_SHAPE, np.nan).tolist()) + "}}",
    ],
)
def test_evidence_that_no_trial_can_have_is_not_counted(here: Side, there: Side, text: str) -> None:
    here[1].tell(OLD, NEW, "1" * 32, 40, {"": bets(1.0)})
    there[1]._fs.pipe_file(f"{there[1]._evidence}/{OLD}/{NEW}/{'5' * 32}.json", text.encode())
    there[1]._fs.pipe_file(f"{there[1]._evidence}/{OLD}/{NEW}/readme.txt", b"not a trial")
    sums, number = there[1].heard(OLD, NEW, "2" * 32)
    assert (number, sums[""][0, 0]) == (1, 1.0)


def test_of_very_many_trials_some_are_read_whatever_they_say(here: Side) -> None:
    for one in range(MOST_TRIALS + 20):
        here[1].tell(OLD, NEW, f"{one:032x}", 40, {"": bets(float(one < MOST_TRIALS))})
    sums, number = here[1].heard(OLD, NEW, "f" * 32)
    assert (number, sums[""][0, 0]) == (MOST_TRIALS, MOST_TRIALS)


@pytest.mark.parametrize("place", ["nope://key:se/cret@host/x", "nope://key:se/cret@"])
def test_no_error_has_the_credentials_of_the_url(place: str, tmp_path: Path) -> None:
    with pytest.raises(RegistryError) as raised:
        SharedRegistry(place, Registry(tmp_path / "registry"))
    assert "cret" not in str(raised.value)


def test_no_failure_of_a_transfer_has_them_either(here: Side) -> None:
    shared = SharedRegistry("memory://key:se/cret@bucket", here[0])

    def fail() -> None:
        raise OSError("can't reach memory://key:se/cret@bucket")

    with pytest.raises(RegistryError, match="//bucket") as raised:
        shared._reaching(fail)
    assert "cret" not in str(raised.value)
