"""Real static graphs in the schedules' terms: times, a plan by every rule, and what each way of switching adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from tqdm import tqdm

from ondevice.sdnpu import graphs, scheduling, switching
from ondevice.sdnpu.scheduling import Prefill, Timeline

if TYPE_CHECKING:
    from numpy.typing import ArrayLike
    from transformers import PreTrainedModel

    from ondevice.sdnpu.graphs import Graphs
    from ondevice.sdnpu.switching import Prefilled, Profile

WAYS = {
    "keep both": scheduling.keep_both, "synchronous": scheduling.synchronous, "naive": scheduling.naive_asynchronous,
    "greedy (paper)": scheduling.greedy, "progressive": scheduling.beam_search,
}  # fmt: skip


def instance(profile: Profile, chunks: int, unit: float = 1e3) -> Prefill:
    """What is to be scheduled, as measured, in milliseconds."""
    return Prefill(unit * profile.p, unit * profile.d, unit * profile.s, chunks)


def plan(prefill: Prefill, loads: Sequence[scheduling.Load]) -> list[switching.Load]:
    """A schedule's loads as `switching.prefill` takes them: each after a (chunk, block) or from the start."""
    blocks = prefill.blocks
    after = [divmod(load.after - 1, blocks) if load.after else None for load in loads]
    return [switching.Load(load.block, place) for load, place in zip(loads, after, strict=True)]


def timeline(prefill: Prefill, done: Prefilled) -> Timeline:
    """A measured prefill as a schedule's timeline, in milliseconds, so that it can be drawn beside a simulated one."""
    starts, ends = np.zeros(prefill.p.shape), np.zeros(prefill.p.shape)
    graph = np.ones(prefill.p.shape, np.int64)
    loads = []
    for interval in done.timeline:
        if interval.chunk is None:
            loads.append((interval.block, 1e3 * interval.start_s, 1e3 * interval.end_s))
        else:
            place = interval.chunk, interval.block
            starts[place], ends[place] = 1e3 * interval.start_s, 1e3 * interval.end_s
            graph[place] = int(interval.what[1])
    blocks, begun, over = (np.array(column) for column in zip(*loads, strict=True)) if loads else (np.empty(0),) * 3
    return Timeline(prefill, starts, ends, graph, blocks.astype(np.int64), begun.astype(float), over.astype(float))


def switched(built: Graphs, ids: ArrayLike, prefill: Prefill, rounds: int = 5) -> list[dict[str, Prefilled]]:
    """The same prompt by every way, one after the other in an order that rotates, `rounds` times."""
    plans = {name: plan(prefill, rule(prefill)) if name != "keep both" else None for name, rule in WAYS.items()}
    names, found = list(plans), []
    for turn in tqdm(range(rounds), desc="ways of switching", delay=5, leave=False):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        done = {name: switching.prefill(built, ids, plans[name]) for name in order}
        found.append({name: done[name] for name in names})
    return found


def exposed(found: Sequence[dict[str, Prefilled]]) -> pd.DataFrame:
    """What each way of switching adds to the prefill that keeps both graphs, paired by round.

    Columns: method, round, total_s, loading_s, exposed_s, hidden (of what synchronous switching exposes), logits (the
    largest difference to the unswitched prefill's). Slower chunks on G2 count as exposed, too.
    """
    rows = []
    for number, done in enumerate(found):
        base, worst = done["keep both"], done["synchronous"].total_s - done["keep both"].total_s
        for name, one in done.items():
            added = one.total_s - base.total_s
            difference = float((one.logits - base.logits).abs().max())
            rows.append((name, number, one.total_s, one.loading_s, added, 1 - added / worst, difference))
    columns = ["method", "round", "total_s", "loading_s", "exposed_s", "hidden", "logits"]
    return pd.DataFrame(rows, columns=columns)


def by_shape(
    model: PreTrainedModel, pairs: Sequence[tuple[int, int]], blocks: int, accepted: float, repeats: int = 5
) -> pd.DataFrame:
    """Figure 5 on this CPU: shape, forward_ms (of all blocks), prefill_ms and decode_ms (a token), medians.

    pairs: large and small chunk of each pair of graphs. accepted: tokens a verification, whatever the shape.
    """
    rows = []
    for large, small in pairs:
        built = graphs.build(model, blocks, large, small)
        found = switching.profile(built, repeats)
        runs = large / small  # of the small graph for a large chunk
        rows += [(small, 1e3 * found.d.sum() / runs), (large, 1e3 * found.p.sum())]
    table = pd.DataFrame(sorted(rows), columns=["shape", "forward_ms"])
    return table.assign(prefill_ms=table["forward_ms"] / table["shape"], decode_ms=table["forward_ms"] / accepted)
