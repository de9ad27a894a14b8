"""An engine in a thread of its own, for callers in any other. Never torch.

Callers put commands into a queue; between two steps the engine's thread takes them, and delivers the step's events. A
caller's own function is called there, so it must be quick and must not raise.
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
from llamarium.errors import EngineStoppedError, FunctionError, GaveWayError, MemoryBudgetError
from llamarium.kernels.threads import allowed_cpus, num_threads
from llamarium.kernels.turns import Turns

if TYPE_CHECKING:
    import asyncio

MOST_WAIT_S = 0.003  # for event loops after a mixed step: docs/decisions/0045-attention-of-several-rows.md


class Reader(NamedTuple):
    """What waits for an answer in an event loop, and what is called there when something has come."""

    loop: "asyncio.AbstractEventLoop"
    wake: Callable[[], object]


Deliver = Callable[[Sequence[TokenEvent] | Exception], Reader | None]
"""Takes a step's events of one request, or the error that ends it; returns its reader if that is to be woken."""

State = Literal["ready", "draining", "stopped", "broken"]

T = TypeVar("T")


class _Command(NamedTuple):
    """What the engine's thread does between two steps, and what happens if it has broken before that."""

    execute: Callable[[], object]
    refuse: Callable[[Exception], object] = lambda _: None


class EngineThread:
    """Runs an `engine` until it is closed; other threads may use its `prepare`, and what never changes.

    `failure` is the error that broke it, if any, `snapshot` the engine after its last step, and `turns` what other work
    in this process takes turns with its steps by.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands = queue.SimpleQueue[_Command]()
        self._deliver: dict[int, Deliver] = {}
        self.failure: BaseException | None = None
        self._closing, self.turns = False, Turns()
        self.snapshot = engine.snapshot()
        self._lock = threading.Lock()  # no request is put into the queue after the last command
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
        """Begin a request and return its number; the engine's thread calls `deliver`.

        EngineStoppedError if the engine takes no more requests, errors as `Engine.prepare`.
        """
        sequences = self.engine.prepare(request)
        number = sequences[0].number

        def refuse(error: Exception) -> None:
            self._wake({number: deliver(error)})

        self._put(_Command(partial(self._begin, sequences, deliver), refuse))
        return number

    def read(self, work: Callable[[Engine], T]) -> Future[T]:
        """Let the engine's thread look at something between two steps; EngineStoppedError if it takes no more requests.

        `work` must be quick, change nothing, and return nothing that the engine goes on changing.
        """
        found = Future[T]()

        def execute() -> None:
            if found.set_running_or_notify_cancel():
                try:
                    found.set_result(work(self.engine))
                except Exception as error:  # noqa: BLE001 - the reader has failed, not the engine
                    found.set_exception(error)

        def refuse(error: Exception) -> None:
            if found.set_running_or_notify_cancel():
                found.set_exception(error)

        self._put(_Command(execute, refuse))
        return found

    def abort(self, number: int, row: int | None = None) -> None:
        """Abort a request, or one of its answers, before the next step; no further event is delivered."""
        self._commands.put(_Command(lambda: self._abort(number, row)))

    def close(self, timeout_s: float | None = None) -> bool:
        """Take no more requests, finish the live ones, and stop; return whether all were finished.

        After `timeout_s` seconds the rest end with an error; None waits as long as it takes.
        """
        with self._lock:
            self._closing = True
            self._commands.put(_Command(lambda: None))  # wakes the thread
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            return self.failure is None
        error = EngineStoppedError("the engine was closed before the answer came to its end")
        self._commands.put(_Command(lambda: self._end_all(error)))
        self._thread.join()
        return False

    def _put(self, command: _Command) -> None:
        with self._lock:
            if self.failure is not None:
                raise self._broken()
            if self._closing:
                raise EngineStoppedError("the engine is being closed and takes no more requests")
            self._commands.put(command)

    def _broken(self) -> EngineStoppedError:
        return EngineStoppedError(f"the engine has broken: {self.failure}")

    def _serve(self) -> None:
        try:
            while self._execute_commands():
                try:
                    with self.turns.step():
                        events = self.engine.step()
                except MemoryBudgetError as error:
                    self._abort_largest(error)
                except FunctionError as error:  # the pass of all of them has failed; the next one may not
                    self._end_all(error)
                else:
                    self._hand_out(events)
        except BaseException as error:  # noqa: BLE001 - whatever it was, waiting callers get it
            self._fail(error)
        self.turns.rest()
        self.engine.close()

    def _execute_commands(self) -> bool:
        """Execute the queued commands; wait for one if the engine is idle. False when all is done."""
        while True:
            self.snapshot = self.engine.snapshot()
            if self.engine.is_idle:
                self.turns.rest()
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
        for number, own in by_request.items():
            deliver = self._deliver.get(number)  # None if it was aborted after these were chosen
            if deliver is None:
                continue
            if number not in self.engine.live:
                del self._deliver[number]
            readers[number] = deliver(own)
        for number in self._wake(readers):
            self._abort(number, None)

    def _wake(self, readers: Mapping[int, Reader | None]) -> list[int]:
        """Wake each event loop that reads, once for all of its requests; return the requests of closed loops.

        That releases the GIL, so it is done once per step, after all events. After a mixed step wait for the loops if
        the kernels leave no CPU free: later they would get one only at a tick of the system, 4 ms apart.
        """
        unread, passed_on, num_woken = list[int](), threading.Semaphore(0), 0
        by_loop: dict[asyncio.AbstractEventLoop, dict[int, Callable[[], object]]] = defaultdict(dict)
        for number, reader in readers.items():
            if reader is not None:
                by_loop[reader.loop][number] = reader.wake
        for loop, calls in by_loop.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls.values(), loop, passed_on.release)
                num_woken += 1
            except RuntimeError:
                unread += calls
        if self.engine.was_mixed and self._leaves_no_cpu():
            deadline = time.monotonic() + MOST_WAIT_S
            for _ in range(num_woken):
                passed_on.acquire(timeout=max(0.0, deadline - time.monotonic()))
        return unread

    def _leaves_no_cpu(self) -> bool:
        """Return whether a step computes with the C kernels on all CPUs that this process may keep busy."""
        return self.engine.runner.reads_in_place and num_threads() >= allowed_cpus()

    def _abort_largest(self, error: MemoryBudgetError) -> None:
        """Abort the largest request if there is no memory for a step with all of them."""
        number = self.engine.abort_largest()
        if number is None:
            raise error
        message = f"there was no memory for all answers that were run, and this one was ended: {error}; ask again later"
        self._end([number], GaveWayError(message))

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
    loop.call_soon(done)  # behind what they have made ready
