"""pydantic's errors in honed's words: what a value must be, in settings, files and requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from honed.daemon.settings.variables import did_you_mean

WHOLE, NUMBER, TRUTH, LIST = "must be a whole number", "must be a number", "must be true or false", "must be a list"
GROUP = "must be a group of keys with values"

SENTENCES = {
    "missing": "is missing",
    "extra_forbidden": "is unknown",
    "json_invalid": "isn't JSON ({error})",
    "int_type": WHOLE,
    "int_parsing": WHOLE,
    "int_from_float": WHOLE,
    "int_parsing_size": "has too many digits",
    "float_type": NUMBER,
    "float_parsing": NUMBER,
    "finite_number": "must be a finite number",
    "bool_type": TRUTH,
    "bool_parsing": TRUTH,
    "string_type": "must be a text",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "path_type": "must be a path",
    "list_type": LIST,
    "tuple_type": LIST,
    "too_long": "must have at most {max_length} items",
    "dict_type": GROUP,
    "model_type": GROUP,
    "model_attributes_type": GROUP,
    "literal_error": "must be {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
}
"""By pydantic's type of an error: the end of a sentence that begins with the value's name."""


def sentence(error: Mapping[str, Any], known: Sequence[str] = ()) -> str:
    """Say what is wrong with a value, as the end of a sentence that begins with its name.

    Args:
        error: one of pydantic's `errors()`.
        known: names that an unknown one may have meant.
    """
    kind, name = error["type"], error["loc"][-1] if error["loc"] else ""
    if kind == "missing" and isinstance(name, int):
        return "has too few items"
    if kind not in SENTENCES:
        return str(error["msg"]).removeprefix("Value error, ")
    context = {key: _shown(value) for key, value in (error.get("ctx") or {}).items()}
    found = SENTENCES[kind].format_map(context)
    return found + (did_you_mean(str(name), known) if kind == "extra_forbidden" else "")


def _shown(value: Any) -> str:
    return f"{int(value):_}" if isinstance(value, int | float) and value == int(value) else str(value)
