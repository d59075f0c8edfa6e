"""Both sides in one process, token by token: how alike they are, and how often each way to decide accepts a draft.

Nothing is timed here. The text is the greedy one of the mixture, and at each of its tokens the acceptance of every
rule is computed from the two distributions, not drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from tqdm import tqdm

from ondevice.dragon import codec
from ondevice.dragon.aggregation import Floats, share, target
from ondevice.dragon.live.node import Node
from ondevice.dragon.speculative_aggregation import acceptance, divergence, shared_acceptance

RULES = ("greedy", "Algorithm 1", "remote first", "shared randomness")
# Words that stand in any text; what a claim of section 6 calls function words is not said in the paper.
_PLAIN = """a an the of to in on at by for from with and or not no is are was were be been has have had do does this
that these those it its as if then than which who what when where how but so can may will would should must"""
FUNCTION_WORDS = frozenset(_PLAIN.split())


def compare(
    device: Node, cloud: Node, queries: Sequence[str], k: int = 2, limit: int = 24, cap: int | None = codec.CAP, *,
    target: Callable[..., Floats] = target, acceptance: Callable[..., float] = acceptance,
) -> pd.DataFrame:  # fmt: skip
    """A row a token and side: query, position, token, word, side, eta, tv, lost, bytes and a column of each rule.

    eta: the side's share of the target. tv: total variation between what the two sides draw from. lost: that by which
    the receiver's idea of this side's distribution differs from it, after `bytes`. cap None: no codec. Rules: whether
    the greedy drafts agree with the target; Algorithm 1 as printed; with the resample of the side that does not
    aggregate, here this one, always taken (gamma 1); with shared randomness.
    target, acceptance: the functions of `aggregation` and `speculative_aggregation`, or an experiment's.
    Raises ValueError without queries.
    """
    if not queries:
        raise ValueError("There are no queries to compare both sides on.")
    rows = []
    for number, query in enumerate(tqdm(queries, desc="lockstep", leave=False)):
        sides = {"device": device.decoder(query, k)[0], "cloud": cloud.decoder(query, k)[0]}
        weights = {name: decoder.log_weight for name, decoder in sides.items()}
        while sides["device"].position < limit and not sides["device"].ended:
            whole = {name: np.exp(decoder.next_distribution()) for name, decoder in sides.items()}
            priors = {name: decoder.prior for name, decoder in sides.items()}
            coded = {name: codec.encode(p, cap, priors[name]) for name, p in whole.items()} if cap is not None else {}
            p = {name: codec.decode(one, len(whole[name])) for name, one in coded.items()} or whole
            told = {name: codec.filled(one, np.asarray(priors["device"])) for name, one in coded.items()} or whole
            mixed = target(told["device"], told["cloud"], weights["device"], weights["cloud"])
            token, apart = int(mixed.argmax()), divergence(p["device"], p["cloud"])
            text = str(device.tokenizer.decode([token]))
            for name, other in (("device", "cloud"), ("cloud", "device")):
                rows.append({
                    "query": number, "position": sides[name].position, "token": token, "word": text, "side": name,
                    "eta": share(weights[name], weights[other]), "tv": apart,
                    "lost": divergence(whole[name] / whole[name].sum(), told[name]), "bytes": len(coded.get(name, b"")),
                    "greedy": float(p[name].argmax() == token), "Algorithm 1": acceptance(p[name], mixed, 0.5),
                    "remote first": acceptance(p[name], mixed, 1.0),
                    "shared randomness": shared_acceptance(p[name], mixed),
                })  # fmt: skip
            for decoder in sides.values():
                decoder.commit(token)
    return pd.DataFrame(rows)


def by_rule(table: pd.DataFrame) -> pd.DataFrame:
    """Mean acceptance: a row a rule, a column a side."""
    return table.groupby("side")[list(RULES)].mean().T[["device", "cloud"]]


def by_word(table: pd.DataFrame, rule: str = "Algorithm 1") -> tuple[float, float]:
    """Mean acceptance of function words and punctuation, and of all other tokens, over both sides.

    Raises ValueError where one kind does not occur.
    """
    words = table["word"].str.strip().str.lower()
    plain = words.isin(FUNCTION_WORDS) | ~words.str.contains("[0-9a-z]")
    if plain.all() or not plain.any():
        raise ValueError("The tokens are all of one kind: ask for more.")
    return float(table.loc[plain, rule].mean()), float(table.loc[~plain, rule].mean())
