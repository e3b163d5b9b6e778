"""`honed units`: shown before it is done, and nobody's own work is ever lost."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from honed.daemon.commands.install import SERVICES, TIMEOUT_S
from honed.daemon.commands.main import app
from honed.daemon.install import units
from honed.daemon.install.units import RECORD, SOURCES, Place
from tests.full_tmpfs import run_on_tmpfs

Run = Callable[..., Result]
UNIT, TRAINER = "etc/systemd/system/honed.service", "etc/systemd/system/honed-trainer.service"
DROP_IN = "etc/systemd/system/vllm.service.d/honed.conf"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    (made / "opt/honed/bin").mkdir(parents=True)
    (made / "opt/honed/bin/honed").write_text("")
    (made / "opt/honed/bin/honed").chmod(0o755)
    (made / "lib/systemd/system").mkdir(parents=True)
    (made / "lib/systemd/system/vllm.service").write_text("[Service]\n")
    return made


@pytest.fixture
def run(root: Path) -> Run:
    def invoke(command: str, *arguments: str) -> Result:
        prefix = ["--prefix", "/opt/honed"] if command == "install" else []
        return CliRunner().invoke(app, [command, "--root", str(root), *prefix, *arguments])

    return invoke


def document(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def files(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in (root / "etc").rglob("*") if path.is_file()}


def states(result: Result) -> dict[str, str]:
    return {file["path"].lstrip("/"): file["state"] for file in document(result)["files"]}


def test_services_can_read_what_a_strict_umask_made(run: Run, root: Path) -> None:
    before = os.umask(0o077)
    try:
        assert run("install", "--apply").exit_code == 0
    finally:
        os.umask(before)
    for folder in ("etc", "etc/honed", "etc/systemd/system"):
        assert (root / folder).stat().st_mode & 0o777 == 0o755, folder
    (root / "opt/honed").chmod(0o700)
    assert "chmod -R a+rX /opt/honed" in " ".join(run("install").output.split())


def test_without_apply_nothing_is_written(run: Run, root: Path) -> None:
    result = run("install")
    assert result.exit_code == 0, result.output
    assert "Nothing was changed" in result.stdout
    assert "+ /etc/systemd/system/honed.service" in result.stdout
    assert not (root / "etc").exists()


def test_apply_puts_everything_in_place_and_again_changes_nothing(run: Run, root: Path) -> None:
    result = run("install", "--apply", "--json")
    assert result.exit_code == 0, result.output
    assert files(root) == {
        "etc/sysusers.d/honed.conf",
        "etc/tmpfiles.d/honed.conf",
        UNIT,
        TRAINER,
        DROP_IN,
        "etc/honed/honed.env",
        "etc/honed/honed.toml",
        RECORD.lstrip("/"),
    }
    assert (root / UNIT).read_text() == (SOURCES / "honed.service").read_text()
    assert (root / UNIT).stat().st_mode & 0o777 == 0o644
    assert document(result)["notes"] == []
    before = {name: (root / name).stat().st_mtime_ns for name in files(root) - {RECORD.lstrip("/")}}
    again = run("install", "--apply", "--json")
    assert document(again)["written"] == []
    assert set(states(again).values()) == {"same"}
    assert {name: (root / name).stat().st_mtime_ns for name in before} == before


def test_units_start_the_environment_that_was_named(run: Run, root: Path) -> None:
    result = run("install", "--apply", "--json", "--prefix", "/srv/honed")
    assert "ExecStart=/srv/honed/bin/honed serve" in (root / UNIT).read_text()
    assert "/srv/honed/bin/honed does not exist" in document(result)["notes"][0]
    hidden = run("install", "--json", "--prefix", "/home/me/venv")
    assert "is hidden from the services" in document(hidden)["notes"][0]


def test_a_file_that_the_operator_changed_is_left_alone_and_shown(run: Run, root: Path) -> None:
    run("install", "--apply")
    (root / UNIT).write_text((root / UNIT).read_text().replace("RestartSec=2", "RestartSec=20"))
    result = run("install", "--apply")
    assert result.exit_code == 4
    assert "changed by someone else: left alone" in result.stdout
    assert "-RestartSec=20" in result.stdout
    assert "+RestartSec=2" in result.stdout
    assert "RestartSec=20" in (root / UNIT).read_text()


def test_overwriting_keeps_a_copy_of_what_was_there(run: Run, root: Path) -> None:
    run("install", "--apply")
    (root / UNIT).write_text("[Service]\n# mine\n")
    result = run("install", "--apply", "--overwrite")
    assert result.exit_code == 0
    assert f"/{UNIT}  replaced; the old file is kept as /{UNIT}.before-honed" in result.stdout
    assert "left alone" not in result.stdout
    assert (root / UNIT).read_text() == (SOURCES / "honed.service").read_text()
    assert (root / f"{UNIT}.before-honed").read_text() == "[Service]\n# mine\n"
    assert states(run("uninstall", "--apply", "--json"))[f"{UNIT}.before-honed"] == "kept"
    assert (root / f"{UNIT}.before-honed").exists()


@pytest.mark.parametrize("command", ["install --prefix /srv/honed --vllm-unit vllm@1", "uninstall"])
def test_how_to_do_it_names_the_options_that_were_given(run: Run, root: Path, command: str) -> None:
    run("install", "--apply")
    name, *options = command.split()
    last = run(name, *options).stdout.rstrip().splitlines()[-1]
    said = last.removeprefix("Nothing was changed. To do it: honed ").split()
    given = [f"{option}={value}" for option, value in zip(options[::2], options[1::2], strict=True)]
    assert sorted(said) == sorted([name, "--apply", f"--root={root}", *given])


def test_what_is_wrong_with_the_plan_ends_with_its_own_code(run: Run) -> None:
    result = run("install", "--vllm-unit", "nope")
    assert "! there is no nope.service" in result.stdout
    assert result.exit_code == 4
    assert run("install", "--prefix", "/nope").exit_code == 4


def test_a_file_that_was_there_before_us_counts_as_somebody_elses(run: Run, root: Path) -> None:
    (root / UNIT).parent.mkdir(parents=True)
    (root / UNIT).write_text("# by hand\n")
    assert states(run("install", "--json"))[UNIT] == "changed"
    run("install", "--apply")
    assert (root / UNIT).read_text() == "# by hand\n"


def test_an_older_file_of_ours_is_brought_up_to_date(run: Run, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new = {path: (text, theirs) for path, (text, theirs) in units.texts(Place(root)).items()}
    old = {path: (f"# older\n{text}", theirs) for path, (text, theirs) in new.items()}
    with monkeypatch.context() as patch:
        patch.setattr(units, "texts", lambda place: old)
        run("install", "--apply")
    result = run("install", "--apply", "--json")
    assert result.exit_code == 0
    found = states(result)
    assert found[UNIT] == "update"
    assert found["etc/honed/honed.toml"] == "settings"  # the operator's from the first day on
    assert (root / UNIT).read_text() == (SOURCES / "honed.service").read_text()
    assert (root / "etc/honed/honed.toml").read_text().startswith("# older")


def test_an_older_drop_in_of_a_unit_that_was_named_is_brought_up_to_date(
    run: Run, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "lib/systemd/system/llm.service").write_text("[Service]\n")
    with monkeypatch.context() as patch:
        patch.setattr(units, "drop_in", lambda unit, **about: f"# older, of {unit}\n")
        for unit in ("llm", "other", "gone"):
            run("install", "--apply", "--vllm-unit", unit)
    llm, other, gone = (f"etc/systemd/system/{name}.service.d/honed.conf" for name in ("llm", "other", "gone"))
    (root / other).write_text("# mine\n")
    (root / gone).unlink()
    found = states(run("install", "--apply", "--json"))
    assert (found[llm], found[other], found[DROP_IN]) == ("update", "changed", "new")
    assert gone not in found, "a drop-in that the operator removed stays away"
    assert (root / llm).read_text() == units.drop_in("llm.service")
    assert (root / other).read_text() == "# mine\n"


def test_settings_are_never_touched_again(run: Run, root: Path) -> None:
    run("install", "--apply")
    (root / "etc/honed/honed.toml").write_text("[store]\nmax_raw_bytes = 1\n")
    result = run("install", "--apply", "--overwrite", "--json")
    assert result.exit_code == 0
    assert states(result)["etc/honed/honed.toml"] == "settings"
    assert (root / "etc/honed/honed.toml").read_text() == "[store]\nmax_raw_bytes = 1\n"


def test_without_vllms_unit_there_is_no_drop_in(run: Run, root: Path) -> None:
    (root / "lib/systemd/system/vllm.service").unlink()
    assert DROP_IN not in states(run("install", "--json"))
    assert DROP_IN in states(run("install", "--json", "--vllm-unit", "vllm"))
    assert "etc/systemd/system/llm@0.service.d/honed.conf" in states(run("install", "--json", "--vllm-unit", "llm@0.service"))
    assert "HONED_ENGINE_ID" not in units.drop_in("vllm.service"), "the one engine of a host needs no name"
    for name, engine_id in (("llm", "llm"), ("vllm@", "vllm-%i"), ("vllm@a-1", "vllm-a-1")):
        assert f'Environment="HONED_ENGINE_ID={engine_id}"' in units.drop_in(f"{name}.service").splitlines()
    (root / "lib/systemd/system/llm.service.d").mkdir(parents=True)
    (root / "lib/systemd/system/llm.service.d/mine.conf").write_text('[Service]\nEnvironment="HONED_ENGINE_ID=chat"\n')
    run("install", "--apply", "--vllm-unit", "llm.service")
    assert "HONED_ENGINE_ID" not in (root / "etc/systemd/system/llm.service.d/honed.conf").read_text(), "it has one"
    for name in ("../x", "a/b.service", "x y"):
        assert run("install", "--vllm-unit", name).exit_code == 2


def test_uninstall_takes_what_is_ours_and_leaves_what_is_not(run: Run, root: Path) -> None:
    run("install", "--apply")
    (root / TRAINER).write_text("# mine\n")
    shown = run("uninstall")
    assert "Nothing was changed" in shown.stdout
    assert (root / UNIT).exists()
    result = run("uninstall", "--apply", "--json")
    assert result.exit_code == 0
    assert states(result)[TRAINER] == "changed"
    assert files(root) == {TRAINER, "etc/honed/honed.env", "etc/honed/honed.toml", RECORD.lstrip("/")}
    assert not (root / DROP_IN).parent.exists()
    assert run("install", "--apply").exit_code == 4  # and can be put back, but for what was changed
    assert (root / UNIT).exists()


@pytest.fixture
def booted(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root counts as the running system's; a `systemctl` that notes its calls, and fails where it is told to."""
    (root / "run/systemd/system").mkdir(parents=True)
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n[ "$1" != "$(cat {tmp_path}/refused)" ] || {{ echo no >&2; exit 1; }}\n'
    )
    program.chmod(0o755)
    (tmp_path / "refused").write_text("")
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(Place, "is_live", True)
    return tmp_path


@pytest.mark.fault("units removed from under a daemon that runs on")
def test_where_the_services_do_not_stop_nothing_is_removed(run: Run, root: Path, booted: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Place, "is_live", False)
        run("install", "--apply")
    (booted / "refused").write_text("disable")
    before = files(root)
    result = run("uninstall", "--apply")
    assert result.exit_code == 1
    assert "`systemctl disable --now honed.service honed-trainer.service` ended with 1: no" in result.stderr
    assert "Nothing was removed" in result.stderr
    assert files(root) == before
    assert (booted / "calls").read_text().splitlines() == ["disable --now honed.service honed-trainer.service"]

    (booted / "refused").write_text("daemon-reload")
    result = run("uninstall", "--apply")
    assert result.exit_code == 1
    assert "Run `systemctl daemon-reload`" in result.stderr
    assert not (root / UNIT).exists()

    (booted / "calls").unlink()
    assert run("uninstall", "--apply").exit_code == 0, "there are only settings now, and no service to stop"
    assert not (booted / "calls").exists()


def _waits(service: str) -> list[str]:
    return re.findall(r"^Timeout(?:Stop|Abort)Sec=(\d+)$", (SOURCES / service).read_text(), re.MULTILINE)


@pytest.mark.fault("units removed from under a daemon that runs on")
def test_services_have_the_time_to_stop_that_their_units_give_them() -> None:
    stop_s = [int(value) for name in SERVICES for value in _waits(name)]
    assert len(stop_s) == 4
    assert sum(stop_s) < TIMEOUT_S


@pytest.mark.parametrize(
    ("prefix", "command"),
    [
        ("/opt/honed", "/opt/honed/bin/honed"),
        ("/opt/my env 50%", '"/opt/my env 50%%/bin/honed"'),
        ("/opt/50%", "/opt/50%%/bin/honed"),
        ("/opt/möhre", "/opt/möhre/bin/honed"),
    ],
)
@pytest.mark.fault("a prefix that breaks the units")
def test_a_prefix_is_written_as_systemd_reads_it(root: Path, prefix: str, command: str) -> None:
    CliRunner().invoke(app, ["install", "--root", str(root), "--apply", "--prefix", prefix])
    assert f"\nExecStart={command} serve\n" in (root / UNIT).read_text()
    assert f"\nExecStart={command} train\n" in (root / TRAINER).read_text()


@pytest.mark.fault("a prefix that breaks the units")
@pytest.mark.parametrize("prefix", ['/opt/a"b', "/opt/a\\b", "/opt/$HOME", "/opt/a\nb", "/opt/a'b"])
def test_a_prefix_that_systemd_cannot_start_is_refused(root: Path, prefix: str) -> None:
    result = CliRunner().invoke(app, ["install", "--root", str(root), "--apply", "--prefix", prefix])
    assert result.exit_code == 1
    assert "systemd starts no program with quotes" in result.stderr
    assert "such as /opt/honed" in result.stderr
    assert not (root / UNIT).exists()


def test_uninstall_where_nothing_is_installed_says_so(run: Run) -> None:
    result = run("uninstall", "--apply")
    assert result.exit_code == 0
    assert "installed nothing here" in result.stdout


def test_a_folder_that_may_not_be_written_is_one_clear_line(run: Run, root: Path) -> None:
    (root / "etc").write_text("not a folder")
    result = run("install", "--apply")
    assert result.exit_code == 1
    assert "honed: " in result.stderr
    assert "Traceback" not in result.output


FULL = """
import errno, os, subprocess, sys
from pathlib import Path
from honed.daemon.install.units import InstallError, Place, apply, plan
folder = Path(sys.argv[1])
if sys.argv[2] == "full":
    with (folder / "ballast").open("wb") as ballast:
        try:
            ballast.write(bytes(1 << 20))
        except OSError as error:
            assert error.errno == errno.ENOSPC
else:
    subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
place = Place(folder)
try:
    apply(place, plan(place))
except InstallError as error:
    print(error, error.cure, sep="|")
"""


@pytest.mark.parametrize(("state", "cure"), [("full", "Make room on the disk of"), ("ro", "Mount the file system of")])
def test_a_disk_that_takes_no_file_is_named_with_the_file(root: Path, state: str, cure: str) -> None:
    said, cured = run_on_tmpfs(root, "64k", FULL, str(root), state).strip().split("|")
    assert re.match(rf"{root}/etc/\S+[^.]\S* can't be written: ", said)
    assert cured.startswith(f"{cure} {root}/etc/")
    assert "Errno" not in said


def test_a_damaged_record_is_named_and_nothing_is_overwritten(run: Run, root: Path) -> None:
    run("install", "--apply")
    (root / RECORD.lstrip("/")).write_text("[1]")
    result = run("install", "--apply")
    assert result.exit_code == 1
    assert "installed.json is damaged" in result.stderr


def test_the_default_is_the_environment_that_runs_the_command(root: Path) -> None:
    result = CliRunner().invoke(app, ["install", "--root", str(root), "--apply"])
    assert f"\n! {sys.prefix}" in result.stdout  # below this root it isn't there, or it is where services can't see it
    assert result.exit_code == 4
    assert f"ExecStart={sys.prefix}/bin/honed serve" in (root / UNIT).read_text()
