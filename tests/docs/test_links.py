"""Links of the site and of a package's README lead to the source repository."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.make.links import absolute
from tests.tools import ROOT

SOURCE = "https://github.com/honed-project/honed"


def test_links_to_the_checkout_become_absolute() -> None:
    text = "[a](docs/upgrade.md#versions), [b](dashboards), [c](https://example.org/x), [d](#here)"
    assert absolute(text, ROOT / "README.md", ROOT) == (
        f"[a]({SOURCE}/blob/main/docs/upgrade.md#versions), [b]({SOURCE}/tree/main/dashboards), "
        "[c](https://example.org/x), [d](#here)"
    )


def test_pages_of_the_site_stay_linked_as_they_are() -> None:
    text = "[a](operate.md#look), [b](../CHANGELOG.md)"
    page = ROOT / "docs" / "index.md"
    assert absolute(text, page, ROOT, kept=ROOT / "docs") == f"[a](operate.md#look), [b]({SOURCE}/blob/main/CHANGELOG.md)"


def test_a_link_that_leads_nowhere_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"README.md: docs/nothing.md"):
        absolute("[a](docs/nothing.md)", ROOT / "README.md", ROOT)


def test_every_link_of_the_readme_works_on_a_package_index() -> None:
    path = Path(ROOT / "README.md")
    assert "](docs/" in path.read_text()
    assert "](docs/" not in absolute(path.read_text(), path, ROOT)
