"""What a simulated engine is made of: the time of steps, the sequences, and what its cache remembers.

Pure bookkeeping: no timers, no waits. Steps are counted from the engine's start; times are seconds of the loop's clock.
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
    """Steps of one membership, from a point in time."""

    start: float
    """Seconds of the loop's clock at which its first step began."""
    first: float
    """Seconds that the first step takes beyond the formula of the others: prefill."""
    step: float
    """Seconds of a step with the context of the first one."""
    growth: float
    """Seconds that each step takes more than the one before."""

    def after(self, steps: int) -> float:
        """When this many steps are over."""
        if steps == 0:
            return self.start
        return self.start + self.first + steps * self.step + self.growth * (steps * (steps - 1) / 2)

    def over(self, now: float, most: int) -> int:
        """How many steps are over at a time, at most `most`."""
        if most == 0 or self.after(1) > now:
            return 0
        if self.step == 0:
            return most
        elapsed = now - self.start - self.first
        # The positive root of growth/2·k² + (step − growth/2)·k = elapsed, in the form that loses no digits.
        half = self.step - self.growth / 2
        root = 2 * elapsed / (half + math.sqrt(half * half + 2 * self.growth * elapsed))
        steps = min(int(root), most)
        while steps < most and self.after(steps + 1) <= now:
            steps += 1
        while steps > 0 and self.after(steps) > now:
            steps -= 1
        return steps


class SimSequence:
    """One request in the engine."""

    def __init__(self, request: ResponseRequest, length: int, finish: str) -> None:
        self.request = request
        self.prompt = len(request.prompt)
        self.length = length
        """Tokens to sample."""
        self.finish = finish
        self.sampled = 0
        """Tokens sampled before it joined for the last time."""
        self.joined = -1
        """The step count when it joined; −1 while it waits."""
        self.runs: list[VersionRun] = []
        """Versions of the tokens before step `seen`."""
        self.seen = 0
        self.streamed = 0
        """Tokens delivered."""
        self.ended = False
        self.waiter: asyncio.Future[None] | None = None

    def tokens(self, step: int) -> int:
        """Tokens sampled when the engine has done this many steps."""
        return self.sampled + (step - self.joined if self.joined >= 0 else 0)

    def context(self, step: int) -> int:
        """Tokens of prompt and response."""
        return self.prompt + self.tokens(step)

    @property
    def end(self) -> int:
        """The step count at which it is complete; only while it runs."""
        return self.joined + self.length - self.sampled

    def note_versions(self, step: int, epochs: Sequence[tuple[int, int]]) -> None:
        """Write down the versions of its tokens up to a step; only while it runs.

        `epochs`: (step count, version) of each swap, oldest first.
        """
        if self.seen == step:
            return
        # From the newest swap backwards: a sequence has seen few of them, and mostly one.
        first = len(epochs) - 1
        while epochs[first][0] > self.seen:
            first -= 1
        for i in range(first, len(epochs)):
            stop = epochs[i + 1][0] if i + 1 < len(epochs) else step
            if stop > self.seen:
                append_versions(self.runs, [VersionRun(epochs[i][1], stop - self.seen)])
                self.seen = stop

    def newest_runs(self, count: int) -> list[VersionRun]:
        """The versions of its last `count` tokens."""
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
        """Let its `generate` look again."""
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)


class PrefixCache:
    """Contexts that nobody is decoding, as vLLM keeps them: what is needed goes from the least recently used one, its
    end first, so that a beginning may be left."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._total = 0

    def hold(self, kind: str, name: int, tokens: int) -> None:
        """Remember this many tokens of a context; it was used last."""
        self.take(kind, name)
        self._total += tokens
        self._tokens[kind, name] = tokens

    def hit(self, kind: str, name: int) -> int:
        """Tokens known of a context, which stay for others."""
        if (kind, name) not in self._tokens:
            return 0
        self._tokens.move_to_end((kind, name))
        return self._tokens[kind, name]

    def take(self, kind: str, name: int) -> int:
        """Tokens known of a context that is decoded from now on: they count as what runs."""
        tokens = self._tokens.pop((kind, name), 0)
        self._total -= tokens
        return tokens

    def shrink(self, room: int) -> None:
        """Forget until the rest fits."""
        while self._total > room:
            name, tokens = next(iter(self._tokens.items()))
            left = max(0, tokens - (self._total - room))
            self._total -= tokens - left
            if left:
                self._tokens[name] = left
            else:
                del self._tokens[name]

    def clear(self) -> None:
        """Forget all contexts, as new weights make it necessary."""
        self._tokens.clear()
        self._total = 0
