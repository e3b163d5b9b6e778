"""The HONED_* environment variables: known names, their readers, and suggestions for misspelt ones."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel

from honed.adapt.protocol.attach_variables import VARIABLES

PATHS = {"HONED_STATE_DIR": "state_dir", "HONED_RUNTIME_DIR": "runtime_dir"}
"""Short names for settings of the section "paths"."""
OTHERS = frozenset({"HONED_CONFIG", "HONED_LOG_LEVEL"})
"""Read before the settings."""
OF_TESTS = "HONED_TEST_"
"""Prefix of the test suite's own variables, which the daemons it starts inherit."""


def name_of(key: str) -> str:
    """The variable of a setting: "store.max_raw_bytes" -> HONED_STORE__MAX_RAW_BYTES."""
    return "HONED_" + key.upper().replace(".", "__")


def keys_of(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every setting below a model, as "section.name"."""
    keys = []
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            keys += keys_of(kind, f"{prefix}{name}.")
        else:
            keys.append(f"{prefix}{name}")
    return keys


def unknown(env: Mapping[str, str], model: type[BaseModel]) -> list[str]:
    """One sentence for each unknown variable. The model reports unknown keys of a section.

    A section's variables may be in any case, the others are in capitals.
    """
    sections = {name_of(name) for name in model.model_fields}
    plain = {*PATHS, *VARIABLES, *OTHERS}
    candidates = [*sorted(plain), *map(name_of, keys_of(model))]
    return [
        f"unknown setting {name} in the environment{did_you_mean(name.upper(), candidates)}"
        for name in sorted(env)
        if name.upper().startswith("HONED_")
        and name not in plain
        and not name.startswith(OF_TESTS)
        and name.upper().partition("__")[0] not in sections
    ]


def not_json(env: Mapping[str, str], model: type[BaseModel], prefix: str = "HONED_") -> dict[str, str]:
    """Variables of lists and whole sections that aren't valid JSON, with an error message for each."""
    wrong: dict[str, str] = {}
    spelt = {name.upper(): name for name in env}
    for key, field in model.model_fields.items():
        name, kind = spelt.get(prefix + key.upper(), ""), field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, BaseModel)
        if (is_section or get_origin(kind) is tuple) and name and not _is_json(env[name]):
            example = '{"key": 1}' if is_section else _example(kind)
            wrong[name] = f"setting {name}={env[name]!r} in the environment isn't JSON; write it like {example}"
        if is_section:
            wrong |= not_json(env, kind, f"{prefix}{key.upper()}__")  # type: ignore[arg-type]
    return wrong


def did_you_mean(name: str, candidates: Sequence[str]) -> str:
    """The nearest known name, as the end of a sentence."""
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _example(kind: Any) -> str:
    """Example of a list of this kind."""
    inner = get_args(kind)[0]
    if get_origin(inner) is tuple:
        return "[[4, 5], [16, 2]]"
    return '["chat-0"]' if inner is str else "[0.5, 0.25]" if inner is float else "[1, 2]"


def _is_json(text: Any) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
