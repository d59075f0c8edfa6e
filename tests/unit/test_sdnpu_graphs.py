"""Static graphs: portable, shared weights, the model's own logits on chunks and trees, bad folders."""

from __future__ import annotations

import json
import shutil

import numpy as np
import onnx
import pytest
import torch

from ondevice import corpus, models
from ondevice.causal_lm import CausalLM, TokenTree
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import static_graphs
from ondevice_programs.graphs.static_lm import StaticLM

SMALL = "pydocs-lm-small"
PROMPT = [1 + place % 700 for place in range(90)]


@pytest.fixture(scope="module")
def model():
    return models.load(SMALL).model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    new = tmp_path_factory.mktemp("graphs") / "fp32"
    return static_graphs.export(model, new, blocks=2, large=64, small=32, capacity=256, tokenizer=corpus.tokenizer())


@pytest.fixture(scope="module")
def built(folder):
    return static_graphs.compiled(folder, folder.parent / "compiled")


def test_graphs_are_portable_and_share_one_file_of_weights(folder, model):
    files = sorted(folder.glob("*.onnx"))
    assert len(files) == 2 * (2 + 2)
    for path in files:
        proto = onnx.load(path, load_external_data=False)
        assert [(one.domain, one.version) for one in proto.opset_import] == [("", static_graphs.OPSET)]
        assert {node.domain for node in proto.graph.node} == {""}
        for value in (*proto.graph.input, *proto.graph.output):
            assert all(size.dim_value > 0 for size in value.type.tensor_type.shape.dim)
        onnx.checker.check_model(str(path))
    parameters = sum(weights.numel() for weights in model.parameters()) + model.lm_head.weight.numel()  # tied, turned
    assert (folder / static_graphs.WEIGHTS).stat().st_size < 1.02 * 4 * parameters  # both shapes read the same bytes


@pytest.mark.parametrize("rule", [None, "keep both", "synchronous", "naive", "greedy (paper)", "ours"])
def test_chunks_trees_and_kept_rows_have_the_models_logits(built, model, rule):
    lm = StaticLM(built, RULES[rule or "ours"], 1.5 if rule is None else 1.0)
    session, right = lm.start(), CausalLM(model).start()
    parts = {}
    last = session.prefill(PROMPT, None, lambda start, logits: parts.update({start: logits}))
    whole = right.extend(PROMPT)
    np.testing.assert_allclose(torch.cat([parts[0], parts[64]]), whole, atol=2e-4)
    np.testing.assert_allclose(last, whole[-1], atol=2e-4)
    tree = TokenTree([5, 6, 7, 8, 9, *range(20, 60)], [-1, 0, 0, 1, 2, *[4] * 40])  # 45 rows: two runs of 32
    np.testing.assert_allclose(session.verify(tree), right.verify(tree), atol=2e-4)
    for one in (session, right):
        one.keep([0, 2, 4])
    assert session.length == 93 and session.tokens == right.tokens
    chain = TokenTree.chain([3, 4])
    np.testing.assert_allclose(session.verify(chain), right.verify(chain), atol=2e-4)
    timeline = lm.timeline
    assert timeline is not None and (len(timeline.load_block) == 2) == (rule != "keep both")


@pytest.mark.parametrize("precision", ["fp16", "int8"])
def test_other_precisions_run_and_are_near(model, tmp_path, precision):
    texts = [PROMPT[:64], PROMPT[20:84]]
    exported = static_graphs.export(
        model, tmp_path / precision, blocks=2, large=64, small=32, capacity=256, precision=precision, texts=texts
    )
    session = StaticLM(static_graphs.compiled(exported, tmp_path / "compiled"), RULES["naive"]).start()
    logits, right = session.prefill(PROMPT), CausalLM(model).start().prefill(PROMPT)
    # int8 products saturate on processors without VNNI, so that the bound is wide.
    assert torch.nn.functional.cosine_similarity(logits, right, dim=0) > (0.999 if precision == "fp16" else 0.5)
    kinds = {node.op_type for path in exported.glob("block*.onnx") for node in onnx.load(path).graph.node}
    assert ("QuantizeLinear" in kinds) == (precision == "int8")


@pytest.mark.parametrize(
    ("ids", "said"),
    [([], "224.* 0"), ([1] * 225, "225"), ([10**6], "8191")],
)
def test_a_prompt_that_cannot_be_is_refused(built, ids, said):
    with pytest.raises(ValueError, match=said):
        StaticLM(built, RULES["keep both"]).start().prefill(ids)


def test_graphs_that_do_not_fit_the_memory_are_refused(built):
    with pytest.raises(ValueError, match="memory"):
        StaticLM(built, lambda prefill: RULES["ours"](type(prefill)(
            prefill.p, prefill.d, prefill.s, g1=prefill.g1, g2=prefill.g2, memory=prefill.memory / 2)))  # fmt: skip


@pytest.mark.parametrize(
    ("blocks", "large", "small", "precision", "said"),
    [
        (7, 64, 32, "fp32", "6 .* 7"),
        (2, 64, 33, "fp32", "33 .* 64"),
        (2, 64, 32, "fp8", "fp8"),
        (2, 64, 32, "int8", "texts"),
    ],
)
def test_an_export_that_cannot_be_is_refused(model, tmp_path, blocks, large, small, precision, said):
    with pytest.raises(ValueError, match=said):
        static_graphs.export(model, tmp_path / "g", blocks=blocks, large=large, small=small, precision=precision)


def test_damaged_folders_are_named(folder, tmp_path):
    def copied(name):
        return shutil.copytree(folder, tmp_path / name)

    half = copied("half")
    path = half / "block00-32.onnx"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"block00-32\.onnx in half"):
        static_graphs.compiled(half, tmp_path / "a")
    cut = copied("cut")
    with (cut / static_graphs.WEIGHTS).open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(ValueError, match=r"weights\.bin in cut"):
        static_graphs.compiled(cut)
    changed = copied("changed")
    with (changed / static_graphs.WEIGHTS).open("r+b") as file:
        file.write(b"other")
    with pytest.raises(ValueError, match=r"weights\.bin in changed"):
        static_graphs.compiled(changed, tmp_path / "b")
    lost = copied("lost")
    (lost / "head-32.onnx").unlink()
    with pytest.raises(ValueError, match=r"head-32\.onnx"):
        static_graphs.compiled(lost)
    (copied("empty") / static_graphs.FACTS).write_text(json.dumps({}))
    with pytest.raises(ValueError, match=r"empty.*ondevice-graphs export"):
        static_graphs.compiled(tmp_path / "empty")


def test_a_compiled_file_that_is_cut_or_missing_is_named(built, tmp_path):
    cut = tmp_path / "cut.onnx"
    cut.write_bytes(built.small_files[0].read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cut\.onnx"):
        static_graphs.load(cut)
    with pytest.raises(FileNotFoundError, match=r"gone\.onnx"):
        static_graphs.load(tmp_path / "gone.onnx")
