"""What notebooks need in the user's cache, built once: `python -m ondevice_studies.prepare`.

The corpus of installed packages: the step says what it builds and how long it took. Of several processes one builds and
the others wait; an interrupted build goes on where it was.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

from filelock import FileLock
from tqdm import tqdm

from ondevice import assets, commands, corpus
from ondevice.corpus import reading, store


def documents() -> None:
    """The corpus, whose packages two processes read."""
    packages = reading.versions()
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        read = pool.map(store.kept, packages, packages.values())
        list(tqdm(read, total=len(packages), desc="reading docstrings", unit="package", leave=False))
    corpus.manifest()


STEPS: dict[str, Callable[[], object]] = {
    "the documentation corpus (two minutes)": documents,
}


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0, or 2 where the cache cannot be written."""
    commands.Parser(
        "prepare", example="python -m ondevice_studies.prepare", description="Build what notebooks need in the cache."
    ).parse_args(arguments)
    with commands.refusing("prepare"), FileLock(assets.cache_folder("corpus") / "prepare.lock"):
        for step, build in STEPS.items():
            print(f"== {step}", end=" ", file=sys.stderr, flush=True)
            began = time.perf_counter()
            build()
            print(f"{time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
