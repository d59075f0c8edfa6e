"""Twenty devices at one cloud: seconds until all have their answers, a greedy client's neighbours, the cloud's memory.

The cloud is a process of its own, `ondevice-pair cloud` with 16 files. The devices are in this process, with one engine
for all their models, so this process does the work of twenty machines. Each side has a core of its own where there are
two. All questions are asked once, which fills the cloud's memory of documents; then in each round 1, 5 and 20 devices
ask at once. Ratios are of a round, medians over rounds. Answers are greedy and must be the same alone and in company.

Greedy client, after the rounds: it begins 8 sessions of 16 documents each and takes drafts without ever deciding. Its
neighbours' first tokens, of five devices, are timed with it and without it in turn.

Run: python tests/benchmarks/bench_pair.py [--only smollm2-135m-instruct] [--rounds 3]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import psutil
import torch

from ondevice import models
from ondevice.causal_lm import CausalLM
from ondevice_papers.dragon.messages import Begin, End, Message
from ondevice_programs.pair import relevance, wire
from ondevice_programs.pair.__main__ import make_scorer
from ondevice_programs.pair.answer import Answer, AnswerSettings
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.library import documents, write
from ondevice_programs.pair.node import Node
from ondevice_programs.pair.wire import Lost
from ondevice_studies.dragon import sides

FILES, PASSAGES = 16, 12
COUNTS = (1, 5, 20)
NEIGHBOURS = 5
GREEDY_SESSIONS, GREEDY_DOCUMENTS = 8, 16
ASKED = AnswerSettings(temperature=0.0, limit=24)
MODELS = ["smollm2-135m-instruct"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=MODELS, choices=MODELS, metavar="MODEL")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores.")
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), sides.texts("validation", FILES * PASSAGES))
        questions = [question.text for question in sides.questions("validation") if question.holder == "cloud"]
        for name in options.only:
            with both(name, Path(folder)) as (process, devices):
                print(name, flush=True)
                measure(process, devices, questions[: max(COUNTS)], options.rounds)


# Both sides


def write_files(folder: Path, texts: dict[str, list[str]]) -> None:
    """16 files of the cloud, and the device's notes."""
    (folder / "public").mkdir()
    for number in range(FILES):
        passages = texts["cloud"][number * PASSAGES : (number + 1) * PASSAGES]
        paragraphs = (" ".join(passage.split("\n\n")) for passage in passages)
        (folder / "public" / f"{number}.md").write_text("\n\n".join(paragraphs), encoding="utf-8")
    write(folder / "device.jsonl", texts["device"])


@contextlib.contextmanager
def both(model: str, folder: Path) -> Iterator[tuple[int, list[Device]]]:
    """The cloud's process, and the devices."""
    with contextlib.ExitStack() as stack:
        process, port = stack.enter_context(served(model, folder))
        node, cores = device_node(model, folder), sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(process, {cores[1]})
            os.sched_setaffinity(0, {cores[0]})
            stack.callback(os.sched_setaffinity, 0, set(cores))
        options = dict(port=port, patience=600.0, silence=600.0)
        devices = [stack.enter_context(Device(node, **options)) for _ in range(max(COUNTS))]
        for device in devices:
            device.connect()
        yield process, devices


@contextlib.contextmanager
def served(model: str, folder: Path) -> Iterator[tuple[int, int]]:
    """`ondevice-pair cloud`: its process and port."""
    command = [
        sys.executable, "-m", "ondevice_programs.pair", "cloud", "--listen", "127.0.0.1:0", "--until-input-ends",
        "--model", model, "--documents", str(folder / "public"),
        "--index", str(folder / "index"),
    ]  # fmt: skip
    environment = {**os.environ, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline().rsplit(":", 1)[1])
    finally:
        process.communicate()


def device_node(model: str, folder: Path) -> Node:
    loaded = models.load(model)
    collection = documents(str(folder / "device.jsonl"), private=True)
    scored = relevance.Scored(**vars(collection), scorer=make_scorer(relevance.RERANKER, relevance.MEMORY))
    return Node(CausalLM(loaded.model), loaded.tokenizer, scored, weight_temperature=relevance.TEMPERATURE)


# Measurements


def measure(process: int, devices: Sequence[Device], questions: Sequence[str], rounds: int) -> None:
    print(f"  the cloud's memory at the start: {memory(process):.0f} MB")
    cold, answers = at_once(devices, questions)
    right = [answer.tokens for answer in answers]
    print(f"  {sum(map(len, right))} tokens of {len(right)} answers, cold {cold:.2f} s")
    seconds: dict[int, list[float]] = {count: [] for count in COUNTS}
    for _ in range(rounds):
        for count in COUNTS:
            passed, answers = at_once(devices, questions[:count])
            seconds[count].append(passed)
            assert [answer.tokens for answer in answers] == right[:count], "not the same in company"
    for count, times in seconds.items():
        ratios = [passed / alone for passed, alone in zip(times, seconds[COUNTS[0]], strict=True)]
        print(f"  {count} devices: {median(times):.2f} s, {median(ratios):.1f} times as long as one")
    first: dict[bool, list[float]] = {False: [], True: []}
    for greedy in (False, True, False) * rounds:
        with beside_greedy(devices[0], questions[-1]) if greedy else contextlib.nullcontext():
            _, answers = at_once(devices, questions[:NEIGHBOURS])
        first[greedy].append(median(answer.ttft for answer in answers))
    delayed = median(first[True]) / median(first[False])
    print(f"  the neighbours' first token beside a greedy client: {delayed:.2f} times as late")
    print(f"  the cloud's memory at the end: {memory(process):.0f} MB", flush=True)


def at_once(devices: Sequence[Device], questions: Sequence[str]) -> tuple[float, list[Answer]]:
    """Seconds until all have their answers, and these; a device each."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(questions)) as pool:
        answers = list(pool.map(lambda device, question: device.answer(question, ASKED), devices, questions))
    return time.perf_counter() - began, answers


@contextlib.contextmanager
def beside_greedy(device: Device, question: str) -> Iterator[None]:
    """Meanwhile a client begins sessions of many documents, and takes drafts without deciding."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    connected = asyncio.run_coroutine_threadsafe(_greedy(device, question), loop).result()
    try:
        yield
    finally:
        for number in range(GREEDY_SESSIONS):  # else they would be kept for a while, and go on
            loop.call_soon_threadsafe(connected.send, End(f"greedy-{number}", 0))
        asyncio.run_coroutine_threadsafe(connected.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _greedy(device: Device, question: str) -> wire.Connection:
    connection = await wire.connect(device.host, device.port, device.node.hello, silence=600.0)

    async def take() -> None:
        with contextlib.suppress(Lost):
            while True:
                await connection.receive()

    connection.taking = asyncio.create_task(take())  # type: ignore[attr-defined]  # kept, or it may vanish
    for number in range(GREEDY_SESSIONS):
        begin: Message = Begin(
            f"greedy-{number}", 1, "speculative", GREEDY_DOCUMENTS, f"{question} ({number})", 256, "device", 0.0,
            lookahead=256,
        )  # fmt: skip
        connection.send(begin)
    return connection


def memory(process: int) -> float:
    """MB that are resident."""
    return psutil.Process(process).memory_info().rss / 1e6


if __name__ == "__main__":
    main()
