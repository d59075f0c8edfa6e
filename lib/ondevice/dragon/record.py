"""What DRAGON's verdicts rest on: `make record PAPER=dragon` makes all of it; it goes on where it was stopped.

By `python -m ondevice.evidence.record dragon --only NAME` one record at a time: `latency` (Figures 7 and 8, Table 1; two
processes and a relay, times of this machine). With `--share i/n` n processes share its work.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch
from tqdm import tqdm

from ondevice.dragon import pair
from ondevice.dragon.live.answer import Answer
from ondevice.dragon.pair import AGAIN, AS_MANY, CRCG, DRAGON, GREEDY, ON_CLOUD, ROWS, SW, TEXT, TW
from ondevice.dragon.world import Question, world
from ondevice.evidence import Recorder, machine_name

BASE, SMALL = "pydocs-lm-base", "pydocs-lm-small"
EACH = 20  # questions of every holder in Figures 7 and 8
LEAST = 12  # tokens of their reference answers
DELAYS = (0, 50, 100, 150, 200, 250, 300)  # ms, added
UNPACED, IMPOSED, FIRST = "unpaced", "imposed", "first tokens"
PACES = {UNPACED: pair.Paces(), IMPOSED: pair.PAPER_PACES, FIRST: pair.PAPER_FIRST}


# Latency (Figures 7 and 8, Table 1)


def latencies(
    device: pair.Device, relay: pair.Relay, question: Question, pace: str, delays: Sequence[int] = DELAYS
) -> list[dict[str, object]]:
    """A question by each method at each delay, in turn: rows of the record.

    The device alone does not depend on the delay: it answers at the first and the last one. DRAGON answers twice in the
    middle, the second time as `DRAGON again`, which is the floor below which no difference is read.
    """
    rows = []
    for delay in delays:
        up, down = pair.added(delay / 1000)
        relay.set(up=up, down=down)
        for name in methods(pace, delay, delays):
            asked = pair.replace(GREEDY, limit=3) if pace == FIRST or name in (TEXT, ROWS, AS_MANY, ON_CLOUD) else GREEDY
            answer = pair.method(name, asked)(device, question.query)
            rows.append({"pace": pace, "question": question.name, "holder": question.holder, "delay_ms": delay,
                         "method": name, **account(answer)})  # fmt: skip
    return rows


def methods(pace: str, delay: int, delays: Sequence[int]) -> list[str]:
    """Those that answer at a delay. Baselines that only Figure 8 has give their first tokens, unpaced."""
    if pace == FIRST:
        return [DRAGON, CRCG]
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
        "tokens": len(answer.tokens), "alone": answer.alone_from is not None, "prefilled": _ms([answer.prefilled or 0.0]),
        "times": _ms(answer.times), "decided": "".join(letters[one[1], one[2]] for one in decisions),
        "device": _ms([one[3] for one in decisions]), "cloud": _ms([one[4] for one in decisions]), "sent": answer.sent,
        "received": answer.received,
    }  # fmt: skip


def _ms(seconds: Sequence[float]) -> str:
    return " ".join(f"{1000 * one:.1f}" for one in seconds)


def record_latency(which: int, of: int, paces: Sequence[str]) -> Recorder:
    """Record what is missing of every `of`th question, one pace after the other."""
    parameters = {"questions of a holder": EACH, "tokens of references": LEAST, "delays": DELAYS, "documents": GREEDY.k,
                  "tokens": GREEDY.limit, "lookahead": GREEDY.lookahead, "cap": GREEDY.cap, "threads": 1}  # fmt: skip
    recorder = Recorder("dragon", "latency", ["pace", "question"], parameters, [BASE], machine=machine_name())
    asked, missing = world().first(EACH, LEAST), 0
    for pace in paces:
        mine = [one for one in asked[which::of] if (pace, one.name) not in recorder.done]
        if mine:
            with tempfile.TemporaryDirectory(prefix="dragon-") as name:
                folder = pair.write(Path(name), world())
                with pair.both(BASE, folder, paces=PACES[pace]) as (device, relay):
                    for question in mine:  # stored rows are made, and both sides have run
                        for warm in methods(pace, 0, DELAYS) if question is mine[0] else (DRAGON, AS_MANY):
                            pair.method(warm, pair.replace(GREEDY, limit=2))(device, question.query)
                    for question in tqdm(mine, desc=f"latency, {pace}"):
                        recorder.add(latencies(device, relay, question, pace))
        recorder.checkpoint()
        missing += sum((pace, one.name) not in recorder.done for one in asked)
    return recorder


def main(argv: Sequence[str] | None = None) -> None:
    """The command; a record is written once nothing of it is missing."""
    parser = argparse.ArgumentParser(prog="make record PAPER=dragon", description=__doc__)
    parser.add_argument("--only", nargs="+", default=["latency"], choices=["latency"])
    parser.add_argument("--share", default="1/1", help="i/n: this process takes every n-th unit of work")
    parser.add_argument("--pace", nargs="+", default=list(PACES), choices=list(PACES), help="of latency")
    options = parser.parse_args(argv)
    which, of = (int(part) for part in options.share.split("/"))
    torch.set_num_threads(1)
    recorder = record_latency(which - 1, of, options.pace)
    if all((pace, one.name) in recorder.done for pace in PACES for one in world().first(EACH, LEAST)):
        print(recorder.finish())


if __name__ == "__main__":
    main()
