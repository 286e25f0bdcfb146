"""What the steps of a vLLM engine tell of it. Pure state; times are in seconds."""

from __future__ import annotations

from collections import deque

import msgspec

from flash.rollout.engine import Pressure

PROMPT_STEPS = 100
"""Steps over which shares are told: enough for a mean, few enough to follow a change."""


class _Share:
    """A part of a whole, over the last steps that had any of it."""

    def __init__(self) -> None:
        self._counts: deque[tuple[int, int]] = deque(maxlen=PROMPT_STEPS)

    def after(self, part: int, whole: int) -> float | None:
        """The share, with another step's counts; None before the first one that counts."""
        if whole:
            self._counts.append((part, whole))
        return sum(part for part, _ in self._counts) / sum(whole for _, whole in self._counts) if self._counts else None


class PressureGauge:
    """Its load: sequences, KV cache, preemptions, as of its last step."""

    def __init__(self) -> None:
        self._pressure = Pressure(running=0, waiting=0, kv_used=0.0, preemptions=0)
        self._excused = 0
        self._hits, self._accepted = _Share(), _Share()

    @property
    def pressure(self) -> Pressure:
        """As of the engine's last step."""
        return self._pressure

    def has_cache(self, tokens: int) -> None:
        """The engine has started, with a KV cache for so many tokens."""
        self._pressure = msgspec.structs.replace(self._pressure, kv_tokens=tokens)

    def all_put_back(self) -> None:
        """The engine forgets its cache, for which it puts all its sequences back: not for want of cache."""
        self._excused = self._pressure.running

    def read(
        self,
        *,
        running: int,
        waiting: int,
        resumed: int,
        asked: int = 0,
        cached: int = 0,
        drafted: int = 0,
        accepted: int = 0,
        **others: float,
    ) -> None:
        """Take one step's numbers.

        Args:
            resumed: sequences that went on in it after they had been put back.
            asked: prompt tokens of the requests that it began.
            cached: how many of these the prefix cache held.
            drafted: tokens that were tried without being computed first.
            accepted: how many of these stay.
            others: fields of `Pressure`, as they are.
        """
        excused = min(resumed, self._excused)
        # Nobody waits: all that were put back go on, and the excuse has served.
        self._excused = self._excused - excused if waiting else 0
        preemptions = self._pressure.preemptions + resumed - excused
        shares = {
            "prefix_hit_share": self._hits.after(cached, asked),
            "accepted_share": self._accepted.after(accepted, drafted),
        }
        told = {
            "running": running,
            "waiting": waiting,
            "preemptions": preemptions,
            "drafted": self._pressure.drafted + drafted,
            "accepted": self._pressure.accepted + accepted,
        }
        self._pressure = msgspec.structs.replace(self._pressure, **told, **shares, **others)


class StepWatch:
    """Whether it hangs: it has requests, may work on them, and has made no step for too long. Told of each change.

    Args:
        limit_s: how long a step may take.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._since = 0.0
        """When it last made a step, or got something to do."""
        self._requests = 0
        """What it has to do."""
        self._paused = False

    def begins(self, now: float) -> None:
        """It has one more request."""
        if self._requests == 0:
            self._since = now
        self._requests += 1

    def ends(self) -> None:
        """It has one request less."""
        self._requests -= 1

    def pauses(self) -> None:
        """It makes no step before `goes_on`: a swap has a deadline of its own."""
        self._paused = True

    def goes_on(self, now: float) -> None:
        """It may make steps again."""
        self._paused, self._since = False, now

    def steps(self, now: float) -> None:
        """It has made a step."""
        self._since = now

    def left(self, now: float) -> float:
        """Seconds in which it cannot count as hanging; none are left of one that hangs."""
        if self._paused or self._requests == 0:
            return self._limit_s
        return max(0.0, self._since + self._limit_s - now)
