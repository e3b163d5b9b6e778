"""What is written down of settings, endpoints and commands is what the code has; `make reference` writes it anew."""

from __future__ import annotations

import json
import re

import pytest

from docs.make import alerts_page, models_page, reference
from docs.make.published import PUBLISHED
from honed.adapt.protocol.attach_variables import VARIABLES
from honed.attach.engine import environment
from honed.daemon.settings import variables
from honed.daemon.settings.settings import Settings
from tests.dashboards.contents import ALERTS, METRIC, all_queries, rules
from tests.tools import ROOT

ANEW = "run `make reference` and look at the difference"


@pytest.fixture(scope="module")
def page() -> str:
    return reference.markdown()


def test_the_openapi_document_that_is_checked_in_is_what_the_daemon_answers() -> None:
    assert (ROOT / reference.OPENAPI).read_text() == reference.openapi_text(), ANEW


def test_the_reference_is_what_the_code_has(page: str) -> None:
    assert (ROOT / reference.MARKDOWN).read_text() == page, ANEW


def test_the_page_of_published_drafters_is_what_the_rules_say() -> None:
    assert (ROOT / models_page.PAGE).read_text() == models_page.text(), ANEW
    assert sum(not one.reasons() for one in PUBLISHED) >= 45


def test_the_page_of_alerts_is_what_the_rules_have_and_each_alert_links_to_its_part() -> None:
    page = (ROOT / alerts_page.PAGE).read_text()
    assert page == alerts_page.text(ROOT), ANEW
    for rule in rules(ALERTS):
        url = rule["annotations"]["runbook_url"]
        assert url.endswith(f"{alerts_page.PAGE}#{rule['alert'].lower()}")
        assert f"\n## {rule['alert']}\n" in page


def test_every_setting_is_in_it_and_says_what_it_means(page: str) -> None:
    for key in variables.keys_of(Settings):
        section, _, name = key.rpartition(".")
        part = page.split(f"### [{section}]")[1].split("\n##")[0]
        row = next((line for line in part.splitlines() if line.startswith(f"| `{name}` |")), "")
        assert row, key
        assert row.rsplit("|", 2)[1].strip(), f"{key} has no docstring"


def test_every_endpoint_says_what_it_does(page: str) -> None:
    document = json.loads((ROOT / reference.OPENAPI).read_text())
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            assert operation.get("description"), f"{method} {path} has no docstring"
            assert f"`{method.upper()} {path}`" in page


def test_every_metric_that_dashboards_and_rules_name_is_in_it(page: str) -> None:
    families = set(re.findall(r"^\| `(honed_\w+|process_\w+)` \|", page, re.M))
    for query in all_queries():
        for name, _ in METRIC.findall(query.expr):
            known = {name, re.sub(r"_(total|info|bucket|sum|count)$", "", name)}
            assert known & families, f"{query.where}: {name}"


def test_variables_of_vllms_processes_are_the_attachments_own() -> None:
    assert set(reference.OF_VLLM) == set(VARIABLES)
    defaults = environment.from_environment({"HONED_RUNTIME_DIR": "/run/honed"})
    assert defaults is not None
    assert str(defaults.ring_bytes) in reference.OF_VLLM["HONED_RING_BYTES"]
    assert str(defaults.queue_bytes) in reference.OF_VLLM["HONED_QUEUE_BYTES"]


def test_links_in_the_docs_lead_somewhere() -> None:
    for file in [*ROOT.glob("*.md"), ROOT / "benchmarks" / "tiny" / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", file.read_text()):
            if "://" not in target:
                assert (file.parent / target).exists(), f"{file.name}: {target}"
