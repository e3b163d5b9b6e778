"""Two hosts that share versions on S3-compatible storage: when it is well, gone, mute, full, cut off or hostile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.views.findings import findings
from honed.daemon.views.views import status
from tests.daemon.conftest import wait_for
from tests.daemon.lifecycle.hosts import Host, hosts
from tests.daemon.share.conftest import Line

MOST_STOP_S = 20.0
"""Longest end of a daemon, whatever the place does. systemd gives it 60 s."""


@pytest.fixture
def make_host(folder: Path, url: str) -> Iterator[Callable[..., Host]]:
    with hosts(folder, url) as make:
        yield make


def files() -> Any:
    import s3fs

    return s3fs.S3FileSystem()


def warnings(host: Host) -> list[str]:
    return [found.text for found in findings(status(host.service)) if "shared" in found.text]


def adopts(host: Host, name: str) -> None:
    host.engine.acceptance = {host.service.drafters.active: 0.4, name: 0.7}
    host.engine.serve(lambda: host.service.drafters.active == name, f"the promotion of {name}")


def test_what_proved_itself_on_one_host_is_tried_out_and_promoted_on_the_other(make_host: Callable[..., Host]) -> None:
    one, other = make_host("one"), make_host("other")
    made = one.make(1.0)
    one.promote(made.version)
    wait_for(lambda: one.shared()["pushed"] == 1, "the push")
    adopts(other, f"v0002-{made.sha256[:8]}")
    assert other.service.drafters.manifest(other.service.drafters.active).origin.endswith(f":{made.version}")
    assert (one.shared()["errors"], other.shared()["errors"]) == (0, 0)


@pytest.mark.parametrize("trouble", ["gone", "mute", "full"])
def test_a_place_in_trouble_is_said_and_holds_nothing_up(make_host: Callable[..., Host], line: Line, trouble: str) -> None:
    one, other = make_host("one"), make_host("other")
    wait_for(lambda: one.shared()["last_success_unix_s"] and other.shared()["last_success_unix_s"], "the first look")
    line.set(trouble)
    made = one.make(1.0)
    began_s = time.monotonic()
    one.promote(made.version)
    assert time.monotonic() - began_s < 5.0, "a promotion waits for nobody's storage"
    wait_for(lambda: warnings(one), "the warning", 120.0)
    assert "test" not in warnings(one)[0].replace("test_", ""), "no credentials"
    line.set("up")
    wait_for(lambda: one.shared()["pushed"] == 1, "the push once it is back", 120.0)
    wait_for(lambda: not warnings(one), "the end of the warning")
    adopts(other, f"v0002-{made.sha256[:8]}")


def test_a_daemon_ends_in_time_though_the_place_is_mute(make_host: Callable[..., Host], line: Line) -> None:
    one = make_host("one", poll_s=0.1)
    wait_for(lambda: one.shared()["last_success_unix_s"], "the first look")
    line.set("mute")
    wait_for(lambda: line.num_unanswered, "a request that nobody answers")
    began_s = time.monotonic()
    one.service.stop()
    assert time.monotonic() - began_s < MOST_STOP_S


def test_a_transfer_that_is_cut_off_leaves_nothing_and_is_made_good(make_host: Callable[..., Host], line: Line) -> None:
    one = make_host("one")
    made = one.make(1.0)
    one.promote(made.version)
    wait_for(lambda: one.shared()["pushed"] == 1, "the push")
    line.set("cut")
    other = make_host("other")
    wait_for(lambda: other.shared()["errors"] > 0, "the error", 120.0)
    assert len(other.service.drafters.registry.versions()) == 1
    line.set("up")
    adopts(other, f"v0002-{made.sha256[:8]}")


def test_what_was_changed_there_is_refused(make_host: Callable[..., Host], url: str) -> None:
    one = make_host("one")
    made = one.make(1.0)
    one.promote(made.version)
    wait_for(lambda: one.shared()["pushed"] == 1, "the push")
    weights = f"{url.removeprefix('s3://')}/versions/{made.sha256}/model.safetensors"
    store = files()
    before = store.cat_file(weights)
    store.pipe_file(weights, before[:-1] + bytes([before[-1] ^ 1]))
    other = make_host("other")
    wait_for(lambda: warnings(other), "the warning", 120.0)
    assert "its manifest says" in warnings(other)[0]
    assert len(other.service.drafters.registry.versions()) == 1
    store.pipe_file(weights, before)
    adopts(other, f"v0002-{made.sha256[:8]}")


def test_evidence_is_pooled_there_as_well(make_host: Callable[..., Host]) -> None:
    one, other = make_host("one", pool_evidence=True), make_host("other", pool_evidence=True)
    made = one.make(1.0)
    one.prove(made.version)
    trial = other.engine.serve(lambda: other.service.rollout.trial, "the trial on the other host", rounds=0)
    other.engine.serve(lambda: trial.canary.num_others == 1, "its evidence", rounds=0)
    adopts(other, f"v0002-{made.sha256[:8]}")
    assert (one.shared()["errors"], other.shared()["errors"]) == (0, 0)
