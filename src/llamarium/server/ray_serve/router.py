"""The request router of fronts, which applies the rules of `ranking.py`."""

import random
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from llamarium.server.ray_serve.forward import Forwarded
from llamarium.server.ray_serve.ranking import Places, by_choice, ranking


class ConversationRouter(RequestRouter):
    """Routes a conversation to its replica, and other requests to the less busy of two random replicas."""

    _places: Places

    def initialize_state(self, *, to_run: int, to_wait: int) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Set the number of places of each replica."""
        self._places = Places(to_run, to_wait)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas in groups; Ray chooses the least busy replica of the first group that is not full."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all replicas are full
        forwarded = _asked(pending_request)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        replicas = {name: replica for name, replica in replicas.items() if name not in forwarded.full} or replicas
        if not replicas:
            return []
        names = list(replicas)
        if forwarded.conversation is None:
            random.shuffle(names)
            return [[replicas[name] for name in group] for group in (names[:2], names[2:]) if group]
        under_way = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0 for name, replica in replicas.items()
        }
        groups = by_choice(ranking(forwarded.conversation, names), under_way, self._places)
        return [[replicas[name] for name in group] for group in groups]


def _asked(pending: PendingRequest | None) -> Forwarded:
    """Return the forwarded request of a call; calls for other purposes get an empty one."""
    forwarded: Any = pending.args[0] if pending is not None and pending.args else None
    return forwarded if isinstance(forwarded, Forwarded) else Forwarded({})
