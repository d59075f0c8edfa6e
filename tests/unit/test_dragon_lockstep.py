"""Both sides token by token: every column against its definition, the text that is followed, means by rule and word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ondevice.dragon import codec, lockstep

WORDS = ("the", " Cat", "<end>", " sat")
END = 2
# p(next token) of each side by the last token; none is first.
DEVICE = {None: [0.5, 0.1, 0.0, 0.4], 3: [0.6, 0.2, 0.1, 0.1], 0: [0.2, 0.2, 0.5, 0.1]}
CLOUD = {None: [0.1, 0.5, 0.0, 0.4], 3: [0.25] * 4, 0: [0.1, 0.6, 0.2, 0.1]}
SHARE = 0.6  # of the device
# Of the mixture, by hand: .40, which is neither side's own, .46, and .38, where equal shares would give 1 more.
LIKELIEST = [3, 0, END]


@dataclass
class Side:
    """A node and the decoders that were asked of it. height: log weight of its documents."""

    next: dict[int | None, list[float]]
    height: float
    asked: list[tuple[str, int]] = field(default_factory=list)
    made: list[Decoder] = field(default_factory=list)
    prior: np.ndarray | None = None

    @property
    def tokenizer(self) -> Side:
        return self

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(WORDS[token] if token < len(WORDS) else f"w{token}" for token in tokens)

    def decoder(self, query: str, k: int) -> tuple[Decoder, list]:
        self.asked.append((query, k))
        self.made.append(Decoder(self))
        return self.made[-1], []


@dataclass
class Decoder:
    """A table in the place of a model."""

    side: Side
    tokens: list[int] = field(default_factory=list)

    @property
    def log_weight(self) -> float:
        return self.side.height

    @property
    def prior(self) -> np.ndarray:
        size = len(next(iter(self.side.next.values())))
        return np.full(size, 1 / size) if self.side.prior is None else self.side.prior

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def ended(self) -> bool:
        return self.tokens[-1:] == [END]

    def next_distribution(self) -> np.ndarray:
        assert not self.ended
        with np.errstate(divide="ignore"):
            return np.log(self.side.next[self.tokens[-1] if self.tokens else None])

    def commit(self, token: int) -> None:
        self.tokens.append(int(token))


def sides() -> tuple[Side, Side]:
    return Side(DEVICE, float(np.log(SHARE / (1 - SHARE))) + 3), Side(CLOUD, 3.0)


def compared(*queries: str, between: tuple[Side, Side] | None = None, **options: Any) -> pd.DataFrame:
    return lockstep.compare(*(between or sides()), list(queries) or ["q"], **options)  # type: ignore[arg-type]


def test_the_text_is_the_mixtures_greedy_one_up_to_the_end_token():
    both = sides()
    table = compared(between=both, cap=None)
    assert table["token"].tolist() == np.repeat(LIKELIEST, 2).tolist()
    assert table["position"].tolist() == [0, 0, 1, 1, 2, 2]
    assert table["side"].tolist() == ["device", "cloud"] * 3
    assert table["word"].tolist() == np.repeat([WORDS[token] for token in LIKELIEST], 2).tolist()
    assert [side.made[0].tokens for side in both] == [LIKELIEST, LIKELIEST]


def test_the_limit_counts_tokens_and_each_query_begins_anew():
    both = sides()
    table = compared("first", "second", between=both, k=5, limit=2)
    assert table["query"].tolist() == [0] * 4 + [1] * 4
    assert table["position"].tolist() == [0, 0, 1, 1] * 2
    assert [side.asked for side in both] == [[("first", 5), ("second", 5)]] * 2


def test_columns_are_what_they_are_called():
    """Each rule's acceptance by its definition, not by the functions that the table is made with."""
    table = compared(cap=None)
    for position, before in enumerate([None, *LIKELIEST[:-1]]):
        device, cloud = np.array(DEVICE[before]), np.array(CLOUD[before])
        mixed, found = SHARE * device + (1 - SHARE) * cloud, table[table["position"] == position].set_index("side")
        for side, p, eta in (("device", device, SHARE), ("cloud", cloud, 1 - SHARE)):
            row, overlap = found.loc[side], np.minimum(p, mixed).sum()
            ratios = [1 / sum(max(p[y] / p[x], mixed[y] / mixed[x]) for y in range(4)) for x in range(4) if p[x]]
            assert row["eta"] == pytest.approx(eta)
            assert row["tv"] == pytest.approx(np.abs(device - cloud).sum() / 2)
            assert row["greedy"] == float(np.argmax(p) == LIKELIEST[position])
            assert row["Algorithm 1"] == pytest.approx((overlap + p @ mixed) / 2)
            assert row["remote first"] == pytest.approx(overlap)
            assert row["shared randomness"] == pytest.approx(sum(ratios))
            assert (row["lost"], row["bytes"]) == (pytest.approx(0), 0)
    assert set(lockstep.RULES) < set(table.columns) and table["greedy"].nunique() == 2


def test_with_the_codec_drafts_are_of_what_is_sent_and_the_target_of_what_is_filled_in():
    flat, peaked, prior = np.full(200, 1 / 200), np.full(200, 0.5 / 199), np.linspace(1, 2, 200) / 300
    peaked[7] = 0.5
    whole = {"device": flat, "cloud": peaked / peaked.sum()}
    between = Side({None: flat.tolist()}, 0.0, prior=prior), Side({None: peaked.tolist()}, 0.0, prior=prior)
    table = compared(between=between, limit=1, cap=codec.SMALLEST).set_index("side")
    coded = {side: codec.encode(p, codec.SMALLEST, prior) for side, p in whole.items()}
    p = {side: codec.decode(payload, 200) for side, payload in coded.items()}
    told = {side: codec.filled(payload, prior) for side, payload in coded.items()}
    for side, row in table.iterrows():
        assert row["bytes"] == len(coded[side])
        assert row["lost"] == pytest.approx(np.abs(whole[side] - told[side]).sum() / 2)
        assert row["tv"] == pytest.approx(np.abs(p["device"] - p["cloud"]).sum() / 2)
        assert row["remote first"] == pytest.approx(np.minimum(p[side], (told["device"] + told["cloud"]) / 2).sum())
    assert (table["lost"] > 0.01).all() and table["lost"].nunique() == 2


def test_equal_sides_accept_what_can_be_accepted():
    alike = Side(DEVICE, 1.0), Side(DEVICE, 1.0)
    table = compared(between=alike, cap=None)
    for column, value in {"eta": 0.5, "tv": 0, "greedy": 1, "remote first": 1, "shared randomness": 1}.items():
        assert table[column].to_numpy() == pytest.approx(value)
    assert (table["Algorithm 1"] < 1).all()  # the other side's resample is another draw


# Means


def test_rules_are_rows_and_sides_are_columns():
    rows = [dict(side=side, **{rule: at + i + (side == "cloud") * 10 for at, rule in enumerate(lockstep.RULES)})
            for i in (0, 0, 6) for side in ("cloud", "device")]  # fmt: skip
    found = lockstep.by_rule(pd.DataFrame(rows))
    assert found.index.tolist() == list(lockstep.RULES) and found.columns.tolist() == ["device", "cloud"]
    assert found["device"].tolist() == [2, 3, 4, 5]
    assert found["cloud"].tolist() == [12, 13, 14, 15]


def said(*words: str, start: float = 1.0) -> pd.DataFrame:
    """A token each, accepted 1, 2, 4, ... times by Algorithm 1, and minus as often by the other rule."""
    values = start * 2.0 ** np.arange(len(words))
    return pd.DataFrame({"word": words, "Algorithm 1": values, "greedy": -values})


def test_function_words_and_punctuation_are_told_from_other_tokens():
    table = said(" The", "cat", ",\n", " 7", "of", "then.")
    plain, other = (1 + 4 + 16) / 3, (2 + 8 + 32) / 3  # "then." is no word of the list
    assert lockstep.by_word(table) == pytest.approx((plain, other))
    assert lockstep.by_word(table, "greedy") == pytest.approx((-plain, -other))
    assert "cat" not in lockstep.FUNCTION_WORDS and {"the", "of", "would"} <= lockstep.FUNCTION_WORDS


@pytest.mark.parametrize("words", [(" the", "."), (" cat", "7"), ()])
def test_tokens_of_one_kind_are_refused(words: tuple[str, ...]):
    table = said(*words).astype({"word": str})
    with pytest.raises(ValueError, match="all of one kind: ask for more"):
        lockstep.by_word(table)
