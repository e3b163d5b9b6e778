"""The status page in a real browser, under live traffic: what it shows is what the API says, at any width, light and dark.

The pictures of the documentation are made here: HONED_PICTURES names the folder that they go to.
"""

from __future__ import annotations

import io
import os
import re
import signal
import time
from collections.abc import Iterator
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.observability.browser import Browser
from tests.observability.stack import Stack
from tests.tools import path_of

SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
SHOWN = "document.body?.dataset.shown"
FIGURE = "[...document.querySelectorAll('[data-figure=\"{}\"]')].map((node) => node.firstChild.textContent)"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser(path_of("chromium")) as opened:
        yield opened


def open_page(browser: Browser, stack: Stack, width: int, scheme: str, window: str = "5min") -> None:
    browser.show(stack.page_url, width=width, height=900, scheme=scheme, is_phone=width < 600)
    browser.wait_for(SHOWN)
    browser.value(f"document.querySelector('[data-window=\"{window}\"]').click()")
    browser.wait_for(f"view.found && view.found.window === '{window}'")
    browser.wait_for("document.querySelectorAll('#length polyline').length > 0")


def figure(browser: Browser, name: str) -> str:
    found: list[str] = browser.value(FIGURE.format(name))
    assert len(found) == 1, (name, found)
    return found[0]


def number(text: str) -> float:
    match = re.match(r"-?[\d,]+(\.\d+)?", text)
    assert match, text
    return float(match[0].replace(",", ""))


def fixed(value: float, digits: int) -> str:
    """Round as JavaScript's toFixed does: a half goes up, and not to the even number."""
    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP))


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_it_renders_at_every_width_light_and_dark(browser: Browser, stack: Stack, width: int, scheme: str) -> None:
    open_page(browser, stack, width, scheme)
    assert browser.value("document.documentElement.scrollWidth") <= width, "nothing sticks out"
    background = browser.value("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
    assert browser.value("document.querySelectorAll('#positions rect').length") > 20
    assert browser.value("document.querySelectorAll('#lengths polyline').length") >= 2
    assert browser.value("document.querySelectorAll('#plan circle').length") > 2
    assert browser.value("document.querySelectorAll('#versions tbody tr').length") >= 2
    assert "docs +50.0 % (+40.0 … +60.0)" in browser.value("document.getElementById('versions').textContent")
    assert browser.complaints() == []
    save_picture(browser, f"status-{width}-{scheme}.png")


def test_what_it_shows_under_traffic_lies_between_two_answers_of_the_api(browser: Browser, stack: Stack) -> None:
    open_page(browser, stack, 1280, "light")
    before = stack.client.get("/v1/status")
    browser.value("(async () => { view.found = null; await new Promise((r) => setTimeout(r, 2100)); await refresh(); })()")
    after_shown = browser.wait_for("view.found && view.found.t")
    after = stack.client.get("/v1/status")
    shown = number(figure(browser, "total_rounds"))
    assert before["acceptance"]["total"]["rounds"] <= shown <= after["acceptance"]["total"]["rounds"]
    assert before["acceptance"]["total"]["rounds"] < after["acceptance"]["total"]["rounds"], "there is traffic"
    assert after_shown


def test_without_traffic_every_figure_is_the_apis(browser: Browser, stack: Stack) -> None:
    with stack.traffic.paused():
        stack.settle()
        open_page(browser, stack, 1280, "light")
        browser.value("(async () => { await new Promise((r) => setTimeout(r, 2100)); await refresh(); })()")
        status, workloads = stack.client.get("/v1/status"), stack.client.get("/v1/workloads", window_s=300)
        check_figures(browser, status)
        check_workloads(browser, workloads)


def check_figures(browser: Browser, status: dict[str, Any]) -> None:
    events, total = status["events"], status["acceptance"]["total"]
    assert number(figure(browser, "total_rounds")) == total["rounds"]
    assert number(figure(browser, "lost_rounds")) == number(figure(browser, "events_lost")) == events["lost_rounds"]
    assert number(figure(browser, "received_rounds")) == events["received_rounds"]
    assert number(figure(browser, "rejected_frames")) == events["rejected_frames"]
    assert number(figure(browser, "duplicate_batches")) == events["duplicate_batches"]
    assert figure(browser, "active") == status["drafters"]["active"]
    assert figure(browser, "engines") == "1 of 1"
    trainer = status["trainer"]
    assert figure(browser, "trainer_state") == trainer["state"]
    assert number(figure(browser, "samples")) == trainer["samples"]
    assert number(figure(browser, "steps")) == trainer["steps"]
    # These two are of the last minute, which goes on: what the page holds has to be what it shows.
    recent = browser.value("view.found.status.acceptance.last_minute")
    if recent["rounds"]:
        assert figure(browser, "acceptance_length") == fixed(recent["acceptance_length"], 2)
        assert figure(browser, "acceptance_rate") == f"{fixed(100 * recent['acceptance_rate'], 1)} %"


def check_workloads(browser: Browser, workloads: list[dict[str, Any]]) -> None:
    cells = "[...document.querySelectorAll('#workloads tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    rows: list[list[str]] = browser.value(cells)
    shown = {(row[0], row[1], row[2]): row for row in rows}
    assert len(shown) == len(rows) > 0
    # The window moves on: rows of its far end may have gone meanwhile, or lost rounds.
    for one in workloads:
        row = shown[one["workload"], one["engine_id"], one["drafter_version"] or "–"]
        assert number(row[3]) >= one["rounds"] > 0
        if number(row[3]) == one["rounds"]:
            assert row[4] == fixed(one["acceptance_length"], 2)
            assert row[8].split() == [fixed(100 * share, 0) for share in one["by_position"]]


def test_a_screen_reader_hears_every_plot(browser: Browser, stack: Stack) -> None:
    open_page(browser, stack, 1280, "light")
    plots = browser.accessible("image")
    assert len(plots) >= 5
    assert all(len(name) > 20 for name in plots), plots
    assert any(re.search(r"Acceptance length over time; latest: a \d\.\d\d", name) for name in plots), plots
    assert all(browser.accessible("button"))
    assert len(browser.accessible("heading")) >= 11
    browser.value("for (const more of document.querySelectorAll('details')) more.open = true")
    browser.wait_for("document.querySelectorAll('details table tbody tr').length > 20")


def test_a_hostile_name_stays_a_name(browser: Browser, stack: Stack) -> None:
    open_page(browser, stack, 1280, "light")
    name = "<img src=x onerror=document.title='taken'><script>document.title='taken'</script>"
    browser.value(f"view.found.workloads[0].workload = {name!r}; view.found.acceptance[0].workload = {name!r}; show()")
    assert browser.value("document.title") == "honed"
    assert browser.value("document.querySelectorAll('main img, main script').length") == 0
    assert name in browser.value("document.querySelector('#workloads').textContent")


NARROW = """
(() => {
  const found = [], probe = document.createElement("canvas").getContext("2d");
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, text = node.textContent.trim(), host = node.parentElement;
    if (!text || !host.getClientRects().length) continue;
    if (host.closest("script, noscript, .quiet, .skip, svg, option, .scroll")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const lines = new Set([...range.getClientRects()].map((rect) => Math.round(rect.top)));
    probe.font = getComputedStyle(host).font;
    const block = host.closest("p, li, dd, dt, div, section");
    if (lines.size > 1 && block.getBoundingClientRect().width < probe.measureText("0".repeat(12)).width) found.push(text);
    if (host.scrollWidth > host.clientWidth + 1 && host.clientWidth) found.push(`clipped: ${text}`);
  }
  return found;
})()
"""
"""Texts that wrap in less than twelve characters' width, or are cut off."""


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_no_text_is_cut_off_or_squeezed(browser: Browser, stack: Stack, width: int, scheme: str) -> None:
    open_page(browser, stack, width, scheme)
    assert browser.value(NARROW) == []
    browser.value(
        "view.found.findings = [{level: 'error', text: 'the database failed 12,345 times: check the disk'},"
        "{level: 'warning', text: 'engine engine-0 is in fallback stale_policy: `honed status` names the reason'}]; show()"
    )
    assert browser.value(NARROW) == []
    assert "All is well" not in browser.value("document.getElementById('findings').textContent")
    save_picture(browser, f"status-sick-{width}-{scheme}.png")


@pytest.mark.parametrize("width", [1280, 390])
def test_a_daemon_that_ends_is_told_of_at_once_and_prometheus_names_its_host_alone(
    browser: Browser, stack: Stack, width: int
) -> None:
    there = stack.instances[1]
    if width == 1280:
        browser.show(f"http://{there}/", width=width, height=900, scheme="light", is_phone=False)
        browser.wait_for(SHOWN)
        assert not browser.value("document.body.classList.contains('gone')")
        os.kill(stack.neighbour.pid, signal.SIGTERM)
        began_s = time.monotonic()
        browser.wait_for("!document.getElementById('gone').hidden")
        assert time.monotonic() - began_s < 5.0
    else:
        browser.resize(width=width, height=900, is_phone=True)
    banner = browser.value("document.getElementById('gone').innerText")
    assert re.search(r"doesn't answer: nothing listens there. The figures below are of \d\d:\d\d:\d\d", banner), banner
    assert "vLLM goes on serving" in banner
    assert browser.value("document.getElementById('about').textContent").endswith("no answer"), "no ok beside an error"
    assert browser.value("document.title") == "✗ honed: no answer"
    assert float(browser.value("getComputedStyle(document.querySelector('main')).opacity")) < 0.6
    assert browser.value("getComputedStyle(document.getElementById('findings')).display") == "none", "no OK beside an error"
    assert browser.value("document.getElementById('gone').getBoundingClientRect().top") >= 0
    assert browser.value(NARROW) == []
    save_picture(browser, f"status-gone-{width}-light.png")

    def down() -> list[str]:
        return [one["labels"]["instance"] for one in stack.alertmanager.alerts() if one["labels"]["alertname"] == "HonedDown"]

    assert stack.wait_for(down, "the alert") == [there]


def save_picture(browser: Browser, name: str) -> None:
    folder = os.environ.get("HONED_PICTURES")
    if not folder:
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    picture = Image.open(io.BytesIO(browser.picture())).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    picture.save(Path(folder) / name, optimize=True)
