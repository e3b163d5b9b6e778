"""The admin API against its own OpenAPI document, with requests that schemathesis makes up: right ones, wrong ones, odd ones.

They go over a real TCP listener to a real daemon, so that tokens and HTTP's framing are part of it. HONED_TEST_API_CASES sets
how many requests an operation gets beside those for every bound and method (`make test-api`: 1,000).
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed (honed[dev])")

import structlog  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from honed.daemon.process.serve import start  # noqa: E402
from honed.daemon.settings.settings import load  # noqa: E402
from tests.daemon.conftest import free_port  # noqa: E402
from tests.daemon.fake_engine import FakeEngine, FakeTrainer  # noqa: E402
from tests.tools import ROOT  # noqa: E402

CASES = int(os.environ.get("HONED_TEST_API_CASES", "10"))
READ, ADMIN = "r" * 40, "a" * 40
POSSIBLE = ["2xx", "404", "409", "412"]
"""What a request that the document allows may be answered with: its subject may not exist, or not be possible now."""
CONFIG = {"checks": {"positive_data_acceptance": {"expected-statuses": POSSIBLE}}}
DOCUMENT = ROOT / "daemon" / "openapi.json"

schema = schemathesis.openapi.from_dict(
    json.loads(DOCUMENT.read_text()), config=schemathesis.config.SchemathesisConfig.from_dict(CONFIG)
)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon with an engine and a trainer, so that changes have something to change."""
    folder: Path = tmp_path_factory.mktemp("c")
    for name, token in (("read", READ), ("admin", ADMIN)):
        (folder / name).write_text(token)
    address = f"127.0.0.1:{free_port()}"
    flags = {
        "paths": {"state_dir": folder / "state", "runtime_dir": folder / "run"},
        "http": {
            "metrics_listen": "",
            "admin_listen": address,
            "read_token_file": folder / "read",
            "admin_token_file": folder / "admin",
            "mutations_per_minute": 1_000_000,
        },
        "store": {"commit_interval_s": 0.0},
        "events": {"engine_lost_s": 1e6},
        "recalibration": {"trainer_lost_s": 1e6},
    }
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    with ExitStack() as stack:
        stack.callback(structlog.reset_defaults)
        service = start(load(None, flags, env={}), stack)
        engine, trainer = (kind(service.settings.paths.engine_socket) for kind in (FakeEngine, FakeTrainer))
        stack.callback(engine.close)
        stack.callback(trainer.close)
        engine.hello(capture_path="/dev/null")
        engine.send(engine.batch(1))
        engine.wait_acked(1)
        trainer.introduce()
        yield f"http://{address}"


@schema.exclude(path="/v1/marks:follow").parametrize()  # it never ends; test_follow.py has it
@settings(max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck))
def test_every_operation_keeps_to_the_document(case: Any, url: str) -> None:
    excluded = []
    if case.method == "PUT":
        # Which values an override takes depends on its name, which no schema says.
        excluded.append(schemathesis.checks.CHECKS.get_one("positive_data_acceptance"))
    if len(case.headers.get("Idempotency-Key") or "") in range(1, 201):
        case.headers["Idempotency-Key"] = uuid.uuid4().hex  # one that was used for another request is refused, rightly
    if is_lost_on_the_way(case):
        excluded.append(schemathesis.checks.CHECKS.get_one("negative_data_rejection"))
    # A case whose fault is that it shows no token is left as it is.
    is_shown = case.meta is None or case.meta.generation.mode.is_positive or "Authorization" in case.headers
    headers = {"Authorization": f"Bearer {ADMIN}"} if is_shown else {}
    answer = case.call_and_validate(base_url=url, headers=headers, excluded_checks=excluded)
    assert answer.status_code < 500


def is_lost_on_the_way(case: Any) -> bool:
    """Whether what is wrong with a case is a parameter that HTTP has no way of writing.

    An empty list or mapping is no parameter, a list is the parameter several times: of one value, just the value.
    """
    return any(isinstance(value, list) or value == {} for value in (case.query or {}).values())
