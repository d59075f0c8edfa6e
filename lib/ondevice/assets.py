"""Where every model, corpus and trace comes from, and where results go: the one module that knows paths."""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from ondevice import extras

if TYPE_CHECKING:
    import pandas as pd
    from numpy.typing import NDArray

_LIBRARY = Path(__file__).resolve().parents[1]
_INSTALLED = _LIBRARY / "ondevice_data"  # data/ as a wheel brings it; then there is no checkout
ROOT = Path.cwd() if _INSTALLED.is_dir() else _LIBRARY.parent
LOCAL_DATA_VARIABLE = "ONDEVICE_DATA"
CACHE_VARIABLE = "ONDEVICE_CACHE"
FIGURES_VARIABLE = "ONDEVICE_FIGURES"
RESULT_VARIABLE = "ONDEVICE_RESULT"  # the file that a runner wants a notebook's result record in
# Python 3.11 counts one depth for all threads that parse literals, as NumPy does in a file's header (cpython 106905).
_PARSING = threading.Lock()


def data(*parts: str) -> Path:
    """A file or folder of what travels with the code: below data/ of the checkout, or of an installed wheel."""
    return (_INSTALLED if _INSTALLED.is_dir() else ROOT / "data").joinpath(*parts)


def local_data() -> Path | None:
    """The optional folder of raw inputs: $ONDEVICE_DATA, else a folder shared/data beside the repository, else None.

    Raises FileNotFoundError when the variable names a folder that does not exist.
    """
    named = os.environ.get(LOCAL_DATA_VARIABLE)
    if named:
        folder = Path(named).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(f"{LOCAL_DATA_VARIABLE} names {named!r}, which is not a folder.")
        return folder
    beside = ROOT.parent / "shared" / "data"
    return beside if beside.is_dir() else None


def paper_table(paper: str, stem: str) -> pd.DataFrame:
    """A table of the paper as transcribed in data/paper/<paper>/<stem>.csv (quoted numbers)."""
    return _read("paper", paper, f"{stem}.csv")


def paper_list(stem: str, paper: str) -> pd.DataFrame:
    """The rows of one paper in data/paper/<stem>.csv (claims, exhibits or hyperparameters)."""
    rows = _read("paper", f"{stem}.csv")
    rows = rows[rows["paper"] == paper].reset_index(drop=True)
    if rows.empty:
        raise ValueError(f"data/paper/{stem}.csv has no rows for paper {paper!r}.")
    return rows


def derived_trace(name: str) -> pd.DataFrame:
    """A committed table of quantiles or fits, data/traces/<name>.csv."""
    return _read("traces", f"{name}.csv")


def figures_folder(paper: str) -> Path:
    """Folder of the exhibits that a notebook makes: runs/exhibits/<paper>, or below $ONDEVICE_FIGURES.

    Never figures/<paper>, where the published ones are: `ondevice-run publish` puts them there.
    """
    return Path(os.environ.get(FIGURES_VARIABLE) or ROOT / "runs" / "exhibits") / paper


def cache_folder(name: str) -> Path:
    """A folder below the user's cache folder for this package, or below $ONDEVICE_CACHE; created on first use."""
    folder = Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("ondevice", appauthor=False)) / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"The cache {folder} cannot be made ({error.strerror}): {CACHE_VARIABLE} names one.") from None
    return folder


def stamp(path: Path) -> tuple[int, ...]:
    """What the system changes with a file's content: number, size, and times of content and of change.

    Its name and folder are no part of it. The last time, unlike the other, cannot be set to that of another file.
    """
    status = path.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@contextlib.contextmanager
def writing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a temporary path; on success it replaces `path` in one step, on failure nothing of it is left.

    mode: of the file, less the umask; until it is whole, the temporary file is its owner's alone.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(mode & ~mask)  # mkstemp makes files private; results are as readable as any other file
        temporary.replace(path)
    except OSError as error:
        if error.errno and not error.filename:
            error.filename = str(path)  # a full disk is an error of a handle, which names no file
        raise
    finally:
        temporary.unlink(missing_ok=True)


def array(path: Path, mapped: bool = False) -> NDArray[Any]:
    """The array of a .npy file, safely in many threads. mapped: read from the file when it is used.

    Raises OSError and ValueError, as `numpy.load` does.
    """
    import numpy as np

    with _PARSING:
        return np.load(path, mmap_mode="r" if mapped else None)


def arrays(path: Path) -> dict[str, NDArray[Any]]:
    """All arrays of a .npz file, by name, safely in many threads.

    Raises OSError, ValueError, EOFError or zipfile.BadZipFile where the file is none.
    """
    import numpy as np

    with _PARSING, np.load(path) as kept:
        return dict(kept)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file in one step."""
    with writing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _read(*parts: str) -> pd.DataFrame:
    with extras.needing("notebooks", "A table in data/"):
        import pandas as pd

    path = data(*parts)
    if not path.is_file():
        raise FileNotFoundError(f"data/{'/'.join(parts)} is missing: is this a complete clone of the repository?")
    return pd.read_csv(path)
