"""DiSCo's measurements of language models, on tiny random ones and on scores made by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model

from ondevice import fetched, models, shapes
from ondevice.causal_lm import CausalLM
from ondevice.causal_lm.lean import engine
from ondevice.evidence import agreement, born, load
from ondevice_papers.disco import quality
from ondevice_papers.disco.quality import GradedQuestion, Speaker
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
    """Two models of bytes, of unlike vocabularies."""
    speakers = []
    for width, more in ((32, 0), (48, 40)):
        tokenizer = shapes.byte_tokenizer()
        lm = CausalLM(tiny(width, vocabulary=len(tokenizer) + more, seed=more))
        speakers.append(Speaker(lm, tokenizer, (EOS,)))
    return speakers


def alone(speaker, prompt, begun, n):
    """Token by token, without a cache: what the answers must equal, and their margins."""
    ids = speaker.tokenizer(prompt).input_ids + (speaker.tokenizer(begun).input_ids if begun else [])
    said, margins = list(ids), []
    with torch.inference_mode():
        while len(said) < len(ids) + n and said[-1:] != [EOS]:
            logits = speaker.lm.model(torch.tensor([said])).logits[0, -1]
            said.append(int(logits.argmax()))
            margins.append(float(logits.max() - logits.sort().values[-2]))
    return said[len(ids) :], margins


pytestmark = pytest.mark.filterwarnings("ignore:This model has no chat template")
PROMPTS = ["Say it.", "?", "two words"]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_handover_at_either_end_is_one_model_alone(pair, prompt):
    answers = quality.migrated(*pair, prompt, [0, 12], 12)
    for handover, speaker in ((0, pair[1]), (12, pair[0])):
        tokens, margins = alone(speaker, prompt, "", 12)
        answer = answers[handover]
        assert [*(answer.begun or answer.ended)] == tokens and not (answer.begun and answer.ended)
        assert answer.margin == pytest.approx(min(margins), abs=1e-4)
        assert answer.text == speaker.text(tokens)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_handover_continues_the_first_models_words_in_the_seconds_tokens(pair, prompt):
    answer = quality.migrated(*pair, prompt, [4], 12)[4]
    begun, _ = alone(pair[0], prompt, "", 4)
    text = pair[0].text(begun)
    rest = [] if begun[-1] == EOS else alone(pair[1], prompt, text, 8)[0]
    assert (list(answer.begun), list(answer.ended)) == (begun, rest)
    assert answer.text == text + pair[1].text(rest)


def test_an_answer_that_has_ended_is_not_handed_over(pair, monkeypatch):
    scripted = {id(pair[0]): [(70, 0.1), (EOS, 0.2)], id(pair[1]): [(80, 0.3), (80, 0.4)]}
    monkeypatch.setattr(quality, "continued", lambda speaker, prompt, begun, n: scripted[id(speaker)][:n])
    answers = quality.migrated(*pair, "?", [0, 1, 2, 3], 3)
    assert {handover: (answer.begun, answer.ended, answer.margin) for handover, answer in answers.items()} == {
        0: ((), (80, 80), 0.3), 1: ((70,), (80, 80), 0.1), 2: ((70, EOS), (), 0.1), 3: ((70, EOS), (), 0.1)
    }  # fmt: skip


def test_half_a_character_at_the_seam_is_left_out(pair):
    tokens = pair[0].tokenizer("na\u00efve").input_ids
    assert pair[0].text(tokens[:3]) == "na" and pair[0].text(tokens[:4]) == "na\u00ef"


def test_an_answer_is_right_if_a_text_of_each_part_stands_in_it():
    assert quality.right("It was on April 21, 2017.", [["2016", "April 21 , 2017"]])
    assert quality.right("Rick's hat is red", [["rick"], ["blue", "red"]])
    assert not quality.right("Rick's hat", [["rick"], ["blue", "red"]]) and not quality.right("the Ricks", [["Rick"]])


def test_a_question_has_its_metrics():
    asked = [GradedQuestion("a", "note", "?", (("2",),)),
             GradedQuestion("b", "translation", "?", reference="a small cat")]  # fmt: skip
    scored = quality.scores(asked, ["it is 2", "a small dog"])
    assert scored["right"].tolist() == pytest.approx([1.0, np.nan], nan_ok=True)
    assert scored["rouge_1"].tolist() == pytest.approx([np.nan, 2 / 3], nan_ok=True)
    assert np.isnan(scored["similarity"][0]) and 0.2 < scored["similarity"][1] < 1


def by_hand(scored, task="rag", direction="small to base"):
    """A table of one direction: scored {hand-over: scores of the prompts}."""
    rows = [(task, direction, h, i, s, 5 + i) for h, values in scored.items() for i, s in enumerate(values)]
    columns = ["task", "direction", "handover", "request", "right", "tokens"]
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


def test_tasks_weigh_alike_and_a_metric_counts_where_it_is():
    of_rag = by_hand({0: [0.1, 0.6, 0.9], 4: [0.5, 0.7, 0.2], 8: [0.4, 0.3, 0.8]})
    of_math = by_hand({0: [1.0], 4: [0.0], 8: [1.0]}, task="math").assign(request=7)
    other = by_hand({0: [1.0], 4: [1.0], 8: [1.0]}, task="summarization").assign(request=8, right=np.nan)
    means = quality.means(born(pd.concat([of_rag, of_math, other]), "simulated"), ["right"])
    assert means["n"].eq(4).all()
    assert means["mean"].tolist() == pytest.approx([(1.6 / 3 + 1) / 2, 1.4 / 6, (0.5 + 1) / 2])
    assert quality.extreme(quality.bound(of_rag, "right", "small"), "outside", max).drawn == "requests"


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
@pytest.mark.skipif(fetched.path(models.QWEN) is None, reason="needs Qwen2.5-Coder-0.5B-Instruct")
def test_the_first_prompts_run_again_as_recorded():
    pair = record.speakers()
    asked = record.questions(fetched=False)[::80]
    recorded = load("disco", "quality")
    same = agreement(recorded, record.graded(pair, asked), record.KEYS, record.EXACT, "margin", record.NEAR)
    assert same.n == 20 and not same.differing

    def backwards(first, second, *rest):
        return quality.migrated(second, first, *rest)

    edited = record.graded(pair, asked, backwards)
    assert agreement(recorded, edited, record.KEYS, record.EXACT, "margin", record.NEAR).differing


def test_answers_that_are_equal_but_for_rounding_widen_no_interval():
    rng = np.random.default_rng(0)
    first, handed, last = rng.random((3, 60))
    exact = {0: first, 2: last, 4: handed, 8: last}
    rounded = exact | {2: last * (1 + 1e-15 * rng.standard_normal(60))}
    bounds, others = (quality.bound(by_hand(scores), "right", "small") for scores in (exact, rounded))
    numbers = bounds.select_dtypes("float").columns
    assert np.allclose(bounds[numbers], others[numbers], rtol=0, atol=1e-9)
    assert bounds.loc[0, ["over_device_low", "over_device_high"]].tolist() == [0, 0]
