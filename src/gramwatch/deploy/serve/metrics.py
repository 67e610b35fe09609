"""The metrics of the service for Prometheus, at `/metrics`."""

import time
from collections.abc import Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gramwatch.deploy.serve.judge import Verdict
from gramwatch.stream.monitor import Monitor

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The counters of one service."""

    def __init__(self, monitor: Monitor | None) -> None:
        self.registry = CollectorRegistry()
        new: dict[str, Any] = {"registry": self.registry}
        self.seconds = Histogram("gramwatch_request_seconds", "Latency of requests.", ["route"], **new)
        self.requests = Counter("gramwatch_requests", "Requests.", ["route", "status"], **new)
        self.images = Counter("gramwatch_images", "Images that were judged.", **new)
        self.flagged = Counter("gramwatch_flagged", "Images that were flagged.", **new)
        self.reasons = Counter("gramwatch_reasons", "Flagged images whose reasons were given.", **new)
        self.batches = Histogram("gramwatch_batch_images", "Images per batch.", buckets=SIZES, **new)
        self.waiting = Gauge("gramwatch_waiting_images", "Places taken by images not yet judged.", **new)
        self.failed_saves = Counter("gramwatch_monitor_failed_saves", "States that were not saved.", **new)
        self.share = Gauge("gramwatch_flagged_share", "Share of flagged images since the start.", **new)
        self._seen = self._unusual = 0
        if monitor is not None:
            self._watch(monitor)

    def _watch(self, monitor: Monitor) -> None:
        values = {
            "alarm": ("1 if the stream has changed.", lambda: float(monitor.alarm)),
            "strength": ("The evidence of a change.", lambda: monitor.strength),
            "alarm_strength": (
                "The evidence that raises the alarm.",
                lambda: monitor.mean_time_to_false_alarm,
            ),
            "images": ("Images that the monitor has seen.", lambda: float(monitor.seen)),
        }
        for name, (about, value) in values.items():
            Gauge(f"gramwatch_monitor_{name}", about, registry=self.registry).set_function(value)

    def count(self, verdicts: Sequence[Verdict]) -> None:
        """Count the verdicts of a batch."""
        flagged = sum(verdict["is_ood"] for verdict in verdicts)
        self._seen += len(verdicts)
        self._unusual += flagged
        self.share.set(self._unusual / self._seen)
        self.batches.observe(len(verdicts))
        self.images.inc(len(verdicts))
        self.flagged.inc(flagged)
        self.reasons.inc(sum(verdict.get("reasons") is not None for verdict in verdicts))

    def text(self) -> bytes:
        """All of it, in Prometheus' format."""
        return generate_latest(self.registry)


class Timed:
    """Middleware that counts requests and measures their latency, by route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, start = "none", time.perf_counter()

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(route, status).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - start)
