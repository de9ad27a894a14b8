"""Prometheus metrics, with vLLM's names after the prefix `llamarium:`."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from llamarium.engine.tiers.disk_tier import DiskUse
from llamarium.generation.completion import Piece
from llamarium.server.lifecycle.service import Service

_FIRST_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_BETWEEN_S = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_WHOLE_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class Metrics:
    """The metrics of `/metrics`; requests to an adapter have its name as label `model_name`."""

    def __init__(self, service: Service, model_name: str) -> None:
        registry = self._registry = CollectorRegistry()
        self._model_name, label = model_name, ["model_name"]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"llamarium:{name}", text, label, registry=registry, buckets=buckets)

        self._first = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_S)
        self._between = histogram("inter_token_latency_seconds", "Time between two tokens.", _BETWEEN_S)
        self._whole = histogram("e2e_request_latency_seconds", "End-to-end latency of a request.", _WHOLE_S)

        def counter(name: str, text: str, reason: str) -> Counter:
            return Counter(f"llamarium:{name}", text, [*label, reason], registry=registry)

        self._success = counter("request_success", "Completed answers.", "finished_reason")
        self._aborted = counter("request_aborted", "Requests that were aborted or failed.", "reason")
        registry.register(_EngineCollector(service, model_name))
        self._of = dict[str | None, RequestMetrics]()
        self.of(None)  # exported before the first request

    def of(self, adapter: str | None) -> "RequestMetrics":
        """Return the metrics of an adapter's requests; None is the model without adapter."""
        if adapter not in self._of:
            name = adapter or self._model_name
            histograms = (self._first.labels(name), self._between.labels(name), self._whole.labels(name))
            self._of[adapter] = RequestMetrics(name, *histograms, self._success, self._aborted)
        return self._of[adapter]

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """The metrics of requests to one model name: TTFT, inter-token and end-to-end latency, and counts."""

    name: str
    first: Histogram
    between: Histogram
    whole: Histogram
    num_finished: Counter
    num_aborted: Counter

    def finished(self, reason: str) -> None:
        """Count a completed answer."""
        self.num_finished.labels(self.name, reason).inc()

    def aborted(self, reason: str) -> None:
        """Count a request that was aborted or failed."""
        self.num_aborted.labels(self.name, reason).inc()


@dataclass(slots=True)
class Timer:
    """Measures the token latencies of one request.

    Attributes:
        metrics: Receives the measurements.
        began: Start of the request on the monotonic clock, in seconds.
    """

    metrics: RequestMetrics
    began: float
    _last: float = 0.0

    def step(self, pieces: Sequence[Piece]) -> None:
        """Record the arrival of a step's tokens, and count the answers that end with it."""
        now = time.monotonic()
        if self._last:
            self.metrics.between.observe(now - self._last)
        else:
            self.metrics.first.observe(now - self.began)
        self._last = now
        for piece in pieces:
            if piece.finish_reason is not None:
                self.metrics.finished(piece.finish_reason)

    def end(self) -> None:
        """Record the end-to-end latency."""
        self.metrics.whole.observe(time.monotonic() - self.began)


class _EngineCollector:
    """Collects the engine's state after its last step, on each request for metrics."""

    def __init__(self, service: Service, model_name: str) -> None:
        self._service, self._label = service, model_name

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics, once it is loaded."""
        if self._service.loaded is None:
            return
        engine = self._service.loaded[1]
        snapshot, disk = engine.snapshot, engine.disk_use or DiskUse(0, 0, 0, 0)
        num_kept = 0 if engine.proposer is None else engine.proposer.num_pool_tokens
        counts, share = snapshot.counts, snapshot.used_blocks / snapshot.num_blocks
        gauges = (
            ("num_requests_running", "Running sequences.", snapshot.running),
            ("num_requests_waiting", "Waiting sequences.", snapshot.waiting),
            ("kv_cache_usage_perc", "Share of KV cache blocks in use.", share),
            ("prefix_cache_disk_bytes", "Size of the prefix cache on disk, in bytes.", disk.num_bytes),
            ("spec_decode_ngram_pool_tokens", "Tokens kept for n-gram drafts.", num_kept),
        )
        counters = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", counts.sought_tokens),
            ("prefix_cache_hits", "Prompt tokens read from the prefix cache.", counts.cached_tokens),
            ("prompt_tokens", "Prompt tokens.", counts.prompt_tokens),
            ("generation_tokens", "Generated tokens.", counts.generated_tokens),
            ("model_pass_seconds", "Seconds spent in forward passes.", counts.pass_s),
            ("spec_decode_num_draft_tokens", "Draft tokens that were verified.", counts.drafted_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", counts.accepted_tokens),
            ("num_preemptions", "Preemptions of sequences.", counts.preempted),
            ("prefix_cache_disk_hits", "Prompt tokens read from the prefix cache on disk.", counts.disk_tokens),
            ("prefix_cache_disk_written_blocks", "KV cache blocks written to disk.", disk.num_written),
            ("prefix_cache_disk_dropped_blocks", "KV cache blocks not written to disk.", disk.num_dropped),
        )
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in rows:
                metric = family(f"llamarium:{name}", text, labels=["model_name"])
                metric.add_metric([self._label], value)
                yield metric
        yield self._prefixes()

    def _prefixes(self) -> Metric:
        text = "Prompts by API key, reason why they were not fully cached, and the field that differs."
        labels = ["model_name", "key", "reason", "field"]
        metric = CounterMetricFamily("llamarium:prefix_cache_prompts", text, labels=labels)
        for names, count in self._service.explainer.counts.items():
            metric.add_metric([self._label, *names], count)
        return metric
