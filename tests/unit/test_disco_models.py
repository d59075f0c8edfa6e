"""DiSCo's measurements of language models, on tiny random ones and on scores made by hand."""

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice import models, shapes
from ondevice.corpus.prompts import Task
from ondevice.disco import cold_start, device_probe, judge, plots, quality
from ondevice.disco.judge import NgramJudge
from ondevice.plotting import plt

EOS = 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    tiny(32, vocabulary=300).save_pretrained(path)
    shapes.byte_tokenizer().save_pretrained(path)
    return str(path)


def tiny(width: int, vocabulary: int = 64, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=width, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=128, eos_token_id=EOS, bos_token_id=0,
        )
    ).eval()  # fmt: skip


def test_the_probe_times_every_token_of_every_prompt_in_order(folder):
    timed = device_probe.measure(device_probe.load(folder).model, np.array([5, 9, 3]), 4, seed=0)
    assert timed["length"].tolist() == [5] * 4 + [9] * 4 + [3] * 4
    assert timed["token"].tolist() == [0, 1, 2, 3] * 3 and (timed["seconds"] > 0).all()
    requests = device_probe.requests(timed)
    assert requests["length"].tolist() == [5, 9, 3]
    assert requests["ttft_s"].tolist() == timed.loc[timed["token"] == 0, "seconds"].tolist()
    assert requests["tbt_s"].iloc[1] == pytest.approx(timed["seconds"].iloc[5:8].mean())


def test_the_probe_gives_the_threads_back(folder):
    before = torch.get_num_threads()
    with device_probe.one_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


def test_the_probe_needs_a_token_and_can_do_without_gaps(folder):
    model = device_probe.load(folder).model
    assert device_probe.requests(device_probe.measure(model, [5], 1, seed=0))["tbt_s"].isna().all()
    with pytest.raises(ValueError, match="at least one token"):
        device_probe.measure(model, [5], 0, seed=0)


def test_the_line_is_through_the_medians():
    lengths = pd.Series([10, 10, 10, 20, 20, 20, 40, 40, 40])
    noise = np.tile([-0.1, 0.0, 5.0], 3)  # a hiccup in every group, which the medians do not see
    line = device_probe.line(lengths, 0.01 * lengths + 2 + noise)
    assert line["tokens_per_s"] == pytest.approx(100) and line["overhead_s"] == pytest.approx(2)
    assert line["r2"] == pytest.approx(1) and line["pearson_r"] < 0.2


def test_the_spread_takes_no_notice_of_one_hiccup():
    calm = device_probe.steadiness([1.0] * 50)
    assert calm["spread"] == calm["cv"] == 0 and calm["p99_over_p50"] == 1
    hiccup = device_probe.steadiness([1.0] * 49 + [9.0])
    assert hiccup["spread"] == 0 and hiccup["cv"] > 0.5


def test_a_model_that_is_not_bundled_is_named_and_a_path_is_not_hidden():
    assert device_probe.absent([]) == "no model is named"
    assert "pydocs-lm-huge" in device_probe.absent(["some/model", "pydocs-lm-huge"])
    assert device_probe.absent(["some/model"]) == ""
    assert device_probe.label("a/folder/of-mine/") == "of-mine" and device_probe.label("name") == "name"


def test_a_cold_start_is_timed_in_a_process_of_its_own(folder):
    table = cold_start.of_models([folder], 1)
    assert table["page_cache"].tolist() == ["warm", "cold"]
    assert (table[["load_s", "ttft_s"]] > 0).all().all()
    assert (table["parameters"] == models.load(folder).model.num_parameters()).all()
    with pytest.raises(RuntimeError, match="cold start failed"):
        cold_start.of_folder("no-such-folder", "none", 1)


def test_linear_loading_has_the_exponent_one():
    table = pd.DataFrame({"page_cache": ["cold", "cold", "warm", "warm"], "parameters": [1e6, 1e9] * 2,
                          "load_s": [0.001, 1.0, 0.3, 0.3]})  # fmt: skip
    assert cold_start.exponents(table) == pytest.approx({"cold": 1.0, "warm": 0.0})


def test_the_kept_cold_starts_are_of_the_papers_sizes():
    kept = cold_start.assets.derived_trace("cold_start")
    assert set(kept["page_cache"]) == {"warm", "cold"} and kept["machine"].str.len().gt(0).all()
    for name in kept["model"]:
        row = kept.loc[kept["model"] == name, "parameters"]
        assert (row == shapes.shape(name.removeprefix("random:")).parameters).all()


@pytest.fixture(scope="module")
def pair():
    return tiny(32), tiny(48, seed=1)


def greedy(model, ids, n):
    """One prompt at a time, token by token, without a cache: what the batched answers must equal."""
    said = list(ids)
    with torch.inference_mode():
        while len(said) < len(ids) + n and said[-1:] != [EOS]:
            said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return said[len(ids) :]


PROMPTS = [[3, 5, 7], [9], [2, 4, 6, 8, 10]]


def test_a_handover_at_either_end_is_one_model_alone(pair):
    answers = quality.handed_over(*pair, PROMPTS, [0, 12], 12)
    assert answers[0] == [greedy(pair[1], ids, 12) for ids in PROMPTS]
    assert answers[12] == [greedy(pair[0], ids, 12) for ids in PROMPTS]


def test_a_handover_continues_the_first_models_words(pair):
    for ids, answer in zip(PROMPTS, quality.handed_over(*pair, PROMPTS, [4], 12)[4], strict=True):
        begun = greedy(pair[0], ids, 4)
        assert answer == begun + (greedy(pair[1], [*ids, *begun], 8) if begun[-1] != EOS else [])


def test_an_answer_that_has_ended_is_not_handed_over(pair, monkeypatch):
    scripted = {id(pair[0]): [5, EOS], id(pair[1]): [8, 8]}
    monkeypatch.setattr(quality, "generate", lambda model, prefixes, n: [scripted[id(model)][:n] for _ in prefixes])
    assert quality.handed_over(*pair, [[3]], [0, 1, 2], 2) == {0: [[8, 8]], 1: [[5, 8]], 2: [[5, EOS]]}


def test_a_handover_beyond_the_limit_is_refused(pair):
    with pytest.raises(ValueError, match="between 0 and 4"):
        quality.handed_over(*pair, [[3]], [5], 4)


def loaded(model, origin="folder"):
    return models.Loaded("x", origin, model, shapes.byte_tokenizer())


def test_what_cannot_be_compared_is_said(pair):
    assert quality.why_not({"a": loaded(pair[0])}) == "it takes two models of different names"
    assert quality.why_not({"a": loaded(pair[0]), "b": loaded(pair[1])}) == ""
    marked = tiny(32)
    setattr(marked.config, shapes.MARK, True)
    assert "random" in quality.why_not({"a": loaded(pair[0]), "b": loaded(marked)})
    other = shapes.byte_tokenizer()
    other.add_tokens(["more"])
    two = {"a": loaded(pair[0]), "b": models.Loaded("x", "folder", pair[1], other)}
    with pytest.raises(ValueError, match="different vocabularies"):
        quality.quality_by_handover(two, [], [0, 4], 4)


def test_rouge_1_counts_shared_words():
    assert quality.rouge_1("the cat sat", "The cat sat") == 1.0
    assert quality.rouge_1("the cat", "a dog") == 0.0
    assert quality.rouge_1("the the cat", "the cat sat on") == pytest.approx(2 * 2 / 7)


def test_an_answer_is_right_when_its_words_are_the_references(monkeypatch):
    monkeypatch.setattr(judge, "likelihood", lambda answer: -float(len(answer)))
    monkeypatch.setattr(quality, "embedder", lambda: lambda texts: np.eye(4)[[len(text) % 4 for text in texts]])
    tasks = [Task("rag", "a", (), (("q", "the array of  numbers it sums"),))] * 3
    table = quality.scores(tasks, ["the array of numbers it sums", "the array of numbers it adds", "no idea"])
    assert table["accurate"].tolist() == [1.0, 1.0, 0.0]
    assert table["rouge_1"].tolist() == pytest.approx([1.0, 5 / 6, 0.0])


def by_hand(scored):
    """A table of one direction: scored {hand-over: scores of the items}."""
    rows = [("small to base", h, i, s) for h, values in scored.items() for i, s in enumerate(values)]
    return pd.DataFrame(rows, columns=["direction", "handover", "item", "rouge_1"])


def test_the_bound_measures_how_far_a_mean_lies_outside():
    table = by_hand({0: [0.6, 0.6], 2: [0.5, 0.5], 4: [0.7, 0.9], 6: [0.1, 0.3], 8: [0.4, 0.4]})
    found = quality.bound(table, "rouge_1", "small", seed=0).set_index("handover")
    assert found["outside"].to_dict() == pytest.approx({2: -0.1, 4: 0.2, 6: 0.2})
    assert found["gain"].to_dict() == pytest.approx({2: 0.1, 4: 0.4, 6: -0.2})  # over the device's 0.4, which begins
    assert found["within"].to_dict() == {2: 1.0, 4: 0.0, 6: 0.0}
    assert found.loc[2, ["low", "high"]].tolist() == pytest.approx([-0.1, -0.1])
    assert found.loc[4, "low"] == pytest.approx(0.1) and found.loc[4, "high"] == pytest.approx(0.3)
    assert found["first"].eq(0.4).all() and found["second"].eq(0.6).all()


def test_the_device_is_the_model_that_is_named():
    table = by_hand({0: [0.6, 0.6], 2: [0.5, 0.5], 8: [0.4, 0.4]})
    assert quality.bound(table, "rouge_1", "base", seed=0)["gain"].tolist() == pytest.approx([-0.1])


def test_the_bounds_interval_holds_what_it_promises():
    """Scores of two models and a mixture of them: the true mean is on the bound's edge, in 95 of 100 intervals."""
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        weak, strong = rng.normal(0.3, 0.1, 60), rng.normal(0.9, 0.1, 60)
        table = by_hand({0: strong, 4: weak + rng.normal(0, 0.1, 60), 8: weak})
        row = quality.bound(table, "rouge_1", "small", seed=seed, draws=400).iloc[0]
        held += row["low"] <= 0 <= row["high"]
    assert 88 <= held <= 100


def test_means_come_with_intervals_that_hold_them():
    table = by_hand({0: np.linspace(0, 1, 21), 8: np.ones(21)})
    found = quality.means(table, ["rouge_1"], seed=0).set_index("handover")
    assert found["mean"].to_dict() == pytest.approx({0: 0.5, 8: 1.0})
    assert found.loc[0, "low"] < 0.45 and found.loc[0, "high"] > 0.55 and found.loc[8, "low"] == pytest.approx(1.0)
    figure = plots.handover_quality(found.reset_index(), quality.METRICS, "measured", {"rouge_1": (0.2, 0.3)})
    plt.close(figure)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_the_judges_chances_add_up_to_one(order):
    ids = np.random.default_rng(0).integers(0, 5, 200)
    ngrams = NgramJudge(ids, vocabulary=6, order=order)  # token 5 was never seen
    for context in ([], [0], [1, 2], [5, 5], [3, 5], [5, 2, 4]):
        chances = [np.exp(ngrams.log_probabilities([*context, token])[-1]) for token in range(6)]
        assert sum(chances) == pytest.approx(1) and min(chances) > 0


def test_the_judge_counts_by_hand():
    """0 1 0 1 2 as bigrams: 01 twice, 10, 12. After 1 come 0 and 2, once each; four kinds of tokens end bigrams."""
    ngrams = NgramJudge(np.array([0, 1, 0, 1, 2]), vocabulary=3, order=2)
    unigram = (1 - 0.75) / 3 + 0.75 * 3 / 3 / 3  # each token follows one other: 01, 10, 12
    assert np.exp(ngrams.log_probabilities([1, 0])) == pytest.approx(
        [unigram, (1 - 0.75) / 2 + 0.75 * 2 / 2 * unigram]
    )


def test_the_judge_prefers_what_it_has_read():
    ngrams = NgramJudge(np.tile([1, 2, 3, 4], 50), vocabulary=8, order=3)
    assert ngrams.log_probabilities([1, 2, 3, 4]).mean() > ngrams.log_probabilities([4, 2, 1, 3]).mean() + 1
    with pytest.raises(ValueError, match="64 bits"):
        NgramJudge(np.arange(10), vocabulary=8192, order=5)
