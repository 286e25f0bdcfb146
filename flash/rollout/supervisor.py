"""Supervisor: keeps one place of a node filled with an engine, one after the other.

An engine that dies is closed, and after a pause the next one starts in its place, as long as the place's budget lasts.
One that is killed while it starts has died as well, be it the first. What an engine does while it lives is its owner's,
the node's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import anyio

from flash.config.waits import LONGEST_PAUSE_S
from flash.errors import DeadlineError, EngineDeadError, EngineError
from flash.rollout.engine import Engine
from flash.waiting import deadline

FIRST_PAUSE_S = 1.0
"""Seconds before the first restart in a row; each further one waits twice as long, up to `LONGEST_PAUSE_S`."""
STEADY_STARTS, LEAST_STEADY_S, MOST_STEADY_S = 10.0, 60.0, 600.0
"""An engine that has served for so many times its own start, within these seconds, was well: what kills it then is
news, and its restarts count anew."""
LOOK_AT = "the engines' output and deadlines.engine_start"


class Restart(NamedTuple):
    """An engine will be started again."""

    pause_s: float
    number: int
    """How many there have been in a row, with this one."""


class RestartBudget:
    """Whether and when an engine that dies is started again. Pure state.

    Args:
        most: restarts in a row.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._in_a_row = 0
        self._well_at = math.inf

    def serves(self, now: float, start_s: float) -> None:
        """An engine has started, which took so many seconds."""
        self._well_at = now + min(max(STEADY_STARTS * start_s, LEAST_STEADY_S), MOST_STEADY_S)

    def died(self, now: float) -> Restart | None:
        """The engine died, or did not start. None: there is no other."""
        if now >= self._well_at:
            self._in_a_row = 0
        self._well_at = math.inf
        if self._in_a_row >= self._most:
            return None
        self._in_a_row += 1
        return Restart(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (self._in_a_row - 1)), self._in_a_row)


class Owner(Protocol):
    """Who gives a place's engines their work."""

    async def serve(self, place: int) -> EngineDeadError:
        """Let the engine work until it is dead; why it is."""
        ...

    async def died(self, place: int, death: EngineDeadError, restart: Restart | None) -> None:
        """It died, or the next one did not start; None: the place stays empty."""
        ...

    async def replaced(self, place: int, engine: Engine) -> None:
        """The next engine has started."""
        ...


class Supervisor:
    """See the module's docstring.

    Args:
        place: the engine's number on its node.
        make: makes an engine, not started.
        most: restarts in a row.
        start_s: deadline of a restart, in seconds.
    """

    def __init__(self, place: int, make: Callable[[], Engine], most: int, start_s: float) -> None:
        self._place = place
        self._make = make
        self._most = most
        self._start_s = start_s
        self.engine = make()
        """The place's newest engine, which its owner closes last."""
        self.killed: EngineDeadError | None = None
        """How the first engine died, if it never came to serve."""
        self._has_started = False
        """Whether an engine of this place ever has."""
        self._took_s = 0.0
        """How long the newest one's start did."""

    async def start(self) -> None:
        """Start the first engine, under the caller's deadline.

        Raises:
            EngineError: it cannot start. Not if it is killed meanwhile: that is for `run`.
        """
        try:
            await self._start_engine()
        except EngineDeadError as death:
            self.killed = death

    async def run(self, owner: Owner) -> EngineDeadError:
        """One engine's life after the other, from the end of the first one's start; returns how the last one died.

        Waits for deaths, pauses and starts. Produces what the owner is told.

        Raises:
            EngineError, DeadlineError: no engine of this place has ever started, and not because it was killed.
        """
        budget = RestartBudget(self._most)
        budget.serves(anyio.current_time(), self._took_s)
        while True:
            death, self.killed = self.killed or await owner.serve(self._place), None
            while death is not None:
                restart = budget.died(anyio.current_time())
                await owner.died(self._place, death, restart)
                # Also of one that nobody follows: what is left of it holds memory.
                await self.engine.close()
                if restart is None:
                    return death
                await anyio.sleep(restart.pause_s)
                death = await self._start_next()
            budget.serves(anyio.current_time(), self._took_s)
            await owner.replaced(self._place, self.engine)

    async def _start_next(self) -> EngineDeadError | None:
        """Start another engine; why that failed, if it did."""
        self.engine = self._make()
        try:
            with deadline(self._start_s, "an engine to start again", LOOK_AT):
                await self._start_engine()
        except EngineDeadError as death:
            return death
        except (EngineError, DeadlineError) as error:
            # What fails before it was ever done will fail again: the model does not fit, or the configuration.
            if not self._has_started:
                raise
            return EngineDeadError(str(error))
        return None

    async def _start_engine(self) -> None:
        begun = anyio.current_time()
        await self.engine.start()
        self._has_started, self._took_s = True, anyio.current_time() - begun


async def start_all(supervisors: Sequence[Supervisor], timeout: float) -> None:
    """Start the first engines of all places at once. Raises DeadlineError, EngineError."""
    with deadline(timeout, "the engines to start", LOOK_AT):
        async with anyio.create_task_group() as group:
            for supervisor in supervisors:
                group.start_soon(supervisor.start)


def only(engine: Engine) -> Callable[[int], Engine]:
    """What makes this engine and no other, whatever its number: for an owner that looks into it."""
    return lambda number: engine
