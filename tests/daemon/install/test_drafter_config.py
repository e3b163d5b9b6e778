"""A drafter's config.json comes from its folder, the hub's cache or the hub. Without one, its name tells the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.install.drafter_config import draft_tokens_of, method_of, read

FILES = {
    "/z-lab/Qwen3-8B-DFlash/resolve/main/config.json": {"architectures": ["DFlashDraftModel"], "block_size": 10},
    "/org/head/resolve/main/config.json": {"architectures": ["LlamaForCausalLMEagle3"]},
}


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does: 401 for what isn't public, whether or not it exists."""

    def do_GET(self) -> None:
        """One file; the gated one by a redirection, as the hub sends small files."""
        if self.path.startswith("/org/gated/") and self.headers["Authorization"] == "Bearer hf_right":
            self.send_response(307)
            self.send_header("Location", "/org/head/resolve/main/config.json")
            self.end_headers()
            return
        found = FILES.get(self.path)
        self.send_response(200 if found else 404 if self.path.startswith("/org/empty/") else 401)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent."""


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def vllm_args(drafter: str, home: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "honed.daemon.commands.main", "vllm-args", "--format", "json", "--drafter", drafter]
    variables = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **environment}
    return subprocess.run([*command, *options], env=variables, capture_output=True, text=True, timeout=60, check=False)


def speculative(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    flags = json.loads(done.stdout)["flags"]
    return dict(json.loads(flags[flags.index("--speculative-config") + 1]))


@pytest.mark.parametrize(("name", "method", "k"), [("z-lab/Qwen3-8B-DFlash", "dflash", 9), ("org/head", "eagle3", 5)])
def test_a_name_on_the_hub_is_looked_up(hub: str, tmp_path: Path, name: str, method: str, k: int) -> None:
    found = speculative(vllm_args(name, tmp_path, HF_ENDPOINT=hub))
    assert found == {"method": method, "model": name, "num_speculative_tokens": k}


def test_a_token_opens_what_is_gated(hub: str, tmp_path: Path) -> None:
    found = speculative(vllm_args("org/gated", tmp_path, HF_ENDPOINT=hub, HF_TOKEN="hf_right"))
    assert found["method"] == "eagle3"
    assert "wants a token" in vllm_args("org/gated", tmp_path, HF_ENDPOINT=hub, HF_TOKEN="hf_wrong").stderr


def test_what_the_cache_has_is_not_looked_up(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--org--drafter"
    snapshot = repository / "snapshots" / "0123abcd"
    for folder in (snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    (snapshot / "config.json").write_text(json.dumps({"block_size": 16}))
    assert speculative(vllm_args("org/drafter", tmp_path, HF_HUB_OFFLINE="1"))["num_speculative_tokens"] == 15


@pytest.mark.parametrize(
    ("name", "environment", "says"),
    [
        ("org/other", {}, "has no such name, or wants a token in HF_TOKEN"),
        ("org/empty", {}, "has no such file"),
        ("org/other", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set"),
        ("org/other", {"HF_ENDPOINT": "http://127.0.0.1:9"}, "can't be reached"),
    ],
)
def test_why_a_name_cannot_be_looked_up_is_said(
    hub: str, tmp_path: Path, name: str, environment: dict[str, str], says: str
) -> None:
    done = vllm_args(name, tmp_path, **{"HF_ENDPOINT": hub, **environment})
    assert done.returncode == 2
    assert says in done.stderr
    assert "--draft-tokens" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_tells_the_block_size_and_the_method_where_nothing_else_does(tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1"}
    found = speculative(vllm_args("z-lab/Qwen3-8B-DFlash-b16", tmp_path, **offline))
    assert (found["method"], found["num_speculative_tokens"]) == ("dflash", 15)
    found = speculative(vllm_args("deepseek-ai/dspark_qwen3_8b_block7", tmp_path, **offline))
    assert (found["method"], found["num_speculative_tokens"]) == ("dspark", 7)
    found = speculative(vllm_args("org/Qwen3-8B_eagle3", tmp_path, "--draft-tokens", "4", **offline))
    assert (found["method"], found["num_speculative_tokens"]) == ("eagle3", 4)


@pytest.mark.parametrize(
    ("raw", "method", "k"),
    [
        ({"block_size": 16}, "dflash", 15),
        ({"dflash_config": {"block_size": 8}, "architectures": ["DFlash2DraftModel"]}, "dflash", 7),
        (
            {"speculators_model_type": "dflash", "speculators_config": {"proposal_methods": [{"speculative_tokens": 7}]}},
            "dflash",
            7,
        ),
        ({"block_size": "8"}, "dflash", 0),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7}, "dspark", 7),
        ({"architectures": ["Qwen3DSparkModel"], "block_size": 7, "sample_from_anchor": False}, "dspark", 6),
        ({"speculators_model_type": "dspark", "block_size": 8}, "dspark", 7),
        ({"speculators_model_type": "dspark", "block_size": 8, "sample_from_anchor": True}, "dspark", 8),
    ],
)
def test_the_block_size_is_where_the_formats_have_it(raw: dict[str, Any], method: str, k: int) -> None:
    assert (method_of("org/name", raw), draft_tokens_of("org/name", raw)) == (method, k)


def test_a_config_that_is_a_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no JSON object"):
        read(str(tmp_path))
