"""The file that outlives the router: what its dispatcher learned, under which budget, and all costs. No text."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import platformdirs

from ondevice import assets
from ondevice_programs.router.config import Config

VERSION = 1


def path_of(config: Config) -> Path | None:
    """The file for these endpoints, in the configured or the user's state folder; None where none is kept."""
    named = config.router_settings.state
    if named == "none":
        return None
    addresses = sorted((entry.side, entry.address) for entry in config.model_list)
    key = hashlib.sha256(json.dumps([config.router_settings.constrained, addresses]).encode()).hexdigest()[:12]
    folder = platformdirs.user_state_path("ondevice") if named is None else named.expanduser()
    return folder / f"disco-{key}.json"


def lock(path: Path) -> TextIO:
    """Keep other routers from a state while the file that is returned is open. Raises ValueError where one has it."""
    import fcntl  # not on Windows

    opened = path.with_suffix(".lock").open("w", encoding="utf-8")
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        opened.close()
        raise ValueError(f"Another router keeps {path}: stop it, or name another folder with --state.") from None
    return opened


def read(path: Path) -> dict[str, Any]:
    """What was saved; empty if nothing was. Raises ValueError for a file that is none of this version's."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()
            return {}
        saved = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(saved["dispatcher"], dict) and all(money >= 0 for money in saved["spent"].values())
        if whole and saved["version"] == VERSION:
            return saved
    except OSError as error:
        raise ValueError(f"No state can be kept in {path.parent}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise ValueError(f"{path} is damaged, or no state of version {VERSION} of a router; move it away to begin anew.")


def write(path: Path, saved: Mapping[str, Any]) -> None:
    """Whole or not at all. saved: `dispatcher`, its state; `budget`; `spent` and `renewed_at` of each endpoint."""
    assets.write_text(path, json.dumps({"version": VERSION} | dict(saved)))
