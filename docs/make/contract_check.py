"""Holds the contract against vLLM's Python sources, which are read and never imported.

`python -m docs.make.contract_check [FOLDER]` names what doesn't fit in the package `vllm` that lies there, by default the
one that is installed, and ends with 1 if anything doesn't.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from honed.attach.contract.contract import CONTRACT, Attributes, Clause, Constant, Method, Open, Passes

Function = ast.FunctionDef | ast.AsyncFunctionDef


def check(sources: Sources, contract: Mapping[str, Sequence[Clause]] = CONTRACT) -> dict[str, list[str]]:
    """What doesn't fit, by capability: a sentence for each clause that is broken."""
    found = {}
    for capability, clauses in contract.items():
        found[capability] = [text for clause in clauses if (text := misfit(sources, clause))]
    return found


class Sources:
    """The classes and functions of a source tree, parsed when asked for.

    Args:
        package: folder of the package `vllm`.

    Raises:
        FileNotFoundError: there are no sources of vLLM.
    """

    def __init__(self, package: Path) -> None:
        if not (package / "__init__.py").is_file():
            raise FileNotFoundError(f"{package} holds no sources of vLLM: its folder `vllm` is wanted")
        self.package = package
        self._trees: dict[str, ast.Module | None] = {}

    @property
    def files(self) -> list[str]:
        """The modules that were read so far."""
        return [file for file, tree in self._trees.items() if tree is not None]

    def tree(self, file: str) -> ast.Module | None:
        """A module; None when there is no such file."""
        if file not in self._trees:
            path = self.package / file
            self._trees[file] = _parsed(path.read_text()) if path.is_file() else None
        return self._trees[file]

    def lineage(self, file: str, owner: str, seen: frozenset[tuple[str, str]] = frozenset()) -> list[ast.ClassDef]:
        """A class and, after it, its bases as far as vLLM defines them; empty when it isn't there."""
        tree = self.tree(file)
        if tree is None or (file, owner) in seen:
            return []
        seen |= {(file, owner)}
        found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner), None)
        if found is None:
            source = self._imported(tree, file, owner)
            return self.lineage(*source, seen) if source is not None else []
        bases = [base.id for base in found.bases if isinstance(base, ast.Name)]
        return [found, *(one for base in bases for one in self.lineage(file, base, seen))]

    def _imported(self, tree: ast.Module, file: str, name: str) -> tuple[str, str] | None:
        """(file, name) of what a module imports from elsewhere in vLLM under this name."""
        for node, alias in _imports(tree):
            if (alias.asname or alias.name) == name and (source := self._file_of(file, node)):
                return source, alias.name
        return None

    def _file_of(self, file: str, node: ast.ImportFrom) -> str | None:
        parts = (node.module or "").split(".") if node.module else []
        if node.level:
            folder = Path(file).parent
            for _ in range(node.level - 1):
                folder = folder.parent
            parts = [*folder.parts, *parts]
        elif parts[:1] == ["vllm"]:
            parts = parts[1:]
        else:
            return None
        stem = "/".join(parts)
        return next((f for f in (f"{stem}.py", f"{stem}/__init__.py") if (self.package / f).is_file()), None)


@functools.cache
def _parsed(text: str) -> ast.Module:
    """A module's tree; modules of several checks are mostly the same."""
    return ast.parse(text)


@functools.cache
def _imports(tree: ast.Module) -> list[tuple[ast.ImportFrom, ast.alias]]:
    """All names that a module imports from others."""
    return [(node, alias) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]


def forget() -> None:
    """Forget what was read from trees: somebody changes them."""
    _imports.cache_clear()
    _attributes.cache_clear()


def misfit(sources: Sources, clause: Clause) -> str:
    """Why a clause doesn't hold, "" when it does."""
    tree = sources.tree(clause.file)
    if tree is None:
        return f"{qualified(clause)}: {clause.file} is missing"
    classes = sources.lineage(clause.file, clause.owner) if clause.owner else []
    if clause.owner and not classes:
        return f"{qualified(clause)}: {clause.owner} is missing in {clause.file}"
    bodies = [node.body for node in classes] or [tree.body]
    match clause:
        case Attributes():
            absent = sorted(set(clause.names) - {name for node in classes for name in _attributes(node)})
            return f"{clause.owner} has no {', '.join(absent)}" if absent else ""
        case Open():
            return f"{clause.owner} takes no further attributes" if _is_closed(classes[0]) else ""
        case Constant():
            value = next((v for body in bodies for n, v in _constants(body) if n == clause.name), None)
            return "" if value == clause.value else f"{qualified(clause)} is {value!r}, not {clause.value!r}"
        case Method() | Passes():
            function = _function(bodies, clause.name)
            if function is None:
                return f"{qualified(clause)} is missing"
            return _broken_method(clause, function) if isinstance(clause, Method) else _broken_call(clause, function)


def qualified(clause: Clause) -> str:
    """What a clause is about, in full."""
    name = "" if isinstance(clause, Attributes | Open) else clause.name
    return ".".join(part for part in (clause.owner, name) if part)


def _function(bodies: Sequence[Sequence[ast.stmt]], name: str) -> Function | None:
    """A class's own function of this name, else that of its bases; what a base only demands of others doesn't count."""
    for depth, body in enumerate(bodies):
        for node in reversed(body):  # overloads come before what they are of
            if isinstance(node, Function) and node.name == name and not (depth and _is_abstract(node)):
                return node
    return None


def _is_abstract(function: Function) -> bool:
    return any(isinstance(d, ast.Name) and d.id == "abstractmethod" for d in function.decorator_list)


def _broken_method(clause: Method, function: Function) -> str:
    where, arguments = qualified(clause), function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    names = names[1:] if clause.owner and names[:1] in (["self"], ["cls"]) else names
    if tuple(names[: len(clause.first)]) != clause.first:
        return f"{where} begins with ({', '.join(names[: len(clause.first)])}), not ({', '.join(clause.first)})"
    absent = [p for p in clause.parameters if p not in names and p not in {a.arg for a in arguments.kwonlyargs}]
    if absent:
        return f"{where} has no parameter {', '.join(absent)}"
    wanted = list(clause.calls)
    for call in _calls(function):
        if wanted and _callee(call) == wanted[0]:
            wanted.pop(0)
    after = f" after {clause.calls[-len(wanted) - 1]}" if 0 < len(wanted) < len(clause.calls) else ""
    return f"{where} does not call {wanted[0]}{after}" if wanted else ""


def _broken_call(clause: Passes, function: Function) -> str:
    """The call that comes nearest says what is missing."""
    given = [{k.arg for k in call.keywords} for call in _calls(function) if _callee(call) == clause.callee]
    if not given:
        return f"{qualified(clause)} does not call {clause.callee}"
    absent = min(([name for name in clause.keywords if name not in names] for names in given), key=len)
    return f"{qualified(clause)} calls {clause.callee} without {', '.join(absent)}" if absent else ""


def _calls(function: Function) -> list[ast.Call]:
    """All calls in a function, in the order of the source."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    return sorted(found, key=lambda call: (call.func.end_lineno or 0, call.func.end_col_offset or 0))


def _callee(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else call.func.id if isinstance(call.func, ast.Name) else ""


@functools.cache
def _attributes(node: ast.ClassDef) -> frozenset[str]:
    """Names that instances of a class have: fields, methods, what is assigned on self."""
    found = set()
    for statement in node.body:
        if isinstance(statement, Function):
            found.add(statement.name)
        found |= {target.id for target in _targets(statement) if isinstance(target, ast.Name)}
    for child in ast.walk(node):
        for target in _targets(child):
            if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
                found.add(target.attr)
    return frozenset(found)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to."""
    if isinstance(node, ast.Assign):
        yield from _flat(node.targets)
    elif isinstance(node, ast.AnnAssign):
        yield node.target


def _flat(targets: Iterable[ast.expr]) -> Iterator[ast.expr]:
    for target in targets:
        if isinstance(target, ast.Tuple):
            yield from _flat(target.elts)
        else:
            yield target


def _is_closed(node: ast.ClassDef) -> bool:
    decorators = [d for d in node.decorator_list if isinstance(d, ast.Call)]
    on = {k.arg for d in decorators for k in d.keywords if isinstance(k.value, ast.Constant) and k.value.value is True}
    return bool(on & {"frozen", "slots"}) or "__slots__" in _attributes(node)


def _constants(body: Iterable[ast.stmt]) -> Iterator[tuple[str, object]]:
    for node in body:
        if isinstance(node, ast.If):  # for type checkers only, where vLLM's variables have their defaults
            yield from _constants(node.body)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            (target, *others) = _targets(node)
            if others or not isinstance(target, ast.Name):
                continue
            try:
                yield target.id, ast.literal_eval(node.value)
            except ValueError:
                continue


def installed() -> Path | None:
    """The package `vllm` of this Python environment, found without importing it; None when there is none."""
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def main(folders: Sequence[Path]) -> int:
    """Check source trees; 1 when something doesn't fit."""
    num_broken = 0
    for folder in folders:
        for capability, misfits in check(Sources(folder)).items():
            num_broken += len(misfits)
            print("\n".join(f"{folder}: {capability}: {text}" for text in misfits) or f"{folder}: {capability} fits")
    return 1 if num_broken else 0


if __name__ == "__main__":
    sys.exit(main([Path(argument) for argument in sys.argv[1:]] or [found for found in [installed()] if found]))
