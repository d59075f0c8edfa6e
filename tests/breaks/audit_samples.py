"""Faults of an audit: in what a random sample of the record has to notice."""

from copies import Break

UNIT = "tests/unit/test_"

FAULTS = [
    Break(
        "a near-tie is whatever is closer than 0.1", "shared", "lib/ondevice/evidence/records.py",
        "near: float = 1e-4", "near: float = 0.1",
        (f"{UNIT}records.py::test_only_a_near_tie_may_differ",),
    ),
    Break(
        "DIAA's tables forget between requests", "diaa", "lib/ondevice_papers/diaa/drafter.py",
        "        self._prompt = prompt\n",
        "        self._prompt = prompt\n"
        "        self._warmed = getattr(self, '_warmed', None) or self.tables.copy()\n"
        "        self.tables = self._warmed.copy()\n",
        (f"{UNIT}diaa.py::test_tables_last_from_request_to_request",),
    ),
    Break(
        "the sample is the first request of each task", "shared", "lib/ondevice/evidence/sampling.py",
        ".iloc[random.permutation(len(ordered))]", "",
        (f"{UNIT}sampling.py::test_the_seed_draws_over_all_units_and_the_order_of_rows_does_not_matter",),
    ),
]  # fmt: skip
