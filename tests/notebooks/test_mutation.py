"""The check of stored outputs can fail: one changed digit makes nbval reject a notebook."""

import re

import nbformat

from ondevice.run import Layout

DIGIT = re.compile(r"\d")


def is_checked(cell) -> bool:
    return "nbval-check-output" in cell.metadata.get("tags", [])


def cut_after_first_check(notebook):
    """The notebook up to its first checked cell that stores a digit, and that cell; the rest would only take time."""
    for index, cell in enumerate(notebook.cells):
        if is_checked(cell) and any(DIGIT.search(text) for _, _, text in texts(cell)):
            notebook.cells = notebook.cells[: index + 1]
            return cell
    raise AssertionError("no nbval-check-output cell stores a number")


def texts(cell):
    """The stored texts of a cell with the places that hold them."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output, "text", output.text
        elif "text/plain" in output.get("data", {}):
            yield output.data, "text/plain", output.data["text/plain"]


def change_one_digit(cell) -> None:
    for holder, key, text in texts(cell):
        if match := DIGIT.search(text):
            other = str((int(match.group()) + 1) % 10)
            holder[key] = text[: match.start()] + other + text[match.end() :]
            return


def unchanged_and_changed(notebook, nbval, folder):
    """nbval's word on the cut notebook as it is, and with one stored digit changed."""
    contents = nbformat.read(notebook, as_version=4)
    cell = cut_after_first_check(contents)
    results = []
    for name in ("unchanged", "changed"):
        if name == "changed":
            change_one_digit(cell)
        nbformat.write(contents, folder / f"{name}.ipynb")
        results.append(nbval(folder / f"{name}.ipynb"))
    return results


def test_one_changed_digit_is_noticed(nbval, tmp_path):
    """In the notebook that comes to a compared cell soonest."""
    unchanged, changed = unchanged_and_changed(Layout().notebook("dragon"), nbval, tmp_path)
    assert unchanged.failed == 0 and unchanged.passed > 0, unchanged.output
    assert changed.failed == 1 and "mismatch" in changed.output, changed.output


def test_the_check_itself_on_a_small_notebook(nbval, tmp_path):
    cell = nbformat.v4.new_code_cell(
        "print(6 * 7)",
        id="product",
        execution_count=1,
        metadata={"tags": ["nbval-check-output"]},
        outputs=[nbformat.v4.new_output("stream", text="42\n")],
    )
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"kernelspec": kernel})
    nbformat.write(notebook, tmp_path / "small.ipynb")
    unchanged, changed = unchanged_and_changed(tmp_path / "small.ipynb", nbval, tmp_path)
    assert (unchanged.passed, unchanged.failed) == (1, 0)
    assert (changed.passed, changed.failed) == (0, 1)
    cell.source = "raise SystemExit"
    nbformat.write(notebook, tmp_path / "small.ipynb")
    assert nbval(tmp_path / "small.ipynb").failed == 1
