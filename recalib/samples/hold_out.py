"""The choice of sessions that are never trained on, made once and permanently.

A session is held out when a keyed hash of its label falls into the lowest `share` of its range. The key is made once and kept
beside the registry, so a session stays on its side across restarts, and nobody can choose labels that evade the gate. Whole
sessions are held out: rows of one conversation resemble each other, so single records would flatter every candidate.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from honed.recalib.registry.durable import make_folder

if TYPE_CHECKING:
    from honed.recalib.samples.stretch import Stretch

SALT_BYTES = 16


@dataclass(frozen=True)
class HoldOut:
    """The rule: a key and a share."""

    salt: bytes
    share: float = 0.2

    def is_held_out(self, session: str) -> bool:
        """Return whether this session is for judging only."""
        digest = hashlib.blake2b(session.encode(errors="replace"), key=self.salt, digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64

    def digest(self, stretches: Iterable[Stretch]) -> str:
        """Digest that shows whether two trainings saw the same rows, in any order; without the key nobody can test guesses."""
        each = sorted(
            hashlib.blake2b(
                stretch.token_ids.tobytes(), key=self.salt, digest_size=16, salt=stretch.first_position.to_bytes(8, "big")
            ).digest()
            for stretch in stretches
        )
        return hashlib.blake2b(b"".join(each), key=self.salt, digest_size=16).hexdigest()


def load_salt(folder: Path) -> bytes:
    """Return the key in this folder; make one if there is none. If several processes make one, one of them wins."""
    path = folder / "hold-out.key"
    make_folder(folder)
    try:
        salt = path.read_bytes()
        if len(salt) == SALT_BYTES:
            return salt
        path.unlink()  # truncated by a disk crash: the only remedy is a new key
    except FileNotFoundError:
        pass
    temporary = path.with_name(f".hold-out.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(secrets.token_bytes(SALT_BYTES))
        file.flush()
        os.fsync(fd)
    try:
        os.link(temporary, path)  # unlike a rename, never replaces the key of a faster process
    except FileExistsError:
        pass
    finally:
        temporary.unlink()
    return path.read_bytes()
