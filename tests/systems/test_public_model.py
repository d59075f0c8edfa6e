"""SmolLM2, as it is installed: what is loaded, what it answers, and what it takes in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ondevice import chat, fetched, models
from ondevice.causal_lm import TokenTree, channels
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter, generate

MEGABYTES = 220  # that a process grows by with the model in 4 or 8 bits
# A session's first forward is counted with the engine; what is imported before is not.
GROWTH = """
import sys
import numpy as np
import psutil, torch
torch.set_num_threads(1)
sys.path.append("{tests}")
from tiny import loaded_model
from ondevice import models
from ondevice.causal_lm.lean import engine
models.import_classes()
engine(loaded_model())
before = psutil.Process().memory_full_info().uss
lm = engine(models.load(models.SMOLLM2), weights="{weights}", arithmetic="{arithmetic}")
lm.start().prefill(np.arange(64))
print((psutil.Process().memory_full_info().uss - before) / 1e6)
"""


@pytest.fixture(scope="module")
def loaded() -> models.Loaded:
    return models.load(models.SMOLLM2)


def test_token_ids_are_those_of_the_models_authors(loaded):
    """Where transformers' own reader of GGUF files splits otherwise; `test_llama_cpp` compares 200 texts."""
    for text, ids in ((".\n\n0", [30, 1116, 32]), (" ½ ²", [216, 16738, 216, 19133])):
        assert loaded.tokenizer(text, add_special_tokens=False).input_ids == ids


@pytest.mark.parametrize(
    ("weights", "arithmetic"), [("float32", "float32"), ("4bit", "float32"), ("8bit", "float32"), ("8bit-rows", "int8")]
)
def test_it_answers(loaded, weights, arithmetic):
    ids = chat.prompt_ids(loaded.tokenizer, "What is the capital of France?")
    lm = engine(loaded, weights=weights, arithmetic=arithmetic)
    answer = generate(lm, Drafter(), ids, 20, eos_token_ids=loaded.eos_token_ids)
    assert answer.ended and "Paris" in loaded.tokenizer.decode(answer.tokens)


def test_weights_and_logits_are_those_of_transformers(loaded):
    from transformers import AutoModelForCausalLM

    file = loaded.gguf
    with models.quiet():
        right = AutoModelForCausalLM.from_pretrained(file.path.parent, gguf_file=file.path.name, dtype=torch.float32)
    state = loaded.model.state_dict()
    assert all(torch.equal(state[name], weight) for name, weight in right.state_dict().items())
    ids = chat.prompt_ids(loaded.tokenizer, "Name three rivers.")
    tree = TokenTree([28, 30, 284, 260, 28], [-1, 0, 0, 1, -1])
    session = engine(loaded).start()
    session.prefill(ids)
    logits = session.verify(tree)
    for row in range(len(tree)):
        path = torch.tensor([ids + tree.tokens[tree.path_to(row)].tolist()])
        with torch.inference_mode():
            expected = right(path).logits[0, -1]
        assert float((logits[row] - expected).abs().max() / expected.std()) < 1e-3


@pytest.mark.parametrize(("weights", "arithmetic"), [("4bit", "float32"), ("4bit", "int8"), ("8bit-rows", "int8")])
def test_codes_take_little_memory(loaded, weights, arithmetic):
    if weights == "8bit-rows":
        channels.kept(loaded)  # made once, in another process
    code = GROWTH.format(weights=weights, arithmetic=arithmetic, tests=Path(__file__).parents[1])
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < MEGABYTES


@pytest.mark.parametrize(("spec", "command"), [(models.SMOLLM2, "pip install"), (models.QWEN, "ondevice.data")])
def test_a_missing_package_or_file_is_one_command(monkeypatch, spec, command):
    monkeypatch.setattr(models, "_package_folder", lambda name: None)
    monkeypatch.setattr(fetched, "path", lambda name: None)
    with pytest.raises(FileNotFoundError, match=command):
        models.load(spec)


def test_another_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF and more")
    monkeypatch.setattr(models, "_package_folder", lambda name: tmp_path)
    with pytest.raises(ValueError, match="sha256"):
        models.load(models.SMOLLM2)
