"""What the assistant's findings rest on: `make record PAPER=assistant`; it goes on where it was stopped.

Deterministic: `answers` with `steps`, of every set of systems, to DRAGON's questions (`dragon.questions`).
Of this machine: `costs` (seconds of the parts), `memory` (of the device's process) and `live` (whole runs of the pair).
One at a time: `--only NAME`; several processes share the answers with `--share i/n`.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ondevice.evidence import Recorder, machine_name
from ondevice.meters import memory
from ondevice.network.relay import Relay
from ondevice.retrieval import SparseIndex, embeddings
from ondevice_papers.dragon.aggregation import target
from ondevice_programs.assistant.__main__ import cloud
from ondevice_programs.assistant.drafting import BUDGET, NODES, Ahead, drafters, likeliest_chain
from ondevice_programs.assistant.picking import CANDIDATES, K, picked
from ondevice_programs.assistant.sides import MODEL, Sides
from ondevice_programs.assistant.systems import SYSTEMS
from ondevice_programs.pair import library
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.node import Documents, Node
from ondevice_programs.pair.prefixes import Prefixes
from ondevice_programs.pair.relevance import RERANKER
from ondevice_studies.dragon import lockstep, questions
from ondevice_studies.dragon.pair import GREEDY, added, write
from ondevice_studies.dragon.questions import Question
from ondevice_studies.speculation.prompts import digest

EACH, DRAFTED, LIMIT = 20, 30, 48  # questions of every holder; those that drafters run on, too; tokens of an answer
LIVE_SETS, LIVE_EACH, DELAYS = ["D", "GD", "DS", "GDL", "GDLS"], 4, (0.0, 0.1, 0.3)
MODELS = [MODEL, RERANKER]
Nodes = Mapping[bool, Mapping[str, Node]]  # by whether passages are reranked, by side


def nodes() -> Nodes:
    """Both sides in this process, without drafters, picking by embeddings and by GRATING's reranker."""
    sides = Sides("G")
    documents = {side: Documents(texts, SparseIndex.build(texts)) for side, texts in questions.documents().items()}
    ranked = {side: sides.node(texts) for side, texts in documents.items()}
    near = {side: picked(texts, embeddings(texts.texts), None) for side, texts in documents.items()}
    return {True: ranked, False: {side: replace(node, documents=near[side]) for side, node in ranked.items()}}


def layers_read(node: Node) -> int:
    """Layers that the candidates of a reranker's last call went through, all together."""
    return sum(node.documents.scorer._reranker.receipt.active)  # type: ignore[attr-defined]


def answered(
    by_kind: Nodes,
    makers: Mapping[str, Callable[..., Any]],
    question: Question,
    sets: Sequence[tuple[bool, str, str]],
    **hooks: Callable[..., Any],
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows of answers, rows of steps) of a question by (picked, method, drafter). hooks: of `Ahead`."""
    rows = list[dict[str, Any]]()
    steps = list[dict[str, Any]]()
    chosen: dict[tuple[bool, str], Any] = {}
    for reranked, method, drafter in sets:
        names = ("device", "cloud") if method == "both" else (method,)
        about = {"question": question.name, "picked": reranked, "method": method, "drafter": drafter}
        row: dict[str, Any] = {**about, "holder": question.holder, "margin": 1.0, "cloud_bytes": 0}
        row |= {f"{side}_{what}": 0 for side in ("device", "cloud") for what in ("prompt", "work")}
        decoders: dict[str, Any] = {}
        for name in names:
            node = replace(
                by_kind[reranked][name],
                decodes=partial(Ahead, drafter=makers[drafter], **hooks),
            )
            if (reranked, name) not in chosen:
                indices, scores = node.documents.positions(question.text, K)
                work = layers_read(node) if reranked else 0
                chosen[reranked, name] = [node.documents.texts[index] for index in indices], scores, work
            texts, scores, row[f"{name}_work"] = chosen[reranked, name]
            prefixes = node.prefixes(texts)
            row[f"{name}_prompt"] = sum(map(len, prefixes))
            if name == "cloud":
                row["cloud_bytes"] = sum(len(text.encode()) for text in texts)
            bare = node.template.prefix(node.tokenizer, "")
            decoders[name] = node.decoder_of(prefixes, scores, question.text, 0.0, bare=bare)
        tokens: list[int] = []
        while len(tokens) < LIMIT and not any(decoder.ended for decoder in decoders.values()):
            if method == "both":
                now = lockstep.step(decoders)
                p = target(now.told["device"], now.told["cloud"], now.log_weight["device"], now.log_weight["cloud"])
                own = {name: int(now.p[name].argmax()) for name in names}
            else:
                p = np.exp(decoders[method].next_distribution())
                own = {method: int(p.argmax())}
            token = int(p.argmax())
            second, first = np.partition(p, -2)[-2:]
            row["margin"] = min(row["margin"], float(first - second))
            for number, (name, decoder) in enumerate(decoders.items()):
                other = own[names[1 - number]] if len(names) > 1 else token
                steps.append({**about, "side": name, "position": len(tokens), "token": token, "width": decoder.width,
                              "accepted": own[name] == token, "other_accepted": other == token})  # fmt: skip
                if own[name] != token:  # as it runs: the side goes on from its own draft until it hears otherwise
                    decoder.commit(own[name])
                    decoder.rollback(len(tokens))
                decoder.commit(token)
            tokens.append(token)
        text = str(node.tokenizer.decode(tokens, skip_special_tokens=True))
        query = len(node.tokenizer(question.text).input_ids)
        rows.append({**row, "tokens": len(tokens), "query": query, "answer_sha": digest(tokens),
                     "right": question.right(text)})  # fmt: skip
    return rows, steps


SETS = [
    (reranked, method, drafter)
    for reranked in (False, True)
    for method in ("device", "cloud", "both")
    for drafter in ("", "L", "S", "LS")
]


def costs(by_kind: Nodes, makers: Mapping[str, Callable[..., Any]], sample: Sequence[Question]) -> Iterator[dict]:
    """Seconds of the parts, by name and size, a row a question: interleaved, so that all meet the same machine."""
    for number, question in enumerate(sample):

        def row(name: str, size: int, act: Callable[[], Any], count: int = 1) -> dict[str, Any]:
            began = time.perf_counter()
            act()
            seconds = (time.perf_counter() - began) / count
            return {"round": number, "name": name, "size": size, "seconds": seconds}  # noqa: B023

        near = by_kind[False]["device"]
        ranked = by_kind[True]["device"]
        yield row("embedding", 1, lambda: near.documents.positions(question.text, K))  # noqa: B023
        hybrid = ranked.documents.hybrid  # type: ignore[attr-defined]
        scorer = ranked.documents.scorer  # type: ignore[attr-defined]
        yield row("hybrid", 1, lambda: hybrid.search([question.text], CANDIDATES))  # noqa: B023
        indices = hybrid.search([question.text], CANDIDATES)[1][0]
        texts = [ranked.documents.texts[index] for index in indices]
        scorer(question.text, texts)  # embeds the passages, once
        began = time.perf_counter()
        scorer(question.text, texts)
        seconds = (time.perf_counter() - began) / layers_read(ranked)
        yield {"round": number, "name": "layer of a candidate", "size": 1, "seconds": seconds}
        for letters, make in makers.items():
            node = replace(near, memory=Prefixes(0), decodes=partial(Ahead, drafter=make))
            decoder: Any = node.decoder(question.text, K)[0]
            if letters in ("", "S"):
                long = sum(map(len, decoder._prefixes))
                name = "prefill" + ", logits read" * (letters == "S")
                yield row(name, 1, decoder.prefill, long)
            text = list(decoder.read)
            decoder.next_distribution()
            draft = decoder.drafter
            yield row(f"drafting {letters}".strip(), 1, lambda: likeliest_chain(draft.propose(text, NODES), BUDGET))  # noqa: B023
            if not letters:
                logits = decoder._logits()
                yield row("mixture", 1, lambda: decoder._mix(logits))  # noqa: B023
                batch = decoder._batch
                start = decoder._batch.length
                for width in (1, 2, 3, 5, 9, 24):
                    yield row("pass", width, lambda: batch.extend(text[:width]))  # noqa: B023
                    batch.rollback(start)


# Processes


def remembered(letters: str) -> int:
    """Anonymous bytes by which the device's process grows, at most, over two questions of a set. Runs in a child."""
    code = (
        "import json, sys\nfrom pathlib import Path\nfrom ondevice.meters import mark\nimport torch\n"
        "torch.set_num_threads(1)\nfrom ondevice_programs.assistant.sides import Sides\n"
        "from ondevice_programs.pair import library\nfrom ondevice_programs.pair.device import Device\n"
        "from ondevice_studies.dragon.pair import GREEDY, alone\nmark('begin')\n"
        "node = Sides(sys.argv[1]).node(library.documents(sys.argv[2], private=True))\n"
        "with Device(node) as device:\n    [alone(device, query, GREEDY) for query in sys.argv[3:]]\nmark('end')\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        queries = [question.text for question in questions.first(1)[:2]]
        device = write(Path(folder), questions.documents()) / "device.jsonl"
        sampled = memory.sample([sys.executable, "-c", code, letters, str(device), *queries])
    return sampled.peak("anonymous")


def live(folder: Path, letters: str, sample: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Whole answers of device and cloud, two processes with a link of every delay between them."""
    words = [word for letter, name in SYSTEMS.items() if letter not in letters for word in ("--without", name)]
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(cloud(folder / "cloud.jsonl", *words))
        node = Sides(letters).node(library.documents(str(folder / "device.jsonl"), private=True))
        for delay in DELAYS:
            relay = stack.enter_context(Relay("127.0.0.1", port, *added(delay)))
            device = stack.enter_context(Device(node, port=relay.port, patience=60.0))
            device.answer(sample[0].text, GREEDY)
            for question in sample:
                answer = device.answer(question.text, replace(GREEDY, limit=LIMIT))
                yield {
                    "systems": letters,
                    "delay": delay,
                    "question": question.name,
                    "ttft": answer.ttft,
                    "last": answer.times[-1],
                    "tokens": len(answer.tokens),
                    "answer_sha": digest(answer.tokens),
                }


def record_answers(share: int, shares: int) -> None:
    """answers and steps."""
    by_kind = nodes()
    makers = drafters(by_kind[False]["device"].lm.vocabulary)
    sample = questions.first(EACH)
    parameters = {"each": EACH, "drafted": DRAFTED, "limit": LIMIT, "budget": BUDGET, "nodes": NODES}
    opened = partial(
        Recorder, "assistant", keys=["question"], parameters=parameters, models=MODELS, functions=(answered,)
    )
    both = [opened(name) for name in ("answers", "steps")]
    for number, question in enumerate(tqdm(sample, "answers")):
        if number % shares == share and (question.name,) not in both[0].done & both[1].done:
            sets = SETS if number < DRAFTED else [setting for setting in SETS if not setting[2]]
            for recorder, rows in zip(both, answered(by_kind, makers, question, sets), strict=True):
                recorder.add(rows)
    for recorder in both:
        recorder.checkpoint()
    for whole in [opened(recorder.name) for recorder in both]:
        if len(whole.done) == len(sample):
            whole.finish()


def record_here(name: str) -> None:
    """costs, memory or live, of this machine."""
    keys = {"costs": ["round", "name", "size"], "memory": ["systems", "run"], "live": ["systems", "delay", "question"]}
    functions: dict[str, Callable[..., Any]] = {"costs": costs, "memory": remembered, "live": live}
    recorder = Recorder("assistant", name, keys[name], {}, MODELS, machine=machine_name(), functions=[functions[name]])
    if name == "costs":
        by_kind = nodes()
        makers = drafters(by_kind[False]["device"].lm.vocabulary)
        recorder.add(list(costs(by_kind, makers, questions.first(4)[:10])))
    elif name == "memory":
        for run, letters in product(range(3), ("", "G", "L", "S", "GLS")):
            if (letters, run) not in recorder.done:
                recorder.add([{"systems": letters, "run": run, "bytes": remembered(letters)}])
    else:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), questions.documents())
            for letters in LIVE_SETS:
                recorder.add(list(live(Path(folder), letters, questions.first(LIVE_EACH))))
    recorder.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Record."""
    parser = argparse.ArgumentParser(prog="make record PAPER=assistant")
    parser.add_argument("--only", choices=["answers", "costs", "memory", "live"])
    parser.add_argument("--share", default="1/1", metavar="i/n", help="the i-th of n parts of the answers")
    options = parser.parse_args(argv)
    share, shares = map(int, options.share.split("/"))
    torch.set_num_threads(1)
    for name in [options.only] if options.only else ["answers", "costs", "memory", "live"]:
        if name == "answers":
            record_answers(share - 1, shares)
        else:
            record_here(name)


if __name__ == "__main__":
    main()
