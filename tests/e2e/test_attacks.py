"""What others do to honed's files, and what they name, ends no request: neither vLLM's process nor honed in it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from honed.recalib.registry.weights_digest import weights_digests
from tests.e2e.engine import DRAFTER, IS_CUDA, IS_SLOW, TestEngine, held_out
from tests.e2e.logged import set_policy
from tests.e2e.swapping import perturbed_drafter, renamed_drafter, swap, wait_for, wait_until_compiled
from tests.e2e.test_engine_modes import late_daemon, stored_and_lost
from tests.full_tmpfs import run_on_tmpfs

pytestmark = [pytest.mark.e2e, pytest.mark.runners]
NUM_PROMPTS = 2 if IS_SLOW else 6
MAX_TOKENS = 10 if IS_SLOW else 32

ON_A_FULL_TMPFS = f"""
import json, os, sys
from pathlib import Path
from tests.e2e.engine import engine, held_out
folder = Path(sys.argv[1])
with open(folder / "filler", "wb", buffering=0) as filler:
    try:
        while filler.write(bytes(4096)):
            pass
    except OSError:
        pass
with engine(folder) as running:
    print(json.dumps(running.generate(held_out({NUM_PROMPTS}, 100), temperature=0.0, max_tokens={MAX_TOKENS})))
"""


def answers_of(running: TestEngine, **params: object) -> list[list[int]]:
    return running.generate(held_out(NUM_PROMPTS, 100), temperature=0.0, max_tokens=MAX_TOKENS, **params)


@pytest.mark.fault("a full tmpfs under the busy flag")
@pytest.mark.skipif(IS_SLOW or IS_CUDA, reason="another engine, which is slow, or has no room on the device")
def test_A1_on_a_full_tmpfs_vllm_serves_without_honed(attached: TestEngine, tmp_path: Path) -> None:
    """The first request ended vLLM with SIGBUS."""
    printed = run_on_tmpfs(tmp_path, "64k", ON_A_FULL_TMPFS, str(tmp_path), timeout_s=180.0)
    assert "honed: the trainer can't see when this engine has requests" in printed
    set_policy(attached, kind="off")
    assert json.loads(printed.splitlines()[-1]) == answers_of(attached)


@pytest.mark.fault("files that are cut off while they are in use")
def test_A1_files_that_are_cut_off_end_no_request(attached: TestEngine) -> None:
    set_policy(attached)
    wait_until_compiled(attached)
    attached.rpc("honed_capture", 1.0, "v-test")
    expected = answers_of(attached)
    settings = attached.honed._settings
    for path in (settings.busy_path, settings.ring_path):
        assert path.stat().st_size
        os.truncate(path, 0)
    assert answers_of(attached) == expected
    attached.rpc("honed_capture", 0.0, "v-test")
    assert settings.busy_path.stat().st_size
    assert settings.ring_path.stat().st_size
    assert attached.honed.errors.count == 0


@pytest.mark.fault("an exception in the publisher's thread")
def test_A2_the_publishers_thread_survives_what_it_cannot_send(attached: TestEngine) -> None:
    """Half a surrogate pair in a label, which a client in vLLM's process can send, ended it; so did every exception."""
    service = late_daemon(Path(os.environ["HONED_RUNTIME_DIR"]))
    try:
        expected = answers_of(attached)
        assert answers_of(attached, extra=[{"honed_workload": "half \ud800"}] * NUM_PROMPTS) == expected
        errors = attached.honed.errors.count
        attached.honed._publisher._log.append(object())  # type: ignore[arg-type]
        wait_for(lambda: attached.honed.errors.count == errors + 1)
        assert answers_of(attached) == expected
        wait_for(lambda: stored_and_lost(service) == attached.counters())
        assert attached.honed._publisher._thread.is_alive()
    finally:
        service.stop()


@pytest.mark.fault("a drafter under other tensor names")
def test_a_drafter_under_other_names_is_swapped_in_and_can_be_verified(attached: TestEngine, tmp_path: Path) -> None:
    attached.honed.before_schedule()
    other = perturbed_drafter(tmp_path / "other")
    renamed = renamed_drafter(other, tmp_path / "renamed")
    sums = []
    for version, folder in (("other", other), ("stock", DRAFTER), ("renamed", renamed)):
        result = swap(attached, version, folder)
        assert result.ok, result.error
        sums.append(attached.checksum())
    assert sums[0] == sums[2] != sums[1]
    assert sums[2] in weights_digests(renamed / "model.safetensors")
