"""What exhibits share: speeds in regimes, draws of prompts in pairs, and what is judged."""

import numpy as np
import pandas as pd
import pytest

from ondevice import evidence
from ondevice.evidence import born
from ondevice_studies.diaa import regimes, study
from ondevice_studies.diaa.claims import CLAIMS
from ondevice_studies.diaa.regimes import Regime

TASKS = ["math", "rag"]
METHODS = {"vanilla": 0, "SAM-D": 4, "TR": 8, "DIAA": 3, study.STALE: 3, study.SKIPPING: 2}  # and what a pass drafts


@pytest.fixture
def answers():
    """Answers of 9 tokens, 8 of them decoded: in 8 passes by vanilla, in 4 by the others."""
    rows = [("m", task, f"{task}{request}", method, 8 if method == "vanilla" else 4, 8, True)
            for task in TASKS for request in range(3) for method in METHODS]  # fmt: skip
    columns = ["model", "task", "request", "method", "passes", "decoded", "identical"]
    return born(pd.DataFrame(rows, columns=columns), "recorded")


@pytest.fixture
def passes():
    """SAM-D drafts one node more on rag."""
    rows = [("m", task, f"{task}{request}", method, drafted + (method == "SAM-D" and task == "rag"), 0)
            for task in TASKS for request in range(3) for method, drafted in METHODS.items() if drafted
            for _ in range(4)]  # fmt: skip
    columns = ["model", "task", "request", "method", "drafted", "drafting_passes"]
    return born(pd.DataFrame(rows, columns=columns), "recorded")


def regime(slope: float) -> Regime:
    """A row more costs `slope` of a pass."""
    return Regime(f"{slope}", "simulated", np.array([1.0, 81.0]), np.array([1.0, 1 + 80 * slope]))


@pytest.fixture
def timed(answers, passes):
    return study.in_regimes(answers, passes, {"3B": regime(0.1), "1B": regime(0.2)}, update=0.03)


def test_an_answer_costs_its_passes_by_their_rows_in_each_regime(timed):
    first = timed[(timed["request"] == "rag0")].set_index(["model", "method"])
    for size, slope in (("3B", 0.1), ("1B", 0.2)):
        spent = {"vanilla": 8.0, "SAM-D": 4 * (1 + 5 * slope), "TR": 4 * (1 + 8 * slope), "DIAA": 4 * (1 + 3 * slope)}
        assert first.loc[size, "spent"][list(spent)].to_dict() == pytest.approx(spent)
        assert first.loc[(size, "DIAA"), "latency"] == pytest.approx(spent["DIAA"] / 8)
        hidden = first.loc[(size, study.STALE)]
        assert hidden["spent"] == pytest.approx(0.97 * spent["DIAA"])  # the update's share is taken off
        assert hidden["speed"] * hidden["latency"] == pytest.approx(1)
    assert evidence.kind_of(timed) == "simulated"


def test_draws_take_the_same_prompts_for_every_name_and_keep_tasks_apart():
    rng = np.random.default_rng(1)
    values = rng.uniform(1, 2, (2, 30))
    rows = [(task, request, name, factor * values[place, request]) for place, task in enumerate(TASKS)
            for request in range(30) for name, factor in (("a", 1), ("twice", 2))]  # fmt: skip
    table = born(pd.DataFrame(rows, columns=["task", "request", "method", "value"]), "recorded")
    sample = study.resample(table, "value")
    ratio = sample.estimate(sample.against("a")["twice"].mean(axis=1))
    assert (ratio.value, ratio.low, ratio.high, ratio.n) == pytest.approx((0.5, 0.5, 0.5, 60))
    mean = sample.estimate(sample["a"].mean(axis=1))
    assert mean.value == pytest.approx(values.mean())
    spread = 1.96 * np.sqrt((values.var(axis=1, ddof=1) / 30).sum()) / 2
    assert mean.high - mean.low == pytest.approx(2 * spread, rel=0.15)


def test_claims_and_a_null_are_the_same_code(timed):
    goodput, latency = (study.by_regime(timed, column, METHODS) for column in ("speed", "latency"))
    assert study.average_speedup(latency, 0).value == pytest.approx(2 / 1.3)
    assert study.average_speedup(latency, 1).value == pytest.approx(2 / 1.6)
    best = (2 / 1.4 + 2 / 1.5) / 2
    assert study.goodput_lead(goodput, 0).value == pytest.approx(2 / 1.3 / best)
    cells = study.first_or_second(goodput)
    assert cells.value == 1 and cells.n == 6  # both regimes have the same prompts
    assert study.lead_on_rag(goodput)[0].n == 3
    assert study.average_speedup(latency, 0, ours="vanilla").value == 1
    assert study.goodput_lead(goodput, 0, ours="vanilla").value < 1
    least, greatest = study.skipping_speedups(latency)
    assert (least.value, greatest.value) == pytest.approx((2 / 1.4, 2 / 1.2))


def test_overheads_are_sums_over_sums_of_the_model_whose_answers_take_longest():
    rows = [{"model": model, "task": task, "request": f"{task}{request}", "method": method,
             "decode_s": spent * (1 + request), "observe_s": 0.1}
            for model in ("larger", "small") for task in TASKS for request in range(3)
            for method, spent in (("vanilla", 1.0), ("DIAA", 0.5 if model == "larger" else 0.1))]  # fmt: skip
    whole = born(pd.DataFrame(rows), "recorded")
    share = study.percent_of_time(whole, ["observe_s"])
    assert (share.value, share.n) == (pytest.approx(100 * 0.1 / (0.5 * 2)), 6)


def test_answers_that_differ_are_counted_and_a_format_is_the_null(answers):
    rows = [("float32", "float32", "DIAA", f"r{n}", "a") for n in range(4)]
    rows += [("4bit", arithmetic, "TR", f"r{n}", "b" if n else "a")
             for arithmetic in ("float32", "int8") for n in range(4)]  # fmt: skip
    identity = pd.DataFrame(rows, columns=["weights", "arithmetic", "method", "request", "answer_sha"])
    assert [part.value for part in study.differing(answers, identity)] == [0, 6]
    assert [part.value for part in study.differing(answers, identity, "4bit")] == [75, 4]
    answers.loc[answers["method"] == "DIAA", "identical"] = [False, True, True, True, True, True]
    assert study.differing(answers, identity)[0].value == pytest.approx(100 / 6)


def test_the_regimes_that_the_rules_name_are_the_implied_ones():
    ratios = {size: float(regimes.implied(size).cost(81)) for size in study.SIZES}
    one = {f"the paper's for its {size}, implied: T(81)/T(1) {ratio:.2f}" for size, ratio in ratios.items()}
    both = "the paper's for its 3B and its 1B, implied: T(81)/T(1) {:.2f} and {:.2f}".format(*ratios.values())
    notes = [row.rule.note.partition("Regime")[2].partition(": ")[2] for row in CLAIMS.values() if row.value]
    assert {note for note in notes if note} == {*one, both}


def test_the_probability_of_a_node_tells_more_than_its_depth():
    rng = np.random.default_rng(0)
    chance = rng.uniform(0, 1, 4000)
    nodes = pd.DataFrame({"answer": rng.integers(0, 20, 4000), "chance": chance, "depth": rng.integers(1, 4, 4000),
                          "accepted": rng.uniform(0, 1, 4000) < chance})  # fmt: skip
    nodes = born(nodes, "measured")
    assert study.confidence_rank_correlation(nodes).value == pytest.approx(1)
    assert study.confidence_rank_correlation(nodes, by="depth").low < 0.9


def test_the_mixture_reads_short_prompts_and_racer_all_of_them():
    rows = [("mixture 8", 512), ("mixture 32", 513), ("RACER 32", 900), ("DIAA, prompt read", 900), ("DIAA", 9)]
    answers = pd.DataFrame(rows, columns=["method", "prompt_tokens"])
    assert study.prompt_read(answers).tolist() == [512, 0, 900, 900, 0]
