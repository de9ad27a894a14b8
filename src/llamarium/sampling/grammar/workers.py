"""Threads for grammars: masks are computed in the background, while the model's kernels run."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

STACK_BYTES = 128 * 2**20
"""Stack size for llguidance's recursion over rules and schemas; limits were tested with it. Only used pages take
memory."""
_MOST_THREADS = 4  # a mask takes 0.1 ms, much less than a forward pass, so a few threads suffice
_creating = threading.Lock()


def start(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread with a stack of `STACK_BYTES`."""
    with _creating:  # the stack size is a process-wide setting
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=target, name=name, daemon=True).start()
        finally:
            threading.stack_size(before)


def submit(task: Callable[[], ResultT]) -> "Future[ResultT]":
    """Run a task in one of the threads for masks."""
    future: Future[ResultT] = Future()
    _queue().put((task, future))
    return future


@cache
def _queue() -> "SimpleQueue[tuple[Callable[[], Any], Future[Any]]]":
    """Start the threads, once per process, and return their queue."""
    queue: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
    for _ in range(min(_MOST_THREADS, max(1, (os.cpu_count() or 2) // 2))):
        start(lambda: _serve(queue), "llamarium-grammar")
    return queue


def _serve(queue: "SimpleQueue[tuple[Callable[[], Any], Future[Any]]]") -> None:
    while True:
        run(*queue.get())


def run(task: Callable[[], ResultT], future: "Future[ResultT]") -> None:
    """Run a task, and set its result or error in a future."""
    try:
        future.set_result(task())
    except BaseException as error:  # noqa: BLE001 - raised where the result is read
        future.set_exception(error)
