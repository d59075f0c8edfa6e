"""What every committed notebook must be like; each rule is shown to find what it is for."""

import ast
import json
import re
from pathlib import Path

import nbformat
import pandas as pd
import papermill
import pytest

from ondevice.run import SCOREBOARD, Layout, plan
from ondevice.run.parameters import ParameterError, checked, read_parameters
from ondevice.run.sources import names

LAYOUT = Layout()
ASSISTANT = "assistant"  # of all papers, and no paper's
MAX_BYTES = 600_000
MAX_MEDIAN_LINES = 14  # none empty: a display is a function, so that it runs by the library, too, and has a caption
MAX_FUNCTION_LINES = 40  # longer ones are the library's, or cells of their own
FORBIDDEN_TAGS = {"raises-exception", "nbval-raises-exception", "nbval-skip", "injected-parameters"}
ABSOLUTE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|root|Users|work|tmp|usr|opt|var|mnt|private)/|\b[A-Z]:\\\\?Users")
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
LANGUAGE = {
    "codemirror_mode", "file_extension", "mimetype", "name", "nbconvert_exporter", "pygments_lexer", "version",
}  # fmt: skip
READABLE_ID = re.compile(r"(?![0-9a-f]{8}(?:$|-))[a-z][a-z0-9_]*(-[a-z0-9_]+)*")  # nbformat's own ids: 8 random digits


def problems(path: Path) -> list[str]:
    """Everything that is wrong with a notebook, in words."""
    notebook = nbformat.read(path, as_version=nbformat.NO_CONVERT)
    try:
        nbformat.validate(notebook)
    except nbformat.ValidationError as error:
        return [f"invalid: {error}"]
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    found = [*of_file(path, notebook), *of_parameters(path, code), *of_metadata(notebook), *of_imports(code),
             *of_code(code), *of_records(path.stem, code)]  # fmt: skip
    return found + [f"{cell.get('id')}: {text}" for cell in notebook.cells for text in of_cell(cell)]


def of_file(path, notebook):
    if (notebook.nbformat, notebook.nbformat_minor) != (4, 5):
        yield "is not nbformat 4.5"
    if notebook.metadata.get("kernelspec") != KERNEL:
        yield "its kernel is not python3 as JupyterLab writes it"
    if set(notebook.metadata.get("language_info", {})) != LANGUAGE:
        yield "its language is not as a kernel writes it"
    if set(notebook.metadata) - {"kernelspec", "language_info", "title"}:
        yield f"has the metadata {sorted(notebook.metadata)}"
    if path.read_text(encoding="utf-8") != nbformat.writes(notebook) + "\n":
        yield "is not in the form in which JupyterLab saves it"
    if path.stat().st_size >= MAX_BYTES:
        yield f"has {path.stat().st_size} bytes"
    if not any("nbval-check-output" in cell.metadata.get("tags", []) for cell in notebook.cells):
        yield "no cell is tagged nbval-check-output"


def of_parameters(path, code):
    """papermill skips a parameter line that holds two equals signs, without an error."""
    cells = [cell for cell in code if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        yield f"{len(cells)} cells are tagged parameters"
        return
    lines = [line for line in cells[0].source.splitlines() if line.strip() and not line.startswith("#")]
    if any(line.count("=") != 1 for line in lines):
        yield "a line of the parameters cell has not one equals sign"
    assigned = {
        node.id
        for node in ast.walk(ast.parse(cells[0].source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    if missed := assigned - set(papermill.inspect_notebook(str(path))):
        yield f"papermill does not find {sorted(missed)}"
    try:
        parameters = read_parameters(path)
    except ParameterError as error:
        yield str(error)
        return
    for parameter in parameters.values():
        try:
            checked(path.stem, parameters, {parameter.name: parameter.default}, "The cell")
        except ParameterError:
            yield f"{parameter.name} does not keep to its own limits"
        if numbers(parameter.default) and not parameter.limits:
            yield f"{parameter.name} is a number without limits"
    if path.stem != SCOREBOARD and not {"seed", "threads"} <= set(parameters):
        yield "has not both seed and threads"
    check = f'from ondevice.run import check_parameters\n\nparameters = check_parameters("{path.stem}", globals())'
    if [cell.source for cell in code[1:2]] != [check] or code[0] is not cells[0]:
        yield "does not begin with its parameters and their check"


def numbers(value) -> bool:
    return any(map(numbers, value)) if isinstance(value, list) else type(value) in (int, float)


def of_metadata(notebook):
    if "papermill" in notebook.metadata:
        yield "has papermill metadata"
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    if counts != list(range(1, len(counts) + 1)):
        yield f"its code cells are numbered {counts}"


def of_imports(code):
    """Imports stand in one cell near the top, which JupyterLab folds; the second cell has one of its own."""
    import_cells = [cell for cell in code if not names(cell) and imports_at_top(cell.source)]
    if [cell for cell in import_cells if cell is not code[1]] != code[2:3]:
        yield f"its cells that import are {[cell.id for cell in import_cells]}, not the second and third code cell"
    elif code[2].metadata.get("jupyter") != {"source_hidden": True}:
        yield "its imports are not folded"


def imports_at_top(text) -> bool:
    return any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.parse(without_magics(text)).body)


def without_magics(text) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith(("%", "!")))


def of_code(code):
    lengths = sorted(sum(map(bool, cell.source.splitlines())) for cell in code if not names(cell))
    if lengths and lengths[len(lengths) // 2] > MAX_MEDIAN_LINES:
        yield f"its median code cell has {lengths[len(lengths) // 2]} lines"


def of_records(name, code):
    """Near the top it is printed what speaks against its records; the lines follow installed versions and code."""
    printed = [cell for cell in code[:6] if f'print(*evidence.stale("{name}"), ' in cell.source]
    if len(printed) != 1 or printed[0].metadata.get("tags"):
        yield f'does not print evidence.stale("{name}") in one of its first cells, without a tag'


def of_cell(cell):
    tags = set(cell.metadata.get("tags", []))
    if not READABLE_ID.fullmatch(cell.get("id", "")):
        yield "its id does not read as words"
    if tags & FORBIDDEN_TAGS:
        yield f"is tagged {sorted(tags & FORBIDDEN_TAGS)}"
    if {"papermill", "execution", "ExecuteTime"} & set(cell.metadata):
        yield "has run metadata"
    if ABSOLUTE_PATH.search(cell.source + stored_text(cell)):
        yield "holds an absolute path"
    if cell.cell_type == "code":
        yield from of_code_cell(cell, tags)


def of_code_cell(cell, tags):
    if any(output.output_type == "error" for output in cell.outputs):
        yield "stores an error"
    if "NBVAL_" in cell.source:
        yield "has an NBVAL comment, which wins over its tags"
    if "nbval-check-output" in tags and not stored_text(cell).strip():
        yield "is tagged nbval-check-output and stores nothing that nbval compares"
    if names(cell):
        return
    for node in ast.walk(ast.parse(without_magics(cell.source))):
        long = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if long and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES:
            yield f"defines {node.name} in more than {MAX_FUNCTION_LINES} lines"


def stored_text(cell) -> str:
    """The stored outputs without the images, whose base64 could spell anything."""
    texts = []
    for output in cell.get("outputs", []):
        texts += [output.get("text", ""), *output.get("traceback", [])]
        texts += [str(value) for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]
    return "\n".join("".join(text) for text in texts)


def test_hygiene(notebook):
    found = problems(notebook)
    assert not found, "\n".join(found)


def test_every_paper_with_a_package_has_a_notebook():
    papers = {
        paper
        for paper in pd.read_csv(LAYOUT.data / "paper" / "exhibits.csv")["paper"]
        if (LAYOUT.library / "ondevice_papers" / paper).is_dir()
    }
    assert set(LAYOUT.papers()) - {SCOREBOARD, ASSISTANT} == papers


@pytest.mark.parametrize("file", sorted(LAYOUT.notebooks.glob("params/[!.]*")), ids=lambda path: path.name)
def test_parameter_files_are_valid(file):
    paper, name, suffix = file.name.split(".")
    assert suffix == "yaml" and len(plan([paper], params=name)) == 1


def test_pytest_collects_no_notebook_by_itself():
    """With --nbval pytest runs every notebook below its paths, those of runs/ too."""
    assert not list((LAYOUT.root / "tests").rglob("*.ipynb"))


CHECK = 'from ondevice.run import check_parameters\n\nparameters = check_parameters("good", globals())'


def good_notebook():
    new = nbformat.v4
    cells = [
        new.new_code_cell(
            "seed: int = 0  # of the random numbers [0 to 9]\nthreads: int = 0  # [0 to 9]",
            id="parameters",
            execution_count=1,
            metadata={"tags": ["parameters"]},
        ),
        new.new_code_cell(CHECK, id="checked", execution_count=2),
        new.new_code_cell(
            "import json", id="imports", execution_count=3, metadata={"jupyter": {"source_hidden": True}}
        ),
        new.new_code_cell(
            "print(seed + 1)",
            id="print-seed",
            execution_count=4,
            metadata={"tags": ["nbval-check-output"]},
            outputs=[new.new_output("stream", text="1\n")],
        ),
        new.new_markdown_cell("Words about a/tmp/path and https://a.b/usr/c.", id="words"),
        new.new_code_cell('print(*evidence.stale("good"), sep="\\n")', id="records", execution_count=5),
    ]
    return new.new_notebook(cells=cells, metadata={"kernelspec": KERNEL, "language_info": dict.fromkeys(LANGUAGE, "")})


def source(index, text):
    return lambda n: n.cells[index].update(source=text)


def printed(text):
    return lambda n: n.cells[3].update(outputs=[nbformat.v4.new_output("stream", text=text)])


DEFECTS = {
    "not nbformat 4.5": lambda n: (n.update(nbformat_minor=4), [cell.pop("id") for cell in n.cells]),
    "kernel is not python3": lambda n: n.metadata.kernelspec.update(name="conda-base"),
    "its language is not": lambda n: n.metadata.language_info.pop("version"),
    "has the metadata": lambda n: n.metadata.update(widgets={}),
    "not in the form": lambda n: n.metadata.update({"title": n.metadata.pop("title", "Good")}),
    "imports are not folded": lambda n: n.cells[2].metadata.clear(),
    "imports'], not the second": lambda n: n.cells.insert(2, n.cells.pop(3)),
    "bytes": source(4, "x" * MAX_BYTES),
    "no cell is tagged nbval-check-output": lambda n: n.cells[3].metadata.clear(),
    "0 cells are tagged parameters": lambda n: n.cells[0].metadata.clear(),
    "not one equals sign": source(0, "seed: int = 0  # seed=0 is the default"),
    "papermill does not find ['seed']": source(0, "seed: int | None = 0"),
    "seed is a number without limits": source(0, "seed: int = 0\nthreads: int = 0  # [0 to 9]"),
    "seed does not keep to its own limits": source(0, "seed: int = 0  # (0 to 9]"),
    "has not both seed and threads": source(0, "seed: int = 0  # [0 to 9]"),
    "does not begin with its parameters": source(1, "parameters = dict(seed=seed)"),
    "is no parameter, which is name: type = literal": source(0, "seed: int = 6 * 7"),
    "has papermill metadata": lambda n: n.metadata.update(papermill={}),
    "numbered [1, 2, 3, 6, 5]": lambda n: n.cells[3].update(execution_count=6),
    "median code cell has 15 lines": lambda n: [cell.update(source="\n\n".join(["1"] * 15)) for cell in n.cells[1:4]],
    "does not print evidence.stale": source(5, 'evidence.stale("good")'),
    "in one of its first cells, without": lambda n: n.cells[5].metadata.update(tags=["nbval-check-output"]),
    "its id does not read": lambda n: n.cells[3].update(id="0f3a9c1e"),
    "is tagged ['raises-exception']": lambda n: n.cells[3].metadata.tags.append("raises-exception"),
    "has run metadata": lambda n: n.cells[3].metadata.update(execution={"iopub.execute_input": "2026"}),
    "holds an absolute path": source(3, "open('/home/me/file')"),
    "print-seed: holds an absolute path": printed("saved /tmp/x.png\n"),
    "stores an error": lambda n: n.cells[3].outputs.append(nbformat.v4.new_output("error", ename="E", evalue="")),
    "has an NBVAL comment": source(3, "print(1)  # NBVAL_IGNORE_OUTPUT"),
    "stores nothing that nbval compares": lambda n: n.cells[3].update(outputs=[]),
    "defines f in more": source(3, "%time\ndef f():\n" + "    a = 1\n" * MAX_FUNCTION_LINES),
}


@pytest.mark.parametrize("message", DEFECTS)
def test_each_rule_finds_its_defect(tmp_path, message):
    notebook = good_notebook()
    nbformat.write(notebook, tmp_path / "good.ipynb")
    assert problems(tmp_path / "good.ipynb") == []
    DEFECTS[message](notebook)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "good.ipynb").write_text(json.dumps(notebook))
    assert any(message in problem for problem in problems(tmp_path / "bad" / "good.ipynb"))
