"""Edits of the notebooks' source cells, and the parameters and cells with which a notebook is run for them."""

from __future__ import annotations

from typing import NamedTuple

from cells import Notebook


class Edit(NamedTuple):
    """What stands in a cell, what is put in its place, and the cell that shows it.

    table, column: of `live`, where the cell draws them. exhibits: that move, where it saves some, or cells that print.
    """

    cell: str
    old: str
    new: str
    shown: str = ""
    table: str = ""
    column: str = "value"
    exhibits: frozenset[str] = frozenset()


ASSISTANT = {
    "likeliest_chain": Edit("drafting", "int(below[0])", "int(below[-1])", "again"),
    "verify": Edit("drafting", "min(BUDGET, side.room - 1)", "min(1, side.room - 1)", "again"),
    "learn": Edit("drafting", "logsumexp(0).float()", "logsumexp(0).float().flip(-1)", "again"),
    "ready": Edit("costs", '+ costs("layer of a candidate")', '+ 0 * costs("layer of a candidate")', "one-at-a-time"),
    "paces": Edit("costs", "np.where(widths > 0, passes, 0.0)", "passes", "one-at-a-time"),
    "together": Edit("together", "lookahead=32", "lookahead=1", "one-at-a-time"),
    "admitted": Edit("admitted", "< NEVER", ">= NEVER", "one-at-a-time"),
    "raced": Edit("raced", "server + way).device_won", "server + 99 * way).device_won", "one-at-a-time"),
    "play": Edit("play", 'if asks[i] and "D" in systems', 'if "D" in systems', "one-at-a-time"),
}  # by function, as a cell has several

DIAA = [
    Edit("means", "sums / np.bincount(keys)[rows]", "-sums", "means-shown", "means"),
    Edit("overwrite", "tables.tokens[rows] = fresh.tokens[nodes]", "pass", "overwrite-shown", "overwrite"),
    Edit("utility", "np.setdiff1d(np.arange(len(draft)), draft.parents)", "np.arange(len(draft))", "grow-shown", "grow",
         "printed U"),
    Edit("grow", "len(tree) < budget:", "len(tree) < 2:", "grow-shown", "grow", "expected"),
    Edit("refill", "rank - 1]", "-rank]", "refill-shown", "refill"),
    Edit("accepted", "node = children.get((-1, tokens[0]))", "node = None", "walk-shown", "walk", "accepted"),
    Edit("loop", "tokens += emitted", "tokens += emitted[:1]", "methods", "methods"),
    Edit("learning", "self.update(self.tables, keys, fresh)", "pass", "methods", "methods"),
    Edit("drafter", "self._shape = tree.draft()", "self._shape = EMPTY", "methods", "methods"),
    Edit("mix", "+ weight * p", "- weight * p", "mix-shown", "mix"),
    Edit("maximised", "(explained + strength * prior)", "explained + 1", "maximised-shown", "maximised"),
    Edit("grow-likeliest", "tokens.append(candidates[number][0])", "tokens.append(candidates[-1][0])",
         "grow-likeliest-shown", "grow-likeliest"),
    Edit("size", "expected / seconds", "1 / seconds", "size-shown", "size"),
]  # fmt: skip

FIGURE_6 = frozenset({"fig_06_mean_ttft", "fig_06_measured_services", "fig_06_p99_ttft"})
LEARNED = frozenset({"beyond_00_learned", "beyond_02_learned", "beyond_03_learned_figure"})
TTFT = FIGURE_6 | {"table_02_tail_reduction", "fig_05_users"}
MIGRATED = frozenset({"table_03_migration", "fig_07_cost"})
BEST = FIGURE_6 | LEARNED | {"beyond_00_optimum", "beyond_01_mean_tail_plane", "beyond_05_held_out"}
DISCO = [
    Edit("race", "np.minimum(device_at, server_at)", "np.minimum(device_at, server_at) + 1.0",
         exhibits=BEST | TTFT | {"beyond_00_race", "algorithm_2_waits", "algorithm_3_threshold",
                                 "beyond_06_tail_bound", "beyond_00_own_budget"}),
    Edit("race", "(device_at <= server_at)", "(device_at > server_at)", exhibits=MIGRATED),
    Edit("play", "device.ttft(requests.prompt)", "device.ttft(2 * requests.prompt)", exhibits=TTFT | MIGRATED),
    Edit("device-constrained", "left -= need", "left -= 2 * need",
         exhibits=TTFT | {"algorithm_2_waits", "beyond_00_optimum", "fig_07_cost", "beyond_01_mean_tail_plane",
                          "beyond_05_held_out"}),
    Edit("server-constrained", "alone = (1 - b) * tokens[-1]", "alone = (1 - b**2) * tokens[-1]",
         exhibits=TTFT | MIGRATED | {"algorithm_3_threshold", "beyond_00_optimum"}),
    Edit("equations-4-5", "pace * seconds", "3 * pace * seconds", exhibits=MIGRATED | {"fig_04_migration"}),
    Edit("migration", "generated - shown >=", "generated >=", exhibits=MIGRATED | {"fig_04_migration"}),
    Edit("stream", "paced(generated, pace), np.nan", "paced(generated, 2 * pace), np.nan",
         exhibits=frozenset({"fig_04_migration"})),
    Edit("prices", "use(middle) <= b else", "use(middle) <= b / 2 else", exhibits=BEST),
    Edit("mean-optimal", "left = b - (mass", "left = -(mass", exhibits=BEST - {"beyond_03_learned_figure"}),
    Edit("survived", "right=seconds[~seen]", "right=2 * seconds[~seen]", exhibits=LEARNED | {"beyond_00_censored"}),
    Edit("account", "self.slack[index] -= tokens", "self.slack[index] -= 2 * tokens", exhibits=LEARNED),
    Edit("choose", "price * tokens * share", "0.0 * share", exhibits=LEARNED),
    Edit("migrated", "whole[:handover]", "whole[: handover // 2]", exhibits=frozenset({"quality-live"})),
    Edit("scenario", "min(device) > max(server)", "min(device) < max(server)", exhibits=frozenset({"algorithm-1"})),
    Edit("components", '"layernorm": float(n * 8 * d)', '"layernorm": float(n * 80 * d)',
         exhibits=frozenset({"table_06_flops_per_token", "table_07_flops_share"})),
]  # fmt: skip

DRAGON = [
    Edit("mixture", "eta_local * p_local +", "eta_local * p_remote +", "mixture-shown"),
    Edit("algorithm-1", "verifying * p[draft] < p", "verifying * p[draft] > p", "algorithm-1-shown"),
    Edit("acceptance", "gamma_side * np.minimum", "0.9 * gamma_side * np.minimum", "acceptance-shown"),
    Edit("shared", "np.log(probabilities) + gumbel", "np.log(probabilities) - gumbel", "acceptance-shown"),
    Edit("kept", "np.sqrt(p / unit)", "(p / unit)", "codec-shown"),
    Edit("filled", "(1 - tail) * (kept.weights", "(kept.weights", "codec-shown"),
    Edit("drafting", "ahead >= side.lookahead", "ahead >= 1", "figure-4"),
    Edit("settling", "if not kept_remote:", "if kept_remote:", "figure-4"),
    Edit("committing", "if not accepted:", "if accepted:", "figure-4"),
    Edit("taking-over", "deque(switch.drafts)", "deque()", "oracle-shown"),
    Edit("numbers", ".random(count)", ".random(count) ** 9", "deciding-shown"),
    Edit("deciding", "int(sample(p, uniforms(begin.seed, stream, position, 1)[0]))", "int(p.argmin())",
         "deciding-shown"),
    Edit("waiting", "costs.send_local + costs.decode_remote + costs.send_remote", "costs.decode_remote", "table-1"),
    Edit("latency", "costs.decode_remote + costs.round_trip)", "costs.decode_remote)", "table-1"),
    Edit("latency", "latency_per_token(costs, acceptance_remote) > latency", "0 < latency", "oracle-shown"),
    Edit("plan", "cost = rejected_b * lag", "cost = 0 * lag", "oracle-shown"),
    Edit("attack", "(1 - ETA) * p_cloud + ETA * p_candidate", "p_cloud", "attack-again"),
    Edit("windows-live", "weights[:, None] + read", "0 * weights[:, None] + read", "windows-again"),
    Edit("oracle-steps", "now = max(state.decided, drafted[side], ", "now = max(state.decided, ", "oracle-shown"),
    Edit("oracle", "(i - 1, state.trail)", "(i, state.trail)", "oracle-shown"),
]  # fmt: skip

GRATING = [
    Edit("dispersion", "/ max(p.mean(), 1e-12)", "", "dispersion-shown", "dispersion"),
    Edit("clustering", "totals.argmin(0)", "totals.argmax(0)", "clustering-shown", "clusters"),
    Edit("boundary", "np.sign(boundary - labels)", "np.sign(labels - boundary)", "boundary-shown", "boundary"),
    Edit("selection", "verdicts == DEFER, ACCEPT if left else DROP", "verdicts == DEFER, DROP", "selection-shown",
         "selection"),
    Edit("replay", "pool.scores[layer - 1, active]", "pool.scores[-1, active]", "selection-shown", "selection"),
    Edit("thresholds", "missed[0] if len(missed) else len(values)", "len(values)", "thresholds-shown", "thresholds"),
    Edit("margin", "distances < -margin", "distances < margin", "margin-shown", "margin"),
    Edit("error-model", "(predicted > 0) == (final > 0)", "(predicted > 0) != (final > 0)", "margin-shown", "margin"),
    Edit("certificate", "if p > 1 - confidence", "if p > confidence", "certified-shown", "certified"),
    Edit("probe", "weighted.T @ wanted", "-weighted.T @ wanted", "probe-shown", "probes"),
    Edit("costs", "self.layer).sum())", "self.layer).max())", "costs-shown", "costs"),
    Edit("layer", "states.put(group, hidden)", "pass", "live-again"),
    Edit("states", "hidden[row, :", "hidden[0, :", "live-again"),
    Edit("window", "if self.holds[slot] != index", "if self.holds[slot] < 0", "live-again"),
    Edit("cache", "= slots, missing, self.request", "= slots[::-1], missing, self.request", "live-again"),
]  # fmt: skip

SDNPU = [
    Edit("searched", "reach * p < floor", "reach * p < 2.0", "searched-shown", "searched"),
    Edit("rejected", "return Rejected(longest,", "return Rejected(longest[:1],", "reuse-shown", "reuse"),
    Edit("agreed-run", "[parent + 1] == tokens[node]", "[parent + 1] != tokens[node]", "reuse-shown", "reuse"),
    Edit("classify", '"synonym" if skipped else "missing"', '"missing"', "reuse-shown", "reuse"),
    Edit("pooled", "for branch in branches:", "for branch in branches[:0]:", "pool-shown", "pool"),
    Edit("execute", "start = max(free, ends[after])", "start = free", "figure-8"),
    Edit("greedy", "j = max(fitting)", "j = min(fitting)", "figure-8"),
    Edit("simple-rules", "Load(block, prefill.p.size, prefill.chunks)", "Load(block, 0, prefill.chunks)", "figure-8"),
    Edit("earliest", "np.argsort(due, ", "np.argsort(-due, ", "figure-8"),
    Edit("latencies", " + s[:, k]", "", "ratios"),
    Edit("downhill", "latency.argmin()]", "latency.argmax()]", "ratios"),
    Edit("ours-schedule", "return min([*plans", "return max([*plans", "ratios"),
    Edit("scheduling-instance", "2.0 * half + 2 * m", "4.0 * half", "appendix-a"),
    Edit("forward", "mask[:, :start] = 0.0", "pass", "graphs-shown"),
    Edit("best-shapes", "seconds[b - 1]", "seconds[0]", "shapes"),
    Edit("per-token", "(forward + drafting) / accepted", "forward / accepted", "phones"),
]

EDITS: dict[str, list[Edit]] = {
    "assistant": list(ASSISTANT.values()),
    "diaa": DIAA,
    "disco": DISCO,
    "dragon": DRAGON,
    "grating": GRATING,
    "sdnpu": SDNPU,
}
SHORT = {
    "assistant": {"threads": 1, "live": 1},
    "diaa": {"tokens": 16, "each": 1, "threads": 1, "again": ["cold"]},
    "disco": {"runs": 2, "requests": 60, "budget_step": 0.1, "threads": 1, "sample": 2},
    "dragon": {"pairs": 2, "threads": 1, "answers_again": 5},
    "grating": {"sample": 12, "threads": 1},
    "sdnpu": {"instances_a_family": 2, "threads": 1, "tokens": 24},
}  # parameters
LAST = {
    "assistant": "one-at-a-time", "diaa": "again", "disco": "tables-6-7", "dragon": "answers-again", "grating": "use",
    "sdnpu": "phones",
}  # fmt: skip
# DiSCo's cells that no source cell has a part in
LEFT_OUT = {"endpoint", "stream-live", "stream-drawn", "table-5", "table-4", "figure-9"}
FEW = """
answers = answers[answers["question"].isin(sorted(set(answers.loc[answers["drafter"] != "", "question"]))[:8])]
steps = steps[steps["question"].isin(answers["question"])]
LINKS = (delay,)
"""


def notebook(paper: str) -> Notebook:
    """A paper's notebook, run up to its last cell that shows an edit, as quickly as that is possible."""
    book = Notebook(paper, SHORT[paper])
    shown = {edit.shown for edit in EDITS[paper]}
    if paper == "assistant":
        few_questions(book, shown)
    elif paper == "disco":
        book.leave(set(book.texts) - LEFT_OUT)
        short = book.texts["learned"].replace("traces.series_names()", '["replicate-7b"]').replace("2000", "200")
        book.texts["learned"] = short
    elif paper == "dragon":
        book.leave({"parameters", "checked", "imports", "setup", LAST[paper], *shown, *book.sources})
        few = "units = units[units['documents'] == 4]\ndrawn = "
        book.texts["windows-again"] = book.texts["windows-again"].replace("drawn = ", few)
    return book.begin(max([LAST[paper], *shown & set(book.texts)], key=list(book.texts).index))


def few_questions(book: Notebook, shown: set[str]) -> None:
    """One link, eight recorded questions; the models of the live one are loaded once."""
    book.leave({"parameters", "checked", "imports", "setup", "played", *shown, *book.sources})
    models, answering = book.texts["again"].split("sets = [")
    book.texts["setup"] += "\n" + FEW
    book.texts["again"] = f"sets = [{answering}"
    book.texts = {
        name: text
        for cell, shown_text in book.texts.items()
        for name, text in ([("models", models)] if cell == "drafting" else []) + [(cell, shown_text)]
    }
