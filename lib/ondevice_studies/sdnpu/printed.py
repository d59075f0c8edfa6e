"""The paper's numbers: its tables under our names, to be drawn beside ours, and what they say of each other.

Nothing here is measured: values are quoted, or analytic, computed from quoted ones. Times are in milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import pandas as pd

from ondevice import assets, shapes
from ondevice_papers.sdnpu.npu import CALIBRATE_MS, OURS, Curve, draft_parameters, fit

FIG_5 = {"acceptance": 4.2, "decode": 160.0, "prefill": 8.0}  # ms a token, 32-row graph, K70 Pro; the last is a bound
FIG_6 = {1: 51.1, 32: 5.7}  # ms a token by draft length; the phone is not named
THROUGHPUT_LOSS = 50.0  # percent, of length 8 against 64, section 1
PREFILL_SPEED = 1000.0  # tokens/s, a bound, section 2.1
DECODE_SHARE_CPU = (0.872, 0.902)  # of the time, NPU prefill and CPU decoding, OnePlus 13, section 2.1
DECODE_SHARE_NPU = (0.67, 0.74)  # of NPU vanilla's time, OnePlus 13, section 4.4
DECODE_SPEEDUP = (5.25, 8.15)  # over NPU vanilla, OnePlus 13, section 4.4
OVER_SAM = (1.11, 2.53)
OVER_EAGLE = (1.09, 1.80)  # of sd.npu, section 4.2
SAM_ON_CPU = (0.92, 1.13)  # over CPU vanilla, section 4.2
ENERGY_AND_TIME = {  # greatest gains of sd.npu, section 4.2
    "NPU vanilla": (4.18, 3.81), "CPU vanilla": (2.50, 1.78), "SAM": (3.07, 2.53), "EAGLE": (4.71, 1.80),
}  # fmt: skip
BOTH = "Qwen2.5-1.5B"  # the one model of both Table 3 and Table 4
_HALF = 0.5 + 1e-9  # of the last printed digit


# Tables


def acceptance(models: Mapping[str, str], tasks: Mapping[str, str]) -> pd.DataFrame:
    """Table 4: model, method (PLD, PLD+Ours, SAM, SAM+Ours), task, accepted (tokens a verification), gain.

    models: our names by the paper's; a model that is not in it is left out. tasks: the paper's names by ours.
    gain: accepted over the drafter's own, from the printed values; 1 for the drafter. Raises ValueError on other names.
    """
    table = assets.paper_table("sdnpu", "table_04_acceptance_ratio")
    ours = {printed: name for name, printed in tasks.items()}
    _known(models, table["model"], "model")
    _known(ours, table["dataset"], "task")
    table = table[table["model"].isin(models) & table["dataset"].isin(ours)]
    accepted = table["accepted_tokens_per_verification"]
    alone = table[table["with_sdnpu_techniques"] == "no"].set_index(["model", "dataset", "drafter"])
    base = alone["accepted_tokens_per_verification"].reindex(
        pd.MultiIndex.from_frame(table[["model", "dataset", "drafter"]])
    )
    return pd.DataFrame({
        "model": table["model"].map(models),
        "method": table["drafter"] + table["with_sdnpu_techniques"].map({"no": "", "yes": "+Ours"}),
        "task": table["dataset"].map(ours), "accepted": accepted, "gain": accepted / base.to_numpy(),
    }).reset_index(drop=True)  # fmt: skip


def ablation() -> pd.DataFrame:
    """Table 3: model (the paper's), arm (names of `npu.table_3`), per_token_ms, speedup (over the arm NPU)."""
    table = assets.paper_table("sdnpu", "table_03_ablation_latency")
    table = table.rename(columns={"paper_label": "arm", "per_token_latency_ms": "per_token_ms"})
    base = table[table["arm"] == "NPU"].set_index("model")["per_token_ms"]
    return table[["model", "arm", "per_token_ms"]].assign(speedup=table["model"].map(base) / table["per_token_ms"])


def rejections() -> pd.DataFrame:
    """Table 2: cause, share (of the rejections)."""
    table = assets.paper_table("sdnpu", "table_02_draft_rejection_patterns")
    return pd.DataFrame({"cause": table["case"], "share": table["ratio_percent"] / 100})


def hardware() -> pd.DataFrame:
    """Table 1: vendor, soc, npu, int8_performance_tops."""
    return assets.paper_table("sdnpu", "table_01_mobile_npu_specs")


# The fit


def npu_curve() -> Curve:
    """F through Fig. 6's two values: 46.9 + 4.24 n.

    The length of a draft is taken for the shape of its graph: on one graph of 32 rows a token alone would take 32 times
    what it takes in a full draft, and the printed factor is 9.
    """
    return fit(list(FIG_6), [rows * ms for rows, ms in FIG_6.items()])


def throughput_loss(curve: Curve, short: int = 8, long: int = 64) -> float:
    """Percent by which fewer rows are run in a second on a graph of `short` rows than on one of `long`."""
    return float(100 * (1 - (short / curve(short)) / (long / curve(long))))


def fit_residuals(curve: Curve | None = None) -> pd.DataFrame:
    """What the paper prints of F, and what the curve says: what, printed, fitted, residual_percent, role.

    role: `fit` where F was made from it, `check` where it was not. The last three are of other phones, one of another
    graph. curve: `npu_curve` by default.
    """
    found = curve or npu_curve()
    rows = [(f"ms a token at {n} rows", ms, float(found(n)) / n, "fit") for n, ms in FIG_6.items()]
    rows += [
        ("% of throughput lost, 8 rows against 64", THROUGHPUT_LOSS, throughput_loss(found), "check"),
        ("ms of a forward of 32 rows, Fig. 5 read as one token a forward", FIG_5["decode"], float(found(32)), "check"),
        ("ms of a forward of 32 rows, Fig. 5 as printed", figure_5()["forward_as_printed"], float(found(32)), "check"),
        ("ms a token at 256 rows, prefill", 1e3 / PREFILL_SPEED, float(found(256)) / 256, "check"),
    ]
    table = pd.DataFrame(rows, columns=["what", "printed", "fitted", "role"])
    table.insert(3, "residual_percent", 100 * (table["fitted"] / table["printed"] - 1))
    return table


def cpu_curve(rows: float, accepted: float) -> Curve:
    """The phone's CPU: one row as long as the NPU's, which Fig. 6 calls similar, and SAM's steps with its printed gain.

    rows, accepted: means of SAM's steps in the log, root and the model's own token included. SAM on the CPU gains 0.92
    to 1.13 there; their geometric mean is put in, so it is no result. Raises ValueError where SAM drafted nothing.
    """
    step = accepted / math.sqrt(SAM_ON_CPU[0] * SAM_ON_CPU[1])
    if rows <= 1 or step < 1:
        raise ValueError(f"SAM's steps have drafts and gain something, not {rows} rows for {accepted} tokens.")
    slope = FIG_6[1] * (step - 1) / (rows - 1)
    return Curve(FIG_6[1] - slope, slope)


def weights(bits: float = 16) -> pd.DataFrame:
    """GB (10^9 bytes) of the latency tests' models, by name: weights_gb, twice_gb (CPU and NPU), draft_gb (EAGLE's).

    The paper does not state its precision. Its 3.05 to 3.12 GB for the 1.5B on the NPU are the weights in 16 bits.
    """
    each = bits / 8 / 1e9
    rows = []
    for name in ("qwen2.5-0.5b", "qwen2.5-1.5b", "llama-3.2-3b"):
        total = shapes.shape(name).parameters * each
        rows.append((name, total, 2 * total, draft_parameters(name)[0] * each))
    return pd.DataFrame(rows, columns=["model", "weights_gb", "twice_gb", "draft_gb"]).set_index("model")


# What the printed numbers say of each other


def figure_5() -> dict[str, float]:
    """What 160 ms a token means on the 32-row graph that prefills at under 8 ms a token.

    forward_as_printed, prefill_as_printed: a forward at 4.2 tokens, and its time over 32 rows, which is above the
    printed bound. prefill_at_one: were 160 ms a whole forward, at one token each; this agrees with the bound.
    """
    forward = FIG_5["decode"] * FIG_5["acceptance"]
    return {
        "forward_as_printed": forward,
        "prefill_as_printed": forward / 32,
        "prefill_at_one": FIG_5["decode"] / 32,
        "prefill_bound": FIG_5["prefill"],
    }


def graph_saving() -> pd.DataFrame:
    """What progressive graphs save in Table 3: model, plain (ms a token), speculative, equal (to the printed digit).

    A saving that is the same with and without speculation is of a request and not of a forward.
    """
    wide = _table_3()
    plain = wide["NPU"] - wide["+G"]
    speculative = wide["+SD"] - wide["+G+SD"]
    equal = (plain - speculative).abs() < 0.005
    return pd.DataFrame({"plain": plain, "speculative": speculative, "equal": equal}).reset_index()


def forward_bounds(draft_ms: float = 0.0) -> pd.DataFrame:
    """What Table 3 leaves open for the model of Table 4: what, low, high.

    A token takes c + F / accepted, with one c for all arms with progressive graphs and accepted from Table 4 (1 for
    vanilla). c lies between 0 and where sd.npu's forward would take less than vanilla's single row does. From its ends:
    vanilla, sam, ours (ms of a forward), sam_over_ours. draft_ms: of a step, where drafting is charged.
    """
    row = _row(BOTH)
    accepted = _summary_acceptance()
    most = (accepted["SAM+Ours"] * row["Ours"] - draft_ms - row["+G"]) / (accepted["SAM+Ours"] - 1)
    ends = []
    for c in (0.0, most):
        sam = accepted["SAM"] * (row["+G+SD"] - c) - draft_ms
        ours = accepted["SAM+Ours"] * (row["Ours"] - c) - draft_ms
        ends.append({"c": c, "vanilla": row["+G"] - c, "sam": sam, "ours": ours, "sam_over_ours": sam / ours})
    table = pd.DataFrame(ends)
    return pd.DataFrame({"what": table.columns, "low": table.min().to_numpy(), "high": table.max().to_numpy()})


def spill_share(draft_ms: float = 0.0) -> tuple[float, float]:
    """(least, greatest) share of SAM's verifications that must take two runs of the graph for Table 3 to hold.

    sd.npu's always take one. Where SAM drafts 4 tokens for each that matched, these are matches of 8 tokens or more.
    """
    bounds = forward_bounds(draft_ms).set_index("what")
    return bounds["low"].to_dict()["sam_over_ours"] - 1, bounds["high"].to_dict()["sam_over_ours"] - 1


def spill_account() -> pd.DataFrame:
    """Whether drafts that spill can explain Table 3: model, gain (+G+SD over Ours), most, explained.

    most: if every one of SAM's verifications took two runs, times the greatest gain of acceptance in Table 4. Any c
    that both arms share only makes `gain` larger. The 3B's 1.11 needs no spill: more acceptance alone gives it.
    """
    wide = _table_3()
    gain = wide["+G+SD"] / wide["Ours"]
    printed = assets.paper_table("sdnpu", "table_04_acceptance_ratio")
    most = 2 * printed.loc[printed["drafter"] == "SAM", "reported_gain_over_drafter_x"].max()
    return pd.DataFrame({"gain": gain, "most": most, "explained": gain <= most}).reset_index()


def vanilla_over_ours() -> tuple[float, float]:
    """(least, greatest) time of vanilla's forward over sd.npu's that a decoding cut by 5.25 to 8.15 needs at 4.21."""
    accepted = _summary_acceptance()["SAM+Ours"]
    return DECODE_SPEEDUP[0] / accepted, DECODE_SPEEDUP[1] / accepted


def over_sam() -> pd.DataFrame:
    """Table 3's +SD, which is the baseline NPU-SAM, over Ours: model, speedup, inside (the range printed for it)."""
    wide = _table_3()
    speedup = wide["+SD"] / wide["Ours"]
    return pd.DataFrame({"speedup": speedup, "inside": speedup.between(*OVER_SAM)}).reset_index()


def longest_prompt(calibrate_ms: float = CALIBRATE_MS) -> float:
    """Tokens of the prompt for each of the output, at most, if Table 3's times held prefill and calibration.

    Prefill at 1,000 tokens/s in all arms, calibration in sd.npu's; its forward takes no less than vanilla's row does.
    """
    row = _row(BOTH)
    accepted = _summary_acceptance()["SAM+Ours"]
    prefill = 1e3 / PREFILL_SPEED
    return (accepted * row["Ours"] - row["+G"]) / (accepted * (prefill + calibrate_ms) - prefill)


def prompt_by_shares() -> tuple[float, float]:
    """(least, greatest) tokens of the prompt for each of the output, by section 4.4's shares of NPU vanilla's time.

    At the same prefill, and a decoding time from `forward_bounds`; the shares are of another phone than Table 3.
    """
    vanilla = forward_bounds().set_index("what").loc["vanilla"].to_dict()
    prefill = 1e3 / PREFILL_SPEED
    low, high = (1 / _over_rest(share) / prefill for share in DECODE_SHARE_NPU[::-1])
    return low * vanilla["low"], high * vanilla["high"]


def cpu_over_npu_decoding() -> tuple[float, float]:
    """(least, greatest) time of decoding on the CPU over that of NPU vanilla, by the shares of decoding, summaries.

    Both on the OnePlus 13 with one prefill. Above 1 the NPU decodes faster, against section 2.1's "no advantage".
    """
    cpu = _over_rest(DECODE_SHARE_CPU[0])
    return cpu / _over_rest(DECODE_SHARE_NPU[1]), cpu / _over_rest(DECODE_SHARE_NPU[0])


def power_ratios() -> pd.DataFrame:
    """Power over sd.npu's that the greatest gains imply, were both of one setting: baseline, energy, time, power."""
    rows = [(name, energy, time, energy / time) for name, (energy, time) in ENERGY_AND_TIME.items()]
    return pd.DataFrame(rows, columns=["baseline", "energy", "time", "power"])


def powers() -> dict[str, dict[str, float]]:
    """Assumed watts by arm over sd.npu's: all alike, and what the paper's greatest gains in energy and time imply."""
    ratios = power_ratios().set_index("baseline")["power"]
    arms = {
        arm: next(name for name in ratios.index if name in arm)
        for arm in ("NPU vanilla", "CPU vanilla", "NPU-SAM", "CPU-SAM", "NPU-EAGLE", "CPU-EAGLE")
    }
    implied = {arm: float(ratios[name]) for arm, name in arms.items()} | {OURS: 1.0}
    return {"one power": dict.fromkeys(implied, 1.0), "implied powers": implied}


def least_sample(shares: Sequence[float], digits: int = 1, most: int = 10_000) -> int:
    """The smallest number of cases whose counts give these percentages to the printed digit.

    Table 2's give 13. Raises ValueError where none up to `most` does.
    """
    half = _HALF * 10.0**-digits
    for size in range(1, most + 1):
        counts = [round(share * size / 100) for share in shares]
        close = all(abs(100 * n / size - share) <= half for n, share in zip(counts, shares, strict=True))
        if close and sum(counts) == size:
            return size
    raise ValueError(f"No sample of up to {most} has the shares {', '.join(f'{share:g}' for share in shares)} percent.")


def consistency() -> pd.DataFrame:
    """Every check of this module: where, finding, printed, computed, agrees. For the notes on the paper."""
    curve, fifth, savings = npu_curve(), figure_5(), graph_saving().set_index("model")
    bounds = forward_bounds().set_index("what")
    forwards = vanilla_over_ours()
    sample = least_sample((100 * rejections()["share"]).tolist())
    sam = over_sam()
    spill = spill_account().set_index("model")
    cpu, prompt, by_shares = cpu_over_npu_decoding(), longest_prompt(), prompt_by_shares()
    loss = throughput_loss(curve)
    small = "Qwen2.5-0.5B"
    needed = f"{spill_share()[0]:.0%} to {spill_share()[1]:.0%} of SAM's steps spill"
    rows = [
        ("Fig. 6", "throughput lost at 8 rows against 64, by a line through the two printed times",
         f"{THROUGHPUT_LOSS:g} %", f"{loss:.1f} %", abs(loss - THROUGHPUT_LOSS) <= 1),
        ("Fig. 6", "time a token at length 1 over that at 32; one static graph of 32 rows would have 32x", "32x",
         f"{FIG_6[1] / FIG_6[32]:.1f}x", abs(FIG_6[1] / FIG_6[32] - 32) <= 1),
        ("Fig. 5", "prefill on the 32-row graph, if 160 ms a token is at 4.2 tokens a forward",
         f"< {FIG_5['prefill']:g} ms", f"{fifth['prefill_as_printed']:.1f} ms",
         fifth["prefill_as_printed"] < FIG_5["prefill"]),
        ("Fig. 5", "the same, if 160 ms is one forward",
         f"< {FIG_5['prefill']:g} ms", f"{fifth['prefill_at_one']:.1f} ms", fifth["prefill_at_one"] < FIG_5["prefill"]),
        *(("Table 3", f"what graphs save a token with and without speculation, {model}",
           f"{row.plain:.2f} ms", f"{row.speculative:.2f} ms", bool(row.equal)) for model, row in savings.iterrows()),
        ("Table 3", f"SAM's forward over sd.npu's, {BOTH}; above 1, longer drafts would make forwards cheaper",
         "-", f"{bounds.low['sam_over_ours']:.2f} to {bounds.high['sam_over_ours']:.2f}: {needed}",
         bool(spill.explained[BOTH])),
        ("Table 3", f"sd.npu over +G+SD, {small}, if every draft of SAM spilled",
         f"{spill.gain[small]:.2f}x", f"at most {spill.most[small]:.2f}x", bool(spill.explained[small])),
        ("4.2", "sd.npu over NPU-SAM by Table 3", f"up to {OVER_SAM[1]}x", f"up to {sam['speedup'].max():.2f}x",
         bool(sam["inside"].all())),
        ("4.4", "decoding cut, in vanilla's forwards over sd.npu's at 4.21 tokens", "1 on one graph",
         f"{forwards[0]:.2f} to {forwards[1]:.2f}", forwards[0] <= 1),
        ("Table 3, 4.4", "prompt over output, if times hold prefill at 1 ms a token and calibration at 2",
         f"{by_shares[0]:.0f} to {by_shares[1]:.0f}", f"at most {prompt:.2f}", prompt >= by_shares[0]),
        ("2.1, 4.4", "decoding on the CPU over NPU vanilla's by the shares of decoding", "at most 1",
         f"{cpu[0]:.1f} to {cpu[1]:.1f}", cpu[0] <= 1),
        ("Table 2", "rejections that were counted, at least; three digits need some 1,000", "three digits", f"{sample}",
         sample >= 1000),
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["where", "finding", "printed", "computed", "agrees"])


def _table_3() -> pd.DataFrame:
    """[model, arm] ms a token, in the paper's order."""
    table = ablation()
    wide = table.pivot(index="model", columns="arm", values="per_token_ms")
    return wide.reindex(index=table["model"].unique(), columns=table["arm"].unique())


def _row(model: str) -> dict[str, float]:
    """A model's row of Table 3."""
    table = ablation()
    table = table[table["model"] == model]
    return dict(zip(table["arm"], table["per_token_ms"], strict=True))


def _summary_acceptance() -> dict[str, float]:
    """Table 4's tokens a verification of `BOTH` on summaries, by method."""
    table = acceptance({BOTH: BOTH}, {"summary": "summary"})
    return dict(zip(table["method"], table["accepted"], strict=True))


def _over_rest(share: float) -> float:
    return share / (1 - share)


def _known(names: Mapping[str, str], printed: pd.Series, what: str) -> None:
    unknown = sorted(set(names) - set(printed))
    if unknown:
        raise ValueError(f"Table 4 has no {what} {', '.join(unknown)}; it has {', '.join(printed.unique())}.")
