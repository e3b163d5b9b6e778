"""Addresses that the daemon may listen on: loopback, unless its owner has said how other hosts are kept out."""

from __future__ import annotations

import ipaddress

LOOPBACK_ONLY = (
    "isn't a loopback address; honed has no TLS there, so it listens on loopback only, with or without tokens: "
    "for other machines put a reverse proxy with TLS in front"
)
NOT_PROTECTED = (
    "isn't a loopback address: name a file in Prometheus' web-config form with TLS (http.metrics_web_config), or set "
    "http.metrics_plaintext = true if everybody on the network may read it"
)


def check_address(address: str, *, why_only_loopback: str = LOOPBACK_ONLY) -> tuple[str, int]:
    """Numeric host and port of "host:port".

    Args:
        why_only_loopback: text about other addresses; empty: they are allowed.

    Raises:
        ValueError: with the fault and a correct form.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        is_local = is_loopback(host)
        if not (port.isascii() and port.isdigit()):  # int() also takes 9_464 and other scripts' digits
            raise ValueError(f"port {port!r} isn't a number")
        number = int(port)
    except ValueError as error:
        raise ValueError('isn\'t host:port with a numeric address; write 127.0.0.1:9464, or "" for none') from error
    if not 0 <= number <= 65535:
        raise ValueError(f"has port {number}; a port is from 0 to 65535")
    if why_only_loopback and not is_local:
        raise ValueError(why_only_loopback)
    return host, number


def is_loopback(host: str) -> bool:
    """Whether a numeric host is this machine alone. Raises ValueError for another kind of host."""
    return ipaddress.ip_address(host).is_loopback
