"""Jobs in the background: in order where they touch the same thing, and never in the way of an end."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from functools import partial

import pytest

from honed.daemon.background import Background
from tests.daemon.conftest import wait_for


def test_jobs_that_touch_the_same_thing_run_in_order() -> None:
    jobs, done = Background("test", most=4), list[int]()
    for number in range(50):
        jobs.submit(partial(done.append, number), "a")
    wait_for(lambda: len(done) == 50, "the jobs")
    assert done == list(range(50))
    wait_for(lambda: jobs.oldest() is None, "their end")


def test_others_run_meanwhile_on_so_many_threads() -> None:
    jobs, go_on, done = Background("test", most=2, monotonic=itertools.count().__next__), threading.Event(), list[str]()
    jobs.submit(partial(go_on.wait, 60), "hung")
    jobs.submit(partial(done.append, "behind it"), "hung")
    jobs.submit(partial(done.append, "b"), "b")
    wait_for(lambda: done == ["b"], "the other job")
    assert jobs.oldest() == (0, "hung")
    jobs.submit(partial(go_on.wait, 60), "also hung")
    wait_for(lambda: len(jobs._running) == 2, "the second thread")
    jobs.submit(partial(done.append, "c"), "c")
    assert done == ["b"]
    go_on.set()
    wait_for(lambda: set(done) == {"b", "behind it", "c"}, "the rest")


def test_after_a_stop_nothing_begins() -> None:
    jobs, go_on, done = Background("test"), threading.Event(), list[str]()
    jobs.submit(partial(go_on.wait, 60), "a")
    wait_for(lambda: jobs._running, "the job's begin")
    jobs.submit(partial(done.append, "waits"), "a")
    jobs.stop(0.01)
    jobs.submit(partial(done.append, "late"), "b")
    go_on.set()
    jobs.stop(60)
    assert jobs.oldest() is None
    assert done == []


@pytest.mark.fault("a stop that waits for a disk that hangs")
def test_a_process_ends_though_a_job_hangs() -> None:
    code = (
        "import threading; from honed.daemon.background import Background; jobs = Background('test'); "
        "jobs.submit(threading.Event().wait, 'a mount'); jobs.stop(0.01)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
