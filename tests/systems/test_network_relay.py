"""The relay in its own process: times as the model has them, order, bandwidth, ends, and nothing left behind."""

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
from waiting import PATIENCE, least_time, one_of, wait_for

from ondevice.network.link import Line, Link
from ondevice.network.relay import Relay

HOST = "127.0.0.1"


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


def take(client: socket.socket, amount: int) -> tuple[bytes, str]:
    """Up to so many bytes, and how it stands: open, end or reset."""
    data = b""
    try:
        while len(data) < amount:
            if not (more := client.recv(amount - len(data))):
                return data, "end"
            data += more
    except ConnectionResetError:
        return data, "reset"
    return data, "open"


@contextlib.contextmanager
def connected(relay: Relay) -> Iterator[socket.socket]:
    with socket.create_connection((HOST, relay.port), PATIENCE) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield client


# Time


@pytest.mark.parametrize(
    ("link", "seed"), [(Link(0.1), 0), (Link(0.02, 0.1), 1), (Link(0.02, 0.1), 2), (Link(0.02, bandwidth=45.0), 0)],
    ids=["delay", "jitter", "other jitter", "bandwidth"],
)  # fmt: skip
def test_bytes_arrive_when_the_model_says(link, seed):
    """Message by message: so a relay that draws another jitter, or none, fails."""
    target, line, sent = Recorder(), Line(link, seed, "up"), list[float]()
    with Target(target) as server, Relay(HOST, server.port, up=link, seed=seed) as relay, connected(relay) as client:
        for number in range(25):  # two that the relay reads together would be one message to it
            sent.append(time.monotonic())
            client.sendall(b"a")
            wait_for(lambda there=number + 1: len(target.data) == there)
    added = np.array(target.times) - sent[0] - [line.arrival(now - sent[0], 1) for now in sent]
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
        assert take(client, 99) == (b"5000", "end")
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
