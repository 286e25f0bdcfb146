"""Replayed: the state of a buffer from that of a checkpoint and the journal after it. Pure state.

What was delivered since the checkpoint is kept. The run goes on from any version since then, mostly the one that it
has `reached`: a batch of a later step, formed already, is trained again as it was (`flash.samples.groups`), and where
it was booked as trained, that is taken back. Incarnations of the hub may have ended in between, at any such version.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from flash.errors import BreakerError, ContractError
from flash.samples.groups import Formed, FormedBatches
from flash.samples.journal import Began, Committed, Ended, Event, Made
from flash.samples.state import BufferState, Samples
from flash.samples.tasks import TaskSource
from flash.types import Trajectory


class Replay:
    """Makes the changes of a journal again, one after the other.

    Args:
        state: what the checkpoint kept; None for a run that has none.
        version: that of the checkpoint.
    """

    def __init__(self, state: BufferState | None, version: int) -> None:
        self._incarnation = None if state is None else _Incarnation(state.made, state, version, goes_on=True)
        self.delivered = 0
        """Trajectories that have come since."""

    def apply(self, event: Event) -> None:
        """The next change.

        Raises:
            ContractError: it cannot have happened in this state.
        """
        if isinstance(event, Began):
            before = self._incarnation
            state, booked = (None, ()) if before is None else (before.left(event.step), before.booked)
            self._incarnation = _Incarnation(event.made, state, event.step, booked)
            return
        if self._incarnation is None:
            raise ContractError("the journal of a run without a checkpoint begins in the middle")
        if isinstance(event, Ended) and isinstance(event.result, Trajectory):
            self.delivered += 1
        self._incarnation.replay(event)

    @property
    def reached(self) -> int:
        """The version that the run has come to."""
        return 0 if self._incarnation is None else self._incarnation.version

    def state(self, until: int) -> BufferState | None:
        """What there is for a run at version `until`; the replay is over. None: nothing was ever begun.

        Raises:
            ContractError: a task or a token is unaccounted for.
        """
        return None if self._incarnation is None else self._incarnation.left(until)


class _Booked(NamedTuple):
    """What was booked of a group as trained."""

    formed: Formed
    oldest: int
    """The oldest version whose tokens counted."""


class _Incarnation:
    """One incarnation of the hub, from its state at the beginning, or at the checkpoint, to its end.

    `booked` is what was trained since the checkpoint, in incarnations before this one and in it.
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
        self._samples = Samples(made, source, step=step, state=state, goes_on=goes_on)
        self.version = step
        self.booked = list(booked)

    def replay(self, event: Event) -> None:
        """Raises ContractError: see `Replay.apply`."""
        samples = self._samples
        if isinstance(event, Committed):
            if event.books != samples.books:
                raise ContractError(f"before step {event.step}, {event.books} were booked, and now {samples.books}")
            oldest = samples.contract.min_token_version(event.step)
            self.booked += [_Booked(Formed(event.step, group), oldest) for group in samples.pool.training.values()]
            self.version = event.step + 1
        with suppress(BreakerError):  # it ended that incarnation, whose state is sound all the same
            samples.apply(event)
        samples.leases.withdrawn.clear()
        samples.notes.clear()

    def left(self, until: int) -> BufferState:
        """What this incarnation has left to a run at version `until`. Raises ContractError: it does not add up."""
        pool, backlog, taken = self._samples.pool, self._samples.backlog, self._samples.taken
        while backlog:
            with suppress(BreakerError):
                backlog.work()
        undone = [each for each in self.booked if each.formed.step >= until]
        self.booked = [each for each in self.booked if each.formed.step < until]
        for each in undone:
            self._take_back(each)
        formed = [each.formed for each in undone]
        if taken is not None:
            formed += [Formed(taken, pool.trained(group_id)) for group_id in list(pool.training)]
        state = self._samples.snapshot()
        state.formed = [*formed, *state.formed]
        batches = FormedBatches(state.formed)
        state.ledger.check(pool.in_flight + batches.in_flight, pool.tokens + batches.tokens)
        return state

    def _take_back(self, booked: _Booked) -> None:
        for trajectory in booked.formed.group.trajectories():
            tokens = trajectory.trained_tokens(booked.oldest)
            self._samples.ledger.train(tokens, trajectory.action_count, times=-1)
