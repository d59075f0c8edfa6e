"""Listening sockets that send tokens at once, and an ASGI application served inside the running event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from starlette.types import ASGIApp


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


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone: this server is a guest in someone else's event loop."""
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve `app` while the context is open; yields its base URL, http://127.0.0.1:<port>."""
    opened = listener()
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="auto", timeout_graceful_shutdown=1)
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[opened]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)  # uvicorn has no event for this
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        opened.close()
