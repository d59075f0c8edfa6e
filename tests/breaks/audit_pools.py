"""Faults of an auditor: validation pools in the place of test pools, and DRAGON's first wait dropped."""

from copies import Break

GRATING, DRAGON = "lib/ondevice_studies/grating/study.py", "lib/ondevice_studies/dragon/study.py"
POOLS = "tests/unit/test_grating_study.py::test_"
WAITS = "tests/unit/test_dragon_study.py::test_"
WAIT = f"{WAITS}the_wait_for_the_first_token_counts_from_the_devices_first_distribution"
PUBLISHED = f"{WAITS}figure_7_as_published_is_the_records_time_a_token_with_the_first_wait"

FAULTS = [
    Break(
        "pools are those of validation where no split is named",
        "grating",
        GRATING,
        'set_: str, split: str = "test", probed',
        'set_: str, split: str = "validation", probed',
        (f"{POOLS}what_is_judged_are_test_pools",),
    ),
    Break(
        "rules are judged on validation pools",
        "grating",
        GRATING,
        'pools_of(scores, model, set_, "test", rule == PROBED)',
        'pools_of(scores, model, set_, "validation", rule == PROBED)',
        (f"{POOLS}what_is_judged_are_test_pools",),
    ),
    Break(
        "validation pools are read whatever the split",
        "grating",
        GRATING,
        '(scores["split"] == split)]',
        '(scores["split"] == "validation")]',
        (
            f"{POOLS}what_is_judged_are_test_pools",
            f"{POOLS}the_recorded_pools_of_both_splits_are_apart_and_curves_are_of_test_pools",
        ),
    ),
    Break(
        "the notebook shows a threshold's effect on validation pools",
        "grating",
        "notebooks/grating.ipynb",
        "few = study.pools_of(scores, study.DEEP, QUESTIONS)[:pools]",
        'few = study.pools_of(scores, study.DEEP, QUESTIONS, "validation")[:pools]',
        (f"{POOLS}the_notebook_reads_validation_pools_where_it_calibrates_alone",),
    ),
    Break(
        "the sample forgets the cache's rows from pool to pool",
        "grating",
        "lib/ondevice_papers/grating/embedding_cache.py",
        "there = self.slot[wanted] >= 0",
        "there = np.zeros(len(wanted), bool)",
        ("tests/unit/test_grating_window.py::test_a_cache_finds_what_is_due_unless_it_forgets",),
    ),
    Break(
        "a session's time begins with its first token",
        "dragon",
        DRAGON,
        'total_ms=last - rows["prefilled"].astype(float),',
        "total_ms=last - first,",
        (WAIT, PUBLISHED),
    ),
    Break(
        "time per token leaves the first wait out",
        "dragon",
        DRAGON,
        'pace: str, column: str = "total_ms"',
        'pace: str, column: str = "between_ms"',
        (WAIT, PUBLISHED),
    ),
    Break(
        "the first token's time begins with the first distribution",
        "dragon",
        DRAGON,
        "ttft_ms=first,",
        'ttft_ms=first - rows["prefilled"].astype(float),',
        (WAIT,),
    ),
    Break(
        "a row's first distribution is its first token",
        "dragon",
        "lib/ondevice_studies/dragon/record.py",
        '"prefilled": _ms([answer.prefilled or 0.0]),',
        '"prefilled": _ms(answer.times[:1]),',
        ("tests/unit/test_dragon_record.py::test_an_answer_is_a_row_that_is_read_back",),
    ),
]
