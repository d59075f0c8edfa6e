"""What the library needs of an operating system: on macOS it imports and decodes, and Windows it refuses in a sentence.

Linux alone is tested whole. Here a Linux process is told that it is another one, and loses what only Linux has.
"""

import subprocess
import sys

MACOS = """
import importlib, os, pkgutil, sys

PACKAGES = ("ondevice", "ondevice_papers", "ondevice_programs", "ondevice_studies", "ondevice_training")


def load_all():
    for package in PACKAGES:
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.endswith(("__main__", "custom_generate.generate")):
                importlib.import_module(module.name)


load_all()  # with what other people's packages load, which look at the platform as well
for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
    del sys.modules[name]
for name in ("posix_fadvise", "sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open"):
    if hasattr(os, name):
        delattr(os, name)
sys.platform = "darwin"
load_all()

from ondevice import models
from ondevice.causal_lm.lean import engine
from ondevice.speculation import Drafter, generate
from ondevice.speculation.bundled import mixture

loaded = models.load(models.SMOLLM2)
lm = engine(loaded, threads=1)
ids = loaded.tokenizer("def mean(values):").input_ids
plain, drafted = (generate(lm, drafter, ids, 12, budget=8).tokens for drafter in (Drafter(), mixture()))
assert list(plain) == list(drafted) and len(plain) > 1
print("the same tokens")
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=280)


def test_without_what_only_linux_has_all_modules_import_and_the_library_decodes():
    done = run(MACOS)
    assert done.stdout.splitlines()[-1:] == ["the same tokens"], done.stderr[-2000:]


def test_windows_is_refused_in_a_sentence():
    done = run("import sys; sys.platform = 'win32'; import ondevice")
    assert done.returncode and done.stderr.splitlines()[-1] == (
        "ImportError: ondevice runs on Linux and macOS; on Windows it runs in the Windows Subsystem for Linux (WSL 2)."
    )
