"""DRAGON's two sides over real connections: what they agree on, what they refuse, how they end, how long it takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from dragon_tables import NOTHING, CloudProcess, TableNode, begin_of, by_itself, exact, left_over
from waiting import PATIENCE, one_of, until

from ondevice.dragon import decisions, messages
from ondevice.dragon.live import cloud as cloud_module
from ondevice.dragon.live import frames
from ondevice.dragon.live.cloud import Cloud
from ondevice.dragon.live.connection import client_tls, server_tls
from ondevice.dragon.live.device import Answer, Asked, Device
from ondevice.dragon.live.remote import Remote
from ondevice.dragon.simulator import CLOUD, DEVICE, World, simulate
from ondevice.dragon.speculative_aggregation import Stream
from ondevice.network.link import Link
from ondevice.network.relay import Relay

QUICK = dict(beat=0.05, silence=0.5)
ASKED = Asked(limit=12, mode="shared", seed=5)
RIGHT = exact(TableNode(2), TableNode(1, 0.3), ASKED).tokens
ALONE = by_itself(TableNode(2), ASKED, Stream.DEVICE, [])


def ask(
    device: TableNode, cloud: TableNode | None, asked: Asked = ASKED, query: str = "q", server=None, client=None
) -> Answer:
    """One answer; without a cloud nobody listens."""

    async def run() -> Answer:
        if cloud is None:
            with nobody_s_port() as port:
                return await Device(device, port=port, patience=0.3, **QUICK).ask(query, asked)
        async with Cloud(cloud, **QUICK).listening(tls=server) as port:
            return await Device(device, "localhost", port, tls=client, patience=0.3, **QUICK).ask(query, asked)

    async def whole() -> Answer:
        found = await run()
        assert list(left_over()) == []
        return found

    return asyncio.run(whole())


@contextlib.contextmanager
def nobody_s_port() -> Iterator[int]:
    """Nobody listens there, and for that long nobody else can."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


# What the two must have alike


@pytest.mark.parametrize(
    "other, named",
    [
        (dict(model="another"), "model 'another', this one 'table'"),
        (dict(tokenizer="letters"), "tokenizer 'letters', this one 'numbers'"),
        (dict(vocabulary=4), "vocabulary 4, this one 3"),
        (dict(version=7), "version 7, this one 2"),
    ],
    ids=lambda found: found if isinstance(found, str) else None,
)
@pytest.mark.parametrize("mode", ["shared", "sequence-wise", "cloud-only"])
def test_sides_that_do_not_fit_say_what_differs(other: dict, named: str, mode):
    with pytest.raises(ValueError, match=f"^The other side has the {named}; they cannot work together.$"):
        ask(TableNode(2), TableNode(1, 0.3, **other), replace(ASKED, mode=mode))


@pytest.mark.parametrize("speaker", ["device", "cloud"])
def test_another_version_of_the_frames_is_one_clear_error(monkeypatch, speaker: str):
    """The peer's first byte that differs is the version's, whatever follows it."""
    replies: list[bytes] = []

    async def other_cloud(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"DRG\x09whatever that is")
        await reader.read()
        writer.close()

    async def run() -> None:
        if speaker == "cloud":
            server = await asyncio.start_server(other_cloud, "127.0.0.1", 0)
            try:
                await Device(TableNode(2), port=server.sockets[0].getsockname()[1], **QUICK).ask("q", ASKED)
            finally:
                server.close()
        async with Cloud(TableNode(1), **QUICK).listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"DRG\x09whatever that is")
            replies.append(await reader.read())
            writer.close()

    if speaker == "cloud":
        with pytest.raises(ValueError, match=r"^The other side speaks version 9 of the protocol, this one 2\.$"):
            asyncio.run(run())
    else:
        asyncio.run(run())
        bodies = [messages.decode(body[4:]) for body in frames.Reader().feed(replies[0])]
        failures = [message.reason for message in bodies if isinstance(message, messages.Failure)]
        assert failures == ["The other side speaks version 9 of the protocol, this one 2."]


# Requests that cannot be


@pytest.mark.parametrize(
    "wrong, named",
    [
        (dict(k=0), "A request's k cannot be 0: "),
        (dict(limit=0), "A request's limit cannot be 0: "),
        (dict(mode="quick"), "A request's mode cannot be 'quick': "),
        (dict(aggregator="both"), "A request's aggregator cannot be 'both': "),
        (dict(scheduler="often"), "A request's scheduler cannot be 'often': "),
        (dict(lookahead=0), "A request's lookahead cannot be 0: "),
        (dict(cap=3), "A request's cap cannot be 3: "),
        (dict(gamma_remote=1.5), "A request's gamma_remote cannot be 1.5: "),
        (dict(temperature=-1.0), "A request's temperature cannot be -1.0: "),
        (dict(temperature=float("nan")), "temperature takes finite numbers, not nan"),
        (dict(seed=-1), "A request's seed cannot be -1: "),
    ],
    ids=lambda found: found if isinstance(found, str) else None,
)
def test_a_request_that_cannot_be_names_what_is_wrong(wrong: dict, named: str):
    with pytest.raises(ValueError) as caught:
        ask(TableNode(2), None, replace(ASKED, **wrong))
    assert str(caught.value).startswith(named)


@pytest.mark.parametrize("query", ["", " \n"])
def test_an_empty_query_is_refused(query: str):
    with pytest.raises(ValueError, match=r"The query is empty\."):
        ask(TableNode(2), None, query=query)


@pytest.mark.parametrize("mode", ["shared", "token-wise", "sequence-wise"])
def test_a_device_without_a_document_for_the_query_says_so(mode):
    with pytest.raises(ValueError, match="at least one document, not 0"):
        ask(TableNode(2), TableNode(1), replace(ASKED, mode=mode), NOTHING)


@pytest.mark.parametrize("mode", ["shared", "cloud-only", "sequence-wise"])
def test_a_cloud_without_a_document_leaves_the_device_alone(mode):
    device = TableNode(2)
    device.decoder = lambda *_: TableNode(2).decoder("something", 1)  # type: ignore[method-assign]
    asked = replace(ASKED, mode=mode)
    found = ask(device, TableNode(1), asked, NOTHING)
    assert (found.alone_from, found.reason) == (0, "A side decodes with at least one document, not 0.")
    assert found.tokens == by_itself(TableNode(2), asked, Stream.DEVICE, [])


@pytest.mark.parametrize("mode", ["shared", "cloud-only", "sequence-wise"])
def test_a_cloud_has_its_longest_answer(mode):
    async def run() -> Answer:
        async with Cloud(TableNode(1), longest=5, **QUICK).listening() as port:
            return await Device(TableNode(2), port=port, **QUICK).ask("q", replace(ASKED, mode=mode))

    found = asyncio.run(run())
    assert (found.alone_from, found.reason) == (0, "An answer has at most 5 tokens here, not 12.")


# A side that fails


@pytest.mark.parametrize("aggregator", ["device", "cloud"])
def test_a_cloud_whose_model_fails_leaves_an_exact_beginning(aggregator):
    asked = replace(ASKED, aggregator=aggregator, lookahead=2)
    found = ask(TableNode(2), TableNode(1, 0.3, failing_at=7), asked)
    assert found.reason == "The table has a hole." and found.alone_from is not None and found.alone_from <= 7
    assert found.tokens[: found.alone_from] == RIGHT[: found.alone_from]
    assert found.tokens == [
        *RIGHT[: found.alone_from],
        *by_itself(TableNode(2), asked, Stream.DEVICE, RIGHT[: found.alone_from]),
    ]


def test_a_cloud_that_generates_alone_and_fails_says_why():
    found = ask(TableNode(2), TableNode(1, failing_at=7), replace(ASKED, mode="cloud-only"))
    assert found.reason == "The table has a hole." and len(found.tokens) == 12


def test_an_answer_that_is_whole_when_the_cloud_goes_is_whole(monkeypatch):
    send = Remote._send

    def without_end(self: Remote, message: messages.Message) -> None:
        if isinstance(message, messages.End):
            self._loop.call_soon_threadsafe(self.connection._writer.transport.abort)
        else:
            send(self, message)

    monkeypatch.setattr(Remote, "_send", without_end)
    asked = replace(ASKED, mode="cloud-only")
    found = ask(TableNode(2), TableNode(1), asked)
    assert found.tokens == by_itself(TableNode(1), asked, Stream.CLOUD, []) and found.alone_from is None


def test_a_device_whose_model_fails_raises_what_it_was():
    with pytest.raises(RuntimeError, match=r"The table has a hole\."):
        ask(TableNode(2, failing_at=4), TableNode(1))


@pytest.mark.parametrize("aggregator", ["device", "cloud"])
@pytest.mark.parametrize("liar", [Stream.DEVICE, Stream.CLOUD])
def test_a_draft_that_cannot_be_ends_the_session_and_not_the_answer(monkeypatch, aggregator, liar):
    """One side's draft at position 3 is a token that the model does not have."""
    drafts, lies = decisions.drafts, [99]

    def lying(begin, stream):
        draw = drafts(begin, stream)
        return lambda position, p: lies.pop() if lies and (position, stream) == (3, liar) else draw(position, p)

    monkeypatch.setattr(decisions, "drafts", lying)
    asked = replace(ASKED, mode="speculative", aggregator=aggregator, lookahead=1)  # so that it is drafted once
    found = ask(TableNode(2), TableNode(1, 0.3), asked)
    assert "token id" in found.reason and found.alone_from == 3 and len(found.tokens) == 12


# Who listens, and who connects


def test_nobody_listens():
    start = time.perf_counter()
    found = ask(TableNode(2), None)
    assert found.tokens == ALONE and found.alone_from == 0 and "nobody answers at 127.0.0.1:" in found.reason
    assert time.perf_counter() - start > 0.25 and found.connections == 0


def test_a_stranger_listens():
    async def run() -> Answer:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            while await reader.read(2**12):
                pass
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await Device(TableNode(2), port=port, patience=0.2, **QUICK).ask("q", ASKED)

    found = asyncio.run(run())
    assert found.tokens == ALONE and found.reason == "what listens there is no DRAGON cloud" and not found.connections


@pytest.mark.parametrize("scheduler, least", [("stay", 0), ("greedy", 1)])
def test_moves_of_the_aggregator_are_counted(scheduler: str, least: int):
    """The cloud aggregates, and the device's drafts are rejected more often."""
    found = [ask(TableNode(2), TableNode(1, 0.3), replace(ASKED, scheduler=scheduler, aggregator=side, seed=seed))
             for side in ("device", "cloud") for seed in range(4)]  # fmt: skip
    assert all(answer.alone_from is None for answer in found)
    moves = sum(answer.moves for answer in found)
    assert moves >= least and (moves == 0) == (scheduler == "stay")


def test_a_port_in_use_is_named():
    async def run() -> None:
        async with Cloud(TableNode(1)).listening() as port:
            with pytest.raises(ValueError, match=f"Nothing can listen at 127.0.0.1:{port}: "):
                async with Cloud(TableNode(1)).listening(port=port):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_listening_to_other_machines_needs_tls(host: str):
    async def run() -> None:
        async with Cloud(TableNode(1)).listening(host):
            pass

    with pytest.raises(ValueError, match="needs TLS"):
        asyncio.run(run())


STRANGERS = {
    "web": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "large": frames.pack(b"x")[:4] + b"\xff" * 12,
    "silent": b"",
    "no greeting": frames.pack(bytes(4) + messages.encode(messages.End("s", 1))),
    "session that is not": frames.pack(bytes(4) + messages.encode(TableNode(1).hello))
    + frames.pack(b"\0\0\0\1" + messages.encode(messages.Resume("none", 0, 0, False))),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_shown_out_and_the_next_device_is_served(name: str):
    async def run() -> None:
        cloud = Cloud(TableNode(1, 0.3), **QUICK)
        async with cloud.listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STRANGERS[name])
            async with asyncio.timeout(PATIENCE):
                reply = await reader.read()
            bodies = [messages.decode(body[4:]) for body in frames.Reader().feed(reply)]
            kinds = (messages.Heartbeat, messages.Welcome, messages.Failure)
            assert all(isinstance(message, kinds) for message in bodies)
            writer.close()
            found = await Device(TableNode(2), port=port, **QUICK).ask("q", ASKED)
            assert found.tokens == RIGHT and found.alone_from is None

    asyncio.run(run())


def test_a_stranger_that_only_beats_its_heart_is_shown_out():
    async def run() -> None:
        async with Cloud(TableNode(1), **QUICK).listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for number in itertools.count():
                if reader.at_eof() or writer.is_closing():
                    break
                assert number < 1000
                writer.write(frames.pack(number.to_bytes(4, "big") + messages.encode(messages.Heartbeat(1.0))))
                await asyncio.sleep(0.05)
                while not reader.at_eof() and len(reader._buffer):  # type: ignore[attr-defined]
                    await reader.read(100)
            writer.close()
            assert number > 2

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["shared", "cloud-only"])
def test_64_devices_at_once_and_one_more(monkeypatch, mode):
    asked = [replace(ASKED, seed=seed, mode=mode) for seed in range(cloud_module.MOST)]
    right = [
        by_itself(TableNode(1, 0.3), one, Stream.CLOUD, []) if mode == "cloud-only" else
        exact(TableNode(2), TableNode(1, 0.3), one).tokens for one in asked
    ]  # fmt: skip

    async def run() -> tuple[list[Answer], Answer]:
        node, gate = TableNode(1, 0.3), threading.Event()
        made = node.decoder
        node.decoder = lambda *given: (gate.wait(PATIENCE), made(*given))[1]  # type: ignore[method-assign]
        cloud = Cloud(node, silence=PATIENCE)
        async with cloud.listening() as port:
            devices = [asyncio.create_task(Device(TableNode(2), port=port).ask("q", one)) for one in asked]
            try:
                assert await until(lambda: len(cloud._sessions) + cloud._remotes == len(asked))
                more = await Device(TableNode(2), port=port).ask("q", replace(ASKED, mode=mode))
            finally:
                gate.set()
            found = await asyncio.gather(*devices)
            assert await until(lambda: not cloud._sessions and not cloud._remotes)
        assert list(left_over()) == []
        return found, more

    found, more = asyncio.run(run())
    assert [answer.tokens for answer in found] == right and all(answer.alone_from is None for answer in found)
    assert (more.alone_from, more.reason) == (0, "The cloud has 64 sessions already.")


def test_a_device_that_vanishes_is_forgotten_after_a_while():
    async def run() -> None:
        node = TableNode(1, delay=0.01)
        cloud = Cloud(node, keep=3.0, **QUICK)
        async with cloud.listening() as port:
            asking = asyncio.create_task(
                Device(TableNode(2, delay=0.01), port=port).ask("q", replace(ASKED, limit=4000))
            )
            assert await until(lambda: bool(cloud._sessions))
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert await until(lambda: not cloud._handlers)
            assert cloud._sessions and list(left_over())  # it may come back
            assert await until(lambda: not cloud._sessions)
            assert await until(lambda: not any("drafting" in thread.name for thread in threading.enumerate()))
        assert await until(lambda: not list(left_over()))  # the task that forgets it has one more turn to take

    asyncio.run(run())


# TLS


def openssl(folder: Path, *words: str) -> None:
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory) -> Path:
    """A folder with two authorities, and for each a certificate for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    try:
        subprocess.run(["openssl", "version"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("there is no openssl to make certificates with")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for name in ("ours", "theirs"):
        root = ["req", "-x509", *key, "-keyout", f"{name}-root.key", "-out", f"{name}-root.pem", "-days", "2"]
        openssl(folder, *root, "-subj", f"/CN={name}")
        openssl(folder, "req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", "/CN=localhost")
        sign = ["x509", "-req", "-in", f"{name}.csr", "-CA", f"{name}-root.pem", "-CAkey", f"{name}-root.key"]
        openssl(folder, *sign, "-CAcreateserial", "-out", f"{name}.pem", "-days", "2", "-extfile", "names")
    return folder


def test_tls_with_the_right_authority(certificates: Path):
    server = server_tls(certificates / "ours.pem", certificates / "ours.key")
    found = ask(TableNode(2), TableNode(1, 0.3), server=server, client=client_tls(certificates / "ours-root.pem"))
    assert found.tokens == RIGHT and found.alone_from is None


def test_tls_with_certificates_on_both_sides(certificates: Path):
    root = certificates / "ours-root.pem"
    server = server_tls(certificates / "ours.pem", certificates / "ours.key", root)
    client = client_tls(root, certificates / "ours.pem", certificates / "ours.key")
    assert ask(TableNode(2), TableNode(1, 0.3), server=server, client=client).tokens == RIGHT


def test_tls_of_another_authority_is_refused(certificates: Path):
    server = server_tls(certificates / "theirs.pem", certificates / "theirs.key")
    with pytest.raises(ValueError, match=r"^The certificate of localhost:\d+ is not trusted: .*issuer certificate\.$"):
        ask(TableNode(2), TableNode(1), server=server, client=client_tls(certificates / "ours-root.pem"))


@pytest.mark.parametrize("shown", [None, "theirs"])
def test_tls_refuses_a_device_without_the_right_certificate(certificates: Path, shown: str | None):
    root = certificates / "ours-root.pem"
    server = server_tls(certificates / "ours.pem", certificates / "ours.key", root)
    own = [certificates / f"{shown}.pem", certificates / f"{shown}.key"] if shown else []
    found = ask(TableNode(2), TableNode(1), server=server, client=client_tls(root, *own))
    assert found.alone_from == 0 and "may not accept this side's certificate" in found.reason


@pytest.mark.parametrize("speaker", ["device", "cloud"])
def test_tls_on_one_side_alone_is_no_connection(certificates: Path, speaker: str):
    server = server_tls(certificates / "ours.pem", certificates / "ours.key") if speaker == "cloud" else None
    client = client_tls(certificates / "ours-root.pem") if speaker == "device" else None
    found = ask(TableNode(2), TableNode(1), server=server, client=client)
    assert found.alone_from == 0 and found.reason and found.tokens == ALONE


def test_files_that_are_no_certificates_are_named(certificates: Path):
    with pytest.raises(ValueError, match=r"ours\.key and ours\.pem are no certificate with its key"):
        server_tls(certificates / "ours.key", certificates / "ours.pem")
    with pytest.raises(ValueError, match="names holds no certificate"):
        client_tls(certificates / "names")


# Both commands, as processes


FOLDER = "a bird sings\n\na fish swims\n\nthe sky is blue\n\nthe grass is green and wet after the rain"


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[subprocess.Popen, int, Path]]:
    """`cloud` with a bundled model and a folder of texts, and its port."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "one.txt").write_text(FOLDER)
    process = start("cloud", folder, "--listen", "127.0.0.1:0", "--part", "1/2", "--until-input-ends")
    try:
        line = process.stdout.readline()
        assert line.startswith("Listening on 127.0.0.1:"), process.stderr.read()
        yield process, int(line.rsplit(":", 1)[1]), folder
    finally:
        process.kill()
        process.communicate()


def start(command: str, folder: Path, *words: str) -> subprocess.Popen:
    call = [sys.executable, "-m", "ondevice.dragon", command, "--model", "pydocs-lm-small", "--documents", str(folder)]
    return subprocess.Popen(
        [*call, *words], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TQDM_DISABLE": "1"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def test_both_commands_answer_and_are_interrupted(served):
    cloud, port, folder = served
    common = ["--connect", f"127.0.0.1:{port}", "--part", "2/2", "--query", "What does a bird do?"]
    slow = start("device", folder, *common, "--limit", "500", "--pace-ms", "3000", "--k", "1")
    device = start("device", folder, *common, "--limit", "6", "--temperature", "0", "--k", "1")
    text, note = device.communicate(timeout=120)
    assert device.returncode == 0, note
    assert text.strip() and "alone" not in note and "drafts accepted: device" in note
    while not psutil.Process(slow.pid).net_connections("tcp"):  # until it answers
        assert slow.poll() is None
        time.sleep(0.1)
    for process in (slow, cloud):
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        assert process.returncode == 130 and "Traceback" not in process.stderr.read()


def test_a_device_without_a_cloud_says_so_in_a_line(served):
    with nobody_s_port() as port:
        address = f"127.0.0.1:{port}"
        device = start("device", served[2], "--connect", address, "--query", "What does a bird do?", "--limit", "4",
                       "--k", "1", "--patience", "0.1")  # fmt: skip
        text, notes = device.communicate(timeout=120)
    first, second = notes.splitlines()
    assert device.returncode == 0 and text.strip() and second.endswith("received; alone]")
    assert first == f"No cloud at {address}; answered with this side's documents alone."


# How long it takes


PACES = dict(device=0.013, cloud=0.002)
SYSTEMS = {
    "device": (Asked(limit=16, mode="shared", seed=17), DEVICE),
    "cloud": (Asked(limit=16, mode="shared", seed=17, aggregator="cloud"), CLOUD),
    "token-wise": (Asked(limit=16, mode="token-wise", seed=17), DEVICE),
}


def simulated(asked: Asked, aggregator: int, accepted: np.ndarray, delay: float, paces: dict) -> float:
    """Seconds a token after the first."""
    link = Link(delay)
    world = World(accepted, **paces, up=link, down=link, lookahead=decisions.lookahead(begin_of(asked)))
    seen = simulate(world, aggregator).seen
    return float(seen[-1] - seen[0]) / (len(seen) - 1)


def measured(answer: Answer) -> dict:
    """The paces that the session's drafts did take, waits for the processor included."""
    device, cloud = np.array(answer.decisions)[:, 3:].T
    return dict(device=float(np.median(device)), cloud=float(np.median(cloud)))


def agrees(device: Device, asked: Asked, aggregator: int, delay: float, paces: dict) -> bool:
    """Whether an answer's time is the simulator's, at its own paces, which are put into `paces`."""
    accepted = exact(TableNode(2), TableNode(1, 0.3), asked).accepted
    answer = device.answer("q", asked)
    flags = [found[1:3] for found in answer.decisions]
    assert not flags or flags == [tuple(row) for row in accepted.tolist()]
    paces |= measured(answer) if flags else {}  # where the cloud decides its account is not here: the run before
    expected = simulated(asked, aggregator, accepted, delay, paces)
    print(f"{delay} s: {answer.per_token:.4f} s a token live, {expected:.4f} s simulated")
    return abs(answer.per_token / expected - 1) < 0.1


def test_the_simulator_s_time_is_the_live_time_within_a_tenth():
    """Where nothing disturbs an answer: each is asked again until one agrees."""
    options, paces = dict(pace=PACES["cloud"]), dict(PACES)
    with CloudProcess(dict(seed=1, log_weight=0.3), options) as cloud, Relay("127.0.0.1", cloud.port) as relay:
        device = Device(TableNode(2), port=relay.port, pace=PACES["device"])
        for delay, name in itertools.product((0.0, 0.02, 0.06), SYSTEMS):
            relay.set(up=Link(delay), down=Link(delay))
            assert one_of(20, partial(agrees, device, *SYSTEMS[name], delay, paces)), (name, delay)
