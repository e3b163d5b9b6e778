"""`honed dashboards` writes what is installed, and nothing over what somebody has changed."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from honed.daemon.commands.main import app
from tests.dashboards.contents import FOLDER

FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in (".json", ".yml"))


def test_a_folder_gets_every_board_and_rule(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "boards"
    done = CliRunner().invoke(app, ["dashboards", str(folder), "--json"])
    assert json.loads(done.stdout)["written"] == FILES
    assert {path.name: path.read_text() for path in folder.iterdir()} == {name: (FOLDER / name).read_text() for name in FILES}
    again = CliRunner().invoke(app, ["dashboards", str(folder)])
    assert again.exit_code == 0
    assert again.stdout.startswith("0 files written")


def test_a_file_that_differs_stays_unless_asked(tmp_path: Path) -> None:
    (tmp_path / FILES[0]).write_text("mine")
    refused = CliRunner().invoke(app, ["dashboards", str(tmp_path)])
    assert refused.exit_code == 1
    assert FILES[0] in refused.stderr
    assert "--overwrite" in refused.stderr
    assert [path.name for path in tmp_path.iterdir()] == [FILES[0]], "nothing is half written"
    assert CliRunner().invoke(app, ["dashboards", str(tmp_path), "--overwrite"]).exit_code == 0
    assert (tmp_path / FILES[0]).read_text() == (FOLDER / FILES[0]).read_text()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = CliRunner().invoke(app, ["dashboards", str(tmp_path / "file" / "below")])
    assert refused.exit_code == 1
    assert "Not a directory" in refused.stderr
