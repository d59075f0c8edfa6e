"""Part I of the notebooks on models that the test writes: it runs through, and a line says what was done instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import Notebook
from tiny import random_model
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ondevice.run import Layout
from ondevice_studies.speculation import live

pytestmark = [
    pytest.mark.long,
    pytest.mark.usefixtures("exhibits_elsewhere"),
    pytest.mark.filterwarnings("default"),  # that there is no chat template is one
]
TEXT = ["The tide comes in and the tide goes out.", "def open(file): return file.read()", "What is 3 times 14?"]
SHORT: dict[str, dict[str, Any]] = {"diaa": {"each": 1}, "sdnpu": {"each": 1}, "disco": {}}
ANSWERS = {"diaa", "sdnpu"}  # notebooks whose cell `answers` says what was done
KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {  # what a model is, and what the notebooks say of its answers
    "base, 300 entries": ({}, []),
    "ends at once": ({"constant": 0}, [live.ENDS, live.REPEATS]),
    "one token for ever": ({"constant": 70}, [live.REPEATS]),
    "context of 64": ({"context": 64}, [live.CUT]),
    "word pieces": ({"words": True}, []),
}


def byte_pairs() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def word_pieces() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=90, special_tokens=["[UNK]", "[SEP]"]))
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="[SEP]")


def written(folder: Path, constant: int | None = None, context: int = 2048, words: bool = False) -> str:
    """A folder with a random model without a chat template. constant: the token that it says after anything."""
    tokenizer = word_pieces() if words else byte_pairs()
    kind = "llama" if constant is None else "gpt2"
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None, "pad_token_id": None}
    model = random_model(kind, torch.float32, vocabulary=len(tokenizer), context=context, **ends)
    if constant is not None:
        with torch.no_grad():
            model.transformer.ln_f.weight.zero_()
            model.transformer.ln_f.bias.fill_(1.0)
            model.transformer.wte.weight[constant] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def last_of_part_one(paper: str) -> str:
    """The id of its last code cell."""
    last = ""
    for cell in json.loads(Layout().notebook(paper).read_text(encoding="utf-8"))["cells"]:
        if "".join(cell["source"]).startswith("# Part II"):
            return last
        last = cell["id"] if cell["cell_type"] == "code" else last
    raise AssertionError(f"{paper} has no Part II.")


@pytest.mark.parametrize("paper", SHORT)
@pytest.mark.parametrize("kind", KINDS)
def test_part_one_runs_through(tmp_path: Path, paper: str, kind: str) -> None:
    values, remarks = KINDS[kind]
    book = Notebook(paper, SHORT[paper] | {"model": written(tmp_path, **values)})
    book.begin(last_of_part_one(paper))
    if paper in ANSWERS:
        assert [remark in book.said["answers"] for remark in (live.ENDS, live.REPEATS, live.CUT)] == [
            remark in remarks for remark in (live.ENDS, live.REPEATS, live.CUT)
        ]
    if paper == "diaa":
        assert "the same as before: True" in book.said["in-use"]
        assert "the same tokens as plain decoding: True" in book.said["walk-shown"]
