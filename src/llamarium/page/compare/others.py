"""Models to compare with the served one: built on first use, one at a time, within a memory limit.

Their activations are cached up to a number of bytes, so that two models can be compared that are never in memory at the
same time. No torch at import.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamarium.errors import CheckpointError, ModelNotFoundError, QuestionError, TokenizerError, UnknownNameError
from llamarium.kernels.memory import free_bytes
from llamarium.page.passes import BUDGET_MB
from llamarium.runtime.runner import CacheDtype, Runner
from llamarium.server.lifecycle.threads import check_wanted
from llamarium.tokenizer.base import Tokenizer

if TYPE_CHECKING:
    from llamarium.inspect.trace import Trace

MAX_TOKENS = 128
"""Maximum tokens of a compared text, as the logits of all its tokens are in memory for both sides."""

MAX_KEPT_BYTES = 256 * 2**20
"""Maximum bytes of the cached activations of all models."""

_SHARE = 1 / 2  # of the free memory, for one model


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: the served model, or another one.

    Attributes:
        id: Name in requests.
        title: Display name.
        words: Description, and the meaning of a comparison with it.
        num_bytes: Memory needed to build it; 0 for the served weights.
        build: Returns its runner.
        adapter_idx: Index of the runner's adapter, -1 for none.
        kv_cache_dtype: KV cache dtype.
        version: Version of its files, if they can change.
        vocabulary: Name of its vocabulary; "" is the served model's.
        tokenizer: Its tokenizer, if its vocabulary differs from the served model's.
    """

    id: str
    title: str
    words: str
    num_bytes: int
    build: Callable[[], Runner]
    adapter_idx: int = -1
    kv_cache_dtype: CacheDtype = "auto"
    version: str = ""
    vocabulary: str = ""
    tokenizer: Tokenizer | None = None

    def read(self, ids: tuple[int, ...], served: Tokenizer) -> tuple[int, ...]:
        """Convert the served model's ids to this side's; with another vocabulary, the first ids of the same text."""
        if self.tokenizer is None:
            return ids
        try:
            ids_read = tuple(self.tokenizer.encode(served.decode(ids))[:MAX_TOKENS])
            reason = "" if ids_read else "it has no tokens of its own; expected a text with a character at least"
        except TokenizerError as error:  # whose message begins with a path that clients must not see
            ids_read, reason = (), str(error).removeprefix(f"{self.tokenizer.source}: ")
        if reason:
            raise QuestionError(f"{self.title} cannot read the text: {reason}", code="unreadable_text", param="id")
        return ids_read


@dataclass(frozen=True, slots=True)
class Wanted:
    """The activations of a pass to cache.

    Attributes:
        ids: Token ids of the text.
        names: Names in `ACTIVATIONS`.
        layers: Layers; None is all.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    layers: tuple[int, ...] | None = None


_Key = tuple[str, str, Wanted]  # a side's id and version, and the cached activations


class Others:
    """Runs sides one at a time; thread-safe.

    Args:
        max_bytes: Maximum memory of one model; None is half of the memory that is free when it is built.
        max_kept_bytes: Maximum bytes of cached activations.
    """

    def __init__(self, max_bytes: int | None = None, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes, self._max_kept_bytes = max_bytes, max_kept_bytes
        self._held: tuple[Side, Runner] | None = None
        self._traces: OrderedDict[_Key, Trace] = OrderedDict()
        self._seconds, self._perplexities = dict[str, float](), dict[tuple[str, str], float | None]()
        self._working = threading.Lock()

    @property
    def max_bytes(self) -> int:
        """Maximum memory of one model now; the model in memory counts as free, as it will be released."""
        if self._max_bytes is not None:
            return self._max_bytes
        in_memory = self._held
        return round(_SHARE * (free_bytes() + (0 if in_memory is None else in_memory[0].num_bytes)))

    def seconds(self, side: Side) -> float | None:
        """Return the seconds that building a side took; None if it has not been built."""
        return self._seconds.get(side.id)

    def trace(self, side: Side, selection: Wanted, *, field: str) -> "Trace":
        """Return a side's activations, and build the side if needed; errors are attributed to the request's `field`."""
        from llamarium.inspect.trace import trace

        key = side.id, side.version, selection
        with self._working:
            check_wanted()
            if key in self._traces:
                self._traces.move_to_end(key)
                return self._traces[key]
            runner = self._runner(side, field)
            check_wanted()
            traced = trace(
                runner, selection.ids, names=selection.names, layers=selection.layers, budget_mb=BUDGET_MB,
                adapter=side.adapter_idx, kv_cache_dtype=side.kv_cache_dtype,
            )  # fmt: skip
            self._traces[key] = traced
            while len(self._traces) > 1 and sum(map(_bytes, self._traces.values())) > self._max_kept_bytes:
                self._traces.popitem(last=False)
        return traced

    def perplexity(self, side: Side, tokenizer: Tokenizer, text: str, *, field: str) -> float | None:
        """Return a side's perplexity of a fixed text, None if it cannot encode it; other arguments as `trace`."""
        from llamarium.inspect.measures.perplexity import perplexity_of_text

        key = side.id, side.version
        with self._working:
            if key not in self._perplexities:
                self._perplexities[key] = None
                with suppress(TokenizerError):  # a character that its vocabulary lacks
                    measured = perplexity_of_text(self._runner(side, field), tokenizer, text)
                    self._perplexities[key] = measured.perplexity
            return self._perplexities[key]

    def _runner(self, side: Side, field: str) -> Runner:
        if side.num_bytes == 0:
            return side.build()
        if self._held is not None and (self._held[0].id, self._held[0].version) == (side.id, side.version):
            return self._held[1]
        most = self.max_bytes
        if side.num_bytes > most:
            message = (
                f"{side.title} takes {side.num_bytes / 1e9:.2f} GB beside the model, and {most / 1e9:.2f} GB may be "
                "taken, half of the memory that is free; choose another side, or free some memory"
            )
            raise QuestionError(message, code="side_too_large", param=field)
        self._held = None  # release it first, so that two are never in memory
        began = time.monotonic()
        try:
            runner = side.build()
        except (CheckpointError, ModelNotFoundError):  # whose message has a path that clients must not see
            message = f"{side.title} cannot be read any more; `llamarium info` on its files says why"
            raise UnknownNameError(message, code="unreadable_side", param=field) from None
        self._seconds[side.id] = time.monotonic() - began
        self._held = side, runner
        return runner


def _bytes(trace: "Trace") -> int:
    return sum(values.nbytes for values in trace.arrays.values())
