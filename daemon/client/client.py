"""The client side of the admin API: one daemon, one connection, one boundary that names every failure.

The command line and the benchmarks use `AdminClient`. It reaches the daemon over the unix socket (`admin.sock`) or, on
request, over loopback TCP. Every failure on the way becomes an `AdminError`: one line says what happened, one says
what to do, and an exit code for the command line.
"""

from __future__ import annotations

import json
import os
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx2

from honed.daemon.errors import HonedError, RequestError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3
EXIT_WARNINGS = 4
"""`honed status --check` found warnings but no errors."""

FINISHED = frozenset({"succeeded", "failed", "cancelled"})
"""Final states of an operation."""

RETRY_S = 1.0
"""Pause before looking for a daemon that went away."""

Json = Any
"""Decoded JSON of an API answer."""


class AdminError(RuntimeError):
    """A request to the daemon failed; `cure` says what to do, `exit_code` is the command line's."""

    exit_code = EXIT_FAILED

    def __init__(self, message: str, *, cure: str = "") -> None:
        super().__init__(message)
        self.cure = cure


class Unreachable(AdminError, ConnectionError):
    """No answer: not running, not allowed, hung, or gone during a request."""

    exit_code = EXIT_UNREACHABLE


class AddressError(AdminError, ValueError):
    """A URL that can't be a server's."""

    exit_code = EXIT_USAGE


class Refused(AdminError, ValueError):
    """The daemon refused the request. `status` is the HTTP status, `problem` the RFC 9457 document."""

    def __init__(self, message: str, *, status: int, problem: Mapping[str, Json], cure: str = "") -> None:
        super().__init__(message, cure=cure)
        self.status = status
        self.problem = dict(problem)
        self.exit_code = EXIT_USAGE if status in (400, 405, 422) else EXIT_FAILED


def exit_code_of(error: HonedError) -> int:
    """Exit code of a command that failed without the daemon: the same as for the daemon's refusal."""
    return EXIT_USAGE if isinstance(error, RequestError) else EXIT_FAILED


class AdminClient:
    """A synchronous connection to one daemon. Use it as a context manager; it's cheap to open.

    Args:
        socket_path: the daemon's `admin.sock`.
        url: `http://127.0.0.1:port` instead of the socket.
        token: bearer token, for TCP.
        timeout_s: longest wait for an answer (not for an operation: operations are polled).

    Raises:
        AddressError: `url` can't be a server's.
    """

    def __init__(self, socket_path: Path | None = None, *, url: str = "", token: str = "", timeout_s: float = 10.0) -> None:
        if bool(url) == (socket_path is not None):
            raise ValueError("give either the daemon's socket or its URL")
        if url and (fault := fault_of_url(url)):
            raise AddressError(f"--url {url} isn't an address: {fault}", cure="Write it like http://127.0.0.1:9465.")
        self.socket_path = socket_path
        self.where = url or str(socket_path)
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        transport = None if url else httpx2.HTTPTransport(uds=str(socket_path))
        self._http = httpx2.Client(
            base_url=url or "http://localhost",
            transport=transport,
            headers=headers,
            timeout=timeout_s,
            trust_env=False,  # an http_proxy in the environment must never see the admin API
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def get(self, path: str, **query: str | int | float | None) -> Json:
        """Read something. Query arguments that are None are left out."""
        return self._send("GET", path, params={k: v for k, v in query.items() if v is not None})

    def text(self, path: str) -> str:
        """Read something that isn't JSON (`/metrics`)."""
        return self._answer("GET", path).text

    def marks(self, after: int = -1, *, is_patient: bool = False) -> Iterator[dict[str, Json]]:
        """Yield new marks (see follow.py), from now on or after a number.

        Ends when the daemon does. If `is_patient`, it waits for the next one, and misses no mark.
        """
        wait = httpx2.Timeout(self._timeout_s, read=60.0)  # it sends at least every 15 s
        is_heard = False
        while True:
            try:
                with self._http.stream("GET", "/v1/marks:follow", params={"after": after}, timeout=wait) as answer:
                    if answer.is_error:
                        answer.read()
                        raise self._refusal(answer)
                    is_heard = True
                    for line in answer.iter_lines():
                        if line.startswith("id: "):
                            after = int(line[4:])
                        elif line.startswith("data: "):
                            yield json.loads(line[6:])
            except (httpx2.TransportError, OSError) as error:
                if not (is_patient and is_heard):
                    raise self._unreachable(error) from error
            if not is_patient:
                return
            time.sleep(RETRY_S)

    def post(self, path: str, body: Mapping[str, Json] | None = None, *, if_match: int | None = None) -> Json:
        """Change something, once: the request carries a fresh idempotency key."""
        return self._mutate("POST", path, body, if_match)

    def put(self, path: str, body: Mapping[str, Json]) -> Json:
        """Set something."""
        return self._mutate("PUT", path, body, None)

    def delete(self, path: str) -> Json:
        """Remove something."""
        return self._mutate("DELETE", path, None, None)

    def follow(self, operation_id: str, *, poll_s: float = 0.5, patience_s: float = 15.0) -> Iterator[dict[str, Json]]:
        """Yield the operation's view repeatedly until it is finished (included).

        Wait for a daemon that restarts meanwhile for at most `patience_s`, then raise Unreachable.
        """
        heard_s = time.monotonic()
        while True:
            try:
                view: dict[str, Json] = self.get(f"/v1/operations/{part(operation_id)}")
            except Unreachable:
                if time.monotonic() - heard_s > patience_s:
                    raise
            else:
                heard_s = time.monotonic()
                yield view
                if view["state"] in FINISHED:
                    return
            time.sleep(poll_s)

    def _mutate(self, method: str, path: str, body: Mapping[str, Json] | None, if_match: int | None) -> Json:
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        if if_match is not None:
            headers["If-Match"] = str(if_match)
        return self._send(method, path, json=dict(body or {}) if method != "DELETE" else None, headers=headers)

    def _send(self, method: str, path: str, **arguments: Any) -> Json:
        answer = self._answer(method, path, **arguments)
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError as error:
            raise AdminError(
                f"{self.where} answered {method} {path} with something that isn't JSON",
                cure="Check that the address is honed's admin socket and not another server's.",
            ) from error

    def _answer(self, method: str, path: str, **arguments: Any) -> httpx2.Response:
        """Send, and turn every failure into one of the errors above. This is the boundary."""
        try:
            answer = self._http.request(method, path, **arguments)
        except (httpx2.TransportError, httpx2.InvalidURL, OSError) as error:
            raise self._unreachable(error) from error
        if answer.is_error:
            raise self._refusal(answer)
        return answer

    def _refusal(self, answer: httpx2.Response) -> AdminError:
        """Error for a refusal. A 404 without a problem document isn't honed's."""
        if answer.status_code == 404 and "problem+json" not in answer.headers.get("content-type", ""):
            return AdminError(
                f"{self.where} answered {answer.request.method} {answer.request.url.path} with 404, and not as honed does",
                cure="Another server is there. The admin API is on a unix socket: leave --url out, or check --socket.",
            )
        return refusal(answer)

    def _unreachable(self, error: Exception) -> Unreachable:
        if isinstance(error, httpx2.ConnectError | OSError) and self.socket_path is not None:
            return self._no_connection(self.socket_path)
        if isinstance(error, httpx2.ReadTimeout | httpx2.WriteTimeout | httpx2.PoolTimeout):
            return Unreachable(
                f"the daemon at {self.where} did not answer within {self._timeout_s:g} s",
                cure="It may be hung or its disk very slow: see `journalctl -u honed`, or raise --timeout.",
            )
        if "SSL" in str(error) and self.where.startswith("https://"):
            return Unreachable(
                f"{self.where} doesn't speak TLS as asked ({error})",
                cure="The admin API's own port has none: write http://, or go through the proxy that has the certificate.",
            )
        if isinstance(error, httpx2.RemoteProtocolError | httpx2.ReadError):
            return Unreachable(
                f"the daemon at {self.where} went away during the request",
                cure="It stopped or crashed: see `systemctl status honed` and try again.",
            )
        return Unreachable(
            f"no daemon answers at {self.where} ({error})",
            cure="Start it with `systemctl start honed` or `honed serve`, or check --url.",
        )

    def _no_connection(self, path: Path) -> Unreachable:
        """Find from the socket file why a connection failed."""
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            return Unreachable(
                f"no daemon is running: {path} does not exist",
                cure="Start it with `systemctl start honed` or `honed serve`; for another daemon set --socket.",
            )
        except PermissionError:
            pass
        except OSError as error:
            return Unreachable(f"{path} can't be reached ({error.strerror})", cure="Check --socket.")
        else:
            if not stat.S_ISSOCK(mode):
                return Unreachable(
                    f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a file'}, not a socket",
                    cure="Check --socket: the daemon's is admin.sock in its runtime directory.",
                )
        if not os.access(path, os.W_OK):
            return Unreachable(
                f"permission denied on {path}",
                cure="Join its group (`usermod -aG honed $USER`, then log in again) or use sudo.",
            )
        return Unreachable(
            f"no daemon is listening on {path}: a stopped daemon left the file",
            cure="It crashed or was killed: `systemctl restart honed` or `honed serve`.",
        )


def fault_of_url(url: str) -> str:
    """Why a URL can't be a server's; "" if it can."""
    if not url.startswith(("http://", "https://")):
        return "it doesn't begin with http:// or https://"
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        return str(error)
    try:
        is_name = bool(parsed.host.encode("idna"))
    except UnicodeError:
        is_name = False
    if not is_name:
        return f"it has no valid host ({parsed.host!r})"
    return "" if 0 < (parsed.port or 80) <= 65535 else f"it has port {parsed.port}; a port is from 1 to 65535"


def part(text: str) -> str:
    """A name quoted as one path segment, so that `../` or `?` in it has no effect."""
    return quote(text, safe="")


def refusal(answer: httpx2.Response) -> Refused:
    """The error for an answer ≥ 400, from its problem document if it has one."""
    try:
        problem = answer.json()
    except ValueError:
        problem = {}
    if not isinstance(problem, dict):
        problem = {}
    title = str(problem.get("title") or answer.reason_phrase or "error")
    detail = problem.get("detail")
    detail = detail if isinstance(detail, str) else ""
    message = f"{title}: {detail}" if detail and detail != title else title
    cure = problem.get("cure")
    cures = {
        404: "List what exists with `honed drafters`, `honed operations` or `honed engines`.",
        409: "See what is running with `honed operations`.",
        412: "Something changed meanwhile: check `honed drafters`, then repeat.",
        500: "See `journalctl -u honed` for the cause.",
    }
    cure = cure if cure and isinstance(cure, str) else cures.get(answer.status_code, "")
    return Refused(message, status=answer.status_code, problem=problem, cure=cure)
