"""Replayed: the state of a buffer from that of a checkpoint and the journal after it. Pure state.

What was delivered since the checkpoint is kept. The run goes on from any version since then, mostly the one that it has
`reached`: a batch of a later step, formed already, is trained again as it was (`flash.hub.again`), and where it was
booked as trained, that is taken back. Lives of the hub may have ended in between, at any such version.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from flash.errors import BreakerError, ContractError
from flash.hub.again import Again, Formed
from flash.hub.journal import Began, Committed, Ended, Event, Made
from flash.hub.samples import BufferState, Samples
from flash.hub.tasks import TaskSource
from flash.types import Trajectory


class Replay:
    """Makes the changes of a journal again, one after the other.

    Args:
        state: what the checkpoint kept; None for a run that has none.
        version: that of the checkpoint.
    """

    def __init__(self, state: BufferState | None, version: int) -> None:
        self._life = None if state is None else _Life(state.made, state, version, goes_on=True)
        self.delivered = 0
        """Trajectories that have come since."""

    def apply(self, event: Event) -> None:
        """The next change.

        Raises:
            ContractError: it cannot have happened in this state.
        """
        if isinstance(event, Began):
            state = None if self._life is None else self._life.left(event.step)
            self._life = _Life(event.made, state, event.step, () if self._life is None else self._life.booked)
            return
        if self._life is None:
            raise ContractError("the journal of a run without a checkpoint begins in the middle")
        if isinstance(event, Ended) and isinstance(event.result, Trajectory):
            self.delivered += 1
        self._life.replay(event)

    @property
    def reached(self) -> int:
        """The version that the run has come to."""
        return 0 if self._life is None else self._life.version

    def state(self, until: int) -> BufferState | None:
        """What there is for a run at version `until`; the replay is over. None: nothing was ever begun.

        Raises:
            ContractError: a task or a token is unaccounted for.
        """
        return None if self._life is None else self._life.left(until)


class _Booked(NamedTuple):
    """What was booked of a group as trained."""

    formed: Formed
    oldest: int
    """The oldest version whose tokens counted."""


class _Life(Samples):
    """One life of the hub, from its state at the beginning, or at the checkpoint, to its end.

    `booked` is what was trained since the checkpoint, in lives before this one and in it.
    """

    def __init__(
        self,
        made: Made,
        state: BufferState | None,
        step: int,
        booked: Iterable[_Booked] = (),
        *,
        goes_on: bool = False,
    ) -> None:
        members = made.rules.sizes(made.contract.group_size)
        source = TaskSource(0, members, cursor=None if state is None else state.cursor)
        super().__init__(made, source, step=step, state=state, goes_on=goes_on)
        self.version = step
        self.booked = list(booked)

    def replay(self, event: Event) -> None:
        """Raises ContractError: see `Replay.apply`."""
        if isinstance(event, Committed):
            if event.books != self.books:
                raise ContractError(f"before step {event.step}, {event.books} were booked, and now {self.books}")
            oldest = self._contract.min_token_version(event.step)
            self.booked += [_Booked(Formed(event.step, group), oldest) for group in self._pool.training.values()]
            self.version = event.step + 1
        with suppress(BreakerError):  # it ended that life, whose state is sound all the same
            self.apply(event)
        self.leases.withdrawn.clear()
        self.notes.clear()

    def left(self, until: int) -> BufferState:
        """What this life has left to a run at version `until`. Raises ContractError: it does not add up."""
        while self._chores:
            with suppress(BreakerError):
                self._chores.work()
        undone = [each for each in self.booked if each.formed.step >= until]
        self.booked = [each for each in self.booked if each.formed.step < until]
        for each in undone:
            self._take_back(each)
        formed = [each.formed for each in undone]
        if self._taken is not None:
            formed += [Formed(self._taken, self._pool.trained(group_id)) for group_id in list(self._pool.training)]
        state = self.snapshot()
        state.again = [*formed, *state.again]
        again = Again(state.again)
        state.ledger.check(self._pool.in_flight + again.in_flight, self._pool.tokens + again.tokens)
        return state

    def _take_back(self, booked: _Booked) -> None:
        for trajectory in booked.formed.group.trajectories():
            self.ledger.train(trajectory.trained_tokens(booked.oldest), trajectory.action_count, times=-1)
