"""How many requests an engine may hold at once, so that its KV cache is full and seldom overflows. Pure state.

What runs grows by a token a step each, until it ends. How soon that is, is learned from the responses so far: the
hazard of an end, per token, within a quarter of an octave of lengths is the ends there over the tokens generated there,
by those that still run too (the maximum of the likelihood of piecewise constant hazards under censoring). With
S(s | a) the probability that a response of a tokens outlives s more, the cache is expected to hold in s steps

    U(s) = sum over what runs of (context + s) · S(s | age),

with a variance of the sum of (context + s)² · S · (1 - S). Each request more adds (prompt + s) · S(s | 0). As many may
begin as keep the expectation, and two standard deviations, within the cache at every s. Where more of them live than
that, the engine puts its youngest back, which costs least, as it has the least to compute again.

Where the cache does not matter, an engine is given in advance what takes the places that are free in a few steps.
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
"""Lengths between which the hazard is constant, in tokens: quarters of octaves."""
_EDGES = EDGES.tolist()
DEVIATIONS = 2.0
"""Of the expected use, that are kept free: once in forty times more is used."""
AHEAD = 1 / 1024
"""The least s that is looked at, as a share of the greatest length."""
STEP_TOKENS = 16
"""Tokens of context that an engine computes in the time of a decoding step, at the least: both read all weights."""
PRIOR = 0.5
"""Responses that count as seen before the first one, of half the greatest length each, between any two edges."""
STEPS_AHEAD = 8
"""Steps for whose ends an engine is given what comes next: while a node replaces what has ended it would make as many
with few sequences, each of which costs much of a full one. With answers of 16 tokens that was 8 % of its work."""
KNOWN = 256
"""Responses that must have come to their end before anything is given in advance."""


class ResponseLengths:
    """What is known of how long responses become, of all engines of a node."""

    def __init__(self) -> None:
        self._whole = self._whole_tokens = 0
        self._ends = np.zeros(len(EDGES))
        self._tokens = np.zeros(len(EDGES))

    def grew(self, first: int, last: int) -> None:
        """A response has got its tokens from `first` on, before `last`."""
        while first < last:
            place = _place(first)
            stop = last if place + 1 == len(_EDGES) else min(last, math.ceil(_EDGES[place + 1]))
            self._tokens[place] += stop - first
            first = stop

    def ended(self, length: int, *, limited: bool = False) -> None:
        """One has ended with so many tokens, by itself or at its limit."""
        self._whole, self._whole_tokens = self._whole + 1, self._whole_tokens + length
        self._ends[_place(length)] += not limited

    def soon(self, running: int) -> int:
        """How many of so many that run end within `STEPS_AHEAD`."""
        known = self._whole >= KNOWN and self._whole_tokens
        return min(running, STEPS_AHEAD * running * self._whole // self._whole_tokens) if known else 0

    def hazard(self, longest: int) -> NDArray[np.float64]:
        """Of an end until each of `EDGES`, in sum, where a response has at most `longest` tokens."""
        rates = (self._ends + PRIOR) / (self._tokens + PRIOR * longest / 2)
        return np.concatenate([[0.0], np.cumsum(rates[:-1] * np.diff(EDGES))])


class ConcurrencyLimit:
    """The limit of one engine: at least 1. It runs at most `ceiling`, which is the limit until the first one begins."""

    def __init__(self, ceiling: int, lengths: ResponseLengths) -> None:
        assert ceiling >= 1, "an engine runs at least one sequence"
        self._ceiling = ceiling
        self._lengths = lengths
        self._running: dict[Hashable, list[int]] = {}
        """Of each response that runs, the tokens before it, its own, how many these may become, and whether the engine
        has given any: only then it surely counts in the engine's own use."""
        self._seen: Pressure | None = None
        """What was last taken note of: an engine tells a new one after each step."""
        self._worst = 0
        """Tokens of all of them together if each becomes as long as it may."""
        self._newest = (0, 0)
        """Tokens before the last response that has begun, and how many its own may become."""
        self._limit = ceiling

    @property
    def limit(self) -> int:
        """Requests that the engine may hold."""
        return self._limit

    def begins(self, name: Hashable, prompt: int, done: int, longest: int) -> None:
        """A response of at most `longest` tokens, of which it has `done`, goes on after its prompt."""
        self._running[name] = [prompt, done, longest, 0]
        self._worst += prompt + longest
        self._newest = prompt, longest

    def grows(self, name: Hashable, tokens: int) -> None:
        """It has got so many more."""
        row = self._running[name]
        self._lengths.grew(row[1], row[1] + tokens)
        row[1] += tokens
        row[3] = 1

    def ends(self, name: Hashable, *, whole: bool) -> None:
        """It runs here no more; `whole`: it has come to its end."""
        prompt, length, longest, _ = self._running.pop(name)
        self._worst -= prompt + longest
        if whole:
            self._lengths.ended(length, limited=length >= longest)

    def worth_moving(self, names: Sequence[Name]) -> list[Name]:
        """Those that are expected to decode here for longer than another engine would compute their contexts again, the
        shortest first, of equal ones the last."""
        rows = [self._running[name] for name in names]
        prompt, age, longest, _ = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        most, context = longest.max(initial=1), prompt + age
        hazard = self._lengths.hazard(int(most))
        later = np.minimum(np.append(EDGES[most > EDGES], most), (longest - age)[:, None])
        alive = np.exp(np.interp(age, EDGES, hazard)[:, None] - np.interp(age[:, None] + later, EDGES, hazard))
        worth = np.trapezoid(alive, later) * STEP_TOKENS > context
        return [names[at] for at in np.lexsort((-np.arange(len(names)), context)) if worth[at]]

    def observe(self, pressure: Pressure) -> None:
        """Take note of how full the engine is, once a response has begun."""
        running, cache = len(self._running), pressure.kv_tokens
        mean = self._worst / running if running else sum(self._newest)
        if not cache or mean * self._ceiling <= cache:
            self._limit, self._seen = self._ceiling + self._lengths.soon(self._ceiling), None
            return
        if running and pressure is self._seen:
            return  # no step since: who has begun or ended meanwhile takes or leaves room that is counted
        self._seen = pressure
        # What an engine that runs nothing has last told is of requests that are gone. Who waits there and has no token
        # yet has just come, and is counted; others were put back.
        come = sum(not row[3] for row in self._running.values())
        more = 0 if running and pressure.waiting > come else self._room(cache, pressure.kv_used * cache)
        self._limit = max(1, min(self._ceiling, running + more))

    def _room(self, cache: int, used: float) -> int:
        """How many more may begin."""
        prompt, age, longest, given = np.array([*self._running.values()], dtype=np.float64).reshape(-1, 4).T
        mean, most = (prompt.mean(), longest.max()) if len(age) else self._newest
        hazard = self._lengths.hazard(int(most))
        steps = EDGES[(EDGES == 0) | ((most * AHEAD <= EDGES) & (most > EDGES))]
        # The engine's own count knows what has not been delivered yet, and what several share; not who has just begun.
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


def _place(length: int) -> int:
    """Between which of `EDGES` a length is."""
    return bisect_right(_EDGES, length) - 1
