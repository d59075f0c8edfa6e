"""What Prometheus reads: OpenTelemetry's names for generative AI, migrations by cause, and the budget."""

from __future__ import annotations

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_programs.router.request import ChatRequest
from ondevice_programs.router.session import Attempt, RoutedRequest

# OpenTelemetry's own bounds: seconds to a first token, seconds a token, seconds an operation, tokens.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
EACH = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LASTS = tuple(0.01 * 2**n for n in range(14))
COUNTS = tuple(float(4**n) for n in range(14))
MODEL = ("gen_ai_request_model",)
UPSTREAM = ("server_address", "gen_ai_request_model", "error_type")


class Metrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()
        histogram = partial(Histogram, registry=self.registry)
        counter = partial(Counter, registry=self.registry)
        each, kinds = "Of a start upstream", ("server_address", *MODEL, "gen_ai_token_type")
        self._first = histogram("gen_ai_server_time_to_first_token_seconds", "For the caller", MODEL, buckets=FIRST)
        self._gap = histogram("gen_ai_server_time_per_output_token_seconds", "After it", MODEL, buckets=EACH)
        self._lasted = histogram("gen_ai_client_operation_duration_seconds", each, UPSTREAM, buckets=LASTS)
        self._chunk = histogram("gen_ai_client_operation_time_to_first_chunk_seconds", each, UPSTREAM, buckets=FIRST)
        self._tokens = histogram("gen_ai_client_token_usage", each, kinds, buckets=COUNTS)
        self._requests = counter("disco_requests", "Requests", ("status",))
        self._migrations = counter("disco_migrations", "Answers that changed endpoint", ("model", "cause"))
        self._over = counter("disco_over_budget", "Requests answered beyond the budget")
        account = dispatcher.account
        share = Gauge("disco_budget_share_used", "Of all input tokens", registry=self.registry)
        share.set_function(lambda: account.spent / max(1.0, account.arrived))
        left = Gauge("disco_budget_tokens_left", "Neither used nor reserved", registry=self.registry)
        left.set_function(lambda: dispatcher.left)
        Gauge("disco_budget", "Share of input tokens allowed", registry=self.registry).set(dispatcher.budget)

    def attempt(self, attempt: Attempt) -> None:
        """A start upstream has ended."""
        where = attempt.endpoint.deployment
        at = where.litellm_params.api_base, where.model or ""
        outcome = "" if attempt.error is None else str(attempt.error.status or "connection")
        self._lasted.labels(*at, outcome).observe(attempt.progress - attempt.started)
        if attempt.ttft is not None:
            self._chunk.labels(*at, outcome).observe(attempt.ttft)
        self._tokens.labels(*at, "input").observe(attempt.usage.prompt_tokens)
        self._tokens.labels(*at, "output").observe(attempt.usage.output_tokens)

    def request(
        self, request: ChatRequest, session: RoutedRequest, status: int, ttft: float | None, seconds: float
    ) -> None:
        """A request has ended, `seconds` after it came; its first token came after `ttft`, if one did."""
        self._requests.labels(status).inc()
        self._over.inc(session.over_budget)
        if ttft is not None:
            self._first.labels(request.model).observe(ttft)
            output = session.usage()[0].output_tokens
            if output > 1:
                self._gap.labels(request.model).observe((seconds - ttft) / (output - 1))
        for switch in session.switches[1:]:
            cause = "cost" if switch.role == "migration" else "failure"
            self._migrations.labels(request.model, cause).inc()
