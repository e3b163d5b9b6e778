"""`honed retention` between two live servers: a target and what it was fine-tuned to, with the same drafter, daemon and all.

Two classes of prompts: texts to continue, and conversations, which go through the servers' chat template. Some minutes of both
cores, so behind a switch: `make test-calibrate`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.server import honed_side, vllm_server
from benchmarks.server.processes import Processes, free_port
from benchmarks.server.recalib_target import fine_tune
from honed.daemon.client.client import AdminClient
from tests.e2e.calibrating import IS_SWITCHED_ON, SETTINGS, TINY, honed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    IS_SWITCHED_ON,
]

PROMPTS, TUNING_STEPS, DRAFT_TOKENS = 12, 24, 7


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the command prints with --json."""
    folder = tmp_path_factory.mktemp("ret")
    texts = [json.loads(line)["prompt"] for line in (TINY / "prompts_a.jsonl").read_text().splitlines()]
    fine_tune(TINY / "target", folder / "tuned", texts[PROMPTS : 5 * PROMPTS], TUNING_STEPS)
    (folder / "prompts.jsonl").write_text("".join(map(line_of, range(2 * PROMPTS), texts)))
    (folder / "template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    (folder / "honed.toml").write_text(SETTINGS.format(folder=folder, port=free_port()))
    with Processes(folder / "logs") as processes, AdminClient(folder / "run" / "admin.sock") as client:
        _, environment = honed_side.start_daemon(processes, folder / "honed.toml", client)
        args = honed_side.vllm_args(environment)
        flags = [*args["flags"], "--chat-template", str(folder / "template.jinja")]

        def serve(name: str, target: str) -> vllm_server.Server:
            own = args["environment"] | {"HONED_ENGINE_ID": name}
            return vllm_server.start(processes, f"vllm-{name}", extra=flags, environment=own, target=target)

        base, tuned = serve("base", vllm_server.TARGET), serve("tuned", str(folder / "tuned"))
        for server in (base, tuned):
            vllm_server.wait(server)
        tuned.child.wait_until(lambda: connected(client) == {"base-0", "tuned-0"}, 30.0, "engine in the daemon")
        document = honed(
            environment,
            "retention",
            "--url",
            tuned.url,
            "--base-url",
            base.url,
            "--prompts",
            folder / "prompts.jsonl",
            "--draft-tokens",
            DRAFT_TOKENS,
            "--max-tokens",
            48,
            "--repeat",
            1,
        )
        assert client.get("/v1/overrides") == []
        print(json.dumps({which: document[which]["classes"][""] for which in ("base", "tuned")} | {"of": document["retained"]}))
        yield document


def line_of(number: int, text: str) -> str:
    """Texts and conversations in turns."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if number % 2 else {"prompt": text}
    return json.dumps(asked | {"class": "talk" if number % 2 else "text"}) + "\n"


def connected(client: AdminClient) -> set[str]:
    return {engine["engine_id"] for engine in client.get("/v1/engines") if engine["connected"]}


def test_both_targets_are_measured_class_by_class_and_nothing_else(document: dict[str, Any]) -> None:
    assert document["notes"] == []
    for which in ("base", "tuned"):
        classes = document[which]["classes"]
        assert set(classes) == {"", "text", "talk"}
        for name in ("text", "talk"):
            assert classes[name]["prompts"] == PROMPTS
            assert classes[name]["draft_tokens_per_round"] == pytest.approx(DRAFT_TOKENS, abs=0.5)
            assert classes[name]["tokens_per_s"] > 0.0
            assert classes[name]["tokens_per_s_without"] > 0.0
            assert classes[name]["speedup"]["median"] > 0.0
        assert classes[""]["rounds"] == classes["text"]["rounds"] + classes["talk"]["rounds"]


def test_the_fine_tuned_target_keeps_a_part_of_the_acceptance(document: dict[str, Any]) -> None:
    base, tuned = (document[which]["classes"] for which in ("base", "tuned"))
    retained = {row["class"]: row for row in document["retained"]}
    assert set(retained) == {"", "text", "talk"}
    for name, row in retained.items():
        share = tuned[name]["acceptance_length"] / base[name]["acceptance_length"]
        assert row["acceptance_length_retained"] == pytest.approx(share)
        assert row["speedup_retained"] == pytest.approx(tuned[name]["speedup"]["median"] / base[name]["speedup"]["median"])
    assert base[""]["acceptance_length"] > 2.0
    assert 0.3 < retained[""]["acceptance_length_retained"] < 0.97
