"""Parser for the parts of a vLLM server's command line that honed needs: model, drafter, honed's classes.

Pure: words in, values out. Flags may have any form that vLLM takes: `--a-b x`, `--a_b x`, `--a-b=x`, and nested ones as
`--speculative-config.method dflash`. Source: vllm/engine/arg_utils.py (0.32), `create_speculative_config`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from honed.adapt.models.drafter_tensor_names import method_named
from honed.daemon.install.drafter_config import method_by_name

SHORT = {"-sc": "--speculative-config", "-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size"}
SPECULATIVE = {"--spec-method": "method", "--spec-model": "model", "--spec-tokens": "num_speculative_tokens"}
SWITCHES = frozenset({"--enable-lora"})
SERVERS = ("vllm.entrypoints.openai.api_server", "vllm.entrypoints.api_server", "vllm.entrypoints.cli.main")
_PYTHON = re.compile(r"(python|pypy)[\d.]*t?")


@dataclass(frozen=True)
class VllmCommand:
    """Values in a vLLM command; "" and 0 if absent."""

    model: str = ""
    is_model_named_twice: bool = False
    scheduler_cls: str = ""
    worker_extension_cls: str = ""
    speculative: dict[str, Any] = field(default_factory=dict)
    is_lora: bool = False
    pipeline_parallel_size: int = 1
    tensor_parallel_size: int = 1
    max_model_len: int = 0
    config_file: str = ""
    """File with further flags, which isn't read here."""
    unreadable: tuple[str, ...] = ()
    """Flags with an invalid value."""

    @property
    def method(self) -> str:
        """The speculative method; where none is named, the one that vLLM takes by the drafter's name; "" without one."""
        named, model = method_named(str(self.speculative.get("method") or "")), self.drafter
        if named or not model:
            return named
        return "ngram" if model in ("ngram", "[ngram]") else method_by_name(model)

    @property
    def drafter(self) -> str:
        return str(self.speculative.get("model") or "")

    def resolved(self, config: Mapping[str, Any] | None) -> VllmCommand:
        """Return the command that vLLM makes of this one: a model in speculators' format becomes the drafter.

        Source: vllm/transformers_utils/config.py (0.32), `maybe_override_with_speculators`.

        Args:
            config: the model's config.json; None if that can't be read.
        """
        try:
            own = (config or {})["speculators_config"]
            target, tokens = own["verifier"]["name_or_path"], own["proposal_methods"][0]["speculative_tokens"]
        except (KeyError, IndexError, TypeError):
            return self
        kind = str((config or {}).get("speculators_model_type") or "")
        ours = {"method": {"peagle": "eagle3", "dflash2": "dflash"}.get(kind, kind), "model": self.model}
        return replace(self, model=str(target), speculative={"num_speculative_tokens": tokens} | self.speculative | ours)


def is_server(words: Sequence[str]) -> bool:
    """True if these words are vLLM's OpenAI server, not its launcher (`timeout`, `sudo`, a supervisor)."""
    rest = list(words)
    if rest and _PYTHON.fullmatch(rest[0].rpartition("/")[2]):
        rest.pop(0)
        while rest and rest[0].startswith("-") and rest[0] != "-m":
            del rest[: 2 if rest[0] in ("-X", "-W") else 1]
        del rest[: rest[:1] == ["-m"]]
    return bool(_flags_at(rest, 0))


def parse(words: Sequence[str]) -> VllmCommand:
    """Read a command, program included: `vllm serve MODEL …` or `python -m vllm.entrypoints.openai.api_server …`."""
    rest = _after_program(words) or list(words)
    values: dict[str, str] = {}
    speculative: dict[str, Any] = {}
    positional, unreadable = "", []
    is_model_first = bool(rest) and not rest[0].startswith("-")  # elsewhere a word may be a flag's second value
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            positional = positional or word
            continue
        name, has_value, value = word.partition("=")
        name = _canonical(name)
        if not has_value and name not in SWITCHES and rest and not _is_flag(rest[0]):
            value = rest.pop(0)
        head, _, key = name.partition(".")
        if name == "--speculative-config":
            made = _json(value)
            if isinstance(made, dict):
                speculative |= {k.replace("-", "_"): v for k, v in made.items()}
            else:
                unreadable.append(f"--speculative-config {value!r} is no JSON object")
        elif head == "--speculative-config" and key:
            speculative[key.replace("-", "_")] = _loose(value)
        elif name in SPECULATIVE:
            speculative[SPECULATIVE[name]] = _loose(value)
        else:
            values[name] = value
    return VllmCommand(
        model=values.get("--model", "") or positional,
        is_model_named_twice=is_model_first and "--model" in values,
        scheduler_cls=values.get("--scheduler-cls", ""),
        worker_extension_cls=values.get("--worker-extension-cls", ""),
        speculative=speculative,
        is_lora="--enable-lora" in values,
        pipeline_parallel_size=int(_number(values.get("--pipeline-parallel-size", ""), 1)),
        tensor_parallel_size=int(_number(values.get("--tensor-parallel-size", ""), 1)),
        max_model_len=int(_number(values.get("--max-model-len", ""), 0)),
        config_file=values.get("--config", ""),
        unreadable=tuple(unreadable),
    )


def _after_program(words: Sequence[str]) -> list[str]:
    """Words after the program's name; empty if it isn't vLLM's server."""
    return next(filter(None, (_flags_at(words, i) for i in range(len(words)))), [])


def _flags_at(words: Sequence[str], i: int) -> list[str]:
    """Words after vLLM's server if it is at `i`, plus an empty word so that the list is never empty."""
    word = words[i] if i < len(words) else ""
    if word in SERVERS or word.endswith("/vllm/entrypoints/openai/api_server.py"):
        return [*words[i + 1 :], ""]
    if word.rpartition("/")[2] == "vllm" and list(words[i + 1 : i + 2]) == ["serve"]:
        return [*words[i + 2 :], ""]
    return []


def _canonical(name: str) -> str:
    head, dot, key = name.partition(".")
    head = SHORT.get(head, head.replace("_", "-"))
    return f"{head}{dot}{key}"


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not _is_number(word)


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _number(text: str, default: float) -> float:
    return float(text) if _is_number(text) and math.isfinite(float(text)) else default


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _loose(text: str) -> Any:
    """Parsed JSON, or the text if it isn't JSON."""
    found = _json(text)
    return text if found is None and text != "null" else found
