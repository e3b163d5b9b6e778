"""A target without a drafter, on the real engine: an untrained one of each kind is served, calibrated on prompts, and drafts.

Some minutes of both cores, so behind a switch: `make test-calibrate`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.make_pairs.kinds import eagle3_json, fresh_eagle3, write_eagle3
from benchmarks.server import honed_side, vllm_server
from benchmarks.server.processes import Processes, free_port
from honed.daemon.client.client import AdminClient
from tests.e2e.calibrating import IS_SWITCHED_ON, SETTINGS, TINY, honed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(1800),
    IS_SWITCHED_ON,
]

# The pair is small and nothing is learnt yet: larger and more steps than for a drafter that is polished.
TRAINING = """
[trainer]
learning_rate = 2e-3
micro_steps_per_update = 1
anchors_per_micro_step = 64
rows_per_micro_step = 512
max_steps = 100000
nice = 0
torch_threads = 2
preempt_budget_s = 0
"""


@dataclass
class Site:
    """A vLLM server with an untrained drafter, honed attached, daemon and trainer."""

    folder: Path
    server: vllm_server.Server
    client: AdminClient
    environment: dict[str, str]
    num_draft_tokens: int

    def honed(self, *arguments: Any) -> Any:
        """A command's JSON; it must end with 0."""
        return honed(self.environment, *arguments)

    def retention(self, *more: Any) -> Any:
        """Held-out prompts, all drafts of full length."""
        prompts = ("--prompts", TINY / "prompts_b.jsonl", "--limit", 32, "--max-tokens", 64, "--repeat", 1)
        prompts += ("--draft-tokens", self.num_draft_tokens)
        return self.honed("retention", "--url", self.server.url, *prompts, *more)


@pytest.fixture(scope="module", params=["dflash", "eagle3"])
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("cal")
    config = folder / "honed.toml"
    config.write_text(SETTINGS.format(folder=folder, port=free_port()) + TRAINING)
    with Processes(folder / "logs") as processes, AdminClient(folder / "run" / "admin.sock") as client:
        _, environment = honed_side.start_daemon(processes, config, client)
        if request.param == "dflash":
            shape = ("--layers", 3, "--block-size", 8)
            honed(environment, "calibrate", "--new-drafter", folder / "drafter", "--target", TINY / "target", *shape)
        else:
            write_untrained_eagle3(folder / "drafter")
        args = honed(environment, "vllm-args", "--drafter", folder / "drafter")
        speculative = json.loads(args["flags"][args["flags"].index("--speculative-config") + 1])
        assert speculative["method"] == request.param
        processes.start("trainer", [honed_side.honed_command(), "train"], environment)
        server = vllm_server.start(
            processes,
            "vllm",
            extra=args["flags"],
            environment=args["environment"] | {"HONED_FEATURES": "layers", "HONED_RING_BYTES": str(256 << 20)},
            is_speculating=False,  # the flags of vllm-args bring the drafter
        )
        vllm_server.wait(server)
        honed_side.wait_attached(server.child, client)
        yield Site(folder, server, client, environment, speculative["num_speculative_tokens"])


def write_untrained_eagle3(folder: Path) -> None:
    raw = eagle3_json(TINY / "target", eagle_aux_hidden_state_layer_ids=[2, 4, 5])
    torch.manual_seed(0)
    write_eagle3(fresh_eagle3(TINY / "target", raw), folder, raw)


def test_an_untrained_drafter_is_calibrated_until_it_drafts(site: Site) -> None:
    before = site.retention()
    untrained = before["tuned"]["classes"][""]
    assert untrained["draft_tokens_per_round"] == pytest.approx(site.num_draft_tokens, abs=0.5)
    assert untrained["acceptance_length"] < 1.05
    assert before["notes"] == []
    (site.folder / "before.json").write_text(json.dumps(before))

    made = site.honed(
        "calibrate",
        "--url",
        site.server.url,
        "--prompts",
        TINY / "traffic_b.jsonl",
        "--limit",
        192,
        "--max-tokens",
        96,
        "--temperature",
        0,
        "--max-seconds",
        120,
        "--promote",
    )
    collected = made["collected"]
    assert collected["failed"] == 0
    # All rows but each answer's last token's, whose hidden state nobody computes.
    assert collected["captured_rows"] >= collected["prompt_tokens"] + collected["completion_tokens"] - 2 * 192
    (gate,) = [row for row in made["operation"]["detail"]["gate"] if row["workload"] == ""]
    assert gate["passed"]
    assert gate["parent"] < 1.05
    assert made["promotion"]["state"] == "succeeded"
    assert site.client.get("/v1/drafters")["aliases"]["active"] == made["version"]

    after = site.retention("--base", site.folder / "before.json")
    (row,) = after["retained"]
    print(json.dumps({"gate": gate, "collected": collected, "before": untrained, "after": after["tuned"]["classes"][""]}))
    assert row["acceptance_length_retained"] > 1.15
