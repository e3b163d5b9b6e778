"""Two domains of text for the tiny pair: Python's own library (A) and the prose of a cloud API's manual (B).

Both are reproducible anywhere. A is the standard library of the running interpreter (PSF licence). B is the documentation
strings of one pinned release of the PyPI package `botocore` (Apache-2.0), without HTML and everything else that isn't prose. A
document is one source file or one operation's page. A hash of its name assigns it to one split permanently, so nothing of a
held-out document is ever trained on. Paragraphs of B that occur in several pages are kept in the first only.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

BOTOCORE_VERSION = "1.40.0"
SKIPPED_STDLIB_FOLDERS = {"site-packages", "test", "tests", "encodings", "pydoc_data", "idle_test", "__pycache__"}
MAX_SERVICE_CHARS = 100_000
MIN_DOCUMENT_CHARS = 600
MAX_DOCUMENT_CHARS = 120_000

Domain = Literal["a", "b"]
Split = Literal["train", "traffic", "heldout"]


@dataclass(frozen=True)
class Document:
    """One source file of domain A, or one operation's page of domain B."""

    name: str
    domain: Domain
    text: str

    @property
    def split(self) -> Split:
        """Split by the hash of the name, so it never changes: held out 8 %, live traffic 12 %, the rest for training."""
        bucket = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4], "big") % 100
        if bucket < 8:
            return "heldout"
        return "traffic" if bucket < 20 else "train"


def stdlib_documents() -> Iterator[Document]:
    """Yield every module of the running interpreter's standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_STDLIB_FOLDERS & set(relative.parts) or path.name.startswith("_sysconfigdata"):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore").encode("ascii", "ignore").decode()
        if MIN_DOCUMENT_CHARS <= len(text) <= MAX_DOCUMENT_CHARS:
            yield Document(f"stdlib/{relative.as_posix()}", "a", text)


def fetch_botocore(folder: Path) -> Path:
    """Download the pinned botocore wheel once, by pip, into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / f"botocore-{BOTOCORE_VERSION}-py3-none-any.whl"
    if not wheel.exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-q"]
        subprocess.run([*command, "-d", str(folder), f"botocore=={BOTOCORE_VERSION}"], check=True)
    return wheel


def botocore_documents(wheel: Path) -> Iterator[Document]:
    """Yield one page an operation: its purpose, then its parameters' meaning, as plain paragraphs."""
    seen: set[str] = set()
    with zipfile.ZipFile(wheel) as archive:
        for name in newest_services(archive.namelist()):
            service = json.loads(gzip.decompress(archive.read(name)))
            yield from service_documents(name.split("/")[2], service, seen)


def newest_services(names: list[str]) -> list[str]:
    """Choose the description with the latest date for each service."""
    newest: dict[str, str] = {}
    for name in sorted(n for n in names if n.endswith("/service-2.json.gz")):
        newest[name.split("/")[2]] = name
    return sorted(newest.values())


def service_documents(service_name: str, service: dict[str, Any], seen: set[str]) -> Iterator[Document]:
    """Yield pages of one service until its share of characters is used up, so that no service dominates."""
    left_chars = MAX_SERVICE_CHARS
    for name, operation in sorted(service["operations"].items()):
        paragraphs = prose(operation.get("documentation", ""))
        shapes = [operation.get(side, {}).get("shape") for side in ("input", "output")]
        for shape in filter(None, shapes):
            for member, described in service["shapes"][shape].get("members", {}).items():
                lines = prose(described.get("documentation", ""))
                paragraphs += [f"{member}: {line}" if i == 0 else line for i, line in enumerate(lines)]
        fresh = [p for p in dict.fromkeys(paragraphs) if p not in seen]
        seen.update(fresh)
        text = f"{name}\n\n" + "\n\n".join(fresh) + "\n"
        if MIN_DOCUMENT_CHARS <= len(text) <= MAX_DOCUMENT_CHARS and left_chars > 0:
            left_chars -= len(text)
            yield Document(f"botocore/{service_name}/{name}", "b", text)


def prose(markup: str) -> list[str]:
    """Return the paragraphs of a documentation string, without tags, in ASCII; one-word items are dropped."""
    text = re.sub(r"</?(p|li|ul|ol|dl|dt|dd|note|important|h\d|table|tr|div|br)\b[^>]*>", "\n", markup)
    text = html.unescape(re.sub(r"<[^>]+>", "", text)).encode("ascii", "ignore").decode()
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
    return [line for line in lines if len(line.split()) > 3]


def load_documents(cache: Path) -> list[Document]:
    """Load all documents of both domains."""
    return [*stdlib_documents(), *botocore_documents(fetch_botocore(cache))]
