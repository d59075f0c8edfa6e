"""How a model reads passage and question, and which two sides have the same model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from tiny import random_model
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from ondevice import chat, shapes
from ondevice.causal_lm import CausalLM
from ondevice.retrieval import SparseIndex
from ondevice_papers.dragon.messages import Hello, check_peer, encode, hello
from ondevice_programs.pair import __main__ as command
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.guard import LENGTH
from ondevice_programs.pair.node import MESSAGE, PLAIN, Documents, Node, template_of

TEXTS = ["a bird sings", "a fish swims"]
CHAT = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} [end]{% endfor %}[answer] "


def tokenizer(template: str | None = None) -> PreTrainedTokenizerBase:
    made = shapes.byte_tokenizer()
    made.chat_template = template
    return made


def test_a_prompt_is_what_the_chat_template_makes_of_passage_and_question():
    ours = tokenizer(CHAT)
    made = template_of(ours)
    shown = MESSAGE.format(document=TEXTS[0], query="Who sings?")
    assert made.prefix(ours, TEXTS[0]) + made.suffix(ours, "Who sings?") == chat.prompt_ids(ours, shown)
    assert chat.prompt_text(ours, shown) == f"[user] {shown} [end][answer] "


def test_the_begin_token_of_a_chat_template_stands_once():
    ours = tokenizer("<s>" + CHAT)
    ours.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    assert ours("a").input_ids[0] == ours.bos_token_id  # it puts one before every text
    made = template_of(ours)
    ids = made.prefix(ours, TEXTS[0]) + made.suffix(ours, "?")
    assert ids.count(ours.bos_token_id) == 1


def test_a_model_without_a_chat_template_reads_plain_text():
    assert template_of(tokenizer()) == PLAIN
    with pytest.raises(ValueError, match="no chat template"):
        chat.prompt_text(tokenizer(), "Who sings?")


def test_a_chat_template_that_does_not_show_a_message_is_refused():
    with pytest.raises(ValueError, match="document"):
        template_of(tokenizer("{% for m in messages %}[{{ m['role'] }}]{% endfor %}"))


# The same model


def lm(seed: int = 0) -> CausalLM:
    return CausalLM(random_model("llama", torch.float32, vocabulary=300, context=64, seed=seed))


def greeting(name: str, of: CausalLM, template: str | None = CHAT) -> Hello:
    return Node(of, tokenizer(template), Documents(TEXTS, SparseIndex.build(TEXTS)), name=name).hello


def test_a_model_is_known_by_its_weights_and_template_whatever_its_path(tmp_path: Path):
    long = str(tmp_path / "/".join(["a-folder-of-models"] * 9) / "mine") + "/"
    here, there = greeting(long, lm()), greeting("somewhere/else", lm())
    check_peer(here, there)
    assert hello(encode(here)) == here and here.name == "mine" and str(tmp_path) not in str(here)
    for other, named in ((greeting(long, lm(1)), "weights"), (greeting(long, lm(), CHAT + "so "), "templates")):
        with pytest.raises(ValueError, match=named):
            check_peer(here, other)


def test_a_greeting_of_the_version_before_is_told_by_its_version():
    """It has neither a template nor a relevance."""
    before = msgspec.structs.replace(greeting("a", lm()), version=4)
    body = msgspec.msgpack.encode(msgspec.structs.astuple(before)[:5])
    assert hello(msgspec.msgpack.encode(["hello", *msgspec.msgpack.decode(body)])).version == 4


def test_a_question_longer_than_the_context_is_refused_before_any_work():
    node = Node(lm(), tokenizer(), Documents(TEXTS, SparseIndex.build(TEXTS)), Template("{document}{query}"))
    node.require_room("?" * 54, 10)
    with pytest.raises(ValueError, match="55"):
        node.require_room("?" * 55, 10)


def test_an_answer_ends_at_every_end_token_of_the_model():
    of = lm()
    of.model.config.eos_token_id, of.model.generation_config.eos_token_id = [2, 7], [8]
    node = Node(of, tokenizer(), Documents(TEXTS, SparseIndex.build(TEXTS)), Template("{document}{query}"))
    assert node.ends == {2, 7, 8}
    for end in node.ends:
        decoder, _ = node.decoder("a bird", 1)
        decoder.commit(end)
        assert decoder.ended


def test_the_device_is_guarded_where_nothing_is_said():
    assert command._parser().parse_args(["device"]).guard == LENGTH >= 2
