"""Faults of an auditor in what intervals draw, in memory and in nulls of DiSCo and GRATING."""

from copies import Break

DISCO = "tests/unit/test_disco_study.py::test_"
MODELS = "tests/unit/test_disco_models.py::test_"
GRATING = "tests/unit/test_grating_study.py::test_"

FAULTS = [
    Break(
        "a prompt that is asked five times is five prompts",
        "disco",
        "lib/ondevice_studies/disco/claims.py",
        'drawn="prompts", clusters=alpaca["request"].tolist()',
        'drawn="prompts"',
        (f"{DISCO}the_correlation_is_over_prompts_and_its_null_has_the_lengths_of_others",),
    ),
    Break(
        "streams are drawn, not requests",
        "disco",
        "lib/ondevice_studies/disco/study.py",
        'streams.groupby(["service", "request"])["stalled"]',
        'streams.groupby(streams.index)["stalled"]',
        (f"{DISCO}the_streams_of_a_request_are_drawn_together",),
    ),
    Break(
        "prompts on one document are drawn apart",
        "disco",
        "lib/ondevice_papers/disco/quality.py",
        "    n = int(document.max()) + 1\n",
        "    document, n = np.arange(len(document)), len(document)\n",
        (f"{MODELS}prompts_on_one_document_are_drawn_together",),
    ),
    Break(
        "questions on one document are drawn apart",
        "grating",
        "lib/ondevice_studies/grating/study.py",
        '"name": "request"})',
        '"pool": "request"})',
        (f"{GRATING}questions_on_one_document_are_drawn_together",),
    ),
    Break(
        "a range of runs is called an interval",
        "grating",
        "lib/ondevice_studies/grating/values.py",
        '"runs", "range")',
        '"runs")',
        (f"{GRATING}memory_is_a_range_of_runs_of_both_kinds",),
    ),
    Break(
        "resident memory is called anonymous",
        "grating",
        "lib/ondevice_studies/grating/values.py",
        "of_runs(values(ANONYMOUS), memory)",
        "of_runs(values(RESIDENT), memory)",
        (f"{GRATING}memory_is_a_range_of_runs_of_both_kinds",),
    ),
    Break(
        "no pruning is pruning",
        "grating",
        "lib/ondevice_studies/grating/claims.py",
        '_UNPRUNED = {"ours": UNPRUNED}',
        '_UNPRUNED = {"ours": "GRATING"}',
        (f"{GRATING}the_null_of_a_saving_is_ranking_without_pruning",),
    ),
    Break(
        "growth of memory is measured without its baseline",
        "shared",
        "lib/ondevice/meters/memory.py",
        "return total - total[self.at[0]]",
        "return total",
        ("tests/unit/test_meters.py::test_several_kinds_are_added_at_the_same_time",),
    ),
]
