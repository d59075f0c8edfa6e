"""What Prometheus reads: requests by status, answers that changed endpoint by cause, and the budget."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from ondevice_papers.disco.budgeted import Dispatcher
from ondevice_programs.router.session import RoutedRequest


class Metrics:
    """All metrics of one router, in a registry of their own."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.registry = kept = CollectorRegistry()
        self._requests = Counter("disco_requests", "Requests", ("status",), registry=kept)
        self._migrations = Counter("disco_migrations", "Answers that changed endpoint", ("cause",), registry=kept)
        self._over = Counter("disco_over_budget", "Requests answered beyond the budget", registry=kept)
        account = dispatcher.account
        share = Gauge("disco_budget_share_used", "Of all input tokens", registry=kept)
        share.set_function(lambda: account.spent / max(1.0, account.arrived))
        left = Gauge("disco_budget_tokens_left", "Neither used nor reserved", registry=kept)
        left.set_function(lambda: dispatcher.left)
        Gauge("disco_budget", "Share of input tokens allowed", registry=kept).set(dispatcher.budget)

    def request(self, session: RoutedRequest, status: int) -> None:
        """A request has ended."""
        self._requests.labels(status).inc()
        self._over.inc(session.over_budget)
        for switch in session.switches[1:]:
            self._migrations.labels("cost" if switch.role == "migration" else "failure").inc()
