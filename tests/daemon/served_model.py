"""An OpenAI-compatible server whose answers and counters a test chooses, over real HTTP on a loopback port.

It counts as vLLM does: a request's drafts are in its counters unless honed's label asks for none.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

MAX_MODEL_LEN = 1024


@dataclass
class ServedModel:
    """What it is and what it was asked. A token is a word; every answer is as long as it may be."""

    accepted: float = 2.0
    """Drafts accepted in a round of `num_draft_tokens`."""
    num_draft_tokens: int = 4
    heeds_labels: bool = True
    """Whether honed is attached: only then a request may ask for no drafts."""
    key: str = ""
    extra_tokens: int = 0
    """Generated for somebody else beside each request."""
    url: str = ""
    on_answer: Callable[[], None] = lambda: None
    asked: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all completions."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    generated: int = 0
    rounds: int = 0

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Status and document, or text."""
        if path == "/metrics":
            return 200, self._metrics()
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "tiny"}, {"id": "adapter"}]}
        if path == "/tokenize":
            return 200, {"count": _words(body), "max_model_len": MAX_MODEL_LEN, "tokens": []}
        if path in ("/v1/completions", "/v1/chat/completions"):
            return self._complete(body)
        return 404, {"detail": "Not Found"}

    def _complete(self, body: Any) -> tuple[int, Any]:
        if "refuse" in json.dumps(body):
            return 400, {"error": {"message": "I don't like\nthis prompt", "type": "BadRequestError"}}
        tokens = int(body["max_tokens"])
        drafts = not (self.heeds_labels and body["vllm_xargs"].get("honed_max_draft_tokens") == 0)
        with self.lock:
            self.asked.append(body)
            self.on_answer()
            self.generated += tokens + self.extra_tokens
            self.rounds += round(tokens / (1 + self.accepted)) if drafts else 0
        return 200, {"choices": [{}], "usage": {"prompt_tokens": _words(body), "completion_tokens": tokens}}

    def _metrics(self) -> str:
        with self.lock:
            figures = {
                "generation_tokens": self.generated,
                "spec_decode_num_drafts": self.rounds,
                "spec_decode_num_draft_tokens": self.rounds * self.num_draft_tokens,
                "spec_decode_num_accepted_tokens": self.rounds * self.accepted,
            }
        return "".join(
            f"# HELP vllm:{name} x\n# TYPE vllm:{name} counter\n"
            f'vllm:{name}_total{{engine="0",model_name="tiny"}} {float(value)}\n'
            f'vllm:{name}_created{{engine="0",model_name="tiny"}} 1.7e9\n'
            for name, value in figures.items()
        )


def _words(body: Any) -> int:
    texts = [body["prompt"]] if "prompt" in body else [message["content"] for message in body["messages"]]
    return sum(len(text.split()) for text in texts)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 64
    allow_reuse_address = True


@contextmanager
def serving_model(**about: Any) -> Iterator[ServedModel]:
    """Serve one until the end of the `with`."""
    model = ServedModel(**about)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            if model.key and self.headers.get("authorization") != f"Bearer {model.key}":
                status, document = 401, {"error": "Unauthorized"}
            else:
                status, document = model.answer(self.command, self.path, json.loads(body) if body else None)
            text = document if isinstance(document, str) else json.dumps(document)
            self.send_response(status)
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = handle_any

        def log_message(self, *_: Any) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    model.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
