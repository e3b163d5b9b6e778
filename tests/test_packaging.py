"""The wheel holds every module and data file of the code folders, at any depth, and nothing else."""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.build_wheel import build_wheel, pip_wheel
from tests.tools import ROOT

NOT_INSTALLED = {"tests", "benchmarks", "deploy", "docs", "src"}
IGNORED = {"build", "dist", "site", "demo-out"}
WORKSHOP = {"__pycache__", "make"}
"""Folders that are not installed: `dashboards/make` needs packages that only developers have."""
DATA = {".json", ".yml", ".html", ".css", ".js", ".service", ".conf", ".toml", ".env"}

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders() -> set[str]:
    """Top-level folders with Python files or data in them."""
    tops = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}
    return {name for name in tops - NOT_INSTALLED - IGNORED if {path.suffix for path in shipped(name)} & {".py", *DATA}}


def shipped(name: str) -> list[Path]:
    """All files of a code folder, at any depth."""
    found = (path for path in (ROOT / name).rglob("*") if path.is_file() and not WORKSHOP & set(path.parts))
    return sorted(path for path in found if not path.name.startswith("."))


def test_every_folder_is_linked_into_the_package() -> None:
    links = {path.name: path for path in (ROOT / "src" / "honed").iterdir() if path.is_symlink()}
    assert set(links) == folders()
    assert {name: path.readlink().as_posix() for name, path in links.items()} == {name: f"../../{name}" for name in links}


def test_every_subfolder_is_a_regular_package() -> None:
    """A folder without `__init__.py` loses to a stale package of an older install."""
    parents = {path.parent for name in folders() for path in shipped(name) if path.suffix == ".py"}
    assert [path for path in sorted(parents) if path.parent != ROOT and not (path / "__init__.py").is_file()] == []


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel of what is checked out."""
    files = ["setup.py", "pyproject.toml", PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"]]
    return zipfile.Path(build_wheel(tmp_path_factory.mktemp("wheel"), {"src", *folders()}, files))


def names(wheel: zipfile.Path) -> set[str]:
    return {name for name in wheel.root.namelist() if not name.endswith("/")}


def test_the_wheel_holds_every_module_and_data_file(wheel: zipfile.Path) -> None:
    wanted = {f"honed/{path.relative_to(ROOT).as_posix()}" for name in folders() for path in shipped(name)}
    assert {"honed/adapt/protocol/wire.py", "honed/systemd/honed.service", "honed/dashboards/honed-overview.json"} <= wanted
    assert {name for name in names(wheel) if name.startswith("honed/")} == wanted | {"honed/__init__.py", "honed/py.typed"}


def test_a_source_whose_links_are_text_files_is_refused(tmp_path: Path) -> None:
    """As in GitHub's zip, or with git's core.symlinks=false: pip installed a package without code."""
    for name in ("setup.py", "pyproject.toml", PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"]):
        shutil.copy(ROOT / name, tmp_path / name)
    package = tmp_path / "src" / "honed"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "adapt").write_text("../../adapt")
    done = pip_wheel(tmp_path, tmp_path)
    assert done.returncode
    assert "src/honed/adapt is a text file and not a link" in done.stderr
    assert "get honed with git clone, or as tar.gz" in done.stderr


def test_nothing_is_installed_beside_honed(wheel: zipfile.Path) -> None:
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert tops == {"honed", f"honed-{PYPROJECT['project']['version']}.dist-info"}


def test_every_kind_of_file_is_known() -> None:
    """A folder's file of a kind that no rule of package-data takes would be left out of the wheel in silence."""
    files = [path for name in folders() for path in shipped(name)]
    assert {path.suffix for path in files} <= {".py", *DATA}


def test_entry_points_name_functions_that_exist(wheel: zipfile.Path) -> None:
    text = next(name for name in names(wheel) if name.endswith("/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.joinpath(text).read_text())
    assert dict(parser["console_scripts"]) == {"honed": "honed.daemon.commands.main:main"}
    assert dict(parser["vllm.general_plugins"]) == {"honed": "honed.attach.plugin:register"}
    for section in parser.sections():
        for target in parser[section].values():
            module, _, function = target.partition(":")
            tree = ast.parse(wheel.joinpath(f"{module.replace('.', '/')}.py").read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, target


def test_the_licence_travels_along(wheel: zipfile.Path) -> None:
    assert any(name.endswith("/licenses/LICENSE") for name in names(wheel))


def test_every_hint_installs_a_checkout() -> None:
    """honed is on no package index: `pip install honed` finds nothing, or somebody else's."""
    code = [path for name in folders() for path in shipped(name) if path.suffix == ".py"]
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *code]
    hints = [hint for path in files for hint in re.findall(r"pip install .*?honed\b", path.read_text())]
    assert len(hints) >= 8
    assert [hint for hint in hints if not hint.endswith("/path/to/honed")] == []
