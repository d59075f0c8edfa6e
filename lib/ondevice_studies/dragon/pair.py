"""The two real processes, for experiments: this one is the device, the cloud is another one behind a relay.

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

import torch

from ondevice import models
from ondevice.causal_lm import CausalLM
from ondevice.network.link import Link
from ondevice.network.relay import Relay
from ondevice.retrieval import embedder
from ondevice_papers.dragon.kv_store import KVStore
from ondevice_papers.dragon.messages import Mode
from ondevice_programs.pair import library, relevance
from ondevice_programs.pair.answer import Answer, AnswerSettings
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.node import Node, template_of
from ondevice_programs.reranker import Reranker

DRAGON, AGAIN, TW, SW, CRCG = "DRAGON", "DRAGON again", "DRDG/TW", "DRDG/SW", "CRCG/Device"
ON_CLOUD, AS_MANY = "CRCG/Cloud", "CRCG/Device, as many documents"
MODES: dict[str, Mode] = {TW: "token-wise", SW: "sequence-wise", ON_CLOUD: "cloud-only"}
BASE = 0.002  # seconds of the paper's network without added delay (section 7.2)
BASE_JITTER = 0.006  # seconds on top of it at most
WIFI = 100e6 / 8  # bytes a second, each way (section 7.5)
# A round trip of 310 ms at 13 ms a token takes 24 drafts.
GREEDY = AnswerSettings(temperature=0.0, lookahead=32, limit=20)
Method = Callable[[Device, str], Answer]


@dataclass(frozen=True)
class Paces:
    """Least seconds of a token and of the first one, on the device and in the cloud."""

    device: float = 0.0
    cloud: float = 0.0
    device_prefill: float = 0.0
    cloud_prefill: float = 0.0


def alone(device: Device, query: str, options: AnswerSettings = GREEDY) -> Answer:
    """CRCG on the device: it by itself, at its pace."""
    with Device(device.node, pace=device.pace, prefill=device.prefill) as single:
        return single.answer(query, options)


def method(name: str, options: AnswerSettings = GREEDY) -> Method:
    """How a method answers. All are greedy; all documents of both sides are used, but by CRCG."""
    if name in (CRCG, AS_MANY):
        how = replace(options, k=options.k if name == CRCG else 2 * options.k)
        return lambda device, query: alone(device, query, how)
    how = replace(options, mode=MODES.get(name, options.mode))
    return lambda device, query: device.answer(query, how)


def added(delay: float) -> tuple[Link, Link]:
    """(up, down) with an added delay on the way from the cloud, D with a jitter of D/5 (section 7.3), in seconds."""
    down = Link(BASE + 0.8 * delay, BASE_JITTER + 0.4 * delay, WIFI)
    return Link(BASE, BASE_JITTER, WIFI), down


def after(tokens: int, act: Callable[[], object]) -> Callable[[int], None]:
    """For `on_token`: does something once, when so many tokens have been decided."""
    seen = itertools.count(1)

    def called(_: int) -> None:
        if next(seen) == tokens:
            act()

    return called


def scorer() -> relevance.Scorer:
    """What weighs passages on both sides, as `ondevice-pair` does unasked."""
    reranker = Reranker(relevance.RERANKER, memory_budget=relevance.MEMORY, mode="order", calibration=False)
    return relevance.Scorer(reranker, embedder())


# Processes


def write(folder: Path, documents: Mapping[str, Sequence[str]]) -> Path:
    """Both sides' documents, in files that `both` reads. documents: texts, by `device` and `cloud`."""
    for side, texts in documents.items():
        library.write(folder / f"{side}.jsonl", texts)
    return folder


@contextlib.contextmanager
def both(
    model: str, folder: Path, delay: float = 0.0, *, paces: Paces = Paces(), patience: float = 30.0, **hooks: Any
) -> Iterator[tuple[Device, Relay]]:
    """The device, in this process, and the relay to the cloud, in another one: (device, relay).

    folder: of `write`; each side keeps its stored rows in a folder of its own in it. delay: added, seconds. patience:
    as of `Device`, by default so long that no method goes on alone. hooks: decision and rules of the device.
    """
    up, down = added(delay)
    with (
        _cloud(model, folder, paces) as port,
        _this_side(model, folder) as node,
        Relay("127.0.0.1", port, up, down) as relay,
        Device(
            node, port=relay.port, pace=paces.device, prefill=paces.device_prefill, patience=patience, **hooks
        ) as device,
    ):
        yield device, relay


@contextlib.contextmanager
def _cloud(model: str, folder: Path, paces: Paces) -> Iterator[int]:
    """`ondevice-pair cloud`; yields its port. Raises ValueError with its last line where it does not start."""
    command = [
        sys.executable, "-m", "ondevice_programs.pair", "cloud", "--listen", "127.0.0.1:0", "--until-input-ends",
        "--model", model, "--documents", str(folder / "cloud.jsonl"), "--whole", "--store", str(folder / "cloud"),
        "--index", str(folder / "index"), "--pace-ms", str(1000 * paces.cloud),
        "--prefill-ms", str(1000 * paces.cloud_prefill),
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
def _this_side(model: str, folder: Path) -> Iterator[Node]:
    """The device's node; this process keeps to one thread and core meanwhile."""
    threads = torch.get_num_threads()
    cores = _cores()
    torch.set_num_threads(1)
    _pin(0, 0)
    try:
        loaded = models.load(model)
        models.require_trained(loaded.model, "answering")
        lm = CausalLM(loaded.model)
        store = KVStore(folder / "device", lm, loaded.tokenizer, template_of(loaded.tokenizer).text)
        read = library.documents(str(folder / "device.jsonl"), private=True)
        texts = relevance.Scored(**vars(read), scorer=scorer())
        yield Node(lm, loaded.tokenizer, texts, store=store, weight_temperature=relevance.TEMPERATURE, name=model)
    finally:
        torch.set_num_threads(threads)
        if cores is not None:
            os.sched_setaffinity(0, cores)


def _cores() -> set[int] | None:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _pin(process: int, core: int) -> None:
    """Keep a process to one core, where there is one for each."""
    cores = sorted(_cores() or ())
    if len(cores) > core and len(cores) > 1:
        os.sched_setaffinity(process, {cores[core]})
