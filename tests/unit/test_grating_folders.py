"""Folders that set what changes scores: the Reranker's are CrossEncoder's, or the folder is refused by name."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import CHANGES, ROLES, Plan, Rules, add_adapter, edited, random_folder, resaved, scores_of
from sentence_transformers import CrossEncoder

from ondevice import assets
from ondevice_programs.reranker import Reranker

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # peft's, on loading an adapter
]
END = Rules(pad="[SEP]", segments=False)  # padding is the end, which follows each pair
PLAIN = Rules(segments=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))


def scored(folder: Path) -> np.ndarray | str:
    """The Reranker's logits and scores, or its refusal."""
    try:
        with Reranker(folder) as reranker:
            return scores_of(reranker)
    except (ValueError, OSError) as error:
        return str(error)


def alike(ours: np.ndarray, theirs: np.ndarray) -> bool:
    """Whether scores are equal but for rounding, and in one order where they differ by more than that."""
    near = bool(np.allclose(ours, theirs, atol=1e-4 * max(1.0, float(np.abs(theirs).max()))))
    order = np.argsort(theirs[0])
    return near and bool((np.diff(ours[0][order]) > -1e-3).all())


def require_alike(folder: Path) -> None:
    theirs = scores_of(CrossEncoder(str(folder), device="cpu"))
    ours = scored(folder)
    assert not isinstance(ours, str), ours
    assert theirs[0].std() > 1e-2 and alike(ours, theirs), (ours, theirs)


TEN = {
    "Bert": Rules(truncation_side="left"),
    "Roberta": PLAIN,
    "Electra": Rules(template=ROLES),
    "DebertaV2": PLAIN,
    "ModernBert": Rules(segments=False, truncation_side="left", template=ROLES),
    "Llama": END,
    "Mistral": Rules(pad="[SEP]", padding_side="left", segments=False),
    "Qwen3": Rules(pad="[SEP]", template=ROLES, segments=False),
    "Gemma": Rules(pad="[SEP]", truncation_side="left", segments=False),
    "Phi3": END,
}


@pytest.mark.parametrize("family", TEN)
def test_ten_architectures_score_as_crossencoder_does(family: str, tmp_path: Path) -> None:
    require_alike(Plan(f"{family}ForSequenceClassification", TEN[family]).write(tmp_path / "model"))


def test_a_causal_models_score_is_read_at_the_end_that_is_padding_too(tmp_path: Path) -> None:
    rules = Rules(pad="[SEP]", template=ROLES, truncation_side="left", segments=False)
    require_alike(Plan("LlamaForCausalLM", rules).write(tmp_path / "model"))


@pytest.mark.long  # a process of its own writes it
def test_settings_are_read_where_weights_are_written_anew(tmp_path: Path) -> None:
    """In another dtype than config.json names, which are saved in the cache."""
    folder = resaved(
        Plan("BertForSequenceClassification", dtype=torch.float16).write(tmp_path / "model"), prompts={"own": "judge "},
        default_prompt_name="own", activation_fn=torch.nn.Identity(), max_length=14,
    )  # fmt: skip
    require_alike(edited(folder, "config.json", dtype="float32"))


def test_a_call_may_say_how_its_pairs_are_read(tmp_path: Path) -> None:
    """As another length, side or prompt of the whole model, or other texts, would have it."""
    query = "alpha beta"
    documents = ["gamma delta epsilon it", "alpha " * 30 + "delta", "beta", "", "yes no " * 20 + "it"]
    folder, left = (
        Plan("LlamaForSequenceClassification", Rules(segments=False, truncation_side=side)).write(tmp_path / side)
        for side in ("right", "left")
    )
    with Reranker(folder) as ours, Reranker(folder, max_length=12) as shorter, Reranker(left) as from_left:
        plain = ours.rank(query, documents)
        rows = ours.tokenizer([query] * len(documents), documents, truncation=True, max_length=30)["input_ids"]
        assert ours.receipt and ours.receipt.tokens == sum(map(len, rows))
        changed = [
            (ours.rank(query, documents, max_length=12), shorter.rank(query, documents)),
            (ours.rank(query, documents, truncation_side="left"), from_left.rank(query, documents)),
            (from_left.rank(query, documents, truncation_side="right"), plain),
            (
                ours.rank(query, documents, max_document_tokens=2),
                ours.rank(query, [" ".join(document.split()[:2]) for document in documents]),
            ),
        ]
        assert not ours.instructed
        with pytest.raises(ValueError, match="max_length"):
            ours.rank(query, documents, max_length=81)
    for given, right in changed:
        assert given == right and (given != plain or right is plain)


def test_a_recipe_reads_an_instruction_and_cuts_ends(tmp_path: Path) -> None:
    rules = Rules(segments=False, most=75)
    folder = Plan("LlamaForCausalLM", rules).write(tmp_path / "model")
    with pytest.raises(ValueError, match=r"--recipe.*recipe=") as refused:
        Reranker(folder)
    assert "qwen3-reranker" in str(refused.value) and "mxbai" not in str(refused.value)  # whose answers are no entries
    with Reranker(folder, recipe="qwen3-reranker") as ours:
        assert ours.instructed
        first, second = (ours.rank("alpha", ["beta"], prompt=prompt) for prompt in ("judge it", "please it"))
        assert first != second
        with pytest.raises(ValueError, match="truncation side"):
            ours.rank("alpha", ["beta"], truncation_side="left")


@pytest.mark.parametrize(("name", "content", "words"), [
    ("model.gguf", b"GGUF\3\0\0\0", "safetensors"),
    ("notes.txt", b"no model", "is a file"),
])  # fmt: skip
def test_a_file_that_is_no_reranker_is_one_sentence(name: str, content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / name
    file.write_bytes(content)
    with pytest.raises(ValueError, match=words) as refused:
        Reranker(file.parent if name.endswith("gguf") else file)
    assert len(str(refused.value).splitlines()) == 1


REFUSED = {  # change of a BERT or Llama, and what the sentence names
    "an activation of its own": "package.Identity",
    "another activation": "Tanh",
    "layers in float32": "keep_in_fp32_modules",
    "an embedder": "SentenceTransformer",
    "a key that nobody lists": "softmax",
    "lower case": "do_lower_case",
    "a stride": "stride",
    "no end behind what is cut": "restore_suffix",
    "arguments of the model": "model_kwargs",
    "quantised": "gptq",
    "code of its own": "auto_map",
    "a tokenizer of its own": "AutoTokenizer",
    "other weights": "transformers_weights",
    "another type": "ElectraForSequenceClassification",
    "left padding": "padding_side",
    "a processor": "processor_config.json",
    "no head": "pooler.dense",
    "a file with a head": "score_head.safetensors",
    "an adapter's weights alone": "adapter_config.json",
    "both directions": "is_causal",
}


@pytest.mark.parametrize("change", REFUSED)
def test_what_is_not_applied_is_refused_by_name(change: str, tmp_path: Path) -> None:
    name = "Llama" if change == "both directions" else "Bert"
    folder = CHANGES[change](Plan(f"{name}ForSequenceClassification").write(tmp_path / "model"))
    refusal = scored(folder)
    assert isinstance(refusal, str) and REFUSED[change] in refusal and len(refusal.splitlines()) == 1, refusal


@pytest.mark.long  # a process of its own writes each
@pytest.mark.parametrize("family", ["Bert", "Llama"])
@pytest.mark.parametrize("settings", [{}, {"use_rslora": True, "alpha_pattern": {"query|q_proj": 3}}])
def test_an_adapter_beside_its_base_is_applied(family: str, settings: dict[str, object], tmp_path: Path) -> None:
    folder = Plan(f"{family}ForSequenceClassification", END).write(tmp_path / "model")
    with Reranker(folder) as reranker:
        alone = scores_of(reranker)
    add_adapter(folder, **settings)
    require_alike(folder)
    assert np.abs(scored(folder) - alone).max() > 0.1
    add_adapter(folder, seed=2, **settings)  # under the same path, where the first one's model is in the cache
    require_alike(folder)


@pytest.mark.long  # minutes
def test_no_random_folder_scores_otherwise_in_silence(tmp_path: Path) -> None:
    outcomes = Counter[str]()
    for seed in range(40):
        folder, words = random_folder(seed, tmp_path / str(seed))
        ours, theirs = scored(folder), None
        with contextlib.suppress(Exception):  # it fails on what it cannot load
            theirs = scores_of(CrossEncoder(str(folder), device="cpu"))
        if isinstance(ours, str):
            outcomes["refused"] += 1
            assert len(ours.splitlines()) == 1, f"{words}: {ours}"
        elif theirs is not None:
            outcomes["alike"] += 1
            assert alike(ours, theirs), f"{words}: {ours}, not {theirs}"
    assert outcomes["alike"] >= 10 and outcomes["refused"] >= 10, outcomes


def test_the_name_of_a_reranker_that_left_says_what_takes_its_place() -> None:
    with pytest.raises(ValueError, match=r"'pydocs-reranker-deep' has left .*smollm2-reranker takes its place"):
        Reranker("pydocs-reranker-deep")
