"""A file of settings in YAML, read without guessing: a key that stands twice is refused, and not the last one taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class _Twice(ValueError):
    """A key that stands twice in a mapping; the message says where."""


class _Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """PyYAML's, before merges: what a mapping merges may have its keys, too."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value)), key.start_mark.line + 1
            if name in lines:
                raise _Twice(f"has the key {key.value!r} twice, in lines {lines[name]} and {line}")
            lines[name] = line
        return node


def mapping(path: Path, shown: str = "") -> dict[str, Any]:
    """The mapping of a file. shown: how messages name the file.

    Raises ValueError, with one sentence, for a file that is no UTF-8, no YAML or no mapping, or has a key twice.
    """
    shown = shown or str(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except _Twice as error:
        raise ValueError(f"{shown} {error}.") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{shown} is not YAML: {' '.join(str(error).split())}.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{shown} holds no mapping of names to values.")
    return values
