"""Static graphs: named tensors, shared weights, the model's own logits on chunks and trees, bad folders and numbers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from tiny import loaded_model

from ondevice import assets, chat
from ondevice.blocks import Blocks
from ondevice.causal_lm import CausalLM, TokenTree
from ondevice.speculation import Drafter, generate, greedy
from ondevice_papers.sdnpu.scheduling import RULES
from ondevice_programs.graphs import __main__ as graphs_command
from ondevice_programs.graphs import drawn, exporting, htp, static_graphs
from ondevice_programs.graphs.__main__ import main as commanded
from ondevice_programs.graphs.static_lm import StaticLM

PROMPT = [1 + position % 200 for position in range(90)]
TEXTS = [[1 + (7 * position + start) % 250 for position in range(128)] for start in range(4)]


@pytest.fixture(scope="module")
def loaded():
    return loaded_model()


def exported(loaded, folder, **options):
    shape = {"blocks": 2, "large": 64, "small": 32, "context": 224, "compared": 0}
    exporting.export(loaded, folder, TEXTS, **shape | options)
    return folder


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    return exported(loaded, tmp_path_factory.mktemp("graphs") / "float32", compared=64)


@pytest.fixture(scope="module")
def built(folder):
    return static_graphs.opened(folder, folder.parent / "compiled")


def test_graphs_have_static_named_tensors_and_share_one_file_of_weights(folder, loaded):
    files = sorted(folder.glob("*.onnx"))
    assert len(files) == 2 * (2 + 2)
    for path in files:
        proto = onnx.load(path, load_external_data=False)
        assert {node.domain for node in proto.graph.node} == {""}
        names = [value.name for value in (*proto.graph.input, *proto.graph.output)]
        assert all(re.fullmatch(r"ids|hidden(_out)?|mask|positions|logits|(past_)?(keys|values)_\d+", n) for n in names)
        for value in (*proto.graph.input, *proto.graph.output):
            assert all(size.dim_value > 0 for size in value.type.tensor_type.shape.dim)
        onnx.checker.check_model(str(path))
    model = loaded.model
    parameters = sum(weights.numel() for weights in model.parameters())  # a tied head is none of its own
    assert (folder / static_graphs.WEIGHTS).stat().st_size < 1.02 * 4 * parameters  # both shapes read the same bytes


def test_the_folder_says_what_its_logits_are_worth(folder, loaded):
    found = static_graphs.facts_of(folder)["compared"]
    assert found["tokens"] == 64 and found["argmax_agreement"] == 1 and found["greatest_difference"] < 1e-4
    assert found["loss"] == pytest.approx(found["model_loss"], abs=1e-4)
    wrong = {name: weight.clone() for name, weight in loaded.model.state_dict().items()}
    other = loaded_model().model
    other.load_state_dict({name: weight + 0.05 * torch.randn_like(weight) for name, weight in wrong.items()})
    assert exporting.comparison(folder, other, TEXTS, 64, 224)["argmax_agreement"] < 0.9


def test_so_many_tokens_are_compared_as_are_asked_for(folder, loaded):
    """They are of several texts, each read by itself and as far as the context goes."""
    for asked, read in ((1, 1), (100, 100), (150, 150), (999, 400)):
        assert exporting.comparison(folder, loaded.model, TEXTS, asked, 100)["tokens"] == read


@pytest.mark.parametrize("rule", [None, "keep both", "synchronous", "naive", "greedy (paper)", "ours"])
def test_chunks_trees_and_kept_rows_have_the_models_logits(built, loaded, rule):
    lm = StaticLM(built, RULES[rule or "ours"], 1.5 if rule is None else 1.0)
    session, right = lm.start(), CausalLM(loaded.model).start()
    parts = {}
    last = session.prefill(PROMPT, None, lambda start, logits: parts.update({start: logits}))
    whole = right.extend(PROMPT)
    assert list(parts) == sorted(parts) and max(map(len, parts.values())) == built.small
    np.testing.assert_allclose(torch.cat(list(parts.values())), whole, atol=2e-4)
    np.testing.assert_allclose(last, whole[-1], atol=2e-4)
    tree = TokenTree([5, 6, 7, 8, 9, *range(20, 60)], [-1, 0, 0, 1, 2, *[4] * 40])  # 45 rows: two runs of 32
    np.testing.assert_allclose(session.verify(tree), right.verify(tree), atol=2e-4)
    for each in (session, right):
        each.keep([0, 2, 4])
    assert session.length == 93 and session.tokens == right.tokens
    chain = TokenTree.chain([3, 4])
    np.testing.assert_allclose(session.verify(chain), right.verify(chain), atol=2e-4)
    timeline = lm.timeline
    assert timeline is not None and (len(timeline.load_block) == 2) == (rule != "keep both")


@pytest.mark.parametrize("weights", ["8bit", "4bit"])
def test_blocks_of_few_bits_have_the_logits_of_the_same_blocks_in_the_lean_engine(loaded, tmp_path, weights):
    from ondevice.causal_lm.lean import engine

    built = static_graphs.opened(exported(loaded, tmp_path / "g", weights=weights), tmp_path / "compiled")
    right = engine(loaded, threads=1, weights=weights).start().extend(PROMPT)
    ours = static_graphs.read(built, PROMPT)
    assert (ours - right).abs().max() < 2e-4 * right.std() and (ours.argmax(-1) == right.argmax(-1)).all()
    assert (tmp_path / "g" / static_graphs.WEIGHTS).stat().st_size < {"8bit": 9.0e6, "4bit": 6.7e6}[weights]


@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_an_embedding_reads_the_bytes_of_a_tied_head(loaded, bits, minima):
    random = np.random.default_rng(bits)
    rows, columns = loaded.model.lm_head.weight.shape
    scales, lowest = random.normal(size=(2, rows, columns // 32)).astype(np.float32)
    codes = random.integers(2**bits, size=(rows, columns), dtype=np.uint8)
    table = Blocks(codes, scales, lowest if minima else None, bits)
    embed, head = (drawn.StaticDrawing(loaded.model, 32, 256, lambda name: table) for _ in range(2))
    graphs = embed.embedding(), head.head()
    ids = np.arange(32, dtype=np.int32) * 7
    session = onnxruntime.InferenceSession(graphs[0].SerializeToString(), providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"ids": ids})[0], table.values()[ids], rtol=1e-4, atol=1e-4)
    every = [[tensor.raw_data for tensor in graph.graph.initializer] for graph in graphs]
    stored = [{data for data in each if len(data) > 4999} for each in every]
    assert len(stored[0] - stored[1]) == minima and stored[0] & stored[1]


@pytest.mark.parametrize("weights", ["float32", "8bit", "4bit"])
def test_residuals_of_thousands_are_right(loaded, tmp_path, weights):
    """Beyond 1,500: a token's embedding is large in one place, and norms undo it."""
    model = loaded_model().model
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] += 1800
    folder = exported(replace(loaded, source=model), tmp_path / "g", weights=weights, compared=64)
    difference = static_graphs.facts_of(folder)["compared"]["greatest_difference"]
    assert difference < (5e-2 if weights == "float32" else 0.5)  # processors round 1,800 otherwise


def test_channels_that_meet_large_values_have_larger_weights_before_both_are_rounded():
    ends = np.array([1.0, 16.0, 81.0], np.float32)
    channels = drawn.ChannelRanges(-ends, 2 * ends, ends)
    np.testing.assert_allclose(channels.balance, np.array([1, 2, 3]) / 2, rtol=1e-6)
    assert (channels.balanced.low, channels.balanced.high) == pytest.approx((-54, 108))


def test_ranges_are_those_of_the_model_on_the_texts(loaded):
    noted = htp.noted(loaded.model, TEXTS[:1], 8)
    assert not any(module._forward_hooks for module in loaded.model.modules())
    with torch.inference_mode():
        output = loaded_model().model(torch.tensor([TEXTS[0]]), output_hidden_states=True, use_cache=True)
    keys = output.past_key_values.layers[2].keys
    assert (noted.ranges["keys.2"].low, noted.ranges["keys.2"].high) == (float(keys.min()), float(keys.max()))
    assert noted.ranges["keys.2"].bits == 8 and noted.ranges["lm_head"].bits == 16
    assert noted.ranges["lm_head"].high == pytest.approx(float(output.logits.max()))
    state = output.hidden_states[-1][0]
    channels = noted.inputs["lm_head"]
    np.testing.assert_allclose(channels.size, state.square().mean(0).sqrt(), rtol=1e-4)
    np.testing.assert_allclose(channels.high, state.amax(0).clamp(min=0), rtol=1e-4, atol=1e-5)
    balanced = state.numpy() / channels.balance
    assert channels.balanced.low <= balanced.min() + 1e-4 and channels.balanced.high >= balanced.max() - 1e-4
    assert channels.balance.mean() == pytest.approx(1, rel=1e-5)


def test_the_htps_graphs_round_products_of_weights_and_nothing_else(loaded):
    noted = htp.noted(loaded.model, TEXTS[:1], 16)
    proto = drawn.HTPDrawing(loaded.model, 32, 256, noted).block([0, 1])
    constants = {tensor.name for tensor in proto.graph.initializer}
    made = {name: node for node in proto.graph.node for name in node.output}
    products = [node for node in proto.graph.node if node.op_type == "MatMul"]
    of_weights = [node for node in products if made[node.input[1]].op_type == "DequantizeLinear"
                  and set(made[node.input[1]].input) <= constants]  # fmt: skip
    assert len(products) == 2 * 9 and len(of_weights) == 2 * 7
    for node in products:
        rounded = all(made[given].op_type == "DequantizeLinear" for given in node.input)
        assert rounded == (node in of_weights)
    types = {value.name: value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)}
    assert types["past_keys_0"] == types["values_1"] == onnx.TensorProto.UINT16
    assert types["positions"] == onnx.TensorProto.INT32


@pytest.mark.parametrize(("ids", "words"), [([], " 0"), ([1] * 225, "225"), ([10**6], "511")])
def test_a_prompt_that_cannot_be_is_refused(built, ids, words):
    with pytest.raises(ValueError, match=words):
        StaticLM(built, RULES["keep both"]).start().prefill(ids)


def test_graphs_that_do_not_fit_the_memory_are_refused(built):
    with pytest.raises(ValueError, match="memory"):
        StaticLM(built, lambda prefill: RULES["ours"](type(prefill)(
            prefill.p, prefill.d, prefill.s, g1=prefill.g1, g2=prefill.g2, memory=prefill.memory / 2)))  # fmt: skip


def generated(folder, *words, prompt="def mean(values):"):
    """The exit code of `ondevice-graphs generate` on a folder."""
    try:
        return commanded(["generate", str(folder), "--prompt", prompt, "--drafter", "none", *words])
    except SystemExit as end:
        return end.code


def test_an_answer_ends_with_the_graphs_context_and_says_so(folder, loaded, capsys):
    prompts = ("a, b, c, d, " * times for times in range(60, 1, -1))
    prompt, ids = next((text, ids) for text in prompts if len(ids := chat.prompt_ids(loaded.tokenizer, text)) <= 218)
    right = generate(CausalLM(loaded.model, 224), Drafter(), ids, 500, eos_token_ids=loaded.eos_token_ids).tokens
    assert 7 <= len(right) == 225 - len(ids)
    answers = []
    for drafter in ("none", "sdnpu"):
        assert generated(folder, "--tokens", "500", "--drafter", drafter, prompt=prompt) == 0
        output = capsys.readouterr()
        assert f"at most {225 - len(ids)} tokens" in output.err and "Traceback" not in output.err
        answers.append(output.out)
    assert answers == [loaded.tokenizer.decode(list(right), skip_special_tokens=True) + "\n"] * 2


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), OSError(5, "Input/output error"), IndexError("beyond")])
def test_what_was_generated_is_printed_whatever_ends_it(folder, loaded, capsys, monkeypatch, failure):
    assert generated(folder, "--tokens", "6") == 0
    right = capsys.readouterr().out.rstrip("\n")
    calls = iter(range(9))

    def failing(logits):
        if next(calls) == 4:
            raise failure
        return greedy(logits)

    monkeypatch.setattr(graphs_command, "greedy", failing)
    assert generated(folder, "--tokens", "6") in (130, 2)  # what a test raises counts as another library's
    begun = capsys.readouterr().out.rstrip("\n")
    assert begun and right.startswith(begun) and begun != right


WRONG = {
    "no block": ({"blocks": 0}, "one block"),
    "chunks that do not divide": ({"small": 33}, "33 .* 64"),
    "a context longer than the model's": ({"context": 5000}, "5000"),
    "a context shorter than a chunk": ({"context": 40}, "64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_export_that_cannot_be_is_refused_and_leaves_nothing(loaded, tmp_path, case):
    options, words = WRONG[case]
    with pytest.raises(ValueError, match=words):
        exported(loaded, tmp_path / "g", **options)
    assert not list(tmp_path.iterdir())


def test_texts_that_are_too_short_and_folders_that_are_there_are_refused(loaded, folder, tmp_path):
    with pytest.raises(ValueError, match="100"):
        exporting.export(loaded, tmp_path / "g", [[1] * 100])
    (tmp_path / "mine.txt").write_text("x")
    for there in (folder, tmp_path):
        with pytest.raises(ValueError, match=there.name):
            exported(loaded, there)
    assert (tmp_path / "mine.txt").is_file()


def test_what_fails_in_the_middle_leaves_no_folder(loaded, tmp_path, monkeypatch):
    def broken(*given):
        raise OSError(28, "No space left on device", "weights.bin")

    monkeypatch.setattr(exporting, "comparison", broken)
    with pytest.raises(OSError, match="No space left"):
        exported(loaded, tmp_path / "g", compared=64)
    assert not list(tmp_path.iterdir())


OTHER_MODELS = {  # what is changed in a model's configuration, and what the sentence names
    "another attention": ({"layer_types": ["sliding_attention"] * 6}, "llama with layers of type sliding_attention"),
    "other angles": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    "another activation": ({"hidden_act": "gelu"}, "llama with the activation gelu"),
    "another family": ({"model_type": "gemma"}, "is gemma"),
    "both": (
        {"layer_types": ["full_attention", "chunked_attention"] * 3, "hidden_act": "relu"},
        "of type chunked_attention and the activation relu",
    ),
}


@pytest.mark.parametrize("case", OTHER_MODELS)
def test_other_models_are_refused_by_what_differs(loaded, tmp_path, case):
    change, words = OTHER_MODELS[case]
    model = loaded_model().model
    vars(model.config).update(change)
    with pytest.raises(ValueError, match=words):
        exported(replace(loaded, source=model), tmp_path / "g")
    assert not list(tmp_path.iterdir())


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGES = {
    "a graph that is cut": ("block00-32.onnx", halved),
    "weights that are cut": (static_graphs.WEIGHTS, halved),
    "weights that changed": (static_graphs.WEIGHTS, lambda path: path.write_bytes(b"other" + path.read_bytes()[5:])),
    "a graph that is lost": ("head-32.onnx", lambda path: path.unlink()),
    "a graph of nobody": ("mine.onnx", lambda path: shutil.copy(path.parent / "head-32.onnx", path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_folders_are_named(folder, tmp_path, damage):
    copied, (name, harm) = shutil.copytree(folder, tmp_path / "copied"), DAMAGES[damage]
    harm(copied / name)
    with pytest.raises(ValueError, match=name):
        static_graphs.opened(copied, tmp_path / "compiled")
    (copied / static_graphs.FACTS).write_text("{}")
    with pytest.raises(ValueError, match="copied"):
        static_graphs.opened(copied)


def test_a_cache_that_cannot_be_written_is_one_error(folder, tmp_path, monkeypatch):
    def full(*given, **named):
        raise RuntimeError("[ONNXRuntimeError] : 7 : INVALID_PROTOBUF : Protobuf serialization failed.")

    monkeypatch.setattr(static_graphs.onnxruntime, "InferenceSession", full)
    with pytest.raises(OSError, match=r"\.onnx cannot be written"):
        static_graphs.opened(folder, tmp_path / "full")
    assert not list(tmp_path.rglob("*.onnx"))


def test_the_pages_driver_needs_nothing_of_this_project(folder, loaded, tmp_path, capsys, monkeypatch):
    page = (assets.ROOT / "docs" / "graphs.md").read_text(encoding="utf-8")
    (driver,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert "ondevice" not in driver and len(driver.splitlines()) <= 50
    shutil.copytree(folder, tmp_path / "GRAPHS")
    monkeypatch.chdir(tmp_path)
    exec(driver, {})
    right = generate(CausalLM(loaded.model), Drafter(), [28, 30, 284, 260], 8, eos_token_ids=loaded.eos_token_ids)
    assert json.loads(capsys.readouterr().out) == list(right.tokens)


@pytest.mark.parametrize(
    ("fault", "code"),
    [(htp.CompilerRefused("The compiler refuses block01"), 3), (ValueError("It needs the extra npu."), 2)],
)
def test_a_compilation_that_breaks_off_leaves_nothing_and_can_be_tried_again(
    folder, tmp_path, monkeypatch, capsys, fault, code
):
    facts = static_graphs.facts_of(folder) | {"target": "htp"}
    monkeypatch.setattr(static_graphs, "facts_of", lambda _: facts)

    def broken(graphs, facts, new, soc):
        (new / "block00").mkdir(parents=True)
        yield "block00", (1e6, 2e6), (3e6, 4e6)
        raise fault

    monkeypatch.setattr(htp, "both_ways", broken)
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            raise SystemExit(commanded(["compile", str(folder), str(tmp_path / "new" / "binaries")]))
        assert ended.value.code == code and str(fault) in capsys.readouterr().err
    assert not list((tmp_path / "new").iterdir())
