"""The router: two endpoints behind one stream, dispatched within a budget (Sun et al. 2025, section 4)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, TextIO

from ondevice_papers.disco.budgeted import Account, Dispatcher
from ondevice_papers.disco.policy import Side
from ondevice_programs.router import probe, state
from ondevice_programs.router.config import Config, Deployment, Settings
from ondevice_programs.router.endpoints import EndpointClient
from ondevice_programs.router.metrics import Metrics
from ondevice_programs.router.request import ChatRequest
from ondevice_programs.router.session import Attempt, RoutedRequest, Setup
from ondevice_programs.router.sides import Endpoint

SAVED_EVERY_S = 60.0
PROBE_S = 30.0  # an endpoint that takes longer for four tokens is probed again later

log = logging.getLogger("ondevice_programs.router")


class Unlimited(Account):
    """The account of a router without a budget: every start is counted, none is refused."""

    def __init__(self, b: float, arrived: float = 0.0, spent: float = 0.0) -> None:
        super().__init__(b, arrived, spent)
        self.slack = deque([float("inf")])


def dispatcher_of(settings: Settings, saved: dict[str, Any]) -> Dispatcher:
    """A dispatcher that begins with what was saved, but for the account of another budget.

    saved: of the state file. Raises ValueError where it is damaged.
    """
    kept = saved.get("dispatcher")
    if kept and saved.get("budget") != settings.budget:
        kept = kept | {"account": {"arrived": 0.0, "spent": 0.0}}
    if settings.budget is None:
        return Dispatcher(settings.constrained, 1.0, kept, account=Unlimited, rate=lambda *_: 1.0)
    return Dispatcher(settings.constrained, settings.budget, kept)


class Router:
    """All that a configuration describes. Raises ValueError where its state file is another's.

    source: makes what asks an endpoint. dispatcher: in place of one that begins with what the state file holds.
    """

    def __init__(
        self,
        config: Config,
        source: Callable[[Deployment], EndpointClient] = EndpointClient,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self.config = config
        self._path = state.path_of(config)
        saved = state.read(self._path) if self._path else {}
        try:
            self.dispatcher = dispatcher or dispatcher_of(config.router_settings, saved)
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from None
        self.endpoints: dict[Side, Endpoint] = {}
        for entry in config.model_list:
            setting = entry.model_info.can_continue
            endpoint = Endpoint(entry, source(entry), None if setting == "probe" else setting)
            endpoint.spent = saved.get("spent", {}).get(entry.address, 0.0)
            endpoint.renewed_at = (saved.get("renewed_at") or {}).get(entry.address)
            self.endpoints[entry.side] = endpoint
        self.metrics = Metrics(self.dispatcher)
        self._setup = Setup(self.endpoints, self.dispatcher, config.router_settings, self._seen)

    def lock(self) -> TextIO | None:
        """Keep other routers from the state while the file is open. Raises ValueError where another one has it."""
        return state.lock(self._path) if self._path else None

    def open(self, request: ChatRequest) -> RoutedRequest:
        """One answer: `start()` it, read `out`, `abandon()` it at last."""
        return RoutedRequest(self._setup, request)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probes the endpoints and keeps the state on disk meanwhile; streams that still run at the end break off."""
        for endpoint in self.endpoints.values():
            self._probe(endpoint)
        saving = asyncio.create_task(self._keep_saving())
        try:
            yield
        finally:
            saving.cancel()
            await asyncio.gather(saving, *self.break_off(), return_exceptions=True)
            for endpoint in self.endpoints.values():
                await endpoint.source.aclose()
            self.save()

    def break_off(self) -> list[asyncio.Task[None]]:
        """End all streams, each with an error that its reader gets."""
        tasks = list(self._setup.tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def ready(self) -> bool:
        """Whether at least one endpoint answers."""
        endpoints = self.endpoints.values()
        if any(endpoint.fine for endpoint in endpoints):
            return True
        return any(await asyncio.gather(*(endpoint.source.alive() for endpoint in endpoints)))

    def save(self) -> None:
        """To disk; a full one stops no stream."""
        if self._path is None:
            return
        of_address = {endpoint.deployment.address: endpoint for endpoint in self.endpoints.values()}
        saved = {
            "budget": self.config.router_settings.budget,
            "dispatcher": self.dispatcher.state(),
            "spent": {address: endpoint.spent for address, endpoint in of_address.items()},
            "renewed_at": {address: endpoint.renewed_at for address, endpoint in of_address.items()},
        }
        try:
            state.write(self._path, saved)
        except OSError as error:
            log.error("The state was not saved: %s", error)

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(SAVED_EVERY_S)
            self.save()

    def _probe(self, endpoint: Endpoint) -> None:
        if endpoint.can_continue is None:
            self._setup.keep(asyncio.create_task(self._find_out(endpoint)))

    async def _find_out(self, endpoint: Endpoint) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_S):
                endpoint.can_continue = await probe.can_continue(endpoint)
        log.info("%s: can continue an answer: %s", endpoint.deployment.address, endpoint.can_continue)

    def _seen(self, attempt: Attempt) -> None:
        if attempt.outcome == "served":
            self._probe(attempt.endpoint)
