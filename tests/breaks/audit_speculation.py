"""Faults of an auditor in sd.npu's and DIAA's units and nulls."""

from copies import Break

UNIT = "tests/unit/test_"

FAULTS = [
    Break(
        "a prompt that two models answer is drawn for each",
        "shared",
        "lib/ondevice_studies/speculation/nested.py",
        "            own = weights[:, labels.get_indexer(wide.index)]\n",
        "            own = random.permuted(weights, axis=1)[:, labels.get_indexer(wide.index)]\n",
        (f"{UNIT}nested.py::test_two_models_on_the_same_prompts_are_no_more_samples_than_one",),
    ),
    Break(
        "intervals of six prompts are not widened",
        "shared",
        "lib/ondevice_studies/speculation/nested.py",
        "ends = widened(self.fewest, max(1, self.n - len(set(self.prompts))))",
        "ends = (0.025, 0.975)",
        (f"{UNIT}nested.py::test_an_interval_of_few_prompts_is_as_wide_as_that_of_resampled",),
    ),
    Break(
        "pairs that are dealt at random keep their relation",
        "sdnpu",
        "lib/ondevice_studies/sdnpu/values.py",
        '.permutation(cosines["pair"].to_numpy())',
        '.permuted(cosines["pair"].to_numpy()[:, None], axis=1)[:, 0]',
        (f"{UNIT}sdnpu_study.py::test_of_pairs_that_are_dealt_at_random_no_relation_is_nearer",),
    ),
    Break(
        "overheads are means of the answers' shares",
        "diaa",
        "lib/ondevice_studies/diaa/study.py",
        "float(100 * part[rows].sum() / decode[rows].sum())",
        "float(100 * (part[rows] / decode[rows]).mean())",
        (f"{UNIT}diaa_study.py::test_overheads_are_sums_over_sums_of_the_model_whose_answers_take_longest",),
    ),
    Break(
        "the regime of a speed is another one",
        "diaa",
        "lib/ondevice_studies/diaa/claims.py",
        '"Regime: the paper\'s for its 3B, implied: T(81)/T(1) 1.31"',
        '"Regime: the paper\'s for its 3B, implied: T(81)/T(1) 3.31"',
        (f"{UNIT}diaa_study.py::test_the_regimes_that_the_rules_name_are_the_implied_ones",),
    ),
]
