"""Both sides token by token: every column against its definition, and the text that each method follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice_papers.dragon import codec
from ondevice_papers.dragon.aggregation import target
from ondevice_studies.dragon import lockstep

END = 2
# p(next token) of each side by the last token; none is first.
DEVICE = {None: [0.5, 0.1, 0.0, 0.4], 3: [0.6, 0.2, 0.1, 0.1], 0: [0.2, 0.2, 0.5, 0.1]}
CLOUD = {None: [0.1, 0.5, 0.0, 0.4], 3: [0.25] * 4, 0: [0.1, 0.6, 0.2, 0.1]}
SHARE = 0.6  # of the device
# Of the mixture, by hand: .40, which is neither side's own, .46, and .38, where equal shares would give 1 more.
LIKELIEST = [3, 0, END]


class Side:
    """A node and the decoders that were asked of it. height: log weight of its documents."""

    def __init__(self, after: dict[int | None, list[float]], height: float, prior: np.ndarray | None = None) -> None:
        self.after, self.height, self.made = after, height, list[Decoder]()
        size = len(after[None])
        self.prior = np.full(size, 1 / size) if prior is None else prior

    def decoder(self, query: str, k: int) -> tuple[Decoder, list]:
        self.made.append(Decoder(self, []))
        return self.made[-1], []


class Decoder:
    """A table in the place of a model."""

    def __init__(self, side: Side, tokens: list[int]) -> None:
        self.side, self.tokens, self.commit = side, tokens, tokens.append
        self.log_weight, self.prior = side.height, side.prior

    in_line = False
    position = property(lambda self: len(self.tokens))
    ended = property(lambda self: self.tokens[-1:] == [END])

    def next_distribution(self) -> np.ndarray:
        assert not self.ended
        with np.errstate(divide="ignore"):
            return np.log(self.side.after[self.tokens[-1] if self.tokens else None])


def nodes(device: Side | None = None, cloud: Side | None = None) -> dict[str, Side]:
    ours = Side(DEVICE, float(np.log(SHARE / (1 - SHARE))) + 3)
    return {"device": device or ours, "cloud": cloud or Side(CLOUD, 3.0)}


def answered(between: dict[str, Side], method: str = lockstep.DRAGON, **options: Any) -> tuple[list[int], float, Any]:
    return lockstep.answer(between, "q", method, **options)  # type: ignore[arg-type]


def told(between: dict[str, Side], tokens: Sequence[int], cap: int | None, token: int) -> pd.DataFrame:
    """The rows of the next token after some, by side; the target is the mixture of what is told."""
    decoders = {name: Decoder(side, list(tokens)) for name, side in between.items()}
    now = lockstep.step(decoders, cap)  # type: ignore[arg-type]
    mixed = target(*(now.told[name] for name in between), *(now.log_weight[name] for name in between))
    return pd.DataFrame(lockstep.accepted(now, mixed, token)).set_index("side")


# Answers


def test_the_text_is_the_mixtures_greedy_one_up_to_the_end_token():
    between = nodes()
    tokens, margin, rows = answered(between)
    assert tokens == LIKELIEST and len(rows) == 6
    assert [(row["side"], row["token"]) for row in rows] == [(s, t) for t in LIKELIEST for s in ("device", "cloud")]
    assert [side.made[0].tokens for side in between.values()] == [LIKELIEST, LIKELIEST]
    # .40 against .34 of token 0, .46 against .22, .38 against .36: of what the codec leaves of it, nearly
    assert margin == pytest.approx(0.38 - 0.36, abs=0.02)
    assert answered(nodes(), lockstep.WHOLE)[1] == pytest.approx(0.38 - 0.36)


@pytest.mark.parametrize(
    ("method", "tokens", "margin"),
    [
        (lockstep.WHOLE, LIKELIEST, 0.02),
        (lockstep.ON_DEVICE, [0, END], 0.1),
        (lockstep.ON_CLOUD, [1, 1], 0.1),
        (lockstep.NONE, [END], 0.3),
    ],
)
def test_what_each_method_follows(method: str, tokens: list[int], margin: float):
    """Uncut, no method has rows; without documents both sides would have the same prior."""
    prior = np.array([0.1, 0.2, 0.5, 0.2])
    device = Side(DEVICE, float(np.log(SHARE / (1 - SHARE))), prior=prior)
    between = nodes(device, Side({**CLOUD, 1: [0.1, 0.45, 0.35, 0.1]}, 0.0, prior=prior))
    found, least, rows = answered(between, method, limit=3 if method == lockstep.WHOLE else 2)
    assert found == tokens and least == pytest.approx(margin) and rows == []
    asked = {name: bool(side.made) for name, side in between.items()}
    assert asked == {"device": method != lockstep.ON_CLOUD, "cloud": method in (lockstep.WHOLE, lockstep.ON_CLOUD)}


# Acceptance


def test_columns_are_what_they_are_called():
    """Each rule's acceptance by its definition, not by the functions that the table is made with."""
    greedy = set()
    for position, token in enumerate(LIKELIEST):
        before = [None, *LIKELIEST][position]
        device, cloud = np.array(DEVICE[before]), np.array(CLOUD[before])
        mixed = SHARE * device + (1 - SHARE) * cloud
        found = told(nodes(), LIKELIEST[:position], None, token)
        for side, p, eta in (("device", device, SHARE), ("cloud", cloud, 1 - SHARE)):
            row, overlap = found.loc[side], np.minimum(p, mixed).sum()
            ratios = [1 / sum(max(p[y] / p[x], mixed[y] / mixed[x]) for y in range(4)) for x in range(4) if p[x]]
            assert row["eta"] == pytest.approx(eta)
            assert row["tv"] == pytest.approx(np.abs(device - cloud).sum() / 2)
            assert row["greedy"] == float(np.argmax(p) == token)
            assert row["Algorithm 1"] == pytest.approx((overlap + p @ mixed) / 2)
            assert row["remote first"] == pytest.approx(overlap)
            assert row["shared randomness"] == pytest.approx(sum(ratios))
            assert (row["lost"], row["bytes"]) == (pytest.approx(0), 0)
            greedy.add(row["greedy"])
    assert set(lockstep.RULES) < set(found.columns) and greedy == {0.0, 1.0}


def test_with_the_codec_drafts_are_of_what_is_sent_and_the_target_of_what_is_filled_in():
    flat, peaked, prior = np.full(200, 1 / 200), np.full(200, 0.5 / 199), np.linspace(1, 2, 200) / 300
    peaked[7] = 0.5
    whole = {"device": flat, "cloud": peaked / peaked.sum()}
    between = {name: Side({None: p.tolist()}, 0.0, prior=prior) for name, p in whole.items()}
    coded = {side: codec.encode(p, codec.SMALLEST, prior) for side, p in whole.items()}
    p = {side: codec.decode(payload, 200) for side, payload in coded.items()}
    filled = {side: codec.filled(payload, prior) for side, payload in coded.items()}
    table = told(between, [], codec.SMALLEST, 7)
    for side, row in table.iterrows():
        assert row["bytes"] == len(coded[side])
        assert row["lost"] == pytest.approx(np.abs(whole[side] - filled[side]).sum() / 2)
        assert row["tv"] == pytest.approx(np.abs(p["device"] - p["cloud"]).sum() / 2)
        assert row["remote first"] == pytest.approx(np.minimum(p[side], (filled["device"] + filled["cloud"]) / 2).sum())
    assert (table["lost"] > 0.01).all() and table["lost"].nunique() == 2
    (_, _, rows) = answered(between, limit=1)  # at the system's cap all 200 fit
    assert [row["bytes"] for row in rows] == [len(codec.encode(p, codec.CAP, prior)) for p in whole.values()]
