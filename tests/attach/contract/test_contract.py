"""What is relied on in vLLM is in its sources, and the contract fails, naming it, as soon as any of it is called otherwise."""

from __future__ import annotations

import ast
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import packages_distributions, version
from pathlib import Path

import pytest

from docs.make import contract_page
from docs.make.contract_check import Sources, check, forget, installed, misfit
from honed.attach.contract.compatibility import is_supported
from honed.attach.contract.contract import CONTRACT, Attributes, Clause, Constant, Method, Open, Passes
from tests.attach.fetch_vllm import folder as fetched
from tests.tools import ROOT

FINDINGS = contract_page.read(ROOT)
needs_vllm = pytest.mark.skipif(installed() is None, reason="vLLM is not installed")


@needs_vllm
def test_the_installed_vllm_fits() -> None:
    package = installed()
    assert package is not None
    assert check(Sources(package)) == {capability: [] for capability in CONTRACT}


@needs_vllm
def test_releases_are_as_the_findings_say() -> None:
    """The installed one, and those that `make contract` has fetched."""
    package = installed()
    assert package is not None
    fetches = {release: fetched() / release / "vllm" for release in FINDINGS["releases"]}
    packages = {release: path for release, path in fetches.items() if path.exists()}
    distribution = packages_distributions()["vllm"][0]
    packages[version(distribution).split("+")[0]] = package
    found = {release: check(Sources(path)) for release, path in packages.items()}
    assert found == {release: FINDINGS["releases"].get(release) for release in packages}, "run `make contract`"


def test_the_page_and_the_findings_are_those_of_this_contract() -> None:
    assert FINDINGS["contract"] == contract_page.digest(), "the contract was changed: run `make contract`"
    assert all(is_supported(release) for release in FINDINGS["releases"])
    assert {release.rpartition(".")[0] for release in FINDINGS["releases"]} >= {"0.32", "0.33"}
    assert (ROOT / contract_page.PAGE).read_text() == contract_page.markdown(FINDINGS), "run `make reference`"


def test_a_release_that_does_not_fit_is_told_from_one_that_does() -> None:
    broken = {capability: [] for capability in CONTRACT} | {"swap": ["QKVParallelLinear has no head_size"]}
    releases = {"0.32.0": {capability: list[str]() for capability in CONTRACT}, "0.33.0": broken}
    page = contract_page.markdown({"contract": "", "releases": releases})
    num_clauses = len(CONTRACT["swap"])
    assert f"| swap of the drafter's weights | fits ({num_clauses}) | 1 of {num_clauses} don't fit | no |" in page
    assert "| 0.33.0 | swap of the drafter's weights | QKVParallelLinear has no head_size |" in page


def test_whatever_is_imported_from_vllm_is_in_the_contract() -> None:
    clauses = [clause for clauses in CONTRACT.values() for clause in clauses]
    known = {clause.owner for clause in clauses} | {getattr(clause, "name", "") for clause in clauses}
    nodes = [node for path in (ROOT / "attach").rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"]
    imported = {alias.name for node in froms for alias in node.names}
    assert imported >= {"AsyncScheduler", "EngineCore"}
    assert imported <= known


# --- the contract can fail: in copied sources, in each of its clauses ---------------------------------------------------------

CHANGES = {
    "a method": (
        "v1/core/sched/scheduler.py",
        r"def update_draft_token_ids\(",
        "def take_in_drafts(",
        "draft_length",
        "Scheduler.update_draft_token_ids is missing",
    ),
    "a parameter": (
        "v1/core/sched/scheduler.py",
        r"def _free_request\(\s*self, request",
        "def _free_request(self, req",
        "events",
        "Scheduler._free_request begins with (req), not (request)",
    ),
    "an attribute": (
        "v1/spec_decode/dflash.py",
        r"self\._dflash_hidden_states = ",
        "self._fused_states = ",
        "capture",
        "DFlashProposer has no _dflash_hidden_states",
    ),
    "the order of calls": (
        "v1/engine/core.py",
        r"(?m)^( +)load_general_plugins\(\)$",
        r"\1pass",
        "events",
        "EngineCore.__init__ does not call load_general_plugins",
    ),
    "a keyword": (
        "v1/worker/gpu_model_runner.py",
        r"\btarget_hidden_states=target_hidden_states,\s+next_token",
        "h=h, next_token",
        "capture",
        "GPUModelRunner.propose_draft_token_ids calls propose without target_hidden_states",
    ),
    "slots": (
        "v1/core/sched/output.py",
        r"@dataclass\nclass SchedulerOutput",
        "@dataclass(slots=True)\nclass SchedulerOutput",
        "events",
        "SchedulerOutput takes no further attributes",
    ),
    "a value": (
        "v1/spec_decode/utils.py",
        r"PADDING_SLOT_ID = -1",
        "PADDING_SLOT_ID = -2",
        "draft_length",
        "PADDING_SLOT_ID is -2, not -1",
    ),
    "a method of a base class": (
        "v1/spec_decode/llm_base_proposer.py",
        r"def propose\(",
        "def draft(",
        "draft_length",
        "DFlashProposer.propose is missing",
    ),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed vLLM's sources, as far as the contract looks at them."""
    package = installed()
    assert package is not None
    sources, copy = Sources(package), tmp_path_factory.mktemp("copied") / "vllm"
    check(sources)
    for file in {"__init__.py", *sources.files}:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(package / file, copy / file)
    return copy


@needs_vllm
def test_the_copy_fits_before_anything_is_changed(copied: Path) -> None:
    assert not any(check(Sources(copied)).values())


@needs_vllm
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_vllm_is_named(copied: Path, change: str) -> None:
    file, pattern, otherwise, capability, sentence = CHANGES[change]
    path = copied / file
    before = path.read_text()
    after, num_changes = re.subn(pattern, otherwise, before)
    assert num_changes >= 1, "this vLLM writes it otherwise: the change changes nothing"
    try:
        path.write_text(after)
        assert sentence in check(Sources(copied))[capability]
    finally:
        path.write_text(before)


@needs_vllm
def test_a_module_that_has_moved_is_named(copied: Path) -> None:
    path = copied / "model_executor/models/qwen3_dflash.py"
    before = path.read_text()
    try:
        path.unlink()
        assert any("models/qwen3_dflash.py is missing" in text for text in check(Sources(copied))["swap"])
    finally:
        path.write_text(before)


@needs_vllm
def test_no_clause_holds_when_what_it_names_is_called_otherwise() -> None:
    package = installed()
    assert package is not None
    sources = Sources(package)
    named_in = cache(lambda file: by_name(sources.tree(file)))
    for clause in dict.fromkeys(clause for clauses in CONTRACT.values() for clause in clauses):
        looked_at = Noted(sources)
        assert misfit(looked_at, clause) == ""
        for name in names_of(clause):
            with renamed([node for file in looked_at.files for node in named_in(file).get(name, [])], name):
                assert name in misfit(sources, clause), f"{clause} holds though {name} is gone"


class Noted(Sources):
    """Parsed modules of others, and which of them were asked for."""

    def __init__(self, others: Sources) -> None:
        super().__init__(others.package)
        self._others = others

    def tree(self, file: str) -> ast.Module | None:
        return self._trees.setdefault(file, self._others.tree(file))


def names_of(clause: Clause) -> tuple[str, ...]:
    """What a clause names; not the class, whose file tells it."""
    match clause:
        case Attributes():
            return clause.names
        case Passes():
            return (clause.callee, *clause.keywords)
        case Method():
            return (clause.name, *clause.first, *clause.parameters, *clause.calls)
        case Constant():
            return (clause.name,)
        case Open():
            return ()


Named = tuple[ast.AST, str]
"""A node, and the field in which it has a name."""


def by_name(tree: ast.Module | None) -> dict[str, list[Named]]:
    found: dict[str, list[Named]] = {}
    for node in ast.walk(tree or ast.Module([], [])):
        for field in ("name", "id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                found.setdefault(name, []).append((node, field))
    return found


@contextmanager
def renamed(nodes: Iterable[Named], name: str) -> Iterator[None]:
    """Let everything of this name have another one for a while, and what was read of it before be forgotten."""
    nodes = list(nodes)
    for node, field in nodes:
        setattr(node, field, "otherwise")
    forget()
    try:
        yield
    finally:
        for node, field in nodes:
            setattr(node, field, name)
        forget()


# --- reading sources ----------------------------------------------------------------------------------------------------------


def package_of(folder: Path, **modules: str) -> Sources:
    for name, text in {"__init__": "", **modules}.items():
        path = folder / f"{name.replace('__in__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(folder)


def test_bases_are_followed_through_imports_however_they_are_written(tmp_path: Path) -> None:
    sources = package_of(
        tmp_path,
        base="class Base:\n  size: int = 1\n  def old(self, a): ...\n",
        again="from vllm.base import Base as Renamed\n",
        sub__in__middle="from ..again import Renamed\nclass Middle(Renamed):\n  async def newer(self): self.x, self.y = 1, 2\n",
        top="from vllm.sub.middle import Middle\nclass Top(Middle, dict): ...\n",
    )
    assert misfit(sources, Attributes("top.py", "Top", ("size", "x", "y", "newer"))) == ""
    assert misfit(sources, Method("top.py", "Top", "old", first=("a",))) == ""
    assert misfit(sources, Method("top.py", "Top", "new")) == "Top.new is missing"


def test_modules_that_import_each_other_do_not_go_round(tmp_path: Path) -> None:
    sources = package_of(tmp_path, one="from vllm.two import Lost\n", two="from vllm.one import Lost\n")
    assert misfit(sources, Attributes("one.py", "Lost", ("x",))) == "Lost: Lost is missing in one.py"


def test_what_a_base_only_demands_does_not_count(tmp_path: Path) -> None:
    text = "class A:\n  @abstractmethod\n  def f(self): ...\n  def g(self): ...\nclass B(A): ...\n"
    sources = package_of(tmp_path, a=text)
    assert misfit(sources, Method("a.py", "A", "f")) == misfit(sources, Method("a.py", "B", "g")) == ""
    assert misfit(sources, Method("a.py", "B", "f")) == "B.f is missing"


def test_of_overloads_the_last_counts(tmp_path: Path) -> None:
    text = "class A:\n  def f(self, x): ...\n  def f(self, y, *, z): ...\n"
    sources = package_of(tmp_path, a=text)
    assert misfit(sources, Method("a.py", "A", "f", ("z",), first=("y",))) == ""
    assert misfit(sources, Method("a.py", "A", "f", ("x",))) == "A.f has no parameter x"


def test_a_folder_without_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="holds no sources of vLLM"):
        Sources(tmp_path)
