"""A folder's filesystem: samples must stay in memory, and only a tmpfs keeps them there."""

from __future__ import annotations

from pathlib import Path

IN_MEMORY = frozenset({"tmpfs", "ramfs"})
MOUNTS = Path("/proc/self/mountinfo")


def filesystem_of(path: Path, mounts: Path = MOUNTS) -> str:
    """The filesystem's type, such as "ext4" or "tmpfs"; "" if unknown.

    Source: proc(5), /proc/pid/mountinfo: field 5 is the mount point, the first field after " - " the type.
    """
    try:
        lines = mounts.read_text(errors="surrogateescape").split("\n")  # names may hold other line ends, and any bytes
        resolved = path.resolve()
    except OSError:
        return ""
    found, most = "", -1
    for line in lines:
        place, _, source = line.partition(" - ")
        fields = place.split(" ")
        if len(fields) < 5 or not source:
            continue
        point = Path(_unescaped(fields[4]))
        # A later mount on the same point hides the earlier one.
        if resolved.is_relative_to(point) and len(point.parts) >= most:
            found, most = source.split(" ")[0], len(point.parts)
    return found


def folder_in_memory(mounts: Path = MOUNTS) -> str:
    """Places for a folder in memory, in words."""
    found = [place for place in ("/run", "/dev/shm") if filesystem_of(Path(place), mounts) in IN_MEMORY]
    return f"a folder below {' or '.join(found)}" if found else "a folder on a tmpfs (none is mounted on /run or /dev/shm)"


def _unescaped(text: str) -> str:
    for code, sign in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        text = text.replace(f"\\{code}", sign)
    return text
