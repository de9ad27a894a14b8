"""Chooses a replica: the one of the conversation, unless it has many more requests than the others.

Replicas are ranked for a conversation by a hash of both (rendezvous hashing), so all fronts agree by themselves,
and a new or lost replica moves only its own share of conversations. The first of the ranking is chosen while it has a
place, and at most `BALANCE` times its share of the requests under way; else the next, and so on. No request waits for a
place at one replica while another has a free one.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998), section 3; Mirrokni, Thorup
and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016), section 1.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BALANCE = 1.5
"""Up to how many times its share of requests under way a replica keeps its conversations."""

SPARE = 32
"""Requests that a replica takes beyond its places: to refuse them, and to return its metrics."""


def ranking(conversation: str, names: Sequence[str]) -> list[str]:
    """Return the names of replicas in the order of a conversation's preference."""
    return sorted(names, key=lambda name: hashlib.blake2b(f"{conversation} {name}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Places:
    """How many requests a replica can run, and how many more can wait there."""

    to_run: int
    to_wait: int

    @property
    def num_taken(self) -> int:
        """The limit for Ray."""
        return self.to_run + self.to_wait + SPARE


def by_choice(names: Sequence[str], under_way: Mapping[str, int], places: Places) -> list[list[str]]:
    """Return ranked replicas in groups, best first; Ray chooses the least busy one of the first group with a place."""
    share = (sum(under_way.get(name, 0) for name in names) + 1) / len(names)
    free: list[str] = []
    for most in (places.to_run, places.to_run + places.to_wait):
        most = min(most, math.ceil(BALANCE * share))
        free = free or [name for name in names if under_way.get(name, 0) < most]
    ordered = free + [name for name in names if name not in free]
    return [group for group in (ordered[:1], ordered[1:3], ordered[3:]) if group]
