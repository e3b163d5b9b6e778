"""The admin API's tokens: from the files that the settings name, else from systemd's credentials."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from honed.daemon.errors import SettingsError, refused

Role = Literal["read", "admin"]
CREDENTIALS: dict[Role, str] = {"read": "honed-read-token", "admin": "honed-admin-token"}
"""Files in $CREDENTIALS_DIRECTORY, written by systemd's LoadCredential."""
MIN_LENGTH = 32
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, repr=False)
class Tokens:
    """SHA-256 of the two secrets: comparing digests takes the same time for every guess."""

    by_role: Mapping[Role, bytes]

    def role_of(self, authorization: bytes) -> Role | None:
        """Role for the header `Authorization: Bearer …`. Always compares both tokens."""
        scheme, _, token = authorization.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        found: Role | None = None
        for role in ("read", "admin"):
            if hmac.compare_digest(digest, self.by_role.get(role, b"")):
                found = role
        return found if scheme.lower() == b"bearer" and token else None


def credential_folders(env: Mapping[str, str] = os.environ) -> list[Path]:
    """The folder in which systemd gives a service its credentials, if it does."""
    return [Path(folder)] if (folder := env.get("CREDENTIALS_DIRECTORY", "")) else []


def load_tokens(read_file: Path | None, admin_file: Path | None, folders: Sequence[Path]) -> Tokens:
    """The tokens from the settings' files, else from the first of these folders. The read token may be missing.

    Raises:
        SettingsError: admin token missing, unreadable or too weak; names the place and the cure.
        StartError: a file can't be read now.
    """
    given: dict[Role, Path | None] = {"read": read_file, "admin": admin_file}
    found: dict[Role, bytes] = {}
    for role, path in given.items():
        secret = _read(role, path, folders)
        if secret:
            found[role] = hashlib.sha256(secret.encode()).digest()
    if "admin" not in found:
        raise SettingsError(
            "http.admin_listen needs an admin token: put one into /etc/credstore/honed-admin-token (`openssl rand -hex 32`), "
            "or name its file with http.admin_token_file"
        )
    if found.get("read") == found["admin"]:
        raise SettingsError("the read token and the admin token are the same: every reader could change everything")
    return Tokens(found)


def _read(role: Role, path: Path | None, folders: Sequence[Path]) -> str:
    """A secret; "" if none is set."""
    for place in [path] if path is not None else [folder / CREDENTIALS[role] for folder in folders]:
        try:
            secret = place.read_text().strip()
        except FileNotFoundError as error:
            if path is None:
                continue
            raise refused(f"the {role} token's file {place} doesn't exist", error) from error
        except OSError as error:
            raise refused(f"the {role} token's file {place} can't be read: {error}", error) from error
        except UnicodeDecodeError as error:
            raise SettingsError(f"the {role} token's file {place} can't be read: {error}") from error
        if len(secret) < MIN_LENGTH or not _TOKEN.fullmatch(secret):
            make = f"make one with `openssl rand -hex 32 > {place}`"
            what = f"one line of {MIN_LENGTH} or more printable characters"
            raise SettingsError(f"the {role} token in {place} must be {what}; {make}")
        return secret
    return ""
