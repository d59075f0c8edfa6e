"""DRAGON's connection over loopback: what arrives, what is noticed, what is left when it is closed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from waiting import PATIENCE, until

from ondevice.dragon import messages
from ondevice.dragon.live import frames
from ondevice.dragon.live.connection import Connection, Lost, connect, listen
from ondevice.dragon.messages import End, Heartbeat

BEAT = 0.02


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[Connection, Connection]]:
    """Both ends of a connection."""
    came: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def handle(connection: Connection) -> None:
        came.set_result(connection)
        await over.wait()

    server = await listen(handle, beat=BEAT, silence=PATIENCE)
    one = await connect("127.0.0.1", server.sockets[0].getsockname()[1], beat=BEAT, silence=PATIENCE)
    other = await came
    try:
        yield one, other
    finally:
        await one.close()
        await other.close()
        over.set()
        server.close()
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def speaking(*pieces: bytes, close: bool = False, silence: float = PATIENCE) -> AsyncIterator[Connection]:
    """A connection to a peer that says these bytes, and then nothing."""
    over = asyncio.Event()

    async def opened(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
        if not close:
            await over.wait()
        writer.close()

    server = await asyncio.start_server(opened, "127.0.0.1", 0)
    connection = await connect("127.0.0.1", server.sockets[0].getsockname()[1], beat=BEAT, silence=silence)
    try:
        yield connection
    finally:
        await connection.close()
        over.set()
        server.close()
        await asyncio.sleep(0)


def frame(number: int, message: messages.Message) -> bytes:
    return frames.pack(number.to_bytes(4, "big") + messages.encode(message))


def end(position: int) -> End:
    return End("s", position)


def run(test: Callable[[], Awaitable[None]]) -> None:
    """Run it, with nothing left behind."""

    async def whole() -> None:
        await test()
        assert await until(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(whole())


def test_messages_come_in_order_and_heartbeats_are_not_seen():
    async def test() -> None:
        async with pair() as (one, other):
            for position in range(100):
                one.send(end(position))
            await asyncio.sleep(0.1)  # some heartbeats
            one.send(end(100))
            other.send(end(7))
            assert [await other.receive() for _ in range(101)] == [end(position) for position in range(101)]
            assert await one.receive() == end(7)
            assert one.sent >= 101 * len(frame(0, end(100))) - 101 and other.received <= one.sent

    run(test)


def test_the_round_trip_is_measured_while_nothing_else_is_said():
    async def test() -> None:
        async with pair() as (one, other):
            hearing = [asyncio.create_task(each.receive()) for each in (one, other)]
            assert await until(lambda: one.rtt is not None and 0 <= one.rtt < 0.1)
            for task in hearing:
                task.cancel()
            await asyncio.gather(*hearing, return_exceptions=True)

    run(test)


def test_silence_is_noticed_in_its_time():
    async def test() -> None:
        async with speaking(silence=0.3) as connection:
            start = time.perf_counter()
            with pytest.raises(Lost, match=r"nothing was heard for 0\.3 s"):
                await connection.receive()
            assert time.perf_counter() - start > 0.25

    run(test)


def test_the_peer_s_end_is_noticed():
    async def test() -> None:
        async with speaking(frame(0, end(1)), close=True) as connection:
            assert await connection.receive() == end(1)
            with pytest.raises(Lost, match="the other side has closed the connection"):
                await connection.receive()

    run(test)


@pytest.mark.parametrize(
    "pieces, reason",
    [
        ([frame(0, end(0)), frame(2, end(2))], "message 1 did not come in its turn"),
        ([frame(0, end(0)), frame(0, end(0))], "message 1 did not come in its turn"),
        ([frame(0, end(0)), frame(1, end(1))[:-3]], "ended within a frame"),
        ([frame(0, end(0)), b"DRG\x63 and so on"], "speaks version 99"),
        ([frame(0, end(0)), b"GET / HTTP/1.1"], "begins with DRG"),
        ([frame(0, end(0)), frames.pack(b"\0\0\0\1\x91\xa4none")], "No message of version 2"),
        ([frame(0, end(0)), frames.pack(b"\0")], "did not come in its turn"),
    ],
    ids=["missing", "twice", "cut", "version", "stranger", "no message", "short"],
)
def test_damage_ends_the_connection(pieces: list[bytes], reason: str):
    async def test() -> None:
        async with speaking(*pieces, close=True) as connection:
            assert await connection.receive() == end(0)
            with pytest.raises(Lost, match=reason):
                await connection.receive()

    run(test)


def test_a_stranger_is_known():
    async def test() -> None:
        for pieces, strange in (([b"GET / HTTP/1.1"], True), ([frame(0, end(0)), b"GET / HTTP/1.1"], False)):
            async with speaking(*pieces, close=True) as connection:
                with pytest.raises(Lost, match="begins with DRG"):
                    while True:
                        await connection.receive()
                assert connection.stranger == strange

    run(test)


def test_another_version_at_first_is_no_damage():
    async def test() -> None:
        async with speaking(b"DRG\x63 and so on") as connection:
            with pytest.raises(frames.OtherVersion, match="speaks version 99 of the protocol, this one 2"):
                await connection.receive()

    run(test)


def test_a_closed_connection_sends_nothing_and_can_be_closed_again():
    async def test() -> None:
        async with pair() as (one, other):
            await one.close()
            sent = one.sent
            one.send(end(1))
            assert one.sent == sent
            await one.close()
            with pytest.raises(Lost):
                await other.receive()

    run(test)


def test_what_was_sent_before_closing_arrives():
    async def test() -> None:
        async with pair() as (one, other):
            for _ in range(200):
                one.send(messages.Failure(None, "x" * 900))
            await one.close()
            assert len([await other.receive() for _ in range(200)]) == 200

    run(test)


def test_nobody_there():
    async def test() -> None:
        async with speaking() as connection:
            port = connection._writer.get_extra_info("peername")[1]
        with pytest.raises(Lost, match=f"nobody answers at 127.0.0.1:{port}"):
            await connect("127.0.0.1", port, beat=BEAT, silence=PATIENCE)

    run(test)


@pytest.mark.parametrize("beat, silence", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (float("nan"), 1.0)])
def test_a_peer_beats_more_often_than_it_is_given_up(beat: float, silence: float):
    async def test() -> None:
        with pytest.raises(ValueError, match="A peer beats more often"):
            Connection(None, None, beat=beat, silence=silence)  # type: ignore[arg-type]

    run(test)


def test_a_message_that_cannot_be_sent_is_refused_and_takes_no_number():
    async def test() -> None:
        async with pair() as (one, other):
            with pytest.raises(ValueError):
                one.send(End("", 1))
            one.send(end(3))
            assert await other.receive() == end(3)
            assert not isinstance(end(3), Heartbeat)

    run(test)
