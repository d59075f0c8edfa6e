"""Faults of an audit: rules that change in silence. The lock is compared with the code, whatever is published."""

from copies import Break

LOCK = "tests/unit/test_rules_lock.py::test_"

FAULTS = [
    Break(
        "a bound loosened and published",
        "diaa",
        "lib/ondevice_studies/diaa/claims.py",
        "AtLeast(95),",
        "AtLeast(85),",
        (f"{LOCK}the_lock_has_the_codes_rules",),
    ),
    Break(
        "a lock that is not compared with the code",
        "shared",
        "lib/ondevice_studies/rules_lock.py",
        "if last.get(claim) != (form(rule), words(rule))",
        "if claim not in last",
        (f"{LOCK}a_bound_that_is_loosened_fails_even_where_its_verdict_is_published",),
    ),
    Break(
        "bounds rounded in what the lock compares",
        "shared",
        "lib/ondevice/evidence/rules.py",
        "repr(float(x))",
        'f"{float(x):.2g}"',
        (f"{LOCK}a_form_that_is_read_judges_as_the_code_does",),
    ),
]
