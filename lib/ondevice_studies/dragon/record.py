"""What DRAGON's verdicts rest on: `make record PAPER=dragon` makes all of it; it goes on where it was stopped.

One record at a time: `python -m ondevice_studies.record dragon --only NAME`, and n processes share its work with
`--share i/n`. Without a clock and in float32, so the same on every machine but for near-ties: `answers` and `lockstep`
(greedy answers by who holds them), `temperatures` and `windows` (Figure 6), `schedules` (Figure 9), `membership` (the
attack). Of this machine: `latency` (Figures 7 and 8, Table 1).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tqdm import tqdm

from ondevice import evidence, models
from ondevice.evidence import Again, Recorder, machine_name, some
from ondevice.retrieval import SparseIndex
from ondevice_programs.pair import relevance
from ondevice_programs.pair.answer import Answer
from ondevice_programs.pair.node import Node
from ondevice_studies.dragon import answers, language_modelling, membership, pair, questions, replays, study
from ondevice_studies.dragon.answers import DOCUMENTS, LONGEST, MODEL
from ondevice_studies.dragon.language_modelling import CAPS, TEMPERATURES, Fronts, Retrieved, read_window, token_wise
from ondevice_studies.dragon.pair import AGAIN, AS_MANY, CRCG, DRAGON, GREEDY, ON_CLOUD, SW, TW
from ondevice_studies.dragon.printed import Recording
from ondevice_studies.dragon.questions import HOLDERS, Question
from ondevice_studies.dragon.simulator import Bools

ANSWERED = 100  # questions of every holder

# Figure 6: windows

WINDOWS = 40  # of the test split, of an article each
HELD_OUT = 16  # of the validation split


def window_rows(
    loaded: models.Loaded, number: int, retrieval: Retrieved, temperature: float, **options: Any
) -> list[dict[str, Any]]:
    """Every method on a window. options: as of `language_modelling.methods`."""
    fronts = Fronts(loaded.model, loaded.tokenizer)
    results = language_modelling.methods(loaded.model, fronts, retrieval, temperature, **options)
    return [
        {"model": loaded.spec, "window": number, "method": method, "documents": documents, "cap": cap, "nats": nats,
         "tokens": len(retrieval.window.scored), "read": read}
        for method, documents, cap, nats, read in results
    ]  # fmt: skip


def temperature_rows(loaded: models.Loaded, number: int, retrieval: Retrieved, split: str) -> list[dict[str, Any]]:
    """Nats of a window by temperature, uncut."""
    read = read_window(loaded.model, Fronts(loaded.model, loaded.tokenizer), retrieval)
    every = slice(len(retrieval.passages))
    return [
        {"split": split, "model": loaded.spec, "window": number, "temperature": temperature,
         "nats": token_wise(read, every, temperature)}
        for temperature in TEMPERATURES
    ]  # fmt: skip


# Figure 9: schedules


def schedule_rows(setting: str, number: int, decisions: Bools, paces: Recording, **hooks: Any) -> list[dict[str, Any]]:
    """Every strategy on a sequence, simulated. hooks: as of `replays.totals`."""
    rows = replays.totals(decisions, paces, number, **hooks)
    return [{"setting": setting, "sequence": number, **row} for row in rows]


# The attack

ATTACKED = 20  # questions of every holder
CANDIDATES = 25  # those of the device's context, and notes nearest to the question that nobody has


def attacked(nodes: Mapping[str, Node], question: Question, **evidence: Any) -> list[dict[str, Any]]:
    """Who was in the device's context, by mode and cap: a row each. evidence: as of `attack`.

    The device has a half of the notes, drawn by chance, so that a question says nothing about who has its note; held:
    whether the device does. Candidates are two notes that the device has read and others of the half that nobody has.
    """
    held, nobodys = questions.halves()
    whole = nodes["device"].documents
    device = replace(nodes["device"], documents=replace(whole, texts=held, index=SparseIndex.build(held)))
    read = [held[position] for position in device.documents.positions(question.text, DOCUMENTS)[0]]
    shown = membership.candidates(question.text, read, nobodys, CANDIDATES)
    prior = whole.scorer(question.text, shown) / device.weight_temperature  # type: ignore[attr-defined]
    sides = device, nodes["cloud"]
    rows = membership.attack(*sides, question.text, shown, DOCUMENTS, GREEDY.limit, prior=prior, **evidence)
    about = {"question": question.name, "holder": question.holder, "held": question.note in held}
    return [{**about, **row} for row in rows]


# Latency (Figures 7 and 8, Table 1)

EACH = 4  # questions of every holder in Figures 7 and 8
LEAST = 12  # tokens of DRAGON's recorded answers to them
DELAYS = (0, 50, 100, 150, 200, 250, 300)  # ms, added
UNPACED, IMPOSED, FIRST = "unpaced", "imposed", "first tokens"
PACES = {UNPACED: pair.Paces()}  # the paper's are simulated (`paper_paces`): no model of 135 M has them on a CPU


def timed_questions(recorded: pd.DataFrame, each: int = EACH) -> list[Question]:
    """The first `each` questions of every holder that DRAGON answers with at least LEAST tokens; the holders in turn.

    recorded: the record `answers`. Raises ValueError where there are fewer.
    """
    long = recorded[(recorded["method"] == DRAGON) & (recorded["tokens"] >= LEAST)]
    eligible = [question for question in questions.questions() if question.name in set(long["question"])]
    columns = [[question for question in eligible if question.holder == holder][:each] for holder in HOLDERS]
    if (fewest := min(map(len, columns))) < each:
        raise ValueError(f"A holder has {fewest} questions with answers of {LEAST} tokens, not {each}.")
    return [question for row in zip(*columns, strict=True) for question in row]


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
            answer = pair.method(name, options)(device, question.text)
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
    both = [MODEL, relevance.RERANKER]
    of_answers = {"questions of a holder": ANSWERED, "documents": DOCUMENTS, "tokens": LONGEST}
    attack = {"questions of a holder": ATTACKED, "candidates": CANDIDATES, "documents": DOCUMENTS,
              "tokens": GREEDY.limit}  # fmt: skip
    times = {"questions of a holder": EACH, "tokens of answers": LEAST, "delays": DELAYS, "documents": GREEDY.k,
             "tokens": GREEDY.limit, "lookahead": GREEDY.lookahead, "cap": GREEDY.cap}  # fmt: skip
    definitions: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
        "answers": (["question", "method"], of_answers, both),
        "lockstep": (["question"], of_answers, both),
        "temperatures": (["window"], {"windows": HELD_OUT}, [MODEL]),
        "windows": (["window"], {"windows": WINDOWS, "caps": CAPS}, [MODEL]),
        "schedules": (["setting", "sequence"], {"sequences": replays.SEQUENCES, "lookahead": replays.LOOKAHEAD}, []),
        "membership": (["question"], attack, both),
        "latency": (["pace", "question"], times, both),
    }
    keys, parameters, used = definitions[name]
    machine = machine_name() if name == "latency" else ""
    return Recorder("dragon", name, keys, {**parameters, "threads": 1}, used, machine=machine, functions=made_by(name))


def made_by(name: str) -> list[Callable[..., Any] | str]:
    """What makes the rows of a record."""
    functions: dict[str, list[Callable[..., Any] | str]] = {
        "answers": [answers.answered, answers.nodes],
        "lockstep": [answers.answered, answers.nodes],
        "temperatures": [language_modelling.retrieved, temperature_rows],
        "windows": [language_modelling.retrieved, window_rows],
        "schedules": [schedule_rows, replays.settings, replays.answered],
        "membership": [attacked, answers.nodes],
        "latency": [latencies, timed_questions, pair.both],
    }
    return functions[name]


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


def record_answers(share: int, shares: int) -> bool:
    """answers and lockstep, some questions of a holder at once."""
    kept, tokens = recorder("answers"), recorder("lockstep")
    nodes = answers.nodes()
    first = questions.first(ANSWERED)
    every = {(question.name, method) for question in first for method in answers.methods(question)}
    groups = [[question for question in first if question.holder == holder][share::shares] for holder in HOLDERS]
    starts = [(group, start) for group in groups for start in range(0, len(group), answers.TOGETHER)]
    for (group, start), method in tqdm(list(product(starts, answers.OF_BOTH)), desc="answers"):
        chosen = group[start : start + answers.TOGETHER]
        missing = [question for question in chosen if (question.name, method) in every - kept.done]
        if missing:
            rows, words = answers.answered(nodes, missing, method)
            kept.add(rows)
            if words:
                tokens.add(words)
    kept.checkpoint()
    tokens.checkpoint()
    return every <= recorder("answers").done


def record_membership(share: int, shares: int) -> bool:
    """The attack."""
    units = {(question.name,): (question,) for question in questions.first(ATTACKED)}
    return recorded("membership", units, partial(attacked, answers.nodes()), share, shares)


def record_windows(share: int, shares: int) -> bool:
    """temperatures and windows; each share makes all temperatures, as all windows need them."""
    loaded = models.load(MODEL)
    held_out, tested = (
        enumerate(language_modelling.retrieved(split, loaded.tokenizer, count))
        for split, count in (("validation", HELD_OUT), ("test", WINDOWS))
    )
    units = {(number,): (loaded, number, window, "validation") for number, window in held_out}
    recorded("temperatures", units, temperature_rows, 0, 1)
    chosen = study.temperature(recorder("temperatures").rows())
    shown = {(number,): (loaded, number, window, chosen) for number, window in tested}
    return recorded("windows", shown, partial(window_rows, caps=CAPS), share, shares)


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
    """Of every `shares`th question, one pace after the other; needs the record `answers`."""
    kept = recorder("latency")
    long = timed_questions(evidence.load("dragon", "answers"))
    for pace, paces in PACES.items():
        missing = [question for question in long[share::shares] if (pace, question.name) not in kept.done]
        if not missing:
            continue
        with tempfile.TemporaryDirectory(prefix="dragon-") as scratch:
            folder = pair.write(Path(scratch), questions.documents())
            with pair.both(MODEL, folder, paces=paces) as (device, relay):
                for question in missing:  # stored rows are made, and both sides have run
                    for warm in methods(pace, 0, DELAYS) if question is missing[0] else (DRAGON, AS_MANY):
                        pair.method(warm, pair.replace(GREEDY, limit=2))(device, question.text)
                delays = DELAYS[::3] if pace == FIRST else DELAYS
                for question in tqdm(missing, desc=f"latency, {pace}"):
                    kept.add(latencies(device, relay, question, pace, delays))
        kept.checkpoint()
    return {(pace, question.name) for pace in PACES for question in long} <= recorder("latency").done


def again(name: str) -> Again | None:
    """How a part of a record is made again; None of times."""
    by_name = {question.name: question for question in questions.questions()}

    def answered(rows: pd.DataFrame) -> pd.DataFrame:
        nodes = answers.nodes()
        units = rows[["question", "method"]].drop_duplicates().to_numpy()
        return pd.DataFrame([answers.answered(nodes, [by_name[question]], method)[0][0] for question, method in units])

    def tokens(rows: pd.DataFrame) -> pd.DataFrame:
        nodes = answers.nodes()
        group = [by_name[question] for question in rows["question"].unique()]
        return pd.DataFrame(answers.answered(nodes, group, DRAGON)[1])

    def losses(rows: pd.DataFrame) -> pd.DataFrame:
        loaded = models.load(MODEL)
        shown = language_modelling.retrieved("test", loaded.tokenizer, WINDOWS)
        chosen = study.temperature(evidence.load("dragon", "temperatures"))
        tables = [window_rows(loaded, number, shown[number], chosen, caps=CAPS) for number in rows["window"].unique()]
        return pd.DataFrame([row for table in tables for row in table])

    def by_temperature(rows: pd.DataFrame) -> pd.DataFrame:
        loaded = models.load(MODEL)
        shown = language_modelling.retrieved("validation", loaded.tokenizer, HELD_OUT)
        tables = [temperature_rows(loaded, number, shown[number], "validation") for number in rows["window"].unique()]
        return pd.DataFrame([row for table in tables for row in table])

    def scheduled(rows: pd.DataFrame) -> pd.DataFrame:
        settings = replays.settings(replays.answered(evidence.load("dragon", "lockstep")))
        units = rows[["setting", "sequence"]].drop_duplicates().to_numpy()
        tables = [schedule_rows(name, n, settings[name][0][n], settings[name][1]) for name, n in units]
        return pd.DataFrame([row for table in tables for row in table])

    def attack(rows: pd.DataFrame) -> pd.DataFrame:
        nodes = answers.nodes()
        return pd.DataFrame(
            [row for question in rows["question"].unique() for row in attacked(nodes, by_name[question])]
        )

    # Bytes: a processor rounds otherwise, and a packed distribution is some bytes longer.
    tables = Callable[[pd.DataFrame], pd.DataFrame]
    ways: dict[str, tuple[list[str], int, tables, list[str], float | dict[str, float]]] = {
        "answers": (["question", "method"], 4, answered, ["tokens", "answer_sha"], 0.0),
        "lockstep": (["question"], 1, tokens, ["token", "greedy", "bytes"], {"bytes": 8}),
        "temperatures": (["window"], 1, by_temperature, ["nats"], 1e-3),
        "windows": (["window"], 1, losses, ["nats", "read"], 1e-2),
        "schedules": (["setting", "sequence"], 2, scheduled, ["total_s", "moves"], 1e-9),
        "membership": (["question"], 1, attack, ["top1", "best_rank", "tokens"], 0.0),
    }
    if name not in ways:
        return None
    unit, count, make, columns, tolerance = ways[name]
    margin = "margin" if name == "answers" else None
    return Again(made_by(name), unit, some(unit, count), make, columns, tolerance, margin)


# By name, what makes them, a share of all: whether nothing is missing; and the records that it makes.
RECORDS: dict[str, tuple[Callable[[int, int], bool], list[str]]] = {
    "answers": (record_answers, ["answers", "lockstep"]),
    "windows": (record_windows, ["temperatures", "windows"]),
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
