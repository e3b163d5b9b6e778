"""The daemon's own fixtures: dashboards and alerts are checked against what it really exposes."""

from __future__ import annotations

from tests.daemon.conftest import daemon, folder, make_engine, service, settings  # noqa: F401 (fixtures, used by name)
