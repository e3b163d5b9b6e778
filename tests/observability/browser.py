"""Chromium without a window, driven over its debugging pipe (Chrome DevTools Protocol): no port, no driver, no library."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

Document = dict[str, Any]
TIMEOUT_S = 30.0

# Chromium reads commands from descriptor 3 and writes answers to 4.
LAUNCH = """
import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3)
os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe"]


class BrowserError(RuntimeError):
    """Chromium refused a command, ended, or didn't answer in time."""


class Browser:
    """One Chromium with one page."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="honed-chromium-", ignore_cleanup_errors=True)
        read, self._write = os.pipe()
        self._read, write = os.pipe()
        launch = [sys.executable, "-c", LAUNCH, str(read), str(write)]
        command = [*launch, program, *FLAGS, f"--user-data-dir={self._profile.name}"]
        self._log = Path(self._profile.name) / "chromium.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, pass_fds=(read, write), stdout=log, stderr=log)
        os.close(read)
        os.close(write)
        self._last_id, self._buffer = 0, b""
        self.events: list[Document] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: str = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.page(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        os.close(self._read)
        os.close(self._write)
        self._profile.cleanup()

    # --- what a test asks -----------------------------------------------------------------------------------------------

    def show(self, url: str, *, width: int, height: int, scheme: str, is_phone: bool) -> None:
        """Open a page on a screen of this size, for somebody who likes it "light" or "dark"."""
        self.resize(width=width, height=height, is_phone=is_phone)
        self.page("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.events.clear()
        self.page("Page.navigate", url=url)

    def resize(self, *, width: int, height: int, is_phone: bool) -> None:
        """Give the page another screen."""
        self.page("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, as JSON can carry it. Raises BrowserError when it throws."""
        answer = self.page("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = TIMEOUT_S) -> Any:
        """Poll until an expression gives something true. Raises BrowserError when it never does."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.value(expression)):
            if time.monotonic() > deadline:
                raise BrowserError(f"waited {timeout_s:g} s in vain for {expression}; said: {self.complaints()}")
            time.sleep(0.1)
        return found

    def complaints(self) -> list[str]:
        """What the page wrote to the console, exceptions and refusals by its policy included."""
        found = []
        for event in self.events:
            if event["method"] in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
                found.append(json.dumps(event["params"])[:500])
        return found

    def accessible(self, role: str) -> list[str]:
        """Names, as a screen reader tells them, of what has a role."""
        nodes = self.page("Accessibility.getFullAXTree")["nodes"]
        shown = [node for node in nodes if not node.get("ignored") and node.get("role", {}).get("value") == role]
        return [str(node.get("name", {}).get("value", "")) for node in shown]

    def picture(self) -> bytes:
        """The whole page, as PNG."""
        size = self.page("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.page("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        return base64.b64decode(shot["data"])

    # --- the protocol ---------------------------------------------------------------------------------------------------

    def page(self, method: str, **params: Any) -> Document:
        """A command to the page."""
        return self.call(method, session=self._session, **params)

    def call(self, method: str, session: str = "", **params: Any) -> Document:
        """A command, and its answer. Raises BrowserError."""
        self._last_id += 1
        message: Document = {"id": self._last_id, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            answer = self._receive(left)
            if answer.get("id") == self._last_id:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            if "method" in answer:
                self.events.append(answer)
        raise BrowserError(f"{method}: no answer within {TIMEOUT_S:g} s")

    def _receive(self, timeout_s: float) -> Document:
        while b"\0" not in self._buffer:
            if not select.select([self._read], [], [], timeout_s)[0]:
                return {}
            data = os.read(self._read, 1 << 20)
            if not data:
                raise BrowserError(f"Chromium ended: {self._log.read_text(errors='replace')[-1000:]}")
            self._buffer += data
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))
