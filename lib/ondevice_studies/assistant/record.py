"""What the assistant's findings rest on: `make record PAPER=assistant`; it goes on where it was stopped.

Deterministic: `calibration` and `relevance` (validation questions), `answers` with `steps` (test questions, every set).
Of this machine: `costs` (seconds of the parts), `memory` (of the device's process) and `live` (whole runs of the pair).
One at a time: `--only NAME`; several processes share the answers with `--share i/n`.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ondevice.causal_lm.scoring import score
from ondevice.corpus.answers import hit
from ondevice.evidence import Recorder, machine_name
from ondevice.evidence.records import enter
from ondevice.meters import memory
from ondevice.network.relay import Relay
from ondevice.retrieval import SparseIndex, embeddings
from ondevice_papers.dragon.aggregation import target
from ondevice_programs.assistant.__main__ import cloud
from ondevice_programs.assistant.drafting import BUDGET, NODES, Ahead, drafters, likeliest_chain
from ondevice_programs.assistant.picking import CANDIDATES, RERANKER, K, picked
from ondevice_programs.assistant.sides import MODEL, Sides, calibration, reranker, warm_tables
from ondevice_programs.assistant.systems import SYSTEMS, temperature
from ondevice_programs.pair.device import Device
from ondevice_programs.pair.node import Documents, Node
from ondevice_programs.pair.prefixes import Prefixes
from ondevice_programs.reranker import Reranker
from ondevice_studies.assistant.world import Question, World, world
from ondevice_studies.dragon import lockstep
from ondevice_studies.dragon.pair import GREEDY, added, write
from ondevice_studies.speculation.prompts import digest

EACH, DRAFTED, LIMIT = 50, 100, 32  # questions of every holder; those that drafters run on, too; tokens of an answer
CERTIFIED, WEIGHED = 240, 25  # validation questions: for the reranker's rule; of every holder, for the temperatures
TEMPERATURES = [2.0**-power for power in range(8)]
LIVE_SETS, LIVE_EACH, DELAYS = ["D", "GD", "DS", "GDL", "GDLS"], 3, (0.0, 0.1, 0.3)
Nodes = Mapping[bool, Mapping[str, Node]]  # by whether passages are reranked, by side


def nodes(dataset: World, ranker: Reranker) -> Nodes:
    """Both sides of a world in this process, without drafters, picking by embeddings and by GRATING."""
    sides = Sides("")
    by_kind: dict[bool, dict[str, Node]] = {False: {}, True: {}}
    for side in ("device", "cloud"):
        texts = getattr(dataset, side)
        documents = Documents(texts, SparseIndex.build(texts))
        vectors = embeddings(texts)
        for reranked in (False, True):
            own = picked(documents, vectors, ranker if reranked else None)
            by_kind[reranked][side] = Node(sides.lm, sides.tokenizer, own, name=MODEL)
    return by_kind


def calibrated(ranker: Reranker, dataset: World) -> None:
    """Certify the pruning of two of ten passages on validation questions of both sides."""
    by_kind = nodes(dataset, ranker)[True].values()
    questions = dataset.questions[:CERTIFIED]
    queries = [question.query for question in questions for _ in by_kind]
    pools = []
    for question in questions:
        for node in by_kind:
            indices = node.documents.hybrid.search([question.query], CANDIDATES)[1][0]  # type: ignore[attr-defined]
            pools.append([node.documents.texts[index] for index in indices])
    ranker.calibrate(queries, pools, K, save=calibration())
    enter(calibration())


def weighed(by_kind: Nodes, question: Question) -> list[dict[str, Any]]:
    """The loss of the reference answer, nats a token, by what relevance is divided by."""
    rows = []
    for reranked, sides in by_kind.items():
        scores = list[float]()
        losses = []
        for node in sides.values():
            indices, relevance = node.documents.positions(question.query, K)
            suffix = node.template.suffix(node.tokenizer, question.query)
            answer = [*node.tokenizer(question.answer, add_special_tokens=False).input_ids, node.end]
            prompts = [[*prefix, *suffix] for prefix in node.prefixes([node.documents.texts[at] for at in indices])]
            losses += [scored.log_probs for scored in score(node.lm.model, prompts, [answer] * len(prompts))]
            scores += relevance
        for divisor in TEMPERATURES:
            weights = torch.tensor(scores, dtype=torch.float64).div(divisor).log_softmax(0)
            weighted = torch.tensor(np.array(losses), dtype=torch.float64) + weights[:, None]
            rows.append({"question": question.name, "holder": question.holder, "picked": reranked,
                         "temperature": divisor, "loss": -float(weighted.logsumexp(0).mean())})  # fmt: skip
    return rows


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
                weight_temperature=temperature(reranked),
                decodes=partial(Ahead, drafter=makers[drafter], **hooks),
            )
            if (reranked, name) not in chosen:
                indices, scores = node.documents.positions(question.query, K)
                work = sum(node.documents.reranker.receipt.active) if reranked else 0  # type: ignore[attr-defined]
                chosen[reranked, name] = [node.documents.texts[index] for index in indices], scores, work
            texts, scores, row[f"{name}_work"] = chosen[reranked, name]
            prefixes = node.prefixes(texts)
            row[f"{name}_prompt"] = sum(map(len, prefixes))
            if name == "cloud":
                row["cloud_bytes"] = sum(len(text.encode()) for text in texts)
            bare = node.template.prefix(node.tokenizer, "")
            decoders[name] = node.decoder_of(prefixes, scores, question.query, 0.0, bare=bare)
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
        query = len(node.tokenizer(question.query).input_ids)
        rows.append({**row, "tokens": len(tokens), "query": query, "answer_sha": digest(tokens),
                     "right": hit(text, question.answer)})  # fmt: skip
    return rows, steps


SETS = [
    (reranked, method, drafter)
    for reranked in (False, True)
    for method in ("device", "cloud", "both")
    for drafter in ("", "L", "S", "LS")
]


def costs(by_kind: Nodes, makers: Mapping[str, Callable[..., Any]], questions: Sequence[Question]) -> Iterator[dict]:
    """Seconds of the parts, by name and size, a row a question: interleaved, so that all meet the same machine."""
    for number, question in enumerate(questions):

        def row(name: str, size: int, act: Callable[[], Any], count: int = 1) -> dict[str, Any]:
            began = time.perf_counter()
            act()
            seconds = (time.perf_counter() - began) / count
            return {"round": number, "name": name, "size": size, "seconds": seconds}  # noqa: B023

        near = by_kind[False]["device"]
        ranked = by_kind[True]["device"]
        yield row("embedding", 1, lambda: near.documents.positions(question.query, K))  # noqa: B023
        hybrid = ranked.documents.hybrid  # type: ignore[attr-defined]
        ranker = ranked.documents.reranker  # type: ignore[attr-defined]
        yield row("hybrid", 1, lambda: hybrid.search([question.query], CANDIDATES))  # noqa: B023
        indices = hybrid.search([question.query], CANDIDATES)[1][0]
        texts = [ranked.documents.texts[index] for index in indices]
        began = time.perf_counter()
        ranker.rank(question.query, texts, K)
        seconds = (time.perf_counter() - began) / sum(ranker.receipt.active)
        yield {"round": number, "name": "layer of a candidate", "size": 1, "seconds": seconds}
        for letters, make in makers.items():
            node = replace(near, memory=Prefixes(0), decodes=partial(Ahead, drafter=make))
            decoder: Any = node.decoder(question.query, K)[0]
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
    dataset = world("test")
    with tempfile.TemporaryDirectory() as folder:
        queries = [question.query for question in dataset.first(1)[:2]]
        device = write(Path(folder), dataset.texts) / "device.jsonl"
        sampled = memory.sample([__import__("sys").executable, "-c", code, letters, str(device), *queries])
    return sampled.peak("anonymous")


def live(folder: Path, letters: str, questions: Sequence[Question]) -> Iterator[dict[str, Any]]:
    """Whole answers of device and cloud, two processes with a link of every delay between them."""
    words = [word for letter, name in SYSTEMS.items() if letter not in letters for word in ("--without", name)]
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(cloud(folder / "cloud.jsonl", *words))
        from ondevice_programs.pair import library

        node = Sides(letters).node(library.documents(str(folder / "device.jsonl"), private=True))
        for delay in DELAYS:
            relay = stack.enter_context(Relay("127.0.0.1", port, *added(delay)))
            device = stack.enter_context(Device(node, port=relay.port, patience=30.0))
            device.answer(questions[0].query, GREEDY)
            for question in questions:
                answer = device.answer(question.query, replace(GREEDY, limit=LIMIT))
                yield {
                    "systems": letters,
                    "delay": delay,
                    "question": question.name,
                    "ttft": answer.ttft,
                    "last": answer.times[-1],
                    "tokens": len(answer.tokens),
                    "answer_sha": digest(answer.tokens),
                }


def main(argv: Sequence[str] | None = None) -> None:
    """Record."""
    parser = argparse.ArgumentParser(prog="make record PAPER=assistant")
    parser.add_argument("--only", choices=["calibration", "relevance", "answers", "costs", "memory", "live"])
    parser.add_argument("--share", default="1/1", metavar="i/n", help="the i-th of n parts of the answers")
    options = parser.parse_args(argv)
    part, parts = map(int, options.share.split("/"))
    wanted = [options.only] if options.only else ["calibration", "relevance", "answers", "costs", "memory", "live"]
    torch.set_num_threads(1)
    here = machine_name()
    models = [MODEL, RERANKER]
    if "calibration" in wanted and not calibration().is_file():
        calibrated(Reranker(RERANKER, mode="order", calibration=False), world("validation"))
    if "relevance" in wanted:
        recorder = Recorder("assistant", "relevance", ["question"], {"each": WEIGHED}, models)
        by_kind = nodes(world("validation"), reranker())
        for question in tqdm(world("validation").first(WEIGHED), "relevance"):
            if (question.name,) not in recorder.done:
                recorder.add(weighed(by_kind, question))
        recorder.finish()
    if not {"answers", "costs"} & set(wanted):
        by_kind = {}
        makers = {}
    else:
        by_kind = nodes(world("test"), reranker())
        node = by_kind[False]["device"]
        makers = drafters(warm_tables(node.lm, int(node.end or 0)))
    if "answers" in wanted:
        parameters = {"each": EACH, "limit": LIMIT, "budget": BUDGET, "nodes": NODES}
        pair = [Recorder("assistant", name, ["question"], parameters, models) for name in ("answers", "steps")]
        for number, question in enumerate(tqdm(world("test").first(EACH), "answers")):
            if number % parts == part - 1 and (question.name,) not in pair[1].done & pair[0].done:
                sets = SETS if number < DRAFTED else [setting for setting in SETS if not setting[2]]
                for recorder, rows in zip(pair, answered(by_kind, makers, question, sets), strict=True):
                    recorder.add(rows)
        for recorder in pair:
            recorder.checkpoint()
            if len(Recorder("assistant", recorder.name, ["question"], parameters, models).done) == 4 * EACH:
                Recorder("assistant", recorder.name, ["question"], parameters, models).finish()
    if "costs" in wanted:
        recorder = Recorder("assistant", "costs", ["round", "name", "size"], {}, models, machine=here)
        recorder.add(list(costs(by_kind, makers, world("test").first(10))))
        recorder.finish()
    if "memory" in wanted:
        recorder = Recorder("assistant", "memory", ["systems", "run"], {}, models, machine=here)
        for run in range(3):
            for letters in ("", "G", "L", "S", "GLS"):
                if (letters, run) not in recorder.done:
                    recorder.add([{"systems": letters, "run": run, "bytes": remembered(letters)}])
        recorder.finish()
    if "live" in wanted:
        recorder = Recorder("assistant", "live", ["systems", "delay", "question"], {}, models, machine=here)
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder), world("test").texts)
            for letters in LIVE_SETS:
                recorder.add(list(live(Path(folder), letters, world("test").first(LIVE_EACH))))
        recorder.finish()


if __name__ == "__main__":
    main()
