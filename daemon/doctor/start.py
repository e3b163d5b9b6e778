"""Checks of what the daemon reads at its start besides the settings: web config, tokens, the shared registry's file system."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from honed.daemon.doctor.check import Check
from honed.daemon.errors import HonedError
from honed.daemon.settings.settings import Settings
from honed.daemon.settings.tokens import credential_folders, load_tokens
from honed.recalib.registry.manifest import RegistryError
from honed.recalib.registry.shared import open_url, without_credentials

CREDENTIALS = (
    Path("/run/credentials/honed.service"),
    Path("/run/credentials/@system"),
    Path("/etc/credstore"),
    Path("/run/credstore"),
    Path("/usr/lib/credstore"),
)
"""Where a running service has its credentials, and where systemd's LoadCredential finds them."""
CURE = "Correct it: the daemon can't start with it."


def check_start(settings: Settings, *, is_service: bool) -> Iterator[Check]:
    """Check all of them, as far as they are used; nothing where honed is installed for vLLM alone.

    Args:
        is_service: whether the settings are the service's, whose user may read files that this one may not.
    """
    if find_spec("sqlite_utils") is None:
        return
    from honed.daemon.settings.web_config import web_config_of

    def tried(subject: str, start: Callable[[], object], fine: str) -> Check:
        try:
            start()
        except (HonedError, RegistryError) as error:
            if is_service and isinstance(error.__cause__, PermissionError):
                return Check(subject, "unknown", str(error), "Run `sudo honed doctor`.")
            return Check(subject, "error", str(error), CURE)
        return Check(subject, "ok", fine)

    http, url = settings.http, settings.registry.url
    if http.metrics_listen and http.metrics_web_config is not None:
        yield tried("web config", lambda: web_config_of(http), f"{http.metrics_web_config} can be used")
    if http.admin_listen:
        folders = CREDENTIALS if is_service else credential_folders()
        fine = f"there is an admin token for {http.admin_listen}"
        yield tried("tokens", lambda: load_tokens(http.read_token_file, http.admin_token_file, folders), fine)
    if url:
        fine = f"what registry.url = {without_credentials(url)!r} needs is installed"
        yield tried("shared registry", lambda: open_url(url), fine)
