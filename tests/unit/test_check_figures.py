"""What is published is what runs: figures/ agrees with itself, and whatever differs from a run is named."""

import hashlib
import json

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from PIL import Image, PngImagePlugin

from ondevice import assets, evidence, plotting
from ondevice.evidence.drawn import hashes
from ondevice.evidence.exhibits import DRAWN
from ondevice.run import Layout
from ondevice_studies import published

LAYOUT = Layout()
FOLDERS = sorted(path for path in LAYOUT.figures.iterdir() if path.is_dir())
TABLE = pd.DataFrame({"x": ["a", "b", "c", "d"], "y": [1.0, 3.0, 2.0, 4.0], "z": [2.0, 2.5, 1.0, 3.0]})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_figures_agree_with_themselves_and_hold_what_a_notebook_makes(folder):
    assert list(published.faults(folder)) == [] and folder.name in LAYOUT.papers()
    own = ["verdicts.csv", "verdicts.json", "verdicts.png"]  # of the scoreboard, which has no list
    names = own if folder.name == "scoreboard" else published.named(folder)
    assert published.surplus(names, folder) == []


def draw(column="y", title="", colour="blue", table=TABLE):
    figure, axes = plotting.panels(1, 1)
    plotting.bars(axes[0, 0], table, "x", column, looks={"": dict(color=plotting.COLOURS[colour])})
    axes[0, 0].set(title=title)
    plotting.legend(figure, "simulated")
    return figure


def publish(folder, monkeypatch, kind="simulated", scale=1.0, timed=(), **options):
    """A run of one exhibit, and its lists."""
    monkeypatch.setenv(assets.FIGURES_VARIABLE, str(folder))
    run = evidence.PaperRun("tiny", {"seed": 0}, {})
    table = evidence.born(TABLE.assign(y=scale * TABLE["y"]), kind)
    run.save("beyond_01_bars", table, draw(**options), timed=timed, inputs=["a", evidence.machine_name()])
    run.finish()
    plt.close("all")
    claims = {"claim": "tiny-c01", "ours": f"{scale:g} s", "kind": kind, "verdict": "trend", "note": "at most 2 s"}
    pd.DataFrame([claims]).to_csv(folder / "tiny" / "claims.csv", index=False)
    return folder / "tiny"


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    return publish(tmp_path / "run", monkeypatch)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    return publish(tmp_path / "figures", monkeypatch)


def sentences(fresh, folder):
    return [*published.faults(folder), *published.differences(fresh, folder)]


def mend(folder, **values):
    """Write values, and the hashes of the files as they are now, into the JSON."""
    path = folder / "beyond_01_bars.json"
    files = {end: path.with_suffix(f".{end}").read_bytes() for end in ("csv", "png")}
    hashed = {f"{end}_sha256": hashlib.sha256(content).hexdigest() for end, content in files.items()}
    path.write_text(json.dumps({**json.loads(path.read_text()), **hashed, **values}))


@pytest.mark.parametrize(("kind", "words", "differs"), [("measured", "zen9-8c", False), ("measured", "other", True),
                                                        ("recorded", "zen9-8c", True)])  # fmt: skip
def test_what_is_measured_may_name_another_machine_in_inputs_and_words(tmp_path, monkeypatch, kind, words, differs):
    """A run on another machine would differ from what is published, whatever the code; other inputs still do."""
    copied = publish(tmp_path / "figures", monkeypatch, kind, title=evidence.machine_name())
    monkeypatch.setenv("ONDEVICE_MACHINE", "zen9-8c")
    fresh = publish(tmp_path / "run", monkeypatch, kind, title=words)
    if words == "other":
        mend(fresh, inputs=["b", "zen9-8c"])
    assert bool([*published.differences(fresh, copied)]) == differs


@pytest.mark.parametrize("mended", [False, True])
def test_a_halved_or_edited_csv_is_named(fresh, copied, mended):
    path = copied / "beyond_01_bars.csv"
    whole = path.read_text()
    for text in ("\n".join(whole.splitlines()[:3]) + "\n", whole.replace("b,3", "b,3.0001")):
        path.write_text(text)
        if mended:
            mend(copied)
        named = sentences(fresh, copied)
        assert named and all("beyond_01_bars.csv" in sentence for sentence in named)


def test_a_stale_picture_is_named(fresh, copied, tmp_path, monkeypatch):
    old = publish(tmp_path / "old", monkeypatch, column="z")
    picture = copied / "beyond_01_bars.png"
    picture.write_bytes((old / picture.name).read_bytes())
    assert next(published.faults(copied)) == "beyond_01_bars.png is not the file that the run wrote"
    mend(copied)
    assert next(published.faults(copied)) == "beyond_01_bars.png shows another run's data than its JSON names"


def test_an_edited_picture_is_named(fresh, copied):
    path = copied / "beyond_01_bars.png"
    with Image.open(path) as image:
        drawn = PngImagePlugin.PngInfo()
        drawn.add_text(DRAWN, image.info[DRAWN])
        pixels = np.array(image)
    pixels[100:120, 100:120] = 0
    Image.fromarray(pixels).save(path, pnginfo=drawn)
    assert "beyond_01_bars.png is not the file that the run wrote" in sentences(fresh, copied)
    mend(copied)
    assert sentences(fresh, copied) == ["beyond_01_bars.png is another picture than the run's"]


def test_a_relabelled_kind_is_named(fresh, copied):
    mend(copied, kind="measured")
    assert "beyond_01_bars.json says measured, exhibits.csv simulated" in sentences(fresh, copied)
    for name in ("claims", "exhibits"):
        path = copied / f"{name}.csv"
        path.write_text(path.read_text().replace("simulated", "measured"))
    named = [sentence.split()[0] for sentence in sentences(fresh, copied)]
    assert named == ["beyond_01_bars.json", "claims.csv", "exhibits.csv"]


def test_an_invented_machine_is_named(fresh, copied):
    machine = json.loads((copied / "beyond_01_bars.json").read_text())["machine"]
    mend(copied, machine={**machine, "name": "phone-8c"})
    invented = "beyond_01_bars.json names the machine phone-8c"
    assert sentences(fresh, copied) == [f"{invented}, but its facts give {machine['name']}"]
    mend(copied, machine=machine, parameters={"seed": 0, "machine": "phone-8c"})
    assert f"{invented}, of which there is no record" in sentences(fresh, copied)


@pytest.mark.parametrize(("options", "named"), [({"column": "z"}, True), ({"colour": "red"}, True), ({}, False)])
def test_another_column_or_colour_is_named(fresh, tmp_path, monkeypatch, options, named):
    differences = sentences(fresh, publish(tmp_path / "other", monkeypatch, **options))
    assert ("beyond_01_bars.json has other data or artists" in differences) == bool(differences) == named


def test_times_of_a_run_differ_in_numbers_alone(tmp_path, monkeypatch):
    measured = dict(kind="measured", timed=["y"])
    first, second, third = (
        publish(tmp_path / name, monkeypatch, **measured, scale=scale, **options)
        for name, scale, options in (("1", 1.0, {}), ("2", 1.5, {"column": "z"}), ("3", 1.0, {"title": "other"}))
    )
    assert sentences(first, second) == []
    assert sentences(first, third) == ["beyond_01_bars.json has other data or artists"]
    with pytest.raises(ValueError, match="simulated"):
        publish(tmp_path / "4", monkeypatch, timed=["y"])


def test_live_numbers_may_lie_apart_by_a_twentieth_of_the_largest(tmp_path, monkeypatch):
    first, near, far, whole = (
        publish(tmp_path / name, monkeypatch, kind="measured", scale=scale)
        for name, scale in (("1", 1.1), ("2", 1.12), ("3", 1.2), ("4", 1.0))
    )
    assert sentences(first, near) == []
    assert sentences(first, far) == ["beyond_01_bars.csv has '3.6' in row 2 of y, the run '3.3'"]
    assert sentences(near, whole)  # whole numbers, as budgets, are exact


def test_a_file_that_nobody_makes_is_refused(tmp_path, monkeypatch, capsys):
    """The command, on a repository of one notebook whose run is there."""
    fresh, copied = publish(tmp_path / "runs", monkeypatch), publish(tmp_path / "figures", monkeypatch)
    layout = Layout(tmp_path)
    layout.papers = lambda named=(): ["tiny"]
    job = type("Job", (), {"paper": "tiny", "folder": tmp_path / "job"})()
    job.folder.joinpath("figures").mkdir(parents=True)
    fresh.rename(job.folder / "figures" / "tiny")
    monkeypatch.setattr(published.run, "Layout", lambda: layout)
    monkeypatch.setattr(published.run, "plan", lambda papers: [job])
    monkeypatch.setattr(published.run, "run_all", lambda jobs: [])
    assert published.main([]) == 0 and "0 differences" in capsys.readouterr().out
    (copied / "beyond_01_bars.csv").write_text("x\n1\n")
    assert published.main(["tiny"]) == 1
    assert "figures/tiny/beyond_01_bars.csv is not the file that" in capsys.readouterr().out
    for name in ("tiny/notes.txt", "other"):
        (layout.figures / name).write_text("")
        with pytest.raises(SystemExit) as end:
            published.main([])
        assert end.value.code == 2 and f"figures/{name} " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("first", "second", "equal"),
    [
        ("1.00000", "1.00001", True), ("1.0000", "1.0002", False), ("0", "-3e-17", True), ("a 1", "b 1", False),
        ('{"low": 0.3875968992248069}', '{"low": 0.387596899224818}', True), ("", "0", False), ("nan", "nan", True),
    ],
)  # fmt: skip
def test_cells_are_equal_but_for_rounding(first, second, equal):
    assert published.same(first, second) == equal


def test_the_hash_of_what_is_drawn_is_of_data_not_of_pixels(tmp_path):
    first = hashes(draw())
    figure = draw()
    figure.savefig(tmp_path / "small.svg", dpi=40)
    with plt.rc_context({"font.family": "DejaVu Serif", "font.size": 14, "figure.dpi": 200}):
        large = draw()
    assert first == hashes(figure) == hashes(large)
    assert hashes(draw(table=TABLE.assign(y=TABLE["y"] * (1 + 1e-13)))) == first
    plt.close("all")
