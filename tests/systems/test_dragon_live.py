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
from ondevice_programs.pair.answer import Answer, AnswerSettings
from ondevice_programs.pair.cloud import Cloud, Limits
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.wire import Connection, Refused, client_tls, server_tls

QUICK = dict(beat=0.05, silence=0.5)
ASKED = AnswerSettings(limit=12, mode="shared", temperature=1.0, seed=5)
RIGHT = exact(TableNode(2), TableNode(1, 0.3), ASKED).tokens


def ask(
    device: TableNode, cloud: TableNode | None, asked: AnswerSettings = ASKED, query: str = "q", server=None,
    client=None,
) -> Answer:
    """One answer; without a cloud nobody listens."""

    async def run() -> Answer:
        if cloud is None:
            with socket.socket() as bound:  # nobody listens there, and nobody else can
                bound.bind(("127.0.0.1", 0))
                with Device(device, port=bound.getsockname()[1], patience=0.3, **QUICK) as asking:
                    return await asking.ask(query, asked)
        async with Cloud(cloud, **QUICK).listening(tls=server) as port:
            with Device(device, "localhost", port, tls=client, **QUICK) as asking:
                return await asking.ask(query, asked)

    async def whole() -> Answer:
        found = await run()
        assert await until(lambda: not list(left_over()))
        return found

    return asyncio.run(whole())


# What the two must have alike


def test_sides_that_do_not_fit_are_refused():
    with pytest.raises(Refused, match="weights"):
        ask(TableNode(2), TableNode(1, 0.3, model="another"))


def test_a_web_client_is_refused():
    async def run() -> None:
        async with Cloud(TableNode(1), **QUICK).listening() as port:
            with pytest.raises(websockets.exceptions.InvalidStatus, match="409"):
                headers = {wire.HEADER: "no base64"}
                await websockets.connect(f"ws://127.0.0.1:{port}", proxy=None, additional_headers=headers)

    asyncio.run(run())


# Requests that cannot be


@pytest.mark.parametrize("wrong", [dict(k=0), dict(mode="quick"), dict(temperature=float("nan"))], ids=str)
def test_a_request_that_cannot_be_names_what_is_wrong(wrong: dict):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ask(TableNode(2), None, replace(ASKED, **wrong))


def test_an_empty_query_is_refused():
    with pytest.raises(ValueError, match="query"):
        ask(TableNode(2), None, query=" \n")


@pytest.mark.parametrize("mode", ["shared", "token-wise", "sequence-wise"])
def test_a_device_without_a_document_for_the_query_says_so(mode):
    with pytest.raises(ValueError, match="document"):
        ask(TableNode(2), TableNode(1), replace(ASKED, mode=mode), NOTHING)


@pytest.mark.parametrize("mode", ["shared", "cloud-only", "sequence-wise"])
@pytest.mark.parametrize(
    ("limits", "named"),
    [(None, "document"), (Limits(tokens=5), "5 tokens"), (Limits(k=1), "1 documents"), (Limits(sessions=0), "sessions"),
     (Limits(memory=20), "memory")],
)  # fmt: skip
def test_a_cloud_that_begins_no_session_leaves_the_device_alone(mode: str, limits: Limits | None, named: str):
    """Without a limit, it has no document for the query."""
    device, asked = TableNode(2), replace(ASKED, mode=mode)
    device.decoder = lambda *_: TableNode(2).decoder("something", 1)  # type: ignore[method-assign]

    async def run() -> Answer:
        async with Cloud(TableNode(1), limits=limits or Limits(), **QUICK).listening() as port:
            with Device(device, port=port, **QUICK) as asking:
                return await asking.ask("q" if limits else NOTHING, asked)

    answer = asyncio.run(run())
    assert answer.alone_from == 0 and named in answer.reason
    assert answer.tokens == by_itself(TableNode(2), asked, Stream.DEVICE, [])


# A side that fails


@pytest.mark.parametrize("changed", [dict(), dict(aggregator="cloud"), dict(mode="cloud-only")], ids=str)
def test_a_cloud_whose_model_fails_leaves_an_exact_beginning(changed: dict):
    asked = replace(ASKED, lookahead=2, **changed)
    answer = ask(TableNode(2), TableNode(1, 0.3, failing_at=7), asked)
    right = by_itself(TableNode(1), asked, Stream.CLOUD, []) if asked.mode == "cloud-only" else RIGHT
    assert "hole" in answer.reason and answer.alone_from is not None and answer.alone_from <= 7
    begun = right[: answer.alone_from]
    assert answer.tokens == [*begun, *by_itself(TableNode(2), asked, Stream.DEVICE, begun)]


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
    answer = ask(TableNode(2), None)
    assert answer.tokens == by_itself(TableNode(2), ASKED, Stream.DEVICE, [])
    assert (answer.alone_from, answer.connections) == (0, 0) and "127.0.0.1" in answer.reason


@pytest.mark.parametrize(
    "reply", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b"SSH-2.0-OpenSSH_9.6\r\n"]
)
def test_a_stranger_listens(reply: bytes):
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(reply)
        while await reader.read(2**12):
            pass
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            with Device(TableNode(2), port=server.sockets[0].getsockname()[1], **QUICK) as device:
                await device.ask("q", ASKED)

    with pytest.raises(Refused):
        asyncio.run(run())


def test_a_port_in_use_is_named():
    async def run() -> None:
        async with Cloud(TableNode(1)).listening() as port:
            with pytest.raises(ValueError, match=f"127.0.0.1:{port}"):
                async with Cloud(TableNode(1)).listening(port=port):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "example.org", ""])
def test_listening_to_other_machines_needs_tls(host: str):
    async def run() -> None:
        async with Cloud(TableNode(1)).listening(host):
            pass

    with pytest.raises(ValueError, match="TLS"):
        asyncio.run(run())


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", bytes(range(256)) * 40, b""])
def test_a_stranger_is_shown_out_and_the_next_device_is_served(sent: bytes):
    async def run() -> None:
        async with Cloud(TableNode(1, 0.3), **QUICK).listening() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            async with asyncio.timeout(PATIENCE):
                await reader.read()
            writer.close()
            with Device(TableNode(2), port=port, **QUICK) as device:
                assert (await device.ask("q", ASKED)).tokens == RIGHT

    asyncio.run(run())


RESUMED = messages.encode(messages.Resume("nobody's", 0, 0, False))
UNKNOWN = messages.encode(messages.Target("nobody's", 0, 0, 1, True))


@pytest.mark.parametrize("sent", ["words", b"\xc1garbage", bytes(2**21), RESUMED, UNKNOWN], ids=range(5))
def test_a_wrong_message_ends_a_connection_at_most(sent: str | bytes):
    async def run() -> None:
        async with Cloud(TableNode(1, 0.3), **QUICK).listening() as port:
            hello = {wire.HEADER: wire._shown(TableNode(2).hello)}
            async with websockets.connect(f"ws://127.0.0.1:{port}", proxy=None, additional_headers=hello) as stranger:
                await stranger.send(sent)
                if sent == RESUMED:
                    assert isinstance(messages.decode(await stranger.recv()), messages.Failure)
                elif sent != UNKNOWN:
                    with pytest.raises(websockets.exceptions.ConnectionClosed):
                        await stranger.recv()
            with Device(TableNode(2), port=port, **QUICK) as device:
                assert (await device.ask("q", ASKED)).tokens == RIGHT

    asyncio.run(run())


def test_64_devices_at_once_and_one_more():
    asked = [replace(ASKED, seed=seed) for seed in range(Limits().sessions)]
    right = [exact(TableNode(2), TableNode(1, 0.3), each).tokens for each in asked]

    async def run() -> tuple[list[Answer], Answer]:
        node, gate = TableNode(1, 0.3), threading.Event()
        made = node.decoder
        node.decoder = lambda *given: (gate.wait(PATIENCE), made(*given))[1]  # type: ignore[method-assign]
        cloud = Cloud(node)
        async with cloud.listening() as port:
            with contextlib.ExitStack() as stack:
                devices = [stack.enter_context(Device(TableNode(2), port=port, patience=PATIENCE)) for _ in asked]
                questions = map(Device.ask, devices, ["q"] * len(asked), asked)
                asking = [asyncio.create_task(question) for question in questions]
                try:
                    assert await until(lambda: len(cloud._sessions) == len(asked))
                    with Device(TableNode(2), port=port) as another:
                        more = await another.ask("q", ASKED)
                finally:
                    gate.set()
                answers = await asyncio.gather(*asking)
                assert await until(lambda: not cloud._sessions)
        assert await until(lambda: not list(left_over()))
        return answers, more

    answers, more = asyncio.run(run())
    assert [answer.tokens for answer in answers] == right and all(answer.alone_from is None for answer in answers)
    assert more.alone_from == 0 and "64 sessions" in more.reason


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


@pytest.mark.parametrize("mode", ["shared", "token-wise"])
def test_a_starved_cloud_is_left_alone_and_used_again_when_it_is_back(mode: str):
    asked = replace(ASKED, mode=mode)
    right = exact(TableNode(2), TableNode(1, 0.3), asked).tokens
    alone = by_itself(TableNode(2), asked, Stream.DEVICE, [])

    async def run() -> None:
        node = TableNode(1, 0.3, delay=30.0)
        async with Cloud(node, **QUICK).listening() as port:
            with Device(TableNode(2), port=port, patience=0.4) as device:
                await asyncio.to_thread(device.connect)
                for least, most in ((0.35, 1.5), (0.0, 0.3)):  # the second time it rests
                    begin = time.perf_counter()
                    answer = await device.ask("q", asked)
                    assert least < time.perf_counter() - begin < most
                    assert (answer.alone_from, answer.tokens) == (0, alone)
                node.lm.delay = 0.0
                for decoder in node.decoders:
                    decoder.interrupt()
                assert await until(lambda: not device.link.resting)
                answer = await device.ask("q", asked)
                assert (answer.alone_from, answer.tokens) == (None, right)

    asyncio.run(run())


# A connection that is kept, tokens as they come, and where they come from


def test_answers_share_a_connection_and_stream():
    async def run() -> None:
        async with Cloud(TableNode(1, 0.3, delay=0.02), **QUICK).listening() as port:  # drafts wait for the cloud's
            with Device(TableNode(2), port=port, **QUICK) as device:
                connections: set[Connection | None] = set()
                for _ in range(5):
                    tokens: list[int] = []
                    drafts: list[list[int]] = []
                    answer = await device.ask("q", ASKED, tokens.append, drafts.append)
                    connections.add(device.link.connection)
                    assert tokens == answer.tokens == RIGHT and any(drafts) and drafts[-1] == []
                    assert {(side, cited.file) for side, cited in answer.sources} == {
                        ("cloud", "tables.txt"), ("device", "tables.txt")
                    }  # fmt: skip
                    assert set(answer.left) == {"Begin", "Target", "End"} and sum(answer.left.values()) == answer.sent
                assert len(connections) == 1 and None not in connections

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


def tls(folder: Path, server: str | None, client: str | None, own: str | None = None, both: bool = False) -> Answer:
    """An answer. server, client, own: whose certificate is shown, whose authority the device trusts, what it shows."""
    root = folder / "ours-root.pem"
    shown = [folder / f"{own}.{kind}" for kind in ("pem", "key")] if own else []
    return ask(
        TableNode(2), TableNode(1, 0.3),
        server=server and server_tls(folder / f"{server}.pem", folder / f"{server}.key", root if both else None),
        client=client and client_tls(folder / f"{client}-root.pem", *shown),
    )  # fmt: skip


@pytest.mark.parametrize("mutual", [False, True])
def test_tls_with_the_right_certificates(certificates: Path, mutual: bool):
    answer = tls(certificates, "ours", "ours", "ours" if mutual else None, both=mutual)
    assert answer.tokens == RIGHT and answer.alone_from is None


def test_tls_of_another_authority_is_refused(certificates: Path):
    with pytest.raises(Refused, match="issuer"):
        tls(certificates, "theirs", "ours")


@pytest.mark.parametrize(
    ("server", "client", "own", "named"),
    [("ours", "ours", None, "certificate"), ("ours", "ours", "theirs", "certificate"),
     (None, "ours", None, "--authority"), ("ours", None, None, "--authority")],
    ids=["no certificate", "another's certificate", "a plain cloud", "a plain device"],
)  # fmt: skip
def test_without_the_tls_that_is_asked_for_the_device_is_alone(certificates: Path, server, client, own, named: str):
    answer = tls(certificates, server, client, own, both=bool(server and client))
    assert answer.alone_from == 0 and named in answer.reason


def test_files_that_are_no_certificates_are_named(certificates: Path):
    with pytest.raises(ValueError, match=r"ours\.key"):
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
    common = ["--model", "smollm2-135m-instruct", "--documents", str(folder), "--reranker", "none"]
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


def test_a_reranker_that_one_side_lacks_is_refused(served):
    device = start("device", served[2], "--connect", f"127.0.0.1:{served[1]}", "--query", "What does a bird do?",
                   "--reranker", "minilm-reranker")  # fmt: skip
    text, note = device.communicate(timeout=240)
    assert device.returncode == 3 and not text and "--reranker" in note and "Traceback" not in note


def test_both_commands_answer_and_are_interrupted(served):
    cloud, port, folder = served
    common = ["--connect", f"127.0.0.1:{port}", "--part", "2/2", "--query", "What does a bird do?"]
    common += ["--patience", "60"]  # two seconds, the default, are too few on a busy machine
    device = start("device", folder, *common, "--limit", "6", "--temperature", "0", "--k", "1")
    text, note = device.communicate(timeout=600)
    assert device.returncode == 0, note
    assert text.strip() and "alone" not in note and "Drafts accepted: device" in note
    assert "(device, " in note and "(cloud, " in note and "Left this device: " in note
    slow = start("device", folder, *common, "--limit", "500", "--pace-ms", "3000", "--k", "1")
    while not psutil.Process(slow.pid).net_connections("tcp"):  # until it answers
        assert slow.poll() is None
        time.sleep(0.1)
    for process in (slow, cloud):
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE)
        assert process.returncode == 130 and "Traceback" not in process.stderr.read()
