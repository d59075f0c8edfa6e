"""The relay in its own process: times as the model has them, order, bandwidth, faults, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest
from broken_relay import Burst, Corrupt, Cut, Drop, Relay, Repeat, Stall
from waiting import PATIENCE, least_time, one_of, wait_for

from ondevice.network.link import Line, Link

HOST = "127.0.0.1"
DATA = bytes(range(256)) * 4


@dataclass
class Target:
    """A server; each connection runs `serve` in a thread."""

    serve: Callable[[socket.socket], None]
    listener: socket.socket = field(default_factory=lambda: socket.create_server((HOST, 0), backlog=64))

    @property
    def port(self) -> int:
        return self.listener.getsockname()[1]

    def __enter__(self) -> Target:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # ends the accept
        self.listener.close()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                connection.settimeout(PATIENCE)
                threading.Thread(target=self._one, args=(connection,), daemon=True).start()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            self.serve(connection)


def echo(connection: socket.socket) -> None:
    while data := connection.recv(2**16):
        connection.sendall(data)


class Recorder:
    """Keeps what a connection brings: bytes, when each came, and how it ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.data = b""
        self.ended: list[str] = []

    def __call__(self, connection: socket.socket) -> None:
        try:
            while data := connection.recv(2**16):
                self.times += [time.monotonic()] * len(data)
                self.data += data
            self.ended.append("end")
        except ConnectionResetError:
            self.ended.append("reset")


@contextlib.contextmanager
def connected(relay: Relay) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, relay.port), PATIENCE) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


def read(client: socket.socket, amount: int) -> bytes:
    found = b""
    while len(found) < amount and (data := client.recv(2**16)):
        found += data
    return found


def one_byte_each(relay: Relay, target: Recorder, count: int) -> tuple[np.ndarray, np.ndarray]:
    """When each of `count` messages was sent and when it arrived, in seconds from the first.

    One is sent when the one before it is there: two that the relay reads together would be one message to it.
    """
    sent = []
    with connected(relay) as client:
        for number in range(count):
            sent.append(time.monotonic())
            client.sendall(bytes([number % 256]))
            wait_for(lambda there=number + 1: len(target.data) == there)
    assert target.data == bytes(number % 256 for number in range(count))
    return np.array(sent) - sent[0], np.array(target.times) - sent[0]


# Time


@pytest.mark.parametrize(
    ("link", "seed"),
    [
        (Link(), 0),
        (Link(0.1), 0),
        (Link(0.02, 0.1), 1),
        (Link(0.02, 0.1), 2),
        (Link(0.02, bandwidth=45.0), 0),
    ],
    ids=["none", "delay", "jitter", "other jitter", "bandwidth"],
)
def test_bytes_arrive_when_the_model_says(link, seed):
    """Message by message: so a relay that draws another jitter, or none, fails."""
    target = Recorder()
    with Target(target) as server, Relay(HOST, server.port, up=link, seed=seed) as relay:
        sent, arrived = one_byte_each(relay, target, 25)
    line = Line(link, seed, "up")
    added = arrived - [line.arrival(now, 1) for now in sent]
    assert added.min() > -1e-4
    assert np.median(added) < 0.02


def test_each_direction_has_its_link():
    with Target(echo) as server, Relay(HOST, server.port, Link(0.05), Link(0.2)) as relay, connected(relay) as client:

        def there_and_back() -> None:
            client.sendall(b"a")
            assert client.recv(1) == b"a"

        assert 0.25 <= least_time(there_and_back, below=0.3) < 0.3
        relay.set(up=Link(0.0), down=Link(0.02))
        assert 0.02 <= least_time(there_and_back, below=0.05) < 0.05


def test_a_change_does_not_overtake():
    target = Recorder()
    with Target(target) as server, Relay(HOST, server.port, Link(0.3)) as relay, connected(relay) as client:
        for number in range(20):  # so that some are under way whenever the link changes
            client.sendall(bytes([number]) * 50)
            if number == 10:
                relay.set(up=Link(0.0))
        wait_for(lambda: len(target.data) == 1000)
    assert target.data == b"".join(bytes([number]) * 50 for number in range(20))


def test_bandwidth_is_kept_and_shared(capfd):
    """Two connections send 150 kB each at 500 kB/s."""
    ends: list[float] = []

    def drain(connection: socket.socket) -> None:
        while connection.recv(2**16):
            pass
        ends.append(time.monotonic())

    with Target(drain) as server, Relay(HOST, server.port, Link(0.1, bandwidth=5e5)) as relay:

        def both() -> bool:
            ends.clear()
            begin = time.monotonic()
            with connected(relay) as one, connected(relay) as other:
                threads = [threading.Thread(target=c.sendall, args=(bytes(150_000),)) for c in (one, other)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
            wait_for(lambda: len(ends) == 2)
            assert ends[1] - begin >= 0.69 and ends[0] - begin >= 0.39
            return ends[1] - begin < 0.85

        assert one_of(20, both)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("link", "most"), [(Link(), 30e6), (Link(60.0), 80e6), (Link(bandwidth=1e5), 20e6)])
def test_a_sender_waits_as_with_a_full_window(link, most):
    """Where the receiver does not read, or what is under way is long in coming, or the wire is slow."""
    asleep = Target(lambda _: over.wait(PATIENCE))
    over = threading.Event()
    with asleep as server, Relay(HOST, server.port, link) as relay, connected(relay) as client:
        client.settimeout(0.3)
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 2 * most:
                sent += client.send(bytes(2**20))
        over.set()
        assert sent < most


def test_twenty_connections_at_once():
    link = Link(0.05, 0.05)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Target(echo))
        relay = stack.enter_context(Relay(HOST, server.port, link, link))
        clients = [stack.enter_context(connected(relay)) for _ in range(20)]

        def all_of_them() -> None:
            for part in range(10):
                for number, client in enumerate(clients):
                    client.sendall(bytes([number, part]) * 50)
            for number, client in enumerate(clients):
                assert read(client, 1000) == b"".join(bytes([number, part]) * 50 for part in range(10))

        assert 0.1 <= least_time(all_of_them, below=0.4) < 0.4


# Ends


def test_a_half_close_is_passed_on_behind_the_bytes():
    def answer(connection: socket.socket) -> None:
        total = 0
        while data := connection.recv(2**16):
            total += len(data)
        connection.sendall(str(total).encode())

    with Target(answer) as server, Relay(HOST, server.port, Link(0.1), Link(0.1)) as relay, connected(relay) as client:
        begin = time.monotonic()
        client.sendall(bytes(5000))
        client.shutdown(socket.SHUT_WR)
        assert read(client, 99) == b"5000"
        assert time.monotonic() - begin >= 0.2


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


def test_a_reset_of_either_end_is_passed_on():
    target = Recorder()
    with Target(target) as server, Relay(HOST, server.port, Link(0.1)) as relay, connected(relay) as client:
        client.sendall(b"abc")
        wait_for(lambda: target.data)
        begin = time.monotonic()
        reset(client)
        wait_for(lambda: target.ended)
        assert target.ended == ["reset"] and target.data == b"abc"
        assert time.monotonic() - begin >= 0.09

    def resets(connection: socket.socket) -> None:
        connection.recv(1)
        reset(connection)

    with Target(resets) as server, Relay(HOST, server.port) as relay, connected(relay) as client:
        client.sendall(b"a")
        assert take(client, 1) == (b"", "reset")


def test_an_unreachable_target_is_logged_once_and_clients_are_closed(capfd):
    with socket.socket() as taken:  # by nobody else, and nobody is served yet
        taken.bind((HOST, 0))
        port = taken.getsockname()[1]
        with Relay(HOST, port) as relay:
            for _ in range(3):
                with connected(relay) as client:
                    assert client.recv(1) == b""
            taken.listen()
            with Target(echo, taken), connected(relay) as client:
                client.sendall(b"a")
                assert client.recv(1) == b"a"
    said = capfd.readouterr().err
    assert said.count("does not reach") == 1 and f"{HOST}:{port}" in said and "Traceback" not in said


# Faults


@pytest.fixture(scope="module")
def echoing() -> Iterator[Relay]:
    with Target(echo) as server, Relay(HOST, server.port, Link(0.02), Link(0.02)) as relay:
        yield relay


@pytest.mark.parametrize("direction", ["up", "down"])
@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        (Cut, dict(at=100), DATA[:100]),
        (Cut, dict(at=100, reset=True), DATA[:100]),
        (Drop, dict(at=100, length=50), DATA[:100] + DATA[150:]),
        (Repeat, dict(at=100, length=50), DATA[:150] + DATA[100:]),
        (Corrupt, dict(at=100, length=2, mask=1), DATA[:100] + bytes([101, 100]) + DATA[102:]),
        (Stall, dict(at=100), DATA[:100]),
        (Burst, dict(at=100, length=50, seconds=0.2), DATA),
    ],
    ids=["cut", "reset", "drop", "repeat", "corrupt", "stall", "burst"],
)
def test_each_fault_in_each_direction(echoing, direction, kind, options, wanted):
    """It strikes the second connection of three; the others echo all."""
    echoing.set(faults=[kind(connection=1, direction=direction, **options)])
    for number in range(3):
        with connected(echoing) as client:
            begin = time.monotonic()
            client.sendall(DATA)
            if number != 1:
                assert take(client, len(DATA)) == (DATA, "open")
            elif kind is Cut:
                ended = "reset" if options.get("reset") else "end"
                assert take(client, 101) == (wanted if direction == "down" else b"", ended)
            else:
                assert take(client, len(wanted)) == (wanted, "open")
                assert kind is not Burst or time.monotonic() - begin >= 0.24
                client.settimeout(0.1)
                assert take(client, 1) == (b"", "open")  # and no more


def take(client: socket.socket, amount: int) -> tuple[bytes, str]:
    """Up to so many bytes, and how it stands: open, end or reset."""
    found = b""
    try:
        while len(found) < amount:
            data = client.recv(amount - len(found))
            if not data:
                return found, "end"
            found += data
    except TimeoutError:
        pass
    except ConnectionResetError:
        return found, "reset"
    return found, "open"


@pytest.mark.parametrize("cut_reset", [False, True])
def test_a_cut_at_a_time_needs_no_bytes_and_loses_what_is_on_the_link(cut_reset):
    target = Recorder()
    fault = Cut(after=0.2, reset=cut_reset)
    with Target(target) as server, Relay(HOST, server.port, Link(PATIENCE), faults=[fault]) as relay:
        begin = time.monotonic()
        with connected(relay) as client:
            client.sendall(b"abc")
            assert take(client, 1) == (b"", "reset" if cut_reset else "end")
            assert 0.19 <= time.monotonic() - begin < PATIENCE / 2
            wait_for(lambda: target.ended)
    assert target.ended == ["reset" if cut_reset else "end"] and target.data == b""


def test_a_stalled_connection_hides_the_end():
    target = Recorder()
    stalls = [Stall(at=3), Stall(at=0, connection=1)]
    with Target(target) as server, Relay(HOST, server.port, faults=stalls) as relay:
        with connected(relay) as client:
            client.sendall(bytes(100_000))
            wait_for(lambda: target.data)
        time.sleep(0.2)
        assert (target.data, target.ended) == (bytes(3), [])
        with connected(relay) as client:
            client.sendall(bytes(3))
            reset(client)
            time.sleep(0.2)
        assert (target.data, target.ended) == (bytes(3), [])


# Nothing is left


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_nothing_is_left_after_the_block():
    def there() -> tuple[set[psutil.Process], int]:
        return set(psutil.Process().children()), len(os.listdir("/proc/self/fd"))

    before = there()
    target = Recorder()
    with Target(target) as server:
        with Relay(HOST, server.port, Link(5.0), Link(5.0)) as relay, connected(relay) as client:
            client.sendall(b"abc")
            (child,) = set(psutil.Process().children()) - before[0]
            relay.__exit__()
            assert client.recv(1) == b""
        assert not child.is_running() and not listens(relay.port)
        wait_for(lambda: target.ended)
    wait_for(lambda: there() == before)
    assert target.ended == ["end"] and target.data == b""


def test_a_block_that_raises_ends_the_relay():
    before = psutil.Process().children()
    with pytest.raises(KeyError), Relay(HOST, 9) as relay:
        raise KeyError
    assert not listens(relay.port) and psutil.Process().children() == before


def test_the_relay_ends_with_a_killed_parent():
    code = (
        "import time; from ondevice.network.relay import Relay; relay = Relay('127.0.0.1', 9).__enter__();"
        "print(relay.port, relay._process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        port, pid = map(int, parent.stdout.readline().split())
        assert listens(port)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: gone(pid))
    assert not listens(port)


def test_a_killed_relay_is_told():
    with Relay(HOST, 9) as relay:
        assert relay._process
        relay._process.kill()
        relay._process.wait()
        with pytest.raises(RuntimeError, match="-9"):
            relay.set(up=Link(0.1))


# Bad input


def test_bad_relays_are_refused():
    before = psutil.Process().children()
    with pytest.raises(ValueError, match="Sinusoid"):
        Relay(HOST, 9, Link(lambda now: now))
    with pytest.raises(ValueError, match="with statement"):
        Relay(HOST, 9).set(up=Link())
    assert psutil.Process().children() == before
