"""Writes docs/compatibility.md from the contract, and from what was found when it was held against each release's sources.

`python -m docs.make.contract_page ROOT` writes the page of a checkout out of attach/compatibility.json. With package folders
after it, RELEASE/vllm each, those are checked first and their findings put there.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from docs.make.contract_check import Sources, check, qualified
from honed.attach.contract.compatibility import SUPPORTED
from honed.attach.contract.contract import CONTRACT, WORKERS, Attributes, Clause, Constant, Method, Open, Passes

PAGE, FINDINGS = "docs/compatibility.md", "attach/compatibility.json"
HEAD = """# Compatibility with vLLM

`make reference` writes this page from `attach/contract/contract.py` and `attach/compatibility.json`. Tests keep it true.
`make contract` fetches the sources of every vLLM release from {low} up to, but not including, {high}, and checks the contract
against them.

Most of what honed relies on inside vLLM is private to vLLM. *Fits* means: the release's sources have every name, parameter,
attribute and order of calls that a capability relies on. The sources were read, not run. `make test` runs the installed
release, and checks the contract against it too.

On an unsupported vLLM, honed only logs events, where its scheduler still fits. It leaves draft lengths, capture and swap alone.
vLLM's log says so once, and `honed engines` at any time.
"""
TITLES = {
    "events": "events, metrics",
    "draft_length": "draft length per request",
    "capture": "capture of training samples",
    "swap": "swap of the drafter's weights",
    "trees": "draft trees",
}


class Findings(TypedDict):
    """What is checked in beside the page."""

    contract: str
    """Digest of the contract that was held against the sources."""
    releases: dict[str, dict[str, list[str]]]
    """Release -> capability -> what doesn't fit."""


def digest() -> str:
    """Changes with the contract."""
    return hashlib.sha256(repr(CONTRACT).encode()).hexdigest()[:16]


def find(packages: Sequence[Path]) -> Findings:
    """Hold the contract against releases, each in a folder that is named after it."""
    return Findings(contract=digest(), releases={package.parent.name: check(Sources(package)) for package in packages})


def read(root: Path) -> Findings:
    """The findings that are checked in."""
    findings: Findings = json.loads((root / FINDINGS).read_text())
    return findings


def markdown(findings: Findings) -> str:
    """The page."""
    return "\n".join([*_head(), *_table(findings["releases"]), *_misfits(findings["releases"]), *_contract()]) + "\n"


def _head() -> Iterator[str]:
    low, high = (".".join(map(str, version)) for version in SUPPORTED)
    yield HEAD.format(low=low, high=high)


def _table(releases: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    columns = [*(f"vLLM {release}" for release in releases), "any other"]
    yield f"| | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 1)}"
    for capability, title in TITLES.items():
        cells = [_verdict(found[capability], len(CONTRACT[capability])) for found in releases.values()]
        other = "if its scheduler fits" if capability == "events" else "no"
        yield f"| {title} | {' | '.join([*cells, other])} |"
    yield ""


def _verdict(misfits: Sequence[str], num_clauses: int) -> str:
    return f"{len(misfits)} of {num_clauses} don't fit" if misfits else f"fits ({num_clauses})"


def _misfits(releases: Mapping[str, Mapping[str, Sequence[str]]]) -> Iterator[str]:
    broken = [(r, c, text) for r, found in releases.items() for c, misfits in found.items() for text in misfits]
    if broken:
        yield "## What doesn't fit\n\n| vLLM | capability | |\n|---|---|---|"
        yield from (f"| {release} | {TITLES[capability]} | {text} |" for release, capability, text in broken)
        yield ""


def _contract() -> Iterator[str]:
    yield "## What is relied on\n"
    groups = {
        "Events and metrics": CONTRACT["events"],
        "Draft length per request": CONTRACT["draft_length"],
        "Capture and swap: the way to the workers and their drafter": WORKERS,
        "Capture": [clause for clause in CONTRACT["capture"] if clause not in WORKERS],
        "Swap": [clause for clause in CONTRACT["swap"] if clause not in WORKERS],
    }
    for title, clauses in groups.items():
        yield f"### {title}\n\n| file | what |\n|---|---|"
        yield from (f"| `{clause.file}` | {_in_words(clause)} |" for clause in clauses)
        yield ""


def _in_words(clause: Clause) -> str:
    match clause:
        case Attributes():
            return f"`{clause.owner}` has {_listed(clause.names)}"
        case Open():
            return f"`{clause.owner}` takes further attributes"
        case Constant():
            return f"`{qualified(clause)} = {clause.value!r}`"
        case Passes():
            return f"`{qualified(clause)}` calls `{clause.callee}` with {_listed(clause.keywords)}"
        case Method():
            rest = ["…"] if clause.first or clause.parameters else []
            named = [*clause.first, *rest, *(f"{name}=" for name in clause.parameters)]
            calls = f" calls {', then '.join(f'`{name}`' for name in clause.calls)}" if clause.calls else ""
            return f"`{qualified(clause)}({', '.join(named)})`{calls}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def main(root: Path, packages: Sequence[Path]) -> None:
    """Write the page, and before it the findings if there are sources to check."""
    if packages:
        (root / FINDINGS).write_text(json.dumps(find(packages), indent=1) + "\n")
    (root / PAGE).write_text(markdown(read(root)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
