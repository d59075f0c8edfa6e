"""Faults of an audit: what is published is not what runs, and a simulation that calls itself a measurement."""

from copies import Break

FIGURES = "tests/unit/test_check_figures.py::test_"
MEASURED = ("tests/unit/test_kinds.py::test_a_kind_is_attached_where_it_is_listed_and_nowhere_else[measured]",)
AGAIN = "tests/notebooks/test_exhibits_again.py::test_an_exhibit_is_made_again_from_its_cells"
CHECK = "lib/ondevice_studies/published.py"

FAULTS = [
    Break(
        "another column is plotted",
        "sdnpu",
        "notebooks/sdnpu.ipynb",
        'axes[0, 1].plot(contexts["overlap"], contexts["cosine"]',
        'axes[0, 1].plot(contexts["overlap"], contexts["overlap"]',
        (f"{AGAIN}[sdnpu-figure-3]",),
    ),
    Break(
        "times of a fitted phone are called measured",
        "sdnpu",
        "lib/ondevice_papers/sdnpu/npu.py",
        '== HELD_OUT), "simulated"',
        '== HELD_OUT), "measured"',
        MEASURED,
    ),
    Break(
        "simulated costs are called measured",
        "disco",
        "lib/ondevice_studies/disco/study.py",
        'return Bill(born(table, "simulated")',
        'return Bill(born(table, "measured")',
        MEASURED,
    ),
    Break(
        "a simulated exhibit is called measured",
        "disco",
        "notebooks/disco.ipynb",
        'evidence.born(held, "simulated")',
        'evidence.born(held, "measured")',
        MEASURED,
    ),
    Break(
        "a picture's hash is not looked at",
        "shared",
        CHECK,
        "if not whole:",
        'if not whole and suffix == "csv":',
        (f"{FIGURES}an_edited_picture_is_named",),
    ),
    Break(
        "a stale picture with a mended hash passes",
        "shared",
        CHECK,
        "Image.open(file).info.get(DRAWN)",
        'record.get("drawn_sha256")',
        (f"{FIGURES}a_stale_picture_is_named",),
    ),
    Break(
        "a halved table passes",
        "shared",
        CHECK,
        "if list(now) != list(before) or len(now) != len(before):",
        "if list(now) != list(before):",
        (f"{FIGURES}a_halved_or_edited_csv_is_named",),
    ),
    Break(
        "relabelled kinds pass where all files agree",
        "shared",
        CHECK,
        'REPEATED = ("exhibit", "title", "kind",',
        'REPEATED = ("exhibit", "title",',
        (f"{FIGURES}a_relabelled_kind_is_named",),
    ),
    Break(
        "a machine may have any name",
        "shared",
        CHECK,
        'if machine.get("name") != facts:',
        "if False:",
        (f"{FIGURES}an_invented_machine_is_named",),
    ),
    Break(
        "what is drawn counts without its data",
        "shared",
        "lib/ondevice/evidence/drawn.py",
        "np.floor(numbers * _STEPS + _SHIFT)",
        "np.floor(0 * numbers)",
        (f"{FIGURES}another_column_or_colour_is_named",),
    ),
]
