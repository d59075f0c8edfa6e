"""Figure 7 at the paper's paces: recorded answers of SmolLM2 on a virtual clock, as no CPU here decodes it so fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from ondevice.evidence import derived
from ondevice.network.link import Line
from ondevice_papers.dragon.side import Rules
from ondevice_studies.dragon import pair, printed
from ondevice_studies.dragon.answers import ROUTER
from ondevice_studies.dragon.pair import CRCG, DRAGON, SW, TW
from ondevice_studies.dragon.record import DELAYS, IMPOSED, LEAST
from ondevice_studies.dragon.simulator import DISTRIBUTION, HEADER, Run, World, simulate


def at_the_papers(
    tokens: pd.DataFrame,
    limit: int = pair.GREEDY.limit,
    rules: Rules | None = None,
    simulate: Callable[..., Run] = simulate,
) -> pd.DataFrame:
    """Recorded answers at the paper's paces on a virtual clock: rows as of `study.latencies`, of the pace IMPOSED.

    tokens: the record `lockstep`, of whose answers with at least LEAST tokens the first `limit` count. At time 0 both
    sides have their first distribution; then a token takes as long as OPT-1.3B's on the paper's hardware.
    Sequence-wise, each side decodes as many tokens by itself, and the cloud's distributions come in one message. The
    device alone waits for nobody. The router has the side with the larger weight of the first token answer alone, so
    the cloud's tokens come as it decodes them. rules, simulate: the functions of `side` and `simulator`, or an
    experiment's.
    """
    device, cloud = printed.alone()[:2]
    rows = list[tuple[Any, ...]]()
    wide = tokens.pivot(index=["holder", "question", "position"], columns="side", values="greedy")
    of_device = tokens[tokens["side"] == "device"].groupby(["holder", "question"], sort=False)["eta"].first().to_dict()
    for number, ((holder, question), greedy) in enumerate(wide.groupby(["holder", "question"], sort=False)):
        if len(greedy) < LEAST:
            continue
        flags = greedy[["device", "cloud"]].to_numpy(bool)[:limit]
        on_device, on_cloud = (np.r_[0.0, np.full(len(flags) - 1, pace)] for pace in (device, cloud))
        for delay in DELAYS:
            up, down = pair.added(delay / 1000)
            seconds = {CRCG: on_device.sum()}
            for name, lookahead in ((DRAGON, pair.GREEDY.lookahead), (TW, 1)):
                world = World(flags, on_device, on_cloud, up, down, lookahead=lookahead)
                seconds[name] = simulate(world, seed=number, rules=rules).total
            sent = len(flags) * (HEADER + DISTRIBUTION)
            seconds[SW] = max(seconds[CRCG], Line(down, number, "down").arrival(on_cloud.sum(), sent))
            from_cloud = Line(down, number, "down").arrival(on_cloud.sum(), HEADER)
            seconds[ROUTER] = seconds[CRCG] if of_device[holder, question] >= 0.5 else from_cloud
            rows += [(holder, question, name, delay, 1000 * value, len(flags)) for name, value in seconds.items()]
    table = pd.DataFrame(rows, columns=["holder", "question", "method", "delay_ms", "total_ms", "tokens"])
    table = table.assign(
        pace=IMPOSED,
        task=table["holder"],
        request=table["question"],
        steps=table["tokens"] - 1,
        method=table["method"] + " " + table["delay_ms"].astype(str),
    )
    return derived(table, tokens, "simulated")
