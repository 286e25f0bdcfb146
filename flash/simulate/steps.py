"""Parts of a simulated engine: the time of its steps, its sequences, and its prefix cache.

`flash.simulate.engine` uses it. A version is the number of the policy's weights with which a token was sampled, and a
swap is the change to another version. All of this is bookkeeping without timers. Steps are counted from the engine's
start; times are seconds of the loop's clock.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from flash.rollout.engine import ResponseRequest
from flash.types import VersionRun, append_versions


class Stretch(msgspec.Struct, frozen=True):
    """Successive steps during which the same sequences run, so that their times have a closed form."""

    start: float
    """Time at which the first step began."""
    first: float
    """Additional seconds of the first step, for prefill."""
    step: float
    """Seconds of the first step without prefill."""
    growth: float
    """Seconds by which each step is longer than the step before, because the context grows."""

    def after(self, steps: int) -> float:
        """Return the time at which this many steps are over."""
        if steps == 0:
            return self.start
        return self.start + self.first + steps * self.step + self.growth * (steps * (steps - 1) / 2)

    def over(self, now: float, most: int) -> int:
        """Return the number of steps that are over at time `now`, at most `most`."""
        if most == 0 or self.after(1) > now:
            return 0
        if self.step == 0:
            return most
        elapsed = now - self.start - self.first
        # Positive root of growth/2·k² + (step − growth/2)·k = elapsed, in the form without cancellation.
        half = self.step - self.growth / 2
        root = 2 * elapsed / (half + math.sqrt(half * half + 2 * self.growth * elapsed))
        # The root is rounded, so the number may be wrong by one or so.
        steps = min(int(root), most)
        while steps < most and self.after(steps + 1) <= now:
            steps += 1
        while steps > 0 and self.after(steps) > now:
            steps -= 1
        return steps


class SimSequence:
    """A request in a simulated engine, and the progress of its response."""

    def __init__(self, request: ResponseRequest, length: int, finish: str) -> None:
        self.request = request
        self.prompt = len(request.prompt)
        """Tokens of the prompt."""
        self.length = length
        """Tokens that the response will have."""
        self.finish = finish
        """Reason why the response ends: `stop` or `length`."""
        self.sampled = 0
        """Tokens that were sampled before the sequence joined for the last time."""
        self.joined = -1
        """Step count at which the sequence joined; −1 while it waits."""
        self.runs: list[VersionRun] = []
        """Versions of the tokens before step `seen`, run-length encoded."""
        self.seen = 0
        """Step count up to which `runs` is complete."""
        self.streamed = 0
        """Tokens that were delivered."""
        self.ended = False
        """True if all tokens are sampled."""
        self.waiter: asyncio.Future[None] | None = None
        """Future that the request's `generate` waits for, if it waits."""

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

    def note_versions(self, step: int, epochs: Sequence[tuple[int, int]]) -> None:
        """Record the versions of the tokens up to a step. Valid only while the sequence runs.

        `epochs` has (step count, version) of each swap, the oldest first.
        """
        if self.seen == step:
            return
        # Search backwards from the newest swap, because a sequence rarely runs through more than one swap.
        first = len(epochs) - 1
        while epochs[first][0] > self.seen:
            first -= 1
        for i in range(first, len(epochs)):
            stop = epochs[i + 1][0] if i + 1 < len(epochs) else step
            if stop > self.seen:
                append_versions(self.runs, [VersionRun(epochs[i][1], stop - self.seen)])
                self.seen = stop

    def newest_runs(self, count: int) -> list[VersionRun]:
        """Return the versions of the last `count` tokens, run-length encoded."""
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
        """Let the request's `generate` check the state of the sequence again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class PrefixCache:
    """Cached contexts that no running sequence uses, with the eviction rule of vLLM.

    If room is needed, the cache evicts tokens from the end of the least recently used context, so that the beginning of
    the context may remain.
    """

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._total = 0

    def hold(self, kind: str, name: int, tokens: int) -> None:
        """Store the first `tokens` tokens of a context as the most recently used one."""
        self.take(kind, name)
        self._total += tokens
        self._tokens[kind, name] = tokens

    def hit(self, kind: str, name: int) -> int:
        """Return the number of cached tokens of a context. They stay in the cache."""
        if (kind, name) not in self._tokens:
            return 0
        self._tokens.move_to_end((kind, name))
        return self._tokens[kind, name]

    def take(self, kind: str, name: int) -> int:
        """Return the number of cached tokens of a context, and remove them from the cache.

        The sequence that continues the context holds them from now on.
        """
        tokens = self._tokens.pop((kind, name), 0)
        self._total -= tokens
        return tokens

    def shrink(self, room: int) -> None:
        """Evict tokens until the cache holds at most `room` of them."""
        while self._total > room:
            name, tokens = next(iter(self._tokens.items()))
            left = max(0, tokens - (self._total - room))
            self._total -= tokens - left
            if left:
                self._tokens[name] = left
            else:
                del self._tokens[name]

    def clear(self) -> None:
        """Evict all contexts, because new weights make them invalid."""
        self._tokens.clear()
        self._total = 0
