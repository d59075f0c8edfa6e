"""Documents' rows on disk: what comes back is what was computed, whatever happened to the files meanwhile."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from tiny import random_model

from ondevice import assets, shapes
from ondevice.causal_lm import CausalLM, Session
from ondevice.digests import tokenizer_digest
from ondevice_papers.dragon import kv_store
from ondevice_papers.dragon.kv_store import KVStore, _checksum

KINDS = "llama", "qwen2", "opt"
V, CONTEXT, TEMPLATE = 259, 64, "Context: {document}. Question: {query}"
DOCUMENT, QUERY = [5, 117, 3, 244, 8, 29, 2, 31, 31, 70], [9, 200, 14, 77]
OTHERS = [[6, *DOCUMENT], [7, *DOCUMENT]]


pytestmark = pytest.mark.usefixtures("one_thread")


def built(kind: str, dtype: torch.dtype = torch.float64, **values: Any) -> CausalLM:
    return CausalLM(random_model(kind, dtype, vocabulary=V, context=CONTEXT, **values))


@cache
def lm(kind: str = "llama", dtype: torch.dtype = torch.float64) -> CausalLM:
    return built(kind, dtype)


def opened(folder: Path, of: CausalLM | None = None, cap: int = 1 << 20, template: str = TEMPLATE) -> KVStore:
    return KVStore(folder, of or lm(), shapes.byte_tokenizer(), template, cap)


@torch.inference_mode()
def fresh(of: CausalLM, ids: list[int]) -> torch.Tensor:
    """[len(ids), V] logits of one run without a cache."""
    return of.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def assert_right(session: Session, document: list[int] = DOCUMENT, bound: float = 1e-10) -> None:
    """The session's document is followed by a query as in a run from the text."""
    assert session.tokens == document
    found = session.extend(QUERY)
    assert float((found - fresh(session.lm, document + QUERY)[len(document) :]).abs().max()) < bound


# Rows


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=str)
def test_a_stored_prefix_gives_the_logits_of_a_fresh_prefill(
    tmp_path: Path, kind: str, dtype: torch.dtype, bound: float
) -> None:
    opened(tmp_path, lm(kind, dtype)).session(DOCUMENT)
    store = opened(tmp_path, lm(kind, dtype))
    session = store.session(DOCUMENT)
    assert (store.hits, store.misses) == (1, 0)
    assert_right(session, bound=bound)
    session.rollback(len(DOCUMENT))  # a second query after the same document
    assert_right(session, bound=bound)
    session.extend(range(3, 43))  # past what was allocated
    assert float((session.extend([11])[0] - fresh(session.lm, session.tokens)[-1]).abs().max()) < bound


def test_a_session_is_no_view_of_the_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.session(DOCUMENT)
    before = store.path(DOCUMENT).read_bytes()
    session = store.session(DOCUMENT)
    session.rollback(3)
    session.extend([9, 9, 9, 9])
    assert store.path(DOCUMENT).read_bytes() == before
    assert_right(store.session(DOCUMENT))


# The key


@pytest.mark.parametrize("other", [
    lambda folder: opened(folder, with_one_changed_weight()),
    lambda folder: opened(folder, built("llama", torch.float32)),
    lambda folder: opened(folder, built("llama", rope_parameters={"rope_theta": 500.0, "rope_type": "default"})),
    lambda folder: opened(folder, template=TEMPLATE + " "),
    lambda folder: KVStore(folder, lm(), with_one_more_token(), TEMPLATE),
], ids=["weights", "dtype", "rotary base", "template", "tokenizer"])  # fmt: skip
def test_anything_else_has_another_place(tmp_path: Path, other: Callable[[Path], KVStore]) -> None:
    assert other(tmp_path).path(DOCUMENT) != opened(tmp_path).path(DOCUMENT)


def with_one_changed_weight() -> CausalLM:
    of = built("llama")
    with torch.no_grad():
        next(of.model.parameters()).view(-1)[-1] += 1e-9
    return of


def with_one_more_token() -> Any:
    tokenizer = shapes.byte_tokenizer()
    tokenizer.add_tokens(["<|passage|>"])
    return tokenizer


def test_a_call_with_padding_does_not_change_a_tokenizers_digest() -> None:
    tokenizer = shapes.byte_tokenizer()
    before = tokenizer_digest(tokenizer)
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_digest(tokenizer) == before


# Damage


def stored(path: Path) -> tuple[dict[str, str], dict[str, list[Any]]]:
    """A file's label and tensors; safetensors writes labels in any order."""
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata(), {name: file.get_tensor(name).tolist() for name in ("keys", "values", "tokens")}


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    """Change a file's tensors and make its checksum fit, so that only what they hold can give them away."""
    with safetensors.safe_open(path, framework="pt") as file:
        label = file.metadata()
        tensors = change({name: file.get_tensor(name) for name in ("keys", "values", "tokens")})
    label["checksum"] = _checksum(tensors["keys"], tensors["values"])
    safetensors.torch.save_file(tensors, path, label)


def flip(path: Path, place: int) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-8]),
    "a header of 2^60 bytes": lambda path: path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}"),
    "a bit of the first rows": lambda path: flip(path, 2500),
    "other tensors": lambda path: safetensors.torch.save_file({"weight": torch.zeros(3)}, path),
    "other tokens": lambda path: rewrite(path, lambda tensors: tensors | {"tokens": tensors["tokens"] + 1}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_file_is_ignored_with_a_warning_and_made_anew(tmp_path: Path, kind: str) -> None:
    store = opened(tmp_path)
    store.session(DOCUMENT)
    whole = stored(store.path(DOCUMENT))
    DAMAGE[kind](store.path(DOCUMENT))
    with pytest.warns(UserWarning, match="ignored"):
        assert_right(store.session(DOCUMENT))
    assert (store.hits, store.misses) == (0, 2) and stored(store.path(DOCUMENT)) == whole
    assert_right(store.session(DOCUMENT))
    assert store.hits == 1


def test_where_nothing_can_be_written_sessions_are_right_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextlib.contextmanager
    def full(path: Path) -> Iterator[Path]:
        raise OSError(28, "No space left on device")
        yield path

    monkeypatch.setattr(assets, "writing", full)
    with pytest.warns(UserWarning, match="space"):
        assert_right(opened(tmp_path).session(DOCUMENT))


# The cap


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_files_used_longest_ago_go_first(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for age, document in enumerate((DOCUMENT, *OTHERS)):
        store.session(document)
        os.utime(store.path(document), (1000 + age, 1000 + age))
    assert len(names(tmp_path)) == 3
    size = max(path.stat().st_size for path in tmp_path.iterdir())
    store.session(DOCUMENT)  # the oldest, and now the newest
    small = opened(tmp_path, cap=3 * size)
    fourth = [8, *DOCUMENT]
    small.session(fourth)
    assert names(tmp_path) == {store.path(document).name for document in (DOCUMENT, OTHERS[1], fourth)}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 3 * size


def test_only_the_stores_own_files_count_and_go(tmp_path: Path) -> None:
    notes, stem = tmp_path / "notes.safetensors", "0" * 64
    old, young = tmp_path / f".{stem}-a1b2.safetensors", tmp_path / f".{stem}-c3d4.safetensors"
    for path in (notes, old, young):
        path.write_bytes(b"x" * 50_000)
    for path in (notes, old):
        os.utime(path, (time.time() - 7200,) * 2)
    store = opened(tmp_path, cap=30_000)
    store.session(DOCUMENT)
    assert names(tmp_path) == {notes.name, young.name, store.path(DOCUMENT).name}


# Two processes


def work(folder: Path, cap: int, rounds: int) -> tuple[int, int, int]:
    """Use three documents in turn where only two have room: (wrong sessions, hits, misses)."""
    store, wrong = opened(folder, cap=cap), 0
    expected = {tuple(document): fresh(lm(), document + QUERY)[-1] for document in (DOCUMENT, *OTHERS)}
    for turn in range(rounds):
        for document in (DOCUMENT, DOCUMENT, OTHERS[turn % 2]):
            found = store.session(document).extend(QUERY)[-1]
            wrong += float((found - expected[tuple(document)]).abs().max()) > 1e-10
    return wrong, store.hits, store.misses


def other_process(folder: Path, cap: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", UserWarning)  # as in this process: a warning ends it
    lm()
    results.put("ready")
    results.put(work(folder, cap, rounds))


def test_a_file_dropped_while_it_was_read_is_not_put_back_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    store.session(DOCUMENT)
    monkeypatch.setattr(kv_store, "_checksum", lambda *rows: (store.path(DOCUMENT).unlink(), _checksum(*rows))[1])
    assert_right(store.session(DOCUMENT))
    assert store.hits == 1 and not names(tmp_path)


@pytest.mark.long  # other processes
def test_two_processes_share_a_folder(tmp_path: Path) -> None:
    probe, rounds = opened(tmp_path / "probe"), 25
    probe.session(OTHERS[0])
    cap, shared = 2 * probe.path(OTHERS[0]).stat().st_size, tmp_path / "shared"
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=other_process, args=(shared, cap, rounds, results), daemon=True)
    process.start()
    assert results.get(timeout=120) == "ready"
    found = [work(shared, cap, rounds), results.get(timeout=120)]
    process.join(timeout=60)
    assert process.exitcode == 0
    assert all(wrong == 0 and hits > 0 and hits + misses == 3 * rounds for wrong, hits, misses in found)
    assert sum(path.stat().st_size for path in shared.iterdir()) <= cap
    assert all(not name.startswith(".") for name in names(shared))


# Bad input


def test_bad_input_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="'file'"):
        opened(tmp_path / "file")
    for document, named in (([], "empty"), ([3] * 65, "context"), ([V], str(V))):
        with pytest.raises(ValueError, match=named):
            opened(tmp_path).session(document)


def test_the_folder_is_private(tmp_path: Path) -> None:
    opened(tmp_path / "new" / "store")
    assert (tmp_path / "new" / "store").stat().st_mode & 0o777 == 0o700
