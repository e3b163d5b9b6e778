"""Errors of the daemon. Each is also a standard exception, so callers needn't know ours."""

from __future__ import annotations

from collections.abc import Iterable

EXIT_CONFIG = 78
"""Exit code of both services for wrong settings (EX_CONFIG of sysexits.h); the units don't start them again after it."""
START_TRAINER = "Start one: `systemctl start honed-trainer`, or `honed train`."
"""Cure if no trainer is connected."""

CHECK_DISK = "Check the state folder's disk: whether it is full, mounted read-only or failing, and who owns the files."
"""Cure if the database or the registry refuses."""


class HonedError(Exception):
    """Base of the daemon's own errors; the text is one clear line for an operator, `cure` says what to do."""

    def __init__(self, message: str = "", *, cure: str = "") -> None:
        super().__init__(message)
        self.cure = cure


class SettingsError(HonedError, ValueError):
    """A setting that doesn't exist, doesn't parse, isn't allowed, or names what can't be used: it stays wrong."""


class StartError(HonedError, RuntimeError):
    """The daemon can't start now: state in use, port in use, unusable SQLite, a path that can't be made, a file that's away."""


def refused(message: str, error: OSError) -> SettingsError | StartError:
    """The error for what the system refuses of a setting: a missing right stays missing, all else may come, as a mount does."""
    return SettingsError(message) if isinstance(error, PermissionError) else StartError(message)


class StoreError(HonedError, OSError):
    """The database or the registry refused a read or a write (full disk, I/O error, closed)."""

    def __init__(self, message: str = "", *, cure: str = CHECK_DISK) -> None:
        super().__init__(message, cure=cure)


class UnknownError(HonedError, LookupError):
    """An engine, version, operation or override that doesn't exist."""


class ConflictError(HonedError, RuntimeError):
    """The present state forbids a valid request: another operation runs, nothing is connected."""


class PreconditionError(HonedError, RuntimeError):
    """`If-Match` differs from the present generation."""


class RequestError(HonedError, ValueError):
    """The request is invalid in every state."""


class ReusedKeyError(RequestError):
    """An `Idempotency-Key` used before for another request."""


class UnauthorizedError(HonedError, PermissionError):
    """The request has no valid token."""


class ForbiddenError(HonedError, PermissionError):
    """The token doesn't allow the request."""


def there_are(names: Iterable[str], most: int = 5) -> str:
    """Existing names, as the end of a sentence about an unknown one; the last `most` if there are more."""
    known = list(names)
    if not known:
        return "there are none"
    shown = ", ".join(known[-most:])
    if len(known) > most:
        return f"there are {len(known)}, lastly {shown}"
    return f"there {'is' if len(known) == 1 else 'are'} {shown}"
