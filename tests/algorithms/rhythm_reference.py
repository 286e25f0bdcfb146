"""The rhythm of attention once more, from the paper's definitions: one token at a time, in Python floats.

A map is a square of attention weights: map[t][s] is the weight with which token t attends to token s. A response is the
ascending places of its tokens; a gap in them ends a turn. `algorithms.rhythm` explains WAAD, FAI, Δ, plans and anchors.
Nothing here is shared with `algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

Map = Sequence[Sequence[float]]
"""Attention map of one head, or the mean over several heads."""
WINDOW, REACH, SHIFT, LOW_DISTANCE, HIGH_CHANGE = 10, 3, 0.4, 0.5, 0.6
"""W, k, α, τ_waad and τ_Δ."""


def head_span(attention: Map, response: Sequence[int]) -> float:
    """Return the mean distance, in tokens, that the tokens of the response look back."""
    return sum(attention[t][s] * (t - s) for t in response for s in range(t + 1)) / len(response)


def mean_map(maps: Sequence[Map]) -> list[list[float]]:
    """Return the mean of the maps of several heads."""
    size = len(maps[0])
    return [[sum(one[t][s] for one in maps) / len(maps) for s in range(size)] for t in range(size)]


def waad(attention: Map, response: Sequence[int], window: int) -> list[float]:
    """Return WAAD of each token of the response: the mean of min(distance looked back, window)."""
    return [sum(attention[t][s] * min(t - s, window) for s in range(t + 1)) for t in response]


def fai(attention: Map, response: Sequence[int], nearest: int, farthest: int) -> list[float]:
    """Return FAI of each token: the mean weight that tokens of the response give it, `nearest` to `farthest` later."""
    found = []
    for s in response:
        later = [attention[t][s] for t in response if s + nearest <= t <= s + farthest]
        found.append(sum(later) / len(later) if later else 0.0)
    return found


def delta(waad_of: Sequence[float], response: Sequence[int]) -> list[float]:
    """Return Δ of each token: the change of WAAD to the next token; 0 at the end of a turn."""
    values = dict(zip(response, waad_of, strict=True))
    return [abs(values[t] - values[t + 1]) if t + 1 in values else 0.0 for t in response]


def top(signal: Sequence[float], share: float) -> set[int]:
    """Return the indices of the largest values, at most ⌈share · n⌉ of them and none that is 0.

    Of equal values, earlier ones are taken first.
    """
    order = sorted(range(len(signal)), key=lambda place: (-signal[place], place))
    return {place for place in order[: math.ceil(share * len(signal) - 1e-9)] if signal[place] > 0}


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, with linear interpolation between the two nearest values."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def gamma(options: Any, local: Map, far: Map, response: Sequence[int]) -> list[float]:
    """Return the multiplier of each token, from the mean map of the local heads and of the global heads (`far`)."""
    waad_of = waad(local, response, WINDOW)
    delta_of = delta(waad_of, response)
    extra = options.gain - 1
    if options.credit == "local":
        return [1 + extra * (place in top(delta_of, options.top)) for place in range(len(response))]
    anchors = top(fai(far, response, options.nearest, options.farthest), options.top)
    if options.credit == "global":
        return [1 + extra * (place in anchors) for place in range(len(response))]
    low, high = quantile(waad_of, LOW_DISTANCE), quantile(delta_of, HIGH_CHANGE)
    place_of = {t: place for place, t in enumerate(response)}
    dominated, plans = set[int](), set[int]()
    for place in anchors:
        t = response[place]
        before = []
        for u in range(t - 1, t - REACH - 1, -1):
            if u not in place_of:
                break  # another turn
            before.append(place_of[u])
        best = max(before, key=lambda one: delta_of[one], default=None)
        if waad_of[place] <= low and best is not None and delta_of[best] >= high and delta_of[best] > 0:
            dominated.add(place)
            plans.add(best)
    share = SHIFT
    return [
        1
        + extra * (place in anchors - dominated)
        + (1 - share) * extra * (place in dominated)
        + share * extra * (place in plans)
        for place in range(len(response))
    ]
