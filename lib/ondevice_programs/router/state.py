"""The file that outlives the router: what its dispatcher learned and what each deployment has cost. No text."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

from ondevice import assets
from ondevice_programs.router.config import Config

VERSION = 1


def path_of(config: Config) -> Path:
    """The configured file, else one in the user's state folder for these deployments."""
    if config.router_settings.state is not None:
        return config.router_settings.state.expanduser()
    fleet = sorted((it.model_info.side, it.address) for it in config.model_list)
    key = hashlib.sha256(json.dumps([config.router_settings.constrained, fleet]).encode()).hexdigest()[:12]
    return platformdirs.user_state_path("ondevice") / f"disco-{key}.json"


def read(path: Path) -> dict[str, Any]:
    """What was saved; empty if nothing was. Raises ValueError for a file that is none of this version's."""
    if not path.exists():
        _check_writable(path.parent)
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        whole = isinstance(found["dispatcher"], dict) and all(x >= 0 for x in found["spent"].values())
        if found["version"] == VERSION and whole:
            return found
        said = f"is a state of version {found['version']} or damaged, and this router writes {VERSION}"
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        said = "is no router's state, or only a part of one"
    raise ValueError(f"{path} {said}; move it away to begin anew.")


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"No state can be kept in {folder}: {error.strerror}.") from None


def write(path: Path, dispatcher: dict[str, Any], spent: dict[str, float]) -> None:
    """Whole or not at all."""
    assets.write_text(path, json.dumps({"version": VERSION, "dispatcher": dispatcher, "spent": spent}))
