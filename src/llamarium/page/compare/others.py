"""Models beside the one that answers: built at first use, one at a time, within a bound of memory. No torch at import.

Their passes are kept within a bound of bytes, so that two models can be compared that are never in memory together.
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
"""Of a text that is compared: the logits of all tokens are there at once, of both sides."""

MAX_KEPT_BYTES = 256 * 2**20
"""Of what all of them have computed."""

_SHARE = 1 / 2  # of the memory that is free, for one model


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a comparison: the served model, or another one.

    Attributes:
        id: Its name in a request.
        title: Display name.
        words: What it is, and what a comparison with it means.
        num_bytes: Memory that building it takes; 0 for the served weights.
        build: Returns its runner.
        adapter_idx: Which of the runner's adapters is used, -1 for none.
        kv_cache_dtype: Type of its cached keys and values.
        version: Of the files it is built from, where they can change.
        vocabulary: Whose tokens it reads; "" is the served model's.
        tokenizer: Of another vocabulary than the served model's.
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
        """Return the served model's ids as this side's: of another vocabulary, the first ones of the same text."""
        if self.tokenizer is None:
            return ids
        try:
            found = tuple(self.tokenizer.encode(served.decode(ids))[:MAX_TOKENS])
            reason = "" if found else "it has no tokens of its own; expected a text with a character at least"
        except TokenizerError as error:  # whose message begins with a path that clients must not see
            found, reason = (), str(error).removeprefix(f"{self.tokenizer.source}: ")
        if reason:
            raise QuestionError(f"{self.title} cannot read the text: {reason}", code="unreadable_text", param="id")
        return found


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is kept of a pass.

    Attributes:
        ids: The text.
        names: Of `ACTIVATIONS`.
        layers: Layers to keep; None is all.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    layers: tuple[int, ...] | None = None


_Key = tuple[str, str, Wanted]  # a side's id and version, and what is kept of its pass


class Others:
    """Runs sides, from any thread, one at a time.

    Args:
        max_bytes: What one model may occupy; None is half of the memory that is free at that time.
        max_kept_bytes: What is kept of their passes.
    """

    def __init__(self, max_bytes: int | None = None, max_kept_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes, self._max_kept_bytes = max_bytes, max_kept_bytes
        self._held: tuple[Side, Runner] | None = None
        self._traces: OrderedDict[_Key, Trace] = OrderedDict()
        self._seconds, self._perplexities = dict[str, float](), dict[tuple[str, str], float | None]()
        self._working = threading.Lock()

    @property
    def max_bytes(self) -> int:
        """What one model may occupy now; the one that is held makes way."""
        if self._max_bytes is not None:
            return self._max_bytes
        held = self._held
        return round(_SHARE * (free_bytes() + (0 if held is None else held[0].num_bytes)))

    def seconds(self, side: Side) -> float | None:
        """Return what building a side took; None if it has not been built."""
        return self._seconds.get(side.id)

    def trace(self, side: Side, wanted: Wanted, *, field: str) -> "Trace":
        """Return a side's activations; `field` of the request names the side, which is built if need be."""
        from llamarium.inspect.trace import trace

        key = side.id, side.version, wanted
        with self._working:
            check_wanted()
            if key in self._traces:
                self._traces.move_to_end(key)
                return self._traces[key]
            runner = self._runner(side, field)
            check_wanted()
            found = trace(
                runner, wanted.ids, names=wanted.names, layers=wanted.layers, budget_mb=BUDGET_MB,
                adapter=side.adapter_idx, kv_cache_dtype=side.kv_cache_dtype,
            )  # fmt: skip
            self._traces[key] = found
            while len(self._traces) > 1 and sum(map(_bytes, self._traces.values())) > self._max_kept_bytes:
                self._traces.popitem(last=False)
        return found

    def perplexity(self, side: Side, tokenizer: Tokenizer, text: str, *, field: str) -> float | None:
        """Return a side's perplexity of a text, always the same one, None where it cannot read it; as `trace`."""
        from llamarium.inspect.measures.perplexity import perplexity_of_text

        key = side.id, side.version
        with self._working:
            if key not in self._perplexities:
                self._perplexities[key] = None
                with suppress(TokenizerError):  # a character that its vocabulary has not
                    found = perplexity_of_text(self._runner(side, field), tokenizer, text)
                    self._perplexities[key] = found.perplexity
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
        self._held = None  # before the next is there: never two of them
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
