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
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from waiting import wait_for

from ondevice import cores
from ondevice.run import Layout, ParameterError, execute, plan, run_all, schedule
from ondevice.run.__main__ import main
from ondevice.run.execute import Outcome, _locked

PARAMETERS = """
seed: int = 0  # seed of the random numbers
rate: float = 0.5  # of something [0 to 1)
budgets: list[float] = [0.1, 0.5]
""".strip()
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
    before = before.replace("import shared", f"import sys; sys.path.insert(0, {str(layout.library)!r}); import shared")
    write_notebook(layout, paper, before, FINISH.format(paper=paper))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A repository with one paper, in a folder whose name has braces, which papermill takes for a format string."""
    layout = Layout(tmp_path / "a {house}")
    layout.library.mkdir(parents=True)
    (layout.library / "shared.py").write_text("A = 1\n")
    (layout.library / "unused.py").write_text("A = 1\n")
    add_paper(layout, "good", "import shared")
    return layout


def published(layout: Layout, paper: str = "good") -> dict[str, str]:
    return {path.name: path.read_text() for path in (layout.figures / paper).glob("*")}


def put_published(layout: Layout, **files: str) -> None:
    (layout.figures / "good").mkdir(parents=True)
    for stem, text in files.items():
        (layout.figures / "good" / f"{stem}.csv").write_text(text)


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


def test_a_success_is_recorded_and_not_published(endings):
    outcome = endings["good"]
    record = json.loads((outcome.job.folder / "result.json").read_text())
    assert outcome.status == "done" and not outcome.job.part.exists()
    assert record["parameters"] == {"seed": 0, "rate": 0.5, "budgets": [0.1, 0.5]}
    assert record["threads"] == str(max(1, cores.usable() // 3)), "three runs share the cores"
    assert outcome.job.record() == record and outcome.exhibits == tuple(record["exhibits"])
    assert {"output.ipynb", "log.txt", "figures"} <= {path.name for path in outcome.job.folder.iterdir()}
    assert (outcome.job.folder / "figures" / "good" / "fig_01.csv").read_text() == "seed,rate\n0,0.5\n"
    assert not outcome.job.layout.figures.exists()


@pytest.mark.parametrize(
    ("paper", "reason"),
    [
        ("killed", "exit code"),
        ("raises", "exit code"),
        ("exits", "cell 3 of 3"),
        ("late_exit", "cell 4 of 4"),
        ("slow", "6 s"),
        ("silent", "result"),
    ],
)
def test_a_bad_end_is_a_failure(endings, paper, reason):
    outcome = endings[paper]
    assert outcome.status == "failed" and reason in outcome.reason
    assert outcome.job.log.is_file() and outcome.job.record() is None


def test_a_notebooks_setup_that_refuses_a_parameter_is_one_sentence_and_bad_input(layout, capsys):
    text = "raise ValueError(f'There are rates of 1 and 2, not of {rate}.')"
    write_notebook(layout, "good", text)
    notebook = nbformat.read(layout.notebook("good"), as_version=4)
    notebook.cells[1].id = "setup"
    nbformat.write(notebook, layout.notebook("good"))
    assert main(["good"], layout) == 2
    told = capsys.readouterr().out.splitlines()
    assert "good: refused: There are rates of 1 and 2, not of 0.5." in told and "Traceback" not in str(told)


@pytest.mark.gate
def test_a_finished_run_is_not_repeated(layout, capsys):
    assert main(["--jobs", "2"], layout) == 0
    assert "fig_01.csv" in capsys.readouterr().out
    output = plan(layout=layout)[0].folder / "output.ipynb"
    first = output.stat().st_mtime_ns

    assert main([], layout) == 0
    assert "good: skipped" in capsys.readouterr().out and output.stat().st_mtime_ns == first

    assert main(["--list"], layout) == 0
    assert "seed: int = 0" in (listed := capsys.readouterr().out) and "finished and up to date" in listed


def test_a_run_is_repeated_when_asked_or_out_of_date(layout):
    main([], layout)
    output = plan(layout=layout)[0].folder / "output.ipynb"
    first = output.stat().st_mtime_ns

    assert main(["--force"], layout) == 0
    forced = output.stat().st_mtime_ns
    assert forced > first

    (layout.library / "shared.py").write_text("A = 2\n")
    assert main([], layout) == 0
    assert output.stat().st_mtime_ns > forced


def test_publishing_names_what_it_changes_and_takes_finished_quick_runs_only(layout, capsys):
    put_published(layout, fig_01="before", fig_02="of an exhibit that is no more")
    add_paper(layout, "scoreboard")
    assert main(["publish", "good"], layout) == 2
    assert "good" in capsys.readouterr().err
    assert main(["good", "--set", "seed=1"], layout) == 0 and main(["publish"], layout) == 2
    assert main(["good"], layout) == 0
    capsys.readouterr()
    lines = ["changed  figures/good/fig_01.csv", "gone     figures/good/fig_02.csv"]
    assert main(["publish"], layout) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[-4:] == [*lines, "new      figures/scoreboard/fig_01.csv", "3 files changed in figures/"]
    assert published(layout) == {"fig_01.csv": "seed,rate\n0,0.5\n"} and published(layout, "scoreboard")
    assert main(["publish"], layout) == 0 and "0 files changed" in capsys.readouterr().out


def test_run_folders_of_old_layouts_are_named_and_skipped(layout, capsys):
    for number, text in enumerate(['{"parameters_hash": "0123", "code_hash": "4567"}', '{"exhibits": [', "[]"]):
        old = layout.runs / "good" / f"{number}123456789ab"
        old.mkdir(parents=True)
        (old / "result.json").write_text(text)
    for words in (["--list"], []):
        assert main(words, layout) == 0
        assert capsys.readouterr().out.count("123456789ab") == 3


def test_a_copy_under_another_name_with_a_parameter_of_its_own_is_run(layout, capsys):
    check = "from ondevice.run import Layout, check_parameters\nimport pathlib\n"
    check += f"check_parameters('good', globals(), Layout(pathlib.Path({str(layout.root)!r})))"
    write_notebook(layout, "mine", check, FINISH.format(paper="good"))
    copy = nbformat.read(layout.notebook("mine"), as_version=4)
    copy.cells[0].source += "\nbeams: int = 2  # of the copy [1 to 4]"
    nbformat.write(copy, layout.notebook("mine"))
    assert main(["mine", "--set", "beams=9"], layout) == 2 and "[1 to 4]" in capsys.readouterr().err
    assert main(["mine", "--set", "beams=3"], layout) == 0 and "fig_01.csv" in capsys.readouterr().out


OLD_PATHS = {  # code of before the library became five packages, and what the runner must name
    "from ondevice.disco.dispatch import plan": ["ondevice_papers.disco.dispatch"],
    "from ondevice.dragon import live, side": ["ondevice_programs.pair", "ondevice_papers.dragon.side"],
    'command = ["-m", "ondevice.dragon"]': ["ondevice_programs.pair"],
}


@pytest.mark.parametrize("code", OLD_PATHS)
def test_a_notebook_that_imports_an_old_path_is_told_the_new_one(layout, capsys, code):
    (layout.library / "shared.py").unlink()
    for package in Layout().library.glob("ondevice*"):
        (layout.library / package.name).symlink_to(package)
    add_paper(layout, "good", f"%time\n{code}")
    assert main(["good"], layout) == 2 and not layout.runs.exists()
    error = capsys.readouterr().err
    assert all(named in error for named in ["good.ipynb", *OLD_PATHS[code]]) and len(error.splitlines()) == 1, error


def put_data(layout: Layout, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = layout.data / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize("file", ["model/model.safetensors", "model"])
def test_a_folder_or_file_that_a_parameter_names_counts_with_its_content(layout, tmp_path, file):
    job = replace(plan(layout=layout)[0], parameters={"model": str(tmp_path / "model"), "text": "long " * 99})
    prints = [job.made_from()["fingerprint"]]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    for text in ("weights", "weighty", "weights"):
        path.write_text(text)
        os.utime(path, (1, 1))  # as an archive or a copy may have it
        prints.append(job.made_from()["fingerprint"])
    assert len(set(prints)) == 3 and prints[1] == prints[3]


def test_the_fingerprint_covers_what_the_paper_uses_and_no_more(layout, monkeypatch):
    [job] = plan(layout=layout)

    def is_done() -> bool:
        return job.record() is not None

    def mark_done() -> None:
        job.folder.mkdir(parents=True, exist_ok=True)
        (job.folder / "result.json").write_text(json.dumps(job.made_from()))

    add_paper(layout, "other", "import shared; import numpy; names = ['answers', 'ttft', 'tiny']")
    mark_done()
    (layout.library / "unused.py").write_text("B = 1\n")
    put_data(layout, {"records/other/answers.json": "{}", "traces/ttft.csv": "b\n2\n", "models/manifest.json": "{}"})
    notebook = nbformat.read(layout.notebook("good"), as_version=4)
    notebook.cells[-1].outputs = [nbformat.v4.new_output("stream", text="stored")]
    notebook.cells.append(nbformat.v4.new_markdown_cell("prose", id="prose"))
    nbformat.write(notebook, layout.notebook("good"))
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.1")
    assert is_done(), "it uses none of these"
    (layout.library / "shared.py").write_text("from deep import under\n")
    (layout.library / "deep").mkdir()
    assert not is_done()
    mark_done()
    for file, text in [("__init__.py", ""), ("under.py", "import numpy\nNAMES = ['good', 'ttft', 'tiny']\n")]:
        (layout.library / "deep" / file).write_text(text)
        assert not is_done(), f"what an imported module imports: {file}"
        mark_done()
    monkeypatch.setattr(metadata, "version", lambda name: "0.0.2")
    assert not is_done(), "another version of a package"
    mark_done()
    put_data(layout, {"records/other/answers.json": "[]", "traces/other.csv": "a", "prompts/other.json": "{}"})
    assert is_done(), "data that it does not name"
    for file, text in {
        "records/good/answers.json": "{}",
        "paper/claims.csv": "a\n1\n",
        "traces/ttft.csv": "b\n3\n",
        "models/manifest.json": '{"tiny/model.safetensors": "0123", "other/model.safetensors": "4567"}',
        "prompts/tiny.json": "[]",
    }.items():
        put_data(layout, {file: text})
        assert not is_done(), file
        mark_done()
    put_data(layout, {"models/manifest.json": '{"tiny/model.safetensors": "0123", "other/model.safetensors": "89ab"}'})
    assert is_done(), "another model's weights"
    notebook.cells[1].source = "seed += 1"
    nbformat.write(notebook, layout.notebook("good"))
    assert not is_done()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "sede=1"], "'sede'"),
        (["--set", "rate=1"], "[0 to 1)"),
        (["--set", "seed=0.5"], "seed of good is int"),
        (["--set", "budgets=[0.1,high]"], "list[float]"),
        (["--set", "seed"], "name=value"),
        (["--set", "seed=0", "--set", "seed=1"], "seed twice"),
        (["--params", "full"], "good.full.yaml"),
    ],
)
def test_bad_input_is_an_error_before_a_kernel_starts(layout, capsys, arguments, message):
    add_paper(layout, "slow", ENDINGS["slow"])
    assert main(arguments, layout) == 2
    assert message in capsys.readouterr().err and not layout.runs.exists()


@pytest.mark.parametrize("text", ["- 1\n", "a: [", "sede: 1\n"], ids=["no mapping", "no YAML", "no parameter"])
def test_a_bad_parameter_file_is_an_error(layout, text):
    path = layout.parameter_file("good", "full")
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ParameterError):
        plan(["good"], params="full", layout=layout)


def test_a_plan_is_the_grid_over_file_and_settings(layout):
    path = layout.parameter_file("good", "full")
    path.parent.mkdir()
    path.write_text("seed: 9\nrate: 0\n")
    jobs = plan(["good"], "full", ["seed=0,1,2", "budgets=[0, 1],[0.5]"], layout=layout)
    values = [job.parameters for job in jobs]
    assert [v["seed"] for v in values] == [0, 0, 1, 1, 2, 2] and {v["rate"] for v in values} == {0.0}
    assert values[0]["budgets"] == [0.0, 1.0] and all(type(x) is float for v in values for x in v["budgets"])
    assert len({job.folder for job in jobs}) == 6
    assert plan(["good"], settings=["seed=0,0", "rate=5e-1"], layout=layout) == plan(["good"], layout=layout)


def test_the_quickest_comes_first_and_the_scoreboard_last(layout):
    for paper, seconds in (("good", 20), ("scoreboard", 1), ("zeta", 10)):
        add_paper(layout, paper)
        (layout.figures / paper).mkdir(parents=True)
        for stem in ("a", "b"):
            (layout.figures / paper / f"{stem}.json").write_text(json.dumps({"seconds": seconds}))
    assert [job.paper for job in plan(layout=layout)] == ["zeta", "good", "scoreboard"]
    assert [job.paper for job in plan(settings=["seed=1"], layout=layout)] == ["zeta", "good"]


def test_dask_carries_the_runs(layout):
    distributed = pytest.importorskip("distributed")
    options = {"n_workers": 1, "threads_per_worker": 2, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**options) as cluster, distributed.Client(cluster) as client:
        jobs = plan(settings=["seed=1,2"], layout=layout)
        outcomes = run_all(jobs, executor=client.get_executor(pure=False))
    assert [(outcome.status, outcome.reason) for outcome in outcomes] == [("done", "")] * 2
    figures = [outcome.job.folder / "figures" / "good" / "fig_01.csv" for outcome in outcomes]
    assert [path.read_text() for path in figures] == ["seed,rate\n1,0.5\n", "seed,rate\n2,0.5\n"]


def test_a_kernel_that_dies_before_it_answers_is_started_once_more(layout, tmp_path, monkeypatch):
    """As one does whose port another kernel took."""
    starts = tmp_path / "starts"
    dies = f"import pathlib, sys; at = pathlib.Path({str(starts)!r}); at.open('a').write('x')"
    dies += "; len(at.read_text()) < {begun} and sys.exit(1)"
    dies += "; from ipykernel import kernelapp; kernelapp.launch_new_instance(argv=sys.argv[1:])"
    spec = tmp_path / "kernels" / "python3" / "kernel.json"
    spec.parent.mkdir(parents=True)
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for begun, status in ((2, "done"), (3, "failed")):
        starts.unlink(missing_ok=True)
        argv = [sys.executable, "-c", dies.format(begun=begun), "-f", "{connection_file}"]
        spec.write_text(json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"}))
        [outcome] = run_all(plan(settings=[f"seed={begun}"], layout=layout))
        assert (outcome.status, starts.read_text()) == (status, "xx")


def test_a_run_under_way_elsewhere_is_waited_for_and_left_alone(layout):
    [job] = plan(layout=layout)
    job.part.mkdir(parents=True)
    with open(job.part.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert execute(replace(job, timeout=0.5)).status == "failed"
    assert job.part.is_dir()


@pytest.mark.parametrize("waits", [True, False])
def test_what_a_killed_runner_began_is_taken_up(layout, waits):
    """The notebook goes on without its runner; at work or done, it runs once and counts."""
    once = "import pathlib, time\nopen('times', 'a').write('x')\nwhile not pathlib.Path('go').exists(): time.sleep(0.1)"
    add_paper(layout, "good", once)
    [job] = plan(layout=layout)
    process = start_runner(layout)
    times, go = layout.notebooks / "times", layout.notebooks / "go"
    wait_for(times.is_file)
    process.kill()
    process.wait()
    if not waits:
        go.touch()
        wait_for(lambda: lock_is_free(job))
    with ThreadPoolExecutor(1) as pool:
        outcome = pool.submit(run_all, [job])
        time.sleep(1)
        go.touch()
        [outcome] = outcome.result()
    assert outcome.status == "done" and job.record() and times.read_text() == "x"
    assert run_all([job], force=True)[0].status == "done" and times.read_text() == "xx"


def test_what_a_killed_runner_began_of_other_code_is_run_again(layout):
    [job] = plan(layout=layout)
    assert execute(job).status == "done"
    job.folder.rename(job.part)
    job.begun.write_text(json.dumps(job.made_from()))
    before = (job.part / "output.ipynb").stat().st_mtime_ns
    (layout.library / "shared.py").write_text("A = 3\n")
    assert execute(job).status == "done" and (job.folder / "output.ipynb").stat().st_mtime_ns > before


def lock_is_free(job) -> bool:
    with open(job.part.with_suffix(".lock"), "w") as lock:
        return _locked(lock)


def start_runner(layout: Layout) -> subprocess.Popen:
    code = (
        "import pathlib, sys; from ondevice.run import Layout; from ondevice.run.__main__ import interrupt_once, main;"
        "interrupt_once(); sys.exit(main([], Layout(pathlib.Path(sys.argv[1]))))"
    )
    command = [sys.executable, "-c", code, str(layout.root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_everything_and_leaves_nothing_half_written(layout, number):
    begin = "import os, pathlib; pathlib.Path('pid').write_text(str(os.getpid()))"
    add_paper(layout, "good", f"{begin}\n{ENDINGS['slow']}")
    process = start_runner(layout)
    kernel = layout.notebooks / "pid"
    wait_for(lambda: kernel.is_file() and kernel.read_text())
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 130, output
    assert not [path for path in layout.runs.rglob("*") if path.is_file() and path.suffix != ".lock"]
    wait_for(lambda: not is_alive(int(kernel.read_text())), seconds=5)


def test_where_nobody_reads_what_is_said_no_further_run_begins(layout, monkeypatch):
    begun = []

    def begin(job, fresh):
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


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False
