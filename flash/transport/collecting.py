"""Python's cyclic garbage collector, kept from stopping the loop of a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

THRESHOLDS = (500, 3_600, 10)
"""Neither episodes nor samples leave cycles behind, but they live long enough to be looked at again and again: at
Python's own thresholds that stops a loop of 10,000 episodes for a second. What is new is looked at in small pieces,
since looking at 10,000 new objects takes 30 ms; what has survived once only after 1.8 million."""


class _Blocks:
    """Those of this process that are open, and what stood before the first of them."""

    count = 0
    thresholds = gc.get_threshold()


@contextmanager
def seldom_collected() -> Generator[None]:
    """Collect seldom inside the block, and never what was there before. Blocks may overlap: the last one ends it."""
    if _Blocks.count == 0:
        _Blocks.thresholds = gc.get_threshold()
        # What torch and vLLM have loaded stays for good: a full collection over it stops the loop for 0.3 s.
        gc.freeze()
        gc.set_threshold(*THRESHOLDS)
    _Blocks.count += 1
    try:
        yield
    finally:
        _Blocks.count -= 1
        if _Blocks.count == 0:
            gc.set_threshold(*_Blocks.thresholds)
            gc.unfreeze()
