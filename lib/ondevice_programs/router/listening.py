"""Listening sockets that send tokens at once."""

from __future__ import annotations

import socket


def listener(host: str = "127.0.0.1", port: int = 0) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one.

    asyncio switches Nagle's algorithm off only on sockets that name their protocol, which socket.create_server's do
    not: tokens would wait for the 40 ms of a delayed acknowledgement.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(1024)
    except OSError:
        found.close()
        raise
    return found
