"""Models as drafters, and transformers' custom_generate: all say what greedy says."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from queue import Queue
from threading import Thread

import pytest
import torch
import transformers
from tiny import loaded_model, random_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, StaticCache

from ondevice import assets, models
from ondevice.causal_lm import CausalLM, lean
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Draft, Drafter, generate
from ondevice.speculation.bundled import mixture
from ondevice.speculation.custom_generate import FOLDER, speculative, wrapped
from ondevice.speculation.drafter import Verified
from ondevice.speculation.layer_skipping import LayerSkipping, odd_layers, skipped, sublayers
from ondevice.speculation.small_model import SmallModel
from ondevice.speculation.token_recycling import TokenRecycling

VOCABULARY = 40
PROMPT = [1, 2, 3, 4, 5, 6]


def tiny(kind: str = "llama", layers: int = 4, seed: int = 1, **values):
    """A model that repeats tokens now and then, and ends no answer."""
    sizes = {"vocabulary": VOCABULARY, "context": 128, "num_hidden_layers": layers, "eos_token_id": None}
    return random_model(kind, **sizes, seed=seed, **values).eval()


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return CausalLM(tiny())


# A small model


def test_the_target_as_its_own_drafter_is_accepted_whole(lm):
    found = generate(lm, SmallModel(lm), PROMPT, 37)
    assert all(step.accepted == step.drafted for step in found.steps)
    assert len(found.steps) == 6  # 36 tokens after the first, 5 + 1 a step


def test_the_small_model_runs_only_what_is_new():
    small = CausalLM(tiny(layers=1, seed=1))
    drafter, lengths, forward = SmallModel(small, 3), [], small.forward
    small.forward = lambda tokens, *args, **kwargs: lengths.append(len(tokens)) or forward(tokens, *args, **kwargs)
    drafter.begin(PROMPT)
    first = drafter.propose([*PROMPT, 7], 64).tokens.tolist()
    drafter.propose([*PROMPT, 7, *first, 8], 64)  # accepted whole
    drafter.propose([*PROMPT, 7, *first, 8, 9], 64)  # rejected
    assert lengths == [6, 1, 1, 1, 2, 1, 1, 1, 1, 1]
    assert int(small.start().prefill([*PROMPT, 7]).argmax()) == first[0]


def test_the_heuristic_schedule():
    drafter = SmallModel(CausalLM(tiny(layers=1, seed=1)), tokens=2, heuristic=True)
    logits = torch.zeros(1, 1)
    seen = []
    for path in ([0, 1], [0], [], [], [], []):
        drafter.observe(Verified(0, Draft.chain([1, 2]), logits, path, [1]))
        seen.append(drafter.tokens)
    drafter.observe(Verified(0, Draft.chain([]), logits, [], [1]))
    assert [*seen, drafter.tokens] == [4, 3, 2, 1, 1, 1, 1]


# Skipped layers


def test_skipping_leaves_the_model_as_it_was(lm):
    ids = torch.tensor([PROMPT])
    before = lm.model(input_ids=ids).logits
    parts = sublayers(lm)
    with skipped(parts):
        inside = lm.model(input_ids=ids).logits
    last = lm.model.model.layers[-1].mlp

    def fails(*args):
        raise RuntimeError("boom")

    drafter = LayerSkipping(lm)
    drafter.begin(PROMPT)
    last.forward = fails
    with pytest.raises(RuntimeError, match="boom"):
        drafter.propose([*PROMPT, 7], 5)
    del last.forward
    assert torch.equal(lm.model(input_ids=ids).logits, before) and not torch.allclose(inside, before)
    assert not any("forward" in module.__dict__ for module, _ in parts)


def test_a_model_without_its_inner_layers_is_a_shorter_one(lm):
    short = tiny(layers=2)
    for mine, own in zip(short.model.layers, (lm.model.model.layers[0], lm.model.model.layers[-1]), strict=True):
        mine.load_state_dict(own.state_dict())
    short.model.embed_tokens.load_state_dict(lm.model.model.embed_tokens.state_dict())
    short.model.norm.load_state_dict(lm.model.model.norm.state_dict())
    short.lm_head.load_state_dict(lm.model.lm_head.state_dict())
    ids = torch.tensor([PROMPT])
    with skipped(sublayers(lm)):
        inside = lm.model(input_ids=ids).logits
    assert torch.allclose(inside, short(input_ids=ids).logits)


def test_every_odd_layer_but_the_last_is_left_out(lm):
    assert odd_layers(12) == [0, 1, 4, 5, 8, 9]  # of layers 1 to 6 in 8: 1, 3 and 5
    assert odd_layers(2) == [0, 1]
    layers = list(lm.model.model.layers)  # four, of which 1 and 2 may be skipped
    drafter = LayerSkipping(lm, 0.0)
    drafter.begin(PROMPT)
    called = []
    handles = [
        part.register_forward_hook(lambda *_, index=index: called.append(index))
        for index, layer in enumerate(layers)
        for part in (layer.input_layernorm, layer.self_attn.q_proj, layer.mlp.up_proj)
    ]
    drafter.propose([*PROMPT, 7], 1)
    for handle in handles:
        handle.remove()
    assert called == [0, 0, 0, 1, 2, 2, 2, 3, 3, 3]  # of layer 1 its norms alone


# custom_generate


class Echo(Drafter):
    """Repeats the last token: right now and then."""

    def propose(self, tokens, budget):
        return Draft.chain([tokens[-1]] * 3)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_custom_generate_says_what_generate_says(kind):
    model, ids = tiny(kind), torch.tensor([PROMPT])
    plain = model.generate(ids, max_new_tokens=30, do_sample=False)
    output = plain[0, 6:].tolist()
    late = max(set(output), key=output.index)  # ends where it first comes
    fast, logs = speculative(Echo(), report=lambda found: logs.append(found)), []
    for options in (
        {"max_new_tokens": 30},
        {"max_new_tokens": 1},
        {"max_length": 17},
        {"max_new_tokens": 30, "eos_token_id": late},
        {"max_new_tokens": 30, "eos_token_id": [late, output[4]]},
        {"max_new_tokens": 5, "attention_mask": torch.ones_like(ids)},
    ):
        right = model.generate(ids, do_sample=False, **options)
        assert torch.equal(model.generate(ids, do_sample=False, custom_generate=fast, **options), right)
    assert len(logs) == 6 and logs[3].ended and not logs[0].ended
    model.generation_config.eos_token_id = [late, 39]
    right = model.generate(ids, do_sample=False, max_new_tokens=30)
    assert torch.equal(model.generate(ids, do_sample=False, max_new_tokens=30, custom_generate=fast), right)
    assert wrapped(model) is wrapped(model)


class NotTwice(transformers.LogitsProcessor):
    """Forbids the last token of the text, and past 20 tokens whatever is even."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids[0, -1]] = -torch.inf
        if input_ids.shape[1] > 20:
            scores[:, ::2] = -torch.inf
        return scores


class Streamed(transformers.generation.streamers.BaseStreamer):
    """Notes what comes: the prompt [1, n], each token [1], and None at the end."""

    def __init__(self):
        self.parts = []

    def put(self, value):
        self.parts.append(value.tolist())

    def end(self):
        self.parts.append(None)


def after(*last: int):
    """A criterion: the text ends with these tokens."""
    return lambda ids, scores: torch.tensor([ids[0, -len(last) :].tolist() == list(last)])


ANSWER = tiny().generate(torch.tensor([PROMPT]), max_new_tokens=30, do_sample=False)[0, 6:].tolist()
AS_GENERATE = {
    "a penalty": {"repetition_penalty": 1.7},
    "no n-gram twice": {"no_repeat_ngram_size": 2},
    "a processor of one's own": {"logits_processor": transformers.LogitsProcessorList([NotTwice()])},
    "allowed tokens": {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids[-1]) + 1) % 40, (int(ids[-1]) + 2) % 40]},
    "at least": {"eos_token_id": ANSWER[2], "min_new_tokens": 9},
    "draws": {"do_sample": True},
    "draws of a penalty": {"do_sample": True, "min_p": 0.02, "typical_p": 0.9, "repetition_penalty": 1.3},
    "a criterion": {"stopping_criteria": transformers.StoppingCriteriaList([after(*ANSWER[5:7])])},
    "a criterion that says yes or no": {"stopping_criteria": [lambda ids, scores, **_: ids.shape[1] >= 20]},
    "a static cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("options", AS_GENERATE.values(), ids=AS_GENERATE)
@pytest.mark.parametrize("door", ["callable", "folder"])
def test_processors_criteria_and_draws_are_those_of_generate(options, door):
    model, streamer, logs = tiny(), Streamed(), []
    options = {"inputs": torch.tensor([PROMPT]), "max_new_tokens": 30, "do_sample": False, **options}
    torch.manual_seed(5)
    right = model.generate(**options)
    torch.manual_seed(5)
    if door == "callable":
        found = model.generate(custom_generate=speculative(Echo(), 64, logs.append, streamer), **options)
    else:
        found = model.generate(custom_generate=FOLDER, trust_remote_code=True, drafter=Echo(), report=logs.append,
                               streamer=streamer, **options)  # fmt: skip
    assert torch.equal(found, right)
    assert sum(step.drafted for step in logs[0].steps) > 2
    assert streamer.parts == [[PROMPT], *([token] for token in right[0, 6:].tolist()), None]


# Streamers


def test_streamers_of_both_get_each_token_once():
    model, ids = tiny(), torch.tensor([PROMPT])
    streamed = [[PROMPT], *([token] for token in ANSWER[:9]), None]
    arguments = {"max_new_tokens": 9, "do_sample": False}
    own, given = Streamed(), Streamed()
    fast = speculative(Echo(), streamer=own)
    model.generate(ids, streamer=given, custom_generate=fast, **arguments)
    assert own.parts == given.parts == streamed
    own.parts.clear()
    model.generate(ids, streamer=own, custom_generate=fast, **arguments)  # one that is both
    assert own.parts == streamed
    own.parts.clear()
    model.generate(ids, custom_generate=fast, **arguments)  # and none of the last request's
    assert own.parts == given.parts == streamed


@pytest.mark.parametrize(
    "options",
    [
        {"output_scores": True},
        {"max_new_tokens": 200},
        {"logits_processor": [lambda ids, scores: scores - torch.inf]},
    ],
)
def test_a_streamer_of_a_refused_request_ends(options):
    streamer, arguments = Streamed(), {"max_new_tokens": 9, "do_sample": False, **options}
    with pytest.raises(ValueError):
        tiny().generate(torch.tensor([PROMPT]), streamer=streamer, custom_generate=speculative(Echo()), **arguments)
    assert streamer.parts[-1] is None and streamer.parts in ([None], [[PROMPT], None])


def test_requests_in_threads_keep_to_their_own_streamers():
    model, results = tiny(), Queue()
    wrapped(model)

    def run(prompt, streamer):
        model.generate(torch.tensor([prompt]), streamer=streamer, custom_generate=speculative(Echo()),
                       max_new_tokens=9, do_sample=False)  # fmt: skip
        results.put((prompt, streamer.parts))

    threads = [Thread(target=run, args=([start, 7, 8], Streamed()), daemon=True) for start in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for _ in threads:
        prompt, parts = results.get(timeout=20)
        assert parts[0] == [prompt] and parts[-1] is None and len(parts) == 11
        right = model.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)[0, 3:].tolist()
        assert [token for part in parts[1:-1] for token in part] == right


# Models that can verify only chains, or nothing


def test_a_drafter_of_trees_drafts_chains_where_nothing_else_can_be_verified_and_a_warning_says_so_once():
    model, ids, logs = tiny("mistral", sliding_window=8), torch.tensor([PROMPT]), []
    arguments = {"max_new_tokens": 30, "do_sample": False}
    right = model.generate(ids, **arguments)
    fast = speculative(TokenRecycling(VOCABULARY), report=logs.append)
    with pytest.warns(UserWarning, match="Mistral.* TR "):
        assert torch.equal(model.generate(ids, custom_generate=fast, **arguments), right)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(model.generate(ids, custom_generate=fast, **arguments), right)
        chains = speculative(Echo())
        assert torch.equal(model.generate(ids, custom_generate=chains, **arguments), right)
    assert all(step.depth == step.drafted for log in logs for step in log.steps)
    assert sum(step.accepted for step in logs[1].steps) > 0


SHAPE = dict(vocab_size=VOCABULARY, hidden_size=32, num_attention_heads=2, intermediate_size=64)
NO_DECODERS = {
    "t5": (dict(vocab_size=VOCABULARY, d_model=32, decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, d_kv=8,
                d_ff=64, num_layers=2, num_heads=4), "T5ForConditional.* encoder-decoder"),
    "mamba": (dict(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8), "Mamba.* recurrent"),
    "lfm2": (dict(**SHAPE, num_hidden_layers=2, num_key_value_heads=2, layer_types=["conv", "full_attention"]),
             "Lfm2.* conv"),
    "recurrent_gemma": (dict(**SHAPE, num_hidden_layers=3, lru_width=32, attention_window_size=8),
                        "RecurrentGemma.* linear_attention"),
}  # fmt: skip


@pytest.mark.parametrize("kind", NO_DECODERS)
def test_what_a_model_is_that_cannot_be_speculated_on(kind):
    values, message = NO_DECODERS[kind]
    config = AutoConfig.for_model(kind, **values)
    model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config).eval()
    with pytest.raises(ValueError, match=message):
        model.generate(torch.tensor([PROMPT]), max_new_tokens=4, custom_generate=speculative(Drafter()))
    with pytest.raises(ValueError, match=message):
        CausalLM(model)


def said_by(loaded: models.Loaded, ids: torch.Tensor) -> str:
    """A token's text in the middle of what a model says."""
    answer = loaded.model.generate(ids, max_new_tokens=30, do_sample=False)[0, ids.shape[1] + 5 :]
    texts = [loaded.tokenizer.decode([token]) for token in answer.tolist()]
    return next(text for text in texts if text.isprintable() and text.strip() == text and "\ufffd" not in text)


def test_the_folder_finds_stop_strings_wherever_they_are_said_and_takes_no_assistant():
    found = loaded_model()
    ids = found.tokenizer("def open(file):", return_tensors="pt").input_ids
    stop = said_by(found, ids)
    asked = {"inputs": ids, "max_new_tokens": 40, "do_sample": False}
    folder = {"custom_generate": FOLDER, "trust_remote_code": True, "drafter": Echo()}
    ends = {"stop_strings": [stop], "tokenizer": found.tokenizer}
    right = found.model.generate(**asked, **ends)
    assert right.shape[1] < ids.shape[1] + 40
    assert torch.equal(found.model.generate(**asked, **ends, **folder), right)
    said = copy.deepcopy(found.model.generation_config)
    said.stop_strings = [stop]
    given = {"generation_config": said, "tokenizer": found.tokenizer}
    assert torch.equal(found.model.generate(**asked, **given, **folder), right)
    with pytest.raises(ValueError, match="tokenizer"):
        found.model.generate(**asked, stop_strings=[stop], **folder)
    with pytest.raises(ValueError, match="assistant_model"):
        found.model.generate(**asked, assistant_model=found.model, **folder)


def test_the_form_with_stop_strings_in_the_documentation_ends_where_generate_does():
    page = (assets.ROOT / "docs" / "drafters.md").read_text(encoding="utf-8")
    block = page.partition("## Stop strings")[2].partition("```python")[2].partition("```")[0]
    found = loaded_model()
    ids = found.tokenizer("open(file) opens a file", return_tensors="pt").input_ids
    stop = said_by(found, ids)
    names = {"loaded": found, "ids": ids, "mixture": mixture, "engine": engine, "speculative": speculative}
    assert block.count('["."]') == 1
    exec(block.replace('["."]', repr([stop])), names)
    ends = {"stop_strings": [stop], "tokenizer": found.tokenizer}
    right = found.model.generate(ids, max_new_tokens=60, do_sample=False, **ends)
    assert torch.equal(names["stopped"], right) and right.shape[1] < ids.shape[1] + 60
    with pytest.raises(ValueError, match="tokenizer"):  # the form that the page warns of
        found.model.generate(ids, max_new_tokens=60, custom_generate=speculative(mixture()), **ends)


def test_a_copy_of_a_model_has_sessions_of_its_own():
    model, ids = tiny(), torch.tensor([PROMPT])
    asked = {"max_new_tokens": 9, "do_sample": False}
    model.generate(ids, custom_generate=speculative(Echo()), **asked)
    other = copy.copy(model)
    other._modules = {**model._modules, "lm_head": copy.deepcopy(model.lm_head)}
    other.lm_head.weight.data.neg_()
    right = other.generate(ids, **asked)
    assert torch.equal(other.generate(ids, custom_generate=speculative(Echo()), **asked), right)
    assert not torch.equal(model.generate(ids, custom_generate=speculative(Echo()), **asked), right)


def test_a_criterion_that_fires_inside_an_accepted_path_ends_the_output_there():
    model, ids, logs = tiny(), torch.tensor([PROMPT]), []
    right = Told(ANSWER)
    stop = transformers.StoppingCriteriaList([after(*ANSWER[:4])])
    found = model.generate(ids, max_new_tokens=30, stopping_criteria=stop, do_sample=False,
                           custom_generate=speculative(right, report=logs.append))  # fmt: skip
    assert found[0, 6:].tolist() == ANSWER[:4]
    assert logs[0].steps[0].accepted < logs[0].steps[0].drafted and logs[0].ended


class Told(Drafter):
    """Drafts what is right, until it fails in one of its methods."""

    name = "told"
    wants_prefill = True

    def __init__(self, answer, fails=""):
        self.answer, self.fails, self.calls = answer, fails, 0

    def _may_fail(self, method):
        self.calls += 1
        if method == self.fails:
            raise KeyError(method)

    def propose(self, tokens, budget):
        if len(tokens) > 12:
            self._may_fail("propose")
        return Draft.chain(self.answer[len(tokens) - 6 :][:5])

    def prefilled(self, start, logits):
        self._may_fail("prefilled")

    def observe(self, step):
        self._may_fail("observe")

    def end(self, tokens):
        self._may_fail("end")


@pytest.mark.parametrize("method", ["propose", "prefilled", "observe", "end"])
def test_an_answer_goes_on_without_a_drafter_that_fails_and_says_so(method):
    drafter, ids = Told(ANSWER, method), torch.tensor([PROMPT])
    with pytest.warns(UserWarning, match=f"told .*{method}") as warned:
        found = tiny().generate(ids, max_new_tokens=30, do_sample=False, custom_generate=speculative(drafter))
    assert found[0, 6:].tolist() == ANSWER
    assert sum("told" in str(each.message) for each in warned) == 1
    calls = drafter.calls
    drafter.fails = ""
    again = tiny().generate(ids, max_new_tokens=30, do_sample=False, custom_generate=speculative(drafter))
    assert again[0, 6:].tolist() == ANSWER and drafter.calls > calls + 5  # the next request has it back


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": torch.ones(2, 3, dtype=torch.long)}, r"\(2, 3\)"),
        ({"num_beams": 2}, "beam_search"),
        ({"logits_processor": transformers.LogitsProcessorList([lambda ids, scores: scores - torch.inf])},
         "processors"),
        ({"past_key_values": StaticCache(tiny().config, 32)}, "past_key_values"),
        ({"return_dict_in_generate": True}, "return_dict_in_generate"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
        ({"attention_mask": torch.tensor([[0, 1, 1]])}, "attention mask"),
        ({"position_ids": torch.tensor([[4, 5, 6]])}, "position_ids"),
        ({"max_new_tokens": 200}, "max_length"),
    ],
)
def test_what_custom_generate_cannot_do_is_named(lm, options, message):
    options = {"input_ids": torch.tensor([[1, 2, 3]]), "max_new_tokens": 4, "do_sample": False, **options}
    with pytest.raises(ValueError, match=message):
        lm.model.generate(custom_generate=speculative(Drafter()), **options)


def test_an_engine_follows_the_weights_and_its_own_arguments():
    """After new weights, a kept engine would answer with the old ones."""
    model, other = (
        tiny(seed=seed, dtype=torch.float32, hidden_size=64, intermediate_size=96).eval() for seed in range(2)
    )
    ids = torch.tensor([[5, 9, 3]])
    fast = speculative(Drafter(), engine=lean.engine)
    answer = model.generate(ids, max_new_tokens=20, custom_generate=fast)
    model.load_state_dict(other.state_dict())
    changed = model.generate(ids, max_new_tokens=20, custom_generate=fast)
    assert changed.tolist() == other.generate(ids, max_new_tokens=20, do_sample=False).tolist() != answer.tolist()
    narrow, alike = (partial(lean.engine, weights="4bit") for _ in range(2))
    assert wrapped(model, narrow) is wrapped(model, alike) is not wrapped(model, lean.engine)
