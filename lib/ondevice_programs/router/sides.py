"""One side's endpoint: whether it may be asked, when it rests after failures, and what it may still cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass

from ondevice_programs.router.config import Deployment, Settings
from ondevice_programs.router.endpoints import EndpointClient, EndpointError
from ondevice_programs.router.request import ChatRequest

AT_FAULT = {400, 404, 413, 415, 422}  # of these statuses the request is the cause, not the endpoint
FINAL = AT_FAULT | {401, 403, 501}  # asking the same endpoint again cannot help


@dataclass(eq=False)
class Endpoint:
    """The endpoint of one side as it fares. fine: its last request succeeded.

    spent, reserved: money; spent is of the period of max_budget that ends at `renewed_at`.

    can_continue: None until it has been probed.
    """

    deployment: Deployment
    source: EndpointClient
    can_continue: bool | None
    spent: float = 0.0
    reserved: float = 0.0
    renewed_at: float | None = None  # seconds since 1970
    fails: int = 0
    resting_until: float = 0.0
    refuses: EndpointError | None = None  # until it rests no more, as its Retry-After said
    fine: bool = False

    def cost(self, prompt: int, output: int) -> float:
        """Of so many tokens."""
        prices = self.deployment.prices
        return prompt * prices.prefill + output * prices.decode

    def worst(self, request: ChatRequest, tokens: int) -> float:
        """The most that an answer to `tokens` of prompt and prefix can cost."""
        longest = request.max_tokens or self.deployment.model_info.max_output_tokens
        return self.cost(tokens, request.answers * longest)

    def limits(self, request: ChatRequest) -> Mapping[str, int]:
        """What bounds the answer's tokens: the request's own limits, else what `max_budget` counts on."""
        if request.limits or self.deployment.litellm_params.max_budget is None:
            return request.limits
        return {"max_tokens": self.deployment.model_info.max_output_tokens}

    def started(self, worst: float) -> None:
        """A request went there, which costs `worst` at most."""
        self.reserved += worst

    def ended(self, worst: float, cost: float) -> None:
        """It is over and has cost so much."""
        self.reserved -= worst
        self.spent += cost

    def succeeded(self) -> None:
        """It rests no more."""
        self.fine, self.fails, self.resting_until, self.refuses = True, 0, 0.0, None

    def failed(self, error: EndpointError, settings: Settings) -> None:
        """Count a failure that is the endpoint's own; a Retry-After is obeyed at once."""
        if error.status in AT_FAULT:
            return
        self.fine, self.fails = False, self.fails + 1
        rest = settings.cooldown_time if self.fails > settings.allowed_fails else 0.0
        if error.retry_after:
            rest = max(rest, error.retry_after)
            self.refuses = error
        self.resting_until = asyncio.get_running_loop().time() + rest

    def refusal(
        self, request: ChatRequest, tokens: int, continuing: bool, failure: EndpointError | None, retrying: bool
    ) -> EndpointError | None:
        """Why it is not asked for this, or None. failure: how it failed. retrying: though it did, or rests."""
        most = self.deployment.litellm_params.max_budget
        if continuing and not self.can_continue:
            return EndpointError("cannot continue an answer")
        if most is not None:
            self._renew()
            if self.spent + self.reserved + self.worst(request, tokens) > most:
                return EndpointError("its max_budget does not hold this request", 429)
        rests = self.resting_until > asyncio.get_running_loop().time()
        if self.refuses and rests:
            return self.refuses
        if failure is not None:
            return None if retrying and failure.status not in FINAL else failure
        return EndpointError("rests after failures", 503) if rests and not retrying else None

    def _renew(self) -> None:
        """Begin a new period of max_budget where the old one is over."""
        lasts = self.deployment.litellm_params.budget_duration
        if lasts is not None and (self.renewed_at is None or time.time() >= self.renewed_at):
            self.spent = 0.0 if self.renewed_at is not None else self.spent
            self.renewed_at = time.time() + lasts
