"""Measures the structure of the checkout: folders, imports, prose. `make structure` prints it and fails past a limit.

The last line is JSON. Tests are left out, and so are kept results and what is generated.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.test_imports import FOLDERS, backward_edges, folder_of, imports, modules, source_of
from tests.tools import ROOT

LIMITS = {
    "files_in_fullest_folder": 16,
    "import_cycles": 0,
    "backward_edges": 0,
    "readme_words": 900,
    "longest_sentence": 40,
    "mean_sentence": 20,
}
SOURCES = {".py", ".js", ".css", ".html", ".service", ".conf", ".yml", ".toml", ".env", ".sh"}
GENERATED = ("docs/reference.md", "docs/compatibility.md", "docs/models.md", "docs/alerts.md")
NOT_MEASURED = ("tests/", "benchmarks/results/", ".github/", "src/")


def tracked() -> list[Path]:
    """The files of the checkout, links aside."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in listed.split("\0") if name)
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def sources() -> list[Path]:
    """Source files in folders; `__init__.py` files are empty and don't count."""
    found = (path for path in tracked() if path.parent != ROOT and path.suffix in SOURCES and path.name != "__init__.py")
    return [path for path in found if not label(path).startswith(NOT_MEASURED)]


def cycles(edges: Mapping[str, set[str]]) -> list[set[str]]:
    """The groups of nodes that reach each other, of at least two nodes each."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = [start]
        while ahead:
            new = edges.get(ahead.pop(), set()) - seen
            seen |= new
            ahead.extend(new)
        return seen

    reach = {node: reached(node) for node in edges}
    groups = {frozenset({node, *(other for other in reach[node] if node in reach.get(other, ()))}) for node in edges}
    return [set(group) for group in groups if len(group) > 1]


def folder_edges() -> dict[str, set[str]]:
    """Folder -> the folders that its modules import, imports for types and inside functions included."""
    edges: dict[str, set[str]] = defaultdict(set)
    for path in modules(*FOLDERS):
        for found in imports(path):
            source = source_of(found.name)
            if source is not None and folder_of(source) != folder_of(path):
                edges[folder_of(path)].add(folder_of(source))
    return edges


def blocks(text: str) -> Iterator[str]:
    """Paragraphs and list items of a Markdown page as plain text: no code, no tables, no headings, no pictures."""
    text = re.sub(r"(?ms)^[ \t]*```.*?^[ \t]*```[ \t]*$", "", text)
    text = re.sub(r"(?s)<!--.*?-->", "", text)
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        stripped = line.strip()
        is_item = re.match(r"([-*+]|\d+\.)\s", stripped) is not None
        is_code = line.startswith("    ") and not block
        is_no_prose = not stripped or stripped.startswith(("|", "#", "![", "[![", "<", "---", ":::", "!!!", "=== ")) or is_code
        if block and (is_no_prose or is_item):
            yield " ".join(block)
            block = []
        if not is_no_prose:
            block.append(re.sub(r"^([-*+]|\d+\.)\s+", "", stripped))


def sentences(text: str) -> Iterator[str]:
    """The sentences of a Markdown page; a piece of code counts as one word."""
    for block in blocks(text):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", block)
        plain = re.sub(r"`[^`]*`", "code", plain)
        for sentence in re.split(r"(?<=[.!?])[)*\"”]*\s+(?=[A-Z0-9\"“(*_]|code)", plain):
            if words(sentence) > 1:
                yield sentence


def words(text: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def measure() -> tuple[dict[str, float], dict[str, str]]:
    """The figures, and where the largest of them are."""
    per_folder = Counter(label(path.parent) for path in sources())
    fullest = max(per_folder, key=lambda name: per_folder[name])
    lines = {label(path): len(path.read_text().splitlines()) for path in sources() if path.suffix == ".py"}
    product = {name: count for name, count in lines.items() if name.split("/")[0] not in ("benchmarks", "docs")}
    longest_file = max(lines, key=lambda name: lines[name])
    pages = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").glob("*.md")) if label(path) not in GENERATED)]
    told = [(words(sentence), label(page), sentence) for page in pages for sentence in sentences(page.read_text())]
    longest = max(told)
    found = cycles(folder_edges())
    backward = backward_edges()
    figures = {
        "files_in_fullest_folder": per_folder[fullest],
        "import_cycles": len(found),
        "backward_edges": len(backward),
        "readme_words": words((ROOT / "README.md").read_text()),
        "longest_sentence": longest[0],
        "mean_sentence": round(statistics.mean(count for count, _, _ in told), 1),
        "longest_file": lines[longest_file],
        "product_lines": sum(product.values()),
    }
    where = {
        "files_in_fullest_folder": fullest,
        "import_cycles": "; ".join(" <-> ".join(sorted(group)) for group in found),
        "backward_edges": "; ".join(backward[:20]),
        "longest_sentence": f"{longest[1]}: {longest[2]}",
        "longest_file": longest_file,
    }
    return figures, where


def main() -> int:
    figures, where = measure()
    over = [name for name, limit in LIMITS.items() if figures[name] > limit]
    for name, figure in figures.items():
        limit = f" (limit {LIMITS[name]})" if name in LIMITS else ""
        print(f"{name}: {figure:g}{limit} {where.get(name, '')}".rstrip())
    print(json.dumps(figures | {"passed": not over}))
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
