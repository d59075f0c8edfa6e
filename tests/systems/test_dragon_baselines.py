"""The baselines that move documents or whole answers, between two nodes with different documents: each is compared with
runs of the model without any cache, computed by hand, and with what DRAGON itself answers.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from dragon_tables import left_over
from tiny import random_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from waiting import PATIENCE, until

from ondevice.causal_lm import CausalLM
from ondevice_papers.dragon import messages
from ondevice_papers.dragon.messages import End, Fetch, Rows, Texts
from ondevice_programs.pair import fetch
from ondevice_programs.pair.answer import Asked
from ondevice_programs.pair.asking import Asking
from ondevice_programs.pair.cloud import Cloud
from ondevice_programs.pair.decoder import Template
from ondevice_programs.pair.device import Device, request
from ondevice_programs.pair.node import Documents, Node
from ondevice_programs.pair.wire import Lost, listening
from ondevice_studies.dragon import centralised
from ondevice_studies.dragon.centralised import fetched_rows, fetched_texts

V, CONTEXT, END = 61, 48, 2
WORDS = [f"w{i}" for i in range(3, V)]
TEMPLATE = Template("w5 {document} w6 {query} w7")
QUERY, SUFFIX = "w20 w31", [6, 20, 31, 7]
DEVICE = {"w40 w8 w8 w29": 0.4, "w11": 1.1, "w50 w51": -2.0}
CLOUD = {"w12 w33 w9 w9 w60 w14": 1.3, "w17 w3": 0.2}
GREEDY = Asked(k=2, limit=12, temperature=0.0)
DRAWN = replace(GREEDY, temperature=1.5, mode="shared", seed=5)


pytestmark = pytest.mark.usefixtures("one_thread")


def tokenizer(end: bool = False) -> PreTrainedTokenizerFast:
    """Word i has the id i. end: whether id 2 ends a text."""
    ids = {"pad": 0, "unknown": 1, "end": END, **{word: int(word[1:]) for word in WORDS}}
    made = Tokenizer(WordLevel(ids, unk_token="unknown"))
    made.pre_tokenizer = Whitespace()
    options = {"eos_token": "end"} if end else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="unknown", **options)


def model(dtype: torch.dtype = torch.float64, kv_heads: int = 2) -> CausalLM:
    sizes = dict(vocabulary=V, context=CONTEXT, num_key_value_heads=kv_heads)
    return CausalLM(random_model("llama", dtype, spread=0.3, seed=3, **sizes))


LM = model()


@dataclass
class Fixed:
    """An index that finds the same for every query."""

    scores: Sequence[float]

    @property
    def size(self) -> int:
        return len(self.scores)

    def search(self, queries: Sequence[str], k: int) -> tuple[np.ndarray, np.ndarray]:
        order = np.argsort(-np.asarray(self.scores), kind="stable")[:k]
        return np.asarray(self.scores)[order][None], order[None]

    def ceiling(self, query: str) -> float:
        return 1.0


def node(documents: dict[str, float], lm: CausalLM = LM, end: bool = False, **options: Any) -> Node:
    found = Documents(list(documents), Fixed(list(documents.values())))
    return Node(lm, tokenizer(end), found, TEMPLATE, weight_temperature=0.7, **options)


@asynccontextmanager
async def sides(device: Node | None = None, cloud: Node | None = None, **options: Any) -> AsyncIterator[Device]:
    """A device with a cloud that gives its documents; nothing may be left over."""
    of = Cloud(cloud or node(CLOUD), **{"gives_documents": True, **options})
    async with of.listening() as port:
        with Device(device or node(DEVICE), port=port) as asking:
            yield asking
        assert await until(lambda: not of._sessions and not of._tasks)
    assert await until(lambda: not list(left_over()))


def run(work, *arguments: Any, **options: Any) -> Any:
    """A baseline between two sides. sides: options of `sides`."""
    between = options.pop("sides", {})

    async def one() -> Any:
        async with asyncio.timeout(PATIENCE), sides(**between) as device:
            found = await asyncio.to_thread(work, device, QUERY, *arguments, **options)
            return await found if inspect.isawaitable(found) else found

    return asyncio.run(one())


# By hand


def ids(text: str) -> list[int]:
    return [5, *(int(word[1:]) for word in text.split())]


def best(documents: dict[str, float], k: int) -> list[str]:
    return sorted(documents, key=lambda text: -documents[text])[:k]


@torch.inference_mode()
def log_probs(prompt: Sequence[int], temperature: float = 1.0, lm: CausalLM = LM) -> np.ndarray:
    """[n, V] after every token of a prompt."""
    logits = lm.model(input_ids=torch.tensor([list(prompt)]), use_cache=False).logits[0].double()
    return (logits / temperature).log_softmax(-1).numpy()


def mixed(k: int, tokens: Sequence[int]) -> np.ndarray:
    """[V] Eq. 2 over the k best documents of each side."""
    both = {text: (DEVICE | CLOUD)[text] for text in (*best(DEVICE, k), *best(CLOUD, k))}
    weights = np.exp(np.array(list(both.values())) / 0.7)
    rows = np.array([np.exp(log_probs([*ids(text), *SUFFIX, *tokens])[-1]) for text in both])
    return weights / weights.sum() @ rows


def greedily(following, limit: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < limit:
        tokens.append(int(following(tokens).argmax()))
    return tokens


# Output aggregation


def test_output_aggregation_on_the_device_is_what_dragon_and_brute_force_answer():
    expected = greedily(lambda tokens: mixed(2, tokens), GREEDY.limit)
    assert len(set(expected)) > 3
    assert run(lambda device, query: device.ask(query, GREEDY)).tokens == expected
    assert run(fetched_rows, GREEDY).tokens == expected
    with Device(node(DEVICE)) as alone:
        assert alone.answer(QUERY, GREEDY).tokens != expected  # the cloud's documents matter


def test_drawn_with_shared_randomness_they_are_dragons_tokens_too():
    dragon = run(lambda device, query: device.ask(query, DRAWN)).tokens
    assert dragon == run(fetched_rows, DRAWN).tokens
    assert dragon != run(fetched_rows, replace(DRAWN, seed=6)).tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_in_the_models_dtype_as_they_are(dtype):
    """The device's decoder has exactly the rows that the cloud's session has."""
    lm = model(dtype)
    session = lm.start()
    session.prefill(ids(best(CLOUD, 1)[0]))

    async def rows(device: Device, query: str) -> centralised.Documents:
        async def fetched() -> centralised.Documents:
            return await centralised.fetched(Asking(device, request(query, replace(GREEDY, k=1))), "rows")

        return await asyncio.to_thread(lambda: device.run(fetched()))

    found = run(rows, sides=dict(device=node(DEVICE, lm), cloud=node(CLOUD, lm)))
    assert found.prefixes == [tuple(ids(best(CLOUD, 1)[0]))] and found.scores == [1.3]
    for mine, theirs in zip(found.rows[found.prefixes[0]], session.exported(), strict=True):
        assert mine.dtype == dtype and torch.equal(mine, theirs)


# Context aggregation


def test_context_aggregation_puts_all_documents_in_one_prompt():
    order = sorted([*best(DEVICE, 2), *best(CLOUD, 2)], key=lambda text: -(DEVICE | CLOUD)[text])
    prompt = [token for text in order for token in ids(text)]
    expected = greedily(lambda tokens: log_probs([*prompt, *SUFFIX, *tokens])[-1], GREEDY.limit)
    assert run(fetched_texts, GREEDY).tokens == expected


# The account


# What cannot be


@pytest.mark.parametrize("work", [fetched_texts, fetched_rows])
def test_a_cloud_gives_no_documents_unless_it_was_told_to(work):
    with pytest.raises(ValueError, match="The cloud refuses"):
        run(work, GREEDY, sides=dict(gives_documents=False))


@pytest.mark.parametrize("work", [fetched_texts, fetched_rows])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (replace(GREEDY, k=0), "k .* 0"),
        (replace(GREEDY, k=65), "64 .* 65"),
    ],
)
def test_requests_that_cannot_be(work, asked, said):
    with pytest.raises(ValueError, match=said):
        run(work, asked)


def test_what_else_cannot_be():
    for work in (fetched_texts, fetched_rows):
        with Device(node(DEVICE)) as alone, Device(node(DEVICE), port=1, patience=0.2) as absent:
            with pytest.raises(ValueError, match="cloud"):
                work(alone, QUERY, GREEDY)
            with pytest.raises(ValueError, match="query"):
                work(absent, " ", GREEDY)
            with pytest.raises(Lost, match="nobody"):
                work(absent, QUERY, GREEDY)
    with pytest.raises(ValueError, match="45"):
        run(fetched_texts, replace(GREEDY, limit=45))


def test_a_device_that_goes_away_leaves_nothing_behind():
    async def gone(device: Device, query: str) -> None:
        for what in ("rows", "text"):
            with Device(device.node, port=device.port) as single:
                await asyncio.to_thread(single.connect)
                single._loop.call_soon_threadsafe(single.link.connection.send, Fetch("s", query, 2, what))
        with Device(device.node, port=device.port, pace=1.0, prefill=1.0) as slow:
            start, work = time.perf_counter(), centralised._generated(slow, query, GREEDY, "text")
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.3):
                    await asyncio.wrap_future(slow._started(work))
        assert time.perf_counter() - start < 10  # 12 tokens would take 12 seconds

    run(gone)


def against(work, *answers: messages.Message) -> Any:
    """A baseline with a cloud that hears one message and sends these, of its session."""

    async def one() -> Any:
        async def handle(connection) -> None:
            first, _ = await connection.receive()
            for answer in answers:
                connection.send(msgspec.structs.replace(answer, session=first.session))
            with pytest.raises(Lost):
                while True:
                    await connection.receive()

        cloud = node(CLOUD)
        async with asyncio.timeout(PATIENCE), listening(handle, cloud.hello) as port:
            with Device(node(DEVICE), port=port) as device:
                return await asyncio.to_thread(work, device, QUERY, GREEDY)

    return asyncio.run(one())


TOKENS = (5, 17, 3)
SHAPE = (2, 2, 3, 8)
GOOD = Rows("s", 0, 1, 0.2, TOKENS, "float64", SHAPE, SHAPE, 0, 1, bytes(2 * 8 * 96))
OVER = End("s", 1)


def test_fetched_rows_are_used_as_they_come():
    """With rows of another document the answer is another one: the device computes no fetched document itself."""
    session = LM.start()
    session.prefill(TOKENS)
    (right,) = fetch.pieces("s", 0, 1, 0.2, TOKENS, *session.exported())
    texts = [*best(DEVICE, 2), "w17 w3"]
    weights = np.exp([(DEVICE | CLOUD)[text] / 0.7 for text in texts])
    expected = greedily(
        lambda tokens: weights @ np.array([np.exp(log_probs([*ids(text), *SUFFIX, *tokens])[-1]) for text in texts]), 12
    )
    assert against(fetched_rows, right, OVER).tokens == expected
    assert right.keys == GOOD.keys and right.tokens == GOOD.tokens and len(right.data) == len(GOOD.data)
    assert against(fetched_rows, GOOD, OVER).tokens != expected


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(dtype="float32"), "Fetched rows are float32"),
        (dict(keys=(2, 4, 3, 8)), "of shapes (2, 4, 3, 8)"),
        (dict(document=1), "piece 0 of document 0 did not come in its turn"),
        (dict(data=bytes(8 * 96)), "the cloud ended before all rows was there"),
        (dict(data=bytes(24 * 96)), "Fetched rows have 2304 bytes, not 1536"),
        (
            dict(tokens=(3,) * 60, keys=(2, 2, 60, 8), values=(2, 2, 60, 8), data=bytes(2 * 8 * 1920)),
            "Document 2 takes 60 tokens, more than the context of 48",
        ),
    ],
)
def test_rows_of_another_model_or_another_size_are_refused(change, said):
    with pytest.raises((ValueError, Lost)) as raised:
        against(fetched_rows, msgspec.structs.replace(GOOD, **change), OVER)
    assert said in str(raised.value)


def test_what_a_cloud_must_not_send_is_told(monkeypatch):
    with pytest.raises(Lost, match=r"Texts .* rows"):
        against(fetched_rows, Texts("s", ("w3",), (1.0,)))
    with pytest.raises(Lost, match="text"):
        against(fetched_texts, End("s", 0))
    monkeypatch.setattr(centralised, "PIECE", 1000)
    halves = [msgspec.structs.replace(GOOD, pieces=2, data=bytes(1000)) for _ in range(2)]
    with pytest.raises(Lost, match="piece 1 of document 0"):
        against(fetched_rows, *halves)
