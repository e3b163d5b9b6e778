"""The status page, for people without Grafana: `GET /`, and its figures at `GET /page.json`.

It is one HTML document with inline style and script and nothing external. The Content-Security-Policy lists the hashes of
both, so no other code runs, whatever a workload's or a model's name contains. The script writes text, never markup.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Literal

from fastapi import FastAPI, Response

from honed.daemon.page.document import PageDocuments
from honed.daemon.service import Service

FOLDER = files("honed") / "daemon" / "page"
SCRIPTS = ("charts.js", "cells.js", "parts.js", "page.js")
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}


@cache
def page() -> tuple[str, str]:
    """The document and its Content-Security-Policy."""
    style = (FOLDER / "page.css").read_text()
    script = "".join((FOLDER / name).read_text() for name in SCRIPTS)
    html = (FOLDER / "page.html").read_text()
    for mark, text in (("/*style*/", style), ("/*script*/", script)):
        assert html.count(mark) == 1, mark
        html = html.replace(mark, text)
    policy = (
        f"default-src 'none'; style-src '{sha256(style)}'; script-src '{sha256(script)}'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


def sha256(text: str) -> str:
    """Hash of an inline text for a Content-Security-Policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def add_page(app: FastAPI, service: Service) -> None:
    """Add the page and its figures to the read-only listener."""
    documents = PageDocuments(service)
    html, policy = page()

    @app.get("/", include_in_schema=False)
    def show() -> Response:
        headers = HEADERS | {"Content-Security-Policy": policy}
        return Response(html, media_type="text/html; charset=utf-8", headers=headers)

    @app.get("/page.json", include_in_schema=False)
    def figures(window: Literal["5min", "1h", "7d"] = "1h") -> Response:
        return Response(documents.get(window), media_type="application/json", headers=HEADERS)
