"""Chooses a replica: the conversation's own, unless it has many more requests than the others.

For each conversation, replicas are ranked by a hash of both (rendezvous hashing), so that all fronts agree without
communication, and a new or lost replica moves only its own share of conversations. The first replica in the ranking is
chosen that has a free place and at most `BALANCE` times its share of the requests in flight. No request waits at one
replica while another one has a free place.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998), section 3; Mirrokni, Thorup
and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016), section 1.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BALANCE = 1.5
"""Maximum load of a replica for keeping its conversations, relative to the mean number of requests in flight."""

SPARE = 32
"""Requests that a replica accepts beyond its places, to reject them itself and to return its metrics."""


def ranking(conversation: str, names: Sequence[str]) -> list[str]:
    """Return the names of replicas, best first for a conversation."""
    return sorted(names, key=lambda name: hashlib.blake2b(f"{conversation} {name}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Places:
    """The number of requests that a replica can run, and of those that can wait there."""

    to_run: int
    to_wait: int

    @property
    def num_taken(self) -> int:
        """Maximum number of requests that Ray sends to a replica."""
        return self.to_run + self.to_wait + SPARE


def by_choice(names: Sequence[str], under_way: Mapping[str, int], places: Places) -> list[list[str]]:
    """Return replicas in groups, best first; Ray chooses the least busy replica of the first group with a free place.

    Args:
        names: Names of the replicas, ranked.
        under_way: Number of requests in flight by replica.
        places: Places of each replica.
    """
    share = (sum(under_way.get(name, 0) for name in names) + 1) / len(names)
    free: list[str] = []
    for limit in (places.to_run, places.to_run + places.to_wait):
        limit = min(limit, math.ceil(BALANCE * share))
        free = free or [name for name in names if under_way.get(name, 0) < limit]
    ordered = free + [name for name in names if name not in free]
    return [group for group in (ordered[:1], ordered[1:3], ordered[3:]) if group]
