"""The filesystem that a folder is on: by the longest mount point, the last mounted where several are the same."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from honed.daemon.settings.filesystem import filesystem_of, folder_in_memory

MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
24 27 0:6 / /dev rw shared:1 - devtmpfs devtmpfs rw
25 24 0:23 / /dev/shm rw master:2 propagate_from:1 - tmpfs tmpfs rw
26 27 0:24 / /srv rw - xfs /dev/vdb rw
28 27 0:25 / /srv rw - tmpfs tmpfs rw
29 27 0:26 / /srv/with\\040space rw - nfs4 host:/x rw
a line of another kind
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/lib/honed", "ext4"),
        ("/dev/shm/honed", "tmpfs"),
        ("/dev/shmall", "devtmpfs"),
        ("/srv/honed", "tmpfs"),
        ("/srv/with space/honed", "nfs4"),
    ],
)
def test_the_longest_mount_point_counts(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO)
    assert filesystem_of(Path(path), mounts) == kind


@pytest.mark.fault("lines split where none ends")
@pytest.mark.parametrize("name", [b"/srv/a\x0cb", b"/srv/a\xe2\x80\xa8b", b"/srv/a\xffb"])
def test_a_mount_point_may_have_any_name(tmp_path: Path, name: bytes) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_bytes(MOUNTINFO.encode() + b"30 27 0:27 / %b rw - zfs pool rw\n" % name)
    assert filesystem_of(Path(os.fsdecode(name)), mounts) == "zfs"


def test_a_folder_in_memory_is_one_that_is_there(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTINFO)
    assert folder_in_memory(mounts) == "a folder below /dev/shm"
    mounts.write_text(f"{MOUNTINFO}30 27 0:27 / /run rw - tmpfs tmpfs rw\n")
    assert folder_in_memory(mounts) == "a folder below /run or /dev/shm"
    mounts.write_text("27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n")
    assert folder_in_memory(mounts).startswith("a folder on a tmpfs (none")


def test_a_link_is_followed_and_what_cannot_be_known_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/shm")
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    assert filesystem_of(tmp_path / "link" / "honed", tmp_path / "mountinfo") == "tmpfs"
    assert filesystem_of(tmp_path, tmp_path / "missing") == ""


def test_this_machine_knows_what_proc_is() -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
