"""Estimates with their kind and interval, rules that turn them into verdicts, and records of long runs."""
# ruff: noqa: F401, I001

from ondevice.extras import needing

with needing("notebooks", __name__):
    from ondevice.evidence.checks import Again, some, stale
    from ondevice.evidence.claims import Claim, Judged, Untested, judged, read_claims
    from ondevice.evidence.estimates import KINDS, born, derived, kind_of
    from ondevice.evidence.estimates import Estimate, Value, exact, mean, ratio, resampled, share, spread
    from ondevice.evidence.exhibits import environment, machine_name
    from ondevice.evidence.paper_run import PaperRun, quoted, read_value
    from ondevice.evidence.records import Agreement, Recorder, RecordError, agreement, load, machines, times
    from ondevice.evidence.rules import Above, All, Any, AtLeast, AtMost, Below, Between, Both, Each, Either, Equal
    from ondevice.evidence.rules import VERDICTS, Less, Near, Never, Over, Rule, Test
    from ondevice.evidence.sampling import sampled
