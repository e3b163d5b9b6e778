"""Runs the tests of every fault that was found by attack and is mended: each fails without the mend. `make test-faults`.

They are ordinary tests with the mark `fault`. The last line is JSON. A fault counts as failed when one of its tests has failed
or was skipped without a good reason, or when it has none.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter, defaultdict

import pytest

from tests.tools import ROOT

FAULTS = (
    # vLLM itself
    "a full tmpfs under the busy flag",
    "a full tmpfs under the sample ring",
    "files that are cut off while they are in use",
    "an exception in the publisher's thread",
    "pinned memory allocated within a step",
    "tokens past a request's end that counted as gain",
    "drafts struck by a grammar that counted as never tried",
    "an override that outlives its daemon",
    "requests that left counted as prefill",
    "drafts past what a request can take",
    "a drafter's last draft that was never verified",
    "drafts forgotten while a request sat out a step",
    "a draft tree for drafts that vLLM has forgotten",
    "a tree that failed, logged as a chain whose drafts were wrong",
    "a tree's nodes counted as the drafter's positions",
    "a worse drafter promoted where trees are verified",
    "values of nodes that follow no change",
    "values of nodes that stay while chains show a change",
    "trees that take a step's tokens from prompts and other requests",
    "the largest trees for all where nobody decides",
    "a drafter smaller than what vLLM reads of it",
    "attention of trees by layers that attend otherwise",
    "a mistyped switch that keeps vLLM from starting",
    "a step with fewer drafts than were accepted, in a hybrid on a CPU",
    "a drafter that must be asked for all of its tokens",
    "a step with a new request that waits for the device",
    "ranks that wait for the part of one that has failed",
    "a place for versions that hangs, and says nothing",
    "a fetched version dropped, since an engine was away for a moment",
    "a session's later input that moved the rounds of the answer before it",
    "zeros in the place of drafts that counted as refused",
    "pinned memory that grows with the drafter",
    "a hung worker that hung the engine for good",
    "a disk that hangs while an engine says hello",
    "a host without honed among an engine's workers",
    "another kernel for each number of nodes",
    # training and weights
    "captured rows that aren't finite",
    "captured tokens outside the vocabulary",
    "a switch-off in other letters that left capture on",
    "a session's later input captured as the target's words",
    "what vLLM computed behind the answer's end captured as the target's words",
    "no request ends while steps are captured",
    "a mistyped opt-out that is captured",
    "prompts of an earlier start in a ring that nothing is written to any more",
    "a renewed lease that goes home with the other version's cache",
    "a training that diverges without saying so",
    "a saved training that fills the disk",
    "a trainer that is taken for lost while it saves",
    "written files that count as used memory",
    "training at a low share that seemed too dear for ever",
    "a drafter under other tensor names",
    "a candidate that gains on one workload and loses on another",
    "a gate that equal candidates pass by luck",
    "a trial that a busy server ended before it could prove anything",
    "a gate that equal candidates fail by luck",
    "rotary tables an ulp from vLLM's",
    "a fine-tuned target in a folder of its own",
    "a target in a folder that was moved",
    "a restart of vLLM while a training holds the GPU's memory",
    "a training in memory that vLLM has planned for",
    "a training on the GPU of an engine that is down",
    "a full disk under the registry",
    "active weights damaged at rest",
    "an alias of a version that was removed",
    "a damaged alias that is set anew without a word",
    "aliases that are synced while everyone waits",
    # draft lengths
    "a jump of the step time between lengths that were tried",
    "a rare kind of steps whose effect was lost",
    # the daemon, and files that others can write
    "connections until descriptors run out",
    "connections without end from other hosts",
    "answers that nobody reads",
    "a malformed body answered twice",
    "scrapes without end",
    "messages that never end",
    "headers and manifests without end",
    "engine names and reasons without end",
    "a daemon that may take all of the machine's memory",
    "a log that can't be written",
    "a first start on a full disk",
    "wrong settings that restart for ever",
    "two trainers on one state folder",
    "a mistyped device that training is said to run on",
    "a stop that waits for a disk that hangs",
    "a mount that hangs under one engine's drafter",
    "an engine that doesn't answer its swap",
    "a pipe in place of a checkpoint",
    "a checkpoint read again at every hello",
    "a drafter that couldn't be read once is never looked at again",
    "an engine that names a version of a registry that is gone",
    "engines that are gone for good and never forgotten",
    "guesses that hold up the right password",
    "engines that wait behind replays of the log",
    "a reader that holds up engines",
    "a thousand hellos at once",
    "an engine that floods the daemon",
    "a batch that takes long to learn",
    "values out of range in a frame",
    "a path with a NUL",
    "a batch under another engine's ids",
    "a wall clock that is wrong",
    "rounds dated later than now",
    "a database deleted while it is in use",
    "an update of the target while no daemon runs",
    "a purge after an update of the target that failed once",
    "a damaged database blamed on permissions",
    "stored records that can't be read",
    "a ring that no writer made",
    "a link in place of a ring",
    "a sparse ring that claims gigabytes",
    "a checkpoint that its engine's user can't read",
    "ever new checkpoints that fill the disk",
    "sums of rounds that fill the disk",
    "odd figures in a peer's manifest",
    "a damaged upload that nobody repairs",
    "a damaged version before a sound one",
    "a version from a host whose clock is ahead",
    "escape sequences in text of others",
    "a terminal that isn't UTF-8",
    "a verdict that depends on what reads it",
    "labels that run out",
    "counters that engines take turns to reset",
    "gauges of an engine that is gone",
    "overrides that aren't finite numbers",
    "an IPv6 address without a port as host",
    "a URL that can't be read",
    "values of another kind taken as settings",
    "a misspelt place to share that becomes a local folder",
    "a library's own words about a wrong value",
    "lines split where none ends",
    "two running requests of one slot erased each other",
    "a full disk that is called a start",
    "an export that replaces what isn't its file",
    "units removed from under a daemon that runs on",
    "a prefix that breaks the units",
    "a user without a home folder",
    "a folder or a file of another user's",
    "a mask token outside the vocabulary",
    "a drafter with a shorter context than its target",
)
GOOD_REASONS = ("needs root", "no user namespace")
"""Parts of what a test says that can't run on this machine."""
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else both engines run on the first core
    # Its scheduler runs ahead, where more went wrong.
    "HONED_TEST_RUNNER": "v1-async",
}
OPTIONS = ("-q", "--no-header", "-m", "fault", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")


def files() -> list[str]:
    """Files with such tests, those that start engines first."""
    found = [path for path in (ROOT / "tests").rglob("test_*.py") if "mark.fault(" in path.read_text()]
    return [str(path) for path in sorted(found, key=lambda path: (path.parent.name != "e2e", path))]


class Outcomes:
    """Counts what became of each fault's tests, as pytest reports it."""

    def __init__(self) -> None:
        self.by_fault: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            outcome = report.outcome
            if report.skipped and not any(reason in str(report.longrepr) for reason in GOOD_REASONS):
                outcome = "failed"
            # A process that died has no marks to tell: its test stands for itself.
            for fault in [value for name, value in report.user_properties if name == "fault"] or [report.nodeid]:
                self.by_fault[str(fault)][outcome] += 1

    def of(self, fault: str) -> str:
        """Return "passed", "skipped" for a good reason, or "failed": also for a fault without tests or outside the list."""
        found = self.by_fault[fault]
        if found["failed"] or not found or fault not in FAULTS:
            return "failed"
        return "passed" if found["passed"] else "skipped"


def main() -> int:
    """Run the tests and print what became of each fault; 1 if one is back."""
    began_s, outcomes = time.monotonic(), Outcomes()
    os.environ |= {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()}
    code = pytest.main([*OPTIONS, *sys.argv[1:], *files()], plugins=[outcomes])
    faults = list(dict.fromkeys([*FAULTS, *outcomes.by_fault]))
    total: Counter[str] = Counter()
    for fault in faults:
        outcome, found = outcomes.of(fault), outcomes.by_fault[fault]
        total[outcome] += 1
        print(f"{outcome:7} {fault} (tests: {found.total()})")
    figures = {
        "rows": len(FAULTS),
        "failed": total["failed"],
        "skipped": total["skipped"],
        "tests": sum(found.total() for found in outcomes.by_fault.values()),
        "seconds": round(time.monotonic() - began_s),
    }
    print(json.dumps(figures))
    return 1 if code or total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
