"""An engine in a background thread, for callers in other threads. Torch-free.

Callers put commands into a queue. Between two steps, the engine's thread executes them and delivers the step's events.
Callbacks run in that thread, so they must be fast and must not raise.
"""

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from llamarium.engine.engine import Engine
from llamarium.engine.request import EngineSequence, Request, TokenEvent
from llamarium.errors import EngineStoppedError, FunctionError, MemoryBudgetError, OverloadedError
from llamarium.kernels.step_priority import StepPriority
from llamarium.kernels.threads import allowed_cpus, num_threads

if TYPE_CHECKING:
    import asyncio

MOST_WAIT_S = 0.003
"""How long to wait for event loops after a mixed step: docs/decisions/0045-attention-of-several-rows.md."""


class Reader(NamedTuple):
    """A consumer of an answer in an event loop, and the callback that wakes it there."""

    loop: "asyncio.AbstractEventLoop"
    wake: Callable[[], object]


Deliver = Callable[[Sequence[TokenEvent] | Exception], Reader | None]
"""A callback that takes a step's events of one request, or the error that ends it, and returns the reader to wake."""

State = Literal["ready", "draining", "stopped", "broken"]

T = TypeVar("T")


class _Command(NamedTuple):
    """An action for the engine's thread between two steps, and what to do instead if the engine has failed."""

    execute: Callable[[], object]
    refuse: Callable[[Exception], object] = lambda _: None


class EngineThread:
    """Runs an engine until it is closed.

    Attributes:
        engine: The engine; other threads may only use its `prepare` and what never changes.
        failure: The error that stopped it, or None.
        snapshot: The engine's state after its last step.
        step_priority: Lets longer work in this process alternate with the engine's steps.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands = queue.SimpleQueue[_Command]()
        self._deliver: dict[int, Deliver] = {}
        self.failure: BaseException | None = None
        self._closing, self.step_priority = False, StepPriority()
        self.snapshot = engine.snapshot()
        self._lock = threading.Lock()  # so that no request enters the queue after it was closed or has failed
        self._thread = threading.Thread(target=self._serve, name="llamarium-engine", daemon=True)
        self._thread.start()

    @property
    def state(self) -> State:
        """Lifecycle state."""
        if self.failure is not None:
            return "broken"
        if not self._closing:
            return "ready"
        return "draining" if self._thread.is_alive() else "stopped"

    def submit(self, request: Request, deliver: Deliver) -> int:
        """Start a request and return its number; the engine's thread calls `deliver`.

        Raises:
            EngineStoppedError: If the engine accepts no more requests.
            LlamariumError: As `Engine.prepare`.
        """
        sequences = self.engine.prepare(request)
        number = sequences[0].number

        def refuse(error: Exception) -> None:
            self._wake({number: deliver(error)})

        self._put(_Command(partial(self._begin, sequences, deliver), refuse))
        return number

    def read(self, work: Callable[[Engine], T]) -> Future[T]:
        """Run `work` in the engine's thread between two steps and return its result as a future.

        `work` must be fast, change nothing, and return nothing that the engine changes later.

        Raises:
            EngineStoppedError: If the engine accepts no more requests.
        """
        future = Future[T]()

        def execute() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work(self.engine))
                except Exception as error:  # noqa: BLE001 - the caller's function failed, not the engine
                    future.set_exception(error)

        def refuse(error: Exception) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._put(_Command(execute, refuse))
        return future

    def abort(self, number: int, row: int | None = None) -> None:
        """Abort a request, or one of its answers, before the next step; no more events are delivered."""
        self._commands.put(_Command(lambda: self._abort(number, row)))

    def close(self, timeout_s: float | None = None) -> bool:
        """Accept no more requests, finish the live ones, and stop; return whether all were finished.

        After `timeout_s` seconds the remaining ones end with an error; None waits indefinitely.
        """
        with self._lock:
            self._closing = True
            self._commands.put(_Command(lambda: None))  # wakes the thread
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return self.failure is None
        error = EngineStoppedError("the engine was closed before the answer was finished")
        self._commands.put(_Command(lambda: self._end_all(error)))
        self._thread.join()
        return False

    def _put(self, command: _Command) -> None:
        with self._lock:
            if self.failure is not None:
                raise self._broken()
            if self._closing:
                raise EngineStoppedError("the engine is closing and accepts no more requests")
            self._commands.put(command)

    def _broken(self) -> EngineStoppedError:
        return EngineStoppedError(f"the engine has failed: {self.failure}")

    def _serve(self) -> None:
        try:
            while self._execute_commands():
                try:
                    with self.step_priority.step():
                        events = self.engine.step()
                except MemoryBudgetError as error:
                    self._abort_largest(error)
                except FunctionError as error:  # ends the requests of this step; the next step may succeed
                    self._end_all(error)
                else:
                    self._hand_out(events)
        except BaseException as error:  # noqa: BLE001 - waiting callers must get any error
            self._fail(error)
        self.step_priority.release()
        self.engine.close()

    def _execute_commands(self) -> bool:
        """Execute the queued commands, waiting for one if the engine is idle; return False when it is closed."""
        while True:
            self.snapshot = self.engine.snapshot()
            if self.engine.is_idle:
                self.step_priority.release()
            try:
                command = self._commands.get(block=self.engine.is_idle and not self._closing)
            except queue.Empty:
                return not (self._closing and self.engine.is_idle)
            command.execute()

    def _hand_out(self, events: Sequence[TokenEvent]) -> None:
        by_request = defaultdict[int, list[TokenEvent]](list)
        for event in events:
            by_request[event.request].append(event)
        readers = dict[int, Reader | None]()
        for number, request_events in by_request.items():
            deliver = self._deliver.get(number)  # None if the request was aborted after the step
            if deliver is None:
                continue
            if number not in self.engine.live:
                del self._deliver[number]
            readers[number] = deliver(request_events)
        for number in self._wake(readers):
            self._abort(number, None)

    def _wake(self, readers: Mapping[int, Reader | None]) -> list[int]:
        """Wake each reading event loop once for all of its requests; return the requests of closed loops.

        Waking a loop releases the GIL, so it is done once per step, after all events. If the kernels leave no CPU free,
        wait for the loops after a mixed step: otherwise the operating system would give them a CPU only at its next
        tick, up to 4 ms later.
        """
        unread, woken, num_woken = list[int](), threading.Semaphore(0), 0
        by_loop: dict[asyncio.AbstractEventLoop, dict[int, Callable[[], object]]] = defaultdict(dict)
        for number, reader in readers.items():
            if reader is not None:
                by_loop[reader.loop][number] = reader.wake
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls.values(), loop, woken.release)
                num_woken += 1
            except RuntimeError:
                unread += calls
        if self.engine.was_mixed and self._leaves_no_cpu():
            deadline = time.monotonic() + MOST_WAIT_S
            for _ in range(num_woken):
                woken.acquire(timeout=max(0.0, deadline - time.monotonic()))
        return unread

    def _leaves_no_cpu(self) -> bool:
        """Return whether the C kernels use all CPUs that this process may use."""
        return self.engine.runner.is_native and num_threads() >= allowed_cpus()

    def _abort_largest(self, error: MemoryBudgetError) -> None:
        """Abort the largest request after a step ran out of memory, so that the others can continue."""
        number = self.engine.abort_largest()
        if number is None:
            raise error
        message = f"this answer was ended because memory ran out for all running answers: {error}; try again later"
        self._end([number], OverloadedError(message))

    def _begin(self, sequences: list[EngineSequence], deliver: Deliver) -> None:
        self._deliver[self.engine.start(sequences)] = deliver

    def _abort(self, number: int, row: int | None) -> None:
        self.engine.abort(number, row)
        if number not in self.engine.live:
            self._deliver.pop(number, None)

    def _end_all(self, error: Exception) -> None:
        for number in self._deliver:
            self.engine.abort(number)
        self._end(list(self._deliver), error)

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self.failure = error
        while not self._commands.empty():
            self._commands.get().refuse(self._broken())
        self._end(list(self._deliver), self._broken())

    def _end(self, numbers: Iterable[int], error: Exception) -> None:
        delivers = {number: self._deliver.pop(number) for number in numbers if number in self._deliver}
        self._wake({number: deliver(error) for number, deliver in delivers.items()})


def _call_all(
    calls: Iterable[Callable[[], object]], loop: "asyncio.AbstractEventLoop", done: Callable[[], object]
) -> None:
    for call in calls:
        call()
    loop.call_soon(done)  # runs after the callbacks that these calls have scheduled
