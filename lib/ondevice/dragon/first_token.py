"""Figure 8: the time to the first token by each method, with both processes and the relay (section 7.3)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
from tqdm import tqdm

from ondevice.dragon.experiments import CRCG, DRAGON, Question, added, alone
from ondevice.dragon.live import centralised
from ondevice.dragon.live.answer import Answer, Asked, request
from ondevice.dragon.live.asking import Asking
from ondevice.dragon.live.device import Device
from ondevice.network.relay import Relay

TEXT, ROWS, ON_CLOUD, AS_MANY = "DRCG/Text", "DRCG/KV", "CRCG/Cloud", "CRCG/Device, as many documents"
Method = Callable[[Device, str, Asked], Answer]


def _with(**changes: object) -> Method:
    return lambda device, query, asked: device.answer(query, _replaced(asked, changes))


def _replaced(asked: Asked, changes: Mapping[str, object]) -> Asked:
    return Asked(**{**vars(asked), **changes})


METHODS: dict[str, Method] = {
    DRAGON: _with(),
    CRCG: lambda device, query, asked: alone(device, query, asked),
    ON_CLOUD: _with(mode="cloud-only"),
    TEXT: lambda device, query, asked: centralised.fetched_texts(
        device, query, asked, aggregation="context", budget=None
    ),
    ROWS: lambda device, query, asked: centralised.fetched_rows(device, query, asked),
    AS_MANY: lambda device, query, asked: alone(device, query, _replaced(asked, {"k": 2 * asked.k})),
}  # all documents of both sides: DRCG/Text prefills them from text; all others have stored rows


def first_tokens(
    device: Device, relay: Relay, asked: Sequence[Question], delays: Sequence[float], how: Asked,
    methods: Mapping[str, Method] = METHODS, setting: str = "unpaced",
) -> pd.DataFrame:  # fmt: skip
    """Each question by each method at each added delay (seconds), in turn, after one that warms up and is not counted.

    Rows [setting, method, delay_ms, question, ttft_ms, per_token_ms, sent, received].
    """
    rows = []
    for method in methods.values():  # stored rows are made, and both sides have run
        for question in asked:
            method(device, question.query, how)
    with tqdm(total=len(delays) * len(asked) * len(methods), desc=f"first tokens, {setting}") as progress:
        for delay in delays:
            up, down = added(delay)
            relay.set(up=up, down=down)
            for question in asked:
                for name, method in methods.items():
                    answer = method(device, question.query, how)
                    rows.append({
                        "setting": setting, "method": name, "delay_ms": 1000 * delay, "question": question.name,
                        "ttft_ms": 1000 * answer.ttft, "per_token_ms": 1000 * answer.per_token, "sent": answer.sent,
                        "received": answer.received,
                    })  # fmt: skip
                    progress.update()
    return pd.DataFrame(rows)


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians over questions, with the least and the greatest: [setting, method, delay_ms, ttft_ms, low, high]."""
    found = rows.groupby(["setting", "method", "delay_ms"], sort=False)["ttft_ms"]
    return found.agg(ttft_ms="median", low="min", high="max").reset_index()


def fetch_ms(device: Device, relay: Relay, query: str, k: int, delay: float, rounds: int = 3) -> float:
    """Median milliseconds to ask for k documents as text and have them, on the connection that is kept.

    Raises ValueError where refused.
    """
    up, down = added(delay)
    relay.set(up=up, down=down)

    async def once() -> float:
        asking = Asking(device, request(query, Asked(k=k)))
        try:
            await centralised.fetched(asking, "text")
            return time.perf_counter() - asking.began
        finally:
            asking.close()

    device.connect()
    return 1000 * float(np.median([device.run(once()) for _ in range(rounds)]))
