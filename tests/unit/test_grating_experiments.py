"""GRATING's recordings, sweeps, streaming and tables: each as `plots` draws it and `findings` reads it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from matplotlib import pyplot as plt
from scipy import stats
from tokenizers import Tokenizer, processors
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, PreTrainedTokenizerFast

from ondevice import assets, corpus, shapes
from ondevice.grating import calibration, experiments, findings, plots, printed, recordings, streamable, trade_offs
from ondevice.grating import streaming as streaming_module
from ondevice.grating.checkpoint import StoredTensor
from ondevice.grating.printed import HF, OFFLOAD, OURS, OURS_QUANT, QUANT
from ondevice.grating.pruning import ClusterRule
from ondevice.grating.recordings import CLOZE, MODELS, QUESTIONS, Asked, Recording
from ondevice.grating.replay import Pools, measure, replay
from ondevice.retrieval import pools as evaluation_data

LAYERS, N = 4, 12
WORDS = "yes no what is alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    plt.close("all")


def drawn(pools: int = 40, layers: int = 6, n: int = 20, seed: int = 0, ragged: bool = False) -> Pools:
    """Scores that settle layer by layer, with ties, and pools of several sizes."""
    rng = np.random.default_rng(seed)
    final = rng.normal(0, 2, (pools, 1, n))
    noise = rng.normal(0, 2, (pools, layers, n)) * np.linspace(1, 0, layers)[:, None]
    scores = np.round(final + noise, 1)  # rounded: equal ones are frequent
    scores[:3, 0] = 0.5  # all equal
    scores[3:6, 1] = np.where(np.arange(n) < 4, 1.0, -1.0)  # two values
    relevance = (final[:, 0] + rng.normal(0, 1, (pools, n)) > 2).astype(float)
    if ragged:
        for pool in range(0, pools, 3):
            scores[pool, :, n - pool % 7 - 1 :] = np.nan
            relevance[pool, n - pool % 7 - 1 :] = np.nan
    return Pools(scores, relevance)


def recorded(model: str, pools: Pools) -> Recording:
    half = len(pools) // 2
    places = np.zeros(len(pools), np.uint64), np.zeros((len(pools), pools.scores.shape[2]), np.uint64)
    queries = np.array([QUESTIONS] * half + [CLOZE] * (len(pools) - half))
    return Recording(model, "test", pools, queries, *places)


# Recordings


def test_packed_scores_are_within_half_a_step():
    scores = drawn().scores
    packed = recordings.pack(scores)
    assert packed["codes"].dtype == np.uint16
    off = np.abs(recordings.unpack(packed) - scores).max(2)
    assert (off <= 0.51 * packed["step"] + 1e-6).all()
    np.testing.assert_allclose(off[:3, 0], 0, atol=1e-6)  # equal scores stay equal


@pytest.mark.parametrize("model", MODELS)
def test_committed_recordings_give_the_model_cards_precision(model):
    card = json.loads(assets.data("models", model, "reranking.json").read_text())
    recording = recordings.load(model)
    assert (len(recording.pools), len(recordings.load(model, "validation").pools)) == (card["queries"], 432)
    assert {queries: int((recording.queries == queries).sum()) for queries in (QUESTIONS, CLOZE)} == {
        recordings.SETS[kind]: count for kind, count in card["kinds"].items()
    }
    full = measure(recording.pools, 1).full.mean()
    assert full == pytest.approx(card["metrics"]["model"]["precision@1"]["mean"], abs=0.006)  # two of 373 pools
    small = recordings.load(model, int8=True)
    np.testing.assert_array_equal(small.candidates, recording.candidates)
    assert measure(small.pools, 1).full.mean() == pytest.approx(full, abs=0.02)
    assert np.abs(small.pools.scores - recording.pools.scores).max() > 0.01  # they are another recording


def test_the_file_is_small():
    assert recordings._path().stat().st_size < 1.6e6


def test_what_was_not_recorded_is_refused():
    with pytest.raises(ValueError, match="nothing-reranker was not recorded"):
        recordings.load("nothing-reranker")
    with pytest.raises(ValueError, match="with int8 weights was not recorded on the validation split"):
        recordings.load(MODELS[0], "validation", int8=True)
    with pytest.raises(ValueError, match="There are no riddles recorded"):
        recordings.load(MODELS[0]).of("riddles")


def small_corpus(monkeypatch) -> list[str]:
    """Two documents with a query each, and four passages, which can be changed."""
    documents = [
        SimpleNamespace(name=f"a.b{place}", docstring="Open the file for reading now.\n\nMore.\n")
        for place in range(2)
    ]  # fmt: skip
    texts = ["t0", "t1", "t2", "t3"]
    by_hash = {recordings._hash(one.name): one for one in documents}
    monkeypatch.setattr(
        recordings, "_corpus", lambda split: (by_hash, {recordings._hash(text): text for text in texts})
    )
    monkeypatch.setattr(recordings.corpus, "queries", lambda found: [corpus.Query("summary", "q", found[0].name, "")])
    return texts


def test_pools_are_kept_as_hashes_of_texts(monkeypatch, tmp_path):
    texts = small_corpus(monkeypatch)
    pools: Any = [
        SimpleNamespace(query=corpus.Query("summary", "q", "a.b1", ""), passages=("t3", "t1"), relevant=[True, False])
    ]
    scores = np.array([[[0.0, 1.0], [2.0, 1.0]]])
    found = recordings.places("test", pools) | recordings._keyed("m", "test", recordings.pack(scores))
    recordings.save(found, tmp_path / "kept.npz")
    with np.load(tmp_path / "kept.npz") as kept:
        recording = recordings._unpacked({name: kept[name] for name in kept.files}, "m", "test", False)
    assert recording.of(CLOZE).relevance.tolist() == [[1, 0]]
    assert recordings.asked(recording, [0]) == [Asked(0, "q", ("t3", "t1"))]
    texts.remove("t3")  # another version of a package
    with pytest.raises(ValueError, match="another version of the documentation corpus"):
        recordings.asked(recording, [0])
    np.testing.assert_allclose(recording.pools.scores, scores, atol=1e-3)


def test_recording_anew_gives_scores_with_both_kinds_of_weights(monkeypatch, tmp_path):
    texts = small_corpus(monkeypatch)
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(streamable, "_cache", lambda: tmp_path / "cache")
    texts[:] = ["a.b0\nOpens a file for reading.", "a.b1\nThe sum of all numbers.", "a.b0\nA colour.", "a.b1\nA word."]
    query = corpus.Query("summary", "How is a file opened?", "a.b0", "")
    pools = [SimpleNamespace(query=query, passages=tuple(texts), relevant=[True, False, False, False])]
    monkeypatch.setattr(evaluation_data, "for_evaluation", lambda split: SimpleNamespace(pools=pools))
    found = recordings.record("test", ["minilm-reranker"])
    exact, small = (recordings._unpacked(found, "minilm-reranker", "test", int8) for int8 in (False, True))
    assert exact.pools.scores.shape == (1, 6, 4)
    assert exact.candidates.tolist() == [[recordings._hash(text) for text in texts]]
    apart = np.abs(exact.pools.scores - small.pools.scores).max()
    assert 0 < apart < 0.2 * np.ptp(exact.pools.scores[0, -1])
    assert recordings.compare(exact, [Asked(0, "", ())], small.pools.scores)["largest"] == pytest.approx(apart)


def test_places_are_spread_over_a_query_set():
    recording = recorded("m", drawn(10))
    assert recordings.spread(recording, 3).tolist() == [0, 4, 9]
    assert recordings.spread(recording, 2, CLOZE).tolist() == [5, 9]
    assert recordings.spread(recording, 99).tolist() == list(range(10))


def test_live_scores_are_compared_with_recorded_ones():
    recording = recorded("m", drawn(4))
    pools = [Asked(2, "q", ()), Asked(3, "q", ())]
    same = recordings.compare(recording, pools, recording.pools.scores[2:], 5, ClusterRule(0.5))
    assert (same["largest"], same["kendall"], same["overlap"], same["decided"]) == (0, 1, 1, 1)
    other = recordings.compare(recording, pools, -recording.pools.scores[2:], 5)
    assert other["kendall"] == -1 and other["overlap"] < 0.5 and np.isnan(other["decided"])


def test_kendall_is_that_of_scipy():
    scores = drawn(5).scores
    found = recordings.kendall(scores[:, 0], scores[:, -1])
    for pool in range(3, 5):
        assert found[pool] == pytest.approx(stats.kendalltau(scores[pool, 0], scores[pool, -1]).statistic)
    assert found[0] == 0  # all equal


# Sweeps


def test_precision_is_out_of_the_relevant_where_these_are_fewer():
    scores = np.array([[[3.0, 2, 1, 0]], [[3.0, 2, 1, 0]], [[3.0, 2, 1, 0]]])
    pools = Pools(scores, np.array([[1, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 0]]))
    assert measure(pools, 2).precision.tolist() == [1.0, 0.5, 0.0]
    assert trade_offs.at(pools, 2, ClusterRule(np.inf)).full.tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("rule", [ClusterRule(np.inf), ClusterRule(np.inf, "std", on="logit", first=2)])
@pytest.mark.parametrize("k", [1, 5, 14, 20])
def test_a_sweep_is_every_replay_at_once(k, rule, exact):
    pools = drawn(ragged=True)
    slow, fast = calibration.curve(pools, k, rule, exact), trade_offs.curve(pools, k, rule, exact)
    np.testing.assert_allclose(fast.thresholds, slow.thresholds, rtol=1e-12)
    for name in ("saved", "precision", "overlap"):
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), atol=1e-12)
    assert fast.full == pytest.approx(slow.full)
    for tau in (0.3, 0.7, 1.3):
        one = dataclasses.replace(rule, threshold=tau)
        for name in ("saved", "precision", "full", "overlap"):
            found = getattr(trade_offs.at(pools, k, one, exact), name)
            np.testing.assert_allclose(found, getattr(measure(pools, k, one, exact), name))


@pytest.mark.parametrize("rule", [ClusterRule(1, clusters=2), ClusterRule(1, "iqr")])
def test_a_sweep_refuses_other_rules(rule):
    with pytest.raises(ValueError, match="A sweep is of three clusters and cv or std"):
        trade_offs.curve(drawn(3), 1, rule)


def test_calibrated_thresholds_meet_their_targets_on_the_pools_that_set_them():
    recording = recordings.load("pydocs-reranker", "validation")
    found = trade_offs.calibrated([recording], [1, 5])
    assert len(found) == 2 * 2 * 2
    for row in found.to_dict("records"):
        done = trade_offs.at(recording.of(row["queries"]), row["k"], ClusterRule(row["threshold"]))
        if row["name"] == "high":
            assert done.overlap.mean() >= trade_offs.OVERLAP - 1e-9
        else:
            assert done.precision.mean() >= done.full.mean() - trade_offs.POINT - 1e-9
        assert done.saved.mean() > 0.03
    tau = trade_offs.threshold(found, "pydocs-reranker", CLOZE, 5, "high")
    rows = trade_offs.outcomes([recording], found)
    assert (rows["saved_low"] <= rows["saved"]).all() and (rows["overlap"] <= rows["overlap_high"]).all()
    kept = rows[(rows["queries"] == CLOZE) & (rows["k"] == 5) & (rows["name"] == "high")]
    assert all(0 <= share <= 1 for share in findings.thresholds(rows)["grating-c16"])
    assert kept["overlap"].item() == pytest.approx(measure(recording.of(CLOZE), 5, ClusterRule(tau)).overlap.mean())
    with pytest.raises(ValueError, match="There is no high threshold of pydocs-reranker for inverse cloze and K = 7"):
        trade_offs.threshold(found, "pydocs-reranker", CLOZE, 7, "high")


def test_the_trade_off_is_drawn_and_judged():
    all_ = [recordings.load(name) for name in MODELS[2:]]
    curve = trade_offs.trade_off(all_, [1, 10], points=12, queries=CLOZE)
    taus = trade_offs.calibrated([recordings.load(name, "validation") for name in MODELS[2:]], [1, 10])
    marked = trade_offs.chosen(taus, CLOZE)
    assert len(curve) == 2 * 12 and len(marked) == 2 * 2
    assert plots.trade_off(curve, marked).axes
    assert set(findings.trade_off(curve)) == {"grating-c19"}
    rows = curve[(curve["model"] == MODELS[2]) & (curve["k"] == 1)]
    done = measure(all_[0].of(CLOZE), 1, ClusterRule(rows["threshold"].iloc[5] * (1 + 1e-9)))
    assert rows["computed"].iloc[5] == pytest.approx(1 - done.saved.mean())
    assert rows["precision"].iloc[5] == pytest.approx(done.precision.mean())
    never = taus.assign(threshold=np.inf)
    assert trade_offs.chosen(never, CLOZE).empty


def test_promises_are_drawn():
    pools = [drawn(160, 4, 10, seed) for seed in (1, 2)]
    table = trade_offs.guarantee({"a": (pools[0], pools[1])}, [5], (0.7, 0.95), every=6)
    assert plots.guarantee(table).axes
    assert set(table["rule"]) == {trade_offs.MARGIN, trade_offs.CERTIFIED, trade_offs.CALIBRATED}
    wide = table.pivot(index="rule", columns="promised", values="saved")
    assert (wide[0.7] > wide[0.95]).all()
    certified = table[table["rule"] != trade_offs.CALIBRATED]
    assert (certified["reached"] >= certified["promised"]).all()  # the pools are of one kind
    taken = table[(table["rule"] == trade_offs.CERTIFIED) & (table["promised"] == 0.7)]["setting"].item()
    found = measure(pools[1], 5, ClusterRule(taken))
    assert wide.loc[trade_offs.CERTIFIED, 0.7] == pytest.approx(found.saved.mean())
    with pytest.raises(ValueError, match="takes at least"):
        trade_offs.guarantee({"a": (pools[0].take(range(40)), pools[1])}, [2], (0.99,))


def test_where_nothing_is_certified_nothing_is_pruned():
    pools = [drawn(260, 4, 10, seed) for seed in (1, 2)]  # in some, an early decision loses both places
    table = trade_offs.guarantee({"a": (pools[0], pools[1])}, [2], (0.95,), every=12).set_index("rule")
    assert table.loc[trade_offs.CERTIFIED, ["setting", "saved", "reached"]].tolist() == [np.inf, 0, 1]


# Figures 2 and 4, clusters


def test_scores_and_agreement_are_drawn_and_judged():
    all_ = [recordings.load(name) for name in (MODELS[0], MODELS[2])]
    scores, table = experiments.score_evolution(all_, 5), experiments.agreement(all_)
    assert plots.score_evolution(scores, table).axes
    assert 0 < findings.agreement(table)["grating-c11"] <= 1
    assert len(scores) == (12 + 6) * 20
    tops = scores[(scores["model"] == MODELS[0]) & (scores["layer"] == 12)].sort_values("probability").tail(5)
    assert tops["top"].all() and scores["top"].mean() == 5 / 20
    last = table[(table["model"] == MODELS[0]) & (table["layer"] == 12)]
    assert last["kendall"].item() == pytest.approx(1, abs=1e-2)
    card = json.loads(assets.data("models", MODELS[0], "reranking.json").read_text())
    for layer in (5, 9):
        found = table[(table["model"] == MODELS[0]) & (table["layer"] == layer)]["kendall"].item()
        assert found == pytest.approx(card["layers"][layer - 1]["kendall"]["mean"], abs=0.01)


def test_the_worked_example_is_drawn_as_the_paper_tells_it():
    scores, rounds = experiments.worked_example()
    assert plots.pruning(scores, rounds).axes
    for step in assets.paper_table("grating", "worked_example").itertuples():
        rows = scores[scores["layer"] == step.after_layer]["verdict"]
        found = [len(rows), int((rows == "selected").sum()), int((rows == "dropped").sum())]
        told = [step.active, step.selected, step.dropped]
        assert [one for one, known in zip(found, told, strict=True) if known == known] == [
            known for known in told if known == known
        ]  # fmt: skip
    assert (scores["verdict"] == "selected").sum() == 10 and rounds["layer"].max() == 11


def test_rounds_of_a_real_pool_are_those_of_the_replay():
    recording, rule = recordings.load(MODELS[0]), ClusterRule(0.6)
    place = experiments.telling_pool(recording, 5, rule)
    for exact in (False, True):
        scores, rounds = experiments.pruning_rounds(recording.pools.pool(place), 5, rule, exact)
        assert plots.pruning(scores, rounds).axes
        outcome = replay(recording.pools.pool(place), 5, rule, exact)
        assert len(scores) == outcome.work
        assert sorted(scores[scores["verdict"] == "selected"]["candidate"]) == sorted(outcome.chosen.tolist())
        selected = scores[scores["verdict"] == "selected"]["layer"]
        assert not exact or set(selected) == {12}
        before = scores[(scores["verdict"] != "deferred") & (scores["layer"] < 12)]
        assert len(set(before["layer"])) > 1
        assert (rounds["threshold"] == 0.6).all()
        first = before["layer"].min()
        assert rounds.set_index("layer").loc[first, "statistic"] > 0.6


def test_clusterings_are_drawn():
    table = experiments.clustering([recordings.load(MODELS[0])], (20, 60), pools=15)
    assert plots.clustering(table).axes
    wide = table.set_index("method")
    assert (wide.loc[experiments.EXACT, ["missed", "changed"]] == 0).all().all()
    assert wide.loc[experiments.LLOYD, "missed"].sum() > wide.loc[experiments.RESTARTED, "missed"].sum()


# Live, on tiny models


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    entries = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", *WORDS.split()]
    made = Tokenizer(WordLevel({entry: index for index, entry in enumerate(entries)}, "[UNK]"))
    made.pre_tokenizer = WhitespaceSplit()
    made.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", [("[CLS]", 0), ("[SEP]", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="[CLS]", pad_token="[PAD]", sep_token="[SEP]", unk_token="[UNK]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"], model_max_length=40,
    )  # fmt: skip


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A saved random reranker, and recordings and pools of it in the place of the real ones."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setattr(streamable, "_cache", lambda: tmp_path / "cache")
    config = AutoConfig.for_model(
        "qwen3", vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=1, num_labels=1,
        architectures=["Qwen3ForSequenceClassification"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3ForSequenceClassification(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn(parameter.shape))
    spec = str(tmp_path / "tiny")
    model.save_pretrained(spec)
    tokenizer().save_pretrained(spec)
    rng = np.random.default_rng(1)
    texts = [[" ".join(rng.choice(WORDS.split()[4:], size)) for size in rng.integers(3, 12, N)] for _ in range(6)]
    pools = [Asked(place, "what is alpha", tuple(documents)) for place, documents in enumerate(texts)]
    with recordings.opened(spec) as (opened, engine):
        scores = recordings.live(opened, engine, pools)
    relevance = (rng.random((6, N)) < 0.3).astype(float)
    kept = recorded(spec, Pools(scores, relevance))
    for module in (recordings, experiments):
        monkeypatch.setattr(module, "load", lambda name, split="test", int8=False: kept)
        monkeypatch.setattr(module, "asked", lambda recording, places: [pools[place] for place in places])
    return spec


def test_live_scores_of_a_tiny_model_are_checked(tiny):
    table = recordings.check([tiny], pools=3, rules={tiny: ClusterRule(0.2)})
    row = table.to_dict("records")[0]
    assert (row["pools"], row["overlap"], row["decided"], row["kendall"]) == (3, 1, 1, 1)
    assert row["largest"] == 0


def test_latency_and_precision_are_drawn_and_judged(tiny):
    taus = trade_offs.calibrated([experiments.load(tiny)], [1, 10])
    table = experiments.latency_and_precision(taus, [tiny], [1, 10], pools=2)
    for queries in (QUESTIONS, CLOZE):
        assert plots.latency_and_precision(table[table["queries"] == queries]).axes
    values = findings.micro(table.replace({tiny: "tiny"}))
    assert {"grating-c01", "grating-c03", "grating-c12", "grating-c15"} <= set(values)
    assert len(table) == 2 * 2 * 7 and (table["pools"] == 2).all()
    assert (table["seconds"] > 0).all() and (table["low"] <= table["high"]).all()
    full = measure(experiments.load(tiny).of(CLOZE), 10).full.mean()
    cell = table[(table["queries"] == CLOZE) & (table["k"] == 10)].set_index(["method", "threshold"])
    assert cell.loc[(HF, ""), "precision"] == pytest.approx(full)
    assert set(cell.index.get_level_values(0)) == {HF, OFFLOAD, QUANT, OURS, OURS_QUANT, experiments.EXACT_ORDER}
    assert cell.loc[(OURS, "low"), "saved"] == pytest.approx(
        measure(experiments.load(tiny).of(CLOZE), 10,
                ClusterRule(trade_offs.threshold(taus, tiny, CLOZE, 10, "low"))).saved.mean()
    )  # fmt: skip


def test_ways_take_turns_and_medians_are_of_rounds(monkeypatch):
    clock, order = [0.0], []

    def way(name: str, seconds: list[float]) -> experiments.Way:
        left = list(seconds)

        def run(pool: Asked) -> None:
            order.append((name, pool.place))
            clock[0] += left.pop(0)

        return experiments.Way(name, "", None, run)

    monkeypatch.setattr(experiments.time, "perf_counter", lambda: clock[0])
    pools = [Asked(0, "q", ("a", "b", "c")), Asked(1, "q", ("a", "b", "c"))]
    ways = [way("A", [9, 1, 2, 3, 4, 5, 60]), way("B", [9, 1, 1, 1, 1, 1, 1])]
    found = experiments._interleaved(ways, pools, rounds=3)
    assert found.tolist() == [[3, 4], [1, 1]]
    assert order[:2] == [("A", -1), ("B", -1)]  # to warm up
    assert order[2:6] == [("A", 0), ("B", 0), ("B", 1), ("A", 1)]


def test_the_windows_penalty_is_judged(tiny):
    table = experiments.window_penalty(tiny, 0.1, k=3, pools=2, rounds=2)
    assert len(findings.window_penalty(table)["grating-c47"]) == 2
    assert (table["seconds"] > 0).all() and len(table) == 4
    assert table.set_index(["weights", "pruned"]).loc[("memory", False), "stalled"] < 0.01


# Streaming


def test_hidden_reads_are_drawn(monkeypatch, tmp_path):
    of = shapes.shape(printed.SMALL)
    values = of.values | dict(hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=1,
                              head_dim=16)  # fmt: skip
    monkeypatch.setattr(shapes, "SHAPES", shapes.SHAPES | {"tiny": dataclasses.replace(of, values=values)})
    monkeypatch.setattr(streaming_module.assets, "cache_folder", lambda name: tmp_path)
    found = streaming_module.hidden_reads((16, 96), (100e3,), layers=4, passes=1, shape="tiny")
    assert plots.hidden_reads(found.points, found.crossover).axes
    slow = found.points[found.points["disk"] == "throttled to 0.1 MB/s"]
    assert len(found.points) == 4 and (slow["hidden"] < 0.9).all()  # 25 kB a layer take 0.2 s
    assert (slow["read_ms"] > 50).all()
    assert found.crossover["throttled to 0.1 MB/s"] > 50 * found.gflops / max(found.gbs.values())
    assert not list(tmp_path.iterdir())  # removed
    with pytest.raises(ValueError, match="at least 3 layers, not 2"):
        streaming_module.hidden_reads(layers=2)


def test_candidates_have_so_many_tokens_together():
    for tokens in (1, 64, 100, 640):
        assert sum(len(row.ids) for row in streaming_module._rows(tokens)) == tokens


def test_the_embedding_cache_is_drawn(monkeypatch, tmp_path, tiny):
    monkeypatch.setattr(streaming_module.assets, "cache_folder", lambda name: tmp_path)
    path = tmp_path / "own"
    path.write_bytes(np.arange(100 * 4, dtype=np.int16).tobytes())
    own = StoredTensor("own", path, 0, 800, torch.bfloat16, (100, 4))
    asked = [np.array([1, 2, 3, 1]), np.array([1, 2, 3, 4]), np.arange(50, 60), np.array([1, 1, 1])]
    model = recordings.model_of(tiny)
    with streaming_module.zipf_stream(6, 200, 500, 8, 1.5) as zipf:
        real = streaming_module.real_stream(model, experiments.asked(None, range(4)))
        table = streaming_module.embedding_cache({"own": (own, asked), "Zipf": zipf, "real": real})
        assert zipf[0].file.stat().st_size == zipf[0].length
    assert plots.embedding_cache(table).axes
    assert table[table["stream"] == "own"]["hit_rate"].tolist() == [0, 0.75, 0, 0]  # ten rows: the third takes all
    zipfs = table[table["stream"] == "Zipf"].set_index("query")
    assert zipfs.loc[1, "hit_rate"] == 0 and zipfs.loc[6, "hit_rate"] > 0.2
    assert not zipf[0].file.exists()
    cost = streaming_module.warm_cost(table, {"Zipf": 2.0}).set_index("stream")
    assert cost.loc["Zipf", "share"] == pytest.approx(cost.loc["Zipf", "warm_ms"] / 2000)
    assert np.isnan(cost.loc["own", "share"]) and isinstance(cost, pd.DataFrame)
