"""Experiments with the two real processes: this one is the device, the cloud is another one behind a relay.

Each process has one thread for its model, and a core of its own where the machine has two.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from ondevice import corpus, models
from ondevice.causal_lm import CausalLM
from ondevice.corpus.prompts import quotation, tasks
from ondevice.dragon import library
from ondevice.dragon.device import Answer, Asked, Device
from ondevice.dragon.kv_store import KVStore
from ondevice.dragon.node import TEMPLATE, Node
from ondevice.dragon.simulator import DEVICE, World, simulate
from ondevice.dragon.simulator import Link as SimulatedLink
from ondevice.network.link import Link
from ondevice.network.relay import Relay

DRAGON, TW, SW, CRCG = "DRAGON", "DRDG/TW", "DRDG/SW", "CRCG/Device"
BASE, BASE_JITTER = 0.002, 0.006  # seconds, of the paper's network without added delay (section 7.2)
PAPER_PACES = (0.131663, 0.008417)  # seconds a token of its device and cloud with OPT-1.3B: CRCG in Figure 7
GREEDY = Asked(temperature=0.0)
METHODS: dict[str, Asked] = {
    DRAGON: GREEDY,
    TW: replace(GREEDY, mode="token-wise"),
    SW: replace(GREEDY, mode="sequence-wise"),
    CRCG: GREEDY,
}  # Figure 7


@dataclass(frozen=True)
class Question:
    """A question about a document of the test split, and what its document answers."""

    name: str
    query: str
    answer: str


def questions(count: int, least: int = 0) -> list[Question]:
    """The first `count` questions of the test split whose answers have at least `least` tokens.

    Raises ValueError where there are fewer.
    """
    tokenizer, found = corpus.tokenizer(), []
    for task in tasks(corpus.documents("test"), ["rag"]):
        if len(tokenizer(task.answer).input_ids) >= least:
            found.append(Question(task.name, task.turns[-1][0], task.answer))
        if len(found) == count:
            return found
    raise ValueError(f"The test split has {len(found)} such questions, not {count}.")


def pool(most: int) -> list[str]:
    """Passages that the two sides share out: those that hold the answers, and the beginnings of test documents."""
    documents = corpus.documents("test")
    holding = [f"{title}\n{text}" for task in tasks(documents, ["rag"]) for title, text in task.passages]
    beginnings = ["\n".join(quotation(document)) for document in documents]
    return list(dict.fromkeys([*holding, *beginnings]))[:most]


# Processes


@contextlib.contextmanager
def cloud_process(model: str, documents: Path, store: Path, pace: float = 0.0, k: int = 1) -> Iterator[int]:
    """`python -m ondevice.dragon cloud` with the first half of the documents; yields its port.

    pace: least seconds a token. Raises ValueError with the process's last line where it does not start.
    """
    command = [
        sys.executable, "-m", "ondevice.dragon", "cloud", "--listen", "127.0.0.1:0", "--until-input-ends", "--model",
        model, "--documents", str(documents), "--part", "1/2", "--store", str(store), "--pace-ms", str(1000 * pace),
    ]  # fmt: skip
    environment = {**os.environ, "TQDM_DISABLE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline()
        if not line.startswith("Listening"):
            lines = process.stderr.read().strip().splitlines() or ["it said nothing"]
            raise ValueError(f"The cloud does not start: {lines[-1]}")
        _pin(process.pid, 1)
        yield int(line.rsplit(":", 1)[1])
    finally:
        with contextlib.suppress(OSError):
            process.communicate(timeout=10)
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def this_side(model: str, documents: Path, store: Path | None) -> Iterator[Node]:
    """The device's node, with the second half of the documents; this process keeps to one thread and core meanwhile."""
    threads, cores = torch.get_num_threads(), _cores()
    torch.set_num_threads(1)
    _pin(0, 0)
    try:
        loaded = models.load(model)
        models.require_trained(loaded.model, "answering")
        lm = CausalLM(loaded.model)
        kept = None if store is None else KVStore(store, lm, loaded.tokenizer, TEMPLATE.text)
        yield Node(lm, loaded.tokenizer, library.documents(str(documents), "2/2"), store=kept)
    finally:
        torch.set_num_threads(threads)
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _cores() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _pin(process: int, which: int) -> None:
    """Keep a process to one core, where there is one for each."""
    cores = sorted(_cores() or ())
    if len(cores) > which and len(cores) > 1:
        os.sched_setaffinity(process, {cores[which]})


# Latency


def added(delay: float) -> tuple[Link, Link]:
    """(up, down) with an added delay on the way from the cloud, D with a jitter of D/5 (section 7.3), in seconds."""
    down = Link(BASE + 0.8 * delay, BASE_JITTER + 0.4 * delay)
    return Link(BASE, BASE_JITTER), down


def latencies(
    device: Device, relay: Relay, asked: Sequence[Question], delays: Sequence[float], methods: Mapping[str, Asked],
    pace: str, rounds: int = 1,
) -> tuple[pd.DataFrame, list[tuple[dict, Answer]]]:  # fmt: skip
    """Each question by each method at each added delay, methods in turn.

    delays: seconds. pace: what the rows say of the paces. Returns rows [method, delay_ms, pace, question, round,
    tokens, per_token_ms, ttft_ms, device_accepted, cloud_accepted, decided, sent, received, alone], and the answers.
    per_token_ms: from the first token to the last, over one less than the tokens, as the paper leaves the first out;
    sequence-wise all tokens come at once, and it is from the device's first distribution.
    """
    rows, answers = [], []
    total = len(delays) * rounds * len(asked) * len(methods)
    with tqdm(total=total, desc=f"live, {pace}") as progress:
        for delay in delays:
            up, down = added(delay)
            relay.set(up=up, down=down)
            for turn in range(rounds):
                for question in asked:
                    for name, how in methods.items():
                        answer = _alone(device, question, how) if name == CRCG else device.answer(question.query, how)
                        about = {"method": name, "delay_ms": 1000 * delay, "pace": pace, "question": question.name}
                        rows.append({**about, "round": turn, **account(answer, name)})
                        answers.append((about, answer))
                        progress.update()
    return pd.DataFrame(rows), answers


def account(answer: Answer, method: str = DRAGON) -> dict[str, float]:
    """One answer as a row."""
    start = answer.prefilled if method == SW else answer.ttft
    steps = max(1, len(answer.tokens) - 1)
    return {
        "tokens": len(answer.tokens), "per_token_ms": 1000 * (answer.times[-1] - (start or 0.0)) / steps,
        "ttft_ms": 1000 * answer.ttft, "device_accepted": answer.device[1], "cloud_accepted": answer.cloud[1],
        "decided": answer.device[0], "sent": answer.sent, "received": answer.received,
        "alone": -1 if answer.alone_from is None else answer.alone_from,
    }  # fmt: skip


def _alone(device: Device, question: Question, how: Asked) -> Answer:
    """The device by itself, at its pace."""
    return Device(device.node, pace=device.pace).answer(question.query, how)


def summary(rows: pd.DataFrame, seed: int = 0, resamples: int = 1000) -> pd.DataFrame:
    """Per-token latency by pace, method and delay: the mean of tokens, with a 95 % bootstrap interval over answers.

    Columns [pace, method, delay_ms, per_token_ms, low, high, cloud_acceptance, device_acceptance].
    """
    random, found = np.random.default_rng(seed), []
    for (pace, method, delay), group in rows.groupby(["pace", "method", "delay_ms"], sort=False):
        steps = np.maximum(1, group["tokens"].to_numpy() - 1)
        times = group["per_token_ms"].to_numpy() * steps
        picks = random.integers(0, len(group), (resamples, len(group)))
        low, high = np.quantile(times[picks].sum(1) / steps[picks].sum(1), [0.025, 0.975])
        decided = max(1, group["decided"].sum())
        found.append({
            "pace": pace, "method": method, "delay_ms": delay, "per_token_ms": times.sum() / steps.sum(), "low": low,
            "high": high, "cloud_acceptance": group["cloud_accepted"].sum() / decided,
            "device_acceptance": group["device_accepted"].sum() / decided,
        })  # fmt: skip
    return pd.DataFrame(found)


# The simulator against what happened


def simulated(answer: Answer, delay: float, lookahead: int, seeds: int = 20) -> float:
    """Seconds a token after the first, by the simulator, of the session that gave this answer on the device.

    Its decisions, its paces and its links go in; what the links' jitter was is not known, so it is drawn anew.
    Raises ValueError on an answer that the device did not aggregate to its end.
    """
    if len(answer.decisions) != len(answer.tokens) or not answer.tokens:
        raise ValueError(f"The device decided {len(answer.decisions)} of {len(answer.tokens)} tokens.")
    flags = np.array([(device, cloud) for _, device, cloud, _, _ in answer.decisions])
    paces = np.array([(device, cloud) for _, _, _, device, cloud in answer.decisions])
    up, down = (SimulatedLink(link.delay, link.jitter) for link in added(delay))
    # the first draft's pace is the prefill's: it is the same for both clocks and outside of what is compared
    paces[0] = paces[1:].mean(0) if len(paces) > 1 else 0.0
    world = World(flags, paces[:, 0], paces[:, 1], up, down, lookahead=lookahead)
    runs = [simulate(world, DEVICE, seed=seed) for seed in range(seeds)]
    return float(np.mean([(run.seen[-1] - run.seen[0]) / max(1, len(run.seen) - 1) for run in runs]))


def validation(answers: Sequence[tuple[dict, Answer]], methods: Mapping[str, Asked]) -> pd.DataFrame:
    """Live and simulated ms a token of each answer: [method, delay_ms, pace, question, live_ms, simulated_ms]."""
    rows = []
    for about, answer in answers:
        how = methods[about["method"]]
        if about["method"] in (DRAGON, TW) and len(answer.tokens) > 2 and answer.alone_from is None:
            ahead = 1 if how.mode == "token-wise" else how.lookahead
            steps = len(answer.tokens) - 1
            rows.append({
                **about, "live_ms": 1000 * (answer.times[-1] - answer.times[0]) / steps,
                "simulated_ms": 1000 * simulated(answer, about["delay_ms"] / 1000, ahead), "tokens": len(answer.tokens),
            })  # fmt: skip
    return pd.DataFrame(rows)
