"""The router: deployments of two sides behind one stream, dispatched within a budget (Sun et al. 2025, section 4)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_papers.disco.policy import SIDES
from ondevice_programs.router import probe, state
from ondevice_programs.router.config import Config, Deployment
from ondevice_programs.router.endpoints import EndpointClient, Source
from ondevice_programs.router.metrics import Metrics
from ondevice_programs.router.request import Request
from ondevice_programs.router.session import Attempt, Session, Setup
from ondevice_programs.router.sides import Group, Member

SAVED_EVERY_S = 60.0
PROBE_S = 30.0  # an endpoint that takes longer for four tokens is probed again later

log = logging.getLogger("ondevice_programs.router")


class Router:
    """All that a configuration describes. Raises ValueError where its state file is another's.

    source: makes what asks a deployment. dispatcher: in place of one that begins with what the state file holds.
    """

    def __init__(
        self,
        config: Config,
        source: Callable[[Deployment], Source] = EndpointClient,
        dispatcher: Dispatcher | None = None,
    ) -> None:
        self.config = config
        settings = config.router_settings
        self._path = state.path_of(config)
        saved = state.read(self._path)
        try:
            self.dispatcher = dispatcher or Dispatcher(settings.constrained, settings.budget, saved.get("dispatcher"))
        except ValueError as error:
            raise ValueError(f"{self._path}: {error}") from None
        self.members = [Member.of(deployment, source(deployment)) for deployment in config.model_list]
        for member in self.members:
            member.spent = saved.get("spent", {}).get(member.deployment.address, 0.0)
        self.metrics = Metrics(self.dispatcher)
        sides = {side: [it for it in self.members if it.deployment.model_info.side == side] for side in SIDES}
        groups = {side: Group(members, settings) for side, members in sides.items()}
        self._setup = Setup(groups, self.dispatcher, settings, self._seen)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(member.deployment.model_name for member in self.members))

    def open(self, request: Request) -> Session:
        """One answer: `start()` it, read `out`, `abandon()` it at last."""
        return Session(self._setup, request)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Probes the endpoints and keeps the state on disk meanwhile; streams that still run at the end break off."""
        for member in self.members:
            self._probe(member)
        saving = asyncio.create_task(self._keep_saving())
        try:
            yield
        finally:
            saving.cancel()
            await asyncio.gather(saving, *self.break_off(), return_exceptions=True)
            for member in self.members:
                await member.source.aclose()
            self.save()

    def break_off(self) -> list[asyncio.Task[None]]:
        """End all streams, each with an error that its reader gets."""
        tasks = list(self._setup.tasks)
        for task in tasks:
            task.cancel()
        return tasks

    async def ready(self) -> bool:
        """Whether at least one deployment answers."""
        if any(member.fine for member in self.members):
            return True
        return any(await asyncio.gather(*(member.source.alive() for member in self.members)))

    def save(self) -> None:
        """To disk; a full one stops no stream."""
        spent = {member.deployment.address: member.spent for member in self.members}
        try:
            state.write(self._path, self.dispatcher.state(), spent)
        except OSError as error:
            log.error("The state was not saved: %s", error)

    async def _keep_saving(self) -> None:
        while True:
            await asyncio.sleep(SAVED_EVERY_S)
            self.save()

    def _probe(self, member: Member) -> None:
        if member.can_continue is None:
            task = asyncio.create_task(self._find_out(member))
            self._setup.tasks.add(task)
            task.add_done_callback(self._setup.tasks.discard)

    async def _find_out(self, member: Member) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PROBE_S):
                member.can_continue = await probe.can_continue(member)
        log.info("%s: can continue an answer: %s", member.deployment.address, member.can_continue)

    def _seen(self, attempt: Attempt) -> None:
        self.metrics.attempt(attempt)
        if attempt.outcome == "served":
            self._probe(attempt.member)
