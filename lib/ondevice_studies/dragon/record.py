"""What DRAGON's verdicts rest on: `make record PAPER=dragon` makes all of it; it goes on where it was stopped.

One record at a time: `python -m ondevice_studies.record dragon --only NAME`, and n processes share its work with
`--share i/n`. Without a clock and in float32, so the same on every machine but for near-ties: `relevance` (how the two
sides' scores compare, validation split), `found`, `temperatures` and `windows` (Figure 6), `answers` and `lockstep`
(greedy answers by who holds them), `schedules` (Figure 9), `membership` (the attack). Of this machine: `latency`
(Figures 7 and 8, Table 1).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from ondevice import corpus, evidence, models
from ondevice.causal_lm.scoring import score
from ondevice.corpus.answers import hit
from ondevice.corpus.excerpts import passages
from ondevice.corpus.prompts import pick
from ondevice.evidence import Recorder, machine_name
from ondevice.retrieval import SparseIndex
from ondevice_programs.pair.answer import Answer
from ondevice_programs.pair.node import Node
from ondevice_studies.dragon import language_modelling, lockstep, membership, pair, replays, study
from ondevice_studies.dragon.language_modelling import TEMPERATURES, Fronts, read_window, token_wise
from ondevice_studies.dragon.pair import AGAIN, AS_MANY, CRCG, DRAGON, FETCHED, GREEDY, ON_CLOUD, ROWS, SW, TEXT, TW
from ondevice_studies.dragon.printed import Recording
from ondevice_studies.dragon.simulator import Bools
from ondevice_studies.dragon.windows import Retrieved, retrieve, windows
from ondevice_studies.dragon.world import Question, world
from ondevice_studies.speculation.prompts import digest

BASE = "pydocs-lm-base"
SMALL = "pydocs-lm-small"

# Relevance, answers and acceptance: questions

WEIGHED = 60  # questions of every holder, validation split
ASKED = 75  # of every holder, test split
LONGEST = 40  # tokens of an answer


def weighed(nodes: Mapping[str, Node], question: Question, split: str) -> list[dict[str, Any]]:
    """A row a side and document, best first: score, ceiling, and the answer's log-probabilities after it alone."""
    rows = list[dict[str, Any]]()
    for side, node in nodes.items():
        tokenizer = node.tokenizer
        documents = node.documents
        answer = [*tokenizer(question.answer, add_special_tokens=False).input_ids, node.end]
        suffix = node.template.suffix(tokenizer, question.query)
        scores, places = documents.index.search([question.query], 2)
        prefixes = [
            [*node.template.prefix(tokenizer, documents.texts[place])[: node.longest], *suffix] for place in places[0]
        ]
        for rank, found in enumerate(score(node.lm.model, prefixes, [answer] * len(prefixes))):
            rows.append({
                "split": split, "question": question.name, "holder": question.holder, "side": side, "rank": rank,
                "score": float(scores[0][rank]), "ceiling": documents.index.ceiling(question.query),
                "log_probs": " ".join(f"{one:.5f}" for one in found.log_probs),
            })  # fmt: skip
    return rows


def answered(
    nodes: Mapping[str, Node], question: Question, method: str, **hooks: Callable[..., Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A greedy answer as a row, and DRAGON's tokens as rows of `lockstep`. hooks: as of `lockstep.answer`."""
    tokens, margin, rows = lockstep.answer(nodes, question.query, method, GREEDY.k, LONGEST, **hooks)
    tokenizer = nodes["device"].tokenizer
    text = str(tokenizer.decode(tokens, skip_special_tokens=True))
    about = {"question": question.name, "holder": question.holder}
    return (
        {**about, "method": method, "tokens": len(tokens), "answer_sha": digest(tokens), "margin": margin,
         "right": hit(text, question.answer)},
        [{**about, "position": number // 2, "word": str(tokenizer.decode([row["token"]])), **row}
         for number, row in enumerate(rows)],
    )  # fmt: skip


# Figure 6: windows

PASSAGES = 40_000  # of the train split that are searched: those of the lowest hashes
WINDOWS = 48  # of the test split
HELD_OUT = 32  # of the validation split
FOUND = 16  # passages of a window


def retrieved(split: str, count: int) -> list[Retrieved]:
    """Windows of a split with the best passages of the train split."""
    everything = passages(corpus.documents("train"), corpus.tokenizer())
    chosen = sorted(everything, key=lambda one: pick(one.text, "dragon passages", 2**62))[:PASSAGES]
    index = SparseIndex.build([one.text for one in chosen])
    return retrieve(windows(corpus.documents(split), corpus.tokenizer(), count), chosen, index, FOUND)


def found_rows(split: str, number: int, one: Retrieved) -> list[dict[str, Any]]:
    """A window and its passages, by which `window_again` makes it without the index."""
    return [{"split": split, "window": number, "name": one.window.name, "start": one.window.start, "rank": rank,
             "title": passage.title, "place": passage.index, "score": float(scored)}
            for rank, (passage, scored) in enumerate(zip(one.passages, one.scores, strict=True))]  # fmt: skip


def window_again(found: pd.DataFrame) -> Retrieved:
    """The window of these rows of the record `found`, all of one window, from the corpus."""
    first = found.iloc[0]
    of_split = {document.name: document for document in corpus.documents(str(first["split"]))}
    titles = set(found["title"])
    train = {document.name: document for document in corpus.documents("train") if document.name in titles}
    tokenizer = corpus.tokenizer()
    window = next(one for one in windows([of_split[first["name"]]], tokenizer) if one.start == first["start"])
    ranked = found.sort_values("rank")
    places = zip(ranked["title"], ranked["place"], strict=True)
    shown = tuple(passages([train[title]], tokenizer)[place] for title, place in places)
    return Retrieved(window, shown, ranked["score"].to_numpy(float))


def window_rows(
    loaded: models.Loaded, name: str, number: int, one: Retrieved, temperature: float, **options: Any
) -> list[dict[str, Any]]:
    """Every method on a window. options: as of `language_modelling.methods`."""
    fronts = Fronts(loaded.model, loaded.tokenizer)
    found = language_modelling.methods(loaded.model, fronts, one, temperature, **options)
    return [{"model": name, "window": number, "method": method, "documents": documents, "cap": cap, "nats": nats,
             "tokens": len(one.window.scored), "read": read}
            for method, documents, cap, nats, read in found]  # fmt: skip


def temperature_rows(loaded: models.Loaded, name: str, number: int, one: Retrieved, split: str) -> list[dict[str, Any]]:
    """Nats of a window by temperature, uncut."""
    read = read_window(loaded.model, Fronts(loaded.model, loaded.tokenizer), one)
    return [{"split": split, "model": name, "window": number, "temperature": temperature,
             "nats": token_wise(read, slice(FOUND), temperature)} for temperature in TEMPERATURES]  # fmt: skip


# Figure 9: schedules


def schedule_rows(setting: str, number: int, decisions: Bools, paces: Recording, **hooks: Any) -> list[dict[str, Any]]:
    """Every strategy on a sequence, simulated. hooks: as of `replays.totals`."""
    rows = replays.totals(decisions, paces, number, **hooks)
    return [{"setting": setting, "sequence": number, **row} for row in rows]


# The attack

ATTACKED = 3  # questions of every holder
CANDIDATES = 1000
FEW = 60


def pool(count: int) -> list[str]:
    """Passages that candidates are the nearest of: a fourth of the train split's, or for few both sides' documents."""
    if count == FEW:
        return [*world().device, *world().cloud]
    return [f"{one.title}\n{one.text}" for one in passages(corpus.documents("train"), corpus.tokenizer())[::4]]


def attacked(
    nodes: Mapping[str, Node], question: Question, among: Sequence[str], count: int, **evidence: Any
) -> list[dict[str, Any]]:
    """Who was in the device's context, by mode and cap: a row each. among: of `pool`. evidence: as of `attack`."""
    members = nodes["device"].documents.best(question.query, GREEDY.k)[0]
    shown = membership.candidates(question.query, members, among, count)
    sides = nodes["device"], nodes["cloud"]
    rows = membership.attack(*sides, question.query, shown, GREEDY.k, GREEDY.limit, **evidence)
    return [{"question": question.name, "holder": question.holder, **row} for row in rows]


# Latency (Figures 7 and 8, Table 1)

EACH = 20  # questions of every holder in Figures 7 and 8
LEAST = 12  # tokens of their reference answers
DELAYS = (0, 50, 100, 150, 200, 250, 300)  # ms, added
UNPACED, IMPOSED, FIRST, FETCH = "unpaced", "imposed", "first tokens", "fetch"
PACES = {UNPACED: pair.Paces(), IMPOSED: pair.PAPER_PACES, FIRST: pair.PAPER_FIRST, FETCH: pair.Paces()}


def latencies(
    device: pair.Device,
    relay: pair.Relay,
    question: Question,
    pace: str,
    delays: Sequence[int] = DELAYS,
    only: Sequence[str] = (),
) -> list[dict[str, object]]:
    """A question by each method at each delay, in turn: rows of the record.

    The device alone does not depend on the delay: it answers at the first and the last one. DRAGON answers twice in the
    middle, the second time as `DRAGON again`, which is the floor below which no difference is read. only: some methods.
    """
    rows = []
    for delay in delays:
        up, down = pair.added(delay / 1000)
        relay.set(up=up, down=down)
        for name in only or methods(pace, delay, delays):
            short = pace == FIRST or name in (TEXT, ROWS, AS_MANY, ON_CLOUD)
            asked = pair.replace(GREEDY, limit=3) if short else GREEDY
            answer = pair.method(name, asked)(device, question.query)
            rows.append({"pace": pace, "question": question.name, "holder": question.holder, "delay_ms": delay,
                         "method": name, **account(answer)})  # fmt: skip
    return rows


def methods(pace: str, delay: int, delays: Sequence[int]) -> list[str]:
    """Those that answer at a delay. Baselines that only Figure 8 has give their first tokens, unpaced."""
    if pace in (FIRST, FETCH):
        return [DRAGON, CRCG] if pace == FIRST else [FETCHED]
    ends = delay in (delays[0], delays[-1])
    first = [TEXT, ROWS, ON_CLOUD, AS_MANY] if pace == UNPACED and delay in (0, 100, 300) else []
    again = [AGAIN] if delay == delays[len(delays) // 2] else []
    return [DRAGON, TW, SW, *([CRCG] if ends else []), *again, *first]


def account(answer: Answer) -> dict[str, object]:
    """An answer in a row; milliseconds. prefilled: until the device's first distribution.

    times: of each token. decided: a letter a token that the device decided, whose draft was accepted: b both, d its
    own, c the cloud's, n neither. device, cloud: what these drafts took.
    """
    letters = {(True, True): "b", (True, False): "d", (False, True): "c", (False, False): "n"}
    decisions = answer.decisions
    return {
        "tokens": len(answer.tokens),
        "alone": answer.alone_from is not None,
        "prefilled": _ms([answer.prefilled or 0.0]),
        "times": _ms(answer.times),
        "decided": "".join(letters[one[1], one[2]] for one in decisions),
        "device": _ms([one[3] for one in decisions]),
        "cloud": _ms([one[4] for one in decisions]),
        "sent": answer.sent,
        "received": answer.received,
    }


def _ms(seconds: Sequence[float]) -> str:
    return " ".join(f"{1000 * one:.1f}" for one in seconds)


# The recording


def recorder(name: str) -> Recorder:
    """Of one record."""
    known: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
        "relevance": (["question"], {"questions of a holder": WEIGHED, "documents": GREEDY.k}, [BASE]),
        "answers": (["question", "method"], {"questions of a holder": ASKED, "tokens": LONGEST}, [BASE]),
        "lockstep": (["question"], {"questions of a holder": ASKED, "tokens": LONGEST}, [BASE]),
        "found": (["split", "window"], {"passages": PASSAGES, "windows": [HELD_OUT, WINDOWS]}, []),
        "temperatures": (["model", "window"], {"passages": PASSAGES, "windows": HELD_OUT}, [BASE, SMALL]),
        "windows": (["model", "window"], {"passages": PASSAGES, "windows": WINDOWS}, [BASE, SMALL]),
        "membership": (["question", "candidates"], {"questions of a holder": ATTACKED, "most": CANDIDATES,
                                      "documents": GREEDY.k, "tokens": GREEDY.limit}, [BASE]),
        "schedules": (["setting", "sequence"], {"sequences": replays.SEQUENCES, "lookahead": replays.LOOKAHEAD}, []),
        "latency": (["pace", "question"], {"questions of a holder": EACH, "tokens of references": LEAST,
                                           "delays": DELAYS, "documents": GREEDY.k, "tokens": GREEDY.limit,
                                           "lookahead": GREEDY.lookahead, "cap": GREEDY.cap}, [BASE]),
    }  # fmt: skip
    keys, parameters, used = known[name]
    machine = machine_name() if name == "latency" else ""
    return Recorder("dragon", name, keys, {**parameters, "threads": 1}, used, machine=machine)


def record_questions(which: int, of: int, split: str, name: str) -> bool:
    """relevance, or answers with lockstep; whether nothing is missing."""
    kept = {one: recorder(one) for one in RECORDS[name]}
    asked = world(split).first(*((WEIGHED, 4) if name == "relevance" else (ASKED, 0)))
    with tempfile.TemporaryDirectory(prefix="dragon-") as place:
        nodes = pair.nodes(BASE, pair.write(Path(place), world(split)))
        for question in tqdm(asked[which::of], desc=name):
            for method in lockstep.METHODS if name == "answers" else ():
                if (question.name, method) not in kept["answers"].done:
                    row, tokens = answered(nodes, question, method)
                    kept["answers"].add([row])
                    if tokens:
                        kept["lockstep"].add(tokens)
            if name == "relevance" and (question.name,) not in kept[name].done:
                kept[name].add(weighed(nodes, question, split))
    for one in kept.values():
        one.checkpoint()
    units = (
        {(one.name,) for one in asked}
        if name == "relevance"
        else {(one.name, method) for one in asked for method in lockstep.METHODS}
    )
    return units <= recorder(name).done


def record_membership(which: int, of: int) -> bool:
    """The attack; whether nothing is missing."""
    kept = recorder("membership")
    asked = world().first(ATTACKED, LEAST)
    with tempfile.TemporaryDirectory(prefix="dragon-") as place:
        nodes = pair.nodes(BASE, pair.write(Path(place), world()))
        for count in (FEW, CANDIDATES):
            among = pool(count)
            for question in tqdm(asked[which::of], desc=f"membership, {count}"):
                if (question.name, count) not in kept.done:
                    kept.add(attacked(nodes, question, among, count))
    kept.checkpoint()
    return {(one.name, count) for one in asked for count in (FEW, CANDIDATES)} <= recorder("membership").done


def record_windows(which: int, of: int) -> bool:
    """found, temperatures and windows; whether nothing is missing."""
    shown = {split: retrieved(split, count) for split, count in (("validation", HELD_OUT), ("test", WINDOWS))}
    kept = {name: recorder(name) for name in ("found", "temperatures", "windows")}
    for split, those in shown.items():
        for number, window in enumerate(those):
            if which == 0:
                kept["found"].add(found_rows(split, number, window))
    for name in (BASE, SMALL):
        loaded = models.load(name)
        for number, one in enumerate(tqdm(shown["validation"], desc=f"temperatures, {name}")):
            if (name, number) not in kept["temperatures"].done:
                kept["temperatures"].add(temperature_rows(loaded, name, number, one, "validation"))
        chosen = study.temperature(kept["temperatures"].rows(), name)
        for number, one in enumerate(tqdm(shown["test"], desc=f"windows, {name}")):
            if number % of == which and (name, number) not in kept["windows"].done:
                caps = language_modelling.CAPS
                kept["windows"].add(window_rows(loaded, name, number, one, chosen, caps=caps))
    for each in kept.values():
        each.checkpoint()
    return {(name, number) for name in (BASE, SMALL) for number in range(WINDOWS)} <= recorder("windows").done


def record_schedules(which: int, of: int) -> bool:
    """Figure 9's totals; needs the record `lockstep`. Whether nothing is missing."""
    kept = recorder("schedules")
    settings = replays.settings(replays.answered(evidence.load("dragon", "lockstep")))
    units = [(setting, number) for setting, (all_flags, _) in settings.items() for number in range(len(all_flags))]
    for setting, number in tqdm(units[which::of], desc="schedules"):
        if (setting, number) not in kept.done:
            kept.add(schedule_rows(setting, number, settings[setting][0][number], settings[setting][1]))
    kept.checkpoint()
    return set(units) <= recorder("schedules").done


def record_latency(which: int, of: int, paces: Sequence[str]) -> bool:
    """Of every `of`th question, one pace after the other; whether nothing is missing."""
    kept = recorder("latency")
    asked = world().first(EACH, LEAST)
    for pace in paces:
        mine = [one for one in asked[which::of] if (pace, one.name) not in kept.done]
        if not mine:
            continue
        with tempfile.TemporaryDirectory(prefix="dragon-") as place:
            folder = pair.write(Path(place), world())
            with pair.both(BASE, folder, paces=PACES[pace]) as (device, relay):
                for question in mine:  # stored rows are made, and both sides have run
                    for warm in methods(pace, 0, DELAYS) if question is mine[0] else (DRAGON, AS_MANY):
                        pair.method(warm, pair.replace(GREEDY, limit=2))(device, question.query)
                delays = DELAYS[::3] if pace in (FIRST, FETCH) else DELAYS
                for question in tqdm(mine, desc=f"latency, {pace}"):
                    kept.add(latencies(device, relay, question, pace, delays))
        kept.checkpoint()
    return {(pace, one.name) for pace in PACES for one in asked} <= recorder("latency").done


RECORDS: dict[str, list[str]] = {
    "relevance": ["relevance"],
    "answers": ["answers", "lockstep"],
    "windows": ["found", "temperatures", "windows"],
    "schedules": ["schedules"],
    "membership": ["membership"],
    "latency": ["latency"],
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a record is written once nothing of it is missing."""
    parser = argparse.ArgumentParser(prog="make record PAPER=dragon", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(RECORDS), choices=list(RECORDS))
    parser.add_argument("--share", default="1/1", help="i/n: this process takes every n-th unit of work")
    parser.add_argument("--pace", nargs="+", default=list(PACES), choices=list(PACES), help="of latency")
    options = parser.parse_args(argv)
    which, of = (int(part) for part in options.share.split("/"))
    torch.set_num_threads(1)
    others = {"windows": record_windows, "schedules": record_schedules, "membership": record_membership}
    for name in options.only:
        if name == "latency":
            whole = record_latency(which - 1, of, options.pace)
        elif name in others:
            whole = others[name](which - 1, of)
        else:
            whole = record_questions(which - 1, of, "validation" if name == "relevance" else "test", name)
        if whole:
            print(*(recorder(one).finish() for one in RECORDS[name]), sep="\n")


if __name__ == "__main__":
    main()
