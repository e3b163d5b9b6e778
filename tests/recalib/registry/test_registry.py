"""The registry keeps its promises: whole versions, one active, one damaged file harms nothing else."""

import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from honed.recalib.registry.access import User
from honed.recalib.registry.durable import replace_file
from honed.recalib.registry.manifest import Figures, is_for_target
from honed.recalib.registry.registry import Manifest, Registry, RegistryError
from honed.recalib.registry.target_digest import digest_of_target, stamp_of_target
from tests.full_tmpfs import run_on_tmpfs
from tests.shut_out import shut_out
from tests.tools import ROOT


def checkpoint(fill: int, num_values: int = 16):
    """A writer of the smallest checkpoint there is, whose weights depend on `fill`."""
    header = json.dumps(
        {
            "hidden_norm.weight": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "norm.weight": {"dtype": "U16", "shape": [num_values], "data_offsets": [4, 4 + 2 * num_values]},
        }
    ).encode()

    def write(folder: Path) -> None:
        data = b"\x07" * 4 + fill.to_bytes(2, "little") * num_values
        (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
        (folder / "config.json").write_text('{"block_size": 8}')

    return write


@pytest.fixture
def registry(tmp_path):
    return Registry(tmp_path / "registry")


@pytest.fixture
def drafter_folder(tmp_path):
    """A checkpoint outside the registry."""
    folder = tmp_path / "drafter"
    folder.mkdir()
    checkpoint(5)(folder)
    return folder


def test_created_version_is_listed_verified_and_immutable(registry):
    manifest = registry.create(checkpoint(1), parent="", scope="full", figures=Figures(steps=12), data_window={"rows": 3})
    assert manifest.version == f"v0001-{manifest.sha256[:8]}"
    assert registry.get(manifest.version) == registry.verify(manifest.version) == manifest
    assert registry.versions() == [manifest]
    assert (manifest.figures, manifest.data_window, manifest.num_tensors) == (Figures(steps=12), {"rows": 3}, 2)
    for file in registry.path(manifest.version).iterdir():
        assert file.stat().st_mode & 0o777 == 0o440


def test_a_checkpoint_that_two_import_at_once_is_one_version(registry, drafter_folder, tmp_path, monkeypatch):
    shutil.copytree(drafter_folder, tmp_path / "copy")
    others = []

    def copy(*files):
        monkeypatch.undo()  # another engine's copy of it, read by another thread
        others.append(registry.import_checkpoint(tmp_path / "copy"))
        shutil.copyfileobj(*files)

    monkeypatch.setattr("honed.recalib.registry.registry.shutil.copyfileobj", copy)
    assert [registry.import_checkpoint(drafter_folder)] == others == registry.versions()
    assert not list(registry.path(others[0].version).parent.glob(".tmp-*"))


def test_versions_are_numbered_in_order_also_beyond_four_digits(registry):
    for i in range(3):
        registry.create(checkpoint(i))
    last = registry.path(registry.versions()[-1].version)
    renamed = last.with_name("v10000-" + last.name.split("-")[1])
    last.rename(renamed)
    assert registry.create(checkpoint(9)).version.startswith("v10001-")
    assert [m.version.split("-")[0] for m in registry.versions()] == ["v0001", "v0002", "v10000", "v10001"]


def test_context_digest_is_equal_where_the_context_norm_is(registry):
    first, second = registry.create(checkpoint(1)), registry.create(checkpoint(2))
    assert first.sha256 != second.sha256
    assert first.context_sha256 == second.context_sha256 != ""


def named(folder: Path, norm: float, *names: str) -> None:
    """A checkpoint of `fc` and `hidden_norm` under these names, with a tensor that vLLM ignores."""
    values = (np.ones(4, np.float32), np.full(3, norm, np.float32))
    save_file(dict(zip(names, values, strict=True)) | {"t2d": np.zeros(2, bool)}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")


@pytest.mark.fault("a drafter under other tensor names")
def test_digests_know_a_tensor_by_any_name_that_vllm_reads(registry):
    other_names = ("encoder.fc.weight", "encoder.output_norm_enc.weight")
    plain = registry.create(lambda folder: named(folder, 1.0, "fc.weight", "hidden_norm.weight"))
    other = registry.create(lambda folder: named(folder, 1.0, *other_names))
    another_norm = registry.create(lambda folder: named(folder, 2.0, *other_names))
    assert plain.sha256 != other.sha256
    assert (plain.context_sha256, plain.kv_sha256) == (other.context_sha256, other.kv_sha256)
    assert plain.context_sha256 != another_norm.context_sha256, "their fused features mean something else"


def test_an_eagle3_version_knows_what_its_rows_and_its_cache_depend_on(registry):
    names = ("fc.weight", "midlayer.hidden_norm.weight", "midlayer.self_attn.k_proj.weight", "norm.weight", "lm_head.weight")

    def made(changed: str) -> Manifest:
        def write(folder: Path) -> None:
            tensors = {name: np.full(2, 2.0 if name == changed else 1.0, np.float32) for name in names}
            save_file(tensors | {"d2t": np.zeros(2, np.int64)}, folder / "model.safetensors")
            (folder / "config.json").write_text("{}")

        return registry.create(write)

    plain, *others = (made(name) for name in ("", *names))
    assert (plain.method, plain.num_tensors) == ("eagle3", len(names))
    assert [one.context_sha256 != plain.context_sha256 for one in others] == [True, False, False, False, False]
    assert [one.kv_sha256 != plain.kv_sha256 for one in others] == [True, True, True, False, False]


OTHERS = {
    "a target": ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight", "model.norm.weight", "mtp.fc.weight"),
    "EAGLE": ("fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.up_proj.weight", "embed_tokens.weight"),
    "DeepSeek-V4's DSpark": ("mtp.0.main_proj.weight", "mtp.0.markov_head.markov_w1.weight", "mtp.0.norm.weight"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_drafter_of_a_known_method_is_never_a_version(registry, tmp_path, kind):
    """The target of an engine without a drafter became the active version."""

    def write(folder: Path) -> None:
        save_file({name: np.ones(2, np.float32) for name in OTHERS[kind]}, folder / "model.safetensors")
        (folder / "config.json").write_text("{}")

    write(tmp_path)
    with pytest.raises(RegistryError, match=r"model.safetensors holds no drafter of method dflash"):
        registry.import_checkpoint(tmp_path)
    with pytest.raises(RegistryError, match="holds no drafter"):
        registry.create(write)
    assert registry.versions() == []
    assert [path.name for path in (registry.root / "versions").iterdir()] == []


def test_import_is_idempotent(registry, drafter_folder):
    first = registry.import_checkpoint(drafter_folder, target_path="/nowhere", note="shipped")
    assert registry.import_checkpoint(drafter_folder, target_path="/nowhere") == first
    assert first.scope == "imported"
    assert len(registry.versions()) == 1


def make_target(folder: Path, name: str, value: float = 1.0) -> Path:
    target = folder / name
    target.mkdir(parents=True)
    (target / "config.json").write_text('{"model_type": "qwen3"}')
    save_file({"model.norm.weight": np.full(4, value, np.float32)}, target / "model.safetensors")
    return target


@pytest.mark.fault("a fine-tuned target in a folder of its own")
def test_the_same_drafter_of_another_target_is_another_version(registry, drafter_folder, tmp_path):
    base, tuned = make_target(tmp_path, "base"), make_target(tmp_path, "tuned", 1.5)
    first = registry.import_checkpoint(drafter_folder, target_path=str(base))
    second = registry.import_checkpoint(drafter_folder, target_path=str(tuned))
    assert second.sha256 == first.sha256
    assert (second.version != first.version, second.target_path) == (True, str(tuned))
    assert first.trial_key != second.trial_key, "a verdict on one says nothing of the other"
    shutil.rmtree(base)
    assert registry.import_checkpoint(drafter_folder, target_path=str(tuned)) == second
    assert registry.import_checkpoint(drafter_folder, target_path=str(base)) == first
    assert registry.import_checkpoint(drafter_folder) == first, "whose target nobody names"


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_target_that_took_anothers_place_is_another_one(registry, drafter_folder, tmp_path, is_sharded):
    """In the same folder; its weights alone were written anew."""
    target = make_target(tmp_path, "here")
    weights = target / "model.safetensors"
    if is_sharded:
        weights = weights.rename(target / "model-1.safetensors")
        names = load_file(weights).keys()
        (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, weights.name)}))
    made, stamp = registry.import_checkpoint(drafter_folder, target_path=str(target)), stamp_of_target(str(target))
    assert is_for_target(made, str(target), digest_of_target(str(target)))
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    assert stamp_of_target(str(target)) != stamp
    assert not is_for_target(made, str(target), digest_of_target(str(target)))
    assert registry.import_checkpoint(drafter_folder, target_path=str(target)) != made


@pytest.mark.fault("a target in a folder that was moved")
def test_a_drafter_of_a_moved_target_is_the_same_version(registry, drafter_folder, tmp_path):
    target = make_target(tmp_path, "here")
    made = registry.import_checkpoint(drafter_folder, target_path=str(target))
    there = target.rename(tmp_path / "there")
    assert registry.import_checkpoint(drafter_folder, target_path=str(there)) == made
    assert is_for_target(made, str(target), "")
    assert not is_for_target(made, str(there), ""), "as long as nobody has read it"
    assert is_for_target(made, str(there), digest_of_target(str(there)))


def test_the_same_weights_with_another_configuration_are_another_version(registry, drafter_folder):
    first = registry.import_checkpoint(drafter_folder)
    config = json.loads((drafter_folder / "config.json").read_text())
    (drafter_folder / "config.json").write_text(json.dumps(config | {"block_size": 4}))
    second = registry.import_checkpoint(drafter_folder)
    assert (second.version != first.version, second.sha256) == (True, first.sha256)
    assert json.loads((registry.path(second.version) / "config.json").read_text())["block_size"] == 4


def test_import_replaces_nothing_but_skips_a_damaged_twin(registry, drafter_folder):
    first = registry.import_checkpoint(drafter_folder)
    (registry.path(first.version) / "config.json").unlink()
    second = registry.import_checkpoint(drafter_folder)
    assert second.version != first.version
    assert second.sha256 == first.sha256


@pytest.mark.parametrize("missing", ["model.safetensors", "config.json"])
def test_import_of_half_a_checkpoint_says_what_is_missing(registry, drafter_folder, missing):
    (drafter_folder / missing).unlink()
    with pytest.raises(RegistryError, match=f"{missing} can't be read"):
        registry.import_checkpoint(drafter_folder)
    assert registry.versions() == []


TENSORS = {
    "fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "midlayer.hidden_norm.weight": np.ones(3, np.float16),
    "norm.weight": np.full(5, 2, np.float32),
    "d2t": np.arange(4),
}


def make_parts(folder: Path) -> Path:
    """An EAGLE-3 drafter in two shards."""
    folder.mkdir()
    names = sorted(TENSORS)
    files = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: TENSORS[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("kind", ["shards", "no index", "another name"])
def test_a_drafter_in_several_files_is_one_file_in_its_version(registry, tmp_path, kind):
    folder = make_parts(tmp_path / "parts")
    if kind != "shards":
        (folder / "model.safetensors.index.json").unlink()
    if kind == "another name":
        for file in folder.glob("*.safetensors"):
            file.unlink()
        save_file(TENSORS, folder / "head.safetensors")
    version = registry.import_checkpoint(folder, target_path="/nowhere")
    assert (version.method, version.scope) == ("eagle3", "imported")
    found = load_file(registry.path(version.version) / "model.safetensors")
    assert found.keys() == TENSORS.keys()
    assert all(np.array_equal(found[name], TENSORS[name]) and found[name].dtype == TENSORS[name].dtype for name in found)
    assert registry.import_checkpoint(folder, target_path="/nowhere") == version
    assert registry.versions() == [version]


def test_parts_that_make_no_drafter_are_refused(registry, tmp_path, monkeypatch):
    folder = make_parts(tmp_path / "parts")
    monkeypatch.setattr("honed.recalib.registry.registry.MAX_WEIGHTS_BYTES", 50)
    with pytest.raises(RegistryError, match="its tensors have 82 bytes, a drafter's at most 50"):
        registry.import_checkpoint(folder)
    save_file({"model.norm.weight": TENSORS["norm.weight"]}, folder / "model-0.safetensors")
    with pytest.raises(RegistryError, match="parts holds no drafter of method dflash"):
        registry.import_checkpoint(folder)
    (folder / "model-0.safetensors").write_bytes(b"")
    with pytest.raises(RegistryError, match="parts: 0 bytes long, shorter than a safetensors header"):
        registry.import_checkpoint(folder)
    assert list((registry.root / "versions").iterdir()) == []


def test_a_folder_that_this_user_may_not_enter_is_named(registry, drafter_folder):
    """Such as one below another user's home, which an operator can open only if told so."""
    with shut_out(drafter_folder), pytest.raises(RegistryError, match=r"drafter/config.json can't be read \(Permission"):
        registry.import_checkpoint(drafter_folder)


def test_parts_that_their_user_cannot_read_are_not_copied(registry, open_folder):
    folder = make_parts(open_folder / "parts")
    for one in (open_folder, folder):
        one.chmod(0o755)
    for file in folder.iterdir():
        file.chmod(0o644)
    nobody = User(65534, 65534)
    (folder / "model-1.safetensors").chmod(0o600)
    with pytest.raises(RegistryError, match="user 65534, whose engine names it, can't read it"):
        registry.import_checkpoint(folder, user=nobody)
    (folder / "model-1.safetensors").chmod(0o644)
    assert registry.import_checkpoint(folder, user=nobody).state == "ready"


def test_pickled_weights_are_refused_with_the_line_that_converts_them(registry, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "config.json").write_text("{}")
    tensors = {name: torch.from_numpy(tensor) for name, tensor in TENSORS.items()}
    torch.save(tensors | {"lm_head.weight": tensors["fc.weight"]}, tmp_path / "pytorch_model.bin")
    with pytest.raises(RegistryError, match=r"weights are in pytorch_model\.bin, and honed reads safetensors only") as refused:
        registry.import_checkpoint(tmp_path)
    assert not isinstance(refused.value.__cause__, OSError), "the cure isn't about who may read it"
    with pytest.raises(RegistryError, match=r"the target's weights are in pytorch_model\.bin"):
        registry.import_head(tmp_path)
    command = str(refused.value).split("`")[1].replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=120)
    version = registry.import_checkpoint(tmp_path)
    assert load_file(registry.path(version.version) / "model.safetensors").keys() == TENSORS.keys() | {"lm_head.weight"}


@pytest.mark.fault("a pipe in place of a checkpoint")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_only_regular_files_are_imported(registry, drafter_folder, name):
    """A pipe would block the reader for ever."""
    (drafter_folder / name).unlink()
    os.mkfifo(drafter_folder / name)
    with pytest.raises(RegistryError, match=f"{name} can't be read .not a regular file"):
        registry.import_checkpoint(drafter_folder)


@pytest.mark.fault("a path with a NUL")
@pytest.mark.parametrize("name", ["\0", "\ud800"])
def test_a_folder_that_cannot_be_is_refused_as_one_that_is_missing(registry, name):
    with pytest.raises(RegistryError, match="can't be read"):
        registry.import_checkpoint(Path("/models") / name)


@pytest.mark.fault("a pipe in place of a checkpoint")
def test_a_long_file_that_holds_nothing_is_refused_before_it_is_read(registry, drafter_folder):
    for num_bytes, why in ((8 << 30, "the file has 8589934592: cut off or appended to"), (1 << 40, "a drafter at most")):
        with (drafter_folder / "model.safetensors").open("r+b") as file:
            file.truncate(num_bytes)
        with pytest.raises(RegistryError, match=why):
            registry.import_checkpoint(drafter_folder)


@pytest.fixture
def open_folder():
    """Everybody can reach it; pytest's own folders are closed."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.fault("a checkpoint that its engine's user can't read")
def test_what_its_user_cannot_read_is_not_copied_for_it(registry, open_folder):
    """The copy is readable by the whole group: a link must not make us give away what only we can read."""
    ours, theirs = open_folder / "ours", open_folder / "theirs"
    ours.mkdir()
    theirs.mkdir()
    checkpoint(5)(ours)
    for name in ("model.safetensors", "config.json"):
        (theirs / name).symlink_to(ours / name)
    for folder in (ours, theirs, open_folder):
        folder.chmod(0o755)
    nobody = User(65534, 65534)
    (ours / "model.safetensors").chmod(0o600)
    with pytest.raises(RegistryError, match="user 65534, whose engine names it, can't read it"):
        registry.import_checkpoint(theirs, user=nobody)
    (ours / "model.safetensors").chmod(0o644)
    (ours / "config.json").chmod(0o644)
    ours.chmod(0o700)
    with pytest.raises(RegistryError, match="can't read it"):
        registry.import_checkpoint(theirs, user=nobody)
    assert registry.versions() == []
    ours.chmod(0o755)
    assert registry.import_checkpoint(theirs, user=nobody).state == "ready"
    ours.chmod(0o700)
    assert registry.import_checkpoint(ours, user=User(os.geteuid(), os.getegid())).state == "ready"


def test_create_that_fails_leaves_nothing(registry):
    def half(folder):
        (folder / "model.safetensors").write_bytes(b"\x10" + b"\0" * 30)
        (folder / "config.json").write_text("{}")

    def raising(folder):
        raise KeyError("mid-write")

    with pytest.raises(RegistryError, match=r"not a sound safetensors file"):
        registry.create(half)
    with pytest.raises(KeyError):
        registry.create(raising)
    assert list((registry.root / "versions").iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["../../etc", "v0001-1a2b3c4d/..", "/etc/passwd", "", ".", "v1-1a2b3c4d", "v0001-XXXXXXXX", "v0001-1a2b3c4d\n"],
)
def test_names_that_are_no_versions_are_refused(registry, name):
    for use in (registry.get, registry.path, registry.verify, lambda n: registry.set_aliases({"active": n or "x"})):
        with pytest.raises(RegistryError, match="no version"):
            use(name)


def test_unknown_alias_is_refused(registry):
    version = registry.create(checkpoint(1)).version
    for use in (lambda: registry.alias("../active"), lambda: registry.set_aliases({"best": version})):
        with pytest.raises(RegistryError, match="unknown alias"):
            use()


def test_aliases_move_and_generation_grows(registry):
    a, b = (registry.create(checkpoint(i)).version for i in (1, 2))
    assert registry.aliases() == dict.fromkeys(("active", "candidate", "previous", "floor"))
    assert registry.generation == 0
    generations = [
        registry.set_aliases({"active": a}),
        registry.set_aliases({"candidate": b}),
        registry.set_aliases({"previous": a, "active": b, "candidate": None}),
    ]
    assert generations == [1, 2, 5]
    assert registry.generation == 5
    assert registry.aliases() == {"active": b, "candidate": None, "previous": a, "floor": None}


def test_concurrent_changes_all_count(registry):
    version = registry.create(checkpoint(1)).version

    def change():
        for _ in range(10):
            Registry(registry.root).set_aliases({"candidate": version})

    threads = [threading.Thread(target=change) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert registry.generation == 40


@pytest.mark.parametrize(
    ("file", "damage", "reason"),
    [
        ("manifest.json", lambda p: p.write_text("{"), "manifest.json is damaged"),
        ("manifest.json", lambda p: p.write_text('{"version": 3}'), "manifest.json is damaged"),
        ("manifest.json", lambda p: p.unlink(), "manifest.json can't be read"),
        pytest.param(
            "manifest.json",
            lambda p: os.truncate(p, 3 << 30),
            "manifest.json can't be read .longer than 4194304 bytes",
            marks=pytest.mark.fault("headers and manifests without end"),
        ),
        ("model.safetensors", lambda p: p.unlink(), "model.safetensors can't be read"),
        ("model.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1]), "model.safetensors has"),
    ],
)
def test_a_damaged_version_is_listed_as_corrupt_and_harms_no_other(registry, file, damage, reason):
    bad, good = registry.create(checkpoint(1)), registry.create(checkpoint(2))
    target = registry.path(bad.version) / file
    target.chmod(0o600)
    damage(target)
    with pytest.raises(RegistryError, match=reason):
        registry.get(bad.version)
    with pytest.raises(RegistryError, match=reason):
        registry.set_aliases({"active": bad.version})
    listed = Registry(registry.root).versions()
    assert [(m.version, m.state) for m in listed] == [(bad.version, "corrupt"), (good.version, "ready")]
    assert "\n" not in listed[0].error
    assert registry.set_aliases({"active": good.version}) == 1


def test_verify_finds_changed_bytes_of_equal_length(registry):
    version = registry.create(checkpoint(1)).version
    for name in ("model.safetensors", "config.json"):
        path = registry.path(version) / name
        data = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:] if name[0] == "m" else data.replace(b"8", b"9"))
        registry.get(version)
        with pytest.raises(RegistryError, match=f"{name} has sha256"):
            registry.verify(version)
        path.write_bytes(data)
    registry.verify(version)


def test_damaged_alias_points_nowhere_and_can_be_set_anew(registry):
    version = registry.create(checkpoint(1)).version
    registry.set_aliases({"active": version})
    alias = registry.root / "aliases" / "active"
    alias.unlink()
    alias.symlink_to("../../evil 7")
    assert registry.aliases()["active"] is None
    with pytest.raises(RegistryError, match="damaged"):
        registry.alias("active")
    registry.set_aliases({"active": version})
    assert registry.alias("active") == version


@pytest.mark.fault("aliases that are synced while everyone waits")
def test_aliases_wait_for_no_version_that_is_published(registry, monkeypatch):
    """Who changes them may hold up others, and a publication waits for the disk."""
    version, ended = registry.create(checkpoint(1)).version, []

    def replace(*arguments):
        other = threading.Thread(target=lambda: registry.set_aliases({"active": version}), daemon=True)
        other.start()
        other.join(10.0)
        ended.append(not other.is_alive())
        replace_file(*arguments)

    monkeypatch.setattr("honed.recalib.registry.registry.replace_file", replace)
    registry.create(checkpoint(2))
    assert ended == [True]


def test_prune_keeps_the_newest_and_whatever_has_a_name(registry):
    versions = [registry.create(checkpoint(i)).version for i in range(6)]
    registry.set_aliases({"floor": versions[0], "active": versions[2]})
    assert registry.prune(keep=2) == [], "a crash may undo what isn't synced"
    registry.sync_aliases()
    assert registry.prune(keep=2) == [versions[1], versions[3]]
    assert [m.version for m in registry.versions()] == [versions[0], versions[2], *versions[4:]]
    registry.prune(keep=0, spared=[versions[4]])
    assert [m.version for m in registry.versions()] == [versions[0], versions[2], *versions[4:]]
    registry.prune(keep=0)
    assert [m.version for m in registry.versions()] == [versions[0], versions[2], versions[5]]
    folder = registry.root / "versions"
    assert len(list(folder.iterdir())) == 6, "a version's files are removed while somebody waits for the lock"
    registry.sweep()
    assert len(list(folder.iterdir())) == 3


def test_opening_spares_the_folder_of_a_living_writer(registry):
    def write(folder):
        Registry(registry.root)  # another process starts meanwhile
        checkpoint(1)(folder)

    registry.create(write)
    assert len(registry.versions()) == 1


def test_full_disk_is_one_clear_error(registry, monkeypatch):
    version = registry.create(checkpoint(1)).version

    def no_space(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("honed.recalib.registry.durable.fsync_path", no_space)
    monkeypatch.setattr("honed.recalib.registry.registry.fsync_path", no_space)
    with pytest.raises(RegistryError, match="No space left on device"):
        registry.create(checkpoint(2))
    assert [m.version for m in registry.versions()] == [version]


_CHILD = """
import sys
from pathlib import Path
from tests.recalib.registry.test_registry import checkpoint
from honed.recalib.registry.registry import Registry
registry = Registry(Path(sys.argv[1]))
print("ready", flush=True)
i = int(sys.argv[2]) * 1000
while True:
    i += 1
    version = registry.create(checkpoint(i % 65536, 4096)).version
    registry.set_aliases({"previous": registry.alias("active"), "active": version, "candidate": None})
    registry.sync_aliases()
    registry.prune(keep=3)
    registry.sweep()
"""


def test_kill_at_any_moment_leaves_whole_versions_and_one_active(tmp_path):
    """A process that creates, promotes and prunes without end is killed again and again, wherever it happens to be."""
    root, rng, seen, had_active = tmp_path / "registry", random.Random(1), 0, False
    for cycle in range(24):
        child = subprocess.Popen([sys.executable, "-c", _CHILD, str(root), str(cycle)], stdout=subprocess.PIPE, cwd=ROOT)
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        # Waits for a few milliseconds' worth of its work; where that ends is the point of the test, not its length.
        threading.Event().wait(rng.uniform(0.002, 0.05))
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        child.stdout.close()
        registry = Registry(root)
        assert [m.error for m in registry.versions() if m.state != "ready"] == []
        for manifest in registry.versions():
            registry.verify(manifest.version)
        aliases = registry.aliases()
        for version in filter(None, aliases.values()):
            registry.get(version)
        if had_active:
            assert aliases["active"] is not None
        had_active = aliases["active"] is not None
        assert registry.generation >= seen
        seen = registry.generation
        assert [p.name for p in (root / "versions").iterdir() if p.name.startswith(".")] == []
    assert had_active


def test_only_its_own_user_can_hold_the_lock(registry):
    registry.create(checkpoint(1), target_path="t")
    registry.set_aliases({"active": None})
    for name in (".lock", ".aliases.lock"):
        assert stat.S_IMODE((registry.root / name).stat().st_mode) == 0o600


FULL_DISK = """
import errno, sys
from pathlib import Path
from honed.recalib.registry.registry import Registry
from tests.recalib.registry.test_registry import checkpoint

registry = Registry(Path(sys.argv[1]) / "registry")
one, two = (registry.create(checkpoint(fill)).version for fill in (1, 2))
registry.set_aliases({"previous": one, "active": two})
filler = open(Path(sys.argv[1]) / "filler", "wb", buffering=0)
try:
    while filler.write(bytes(4096)):
        pass
except OSError as error:
    assert error.errno == errno.ENOSPC
for _ in range(8):  # the room that a change leaves is used again
    registry.set_aliases({"previous": two, "active": one})
    registry.set_aliases({"previous": one, "active": two})
again = Registry(registry.root)
assert again.aliases()["active"] == two, again.aliases()
again.set_aliases({"active": one})
assert Registry(registry.root).alias("active") == one
filler.truncate(0)
again.set_aliases({"active": two})
assert (registry.root / ".reserve").stat().st_blocks * 512 >= 1 << 16
"""


@pytest.mark.fault("a full disk under the registry")
def test_a_full_disk_keeps_nobody_from_going_back(tmp_path):
    run_on_tmpfs(tmp_path, "1m", FULL_DISK, str(tmp_path))
