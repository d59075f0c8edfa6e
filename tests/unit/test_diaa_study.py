"""What exhibits share: times from curves, draws of prompts in pairs, and what is judged."""

import numpy as np
import pandas as pd
import pytest

from ondevice import assets, evidence
from ondevice.evidence import born
from ondevice_studies.diaa import study
from ondevice_studies.diaa.claims import CLAIMS
from ondevice_studies.diaa.methods import BASE, SMALL

TASKS = ["doctest", "rag"]
METHODS = {"vanilla": 0, "SAM-D": 4, "DIAA": 3, study.STALE: 3, "SpS": 2}  # and what they draft in each pass


@pytest.fixture
def record():
    """Answers of 9 tokens: vanilla takes 8 passes, the others 4 behind a prompt of 10 tokens."""
    answers, passes = [], []
    for model in (BASE, SMALL):
        for task in TASKS:
            for request in range(3):
                for method, drafted in METHODS.items():
                    keys = (model, "tasks", task, request, method)
                    each, more = 2 if drafted else 1, int(method == "SAM-D" and task == "rag")
                    said = (f"{task}{request}", f"said by {model}")
                    answers.append((*keys, *said, 10, 9, 8 // each, True, 0.5 * request))
                    spent = int(method == "SpS")
                    passes += [(*keys, drafted + more, each - 1, spent, 10 + step) for step in range(8 // each)]
    columns = ["model", "set", "task", "request", "method"]
    after = ["prompt_sha", "answer_sha", "prompt_tokens", "tokens", "passes", "identical", "redundancy"]
    counted = ["drafted", "accepted", "drafting_passes", "cached"]
    tables = pd.DataFrame(answers, columns=columns + after), pd.DataFrame(passes, columns=columns + counted)
    return tuple(born(table, "recorded") for table in tables)


@pytest.fixture
def machine():
    """A row more costs a tenth of a pass, a cached token nothing; each of four parts takes a thousandth.

    A prompt's token takes a tenth. Only DIAA and plain decoding were run whole.
    """
    rows = [(model, "float32", n, cached, 1 + 0.1 * (n - 1))
            for model in (BASE, SMALL) for n in (1, 2, 8) for cached in (0, 99)]  # fmt: skip
    curves = born(pd.DataFrame(rows, columns=["model", "dtype", "rows", "cached", "mean"]), "recorded")
    whole = [{"model": model, "method": method, "prompt_tokens": tokens, "prefill_s": tokens / 10, "passes": passes}
             | {f"{part}_s": 1e-3 * passes for part in study.PARTS}
             for model in (BASE, SMALL) for method, passes in (("DIAA", 4), ("vanilla", 8))
             for tokens in (10, 20)]  # fmt: skip
    return study.Machine("a machine", curves, pd.DataFrame(whole))


@pytest.fixture
def timed(record, machine):
    return study.timed(*record, machine, "float32", {"SpS": SMALL})


def test_an_answers_time_is_its_passes_and_what_drafts_cost(timed):
    first = timed[(timed["model"] == BASE) & (timed["task"] == "rag") & (timed["request"] == 0)].set_index("method")
    forward = {"vanilla": 8 * 1.0, "SAM-D": 4 * 1.5, "DIAA": 4 * 1.3, "SpS": 4 * 1.2}
    assert first["forward"].loc[list(forward)].to_dict() == pytest.approx(forward)
    assert first["drafting"]["SpS"] == pytest.approx(4.0) and first["drafting"]["DIAA"] == 0
    assert first["seconds"]["DIAA"] == pytest.approx(4 * 1.3 + 4 * 4e-3)
    assert first["seconds"][study.STALE] == pytest.approx(4 * 1.3 + 4 * 3e-3)  # the update is hidden
    assert first["latency"]["DIAA"] == pytest.approx(1e3 * first["seconds"]["DIAA"] / 8)
    assert first["end_to_end"]["DIAA"] == pytest.approx(1e3 * (first["seconds"]["DIAA"] + 1.0) / 9)
    assert timed.attrs["kind"] == "recorded"


def test_beyond_the_last_size_the_last_slope_goes_on_and_an_unknown_model_is_named(machine):
    assert machine.forward(BASE, "float32", [33, 1], 50) == pytest.approx([4.2, 1.0])
    with pytest.raises(ValueError, match=r"'a model'.*float32"):
        machine.forward("a model", "float32", 1, 1)


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
    goodput, latency = (study.by_model(timed, column, METHODS) for column in ("goodput", "latency"))
    speed = 8 * (1 + 4e-3) / (4 * (1.3 + 4e-3))
    assert study.average_speedup(latency, 0).value == pytest.approx(speed)
    best = (1 / (1.4 + 4e-3) + 1 / (1.5 + 4e-3)) / 2
    assert study.goodput_lead(goodput, 0).value == pytest.approx(1 / (1.3 + 4e-3) / best)
    cells = study.first_or_second(goodput)
    assert cells.value == 1 and cells.n == 6  # both models have the same prompts
    assert study.lead_on_rag(goodput)[0].n == 3
    assert study.average_speedup(latency, 0, ours="vanilla").value == 1
    assert study.goodput_lead(goodput, 0, ours="vanilla").value < 1


def test_whole_runs_are_judged_by_the_prompt_and_overheads_as_sums_over_sums():
    seconds = {"vanilla": 1.0, "DIAA": 0.5, study.LOOKUP: 0.8}
    rows = [{"model": model, "task": task, "prompt_sha": f"{task}{request}", "method": method, "tokens": 5,
             "decode_s": spent * (1 + request), "observe_s": 0.1}
            for model in (BASE, SMALL, study.LARGEST) for task in TASKS for request in range(3)
            for method, spent in seconds.items() for _ in range(2)]  # fmt: skip
    whole = born(pd.DataFrame(rows), "recorded")
    speed = study.average_speedup(study.ran(whole), 1)
    assert (speed.value, speed.n) == (2, 6)
    share = study.percent_of_time(whole, ["observe_s"])
    assert (share.value, share.n) == (pytest.approx(100 * 0.1 / (0.5 * 2)), 6)


def test_answers_and_their_null_are_compared_alike(record):
    answers, _ = record
    assert [part.value for part in study.differing(answers)] == [0, 12]
    assert [part.value for part in study.differing(answers, "vanilla", by_itself=False)] == [100, 12]


def test_the_regimes_that_the_rules_name_are_the_recorded_ones():
    curves = evidence.load("diaa", "curves.zen5-2c").query("dtype == 'float32' and cached == 256")
    mean = curves.set_index(["model", "rows"])["mean"]
    larger, small = (f"{mean[model, 33] / mean[model, 1]:.1f}" for model in (BASE, SMALL))
    notes = [row.rule.note.rpartition("Regime: ")[2] for row in CLAIMS.values() if row.value]
    assert {note for note in notes if "T(33)" in note} == {
        f"float32 on zen5-2c, 17.5M parameters, T(33)/T(1) {larger}",
        f"float32 on zen5-2c, 6.9M parameters, T(33)/T(1) {small}",
        f"float32 on zen5-2c, T(33)/T(1) {larger} with 17.5M parameters and {small} with 6.9M",
    }


def test_the_baselines_are_those_of_table_1():
    methods = assets.paper_table("diaa", "table_01_goodput_latency")["method"].str.replace("Vanilla", "vanilla")
    assert {*study.PAPERS, "DIAA"} == {*methods}


def test_predictions_are_compared_with_runs_that_took_the_same_passes(timed):
    runs = timed[["model", "task", "request", "method", "passes"]].assign(decode_s=timed["seconds"] / 1.03)
    runs.loc[runs["request"] == 0, ["passes", "decode_s"]] = [99, 1.0]
    found = study.checked(timed, born(runs, "recorded")).set_index(["model", "method"])
    assert found["ratio"].to_numpy() == pytest.approx(1.03) and (found["answers"] == 4).all()
