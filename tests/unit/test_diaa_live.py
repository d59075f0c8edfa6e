"""What Part I of DIAA's notebook counts, on answers that can be worked out by hand."""

import copy
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from tiny import random_model, word_tokenizer

from ondevice import evidence, prompts
from ondevice.causal_lm import CausalLM
from ondevice.speculation import Draft, Drafter, generate
from ondevice.speculation.bundled import mixture
from ondevice.speculation.loop import PREFILL_CHUNK
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice_papers.diaa.tables import Tables, overwrite
from ondevice_studies.diaa import live as diaa_live
from ondevice_studies.speculation import live

V = 12


def answer(tokens, name="a"):
    """An answer whose logits behind each token put the next one first and token 0 second."""
    logits = torch.zeros(len(tokens), V)
    for row, token in enumerate(tokens):
        logits[row, 0] = 5.0
        logits[row, token] = 9.0
    return live.PlainAnswer(
        name, "qa", (1, 2), tuple(tokens), SimpleNamespace(prompt_logits=torch.zeros(2, V)), logits, 1.0
    )


def tables(rows):
    made = Tables.empty(V)
    for key, row in rows.items():
        made.tokens[key, : len(row)] = row
        made.probabilities[key, : len(row)] = np.linspace(0.5, 0.1, len(row))
    return made


def test_a_draft_is_followed_as_far_as_the_text_goes():
    draft = Draft([5, 6, 7, 8], [-1, 0, 0, 2])
    assert live.followed(draft, [5, 7, 8, 1]) == [0, 2, 3]
    assert live.followed(draft, [5, 9]) == [0] and live.followed(draft, [6]) == [] == live.followed(draft, [])


def test_ranks_are_places_in_the_row_and_updates_come_after_the_look():
    said = answer([3, 4, 3, 4])
    assert diaa_live.coverage(tables({3: [9, 4]}), [said])["rank"].tolist() == [2, 9, 2]
    # behind the first 3 came 4, which the second one finds in its row
    assert diaa_live.coverage(Tables.empty(V), [said], overwrite)["rank"].tolist() == [9, 9, 1]


def test_a_drafter_is_led_along_and_learns_behind_every_token():
    class Same(Drafter):
        """Drafts the last token again, and counts what it observes."""

        wants_prefill = True
        seen = 0

        def prefilled(self, start, logits):
            self.seen += 100 * len(logits)

        def propose(self, tokens, budget):
            return Draft.chain([tokens[-1]] * budget)

        def observe(self, step):
            assert int(step.logits[0].argmax()) == step.emitted[0] and step.path == []
            self.seen += 1

    drafter = Same()
    drafts = live.led(drafter, [answer([3, 3, 3, 4])], budget=2)
    assert drafts["accepted"].tolist() == [2, 1, 0] and drafts["drafted"].tolist() == [2, 2, 2]
    assert drafter.seen == 200 + 3


def test_a_prompt_that_was_read_once_is_answered_as_if_it_were_read_again():
    lm = CausalLM(random_model("llama", vocabulary=40, context=400))
    prompt = torch.randint(3, 40, (PREFILL_CHUNK + 9,), generator=torch.manual_seed(0)).tolist()
    plain = live.answered(lm, "a", "qa", prompt, 20, ())
    assert plain.tokens == generate(lm, Drafter(), prompt, 20).tokens[: plain.limit]
    for make in (PromptLookup.transformers, mixture):  # the second reads the prompt's logits
        log = live.answered_with(generate, make(), [plain, plain], 8, ())
        again = [len(generate(lm, drafter, prompt, plain.limit, budget=8).steps) for drafter in [make()] for _ in "ab"]
        assert log["same"].all() and log["passes"].tolist() == again
    with pytest.raises(ValueError, match="prompt"):
        generate(plain.model, Drafter(), prompt[1:], 5)


def test_a_model_after_its_prompt_can_be_copied():
    read = live.AfterPrompt(CausalLM(random_model("llama", vocabulary=40, context=40)), [3, 4])
    assert copy.copy(read).lm is read.lm and copy.copy(read.start())._lm is read


def test_summaries_draw_whole_answers_and_count_nodes():
    parts = [live.led(Drafter(), [answer([3, 4, 5], name) for name in "ab"], 4)]
    table = live.summarised({("none", 4): parts[0]}, ["kind", "budget"], "accepted")
    assert table.to_dict("records") == [
        {"kind": "none", "budget": 4, "nodes": 0.0, "value": 0.0, "low": 0.0, "high": 0.0}
    ]
    rows = pd.DataFrame({"name": ["a", "b"], "x": [1.0, 3.0], "y": [1.0, 1.0]})
    rows.attrs["kind"] = "measured"
    estimate = live.per_answer(rows, "x", over="y")
    assert estimate.value == 2 and estimate.n == 2 and estimate.low <= 1.5 <= 2.5 <= estimate.high


def test_an_edit_s_difference_is_its_value_less_the_shipped_one_over_the_same_answers(capsys):
    """Ratios of sums: 4 of 8 accepted before, 6 of 8 after; an answer that only one version has counts in neither."""
    names = ["a", "b"]
    rows = {"name": [*names, "c"], "accepted": [1, 3, 9], "drafted": [4, 4, 9]}
    before = evidence.born(pd.DataFrame(rows), "measured")
    after = evidence.born(pd.DataFrame({"name": names, "accepted": [2, 4], "drafted": [4, 4]}), "measured")
    assert live.difference(before, after, "accepted", "drafted").value == pytest.approx(0.25)
    assert live.difference(before, after, "accepted").value == pytest.approx(1.0)
    both = {"shipped": {("DIAA",): before[:2]}, "your edit": {("DIAA",): after}}
    table = live.beside(both, ["method"], "accepted", "drafted")
    assert dict(zip(table["version"], table["value"], strict=True)) == {"shipped": 0.5, "your edit": 0.75}
    assert "your edit less shipped, at most: +0.25" in capsys.readouterr().out


def test_every_source_of_a_mixture_has_its_name_and_chance():
    ranks, chances = diaa_live.by_source(mixture(), [answer([3, 4, 3, 4, 3, 4])])
    assert chances.shape == (5, len(diaa_live.SOURCES))
    by_name = {name: part["rank"].tolist() for name, part in ranks.groupby("source")}
    assert set(by_name) == {*diaa_live.SOURCES, "mixture"}
    assert by_name["request: counts"] == [99, 99, 1, 1, 1] and by_name["mixture"][2:] == [1, 1, 1]
    # behind a token the tables know what its logits put first, once it was observed
    assert by_name["logits: last token, newest"][2:] == [1, 1, 1]


def test_a_warm_up_text_is_of_prompts_of_every_task_that_are_not_asked():
    tokenizer = word_tokenizer(" ".join(prompt.text for prompt in prompts.own("validation")))
    text = diaa_live.warm_up_text(tokenizer, 700)
    assert text.shape == (700,) and text.dtype == np.int64
    read = tokenizer.decode(text).split()
    first = [prompt.text.split()[0] for prompt in prompts.own("validation")[::6]]
    assert len(first) == len(prompts.TASKS) and set(first[:3]) <= set(read)


@pytest.mark.parametrize("count", [1, 3])
def test_a_watched_drafter_keeps_its_steps(count):
    watched = live.Watched(Drafter())
    live.led(watched, [answer([3, 4])] * count, 4)
    assert [step.root for step in watched.steps] == [3] * count


def always(token, context=40):
    """A model that says one token after anything."""
    model = random_model("gpt2", vocabulary=40, context=context)
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.wte.weight[token] = 1.0
    return CausalLM(model)


def test_an_answer_that_ends_or_repeats_at_once_is_decoded_on_and_says_so():
    ends, repeats = (live.answered(always(7), "a", "qa", [3, 4], 20, {eos}) for eos in (7, 2))
    assert ends.tokens == repeats.tokens == [7] * 20 and len(ends.logits) == 20 and ends.seconds > 0
    assert (ends.remarks, repeats.remarks) == ([live.ENDS, live.REPEATS], [live.REPEATS])
    log = live.answered_with(generate, PromptLookup.transformers(), [ends, repeats], 4, {7})
    assert log["same"].tolist() == [True, False]  # the second one's end is not 7
    assert live.remarks([ends, repeats])[0].startswith("1 of 2 answers") and live.remarks([]) == []


def test_a_prompt_longer_than_the_context_is_cut_to_its_end():
    lm = CausalLM(random_model("llama", vocabulary=40, context=16))
    cut = live.answered(lm, "a", "qa", list(range(3, 33)), 4, ())
    assert list(cut.prompt) == list(range(3, 33))[-12:] and live.CUT in cut.remarks and cut.limit >= 2
