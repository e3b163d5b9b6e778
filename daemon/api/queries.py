"""Refusal of unknown query parameters, like unknown body fields, so that typos are noticed."""

from __future__ import annotations

from fastapi import Request
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.routing import APIRoute

from honed.daemon.errors import RequestError
from honed.daemon.settings.variables import did_you_mean


def only_known_parameters(request: Request) -> None:
    """A router's dependency. Raises RequestError with the first unknown parameter and the nearest known one."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute)
    known = [parameter.alias for parameter in get_flat_dependant(route.dependant).query_params]
    for name in request.query_params:
        if name not in known:
            cure = f"It takes {', '.join(known)}." if known else "It takes no parameters."
            raise RequestError(f"unknown parameter {name!r}{did_you_mean(name, known)}", cure=cure)
