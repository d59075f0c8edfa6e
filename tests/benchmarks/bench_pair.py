"""Twenty devices at one cloud: seconds until all have their answers, a greedy client's neighbours, the cloud's memory.

The cloud is a process of its own, `ondevice-pair cloud` with 16 files. The devices are in this process, with one engine
for all their models, so this process does the work of twenty machines. Each side has a core of its own where there are
two. In each round one device asks four questions one after the other, then 1, 5 and 20 devices ask at once, then one
again; ratios are of a round, over the mean of its questions asked singly, and medians are over rounds. Ratios of the
cloud's CPU seconds stand beside them, on which other work of the machine tells less. Before the
rounds all questions are asked once, which fills the cloud's memory of documents; the first answers are timed as `cold`.
Tables stand for both models in the first case: what protocol, codec and engine cost. Answers are greedy and must be the
same alone and in company.

Greedy client, after the rounds: it begins 8 sessions of 16 documents each and takes drafts without ever deciding. Its
neighbours' first tokens, of five devices, are timed with it and without it in turn.

Run: python tests/benchmarks/bench_pair.py [--only tables pydocs-lm-small smollm2-135m-instruct] [--rounds 3]
It prints a table and writes runs/bench_pair.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "systems")]
from dragon_tables import CloudProcess, TableNode  # noqa: E402

from ondevice import models  # noqa: E402
from ondevice.causal_lm import CausalLM  # noqa: E402
from ondevice_papers.dragon.messages import Begin, End, Message  # noqa: E402
from ondevice_programs.pair import relevance, wire  # noqa: E402
from ondevice_programs.pair.__main__ import NO_RERANKER, make_scorer  # noqa: E402
from ondevice_programs.pair.answer import Answer, Asked  # noqa: E402
from ondevice_programs.pair.device import Device  # noqa: E402
from ondevice_programs.pair.library import documents, write  # noqa: E402
from ondevice_programs.pair.node import Node  # noqa: E402
from ondevice_programs.pair.wire import Lost  # noqa: E402
from ondevice_studies.dragon import sides  # noqa: E402

FILES, PASSAGES = 16, 12
COUNTS = (1, 5, 20)
SINGLY = 4  # questions of a round that are asked one after the other
NEIGHBOURS = 5
GREEDY_SESSIONS, GREEDY_DOCUMENTS = 8, 16
ASKED = Asked(temperature=0.0, limit=24)
TABLES = "tables"
CASES = {
    TABLES: (TABLES, NO_RERANKER),
    "pydocs-lm-small, BM25": ("pydocs-lm-small", NO_RERANKER),
    "pydocs-lm-small": ("pydocs-lm-small", relevance.RERANKER),
    "smollm2-135m-instruct, BM25": ("smollm2-135m-instruct", NO_RERANKER),
    "smollm2-135m-instruct": ("smollm2-135m-instruct", relevance.RERANKER),
}


@dataclass
class Case:
    """What was measured. seconds: by number of devices, of each round. memory: MB of the cloud, by moment and kind."""

    name: str
    cold: float = 0.0
    seconds: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in COUNTS})
    singly: list[float] = field(default_factory=list)
    ratios: dict[int, list[float]] = field(default_factory=lambda: {count: [] for count in COUNTS})
    cpu_ratios: list[float] = field(default_factory=list)
    first_token: dict[str, list[float]] = field(default_factory=lambda: {"alone": [], "beside greedy": []})
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: int = 0
    alike: bool = True

    @property
    def delayed(self) -> float:
        """How many times later the neighbours' first tokens come beside the greedy client."""
        return median(self.first_token["beside greedy"]) / median(self.first_token["alone"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES), metavar="CASE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT.parent / "runs" / "bench_pair.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        texts = sides.texts("validation", FILES * PASSAGES)
        questions = [question.text for question in sides.questions("validation") if question.holder == "cloud"]
        write_files(Path(folder), texts)
        for name in options.only:
            with both(*CASES[name], Path(folder)) as (process, devices):
                cases.append(measured(name, process, devices, questions[: max(COUNTS)], options.rounds))
            show(cases[-1])
    report = [{**vars(case), "delayed": case.delayed} for case in cases]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps({"load_before": load, "cores": os.cpu_count(), "cases": report}, indent=1))
    print(f"Load before: {load:.1f} on {os.cpu_count()} cores. Written: {options.output}")


def show(case: Case) -> None:
    """A few lines."""
    print(f"{case.name}: {case.tokens} tokens of 20 answers, {'the same' if case.alike else 'NOT THE SAME'} in company")
    walls = ", ".join(f"{count}: {median(case.seconds[count]):.2f}" for count in COUNTS)
    print(f"  seconds until all have their answers: singly {mean(case.singly):.2f}, {walls}, cold {case.cold:.2f}")
    ratios = case.ratios[max(COUNTS)]
    rounds = ", ".join(f"{ratio:.1f}" for ratio in ratios)
    cpu = median(case.cpu_ratios)
    print(f"  20 devices over one: {median(ratios):.1f} (rounds {rounds}), in the cloud's CPU seconds {cpu:.1f}")
    print(f"  the neighbours' first token beside a greedy client: {case.delayed:.2f} times as late")
    for moment, sizes in case.memory.items():
        print(f"  cloud's memory {moment}: " + ", ".join(f"{kind} {size:.0f} MB" for kind, size in sizes.items()))
    sys.stdout.flush()


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
def both(model: str, reranker: str, folder: Path) -> Iterator[tuple[int, list[Device]]]:
    """The cloud's process, and the devices."""
    with contextlib.ExitStack() as stack:
        if model == TABLES:
            cloud = stack.enter_context(CloudProcess(dict(seed=1, log_weight=0.3, vocabulary=8192)))
            process, port = cloud.process.pid, cloud.port
            nodes: list[Any] = [TableNode(2, vocabulary=8192)] * max(COUNTS)
        else:
            process, port = stack.enter_context(served(model, reranker, folder))
            nodes = [device_node(model, reranker, folder)] * max(COUNTS)
        cores = sorted(os.sched_getaffinity(0))
        if len(cores) > 1:
            os.sched_setaffinity(process, {cores[1]})
            os.sched_setaffinity(0, {cores[0]})
            stack.callback(os.sched_setaffinity, 0, set(cores))
        devices = [stack.enter_context(Device(node, port=port, patience=600.0, silence=600.0)) for node in nodes]
        for device in devices:
            device.connect()
        yield process, devices


@contextlib.contextmanager
def served(model: str, reranker: str, folder: Path) -> Iterator[tuple[int, int]]:
    """`ondevice-pair cloud`: its process and port."""
    command = [
        sys.executable, "-m", "ondevice_programs.pair", "cloud", "--listen", "127.0.0.1:0", "--until-input-ends",
        "--model", model, "--documents", str(folder / "public"), "--reranker", reranker,
        "--index", str(folder / "index"),
    ]  # fmt: skip
    environment = {**os.environ, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline().rsplit(":", 1)[1])
    finally:
        process.communicate()


def device_node(model: str, reranker: str, folder: Path) -> Node:
    loaded = models.load(model)
    collection = documents(str(folder / "device.jsonl"), private=True)
    scorer = make_scorer(reranker, relevance.MEMORY)
    if scorer is None:
        return Node(CausalLM(loaded.model), loaded.tokenizer, collection)
    scored = relevance.Scored(**vars(collection), scorer=scorer)
    return Node(CausalLM(loaded.model), loaded.tokenizer, scored, weight_temperature=relevance.TEMPERATURE)


# Measurements


def measured(name: str, process: int, devices: Sequence[Device], questions: Sequence[str], rounds: int) -> Case:
    case = Case(name)
    case.memory["at the start"] = memory(process)
    case.cold, answers = at_once(devices, questions)
    case.memory["after 20 devices"] = memory(process)
    case.tokens = sum(len(answer.tokens) for answer in answers)
    right = [answer.tokens for answer in answers]
    for number in range(rounds):
        singly = []
        before = cpu_seconds(process)
        for place in range(SINGLY):
            index = (SINGLY * number + place) % len(questions)
            seconds, (answer,) = at_once(devices, questions[index : index + 1])
            singly.append(seconds)
            case.alike &= answer.tokens == right[index]
        case.singly += singly
        cpu = (cpu_seconds(process) - before) / SINGLY
        for count in COUNTS:
            before = cpu_seconds(process)
            seconds, answers = at_once(devices, questions[:count])
            if count == max(COUNTS):
                case.cpu_ratios.append((cpu_seconds(process) - before) / cpu)
            case.seconds[count].append(seconds)
            case.ratios[count].append(seconds / mean(singly))
            case.alike &= [answer.tokens for answer in answers] == right[:count]
            assert all(answer.alone_from is None for answer in answers)
    case.memory["after all rounds"] = memory(process)
    for _ in range(rounds):
        for greedy in (False, True, False):
            with beside_greedy(devices[0], questions[-1]) if greedy else contextlib.nullcontext():
                _, answers = at_once(devices, questions[:NEIGHBOURS])
            kind = "beside greedy" if greedy else "alone"
            case.first_token[kind].append(median(answer.ttft for answer in answers))
    case.memory["after the greedy client"] = memory(process)
    return case


def at_once(devices: Sequence[Device], questions: Sequence[str]) -> tuple[float, list[Answer]]:
    """Seconds until all have their answers, and these; a device each."""
    answers: list[Any] = [None] * len(questions)

    def asking(place: int) -> Callable[[], None]:
        def ask() -> None:
            answers[place] = devices[place].answer(questions[place], ASKED)

        return ask

    threads = [threading.Thread(target=asking(place)) for place in range(len(questions))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
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


def cpu_seconds(process: int) -> float:
    """Of all its threads so far."""
    user, system = Path(f"/proc/{process}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def memory(process: int) -> dict[str, float]:
    """MB of a process: resident, its peak, and without pages of files."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith(" kB")}
    kinds = {"resident": "VmRSS", "peak": "VmHWM", "anonymous": "RssAnon"}
    return {kind: int(sizes[name]) * 1024 / 1e6 for kind, name in kinds.items()}


if __name__ == "__main__":
    main()
