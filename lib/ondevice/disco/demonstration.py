"""The router at work on loopback: replayed endpoints, a policy, migration, and what the ledger says afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pandas as pd

from ondevice.disco import replay
from ondevice.disco.costs import Prices
from ondevice.disco.distributions import Device, Latency
from ondevice.disco.endpoints import Endpoint
from ondevice.disco.handoff import HandoffRule
from ondevice.disco.loopback import serving
from ondevice.disco.policy import DispatchPolicy
from ondevice.disco.request import estimate_tokens
from ondevice.disco.router import Router


async def route(
    prompts: Sequence[str],
    policy: DispatchPolicy,
    server: Latency,
    server_gap: float,
    device: Device,
    prices: tuple[Prices, Prices],
    *,
    pace: float,
    migration: HandoffRule | None,
    max_tokens: int,
    seed: int,
) -> tuple[pd.DataFrame, Router]:
    """Stream all prompts at once through a router in front of two replaying endpoints.

    server: TTFTs, taken in turn. server_gap: seconds between its tokens. prices: (device, server), $ per token. pace:
    tokens/s shown. Returns one row per stream (prompt_tokens, winner, ttft_s, migrated_at, tokens, intact: the text is
    the endpoints' own, token for token) and the router with its ledger.
    """
    on_device = replay.Timing((device.overhead,), 1 / device.decode_rate, device.prefill_rate)
    on_server = replay.Timing(tuple(server.samples.tolist()), server_gap)
    async with (
        serving(replay.create_replay(on_device)) as device_url,
        serving(replay.create_replay(on_server)) as server_url,
        Router(
            Endpoint(device_url, price_prompt=prices[0].prefill, price_output=prices[0].decode),
            Endpoint(server_url, price_prompt=prices[1].prefill, price_output=prices[1].decode),
            policy,
            pace=pace,
            migration=migration,
            seed=seed,
        ) as router,
    ):
        rows = await asyncio.gather(*(_stream(router, prompt, max_tokens) for prompt in prompts))
    columns = ["prompt_tokens", "winner", "ttft_s", "migrated_at", "tokens", "intact"]
    return pd.DataFrame(rows, columns=columns), router


async def _stream(router: Router, prompt: str, max_tokens: int) -> tuple[object, ...]:
    stream = router.stream(prompt, max_tokens)
    text = "".join([token.text async for token in stream])
    seen = stream.summary
    intact = text == "".join(replay.answer(prompt, max_tokens))
    return estimate_tokens(prompt), seen.winner, seen.first_token_s, seen.migrated_at, seen.output_tokens, intact
