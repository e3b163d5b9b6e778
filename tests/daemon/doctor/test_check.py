"""What doctor says of the machine, the daemon and Prometheus; each check is shown to find what it looks for."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import structlog
from click.testing import Result
from rich.console import Console
from safetensors.numpy import save_file
from typer.testing import CliRunner

from honed.adapt.protocol import wire
from honed.attach.engine.busy_flag import BusyFlag
from honed.daemon.commands import doctor as doctor_command
from honed.daemon.commands.main import app
from honed.daemon.doctor import daemon as doctor_daemon
from honed.daemon.doctor import diagnose, service_environment
from honed.daemon.doctor import host as doctor_host
from honed.daemon.doctor import memory as doctor_memory
from honed.daemon.doctor import start as doctor_start
from honed.daemon.doctor.check import ORDER, Check, exit_code, worst_first
from honed.daemon.process.serve import start
from honed.daemon.settings.sections import HttpSettings
from honed.daemon.settings.settings import load
from honed.daemon.store import database
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.config.engine_gpus import EngineGpus
from honed.recalib.config.memory import MemoryEstimate
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.config.training import Precision, Scope
from honed.recalib.registry.registry import Registry
from honed.recalib.registry.vocabulary import VocabularyTensors, vocabulary_tensors
from honed.recalib.training import training_run
from honed.recalib.training.progress import Progress
from tests.daemon.commands.show.test_status import HEALTHY
from tests.daemon.fake_engine import FakeEngine
from tests.daemon.small_server import serving
from tests.shut_out import shut_out
from tests.tools import ROOT

GIB = 1 << 30
TINY = ROOT / "benchmarks" / "tiny"


def levels(checks: Iterator[Check] | list[Check]) -> list[str]:
    return [check.level for check in checks]


def only(checks: Iterator[Check]) -> Check:
    (found,) = checks
    assert found.level == "ok" or found.cure or found.level == "unknown", "what is wrong comes with a cure"
    return found


# --- folders, sockets, disk -------------------------------------------------------------------------------------------------


def test_folders_that_everybody_can_enter_are_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o750)
    assert only(doctor_host.check_folder("state directory", tmp_path)).level == "ok"
    tmp_path.chmod(0o755)
    found = only(doctor_host.check_folder("state directory", tmp_path))
    assert (found.level, found.cure) == ("error", f"chmod o= {tmp_path}")
    assert only(doctor_host.check_folder("state directory", tmp_path / "gone")).level == "warning"
    with monkeypatch.context() as patch:
        patch.setattr(doctor_host.os.path, "ismount", lambda path: True)
        patch.setattr(doctor_host.os, "geteuid", lambda: os.getuid() + 1)
        cure = only(doctor_host.check_folder("state directory", tmp_path)).cure
    assert f"{tmp_path}/private" in cure, "nobody but root may change the mode of a container's volume"
    (tmp_path / "file").write_text("")
    (tmp_path / "file").chmod(0o600)
    assert "isn't a folder" in only(doctor_host.check_folder("x", tmp_path / "file")).text


def test_a_runtime_folder_on_disk_is_a_warning() -> None:
    assert levels(doctor_host.check_in_memory(Path("/dev/shm"))) == []
    found = only(doctor_host.check_in_memory(Path(__file__).parent))
    assert found.level == "warning"
    assert "samples, which reveal prompts, reach the disk" in found.text


def test_engines_folders_must_hand_on_their_group(tmp_path: Path) -> None:
    assert levels(doctor_host.check_engines_folder(tmp_path / "gone")) == []
    tmp_path.chmod(0o2770)
    assert only(doctor_host.check_engines_folder(tmp_path)).level == "ok"
    tmp_path.chmod(0o770)
    assert "chmod g+s" in only(doctor_host.check_engines_folder(tmp_path)).cure
    tmp_path.chmod(0o700)
    assert only(doctor_host.check_engines_folder(tmp_path)).level == "ok"  # daemon and vLLM are one user


def test_sockets_are_told_apart(folder: Path) -> None:
    path = folder / "s"
    assert "no daemon is running" in only(doctor_host.check_socket("admin socket", path)).text
    path.write_text("")
    assert only(doctor_host.check_socket("admin socket", path)).text == f"{path} isn't a socket"
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        path.chmod(0o660)
        assert "nobody listens" in only(doctor_host.check_socket("admin socket", path)).text
        listener.listen()
        assert only(doctor_host.check_socket("admin socket", path)).level == "ok"
        path.chmod(0o666)
        assert only(doctor_host.check_socket("admin socket", path)).cure == f"chmod 0660 {path}"


def test_a_sqlite_that_corrupts_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor_host.check_sqlite()).level == "ok"
    monkeypatch.setattr(database.sqlite3, "sqlite_version_info", (3, 40, 1))
    found = only(doctor_host.check_sqlite())
    assert found.level == "error"
    assert "SQLite 3.40.1 can corrupt databases" in found.text
    assert "pysqlite3" in found.cure


def test_a_trainer_without_pytorch_or_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert only(doctor_host.check_torch("cpu")).level == "ok"
    monkeypatch.setattr(doctor_host.os.path, "exists", lambda path: False)
    assert only(doctor_host.check_torch("cuda:0")).level == "error"
    monkeypatch.setattr(doctor_host, "find_spec", lambda name: None)
    assert "pip install '/path/to/honed[train]'" in only(doctor_host.check_torch("cpu")).cure
    assert only(doctor_host.check_torch("cpu", is_connected=True)).level == "ok", "a trainer in another container"


def test_a_trainer_on_cuda_needs_a_compiler_and_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    found = doctor_host.check_compiler(tmp_path)
    assert found.level == "error"
    assert f"there is no C compiler (gcc or clang) and no {tmp_path}/Python.h: training on CUDA" in found.text
    assert "apt install gcc python3." in found.cure
    (tmp_path / "Python.h").write_text("")
    assert "Python.h" not in doctor_host.check_compiler(tmp_path).text
    (tmp_path / "clang").write_text("")
    (tmp_path / "clang").chmod(0o755)
    assert doctor_host.check_compiler(tmp_path).level == "ok"
    monkeypatch.setenv("CC", "icc")
    assert "no C compiler (icc), which CC names:" in doctor_host.check_compiler(tmp_path).text
    monkeypatch.setattr(doctor_host.os.path, "exists", lambda path: True)
    assert [check.subject for check in doctor_host.check_torch("cuda")] == ["trainer", "trainer's compiler"]
    assert [check.subject for check in doctor_host.check_torch("cpu")] == ["trainer"]


# --- memory -----------------------------------------------------------------------------------------------------------------

GPUS = "6d9c4b9e-8f6b-4f0e-9a53-0d1e2f3a4b5c", "00000000-8f6b-4f0e-9a53-0d1e2f3a4b5c"
SMI = f"0, 143771, 20000, 9.0, GPU-{GPUS[0]}\n1, 143771, 100, 9.0, GPU-{GPUS[1]}\n"


def need(num_bytes: int, **changes: Any) -> doctor_memory.Need:
    cures = [("trainer.seed = 1 makes it fit", MemoryEstimate({"weights": num_bytes // 2}))]
    return doctor_memory.Need(MemoryEstimate({"weights": num_bytes}), cures, **changes)


def tiny_config() -> DrafterConfig:
    return DrafterConfig.from_json(json.loads((TINY / "drafter" / "config.json").read_text()))


@pytest.mark.parametrize("scope", ["kv-frozen", "full"])
@pytest.mark.parametrize("precision", ["auto", "float32", "bfloat16"])
def test_the_need_is_what_the_trainer_says(monkeypatch: pytest.MonkeyPatch, scope: Scope, precision: Precision) -> None:
    said: list[MemoryEstimate] = []
    monkeypatch.setattr(training_run, "check_fits", lambda needed, *rest: said.append(needed))
    settings = TrainerSettings(precision=precision)
    request = wire.TrainRequest("o", str(TINY / "target"), "v0", scope=scope)
    feed = SimpleNamespace(is_fused=scope != "full")
    run = training_run.TrainingRun(request, settings, TINY / "drafter", feed, Progress(), lambda: 0.0, None)  # type: ignore[arg-type]
    run.check_memory()
    vocabulary = vocabulary_tensors(TINY / "drafter", TINY / "target")
    needed = doctor_memory.need(settings, tiny_config(), scope, is_fused=feed.is_fused, vocabulary=vocabulary)
    assert said == [needed.estimate]


def test_a_drafter_that_is_not_known_is_guessed_and_that_is_said() -> None:
    guess, unknown = "no version is active yet", VocabularyTensors()
    found = doctor_memory.need(TrainerSettings(), None, "kv-frozen", is_fused=True, vocabulary=unknown, guess=guess)
    assert 23 * GIB < found.total_bytes < 25 * GIB  # 1.05 B parameters, in float32
    assert "a guess, as for the drafter of an 8B target: no version is active yet" in str(found)
    assert "a guess" in only(doctor_memory.check_gpu(SMI, "cuda:1", found)).text
    assert only(doctor_memory.check_gpu(SMI, "cuda:1", found)).level == "unknown"
    host = f"MemAvailable: {4 * GIB >> 10} kB\n"
    assert only(doctor_memory.check_host(host, found, GIB)).level == "unknown"
    assert only(doctor_memory.check_host(host, found, 5 * GIB)).level == "warning", "the samples alone don't fit"


def test_the_active_version_s_own_shape_counts(tmp_path: Path) -> None:
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    active = {"drafters": {"active": "v0001-aaaaaaaa"}}
    assert diagnose._drafter(settings, None) == (None, "no daemon says which version is active")
    assert diagnose._drafter(settings, {"drafters": {}}) == (None, "no version is active yet")
    assert diagnose._drafter(settings, active) == (None, "the config.json of version v0001-aaaaaaaa can't be read")
    folder = tmp_path / "registry" / "versions" / "v0001-aaaaaaaa"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert "version v0001-aaaaaaaa: " in diagnose._drafter(settings, active)[1]
    (folder / "config.json").write_text((TINY / "drafter" / "config.json").read_text())
    assert diagnose._drafter(settings, active) == (tiny_config(), "")
    (found,) = [c for c in diagnose._memory(settings, active) if c.subject == "memory"]
    assert "a guess" not in found.text
    assert diagnose._drafter(settings, None) == (tiny_config(), ""), "the newest one, while no daemon says"


@pytest.mark.parametrize(("drafter", "is_guess"), [(str(TINY / "drafter"), False), ("z-lab/somewhere-else", True)])
def test_memory_is_judged_for_the_drafter_that_a_command_names(tmp_path: Path, drafter: str, is_guess: bool) -> None:
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    command = ["vllm", "serve", "target", "--speculative-config", json.dumps({"method": "dflash", "model": drafter})]
    (found,) = [c for c in diagnose._memory(settings, None, command) if c.subject == "memory"]
    assert ("a guess" in found.text) == is_guess
    (found,) = diagnose._room(settings, None, command)
    assert ("GiB for drafter versions" in found.text) == is_guess


LLAMA = {"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def test_the_method_tells_the_shape_of_a_drafter_with_its_layers_plain_name(tmp_path: Path) -> None:
    """It is the command's, or the version's."""
    raw, drafter = LLAMA | {"architectures": ["LlamaForCausalLM"]}, tmp_path / "drafter"
    drafter.mkdir()
    (drafter / "config.json").write_text(json.dumps(raw))
    tensors = ("fc.weight", "midlayer.hidden_norm.weight", "norm.weight")
    save_file({name: np.ones(2, np.float32) for name in tensors}, drafter / "model.safetensors")
    wanted = DrafterConfig.from_json(raw, "eagle3")
    assert diagnose._named(["vllm", "serve", "m", "--spec-method", "eagle3", "--spec-model", str(drafter)]) == wanted
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    version = Registry(settings.paths.registry).import_checkpoint(drafter).version
    assert diagnose._drafter(settings, {"drafters": {"active": version}}) == (wanted, "")


def test_memory_is_judged_for_a_drafter_that_is_served_as_the_model(tmp_path: Path) -> None:
    raw = {
        "speculators_model_type": "eagle3",
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 4}], "verifier": {"name_or_path": "target"}},
        "transformer_layer_config": LLAMA,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert diagnose._named(["vllm", "serve", str(tmp_path)]) == DrafterConfig.from_json(raw)


def test_embeddings_and_heads_are_counted_by_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command names both files. Without one it is the active version, and its engine's or its manifest's target."""
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    told, need = list[VocabularyTensors](), doctor_memory.need

    def note(*args: Any, vocabulary: VocabularyTensors, **about: Any) -> doctor_memory.Need:
        told.append(vocabulary)
        return need(*args, vocabulary=vocabulary, **about)

    def seen(status: dict[str, Any] | None, command: list[str]) -> VocabularyTensors:
        list(diagnose._memory(settings, status, command))
        return told[-1]

    monkeypatch.setattr(doctor_memory, "need", note)
    drafter, target = str(TINY / "drafter"), str(TINY / "target")
    command = ["vllm", "serve", target, "--speculative-config", json.dumps({"method": "dflash", "model": drafter})]
    known, unknown = vocabulary_tensors(TINY / "drafter", TINY / "target"), VocabularyTensors()
    assert known.own_values is not None
    assert seen(None, command) == known
    assert seen(None, []) == unknown
    registry = Registry(settings.paths.registry)
    elsewhere, here = (registry.import_checkpoint(TINY / "drafter", target_path=path) for path in ("/nowhere", target))
    assert seen({"drafters": {"active": here.version}}, []) == known
    active = {"drafters": {"active": elsewhere.version}}
    assert seen(active, []) == unknown
    assert seen(active | {"engines": [{"target_path": target}]}, []) == known
    closed = tmp_path / "closed"
    closed.mkdir()
    with shut_out(closed):
        assert seen({"engines": [{"target_path": str(closed / "target")}]}, []) == unknown


@pytest.mark.parametrize(("state", "is_judged"), [("idle", True), ("collecting", True), ("training", False), ("gating", False)])
def test_what_a_running_training_takes_is_not_held_against_it(tmp_path: Path, state: str, is_judged: bool) -> None:
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    found = only(diagnose._memory(settings, {"trainer": {"state": state}}))
    assert (found.subject, "are available" in found.text) == ("memory", is_judged)


@pytest.mark.parametrize(("free_mib", "says"), [(100_000, "on GPU 0"), (5_000, "it trains on the CPU")])
def test_of_auto_it_says_where_a_training_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_mib: int, says: str
) -> None:
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    monkeypatch.setattr(doctor_host, "DRIVER", str(tmp_path))
    monkeypatch.setattr(doctor_memory, "gpu_listing", lambda: f"0, 143771, {free_mib}, 9.0, GPU-{GPUS[0]}\n")
    on_gpu, on_host = diagnose._memory(settings, None)
    assert (on_gpu.subject, on_gpu.level) == ("GPU memory", "ok")
    assert says in on_gpu.text
    assert ("of the rest training may take" in on_host.text) == (free_mib == 5_000)
    monkeypatch.setattr(doctor_host, "DRIVER", str(tmp_path / "none"))
    assert [check.subject for check in diagnose._memory(settings, None)] == ["memory"]


def test_a_training_takes_more_on_a_gpu_that_only_emulates_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    monkeypatch.setattr(doctor_host, "DRIVER", str(tmp_path))
    texts = {}
    for capability in ("7.5", "8.0", "12.0", "[N/A]"):
        monkeypatch.setattr(
            doctor_memory, "gpu_listing", lambda is_of=capability: f"0, 143771, 100000, {is_of}, GPU-{GPUS[0]}\n"
        )
        texts[capability] = next(iter(diagnose._memory(settings, None))).text
    assert texts["8.0"] == texts["12.0"] == texts["[N/A]"]
    size = re.compile(r"training takes about (\d+\.\d) GiB")
    assert float(size.search(texts["7.5"])[1]) > float(size.search(texts["8.0"])[1])  # type: ignore[index]


def test_of_several_gpus_it_names_the_one_that_auto_takes() -> None:
    assert doctor_memory.roomiest(SMI) == "cuda:0"
    assert doctor_memory.roomiest("0, 143771, 100, 9.0, GPU-a\n1, 143771, 20000, 9.0, GPU-b\n") == "cuda:1"
    assert doctor_memory.roomiest(None) == "cuda"


def test_gpu_memory_left_for_training() -> None:
    assert only(doctor_memory.check_gpu(SMI, "cuda", need(10 * GIB))).level == "ok"
    found = only(doctor_memory.check_gpu(SMI, "cuda:1", need(10 * GIB)))
    assert found.level == "error"
    assert "100 MiB of 140.4 GiB are free on GPU 1, 0 MiB of it for training; training takes about 10.0 GiB" in found.text
    assert "Lower vLLM's --gpu-memory-utilization by 0.08 and restart it; or set trainer.device to cpu." in found.cure
    assert "the machine's GPUs are 0, 1" in only(doctor_memory.check_gpu(SMI, "cuda:7", need(1))).text
    assert only(doctor_memory.check_gpu(None, "cuda", need(1))).level == "unknown"


def test_a_tenth_of_what_is_free_is_left_to_others() -> None:
    assert only(doctor_memory.check_gpu(SMI, "cuda", need(17 * GIB))).level == "ok"
    found = only(doctor_memory.check_gpu(SMI, "cuda", need(19 * GIB)))  # of 19.5
    assert (found.level, found.cure.partition("; or ")[2]) == ("error", "trainer.seed = 1 makes it fit.")


def test_what_engines_will_still_want_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM allocates its largest batch's activations when that batch comes."""
    engines = [EngineGpus("e", True, {GPUS[0]: 8 * GIB})]
    assert only(doctor_memory.check_gpu(SMI, "cuda", need(10 * GIB), engines=engines)).level == "ok"
    found = only(doctor_memory.check_gpu(SMI, "cuda", need(12 * GIB), engines=engines))  # of 19.5
    assert (found.level, "11.0 GiB of it for training (engines will still want 8.0 GiB)" in found.text) == ("error", True)
    assert not doctor_memory.may_fit(SMI, "cuda", need(12 * GIB), engines)
    assert doctor_memory.may_fit(SMI, "cuda", need(12 * GIB), [EngineGpus("e", True, {GPUS[1]: 8 * GIB})])
    settings = load(None, {"paths": {"state_dir": tmp_path, "runtime_dir": tmp_path}}, {})
    monkeypatch.setattr(doctor_host, "DRIVER", str(tmp_path))
    monkeypatch.setattr(doctor_memory, "gpu_listing", lambda: f"0, 143771, 100000, 9.0, GPU-{GPUS[0]}\n")
    page = BusyFlag(tmp_path / "engines" / "e" / "busy")
    page.tell_gpus({GPUS[0]: 90 * GIB})
    text = next(c.text for c in diagnose._memory(settings, None) if c.subject == "GPU memory")
    page.close()
    assert "engines will still want 90.0 GiB" in text
    assert "it trains on the CPU" in text


def test_the_gpu_of_an_engine_that_is_down_is_kept_for_it() -> None:
    down = [EngineGpus("chat-0", False, {GPUS[0]: GIB})]
    assert doctor_memory.roomiest(SMI, down) == "cuda:1"
    found = only(doctor_memory.check_gpu(SMI, "cuda:0", need(GIB), is_auto=True, engines=down))
    assert (found.level, found.text.startswith("chat-0 isn't running, and GPU 0 is kept")) == ("warning", True)
    assert not doctor_memory.may_fit(SMI, "cuda:0", need(GIB), down)
    assert only(doctor_memory.check_gpu(SMI, "cuda:0", need(GIB), engines=down)).level == "ok", "where it was asked for"


def test_a_limit_that_is_too_low_for_training() -> None:
    found = only(doctor_memory.check_gpu(SMI, "cuda", need(10 * GIB, limit_bytes=6 * GIB)))
    assert (found.level, "trainer.memory_bytes allows 6.0 GiB" in found.text) == ("error", True)
    assert found.cure == f"Raise trainer.memory_bytes to {10 * GIB}; or trainer.seed = 1 makes it fit."
    meminfo = "MemAvailable:   8388608 kB\n"
    assert "Raise trainer.memory_bytes" in only(doctor_memory.check_host(meminfo, need(GIB, limit_bytes=1), GIB)).cure


def test_memory_of_the_machine() -> None:
    meminfo = "MemTotal: 1 kB\nMemAvailable:   8388608 kB\n"
    assert only(doctor_memory.check_host(meminfo, need(4 * GIB), 2 * GIB)).level == "ok"
    found = only(doctor_memory.check_host(meminfo, need(7 * GIB), 2 * GIB))
    assert (found.level, "trainer.seed = 1 makes it fit" in found.cure) == ("warning", True)
    assert only(doctor_memory.check_host(meminfo, None, 2 * GIB)).level == "ok"
    assert only(doctor_memory.check_host(meminfo, None, 9 * GIB)).level == "warning"


# --- the daemon's own word --------------------------------------------------------------------------------------------------


def engine(drafted: int, accepted: int, **changes: Any) -> dict[str, Any]:
    figures = {"drafted_by_position": [drafted, drafted], "accepted_by_position": [accepted, 0], "honed_version": "0.1.0"}
    return HEALTHY | {"engines": [HEALTHY["engines"][0] | figures | changes]}


def test_a_drafter_of_another_target_shows_in_what_is_accepted() -> None:
    (found,) = [c for c in doctor_daemon.check_daemon(engine(5000, 150), "0.1.0") if c.level != "ok"]
    assert found.level == "error"
    assert "right on 3.0 % of first tokens in 5,000 rounds: it was trained for another target" in found.text
    assert "honed recalibrate" in found.cure
    assert levels(doctor_daemon.check_daemon(engine(5000, 3500), "0.1.0")) == ["ok", "ok"]
    assert levels(doctor_daemon.check_daemon(engine(40, 0), "0.1.0")) == ["ok"]  # too few to say


def test_versions_that_differ_are_named() -> None:
    texts = [c.text for c in doctor_daemon.check_daemon(engine(0, 0, honed_version="0.0.9"), "0.2.0") if c.level == "warning"]
    assert texts == ["it runs honed 0.1.0, this command is 0.2.0", "has honed 0.0.9, the daemon 0.1.0"]


def test_what_status_finds_doctor_says_too() -> None:
    found = list(doctor_daemon.check_daemon(HEALTHY | {"trainer": None, "problems": ["the writer thread has ended"]}, "0.1.0"))
    assert levels(found) == ["ok", "error", "warning"]


def test_metrics_and_prometheus() -> None:
    def fetch(status: int, body: str) -> Callable[[str], tuple[int, str]]:
        return lambda url: (status, body)

    def check(address: str, fetch: Callable[[str], tuple[int, str]], **changes: Any) -> Iterator[Check]:
        return doctor_daemon.check_metrics(HttpSettings(metrics_listen=address, **changes), fetch)

    assert only(check("0.0.0.0:9464", lambda url: (200, f"honed_build_info {url}"), metrics_plaintext=True)).level == "ok"
    protected = only(check("0.0.0.0:9464", fetch(0, ""), metrics_web_config=Path("/none.yml")))
    assert (protected.level, "https://HOST:9464/metrics" in protected.cure) == ("unknown", True)
    assert only(check("127.0.0.1:9464", fetch(200, "honed_build_info{} 1"))).level == "ok"
    assert "isn't honed's" in only(check("127.0.0.1:9464", fetch(200, "go_info 1"))).text
    assert "answers 404" in only(check("127.0.0.1:9464", fetch(404, ""))).text
    assert "gives no answer (refused)" in only(check("127.0.0.1:9464", fetch(0, "refused"))).text
    assert only(check("", fetch(200, ""))).level == "warning"
    check_prometheus = doctor_daemon.check_prometheus
    assert only(check_prometheus("http://p", fetch(200, '{"value":[1,"1"]}'), is_asked=False)).level == "ok"
    assert only(check_prometheus("http://p", fetch(200, '{"result":[]}'), is_asked=False)).level == "warning"
    assert only(check_prometheus("http://p", fetch(0, "refused"), is_asked=False)).level == "unknown"
    assert only(check_prometheus("http://p", fetch(0, "refused"), is_asked=True)).level == "error"


# --- the command ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    for name in [name for name in os.environ if name.startswith("HONED_")]:
        monkeypatch.delenv(name)
    found = {"runtime_dir": folder / "run", "state_dir": folder / "state"}
    monkeypatch.setenv("HONED_RUNTIME_DIR", str(found["runtime_dir"]))
    monkeypatch.setenv("HONED_STATE_DIR", str(found["state_dir"]))
    monkeypatch.setattr("honed.daemon.doctor.diagnose.vllm_processes.running", lambda: [])
    return found


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


def of(result: Result, level: str) -> dict[str, str]:
    return {c["subject"]: c["text"] for c in json.loads(result.stdout)["checks"] if c["level"] == level}


def test_without_a_daemon_it_says_so_once_and_ends_with_1(paths: dict[str, Path]) -> None:
    result = run("--json")
    assert result.exit_code == 1
    assert set(of(result, "error")) == {"admin socket", "engine socket"}


def test_a_user_who_may_not_enter_the_state_folder_is_answered(paths: dict[str, Path]) -> None:
    """Such as one outside of the service's group."""
    paths["state_dir"].mkdir()
    run("--json")  # imports all
    with shut_out(paths["state_dir"]):
        result = run("--json")
    assert of(result, "unknown")["state directory"] == f"{paths['state_dir']}: Permission denied"


@pytest.mark.fault("wrong settings that restart for ever")
def test_what_a_start_would_refuse_is_said_though_no_daemon_answers(
    paths: dict[str, Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "web.yml").write_text("tls_config: {}")
    monkeypatch.setenv("HONED_HTTP__METRICS_WEB_CONFIG", str(folder / "web.yml"))
    monkeypatch.setenv("HONED_HTTP__ADMIN_LISTEN", "127.0.0.1:9465")
    monkeypatch.setenv("HONED_REGISTRY__URL", "nope://key:se/cret@bucket")
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    result = run("--json")
    found = of(result, "error")
    assert "tls_config is unknown" in found["web config"]
    assert "needs an admin token" in found["tokens"]
    assert "Protocol not known: nope" in found["shared registry"]
    assert "cret" not in result.stdout
    (folder / "web.yml").write_text("{}")
    (folder / "token").write_text("a" * 32)
    monkeypatch.setenv("HONED_HTTP__ADMIN_TOKEN_FILE", str(folder / "token"))
    monkeypatch.setenv("HONED_REGISTRY__URL", "memory://x")
    assert {"web config", "tokens", "shared registry"} <= set(of(run("--json"), "ok"))


@pytest.mark.fault("wrong settings that restart for ever")
def test_the_services_tokens_are_where_systemd_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load(None, {"http": {"metrics_listen": "", "admin_listen": "127.0.0.1:9465"}}, {})
    monkeypatch.setattr(doctor_start, "CREDENTIALS", (tmp_path / "gone", tmp_path))
    assert levels(doctor_start.check_start(settings, is_service=True)) == ["error"]
    (tmp_path / "honed-admin-token").write_text("a" * 32)
    assert levels(doctor_start.check_start(settings, is_service=True)) == ["ok"]
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    assert levels(doctor_start.check_start(settings, is_service=False)) == ["error"], "they aren't this user's"

    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    found = only(doctor_start.check_start(settings, is_service=True))
    assert (found.level, found.cure) == ("unknown", "Run `sudo honed doctor`.")


def test_beside_a_sound_daemon_there_are_only_warnings(paths: dict[str, Path]) -> None:
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["HONED_HTTP__METRICS_LISTEN"] = f"127.0.0.1:{port}"
    try:
        with ExitStack() as stack:
            stack.callback(structlog.reset_defaults)
            for path in paths.values():
                path.mkdir(mode=0o750)
            start(load(), stack)
            fake = FakeEngine(paths["runtime_dir"] / "engine.sock")
            fake.hello()
            fake.send_status()
            result = run("--json")
            fake.close()
    finally:
        del os.environ["HONED_HTTP__METRICS_LISTEN"]
    assert of(result, "error") == {}, result.stdout
    assert result.exit_code == 4
    assert {"SQLite", "admin socket", "engine socket", "metrics", "daemon"} <= set(of(result, "ok"))


def test_a_runtime_folder_on_disk_is_said_once(paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = {"dir": str(paths["runtime_dir"]), "filesystem": "ext4"}
    status = HEALTHY | {"engines": [], "runtime": runtime}
    monkeypatch.setattr(doctor_host, "filesystem_of", lambda path: "ext4")
    paths["runtime_dir"].mkdir(mode=0o750)
    with serving(paths["runtime_dir"] / "admin.sock", lambda *_: (200, status)):
        shown = run().stdout
        assert shown.count("reach the disk") == 1
        assert f"! runtime directory: {paths['runtime_dir']} is on ext4" in shown
        runtime["dir"] = "/elsewhere"
        assert run().stdout.count("reach the disk") == 2, "the daemon's folder is another one"


def test_an_engine_that_is_gone_comes_with_a_cure() -> None:
    (found,) = [c for c in doctor_daemon.check_daemon(engine(0, 0, connected=False), "0.1.0") if c.level == "error"]
    assert found.text == "engine engine-0 is not connected"
    assert found.cure.startswith("Start vLLM")


def test_one_error_is_one_error() -> None:
    def last(*levels: Any) -> str:
        console = Console(file=io.StringIO())
        console.print(doctor_command.view([Check("x", level, "") for level in levels]))
        return console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined, no-any-return]

    assert last("error", "warning", "ok", "unknown") == "1 error, 1 warning, 1 not checked, 1 fine"
    assert last("error", "error", "warning", "warning", "ok") == "2 errors, 2 warnings, 1 fine"


def test_wrong_settings_are_said_and_the_command_is_still_judged(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HONED_STORE__MAX_RAW_BITES", "1")
    result = run("--json", "--", "vllm", "serve", "m")
    assert result.exit_code == 1
    assert "MAX_RAW_BITES" in of(result, "error")["settings"]
    assert "vLLM command" in of(result, "error")


def test_the_services_settings_are_read_as_systemd_hands_them_over(
    folder: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, environment = folder / "honed.toml", folder / "honed.env"
    monkeypatch.setattr(service_environment, "CONFIG", config)
    monkeypatch.setattr(service_environment, "ENVIRONMENT", environment)
    config.write_text('[paths]\nstate_dir = "/data/honed"\n[trainer]\ndevice = "cpu"\n')
    environment.write_text(f"HONED_RUNTIME_DIR={folder}\n# a comment\nHONED_TRAINER__DEVISE=cuda\n")
    assert "HONED_TRAINER__DEVISE" not in run("--json").stdout, "this user's own environment names folders: it isn't about them"
    monkeypatch.delenv("HONED_STATE_DIR")
    monkeypatch.delenv("HONED_RUNTIME_DIR")
    for arguments in ([], ["--config", str(config)]):
        assert "unknown setting HONED_TRAINER__DEVISE" in of(run("--json", *arguments), "error")["settings"]
    environment.write_text(f"HONED_RUNTIME_DIR={folder}\nHONED_TRAINER__DEVICE='cuda'\n")
    result = run("--json")
    assert "trains on cuda" in result.stdout or "trainer.device is cuda" in result.stdout
    assert f"{folder}/admin.sock" in of(result, "error")["admin socket"]
    assert "paths.state_dir = '/data/honed'" in of(result, "warning")["settings"]
    assert "/var/lib/honed" in result.stdout


@pytest.mark.parametrize("is_exported", [False, True])
def test_tree_slots_are_no_block_that_is_too_long(
    folder: Path, paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch, is_exported: bool
) -> None:
    (folder / "drafter").mkdir()
    (folder / "drafter" / "config.json").write_text('{"architectures": ["DFlashDraftModel"], "block_size": 8}')
    speculative = {"method": "dflash", "model": str(folder / "drafter"), "num_speculative_tokens": 15}
    command = ["vllm", "serve", "m", "--speculative-config", json.dumps(speculative)]
    assert "drafts 15 tokens, but the drafter's block has 7" in run("--", *command).stdout
    if is_exported:
        monkeypatch.setenv("HONED_TREES", "1")
    else:
        command.insert(0, "HONED_TREES=graphs")
    assert "drafts 15 tokens" not in run("--", *command).stdout


def test_a_command_is_judged_before_it_is_run(paths: dict[str, Path]) -> None:
    result = run("--", "vllm", "serve", "m", "--scheduler-cls", "my.Own")
    assert result.exit_code == 1
    assert "✗ vLLM command: has --scheduler-cls my.Own, not honed's" in result.stdout
    assert "    → Use --scheduler-cls honed.attach.scheduler.make_scheduler" in result.stdout
    named = run("--", "HONED_ENGINE_ID=Qwen/Qwen3-8B", "vllm", "serve", "m")
    assert "honed doesn't attach: HONED_ENGINE_ID: 'Qwen/Qwen3-8B' is no engine id" in named.stdout


@pytest.mark.parametrize(
    ("found", "code"), [(["ok"], 0), (["ok", "unknown"], 0), (["warning", "ok"], 4), (["warning", "error"], 1)]
)
def test_exit_codes(found: list[Any], code: int) -> None:
    checks = [Check("x", level, "") for level in found]
    assert exit_code(checks) == code
    assert [check.level for check in worst_first(checks)] == [level for level in ORDER if level in found]


WITHOUT_THE_DAEMONS_PACKAGES = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, *more):
        is_missing = name.partition(".")[0] in ("bcrypt", "structlog", "pysqlite3", "sqlite_utils")
        return None if is_missing else self.finder.find_spec(name, *more)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Without(finder) if hasattr(finder, "find_spec") else finder for finder in sys.meta_path]
from honed.daemon.commands.main import main
sys.argv = ["honed", "doctor", "--json", "--", "vllm", "serve", "some/target"]
main()
"""


def test_vllms_environment_without_the_daemons_packages_checks_a_command(tmp_path: Path) -> None:
    """There honed is installed with `--no-deps`."""
    places = {"HONED_RUNTIME_DIR": str(tmp_path / "run"), "HONED_STATE_DIR": str(tmp_path / "state")}
    asked = subprocess.run(
        [sys.executable, "-c", WITHOUT_THE_DAEMONS_PACKAGES],
        capture_output=True,
        text=True,
        env=os.environ | places,
        check=False,
    )
    assert "Traceback" not in asked.stderr, asked.stderr
    subjects = {check["subject"] for check in json.loads(asked.stdout)["checks"]}
    assert "SQLite" not in subjects
    assert {"settings", "vLLM command"} <= subjects, subjects
