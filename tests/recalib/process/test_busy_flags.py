"""The busy flags as the trainer sees them."""

import os
import subprocess
import sys
import time

import pytest

from honed.adapt.protocol.step_page import NUM_BYTES, NUM_ROWS, StepRow, offset_of
from honed.attach.engine.busy_flag import BusyFlag
from honed.recalib.process.busy_flags import BusyFlagReader, BusyFlags, Idleness, Preemptions
from tests.full_tmpfs import run_on_tmpfs


def test_follows_the_engine_through_its_life(tmp_path):
    path = tmp_path / "busy"
    flag = BusyFlagReader(path)
    assert not flag.is_busy()  # no engine
    engine = BusyFlag(path)
    assert not flag.is_busy()
    engine.set(True)
    assert flag.is_busy()
    engine.set(False)
    assert not flag.is_busy()
    engine.set(True)
    os.unlink(path)
    assert not flag.is_busy()
    other = BusyFlag(path)  # another file under the same name
    other.set(True)
    assert flag.is_busy()


def test_a_killed_engine_does_not_keep_the_flag_up(tmp_path):
    path = tmp_path / "busy"
    script = (
        "from pathlib import Path; from honed.attach.engine.busy_flag import BusyFlag\n"
        f"flag = BusyFlag(Path({str(path)!r})); flag.set(True); print(1, flush=True); input()"
    )
    engine = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout.readline() == b"1\n"
    flag = BusyFlagReader(path)
    assert flag.is_busy()
    engine.kill()
    engine.wait()
    assert not flag.is_busy()


@pytest.mark.fault("a link in place of a ring")
def test_a_link_in_its_place_is_not_followed(tmp_path):
    """Whoever may write to the folder could have the trainer lock another file, or wait for another engine."""
    engine = BusyFlag(tmp_path / "elsewhere")
    engine.set(True)
    (tmp_path / "busy").symlink_to(tmp_path / "elsewhere")
    assert BusyFlagReader(tmp_path / "elsewhere").is_busy()
    assert not BusyFlagReader(tmp_path / "busy").is_busy()
    engine.close()


def test_when_work_came_is_known_to_the_trainer(tmp_path):
    engine, flag = BusyFlag(tmp_path / "busy"), BusyFlagReader(tmp_path / "busy")
    assert flag.raised_s == 0.0
    before_s = time.monotonic()
    engine.set(True)
    assert flag.is_busy()
    first_s = flag.raised_s
    assert before_s <= first_s <= time.monotonic()
    engine.set(True)  # it was up: the work came earlier
    assert flag.is_busy()
    assert flag.raised_s == first_s


def test_empty_file_means_idle(tmp_path):
    (tmp_path / "busy").touch()
    assert not BusyFlagReader(tmp_path / "busy").is_busy()


def test_one_engine_of_several_on_the_device_is_enough(tmp_path):
    flags = BusyFlags(tmp_path, ["*"])
    flags.discover()
    assert not flags.is_busy()  # no engine
    first, second = BusyFlag(tmp_path / "chat-0" / "busy"), BusyFlag(tmp_path / "chat-1" / "busy")
    second.set(True)
    assert not flags.is_busy(), "it wasn't looked for yet"
    flags.discover()
    assert flags.is_busy()
    since_s = flags.raised_s
    first.set(True)
    assert flags.is_busy()
    assert flags.raised_s == since_s, "since when there has been some work"
    second.set(False)
    assert flags.is_busy()
    assert flags.raised_s > since_s
    first.set(False)
    assert not flags.is_busy()


def test_engines_that_are_gone_are_let_go_of(tmp_path):
    engine, flags = BusyFlag(tmp_path / "chat-0" / "busy"), BusyFlags(tmp_path, ["*"])
    engine.set(True)
    flags.discover()
    flag = flags._flags["chat-0"]
    flags.discover()
    assert flags._flags["chat-0"] is flag
    (tmp_path / "chat-0" / "busy").unlink()
    flags.discover()
    assert not flags.is_busy()
    assert flags._flags == {}


@pytest.mark.parametrize(
    ("patterns", "shared"),
    [
        (["*"], {"chat-0", "chat-1", "code-0"}),
        (["chat-*"], {"chat-0", "chat-1"}),
        (["chat-1", "code-0"], {"chat-1", "code-0"}),
        (["chat"], set()),
        ([], set()),
    ],
)
def test_only_engines_on_its_device_are_looked_at(tmp_path, patterns, shared):
    flags = BusyFlags(tmp_path, patterns)
    for name in ("chat-0", "chat-1", "code-0"):
        engine = BusyFlag(tmp_path / name / "busy")
        engine.set(True)
        flags.discover()
        assert flags.is_busy() == (name in shared)
        engine.set(False)


def test_all_engines_of_other_runtime_directories_count(tmp_path, capsys):
    """Another daemon's engine may have the same name as one of ours."""
    ours, other = tmp_path / "ours" / "engines", tmp_path / "other" / "engines"
    flags = BusyFlags(ours, ["chat-*"], [other])
    flags.discover()
    assert f"{other}: No such file or directory" in capsys.readouterr().out
    theirs, unshared = BusyFlag(other / "engine-0" / "busy"), BusyFlag(ours / "engine-0" / "busy")
    theirs.set(True)
    flags.discover()
    flags.discover()
    assert capsys.readouterr().out.count("can be seen") == 1
    assert flags.is_busy()
    assert set(flags.busy_engines) == flags.living() == {f"engine-0 of {other.parent}"}
    theirs.note_step(1, 1, 1, 1, 0, 0)
    assert [name for name, _ in flags.new_steps()] == [f"engine-0 of {other.parent}"]
    (other / "link").mkdir()
    (other / "link" / "busy").symlink_to(other / "engine-0" / "busy")
    flags.discover()
    assert f"{other / 'link' / 'busy'}: Too many levels of symbolic links" in capsys.readouterr().out
    theirs.close()
    unshared.close()


def test_idleness_is_a_share_of_time():
    idleness = Idleness(memory_s=10.0)
    idleness.observe(True, 0.0)
    assert idleness.ratio == 0.0
    for i in range(1, 2001):
        idleness.observe(i % 4 == 0, i * 0.1)
    assert idleness.ratio == pytest.approx(0.75, abs=0.02)
    idleness.observe(False, 1e6)
    assert idleness.ratio == 1.0


def test_each_preemption_is_told_once():
    preemptions = Preemptions(most_untold=3)
    assert preemptions.take() == ([], [])
    for delay_s in (0.001, 0.002):
        preemptions.observe(delay_s, 0.0015)
    assert preemptions.take() == ([0.001, 0.002], [0.001, 0.0015]), "nobody computes longer than it takes"
    assert preemptions.take() == ([], [])
    for delay_s in (0.003, 0.004, 0.005, 0.006):
        preemptions.observe(delay_s, 0.0)
    assert preemptions.take() == ([0.004, 0.005, 0.006], [0.0] * 3), "the oldest goes while nobody asks"
    assert preemptions.count == 6


@pytest.mark.fault("files that are cut off while they are in use")
@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_a_file_that_shrank_kills_neither_side(tmp_path, side):
    """A map of a file without its pages raises SIGBUS, which ends vLLM without a word."""
    path = tmp_path / "busy"
    script = f"""
import os
from pathlib import Path
from honed.attach.engine.busy_flag import BusyFlag
from honed.recalib.process.busy_flags import BusyFlagReader
path = Path({str(path)!r})
engine, flag = BusyFlag(path), BusyFlagReader(path)
engine.set(True)
assert flag.is_busy()
os.truncate(path, 0)
if {side!r} == "engine":
    engine.set(False)
    engine.set(True)
assert flag.is_busy() == ({side!r} == "engine")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_group_can_read_it_whatever_the_umask_is(tmp_path):
    before = os.umask(0o077)
    try:
        BusyFlag(tmp_path / "e" / "busy")
    finally:
        os.umask(before)
    assert (tmp_path / "e").stat().st_mode & 0o777 == 0o750
    assert (tmp_path / "e" / "busy").stat().st_mode & 0o777 == 0o640


def test_an_engine_that_starts_before_the_daemon_makes_no_folder_that_others_may_enter(tmp_path):
    tmp_path.chmod(0o2777)  # as a container's volume
    before = os.umask(0o022)
    try:
        BusyFlag(tmp_path / "private" / "engines" / "chat-0" / "busy").close()
    finally:
        os.umask(before)
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o750


@pytest.mark.fault("a full tmpfs under the busy flag")
def test_where_there_is_no_room_for_the_flag_it_is_made_later(tmp_path):
    """The file's block is taken when it is made: on a full tmpfs it is refused there, not at the first request."""
    script = f"""
import errno, os
from pathlib import Path
from honed.attach.engine import busy_flag
from honed.recalib.process.busy_flags import BusyFlagReader
busy_flag.RETRY_S = 0.0
folder = Path({str(tmp_path)!r})
with open(folder / "filler", "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError as error:
        assert error.errno == errno.ENOSPC
engine = busy_flag.BusyFlag(folder / "e" / "busy")
assert os.strerror(errno.ENOSPC) in engine.problem
engine.set(True)
engine.note_step(1, 1, 1, 1, 0, 0)
reader = BusyFlagReader(folder / "e" / "busy")
assert not reader.is_busy()
os.truncate(folder / "filler", 0)
engine.make()
assert not engine.problem
assert reader.is_busy()
engine.close()
engine.make()
assert not reader.is_busy()
"""
    run_on_tmpfs(tmp_path, "64k", script)


def test_a_link_that_somebody_laid_is_not_followed(tmp_path):
    victim, path = tmp_path / "victim", tmp_path / "busy"
    victim.write_text("mine")
    path.symlink_to(victim)
    engine, flag = BusyFlag(path), BusyFlagReader(path)
    engine.set(True)
    assert flag.is_busy()
    assert victim.read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["busy", "victim"]
    engine.close()


def test_steps_are_told_once_and_in_order(tmp_path):
    engine, flag = BusyFlag(tmp_path / "busy"), BusyFlagReader(tmp_path / "busy")
    assert flag.new_steps() == []
    flag.is_busy()
    assert flag.new_steps() == []
    for number in range(1, 4):
        engine.note_step(1000 * number, number, 8 * number, number, 0, 3 * number)
    assert flag.new_steps() == [StepRow(n, 1000 * n, n, 8 * n, n, 0, 3 * n) for n in (1, 2, 3)]
    assert flag.new_steps() == []
    engine.set(True)
    assert flag.is_busy(), "the flag isn't among the rows"
    for number in range(4, 1000):
        engine.note_step(1000 * number, number, 1, 1, 0, 0)
    assert [row.number for row in flag.new_steps()] == list(range(1000 - NUM_ROWS, 1000)), "the page has only so many"
    engine.note_step(1 << 60, 1 << 40, 1 << 40, 1 << 20, 1 << 20, 1 << 40)
    assert flag.new_steps() == [StepRow(1000, 1 << 60, (1 << 32) - 1, (1 << 32) - 1, 65535, 65535, (1 << 32) - 1)]
    engine.close()


def test_a_row_that_is_being_written_is_left_for_later(tmp_path):
    path = tmp_path / "busy"
    engine, flag = BusyFlag(path), BusyFlagReader(path)
    flag.is_busy()
    engine.note_step(1, 1, 1, 1, 0, 0)
    engine.note_step(2, 1, 1, 1, 0, 0)
    page = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(offset_of(2) + 8)
        file.write(b"\xff")
    assert [row.number for row in flag.new_steps()] == [1]
    path.write_bytes(page)
    assert [row.number for row in flag.new_steps()] == [2]
    engine.close()


@pytest.mark.parametrize("size", [0, 1, 16, 64, 100, NUM_BYTES - 1])
def test_a_page_that_was_cut_has_no_steps_and_harms_nobody(tmp_path, size):
    path = tmp_path / "busy"
    engine, flag = BusyFlag(path), BusyFlagReader(path)
    flag.is_busy()
    engine.note_step(1, 1, 1, 1, 0, 0)
    os.truncate(path, size)
    assert [row.number for row in flag.new_steps()] == ([1] if size >= offset_of(2) else [])
    engine.close()


def test_steps_of_all_engines_come_in_the_order_of_their_ends(tmp_path):
    engines = [BusyFlag(tmp_path / name / "busy") for name in ("chat-0", "chat-1")]
    flags = BusyFlags(tmp_path, ["*"])
    flags.discover()
    flags.is_busy()
    for end_ns, which in ((1, 0), (2, 1), (3, 0)):
        engines[which].note_step(end_ns, 1, 1, 1, 0, 0)
    assert [(name, row.end_ns) for name, row in flags.new_steps()] == [("chat-0", 1), ("chat-1", 2), ("chat-0", 3)]
    for engine in engines:
        engine.close()
