"""Fetches Prometheus, Alertmanager and Chromium as Debian packages and unpacks them into a folder; nothing is installed.

`python tests/observability/fetch_tools.py FOLDER` leaves FOLDER/bin with promtool, prometheus, alertmanager and chromium:
links to what is on PATH, or wrappers that name the unpacked libraries.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

PACKAGES = {
    "promtool": "prometheus",
    "prometheus": "prometheus",
    "alertmanager": "prometheus-alertmanager",
    "chromium": "chromium-headless-shell",
}
"""Command -> the package that has it."""
NAMES = {
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
    "chromium": ("chromium", "chromium-headless-shell", "google-chrome"),
}
"""Command -> its names on PATH and in packages, where it has others than its own."""


class FetchError(RuntimeError):
    """A tool could not be had; the text says which and what to do."""


def main(folder: Path) -> None:
    """Put every tool that isn't there yet into `folder`/bin. Raises FetchError."""
    bin_folder, root = folder / "bin", folder / "root"
    bin_folder.mkdir(parents=True, exist_ok=True)
    missing = [tool for tool in PACKAGES if not (bin_folder / tool).exists() and not link_installed(tool, bin_folder)]
    if missing:
        unpack(sorted({PACKAGES[tool] for tool in missing}), folder / "packages", root)
    for tool in missing:
        wrap(tool, bin_folder, root)


def link_installed(tool: str, bin_folder: Path) -> bool:
    """Link a tool that the machine has. Returns whether it has it."""
    for name in NAMES.get(tool, (tool,)):
        if found := shutil.which(name):
            (bin_folder / tool).symlink_to(found)
            return True
    return False


def unpack(packages: list[str], downloads: Path, root: Path) -> None:
    """Download packages, and what Chromium needs beside what is installed, and unpack them below `root`. Raises FetchError."""
    if shutil.which("apt-get") is None:
        raise FetchError(f"{', '.join(packages)}: install them (this machine has no apt-get to fetch them with)")
    downloads.mkdir(exist_ok=True)
    names = [name for name in packages if name != PACKAGES["chromium"]]
    if len(names) < len(packages):  # the others are static programs; what Debian makes them depend on are web pages
        plan = run(["apt-get", "install", "--simulate", "--no-install-recommends", PACKAGES["chromium"]], downloads)
        names += [line.split()[1] for line in plan.splitlines() if line.startswith("Inst ")]
    print(f"fetching {len(names)} Debian packages: {', '.join(names)}", flush=True)
    run(["apt-get", "download", *names], downloads)
    for package in sorted(downloads.glob("*.deb")):
        run(["dpkg", "-x", str(package), str(root)], downloads)
        package.unlink()


def wrap(tool: str, bin_folder: Path, root: Path) -> None:
    """Make `bin`/tool run the unpacked one with the unpacked libraries. Raises FetchError."""
    folders = [root / "usr/lib/chromium", root / "usr/bin"]
    found = [path for name in NAMES.get(tool, (tool,)) for folder in folders if (path := folder / name).is_file()]
    if not found:
        raise FetchError(f"the package {PACKAGES[tool]} has no {' or '.join(NAMES.get(tool, (tool,)))}")
    libraries = [path for pattern in ("*-linux-gnu", "*-linux-gnu/pulseaudio") for path in root.glob(f"usr/lib/{pattern}")]
    path = ":".join(map(str, libraries))
    folder = relocate(found[0], root) if tool == "alertmanager" else ""
    script = bin_folder / tool
    script.write_text(f'#!/bin/sh\n{folder}LD_LIBRARY_PATH="{path}" exec "{found[0]}" "$@"\n')
    script.chmod(0o755)


def relocate(program: Path, root: Path) -> str:
    """Let an unpacked Alertmanager find its templates; returns the command that has to precede it. Raises FetchError.

    Debian's has their absolute folder built in. A path of the same length, the working directory, replaces it.
    """
    built_in = b"/usr/share/prometheus/alertmanager"
    working_directory = b"/proc/self/cwd".ljust(len(built_in), b"/")
    data = program.read_bytes()
    if built_in in data:
        program.write_bytes(data.replace(built_in, working_directory))
    elif working_directory not in data:
        raise FetchError(f"{program} looks for its templates somewhere else: install the package {PACKAGES['alertmanager']}")
    return f'cd "{root}{built_in.decode()}" && '


def run(command: list[str], folder: Path) -> str:
    """Run a command there and return its output. Raises FetchError."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    if done.returncode:
        raise FetchError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]).resolve())
    except FetchError as error:
        sys.exit(f"fetch_tools: {error}")
