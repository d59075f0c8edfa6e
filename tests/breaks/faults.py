"""The faults: what is changed where, and the checks of which one has to fail."""

import audit_dragon
import audit_figures
import audit_intervals
import audit_pools
import audit_readme
import audit_records
import audit_rules
import audit_samples
import audit_speculation
from copies import Break

UNIT = "tests/unit/test_"
PUBLISHED = "tests/notebooks/test_published.py::test_"


def notebook(paper: str) -> tuple[str, ...]:
    """What reads a notebook's text without running it."""
    return (
        f"{PUBLISHED}typed_kinds_are_the_published_ones[{paper}]",
        f"tests/notebooks/test_hygiene.py::test_hygiene[{paper}]",
        f"tests/notebooks/test_source_cells.py::test_source_cells_are_the_library[{paper}]",
    )


def rules(paper: str) -> tuple[str, ...]:
    """What looks at a paper's rules."""
    return (f"{UNIT}claims.py::test_the_published_verdicts_are_the_rules[{paper}]",)


def wrong(claim: str) -> tuple[str, ...]:
    """What a claim's wrong value must get."""
    return (f"{UNIT}claims.py::test_each_rule_rejects_its_wrong_value_and_knows_what_its_null_has[{claim}]",)


EVIDENCE = [
    Break(
        "intervals of 50 percent", "shared", "lib/ondevice/evidence/estimates.py",
        "LEVEL = 0.95", "LEVEL = 0.5",
        (f"{UNIT}rules.py::test_a_share_has_wilsons_interval",
         f"{UNIT}rules.py::test_a_mean_weighs_groups_the_same_and_its_interval_covers_95_percent"),
    ),
    Break(
        "a verdict without its interval", "shared", "lib/ondevice/evidence/rules.py",
        "low <= x.low and x.high <= high", "low <= x.value <= high",
        (f"{UNIT}rules.py::test_only_a_whole_interval_is_told",),
    ),
    Break(
        "a bound that belongs to what it excludes", "shared", "lib/ondevice/evidence/rules.py",
        'f"above {x:g}@", low=x, strict=True', 'f"above {x:g}@", low=x',
        (f"{UNIT}rules.py::test_the_ends_of_a_region",),
    ),
    Break(
        "a null that is never compared", "shared", "lib/ondevice/evidence/paper_run.py",
        "_at_least_as_good(rule.verdict(null), verdict)", "rule.verdict(null) == verdict == 'untested'",
        (f"{UNIT}evidence.py::test_a_null_with_the_same_verdict_does_not_discriminate",),
    ),
    Break(
        "a typed kind overrules the data's", "shared", "lib/ondevice/evidence/paper_run.py",
        "kind_of(given) != own", "not kind_of(given)",
        (f"{UNIT}evidence.py::test_kinds_come_with_the_data_and_are_not_overruled",),
    ),
    Break(
        "a kind is lost on the way", "shared", "lib/ondevice/evidence/estimates.py",
        "kind_of(parents)", "kind_of(parents[0])",
        (f"{UNIT}rules.py::test_a_kind_travels_through_selections_and_joins_its_parents",),
    ),
    Break(
        "a record's checksum is not looked at", "shared", "lib/ondevice/evidence/records.py",
        'if {"sha256": sha256(path)', 'if {"sha256": entry["sha256"]',
        (f"{UNIT}records.py::test_a_record_that_is_not_right_is_refused_in_one_sentence",),
    ),
    Break(
        "near-ties count as agreement", "shared", "lib/ondevice/evidence/records.py",
        "Agreement(len(sample), len(same), ", "Agreement(len(sample), len(same) + len(ties), ",
        (f"{UNIT}records.py::test_only_a_near_tie_may_differ",),
    ),
]  # fmt: skip

DISCO = [
    Break(
        "line 18 as printed: more budget, longer waits", "disco", "lib/ondevice_papers/disco/dispatch.py",
        "alpha + (1 - alpha) * share)", "alpha + (1 - alpha) * (1 - share))",
        (f"{UNIT}disco_dispatch.py::test_corrected_line_18_shortens_the_wait_as_more_budget_is_left",),
    ),
    Break(
        "Eq. 3's share of tokens the other way", "disco", "lib/ondevice_papers/disco/dispatch.py",
        "alone = (1 - b) * tokens[-1]", "alone = b * tokens[-1]",
        (f"{UNIT}disco_dispatch.py::test_disco_s_races_the_long_prompts_and_a_share_of_the_boundary",),
    ),
    Break(
        "Eq. 4's sign", "disco", "lib/ondevice_papers/disco/migration.py",
        "(source.decode - target.decode) * remaining", "(target.decode - source.decode) * remaining",
        (f"{UNIT}disco_migration.py::test_a_hand_over_pays_where_the_saving_exceeds_the_second_prefill",),
    ),
    Break(
        "migration's second prefill is free", "disco", "lib/ondevice_papers/disco/migration.py",
        "tokens * target.prefill + meanwhile", "meanwhile",
        (f"{UNIT}disco_migration.py::test_a_hand_over_pays_where_the_saving_exceeds_the_second_prefill",),
    ),
    Break(
        "Eq. 5's buffer is half as long", "disco", "lib/ondevice_papers/disco/migration.py",
        "return pace * seconds", "return pace * seconds / 2",
        (f"{UNIT}disco_migration.py::test_the_hand_over_comes_when_the_unread_tokens_last_for_it_and_is_not_seen",),
    ),
    Break(
        "what remains is over all answers, not the longer ones", "disco", "lib/ondevice_papers/disco/migration.py",
        "np.maximum(1, len(n) - shorter)", "len(n)",
        (f"{UNIT}disco_migration.py::test_expected_remaining_is_the_mean_of_the_longer_answers",),
    ),
    Break(
        "prompts and answers are drawn apart", "disco", "lib/ondevice_studies/disco/study.py",
        "pairs: Pairs = joint", "pairs: Pairs = apart",
        (f"{UNIT}disco_study.py::test_answers_belong_to_their_prompts",),
    ),
    Break(
        "a loser's prefill is free", "disco", "lib/ondevice_papers/disco/race.py",
        "(wait_device == 0) | (wait_device < server_at)", "wait_device + device_ttft <= server_at",
        (f"{UNIT}disco_race.py::test_the_first_token_wins_and_a_late_starter_may_never_run",),
    ),
    Break(
        "P99 is P90", "disco", "lib/ondevice_studies/disco/study.py", "np.quantile(raced.ttft, 0.99, axis=1",
        "np.quantile(raced.ttft, 0.9, axis=1", (f"{UNIT}disco_study.py::test_the_sweeps_p99_is_a_ttft_that_occurred",),
    ),
    Break(
        "the stochastic baseline races", "disco", "lib/ondevice_papers/disco/dispatch.py",
        "np.full(len(lengths.counts), NEVER))", "np.zeros(len(lengths.counts)))",
        (f"{UNIT}disco_dispatch.py::test_stochastic_baselines_route_exclusively_and_races_add_the_other_endpoint",),
    ),
    Break(
        "tables are compared without their order", "disco", "lib/ondevice_studies/disco/study.py",
        "stats.spearmanr(ours, paper).statistic", "stats.spearmanr(np.sort(ours), np.sort(paper)).statistic",
        (f"{UNIT}disco_study.py::test_a_table_is_compared_cell_by_cell",),
    ),
    Break(
        "the account forgets requests that may still start", "disco", "lib/ondevice_papers/disco/budgeted.py",
        "min(islice(self.slack, at, None))", "self.slack[at]",
        ("tests/properties/test_disco_budgeted.py::test_an_account_holds_for_every_prefix_whoever_starts_when",),
    ),
    Break(
        "what was cut off counts as what came", "disco", "lib/ondevice_papers/disco/traffic.py",
        "uncensored=seconds[seen], right=seconds[~seen]", "uncensored=seconds",
        ("tests/properties/test_disco_budgeted.py::test_a_ttft_that_was_cut_off_is_not_taken_for_one_that_came",),
    ),
    Break(
        "the budget is not asked before a fallback", "disco", "lib/ondevice_programs/router/session.py",
        "if not self._setup.dispatcher.start(self.order, side, tokens):", "if False:",
        ("tests/properties/test_disco_router_streams.py",),
    ),
    Break(
        "a rule's bound, and the verdict with it", "disco", "lib/ondevice_studies/disco/claims.py",
        "Each(AtLeast(15), AtMost(40))", "Each(AtLeast(17), AtMost(40))", rules("disco"),
    ),
    Break(
        "a rule's bound, which no verdict shows", "disco", "lib/ondevice_studies/disco/claims.py",
        "AtMost(0.01),\n        AtMost(0.05),\n        0.7", "AtMost(0.02),\n        AtMost(0.05),\n        0.7",
        rules("disco"),
    ),
    Break(
        "a recorded table is called simulated", "disco", "notebooks/disco.ipynb",
        'run.save("table_01_device_rows", table, ', 'run.save("table_01_device_rows", table, kind="simulated", ',
        notebook("disco"),
    ),
    Break(
        "a source cell is edited", "disco", "notebooks/disco.ipynb", "beyond = share * n", "beyond = (1 - share) * n",
        notebook("disco"),
    ),
]  # fmt: skip

DRAGON = [
    Break(
        "the acceptance rule's sign", "dragon", "lib/ondevice_papers/dragon/speculative_aggregation.py",
        "verifying * p[draft] < p[draft] - target[draft]", "verifying * p[draft] > p[draft] - target[draft]",
        (f"{UNIT}dragon_aggregation.py::test_algorithm_1_by_hand",),
    ),
    Break(
        "resampled from the target, not from the residual", "dragon",
        "lib/ondevice_papers/dragon/speculative_aggregation.py",
        "np.maximum(0.0, target - p)", "np.maximum(0.0, target)",
        (f"{UNIT}dragon_aggregation.py::test_algorithm_1_by_hand",),
    ),
    Break(
        "a temperature that sharpens", "dragon", "lib/ondevice_papers/dragon/aggregation.py",
        "np.asarray(scores, float) / temperature)\n\n\ndef mixture",
        "np.asarray(scores, float) * temperature)\n\n\ndef mixture",
        (f"{UNIT}dragon_aggregation.py::test_a_temperature_flattens_the_weights",),
    ),
    Break(
        "Eq. 7 without the round trip", "dragon", "lib/ondevice_papers/dragon/cost.py",
        "rejected = max(costs.decode_local, costs.decode_remote + costs.round_trip)",
        "rejected = max(costs.decode_local, costs.decode_remote)",
        (f"{UNIT}dragon_cost.py::test_equation_7_is_the_pace_of_outcomes_that_repeat",),
    ),
    Break(
        "the scheduler's cost term", "dragon", "lib/ondevice_papers/dragon/scheduler.py",
        "cost = rejected_b * lag", "cost = 0 * lag",
        (f"{UNIT}dragon_scheduler.py::test_no_simple_rule_is_better_than_the_plan",
         f"{UNIT}dragon_scheduler.py::test_plans_are_settled"),
    ),
    Break(
        "a rejection that begins no epoch", "dragon", "lib/ondevice_papers/dragon/side.py",
        "side.epoch += 1\n        side.own.clear()", "side.own.clear()",
        (f"{UNIT}dragon_side.py::test_a_session_by_hand_on_the_side_that_aggregates",
         f"{UNIT}dragon_side.py::test_a_session_by_hand_on_the_side_that_does_not"),
    ),
    Break(
        "the tail is shared out among the wrong tokens", "dragon", "lib/ondevice_papers/dragon/codec.py",
        "p = prior.astype(float)", "p = prior[::-1].astype(float)",
        (f"{UNIT}dragon_codec.py::test_the_tail_is_shared_out_as_the_prior_has_it",),
    ),
    Break(
        "relevance is not divided by its ceiling", "dragon", "lib/ondevice_programs/pair/node.py",
        "float(score) / most", "float(score)",
        (f"{UNIT}dragon_record.py::test_relevance_is_recorded_by_its_parts_and_the_answer_after_each_document_alone",),
    ),
    Break(
        "the temperature of documents' weights", "dragon", "lib/ondevice_programs/pair/node.py",
        "WEIGHT_TEMPERATURE = 1 / 32", "WEIGHT_TEMPERATURE = 1",
        (f"{UNIT}dragon_record.py::test_relevance_is_recorded_by_its_parts_and_the_answer_after_each_document_alone",),
    ),
    Break(
        "what neither side holds is in the cloud", "dragon", "lib/ondevice_studies/dragon/world.py",
        'if holder in (side, "both"):', 'if holder in (side, "both") or (holder, side) == ("neither", "cloud"):',
        (f"{UNIT}dragon_world.py::test_what_is_kept_of_a_document_lies_where_its_answer_is_held",),
    ),
    Break(
        "the sides' weights are exchanged in lockstep", "dragon", "lib/ondevice_studies/dragon/lockstep.py",
        'now.log_weight["device"], now.log_weight["cloud"]', 'now.log_weight["cloud"], now.log_weight["device"]',
        (f"{UNIT}dragon_lockstep.py::test_the_text_is_the_mixtures_greedy_one_up_to_the_end_token",),
    ),
    Break(
        "Figure 6 mixes what the cap leaves out", "dragon", "lib/ondevice_studies/dragon/language_modelling.py",
        "codec.filled(codec.encode(p, cap, prior), prior) for p, prior in both", "p for p, prior in both",
        (f"{UNIT}dragon_language_modelling.py::test_cut_distributions_are_mixed_as_by_hand",),
    ),
    Break(
        "the baseline that reads all documents is dropped", "dragon",
        "lib/ondevice_studies/dragon/language_modelling.py",
        "PRINTED = (CLOUD, DEVICE, DRCG)", "PRINTED = (CLOUD, DEVICE)",
        (f"{UNIT}dragon_claims.py::test_gains_by_hand_and_their_intervals",),
    ),
    Break(
        "the temperature is chosen on any split", "dragon", "lib/ondevice_studies/dragon/study.py",
        'if splits != ["validation"]:', "if not splits:",
        (f"{UNIT}dragon_study.py::"
         "test_the_temperature_is_that_of_the_least_loss_of_a_model_on_validation_windows",),
    ),
    Break(
        "the whole mix leaves out a holder", "dragon", "lib/ondevice_studies/dragon/study.py",
        "sample[name].mean(axis=1) if task", "sample[name][:, 1:].mean(axis=1) if task",
        (f"{UNIT}dragon_study.py::test_time_a_token_is_sums_over_sums_by_holder_and_the_whole_mix_their_mean",),
    ),
    Break(
        "Eq. 7's acceptance counts drafts that nothing waits for", "dragon", "lib/ondevice_studies/dragon/study.py",
        "decisions(row)[:-1, 1]", "decisions(row)[:, 1]",
        (f"{UNIT}dragon_study.py::test_eq_7_is_beside_what_was_saved_and_the_last_tokens_drafts_do_not_count",),
    ),
    Break(
        "a window that is made again has its passages in disorder", "dragon", "lib/ondevice_studies/dragon/record.py",
        'rows.sort_values("rank")', 'rows.sort_values("title")',
        (f"{UNIT}dragon_record.py::test_a_window_is_made_again_from_its_rows_without_the_index",),
    ),
    Break(
        "an attacker's ties count for him", "dragon", "lib/ondevice_studies/dragon/membership.py",
        "scores[~members] >= scores[members].max()", "scores[~members] > scores[members].max()",
        (f"{UNIT}dragon_membership.py::test_ties_count_against_the_attacker_but_not_between_members",),
    ),
    Break(
        "the first token waits for the network behind the device's own prefill", "dragon",
        "lib/ondevice_studies/dragon/values.py",
        "max(device, arrives) if overlapped", "max(device, arrives) if not overlapped",
        (f"{UNIT}dragon_claims.py::"
         "test_the_first_token_by_the_papers_times_waits_for_no_network_behind_the_devices_own",),
    ),
    Break(
        "simulated pipelines are called measured", "dragon", "lib/ondevice_studies/dragon/values.py",
        '.last()[case]), 9), "simulated")', '.last()[case]), 9), "measured")',
        (f"{UNIT}dragon_claims.py::test_pipelines_are_of_the_last_token",),
    ),
    Break(
        "a bound of how latency grows with the delay", "dragon", "lib/ondevice_studies/dragon/claims.py",
        "AtMost(1.6),\n        2.2,", "AtMost(2.6),\n        2.2,", wrong("dragon-c12"),
    ),
]  # fmt: skip

GRATING = [
    Break(
        "pruning at the threshold", "grating", "lib/ondevice_papers/grating/pruning.py",
        "if not dispersion(p) > threshold", "if not dispersion(p) >= threshold",
        (f"{UNIT}grating_pruning.py::test_a_decision_needs_more_than_the_threshold",),
    ),
    Break(
        "the boundary's sign", "grating", "lib/ondevice_papers/grating/pruning.py",
        "np.sign(boundary - labels)", "np.sign(labels - boundary)",
        (f"{UNIT}grating_pruning.py::test_above_the_boundary_is_accepted_and_below_it_dropped",
         f"{UNIT}grating_pruning.py::test_the_papers_example_is_decided_as_it_says"),
    ),
    Break(
        "a dispersion without the mean", "grating", "lib/ondevice_papers/grating/pruning.py",
        "float(p.std() / max(p.mean(), 1e-12))", "float(p.std())",
        (f"{UNIT}grating_pruning.py::test_dispersion_is_the_standard_deviation_over_the_mean",),
    ),
    Break(
        "who is accepted early in the exact order", "grating", "lib/ondevice_papers/grating/pruning.py",
        "verdicts = np.minimum(verdicts, DEFER)", "pass",
        (f"{UNIT}grating_pruning.py::test_exact_order_ranks_by_final_scores_and_accepts_nobody_early",
         "tests/properties/test_grating_scores.py"),
    ),
    Break(
        "clusters that are greedy", "grating", "lib/ondevice_papers/grating/clustering.py",
        "first[totals.argmin()]", "first[-1]",
        (f"{UNIT}grating_pruning.py::test_clusters_are_the_optimum_of_all_partitions",),
    ),
    Break(
        "precision's denominator", "grating", "lib/ondevice_papers/grating/pools.py",
        "max(1, min(k, int(pool.relevant.sum())))", "max(1, int(pool.relevant.sum()))",
        (f"{UNIT}grating_thresholds.py::test_precision_is_out_of_k_or_of_the_relevant_where_these_are_fewer",),
    ),
    Break(
        "the overlap's denominator", "grating", "lib/ondevice_papers/grating/pools.py",
        "len(common) / len(full)", "len(common) / max(1, len(common))",
        (f"{UNIT}grating_thresholds.py::test_overlap_is_out_of_the_full_models_top_k_and_saved_of_all_work",),
    ),
    Break(
        "test pools are calibrated on", "grating", "lib/ondevice_papers/grating/pools.py",
        '- {"validation"}', '- {"validation", "test"}',
        (f"{UNIT}grating_thresholds.py::test_only_validation_pools_are_calibrated_on",
         f"{UNIT}grating_margins.py::test_a_model_is_fitted_on_validation_pools_of_more_than_k"),
    ),
    Break(
        "a threshold one step too low", "grating", "lib/ondevice_papers/grating/thresholds.py",
        "last = (missed[0] if len(missed) else len(values)) - 1",
        "last = missed[0] if len(missed) else len(values) - 1",
        (f"{UNIT}grating_thresholds.py::test_the_lowest_threshold_is_above_the_first_that_misses",
         f"{UNIT}grating_thresholds.py::"
         "test_a_calibrated_threshold_meets_its_target_on_its_pools_and_the_next_one_does_not"),
    ),
    Break(
        "the p-value's sign", "grating", "lib/ondevice_papers/grating/margins.py",
        "len(losses) * np.log1p(-risk) - np.log1p(-losses).sum()",
        "len(losses) * np.log1p(-risk) + np.log1p(-losses).sum()",
        (f"{UNIT}grating_margins.py::test_p_values_by_hand",
         "tests/properties/test_grating_guarantee.py::test_the_promise_is_broken_in_at_most_one_draw_of_twenty"),
    ),
    Break(
        "a rule is certified on the pools that it was fitted on", "grating", "lib/ondevice_papers/grating/margins.py",
        "measure(rest, k, model.rule(chance), exact_order)", "measure(first, k, model.rule(chance), exact_order)",
        (f"{UNIT}grating_margins.py::test_what_is_certified_is_said_of_the_pools_that_nothing_was_fitted_on",),
    ),
    Break(
        "settings are tested beyond the first failure", "grating", "lib/ondevice_papers/grating/margins.py",
        "        if p > 1 - confidence:\n            break", "        if p > 1 - confidence:\n            continue",
        (f"{UNIT}grating_margins.py::test_settings_are_tested_up_to_the_first_failure",),
    ),
    Break(
        "depths are rounded down", "grating", "lib/ondevice_studies/grating/full_size.py",
        "np.ceil(np.asarray(outcome) * large / small)", "np.floor(np.asarray(outcome) * large / small)",
        (f"{UNIT}grating_full_size.py::test_layers_are_mapped_by_their_share_of_the_depth",),
    ),
    Break(
        "a bound of the layers until the order stands", "grating", "lib/ondevice_studies/grating/claims.py",
        "AtMost(0.5), AtMost(0.75)", "AtMost(0.5), AtMost(0.95)", rules("grating"),
    ),
    Break(
        "thresholds are calibrated on the test split", "grating", "lib/ondevice_studies/grating/study.py",
        'valid = validation(pools_of(scores, model, set_, "validation"))',
        'valid = validation(pools_of(scores, model, set_, "test"))',
        (f"{UNIT}grating_study.py::test_rules_are_as_aggressive_as_validation_pools_allow",),
    ),
    Break(
        "a replay is called measured", "grating", "notebooks/grating.ipynb",
        'run.save("fig_10_trade_off", drawn, figure, ', 'run.save("fig_10_trade_off", drawn, figure, kind="measured", ',
        notebook("grating"),
    ),
]  # fmt: skip

SDNPU = [
    Break(
        "loads take no time", "sdnpu", "lib/ondevice_papers/sdnpu/scheduling.py",
        "start + times[2][load.block]", "start", (f"{UNIT}sdnpu_scheduling.py::test_a_plan_by_hand",),
    ),
    Break(
        "the schedule does not wait for a load", "sdnpu", "lib/ondevice_papers/sdnpu/scheduling.py",
        "max(ends[-1], ready[block]) if switched", "ends[-1] if switched",
        (f"{UNIT}sdnpu_scheduling.py::test_a_plan_by_hand",
         f"{UNIT}sdnpu_scheduling.py::test_figure_8_with_a_slower_second_graph"),
    ),
    Break(
        "a load does not wait for memory", "sdnpu", "lib/ondevice_papers/sdnpu/scheduling.py",
        "after = max(load.after, fits)", "after = load.after",
        (f"{UNIT}sdnpu_scheduling.py::test_with_memory_for_one_more_graph_a_load_runs_beside_its_own_block",),
    ),
    Break(
        "graphs are never let go in a plan", "sdnpu", "lib/ondevice_papers/sdnpu/scheduling.py",
        "due[load.block] - blocks + 1", "due[load.block] + 1",
        (f"{UNIT}sdnpu_scheduling.py::test_figure_8_with_equal_graphs_switches_for_free",),
    ),
    Break(
        "a candidate goes on where it stands first", "sdnpu", "lib/ondevice_papers/sdnpu/calibration.py",
        "bisect_right(where, position)", "0",
        (f"{UNIT}sdnpu_drafting.py::test_the_calibrated_tree_is_that_of_a_plain_search",),
    ),
    Break(
        "Eq. 3 takes accepted tokens, too", "sdnpu", "lib/ondevice_papers/sdnpu/reuse.py",
        "node not in kept and parent not in kept and choices", "choices",
        (f"{UNIT}sdnpu_drafting.py::test_the_run_is_eq_3_over_all_paths",),
    ),
    Break(
        "the pool is not shared", "sdnpu", "lib/ondevice_papers/sdnpu/drafter.py",
        "nodes.setdefault((node, token), len(nodes))", "nodes.setdefault((node, token, len(nodes)), len(nodes))",
        (f"{UNIT}sdnpu_drafting.py::test_the_pool_is_filled_in_order_and_shares_prefixes",),
    ),
    Break(
        "a token pays for the whole pass", "sdnpu", "lib/ondevice_papers/sdnpu/npu.py",
        "(forward + drafting) / accepted", "(forward + drafting)",
        (f"{UNIT}sdnpu_npu.py::test_a_token_takes_its_share_of_the_prefill_and_of_a_pass",),
    ),
    Break(
        "the held-out model is fitted", "sdnpu", "lib/ondevice_papers/sdnpu/npu.py",
        "return times[0] + position * (times[1] - times[0])", "return times[0]",
        (f"{UNIT}sdnpu_npu.py::test_a_table_that_follows_the_model_is_foretold",),
    ),
    Break(
        "the null of a claim is its own method", "sdnpu", "lib/ondevice_studies/sdnpu/values.py",
        'sam = requests["NPU-SAM"] / requests[f"NPU-SAM {greedy}"]',
        'sam = requests["NPU-SAM"] / requests["NPU-SAM +G"]',
        (f"{UNIT}sdnpu_study.py::test_measured_claims_and_their_nulls",),
    ),
    Break(
        "intervals of switching are of 50 percent", "sdnpu", "lib/ondevice/evidence/resampling.py",
        "np.nanquantile(draws[1:], [0.025, 0.975])", "np.nanquantile(draws[1:], [0.25, 0.75])",
        (f"{UNIT}sdnpu_study.py::test_an_interval_is_of_95_percent",),
    ),
    Break(
        "a bound of the memory's claim", "sdnpu", "lib/ondevice_studies/sdnpu/claims.py",
        "Each(Below(500), None)", "Each(Below(700), None)",
        wrong("sdnpu-c28"),
    ),
    Break(
        "greedy's source cell is edited", "sdnpu", "notebooks/sdnpu.ipynb", "j = max(fitting)", "j = min(fitting)",
        notebook("sdnpu"),
    ),
    Break(
        "recorded acceptance is called simulated", "sdnpu", "notebooks/sdnpu.ipynb",
        '"table_04_cells", cells,', '"table_04_cells", cells, kind="simulated",', notebook("sdnpu"),
    ),
]  # fmt: skip

DIAA = [
    Break(
        "Eq. 2 without its decay by depth", "diaa", "lib/ondevice_papers/diaa/tree.py",
        "* delta**depth * alpha**rank", "* alpha**rank", (f"{UNIT}diaa.py::test_the_tree_is_that_of_the_naive_growth",),
    ),
    Break(
        "tau on the first level, too", "diaa", "lib/ondevice_papers/diaa/tree.py",
        "score < tau and node != ROOT", "score < tau",
        (f"{UNIT}diaa.py::test_the_first_level_is_exempt_from_tau_and_cold_tables_draft_nothing",),
    ),
    Break(
        "the update rule: the earlier node wins", "diaa", "lib/ondevice_papers/diaa/tables.py",
        "for node, key in enumerate(keys)}", "for node, key in reversed(list(enumerate(keys)))}",
        (f"{UNIT}diaa.py::test_updates_are_those_of_the_naive_rule",
         f"{UNIT}diaa.py::test_updates_go_breadth_first_and_the_later_node_wins"),
    ),
    Break(
        "a node is judged by what is said before it", "diaa", "lib/ondevice/speculation/loop.py",
        "choice(logits[node + 1])", "choice(logits[node])",
        (f"{UNIT}speculation.py::test_drafts_do_not_change_the_output_and_save_steps",),
    ),
    Break(
        "the tree's mask", "diaa", "lib/ondevice/causal_lm/tree.py",
        "sees[row] |= sees[parent]", "sees[row, :row] = True",
        (f"{UNIT}causal_lm.py::test_a_trees_logits_are_those_of_its_paths",),
    ),
    Break(
        "a store's back-off without the kinds", "diaa", "lib/ondevice/speculation/store.py",
        "count + kinds[of_pair] * share", "count + share",
        (f"{UNIT}mixture.py::test_a_store_backs_off_as_witten_and_bell_do",),
    ),
    Break(
        "a tree of the unlikeliest nodes", "diaa", "lib/ondevice/speculation/mixture.py",
        "heappush(queue, (-above *", "heappush(queue, (above *",
        (f"{UNIT}mixture.py::test_the_tree_has_the_likeliest_nodes_of_all",),
    ),
    Break(
        "weights that count the prior twice", "diaa", "lib/ondevice/speculation/fitting.py",
        "explained + strength * prior", "explained + 2 * strength * prior",
        (f"{UNIT}mixture.py::test_a_class_without_answers_has_the_weights_of_all",),
    ),
    Break(
        "forwards that draft are free", "diaa", "lib/ondevice_studies/diaa/regimes.py",
        'skipped * passes["drafting_passes"]', '0 * passes["drafting_passes"]',
        (f"{UNIT}diaa_regimes.py::test_speeds_are_tokens_over_the_cost_of_all_passes",),
    ),
    Break(
        "intervals of speeds are of 50 percent", "diaa", "lib/ondevice/evidence/resampling.py",
        "np.quantile(draws[1:], [0.025, 0.975])", "np.quantile(draws[1:], [0.25, 0.75])",
        (f"{UNIT}diaa_study.py::test_draws_take_the_same_prompts_for_every_name_and_keep_tasks_apart",),
    ),
    Break(
        "Token Recycling is dropped from the baselines", "diaa", "lib/ondevice_studies/diaa/study.py",
        '"SAM-D", "TR")  # the', '"SAM-D")  # the',
        (f"{UNIT}diaa_study.py::test_the_baselines_are_those_of_table_1",),
    ),
    Break(
        "a bound of the acceptance's claim", "diaa", "lib/ondevice_studies/diaa/claims.py",
        "All(Equal(1)), All(Above(0.5))", "All(Equal(1)), All(Above(0.3))", wrong("diaa-c24"),
    ),
]  # fmt: skip

AUDIT = [
    *audit_dragon.FAULTS,
    *audit_figures.FAULTS,
    *audit_intervals.FAULTS,
    *audit_pools.FAULTS,
    *audit_readme.FAULTS,
    *audit_records.FAULTS,
    *audit_rules.FAULTS,
    *audit_samples.FAULTS,
    *audit_speculation.FAULTS,
]
FAULTS = [*EVIDENCE, *DIAA, *DISCO, *DRAGON, *GRATING, *SDNPU, *AUDIT]
