"""The canary: a fixed prompt whose log-probs engine and trainer must agree on after each swap.

A checksum proves that the bytes arrived; the canary proves that the engine computes with them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from flash.errors import WeightsError
from flash.types import Canary


def canary_tokens(vocab_size: int, count: int, seed: int) -> list[int]:
    """Choose the canary's token ids: random, and the same wherever the same arguments are given.

    They are fed, never sampled, so that special tokens need no exception.
    """
    return random.Random(f"canary/{seed}").choices(range(vocab_size), k=count)


def check_canary(canary: Canary, observed: Sequence[float], *, tolerance: float, engine: int, version: int) -> float:
    """Compare an engine's log-probs with the trainer's; return the largest difference.

    Args:
        canary: the prompt and the trainer's log-probs, one per token after the first.
        observed: the engine's log-probs of the same positions.
        tolerance: largest allowed absolute difference of any position; NaN never passes.
        engine: index of the engine, for the message.
        version: the version just loaded, for the message.

    Raises:
        WeightsError: a position differs by more than the tolerance.
    """
    if len(observed) != len(canary.logprobs):
        raise WeightsError(
            f"engine {engine}, version {version}: the canary has {len(canary.logprobs)} positions, "
            f"the engine answered for {len(observed)}"
        )
    worst, worst_gap = 0, -1.0
    for position, (ours, theirs) in enumerate(zip(canary.logprobs, observed, strict=True)):
        gap = abs(ours - theirs)
        if math.isnan(gap):
            gap = math.inf
        if gap > worst_gap:
            worst, worst_gap = position, gap
    if worst_gap > tolerance:
        raise WeightsError(
            f"engine {engine}, version {version}: the canary's log-prob at position {worst + 1} "
            f"(token {canary.token_ids[worst + 1]}) is {observed[worst]:.6f} in the engine and "
            f"{canary.logprobs[worst]:.6f} in the trainer; they may differ by {tolerance:g}. "
            "The engine does not compute with the weights that were published"
        )
    return worst_gap
