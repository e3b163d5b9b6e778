"""Who made a folder inside one that all users share, as /tmp: perhaps somebody who wants what honed puts there."""

from __future__ import annotations

_STICKY, _WRITABLE_BY_ALL = 0o1000, 0o0002


def why_untrusted(folder: object, mode: int, owner: int, parent_mode: int, user: int) -> str:
    """Reason why a user mustn't use a folder of this mode and owner; "" if they may.

    In a shared folder, it must be the user's own or root's, and not all users may write to it.
    """
    if parent_mode & _STICKY and (owner not in (user, 0) or mode & _WRITABLE_BY_ALL):
        return f"folder {folder} was made by another user ({owner}), or every user may write to it"
    return ""
