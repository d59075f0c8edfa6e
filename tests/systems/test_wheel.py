"""The wheel, installed outside the checkout: models, reranker and drafters work in any folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from ondevice.assets import ROOT

pytestmark = pytest.mark.timeout(1800)  # it builds 80 MB
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
DOCUMENTS = ["The mean is the sum divided by the count.", "A file is opened with open.", "Sockets connect two hosts."]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel of this checkout, beside the packages of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", *folder.glob("*.whl")], check=True)
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    # Searched last, and without its own .pth files: the editable install of the checkout is not among them.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


PROGRAM = f"""
import json
import ondevice
from ondevice import assets, models
from ondevice_programs.reranker import Reranker
from ondevice.speculation.custom_generate import speculative
from ondevice.speculation.prompt_lookup import PromptLookup
from transformers import AutoModelForCausalLM, AutoTokenizer

asked = dict(max_new_tokens=16, do_sample=False)
prompt = "def mean(values)\\n\\nReturn the mean of the values."
lm, folder = models.load("pydocs-lm-small"), assets.data("models", "pydocs-lm-small")
ids = lm.tokenizer(prompt, return_tensors="pt")
plain = lm.model.generate(**ids, **asked)
drafted = lm.model.generate(**ids, **asked, custom_generate=speculative(PromptLookup.transformers()))
ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
alone = AutoModelForCausalLM.from_pretrained(folder).generate(**ids, **asked)
with Reranker("minilm-reranker", memory_budget=150) as reranker:
    ranked = [row["corpus_id"] for row in reranker.rank("How do I open a file?", {DOCUMENTS!r})]
assert plain.tolist() == drafted.tolist() == alone.tolist()  # ours, and transformers on the folder by itself
assert ranked[0] == 1 and len(models.bundled()) == 5
assert len(assets.paper_list("claims", "disco")) and len(assets.derived_trace("arrivals"))
print(json.dumps([ondevice.__file__, str(folder)]))
"""


def test_bundled_models_generate_and_rank(python, tmp_path):
    (tmp_path / "work").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ONDEVICE", "PYTHON"))}
    own = dict.fromkeys(("XDG_CACHE_HOME", "XDG_STATE_HOME"), str(tmp_path / "caches"))
    environment = kept | own | {"HF_HUB_OFFLINE": "1"}
    made = subprocess.run(
        [python, "-c", PROGRAM], cwd=tmp_path / "work", env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    assert all(path.startswith(str(python.parents[1])) for path in json.loads(made.stdout))
    assert list((tmp_path / "caches" / "ondevice" / "grating").iterdir())
    assert not list((tmp_path / "work").iterdir())


def test_every_command_is_installed(python):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert [name for name in scripts if not (python.parent / name).is_file()] == []
