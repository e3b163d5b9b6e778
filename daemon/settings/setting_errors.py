"""Messages for wrong settings: the full key, its value, the allowed values, and its source."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from honed.daemon.settings import variables
from honed.daemon.settings.plain_errors import sentence
from honed.daemon.settings.sections import Section

Location = tuple[int | str, ...]
_CREDENTIALS = re.compile(r"[^\s'\"]+@")
"""What stands before an @, in `registry.url`."""


@dataclass(frozen=True, slots=True)
class Given:
    """The sources of the settings, strongest first."""

    flags: Mapping[str, Any]
    env: Mapping[str, str]
    path: Path | None
    toml: dict[str, Any]

    def source(self, key: Location) -> tuple[str, str]:
        """The source of a value and the key's spelling there; ("", …) for a default."""
        names = [str(part) for part in key]
        if _is_in(self.flags, names):
            return "the flags", f"--{names[-1].replace('_', '-')}"
        known = {name.upper(): name for name in self.env}
        for end in range(len(names), 0, -1):
            if (name := variables.name_of(".".join(names[:end]))) in known:
                return "the environment", known[name]
        short = {f"paths.{field}": name for name, field in variables.PATHS.items()}.get(".".join(names), "")
        if self.env.get(short):
            return "the environment", short
        if _is_in(self.toml, names):
            return f"settings file {self.path}", ".".join(names)
        return "", ".".join(names)


def explain(error: ValidationError, given: Given, model: type[BaseModel]) -> list[str]:
    """One sentence for each error found by pydantic."""
    return [_sentence(dict(one), given, model) for one in error.errors(include_url=False)]


def _sentence(one: dict[str, Any], given: Given, model: type[BaseModel]) -> str:
    location: Location = one["loc"]
    key = ".".join(str(part) for part in location if isinstance(part, str))
    text = sentence(one)
    place, name = given.source(tuple(part for part in location if isinstance(part, str)))
    if one["type"] == "extra_forbidden":
        return _unknown(key, place, name, model)
    found, allowed = _find(model, key)
    if isinstance(found, type) and issubclass(found, Section) and one["type"] == "value_error":
        return f"settings [{key}]: {text}{_named_sources(text, location, found, given)}"
    limits = f", {allowed}" if allowed and allowed not in text else ""
    where = f" (from {name} in {place})" if place.startswith("the") else f" (from {place})" if place else ""
    return f"setting {key!r} is {_CREDENTIALS.sub('…@', repr(one['input']))}: {text}{limits}{where}"


def _unknown(key: str, place: str, name: str, model: type[BaseModel]) -> str:
    known = variables.keys_of(model)
    if name.upper() == variables.name_of(key):
        near = variables.did_you_mean(name.upper(), [variables.name_of(one) for one in known])
    else:
        sections = {one.rpartition(".")[0] for one in known}
        near, name = variables.did_you_mean(key, known if "." in key else [*sorted(sections), *known]), repr(key)
    return f"unknown setting {name} in {place or 'the settings'}{near}"


def _find(model: type[BaseModel], key: str) -> tuple[Any, str]:
    """A key's type, and its range in words if it has one."""
    kind: Any = model
    allowed = ""
    for name in key.split("."):
        if not (isinstance(kind, type) and issubclass(kind, BaseModel)) or name not in kind.model_fields:
            return None, ""
        ranges = kind.RANGES if issubclass(kind, Section) else {}
        allowed, kind = str(ranges.get(name, "")), kind.model_fields[name].annotation
    return kind, allowed


def _named_sources(text: str, location: Location, section: type[Section], given: Given) -> str:
    """Sources of the fields named in a sentence."""
    places = []
    for field in section.model_fields:
        if re.search(rf"\b{field}\b", text):
            place, name = given.source((*location, field))
            if place:
                places.append(f"{name} in {place}")
    return f" (from {', '.join(places)})" if places else ""


def _is_in(source: Any, names: list[str]) -> bool:
    for name in names:
        if not isinstance(source, Mapping):
            return True
        if name not in source:
            return False
        source = source[name]
    return True
