"""Boundary between honed and vLLM: honed's errors are counted, logged once a place, and never reach vLLM.

A worker that hangs is no error of honed's: see `NoAnswer`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

logger = logging.getLogger("honed.attach")

MAX_ERRORS = 100
"""Above this number, the attachment stops deciding and only observes."""

P = ParamSpec("P")
R = TypeVar("R")


class NoAnswer(TimeoutError):
    """The workers didn't answer in the time that vLLM gives them for a step. The engine must end, as after a step that hangs.

    Nothing of honed's may catch it: what they answer later, vLLM would take for the answers to its next calls.
    """


class Errors:
    """Exceptions caught at our boundary."""

    def __init__(self) -> None:
        self.count = 0
        self._complained: set[str] = set()

    @property
    def is_too_many(self) -> bool:
        """Whether honed should leave this engine alone."""
        return self.count > MAX_ERRORS

    def note(self, where: str) -> None:
        """Count the exception being handled; log the first of each place with its traceback."""
        self.count += 1
        if where not in self._complained:
            self._complained.add(where)
            logger.warning("honed: error in %s; vLLM is not affected", where, exc_info=True)


def guarded(method: Callable[P, R]) -> Callable[P, R | None]:
    """Make a method of an object with `errors: Errors` return None instead of raising anything but `NoAnswer`."""

    @functools.wraps(method)
    def guard(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return method(*args, **kwargs)
        except NoAnswer:
            raise
        except Exception:
            this: Any = args[0]
            this.errors.note(method.__name__)
            return None

    return guard
