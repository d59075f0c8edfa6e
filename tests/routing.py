"""What the tests of DiSCo's router share: configurations, a dispatcher that is told its waits, and a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import openai

from ondevice.disco.budgeted import Dispatcher, Order
from ondevice.disco.policy import NEVER, Side
from ondevice.disco.router.app import create_app
from ondevice.disco.router.config import Config
from ondevice.disco.router.loopback import serving
from ondevice.disco.router.router import Router

T = TypeVar("T")
NOW: dict[Side, float] = {"device": 0.0, "server": 0.0}
DEVICE_FIRST: dict[Side, float] = {"device": 0.0, "server": NEVER}


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is left to do, and then jumps to the next timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now = max(self.now, self._scheduled[0]._when)  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


def virtually(work: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


@dataclass
class Full:
    """A migration that is due as soon as so many tokens are unread."""

    buffer: int

    def due(self, prompt: int, generated: int, shown: int) -> bool:
        return generated - shown >= self.buffer


class Told(Dispatcher):
    """Waits as told, and a budget of so many tokens in all for the constrained side; all that it is told is noted."""

    def __init__(
        self,
        waits: Mapping[Side, float] = NOW,
        tokens: float = NEVER,
        constrained: Side = "device",
        buffer: int | None = None,
    ) -> None:
        self.waits, self.tokens, self.constrained, self.budget, self.buffer = waits, tokens, constrained, 1.0, buffer
        self.told: list[tuple[Any, ...]] = []

    def arrive(self, tokens: int, device_free_in: float = 0.0) -> Order:
        self.told.append(("arrive", tokens, device_free_in))
        return Order(tokens, self.waits)

    def start(self, order: Order, side: Side, tokens: int) -> bool:
        if side == self.constrained and tokens > self.tokens:
            return False
        self.tokens -= tokens if side == self.constrained else 0
        self.told.append(("start", side, tokens))
        return True

    def refund(self, order: Order, side: Side, tokens: int) -> None:
        self.tokens += tokens if side == self.constrained else 0
        self.told.append(("refund", side, tokens))

    def first_token(self, order: Order, side: Side, seconds: float) -> None:
        self.told.append(("first", side, seconds))

    def cut_off(self, order: Order, side: Side, seconds: float) -> None:
        self.told.append(("cut", side, seconds))

    def close(self, order: Order, answer: int | None = None) -> None:
        self.told.append(("close", answer))

    def migration(self, source: Any, target: Any, pace: float) -> Any:
        self.told.append(("migration", source, target, pace))
        return None if self.buffer is None else Full(self.buffer)

    @property
    def left(self) -> float:
        return self.tokens if self.tokens < NEVER else 0.0

    def state(self) -> dict[str, Any]:
        return {}


def deployment(side: Side, url: str = "http://127.0.0.1:1", name: str | None = None, **more: Any) -> dict[str, Any]:
    """An entry of model_list; what is not in model_info goes to litellm_params."""
    info = {
        name_: more.pop(name_) for name_ in ("api", "can_continue", "tokenizer", "max_output_tokens") if name_ in more
    }
    return {
        "model_name": name or "m",
        "litellm_params": {"model": side, "api_base": url} | more,
        "model_info": {"side": side, "can_continue": True} | info,
    }


def configured(folder: Path, *deployments: dict[str, Any], general: Any = None, **settings: Any) -> Config:
    settings = {"constrained": "device", "state": str(folder / "state.json")} | settings
    return Config.model_validate(
        {"model_list": deployments, "router_settings": settings, "general_settings": general or {}}
    )


@contextlib.asynccontextmanager
async def routed(folder: Path, device: Any, server: Any, dispatcher: Dispatcher, **options: Any) -> AsyncIterator[str]:
    """A router between two ASGI applications, served; yields its base URL. options: of both deployments or the router."""
    names = ("api", "can_continue", "tokenizer")
    ours = {name: options.pop(name) for name in names if name in options}
    async with serving(device) as one, serving(server) as other:
        sides = deployment("device", one, **ours), deployment("server", other, **ours)
        router = Router(configured(folder, *sides, **options), dispatcher=dispatcher)
        async with serving(create_app(router)) as url:
            yield f"{url}/v1"


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30.0)
