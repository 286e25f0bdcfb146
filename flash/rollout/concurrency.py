"""Limit on the requests that an engine holds at once, so that its KV cache is full and seldom overflows. Pure state.

A running sequence grows by one token per step until it ends. How soon it ends is estimated from the responses so far.
The hazard of an end (its probability per token) is constant within each quarter of an octave of lengths: the number of
ends there, divided by the number of tokens generated there, also by responses that still run. This is the maximum
likelihood estimate of a piecewise constant hazard under censoring. With S(s | a) the probability that a response of a
tokens lives for s more, the tokens that the cache is expected to hold in s steps are

    U(s) = sum over running sequences of (context + s) · S(s | age),

and the variance is the sum of (context + s)² · S · (1 − S). Each further request adds (prompt + s) · S(s | 0). As many
requests may begin as keep the expectation, plus two standard deviations, within the cache at every s. If more of them
live than expected, the engine preempts its youngest sequence, which costs least, as it has the least to compute again.

If the cache is large enough for any load, an engine is given a few requests ahead, for the places that will be free
in a few steps. The proxy keeps one `ConcurrencyLimit` per engine and one `ResponseLengths` for all of them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from flash.rollout.engine import Pressure

Name = TypeVar("Name", bound=Hashable)

EDGES = np.array([0.0, *(2.0 ** (np.arange(4 * 24) / 4))])
"""Lengths in tokens between which the hazard is constant: quarters of octaves."""
_EDGES = EDGES.tolist()
DEVIATIONS = 2.0
"""Standard deviations of the expected use that stay free: the use exceeds them about once in forty times."""
AHEAD = 1 / 1024
"""Smallest number of steps s that is checked, as a share of the greatest length."""
STEP_TOKENS = 16
"""Tokens of context that an engine can compute in the time of one decoding step, at least: both read all weights."""
PRIOR = 0.5
"""Responses that every interval of lengths counts before any has ended, each with half of the greatest length as its
tokens. Thus a rate is known where no response has been."""
STEPS_AHEAD = 8
"""An engine gets requests ahead for the responses that end within this many steps. A node needs that long to replace
requests that have ended. Otherwise the engine would make these steps with few sequences, at nearly the cost of full
steps: with answers of 16 tokens that was 8 % of its work."""
MIN_ENDED = 256
"""Responses that must have ended before any request is given ahead."""


class ResponseLengths:
    """Statistics of the lengths of responses, of all engines of a node."""

    def __init__(self) -> None:
        self._ended = self._ended_tokens = 0
        """Responses that have ended, and their tokens."""
        self._ends = np.zeros(len(EDGES))
        """Ends between two edges, without those at a limit."""
        self._tokens = np.zeros(len(EDGES))
        """Tokens generated between two edges."""

    def grow(self, first: int, stop: int) -> None:
        """Note that a response has got the tokens at positions [first, stop)."""
        while first < stop:
            interval = _interval(first)
            end = stop if interval + 1 == len(_EDGES) else min(stop, math.ceil(_EDGES[interval + 1]))
            self._tokens[interval] += end - first
            first = end

    def end(self, length: int, *, limited: bool = False) -> None:
        """Note that a response has ended with `length` tokens, by itself or at its limit."""
        self._ended, self._ended_tokens = self._ended + 1, self._ended_tokens + length
        self._ends[_interval(length)] += not limited

    def ending_soon(self, running: int) -> int:
        """Return how many of `running` responses end within `STEPS_AHEAD` steps; 0 before enough have ended."""
        known = self._ended >= MIN_ENDED and self._ended_tokens
        return min(running, STEPS_AHEAD * running * self._ended // self._ended_tokens) if known else 0

    def cumulative_hazard(self, longest: int) -> NDArray[np.float64]:
        """Return the hazard of an end, summed from 0 to each of `EDGES`.

        Args:
            longest: most tokens that a response may have.
        """
        # The prior adds ends and tokens to every interval, so that a rate is known where no response has been yet.
        rates = (self._ends + PRIOR) / (self._tokens + PRIOR * longest / 2)
        return np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(EDGES))])


class ConcurrencyLimit:
    """Limit on the requests that one engine may hold, from its pressure and the lengths of responses.

    Args:
        ceiling: most requests that the engine runs at once.
        lengths: statistics of all engines of the node.
    """

    def __init__(self, ceiling: int, lengths: ResponseLengths) -> None:
        assert ceiling >= 1, "an engine runs at least one sequence"
        self._ceiling = ceiling
        self._lengths = lengths
        self._running: dict[Hashable, list[int]] = {}
        """Rows of the running responses: tokens of the prompt, tokens so far, most tokens that the response may have,
        and 1 if this engine has given any of them, else 0. Only with a 1 the engine's own count surely includes it."""
        self._seen: Pressure | None = None
        """Pressure of the last update. The engine makes a new object after each step."""
        self._worst = 0
        """Tokens of all running responses and their prompts if each becomes as long as it may."""
        self._newest = (0, 0)
        """Prompt tokens of the response that began last, and the most tokens that it may have."""
        self._limit = ceiling

    @property
    def limit(self) -> int:
        """Requests that the engine may hold; at least 1."""
        return self._limit

    def begin(self, name: Hashable, prompt: int, length: int, longest: int) -> None:
        """Note that a response begins here, or goes on.

        Args:
            name: identifies the response in later calls.
            prompt: tokens of the prompt.
            length: tokens of the response that exist already.
            longest: most tokens that the response may have.
        """
        self._running[name] = [prompt, length, longest, 0]
        self._worst += prompt + longest
        self._newest = prompt, longest

    def grow(self, name: Hashable, tokens: int) -> None:
        """Note that a response has got `tokens` more tokens."""
        prompt, length, longest, _ = self._running[name]
        self._lengths.grow(length, length + tokens)
        self._running[name] = [prompt, length + tokens, longest, 1]

    def end(self, name: Hashable, *, complete: bool) -> None:
        """Note that a response does not run here any more; `complete`: it has all its tokens."""
        prompt, length, longest, _ = self._running.pop(name)
        self._worst -= prompt + longest
        if complete:
            self._lengths.end(length, limited=length >= longest)

    def worth_moving(self, names: Sequence[Name]) -> list[Name]:
        """Return those of the running responses `names` that are worth moving to another engine.

        Each of them is expected to decode here for longer than another engine needs to compute its context again. The
        shortest context comes first; of equal ones, the last in `names`.
        """
        rows = [self._running[name] for name in names]
        prompt, age, longest, _ = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        most, context = longest.max(initial=1), prompt + age
        hazard = self._lengths.cumulative_hazard(int(most))
        later = np.minimum(np.append(EDGES[most > EDGES], most), (longest - age)[:, None])
        alive = np.exp(np.interp(age, EDGES, hazard)[:, None] - np.interp(age[:, None] + later, EDGES, hazard))
        # The integral of S(s | age) is the expected number of steps.
        worth = np.trapezoid(alive, later) * STEP_TOKENS > context
        return [names[at] for at in np.lexsort((-np.arange(len(names)), context)) if worth[at]]

    def observe(self, pressure: Pressure) -> None:
        """Update the limit. To be called when a response has begun, got its first tokens or ended."""
        running, cache = len(self._running), pressure.kv_tokens
        mean = self._worst / running if running else sum(self._newest)
        if not cache or mean * self._ceiling <= cache:
            # The cache cannot overflow.
            self._limit, self._seen = self._ceiling + self._lengths.ending_soon(self._ceiling), None
            return
        if running and pressure is self._seen:
            # No step since the last update. Responses that began or ended meanwhile take or leave room that the last
            # update has counted.
            return
        self._seen = pressure
        # The last pressure of an engine that runs nothing is about requests that are gone. A sequence that waits in
        # the engine and has no token yet has just come; if more wait than those, the others were preempted.
        new = sum(not row[3] for row in self._running.values())
        more = 0 if running and pressure.waiting > new else self._room(cache, pressure.kv_used * cache)
        self._limit = max(1, min(self._ceiling, running + more))

    def _room(self, cache: int, used: float) -> int:
        """Return how many more requests may begin, given the tokens that the cache holds and those it has in use."""
        prompt, age, longest, given = np.array([*self._running.values()], dtype=np.float64).reshape(-1, 4).T
        mean, most = (prompt.mean(), longest.max()) if len(age) else self._newest
        hazard = self._lengths.cumulative_hazard(int(most))
        steps = EDGES[(EDGES == 0) | ((most * AHEAD <= EDGES) & (most > EDGES))]
        # The engine's own count includes tokens that were not delivered yet, and counts shared blocks once. It does not
        # include responses that have just begun. The difference is spread over the responses that it includes.
        known = given > 0
        spread = (used - (prompt + age)[known].sum()) / max(1, known.sum())
        context = np.maximum(1.0, prompt + age + known * spread)[:, None]
        later = age[:, None] + steps
        alive = np.exp(np.interp(age, EDGES, hazard)[:, None] - np.interp(later, EDGES, hazard))
        alive *= later < longest[:, None]
        size = (context + steps) * alive
        taken = size.sum(axis=0) + DEVIATIONS * np.sqrt((size * (context + steps) * (1 - alive)).sum(axis=0))
        new = (mean + steps) * np.exp(-np.interp(steps, EDGES, hazard))
        return max(0, math.floor(((cache - taken) / new).min()))


def _interval(length: int) -> int:
    """Return the index of the interval of `EDGES` that a length is in."""
    return bisect_right(_EDGES, length) - 1
