"""Python's garbage collector, while many objects are made of which none is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """A block, or a function that this decorates, in which Python does not look for garbage in reference cycles.

    For work that is over soon and whose objects live until then: a module that is read, or a function's regions as
    they are rewritten. Python looks among the youngest objects after each 700 that were made and have not died; what
    survives a few of these makes it look through everything there is, the user's objects too, which takes 0.1 s and
    more in a process with JAX. Behind the block it goes on as it was: the objects are looked at once and not again and
    again, and most have died by then.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
