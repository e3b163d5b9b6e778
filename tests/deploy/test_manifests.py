"""What deploy/ says agrees with the rest of the checkout, and with the published schemas where these can be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from honed.daemon.doctor.disk import FREE_BYTES, growth
from honed.daemon.install.vllm_args import SCHEDULER, WORKER_EXTENSION
from honed.daemon.settings.settings import Settings, load
from honed.dashboards.make import prometheus_rule
from tests.build_wheel import ROOT

DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
SCHEMAS = "@kubernetes-models/prometheus-operator@6"
CHECK = """
import { readFileSync } from "fs";
import * as kinds from "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1";
const found = JSON.parse(readFileSync(0));
new kinds[found.kind](found).validate();
"""


def objects() -> list[Any]:
    """Every object of the manifests, the kustomization aside."""
    found = [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text())]
    assert len(found) > 5
    return [one for one in found if one["kind"] != "Kustomization"]


def pod() -> dict[str, Any]:
    (found,) = (one for one in objects() if one["kind"] == "StatefulSet")
    spec: dict[str, Any] = found["spec"]["template"]["spec"]
    return spec


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    return found


def test_the_operators_rules_are_the_shipped_ones() -> None:
    made = (DEPLOY / "kubernetes" / "prometheusrule.yaml").read_text()
    assert made == prometheus_rule.render(ROOT), "out of date: `make dashboards`"


def test_kustomize_finds_every_manifest() -> None:
    listed = yaml.safe_load((DEPLOY / "kubernetes" / "kustomization.yaml").read_text())
    assert sorted(listed["resources"]) == [path.name for path in MANIFESTS if path.name != "kustomization.yaml"]
    assert {image["newTag"] for image in listed["images"]} == {VERSION}
    assert {image["name"] for image in listed["images"]} == {part["image"] for part in pod()["containers"]}


def test_no_service_of_the_namespace_sets_vllms_or_honeds_variables() -> None:
    """A service named vllm would set VLLM_PORT to a URL, and vLLM wouldn't start."""
    assert pod()["enableServiceLinks"] is False


def test_the_daemons_image_has_what_a_shared_registry_needs() -> None:
    """Without fsspec the daemon refuses `registry.url`, and so never starts."""
    stages = (DEPLOY / "Dockerfile").read_text().split("\nFROM ")
    (daemon,) = (stage for stage in stages if stage.partition("\n")[0].endswith(" AS honed"))
    assert '/opt/honed/bin/pip install --no-cache-dir "$(echo /wheels/*.whl)[s3]"' in daemon
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(requirement.startswith("s3fs") for requirement in extras["s3"]), "it brings fsspec"


def test_images_are_of_this_version() -> None:
    for name in ("honed", "trainer", "vllm"):
        assert services()[name]["image"].endswith(f":{VERSION}}}")


def test_vllm_is_told_of_honed_as_vllm_args_tells_it() -> None:
    (container,) = (one for one in pod()["containers"] if one["name"] == "vllm")
    for flags in (services()["vllm"]["command"], container["args"]):
        assert f"--scheduler-cls={SCHEDULER}" in flags
        assert f"--worker-extension-cls={WORKER_EXTENSION}" in flags


@pytest.mark.parametrize("where", ["compose", "kubernetes"])
def test_every_setting_exists(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("HONED_")]:
        monkeypatch.delenv(name)
    if where == "compose":
        given = services()["honed"]["environment"]
        (tmp_path / "web.yml").write_text("{}")
        given["HONED_HTTP__METRICS_WEB_CONFIG"] = str(tmp_path / "web.yml")
    else:
        (container,) = (one for one in pod()["containers"] if one["name"] == "honed")
        given = {one["name"]: one["value"] for one in container["env"]}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert Settings().http.metrics_listen == "0.0.0.0:9464"


@pytest.mark.parametrize(("name", "volume"), [("HONED_RUNTIME_DIR", "runtime"), ("HONED_STATE_DIR", "state")])
def test_no_folder_of_honeds_is_a_volumes_own_which_is_open_to_all(name: str, volume: str) -> None:
    """With fsGroup these have mode 2777 and 2775, and only root may change that."""
    parts = [one for one in pod()["containers"] if name == "HONED_RUNTIME_DIR" or one["name"] != "vllm"]
    folders = {one["value"] for part in parts for one in part["env"] if one["name"] == name}
    mounts = {one["mountPath"] for part in pod()["containers"] for one in part["volumeMounts"] if one["name"] == volume}
    (folder,), (mount,) = folders, mounts
    assert all(name in {one["name"] for one in part["env"]} for part in parts)
    assert Path(folder).parent == Path(mount)


def test_a_claim_holds_what_the_default_settings_may_write(tmp_path: Path) -> None:
    (stateful,) = (one for one in objects() if one["kind"] == "StatefulSet")
    (claim,) = (one for one in stateful["spec"]["volumeClaimTemplates"] if one["metadata"]["name"] == "state")
    gib = float(claim["spec"]["resources"]["requests"]["storage"].removesuffix("Gi"))
    wanted = growth(load(flags={"paths": {"state_dir": tmp_path}}, env={}), None, has_trainer=True)
    assert gib * 2**30 * 0.9 > wanted.total_bytes + FREE_BYTES, "a file system takes some of it"


def test_no_part_of_honeds_can_take_vllm_out_of_service() -> None:
    assert "initContainers" not in pod()
    for part in pod()["containers"]:
        assert ("readinessProbe" in part) == (part["name"] == "vllm"), part["name"]
    assert "depends_on" not in services()["vllm"]


def test_every_container_is_confined() -> None:
    assert pod()["securityContext"]["runAsNonRoot"]
    for part in pod()["containers"]:
        assert part["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_samples_stay_in_memory() -> None:
    (runtime,) = (one for one in pod()["volumes"] if one["name"] == "runtime")
    assert runtime["emptyDir"]["medium"] == "Memory"
    run = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["volumes"]["run"]
    assert run["driver_opts"]["type"] == "tmpfs"


COMPILED = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
"""Folders of libraries that are made and loaded while the trainer runs."""


def test_compiled_kernels_may_be_loaded_from_where_they_are_put() -> None:
    """Docker and podman mount a tmpfs noexec, Kubernetes none of its volumes: there the first kernel would fail."""
    compiling = [one for one in services().values() if COMPILED[0] in one.get("environment", {})]
    assert compiling
    for one in compiling:
        mounts = {path: options.split(",") for path, _, options in (mount.partition(":") for mount in one["tmpfs"])}
        for folder in (one["environment"][name] for name in COMPILED):
            assert "exec" in mounts[str(Path(folder).parent)], folder
    volumes = {one["name"]: one for one in pod()["volumes"]}
    (trainer,) = (part for part in pod()["containers"] if COMPILED[0] in {one["name"] for one in part["env"]})
    mounted = {one["mountPath"]: one["name"] for one in trainer["volumeMounts"]}
    for folder in (one["value"] for one in trainer["env"] if one["name"] in COMPILED):
        assert "emptyDir" in volumes[mounted[str(Path(folder).parent)]], folder


@pytest.mark.skipif(os.environ.get("HONED_TEST_CONTAINER") != "1", reason="`make test-container` installs the schemas")
@pytest.mark.parametrize("version", ["1.29", "1.34"])
def test_kubernetes_objects_are_valid(version: str) -> None:
    import kubernetes_validate  # type: ignore[import-not-found, unused-ignore]

    for one in objects():
        if not one["apiVersion"].startswith("monitoring."):
            kubernetes_validate.validate(one, version, strict=True)


@pytest.mark.skipif(os.environ.get("HONED_TEST_CONTAINER") != "1", reason="`make test-container` fetches the schemas")
def test_the_operators_objects_are_valid(tmp_path: Path) -> None:
    assert shutil.which("npm") is not None, "npm is not installed, which brings the schemas"
    subprocess.run(["npm", "install", "--silent", "--prefix", str(tmp_path), SCHEMAS], check=True, timeout=300)
    found = [one for one in objects() if one["apiVersion"].startswith("monitoring.")]
    assert sorted(one["kind"] for one in found) == ["PodMonitor", "PrometheusRule"]

    def check(one: Any) -> subprocess.CompletedProcess[str]:
        command = ["node", "--input-type=module", "--eval", CHECK]
        return subprocess.run(command, input=json.dumps(one), cwd=tmp_path, capture_output=True, text=True, check=False)

    for one in found:
        done = check(one)
        assert done.returncode == 0, done.stderr
        assert check(one | {"spec": {"groups": 7, "selector": 7}}).returncode != 0
