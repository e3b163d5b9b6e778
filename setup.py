"""Refuses a source whose links in src/honed/ are text files: nothing would be installed. All else is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

for entry in sorted((Path(__file__).parent / "src" / "honed").iterdir()):
    if entry.is_file() and not entry.suffix:
        raise SystemExit(
            f"src/honed/{entry.name} is a text file and not a link, as in GitHub's zip or with git's core.symlinks=false: "
            "get honed with git clone, or as tar.gz"
        )
setup()
