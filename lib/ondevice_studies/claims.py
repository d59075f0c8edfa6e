"""Every paper's table of claims, in README's order."""

from __future__ import annotations

from collections.abc import Mapping

from ondevice.evidence import Claim
from ondevice_studies.diaa.claims import CLAIMS as DIAA
from ondevice_studies.disco.claims import CLAIMS as DISCO
from ondevice_studies.dragon.claims import CLAIMS as DRAGON
from ondevice_studies.grating.claims import CLAIMS as GRATING
from ondevice_studies.sdnpu.claims import CLAIMS as SDNPU

CLAIMS: Mapping[str, Mapping[str, Claim]] = {
    "disco": DISCO,
    "dragon": DRAGON,
    "sdnpu": SDNPU,
    "diaa": DIAA,
    "grating": GRATING,
}


def headlines() -> dict[str, str]:
    """README's words by the claim that they are of, one a paper."""
    return {claim: row.headline for rows in CLAIMS.values() for claim, row in rows.items() if row.headline}
