"""Threads for grammars: masks are computed while the model's kernels run."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")

STACK_BYTES = 128 * 2**20
"""For llguidance's recursion over rules and schemas, whose limits were tested with it; only used parts take memory."""
_MOST_THREADS = 4  # a mask takes a tenth of a millisecond, and a pass over a batch many: a few threads keep up
_creating = threading.Lock()


def start(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread with a deep stack."""
    with _creating:  # the stack's size is one setting for all threads
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=target, name=name, daemon=True).start()
        finally:
            threading.stack_size(before)


def submit(task: Callable[[], ResultT]) -> "Future[ResultT]":
    """Run a task on one of the threads for masks."""
    future: Future[ResultT] = Future()
    _queue().put((task, future))
    return future


@cache
def _queue() -> "SimpleQueue[tuple[Callable[[], Any], Future[Any]]]":
    """Start the threads, once in a process."""
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
