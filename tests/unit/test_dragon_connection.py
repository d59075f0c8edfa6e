"""One connection and how its end is told; and the link that keeps one and leaves a dead cloud alone."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from waiting import PATIENCE, until

from ondevice_papers.dragon.messages import VERSION, DraftMessage, End, Hello, Message, Target
from ondevice_programs.pair import link as link_module
from ondevice_programs.pair.link import CloudLink
from ondevice_programs.pair.wire import Connection, Lost, Refused, Unheard, connect, listening

HELLO = Hello(VERSION, "base", "m", "t", 8)
LARGE = DraftMessage("s", 0, 0, 1, bytes(range(256)) * 64, -1.0)
MESSAGES: list[Message] = [*(Target("s", 0, i, i, True) for i in range(50)), LARGE]


@contextlib.asynccontextmanager
async def pair(
    handle: Callable[[Connection], Awaitable[None]], *, beat: float = 0.05, silence: float = PATIENCE
) -> AsyncIterator[Connection]:
    """This side's connection to one that is handled so."""
    async with listening(handle, HELLO, beat=beat, silence=silence) as port:
        connection = await connect("127.0.0.1", port, HELLO, beat=beat, silence=silence)
        try:
            yield connection
        finally:
            await connection.close()


async def echo(connection: Connection) -> None:
    with contextlib.suppress(Lost):
        while True:
            message, _ = await connection.receive()
            connection.send(message)


def test_messages_come_in_order_and_are_counted():
    async def run() -> None:
        async with pair(echo) as connection:
            sizes = [connection.send(message) for message in MESSAGES]
            back = [await connection.receive() for _ in MESSAGES]
            assert [message for message, _ in back] == MESSAGES and [size for _, size in back] == sizes
            assert await until(lambda: connection.rtt is not None) and 0 < connection.rtt < 1
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_what_was_sent_before_closing_still_comes():
    async def run() -> list[Message]:
        found: list[Message] = []
        ended = asyncio.Event()

        async def handle(connection: Connection) -> None:
            with contextlib.suppress(Lost):
                while True:
                    found.append((await connection.receive())[0])
            ended.set()

        async with listening(handle, HELLO) as port:
            connection = await connect("127.0.0.1", port, HELLO)
            for message in MESSAGES:
                connection.send(message)
            await connection.close()
            await ended.wait()
        return found

    assert asyncio.run(run()) == MESSAGES


@pytest.mark.parametrize("how", ["closed", "dropped", "ended"])
def test_the_other_side_s_end_is_told(how: str):
    async def handle(connection: Connection) -> None:
        connection.send(MESSAGES[0])
        await asyncio.sleep(0.05)
        if how == "closed":
            await connection.close()
        elif how == "dropped":
            connection.drop("away")

    async def run() -> None:
        async with pair(handle) as connection:
            assert (await connection.receive())[0] == MESSAGES[0]
            with pytest.raises(Lost):
                await connection.receive()
            connection.send(MESSAGES[1])  # nothing happens
            await connection.close()
            await connection.close()

    asyncio.run(run())


def test_a_peer_that_does_not_answer_pings_is_lost():
    """Its event loop stands still; TCP goes on."""

    async def run() -> None:
        ready, over = asyncio.Event(), asyncio.Event()

        async def handle(connection: Connection) -> None:
            connection._socket.transport.pause_reading()  # nothing comes in any more
            ready.set()
            await over.wait()
            connection.drop("over")

        async with listening(handle, HELLO, silence=PATIENCE) as port:
            connection = await connect("127.0.0.1", port, HELLO, beat=0.05, silence=0.3)
            await ready.wait()
            with pytest.raises(Lost, match=r"0\.3"):
                await connection.receive()
            await connection.close()
            over.set()

    asyncio.run(run())


def test_nobody_there():
    async def run() -> None:
        server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Lost, match=f"127.0.0.1:{port}"):
            await connect("127.0.0.1", port, HELLO, within=0.2)
        server.close()
        await server.wait_closed()
        with pytest.raises(Lost, match=f"127.0.0.1:{port}"):
            await connect("127.0.0.1", port, HELLO, within=5.0)

    asyncio.run(run())


def test_a_dead_cloud_behind_a_proxy_is_no_mismatch_of_tls():
    """The proxy takes a connection, finds nobody behind it, and closes it."""

    async def run() -> None:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        for tls in (None, ssl.create_default_context()):
            with pytest.raises(Lost) as raised:
                await connect("127.0.0.1", port, HELLO, tls=tls)
            assert not isinstance(raised.value, Unheard) and "TLS" not in str(raised.value)
        server.close()
        await server.wait_closed()

    asyncio.run(run())


# The link


class Cloud:
    """Opens connections, or fails with what it is told. opened: how often it was tried."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.opened, self.port = 0, 0

    async def open(self, within: float) -> Connection:
        self.opened += 1
        if self.error is not None:
            raise self.error
        return await connect("127.0.0.1", self.port, HELLO)


@contextlib.asynccontextmanager
async def linked(patience: float = 0.2) -> AsyncIterator[tuple[Cloud, CloudLink]]:
    cloud = Cloud()
    async with listening(echo, HELLO) as cloud.port:
        link = CloudLink(cloud.open, patience)
        try:
            yield cloud, link
        finally:
            await link.close()


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


def test_a_connection_is_kept_and_messages_reach_their_sessions():
    async def run() -> None:
        async with linked() as (cloud, link):
            one, two = link.join("one"), link.join("two")
            for _ in range(3):
                connection = await link.connected(soon(1))
            for session in ("two", "one", "nobody's", "two"):
                connection.send(End(session, 1))
            assert [(await two.get())[0], (await one.get())[0], (await two.get())[0]] == [
                End("two", 1), End("one", 1), End("two", 1)
            ]  # fmt: skip
            link.leave("two")
            connection.drop("away")
            lost, _ = await one.get()
            assert isinstance(lost, Lost) and two.empty() and link.connection is None
            await link.connected(soon(1))
            assert cloud.opened == 2
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_an_absent_cloud_is_tried_until_the_time_is_over_and_then_left_alone(monkeypatch: pytest.MonkeyPatch):
    async def run() -> None:
        async with linked() as (cloud, link):
            cloud.error = Lost("nobody answers")
            with pytest.raises(Lost, match="nobody"):
                await link.connected(soon(0.2))
            tried = cloud.opened
            assert 2 <= tried <= 6 and link.resting == "nobody answers"
            for _ in range(10):
                with pytest.raises(Lost, match="nobody"):
                    await link.connected(soon(10))  # at once
            assert cloud.opened <= tried + 1
            assert await until(lambda: cloud.opened >= tried + 3)  # in the background, ever more rarely
            assert link._pause > 2 * 0.05
            cloud.error = None
            assert await until(lambda: not link.resting)
            assert link.connection is not None and await link.connected(soon(1)) is link.connection
            link.went_well()
            assert link._pause == 0.05

    monkeypatch.setattr(link_module, "_LEAST", 0.05)
    asyncio.run(run())


def test_a_cloud_that_does_not_fit_is_not_tried_again():
    async def run() -> None:
        async with linked() as (cloud, link):
            cloud.error = Refused("Both sides have other models.")
            with pytest.raises(Refused):
                await link.connected(soon(10))
            assert cloud.opened == 1

    asyncio.run(run())
