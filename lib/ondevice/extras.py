"""One sentence about a package that is not installed: which extra of `ondevice` brings it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needing(extra: str, who: str) -> Iterator[None]:
    """Around imports: where one fails, ModuleNotFoundError says which extra `who`, a command, module or class, needs.

    The repository's own modules are no extra's matter, and a sentence that was raised further in stays as it is.
    """
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.startswith("ondevice"):
            raise
        wanted = f'"ondevice[{extra}]"'
        raise ModuleNotFoundError(f"{who} needs {wanted}: pip install {wanted} ({error}).") from error
