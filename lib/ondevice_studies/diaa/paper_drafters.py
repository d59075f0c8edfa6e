"""DIAA, its ablations and readings, and the paper's baselines, for a public model."""

from __future__ import annotations

from typing import Any

from ondevice.causal_lm import CausalLM
from ondevice.speculation import Drafter
from ondevice.speculation.layer_skipping import LayerSkipping
from ondevice.speculation.prompt_lookup import PromptLookup
from ondevice.speculation.sam_decoding import SamDecoding, automaton
from ondevice_papers.diaa import ambiguities
from ondevice_papers.diaa.drafter import RECYCLING, Diaa
from ondevice_studies.diaa.workbench import Workbench


def prompt_lookup(bench: Workbench) -> Drafter:
    """Prompt lookup by its author's rule."""
    return PromptLookup.original()


def sam_decoding(bench: Workbench) -> Drafter:
    """SAM-Decoding whose corpus is DIAA's warm-up text, for a fair comparison."""
    return SamDecoding(automaton(sequence.tolist() for sequence in bench.text("tasks")))


def layer_skipping(bench: Workbench) -> Drafter:
    """SWIFT's drafting without its search."""
    return LayerSkipping(CausalLM(bench.loaded.model))


def diaa(bench: Workbench, kind: Any = "tasks", **options: Any) -> Drafter:
    """DIAA with tables of a text that the model has read. options: of `Diaa`."""
    return Diaa(bench.tables(kind), **options)


def diaa_prompt_read(bench: Workbench) -> Drafter:
    """The prompt's logits update the tables, too."""
    return diaa(bench, reads_prompt=True)


def diaa_cold(bench: Workbench) -> Drafter:
    """Without a warm-up."""
    return diaa(bench, "cold")


def diaa_static(bench: Workbench) -> Drafter:
    """Token Recycling's template in place of the grown tree."""
    return diaa(bench, template=RECYCLING)


def diaa_static_cold(bench: Workbench) -> Drafter:
    """Neither a warm-up nor a grown tree."""
    return diaa(bench, "cold", template=RECYCLING)


def diaa_stale(bench: Workbench) -> Drafter:
    """Tables are updated one step late, as beside the next forward."""
    return diaa(bench, stale=True)


def diaa_refreshed_4(bench: Workbench) -> Drafter:
    """A tree is grown at every fourth step."""
    return diaa(bench, refresh=4)


def diaa_refreshed_8(bench: Workbench) -> Drafter:
    """A tree is grown at every eighth step."""
    return diaa(bench, refresh=8)


def diaa_documents(bench: Workbench) -> Drafter:
    """Tables of documents."""
    return diaa(bench, "documents")


def diaa_bigrams(bench: Workbench) -> Drafter:
    """Tables counted from documents, without the model."""
    return diaa(bench, "bigrams")


def diaa_replacing(bench: Workbench) -> Drafter:
    """Of the fresh tokens only the likeliest comes in."""
    return diaa(bench, update=ambiguities.replace)


def diaa_union(bench: Workbench) -> Drafter:
    """Rows keep the most probable of fresh and old entries."""
    return diaa(bench, update=ambiguities.union)


def diaa_accepted_only(bench: Workbench) -> Drafter:
    """Only the root and accepted nodes update the tables."""
    return diaa(bench, learns=ambiguities.accepted_only)


def diaa_counting_root(bench: Workbench) -> Drafter:
    """The budget counts the root, too."""
    return diaa(bench, grow=ambiguities.grow_counting_root)


def diaa_two_tokens(bench: Workbench) -> Drafter:
    """Tables are keyed by a hash of the last two tokens."""
    return ambiguities.TwoTokens(bench.lm.vocabulary)
