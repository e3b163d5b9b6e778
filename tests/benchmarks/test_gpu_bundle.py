"""vLLM's build is cut to one chip, and nothing that it requires is forgotten."""

from __future__ import annotations

import struct
import subprocess
import tomllib
from pathlib import Path

from benchmarks.gpu import bundle
from tests.tools import ROOT


def fatbin(*entries: tuple[int, int, bytes]) -> bytes:
    """A container as nvcc makes them: each entry a header of 64 bytes and code."""
    body = b""
    for kind, chip, code in entries:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", chip)
        body += header.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", bundle.FATBIN, 1, 16, len(body)) + body


def library(code: bytes) -> bytes:
    """The least ELF file that has a .nv_fatbin section."""
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at, names_at = 64, 64 + len(code)
    table = names_at + len(names)
    rows = [(0, 0, 0, 0, 0, 0), (1, 1, 0, 0, at, len(code)), (12, 3, 0, 0, names_at, len(names))]
    header = b"\x7fELF".ljust(40, b"\0") + struct.pack("<Q", table) + bytes(10) + struct.pack("<HHH", 64, len(rows), 2)
    return header + code + names + b"".join(struct.pack("<IIQQQQ", *row).ljust(64, b"\0") for row in rows)


def test_only_code_for_one_chip_is_left_and_nothing_moves() -> None:
    elf = library(
        fatbin((bundle.ELF, 80, b"a" * 64), (bundle.ELF, 90, b"hopper!!"), (bundle.PTX, 90, b"p" * 16))
        + fatbin((bundle.ELF, 80, b"b" * 32), (bundle.ELF, 100, b"c" * 24))
    )
    made = bundle.cut(elf, is_ptx_kept=False)
    assert len(made) == len(elf)
    assert bundle.code_for_hopper(made) == bundle.code_for_hopper(elf) != []
    assert b"a" * 64 not in made
    assert b"p" * 16 not in made
    kept = [[(kind, chip) for kind, chip, _ in entries] for _, entries in bundle.fatbins(made)]
    assert kept == [[(bundle.ELF, 90)], [(bundle.ELF, 100)]], "a container without code for the chip gets the smallest other"


def test_a_requirement_that_no_list_names_is_named() -> None:
    metadata = "Name: vllm\nRequires-Dist: torch==2.13.0\nRequires-Dist: compressed-tensors==0.17.0\n"
    metadata += "Requires-Dist: New_Thing[x]>=1; python_version > '3'\nRequires-Dist: zen; extra == 'zen'\n"
    required = bundle.requirements(metadata)
    assert bundle.unaccounted(required, ["compressed-tensors==0.17.0"]) == ["new-thing"]
    assert bundle.unaccounted(required, []) == ["compressed-tensors", "new-thing"]


def test_all_that_honed_requires_is_packed_or_on_the_machine() -> None:
    required = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert bundle.unaccounted(required, f"{bundle.ENGINE} {bundle.SERVER_AND_DAEMON}".split()) == []
    assert bundle.unaccounted(required, bundle.ENGINE.split()) != []


def test_the_other_machine_takes_honed_from_the_checkout(tmp_path: Path) -> None:
    script = tmp_path / "unpack.sh"
    script.write_text(bundle.UNPACK.format(folder=".gpu"))
    subprocess.run(["bash", "-n", script], check=True)
    assert 'PYTHONPATH="$PWD/src:$PWD:$SITE${PYTHONPATH:+:$PYTHONPATH}"' in script.read_text()
