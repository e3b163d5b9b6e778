"""Who may import whom. Read off the source, so imports inside functions and for types count as well."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.tools import ROOT

FOLDERS = ("adapt", "attach", "daemon", "kernels", "recalib")

MAY_IMPORT = {
    "adapt": set[str](),
    "attach": {"adapt", "kernels"},
    "kernels": set[str](),
    "recalib": {"kernels", "adapt"},
    "daemon": {"adapt", "recalib"},
}
"""Folder -> folders of ours, beside itself."""

LAYERS: dict[str, tuple[set[str], ...]] = {
    "adapt": ({"models", "protocol"}, {"acceptance"}, {"steps", "monitor"}, {"lengths"}, {"control"}, {"replay"}),
    "attach": (
        {"contract", "events", "swap"},
        {"trees"},
        {"runner", "engine"},
        {"capture"},
        {"plugin", "scheduler", "worker"},
    ),
    "daemon": (
        {"errors", "background", "log_stream", "retry"},
        {"settings"},
        {"store", "client", "install"},
        {"ingest", "calibration"},
        {"control", "lifecycle"},
        {"service"},
        {"metrics", "views"},
        {"page", "doctor", "commands.show"},
        {"api"},
        {"process"},
        {"commands"},
    ),
    "kernels": ({"cache", "capture", "training", "trees", "verify"}, {"recurrent"}),
    "recalib": ({"config", "registry"}, {"drafter", "samples"}, {"training"}, {"gate"}, {"process"}),
}
"""Inside a top folder, from the bottom up: a folder imports itself and what lies in layers below its own."""
NEVER_SERVICE = {"client", "doctor", "calibration", "install"}
"""Folders of the daemon that work without a running one, and so never import `service`."""
DAEMON_MAY_TAKE_FROM_RECALIB = {
    "honed.recalib.registry.registry",
    "honed.recalib.registry.shared",
    "honed.recalib.registry.access",
    "honed.recalib.registry.durable",
    "honed.recalib.registry.manifest",
    "honed.recalib.registry.target_digest",
    "honed.recalib.registry.vocabulary",
    "honed.recalib.registry.weights_digest",
    "honed.recalib.gate.gate",
    "honed.recalib.config.compiler",
    "honed.recalib.config.trainer",
    "honed.recalib.config.training",
    "honed.recalib.config.drafter",
    "honed.recalib.config.engine_gpus",
    "honed.recalib.config.memory",
    "honed.recalib.config.speculators",
    "honed.recalib.samples.ring_reader",
}
TRAIN_COMMAND = ("honed.daemon.commands.main", "honed.recalib.process.trainer")
"""`honed train` starts the trainer; it is imported there and then only."""

PURE = {
    "__future__",
    "abc",
    "array",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "heapq",
    "itertools",
    "math",
    "random",
    "struct",
    "types",
    "typing",
    "zlib",
    "msgspec",
    "numpy",
}
"""What adapt is made of: no I/O, no clock, no threads, no torch. `random` only as a generator with a given seed,
`zlib` only for CRC-32."""
COMPILED = {"numba", "llvmlite"}
"""What adapt/lengths/compiled.py takes beside that; nobody imports it before it is needed, since the daemon may not make
code."""
INSIDE_VLLM = {"numpy", "msgspec", "zmq", "torch", "safetensors", "vllm", "triton", "huggingface_hub"}
HEAVY = {"torch", "vllm", "triton", "transformers"}

DISTRIBUTIONS = {"zmq": "pyzmq", "starlette": "fastapi", "llvmlite": "numba", "dotenv": "python-dotenv", "yaml": "pyyaml"}
"""Where an import isn't named as what is installed for it; starlette is what FastAPI's answers are made of, and so on."""


@dataclass(frozen=True)
class Import:
    """One imported module, in full ("honed.adapt.protocol.wire"), and where."""

    name: str
    line: int
    is_lazy: bool
    """Inside a function."""
    is_for_types: bool
    """Under `if TYPE_CHECKING`."""

    @property
    def top(self) -> str:
        return self.name.partition(".")[0]


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.name != "__init__.py")


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def name_of(path: Path) -> str:
    return ".".join(("honed", *path.relative_to(ROOT).with_suffix("").parts))


def top(path: Path) -> str:
    """The top folder that a module lies in."""
    return path.relative_to(ROOT).parts[0]


def folder_of(path: Path) -> str:
    """The folder that the rule knows a module by: "adapt.steps"; a module at the top of its folder stands for itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if len(parts) == 2 else parts[:-1])


def layer_of(folder: str) -> int:
    top_folder, _, name = folder.partition(".")
    found = [index for index, names in enumerate(LAYERS[top_folder]) if name in names]
    assert len(found) == 1, f"{folder} has no place in LAYERS"
    return found[0]


def backward_edges() -> list[str]:
    """Imports inside a top folder that go up, or sideways to another folder of the same layer."""
    found = []
    for path in modules(*FOLDERS):
        here = folder_of(path)
        for wanted in imports(path):
            source = source_of(wanted.name)
            if source is None or top(source) != top(path) or folder_of(source) == here:
                continue
            if layer_of(folder_of(source)) >= layer_of(here):
                found.append(f"{label(path)}:{wanted.line} {wanted.name}")
    return found


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_walk(ast.parse(path.read_text()), is_lazy=False, is_for_types=False))


def _walk(node: ast.AST, is_lazy: bool, is_for_types: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, node.lineno, is_lazy, is_for_types)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        assert node.module is not None
        for alias in node.names:
            yield Import(_module_of(node.module, alias.name), node.lineno, is_lazy, is_for_types)
    elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        for statement in node.body:
            yield from _walk(statement, is_lazy, True)
        for statement in node.orelse:
            yield from _walk(statement, is_lazy, is_for_types)
    else:
        is_inside = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from _walk(child, is_inside, is_for_types)


def _module_of(module: str, name: str) -> str:
    """`from honed.adapt import wire` is about honed.adapt.protocol.wire; `from honed.adapt.protocol.wire import Ack` is so
    too."""
    return f"{module}.{name}" if source_of(f"{module}.{name}") else module


def source_of(name: str) -> Path | None:
    """The file of a module of ours."""
    parts = name.split(".")
    path = ROOT / f"{'/'.join(parts[1:])}.py"
    return path if parts[0] == "honed" and len(parts) >= 3 and path.is_file() else None


@pytest.mark.parametrize("path", modules(*FOLDERS), ids=label)
def test_folders_import_only_what_the_table_allows(path: Path) -> None:
    folder = top(path)
    for found in imports(path):
        if found.top != "honed":
            continue
        other = found.name.split(".")[1]
        assert other == folder or other in MAY_IMPORT[folder], f"line {found.line}: {found.name}"
        if (folder, other) == ("daemon", "recalib"):
            is_train_command = (name_of(path), found.name) == TRAIN_COMMAND and found.is_lazy
            assert found.name in DAEMON_MAY_TAKE_FROM_RECALIB or is_train_command, f"line {found.line}: {found.name}"


def test_no_import_goes_up_the_layers() -> None:
    assert backward_edges() == []


def test_every_folder_has_a_place_in_the_layers() -> None:
    for folder in {folder_of(path) for path in modules(*FOLDERS)}:
        layer_of(folder)


@pytest.mark.parametrize("path", modules("daemon"), ids=label)
def test_what_works_without_a_daemon_never_imports_the_service(path: Path) -> None:
    if folder_of(path).removeprefix("daemon.") in NEVER_SERVICE:
        assert "honed.daemon.service" not in {found.name for found in imports(path)}


@pytest.mark.parametrize("path", modules("adapt"), ids=label)
def test_adapt_is_pure(path: Path) -> None:
    allowed = PURE | COMPILED if path.name == "compiled.py" else PURE
    assert {found.top for found in imports(path)} - {"honed"} <= allowed
    tree = ast.parse(path.read_text())
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    assert not called & {"open", "print", "input", "exec", "eval", "__import__"}
    drawn = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "random"}
    assert drawn <= {"Random"}, "the module's own generator is shared and seeded by the system"


@pytest.mark.parametrize("path", modules(*FOLDERS), ids=label)
def test_what_is_compiled_is_imported_when_it_is_needed(path: Path) -> None:
    assert all(
        found.is_lazy and top(path) == "adapt" for found in imports(path) if found.name == "honed.adapt.lengths.compiled"
    )


@pytest.mark.parametrize("path", modules("attach", "kernels"), ids=label)
def test_what_runs_inside_vllm_takes_only_what_vllm_has(path: Path) -> None:
    foreign = {found.top for found in imports(path)} - {"honed"} - sys.stdlib_module_names
    allowed = {"torch", "triton"} if top(path) == "kernels" else INSIDE_VLLM
    assert foreign <= allowed


@pytest.mark.parametrize("path", modules("daemon"), ids=label)
def test_nothing_that_the_daemon_loads_reaches_torch(path: Path) -> None:
    seen, ahead = {path}, [path]
    while ahead:
        here = ahead.pop()
        for found in imports(here):
            if found.is_for_types or (found.is_lazy and name_of(here) == TRAIN_COMMAND[0]):
                continue
            assert found.top not in HEAVY, f"{label(path)} reaches {found.name} by {label(here)}:{found.line}"
            source = source_of(found.name)
            if source is not None and source not in seen:
                seen.add(source)
                ahead.append(source)


def test_every_foreign_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {re.split(r"[<>=\[ ;]", line)[0].lower() for line in wanted}
    for path in [*modules(*FOLDERS), *modules("dashboards")]:
        for found in imports(path):
            if found.top != "honed" and found.top not in sys.stdlib_module_names:
                name = DISTRIBUTIONS.get(found.top, found.top.replace("_", "-"))
                # torch brings triton where it exists.
                assert name in declared or name == "triton", f"{label(path)}:{found.line} {found.name}"


def test_no_top_folder_is_a_regular_package() -> None:
    """A top-level `daemon` or `kernels` with an __init__.py would hide PyPI packages of that name."""
    assert not [path for folder in (*FOLDERS, "dashboards", "systemd") for path in (ROOT / folder).glob("__init__.py")]
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
