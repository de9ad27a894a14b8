"""The adapters that an engine's requests may choose; they can be added and removed while it runs. Torch-free."""

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
    """An adapter that requests may choose: its index in the runner, and its files."""

    number: int
    saved: SavedAdapter


class AdapterChoices:
    """The adapters of an engine, by name.

    An index is never reused, because it is part of the prefix cache's keys. A request keeps the adapter that it started
    with. The memory of a removed adapter is freed at the next change after its last request.

    Attributes:
        served: The adapters that requests may choose.
    """

    def __init__(self, thread: EngineThread, base: Runner, saved: Mapping[str, SavedAdapter]) -> None:
        self._thread, self._base = thread, base
        self.served = {name: ServedAdapter(number, adapter) for number, (name, adapter) in enumerate(saved.items())}
        self._changing = threading.Lock()

    @contextmanager
    def number(self, name: str | None) -> Generator[int]:
        """Return an adapter's index, -1 for None; it cannot be removed within the block.

        Raises:
            UnknownNameError: If there is no adapter with this name.
        """
        if name is None:
            yield -1
            return
        with self._changing:
            if name not in self.served:
                message = (
                    f"adapter is {show_value(name)}; expected {', '.join(self.served) or 'none, as message is none'}"
                )
                raise UnknownNameError(message, param="model", code="model_not_found")
            yield self.served[name].number

    def add(self, name: str, saved: SavedAdapter, adapter: Adapter) -> None:
        """Add an adapter, or replace the one with this name."""
        with self._changing:
            kept = {other_name: served for other_name, served in self.served.items() if other_name != name}
            number = self._use(kept.values(), adapter)
            self.served = {**kept, name: ServedAdapter(number, saved)}

    def remove(self, name: str) -> None:
        """Remove an adapter; OptionError if there is none with this name."""
        with self._changing:
            check_choice("adapter", name, tuple(self.served))
            self.served = {other_name: served for other_name, served in self.served.items() if other_name != name}
            self._use(self.served.values())

    def _use(self, kept: Iterable[ServedAdapter], *more: Adapter) -> int:
        """Use the kept adapters and the new ones from the next step on; return the index of the first new one."""
        live = self._thread.read(lambda engine: {sequence.request.adapter for sequence in engine.sequences}).result()
        live |= {served.number for served in kept}
        adapters = [
            current if number in live else {}
            for number, current in enumerate(self._thread.engine.runner.adapters or ())
        ]
        self._thread.engine.runner = self._base.with_adapters([*adapters, *more])
        return len(adapters)


def head_reader(runner: Runner, number: int) -> Runner:
    """Return a runner whose `read_stream` uses the head of an adapter, given by its index (-1 for none)."""
    adapters = runner.adapters or ()
    if number < 0 or "lm_head" not in adapters[number]:
        return runner
    return runner.with_adapters(adapters, default=number)
