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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from waiting import PATIENCE, until

from ondevice.causal_lm import CausalLM
from ondevice.dragon import messages
from ondevice.dragon.live import centralised
from ondevice.dragon.live.answer import Answer, Asked
from ondevice.dragon.live.asking import Asking
from ondevice.dragon.live.centralised import fetched_rows, fetched_texts, in_one_context
from ondevice.dragon.live.cloud import Cloud
from ondevice.dragon.live.decoder import Template
from ondevice.dragon.live.device import Device, request
from ondevice.dragon.live.kv_store import KVStore
from ondevice.dragon.live.node import Documents, Node
from ondevice.dragon.live.wire import Lost, listening
from ondevice.dragon.messages import End, Fetch, Rows, Texts

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
    """A random model whose distributions are far from uniform."""
    config = AutoConfig.for_model(
        "llama", vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=kv_heads, max_position_embeddings=CONTEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(3)
    made = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    return CausalLM(made)


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


def test_stores_on_both_sides_change_nothing(tmp_path):
    def stored(documents: dict[str, float], name: str) -> Node:
        return node(documents, store=KVStore(tmp_path / name, LM, tokenizer(), TEMPLATE.text))

    device, cloud = stored(DEVICE, "device"), stored(CLOUD, "cloud")
    for work in (fetched_rows, fetched_texts):
        expected = run(work, GREEDY).tokens
        for _ in range(2):
            assert run(work, GREEDY, sides=dict(device=device, cloud=cloud)).tokens == expected
    for side in (device, cloud):  # two documents, for rows alone: a text's are computed in its context
        assert (side.store.misses, side.store.hits) == (2, 2)


def test_bytes_of_rows_are_those_of_their_shapes(monkeypatch):
    """2 layers, 2 heads of width 8, keys and values, 8 bytes each; pieces as small as they must be."""
    sizes = [2 * 2 * 2 * 8 * 8 * len(ids(text)) for text in best(CLOUD, 2)]
    least = sum(sizes)
    whole = run(fetched_rows, GREEDY)
    assert least < whole.received < least + 300  # headers
    monkeypatch.setattr(centralised, "PIECE", 1000)
    pieces = run(fetched_rows, GREEDY)
    assert pieces.tokens == whole.tokens
    more = sum(-(-size // 1000) - 1 for size in sizes)
    assert more == 3 + 1
    assert whole.received + 50 * more < pieces.received < whole.received + 150 * more
    assert run(fetched_texts, GREEDY).received < 200


def test_pieces_by_hand():
    keys, values = torch.arange(12.0).reshape(1, 2, 3, 2), torch.arange(12.0, 24.0).reshape(1, 2, 3, 2)
    (only,) = centralised.pieces("s", 1, 2, 0.5, (4, 5, 6), keys, values)
    assert only.data == np.arange(24.0).astype("<f4").tobytes()
    assert (only.keys, only.values, only.dtype, only.pieces) == ((1, 2, 3, 2), (1, 2, 3, 2), "float32", 1)
    for found, sent in zip(centralised.tensors(only, bytearray(only.data)), (keys, values), strict=True):
        assert torch.equal(found, sent)


# Context aggregation


def test_context_aggregation_puts_all_documents_in_one_prompt():
    order = sorted([*best(DEVICE, 2), *best(CLOUD, 2)], key=lambda text: -(DEVICE | CLOUD)[text])
    prompt = [token for text in order for token in ids(text)]
    expected = greedily(lambda tokens: log_probs([*prompt, *SUFFIX, *tokens])[-1], GREEDY.limit)
    assert run(fetched_texts, GREEDY).tokens == expected
    assert run(fetched_texts, GREEDY, aggregation="context", budget=None).tokens == expected


def test_one_context_by_hand():
    prefixes, scores = [(1, 7, 8), (1, 9), (1, 4, 4, 4)], [0.0, 2.0, 1.0]
    assert in_one_context(prefixes, scores, None) == (1, 9, 1, 4, 4, 4, 1, 7, 8)
    assert in_one_context(prefixes, scores, 1) == (1, 9, 4, 4, 4, 7, 8)


def test_equal_compute_stops_where_the_context_does():
    """Query and answer fit exactly: 48 tokens, of which the last of the answer is not given to the model."""
    many = {f"w{30 + i} " * 9: 1.0 - i for i in range(4)}
    asked = replace(GREEDY, k=4)
    answer = run(fetched_texts, asked, sides=dict(device=node(many)))
    order = sorted([*many, *best(CLOUD, 4)], key=lambda text: -(many | CLOUD)[text])
    prompt = [token for text in order for token in ids(text)][: CONTEXT - len(SUFFIX) - 11]
    assert answer.tokens == greedily(lambda tokens: log_probs([*prompt, *SUFFIX, *tokens])[-1], 12)


# The account


@pytest.mark.parametrize("work", [fetched_texts, fetched_rows])
def test_the_account(work):
    device = node(DEVICE)
    answer: Answer = run(work, GREEDY, sides=dict(device=device))
    assert len(answer.times) == len(answer.tokens) == 12
    assert answer.times == sorted(answer.times)
    assert 0 < answer.prefilled <= answer.ttft
    assert answer.text == device.tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert answer.connections == 1
    assert answer.sent == sum(answer.left.values()) and list(answer.left) == ["Fetch", "End"]
    assert 30 < answer.sent < 100 and answer.received > 80
    assert answer.alone_from is None


def test_an_imposed_pace_holds_for_the_baselines_too():
    def paced(device: Device, query: str) -> list[Answer]:
        with Device(device.node, port=device.port, pace=0.02, prefill=0.1) as slow:
            return [work(slow, query, replace(GREEDY, limit=6)) for work in (fetched_texts, fetched_rows)]

    for answer in run(paced):
        assert answer.prefilled >= 0.1
        assert answer.times[-1] >= 0.1 + 5 * 0.02


# What cannot be


@pytest.mark.parametrize("work", [fetched_texts, fetched_rows])
def test_a_cloud_gives_no_documents_unless_it_was_told_to(work):
    with pytest.raises(ValueError, match=r"The cloud refuses: This cloud does not give its documents away\."):
        run(work, GREEDY, sides=dict(gives_documents=False))


@pytest.mark.parametrize("work", [fetched_texts, fetched_rows])
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (replace(GREEDY, k=0), "k cannot be 0"),
        (replace(GREEDY, k=65), "at most 64 documents of a side, not 65"),
        (replace(GREEDY, limit=0), "limit cannot be 0"),
        (replace(GREEDY, temperature=-1.0), "temperature cannot be -1"),
    ],
)
def test_requests_that_cannot_be(work, asked, said):
    with pytest.raises(ValueError, match=said):
        run(work, asked)


def test_what_else_cannot_be():
    for work in (fetched_texts, fetched_rows):
        with Device(node(DEVICE)) as alone, Device(node(DEVICE), port=1, patience=0.2) as absent:
            with pytest.raises(ValueError, match="needs a cloud, and the device has none"):
                work(alone, QUERY, GREEDY)
            with pytest.raises(ValueError, match="query is empty"):
                work(absent, " ", GREEDY)
            with pytest.raises(Lost, match="nobody answers"):
                work(absent, QUERY, GREEDY)
    with pytest.raises(ValueError, match="answer of 45 leave no room for documents"):
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
    (right,) = centralised.pieces("s", 0, 1, 0.2, TOKENS, *session.exported())
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
        (dict(values=(2, 2, 4, 8)), "(2, 2, 4, 8); this model's are"),
        (dict(tokens=()), "of (2, 2, 0, 8)"),
        (dict(document=1), "piece 0 of document 0 did not come in its turn"),
        (dict(piece=1, pieces=2), "piece 0 of document 0 did not come in its turn"),
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
    with pytest.raises(Lost, match="a Texts came in the place of rows"):
        against(fetched_rows, Texts("s", ("w3",), (1.0,)))
    with pytest.raises(Lost, match="the cloud ended before all text was there"):
        against(fetched_texts, End("s", 0))
    monkeypatch.setattr(centralised, "PIECE", 1000)
    halves = [msgspec.structs.replace(GOOD, pieces=2, data=bytes(1000)) for _ in range(2)]
    with pytest.raises(Lost, match="piece 1 of document 0 did not come in its turn"):
        against(fetched_rows, *halves)


def test_texts_beyond_a_message_are_told():
    """Nine texts of 2^16 characters."""
    long = {f"w{i} " + "x" * (2**16 - 10): float(i) for i in range(9)}
    with pytest.raises(ValueError, match=r"refuses: Texts take at most 524288 bytes in all, not 589\d\d\d"):
        run(fetched_texts, replace(GREEDY, k=9), sides=dict(cloud=node(long)))
