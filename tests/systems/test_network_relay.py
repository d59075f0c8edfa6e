"""The relay in its own process: times as the model has them, order, bandwidth, ends, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil
import pytest
from waiting import PATIENCE, least_time, wait_for

from ondevice.network.link import Line, Link
from ondevice.network.relay import Relay

HOST = "127.0.0.1"


class Target(socketserver.ThreadingTCPServer):
    """A server that is bound at once and listens in its block; each connection runs `serve` in a thread."""

    daemon_threads, block_on_close, request_queue_size = True, False, 64

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        super().__init__((HOST, 0), None, bind_and_activate=False)  # type: ignore[arg-type]
        self.server_bind()
        self.serve, self.port = serve, self.server_address[1]

    def __enter__(self) -> Target:
        self.server_activate()
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def finish_request(self, request: socket.socket, address: object) -> None:
        request.settimeout(PATIENCE)
        with contextlib.suppress(OSError):
            self.serve(request)

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


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


def test_connections_share_the_bandwidth():
    sink, link = Recorder(), Link(bandwidth=50.0)
    with Target(sink) as server, Relay(HOST, server.port, link) as relay, connected(relay) as a, connected(relay) as b:
        begin = time.monotonic()
        for client in (a, b):
            client.sendall(bytes(5))
        wait_for(lambda: len(sink.data) == 10)
    assert sink.times[-1] - begin >= 10 / 50


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
    server = Target(echo)
    with Relay(HOST, server.port) as relay:
        for _ in range(3):
            with connected(relay) as client:
                assert client.recv(1) == b""
        with server, connected(relay) as client:
            client.sendall(b"a")
            assert client.recv(1) == b"a"
    said = capfd.readouterr().err
    assert said.count("does not reach") == 1 and f"{HOST}:{server.port}" in said and "Traceback" not in said


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
