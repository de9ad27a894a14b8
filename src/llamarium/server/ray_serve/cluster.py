"""Health and metrics of all replicas."""

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus
from starlette.responses import PlainTextResponse, Response

from llamarium.server.errors import ApiError
from llamarium.server.ray_serve.forward import Forwarded

_HEALTH_S = 1.0  # how long the replicas' state is cached
_ASKING_S = 5.0  # timeout for the replicas' metrics
_FAILED = (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)


class Cluster:
    """The replicas of an application."""

    def __init__(self, replicas: DeploymentHandle[Any]) -> None:
        self._replicas = replicas
        self._health: dict[str, object] = {"status": "loading"}
        self._seen_s = 0.0
        self._lock = asyncio.Lock()

    async def health(self) -> dict[str, object]:
        """Return the body of `/health`: `ready` if a replica is running, else `loading` or `broken`."""
        async with self._lock:
            if time.monotonic() - self._seen_s > _HEALTH_S:
                self._health = await asyncio.to_thread(self._look)
                self._seen_s = time.monotonic()
        return self._health

    def _look(self) -> dict[str, object]:
        app = serve.status().applications[self._replicas.app_name]
        states = app.deployments[self._replicas.deployment_name].replica_states
        running = sum(count for state, count in states.items() if state == "RUNNING")
        status = "ready" if running else "broken" if app.status in _FAILED else "loading"
        return {"status": status, "replicas": running}

    async def metrics(self, scope: dict[str, Any]) -> Response:
        """Return the metrics of all replicas, each sample with the label `replica`."""
        responses = self._replicas.broadcast("metrics", Forwarded(scope))
        try:
            by_replica = await responses.results_async(timeout_s=_ASKING_S)
        except (TimeoutError, RayServeException):
            raise ApiError(503, "not all replicas report their metrics", code="unavailable") from None
        text = generate_latest(_Merged(dict(by_replica)))  # pyright: ignore[reportArgumentType] - what it calls is collect()
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")


class _Merged:
    """The merged metrics of all replicas; `texts` are their metrics as text, by name of the replica."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterable[Metric]:
        """Return each metric once, with the samples of all replicas."""
        families: dict[str, Metric] = {}
        for replica, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text):
                merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                for sample in family.samples:
                    merged.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        return families.values()
