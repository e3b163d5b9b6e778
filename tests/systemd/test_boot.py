"""honed as an operator runs it: installed by `honed install` on a machine with a real systemd, beside a real vLLM service.

The tests are one story, in order, on one machine. `make test-systemd` runs them; they take some minutes.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.build_wheel import ROOT
from tests.systemd import machine as machines
from tests.systemd.machine import Machine

pytestmark = [
    pytest.mark.skipif(os.environ.get("HONED_TEST_SYSTEMD") != "1", reason="takes minutes: `make test-systemd`"),
    pytest.mark.timeout(1500),
]

READ_TOKEN, ADMIN_TOKEN = "r" * 40, "a" * 40
VLLM = """\
[Unit]
Description=vLLM with the tiny pair
[Service]
User=vllm
StateDirectory=vllm
WorkingDirectory=/opt/test
Environment=HOME=/var/lib/vllm VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 HF_HUB_OFFLINE=1
Environment=OMP_NUM_THREADS=2 VLLM_LOGGING_LEVEL=INFO
ExecStart=/opt/honed/bin/python -m vllm.entrypoints.openai.api_server --model benchmarks/tiny/target \\
  --served-model-name tiny --dtype float32 --max-model-len 1024 --max-num-seqs 16 --enforce-eager --host 127.0.0.1 \\
  --port 8000 \\
  --speculative-config '{"method":"dflash","model":"benchmarks/tiny/drafter","num_speculative_tokens":7}' \\
  --scheduler-cls honed.attach.scheduler.make_scheduler --worker-extension-cls honed.attach.worker.HonedWorkerExtension
"""
ENVIRONMENT = """\
HONED_CONFIG=/etc/honed/honed.toml
HONED_HTTP__ADMIN_LISTEN=127.0.0.1:9465
HONED_CONTROLLER__CAPTURE_SHARE=1.0
HONED_RECALIBRATION__AUTOMATIC=false
HONED_RECALIBRATION__MAX_SECONDS=100
HONED_TRAINER__MAX_STEPS=100000
"""
PLAY = """
import asyncio, json, pathlib
from benchmarks.server import client_load
prompts = client_load.read_prompts(pathlib.Path("/opt/test/benchmarks/tiny/{file}"), {count})
played = asyncio.run(client_load.play("http://127.0.0.1:8000", prompts, concurrency=8, max_tokens=80, workload="{workload}"))
print(json.dumps({{"failed": played.num_failed, "tokens": played.num_tokens, "replies": [r.token_ids for r in played.replies],
                   "errors": [r.error for r in played.replies if r.error][:3]}}))
"""
HEALTH = """
import json, httpx2
try:
    print(json.dumps(httpx2.get("http://127.0.0.1:8000/health", timeout=5, trust_env=False).is_success))
except httpx2.TransportError:
    print("false")
"""
ASK = """
import json, httpx2
answer = httpx2.request("{method}", "http://127.0.0.1:9465{path}", headers={headers}, json={body}, timeout=10, trust_env=False)
print(json.dumps(answer.status_code))
"""
OLDER = """
import hashlib, json, pathlib
unit, record = pathlib.Path("/etc/systemd/system/honed.service"), pathlib.Path("/etc/honed/installed.json")
unit.write_text(unit.read_text().replace("TimeoutStopSec=60", "TimeoutStopSec=61"))
known = json.loads(record.read_text())
known[str(unit)] = hashlib.sha256(unit.read_bytes()).hexdigest()
record.write_text(json.dumps(known))
import subprocess
subprocess.run(["systemctl", "daemon-reload"], check=True)
"""
DOCS = ROOT / "docs"
INSTALLING = ("/usr/bin/python3 -m venv", "/opt/honed/bin/pip", "/path/to/vllm/bin/pip")
OWN_VLLM = {
    "/path/to/new/bin/honed": "/opt/honed/bin/honed",
    "vllm serve …": re.search(r"^ExecStart=((?:.*\\\n)*.*)$", VLLM, re.MULTILINE)[1].replace("\\\n", " "),  # type: ignore[index]
}
"""What stands in a page for a new environment, and for a user's own command: here those of vllm.service."""
MODELS = {"DRAFTER": "/opt/test/benchmarks/tiny/drafter", "MODEL": "/opt/test/benchmarks/tiny/target"}
SERVICES = ("honed.service", "honed-trainer.service")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    assert not (reason := machines.why_not()), reason
    with machines.booted(tmp_path_factory.mktemp("machine")) as made:
        made.write("/etc/sysusers.d/vllm.conf", 'u vllm - "vLLM" /var/lib/vllm -\n')
        made.run("systemd-sysusers")
        made.write("/etc/systemd/system/vllm.service", VLLM)
        made.write("/etc/credstore/honed-read-token", READ_TOKEN, "0600")
        made.write("/etc/credstore/honed-admin-token", ADMIN_TOKEN, "0600")
        yield made


def engine(machine: Machine) -> dict[str, Any]:
    """The one engine, once it is connected; empty before."""
    done = machine.run("honed", "engines", "--json", check=False)
    found = json.loads(done.stdout) if done.returncode == 0 else []
    return found[0] if found and found[0]["connected"] else {}


def play(machine: Machine, workload: str, file: str, count: int) -> dict[str, Any]:
    played: dict[str, Any] = machine.python(PLAY.format(workload=workload, file=file, count=count), timeout_s=600)
    assert played["failed"] == 0, played["errors"]
    return played


def stored_rounds(machine: Machine) -> int:
    """All that are on disk, those without drafts included: drafting hardly pays for so small a target."""
    return len(machine.run("honed", "events", "export", "--out", "-").stdout.splitlines())


def life_of_vllm(machine: Machine) -> tuple[str, str]:
    """Its process and how often it was restarted."""
    found = machine.show("vllm.service", "MainPID", "NRestarts")
    return found["MainPID"], found["NRestarts"]


def wait_serving(machine: Machine, timeout_s: float = 60.0) -> None:
    """The daemon is up, says so, and has its engine."""
    units = ("honed.service", "vllm.service")
    machine.until(lambda: machine.show("honed.service", "ActiveState")["ActiveState"] == "active", "honed", timeout_s, *units)
    machine.until(lambda: engine(machine), "the engine's return", timeout_s, *units)


def commands(page: str, heading: str) -> list[str]:
    """The lines of the shell blocks below a heading of a page."""
    text = (DOCS / page).read_text()
    part = text[text.index(heading) :].split("\n## ")[0]
    blocks = re.findall(r"^```sh\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)
    found = [line for block in blocks for line in block.splitlines()]
    assert found, f"{page} has no commands below {heading!r}"
    return found


def follow(machine: Machine, line: str) -> None:
    """Run a line of a page, unless it is one of those that boot.sh has run: the container reaches no package index."""
    if not line.startswith(INSTALLING):
        for name, here in (OWN_VLLM | MODELS).items():
            line = line.replace(name, here)
        done = machine.run("sh", "-c", line, check=False, timeout_s=180)
        may_warn = "honed doctor" in line
        assert done.returncode in ((0, 4) if may_warn else (0,)), f"{line}: {done.stdout}{done.stderr}"


def test_install_shows_and_changes_nothing(machine: Machine) -> None:
    shown = machine.honed("install")
    assert not shown["applied"]
    assert shown["notes"] == []
    assert {file["state"] for file in shown["files"]} == {"new"}
    assert machine.run("systemctl", "cat", "honed.service", check=False).returncode != 0


def test_the_page_on_installing_followed_to_the_letter(machine: Machine) -> None:
    lines = commands("install.md", "## Bare metal")
    assert "honed install --apply" in lines
    assert lines[-1] == "honed doctor"
    for line in lines[:-1]:
        if line.startswith("systemctl enable"):
            machine.write("/etc/honed/honed.env", ENVIRONMENT)  # what an operator sets before the first start
        follow(machine, line)
    machine.until(lambda: machine.python(HEALTH), "vLLM", 300, "vllm.service")
    found = machine.until(lambda: engine(machine), "the engine", 60, "honed.service", "vllm.service")
    assert set(found["capabilities"]) == {"events", "draft_length", "capture", "swap"}
    follow(machine, lines[-1])
    assert {file["state"] for file in machine.honed("install")["files"]} == {"same", "settings"}
    assert machine.run("stat", "-c", "%U:%G %a", "/run/honed/engines").stdout == "honed:honed 2770\n"


def test_what_is_installed_is_sound_to_systemd(machine: Machine) -> None:
    for unit in (*SERVICES, "vllm.service"):
        assert machine.run("systemd-analyze", "verify", "--man=no", unit).stderr == "", unit
    for unit, most in zip(SERVICES, ("12", "16"), strict=True):
        machine.run("systemd-analyze", "security", "--no-pager", f"--threshold={most}", unit)


def test_services_are_ready_and_say_what_they_do(machine: Machine) -> None:
    for unit in SERVICES:
        found = machine.show(unit, "ActiveState", "SubState", "Type", "User", "NRestarts")
        assert found == {"ActiveState": "active", "SubState": "running", "Type": "notify", "User": "honed", "NRestarts": "0"}

    def says(unit: str, text: str) -> bool:
        return text in machine.show(unit, "StatusText")["StatusText"]

    machine.until(lambda: says("honed.service", "1 engine, trainer connected"), "the status", 60, *SERVICES)
    machine.until(lambda: says("honed-trainer.service", "idle"), "an idle trainer", 30, *SERVICES)


def test_the_audit_table_knows_who_did_it(machine: Machine) -> None:
    for user, command in (("vllm", "pause"), ("root", "resume")):
        machine.run("runuser", "-u", user, "--", "/opt/honed/bin/honed", command)
    actors = {row["action"]: row["actor"] for row in machine.honed("audit")}
    assert (actors["training.pause"], actors["training.resume"]) == ("vllm", "root")


def test_a_recalibration_over_the_admin_api_is_trained_judged_tried_out_and_swapped_in(machine: Machine) -> None:
    before = life_of_vllm(machine)
    play(machine, "a", "traffic_a.jsonl", 120)
    play(machine, "b", "traffic_b.jsonl", 160)
    first = engine(machine)["drafter_version"]
    flags = ("--url", "http://127.0.0.1:9465", "--token-file", "/etc/credstore/honed-admin-token")
    asked = machine.honed(*flags, "recalibrate", "--workload", "b", "--reason", "drill")

    def ended() -> dict[str, Any]:
        view: dict[str, Any] = machine.honed("operations", asked["operation_id"])
        if view["stage"] == "canary":  # old and new take turns on live traffic until one has proven better
            play(machine, "b", "traffic_b.jsonl", 40)
        return view if view["state"] in ("succeeded", "failed", "cancelled") else {}

    view = machine.until(ended, "the recalibration", 900, *SERVICES)
    assert view["state"] == "succeeded", (view, machine.journal("honed-trainer.service"))
    assert view["detail"]["pause_ms"] > 0
    after = machine.until(lambda: engine(machine), "the engine", 30, "honed.service")
    assert after["drafter_version"] == view["detail"]["version"] != first
    assert play(machine, "b", "prompts_b.jsonl", 16)["tokens"] > 0
    assert life_of_vllm(machine) == before


def test_over_tcp_a_token_is_needed_and_the_reading_one_only_reads(machine: Machine) -> None:
    for line in commands("security.md", "## The admin API over TCP"):  # makes a new admin token and uses it
        follow(machine, line)
        if line.startswith("systemctl restart"):
            wait_serving(machine)
    admin = machine.run("cat", "/etc/credstore/honed-admin-token").stdout.strip()

    def ask(method: str, path: str, token: str, body: Any = None) -> int:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        status: int = machine.python(ASK.format(method=method, path=path, headers=headers, body=body))
        return status

    assert len(admin) == 64
    assert ask("GET", "/v1/status", "") == 401
    assert ask("GET", "/v1/status", ADMIN_TOKEN) == 401  # the old one
    assert ask("GET", "/v1/status", READ_TOKEN) == 200
    assert ask("POST", "/v1/training:pause", READ_TOKEN, {}) == 403
    assert ask("POST", "/v1/training:pause", admin, {}) == 202
    assert ask("POST", "/v1/training:resume", admin, {}) == 202


def test_a_killed_daemon_comes_back_and_vllm_serves_on(machine: Machine) -> None:
    before, rounds = life_of_vllm(machine), stored_rounds(machine)
    machine.run("systemctl", "kill", "--signal=SIGKILL", "honed.service")
    played = play(machine, "a", "prompts_a.jsonl", 16)
    wait_serving(machine)
    assert machine.show("honed.service", "NRestarts")["NRestarts"] == "1"
    machine.until(lambda: stored_rounds(machine) > rounds, "the rounds of meanwhile", 60, "honed.service")
    assert engine(machine)["lost_rounds"] == 0
    assert played["tokens"] > 0
    assert life_of_vllm(machine) == before


def test_a_hung_daemon_is_killed_by_the_watchdog_and_comes_back(machine: Machine) -> None:
    before = life_of_vllm(machine)
    pid = machine.show("honed.service", "MainPID")["MainPID"]
    machine.run("kill", "-STOP", pid)
    assert play(machine, "a", "prompts_a.jsonl", 8)["tokens"] > 0

    def was_restarted() -> bool:
        return machine.show("honed.service", "NRestarts")["NRestarts"] == "2"

    machine.until(was_restarted, "the watchdog", 120, "honed.service")
    wait_serving(machine)
    assert "Watchdog timeout" in machine.journal("honed.service", 200)
    assert engine(machine)["lost_rounds"] == 0
    assert life_of_vllm(machine) == before


def test_a_killed_trainer_comes_back(machine: Machine) -> None:
    machine.run("systemctl", "kill", "--signal=SIGKILL", "honed-trainer.service")

    def is_back() -> bool:
        found = machine.show("honed-trainer.service", "NRestarts", "ActiveState")
        return found == {"NRestarts": "1", "ActiveState": "active"}

    machine.until(is_back, "the trainer", 120, "honed-trainer.service")
    machine.until(lambda: machine.honed("status")["trainer"], "the trainer at the daemon", 60, *SERVICES)


def test_neither_service_reaches_beyond_what_it_is_given(machine: Machine) -> None:
    trainer = machine.show("honed-trainer.service", "MainPID")["MainPID"]
    daemon = machine.show("honed.service", "MainPID")["MainPID"]
    namespaces = [machine.run("readlink", f"/proc/{pid}/ns/net").stdout for pid in ("1", daemon, trainer)]
    assert namespaces[0] == namespaces[1] != namespaces[2]
    for pid in (daemon, trainer):
        status = machine.run("cat", f"/proc/{pid}/status").stdout
        assert "CapEff:\t0000000000000000" in status
        assert "NoNewPrivs:\t1" in status
        assert "Seccomp:\t2" in status


def test_a_stop_is_clean_and_vllm_serves_without_honed(machine: Machine) -> None:
    before = life_of_vllm(machine)
    began_s = time.monotonic()
    machine.run("systemctl", "stop", *SERVICES)
    assert time.monotonic() - began_s < 60
    for unit in SERVICES:
        assert machine.show(unit, "ActiveState", "Result") == {"ActiveState": "inactive", "Result": "success"}
    assert machine.run("ls", "/run/honed").stdout.split() == ["engines", "lock"]
    assert play(machine, "a", "prompts_a.jsonl", 8)["tokens"] > 0
    machine.run("systemctl", "start", *SERVICES)
    wait_serving(machine)
    assert life_of_vllm(machine) == before


def test_the_page_on_upgrading_followed_to_the_letter(machine: Machine) -> None:
    before = life_of_vllm(machine)
    machine.run("/opt/honed/bin/python", "-c", OLDER)  # as an older honed would have left it
    assert "TimeoutStopSec=61" in machine.run("systemctl", "cat", "honed.service").stdout
    for line in commands("upgrade.md", "# Upgrade"):
        follow(machine, line)
        if line.startswith("systemctl restart"):
            wait_serving(machine)
    assert "TimeoutStopSec=60" in machine.run("systemctl", "cat", "honed.service").stdout
    assert play(machine, "a", "prompts_a.jsonl", 8)["tokens"] > 0
    assert life_of_vllm(machine) == before


def test_the_page_on_taking_it_away_followed_to_the_letter(machine: Machine) -> None:
    before = life_of_vllm(machine)
    machine.run("sh", "-c", "echo '# mine' >> /etc/systemd/system/honed-trainer.service")
    states = {file["path"]: file["state"] for file in machine.honed("uninstall")["files"]}
    assert states["/etc/systemd/system/honed-trainer.service"] == "changed"
    assert states["/etc/systemd/system/honed.service"] == "ours"
    assert states["/etc/honed/honed.env"] == "settings"
    for line in commands("install.md", "## Take it away"):
        follow(machine, line)
    there = machine.run("ls", "/etc/systemd/system").stdout.split()
    assert "honed-trainer.service" in there
    assert "honed.service" not in there
    assert machine.run("systemctl", "is-active", *SERVICES, check=False).stdout.split() == ["inactive", "inactive"]
    machine.run("ls", "/var/lib/honed/honed.db", "/etc/honed/honed.env")
    assert play(machine, "a", "prompts_a.jsonl", 8)["tokens"] > 0
    assert life_of_vllm(machine) == before
