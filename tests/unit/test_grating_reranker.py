"""The reranker in CrossEncoder's place: calls, results, examples; budgets, threads, files, calibration."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder.evaluation import CrossEncoderRerankingEvaluator
from tiny import random_reranker, reranker_config, word_tokenizer
from torch.nn import Identity

from ondevice import assets, models
from ondevice_papers.grating import margins
from ondevice_papers.grating import probes as fitting
from ondevice_papers.grating.probes import Probes
from ondevice_programs.reranker import Receipt, Reranker, loading
from ondevice_programs.reranker.calibration import FILE
from ondevice_programs.reranker.folder import prepare

BUNDLED = ("minilm-reranker", "smollm2-reranker")
PAIRS = [["How is a file opened?", "open\nOpen a file and return its stream."], ["Sort a list", "os.path.join joins"]]
TEXT = "yes no what is alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi"
WORDS = TEXT.split()
QUERY, LAYERS, CONTEXT = "what is alpha", 4, 400
_DRAWN = np.random.default_rng(5)
DOCUMENTS = [" ".join(_DRAWN.choice(WORDS[4:], size)) for size in (4, 30, 9, 17, 1, 9, 40, 12, 25, 6)]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Saves a random reranker with a token a word in a folder, with a cache of its own. small: layers change little."""
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path / "cache"))

    def placed(
        called: str = "tiny-reranker", name: str = "BertForSequenceClassification", seed: int = 0, small: bool = False
    ) -> Path:
        kind, own = ("qwen3", {"num_key_value_heads": 2, "head_dim": 8}) if "Qwen3" in name else ("bert", {})
        config = reranker_config(name, kind, num_hidden_layers=LAYERS, max_position_embeddings=CONTEXT, **own)
        model = random_reranker(config, torch.float32, seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                parameter.mul_(1 / 6 if small and parameter.ndim > 1 and ".layer." in key else 1)
        for part in (model, word_tokenizer(TEXT, model_max_length=CONTEXT)):
            part.save_pretrained(tmp_path / called)
        return tmp_path / called

    return placed


@pytest.fixture
def folder(place: Callable[..., Path]) -> Path:
    return place()


@cache
def theirs(spec: str = "minilm-reranker") -> CrossEncoder:
    return CrossEncoder(str(prepare(spec)), device="cpu")


@pytest.fixture(scope="module")
def ours() -> Iterator[Reranker]:
    with Reranker("minilm-reranker") as reranker:
        yield reranker


def plain(value: Any, number: Callable[[float], Any] = float) -> Any:
    """Nested lists and dictionaries of a result."""
    if isinstance(value, dict):
        return {name: plain(one, number) for name, one in value.items()}
    if isinstance(value, list) or getattr(value, "ndim", 0):
        return [plain(one, number) for one in value]
    return number(float(value)) if isinstance(value, (float, np.floating, torch.Tensor)) else value


def same(found: Any, right: Any) -> bool:
    if isinstance(found, type):
        return found is right
    return type(found) is type(right) and plain(found) == plain(right, lambda number: pytest.approx(number, abs=1e-5))


def receipt(reranker: Reranker) -> Receipt:
    assert reranker.receipt is not None
    return reranker.receipt


# In CrossEncoder's place


@pytest.mark.parametrize("call", [
    "predict(PAIRS)", "predict(tuple(PAIRS[0]))", "predict([])", "predict(np.array(PAIRS))",
    "predict([], convert_to_tensor=True)", "predict([], convert_to_numpy=False)",
    "predict(PAIRS, convert_to_tensor=True)", "predict(PAIRS[0], convert_to_tensor=True)",
    "predict(PAIRS, convert_to_numpy=False)", "predict(PAIRS[0], convert_to_numpy=False)",
    "predict(inputs=PAIRS, batch_size=1, show_progress_bar=False, activation_fn=Identity(), device=None, prompt=None)",
    "predict(sentences=PAIRS, activation_fct=Identity())", "predict(PAIRS, prompt='Python: ', apply_softmax=True)",
    "predict(PAIRS, activation_fn=torch.tanh, activation_fct=Identity())",
    "rank('a', ['b', 'c'], activation_fct=Identity(), activation_fn=torch.tanh)",
    "rank('', [], batch_size=8)", "rank('a', ('c', 'c', 'b', 'c'), show_progress_bar=False, device=None)",
    "rank('a', ['b', 'c'], return_documents=True)", "is_singular_input(np.array(PAIRS))", "activation_fn.__class__",
    *(f"rank('a', ['b', 'c', 'd'], top_k={k}, activation_fn=Identity())" for k in (0, 1, 9)),
])  # fmt: skip
def test_a_call_gives_what_crossencoder_gives(call: str, ours: Reranker) -> None:
    found, right = (eval(f"model.{call}", globals() | {"model": model}) for model in (ours, theirs()))
    assert same(found, right)


@pytest.mark.parametrize("spec", [BUNDLED[0], *(pytest.param(spec, marks=pytest.mark.long) for spec in BUNDLED[1:])])
def test_bundled_rerankers_score_as_crossencoder_does(spec: str) -> None:
    texts = [f"{name}\n{getattr(str, name).__doc__} {'and more ' * 40 * at}" for at, name in enumerate(dir(str)[-6:])]
    with Reranker(spec, memory_budget="150 MB") as reranker:
        assert same(reranker.rank("Is it upper case?", texts, 4), theirs(spec).rank("Is it upper case?", texts, 4))
        assert receipt(reranker).exact and reranker.num_labels == 1
        assert (receipt(reranker).truncated > 0) == (spec == BUNDLED[0])  # the other one's context is 8,192 tokens


def test_the_evaluator_of_rerankers_takes_it_as_a_crossencoder(folder: Path) -> None:
    evaluator = CrossEncoderRerankingEvaluator(
        [{"query": query, "positive": [DOCUMENTS[place]], "documents": DOCUMENTS}
         for place, query in enumerate(asked(8))], at_k=3, write_csv=False,
    )  # fmt: skip
    with Reranker(folder) as reranker:
        found = evaluator(reranker)
    assert found == pytest.approx(evaluator(CrossEncoder(str(folder), device="cpu")))
    assert 0 < found["ndcg@3"] < 1 and found["map"] != found["base_map"]


@pytest.mark.parametrize(("call", "words"), [
    ("predict(PAIRS, batch_size=0)", "batch_size"), ("rank('a', [], odd=1)", "odd"),
    ("predict(['a', 'b', 'c'])", "Input 0"), ("predict([{'query': 'a', 'document': 'b'}])", "Input 0"),
    ("predict(PAIRS, prompt_name='other')", "'other'"), ("rank('a', 'text')", "documents"),
    ("rank('a', ['b'], top_k=-1)", "top_k"), ("rank('a', ['b'], top_k=True)", "top_k"),
    ("predict(5)", "type int"), ("rank(None, ['b'])", "Query 0"), ("rank('a', ['b', None])", "Document 1"),
    ("predict([['a', 'b'], ['a', '\\ud800']])", "Document 1 .*surrogate"),
])  # fmt: skip
def test_a_call_that_makes_no_sense_is_refused(call: str, words: str, ours: Reranker) -> None:
    with pytest.raises(ValueError, match=words):
        eval(f"ours.{call}")


@pytest.mark.parametrize(("options", "words"), [
    ({"memory_budget": True}, "True"), ({"memory_budget": "much"}, "'much'"),
    ({"memory_budget": float("nan")}, " 0 MB"),
    ({"memory_budget": "1MB"}, r"1 MB .* \d+ MB"), ({"threshold": "auto"}, "threshold"), ({"threshold": -1.0}, "-1.0"),
    ({"mode": "best"}, "'best'"), ({"max_length": 0}, "400"), ({"max_length": 401}, "400"),
    ({"device": "cuda"}, "'cuda'"), ({"backend": "onnx"}, "'onnx'"), ({"trust_remote_code": True}, "trust_remote_code"),
    ({"num_labels": 2}, " 2"), ({"nonsense": 1}, "nonsense"), ({"cache_dir": "here"}, "cache_dir"),
    ({"dtype": torch.int8}, "torch.int8"), ({"model_kwargs": {"device_map": "auto"}}, "device_map"),
    ({"default_prompt_name": "other"}, "'other'"), ({"calibration": "nowhere"}, "'nowhere'"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused_at_once(options: dict[str, Any], words: str, folder: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        Reranker(folder, **options)


def test_an_unknown_recipe_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(assets.CACHE_VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match="no recipe 'other'"):
        Reranker(models.SMOLLM2, recipe="other")
    assert not any(tmp_path.iterdir())


def test_options_of_crossencoder_that_ask_for_nothing_else_are_taken(folder: Path) -> None:
    options = {"device": "cpu", "backend": "torch", "num_labels": 1, "model_kwargs": {"torch_dtype": "float32"},
               "revision": None, "local_files_only": True, "prompts": None, "config_kwargs": {}}  # fmt: skip
    with Reranker(str(folder), max_length=20, activation_fn=Identity(), **options) as reranker:
        reranker.predict([[QUERY, text] for text in DOCUMENTS])
        assert receipt(reranker).truncated == sum(len(text.split()) > 14 for text in DOCUMENTS) > 0


def test_a_spec_must_be_a_reranker(place: Callable[..., Path], folder: Path) -> None:
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    headless = {name: value for name, value in weights.items() if "classifier" not in name}
    safetensors.torch.save_file(headless, folder / "model.safetensors", {"format": "pt"})
    for spec, words in (
        (models.MINILM, "SentenceTransformer"), ("nonsense", "'nonsense'"),
        (place("lm", name="Qwen3ForCausalLM"), r"\blm .*reranker"),
        (folder, r"classifier\.weight"), ("./nowhere", "'./nowhere'"),
    ):  # fmt: skip
        with pytest.raises((ValueError, FileNotFoundError), match=words), Reranker(spec) as reranker:
            reranker.rank("a", ["b"])


def test_prompts_are_instructions_where_a_model_reads_one(place: Callable[..., Path]) -> None:
    model, pairs = place(name="Qwen3ForCausalLM"), [[QUERY, text] for text in DOCUMENTS]
    given: dict[str, Any] = {"prompts": {"own": "alpha beta", "other": "mu nu"}, "recipe": "qwen3-reranker"}
    with Reranker(model, default_prompt_name="own", **given) as own, Reranker(model, **given) as usual:
        right = own.predict(pairs)
        assert np.abs(right - usual.predict(pairs)).max() > 1e-3
        for options in ({"prompt": "alpha beta", "prompt_name": "other"}, {"prompt_name": "own"}):
            assert (usual.predict(pairs, **options) == right).all()  # as CrossEncoder has it


# Memory, threads, files


def test_what_is_taken_for_a_moment_while_a_model_is_opened_counts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = loading.tokenizer

    def wasteful(*arguments: Any) -> Any:
        taken = np.ones(10_000_000)
        time.sleep(0.05)
        del taken
        return opened(*arguments)

    monkeypatch.setattr(loading, "tokenizer", wasteful)
    with pytest.raises(ValueError, match=r"70 MB .* (8\d|9\d) MB"):
        Reranker(folder, memory_budget=70)
    with Reranker(folder, memory_budget=120) as reranker:
        reranker.rank(QUERY, DOCUMENTS)
        assert 80 <= receipt(reranker).peak_mb <= 120


def test_a_small_budget_gives_the_same_scores(folder: Path) -> None:
    many = [[QUERY, text] for text in DOCUMENTS * 60]
    with Reranker(folder) as whole, Reranker(folder, memory_budget=1000) as reranker:
        right = whole.predict(many)
        reranker.budget = 1.0
        with pytest.raises(ValueError, match="a budget that works") as told:
            reranker.predict(many)
        assert reranker.receipt is None
        reranker.budget = float(str(told.value).split()[-2])
        assert same(reranker.predict(many), right)
        assert sum(receipt(reranker).plan_mb.values()) <= reranker.budget


def test_only_the_set_may_have_scores_of_earlier_layers(folder: Path) -> None:
    with Reranker(folder) as whole:
        right = {one["corpus_id"]: one["score"] for one in whole.rank(QUERY, DOCUMENTS)}
    for mode in ("set", "order"):
        with Reranker(folder, threshold=0.0, mode=mode) as reranker:  # type: ignore[arg-type]
            found = reranker.rank(QUERY, DOCUMENTS, 3)
            assert receipt(reranker).saved > 0 and not receipt(reranker).exact
            final = all(one["score"] == pytest.approx(right[one["corpus_id"]], abs=1e-5) for one in found)
            assert final == (mode == "order") and len(found) == 3


def test_thirty_threads_may_use_one_reranker(folder: Path) -> None:
    with Reranker(folder) as reranker, ThreadPoolExecutor(30) as pool:
        right = reranker.rank(QUERY, DOCUMENTS)
        assert all(found == right for found in pool.map(lambda _: reranker.rank(QUERY, DOCUMENTS), range(60)))
    reranker.close()
    with pytest.raises(ValueError, match="closed"):
        reranker.rank(QUERY, DOCUMENTS)


@pytest.mark.long  # other processes
def test_another_dtype_is_saved_once_and_what_a_killed_process_left_is_removed(folder: Path, tmp_path: Path) -> None:
    cache_folder = assets.cache_folder("grating")
    left, alive = cache_folder / ".99999999-a", cache_folder / f".{os.getpid()}-b"
    (left / "half").mkdir(parents=True), alive.mkdir()
    found = prepare(str(folder), torch.bfloat16)
    assert not left.exists() and alive.exists() and prepare(str(folder), torch.bfloat16) == found
    with Reranker(folder, dtype=torch.bfloat16) as small, Reranker(folder) as whole:
        gap = np.abs(small.predict([[QUERY, "mu"]]) - whole.predict([[QUERY, "mu"]])).max()
        assert 0 < gap < 0.05 and small._model.checkpoint.folder == found


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EROFS, "Read-only file system")


def test_without_a_cache_that_can_be_written_checksums_are_made_anew(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert len(Reranker(folder).rank(QUERY, DOCUMENTS)) == len(DOCUMENTS)


# Calibration


def asked(queries: int) -> list[str]:
    drawn = np.random.default_rng(1)
    return [" ".join(drawn.choice(WORDS[4:], 3)) for _ in range(queries)]


def test_what_is_calibrated_is_kept_beside_the_model_and_used(place: Callable[..., Path]) -> None:
    folder = place(small=True)
    with Reranker(folder) as first:
        found = first.calibrate(asked(40), DOCUMENTS, 3, recall=0.8, confidence=0.8)
        assert found.saved > 0 and found.reached >= 0.8 and found.queries == 30
        first.calibrate(asked(11), [DOCUMENTS[:5], *[DOCUMENTS] * 10], 2, 0.8, 0.8, save=False)
    for options, k, pruned in (({}, 3, True), ({}, 2, False), ({}, None, False), ({"mode": "order"}, 3, False),
                               ({"calibration": False}, 3, False)):  # fmt: skip
        with Reranker(folder, **options) as reranker:
            best = reranker.rank(QUERY, DOCUMENTS, k)
            assert (receipt(reranker).saved > 0) == pruned and receipt(reranker).exact != pruned
            assert len(best) == (k or len(DOCUMENTS))


def test_a_calibration_of_another_model_or_a_damaged_one_is_refused(place: Callable[..., Path]) -> None:
    folder, other = place(small=True), place("other", seed=1)
    with Reranker(folder) as reranker:
        reranker.calibrate(asked(11), DOCUMENTS, 3, recall=0.8, confidence=0.8)
    shutil.copy(folder / FILE, other)
    with pytest.raises(ValueError, match=f"{FILE} .*another model"):
        Reranker(other)
    for content in (b"", b"[]", b'{"scoring": {}, "calibrations": [{"k": 3}]}', b"\xff"):
        (folder / FILE).write_bytes(content)
        with pytest.raises(ValueError, match=f"{FILE} .*damaged"):
            Reranker(folder)
    Reranker(folder, calibration=False).close()


def test_a_certificate_holds_for_the_scoring_that_it_was_made_with(place: Callable[..., Path]) -> None:
    folder = place(small=True)
    with Reranker(folder, max_length=40) as first:
        made = first.calibrate(asked(40), DOCUMENTS, 3, recall=0.8, confidence=0.8)
        assert made.saved > 0 and made.truncated == 40
    probes = Probes(np.ones((LAYERS - 1, 32)), np.zeros(LAYERS - 1))
    others: dict[str, dict[str, Any]] = {
        "prompt": {"prompts": {"own": "mu "}, "default_prompt_name": "own"}, "max_length": {"max_length": 30},
        "set of probes": {"probes": probes}, "activation": {"activation_fn": Identity()},
    }  # fmt: skip
    for what, options in others.items():
        with pytest.raises(ValueError, match=f"{FILE} .*another {what}:"):
            Reranker(folder, **{"max_length": 40} | options)
    with Reranker(folder, max_length=40, activation_fn=torch.sigmoid) as reranker:  # another name of the module's
        assert reranker.rank(QUERY, DOCUMENTS, 3) and receipt(reranker).saved > 0
        with pytest.raises(ValueError, match="another prompt"):
            reranker.rank(QUERY, DOCUMENTS, 3, prompt="mu ")
        reranker.max_seq_length = 35
        with pytest.raises(ValueError, match="another max_length"):
            reranker.rank(QUERY, DOCUMENTS, 3)
    exchanged = (folder / "tokenizer.json").read_text().replace('"alpha"', '""').replace('"beta"', '"alpha"')
    (folder / "tokenizer.json").write_text(exchanged.replace('""', '"beta"'))
    with pytest.raises(ValueError, match="another tokenizer"):
        Reranker(folder, max_length=40)


@pytest.mark.long  # fits and certifies several times
def test_probes_are_fitted_on_the_queries_that_certify_nothing_and_kept_with_the_rule(
    place: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = place()
    monkeypatch.setattr(fitting, "PENALTIES", (1.0,))
    lists = [DOCUMENTS[: 5 + number % 6] for number in range(60)]
    numbers, rest = margins.parts(60)
    fitted_on = list[int]()
    fit = fitting.fit

    def counted(states: Any, final: Any, k: int) -> Probes:
        fitted_on.append(len(states))
        return fit(states, final, k)

    monkeypatch.setattr(fitting, "fit", counted)
    with Reranker(folder) as first:
        plain = first.calibrate(asked(60), lists, 3, 0.8, 0.8, save=False)
        probed = first.calibrate(asked(60), lists, 3, 0.8, 0.8, probes=True)
        assert fitted_on[-1] == len(numbers) == 15 and probed.queries == plain.queries == len(rest)
        assert probed.saved > plain.saved and probed.reached >= 0.8  # a random head says little of the last layer's
        best = first.rank(QUERY, DOCUMENTS, 3)
        copied = pickle.loads(pickle.dumps(first))
    with Reranker(folder) as again, copied:
        for reranker in (again, copied):
            assert reranker.rank(QUERY, DOCUMENTS, 3) == best and receipt(reranker).saved > 0
            assert np.array_equal(reranker.probes.weights, first.probes.weights)
        other = again.calibrate(asked(60), lists, 2, 0.8, 0.8)  # by the probes that are there
        assert other.saved > 0 and sorted(k for k, _ in again._calibrations) == [2, 3]
        fitted_last = [asked(60)[number] for number in [*rest, *numbers]]
        with pytest.raises(ValueError, match=r"fitted on query \d+"):
            again.calibrate(fitted_last, DOCUMENTS, 2, 0.8, 0.8)
        assert sorted(k for k, _ in again._calibrations) == [2, 3]


def test_a_calibration_that_is_interrupted_changes_nothing(place: Callable[..., Path]) -> None:
    folder = place(small=True)
    with Reranker(folder) as reranker:
        reranker.calibrate(asked(40), DOCUMENTS, 3, 0.8, 0.8)
        before, kept = (folder / FILE).read_bytes(), dict(reranker._calibrations)
        run, turns = reranker._run, iter(range(25))

        def interrupted(*arguments: Any) -> Any:
            if next(turns, None) is None:
                raise KeyboardInterrupt
            return run(*arguments)

        reranker._run = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            reranker.calibrate(asked(40), DOCUMENTS, 2, 0.8, 0.8, probes=True)
        assert reranker.probes is None and reranker._calibrations == kept and (folder / FILE).read_bytes() == before
        reranker._run = run  # type: ignore[method-assign]
        with pytest.raises(OSError):  # behind the fit of the probes
            reranker.calibrate(asked(40), DOCUMENTS, 2, 0.8, 0.8, probes=True, save=folder / "config.json" / "x")
        assert reranker.probes is None and reranker._calibrations == kept
        reranker.rank(QUERY, DOCUMENTS, 3)
        assert receipt(reranker).saved > 0


def test_others_are_pruned_by_the_earlier_rule_until_a_calibration_is_done(place: Callable[..., Path]) -> None:
    with Reranker(place(small=True)) as reranker:
        reranker.calibrate(asked(40), DOCUMENTS, 3, 0.8, 0.8, save=False)
        run, saved = reranker._run, list[float]()

        def beside(*arguments: Any) -> Any:
            reranker._run = run  # type: ignore[method-assign]
            reranker.rank(QUERY, DOCUMENTS, 3)
            saved.append(receipt(reranker).saved)
            reranker._run = beside  # type: ignore[method-assign]
            return run(*arguments)

        reranker._run = beside  # type: ignore[method-assign]
        reranker.calibrate(asked(40), DOCUMENTS, 2, 0.8, 0.8, probes=True, save=False)
        reranker._run = run  # type: ignore[method-assign]
        assert len(saved) == 40 and min(saved) > 0
        reranker.rank(QUERY, DOCUMENTS, 3)
        assert reranker.probes is not None and receipt(reranker).saved == 0  # its rule was of other scores


@pytest.mark.parametrize(("queries", "documents", "options", "words"), [
    (9, DOCUMENTS, {"recall": 0.8, "confidence": 0.8}, " 11 .* 8 "),
    (3, [DOCUMENTS] * 2, {}, "3 queries"),
    (11, [[]] * 11, {"recall": 0.8, "confidence": 0.8}, "[Qq]uery 0"),
    (3, DOCUMENTS, {"k": 0}, "^k "),
])  # fmt: skip
def test_a_calibration_that_cannot_be_is_one_sentence(
    queries: int, documents: Any, options: dict[str, Any], words: str, folder: Path
) -> None:
    with Reranker(folder) as reranker, pytest.raises(ValueError, match=words):
        reranker.calibrate(asked(queries), documents, **({"k": 3} | options))
    assert not (folder / FILE).exists()
