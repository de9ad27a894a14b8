"""Which replica answers: the one that a conversation belongs to, unless it has much more to do than the others.

Replicas are ranked for a conversation by a hash of both (rendezvous hashing), so all fronts agree without talking to
each other, and a replica that comes or goes takes only its own share of conversations along. The first of the ranking
is asked while it has a place, and at most `BALANCE` times its share of what is under way; else the next, and so on.
Nobody waits for a place with one replica while another has one free.

Source: Thaler and Ravishankar, "Using name-based mappings to increase hit rates" (1998), section 3; Mirrokni, Thorup
and Zadimoghaddam, "Consistent Hashing with Bounded Loads" (2016), section 1.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

BALANCE = 1.5
"""How many times its share of what is under way a replica may have, and still be asked for its conversations' sake."""

SPARE = 32
"""Requests that a replica takes besides those that it has a place for: to refuse them, and to tell its metrics."""


def ranking(conversation: str, names: Sequence[str]) -> list[str]:
    """Return the names of replicas in the order in which a conversation prefers them."""
    return sorted(names, key=lambda name: hashlib.blake2b(f"{conversation} {name}".encode(), digest_size=8).digest())


@dataclass(frozen=True, slots=True)
class Places:
    """How many requests a replica has a place for.

    Attributes:
        to_run: Side by side.
        to_wait: Besides those.
    """

    to_run: int
    to_wait: int

    @property
    def num_taken(self) -> int:
        """How many Ray lets it have."""
        return self.to_run + self.to_wait + SPARE


def by_choice(names: Sequence[str], under_way: Mapping[str, int], places: Places) -> list[list[str]]:
    """Return replicas in groups, best first; the least busy one of the first group that takes a request is to be asked.

    Args:
        names: In the order of a ranking.
        under_way: How many requests each has.
        places: Of each.
    """
    share = (sum(under_way.get(name, 0) for name in names) + 1) / len(names)
    free: list[str] = []
    for most in (places.to_run, places.to_run + places.to_wait):
        most = min(most, math.ceil(BALANCE * share))
        free = free or [name for name in names if under_way.get(name, 0) < most]
    ordered = free + [name for name in names if name not in free]
    return [group for group in (ordered[:1], ordered[1:3], ordered[3:]) if group]
