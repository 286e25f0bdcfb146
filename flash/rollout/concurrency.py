"""Limit on the requests that an engine holds at once, so that its KV cache is full and seldom overflows. Pure state.

With too few requests an engine decodes slowly. If its cache overflows, it *preempts* its youngest sequence: it frees
the cache of the sequence, and computes it again later. The proxy keeps one `ConcurrencyLimit` for each engine, and one
`ResponseLengths` for all engines of the node.

A running sequence grows by one token per step until it ends. The *hazard* of an end (its probability per token) is
constant within each interval of lengths; an interval is a quarter of an octave. The hazard is estimated as the number
of responses that ended in the interval, divided by the number of tokens generated in it. Tokens of responses that still
run count, too. This is the maximum likelihood estimate under censoring. Let S(s | a) be the probability that a response
of a tokens lives for s more tokens. After s steps the cache is expected to hold U(s) tokens:

    U(s) = sum over running sequences of (context + s) · S(s | age),

The variance is the sum of (context + s)² · S · (1 − S). Each further request adds (prompt + s) · S(s | 0). The limit is
the largest number of requests for which U plus two standard deviations stays within the cache at every s.

If the cache is large enough for any load, an engine gets a few requests more than it can run (*requests ahead*). These
replace the responses that end within a few steps.
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
"""Borders of the intervals of lengths, in tokens, within which the hazard is constant: 0 and quarters of octaves, up to
nearly 2²⁴ tokens, which is more than any response has. The last interval has no end."""
_EDGES = EDGES.tolist()
"""`EDGES` as a list, in which `bisect` is fast."""
_WIDTHS = np.diff(EDGES)
"""Width of each interval of `EDGES`, without the last one."""
_FIRST = np.ceil(EDGES)
"""First whole number in each interval of `EDGES`, or above the interval if it has none."""
_POSITIONS = np.diff(_FIRST)
"""Number of whole numbers in each interval of `EDGES`, without the last one."""
DEVIATIONS = 2.0
"""The limit keeps this many standard deviations of the expected use free. The use exceeds them about once in forty
times."""
AHEAD = 1 / 1024
"""Besides s = 0, only numbers of steps s from this share of the greatest length on are checked. In fewer steps the use
hardly changes."""
STEP_TOKENS = 16
"""Number of tokens of context that any engine can compute in the time of one decoding step. Computing the context and
decoding both read all weights, which takes most of the time."""
PRIOR = 0.5
"""Each interval begins with this number of ended responses, and with half of the greatest length as tokens per such
response. So the hazard is also known for lengths that no response has had."""
STEPS_AHEAD = 8
"""Number of decoding steps. An engine gets requests ahead for the responses that end within these steps, because a node
needs that long to replace requests that have ended. Without requests ahead the engine would make these steps with few
sequences, at nearly the cost of full steps: with answers of 16 tokens that was 8 % of its work."""
MIN_ENDED = 256
"""Number of responses that must have ended before an engine gets requests ahead, so that their mean length is known."""


class ResponseLengths:
    """Statistics of the lengths of the responses of all engines of a node."""

    def __init__(self) -> None:
        self._ended = self._ended_tokens = 0
        """Number of responses that have ended, and number of tokens of these responses."""
        self._ends = np.zeros(len(EDGES))
        """Number of ends in each interval of `EDGES`. Responses that ended at a token limit are left out: they say
        nothing about when the model ends a response."""
        self._stopped = np.zeros(len(EDGES))
        """Number of lengths in each interval of `EDGES` up to which responses have grown, minus the number of lengths
        there from which they have grown. From this follow the tokens generated in each interval."""
        self._stopped_tokens = np.zeros(len(EDGES))
        """Sum of the lengths that are counted in `_stopped`, minus the sum of those that are subtracted there."""

    def grow(self, first: int, stop: int) -> None:
        """Note that a response has got the tokens at positions [first, stop). Each counts in the interval of its
        position."""
        # Only the two lengths are noted, because this runs for every piece of every response.
        before, after = _interval(first), _interval(stop)
        if before == after:
            self._stopped_tokens[after] += stop - first
        else:
            self._stopped[before] -= 1
            self._stopped_tokens[before] -= first
            self._stopped[after] += 1
            self._stopped_tokens[after] += stop

    def end(self, length: int, *, limited: bool = False) -> None:
        """Note that a response has ended with `length` tokens: by itself, or at its token limit if `limited`."""
        self._ended, self._ended_tokens = self._ended + 1, self._ended_tokens + length
        self._ends[_interval(length)] += not limited

    def ending_soon(self, running: int) -> int:
        """Return the expected number of `running` responses that end within `STEPS_AHEAD` steps.

        The number follows from the mean length of the ended responses, and is 0 before `MIN_ENDED` have ended.
        """
        known = self._ended >= MIN_ENDED and self._ended_tokens
        return min(running, STEPS_AHEAD * running * self._ended // self._ended_tokens) if known else 0

    def cumulative_hazard(self, longest: int) -> NDArray[np.float64]:
        """Return H, the hazard of an end summed from 0 to each of `EDGES`. With it S(s | a) = exp(H(a) − H(a + s)).

        Args:
            longest: largest number of tokens that a response may have.
        """
        # A length in a later interval stands for all positions of this interval, and a length in this interval for the
        # positions before it.
        tokens = self._stopped_tokens - self._stopped * _FIRST
        tokens[:-1] += self._stopped[:0:-1].cumsum()[::-1] * _POSITIONS
        # The prior adds ends and tokens to every interval, so that the hazard is known for lengths without a response.
        rates = (self._ends + PRIOR) / (tokens + PRIOR * longest / 2)
        hazard = np.zeros(len(EDGES))
        hazard[1:] = (rates[:-1] * _WIDTHS).cumsum()
        return hazard


class ConcurrencyLimit:
    """Limit on the requests that one engine may hold, from its pressure (its load) and the lengths of responses.

    The proxy calls `begin`, `grow` and `end` for each request, and then `observe`, which computes the limit. The `name`
    of a response is a value that the proxy chooses, different for each response that runs.

    Args:
        ceiling: largest number of requests that the engine runs at once (`engine.max_sequences`).
        lengths: statistics of all engines of the node.
    """

    def __init__(self, ceiling: int, lengths: ResponseLengths) -> None:
        assert ceiling >= 1, "an engine runs at least one sequence"
        self._ceiling = ceiling
        self._lengths = lengths
        self._running: dict[Hashable, list[int]] = {}
        """Rows, one for each running response: number of tokens of the prompt, number of tokens so far, token limit,
        and 1 if this engine has given a token of it, else 0. The use of the cache that the engine reports surely
        includes a response only if the last number is 1."""
        self._seen: Pressure | None = None
        """Pressure at the last update. The engine makes a new object after each step, so the same object means that the
        engine has made no step since."""
        self._worst = 0
        """Number of tokens of all running responses and their prompts, if each response reaches its token limit."""
        self._newest = (0, 0)
        """Number of prompt tokens of the response that began last, and its token limit. The next request is expected to
        have the same sizes if the engine runs no request."""
        self._limit = ceiling

    @property
    def limit(self) -> int:
        """Number of requests that the engine may hold; at least 1."""
        return self._limit

    def begin(self, name: Hashable, prompt: int, length: int, longest: int) -> None:
        """Note that a response begins on this engine, or continues here after another engine has begun it.

        Args:
            name: identifies the response in later calls.
            prompt: number of tokens of the prompt.
            length: number of tokens of the response that exist already.
            longest: largest number of tokens that the response may have, including the `length` tokens.
        """
        self._running[name] = [prompt, length, longest, 0]
        self._worst += prompt + longest
        self._newest = prompt, longest

    def grow(self, name: Hashable, tokens: int) -> None:
        """Note that this engine has given `tokens` more tokens of a response."""
        row = self._running[name]
        self._lengths.grow(row[1], row[1] + tokens)
        row[1] += tokens
        row[3] = 1

    def end(self, name: Hashable, *, complete: bool) -> None:
        """Note that a response no longer runs on this engine. The caller calls `observe` next.

        `complete`: True if the response has ended, so that it counts in the statistics. False if it was cancelled, has
        failed, or continues on another engine.
        """
        prompt, length, longest, _ = self._running.pop(name)
        self._worst -= prompt + longest
        if complete:
            self._lengths.end(length, limited=length >= longest)

    def worth_moving(self, names: Sequence[Name]) -> list[Name]:
        """Return the running responses, out of `names`, that are worth moving to another engine.

        The proxy moves some of them to balance the load. A response is worth moving if its expected number of further
        steps is larger than the steps in which another engine computes its context again. The shortest context comes
        first; of equal contexts, the last in `names` comes first.
        """
        # One row for each response; `later`: steps s from now; `alive`: S(s | age) at these steps, whose integral is
        # the expected number of further steps.
        rows = [self._running[name] for name in names]
        prompt, age, longest, _ = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        most, context = longest.max(initial=1), prompt + age
        hazard = self._lengths.cumulative_hazard(int(most))
        later = np.minimum(np.append(EDGES[most > EDGES], most), (longest - age)[:, None])
        alive = np.exp(np.interp(age, EDGES, hazard)[:, None] - np.interp(age[:, None] + later, EDGES, hazard))
        worth = np.trapezoid(alive, later) * STEP_TOKENS > context
        return [names[at] for at in np.lexsort((-np.arange(len(names)), context)) if worth[at]]

    def observe(self, pressure: Pressure) -> None:
        """Compute the limit from the load that the engine reports.

        Call this when a response has begun, got its first tokens or ended.
        """
        running, cache = len(self._running), pressure.kv_tokens
        mean = self._worst / running if running else sum(self._newest)
        if not cache or mean * self._ceiling <= cache:
            # Even with the largest number of requests the cache cannot overflow.
            self._limit, self._seen = self._ceiling + self._lengths.ending_soon(self._ceiling), None
            return
        if running and pressure is self._seen:
            # The engine has made no step since the last update, so the reported use of the cache is old: it does not
            # yet show the responses that began or ended since then. The old limit holds until the next step.
            return
        self._seen = pressure
        # The last pressure of an engine that runs nothing is about requests that are gone, so it is ignored. A response
        # without a token of this engine may still wait inside it, because it has just come. If more requests wait, some
        # of them were preempted: the cache is full, and no further request may begin.
        new = sum(not row[3] for row in self._running.values())
        more = 0 if running and pressure.waiting > new else self._room(cache, pressure.kv_used * cache)
        self._limit = max(1, min(self._ceiling, running + more))

    def _room(self, cache: int, used: float) -> int:
        """Return how many more requests may begin, by the formula of the module's docstring.

        Args:
            cache: number of tokens that the cache can hold.
            used: number of tokens that are in use, as the engine reports.
        """
        prompt, age, longest, given = np.array([*self._running.values()], dtype=np.float64).reshape(-1, 4).T
        # `mean`: expected tokens of the prompt of a further request; `most`: greatest token limit of a response.
        mean, most = (prompt.mean(), longest.max()) if len(age) else self._newest
        hazard = self._lengths.cumulative_hazard(int(most))
        steps = EDGES[(EDGES == 0) | ((most * AHEAD <= EDGES) & (most > EDGES))]
        # `used` includes tokens that were not delivered yet, counts blocks that requests share only once, and leaves
        # out responses that have just begun. The difference between `used` and our own count is spread over the
        # responses that `used` includes.
        known = given > 0
        spread = (used - (prompt + age)[known].sum()) / max(1, known.sum())
        context = np.maximum(1.0, prompt + age + known * spread)[:, None]
        later = age[:, None] + steps
        alive = np.exp(np.interp(age, EDGES, hazard)[:, None] - np.interp(later, EDGES, hazard))
        alive *= later < longest[:, None]
        # Rows are responses, columns are steps. `size` is the expected number of tokens of a response in the cache.
        size = (context + steps) * alive
        # `taken`: tokens that the running responses need at each step, with the margin. `new`: expected tokens of a
        # further request. The step with the least room decides.
        taken = size.sum(axis=0) + DEVIATIONS * np.sqrt((size * (context + steps) * (1 - alive)).sum(axis=0))
        new = (mean + steps) * np.exp(-np.interp(steps, EDGES, hazard))
        return max(0, math.floor(((cache - taken) / new).min()))


def _interval(length: int) -> int:
    """Return the index of the interval of `EDGES` that a length, in tokens, is in."""
    return bisect_right(_EDGES, length) - 1
