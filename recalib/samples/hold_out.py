"""Which sessions are never trained on, decided once and for ever.

A session is held out when a keyed hash of its label falls into the lowest `share` of its range. The key is made once and
kept beside the registry, so a session stays on its side across restarts, and nobody can choose labels that evade the gate.
Whole sessions, since rows of one conversation resemble each other: holding out single records flatters every candidate.
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
        """Whether this session is for judging only."""
        digest = hashlib.blake2b(session.encode(errors="replace"), key=self.salt, digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.share * 2**64

    def digest(self, stretches: Iterable[Stretch]) -> str:
        """Tells whether two trainings saw the same rows, whatever their order; without the key no guess can be tried out."""
        each = sorted(
            hashlib.blake2b(
                stretch.token_ids.tobytes(), key=self.salt, digest_size=16, salt=stretch.first_position.to_bytes(8, "big")
            ).digest()
            for stretch in stretches
        )
        return hashlib.blake2b(b"".join(each), key=self.salt, digest_size=16).hexdigest()


def load_salt(folder: Path) -> bytes:
    """The key in this folder, made when there is none yet; of several processes that make one, one wins."""
    path = folder / "hold-out.key"
    make_folder(folder)
    try:
        salt = path.read_bytes()
        if len(salt) == SALT_BYTES:
            return salt
        path.unlink()  # cut off by a crash of the disk: nothing better can be done than to begin anew
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
