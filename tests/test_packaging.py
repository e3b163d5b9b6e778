"""The wheel holds everything: setuptools is told folder by folder, so a new folder or kind of file is easily forgotten."""

from __future__ import annotations

import ast
import configparser
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.build_wheel import build_wheel

ROOT = Path(__file__).parents[1]
NOT_INSTALLED = {"tests", "benchmarks"}
IGNORED = {"build", "dist", "demo-out"}
DATA = {".json", ".yml", ".html", ".css", ".js", ".service", ".conf", ".toml", ".env"}

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]


def folders() -> set[str]:
    """Top-level folders with Python files or data in them."""
    found = {path.parent.name for path in ROOT.glob("*/*") if path.suffix in {".py", *DATA} and not path.name.startswith(".")}
    return {name for name in found - NOT_INSTALLED - IGNORED if not name.startswith(".")}


def test_every_folder_is_listed() -> None:
    assert {f"honed.{name}" for name in folders()} == set(SETUPTOOLS["packages"])
    assert SETUPTOOLS["package-dir"] == {package: package.removeprefix("honed.") for package in SETUPTOOLS["packages"]}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.Path:
    """A wheel of what is checked out."""
    files = ["pyproject.toml", PYPROJECT["project"]["readme"], *PYPROJECT["project"]["license-files"]]
    return zipfile.Path(build_wheel(tmp_path_factory.mktemp("wheel"), folders(), files))


def names(wheel: zipfile.Path) -> set[str]:
    return {name for name in wheel.root.namelist() if not name.endswith("/")}


def test_the_wheel_holds_every_module_and_data_file(wheel: zipfile.Path) -> None:
    wanted = {
        f"honed/{path.relative_to(ROOT).as_posix()}"
        for name in folders()
        for path in (ROOT / name).rglob("*")
        if path.suffix in {".py", *DATA}
    }
    assert {"honed/adapt/wire.py", "honed/systemd/honed.service", "honed/dashboards/honed-overview.json"} <= wanted
    assert {name for name in names(wheel) if name.startswith("honed/")} == wanted


def test_nothing_is_installed_beside_honed(wheel: zipfile.Path) -> None:
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert tops == {"honed", f"honed-{PYPROJECT['project']['version']}.dist-info"}
    assert not [name for name in names(wheel) if name.endswith("__init__.py")]


def test_every_kind_of_file_is_known() -> None:
    """A folder's file of a kind that no rule of package-data takes would be left out of the wheel in silence."""
    files = [path for name in folders() for path in (ROOT / name).iterdir() if path.is_file()]
    assert {path.suffix for path in files if not path.name.startswith(".")} <= {".py", *DATA}


def test_entry_points_name_functions_that_exist(wheel: zipfile.Path) -> None:
    text = next(name for name in names(wheel) if name.endswith("/entry_points.txt"))
    parser = configparser.ConfigParser()
    parser.read_string(wheel.joinpath(text).read_text())
    assert dict(parser["console_scripts"]) == {"honed": "honed.daemon.command_line:main"}
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
    code = [path for name in folders() for path in (ROOT / name).glob("*.py")]
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *code]
    hints = [hint for path in files for hint in re.findall(r"pip install .*?honed\b", path.read_text())]
    assert len(hints) >= 8
    assert [hint for hint in hints if not hint.endswith("/path/to/honed")] == []
