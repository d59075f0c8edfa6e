"""One WebSocket between device and cloud: messages, a greeting in the handshake, pings, TLS where it is asked for."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http
import logging
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from websockets import datastructures, exceptions
from websockets.asyncio.client import connect as _connect
from websockets.asyncio.server import ServerConnection, serve
from websockets.http11 import Request, Response

from ondevice.network.listening import is_loopback
from ondevice_papers.dragon import messages
from ondevice_papers.dragon.messages import Hello, Message, check_peer

HEADER = "X-Dragon-Hello"
_PROBE = 2.0  # seconds for which a listener's first bytes are waited for
LIMIT = 2**20  # bytes of a message
_QUIET = logging.getLogger(f"{__name__}.websockets")
_QUIET.setLevel(logging.CRITICAL)  # what goes wrong is told by Lost
_OPTIONS: dict[str, Any] = {"compression": None, "max_size": LIMIT, "ping_interval": None, "logger": _QUIET}


class Lost(ConnectionError):
    """The connection is of no more use, or there was none: nobody there, closed, silent. A new one may be."""


class Unheard(Lost):
    """The cloud is there, but only one of the two sides has TLS, or it does not accept this device's certificate."""


class Refused(ConnectionError):
    """The cloud and this device cannot work together, whatever is tried again."""


class Connection:
    """Messages to and from one peer. Sending never waits: what a session has under way is bounded by its lookahead.

    A ping goes every `beat` seconds; after `silence` seconds without its answer the peer counts as gone, which is all
    that tells a half open connection. rtt: the least round trip of a ping so far, in seconds; None before the first.
    """

    def __init__(self, socket: Any, *, beat: float, silence: float) -> None:
        self._socket, self._beat, self._silence = socket, beat, silence
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.rtt: float | None = None
        self._why = ""
        self._tasks = [asyncio.create_task(self._sends()), asyncio.create_task(self._pings())]

    def send(self, message: Message) -> int:
        """Send after all that was sent before; returns the bytes. If the connection is closed, `receive` tells."""
        data = messages.encode(message)
        self._queue.put_nowait(data)
        return len(data)

    async def receive(self) -> tuple[Message, int]:
        """The next message and its bytes. Raises Lost."""
        try:
            data = await self._socket.recv()
            message = messages.decode(data if isinstance(data, bytes) else data.encode())
        except exceptions.ConnectionClosed:
            raise Lost(self._why or "the other side has closed the connection") from None
        except ValueError as error:
            self.drop(str(error))
            raise Lost(str(error)) from None
        return message, len(data)

    async def close(self) -> None:
        """Close after what was sent has left, or after a moment. May be called twice."""
        with contextlib.suppress(TimeoutError, exceptions.ConnectionClosed):
            async with asyncio.timeout(0.1 + 2 * (0.4 if self.rtt is None else self.rtt)):
                while not self._queue.empty():
                    await asyncio.sleep(0)
                await self._socket.close()
        self.drop("this side has closed the connection")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def drop(self, why: str) -> None:
        """Close at once; what was not sent is lost."""
        self._why = self._why or why
        for task in self._tasks:
            task.cancel()
        self._socket.transport.abort()

    async def _sends(self) -> None:
        with contextlib.suppress(exceptions.ConnectionClosed):
            while True:
                await self._socket.send(await self._queue.get())

    async def _pings(self) -> None:
        with contextlib.suppress(exceptions.ConnectionClosed):
            while True:
                try:
                    async with asyncio.timeout(self._silence):
                        trip = await (await self._socket.ping())
                except TimeoutError:
                    self.drop(f"nothing was heard for {self._silence:g} s")
                    return
                self.rtt = trip if self.rtt is None else min(self.rtt, trip)
                await asyncio.sleep(self._beat)


async def connect(
    host: str,
    port: int,
    hello: Hello,
    *,
    tls: ssl.SSLContext | None = None,
    within: float = 8.0,
    beat: float = 1.0,
    silence: float = 8.0,
) -> Connection:
    """Connect within so many seconds. Raises Lost where there is nobody, Refused by what no second try mends."""
    where = f"{host}:{port}"
    try:
        address = f"[{host}]" if ":" in host else host
        socket = await _connect(
            f"{'ws' if tls is None else 'wss'}://{address}:{port}/",
            ssl=tls,
            open_timeout=within,
            proxy=None,
            close_timeout=1.0,
            additional_headers={HEADER: _shown(hello)},
            **_OPTIONS,
        )
    except exceptions.InvalidStatus as error:
        body = (error.response.body or b"").decode("utf-8", "replace").strip()
        if HEADER not in error.response.headers:
            raise Refused(f"What listens at {where} is no DRAGON cloud: it speaks HTTP.") from None
        if error.response.status_code == http.HTTPStatus.CONFLICT:
            raise Refused(body) from None
        raise Lost(body) from None
    except ssl.SSLCertVerificationError as error:
        raise Refused(f"The certificate of {where} is not trusted: {error.verify_message}.") from None
    except (exceptions.InvalidHandshake, EOFError, ssl.SSLError, ConnectionResetError) as error:
        raise await _unheard(host, port, tls, error) from None
    except TimeoutError:
        raise Lost(f"nobody answers at {where} within {within:g} s") from None
    except OSError as error:
        raise Lost(f"nobody answers at {where} ({error.strerror or error})") from None
    try:
        check_peer(_read(socket.response.headers if socket.response else None), hello)
    except ValueError as error:
        socket.transport.abort()
        raise Refused(str(error)) from None
    return Connection(socket, beat=beat, silence=silence)


async def _unheard(host: str, port: int, tls: ssl.SSLContext | None, error: Exception) -> ConnectionError:
    """Something took the connection and did not answer as a cloud does: which of TLS and HTTP it speaks says why."""
    where = f"{host}:{port}"
    speaks = await _speaks(host, port)
    if speaks == "TLS" and tls is None:
        return Unheard(f"the cloud at {where} speaks TLS, which needs --authority here")
    if speaks == "TLS":
        return Unheard(f"the cloud at {where} ended the TLS handshake; it may not accept this device's certificate")
    if speaks == "HTTP" and tls is not None:
        return Unheard(f"the cloud at {where} does not speak TLS, which --authority here asks for")
    closed = isinstance(error.__cause__, EOFError | ConnectionError) or isinstance(error, EOFError | ConnectionError)
    if closed or tls is not None:
        return Lost(f"what listens at {where} ends connections without an answer; the cloud behind it may be down")
    return Refused(f"What listens at {where} is no DRAGON cloud.")


async def _speaks(host: str, port: int) -> str:
    """TLS, HTTP, or nothing: what a listener answers to the first bytes of either."""
    anybody = ssl.create_default_context()
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE  # nothing is sent; its certificate does not matter
    with contextlib.suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(_PROBE):
            try:
                _, writer = await asyncio.open_connection(host, port, ssl=anybody)
                writer.close()
                return "TLS"
            except ssl.SSLError as error:
                if "ALERT" in (error.reason or ""):
                    return "TLS"
    with contextlib.suppress(OSError, TimeoutError, EOFError):
        async with asyncio.timeout(_PROBE):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.1\r\nHost: cloud\r\n\r\n")
            begin = await reader.read(5)
            writer.close()
            return "HTTP" if begin == b"HTTP/" else ""
    return ""


@contextlib.asynccontextmanager
async def listening(
    handle: Callable[[Connection], Awaitable[None]],
    hello: Hello,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    tls: ssl.SSLContext | None = None,
    beat: float = 1.0,
    silence: float = 8.0,
) -> AsyncIterator[int]:
    """Call `handle` with each connection while the context lasts; yields the port. Port 0 takes a free one.

    Raises ValueError on an address that other machines reach, without TLS: queries and tokens would go in the clear;
    and where the port is in use.
    """
    if tls is None and not is_loopback(host):
        raise ValueError(f"Listening at {host} needs TLS, as other machines can reach it; loopback does not.")

    def greet(_: ServerConnection, request: Request) -> Response | None:
        try:
            check_peer(hello, _read(request.headers))
        except ValueError as error:
            body = str(error).encode()
            headers = datastructures.Headers({HEADER: _shown(hello), "Content-Length": str(len(body))})
            return Response(http.HTTPStatus.CONFLICT, "Conflict", headers, body)
        return None

    def answer(_: ServerConnection, __: Request, response: Response) -> None:
        response.headers[HEADER] = _shown(hello)

    async def opened(socket: ServerConnection) -> None:
        connection = Connection(socket, beat=beat, silence=silence)
        try:
            await handle(connection)
        finally:
            await connection.close()

    try:
        server = await serve(
            opened,
            host,
            port,
            ssl=tls,
            process_request=greet,
            process_response=answer,
            open_timeout=silence,
            close_timeout=1.0,
            **_OPTIONS,
        )
    except OSError as error:
        raise ValueError(f"Nothing can listen at {host}:{port}: {error.strerror or error}.") from None
    try:
        yield next(iter(server.sockets)).getsockname()[1]
    finally:
        server.close()
        await server.wait_closed()


def _shown(hello: Hello) -> str:
    return base64.b64encode(messages.encode(hello)).decode()


def _read(headers: datastructures.Headers | None) -> Hello:
    """Raises ValueError on headers without a greeting, or with one of another version."""
    greeting = None if headers is None else headers.get(HEADER)
    if greeting is None:
        raise ValueError("This is a DRAGON cloud; what connects is no DRAGON device.")
    try:
        return messages.hello(base64.b64decode(greeting))
    except ValueError:
        raise ValueError("The other side speaks another version of the protocol; install the same on both.") from None


def server_tls(certificate: Path, key: Path, authority: Path | None = None) -> ssl.SSLContext:
    """TLS of the side that listens. authority: if given, only clients with a certificate of it are let in.

    Raises ValueError on files that are no certificate and key.
    """
    context = _tls(ssl.Purpose.CLIENT_AUTH, authority, certificate, key)
    context.verify_mode = ssl.CERT_REQUIRED if authority is not None else ssl.CERT_NONE
    return context


def client_tls(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """TLS of the side that connects: the peer's certificate must be of `authority` and for its host's name.

    certificate, key: our own, where the peer asks for one. Raises ValueError on files that are none.
    """
    return _tls(ssl.Purpose.SERVER_AUTH, authority, certificate, key or certificate)


def _tls(purpose: ssl.Purpose, authority: Path | None, certificate: Path | None, key: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(purpose, cafile=authority)  # no other authority is trusted
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{authority.name if authority else ''} holds no certificate: {error}.") from None
    if certificate is not None and key is not None:
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{certificate.name} and {key.name} are no certificate with its key: {error}.") from None
    return context
