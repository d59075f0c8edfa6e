"""The mixture, without a store, for a public model."""

from __future__ import annotations

from ondevice.speculation import Drafter
from ondevice.speculation.bundled import mixture as bundled_mixture
from ondevice_studies.diaa.workbench import Bench


def mixture(bench: Bench) -> Drafter:
    """The mixture with the weights that ship for any model."""
    return bundled_mixture()
