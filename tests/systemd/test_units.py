"""The units as systemd's own tools see them, and the example settings as the daemon reads them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from honed.attach.engine import environment
from honed.daemon.errors import EXIT_CONFIG
from honed.daemon.install import vllm_args
from honed.daemon.process.serve import OPEN_FILES
from honed.daemon.settings.settings import Settings, load
from tests.tools import ROOT

FOLDER = ROOT / "systemd"
UNITS = ("honed.service", "honed-trainer.service")
SECTION = re.compile(r"\[(\w+)\]")


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed")


def directives(name: str) -> dict[str, list[str]]:
    """Each directive, as "Section.Name", and its values in the order they are given."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in (FOLDER / name).read_text().splitlines():
        if match := SECTION.fullmatch(line):
            section = match[1]
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(f"{section}.{key}", []).append(value)
    return found


def environment_of(name: str) -> dict[str, str]:
    words = " ".join(directives(name)["Service.Environment"]).replace('"', "").split()
    expanded = [word.replace("%S", "/var/lib").replace("%t", "/run").replace("%C", "/var/cache") for word in words]
    return dict(word.split("=", 1) for word in expanded)


def env_file(uncomment: bool = False) -> dict[str, str]:
    text = (FOLDER / "honed.env").read_text()
    lines = re.sub(r"^#(?=HONED_)", "", text, flags=re.MULTILINE) if uncomment else text
    return dict(line.split("=", 1) for line in lines.splitlines() if line and not line.startswith("#"))


@pytest.mark.fault("wrong settings that restart for ever")
@pytest.mark.parametrize("name", UNITS)
def test_a_service_starts_again_after_any_failure_but_wrong_settings(name: str) -> None:
    found = directives(name)
    assert found["Service.Restart"] == ["on-failure"]
    assert found["Service.RestartPreventExitStatus"] == [str(EXIT_CONFIG)]


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The units beside a vllm.service that has the drop-in, with programs that exist on this machine."""
    for name in UNITS:
        text = (FOLDER / name).read_text()
        assert text.count("ExecStart=/opt/honed/bin/honed ") == 1
        (tmp_path / name).write_text(text.replace("ExecStart=/opt/honed/bin/honed ", "ExecStart=/bin/true "))
    (tmp_path / "vllm.service").write_text("[Service]\nExecStart=/bin/true\n")
    (tmp_path / "vllm.service.d").mkdir()
    shutil.copy(FOLDER / "vllm-honed.conf", tmp_path / "vllm.service.d" / "honed.conf")
    return tmp_path


@needs("systemd-analyze")
@pytest.mark.parametrize("name", [*UNITS, "vllm.service"])
def test_systemd_finds_nothing_wrong(installed: Path, name: str) -> None:
    command = ["systemd-analyze", "verify", "--man=no", str(installed / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs("systemd-analyze")
@pytest.mark.parametrize(("name", "most"), [("honed.service", 12), ("honed-trainer.service", 16)])
def test_exposure_stays_low(installed: Path, name: str, most: int) -> None:
    command = ["systemd-analyze", "security", "--no-pager", "--offline=true", f"--threshold={most}", str(installed / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@needs("systemd-sysusers")
@pytest.mark.parametrize("name", UNITS)
def test_one_file_keeps_both_stopped(name: str) -> None:
    """A unit in /etc/systemd/system can't be masked."""
    assert directives(name)["Unit.ConditionPathExists"] == ["!/etc/honed/off"]
    assert "touch /etc/honed/off" in (ROOT / "docs/operate.md").read_text()


def test_the_user_and_its_group_are_made(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    command = ["systemd-sysusers", f"--root={tmp_path}", str(FOLDER / "honed.sysusers.conf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode and "ermission" in done.stderr:
        pytest.skip("systemd-sysusers may not write here")
    assert done.returncode == 0, done.stderr
    user = (tmp_path / "etc/passwd").read_text().splitlines()[0].split(":")
    assert (user[0], user[5], Path(user[6]).name) == ("honed", "/var/lib/honed", "nologin")
    assert "honed:" in (tmp_path / "etc/group").read_text()


def test_folders_of_engines_belong_to_the_group_and_outlive_the_daemon() -> None:
    lines = [line.split() for line in (FOLDER / "honed.tmpfiles.conf").read_text().splitlines() if not line.startswith("#")]
    assert lines == [
        ["d", "/run/honed", "0750", "honed", "honed", "-"],
        ["d", "/run/honed/engines", "2770", "honed", "honed", "-"],
    ]
    for name in UNITS:
        assert directives(name)["Service.RuntimeDirectoryPreserve"] == ["yes"], name
        assert directives(name)["Service.RuntimeDirectoryMode"] == ["0750"], name


def test_no_folder_is_setgid_where_the_bit_may_not_be_set() -> None:
    # The registry keeps an inherited setgid bit by chmod, which RestrictSUIDSGID refuses.
    for name in UNITS:
        assert directives(name)["Service.RestrictSUIDSGID"] == ["yes"]
        assert directives(name)["Service.StateDirectoryMode"] == ["0750"]


def test_what_is_known_to_break_is_left_out() -> None:
    for name in UNITS:
        found = directives(name)
        assert found["Service.SystemCallFilter"] == ["@system-service", "~@privileged"], name
        assert found["Service.CapabilityBoundingSet"] == [""], name
    trainer = directives("honed-trainer.service")
    assert not trainer.keys() & {"Service.MemoryDenyWriteExecute", "Service.PrivateDevices", "Service.ProcSubset"}
    allowed = {value.split()[0] for value in trainer["Service.DeviceAllow"]}
    assert {"char-nvidia-frontend", "char-nvidiactl", "char-nvidia-uvm", "char-nvidia-caps"} <= allowed


@pytest.mark.fault("a daemon that may take all of the machine's memory")
def test_the_daemon_can_use_up_neither_memory_nor_descriptors() -> None:
    found = directives("honed.service")
    assert (found["Service.MemoryMax"], found["Service.LimitNOFILE"]) == (["4G"], [str(OPEN_FILES)])


def test_the_trainer_has_no_network_and_the_daemon_only_loopback() -> None:
    assert directives("honed-trainer.service")["Service.PrivateNetwork"] == ["yes"]
    assert directives("honed-trainer.service")["Service.RestrictAddressFamilies"] == ["AF_UNIX"]
    assert directives("honed.service")["Service.IPAddressDeny"] == ["any"]
    assert directives("honed.service")["Service.IPAddressAllow"] == ["localhost"]


def test_vllm_is_only_ever_asked_to_want_honed() -> None:
    found = directives("vllm-honed.conf")
    assert found == {
        "Unit.Wants": ["honed.service"],
        "Unit.After": ["honed.service"],
        "Service.Environment": ['"HONED_RUNTIME_DIR=/run/honed"'],
    }
    for name in UNITS:
        tied = {"Unit.Requires", "Unit.BindsTo", "Unit.Requisite", "Unit.PartOf", "Unit.Upholds", "Unit.Conflicts"}
        assert not directives(name).keys() & tied, name


def test_the_drop_in_says_what_the_command_prints() -> None:
    printed = [line for line in vllm_args.make(Path("/run/honed")).render("systemd").splitlines() if not line.startswith("#")]
    ours = [line for line in (FOLDER / "vllm-honed.conf").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in ours if line] == [line for line in printed if line]


def test_both_sides_meet_at_the_same_socket() -> None:
    attached = environment.from_environment(environment_of("vllm-honed.conf"))
    assert attached is not None
    for name in UNITS:
        env = {key: value for key, value in environment_of(name).items() if key.startswith("HONED_")}
        settings = load(None, env=env)
        assert f"ipc://{settings.paths.engine_socket}" == attached.socket_endpoint
        assert settings.paths.state_dir == Path("/var/lib/honed")


def test_caches_of_the_trainer_are_in_its_cache_folder() -> None:
    env = environment_of("honed-trainer.service")
    assert directives("honed-trainer.service")["Service.CacheDirectory"] == ["honed"]
    for name in ("HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
        assert Path(env[name]).is_relative_to("/var/cache/honed"), name


def test_the_example_settings_are_the_defaults() -> None:
    assert load(FOLDER / "honed.toml", env={}).model_dump() == load(None, env={}).model_dump()


def test_what_the_example_settings_suggest_can_be_set(tmp_path: Path) -> None:
    lines = (FOLDER / "honed.toml").read_text().splitlines()
    suggested = [line[1:] for line in lines if re.match(r"#\w+ = ", line)]
    assert suggested
    keys = {line.partition(" =")[0] for line in suggested}
    rest = [line for line in lines if line.partition(" =")[0] not in keys]  # TOML takes a key once
    (tmp_path / "honed.toml").write_text("\n".join(re.sub(r"^#(?=\w+ = )", "", line) for line in rest))
    assert load(tmp_path / "honed.toml", env={}).trainer_settings().device == "cpu"


def test_the_example_environment_is_understood() -> None:
    env = env_file() | {"HONED_CONFIG": str(FOLDER / "honed.toml")}
    assert env_file() == {"HONED_CONFIG": "/etc/honed/honed.toml"}
    settings: Settings = load(env=env | environment_of("honed.service"))
    assert settings.paths.runtime_dir == Path("/run/honed")
    everything = env_file(uncomment=True) | {"HONED_CONFIG": str(FOLDER / "honed.toml")}
    assert load(env=everything).trainer_settings().device == "cpu"
