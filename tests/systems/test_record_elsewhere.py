"""Records in shares, by processes that Dask workers or threads start; and all that a machine decides, step by step."""

import importlib
import subprocess
import sys
import textwrap

import pytest

from ondevice import assets
from ondevice.evidence import load
from ondevice_studies import record

# In DRAGON's place, a paper whose record takes no time: rows say which share and process made them.
PAPER = """
    import argparse, os, sys
    from ondevice.evidence import Recorder

    def kept():
        return Recorder("tiny", "squares", ["unit"], {})

    def main(arguments):
        parser = argparse.ArgumentParser()
        parser.add_argument("--share", default="1/1")
        parser.add_argument("--broken", default="none")
        options = parser.parse_args(arguments)
        which, of = map(int, options.share.split("/"))
        if os.path.exists(options.broken) and which == 2:
            sys.exit(3)
        run = kept()
        for unit in range(7):
            if (unit % of == which - 1 or unit == 0) and (unit,) not in run.done:  # all shares need unit 0
                run.add([dict(unit=unit, square=unit**2, process=os.getpid(), share=options.share)])
        run.checkpoint()
        if {(unit,) for unit in range(7)} <= kept().done:
            print(kept().finish())
"""
SITE = """
    from pathlib import Path
    import ondevice_studies
    from ondevice import assets
    ondevice_studies.__path__.insert(0, HOME)
    real = assets.data
    assets.data = lambda *parts: Path(HOME, *parts) if parts[0] == "records" else real(*parts)
"""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A folder with the tiny paper, its records and its cache, for the processes that a test starts."""
    (tmp_path / "dragon").mkdir()
    (tmp_path / "dragon" / "__init__.py").touch()
    (tmp_path / "dragon" / "record.py").write_text(textwrap.dedent(PAPER))
    (tmp_path / "sitecustomize.py").write_text(f"HOME = {str(tmp_path)!r}\n{textwrap.dedent(SITE)}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))
    real = assets.data
    monkeypatch.setattr(
        assets, "data", lambda *parts: tmp_path.joinpath(*parts) if parts[0] == "records" else real(*parts)
    )
    return tmp_path


def recording(*words):
    command = [sys.executable, "-m", "ondevice_studies.record", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def squares():
    table = load("tiny", "squares")
    assert table[["unit", "square"]].values.tolist() == [[unit, unit**2] for unit in range(7)]
    return table


def test_dask_processes_share_a_record_which_is_written_once(home):
    done = recording("dragon", "--executor", "dask", "--shares", "3")
    assert done.returncode == 0, done.stderr
    table = squares()  # unit 0, which every share recorded, is there once
    assert set(table["share"]) == {"1/3", "2/3", "3/3"} and table["process"].nunique() == 3
    assert table.attrs["sidecar"]["command"].endswith("record dragon --executor dask --shares 3")
    assert not list((home / "cache" / "records" / "tiny").iterdir())


def test_what_a_failed_share_left_is_made_by_the_same_command_again(home):
    words = ["dragon", "--broken", str(home / "broken"), "--executor", "local", "--shares", "2"]
    (home / "broken").touch()
    failed = recording(*words)
    assert failed.returncode == 1 and "2/2" in failed.stderr
    assert not (home / "records" / "tiny").exists()
    (home / "broken").unlink()
    assert recording(*words).returncode == 0
    assert squares()["share"].value_counts().to_dict() == {"1/2": 4, "2/2": 3}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["disco", "--executor", "local"], "disco"),
        (["dragon", "--executor", "local", "--shares", "0"], "--shares"),
        (["dragon", "--executor", "nowhere"], "dragon"),
        (["machine", "--name", "My.Laptop"], "'My.Laptop'"),
        (["machine", "--only", "disco/nothing"], "'disco/nothing'"),
    ],
)
def test_what_cannot_be_is_refused(words, message, capsys):
    try:
        code = record.main(words)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2 and message in capsys.readouterr().err


# A machine's steps


@pytest.mark.parametrize("step", record.STEPS)
def test_the_command_of_a_step_is_one_that_its_paper_takes(step, capsys):
    """--help comes last, so that what stands before it was accepted."""
    words = record.STEPS[step].split()
    if words[0] != "-m":
        assert (assets.ROOT / words[0]).is_file()
        return
    module, rest = words[1], words[2:]
    if module == record.__name__:
        module, rest = f"ondevice_studies.{words[2]}.record", words[3:]
    with pytest.raises(SystemExit) as stopped:
        importlib.import_module(module).main([*rest, "--help"])
    assert stopped.value.code == 0, capsys.readouterr().err


STEP = """
import sys
from ondevice.evidence import Recorder, machine_name
with open(sys.argv[1], "a") as told:
    print(machine_name(), file=told)
if len(sys.argv) > 2:
    sys.exit(7)
run = Recorder("tiny", "times", ["unit"], {}, machine=machine_name())
run.add([{"unit": 0, "seconds": 1.5}])
run.finish()
"""


def test_steps_are_run_by_name_and_not_again_and_a_failed_one_does_not_stop_the_others(home, monkeypatch, capfd):
    (home / "step.py").write_text(STEP)
    steps = {f"tiny/{name}": f"{home / 'step.py'} {home / name}" for name in ("worse", "times")}
    monkeypatch.setattr(record, "STEPS", steps | {"tiny/worse": f"{steps['tiny/worse']} fails"})
    written = list[str]()
    real = record._process
    monkeypatch.setattr(record, "_process", lambda words, name="": real(words, name) if name else written.extend(words))
    words = ["machine", "--name", "my-laptop"]
    assert record.main([*words, "--plan"]) == 0 and not (home / "times").exists()
    assert record.main(words) == 1
    assert "tiny/worse" in capfd.readouterr().err
    assert load("tiny", "times.my-laptop")["seconds"].tolist() == [1.5]
    assert written == ["-m", "ondevice_studies.machines"]
    assert record.main(words) == 1  # the failed one alone
    assert [len((home / name).read_text().split()) for name in ("times", "worse")] == [1, 2]
    assert record.main([*words, "--only", "tiny/times", "--force"]) == 0
    assert (home / "times").read_text().split() == ["my-laptop"] * 2
