"""A side's deployments: which of them is asked, which rest after failures, and what each may still cost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ondevice_programs.router.config import Deployment, Settings
from ondevice_programs.router.endpoints import EndpointError, Source
from ondevice_programs.router.request import Request

ANY_MODEL = "disco"
AT_FAULT = {400, 404, 413, 415, 422}  # of these statuses the request is the cause, not the endpoint
FINAL = AT_FAULT | {401, 403}  # asking the same endpoint again cannot help
NEWEST = 0.2  # weight of the newest observation in a decaying mean


@dataclass(eq=False)
class Member:
    """One deployment as it fares. spent, reserved: money. ttft: a decaying mean, s. fine: its last request succeeded.

    can_continue: None until it has been probed. running: requests there now. service: a decaying mean of the seconds
    that one takes, if they are served one by one; the one being served is so since `since`.
    """

    deployment: Deployment
    source: Source
    can_continue: bool | None
    spent: float = 0.0
    reserved: float = 0.0
    ttft: float | None = None
    fails: int = 0
    resting_until: float = 0.0
    refuses: EndpointError | None = None  # until it rests no more, as its Retry-After said
    fine: bool = False
    running: int = 0
    since: float = 0.0
    service: float = 0.0

    @classmethod
    def of(cls, deployment: Deployment, source: Source) -> Member:
        info = deployment.model_info
        if info.can_continue == "probe":  # a bare prompt is continued by whoever completes it
            return cls(deployment, source, True if info.api == "completions" else None)
        return cls(deployment, source, info.can_continue)

    def cost(self, prompt: int, output: int) -> float:
        prices = self.deployment.prices
        return prompt * prices.prefill + output * prices.decode

    def worst(self, request: Request, tokens: int) -> float:
        """The most that an answer to `tokens` of prompt and prefix can cost."""
        answers = request.options.get("n") or 1
        return self.cost(tokens, answers * (request.max_tokens or self.deployment.model_info.max_output_tokens))

    def started(self, now: float, worst: float) -> None:
        self.since = self.since if self.running else now
        self.running += 1
        self.reserved += worst

    def ended(self, now: float, worst: float, cost: float) -> None:
        self.service += NEWEST * (now - self.since - self.service) if self.service else now - self.since
        self.since = now
        self.running -= 1
        self.reserved -= worst
        self.spent += cost

    def free_in(self, now: float) -> float:
        """Seconds until one that serves one by one has done what it was asked."""
        return max(0.0, self.running * self.service - (now - self.since)) if self.running else 0.0

    def first_token(self, seconds: float) -> None:
        self.ttft = seconds if self.ttft is None else self.ttft + NEWEST * (seconds - self.ttft)

    def succeeded(self) -> None:
        self.fine, self.fails, self.resting_until, self.refuses = True, 0, 0.0, None

    def failed(self, error: EndpointError, settings: Settings) -> None:
        """Count a failure that is the endpoint's own; a Retry-After is obeyed at once."""
        if error.status in AT_FAULT:
            return
        self.fine, self.fails = False, self.fails + 1
        rest = settings.cooldown_time if self.fails > settings.allowed_fails else 0.0
        if error.retry_after and error.retry_after.isdecimal():
            rest = max(rest, float(error.retry_after))
            self.refuses = error
        self.resting_until = asyncio.get_running_loop().time() + rest

    def barred(self, request: Request, tokens: int, continuing: bool) -> EndpointError | None:
        """Why it may not be asked for this, or None."""
        info = self.deployment.model_info
        most = self.deployment.litellm_params.max_budget
        if request.model not in (None, ANY_MODEL, self.deployment.model_name):
            return EndpointError("serves another model")
        if request.api != info.api and (request.pinned or request.api == "completions" or info.tokenizer is None):
            why = request.pinned or (request.api == "chat" and "no tokenizer with a chat template") or "a bare prompt"
            return EndpointError(f"is asked by {info.api} only, which cannot express this request ({why})", 400)
        if continuing and not self.can_continue:
            return EndpointError("cannot continue an answer")
        if most is not None and self.spent + self.reserved + self.worst(request, tokens) > most:
            return EndpointError("its max_budget does not hold this request", 429)
        return None


class Group:
    """The deployments of one side."""

    def __init__(self, members: Sequence[Member], settings: Settings) -> None:
        self.members = members
        self._fastest = settings.routing_strategy == "latency-based-routing"

    def choose(
        self, request: Request, tokens: int, continuing: bool, tried: Mapping[Member, EndpointError], again: bool
    ) -> Member:
        """Who is asked next; again: also those that rest or failed before. Raises EndpointError where nobody may be."""
        reasons = [member.barred(request, tokens, continuing) for member in self.members]
        able = [member for member, reason in zip(self.members, reasons, strict=True) if reason is None]
        if not able:
            raise max(filter(None, reasons), key=lambda reason: reason.status or 0)
        now = asyncio.get_running_loop().time()
        if all(member.refuses and member.resting_until > now for member in able):
            raise next(member.refuses for member in able if member.refuses)
        able = [member for member in able if not (member.refuses and member.resting_until > now)]
        ready = [member for member in able if member not in tried and (again or member.resting_until <= now)]
        if not ready and again:
            ready = [it for it in able if tried[it].status not in FINAL]
        if not ready:
            raise next((tried[it] for it in able if it in tried), EndpointError("rests after failures", 503))
        if self._fastest:
            return min(ready, key=lambda member: member.ttft or 0.0)  # who was not measured is asked first
        return random.choices(ready, [member.deployment.litellm_params.weight for member in ready])[0]
