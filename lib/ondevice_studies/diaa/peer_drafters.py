"""Later drafters without training, each by its authors' rules, for a public model."""

from __future__ import annotations

from ondevice.speculation import Drafter
from ondevice.speculation.cacheback import Cacheback
from ondevice.speculation.goose import Goose
from ondevice.speculation.logit_spec import LogitSpec
from ondevice.speculation.racer import Racer
from ondevice.speculation.suffix_decoding import SuffixDecoding
from ondevice_studies.diaa.workbench import Bench


def goose(bench: Bench) -> Drafter:
    """Goose, without a corpus."""
    return Goose(bench.lm.vocabulary)


def suffix_decoding(bench: Bench) -> Drafter:
    """SuffixDecoding, without a corpus."""
    return SuffixDecoding()


def logit_spec(bench: Bench) -> Drafter:
    """LogitSpec."""
    return LogitSpec()


def racer(bench: Bench) -> Drafter:
    """RACER."""
    return Racer(bench.lm.vocabulary)


def cacheback(bench: Bench) -> Drafter:
    """Cacheback."""
    return Cacheback()
