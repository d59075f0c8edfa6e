"""The faults: what is wrong in which paper, and the check that has to fail."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import torch
from injection import ROOT, Fault, Injection

from ondevice.causal_lm.tree import Topology
from ondevice.evidence import sidecars
from ondevice.evidence.rules import AtLeast
from ondevice.speculation import Draft
from ondevice_papers.diaa.tables import Fresh
from ondevice_papers.disco import dispatch

FAULTS: list[Fault] = []


def fault(paper: str, check: str) -> Callable[[Callable[[Injection], None]], Fault]:
    """Register what puts in a fault, which its docstring names. check: `test_file.py::test_name`, of tests/unit."""

    def register(put: Callable[[Injection], None]) -> Fault:
        name = " ".join((put.__doc__ or "").split()).rstrip(".")
        FAULTS.append(Fault(paper, name, check if "/" in check.partition("::")[0] else f"unit/{check}", put))
        return FAULTS[-1]

    return register


# Evidence that all papers share


@fault("shared", "test_rules.py::test_a_mean_weighs_groups_the_same_and_its_interval_covers_95_percent")
def another_level(inject):
    """Intervals are of 90 percent."""
    inject("ondevice.evidence.estimates:LEVEL", lambda right: 0.9)


@fault("shared", "test_rules.py::test_an_interval_of_few_samples_is_wider_than_the_percentiles_of_its_draws")
def not_widened(inject):
    """Intervals of few samples are not widened."""
    inject("ondevice.evidence.estimates:widened", lambda right: lambda fewest, degrees: (0.025, 0.975))


@fault("shared", "test_rules.py::test_repeated_measurements_of_a_prompt_are_no_further_prompts")
def pairs_for_prompts(inject):
    """A prompt that is asked five times is five prompts."""
    inject(
        "ondevice.evidence.estimates:resampled",
        lambda right: lambda *given, clusters=None, **named: right(*given, **named),
    )


@fault("shared", "test_rules.py::test_a_verdict_needs_the_whole_interval")
def values_judged_alone(inject):
    """A verdict is the value's, without its interval."""
    inject(
        "ondevice.evidence.rules:parts_of",
        lambda right: lambda value: tuple(part.scaled(0.0) for part in right(value)),
    )


@fault("shared", "test_rules.py::test_a_kind_travels_through_selections_and_joins_its_parents")
def first_parents_kind(inject):
    """What is made of recorded and of quoted tables is called recorded."""
    inject("ondevice.evidence.estimates:derived", lambda right: lambda table, first, *rest: right(table, first))


@fault("shared", "test_rules.py::test_a_null_of_another_function_or_of_other_parameters_is_refused")
def null_of_another_function(inject):
    """A null is computed by another function."""
    inject("ondevice.evidence.claims:Claim.__post_init__", lambda right: lambda self: None)


@fault("shared", "test_evidence.py::test_a_null_with_the_same_verdict_does_not_discriminate")
def null_never_compared(inject):
    """A null that does as well is not told."""
    inject("ondevice.evidence.paper_run:_at_least_as_good", lambda right: lambda null, verdict: False)


@fault("shared", "test_records.py::test_only_a_near_tie_may_differ")
def near_ties_within_a_tenth(inject):
    """A near-tie is whatever is closer than 0.1."""
    inject("ondevice.evidence.records:agreement", lambda right: partial(right, near=0.1))


@fault("shared", "test_records.py::test_a_record_that_is_not_right_is_refused_in_one_sentence")
def edits_believed(inject):
    """An invented machine in a sidecar is believed, as nothing compares the seal."""
    inject(
        "ondevice.evidence.sidecars:seal", lambda right: lambda origin, path: origin.get("seal") or right(origin, path)
    )


def recorded_anew(inject: Injection, name: str, harm: Callable[[str], str], **fields: object) -> None:
    """Change a record and fields of its sidecar, and seal and list both again."""
    path = ROOT / "data" / "records" / name
    inject.file(f"data/records/{name}", harm)
    beside = path.with_suffix(".json")
    origin = json.loads(beside.read_text()) | fields
    inject.json(f"data/records/{name.rpartition('.')[0]}.json", **fields, seal=sidecars.seal(origin, path))
    line = {"sha256": sidecars.sha256(path), "sidecar": sidecars.sha256(beside), "rows": origin["rows"]}
    inject.json("data/records/manifest.json", **{name: line})


@fault("shared", "test_committed_records.py::test_a_sidecar_says_what_its_file_bears_out[sdnpu/whole.zen4-2c]")
def invented_machine(inject):
    """A record is of an invented machine, commit and minutes, and sealed anew."""
    invented = {"machine": "zen9-64c", "commit": "0" * 40, "minutes": 999.0}
    recorded_anew(inject, "sdnpu/whole.zen4-2c.csv", lambda text: text + "\n", **invented)


@fault("shared", "test_committed_records.py::test_a_record_is_its_whole_grid[sdnpu/whole.zen4-2c]")
def rows_dropped(inject):
    """A tenth of a record's rows is dropped, and the rest counted and sealed anew."""
    path = "data/records/sdnpu/whole.zen4-2c.csv"
    kept = (9 * (ROOT / path).read_text().count("\n")) // 10
    recorded_anew(inject, path[13:], lambda text: "".join(text.splitlines(True)[:kept]), rows=kept - 1)


@fault("shared", "test_medians.py::test_the_interval_of_a_median")
def mean_in_a_medians_interval(inject):
    """A median's interval stands around the mean."""
    inject(
        "ondevice.evidence.resampling:median_interval",
        lambda right: lambda samples: (np.mean(samples, axis=0), *right(samples)[1:]),
    )


@fault("shared", "test_sampling.py::test_the_seed_draws_over_all_units_and_the_order_of_rows_does_not_matter")
def sample_of_the_first(inject):
    """A sample of a record is always the same units."""
    inject(
        "ondevice.evidence.sampling:sampled",
        lambda right: lambda units, seed, *given, **named: right(units, 0, *given, **named),
    )


@fault("shared", "test_meters.py::test_several_kinds_are_added_at_the_same_time")
def no_baseline(inject):
    """Growth of memory is measured without its baseline."""
    inject(
        "ondevice.meters.memory:Sampled.growth",
        lambda right: lambda self, *kinds: np.sum([getattr(self, kind) for kind in kinds], axis=0),
    )


# What is published


def agree(paper: str) -> str:
    return f"test_check_figures.py::test_figures_agree_with_themselves_and_hold_what_a_notebook_makes[{paper}]"


def swapped_picture(inject: Injection) -> None:
    other = (ROOT / "figures/diaa/beyond_01_sources.png").read_bytes()
    inject.file("figures/diaa/beyond_01_methods.png", lambda content: other)


@fault("shared", agree("diaa"))
def stale_picture(inject):
    """A published picture is that of another run."""
    swapped_picture(inject)


@fault("shared", agree("diaa"))
def stale_picture_with_its_hash(inject):
    """A published picture is that of another run, with its hash mended."""
    swapped_picture(inject)
    digest = sidecars.sha256(ROOT / "figures/diaa/beyond_01_methods.png")
    inject.json("figures/diaa/beyond_01_methods.json", png_sha256=digest)


@fault("shared", agree("dragon"))
def halved_table(inject):
    """A published table has half of its rows."""
    inject.file(
        "figures/dragon/fig_06_perplexity.csv",
        lambda text: "".join(text.splitlines(True)[: text.count("\n") // 2]),
    )


@fault("shared", "test_check_figures.py::test_a_halved_or_edited_csv_is_named")
def tables_never_compared(inject):
    """A run's tables are not compared with the published ones."""
    inject("ondevice_studies.published:_other_table", lambda right: lambda new, old: iter(()))


@fault("shared", "test_check_figures.py::test_another_column_or_colour_is_named")
def another_column(inject):
    """Another column is plotted, and the hash of what is drawn is the same."""
    inject("ondevice.evidence.drawn:_steps", lambda right: lambda values: right(0 * np.ma.asarray(values, float)))


@fault("shared", "notebooks/test_published.py::test_exhibits_are_of_the_kind_that_the_notebook_printed[grating]")
def relabelled_kind(inject):
    """A replay is published as measured, in all files alike."""
    inject.json("figures/grating/fig_10_trade_off.json", kind="measured")
    inject.file("figures/grating/exhibits.csv", lambda text: re.sub(r"(?m)^fig_10,\w+", "fig_10,measured", text))


@fault("shared", "test_kinds.py::test_what_is_called_measured_reads_a_clock_or_a_meter_or_runs_a_model")
def simulated_called_measured(inject):
    """Times of a fitted phone are called measured."""
    inject.file("lib/ondevice_papers/sdnpu/npu.py", lambda text: text.replace('"simulated"', '"measured"'))


@fault("shared", "notebooks/test_source_cells.py::test_source_cells_are_the_library[disco]")
def edited_source_cell(inject):
    """A source cell of a notebook is edited."""

    def edited(text: str) -> str:
        notebook = json.loads(text)
        tagged = [cell for cell in notebook["cells"] if "source:" in "".join(cell["metadata"].get("tags", ()))]
        tagged[0]["source"] = [line.replace(" + ", " - ") for line in tagged[0]["source"]]
        return json.dumps(notebook)

    inject.file("notebooks/disco.ipynb", edited)


def other_number(text: str, behind: str = "") -> str:
    """The text with its first digit behind a mark changed."""
    head, mark, rest = text.partition(behind) if behind else ("", "", text)
    return head + mark + re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), rest, count=1)


@fault("shared", "test_run_readme.py::test_the_readmes_own_text_has_no_other_number")
def number_in_prose(inject):
    """A number in README's prose is another one."""
    inject.file("README.md", other_number)


@fault("shared", "test_run_readme.py::test_a_page_is_that_of_the_published_verdicts[README.md]")
def number_in_findings(inject):
    """A number in README's findings is another one."""
    inject.file("README.md", partial(other_number, behind="<!-- findings"))


@fault("shared", "test_run_readme.py::test_a_page_is_that_of_the_published_verdicts[docs/findings.md]")
def number_in_a_row(inject):
    """A number in the table of the abstracts' numbers is another one."""
    inject.file("docs/findings.md", partial(other_number, behind="<!-- summary"))


@fault("diaa", "test_run_readme.py::test_the_headlines_are_the_numbers_of_the_abstracts")
def swapped_headline(inject):
    """A headline is swapped for a reproduced claim."""
    claims = pd.read_csv(ROOT / "figures/diaa/claims.csv").set_index("claim")
    inject.claim("diaa-c12", lambda claim: replace(claim, headline=""))
    reproduced = next(claim for claim in claims.index[claims["verdict"] == "reproduced"])
    inject.claim(reproduced, lambda claim: replace(claim, headline="DIAA: speed"))


@fault("diaa", "test_rules_lock.py::test_the_lock_has_the_codes_rules")
def loosened_bound(inject):
    """A rule's bound is loosened, and the verdict published."""
    inject.claim("diaa-c03", lambda claim: replace(claim, rule=replace(claim.rule, reproduced=AtLeast(0.01))))


# DIAA


@fault("diaa", "test_medians.py::test_diaa_s_curves")
def diaa_means(inject):
    """DIAA's recorder takes the mean for the median."""
    inject(
        "ondevice_studies.diaa.costs:curves",
        lambda right: lambda *given: right(*given).assign(seconds=lambda t: t["mean"]),
    )


@fault("diaa", "test_diaa.py::test_tables_last_from_request_to_request")
def forgetful_tables(inject):
    """DIAA's tables forget between requests."""
    warm = {}

    def begin(right):
        def forget(self, prompt):
            self.tables = warm.setdefault(id(self), self.tables.copy()).copy()
            right(self, prompt)

        return forget

    inject("ondevice_papers.diaa.drafter:Learning.begin", begin)


@fault("diaa", "test_diaa.py::test_the_tree_is_that_of_the_naive_growth")
def no_decay(inject):
    """Eq. 2 has no decay by depth."""
    inject(
        "ondevice_papers.diaa.tree:grow",
        lambda right: lambda tables, root, budget, delta=0.8, **more: right(tables, root, budget, 1.0, **more),
    )


@fault("diaa", "test_diaa.py::test_updates_are_those_of_the_naive_rule")
def earlier_wins(inject):
    """Of two nodes with one token the earlier one updates the tables."""
    inject(
        "ondevice_papers.diaa.tables:overwrite",
        lambda right: lambda tables, keys, fresh: right(tables, keys[::-1], Fresh(*(part[::-1] for part in fresh))),
    )


@fault("diaa", "properties/test_speculation_identity.py::test_every_drafter_says_what_plain_decoding_says[llama-PLD]")
def judged_by_the_token_before(inject):
    """A drafted token is judged by what the model said a node earlier."""
    inject(
        "ondevice.speculation.loop:accepted",
        lambda right: lambda draft, logits, *rest: right(draft, torch.cat([logits[:1], logits[:-1]]), *rest),
    )


@fault("diaa", "test_causal_lm.py::test_a_trees_logits_are_those_of_its_paths_and_a_kept_path_continues_as_a_fresh_run")
def tree_as_a_chain(inject):
    """In a tree's pass each row sees all rows before it."""
    inject(
        "ondevice.causal_lm.tree:_topology",
        lambda right: lambda parents: Topology(right(parents).depths, np.tri(len(right(parents).depths), dtype=bool)),
    )


@fault("diaa", "test_mixture.py::test_a_class_without_answers_has_the_weights_of_all")
def prior_twice(inject):
    """A mixture's weights count their prior twice."""
    inject(
        "ondevice.speculation.fitting:maximised",
        lambda right: lambda chances, prior, strength: right(chances, 2 * prior, strength),
    )


@fault("diaa", "test_diaa_regimes.py::test_speeds_are_tokens_over_the_cost_of_all_passes")
def free_drafting(inject):
    """Forwards that draft are free."""
    inject(
        "ondevice_studies.diaa.regimes:timed", lambda right: lambda *given, skipped=0.5: right(*given[:3], skipped=0.0)
    )


# DiSCo


@fault("disco", "test_disco_models.py::test_the_line_is_through_the_medians")
def disco_means(inject):
    """DiSCo's probe takes means for medians."""
    inject("pandas.core.groupby:SeriesGroupBy.median", lambda right: lambda self: self.mean())


@fault("disco", "test_disco_dispatch.py::test_corrected_line_18_shortens_the_wait_as_more_budget_is_left")
def printed_line_18(inject):
    """Line 18 is as printed: more budget, longer waits."""
    printed = dispatch.printed
    inject("ondevice_papers.disco.dispatch:corrected", lambda right: printed)


@fault("disco", "test_disco_migration.py::test_a_hand_over_pays_where_the_saving_exceeds_the_second_prefill")
def negative_savings(inject):
    """Eq. 4 has the other sign."""
    inject(
        "ondevice_papers.disco.migration:saving", lambda right: lambda source, target, rest: right(target, source, rest)
    )


@fault("disco", "test_disco_race.py::test_the_first_token_wins_and_a_late_starter_may_never_run")
def free_losers(inject):
    """The prefill of an endpoint that loses the race is free."""

    def race(right):
        def without_losers(*given):
            raced = right(*given)
            return replace(raced, device_ran=raced.device_ran & raced.device_won)

        return without_losers

    inject("ondevice_papers.disco.race:race", race)


@fault("disco", "test_disco_study.py::test_answers_belong_to_their_prompts")
def answers_apart(inject):
    """Prompts and answers are drawn apart."""

    def joint(right):
        def apart(size, rng):
            drawn = right(size, rng)
            return drawn.assign(answer=rng.permutation(drawn["answer"].to_numpy()))

        return apart

    inject("ondevice_studies.disco.study:joint", joint)


@fault("disco", "properties/test_disco_router_streams.py")
def budget_never_asked(inject):
    """The router starts the dear side without asking its budget."""
    inject("ondevice_papers.disco.budgeted:Dispatcher.start", lambda right: lambda self, order, side, tokens: True)


# DRAGON


@fault("dragon", "properties/test_dragon_theorem_1.py::test_the_same_tokens_as_the_printed_algorithm")
def resampled_from_the_target(inject):
    """A rejected draft is resampled from the target, not from the residual."""
    inject("ondevice_papers.dragon.speculative_aggregation:residual", lambda right: lambda p, target: target)


@fault("dragon", "test_dragon_cost.py::test_equation_7_is_the_pace_of_outcomes_that_repeat")
def free_round_trip(inject):
    """Eq. 7 has no round trip."""
    inject(
        "ondevice_papers.dragon.cost:latency_per_token",
        lambda right: lambda costs, rate: right(replace(costs, send_local=0.0, send_remote=0.0), rate),
    )


@fault("dragon", "test_dragon_codec.py::test_the_tail_is_shared_out_as_the_prior_has_it")
def tail_of_other_tokens(inject):
    """What a message leaves out is shared out among the wrong tokens."""
    inject("ondevice_papers.dragon.codec:filled", lambda right: lambda kept, prior: right(kept, prior[::-1]))


@fault("dragon", "test_dragon_aggregation.py::test_two_sides_are_one_softmax_over_all_documents")
def weights_exchanged(inject):
    """Each side has the other one's weight."""
    inject("ondevice_papers.dragon.aggregation:share", lambda right: lambda local, remote: right(remote, local))


@fault("dragon", "test_dragon_study.py::test_the_temperature_is_that_of_the_least_loss_on_validation_windows")
def chosen_on_any_split(inject):
    """The temperature is chosen on any split."""
    inject(
        "ondevice_studies.dragon.study:temperature",
        lambda right: lambda losses: right(losses.assign(split="validation")),
    )


@fault("dragon", "test_dragon_study.py::test_the_wait_for_the_first_token_counts_from_the_devices_first_distribution")
def first_wait_dropped(inject):
    """Time per token leaves the first wait out."""
    inject(
        "ondevice_studies.dragon.study:latencies",
        lambda right: lambda rows: right(rows).assign(total_ms=lambda table: table["between_ms"]),
    )


@fault("dragon", "test_dragon_library.py::test_relevance_is_the_share_of_the_question_that_a_text_covers")
def undivided_relevance(inject):
    """Relevance is not divided by its ceiling."""

    def positions(right):
        def undivided(self, query, k):
            indices, shares = right(self, query, k)
            return indices, [share * (self.index.ceiling(query) or 1.0) for share in shares]

        return undivided

    inject("ondevice_programs.pair.node:Documents.positions", positions)


# GRATING


@fault("grating", "test_medians.py::test_a_layer_s_seconds_of_grating")
def grating_means(inject):
    """GRATING's recorder takes the mean for the median."""
    inject("ondevice_studies.grating.record:np.median", lambda right: np.mean)


@fault("grating", "test_grating_pruning.py::test_dispersion_is_the_standard_deviation_over_the_mean")
def dispersion_without_the_mean(inject):
    """A dispersion is not divided by the mean."""
    inject("ondevice_papers.grating.pruning:dispersion", lambda right: lambda p: float(p.std()))


@fault("grating", "test_grating_pruning.py::test_above_the_boundary_is_accepted_and_below_it_dropped")
def boundary_reversed(inject):
    """Who is above the boundary is dropped."""
    inject("ondevice_papers.grating.pruning:around_boundary", lambda right: lambda *given: -right(*given))


@fault("grating", "properties/test_grating_guarantee.py::test_the_promise_is_broken_in_at_most_one_draw_of_twenty")
def ignored_losses(inject):
    """A certificate ignores what the rule lost."""
    inject("ondevice_papers.grating.margins:p_value", lambda right: lambda losses, *given: right(0 * losses, *given))


@fault(
    "grating",
    "test_grating_margins.py::test_what_is_certified_is_said_of_the_pools_that_nothing_was_fitted_on",
)
def certified_on_fitted_pools(inject):
    """A rule is certified on the pools that it was fitted on."""
    inject("ondevice_papers.grating.margins:parted", lambda right: lambda pools, seed=0: (right(pools, seed)[1],) * 2)


@fault("grating", "test_grating_study.py::test_what_is_judged_are_test_pools")
def judged_on_validation(inject):
    """Rules are judged on validation pools."""
    inject(
        "ondevice_studies.grating.study:pools_of",
        lambda right: (
            lambda scores, model, set_, split="", probed=False: right(scores, model, set_, "validation", probed)
        ),
    )


# sd.npu


@fault("sdnpu", "test_medians.py::test_sdnpu_s_times")
def sdnpu_means(inject):
    """sd.npu's recorder takes the mean for the median."""
    inject(
        "ondevice_studies.sdnpu.timing:summary",
        lambda right: lambda seconds: right(seconds) | {"seconds": float(np.mean(seconds))},
    )


@fault("sdnpu", "test_sdnpu_scheduling.py::test_a_plan_by_hand")
def free_loads(inject):
    """Loads take no time."""

    def execute(right):
        def at_once(prefill, loads):
            free = copy.copy(prefill)
            free.s = 0 * prefill.s
            return right(free, loads)

        return at_once

    inject("ondevice_papers.sdnpu.scheduling:execute", execute)


@fault("sdnpu", "test_sdnpu_drafting.py::test_the_run_is_eq_3_over_all_paths")
def accepted_tokens_reused(inject):
    """Eq. 3 takes accepted tokens, too."""
    inject("ondevice_papers.sdnpu.reuse:agreed_run", lambda right: lambda draft, path, logits: right(draft, [], logits))


@fault("sdnpu", "test_sdnpu_drafting.py::test_the_pool_is_filled_in_order_and_shares_prefixes")
def unshared_pool(inject):
    """Branches of the trace pool do not share their prefixes."""

    def pooled(branches, budget):
        tokens, parents = [], []
        for branch in branches:
            parents += [-1, *range(len(tokens), len(tokens) + len(branch) - 1)]
            tokens += branch
        return Draft(tokens[:budget], parents[:budget])

    inject("ondevice_papers.sdnpu.drafter:pooled", lambda right: pooled)


@fault("sdnpu", "test_sdnpu_npu.py::test_a_token_takes_its_share_of_the_prefill_and_of_a_pass")
def whole_passes(inject):
    """A token takes the time of a whole pass."""
    inject(
        "ondevice_papers.sdnpu.npu:per_token",
        lambda right: lambda *times, accepted=1.0, **named: right(*times[:3], 1.0, **named),
    )
