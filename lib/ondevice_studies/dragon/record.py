"""What DRAGON's verdicts rest on: `make record PAPER=dragon` makes all of it; it goes on where it was stopped.

One record at a time: `python -m ondevice_studies.record dragon --only NAME`, and n processes share its work with
`--share i/n`. Without a clock and in float32, so the same on every machine but for near-ties: `relevance` (how the two
sides' scores compare, validation split), `found`, `temperatures` and `windows` (Figure 6), `answers` and `lockstep`
(greedy answers by who holds them), `both_sides` (those that need a document of each side), `schedules` (Figure 9),
`membership` (the attack). Of this machine: `latency` (Figures 7 and 8, Table 1).
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
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
from ondevice_programs.pair import relevance
from ondevice_programs.pair.answer import Answer
from ondevice_programs.pair.node import Node
from ondevice_studies.dragon import both_sides, language_modelling, lockstep, membership, pair, replays, sides, study
from ondevice_studies.dragon.language_modelling import TEMPERATURES, Fronts, Retrieved, read_window, token_wise
from ondevice_studies.dragon.pair import AGAIN, AS_MANY, CRCG, DRAGON, GREEDY, ON_CLOUD, SW, TW
from ondevice_studies.dragon.printed import Recording
from ondevice_studies.dragon.simulator import Bools
from ondevice_studies.dragon.world import Question, world
from ondevice_studies.speculation.prompts import digest

BASE = "pydocs-lm-base"
SMALL = "pydocs-lm-small"

# Relevance, answers and acceptance: questions

WEIGHED = 60  # questions of every holder, validation split
ANSWERED = 75  # of every holder, test split
LONGEST = 40  # tokens of an answer
TOGETHER = 5  # questions of a forward, of those that need a document of each side


def weighed(nodes: Mapping[str, Node], question: Question, split: str) -> list[dict[str, Any]]:
    """A row a side and document, best first: score, ceiling, and the answer's log-probabilities after it alone."""
    rows = list[dict[str, Any]]()
    for side, node in nodes.items():
        tokenizer = node.tokenizer
        documents = node.documents
        answer = [*tokenizer(question.answer, add_special_tokens=False).input_ids, node.end]
        suffix = node.template.suffix(tokenizer, question.query)
        scores, indices = documents.index.search([question.query], 2)
        prefixes = [
            [*node.template.prefix(tokenizer, documents.texts[index])[: node.longest], *suffix] for index in indices[0]
        ]
        for rank, scored in enumerate(score(node.lm.model, prefixes, [answer] * len(prefixes))):
            rows.append({
                "split": split, "question": question.name, "holder": question.holder, "side": side, "rank": rank,
                "score": float(scores[0][rank]), "ceiling": documents.index.ceiling(question.query),
                "log_probs": " ".join(f"{log_prob:.5f}" for log_prob in scored.log_probs),
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
PER_WINDOW = 16  # passages of a window


def retrieved(split: str, count: int) -> list[Retrieved]:
    """Windows of a split with the best passages of the train split."""
    everything = passages(corpus.documents("train"), corpus.tokenizer())
    chosen = sorted(everything, key=lambda passage: pick(passage.text, "dragon passages", 2**62))[:PASSAGES]
    index = SparseIndex.build([passage.text for passage in chosen])
    shown = language_modelling.windows(corpus.documents(split), corpus.tokenizer(), count)
    return language_modelling.retrieve(shown, chosen, index, PER_WINDOW)


def found_rows(split: str, number: int, retrieval: Retrieved) -> list[dict[str, Any]]:
    """A window and its passages, by which `window_again` makes it without the index."""
    ranked = zip(retrieval.passages, retrieval.scores, strict=True)
    return [{"split": split, "window": number, "name": retrieval.window.name, "start": retrieval.window.start,
             "rank": rank, "title": passage.title, "place": passage.index, "score": float(scored)}
            for rank, (passage, scored) in enumerate(ranked)]  # fmt: skip


def window_again(rows: pd.DataFrame) -> Retrieved:
    """The window of these rows of the record `found`, all of one window, from the corpus."""
    first = rows.iloc[0]
    of_split = {document.name: document for document in corpus.documents(str(first["split"]))}
    titles = set(rows["title"])
    train = {document.name: document for document in corpus.documents("train") if document.name in titles}
    tokenizer = corpus.tokenizer()
    windows = language_modelling.windows([of_split[first["name"]]], tokenizer)
    window = next(candidate for candidate in windows if candidate.start == first["start"])
    ranked = rows.sort_values("rank")
    keys = zip(ranked["title"], ranked["place"], strict=True)
    shown = tuple(passages([train[title]], tokenizer)[index] for title, index in keys)
    return Retrieved(window, shown, ranked["score"].to_numpy(float))


def window_rows(
    loaded: models.Loaded, name: str, number: int, retrieval: Retrieved, temperature: float, **options: Any
) -> list[dict[str, Any]]:
    """Every method on a window. options: as of `language_modelling.methods`."""
    fronts = Fronts(loaded.model, loaded.tokenizer)
    results = language_modelling.methods(loaded.model, fronts, retrieval, temperature, **options)
    return [{"model": name, "window": number, "method": method, "documents": documents, "cap": cap, "nats": nats,
             "tokens": len(retrieval.window.scored), "read": read}
            for method, documents, cap, nats, read in results]  # fmt: skip


def temperature_rows(
    loaded: models.Loaded, name: str, number: int, retrieval: Retrieved, split: str
) -> list[dict[str, Any]]:
    """Nats of a window by temperature, uncut."""
    read = read_window(loaded.model, Fronts(loaded.model, loaded.tokenizer), retrieval)
    return [{"split": split, "model": name, "window": number, "temperature": temperature,
             "nats": token_wise(read, slice(PER_WINDOW), temperature)} for temperature in TEMPERATURES]  # fmt: skip


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
    train = passages(corpus.documents("train"), corpus.tokenizer())
    return [f"{passage.title}\n{passage.text}" for passage in train[::4]]


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
UNPACED, IMPOSED, FIRST = "unpaced", "imposed", "first tokens"
PACES = {UNPACED: pair.Paces(), IMPOSED: pair.PAPER_PACES, FIRST: pair.PAPER_FIRST}


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
            short = pace == FIRST or name in (AS_MANY, ON_CLOUD)
            options = pair.replace(GREEDY, limit=3) if short else GREEDY
            answer = pair.method(name, options)(device, question.query)
            rows.append({"pace": pace, "question": question.name, "holder": question.holder, "delay_ms": delay,
                         "method": name, **account(answer)})  # fmt: skip
    return rows


def methods(pace: str, delay: int, delays: Sequence[int]) -> list[str]:
    """Those that answer at a delay. Baselines that only Figure 8 has give their first tokens, unpaced."""
    if pace == FIRST:
        return [DRAGON, CRCG]
    ends = delay in (delays[0], delays[-1])
    first = [ON_CLOUD, AS_MANY] if pace == UNPACED and delay in (0, 100, 300) else []
    repeated = [AGAIN] if delay == delays[len(delays) // 2] else []
    return [DRAGON, TW, SW, *([CRCG] if ends else []), *repeated, *first]


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
        "decided": "".join(letters[decision[1], decision[2]] for decision in decisions),
        "device": _ms([decision[3] for decision in decisions]),
        "cloud": _ms([decision[4] for decision in decisions]),
        "sent": answer.sent,
        "received": answer.received,
    }


def _ms(seconds: Sequence[float]) -> str:
    return " ".join(f"{1000 * value:.1f}" for value in seconds)


# The recording


def recorder(name: str) -> Recorder:
    """Of one record."""
    definitions: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
        "relevance": (["question"], {"questions of a holder": WEIGHED, "documents": GREEDY.k}, [BASE]),
        "answers": (["question", "method"], {"questions of a holder": ANSWERED, "tokens": LONGEST}, [BASE]),
        "lockstep": (["question"], {"questions of a holder": ANSWERED, "tokens": LONGEST}, [BASE]),
        "both_sides": (["question", "method"], {"questions": len(both_sides.questions()), "documents": GREEDY.k,
                                                "tokens": both_sides.LIMIT, "passages": sides.PUBLIC},
                       [both_sides.MODEL, relevance.RERANKER]),
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
    keys, parameters, used = definitions[name]
    machine = machine_name() if name == "latency" else ""
    return Recorder("dragon", name, keys, {**parameters, "threads": 1}, used, machine=machine)


def recorded(
    name: str, units: Mapping[tuple[Any, ...], tuple[Any, ...]], rows_of: Callable[..., Any], share: int, shares: int
) -> bool:
    """Add the missing units' rows; whether nothing of the record is missing then.

    units: by their keys, the arguments of rows_of. share, shares: every n-th unit is this process's.
    """
    kept = recorder(name)
    for unit, arguments in tqdm(list(units.items())[share::shares], desc=name):
        if unit not in kept.done:
            kept.add(rows_of(*arguments))
    kept.checkpoint()
    return units.keys() <= recorder(name).done


@contextlib.contextmanager
def both_nodes(split: str = "test") -> Iterator[dict[str, Node]]:
    """The two sides over a split's documents, in this process."""
    with tempfile.TemporaryDirectory(prefix="dragon-") as scratch:
        yield pair.nodes(BASE, pair.write(Path(scratch), world(split)))


def record_relevance(share: int, shares: int) -> bool:
    """How the two sides' scores compare, validation split."""
    split = "validation"
    units = {(question.name,): (question, split) for question in world(split).first(WEIGHED, 4)}
    with both_nodes(split) as nodes:
        return recorded("relevance", units, partial(weighed, nodes), share, shares)


def record_answers(share: int, shares: int) -> bool:
    """answers and lockstep."""
    tokens = recorder("lockstep")

    def rows_of(question: Question, method: str) -> list[dict[str, Any]]:
        row, parts = answered(nodes, question, method)
        if parts:
            tokens.add(parts)
        return [row]

    questions = product(world().first(ANSWERED), lockstep.METHODS)
    with both_nodes() as nodes:
        units = {(question.name, method): (question, method) for question, method in questions}
        whole = recorded("answers", units, rows_of, share, shares)
    tokens.checkpoint()
    return whole


def record_both_sides(share: int, shares: int) -> bool:
    """Questions that need a document of each side, some in a forward."""
    kept = recorder("both_sides")
    questions = both_sides.questions()
    missing = [question for question in questions[share::shares] if (question.name, lockstep.DRAGON) not in kept.done]
    nodes = both_sides.nodes(questions) if missing else {}
    for start in tqdm(range(0, len(missing), TOGETHER), desc="both_sides"):
        kept.add(both_sides.answered(nodes, missing[start : start + TOGETHER], GREEDY.k))
    kept.checkpoint()
    return {(question.name, lockstep.DRAGON) for question in questions} <= recorder("both_sides").done


def record_membership(share: int, shares: int) -> bool:
    """The attack."""
    pools = {count: pool(count) for count in (FEW, CANDIDATES)}
    questions = product(world().first(ATTACKED, LEAST), pools)
    units = {(question.name, count): (question, pools[count], count) for question, count in questions}
    with both_nodes() as nodes:
        return recorded("membership", units, partial(attacked, nodes), share, shares)


def record_windows(share: int, shares: int) -> bool:
    """found, temperatures and windows; each share makes all temperatures, as all windows need them."""
    shown = {split: retrieved(split, count) for split, count in (("validation", HELD_OUT), ("test", WINDOWS))}
    every = [(split, number, window) for split, those in shown.items() for number, window in enumerate(those)]
    recorded("found", {row[:2]: row for row in every}, found_rows, share, shares)
    loaded = {name: models.load(name) for name in (BASE, SMALL)}

    def by_model(split: str, *settings: Any) -> dict[tuple[Any, ...], tuple[Any, ...]]:
        windows = product(loaded, enumerate(shown[split]))
        return {(name, number): (loaded[name], name, number, window, *settings) for name, (number, window) in windows}

    def losses(model: models.Loaded, name: str, number: int, window: Retrieved) -> list[dict[str, Any]]:
        return window_rows(model, name, number, window, chosen[name], caps=language_modelling.CAPS)

    recorded("temperatures", by_model("validation", "validation"), temperature_rows, 0, 1)
    chosen = {name: study.temperature(recorder("temperatures").rows(), name) for name in loaded}
    return recorded("windows", by_model("test"), losses, share, shares)


def record_schedules(share: int, shares: int) -> bool:
    """Figure 9's totals; needs the record `lockstep`."""
    settings = replays.settings(replays.answered(evidence.load("dragon", "lockstep")))
    units = {
        (setting, number): (setting, number, flags, paces)
        for setting, (all_flags, paces) in settings.items()
        for number, flags in enumerate(all_flags)
    }
    return recorded("schedules", units, schedule_rows, share, shares)


def record_latency(share: int, shares: int) -> bool:
    """Of every `shares`th question, one pace after the other."""
    kept = recorder("latency")
    questions = world().first(EACH, LEAST)
    for pace, paces in PACES.items():
        missing = [question for question in questions[share::shares] if (pace, question.name) not in kept.done]
        if not missing:
            continue
        with tempfile.TemporaryDirectory(prefix="dragon-") as scratch:
            folder = pair.write(Path(scratch), world())
            with pair.both(BASE, folder, paces=paces) as (device, relay):
                for question in missing:  # stored rows are made, and both sides have run
                    for warm in methods(pace, 0, DELAYS) if question is missing[0] else (DRAGON, AS_MANY):
                        pair.method(warm, pair.replace(GREEDY, limit=2))(device, question.query)
                delays = DELAYS[::3] if pace == FIRST else DELAYS
                for question in tqdm(missing, desc=f"latency, {pace}"):
                    kept.add(latencies(device, relay, question, pace, delays))
        kept.checkpoint()
    return {(pace, question.name) for pace in PACES for question in questions} <= recorder("latency").done


# By name, what makes them, a share of all: whether nothing is missing; and the records that it makes.
RECORDS: dict[str, tuple[Callable[[int, int], bool], list[str]]] = {
    "relevance": (record_relevance, ["relevance"]),
    "answers": (record_answers, ["answers", "lockstep"]),
    "both_sides": (record_both_sides, ["both_sides"]),
    "windows": (record_windows, ["found", "temperatures", "windows"]),
    "schedules": (record_schedules, ["schedules"]),
    "membership": (record_membership, ["membership"]),
    "latency": (record_latency, ["latency"]),
}


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a record is written once nothing of it is missing."""
    parser = argparse.ArgumentParser(prog="make record PAPER=dragon", description=__doc__)
    parser.add_argument("--only", nargs="+", default=list(RECORDS), choices=list(RECORDS))
    parser.add_argument("--share", default="1/1", help="i/n: this process takes every n-th unit of work")
    options = parser.parse_args(argv)
    share, shares = map(int, options.share.split("/"))
    torch.set_num_threads(1)
    for name in options.only:
        record, names = RECORDS[name]
        if record(share - 1, shares):
            print(*(recorder(each).finish() for each in names), sep="\n")


if __name__ == "__main__":
    main()
