"""The notebook runner on tiny notebooks in a folder of their own: what counts as done, and what ends badly."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import nbformat
import pytest

from ondevice.run import Layout, ParameterError, execute, plan, run_all, schedule
from ondevice.run.cli import main
from ondevice.run.execute import Outcome

PARAMETERS = "seed: int = 0  # seed of the random numbers\nrate: float = 0.5\nbudgets: list[float] = [0.1, 0.5]"
# A notebook's work without its imports: one figure and the result file.
FINISH = """
import json, os, pathlib
paper = {paper!r}
folder = pathlib.Path(os.environ["ONDEVICE_FIGURES"]) / paper
folder.mkdir(parents=True)
(folder / "fig_01.csv").write_text(f"seed,rate\\n{{seed}},{{rate}}\\n")
row = dict(exhibit="fig_01", kind="measured", file="fig_01.csv", verdict="1 reproduced")
result = dict(paper=paper, exhibits=[row], threads=os.environ.get("OMP_NUM_THREADS"))
pathlib.Path(os.environ["ONDEVICE_RESULT"]).write_text(json.dumps(result))
"""
ENDINGS = {
    "good": "",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "exits": "import sys; sys.exit(0)",
    "raises": "raise RuntimeError('a cell that fails')",
    "slow": "import time; time.sleep(600)",
}


def write_notebook(layout: Layout, paper: str, *sources: str) -> None:
    cells = [nbformat.v4.new_code_cell(source, id=f"cell-{i}") for i, source in enumerate((PARAMETERS, *sources))]
    cells[0].metadata.tags = ["parameters"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    layout.notebooks.mkdir(parents=True, exist_ok=True)
    notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, layout.notebook(paper))


def add_paper(layout: Layout, paper: str, before: str = "") -> None:
    write_notebook(layout, paper, before, FINISH.format(paper=paper))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A repository with one paper, in a folder whose name has braces, which papermill takes for a format string."""
    layout = Layout(tmp_path / "a {house}")
    layout.library.mkdir(parents=True)
    (layout.library / "shared.py").write_text("A = 1\n")
    add_paper(layout, "good")
    return layout


def published(layout: Layout, paper: str = "good") -> dict[str, str]:
    return {path.name: path.read_text() for path in (layout.figures / paper).glob("*")}


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory):
    """One outcome for each way a notebook can end, all from one call with three runs at a time."""
    layout = Layout(tmp_path_factory.mktemp("endings"))
    for paper, code in ENDINGS.items():
        add_paper(layout, paper, code)
    write_notebook(layout, "silent", "1 + 1")
    write_notebook(layout, "late_exit", FINISH.format(paper="late_exit"), ENDINGS["exits"], "1 + 1")
    jobs = [replace(job, timeout=6 if job.paper == "slow" else None) for job in plan(layout=layout)]
    return {outcome.job.paper: outcome for outcome in run_all(jobs, workers=3)}


def test_a_success_is_recorded_and_published(endings):
    outcome = endings["good"]
    record = json.loads((outcome.job.folder / "result.json").read_text())
    assert outcome.status == "done" and not outcome.job.part.exists()
    assert record["parameters"] == {"seed": 0, "rate": 0.5, "budgets": [0.1, 0.5]}
    assert record["threads"] == str(max(1, len(os.sched_getaffinity(0)) // 3)), "three runs share the cores"
    assert outcome.job.record() == record and outcome.exhibits == tuple(record["exhibits"])
    assert {"output.ipynb", "log.txt", "figures"} <= {path.name for path in outcome.job.folder.iterdir()}
    assert published(outcome.job.layout) == {"fig_01.csv": "seed,rate\n0,0.5\n"}


@pytest.mark.parametrize(
    ("paper", "reason"),
    [
        ("killed", "exit code"),
        ("raises", "exit code"),
        ("exits", "ended early: its cell 3 of 3"),
        ("late_exit", "ended early: its cell 4 of 4"),
        ("slow", "longer than 6 s"),
        ("silent", "no result file"),
    ],
)
def test_a_bad_end_is_a_failure(endings, paper, reason):
    outcome = endings[paper]
    assert outcome.status == "failed" and reason in outcome.reason
    assert outcome.job.log.is_file() and outcome.job.record() is None
    assert not published(outcome.job.layout, paper)


def test_a_run_is_repeated_only_when_asked_or_out_of_date(layout, capsys):
    assert main(["--jobs", "2"], layout) == 0
    assert "fig_01   measured  fig_01.csv  1 reproduced" in capsys.readouterr().out
    output = plan(layout=layout)[0].folder / "output.ipynb"
    first = output.stat().st_mtime_ns

    (layout.figures / "good" / "fig_01.csv").unlink()
    assert main([], layout) == 0
    assert "good: skipped" in capsys.readouterr().out and output.stat().st_mtime_ns == first
    assert "fig_01.csv" in published(layout), "a published file that was removed comes back"

    assert main(["--list"], layout) == 0
    assert "seed: int = 0" in (listed := capsys.readouterr().out) and "finished and up to date" in listed

    assert main(["--force"], layout) == 0
    forced = output.stat().st_mtime_ns
    assert forced > first

    (layout.library / "shared.py").write_text("A = 2\n")
    assert main([], layout) == 0
    assert output.stat().st_mtime_ns > forced


def test_the_fingerprint_covers_what_the_paper_uses_and_no_more(layout):
    [job] = plan(layout=layout)
    result = {"parameters_hash": job.folder.name, "fingerprint": ""}

    def is_done() -> bool:
        return job.record() is not None

    def mark_done() -> None:
        from ondevice.run.fingerprint import fingerprint

        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "result.json").write_text(json.dumps(result | {"fingerprint": fingerprint(layout, "good")}))

    add_paper(layout, "other")
    mark_done()
    (layout.library / "other").mkdir()
    (layout.library / "other" / "own.py").write_text("B = 1\n")
    notebook = nbformat.read(layout.notebook("good"), as_version=4)
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="stored")]
    notebook.cells.append(nbformat.v4.new_markdown_cell("prose", id="prose"))
    nbformat.write(notebook, layout.notebook("good"))
    assert is_done()
    for path, text in [
        (layout.library / "good" / "own.py", "C = 1\n"),
        (layout.data / "paper" / "claims.csv", "a\n1\n"),
        (layout.data / "traces" / "ttft.csv", "b\n2\n"),
        (layout.data / "models" / "manifest.json", "{}"),
    ]:
        path.parent.mkdir(parents=True)
        path.write_text(text)
        assert not is_done(), path
        mark_done()
    notebook.cells[1].source = "seed += 1"
    nbformat.write(notebook, layout.notebook("good"))
    assert not is_done()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "sede=1"], "no parameter 'sede'"),
        (["--set", "seed=0.5"], "seed of good is int, and 0.5 is float"),
        (["--set", "seed=true"], "True is bool"),
        (["--set", "rate=fast"], "'fast' is str"),
        (["--set", "budgets=[0.1,high]"], "is list[float]"),
        (["--set", "seed"], "write name=value"),
        (["--set", "seed=0", "--set", "seed=1"], "seed twice"),
        (["--params", "full"], "no parameter file notebooks/params/good.full.yaml"),
        (["--params", "nowhere.yaml"], "no parameter file nowhere.yaml"),
        (["goood"], "The papers: good, slow."),
    ],
)
def test_bad_input_is_an_error_before_a_kernel_starts(layout, capsys, arguments, message):
    add_paper(layout, "slow", ENDINGS["slow"])
    assert main(arguments, layout) == 2
    error = capsys.readouterr().err
    assert message in error
    if arguments[0] == "--set" and "write" not in message and "twice" not in message:
        assert "seed: int = 0" in error and "seed of the random numbers" in error, "the valid parameters are listed"
    assert not layout.runs.exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n", "no mapping"),
        ("a: [", "not YAML"),
        ("", "no mapping"),
        ("sede: 1\n", "no parameter 'sede'"),
    ],
)
def test_a_bad_parameter_file_is_an_error(layout, text, message):
    path = layout.parameter_file("good", "full")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ParameterError, match=message):
        plan(["good"], params="full", layout=layout)


def test_a_plan_is_the_grid_over_file_and_settings(layout):
    path = layout.parameter_file("good", "full")
    path.parent.mkdir()
    path.write_text("seed: 9\nrate: 1\n")
    jobs = plan(["good"], "full", ["seed=0,1,2", "budgets=[0, 1],[0.5]"], layout=layout)
    values = [job.parameters for job in jobs]
    assert [v["seed"] for v in values] == [0, 0, 1, 1, 2, 2] and {v["rate"] for v in values} == {1.0}
    assert values[0]["budgets"] == [0.0, 1.0] and all(type(x) is float for v in values for x in v["budgets"])
    assert len({job.folder for job in jobs}) == 6
    assert plan(["good"], settings=["seed=0,0", "rate=5e-1"], layout=layout) == plan(["good"], layout=layout)


def test_the_scoreboard_comes_last_and_belongs_to_the_quick_runs(layout):
    add_paper(layout, "scoreboard")
    add_paper(layout, "zeta")
    assert [job.paper for job in plan(layout=layout)] == ["good", "zeta", "scoreboard"]
    assert [job.paper for job in plan(settings=["seed=1"], layout=layout)] == ["good", "zeta"]


def test_dask_carries_the_runs(layout):
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        jobs = plan(settings=["seed=1,2"], layout=layout)
        outcomes = run_all(jobs, executor=client.get_executor(pure=False))
    assert [outcome.status for outcome in outcomes] == ["done", "done"]
    figures = [outcome.job.folder / "figures" / "good" / "fig_01.csv" for outcome in outcomes]
    assert [path.read_text() for path in figures] == ["seed,rate\n1,0.5\n", "seed,rate\n2,0.5\n"]
    assert not layout.figures.exists(), "only runs with the default parameters are published"


def test_a_run_under_way_elsewhere_is_left_alone(layout):
    [job] = plan(layout=layout)
    job.part.mkdir(parents=True)
    with open(job.part.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert execute(job).reason == "another process is running it now"
    assert job.part.is_dir()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_leaves_nothing_half_written(layout, tmp_path, number):
    begin = "import os, pathlib; pathlib.Path('pid').write_text(str(os.getpid()))"
    add_paper(layout, "good", f"{begin}\n{ENDINGS['slow']}")
    (layout.figures / "good").mkdir(parents=True)
    (layout.figures / "good" / "fig_01.csv").write_text("before")
    code = (
        "import pathlib, sys; from ondevice.run import Layout; from ondevice.run.cli import interrupt_once, main;"
        "interrupt_once(); sys.exit(main([], Layout(pathlib.Path(sys.argv[1]))))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(layout.root)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    kernel = layout.notebooks / "pid"
    wait_for(lambda: kernel.is_file() and kernel.read_text())
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert published(layout) == {"fig_01.csv": "before"}
    assert not [path for path in layout.runs.rglob("*") if path.is_file() and path.suffix != ".lock"]
    wait_for(lambda: not is_alive(int(kernel.read_text())), seconds=5)


def test_where_nobody_reads_what_is_said_no_further_run_begins(layout, monkeypatch):
    begun = []

    def begin(job):
        begun.append(job)
        time.sleep(0.2)
        return Outcome(job, "done")

    def nobody_reads(progress, line):
        raise BrokenPipeError

    monkeypatch.setattr(schedule, "execute", begin)
    monkeypatch.setattr(schedule.Progress, "say", nobody_reads)
    jobs = plan(settings=["seed=1,2,3,4,5,6,7,8"], layout=layout)
    with ThreadPoolExecutor(1) as pool, pytest.raises(BrokenPipeError):
        run_all(jobs, executor=pool)
    assert 1 <= len(begun) <= 2 and not list(layout.runs.glob(".stop-*"))


def wait_for(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
