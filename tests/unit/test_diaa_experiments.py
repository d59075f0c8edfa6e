"""DIAA's experiments: the drafters and what they are set to, and each table against a direct computation."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ondevice import shapes
from ondevice.causal_lm import CausalLM
from ondevice.diaa import experiments, memory, projection
from ondevice.diaa.budget import VerifyCost
from ondevice.diaa.drafter import RECYCLING
from ondevice.diaa.experiments import TASKS, Setting
from ondevice.diaa.overlap import Foreground
from ondevice.diaa.tables import NONE, Tables, digest
from ondevice.diaa.warmup import WINDOW, warm_up
from ondevice.speculation import Draft, Verified, generate, measuring
from ondevice.speculation.request_set import Request

V = 40
COST = VerifyCost([1, 8, 64], [1.0, 1.1, 2.0], 0.05)


def tiny(layers: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64, **shape: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": V, **shape}
    config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=160, initializer_range=0.3, **sizes)
    model = LlamaForCausalLM(config).to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def lm() -> CausalLM:
    return CausalLM(tiny())


@pytest.fixture(scope="module")
def tables(lm) -> Tables:
    return warm_up(lm, np.random.default_rng(0).integers(0, V, 300), window=60)


def request(task: str, prompt: int, ids: tuple[int, ...], limit: int = 14) -> Request:
    return Request(task, prompt, f"{task}{prompt}", ids, (), limit, frozenset())


REQUESTS = [request("rag", 0, (1, 2, 3)), request("rag", 1, (4, 5, 4)), request("summary", 0, (6, 7, 8, 6), 20)]


@pytest.fixture
def setting(lm) -> Setting:
    return Setting("tiny", lm, REQUESTS, REQUESTS[:1])


@pytest.fixture
def caught(monkeypatch) -> dict[str, measuring.Method]:
    """What an experiment would measure, by name; nothing is."""
    found: dict[str, measuring.Method] = {}

    def measure(lm, methods, *args):
        found.update({method.name: method for method in methods})
        return []

    monkeypatch.setattr(experiments, "measure", measure)
    return found


# Methods


def test_tasks_are_the_papers():
    assert list(TASKS.values()) == ["sum", "math", "mt", "qa", "rag", "trans"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_methods_say_what_vanilla_says(dtype, tables):
    lm, small = (CausalLM(tiny(layers, dtype=dtype)) for layers in (4, 1))
    before = tables.copy()
    compared = experiments.methods(lm, small, tables, np.array([1, 2, 9, 4, 0, 7, 7]), COST, 0, 12)
    assert [method.name for method in compared] == [
        "vanilla", "PLD", "PLD, transformers' rules", "SpS", "SWIFT", "SAM-D", "SAM[TR]", "TR", "DIAA",
        "DIAA, extended", "generate", "generate, prompt lookup", "generate, assistant",
    ]  # fmt: skip
    found = measuring.measure(lm, compared, REQUESTS)
    runs = measuring.runs(found, "tiny")
    assert runs["identical"].all() and len(runs) == 3 * 13
    sizes = measuring.steps(found, "tiny").groupby("method")["drafted"].max()
    assert sizes["TR"] == 80 and sizes["DIAA"] == 12 and 12 < sizes["DIAA, extended"] <= 64
    assert (before.tokens == tables.tokens).all() and (before.probabilities == tables.probabilities).all()


def test_what_a_model_does_not_allow_is_left_out(tables):
    names = {method.name for method in experiments.methods(CausalLM(tiny(2)), None, tables, np.array([1]), COST, None)}
    assert not names & {"SpS", "SWIFT", "generate, assistant"} and {"DIAA", "TR", "SAM-D"} <= names


def test_the_static_corpus_is_searched_and_read_but_not_rebuilt(lm, tables):
    text = np.array([*range(10, 20), 3, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39])
    methods = {m.name: m for m in experiments.methods(lm, None, tables, text, COST, 3)}
    first, second = methods["SAM-D"].make(), methods["SAM-D"].make()
    assert first is not second and first.corpus is second.corpus is methods["SAM[TR]"].make().corpus
    prompt = list(range(10, 18))
    first.begin(prompt[:-1])
    assert first.propose(prompt, 64).tokens.tolist() == [18, 19, 3]  # up to the end of the sequence, which stays
    one, other = methods["SAM[TR]"].make(), methods["SAM[TR]"].make()
    assert one.auxiliary is not other.auxiliary


def test_sequences_end_with_the_end_token():
    assert experiments.sequences(np.array([5, 6, 0, 7, 0, 8]), 0) == [[5, 6, 0], [7, 0], [8]]
    assert experiments.sequences(np.array([5, 0]), 0) == [[5, 0]] and experiments.sequences(np.array([5]), None) == [
        [5]
    ]


def test_the_ablation_switches_off_what_it_says(caught, setting, tables):
    experiments.ablation(setting, tables, 12)
    drafters = {name: method.make() for name, method in caught.items()}
    assert list(drafters) == ["vanilla", "DIAA, overlapped", "w/o LUT", "w/o DT", "w/o LUT+DT", "w/o CO"]
    assert all(method.budget == 12 for name, method in caught.items() if name != "vanilla")
    off = {name: (not one.tables.filled, one.template is RECYCLING, isinstance(one._updates, Foreground))
           for name, one in drafters.items() if name != "vanilla"}  # fmt: skip
    assert off == {
        "DIAA, overlapped": (False, False, False), "w/o LUT": (True, False, False), "w/o DT": (False, True, False),
        "w/o LUT+DT": (True, True, False), "w/o CO": (False, False, True),
    }  # fmt: skip
    assert all(one.tables.tokens is not tables.tokens for name, one in drafters.items() if name != "vanilla")


def test_the_ablation_of_the_extended_method_switches_off_what_it_says(caught, setting, tables):
    experiments.extended_ablation(setting, tables, COST, 12)
    drafters = {name: method.make() for name, method in caught.items() if "DIAA" not in name and name != "vanilla"}
    parts = {name: (one.calibration is not None, one.sizing and one.sizing.rule, one._suffixes)
             for name, one in drafters.items()}  # fmt: skip
    assert parts == {
        "w/o calibration": (False, "ratio", True), "w/o sizing": (True, None, True),
        "w/o suffixes": (True, "ratio", False), "sized by the rate": (True, "rate", True),
    }  # fmt: skip
    assert caught["w/o sizing"].budget == 12 and caught["DIAA, extended"].budget == 64
    one, other = caught["DIAA, extended"].make(), caught["DIAA, extended"].make()
    assert one.sizing is not other.sizing  # it learns


# Comparisons


def test_static_against_dynamic(setting, tables):
    table = experiments.static_against_dynamic(setting, tables, [4, 12])
    assert len(table) == 2 * 2 * 3 and set(table["task"]) == {"rag", "summary", "average"}
    assert set(zip(table["tree"], table["size"], strict=True)) == {
        (t, s) for t in ("static", "dynamic") for s in (4, 12)
    }
    mine = table[(table["tree"] == "static") & (table["size"] == 12) & (table["task"] == "summary")].iloc[0]
    alone = [measuring.PLAIN, experiments.diaa("x", tables, 12, dynamic=False)]
    runs = measuring.run(setting.lm, alone, REQUESTS, 1, REQUESTS[:1])
    again = runs[(runs["method"] == "x") & (runs["task"] == "summary")].iloc[0]
    assert mine["tokens_per_step"] == pytest.approx((again["tokens"] - 1) / again["steps"])
    assert mine["acceptance_rate"] == pytest.approx(again["accepted"] / again["drafted"])
    assert (table["low"] <= table["speedup"]).all() and (table["speedup"] <= table["high"]).all()


def test_sizes_and_intervals_are_set(caught, setting, tables):
    with pytest.raises(KeyError):  # there is nothing to sum up
        experiments.size_and_refresh(setting, tables, [4, 12], [1, 3])
    found = {name: (method.budget, method.make().refresh) for name, method in caught.items() if name != "vanilla"}
    assert found == {f"{size} nodes, N = {every}": (size, every) for size in (4, 12) for every in (1, 3)}


def test_initial_tables_are_told_apart(setting, tables):
    table = experiments.initialised(setting, {"warm": tables, "cold": Tables.empty(V)}, 8)
    filled = dict(zip(table["tables"], table["filled"], strict=True))
    assert filled == {"warm": pytest.approx(tables.filled), "cold": 0.0} and len(table) == 2 * 3
    assert (table["low"] <= table["goodput_tokens_per_s"]).all() and (table["low"] > 0).all()


def test_an_ablations_ratios_are_to_the_full_method():
    seconds = {"vanilla": 4.0, "DIAA, overlapped": 1.0, "w/o LUT": 2.0}
    keys = {"model": "m", "task": "a", "prompt": 0, "round": 0, "tokens": 3}
    runs = pd.DataFrame([{**keys, "method": name, "decode_s": time} for name, time in seconds.items()])
    table = experiments.without(runs)
    assert table["variant"].tolist() == ["w/o LUT"] * 2 and table["ratio"].tolist() == [0.5, 0.5]


def test_the_breakdown_recomputes():
    columns = ["model", "method", "task", "decode_s", "forward_s", "draft_s", "observe_s", "choose_s", "keep_s"]
    rows = [("m", "w/o CO", "a", 10.0, 6.0, 1.0, 0.5, 0.25, 0.25), ("m", "w/o CO", "b", 6.0, 4.0, 1.0, 0.5, 0.25, 0.25),
            ("m", "DIAA", "a", 100.0, 1.0, 1.0, 1.0, 1.0, 1.0)]  # fmt: skip
    table = experiments.breakdown(pd.DataFrame(rows, columns=columns)).set_index("part")
    assert table["seconds"].to_dict() == {
        "forward": 10.0, "tree": 2.0, "tables": 1.0, "choose": 0.5, "keep": 0.5, "rest": 2.0}  # fmt: skip
    assert table["share"].to_dict()["forward"] == 10 / 16 and table["share"].sum() == pytest.approx(1)
    with pytest.raises(ValueError, match="no runs of 'TR'"):
        experiments.breakdown(pd.DataFrame(rows, columns=columns), "TR")


# Confidence


def test_what_was_said_of_a_node_is_the_product_down_to_it():
    tables = Tables.empty(V, 2)
    tables.tokens[1], tables.probabilities[1] = [2, 3], [0.5, 0.4]
    tables.tokens[2], tables.probabilities[2] = [4, 5], [0.8, 0.1]
    witness = experiments._Witness(tables)
    witness.begin([1])
    draft = witness.propose([0, 1], 8)
    assert draft.tokens.tolist() == [2, 3, 4, 5]
    witness.observe(Verified(1, draft, torch.randn(5, V), [0, 3], [2, 5, 7]))
    said = [(round(a, 6), round(b, 6), right) for a, b, right in witness.notes]
    assert said == [(0.5, 0.5, True), (0.4, 0.4, False), (0.4, 0.4, False), (0.05, 0.05, True)]
    witness.notes = []
    witness.observe(Verified(1, Draft([2], [-1]), torch.randn(2, V), [], [3]))  # cut by the loop
    assert witness.notes == []


def test_confidence_counts_every_verified_node(setting, tables):
    nodes = experiments.confidence(setting, tables, 8)
    assert list(nodes.columns) == ["model", "task", "prompt", "tables", "calibrated", "accepted"]
    witness, drafted, accepted = experiments._Witness(tables.copy()), 0, 0
    for place, one in enumerate([*setting.prime, *setting.requests]):
        found = generate(setting.lm, witness, one.ids, one.limit, budget=8)
        if place >= len(setting.prime):
            drafted += sum(step.drafted for step in found.steps)
            accepted += sum(step.accepted for step in found.steps)
    # Near the limit the loop cuts drafts; their nodes are not judged.
    assert 0 < nodes["accepted"].sum() <= accepted and 0.5 * drafted <= len(nodes) <= drafted
    assert nodes["tables"].between(0, 1).all() and nodes["calibrated"].between(0, 1).all()
    assert (nodes["tables"] != nodes["calibrated"]).any()


def test_reliability_recomputes():
    nodes = pd.DataFrame({"model": "m", "tables": [0.05, 0.95, 1.0, 0.91], "calibrated": [0.05, 0.5, 0.5, 0.5],
                          "accepted": [False, True, False, True]})  # fmt: skip
    table = experiments.reliability(nodes).set_index(["probability", "low"])
    assert len(table) == 4 and table["nodes"].tolist() == [1, 3, 1, 3]
    high = table.loc[("tables", 0.9)]
    assert high["said"] == pytest.approx(np.mean([0.95, 1.0, 0.91])) and high["accepted"] == pytest.approx(2 / 3)
    assert high["high"] == 1.0
    found = experiments.correlations(nodes).set_index("probability")
    assert found.loc["tables", "r"] == pytest.approx(np.corrcoef(nodes["tables"], nodes["accepted"])[0, 1])
    assert found.loc["calibrated", "brier"] == pytest.approx((0.05**2 + 3 * 0.25) / 4)


# Warm-up


class Words:
    """A tokenizer as far as its digest goes."""

    def __init__(self, size: int = V) -> None:
        self._size = size

    def get_vocab(self) -> dict[str, int]:
        return {str(n): n for n in range(self._size)}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments.assets, "cache_folder", lambda name: tmp_path)
    return tmp_path


def test_tables_are_warmed_up_once_for_weights_and_text(lm, cache, monkeypatch):
    calls = []
    monkeypatch.setattr(experiments, "warm_up", lambda *args: calls.append(1) or warm_up(*args))
    ids = np.arange(50) % V
    first = experiments.warmed(lm, ids, Words())
    again = experiments.warmed(CausalLM(tiny()), ids, Words())  # the same weights
    assert len(calls) == 1 and (first.tokens == again.tokens).all()
    assert (first.tokens == warm_up(lm, ids).tokens).all()
    experiments.warmed(lm, ids[1:], Words())
    experiments.warmed(CausalLM(tiny(seed=1)), ids, Words())
    experiments.warmed(CausalLM(tiny(dtype=torch.float32)), ids, Words())
    assert len(calls) == 4 == len(list(cache.iterdir()))
    with pytest.raises(ValueError, match="another tokenizer"):
        experiments.warmed(lm, ids, Words(V + 1))


def test_bigrams_are_counted():
    ids = np.random.default_rng(1).integers(0, 12, 400)
    tables = experiments.bigrams(ids, V, "abc")
    tables.check()
    pairs, keys = Counter(zip(ids[:-1].tolist(), ids[1:].tolist(), strict=True)), Counter(ids[:-1].tolist())
    for key in range(12):
        best = sorted(((-n / keys[a], b) for (a, b), n in pairs.items() if a == key))[:8]
        assert tables.tokens[key].tolist() == [b for _, b in best]
        np.testing.assert_allclose(tables.probabilities[key], [-p for p, _ in best], rtol=1e-6)
    assert (tables.tokens[12:] == NONE).all() and tables.tokenizer == "abc"


def test_initial_tables_come_from_what_they_are_named_after(lm, cache):
    documents, tasks, small = np.arange(60) % 20, 20 + np.arange(60) % 20, CausalLM(tiny(1, seed=3))
    found = experiments.initial_tables(lm, small, documents, tasks, Words())
    assert list(found) == [
        "documents", "task text", "documents, smaller model", "documents, bigrams counted", "cold"]  # fmt: skip
    rows = {name: set(np.flatnonzero(one.tokens[:, 0] != NONE).tolist()) for name, one in found.items()}
    assert rows["documents"] == rows["documents, smaller model"] == set(range(20)) == rows["documents, bigrams counted"]
    assert rows["task text"] == set(range(20, 40)) and not rows["cold"]
    assert (found["documents"].tokens != found["documents, smaller model"].tokens).any()
    assert len({one.tokenizer for one in found.values()}) == 1
    assert "documents, smaller model" not in experiments.initial_tables(lm, None, documents, tasks, Words())


def test_warm_up_text_is_from_all_over_train(monkeypatch):
    own = experiments.corpus.tokenizer()
    ids = np.array(own("The sum of the parts, and more of them. " * 2000)["input_ids"], np.uint16)
    asked = []
    monkeypatch.setattr(experiments.corpus, "document_tokens", lambda split: asked.append(split) or ids)
    found = experiments.warm_up_text(own, "documents", 4 * WINDOW + 5)
    assert asked == ["train"] and len(found) == 4 * WINDOW
    windows = found.reshape(4, WINDOW)
    assert (windows[:, -1] == own.eos_token_id).all()
    assert (windows[0, :-1] == ids[: WINDOW - 1]).all() and (windows[-1, :-1] == ids[-WINDOW + 1 :]).all()
    other = shapes.byte_tokenizer()
    spelled = experiments.warm_up_text(other, "documents", WINDOW)
    assert other.decode(spelled[:-1].tolist()) == own.decode(windows[0, :-1].tolist())
    assert digest(other) != digest(own) and spelled[-1] == other.eos_token_id
    with pytest.raises(ValueError, match="at least one window"):
        experiments.warm_up_text(own, "documents", 10)


# Projection


def steps(drafted: list[int], emitted: list[int], task: str = "a") -> pd.DataFrame:
    return pd.DataFrame({"model": "m", "method": "DIAA", "task": task, "drafted": drafted, "emitted": emitted})


def test_a_constant_curve_projects_tokens_a_step():
    found = projection.projected(steps([0, 7, 7], [1, 3, 5]), VerifyCost([1, 8], [0.5, 0.5]))
    assert found["projected_speedup"].tolist() == [3.0, 3.0] == found["tokens_per_step"].tolist()
    assert found["task"].tolist() == ["a", "average"] and found["rows_per_step"].iloc[0] == 1 + 14 / 3


def test_a_rising_curve_charges_each_step_its_rows():
    both = pd.concat([steps([0, 7], [1, 4]), steps([1], [2], "b")])
    found = projection.projected(both, VerifyCost([1, 8], [1.0, 2.4])).set_index("task")["projected_speedup"]
    assert found["a"] == pytest.approx(5 / 3.4) and found["b"] == pytest.approx(2 / 1.2)
    assert found["average"] == pytest.approx((5 / 3.4 + 2 / 1.2) / 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A saved model of 12 M parameters with the byte tokenizer."""
    place = tmp_path_factory.mktemp("tiny-model")
    tiny(4, dtype=torch.float32, vocab_size=259, hidden_size=512, intermediate_size=1376).save_pretrained(place)
    shapes.byte_tokenizer().save_pretrained(place)
    return str(place)


def test_curves_are_kept_and_read_back(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(projection.assets, "ROOT", tmp_path)
    curve = projection.curve
    monkeypatch.setattr(projection, "curve", lambda spec: curve(spec, torch.float32, 8, (1, 2, 4), 1))
    projection.main([folder])
    table = projection.assets.derived_trace("verify_cost")
    assert list(table.columns) == ["model", "rows", "seconds", "ratio", "context", "dtype", "threads", "machine"]
    assert table["rows"].tolist() == [1, 2, 4] and table["ratio"].iloc[0] == 1 and (table["dtype"] == "float32").all()
    name = folder.rpartition("/")[2]
    cost = projection.cost_of(table, name)
    assert list(cost.seconds) == pytest.approx(table["seconds"].tolist())
    with pytest.raises(ValueError, match=f"there are {name}"):
        projection.cost_of(table, "other")
    with pytest.raises(SystemExit, match="one model or more"):
        projection.main([])


# Memory


def test_memory_is_measured_in_processes_of_their_own(folder):
    table = memory.peaks(folder, ["vanilla", "DIAA"], [64]).set_index("method")
    model = tiny(4, dtype=torch.float32, vocab_size=259, hidden_size=512, intermediate_size=1376)
    weights = 4 * model.num_parameters() / 1e6
    assert table["weights_megabytes"].tolist() == pytest.approx([weights] * 2) and weights > 50
    row = 2 * 4 * 512 * 4  # keys and values of four layers in float32
    assert table["cache_megabytes"].tolist() == pytest.approx([row * (96 + 1) / 1e6, row * (96 + 32) / 1e6])
    assert table["tables_megabytes"].tolist() == pytest.approx([0, 259 * 8 * 12 / 1e6])
    assert table["megabytes"].between(0.9 * weights, weights + 200).all()
    assert (table["peak_megabytes"] >= table["megabytes"]).all()
    with pytest.raises(RuntimeError, match="exceed the model's context of 160"):
        memory.peaks(folder, ["vanilla"], [150])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: memory.peaks("x", ["PLD"], [8]), "no method 'PLD'"),
        (lambda: memory.peaks("x", ["SpS"], [8]), "SpS needs a small model"),
        (lambda: memory.peaks("x", ["SAM-D"], [8]), "SAM-D needs a corpus"),
    ],
)
def test_bad_input_is_one_clear_error(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_shape_that_cannot_fit_is_refused():
    with pytest.raises(MemoryError, match=r"qwen2\.5-72b needs"):
        memory.peaks("random:qwen2.5-72b", ["vanilla"], [8])


def test_every_method_of_the_figure_can_be_made(lm, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "load", lambda spec, dtype: CausalLM(tiny(1)))
    np.save(tmp_path / "text.npy", np.arange(30))
    for method in memory.METHODS:
        job = memory._Job("", method, 20, "float64", "", str(tmp_path / "text.npy"))
        drafter, budget = memory._DRAFTERS[method](lm, job)
        found = generate(lm, drafter, list(range(20)), 12, budget=budget)
        assert found.tokens == generate(lm, memory.Drafter(), list(range(20)), 12).tokens
        if method in ("TR", "DIAA"):
            assert found.steps[0].drafted == budget  # the largest tree from the first step on
