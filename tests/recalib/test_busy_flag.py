"""The busy flag as the trainer sees it."""

import os
import subprocess
import sys
import time

import pytest

from honed.attach.busy_flag import BusyFlag as Writer
from honed.recalib.busy_flag import BusyFlag, Idleness, Preemptions


def test_follows_the_engine_through_its_life(tmp_path):
    path = tmp_path / "busy"
    flag = BusyFlag(path)
    assert not flag.is_busy()  # no engine
    engine = Writer(path)
    assert not flag.is_busy()
    engine.set(True)
    assert flag.is_busy()
    engine.set(False)
    assert not flag.is_busy()
    engine.set(True)
    os.unlink(path)
    assert not flag.is_busy()
    other = Writer(path)  # another file under the same name
    other.set(True)
    assert flag.is_busy()


def test_a_killed_engine_does_not_keep_the_flag_up(tmp_path):
    path = tmp_path / "busy"
    script = (
        "from pathlib import Path; from honed.attach.busy_flag import BusyFlag\n"
        f"flag = BusyFlag(Path({str(path)!r})); flag.set(True); print(1, flush=True); input()"
    )
    engine = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert engine.stdout.readline() == b"1\n"
    flag = BusyFlag(path)
    assert flag.is_busy()
    engine.kill()
    engine.wait()
    assert not flag.is_busy()


def test_when_work_came_is_known_to_the_trainer(tmp_path):
    engine, flag = Writer(tmp_path / "busy"), BusyFlag(tmp_path / "busy")
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
    assert not BusyFlag(tmp_path / "busy").is_busy()


def test_idleness_is_a_share_of_time():
    idleness = Idleness(memory_s=10.0)
    idleness.observe(True, 0.0)
    assert idleness.ratio == 0.0
    for i in range(1, 2001):
        idleness.observe(i % 4 == 0, i * 0.1)
    assert idleness.ratio == pytest.approx(0.75, abs=0.02)
    idleness.observe(False, 1e6)
    assert idleness.ratio == 1.0


def test_preemptions_report_the_ninety_ninth_percentile():
    preemptions = Preemptions()
    assert preemptions.quantile_s(0.99) == 0.0
    for i in range(200):
        preemptions.observe(i / 1000)
    assert preemptions.count == 200
    assert preemptions.quantile_s(0.99) == 0.197
