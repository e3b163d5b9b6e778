"""Pack vLLM's CUDA build for a machine that has a Hopper GPU and no network.

    python3 benchmarks/gpu/bundle.py CHECKOUT [OUT]        OUT is CHECKOUT/.gpu by default, and git is told to ignore it

It downloads vLLM's wheel and the wheels that the other machine lacks, leaves out what a dense bf16 model with a DFlash drafter
never loads, overwrites GPU code for other chips with zeros, and packs the rest into OUT/bundle.tar.xz. That runs on Hopper
alone. On that machine, in the root of the copied checkout, `. OUT/unpack.sh` unpacks it into /tmp/site, sets PYTHONPATH and
PATH, and tries the imports. The copy must keep the links in src/honed.

The other machine needs Python 3.12, torch 2.11 (CUDA 13.0), triton 3.6, transformers, numba, aiohttp and the like. This one
needs Python 3.11 or later with pip, 2 GB of memory and three minutes of a core. Downloads are kept (--work, 340 MB).
"""

from __future__ import annotations

import argparse
import io
import lzma
import re
import struct
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

MIB = 1 << 20
VLLM = "vllm==0.32.0"
# What vLLM's `LLM` and honed's attachment import and the other machine lacks.
ENGINE = """annotated-types==0.8.0 apache-tvm-ffi==0.1.11 blake3==1.0.11 cachetools==8.0.2 cbor2==6.3.0
    compressed-tensors==0.17.0 distro==1.9.0 fastapi==0.136.3 httpcore2==2.16.2 httpx2==2.16.2 jiter==0.19.0 llguidance==1.7.6
    loguru==0.7.3 msgspec==0.22.0 openai==3.57.0 oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7 pybase64==1.5.1
    pydantic==2.14.4 pydantic-core==2.50.5 pyzmq==27.3.0 sniffio==1.3.1 starlette==1.10.0 structlog==26.1.0 truststore==0.10.5
    typing-inspection==0.4.5 uvicorn==0.54.0 xgrammar==0.2.8 setproctitle==1.3.8
    interegular==0.3.3 lm-format-enforcer==0.11.3"""
# What `vllm serve` and honed's daemon need beside.
SERVER_AND_DAEMON = """anthropic==2.14.0 ijson==3.6.0 jmespath==1.1.0 mcp==2.3.0 model-hosting-container-standards==0.1.16
    prometheus-fastapi-instrumentator==8.1.0 python-json-logger==4.2.0 python-multipart==0.0.34 supervisor==4.3.0
    watchfiles==1.3.0 bcrypt==5.0.0 click-default-group==1.2.4 pydantic-settings==2.16.3 pysqlite3==0.6.1 python-dotenv==1.2.4
    sqlite-fts4==1.0.3 sqlite-utils==4.2.1"""
# vLLM or honed requires these, and the other machine has them.
ON_THE_MACHINE = """aiohttp cloudpickle einops filelock h11 huggingface-hub ninja numba numpy opencv-python-headless pillow
    prometheus-client protobuf psutil py-cpuinfo pyyaml regex requests rich safetensors sentencepiece setuptools six tiktoken
    tokenizers torch torchaudio torchvision tqdm transformers typer typing-extensions"""
# vLLM requires these, and a dense bf16 model with a DFlash drafter doesn't load them. For FlashInfer's sampler see `UNPACK`.
NOT_NEEDED = """depyf fastsafetensors flashinfer-python humming-kernels instanttensor jsonschema lark mistral-common
    nvidia-cudnn-frontend nvidia-cutlass-dsl nvtx opentelemetry-api opentelemetry-exporter-otlp opentelemetry-sdk
    opentelemetry-semantic-conventions-ai outlines-core pynvvideocodec quack-kernels tilelang tokenspeed-mla torchcodec"""
LEFT_OUT = re.compile(r"/RECORD$|\.data/|^tvm_ffi/3rdparty/")
LEFT_OUT_OF_VLLM = re.compile(
    r"^vllm/(vllm-rs$|third_party/(deep_gemm|fmha_sm100)/)|\.(h|hpp|cuh|inl|cu|cpp)$"
    r"|/_(vllm_fa2|deepselect|flashkda|flashmla|flashmla_extension|qutlass)_C\."
)
MANYLINUX = ["manylinux1", "manylinux2014", *(f"manylinux_2_{n}" for n in (17, 24, 26, 27, 28, 31, 34, 35, 38, 39))]
FATBIN, PTX, ELF, SM_90 = 0xBA55ED50, 1, 2, 90

UNPACK = r"""# To be sourced by bash in the repository's root: . {folder}/unpack.sh
SITE=${{SITE:-/tmp/site}}
BUNDLE=$(cd "$(dirname "${{BASH_SOURCE[0]}}")" && pwd)
if ! test -e "$SITE/.unpacked"; then
  python3 -m tarfile --filter data -e "$BUNDLE/bundle.tar.xz" "$SITE" || return 1
  python3 -m compileall -q -j 0 "$SITE" >/dev/null 2>&1  # else engines that start at once compile every module each
  touch "$SITE/.unpacked"
fi
export PYTHONPATH="$PWD/src:$PWD:$SITE${{PYTHONPATH:+:$PYTHONPATH}}" PATH="$SITE/bin:$PATH"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 PYTHONUNBUFFERED=1
export VLLM_USE_FLASHINFER_SAMPLER=0  # it isn't packed, and vLLM would use it without a check
python3 -c '
import torch, vllm.entrypoints.llm, vllm._C_stable_libtorch, vllm.v1.worker.gpu.model_runner, honed.attach.plugin
from vllm.platforms import current_platform
from vllm.vllm_flash_attn import flash_attn_interface as fa
print("vllm", vllm.__version__, "on", type(current_platform).__name__, "with torch", torch.__version__)
print("FlashAttention 3:", fa.FA3_UNAVAILABLE_REASON or "loads")
import vllm.model_executor.layers.quantization.online.base  # what loading a model imports
from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported
print("FlashInfer samples:", flashinfer_sampler_supported())
' || return 1
"""


def download(names: list[str], folder: Path) -> list[Path]:
    """Return the wheels of exactly these packages, for Python 3.12 on x86-64."""
    patterns = [name.replace("-", "_").replace("==", "-") + "-*.whl" for name in names]
    missing = [name for name, pattern in zip(names, patterns, strict=True) if not any(folder.glob(pattern))]
    platforms = [word for name in MANYLINUX for word in ("--platform", f"{name}_x86_64")]
    asked = ["--no-deps", "--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    if missing:
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *asked, "-d", folder, *missing], check=True)
    return [next(folder.glob(pattern)) for pattern in patterns]


def plain_name(requirement: str) -> str:
    """Return the package that a requirement names, as indexes spell it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement.strip(), maxsplit=1)[0]).lower()


def requirements(metadata: str) -> list[str]:
    """Return what a wheel requires without extras."""
    lines = [line.partition(":")[2] for line in metadata.splitlines() if line.startswith("Requires-Dist:")]
    return [line for line in lines if "extra ==" not in line]


def unaccounted(required_by: list[str], packed: list[str]) -> list[str]:
    """Return what is required and no list here names: such a package kept every engine, and later the daemon, from starting."""
    required = {plain_name(line) for line in required_by}
    known = {plain_name(name) for name in (*packed, *ON_THE_MACHINE.split(), *NOT_NEEDED.split())}
    return sorted(required - known)


def sections(elf: bytes) -> dict[str, tuple[int, int]]:
    """Return offset and size of each section of a 64-bit ELF file that has bytes in it."""
    table, size, count, names = *struct.unpack_from("<Q", elf, 40), *struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    strings = rows[names][4]
    return {elf[(at := strings + r[0]) : elf.index(b"\0", at)].decode(): (r[4], r[5]) for r in rows if r[1] != 8}


def fatbins(elf: bytes) -> Iterator[tuple[int, list[tuple[int, int, bytes]]]]:
    """Yield each container of a library's .nv_fatbin section: its offset, and its entries (kind, chip, bytes with header)."""
    at, size = sections(elf).get(".nv_fatbin", (0, 0))
    end = at + size
    while at < end:
        magic, _, header, length = struct.unpack_from("<IHHQ", elf, at)
        if magic == 0:  # what `cut` leaves behind a container
            at += 8
            continue
        where, entry, at = at, at + header, at + header + length
        entries = []
        while entry < at:
            kind, _, header, length = struct.unpack_from("<HHIQ", elf, entry)
            entries.append((kind, *struct.unpack_from("<I", elf, entry + 28), elf[entry : entry + header + length]))
            entry += header + length
        if magic != FATBIN or entry != at:
            raise ValueError(f"at {where:#x} isn't a fat binary of the known form")
        yield where, entries


def code_for_hopper(elf: bytes) -> list[bytes]:
    """Return all machine code for sm_90 and sm_90a."""
    return [code for _, entries in fatbins(elf) for kind, chip, code in entries if (kind, chip) == (ELF, SM_90)]


def cut(elf: bytes, is_ptx_kept: bool) -> bytes:
    """Return the library without code for other chips than sm_90 and without debug symbols; its length stays the same.

    Each container stays where it is and is closed behind what it keeps; zeros fill the rest. A container with nothing for sm_90
    gets the file's smallest code for another chip: CUDA then finds no kernel for this device, as in many wheels. PTX goes too:
    it belongs to quantised kernels (Marlin) wherever there is no code for sm_90; elsewhere it isn't read.
    """
    out = bytearray(elf)
    for name, (offset, size) in sections(elf).items():
        if name in (".symtab", ".strtab") or name.startswith(".debug_"):
            out[offset : offset + size] = bytes(size)
    others = [code for _, entries in fatbins(elf) for kind, chip, code in entries if kind == ELF and chip != SM_90]
    for where, entries in fatbins(elf):
        kept = [code for kind, chip, code in entries if (kind, chip) == (ELF, SM_90)]
        if not kept and is_ptx_kept:
            kept = [code for kind, chip, code in entries if kind == PTX and chip <= SM_90]
        code, length = b"".join(kept) or min(others, key=len), sum(len(code) for *_, code in entries)
        header = struct.unpack_from("<H", elf, where + 6)[0]
        struct.pack_into("<Q", out, where + 8, len(code))
        out[where + header : where + header + length] = code.ljust(length, b"\0")
    if len(out) != len(elf) or code_for_hopper(elf) != code_for_hopper(bytes(out)):
        raise AssertionError("the code for sm_90 isn't what it was")
    return bytes(out)


def contents(wheel: Path, is_ptx_kept: bool) -> Iterator[tuple[str, bytes, int]]:
    """Yield the files of a wheel that are packed: name, bytes, mode."""
    is_vllm = wheel.name.startswith("vllm-")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.endswith("/") or LEFT_OUT.search(name) or (is_vllm and LEFT_OUT_OF_VLLM.search(name)):
                continue
            data = archive.read(name)
            yield name, cut(data, is_ptx_kept) if data[:4] == b"\x7fELF" else data, 0o644


def of_honed(checkout: Path) -> Iterator[tuple[str, bytes, int]]:
    """Yield what an installed honed and vLLM have beside their modules: entry points, and the commands."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    info = f"honed-{project['version']}.dist-info"
    yield f"{info}/METADATA", f"Metadata-Version: 2.1\nName: honed\nVersion: {project['version']}\n".encode(), 0o644
    groups = {"console_scripts": project["scripts"]} | project["entry-points"]
    text = "".join(f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items())
    yield f"{info}/entry_points.txt", text.encode(), 0o644
    for command, target in {"vllm": "vllm.entrypoints.cli.main:main", **project["scripts"]}.items():
        module, function = target.split(":")
        text = f"#!/usr/bin/env python3\nimport sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        yield f"bin/{command}", text.encode(), 0o755


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="honed's checkout")
    parser.add_argument("out", type=Path, nargs="?", help="where bundle.tar.xz and unpack.sh go")
    parser.add_argument("--work", type=Path, default=Path("/tmp/honed-bundle"), help="where downloads are kept")
    parser.add_argument("--keep-ptx", action="store_true", help="keep PTX of what has no code for sm_90 (Marlin; 16 MiB)")
    parser.add_argument("--engine-only", action="store_true", help="leave out what only `vllm serve` or honed's daemon needs")
    asked = parser.parse_args()
    checkout = asked.checkout.resolve()
    out = (asked.out or checkout / ".gpu").resolve()
    out.mkdir(parents=True, exist_ok=True)
    asked.work.mkdir(parents=True, exist_ok=True)
    wheels = download([VLLM, *(ENGINE if asked.engine_only else f"{ENGINE} {SERVER_AND_DAEMON}").split()], asked.work)
    with zipfile.ZipFile(wheels[0]) as archive:
        metadata = archive.read(next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))).decode()
    required = requirements(metadata) + tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["dependencies"]
    if names := unaccounted(required, f"{ENGINE} {SERVER_AND_DAEMON}".split()):
        parser.error(f"{VLLM} or honed also requires {', '.join(names)}: name each in ENGINE or another list here")
    how = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 192 * MIB}]
    with lzma.open(out / "bundle.tar.xz", "wb", filters=how) as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for group in (of_honed(checkout), *(contents(wheel, asked.keep_ptx) for wheel in wheels)):
            for name, data, mode in group:
                info = tarfile.TarInfo(name)
                info.size, info.mode = len(data), mode
                archive.addfile(info, io.BytesIO(data))
    (out / "unpack.sh").write_text(UNPACK.format(folder=out.name))
    print(f"{out / 'bundle.tar.xz'}: {(out / 'bundle.tar.xz').stat().st_size / MIB:.1f} MiB")
    if out.is_relative_to(checkout):
        git = ["git", "-C", str(checkout)]
        exclude = checkout / subprocess.check_output([*git, "rev-parse", "--git-path", "info/exclude"], text=True).strip()
        line, text = f"/{out.relative_to(checkout)}/\n", exclude.read_text() if exclude.exists() else ""
        if line not in text:
            exclude.write_text(text + line)


if __name__ == "__main__":
    main()
