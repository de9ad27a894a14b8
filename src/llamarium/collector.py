"""Pausing the garbage collector while many objects are made that stay."""

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def collector_paused(*, freeze: bool = False) -> Generator[None]:
    """Collect no garbage in the body; `freeze` also leaves what is there at its end out of later collections.

    An import of torch makes a quarter of a million objects, Llama 3's tokenizer.json half a million. The collector
    would look through them again and again, a tenth of the time, and find few to free.
    """
    if not gc.isenabled():
        yield
        return

    gc.disable()
    try:
        yield
    finally:
        if freeze:
            gc.freeze()
        gc.enable()
