"""Experiments with the two real processes: this one is the device, the cloud is another one behind a relay.

Each process has one thread for its model, and a core of its own where the machine has two.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

from ondevice import corpus, models
from ondevice.causal_lm import CausalLM
from ondevice.corpus.excerpts import Passage, passages
from ondevice.corpus.prompts import pick, quotation, tasks
from ondevice.dragon.cost import Costs, speedup
from ondevice.dragon.live import library
from ondevice.dragon.live.answer import Answer, Asked
from ondevice.dragon.live.device import Device
from ondevice.dragon.live.kv_store import KVStore
from ondevice.dragon.live.node import TEMPLATE, Node
from ondevice.dragon.simulator import DEVICE, World, simulate
from ondevice.network.link import Link
from ondevice.network.relay import Relay

DRAGON, TW, SW, CRCG = "DRAGON", "DRDG/TW", "DRDG/SW", "CRCG/Device"
BASE, BASE_JITTER = 0.002, 0.006  # seconds, of the paper's network without added delay (section 7.2)
WEIGHTS = 8.0  # what BM25's scores are divided by: so much that both sides count (Figure 6 chooses 2 to 8)
WIFI = 100e6 / 8  # bytes a second, each way (section 7.5)
GREEDY = Asked(temperature=0.0, lookahead=32)  # a round trip of 310 ms at 13 ms a token takes 24 drafts
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


@dataclass(frozen=True)
class Paces:
    """Least seconds of a token and of the first one, on the device and in the cloud."""

    device: float = 0.0
    cloud: float = 0.0
    device_prefill: float = 0.0
    cloud_prefill: float = 0.0


PAPER_PACES = Paces(0.131663, 0.008417)  # its device and cloud with OPT-1.3B: CRCG in Figure 7
# The same with the time to the first token: the device's with stored documents, the cloud's from text (Figure 8).
PAPER_FIRST = Paces(0.131663, 0.008417, 1.2042, 0.06)


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


def train_passages(count: int, length: int = 64) -> list[Passage]:
    """Passages of the train split, `count` of them: those of the lowest hashes, the same on every machine."""
    found = passages(corpus.documents("train"), corpus.tokenizer(), length)
    return sorted(found, key=lambda one: pick(one.text, "dragon passages", 2**62))[:count]


def long_pool(tokens: int, most: int) -> list[str]:
    """The beginnings, `tokens` tokens long, of test documents that have as many."""
    tokenizer, found = corpus.tokenizer(), []
    for document in corpus.documents("test"):
        ids = tokenizer(document.text, add_special_tokens=False, verbose=False).input_ids
        if len(ids) >= tokens:
            found.append(str(tokenizer.decode(ids[:tokens])))
        if len(found) == most:
            break
    return found


# Processes


@contextlib.contextmanager
def cloud_process(
    model: str, documents: Path, store: Path, paces: Paces = Paces(), longest: int = 512
) -> Iterator[int]:
    """`python -m ondevice.dragon cloud` with the first half of the documents; yields its port.

    Raises ValueError with the process's last line where it does not start.
    """
    command = [
        sys.executable, "-m", "ondevice.dragon", "cloud", "--listen", "127.0.0.1:0", "--until-input-ends", "--model",
        model, "--documents", str(documents), "--part", "1/2", "--store", str(store), "--pace-ms",
        str(1000 * paces.cloud), "--prefill-ms", str(1000 * paces.cloud_prefill),
        "--weight-temperature", str(WEIGHTS), "--gives-documents",
        "--longest", str(longest), "--whole", "--index", str(store.with_name("index")),
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
            process.communicate(timeout=60)
        if process.poll() is None:
            process.kill()
            process.wait()


@contextlib.contextmanager
def this_side(model: str, documents: Path, store: Path | None, longest: int = 512) -> Iterator[Node]:
    """The device's node, with the second half of the documents; this process keeps to one thread and core meanwhile."""
    threads, cores = torch.get_num_threads(), _cores()
    torch.set_num_threads(1)
    _pin(0, 0)
    try:
        yield _node(model, documents, "2/2", store, longest)
    finally:
        torch.set_num_threads(threads)
        if cores is not None:
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def both(
    model: str, folder: Path, delay: float, *, paces: Paces = Paces(), patience: float = 30.0,
    documents: str = "passages.jsonl", longest: int = 512,
) -> Iterator[tuple[Device, Relay]]:  # fmt: skip
    """The device, in this process, and the relay to the cloud, in another one: (device, relay).

    folder: holds the documents' file; each side keeps its stored rows in a folder of its own in it. delay: added,
    seconds. patience: as of `Device`, by default so long that no method goes on alone. longest: tokens of a document.
    """
    path = folder / documents
    up, down = added(delay)
    with (
        cloud_process(model, path, folder / "cloud", paces, longest) as port,
        this_side(model, path, folder / "device", longest) as node,
        Relay("127.0.0.1", port, up, down) as relay,
        Device(node, port=relay.port, pace=paces.device, prefill=paces.device_prefill, patience=patience) as device,
    ):
        yield device, relay


@contextlib.contextmanager
def nodes(model: str, folder: Path, documents: str = "passages.jsonl") -> Iterator[tuple[Node, Node]]:
    """(device, cloud) as two nodes of this process, for what needs no clock."""
    first, second = (_node(model, folder / documents, part, None) for part in ("2/2", "1/2"))
    yield first, second


def _node(model: str, documents: Path, part: str, store: Path | None, longest: int = 512) -> Node:
    loaded = models.load(model)
    models.require_trained(loaded.model, "answering")
    lm = CausalLM(loaded.model)
    kept = None if store is None else KVStore(store, lm, loaded.tokenizer, TEMPLATE.text)
    texts = library.documents(str(documents), part, private=True)  # folders of experiments do not last
    return Node(lm, loaded.tokenizer, texts, weight_temperature=WEIGHTS, store=kept, longest=longest, name=model)


def after(tokens: int, act: Callable[[], object]) -> Callable[[int], None]:
    """For `on_token`: does something once, when so many tokens have been decided."""
    seen = itertools.count(1)

    def called(_: int) -> None:
        if next(seen) == tokens:
            act()

    return called


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
    down = Link(BASE + 0.8 * delay, BASE_JITTER + 0.4 * delay, WIFI)
    return Link(BASE, BASE_JITTER, WIFI), down


def latencies(
    device: Device, relay: Relay, asked: Sequence[Question], delays: Sequence[float], methods: Mapping[str, Asked],
    pace: str, rounds: int = 1,
) -> tuple[pd.DataFrame, list[tuple[dict, Answer]]]:  # fmt: skip
    """Each question by each method at each added delay, methods in turn.

    delays: seconds. pace: what the rows say of the paces. Returns rows [method, delay_ms, pace, question, round,
    tokens, per_token_ms, ttft_ms, device_accepted, cloud_accepted, decided, sent, received, alone], and the answers.
    per_token_ms: from the device's first distribution to the last token, over one less than the tokens, so that it is
    the device's pace where nothing is waited for. (The paper leaves the first token out, which with short answers
    flatters what waits before it; and sequence-wise all tokens come at once.)
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
                        query = question.query
                        answer = alone(device, query, how) if name == CRCG else device.answer(query, how)
                        about = {"method": name, "delay_ms": 1000 * delay, "pace": pace, "question": question.name}
                        rows.append({**about, "round": turn, **account(answer)})
                        answers.append((about, answer))
                        progress.update()
    return pd.DataFrame(rows), answers


def account(answer: Answer) -> dict[str, float]:
    """One answer as a row."""
    steps = max(1, len(answer.tokens) - 1)
    return {
        "tokens": len(answer.tokens), "per_token_ms": 1000 * (answer.times[-1] - (answer.prefilled or 0.0)) / steps,
        "ttft_ms": 1000 * answer.ttft, "device_accepted": answer.device[1], "cloud_accepted": answer.cloud[1],
        "decided": answer.device[0], "sent": answer.sent, "received": answer.received,
        "alone": -1 if answer.alone_from is None else answer.alone_from,
    }  # fmt: skip


def alone(device: Device, query: str, how: Asked) -> Answer:
    """CRCG on the device: it by itself, at its pace."""
    with Device(device.node, pace=device.pace, prefill=device.prefill) as single:
        return single.answer(query, how)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Per-token latency by pace, method and delay: the mean of tokens, with a 95 % bootstrap interval over answers.

    Columns [pace, method, delay_ms, per_token_ms, low, high, cloud_acceptance, device_acceptance].
    """
    found = []
    for (pace, method, delay), group in rows.groupby(["pace", "method", "delay_ms"], sort=False):
        steps = np.maximum(1, group["tokens"].to_numpy() - 1)
        times = group["per_token_ms"].to_numpy() * steps
        low, high = _interval(times, steps)
        decided = max(1, group["decided"].sum())
        found.append({
            "pace": pace, "method": method, "delay_ms": delay, "per_token_ms": times.sum() / steps.sum(), "low": low,
            "high": high, "cloud_acceptance": group["cloud_accepted"].sum() / decided,
            "device_acceptance": group["device_accepted"].sum() / decided,
        })  # fmt: skip
    return pd.DataFrame(found)


def reductions(summary: pd.DataFrame) -> pd.DataFrame:
    """By how many percent DRAGON's time a token is lower: pace, delay_ms, over_tw, over_sw, over_device (below 0)."""
    wide: Any = summary.pivot(index=["pace", "delay_ms"], columns="method", values="per_token_ms")
    names = {"over_tw": TW, "over_sw": SW, "over_device": CRCG}
    return pd.DataFrame({name: 100 * (1 - wide[DRAGON] / wide[method]) for name, method in names.items()})


def against_theorem_3(summary: pd.DataFrame, answers: Sequence[tuple[dict, Answer]]) -> pd.DataFrame:
    """Measured speed-up of DRAGON over DRDG/TW, and Eq. 9's at what was measured: acceptance, paces and round trip.

    Both are of the time between tokens, without what comes before the first one. Columns pace, delay_ms, acceptance
    (the cloud's), device_ms, cloud_ms, rtt_ms, eq_9, measured, share.
    """
    rows = []
    for pace, delay in summary[["pace", "delay_ms"]].drop_duplicates().itertuples(index=False):
        found = [answer for about, answer in answers
                 if (about["pace"], about["delay_ms"], about["method"]) == (pace, delay, DRAGON)]  # fmt: skip
        decided = np.array([row for answer in found for row in answer.decisions[:-1]], float)  # what tokens waited for
        later = decided[decided[:, 0] > 0]  # the first one's pace is the prefill's
        device, cloud = np.median(later[:, 3]), np.median(later[:, 4])
        up = BASE + BASE_JITTER / 2  # in the mean, as `added` has it
        down = up + delay / 1000
        expected = speedup(Costs(device, cloud, up, down), decided[:, 2].mean())
        measured = _between(answers, pace, delay, TW) / _between(answers, pace, delay, DRAGON)
        rows.append({
            "pace": pace, "delay_ms": delay, "acceptance": decided[:, 2].mean(), "device_ms": 1000 * device,
            "cloud_ms": 1000 * cloud, "rtt_ms": 1000 * (up + down), "eq_9": expected, "measured": measured,
            "share": measured / expected,
        })  # fmt: skip
    return pd.DataFrame(rows)


def _between(answers: Sequence[tuple[dict, Answer]], pace: str, delay: float, method: str) -> float:
    """Mean seconds between tokens."""
    found = [answer for about, answer in answers
             if (about["pace"], about["delay_ms"], about["method"]) == (pace, delay, method)]  # fmt: skip
    steps = sum(len(answer.tokens) - 1 for answer in found)
    return sum(answer.times[-1] - answer.times[0] for answer in found) / steps


# The simulator against what happened


def simulated(answer: Answer, delay: float, lookahead: int, seeds: int = 20) -> float:
    """Seconds a token, as `latencies` counts them, by the simulator, of the session that gave this answer.

    Its decisions, its paces and its links go in, and when each side's first draft was there, which depends on retrieval
    and prefill; what the links' jitter was is not known, so it is drawn anew.
    Raises ValueError on an answer that the device did not aggregate to its end.
    """
    if len(answer.decisions) != len(answer.tokens) or not answer.tokens:
        raise ValueError(f"The device decided {len(answer.decisions)} of {len(answer.tokens)} tokens.")
    flags = np.array([(device, cloud) for _, device, cloud, _, _ in answer.decisions])
    paces = np.array([(device, cloud) for _, _, _, device, cloud in answer.decisions])
    up, down = added(delay)
    first = answer.prefilled or 0.0
    paces[0] = first, max(0.0, answer.times[0] - BASE - 0.5 * BASE_JITTER - delay)
    world = World(flags, paces[:, 0], paces[:, 1], up, down, lookahead=lookahead)
    runs = [simulate(world, DEVICE, seed=seed) for seed in range(seeds)]
    return float(np.mean([(run.seen[-1] - first) / max(1, len(run.seen) - 1) for run in runs]))


def validation(answers: Sequence[tuple[dict, Answer]], methods: Mapping[str, Asked]) -> pd.DataFrame:
    """Measured and simulated ms a token by method, pace and delay, of the answers that the device decided to their end.

    Columns [method, pace, delay_ms, measured_ms, low, high, simulated_ms, answers]; low, high: 95 % bootstrap interval
    of the measured ones over answers. All are means over tokens.
    """
    rows = []
    for about, answer in answers:
        how = methods[about["method"]]
        if about["method"] in (DRAGON, TW) and len(answer.tokens) > 2 and answer.alone_from is None:
            ahead = 1 if how.mode == "token-wise" else how.lookahead
            rows.append({
                **about, "measured": account(answer)["per_token_ms"], "steps": len(answer.tokens) - 1,
                "simulated": 1000 * simulated(answer, about["delay_ms"] / 1000, ahead),
            })  # fmt: skip
    found = []
    for (method, pace, delay), group in pd.DataFrame(rows).groupby(["method", "pace", "delay_ms"], sort=False):
        steps, measured = group["steps"].to_numpy(), group["measured"].to_numpy()
        low, high = _interval(measured * steps, steps)
        found.append((method, pace, delay, np.average(measured, weights=steps), low, high,
                      np.average(group["simulated"], weights=steps), len(group)))  # fmt: skip
    columns = ["method", "pace", "delay_ms", "measured_ms", "low", "high", "simulated_ms", "answers"]
    return pd.DataFrame(found, columns=columns)


def _interval(totals: np.ndarray, steps: np.ndarray, seed: int = 0, resamples: int = 1000) -> tuple[float, float]:
    """95 % bootstrap interval of sum of totals over sum of steps."""
    picks = np.random.default_rng(seed).integers(0, len(totals), (resamples, len(totals)))
    low, high = np.quantile(totals[picks].sum(1) / steps[picks].sum(1), [0.025, 0.975])
    return float(low), float(high)
