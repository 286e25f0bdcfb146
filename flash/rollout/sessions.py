"""Sessions: whose KV cache each engine of a node holds, counted in tokens. Pure state.

A session is an episode that has asked for a response. Between two turns it waits for its environment, and what its last
turn has cached is worth keeping as long as it comes back soon. So it is counted against the engine's memory like one
that runs (ThunderAgent, arXiv 2602.13692, counts programs so), and what does not fit waits instead of evicting it.
While sessions idle for longer than `keep_s` in the mean, that costs more than it saves, and nothing is counted.

A session is *here* (it runs on an engine, wants to, or idles there) or *held*: it has lost its place. Who idles for
too long, or has idled longest when those that run outgrow the memory, is held from then on: the engine would evict the
same one. Time is told by `at`.

Conservation: an engine's count is the sum over the sessions that are here.
"""

from __future__ import annotations

import math
from collections import OrderedDict, defaultdict

RECENT = 1 / 64
"""Weight of the newest turn in the means over turns: of sizes, growth and idle times."""

PATIENCE = 4
"""How many times `keep_s` one of them may idle before it is held."""


class EngineCache:
    """The KV cache of one engine, in tokens."""

    def __init__(self) -> None:
        self.memory = 0
        """That it holds; 0: as many as come."""
        self.used = 0.0
        """That are counted on it."""
        self.idling = 0.0
        """Of these, those of idle sessions."""


class _Session:
    """One that has begun. `tokens`: what is counted for it."""

    def __init__(self) -> None:
        self.engine: int | None = None
        """Where it is here; None: it is held."""
        self.tokens = 0.0
        self.asked = 0
        """Tokens of its last prompt."""
        self.rested: float | None = None
        """When its last turn was over; None: a turn is under way."""


class Sessions:
    """See the module's docstring.

    Args:
        keep_s: most seconds for which sessions may idle in the mean; 0: nothing is ever counted, and everything fits.
    """

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._now = 0.0
        self.caches = defaultdict[int, EngineCache](EngineCache)
        """By engine."""
        self._sessions: dict[int, _Session] = {}
        self._idle: OrderedDict[int, float] = OrderedDict()
        """Since when they idle, the longest first."""
        self._mean = 0.0
        """Tokens of a session at the end of a turn."""
        self._idle_s = 0.0
        """Seconds between two turns."""
        self._growth = 0.0
        """Tokens that a response adds."""

    @property
    def counted(self) -> bool:
        """Whether anything is."""
        return self._keep_s > 0 and self._idle_s <= self._keep_s

    def at(self, now: float) -> None:
        """It is this time, in seconds: who has idled too long loses its place."""
        self._now = now
        while self._idle and next(iter(self._idle.values())) + PATIENCE * self._keep_s <= now:
            self.hold(next(iter(self._idle)))

    # -- questions ---------------------------------------------------------------------------------------------------

    def begun(self, session: int) -> bool:
        """Whether a session has had a turn."""
        return session in self._sessions

    def home(self, session: int) -> int | None:
        """The engine on which it is here."""
        known = self._sessions.get(session)
        return None if known is None else known.engine

    def tokens(self, session: int) -> float:
        """What is counted for it."""
        known = self._sessions.get(session)
        return 0.0 if known is None else known.tokens

    def fits(self, engine: int, session: int, prompt: float) -> bool:
        """Whether a turn may begin on an engine: one that is here may press idle ones out, another one may not."""
        cache = self.caches[engine]
        if not self.counted or not cache.memory:
            return True
        # A new one will grow to the others' size: room for that keeps it from being held soon.
        known = self._sessions.get(session)
        grown = prompt + self._growth
        needed = cache.used + (max(grown, self._mean) if known is None else grown)
        if known is not None and known.engine == engine:
            needed -= known.tokens + cache.idling
        return needed <= cache.memory

    def room(self, engine: int) -> float:
        """How many sessions could begin on an engine."""
        cache = self.caches[engine]
        if not self.counted or not cache.memory or not self._mean:
            return math.inf
        return max(0.0, cache.memory - cache.used) // self._mean

    # -- events ------------------------------------------------------------------------------------------------------

    def wants(self, session: int) -> None:
        """A session asks for a turn: it idles no more."""
        if (known := self._sessions.get(session)) is not None and known.rested is not None:
            self._idle_s += RECENT * (self._now - known.rested - self._idle_s)
            known.rested = None
        self._wake(session)

    def runs(self, engine: int, session: int, prompt: int) -> None:
        """A turn begins on an engine, with a prompt of so many tokens."""
        if not self._keep_s:
            return
        known = self._sessions.setdefault(session, _Session())
        self._wake(session)
        self._move(known, engine, prompt + self._growth)
        known.asked = prompt
        self._press(engine)

    def rests(self, session: int, tokens: int) -> None:
        """Its turn is over, with so many tokens in all; it waits for its environment."""
        if (known := self._sessions.get(session)) is None:
            return
        weight = RECENT if self._mean else 1.0
        self._mean += weight * (tokens - self._mean)
        self._growth += weight * (tokens - known.asked - self._growth)
        known.rested = self._now
        if not self.counted:
            self.hold(session)
        elif known.engine is not None:
            self._move(known, known.engine, tokens)
            self._idle[session] = self._now
            self.caches[known.engine].idling += known.tokens
            self._press(known.engine)

    def hold(self, session: int) -> None:
        """A session loses its place."""
        self._wake(session)
        self._move(self._sessions[session], None, 0.0)

    def ends(self, session: int) -> int | None:
        """A session is over; returns the engine that has room for another one."""
        if session not in self._sessions:
            return None
        engine = self._sessions[session].engine
        self.hold(session)
        del self._sessions[session]
        return engine

    def lost(self, engine: int) -> None:
        """An engine is gone, with all it held."""
        for name, session in self._sessions.items():
            if session.engine == engine:
                self.hold(name)

    def _wake(self, session: int) -> None:
        if self._idle.pop(session, None) is not None:
            known = self._sessions[session]
            assert known.engine is not None, "who idles has a place"
            self.caches[known.engine].idling -= known.tokens

    def _move(self, session: _Session, engine: int | None, tokens: float) -> None:
        if session.engine is not None:
            self.caches[session.engine].used -= session.tokens
        if engine is not None:
            self.caches[engine].used += tokens
        session.engine, session.tokens = engine, tokens

    def _press(self, engine: int) -> None:
        """Hold those that have idled longest until the others fit."""
        cache = self.caches[engine]
        while cache.memory and cache.used > cache.memory:
            idle = next((name for name in self._idle if self._sessions[name].engine == engine), None)
            if idle is None:
                return
            self.hold(idle)
