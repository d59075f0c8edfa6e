"""`ondevice-bench` as a process: interrupted it keeps what it has measured, and a second run goes on to the end."""

import json
import signal
import subprocess
import sys

import torch
from tiny import random_model
from waiting import wait_for

from ondevice import shapes


def test_an_interrupted_bench_goes_on_where_it_was(tmp_path):
    model = random_model("llama", torch.float32, vocabulary=384, context=128, hidden_size=64, intermediate_size=96)
    model.save_pretrained(tmp_path / "model")
    shapes.byte_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("\n".join(f"Which letter is {letter}?" for letter in "abcdefghijkl"))
    file = tmp_path / "bench.json"
    words = [tmp_path / "model", "--prompts", tmp_path / "prompts.txt", "--json", file, "--threads", "1"]
    words += ["--formats", "4bit", "4bit-int8", "--drafters", "sam", "token-recycling", "--minutes", "0.05"]
    command = [sys.executable, "-m", "ondevice_programs.bench", *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        wait_for(file.exists, 120)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    begun = json.loads(file.read_text())
    assert not begun["complete"] and "Traceback" not in error
    assert "A pass over n rows" in output and str(file) in output
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    whole = json.loads(file.read_text())
    assert whole["complete"] and whole["curves"] == begun["curves"] and whole["measured"]["n"] == 12
    assert "Advice: " in done.stdout and "speculative(" in done.stdout and "Traceback" not in done.stderr
