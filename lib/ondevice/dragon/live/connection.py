"""One TCP connection that carries messages: frames, heartbeats, silence that is noticed, TLS where it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from ondevice.dragon import messages
from ondevice.dragon.live import frames
from ondevice.dragon.messages import Heartbeat, Message

_PIECE = 2**16  # bytes asked of the socket at once
_NUMBER = 4  # bytes of a message's number


class Lost(ConnectionError):
    """The connection is of no more use: closed, silent for too long, or damaged. A new one may be."""


class Connection:
    """Messages to and from one peer. Sending never waits: what one session has under way is bounded by its lookahead.

    beat: seconds between heartbeats. silence: seconds without a byte after which the peer counts as gone; a connection
    that is half open is noticed by nothing else. `rtt` is the least round trip seen so far, in seconds; None before.
    sent, received: bytes, frames included.

    Each message has its number before it, so that one that is missing or comes twice is damage, not a session that
    waits for ever: TCP does not do that, but who stands between the two might.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, beat: float = 1.0, silence: float = 8.0
    ) -> None:
        if not 0 < beat < silence:
            raise ValueError(f"A peer beats more often than it is given up, not every {beat} s of {silence} s.")
        self._reader, self._writer, self._frames = reader, writer, frames.Reader()
        self._ready: deque[bytes] = deque()
        self._next_out = self._next_in = 0  # numbers of messages
        self._beat, self._silence = beat, silence
        self._damage: ValueError | None = None  # of the stream, once all before it is read
        self._understood = False  # whether a message has come: after it another version is damage
        self.stranger = False  # whether the other side does not speak this protocol
        self._echo: tuple[float, float] | None = None  # the peer's clock, and ours when it came
        self.rtt: float | None = None
        self.sent = self.received = 0
        _send_at_once(writer)
        self._beating = asyncio.create_task(self._beats())

    def send(self, message: Message) -> None:
        """Send after all that was sent before; of a connection that is closed, nothing happens: `receive` tells."""
        frame = frames.pack(self._next_out.to_bytes(_NUMBER, "big") + messages.encode(message))
        if not self._writer.is_closing():
            self._writer.write(frame)
            self._next_out += 1
            self.sent += len(frame)

    async def receive(self) -> Message:
        """The next message that is no heartbeat.

        Raises Lost, and frames.OtherVersion where the first message shows it. After either the caller closes the
        connection.
        """
        while True:
            try:
                message = messages.decode(self._numbered(await self._body()))
            except (ValueError, OSError, TimeoutError) as error:
                if isinstance(error, frames.OtherVersion) and not self._understood:
                    raise
                self.stranger = isinstance(error, frames.Stranger)
                reason = str(error) or f"nothing was heard for {self._silence:g} s"
                if not self._understood and self._writer.get_extra_info("sslcontext") is not None:
                    reason += "; with TLS, the other side may not accept this side's certificate"
                raise Lost(reason) from None
            self._understood = True
            if not isinstance(message, Heartbeat):
                return message
            self._heard(message)

    async def close(self) -> None:
        """Close after what was sent has left, or after a moment. May be called twice."""
        self._beating.cancel()
        await asyncio.gather(self._beating, return_exceptions=True)
        try:
            self._writer.close()  # what was sent still leaves
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(min(1.0, self._silence)):
                    await self._writer.wait_closed()
        finally:
            self._writer.transport.abort()

    def _numbered(self, body: bytes) -> bytes:
        number, self._next_in = self._next_in, self._next_in + 1
        if int.from_bytes(body[:_NUMBER], "big") != number:
            raise Lost(f"message {number} did not come in its turn")
        return body[_NUMBER:]

    async def _body(self) -> bytes:
        while not self._ready:
            if self._damage is not None:
                raise self._damage
            async with asyncio.timeout(self._silence):
                piece = await self._reader.read(_PIECE)
            if not piece:
                self._frames.end()
                raise Lost("the other side has closed the connection")
            self.received += len(piece)
            try:
                self._ready.extend(self._frames.feed(piece))
            except ValueError as error:
                self._damage = error  # what came before it is whole
        return self._ready.popleft()

    async def _beats(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            echo, came = self._echo or (0.0, clock())
            self.send(Heartbeat(clock(), echo, max(0.0, clock() - came)))
            await asyncio.sleep(self._beat)

    def _heard(self, beat: Heartbeat) -> None:
        now = asyncio.get_running_loop().time()
        self._echo = (beat.sent, now)
        if 0 < beat.echo <= now:
            trip = max(0.0, now - beat.echo - beat.held)
            self.rtt = trip if self.rtt is None else min(self.rtt, trip)


async def connect(
    host: str, port: int, *, tls: ssl.SSLContext | None = None, beat: float = 1.0, silence: float = 8.0
) -> Connection:
    """Connect within `silence` seconds. Raises Lost where there is nobody, and ValueError on a wrong certificate."""
    try:
        async with asyncio.timeout(silence):
            reader, writer = await asyncio.open_connection(host, port, ssl=tls)
    except ssl.SSLCertVerificationError as error:
        raise ValueError(f"The certificate of {host}:{port} is not trusted: {error.verify_message}.") from None
    except (OSError, TimeoutError) as error:
        raise Lost(f"nobody answers at {host}:{port} ({error or 'no answer in time'})") from None
    return Connection(reader, writer, beat=beat, silence=silence)


async def listen(
    handle: Callable[[Connection], Awaitable[None]], host: str = "127.0.0.1", port: int = 0, *,
    tls: ssl.SSLContext | None = None, beat: float = 1.0, silence: float = 8.0,
) -> asyncio.Server:  # fmt: skip
    """Call `handle`, a coroutine function, with each connection. Port 0 takes a free one.

    Raises ValueError on an address that other machines reach, without TLS: queries and tokens would go in the clear;
    and where the port is in use.
    """
    if tls is None and not _loopback(host):
        raise ValueError(f"Listening at {host} needs TLS, as other machines can reach it; loopback does not.")

    async def opened(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await handle(Connection(reader, writer, beat=beat, silence=silence))

    try:
        return await asyncio.start_server(opened, host, port, ssl=tls)
    except OSError as error:
        raise ValueError(f"Nothing can listen at {host}:{port}: {error.strerror or error}.") from None


def server_tls(certificate: Path, key: Path, authority: Path | None = None) -> ssl.SSLContext:
    """TLS of the side that listens. authority: if given, only clients with a certificate of it are let in.

    Raises ValueError on files that are no certificate and key.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _load(context, certificate, key)
    if authority is not None:
        _trust(context, authority)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def client_tls(authority: Path, certificate: Path | None = None, key: Path | None = None) -> ssl.SSLContext:
    """TLS of the side that connects: the peer's certificate must be of `authority` and for its host's name.

    certificate, key: our own, where the peer asks for one. Raises ValueError on files that are none.
    """
    context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
    _trust(context, authority)
    if certificate is not None:
        _load(context, certificate, key or certificate)
    return context


def _load(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{certificate.name} and {key.name} are no certificate with its key: {error}.") from None


def _trust(context: ssl.SSLContext, authority: Path) -> None:
    try:
        context.load_verify_locations(authority)
    except (OSError, ssl.SSLError) as error:
        raise ValueError(f"{authority.name} holds no certificate: {error}.") from None


def _loopback(host: str) -> bool:
    if host == "localhost":
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def _send_at_once(writer: asyncio.StreamWriter) -> None:
    """Without this a small message waits for the acknowledgement of the one before."""
    found = writer.get_extra_info("socket")
    if found is not None:
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
