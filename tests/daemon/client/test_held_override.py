"""An override that a command holds gives way to what an operator does meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from honed.daemon.client import held_override
from honed.daemon.client.client import AdminClient
from honed.daemon.client.held_override import TTL_S, Held
from honed.daemon.process.http_server import HttpServer
from honed.daemon.service import Service
from honed.daemon.settings.settings import load
from tests.daemon.conftest import flags_in

THEIRS = {"value": 0, "ttl_s": 3000.0, "reason": "incident"}


@pytest.fixture
def client(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AdminClient]:
    monkeypatch.setattr(held_override, "ARRIVES_S", 0.0)
    server = HttpServer(service, load(None, flags_in(folder), env={}))
    server.bind()
    server.start()
    with AdminClient(service.settings.paths.admin_socket) as opened:
        yield opened
    server.stop()


def hold(client: AdminClient) -> Held:
    return Held(client, "draft_tokens", 7, "figures")


def renew(held: Held) -> None:
    held._put_s -= TTL_S / 2
    held.renew()


def in_force(client: AdminClient) -> list[tuple[str, Any, str]]:
    return [(one["name"], one["value"], one["reason"]) for one in client.get("/v1/overrides")]


def test_the_earlier_one_comes_back(client: AdminClient) -> None:
    with hold(client) as held:
        renew(held)
        assert in_force(client) == [("draft_tokens", 7, "figures")]
    assert in_force(client) == []
    client.put("/v1/overrides/draft_tokens", THEIRS)
    with hold(client) as held:
        renew(held)
    assert in_force(client) == [("draft_tokens", 0, "incident")]


@pytest.mark.parametrize("is_renewed", [True, False])
def test_one_that_an_operator_sets_meanwhile_stays(client: AdminClient, is_renewed: bool) -> None:
    """The next renewal replaced it, or the command's end removed it."""
    with hold(client) as held:
        client.put("/v1/overrides/draft_tokens", THEIRS)
        if is_renewed:
            renew(held)
            assert in_force(client) == [("draft_tokens", 0, "incident")]
    assert in_force(client) == [("draft_tokens", 0, "incident")]


def test_a_policy_that_an_operator_sets_meanwhile_stays_in_force(client: AdminClient) -> None:
    with hold(client) as held:
        client.put("/v1/overrides/policy", THEIRS | {"value": "off"})
        renew(held)
        assert in_force(client)[-1] == ("policy", "off", "incident")
    assert in_force(client)[-1] == ("policy", "off", "incident")


def test_one_that_an_operator_has_cleared_stays_away(client: AdminClient) -> None:
    with hold(client) as held:
        client.delete("/v1/overrides/draft_tokens")
        renew(held)
        assert in_force(client) == []
