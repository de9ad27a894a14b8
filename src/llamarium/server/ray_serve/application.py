"""The Ray Serve application: deployments of fronts and replicas."""

from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from llamarium.server.ray_serve.front import Front
from llamarium.server.ray_serve.options import RayOptions, options_of
from llamarium.server.ray_serve.ranking import Places
from llamarium.server.ray_serve.replica import Replica
from llamarium.server.settings import Settings

_ROUTER = "llamarium.server.ray_serve.router.ConversationRouter"
_MAX_LOADINGS = 3  # attempts to load a replica's model before the application counts as failed
_FRONT_CPUS = 0.1
_LOOK_S = 0.5  # interval between checks for running requests on shutdown
_LOGGING = {"enable_access_log": False}  # the server's own access log has more details
_ENDING_S = 5.0  # time for fronts to answer clients after the replicas have stopped


def build(args: dict[str, Any]) -> Application:
    """Return the application for `serve run`, `serve deploy` or `ray.serve.run`.

    Args:
        args: Fields of `RayOptions`.

    Raises:
        LlamariumError: If the arguments are invalid.
    """
    options = options_of(args)
    settings = options.settings()
    replicas = _replicas(options).bind(options.of_model(), options.served_names(), settings)
    return _fronts(options, settings).bind(replicas, settings)


def _replicas(options: RayOptions) -> serve.Deployment:
    """Return the deployment of replicas.

    Excess requests queue at a replica, which rejects them like the server does; they queue at a front only while there
    is no replica.
    """
    places = Places(options.max_num_seqs, options.max_queue)
    deployment = serve.deployment(
        name="Replica",
        ray_actor_options={"num_cpus": options.num_cpus, "num_gpus": options.num_gpus},
        max_ongoing_requests=places.num_taken,
        max_queued_requests=max(1, options.max_queue),
        autoscaling_config=AutoscalingConfig(
            min_replicas=options.min_replicas,
            max_replicas=options.max_replicas,
            target_ongoing_requests=options.target_ongoing_requests or options.max_num_seqs / 2,
        ),
        request_router_config={"request_router_class": _ROUTER, "request_router_kwargs": asdict(places)},
        graceful_shutdown_timeout_s=options.drain_timeout_s,
        graceful_shutdown_wait_loop_s=_LOOK_S,
        logging_config=_LOGGING,
        max_constructor_retry_count=_MAX_LOADINGS,
    )
    return deployment(Replica)


def _fronts(options: RayOptions, settings: Settings) -> serve.Deployment:
    deployment = serve.deployment(
        name="Front",
        num_replicas=options.num_fronts,
        ray_actor_options={"num_cpus": _FRONT_CPUS},
        max_ongoing_requests=settings.max_connections,
        graceful_shutdown_timeout_s=options.drain_timeout_s + _ENDING_S,
        graceful_shutdown_wait_loop_s=_LOOK_S,
        logging_config=_LOGGING,
    )
    return deployment(serve.ingress()(Front))
