"""Addresses that the daemon may listen on: loopback only, since it has no TLS."""

from __future__ import annotations

import ipaddress


def check_address(address: str) -> tuple[str, int]:
    """Numeric host and port of "host:port". Raises ValueError with the fault and a correct form."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if host == "localhost":
        host = "127.0.0.1"
    try:
        ip = ipaddress.ip_address(host)
        number = int(port)
    except ValueError as error:
        raise ValueError('isn\'t host:port with a numeric address; write 127.0.0.1:9464, or "" for none') from error
    if not 0 <= number <= 65535:
        raise ValueError(f"has port {number}; a port is from 0 to 65535")
    if not ip.is_loopback:
        raise ValueError(
            "isn't a loopback address; honed has no TLS, so it listens on loopback only, with or without tokens: "
            "for other machines put a reverse proxy with TLS in front"
        )
    return host, number
