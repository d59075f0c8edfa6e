"""The reranker's memory as the system sees it: 10,000 candidates within a budget, and little more than for 2,000."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, BertForSequenceClassification, PreTrainedTokenizerFast

WORDS, WIDTH, LAYERS, TOKENS = 300, 128, 2, 12  # tokens of a row: query of two, document of seven, three marks
MB, BUDGET = 1_000_000, 34

CHILD = """
import json, random, sys
import torch
torch.set_num_threads(1)
from transformers import AutoConfig, AutoTokenizer
from transformers.models.bert.modeling_bert import BertForSequenceClassification
from ondevice.grating import budget, reranker

folder, states, megabytes, count = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
drawn = random.Random(3)
texts = [" ".join(f"w{drawn.randrange(297)}" for _ in range(7)) for _ in range(count)]
AutoTokenizer.from_pretrained(folder)
torch.randn(64, 64) @ torch.randn(64, 64)
budget.give_back()
print("ready", flush=True)
sys.stdin.readline()
with reranker.Reranker(folder, megabytes, folder=reranker.Path(states)) as ranker:
    found = ranker.rank("w297 w298", texts, 10, return_documents=True)
    plan = ranker.report.plan
    told = {"found": found, "offload": plan.offload, "index": plan.parts["index"], "total": plan.total}
    print(json.dumps(told), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config: Any = AutoConfig.for_model(
        "bert", vocab_size=WORDS + 4, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, max_position_embeddings=64, num_labels=1, initializer_range=0.3,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    model.save_pretrained(folder)
    entries = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", *(f"w{n}" for n in range(WORDS))]
    made = Tokenizer(WordLevel({entry: index for index, entry in enumerate(entries)}, "[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 1), ("[SEP]", 2)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="[CLS]", pad_token="[PAD]", sep_token="[SEP]", unk_token="[UNK]",
        model_max_length=64,
    ).save_pretrained(folder)  # fmt: skip
    return folder


def anonymous(process: int) -> int:
    """Bytes of a process's memory that no file backs."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def ranked(folder: Path, states: Path, count: int) -> tuple[dict[str, Any], int]:
    """What a child process tells, and the growth of its memory while it ranks, seen from outside."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CHILD, str(folder), str(states), str(BUDGET), str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        before = most = anonymous(child.pid)
        child.stdin.write(b"\n")
        child.stdin.flush()
        os.set_blocking(child.stdout.fileno(), False)
        told = b""
        while not told.endswith(b"\n"):
            most = max(most, anonymous(child.pid))
            told += child.stdout.read() or b""
            assert child.poll() is None, told
            time.sleep(0.003)
        child.stdin.write(b"\n")
        child.stdin.flush()
    return json.loads(told), most - before


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from /proc")
def test_ten_thousand_candidates_take_their_index_and_no_more(folder: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as both:
        results = both.map(lambda count: ranked(folder, tmp_path, count), (2_000, 10_000))
    (few, growth_of_few), (many, growth_of_many) = results
    for told, growth in ((few, growth_of_few), (many, growth_of_many)):
        assert told["offload"] and growth <= told["total"] <= BUDGET * MB
    index, states = many["index"] - few["index"], 8_000 * TOKENS * WIDTH * 4
    assert index < states / 4  # so that keeping hidden states would show
    assert growth_of_many - growth_of_few < index + 2 * MB, (growth_of_few, growth_of_many)
    assert list(tmp_path.iterdir()) == []
    best = [one["text"] for one in many["found"]]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with torch.no_grad():
        batch = tokenizer(["w297 w298"] * 10, best, return_tensors="pt")
        right = BertForSequenceClassification.from_pretrained(folder).eval()(**batch).logits[:, 0].sigmoid().tolist()
    assert batch["input_ids"].shape == (10, TOKENS)
    assert [one["score"] for one in many["found"]] == pytest.approx(right, abs=1e-5)
    assert (np.diff(right) <= 1e-6).all() and right[0] > right[9]
