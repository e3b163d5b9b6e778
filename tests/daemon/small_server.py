"""A real HTTP server on a unix socket whose answers a test chooses: for what a healthy daemon never says."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

Answer = tuple[int, Any] | None
"""Status and JSON document (or text); None closes the connection without a word."""


class Requests(list[dict[str, Any]]):
    """What was asked: method, path, headers (lower case), body."""


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True


@contextmanager
def serving(path: Path, answer: Callable[[str, str], Answer]) -> Iterator[Requests]:
    """Answer requests on `path` with what `answer(method, path)` says."""
    seen = Requests()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            document = json.loads(body) if body else None
            seen.append({"method": self.command, "path": self.path, "headers": headers, "body": document})
            said = answer(self.command, self.path)
            if said is None:
                self.close_connection = True
                return
            status, document = said
            text = document if isinstance(document, str) else json.dumps(document)
            self.send_response(status)
            is_problem = isinstance(document, dict) and {"title", "status"} <= set(document)
            self.send_header("content-type", "application/problem+json" if is_problem else "application/json")
            self.send_header("content-length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = do_PUT = do_DELETE = handle_any

        def log_message(self, *_: Any) -> None:
            pass

        def address_string(self) -> str:
            return "unix"

    server = _Server(str(path), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
