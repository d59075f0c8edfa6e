"""What a notebook prints when some of its text is changed: the breaks on purpose are made in a copy.

    true = printed(notebook, "loop-shown", tmp_path)
    wrong = printed(notebook, "loop-shown", tmp_path, {"loop": ("accepted + 1", "accepted")})
    assert changed(true, wrong)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from ondevice.run.parameters import THREAD_VARIABLES


def printed(
    notebook: Path,
    until: str,
    scratch: Path,
    edits: Mapping[str, tuple[str, str]] | None = None,
    parameters: Mapping[str, object] | None = None,
    timeout: float = 900,
) -> dict[str, str]:
    """The printed text of each code cell up to the cell with the id `until`, by id; an error is printed text, too.

    edits: by cell id, what stands there once, and what stands there instead; the notebook itself is not touched.
    parameters: values in place of the notebook's. scratch: gets the exhibits.
    """
    contents = nbformat.read(notebook, as_version=4)
    contents.cells = contents.cells[: 1 + [cell.id for cell in contents.cells].index(until)]
    cells = {cell.id: cell for cell in contents.cells if cell.cell_type == "code"}
    for cell in cells.values():
        cell.outputs = []
    for name, (old, new) in (edits or {}).items():
        if cells[name].source.count(old) != 1:
            raise ValueError(f"{name} does not hold {old!r} once.")
        cells[name].source = cells[name].source.replace(old, new)
    if parameters:
        tagged = next(cell for cell in cells.values() if "parameters" in cell.metadata.get("tags", []))
        tagged.source += "".join(f"\n{name} = {value!r}" for name, value in parameters.items())
    variables = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    variables |= {"ONDEVICE_FIGURES": str(scratch / "figures"), "TQDM_DISABLE": "1"}
    variables |= dict.fromkeys(THREAD_VARIABLES, "1")
    client = NotebookClient(
        contents, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(notebook.parent)}},
        allow_errors=True, on_cell_executed=_stop_at_an_error,
    )  # fmt: skip
    with contextlib.suppress(_Failed):
        client.execute(env=variables)
    return {name: "".join(_text(output) for output in cell.outputs) for name, cell in cells.items()}


def changed(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """The ids of the cells that print something else."""
    return [name for name in first if first[name] != second.get(name)]


class _Failed(Exception):
    pass


def _stop_at_an_error(cell, cell_index, execute_reply) -> None:
    if execute_reply["content"]["status"] == "error":
        raise _Failed


def _text(output) -> str:
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}\n"
    return output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")
