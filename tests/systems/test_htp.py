"""Qualcomm's compiler and the emulator of its arithmetic, where the extra npu is installed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from tiny import loaded_model

from ondevice import models
from ondevice_programs.graphs import exporting, htp, static_graphs
from ondevice_programs.graphs.__main__ import main

pytest.importorskip("onnxruntime_qnn", reason='Qualcomm\'s compiler comes with pip install "ondevice[npu]"')

TEXTS = [[1 + (7 * position + start) % 500 for position in range(128)] for start in range(4)]
SHAPE = {"target": "htp", "blocks": 2, "large": 64, "small": 32, "context": 64}


@pytest.fixture(scope="module")
def loaded() -> models.Loaded:
    return loaded_model()


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    new = tmp_path_factory.mktemp("htp") / "graphs"
    exporting.export(loaded, new, TEXTS, **SHAPE)
    return new


def test_logits_in_the_htps_arithmetic_are_near_the_models(folder):
    found = static_graphs.facts_of(folder)["compared"]
    assert found["tokens"] == 32 and found["argmax_agreement"] >= 0.8  # of a text that no range was taken from
    assert found["loss"] == pytest.approx(found["model_loss"], abs=0.05)


@pytest.mark.parametrize("cache_bits", [16, 8])
def test_residuals_beyond_1500_are_right(loaded, tmp_path, cache_bits):
    """Norms undo what is large in one place; in 16 bits a square of it would overflow."""
    model = loaded_model().model
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 3] += 1600
    facts = exporting.export(replace(loaded, source=model), tmp_path / "g", TEXTS, cache_bits=cache_bits, **SHAPE)
    found = facts["compared"]
    assert found["loss"] == pytest.approx(found["model_loss"], abs=0.1) and found["argmax_agreement"] >= 0.8


def test_one_binary_has_both_graphs_and_the_weights_once(folder, tmp_path):
    graphs = [folder / f"block00-{rows}.onnx" for rows in (64, 32)]
    both = htp.compiled(graphs, tmp_path / "both", True)
    apart = htp.compiled(graphs, tmp_path / "apart", False)
    weights = sum(
        np.prod(tensor.dims) for tensor in onnx.load(graphs[0], load_external_data=False).graph.initializer
        if tensor.data_type == TensorProto.INT8 and len(tensor.dims) == 2
    )  # fmt: skip
    assert len(list((tmp_path / "both").glob("*.bin"))) == 1 and len(list((tmp_path / "apart").glob("*.bin"))) == 2
    assert weights < both.size < 1.5 * weights + 1e6 and apart.size > 1.4 * both.size


def test_a_node_that_the_compiler_refuses_is_named(tmp_path):
    nodes = [
        helper.make_node("Add", ["x", "x"], ["twice"], name="sum"),
        helper.make_node("Det", ["twice"], ["y"], name="determinant"),
    ]
    shapes = {"x": [3, 3], "y": []}
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "refused", tensors[:1], tensors[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "r.onnx")
    with pytest.raises(htp.CompilerRefused, match=r"refuses r\.onnx: 1 nodes would run on the CPU, .* Det determinant"):
        htp.session(tmp_path / "r.onnx")


def test_the_compiler_takes_every_graph_from_the_command_line(folder, tmp_path, capsys):
    assert main(["compile", str(folder), str(tmp_path / "new")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["MB", "block00", "block01", "head", "all"]
    assert "no node is left to the CPU" in lines[-1] and len(list((tmp_path / "new").rglob("*.bin"))) == 9
