"""DiSCo's measurements of language models, on tiny random ones and on scores made by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model

from ondevice import models, shapes
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import engine
from ondevice.evidence import agreement, born, load
from ondevice_papers.disco import quality
from ondevice_studies.disco import cold_start, device_probe, record

EOS = 1


def tiny(width, vocabulary=64, seed=0):
    sizes = {"hidden_size": width, "num_attention_heads": 2, "num_key_value_heads": 2, "eos_token_id": EOS}
    return random_model("llama", torch.float32, vocabulary=vocabulary, context=128, seed=seed, **sizes).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny(32, vocabulary=300).save_pretrained(path)
    shapes.byte_tokenizer().save_pretrained(path)
    return str(path)


def test_the_probe_times_every_token_of_every_prompt_in_order(folder):
    timed = device_probe.measure(engine(device_probe.load(folder)), np.array([5, 9, 3]), 4, seed=0)
    assert timed["length"].tolist() == [5] * 4 + [9] * 4 + [3] * 4
    assert timed["token"].tolist() == [0, 1, 2, 3] * 3 and (timed["seconds"] > 0).all()
    requests = device_probe.requests(timed)
    assert requests["length"].tolist() == [5, 9, 3]
    assert requests["ttft_s"].tolist() == timed.loc[timed["token"] == 0, "seconds"].tolist()
    assert requests["tbt_s"].iloc[1] == pytest.approx(timed["seconds"].iloc[5:8].mean())


def test_the_line_is_through_the_medians():
    lengths = np.repeat([10, 20, 40], 9)
    noise = np.tile([-0.01] * 4 + [0.0] + [0.01] * 3 + [5.0], 3)  # a hiccup in every group: the medians do not see it
    line = device_probe.line(lengths, 0.01 * lengths + 2 + noise, "simulated")
    assert line["tokens_per_s"].value == pytest.approx(100) and line["overhead_s"].value == pytest.approx(2)
    assert line["r2"].value == pytest.approx(1) and line["pearson_r"].value < 0.2
    assert 80 < line["tokens_per_s"].low < 100 < line["tokens_per_s"].high < 150
    assert line["pearson_r"].low < 0 < line["pearson_r"].high and line["pearson_r"].n == 27


def test_a_prompt_that_is_asked_in_every_turn_counts_once():
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 60, 12)
    seconds = 0.01 * lengths + rng.normal(0, 0.15, 12)
    once = device_probe.line(lengths, seconds, "simulated")["pearson_r"]
    x, y, prompts = (np.tile(each, 6) for each in (lengths, seconds, np.arange(12)))
    found = device_probe.line(x, y, "simulated", prompts.tolist())["pearson_r"]
    assert (found.n, found.drawn) == (once.n, once.drawn) == (12, "prompts")
    assert found.interval == pytest.approx(once.interval)
    steady = device_probe.spread(y, "simulated", prompts.tolist())
    assert (steady.n, steady.drawn) == (12, "turns")


def test_the_spread_takes_no_notice_of_one_hiccup():
    calm = device_probe.spread([1.0] * 50, "simulated")
    assert calm.value == calm.high == 0
    assert device_probe.spread([1.0] * 49 + [9.0], "simulated").value == 0
    assert device_probe.spread([1.0, 2.0, 3.0] * 20, "simulated").value == 1


@pytest.mark.long  # processes that import PyTorch and load a model
def test_a_cold_start_is_timed_in_a_process_of_its_own(folder):
    table = cold_start.loads({"tiny": folder}, 1)
    assert table["page_cache"].tolist() == ["warm", "cold"] and table.attrs["kind"] == "measured"
    assert (table[["load_s", "ttft_s"]] > 0).all().all()
    assert (table["parameters"] == models.load(folder).model.num_parameters()).all()
    with pytest.raises(RuntimeError, match="cold start"):
        cold_start.loads({"none": "no-such-folder"}, 0)


def test_the_exponent_is_fitted_through_all_sizes():
    sizes, hiccup = np.repeat([1e6, 1e8, 1e9], 5), np.tile([1.0, 1.0, 1.0, 1.0, 30.0], 3)
    turns = np.concatenate([np.roll(range(5), shift) for shift in range(3)])  # a hiccup meets each size in another turn
    cold = pd.DataFrame({"page_cache": "cold", "turn": turns, "parameters": sizes, "load_s": 1e-9 * sizes * hiccup})
    warm = cold.assign(page_cache="warm", load_s=np.repeat([1.0, 10.0, 1.0], 5))
    found = cold_start.exponents(born(pd.concat([cold, warm]), "simulated"))
    assert found["cold"].value == pytest.approx(1) and found["cold"].low < 1 < found["cold"].high
    assert (found["cold"].n, found["cold"].drawn) == (5, "turns")
    x, y = np.log10([1e6, 1e8, 1e9]), np.array([0, 1, 0])  # the ends alone would say 0
    assert found["warm"].value == pytest.approx(((x - x.mean()) * y).sum() / ((x - x.mean()) ** 2).sum())
    assert found["warm"].low == pytest.approx(found["warm"].high)


@pytest.fixture(scope="module")
def pair():
    return CausalLM(tiny(32)), CausalLM(tiny(48, seed=1))


def greedy(lm, ids, n):
    """Token by token, without a cache: what the answers must equal, and their margins."""
    said, margins = list(ids), []
    with torch.inference_mode():
        while len(said) < len(ids) + n and said[-1:] != [EOS]:
            logits = lm.model(torch.tensor([said])).logits[0, -1]
            said.append(int(logits.argmax()))
            margins.append(float(logits.max() - logits.sort().values[-2]))
    return said[len(ids) :], margins


PROMPTS = [[3, 5, 7], [9], [2, 4, 6, 8, 10]]


@pytest.mark.parametrize("ids", PROMPTS)
def test_a_handover_at_either_end_is_one_model_alone(pair, ids):
    answers = quality.migrated(*pair, ids, [0, 12], 12)
    for handover, alone in ((0, pair[1]), (12, pair[0])):
        tokens, margins = greedy(alone, ids, 12)
        assert [token for token, _ in answers[handover]] == tokens
        assert [margin for _, margin in answers[handover]] == pytest.approx(margins, abs=1e-4)


@pytest.mark.parametrize("ids", PROMPTS)
def test_a_handover_continues_the_first_models_words(pair, ids):
    answer = [token for token, _ in quality.migrated(*pair, ids, [4], 12)[4]]
    begun, _ = greedy(pair[0], ids, 4)
    assert answer == begun + (greedy(pair[1], [*ids, *begun], 8)[0] if begun[-1] != EOS else [])


def test_an_answer_that_has_ended_is_not_handed_over(pair, monkeypatch):
    scripted = {id(pair[0]): [(5, 0.1), (EOS, 0.2)], id(pair[1]): [(8, 0.3), (8, 0.4)]}
    monkeypatch.setattr(quality, "continued", lambda lm, ids, n: scripted[id(lm)][:n])
    answers = quality.migrated(*pair, [3], [0, 1, 2, 3], 3)
    five, end, eight, again = (5, 0.1), (EOS, 0.2), (8, 0.3), (8, 0.4)
    assert answers == {0: [eight, again], 1: [five, eight, again], 2: [five, end], 3: [five, end]}


def by_hand(scored, family="rag", direction="small to base"):
    """A table of one direction: scored {hand-over: scores of the prompts}."""
    rows = [(family, direction, h, i, s, 5 + i) for h, values in scored.items() for i, s in enumerate(values)]
    columns = ["family", "direction", "handover", "document", "right", "tokens"]
    return born(pd.DataFrame(rows, columns=columns), "simulated")


def test_the_bound_measures_how_far_a_mean_lies_outside():
    table = by_hand({0: [0.6, 0.6], 2: [0.5, 0.5], 4: [0.7, 0.9], 6: [0.1, 0.3], 8: [0.4, 0.4]})
    found = quality.bound(table, "right", "small").set_index("handover")
    assert found["outside"].to_dict() == pytest.approx({2: -0.1, 4: 0.2, 6: 0.2})
    assert found["over_device"].to_dict() == pytest.approx({2: 0.1, 4: 0.4, 6: -0.2})  # the device's 0.4, which begins
    assert found["over_server"].to_dict() == pytest.approx({2: -0.1, 4: 0.2, 6: -0.4})
    assert found["over_weaker"].to_dict() == pytest.approx({2: 0.1, 4: 0.4, 6: -0.2})
    assert found.loc[2, ["outside_low", "outside_high"]].tolist() == pytest.approx([-0.1, -0.1])
    assert found.loc[4, "outside_low"] < 0.2 < found.loc[4, "outside_high"]
    assert found["changed"].to_dict() == {2: 1.0, 4: 1.0, 6: 0.0}  # the first model alone says 5 tokens and 6
    assert found["first"].eq(0.4).all() and found["second"].eq(0.6).all() and found["n"].eq(2).all()


def test_prompts_on_one_document_are_drawn_together():
    alone = by_hand({0: [0.1, 0.6, 0.9], 4: [0.5, 0.7, 0.2], 8: [0.4, 0.3, 0.8]})
    twice = born(pd.concat([alone, alone.assign(family="turns")]), "simulated")
    one, two = (quality.means(table, ["right"]) for table in (alone, twice))
    assert one["n"].eq(3).all() and two["n"].eq(3).all()
    assert two[["mean", "low", "high"]].to_numpy() == pytest.approx(one[["mean", "low", "high"]].to_numpy())
    assert quality.extreme(quality.bound(twice, "right", "small"), "outside", max).drawn == "documents"


@pytest.mark.parametrize("strong", [0.9, 0.3], ids=["of unlike models", "of equal models"])
def test_the_bounds_intervals_hold_together(strong):
    """The true means of two hand-overs are those of either model: no mean is outside, in 95 of 100 tables."""
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        values = {0: strong, 4: 0.3, 6: strong, 8: 0.3}
        table = by_hand({handover: rng.normal(mean, 0.1, 60) for handover, mean in values.items()})
        worst = quality.extreme(quality.bound(table, "right", "small", seed=seed), "outside", max)
        held += worst.low <= 0 <= worst.high
    assert held >= 93


# The record


@pytest.mark.long  # recorded answers run again
def test_the_first_prompts_run_again_as_recorded():
    pair = {name: models.load(name) for name in (record.DEVICE, record.SERVER)}
    tasks = [task for task in quality.items(1, pair[record.DEVICE].tokenizer) if task.family in ("rag", "turns")]
    recorded = load("disco", "quality")
    found = agreement(recorded, record.again(pair, tasks), record.KEYS, record.EXACT, "margin")
    assert found.n == 24 and not found.differing

    def backwards(first, second, *asked):
        return quality.migrated(second, first, *asked)

    edited = record.again(pair, tasks, backwards)
    assert agreement(recorded, edited, record.KEYS, record.EXACT, "margin").differing
