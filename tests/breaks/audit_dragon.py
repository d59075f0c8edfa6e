"""Faults of an auditor in DRAGON's units and nulls."""

from copies import Break

STUDY = "lib/ondevice_studies/dragon/study.py"
CLAIMS = "lib/ondevice_studies/dragon/claims.py"

FAULTS = [
    Break(
        "windows are drawn, not the documents that they are of",
        "dragon",
        STUDY,
        'request=documents, method=windows["model"]',
        'request=windows["window"], method=windows["model"]',
        (
            "tests/unit/test_dragon_study.py::"
            "test_windows_of_a_document_are_drawn_together_and_both_models_have_the_same",
        ),
    ),
    Break(
        "imposed times are called recorded alone",
        "dragon",
        STUDY,
        '("quoted",) if pace in PRINTED_PACES else ()',
        "()",
        ("tests/unit/test_dragon_study.py::test_times_at_the_papers_paces_say_that_these_are_quoted",),
    ),
    Break(
        "Eq. 8's null is Eq. 8",
        "dragon",
        CLAIMS,
        '{"difference": lambda costs, local, remote: costs.decode_local - costs.decode_remote}',
        "{}",
        ("tests/unit/test_dragon_claims.py::test_every_judged_claim_has_a_null",),
    ),
]
