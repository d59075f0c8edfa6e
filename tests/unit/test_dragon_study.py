"""What DRAGON's exhibits and claims are made of: by hand, on small records."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.stats import sem

from ondevice import assets
from ondevice.evidence import born, derived, load
from ondevice_studies.dragon import lockstep, pair, paper_paces, study
from ondevice_studies.dragon.questions import HOLDERS
from ondevice_studies.dragon.simulator import World, simulate
from ondevice_studies.dragon.study import MIX, part


def recorded(rows: list[dict[str, Any]]) -> pd.DataFrame:
    return born(pd.DataFrame(rows), "recorded")


def answer(
    times: list[float], decided: str = "", prefilled: float = 0.0, device: list[float] | None = None,
    cloud: list[float] | None = None, **fields: Any,
) -> dict[str, Any]:  # fmt: skip
    """A row of the record `latency`, as it is read back."""
    words = {name: " ".join(map(str, ms)) for name, ms in (("times", times), ("device", device or []),
                                                           ("cloud", cloud or []))}  # fmt: skip
    row = {"pace": "imposed", "question": "q", "holder": "both", "delay_ms": 100, "method": pair.DRAGON, "alone": False}
    return {**row, "tokens": len(times), "prefilled": prefilled, "decided": decided, **words, **fields}


def by_holder(ms: Mapping[str, list[list[float]]], **fields: Any) -> pd.DataFrame:
    """Answers whose tokens are there at these times, by holder."""
    rows = [answer(times, question=f"{holder}{n}", holder=holder, **fields)
            for holder, answers in ms.items() for n, times in enumerate(answers)]  # fmt: skip
    return study.latencies(recorded(rows))


# What validation chooses


def test_the_temperature_is_that_of_the_least_loss_on_validation_windows():
    nats = {1.0: (5, 1), 2.0: (2, 3), 4.0: (9, 0)}
    losses = recorded([{"split": "validation", "model": "a", "temperature": temperature, "window": n, "nats": one}
                       for temperature, windows in nats.items() for n, one in enumerate(windows)])  # fmt: skip
    assert study.temperature(losses) == 2.0
    for splits in (["test"], ["validation", "test"]):
        with pytest.raises(ValueError, match="validation"):
            study.temperature(losses.assign(split=np.resize(splits, len(losses))))


# Figure 6


def windows(nats: Mapping[str, Any]) -> pd.DataFrame:
    """Windows of 64 tokens after two documents of one model, with these nats [W] by method."""
    return recorded([
        {"model": "m", "window": w, "method": method, "documents": 2, "cap": 512 * (method == pair.DRAGON),
         "nats": value, "tokens": 64, "read": 1} for method, values in nats.items() for w, value in enumerate(values)
    ])  # fmt: skip


def test_differences_of_perplexities_are_paired():
    """Windows differ far more than methods: each interval holds the other's value, that of the difference is narrow."""
    rng = np.random.default_rng(0)
    hardness = 64 * rng.normal(2.5, 0.5, 80)
    worse = hardness + 64 * rng.normal(0.02, 0.02, 80)
    sampled = study.perplexities(windows({"DRAGON": hardness, "DRCG": worse}), seed=1)
    ours, theirs = (sampled.estimate(sampled[name][:, 0]) for name in ("DRAGON 2", "DRCG 2"))
    assert ours.low < theirs.value < ours.high and theirs.low < ours.value < theirs.high
    difference = sampled.estimate((sampled["DRCG 2"] - sampled["DRAGON 2"])[:, 0])
    assert 0 < difference.low < difference.value < difference.high < 1
    spread = ours.value * sem(hardness / 64)  # the delta method
    assert (ours.high - ours.low) / (2 * 1.96) == pytest.approx(spread, rel=0.1)


def test_perplexity_is_of_all_tokens_together():
    sampled = study.perplexities(windows({"DRAGON": [64 * 1.0, 64 * 3.0]}))
    assert sampled["DRAGON 2"][0, 0] == pytest.approx(np.exp(2.0)) and sampled.n == 2


def test_times_at_the_papers_paces_say_that_these_are_quoted():
    table = by_holder({holder: [[100, 110]] * 2 for holder in HOLDERS}, prefilled=100.0)
    assert study.per_token(table, "imposed").kind == "recorded+quoted"
    unpaced = derived(table.assign(pace="unpaced"), table)
    assert study.per_token(unpaced, "unpaced").kind == study.first_token(unpaced, "unpaced").kind == "recorded"
    assert study.first_token(unpaced, "unpaced").drawn == "questions"


# Latency


def test_time_a_token_is_sums_over_sums_by_holder_and_the_whole_mix_their_mean():
    table = by_holder({"device": [[100, 110], [100, 200, 300, 400]], "cloud": [[100, 150]], "both": [[100, 130]],
                       "neither": [[100, 120], [100, 140]]}, prefilled=100.0)  # fmt: skip
    found = study.per_token(table, "imposed")
    each = {"device": (10 + 300) / (1 + 3), "cloud": 50, "both": 30, "neither": (20 + 40) / 2}
    assert {task: part(found, "DRAGON 100", task)[0] for task in found.tasks} == pytest.approx(each)
    assert part(found, "DRAGON 100")[0] == pytest.approx(np.mean(list(each.values())))
    first = study.first_token(table.assign(ttft_ms=range(6)), "imposed")
    assert part(first, "DRAGON 100", "device")[0] == 0.5 and part(first, "DRAGON 100")[0] == pytest.approx(2.5)


def test_the_wait_for_the_first_token_counts_from_the_devices_first_distribution():
    table = by_holder({holder: [[300, 340, 390]] for holder in HOLDERS}, prefilled=100.0)
    assert table[["ttft_ms", "between_ms", "total_ms"]].to_numpy().tolist() == [[300, 90, 290]] * 3
    assert part(study.per_token(table, "imposed"), "DRAGON 100")[0] == pytest.approx(290 / 2)
    assert part(study.first_token(table, "imposed"), "DRAGON 100")[0] == 300


def test_figure_7_as_published_is_the_records_time_a_token_with_the_first_wait():
    stem = assets.ROOT / "figures" / "dragon" / "fig_07_per_token_latency"
    published = pd.read_csv(stem.with_suffix(".csv"))
    machine = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))["parameters"]["machine"]
    timed = study.latencies(load("dragon", f"latency.{machine}"))
    paced = paper_paces.at_the_papers(load("dragon", "lockstep"))
    recomputed = {"imposed": study.per_token(paced, "imposed"), "unpaced": study.per_token(timed, "unpaced")}
    for row in published.itertuples():
        ours = part(recomputed[row.pace], f"{row.method} {row.delay_ms}", row.task)[0]
        assert ours == pytest.approx(row.per_token_ms, rel=1e-4), row


def test_costs_are_medians_after_the_first_draft():
    rows = pd.DataFrame([answer([1.0] * 4, "bbbb", device=[900, 10, 20, 90], cloud=[700, 1, 2, 3])])
    found = study.costs(rows, 0.3)
    assert (found.decode_local, found.decode_remote) == (0.02, 0.002)
    assert found.send_remote - found.send_local == pytest.approx(0.3)
    up, down = pair.added(0.3)  # the mean of the relay's links: the added delay with a jitter of a fifth around it
    assert up.delay + up.jitter / 2 == pytest.approx(found.send_local)
    assert down.delay + down.jitter / 2 == pytest.approx(found.send_remote)
    assert down.jitter - up.jitter == pytest.approx(2 * 0.3 / 5)


REJECTED, DEVICE_MS, CLOUD_MS = "dddddd", [20.0] * 6, [50.0] * 6
ROUND = 50 + 100 + 2 * 5  # ms at a delay of 100


def session(decided: str, step: float, method: str = pair.DRAGON, **fields: Any) -> list[dict[str, Any]]:
    """Answers of two questions of each holder, a token every `step` ms from the first one on."""
    times = (300 + step * np.arange(len(decided))).tolist()
    return [answer(times, decided, device=DEVICE_MS[: len(decided)], cloud=CLOUD_MS[: len(decided)], method=method,
                   holder=holder, question=f"{holder}{n}", **fields) for holder in HOLDERS for n in (0, 1)]  # fmt: skip


def test_eq_7_is_beside_what_was_saved_and_the_last_tokens_drafts_do_not_count():
    rows = session("ccddcd", 105.0) + session(REJECTED, ROUND, pair.TW)  # 3 of 5, and nothing waits for the sixth
    found = study.against_eq_7(study.latencies(recorded(rows)), "imposed").set_index("holder")
    assert list(found.index) == [*HOLDERS, MIX]
    assert found["acceptance"].to_numpy() == pytest.approx(0.6)
    assert found["eq_7"].to_numpy() == pytest.approx(100 * 0.6 * (ROUND - 50) / ROUND)
    assert found["saved"].to_numpy() == pytest.approx(100 * (1 - 105 / ROUND))
    assert found["measured_over_eq_7"].to_numpy() == pytest.approx(105 / (0.6 * 50 + 0.4 * ROUND))


def test_waits_are_by_what_became_of_the_two_drafts_before():
    rows = [*session("bdbd", ROUND), answer([300.0], "b", question="of one token", device=[9.0], cloud=[9.0])]
    found = study.waits(study.latencies(recorded(rows)), "imposed", 100).set_index(["local", "remote", "holder"])
    assert found["tokens"].to_dict() == {("accepted", "accepted", holder): 4 for holder in HOLDERS} | {
        ("accepted", "rejected", holder): 2 for holder in HOLDERS}  # fmt: skip
    assert found["measured_ms"].to_numpy() == pytest.approx(ROUND)
    rejected = found.xs("rejected", level="remote")["formula_ms"]
    assert rejected.to_numpy() == pytest.approx(ROUND)  # the device's next draft is there by then
    assert (found.xs("accepted", level="remote")["formula_ms"] < ROUND).all()


def row_of(**fields: Any) -> Any:
    (found,) = study.latencies(recorded([answer(**fields)])).itertuples()
    return found


def test_a_session_is_simulated_from_its_decisions_paces_and_first_drafts():
    """All accepted and the device slow: nothing is waited for, whatever the links do."""
    slow = row_of(times=[200.0, 330.0, 460.0, 590.0], decided="bbbb", prefilled=200.0, device=[999, 130, 130, 130],
                  cloud=[999, 9, 9, 9])  # fmt: skip
    assert study.simulated(slow, 32) == pytest.approx(130)
    fields = dict(decided="bdbn", prefilled=80.0, device=[999, 20, 30, 40], cloud=[999, 60, 50, 40], delay_ms=50)
    one = row_of(times=[250.0, 300.0, 500.0, 600.0], **fields)
    flags = np.array([[1, 1], [1, 0], [1, 1], [0, 0]], bool)
    first = 0.25 - pair.BASE - pair.BASE_JITTER / 2 - 0.05  # the cloud's, when it left
    world = World(flags, [0.08, 0.02, 0.03, 0.04], [first, 0.06, 0.05, 0.04], *pair.added(0.05), lookahead=4)
    totals = [simulate(world, seed=seed).seen[-1] - 0.08 for seed in range(3)]
    assert study.simulated(one, 4) == pytest.approx(1000 * np.mean(totals) / 3)
    assert study.simulated(one, 1) > study.simulated(one, 4)
    assert study.simulated(one, 4, seeds=1) == pytest.approx(1000 * totals[0] / 3)


# Answers, acceptance, schedules


def tokens(rows: list[tuple[str, str, str, str, float]]) -> pd.DataFrame:
    """Of the record `lockstep`: holder, question, side, word and every rule's acceptance."""
    return recorded([
        {"holder": holder, "question": question, "side": side, "word": word, **dict.fromkeys(lockstep.RULES, value)}
        for holder, question, side, word, value in rows
    ])  # fmt: skip


def test_function_words_are_compared_with_the_other_tokens_of_the_same_answers():
    rows = [("both", "a", "cloud", " the", 1.0), ("both", "a", "cloud", ",", 0.5), ("both", "a", "device", "cat", 0.2),
            ("both", "b", "cloud", " of", 0.0), ("both", "b", "cloud", "cat", 0.4), ("both", "b", "cloud", "9", 0.6),
            ("both", "c", "cloud", "cat", 1.0)]  # an answer without a function word is left out  # fmt: skip
    found = study.by_word(tokens(rows))
    assert found["function words"][0, 0] == pytest.approx((1.0 + 0.5 + 0.0) / 3)
    assert found["other"][0, 0] == pytest.approx((0.2 + 0.4 + 0.6) / 3)
