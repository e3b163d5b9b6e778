"""Played prompts come back in order and complete, or as an error that says what went wrong."""

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server.client_load import Played, Prompt, Reply, differing, play, read_prompts
from benchmarks.server.processes import free_port


class Server:
    """Streams the prompt's character codes as token ids; some prompts go wrong on purpose."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.all_here = threading.Barrier(3)

    def answer(self, handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        with self.lock:
            self.bodies.append(body)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        prompt = body["prompt"]
        if prompt.startswith("together"):
            self.all_here.wait(20)
        if prompt == "refused":
            handler.send_error(400, "bad prompt")
        else:
            handler.send_response(200)
            handler.end_headers()
            for character in prompt[: body["max_tokens"]]:
                self.chunk(handler, {"choices": [{"token_ids": [ord(character)], "finish_reason": None}]})
            if prompt == "error":
                self.chunk(handler, {"error": {"message": "engine died"}})
            elif prompt != "cut":
                self.chunk(handler, {"choices": [{"token_ids": [], "finish_reason": "length"}]})
                handler.wfile.write(b"data: [DONE]\n\n")
        with self.lock:
            self.at_once -= 1

    @staticmethod
    def chunk(handler: BaseHTTPRequestHandler, document: dict[str, Any]) -> None:
        handler.wfile.write(f"data: {json.dumps(document)}\n\n".encode())


@pytest.fixture
def server() -> Iterator[tuple[str, Server]]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.answer(self, json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def log_message(self, *_: Any) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}", state
    http.shutdown()
    http.server_close()
    thread.join()


def played(url: str, texts: list[str], **options: Any) -> Played:
    prompts = [Prompt(f"s{i}", text) for i, text in enumerate(texts)]
    return asyncio.run(play(url, prompts, **{"concurrency": 4, "max_tokens": 9, **options}))


def test_replies_come_in_the_prompts_order(server: tuple[str, Server]) -> None:
    found = played(server[0], ["abc", "de", "f"])
    assert [reply.token_ids for reply in found.replies] == [[97, 98, 99], [100, 101], [102]]
    assert (found.num_failed, found.num_tokens) == (0, 6)
    assert found.tokens_per_s > 0


@pytest.mark.parametrize(("text", "error"), [("refused", "HTTP 400"), ("error", "engine died"), ("cut", "finish_reason")])
def test_each_failure_is_a_reply_that_says_what(server: tuple[str, Server], text: str, error: str) -> None:
    found = played(server[0], ["abc", text])
    assert found.num_failed == 1
    assert error in found.replies[1].error


def test_a_server_that_is_gone_fails_each_request() -> None:
    assert played(f"http://127.0.0.1:{free_port()}", ["a", "b"]).num_failed == 2


def test_as_many_at_once_as_asked(server: tuple[str, Server]) -> None:
    played(server[0], ["together"] * 3, concurrency=3)  # the barrier would break if they came one by one
    assert server[1].most_at_once == 3
    server[1].most_at_once = 0
    played(server[0], ["abc"] * 5, concurrency=1)
    assert server[1].most_at_once == 1


def test_labels_travel_in_vllms_own_field(server: tuple[str, Server]) -> None:
    played(server[0], ["a"], workload="b", capture=False)
    played(server[0], ["a"], workload="b")
    played(server[0], ["a"])
    xargs = [body.get("vllm_xargs") for body in server[1].bodies]
    assert xargs == [
        {"honed_workload": "b", "honed_session": "s0", "honed_capture": 0},
        {"honed_workload": "b", "honed_session": "s0"},
        None,
    ]
    assert all(body["temperature"] == 0.0 and body["return_token_ids"] for body in server[1].bodies)


def test_differences_are_named_by_index() -> None:
    one = [Reply([1, 2]), Reply([3]), Reply([])]
    assert differing(one, [Reply([1, 2]), Reply([4]), Reply([])]) == [1]
    with pytest.raises(ValueError, match="shorter"):
        differing(one, one[:2])


def test_prompts_are_read_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"session": "x", "prompt": "p"}\n\n{"session": 2, "prompt": "q"}\n')
    assert read_prompts(path) == [Prompt("x", "p"), Prompt("2", "q")]
    assert read_prompts(path, 1) == [Prompt("x", "p")]
