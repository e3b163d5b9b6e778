"""Writes docs/models.md: which published drafters are trained, and why others aren't, by the rules that the engine asks.

`python -m docs.make.models_page ROOT` writes the page of a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.make.published import PUBLISHED

PAGE = "docs/models.md"
HEAD = """# Published drafters

`make reference` writes this page. `docs/make/published.py` has what is known of each drafter, `adapt/models/trainable.py` the
rules. An engine asks the same rules when it starts, with what vLLM has loaded. `honed engines` and `honed doctor` give its
answer.

*Yes* means: honed captures samples, trains the drafter and swaps it. Draft lengths are tuned for all of them.
No published drafter's own weights were trained here. Pairs of most of their kinds were, at toy size: `make test-zoo`.
The table has DFlash drafters. EAGLE-3 drafters and MTP heads aren't listed by name:
[training](training.md#which-drafters-are-trained) says which kinds are trained.

| drafter | target | structure | can be trained |
|---|---|---|---|
"""


def text() -> str:
    """The page."""
    rows = []
    for one in PUBLISHED:
        reasons = one.reasons()
        rows.append(f"| {one.drafter} | {one.target} | {one.traits} | {'no: ' + '; '.join(reasons) if reasons else 'yes'} |")
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    (Path(sys.argv[1]) / PAGE).write_text(text())
