"""Parts of a simulated engine: the time of its steps, its sequences, and its prefix cache.

This module has no timers; only `flash.simulate.engine` uses it. A version is the number of the policy's weights with
which a token was sampled. A swap is the change to another version. A sequence joins when the engine begins to decode
it. Steps are counted from the engine's start; times are seconds of the loop's clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from flash.rollout.engine import ResponseRequest
from flash.simulate.workload import episode_of
from flash.types import VersionRun, append_versions


class VersionStart(NamedTuple):
    """Swap of an engine: tokens from `step` on have `version`, until the next swap."""

    step: int
    """Number of steps that the engine had done at the swap."""
    version: int


class Stretch(msgspec.Struct, frozen=True):
    """Successive steps during which the same sequences run, so that a formula gives their times.

    The engine makes a stretch when it starts steps, and sets one timer for all steps up to the next event.
    """

    start: float
    """Time at which the first step began."""
    prefill_s: float
    """Additional seconds of the first step, for prefill."""
    step_s: float
    """Seconds of the first step without prefill."""
    growth_s: float
    """Seconds by which each step is longer than the step before, because the context grows."""

    def end_of(self, steps: int) -> float:
        """Return the time at which the first `steps` steps are over."""
        if steps == 0:
            return self.start
        return self.start + self.prefill_s + steps * self.step_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_over(self, now: float, most: int) -> int:
        """Return the number of steps that are over at time `now`, at most `most`.

        The engine calls this when it is asked or disturbed in the middle of a stretch. It is the inverse of `end_of`.
        """
        if most == 0 or self.end_of(1) > now:
            return 0
        if self.step_s == 0:  # Then `growth_s` is 0 too: all steps are over at once.
            return most
        elapsed = now - self.start - self.prefill_s
        # Positive root of growth/2·k² + (step − growth/2)·k = elapsed, in the form without cancellation.
        half = self.step_s - self.growth_s / 2
        root = 2 * elapsed / (half + math.sqrt(half * half + 2 * self.growth_s * elapsed))
        # The root is rounded, so the number may be wrong by one or so.
        steps = min(int(root), most)
        while steps < most and self.end_of(steps + 1) <= now:
            steps += 1
        while steps > 0 and self.end_of(steps) > now:
            steps -= 1
        return steps


class SimSequence:
    """A request in a simulated engine, and the progress of its response.

    `SimEngine.generate` makes one when a request arrives. Only the engine changes it. Counts of tokens are of the
    tokens that this engine samples, without those that earlier engines have sampled (`request.generated`).

    Args:
        request: the request, with its prompt and its key.
        length: tokens that the response will have.
        finish: reason why the response ends.
        version: version of the engine at the arrival of the request.
    """

    def __init__(self, request: ResponseRequest, length: int, finish: Literal["stop", "length"], version: int) -> None:
        self.request = request
        self.prompt = len(request.prompt)
        """Tokens of the prompt, including `request.generated`."""
        self.length = length
        self.finish: Literal["stop", "length"] = finish
        """Reason why the response ends. `length`: its request allows no more tokens. `stop`: it ends by itself."""
        self.cache_version = version
        """Version of the cached contexts that the sequence may use: at first the version at the request's arrival. A
        swap that computes the cache again raises it. vLLM has the same rule (`cache_salt`)."""
        self.sampled = 0
        """Tokens that were sampled before the sequence joined for the last time."""
        self.joined = -1
        """Step count at which the sequence joined; −1 while it waits."""
        self.runs: list[VersionRun] = []
        """Versions of the tokens before step `versions_until`, run-length encoded."""
        self.versions_until = 0
        """Step count up to which `runs` is complete."""
        self.streamed = 0
        """Tokens that `generate` has delivered in a `Progress`."""
        self.ended = False
        """True if all tokens are sampled, so that the sequence has left the engine."""
        self.waiter: asyncio.Future[None] | None = None
        """Future for which `SimEngine.generate` of the request waits; None before it waits for the first time."""

    @property
    def problem_context(self) -> CachedContext:
        """Name of the problem's prompt in the cache."""
        # The first token of a prompt identifies the problem (`Workload.problem_token`).
        return CachedContext("problem", self.request.prompt[0], self.cache_version)

    @property
    def episode_context(self) -> CachedContext:
        """Name of the episode's context in the cache."""
        return CachedContext("episode", episode_of(self.request.key), self.cache_version)

    def tokens(self, step: int) -> int:
        """Return the number of sampled tokens when the engine has done this many steps."""
        return self.sampled + (step - self.joined if self.joined >= 0 else 0)

    def context(self, step: int) -> int:
        """Return the number of tokens of prompt and response when the engine has done this many steps."""
        return self.prompt + self.tokens(step)

    @property
    def end(self) -> int:
        """Step count at which the response is complete. Valid only while the sequence runs."""
        return self.joined + self.length - self.sampled

    def note_versions(self, step: int, version_starts: Sequence[VersionStart]) -> None:
        """Record in `runs` the versions of the tokens up to a step. Valid only while the sequence runs.

        `version_starts` has each swap of the engine, the oldest first. The engine calls this before it delivers tokens,
        and before it removes a complete or preempted sequence.
        """
        if self.versions_until == step:
            return
        # Search backwards from the newest swap, because a sequence rarely runs through more than one swap.
        first = len(version_starts) - 1
        while version_starts[first].step > self.versions_until:
            first -= 1
        for i in range(first, len(version_starts)):
            stop = version_starts[i + 1].step if i + 1 < len(version_starts) else step
            if stop > self.versions_until:
                append_versions(self.runs, [VersionRun(version_starts[i].version, stop - self.versions_until)])
                self.versions_until = stop

    def newest_runs(self, count: int) -> list[VersionRun]:
        """Return the versions of the last `count` tokens, run-length encoded. `note_versions` must be up to date."""
        if self.runs[-1].count >= count:
            return [VersionRun(self.runs[-1].version, count)]
        chosen: list[VersionRun] = []
        for run in reversed(self.runs):
            taken = min(run.count, count)
            chosen.append(VersionRun(run.version, taken))
            count -= taken
            if count == 0:
                break
        return chosen[::-1]

    def wake(self) -> None:
        """Let `SimEngine.generate` of the request continue: it delivers new tokens, ends, or raises an error."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class CachedContext(NamedTuple):
    """Name of a context in the `PrefixCache`."""

    kind: str
    """`problem` for a prompt that a group shares, or `episode` for all tokens of an episode."""
    number: int
    """Number of the problem or of the episode."""
    version: int
    """`SimSequence.cache_version` of the sequence that stored the context. Only requests with the same cache version
    may use it."""


class PrefixCache:
    """Cached contexts for later requests, with the eviction rule of vLLM. Each engine has one.

    If room is needed, the cache evicts tokens from the end of the least recently used context, so that the beginning of
    the context may remain.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[CachedContext, int] = OrderedDict()
        """Number of tokens by context, the least recently used first."""
        self._total = 0
        """Number of tokens of all contexts."""

    def hold(self, context: CachedContext, tokens: int) -> None:
        """Store the first `tokens` tokens of a context as the most recently used one."""
        self.take(context)  # The new number replaces an old one.
        self._total += tokens
        self._tokens[context] = tokens

    def hit(self, context: CachedContext) -> int:
        """Return the number of cached tokens of a context. They stay in the cache, as the most recently used ones."""
        if context not in self._tokens:
            return 0
        self._tokens.move_to_end(context)
        return self._tokens[context]

    def take(self, context: CachedContext) -> int:
        """Return the number of cached tokens of a context, and remove them from the cache.

        The sequence that continues the context holds them from now on.
        """
        tokens = self._tokens.pop(context, 0)
        self._total -= tokens
        return tokens

    def forget_before(self, version: int) -> None:
        """Remove the contexts of versions before `version`, which no request can use any more."""
        # The list is complete before the first removal: a dict must not change while it is iterated.
        for context in [context for context in self._tokens if context.version < version]:
            self.take(context)

    def shrink(self, room: int) -> None:
        """Evict tokens until the cache holds at most `room` of them. The engine calls this before a sequence joins."""
        while self._total > room:
            context, tokens = next(iter(self._tokens.items()))
            left = max(0, tokens - (self._total - room))
            self._total -= tokens - left
            if left:
                # A dict keeps the place of a key that it has, so the context stays the least recently used one.
                self._tokens[context] = left
            else:
                del self._tokens[context]

    def clear(self) -> None:
        """Remove all contexts, because new weights make them invalid."""
        self._tokens.clear()
        self._total = 0
