"""The environment that systemd gives the services: the units' variables, overridden by /etc/honed/honed.env."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from dotenv import dotenv_values

from honed.daemon.client.terminal import SERVICE_DIR
from honed.daemon.doctor.check import Check
from honed.daemon.settings.variables import PATHS

CONFIG = Path("/etc/honed/honed.toml")
ENVIRONMENT = Path("/etc/honed/honed.env")
STATE_DIR = Path("/var/lib/honed")
OF_THE_UNITS = {"HONED_STATE_DIR": str(STATE_DIR), "HONED_RUNTIME_DIR": str(SERVICE_DIR)}


def service_environment(config: Path | None, env: Mapping[str, str] = os.environ) -> dict[str, str] | None:
    """The services' environment; None if this call isn't about the services.

    It is about them if `config` is their settings file, or is None and the user's environment sets no honed variable.

    Raises:
        OSError: honed.env can't be read.
    """
    if config is None and any(name.startswith("HONED_") for name in env):
        return None
    if config not in (None, CONFIG) or not (CONFIG.is_file() or ENVIRONMENT.is_file()):
        return None
    given: dict[str, str] = {}
    if ENVIRONMENT.is_file():
        with ENVIRONMENT.open() as lines:
            given = {name: value for name, value in dotenv_values(stream=lines, interpolate=False).items() if value is not None}
    named = {} if config is None else {"HONED_CONFIG": str(config)}
    own = {"HONED_CONFIG": str(CONFIG)} if CONFIG.is_file() else {}
    return {**own, **OF_THE_UNITS, **given, **named}


def check_paths(config: Path, env: Mapping[str, str]) -> Iterator[Check]:
    """Check for folders set in the settings file: the units' variables override it."""
    try:
        given = tomllib.loads(config.read_text()).get("paths") or {}
    except (OSError, ValueError):
        return
    for variable, field in PATHS.items():
        if field in given and str(given[field]) != env.get(variable, given[field]):
            text = f"paths.{field} = {str(given[field])!r} in {config} has no effect: the services' {variable} overrides it"
            cure = f"Remove it and set {variable} in {ENVIRONMENT}, with ReadWritePaths= in a drop-in of both units."
            yield Check("settings", "warning", text, cure)
