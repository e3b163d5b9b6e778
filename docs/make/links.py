"""Makes links to files of the checkout absolute where the checkout isn't at hand: on the docs site, and on a package index.

mkdocs loads this file as a hook. `python -m docs.make.links README` rewrites the README of a copy that a package is built from.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

LINK = re.compile(r"(\]\()([^)\s#:]+)(#[^)\s]*)?(\))")


def absolute(text: str, page: Path, root: Path, kept: Path | None = None) -> str:
    """Markdown whose relative links lead to the source repository.

    Args:
        page: file that the text is of, below `root`.
        kept: folder whose files stay linked as they are.

    Raises:
        FileNotFoundError: a link leads nowhere.
    """
    source = tomllib.loads((root / "pyproject.toml").read_text())["project"]["urls"]["Source"]

    def rewrite(found: re.Match[str]) -> str:
        before, target, anchor, after = found.groups()
        path = (page.parent / target).resolve()
        if not path.exists():
            raise FileNotFoundError(f"{page.name}: {target}")
        if kept is not None and path.is_relative_to(kept):
            return found.group()
        kind = "tree" if path.is_dir() else "blob"
        return f"{before}{source}/{kind}/main/{path.relative_to(root).as_posix()}{anchor or ''}{after}"

    return LINK.sub(rewrite, text)


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Rewrite a page of the site; mkdocs calls it for each."""
    docs = Path(config["docs_dir"]).resolve()
    return absolute(markdown, Path(page.file.abs_src_path).resolve(), docs.parent, kept=docs)


if __name__ == "__main__":
    readme = Path(sys.argv[1]).resolve()
    readme.write_text(absolute(readme.read_text(), readme, readme.parent))
