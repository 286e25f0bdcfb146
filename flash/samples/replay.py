"""Replayed: the state of a buffer from that of a checkpoint and the journal after it. Pure state.

What was delivered since the checkpoint is kept. The run goes on from any version since then, mostly the one that it
has `reached`: a batch of a later step, formed already, is trained again as it was (`flash.samples.groups`), and where
it was booked as trained, that is taken back. Incarnations of the hub may have ended in between, at any such version.
"""

from __future__ import annotations

from contextlib import suppress

from flash.errors import BreakerError, ContractError
from flash.samples.groups import Batches, Formed
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
        self.reached = 0 if state is None else version
        """The version that the run has come to."""
        self.delivered = 0
        """Trajectories that have come since."""
        self._booked: list[tuple[Formed, int]] = []
        """What was booked as trained since, by all incarnations, and the oldest version whose tokens counted."""
        self._samples: Samples | None = None
        """Of the incarnation of the hub that these changes are of."""
        if state is not None:
            self._begin(state.made, state, goes_on=True)

    def _begin(self, made: Made, state: BufferState | None, *, goes_on: bool = False) -> None:
        members, cursor = made.rules.sizes(made.contract.group_size), state.cursor if state else None
        source = TaskSource(0, members, cursor=cursor, samplings=made.rules.samplings())
        self._samples = Samples(made, source, step=self.reached, state=state, goes_on=goes_on)

    def apply(self, event: Event) -> None:
        """The next change.

        Raises:
            ContractError: it cannot have happened in this state.
        """
        if isinstance(event, Began):
            state = self.state(event.step)
            self.reached = event.step
            self._begin(event.made, state)
            return
        if (samples := self._samples) is None:
            raise ContractError("the journal of a run without a checkpoint begins in the middle")
        if isinstance(event, Ended) and isinstance(event.result, Trajectory):
            self.delivered += 1
        if isinstance(event, Committed):
            if event.books != samples.books:
                raise ContractError(f"before step {event.step}, {event.books} were booked, and now {samples.books}")
            oldest = samples.contract.min_token_version(event.step)
            self._booked += [(Formed(event.step, group), oldest) for group in samples.batches.training.values()]
            self.reached = event.step + 1
        with suppress(BreakerError):  # it ended that incarnation, whose state is sound all the same
            samples.apply(event)
        samples.leases.withdrawn.clear()
        samples.notes.clear()

    def state(self, until: int) -> BufferState | None:
        """What there is for a run at version `until`; the replay is over. None: nothing was ever begun.

        Raises:
            ContractError: a task or a token is unaccounted for.
        """
        if (samples := self._samples) is None:
            return None
        while samples.backlog:
            with suppress(BreakerError):
                samples.backlog.work()
        undone = [(formed, oldest) for formed, oldest in self._booked if formed.step >= until]
        self._booked = [each for each in self._booked if each[0].step < until]
        for formed, oldest in undone:
            for trajectory in formed.group.trajectories():
                samples.ledger.train(trajectory.trained_tokens(oldest), trajectory.action_count, times=-1)
        samples.batches = Batches([*(formed for formed, _ in undone), *samples.batches.left()])
        samples.check()
        return samples.snapshot()
