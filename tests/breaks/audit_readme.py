"""Faults of an auditor: in README's words, in the choice of its rows, in intervals and in nulls."""

from copies import Break

UNIT = "tests/unit/test_"
README = f"{UNIT}run_readme.py::test_"

FAULTS = [
    Break(
        "a number in README's prose",
        "shared",
        "README.md",
        "On two cores the set-up takes two minutes",
        "On two cores the set-up takes one or 2.5 minutes",
        (f"{README}the_readmes_own_text_has_no_other_number",),
    ),
    Break(
        "a number in a row that is written",
        "shared",
        "docs/findings.md",
        "DIAA: speed over plain decoding, simulated in the paper's regime | 2.22 x | 1.6",
        "DIAA: speed over plain decoding, simulated in the paper's regime | 2.22 x | 2.6",
        (f"{README}a_page_is_that_of_the_published_verdicts[docs/findings.md]",),
    ),
    Break(
        "a number in README's findings",
        "shared",
        "README.md",
        "| 1.65 [1.6",
        "| 2.65 [1.6",
        (f"{README}a_page_is_that_of_the_published_verdicts[README.md]",),
    ),
    Break(
        "a finding's words are kept under another verdict",
        "shared",
        "lib/ondevice_studies/front.py",
        "if published != verdict:",
        "if False:",
        (f"{README}words_for_another_verdict_are_refused",),
    ),
    Break(
        "a default of the public API changes",
        "shared",
        "lib/ondevice/models.py",
        'device: str = "cpu", seed: int = 0) -> Loaded:',
        'device: str = "cpu", seed: int = 1) -> Loaded:',
        (f"{UNIT}api.py::test_the_page_shows_the_librarys_signatures",),
    ),
    Break(
        "a headline swapped for a reproduced claim",
        "diaa",
        "lib/ondevice_studies/diaa/claims.py",
        'headline="DIAA: speed over plain decoding, simulated in the paper\'s regime",',
        "",
        (f"{README}the_headlines_are_the_numbers_of_the_abstracts",),
    ),
    Break(
        "the widening for few samples is dropped",
        "shared",
        "lib/ondevice/evidence/estimates.py",
        "math.sqrt(fewest / (fewest - 1)) * stats.t.isf((1 - LEVEL) / 2, degrees)",
        "stats.norm.isf((1 - LEVEL) / 2)",
        (f"{UNIT}rules.py::test_an_interval_of_few_samples_is_wider_than_the_percentiles_of_its_draws",),
    ),
    Break(
        "an interval of 90 percent",
        "shared",
        "lib/ondevice/evidence/estimates.py",
        "LEVEL = 0.95",
        "LEVEL = 0.9",
        (f"{UNIT}rules.py::test_an_interval_of_few_samples_is_wider_than_the_percentiles_of_its_draws",),
    ),
    Break(
        "clusters are drawn as single samples",
        "shared",
        "lib/ondevice/evidence/estimates.py",
        "strata = [_members(rows, clusters) for rows in _strata(groups, n)]",
        "strata = [_members(rows, None) for rows in _strata(groups, n)]",
        (f"{UNIT}rules.py::test_repeated_measurements_of_a_prompt_are_no_further_prompts",),
    ),
    Break(
        "a null is computed by another function",  # which stops the import of a table of claims, so its guard is broken
        "shared",
        "lib/ondevice/evidence/rules.py",
        "if not isinstance(self.null, Mapping):",
        "if callable(self.null):\n            return\n        if not isinstance(self.null, Mapping):",
        (f"{UNIT}rules.py::test_a_null_of_another_function_or_of_other_parameters_is_refused",),
    ),
]
