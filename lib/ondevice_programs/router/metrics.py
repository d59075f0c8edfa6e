"""What Prometheus reads: OpenTelemetry's names for generative AI, migrations by cause, and the budget."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_programs.router.request import Request
from ondevice_programs.router.session import Attempt, Session
from ondevice_programs.router.sides import ANY_MODEL

# OpenTelemetry's own bounds: seconds to a first token, seconds a token, seconds an operation, tokens.
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
EACH = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
LASTS = tuple(0.01 * 2**n for n in range(14))
COUNTS = tuple(float(4**n) for n in range(14))
UPSTREAM = ("server_address", "gen_ai_request_model", "error_type")


class Metrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, what: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, labels, buckets=bounds, registry=self.registry)

        model = ("gen_ai_request_model",)
        self._first = histogram("gen_ai_server_time_to_first_token_seconds", "As the client saw it", model, FIRST)
        self._each = histogram("gen_ai_server_time_per_output_token_seconds", "After the first token", model, EACH)
        self._lasted = histogram("gen_ai_client_operation_duration_seconds", "Of a start upstream", UPSTREAM, LASTS)
        self._chunk = histogram(
            "gen_ai_client_operation_time_to_first_chunk_seconds", "Of a start upstream", UPSTREAM, FIRST
        )
        kinds = ("server_address", *model, "gen_ai_token_type")
        self._tokens = histogram("gen_ai_client_token_usage", "Tokens of a start upstream", kinds, COUNTS)
        self._requests = Counter("disco_requests", "Requests", ("status",), registry=self.registry)
        self._migrations = Counter(
            "disco_migrations", "Answers that changed endpoint", ("model", "cause"), registry=self.registry
        )
        account = dispatcher.account
        share = Gauge("disco_budget_share_used", "Of all input tokens", registry=self.registry)
        share.set_function(lambda: account.spent / max(1.0, account.arrived))
        left = Gauge("disco_budget_tokens_left", "Neither used nor reserved", registry=self.registry)
        left.set_function(lambda: dispatcher.left)
        Gauge("disco_budget", "Share of input tokens allowed", registry=self.registry).set(dispatcher.budget)

    def attempt(self, attempt: Attempt) -> None:
        """A start upstream has ended."""
        where = attempt.member.deployment
        at = where.litellm_params.api_base, where.model
        outcome = "" if attempt.error is None else str(attempt.error.status or "connection")
        self._lasted.labels(*at, outcome).observe(attempt.progress - attempt.started)
        if attempt.ttft is not None:
            self._chunk.labels(*at, outcome).observe(attempt.ttft)
        self._tokens.labels(*at, "input").observe(attempt.usage.prompt_tokens)
        self._tokens.labels(*at, "output").observe(attempt.usage.output_tokens)

    def request(self, request: Request, session: Session, status: int, seconds: float) -> None:
        """A request has ended, `seconds` after it came."""
        model = request.model or ANY_MODEL
        self._requests.labels(status).inc()
        if session.first_token_s is not None:
            self._first.labels(model).observe(session.first_token_s)
            output = session.usage()[0].output_tokens
            if output > 1:
                self._each.labels(model).observe((seconds - session.first_token_s) / (output - 1))
        for switch in session.switches[1:]:
            self._migrations.labels(model, "cost" if switch.role == "migration" else "failure").inc()
