"""The adapters that an engine's requests may choose, which come and go while it runs. Never torch."""

import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from llamarium.adapters.files import SavedAdapter
from llamarium.engine.thread import EngineThread
from llamarium.errors import UnknownNameError, check_choice, show_value
from llamarium.runtime.adapter import Adapter
from llamarium.runtime.runner import Runner


class ServedAdapter(NamedTuple):
    """An adapter that requests may choose: its number, which is its place in the runner, and what was read."""

    number: int
    saved: SavedAdapter


class AdapterChoices:
    """The adapters of one engine: at first those that its runner has, under these names.

    No number is used again, as keys and values are known by it. A request keeps the one that it began with. An adapter
    that no request can use gives its memory back when the next one comes or goes.

    Attributes:
        served: Those that a request may choose now.
    """

    def __init__(self, thread: EngineThread, base: Runner, saved: Mapping[str, SavedAdapter]) -> None:
        self._thread, self._base = thread, base
        self.served = {name: ServedAdapter(number, one) for number, (name, one) in enumerate(saved.items())}
        self._changing = threading.Lock()

    @contextmanager
    def number(self, name: str | None) -> Generator[int]:
        """Return the number of an adapter, -1 for none; it is not taken away within the block. UnknownNameError."""
        if name is None:
            yield -1
            return
        with self._changing:
            if name not in self.served:
                there = f"adapter is {show_value(name)}; expected {', '.join(self.served) or 'none, as there is none'}"
                raise UnknownNameError(there, param="model", code="model_not_found")
            yield self.served[name].number

    def add(self, name: str, saved: SavedAdapter, adapter: Adapter) -> None:
        """Add one; another of this name is replaced."""
        with self._changing:
            kept = {one: served for one, served in self.served.items() if one != name}
            number = self._use(kept.values(), adapter)
            self.served = {**kept, name: ServedAdapter(number, saved)}

    def remove(self, name: str) -> None:
        """Remove one; OptionError if there is none of this name."""
        with self._changing:
            check_choice("adapter", name, tuple(self.served))
            self.served = {one: served for one, served in self.served.items() if one != name}
            self._use(self.served.values())

    def _use(self, kept: Iterable[ServedAdapter], *more: Adapter) -> int:
        """Run kept adapters and new ones from the next step on; return the first new one's number."""
        live = self._thread.read(lambda engine: {sequence.request.adapter for sequence in engine.sequences}).result()
        live |= {served.number for served in kept}
        adapters = [
            one if number in live else {} for number, one in enumerate(self._thread.engine.runner.adapters or ())
        ]
        self._thread.engine.runner = self._base.with_adapters([*adapters, *more])
        return len(adapters)


def head_reader(runner: Runner, number: int) -> Runner:
    """Return a runner whose `read_stream` has the head of one of a runner's adapters; -1 is none."""
    adapters = runner.adapters or ()
    if number < 0 or "lm_head" not in adapters[number]:
        return runner
    return runner.with_adapters(adapters, default=number)
