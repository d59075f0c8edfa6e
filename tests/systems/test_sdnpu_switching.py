"""Static graphs and switching between them: logits, the order of computes and loads, hidden time, damaged files."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from ondevice import models
from ondevice.sdnpu import graphs, switching
from ondevice.sdnpu.switching import Load

V, LARGE, SMALL, CAPACITY, BLOCKS = 60, 16, 4, 56, 3
SHAPE = dict(
    vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3,
)  # fmt: skip
ROPE = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, mlp_bias=True, rope_parameters=ROPE)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=10)),
}


def made(kind: str) -> torch.nn.Module:
    """A small model, with every scale and bias away from where it begins."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    for name, value in model.named_parameters():
        if value.ndim == 1:
            value.data = torch.rand_like(value) + float("norm" in name) / 2
    return model


@pytest.fixture(scope="module", params=MODELS)
def built(request, tmp_path_factory):
    return graphs.build(made(request.param), BLOCKS, LARGE, SMALL, CAPACITY, tmp_path_factory.mktemp("graphs"))


@pytest.fixture
def one(tmp_path):
    """Graphs whose files a test may spoil."""
    return graphs.build(made("llama"), BLOCKS, LARGE, SMALL, CAPACITY, tmp_path)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, V, length)


def reference(built, ids):
    """Logits [V] after the last token, and the keys of all layers [L, g, n, d], by transformers."""
    with torch.inference_mode():
        found = built.model(input_ids=torch.tensor(ids)[None], use_cache=True)
    return found.logits[0, -1], np.stack([layer.keys[0].numpy() for layer in found.past_key_values.layers])


def early(blocks: int, chunks: int) -> list[Load]:
    """A load beside every two computes from the start, the last block first, as in Figure 8."""
    last = blocks * chunks - 1
    after = [None, *(divmod(min(2 * number - 1, last), blocks) for number in range(1, blocks))]
    return [Load(blocks - 1 - number, place) for number, place in enumerate(after)]


PLANS = {
    "keep both": lambda blocks, chunks: None, "synchronous": switching.synchronous, "naive": switching.naive,
    "early": early,
}  # fmt: skip


# Graphs


@pytest.mark.parametrize("length", [1, LARGE - 1, LARGE, 3 * LARGE + 5, CAPACITY])
@pytest.mark.parametrize("which", ["large_files", "small_files"])
def test_either_graph_gives_the_models_logits_and_keys(built, length, which):
    ids, caches = prompt(length, length), built.caches()
    hidden = built.embed(ids)
    for block, path in enumerate(getattr(built, which)):
        hidden = built.run(graphs.load(path), block, hidden, caches[block], 0)
    logits, keys = reference(built, ids)
    assert built.logits(hidden[-1:])[0] == pytest.approx(logits, abs=1e-4)
    mine = np.concatenate([cache.keys for cache in caches])
    assert mine[:, :, :length] == pytest.approx(keys, abs=1e-4)
    assert not mine[:, :, length:].any()  # nothing of the padding is kept


def test_a_second_build_keeps_the_files_and_another_model_gets_its_own(one):
    before = {path: path.stat().st_mtime_ns for path in one.large_files + one.small_files}
    again = graphs.build(one.model, BLOCKS, LARGE, SMALL, CAPACITY, one.large_files[0].parent)
    assert {path: path.stat().st_mtime_ns for path in again.large_files + again.small_files} == before
    one.model.model.layers[0].mlp.up_proj.weight.data[0, 0] += 1
    other = graphs.build(one.model, BLOCKS, LARGE, SMALL, CAPACITY, one.large_files[0].parent)
    assert other.large_files[0] != one.large_files[0] and other.large_files[1:] == one.large_files[1:]


def test_a_build_that_fails_leaves_no_file(tmp_path, monkeypatch):
    def stopped(stored, options, **_):
        with open(options.optimized_model_filepath, "wb") as file:
            file.write(stored[: len(stored) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(graphs.onnxruntime, "InferenceSession", stopped)
    with pytest.raises(KeyboardInterrupt):
        graphs.build(made("llama"), BLOCKS, LARGE, SMALL, CAPACITY, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_or_missing_file_is_one_clear_error_and_no_thread_stays(one, share):
    path = one.small_files[1]
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(ValueError, match=f"{path.name} is damaged or truncated"):
        graphs.load(path)
    for plan in (early(BLOCKS, 3), switching.synchronous(BLOCKS, 3)):  # while computing, and after it
        with pytest.raises(ValueError, match="damaged or truncated"):
            switching.prefill(one, prompt(3 * LARGE), plan)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="build it first"):
        switching.prefill(one, prompt(3 * LARGE), early(BLOCKS, 3))
    assert not [thread for thread in threading.enumerate() if thread.name == "sdnpu-loader"]


def test_a_failing_compute_ends_the_loader(one, monkeypatch):
    def fails(self, graph, block, *_):
        raise RuntimeError("no")

    monkeypatch.setattr(graphs.Graphs, "run", fails)
    with pytest.raises(RuntimeError, match="no"):
        switching.prefill(one, prompt(LARGE), switching.synchronous(BLOCKS, 1))
    assert not [thread for thread in threading.enumerate() if thread.name == "sdnpu-loader"]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((BLOCKS, 256, 48, 64), "48 does not divide 256"), ((BLOCKS, 16, 16, 64), "16 does not divide 16"),
        ((BLOCKS, 16, 0, 64), "0 does not divide"), ((0, 16, 4, 64), "not 0"), ((6, 16, 4, 64), "1 to 5 blocks, not 6"),
        ((BLOCKS, 16, 4, 65), "1 to 64 rows, not 65"), ((BLOCKS, 16, 4, 0), "rows, not 0"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(tmp_path, sizes, message):
    with pytest.raises(ValueError, match=message):
        graphs.build(made("llama"), *sizes, tmp_path)
    assert not list(tmp_path.iterdir())


def test_models_of_another_kind_are_refused(tmp_path):
    with pytest.raises(ValueError, match="not gpt2"):
        graphs.build(GPT2LMHeadModel(GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=V)), 1, 16, 4, 16, tmp_path)
    with pytest.raises(ValueError, match="bfloat16"):
        graphs.build(made("llama").bfloat16(), BLOCKS, LARGE, SMALL, CAPACITY, tmp_path)
    sliding = Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=8, max_window_layers=2)
    with pytest.raises(ValueError, match="full attention"):
        graphs.build(Qwen2ForCausalLM(sliding), BLOCKS, LARGE, SMALL, CAPACITY, tmp_path)


def test_a_run_leaves_the_threads_arithmetic_as_it_was(one):
    tiny = np.full(4, 1e-40, np.float32)
    one.run(graphs.load(one.small_files[0]), 0, one.embed(prompt(8)), one.caches()[0], 0)
    assert (tiny * np.float32(1)).all()


# Switching


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("length", [5, 2 * LARGE, 3 * LARGE + 1])
def test_every_way_to_switch_gives_the_same_logits_and_a_cache_to_go_on_with(built, name, length):
    ids = prompt(length)
    done = switching.prefill(built, ids, PLANS[name](BLOCKS, -(-length // LARGE)))
    plain = switching.prefill(built, ids, None)
    assert (done.logits - plain.logits).abs().max() < 1e-4
    assert (done.logits - reference(built, ids)[0]).abs().max() < 1e-4
    hidden = built.embed([7])  # decoding goes on, on the small graphs
    for block, path in enumerate(built.small_files):
        hidden = built.run(graphs.load(path), block, hidden, done.caches[block], length)
    assert built.logits(hidden)[0] == pytest.approx(reference(built, [*ids, 7])[0], abs=1e-4)


@pytest.mark.parametrize("name", PLANS)
def test_a_timeline_keeps_the_plan(one, name):
    chunks = 3
    plan = PLANS[name](BLOCKS, chunks)
    timeline = switching.prefill(one, prompt(chunks * LARGE), plan).timeline
    computes = [interval for interval in timeline if interval.what != "load"]
    loads = [interval for interval in timeline if interval.what == "load"]
    assert [(c.chunk, c.block) for c in computes] == [(c, b) for c in range(chunks) for b in range(BLOCKS)]
    assert [load.block for load in loads] == [load.block for load in plan or []]
    for lane in (computes, loads):
        assert all(first.end_s <= second.start_s for first, second in itertools.pairwise(lane))
    over = {(c.chunk, c.block): c.end_s for c in computes}
    for load, planned in zip(loads, plan or [], strict=True):
        assert load.start_s >= (over[planned.after] if planned.after else 0.0)
        for compute in computes:
            if compute.block == load.block:  # G1 before the load, G2 after it, never during it
                assert compute.end_s <= load.start_s if compute.what == "G1" else compute.start_s >= load.end_s


def test_the_example_of_figure_8_hides_what_the_schedule_says(tmp_path, monkeypatch):
    """N = 6, C = 2, p = d = 10 units, s = 20: T is 120 progressively, 190 naively, 240 synchronously (specification).

    So of 120 units of loads 0, 70 and 120 lie open. A unit is 3 ms asleep here; shares, the best of three, and wide
    bounds, as a busy machine lengthens every sleep.
    """
    unit, blocks, chunks, load = 0.003, 6, 2, graphs.load
    monkeypatch.setitem(SHAPE, "num_hidden_layers", blocks)
    built = graphs.build(MODELS["llama"](), blocks, LARGE, SMALL, CAPACITY, tmp_path)
    loaded = {path: load(path) for path in built.large_files + built.small_files}

    def slow_load(path):
        if threading.current_thread().name == "sdnpu-loader":
            time.sleep(20 * unit)
        return loaded[path]

    monkeypatch.setattr(graphs, "load", slow_load)
    monkeypatch.setattr(graphs.Graphs, "run", lambda self, graph, block, rows, *_: time.sleep(10 * unit) or rows)

    def busy(done):
        return sum(interval.end_s - interval.start_s for interval in done.timeline if interval.what != "load")

    for name, least, most in (("early", 0.0, 0.3), ("naive", 0.4, 0.85), ("synchronous", 0.99, 1.3)):
        runs = [switching.prefill(built, prompt(chunks * LARGE), PLANS[name](blocks, chunks)) for _ in range(3)]
        assert least <= min((done.total_s - busy(done)) / done.loading_s for done in runs) <= most, name


def test_a_due_load_goes_before_its_blocks_next_compute(one, monkeypatch):
    load = graphs.load

    def slow_load(path):
        time.sleep(0.02)
        return load(path)

    monkeypatch.setattr(graphs, "load", slow_load)
    plan = [Load(1, (0, 0)), Load(0, (1, 2)), Load(2, (1, 2))]  # block 1 is due when its first compute would begin
    timeline = switching.prefill(one, prompt(2 * LARGE), plan).timeline
    assert [interval.what for interval in timeline if interval.block == 1] == ["load", "G2", "G2"]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([Load(0, None), Load(1, None)], "each of 3 blocks once"),
        ([Load(0, None), Load(1, None), Load(1, None)], "each of 3 blocks once"),
        ([Load(0, None), Load(1, (2, 0)), Load(2, None)], r"compute \(2, 0\), of 2 chunks"),
        ([Load(0, None), Load(1, (0, -1)), Load(2, None)], r"compute \(0, -1\)"),
    ],
)
def test_plans_that_cannot_be_are_refused(one, plan, message):
    with pytest.raises(ValueError, match=message):
        switching.prefill(one, prompt(2 * LARGE), plan)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "at least one token"), ([[1]], "at least one token"), (prompt(CAPACITY + 1), "longer than the static"),
        ([V], "0 to 59"), ([-1], "0 to 59"), ([1.5], "0 to 59"),
    ],
)  # fmt: skip
def test_prompts_that_cannot_be_are_refused(one, ids, message):
    with pytest.raises(ValueError, match=message):
        switching.prefill(one, ids, None)


def test_rows_beyond_the_cache_and_a_cache_of_another_block_are_refused(one):
    graph, hidden, caches = graphs.load(one.small_files[0]), one.embed(prompt(8)), one.caches()
    with pytest.raises(ValueError, match="not in the cache of 56 rows"):
        one.run(graph, 0, hidden, caches[0], CAPACITY - 7)
    with pytest.raises(ValueError, match="not block 0's"):
        one.run(graph, 0, hidden, caches[2], 0)
    with pytest.raises(ValueError, match="not 0"):
        switching.profile(one, 0)


def test_the_bundled_model_switches_without_a_change_of_its_logits(tmp_path):
    built = graphs.build(models.load("pydocs-lm-small").model, 3, capacity=768, folder=tmp_path)
    ids = np.random.default_rng(0).integers(3, 8000, 700)
    plain, done = switching.prefill(built, ids, None), switching.prefill(built, ids, early(3, 3))
    assert (done.logits - plain.logits).abs().max() < 1e-4
    assert (done.logits - reference(built, ids)[0]).abs().max() < 1e-4
    found = switching.profile(built, 1)
    assert all(len(values) == 3 and (values > 0).all() for values in (found.p, found.d, found.s))
