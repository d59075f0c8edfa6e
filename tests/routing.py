"""What the tests of DiSCo's router share: configurations, a dispatcher that is told its waits, and a virtual clock."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import openai
import starlette.requests
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from ondevice.network.listening import listener
from ondevice_papers.disco.budgeted import Account, Dispatcher, Order
from ondevice_papers.disco.policy import NEVER, SIDES, Side
from ondevice_papers.disco.traffic import Traffic
from ondevice_programs.router.app import create_app
from ondevice_programs.router.config import Config
from ondevice_programs.router.endpoints import AnswerChunk, EndpointError, Finish, OnEvent, Usage
from ondevice_programs.router.replay import answer, plain_chat
from ondevice_programs.router.request import ChatRequest
from ondevice_programs.router.router import Router
from ondevice_programs.router.session import RoutedRequest, StreamError

T = TypeVar("T")
INFO = ("can_continue", "max_output_tokens", "stream_options")
MESSAGES: Any = [{"role": "user", "content": "Tell me about buffers, 6 words."}]
NOW: dict[Side, float] = {"device": 0.0, "server": 0.0}
DEVICE_FIRST: dict[Side, float] = {"device": 0.0, "server": NEVER}


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is left to do, and then jumps to the next timer."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        timers: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while timers and timers[0]._cancelled:
            heapq.heappop(timers)._scheduled = False
            self._timer_cancelled_count -= 1
        if not self._ready and timers:  # type: ignore[attr-defined]
            self.now = max(self.now, timers[0]._when)
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
        self.other: Side = SIDES[1 - SIDES.index(constrained)]
        self.account, self.traffic = Account(1.0), Traffic()
        self.told: list[tuple[Any, ...]] = []

    def arrive(self, tokens: int, device_free_in: float = 0.0) -> Order:
        self.told.append(("arrive", tokens, device_free_in))
        return Order(0, tokens, self.waits, 0.0)

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

    def settled(self, order: Order) -> None:
        pass

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


class Guest(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the process's signal handlers alone: this server is a guest in someone else's event loop."""
        yield


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[str]:
    """Serve `app` while the context is open; yields its base URL, http://127.0.0.1:<port>."""
    opened = listener()
    config = uvicorn.Config(app, log_level="critical", access_log=False, lifespan="auto", timeout_graceful_shutdown=1)
    server = Guest(config)
    running = asyncio.create_task(server.serve(sockets=[opened]))
    try:
        while not server.started and not running.done():
            await asyncio.sleep(0.005)  # uvicorn has no event for this
        yield f"http://127.0.0.1:{opened.getsockname()[1]}"
    finally:
        server.should_exit = True
        await running
        opened.close()


def deployment(side: Side, url: str = "http://127.0.0.1:1", name: str = "m", **more: Any) -> dict[str, Any]:
    """An entry of model_list; what is not in model_info goes to litellm_params."""
    info = {key: more.pop(key) for key in INFO if key in more}
    return {
        "model_name": name,
        "litellm_params": {"model": side, "api_base": url} | more,
        "model_info": {"side": side, "can_continue": True} | info,
    }


def configured(folder: Path, *deployments: dict[str, Any], general: Any = None, **settings: Any) -> Config:
    usual = {"constrained": "device", "over_budget": "refuse", "state": str(folder / "state")}
    settings = usual | settings
    return Config.model_validate(
        {"model_list": deployments, "router_settings": settings, "general_settings": general or {}}
    )


class Source:
    """Of an endpoint, what is the same for all that stand in for one."""

    async def alive(self) -> bool:
        return True

    async def aclose(self) -> None:
        pass


@dataclass
class Scripted(Source):
    """An endpoint on the virtual clock. fault: (request number, tokens before it) of a failure, or None for none.

    error: what it fails with; None is silence.
    """

    ttft: Sequence[float] = (0.1,)
    tbt: float = 0.01
    voice: str = ""
    fault: tuple[int, int] | None = None
    error: EndpointError | None = field(default_factory=lambda: EndpointError("as scripted", 500))
    usage: bool = True
    asked: list[str] = field(default_factory=list)
    limits: list[Mapping[str, int]] = field(default_factory=list)
    cancelled: int = 0

    async def ask(self, request: ChatRequest, prefix: str, limits: Mapping[str, int], on_event: OnEvent) -> Finish:
        number = len(self.asked)
        self.asked.append(prefix)
        self.limits.append(limits)
        most = min(limits.values(), default=None)
        tokens = answer(plain_chat(request.messages) + prefix, most, self.voice)
        try:
            await asyncio.sleep(self.ttft[number % len(self.ttft)])
            for sent, token in enumerate(tokens):
                if sent:
                    await asyncio.sleep(self.tbt)
                await self._fail(number, sent)
                on_event(AnswerChunk(token))
            await self._fail(number, len(tokens))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        reason = "length" if len(tokens) == most else "stop"
        return Finish(reason, Usage(request.tokens, len(tokens)) if self.usage else None)

    async def _fail(self, number: int, sent: int) -> None:
        if self.fault == (number, sent):
            if self.error is None:
                await asyncio.Event().wait()
            raise self.error or AssertionError


NOBODY = "http://127.0.0.1:1"
DONE = "data: [DONE]"


def chunk(text: str | None = None, reason: str | None = None, index: int | None = 0, **delta: Any) -> str:
    content = {} if text is None else {"content": text}
    choice = {"index": index, "delta": content | delta, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice]})}"


def usage(**counts: Any) -> str:
    return f"data: {json.dumps({'choices': [], 'usage': counts})}"


class Upstream:
    """A chat endpoint. reply: what a body gets, a Response or lines of a stream; a number there is a pause, in s.

    models: the names that it lists; None is no such list. loading: how often it is not ready first when asked for them.
    """

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], Sequence[str | float] | Response],
        models: Sequence[str] | None = None,
        loading: int = 0,
    ) -> None:
        self.reply, self.bodies, self.headers = reply, [], []
        self.loading = loading
        self.sent: list[bytes] = []  # the same bodies, as they came
        routes = [Route("/v1/chat/completions", self.handle, methods=["POST"])]
        if models is not None:
            listed = {"object": "list", "data": [{"id": name} for name in models]}

            def answer(_: starlette.requests.Request) -> Response:
                self.loading -= 1
                return Response(status_code=503) if self.loading >= 0 else JSONResponse(listed)

            routes.append(Route("/v1/models", answer))
        self.app = Starlette(routes=routes)

    async def handle(self, request: starlette.requests.Request) -> Response:
        self.sent.append(await request.body())
        self.bodies.append(json.loads(self.sent[-1]))
        self.headers.append(dict(request.headers))
        reply = self.reply(self.bodies[-1])
        if isinstance(reply, Response):
            return reply

        async def events() -> AsyncIterator[str]:
            for line in reply:
                if isinstance(line, str):
                    yield f"{line}\n\n"
                else:
                    await asyncio.sleep(line)

        return StreamingResponse(events(), media_type="text/event-stream")


@dataclass
class Seen:
    """What a reader saw: each packet's text, and when."""

    texts: list[str]
    times: list[float]
    session: RoutedRequest
    error: StreamError | None

    @property
    def switches(self) -> list[tuple[int, str, str]]:
        return [(switch.base, switch.side, switch.role) for switch in self.session.switches]

    @property
    def outcomes(self) -> list[tuple[str, str, str]]:
        return [(entry.side, entry.role, entry.outcome) for entry in self.session.entries]


async def read(router: Router, request: ChatRequest) -> Seen:
    """One stream to its end."""
    session = router.open(request)
    clock = asyncio.get_running_loop().time
    texts, times, error = [], [], None
    start = clock()
    session.start()
    try:
        async for part in session.out.read():
            texts.append(part.text)
            times.append(clock() - start)
    except StreamError as caught:
        error = caught
    session.abandon()
    return Seen(texts, times, session, error)


def composed(seen: Seen, voices: Mapping[str, str], asked: str) -> list[str]:
    """The answer that the recorded switches promise: each stretch from its side, conditioned on all before it."""
    tokens: list[str] = []
    ends = [at for at, _, _ in seen.switches[1:]] + [len(seen.texts)] * bool(seen.switches)
    for (at, side, _), end in zip(seen.switches, ends, strict=True):
        assert at == len(tokens)
        tokens += answer(asked + "".join(tokens), end - at, voices[side])
    return tokens


@contextlib.asynccontextmanager
async def routed(folder: Path, device: Any, server: Any, dispatcher: Dispatcher, **options: Any) -> AsyncIterator[str]:
    """A router between two ASGI applications, served; yields its base URL. options: of both sides or the router."""
    ours = {key: options.pop(key) for key in INFO if key in options}
    async with serving(device) as one, serving(server) as other:
        sides = deployment("device", one, **ours), deployment("server", other, **ours)
        router = Router(configured(folder, *sides, **options), dispatcher=dispatcher)
        async with serving(create_app(router)) as url:
            yield f"{url}/v1"


def client_of(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=30.0)
