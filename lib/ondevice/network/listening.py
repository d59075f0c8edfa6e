"""Listening sockets that send tokens at once, and whom they reach."""

from __future__ import annotations

import ipaddress
import socket


def listener(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. Raises ValueError where nobody can listen there.

    asyncio switches Nagle's algorithm off only on sockets that name their protocol, which socket.create_server's do
    not: tokens would wait for the 40 ms of a delayed acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        nameless = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise ValueError(f"Nobody can listen on {host}:{port}: {error.strerror}.") from None
    return socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, nameless.detach())


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
