"""DRAGON's two sides over real connections: what they agree on, what they refuse, how they end, how long it takes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import websockets
from dragon_tables import NOTHING, TableNode, by_itself, exact, left_over
from waiting import PATIENCE, until

from ondevice_papers.dragon import decisions, messages
from ondevice_papers.dragon.speculative_aggregation import Stream
from ondevice_programs.pair import wire
from ondevice_programs.pair.answer import Answer, Asked
from ondevice_programs.pair.cloud import Cloud, Limits
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.wire import Connection, Refused, client_tls, server_tls

QUICK = dict(beat=0.05, silence=0.5)
ASKED = Asked(limit=12, mode="shared", seed=5)
RIGHT = exact(TableNode(2), TableNode(1, 0.3), ASKED).tokens
ALONE = by_itself(TableNode(2), ASKED, Stream.DEVICE, [])
ALONE_OF = {mode: by_itself(TableNode(2), replace(ASKED, mode=mode), Stream.DEVICE, [])
            for mode in ("shared", "token-wise", "sequence-wise", "cloud-only")}  # fmt: skip


def ask(
    device: TableNode, cloud: TableNode | None, asked: Asked = ASKED, query: str = "q", server=None, client=None
) -> Answer:
    """One answer; without a cloud nobody listens."""

    async def run() -> Answer:
        if cloud is None:
            with nobody_s_port() as port, Device(device, port=port, patience=0.3, **QUICK) as asking:
                return await asking.ask(query, asked)
        async with Cloud(cloud, **QUICK).listening(tls=server) as port:
            with Device(device, "localhost", port, tls=client, **QUICK) as asking:
                return await asking.ask(query, asked)

    async def whole() -> Answer:
        found = await run()
        assert await until(lambda: not list(left_over()))
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
        (dict(model="another", name="larger"), "weights .*cloud larger, .* device tables"),
        (dict(version=7), f"cloud .* version 7 .* device version {messages.VERSION}"),
    ],
    ids=lambda found: found if isinstance(found, str) else None,
)
@pytest.mark.parametrize("mode", ["shared", "sequence-wise", "cloud-only"])
def test_sides_that_do_not_fit_say_what_differs(other: dict, named: str, mode):
    with pytest.raises(Refused, match=named):
        ask(TableNode(2), TableNode(1, 0.3, **other), replace(ASKED, mode=mode))


@pytest.mark.parametrize("header", [None, "no base64", "AAAA"])
def test_a_web_client_is_told_what_this_is(header: str | None):
    async def run() -> str:
        async with Cloud(TableNode(1), **QUICK).listening() as port:
            with pytest.raises(websockets.exceptions.InvalidStatus) as caught:
                await websockets.connect(
                    f"ws://127.0.0.1:{port}", proxy=None, additional_headers={wire.HEADER: header} if header else {}
                )
            assert caught.value.response.status_code == 409
            return caught.value.response.body.decode()

    told = asyncio.run(run())
    assert told == (
        "This is a DRAGON cloud; what connects is no DRAGON device." if header is None else
        "The other side speaks another version of the protocol; install the same on both."
    )  # fmt: skip


# Requests that cannot be


@pytest.mark.parametrize(
    "wrong, named",
    [
        (dict(k=0), "A request's k cannot be 0: "),
        (dict(mode="quick"), "A request's mode cannot be 'quick': "),
        (dict(temperature=-1.0), "A request's temperature cannot be -1.0: "),
        (dict(temperature=float("nan")), "temperature takes finite numbers, not nan"),
    ],
    ids=lambda found: found if isinstance(found, str) else None,
)
def test_a_request_that_cannot_be_names_what_is_wrong(wrong: dict, named: str):
    with pytest.raises(ValueError) as caught:
        ask(TableNode(2), None, replace(ASKED, **wrong))
    assert str(caught.value).startswith(named)


@pytest.mark.parametrize("query", ["", " \n"])
def test_an_empty_query_is_refused(query: str):
    with pytest.raises(ValueError, match="query"):
        ask(TableNode(2), None, query=query)


@pytest.mark.parametrize("mode", ["shared", "token-wise", "sequence-wise"])
def test_a_device_without_a_document_for_the_query_says_so(mode):
    with pytest.raises(ValueError, match="document, not 0"):
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
@pytest.mark.parametrize(
    "limits, named",
    [
        (Limits(tokens=5), "An answer has at most 5 tokens here, not 12."),
        (Limits(k=1), "A session has at most 1 documents here, not 2."),
        (Limits(sessions=0), "The cloud has 0 sessions already."),
        (Limits(memory=20), "The cloud's memory for sessions, 0 MB, is taken."),
    ],
    ids=lambda found: found if isinstance(found, str) else None,
)
def test_a_cloud_has_its_limits(mode, limits, named):
    async def run() -> Answer:
        async with Cloud(TableNode(1), limits=limits, **QUICK).listening() as port:
            with Device(TableNode(2), port=port, **QUICK) as device:
                return await device.ask("q", replace(ASKED, mode=mode))

    found = asyncio.run(run())
    assert (found.alone_from, found.reason) == (0, named)


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


def test_a_device_whose_model_fails_raises_what_it_was():
    with pytest.raises(RuntimeError, match="hole"):
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
    assert "was not drawn" in found.reason and found.alone_from == 3 and len(found.tokens) == 12


# Who listens, and who connects


def test_nobody_listens():
    start = time.perf_counter()
    found = ask(TableNode(2), None)
    assert found.tokens == ALONE and found.alone_from == 0 and "nobody answers at 127.0.0.1:" in found.reason
    assert time.perf_counter() - start > 0.25 and found.connections == 0


@pytest.mark.parametrize(
    "reply, named",
    [
        (b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", "HTTP"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "is no DRAGON cloud"),
    ],
)
def test_a_stranger_listens(reply: bytes, named: str):
    async def run() -> Answer:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(reply)
            while await reader.read(2**12):
                pass
            writer.close()

        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with Device(TableNode(2), port=port, **QUICK) as device:
                return await device.ask("q", ASKED)

    with pytest.raises(Refused, match=named):
        asyncio.run(run())


def test_a_port_in_use_is_named():
    async def run() -> None:
        async with Cloud(TableNode(1)).listening() as port:
            with pytest.raises(ValueError, match=f"127.0.0.1:{port}"):
                async with Cloud(TableNode(1)).listening(port=port):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "example.org", ""])
def test_listening_to_other_machines_needs_tls(host: str):
    async def run() -> None:
        async with Cloud(TableNode(1)).listening(host):
            pass

    with pytest.raises(ValueError, match="TLS"):
        asyncio.run(run())


STRANGERS = {
    "web": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(range(256)) * 40,
    "silent": b"",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_stranger_is_shown_out_and_the_next_device_is_served(name: str):
    async def run() -> None:
        async with Cloud(TableNode(1, 0.3), **QUICK).listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(STRANGERS[name])
            async with asyncio.timeout(PATIENCE):
                await reader.read()
            writer.close()
            with Device(TableNode(2), port=port, **QUICK) as device:
                found = await device.ask("q", ASKED)
            assert found.tokens == RIGHT and found.alone_from is None

    asyncio.run(run())


WRONG = {
    "text": "words",
    "garbage": b"\xc1garbage",
    "large": bytes(2**21),
    "nobody's": messages.encode(messages.Target("nobody's", 0, 0, 1, True)),
    "an end": messages.encode(messages.End("nobody's", 1)),
    "a session that is not": messages.encode(messages.Resume("nobody's", 0, 0, False)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_messages_end_a_connection_at_most(name: str):
    async def run() -> None:
        async with Cloud(TableNode(1, 0.3), **QUICK).listening() as port:
            hello = {wire.HEADER: wire._shown(TableNode(2).hello)}
            async with websockets.connect(f"ws://127.0.0.1:{port}", proxy=None, additional_headers=hello) as stranger:
                await stranger.send(WRONG[name])
                if name == "a session that is not":
                    failure = messages.decode(await stranger.recv())
                    assert isinstance(failure, messages.Failure) and failure.reason.startswith("There is no session")
                elif name in ("text", "garbage", "large"):
                    with pytest.raises(websockets.exceptions.ConnectionClosed):
                        await stranger.recv()
            with Device(TableNode(2), port=port, **QUICK) as device:
                assert (await device.ask("q", ASKED)).tokens == RIGHT

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["shared", "cloud-only"])
def test_64_devices_at_once_and_one_more(mode):
    asked = [replace(ASKED, seed=seed, mode=mode) for seed in range(Limits().sessions)]
    right = [
        by_itself(TableNode(1, 0.3), one, Stream.CLOUD, []) if mode == "cloud-only" else
        exact(TableNode(2), TableNode(1, 0.3), one).tokens for one in asked
    ]  # fmt: skip

    async def run() -> tuple[list[Answer], Answer]:
        node, gate = TableNode(1, 0.3), threading.Event()
        made = node.decoder
        node.decoder = lambda *given: (gate.wait(PATIENCE), made(*given))[1]  # type: ignore[method-assign]
        cloud = Cloud(node)
        async with cloud.listening() as port:
            with contextlib.ExitStack() as stack:
                devices = [stack.enter_context(Device(TableNode(2), port=port, patience=PATIENCE)) for _ in asked]
                asking = [asyncio.create_task(device.ask("q", one)) for device, one in zip(devices, asked, strict=True)]
                try:
                    assert await until(lambda: len(cloud._sessions) == len(asked))
                    with Device(TableNode(2), port=port) as another:
                        more = await another.ask("q", replace(ASKED, mode=mode))
                finally:
                    gate.set()
                found = await asyncio.gather(*asking)
                assert await until(lambda: not cloud._sessions)
        assert await until(lambda: not list(left_over()))
        return found, more

    found, more = asyncio.run(run())
    assert [answer.tokens for answer in found] == right and all(answer.alone_from is None for answer in found)
    assert (more.alone_from, more.reason) == (0, "The cloud has 64 sessions already.")


def test_a_device_that_vanishes_is_forgotten_after_a_while():
    def vanish(device: Device) -> None:
        """Close its connection so that it does not come back. In one step: a busy machine reconnects between two."""
        device.port = 1
        device.link.connection._socket.transport.abort()

    async def run() -> None:
        cloud = Cloud(TableNode(1, delay=0.01), keep=1.0)
        async with cloud.listening() as port:
            with Device(TableNode(2, delay=0.01), port=port) as device:
                asking = asyncio.create_task(device.ask("q", replace(ASKED, limit=1000)))
                assert await until(lambda: bool(cloud._sessions))
                device._loop.call_soon_threadsafe(vanish, device)
                assert await until(lambda: any(session.connection is None for session in cloud._sessions.values()))
                assert cloud._sessions  # it may come back
                assert await until(lambda: not cloud._sessions)
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
        assert await until(lambda: not list(left_over()))

    asyncio.run(run())


def test_a_cancelled_answer_leaves_nothing():
    async def run() -> None:
        cloud = Cloud(TableNode(1, delay=0.01), **QUICK)
        async with cloud.listening() as port:
            with Device(TableNode(2, delay=0.01), port=port, **QUICK) as device:
                asking = asyncio.create_task(device.ask("q", replace(ASKED, limit=1000)))
                assert await until(lambda: bool(cloud._sessions))
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                assert await until(lambda: not cloud._sessions)
                found = await device.ask("q", ASKED)  # and the connection serves the next one
            assert found.tokens == RIGHT[:0] or len(found.tokens) == 12
        assert await until(lambda: not list(left_over()))

    asyncio.run(run())


# Never left waiting


def thrice(asked: Asked, patience: float, node: TableNode) -> tuple[list[Answer], list[float]]:
    """Three answers with this cloud, and how long each took."""

    async def run() -> tuple[list[Answer], list[float]]:
        async with Cloud(node, **QUICK).listening() as port:
            with Device(TableNode(2), port=port, patience=patience) as device:
                await asyncio.to_thread(device.connect)
                answers, times = [], []
                for _ in range(3):
                    begin = time.perf_counter()
                    answers.append(await device.ask("q", asked))
                    times.append(time.perf_counter() - begin)
        return answers, times

    return asyncio.run(run())


@pytest.mark.parametrize("mode", ["shared", "token-wise", "sequence-wise", "cloud-only"])
@pytest.mark.parametrize("aggregator", ["device", "cloud"])
def test_a_starved_cloud_is_not_waited_for_and_then_left_alone(mode, aggregator):
    asked = replace(ASKED, mode=mode, aggregator=aggregator)
    answers, times = thrice(asked, 0.4, TableNode(1, 0.3, delay=30.0))
    assert [found.alone_from for found in answers] == [0, 0, 0]
    assert answers[0].reason == "the cloud was silent for 0.4 s" and 0.35 < times[0] < 1.5
    assert max(times[1:]) < 0.3 and [found.tokens for found in answers] == [ALONE_OF[mode]] * 3


def test_a_cloud_that_is_back_is_used_again():
    async def run() -> None:
        node = TableNode(1, 0.3, delay=30.0)
        async with Cloud(node, **QUICK).listening() as port:
            with Device(TableNode(2), port=port, patience=0.3) as device:
                assert (await device.ask("q", ASKED)).alone_from == 0
                node.lm.delay = 0.0
                for decoder in node.decoders:
                    decoder.interrupt()
                assert (await device.ask("q", ASKED)).alone_from == 0  # it rests
                assert await until(lambda: not device.link.resting)
                found = await device.ask("q", ASKED)
                assert found.alone_from is None and found.tokens == RIGHT

    asyncio.run(run())


# A connection that is kept, tokens as they come, and where they come from


def test_answers_share_a_connection_and_stream():
    async def run() -> None:
        connections: list[Connection] = []
        cloud = Cloud(TableNode(1, 0.3, delay=0.001), **QUICK)  # the device's drafts wait for the cloud's
        handle = cloud._handle
        cloud._handle = lambda connection: (connections.append(connection), handle(connection))[1]
        async with cloud.listening() as port:
            with Device(TableNode(2), port=port, **QUICK) as device:
                for _ in range(5):
                    tokens: list[int] = []
                    drafts: list[list[int]] = []
                    found = await device.ask("q", ASKED, tokens.append, drafts.append)
                    assert tokens == found.tokens == RIGHT and any(drafts) and drafts[-1] == []
                    assert [(side, one.file, one.paragraph) for side, one in sorted(found.sources)] == [
                        ("cloud", "tables.txt", 1), ("device", "tables.txt", 1)
                    ]  # fmt: skip
                    assert set(found.left) == {"Begin", "Target", "End"} and sum(found.left.values()) == found.sent
                    assert all(0 <= share <= 1 for share in found.leaning)
        assert len(connections) == 1

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
    (folder / "ca").write_text(
        "[ca]\ndefault_ca=c\n[c]\ndatabase=issued\nserial=serial\nnew_certs_dir=.\ndefault_md=sha256\npolicy=p\n"
        "x509_extensions=e\n[p]\ncommonName=supplied\n[e]\nsubjectAltName=DNS:localhost,IP:127.0.0.1\n"
    )
    (folder / "issued").write_text("")
    (folder / "serial").write_text("01\n")
    openssl(folder, "req", "-new", *key, "-keyout", "old.key", "-out", "old.csr", "-subj", "/CN=old")
    dates = ["-startdate", "20200101000000Z", "-enddate", "20200102000000Z"]
    openssl(folder, "ca", "-batch", "-config", "ca", "-selfsign", "-keyfile", "old.key", "-in", "old.csr", *dates,
            "-out", "old.pem", "-notext")  # fmt: skip
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
    with pytest.raises(Refused, match=r"localhost:\d+ .* issuer"):
        ask(TableNode(2), TableNode(1), server=server, client=client_tls(certificates / "ours-root.pem"))


@pytest.mark.parametrize("shown", [None, "theirs"])
def test_tls_refuses_a_device_without_the_right_certificate(certificates: Path, shown: str | None):
    root = certificates / "ours-root.pem"
    server = server_tls(certificates / "ours.pem", certificates / "ours.key", root)
    own = [certificates / f"{shown}.pem", certificates / f"{shown}.key"] if shown else []
    found = ask(TableNode(2), TableNode(1), server=server, client=client_tls(root, *own))
    assert found.alone_from == 0 and found.reason.endswith("it may not accept this device's certificate")


def test_a_device_with_tls_at_a_plain_cloud_is_told(certificates: Path):
    found = ask(TableNode(2), TableNode(1), client=client_tls(certificates / "ours-root.pem"))
    assert found.alone_from == 0 and "does not speak TLS, which --authority here asks for" in found.reason


def test_a_plain_device_at_a_cloud_with_tls_is_told(certificates: Path):
    server = server_tls(certificates / "ours.pem", certificates / "ours.key")
    found = ask(TableNode(2), TableNode(1), server=server)
    assert found.alone_from == 0 and found.reason.endswith("speaks TLS, which needs --authority here")


def test_a_certificate_that_expired_is_named(certificates: Path):
    server = server_tls(certificates / "old.pem", certificates / "old.key")
    with pytest.raises(Refused, match="expired"):
        ask(TableNode(2), TableNode(1), server=server, client=client_tls(certificates / "old.pem"))


def test_files_that_are_no_certificates_are_named(certificates: Path):
    with pytest.raises(ValueError, match=r"ours\.key and ours\.pem"):
        server_tls(certificates / "ours.key", certificates / "ours.pem")
    with pytest.raises(ValueError, match="names"):
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
    common = ["--model", "pydocs-lm-small", "--documents", str(folder), "--reranker", "none"]
    call = [sys.executable, "-m", "ondevice_programs.pair", command, *common]
    return subprocess.Popen(
        [*call, *words], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "TQDM_DISABLE": "1"}, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


@pytest.mark.gate
def test_an_empty_private_folder_can_ask(tmp_path_factory, served):
    empty = tmp_path_factory.mktemp("empty")
    device = start("device", empty, "--connect", f"127.0.0.1:{served[1]}", "--query", "What does a bird do?", "--limit",
                   "6", "--k", "1", "--json", "--patience", "60")  # fmt: skip
    text, note = device.communicate(timeout=600)
    assert device.returncode == 0, note
    account = json.loads(text)
    assert f"{empty} has no document: answers come from the cloud's documents alone." in note
    assert account["share"] == 0.0 and account["alone_from"] is None
    assert [source["side"] for source in account["sources"]] == ["cloud"]
    assert account["words"]["cloud_could_read"] == account["words"]["answer"] > 0
    assert account["words"]["in_private_text"] == []


def test_a_reranker_that_one_side_lacks_is_refused_in_a_sentence(served):
    start_with = ["device", served[2], "--connect", f"127.0.0.1:{served[1]}", "--query", "What does a bird do?"]
    device = start(*start_with, "--reranker", "minilm-reranker")  # type: ignore[arg-type]
    text, note = device.communicate(timeout=240)
    assert device.returncode == 3 and not text
    assert "by BM25's share of the question over 0.03125, the device by minilm-reranker (" in note
    assert note.strip().endswith("give both sides the same --reranker.") and "Traceback" not in note
    device = start(*start_with, "--reranker", "nowhere/at-all")  # type: ignore[arg-type]
    text, note = device.communicate(timeout=240)
    assert device.returncode == 2 and not text and "nowhere/at-all" in note and "Traceback" not in note


def test_a_question_longer_than_the_context_is_refused_in_a_sentence(served):
    device = start("device", served[2], "--connect", f"127.0.0.1:{served[1]}", "--query", "a bird " * 1000)
    text, note = device.communicate(timeout=120)
    assert device.returncode == 2 and not text and "no room behind it in the model's context of 1024" in note
    assert note.count("ondevice-pair device:") == 1 and "Traceback" not in note


def test_both_commands_answer_and_are_interrupted(served):
    cloud, port, folder = served
    common = ["--connect", f"127.0.0.1:{port}", "--part", "2/2", "--query", "What does a bird do?"]
    common += ["--patience", "60"]  # two seconds, the default, are too few on a busy machine
    slow = start("device", folder, *common, "--limit", "500", "--pace-ms", "3000", "--k", "1")
    device = start("device", folder, *common, "--limit", "6", "--temperature", "0", "--k", "1")
    text, note = device.communicate(timeout=600)
    assert device.returncode == 0, note
    assert text.strip() and "alone" not in note and "Drafts accepted: device" in note
    assert "(device, " in note and "(cloud, " in note and "Left this device: " in note
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
    first, second, *_, left, _ = notes.splitlines()[2:]  # behind what prompts and relevance are made of
    assert device.returncode == 0 and text.strip() and left == "Nothing left this device."
    assert first.startswith(f"No cloud at {address}: nobody answers at {address} (")
    assert second.startswith(f"The device answered alone: nobody answers at {address} (")


# How long it takes
