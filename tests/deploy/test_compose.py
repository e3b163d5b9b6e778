"""deploy/ as an operator runs it: images built from its Dockerfile, compose.yaml brought up, a drafter retrained and swapped.

The tests are one story, in order. `make test-container` runs them; building the images takes most of the time, once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.server import client_load
from benchmarks.server.client_load import Played
from benchmarks.server.processes import free_port
from tests.build_wheel import ROOT
from tests.deploy import containers
from tests.deploy.containers import Compose, Podman
from tests.systemd.machine import wait_until

pytestmark = [
    pytest.mark.skipif(os.environ.get("HONED_TEST_CONTAINER") != "1", reason="takes minutes: `make test-container`"),
    pytest.mark.timeout(2400),
]

TINY = ROOT / "benchmarks" / "tiny"
SERVICES = ["honed", "trainer", "vllm", "prometheus", "alertmanager"]
"""Without Grafana, which no package index has."""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    assert not (reason := containers.why_not()), reason
    folder = tmp_path_factory.mktemp("images")
    return Podman(folder).make_images(folder)


@pytest.fixture(scope="module")
def ports() -> Mapping[str, int]:
    return {name: free_port() for name in ("HONED_PORT", "VLLM_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT")}


@pytest.fixture(scope="module")
def compose(images: Mapping[str, str], ports: Mapping[str, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compose]:
    folder = tmp_path_factory.mktemp("compose")
    models = {
        "MODELS": str(TINY),
        "MODEL": "/models/target",
        "MODEL_NAME": "tiny",
        "DRAFTER": "/models/drafter",
        "DRAFT_TOKENS": "7",
    }
    environment = models | dict(images) | {name: str(port) for name, port in ports.items()}
    with containers.running(folder, environment, Podman(folder), SERVICES) as made:
        yield made


def get(port: int, path: str, password: str = "", user: str = "prometheus") -> httpx2.Response | None:
    """The answer of a published port; None while nothing answers there."""
    try:
        auth = (user, password) if password else None
        return httpx2.get(f"http://127.0.0.1:{port}{path}", auth=auth, timeout=10.0, trust_env=False)
    except httpx2.TransportError:
        return None


def is_well(port: int, path: str) -> bool:
    answer = get(port, path)
    return answer is not None and answer.is_success


def honed(compose: Compose, *arguments: str, check: bool = True) -> Any:
    """The JSON that a `honed` command in the daemon's container prints."""
    said = compose.inside("honed", "honed", *arguments, "--json", check=check)
    try:
        return json.loads(said)
    except ValueError:
        assert not check, said
        return None


def engine(compose: Compose) -> dict[str, Any]:
    """The one engine, once it is connected; empty before."""
    found = honed(compose, "engines", check=False)
    return found[0] if found and found[0]["connected"] else {}


def play(port: int, workload: str, file: str, count: int) -> Played:
    prompts = client_load.read_prompts(TINY / file, count)
    played = asyncio.run(client_load.play(f"http://127.0.0.1:{port}", prompts, concurrency=8, max_tokens=80, workload=workload))
    assert played.num_failed == 0, [reply.error for reply in played.replies if reply.error][:3]
    return played


def told(compose: Compose, *services: str) -> str:
    return "\n".join(map(compose.logs, services))


def test_the_daemons_image_has_no_torch_and_no_root(compose: Compose, images: Mapping[str, str]) -> None:
    program = "import importlib.util as u, os; print(os.getuid(), u.find_spec('torch'), u.find_spec('vllm'))"
    said = compose.podman.run("run", "--rm", "--network=none", "--entrypoint=python", images["HONED_IMAGE"], "-c", program)
    assert said.split() == ["10001", "None", "None"]


def test_the_daemons_image_has_what_a_shared_registry_needs(compose: Compose, images: Mapping[str, str]) -> None:
    program = "import fsspec; print(fsspec.get_filesystem_class('s3').__name__)"
    said = compose.podman.run("run", "--rm", "--network=none", "--entrypoint=python", images["HONED_IMAGE"], "-c", program)
    assert said.split() == ["S3FileSystem"]


def test_vllms_packages_stay_as_they_were(compose: Compose, images: Mapping[str, str]) -> None:
    def packages(image: str) -> dict[str, str]:
        said = compose.podman.run(
            "run", "--rm", "--network=none", "--entrypoint=python3", image, "-m", "pip", "list", "--format=json"
        )
        return {one["name"]: one["version"] for one in json.loads(said)}

    before, after = packages(images["VLLM_IMAGE"]), packages(images["VLLM_HONED_IMAGE"])
    assert {name: after[name] for name in before} == before
    assert "honed" in after


def test_every_part_comes_up_and_meets_the_others(compose: Compose, ports: Mapping[str, int]) -> None:
    wait_until(lambda: is_well(ports["VLLM_PORT"], "/health"), 300, lambda: told(compose, "vllm"))
    found = wait_until(lambda: engine(compose), 60, lambda: told(compose, "honed", "vllm"))
    assert set(found["capabilities"]) == {"events", "draft_length", "capture", "swap"}
    wait_until(lambda: honed(compose, "status")["trainer"], 60, lambda: told(compose, "honed", "trainer"))
    compose.inside("honed", "honed", "doctor")
    assert "honed: attached as" in compose.podman.run("logs", compose.container("vllm"), check=False)


def test_honeds_parts_can_do_nothing_beyond_their_work(compose: Compose) -> None:
    for service in ("honed", "trainer"):
        status = compose.inside(service, "cat", "/proc/1/status")
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert "Uid:\t10001\t10001" in status
        assert "Read-only file system" in compose.inside(service, "touch", "/x", check=False)
    assert compose.inside("trainer", "ls", "/sys/class/net").split() == ["lo"]
    assert "tmpfs /run/honed tmpfs" in compose.inside("vllm", "cat", "/proc/mounts")
    (compiled,) = (line for line in compose.inside("trainer", "cat", "/proc/mounts").splitlines() if line.split()[1] == "/tmp")
    assert "noexec" not in compiled, "kernels are loaded from there"


def test_metrics_need_the_password(compose: Compose, ports: Mapping[str, int]) -> None:
    for path in ("/metrics", "/"):
        asked = [get(ports["HONED_PORT"], path, password) for password in ("", "wrong", compose.password)]
        assert [answer.status_code if answer is not None else 0 for answer in asked] == [401, 401, 200]


def test_prometheus_scrapes_both_and_knows_the_rules(compose: Compose, ports: Mapping[str, int]) -> None:
    port = ports["PROMETHEUS_PORT"]

    def up() -> dict[str, str]:
        answer = get(port, "/api/v1/query?query=up")
        found = answer.json()["data"]["result"] if answer is not None and answer.is_success else []
        return {one["metric"]["job"]: one["value"][1] for one in found}

    wait_until(lambda: up() == {"honed": "1", "vllm": "1"}, 60, lambda: f"{up()} {told(compose, 'prometheus', 'honed')}")
    rules = get(port, "/api/v1/rules")
    assert rules is not None
    assert [group["name"] for group in rules.json()["data"]["groups"]] == ["honed", "honed-recording"]
    managers = get(port, "/api/v1/alertmanagers")
    assert managers is not None
    assert len(managers.json()["data"]["activeAlertmanagers"]) == 1
    assert is_well(ports["ALERTMANAGER_PORT"], "/-/ready")


def test_a_drafter_is_retrained_and_swapped_and_no_answer_changes(compose: Compose, ports: Mapping[str, int]) -> None:
    port = ports["VLLM_PORT"]
    play(port, "a", "traffic_a.jsonl", 120)
    play(port, "b", "traffic_b.jsonl", 160)
    first, before = engine(compose)["drafter_version"], play(port, "b", "prompts_b.jsonl", 16)
    asked = honed(compose, "recalibrate", "--workload", "b", "--reason", "drill")

    def ended() -> dict[str, Any]:
        view: dict[str, Any] = honed(compose, "operations", asked["operation_id"])
        if view["stage"] == "canary":  # old and new take turns on live traffic until one has proven better
            play(port, "b", "traffic_b.jsonl", 40)
        return view if view["state"] in ("succeeded", "failed", "cancelled") else {}

    view = wait_until(ended, 900, lambda: told(compose, "honed", "trainer"))
    assert view["state"] == "succeeded", (view, told(compose, "trainer"))
    after = wait_until(lambda: engine(compose), 30, lambda: told(compose, "honed"))
    assert after["drafter_version"] == view["detail"]["version"] != first
    assert client_load.differing(before.replies, play(port, "b", "prompts_b.jsonl", 16).replies) == []
    assert after["lost_rounds"] == 0


def test_a_killed_daemon_leaves_vllm_serving_and_comes_back(compose: Compose, ports: Mapping[str, int]) -> None:
    began = compose.state("vllm")["State"]["StartedAt"]
    compose.podman.run("kill", "--signal=KILL", compose.container("honed"))
    assert play(ports["VLLM_PORT"], "a", "prompts_a.jsonl", 16).num_tokens > 0
    compose.podman.run("start", compose.container("honed"))  # as the restart policy does where a service watches
    found = wait_until(lambda: engine(compose), 60, lambda: told(compose, "honed", "vllm"))
    assert found["lost_rounds"] == 0
    assert compose.state("vllm")["State"]["StartedAt"] == began


def test_a_recreated_vllm_is_the_same_engine_with_the_same_drafter(compose: Compose, ports: Mapping[str, int]) -> None:
    version = engine(compose)["drafter_version"]
    compose.podman.run("restart", compose.container("vllm"))
    wait_until(lambda: is_well(ports["VLLM_PORT"], "/health"), 300, lambda: told(compose, "vllm"))
    wait_until(lambda: engine(compose).get("drafter_version") == version, 120, lambda: told(compose, "honed", "vllm"))
    assert play(ports["VLLM_PORT"], "a", "prompts_a.jsonl", 8).num_tokens > 0


def test_a_stop_is_clean(compose: Compose) -> None:
    for service in ("honed", "trainer"):
        compose.podman.run("stop", "--time=60", compose.container(service))
        assert compose.state(service)["State"]["ExitCode"] == 0, compose.logs(service)


def test_a_missing_variable_is_named(compose: Compose, tmp_path: Path) -> None:
    text = (ROOT / "deploy" / "compose.yaml").read_text()
    (tmp_path / "compose.yaml").write_text(text)
    with pytest.raises(AssertionError, match="MODELS"):
        containers.called(
            [sys.executable, "-m", "podman_compose", "-f", str(tmp_path / "compose.yaml"), "config"],
            compose.podman.env,
            60,
        )
