"""Replay: rebuilds the state of a sample buffer from a checkpoint and the journal after it. Pure state.

When a run starts again, `flash.run.restart.hub_state` reads checkpoint and journal, passes each event to
`Replay.apply`, and then calls `state`. All results that were delivered after the checkpoint are kept. The run may
continue from any version between the checkpoint's and the one that it has `reached`, which is the usual choice. An
earlier version is chosen if records of the later steps are missing.

Steps from that version on are trained again. Batches of such steps that were formed already are trained as they were
(`flash.samples.groups.FormedBatches`). If the ledger counts their samples as trained, that is undone.

The journal may contain the events of several hub processes, one after another. Each of them continued from such a
version.
"""

from __future__ import annotations

from contextlib import suppress

from flash.errors import BreakerError, ContractError
from flash.samples.groups import FormedBatches, FormedGroup
from flash.samples.journal import Began, Committed, Delivered, Event
from flash.samples.rules import BufferSettings
from flash.samples.store import BufferState, SampleStore
from flash.samples.tasks import TaskSource
from flash.types import Trajectory


class Replay:
    """Applies the events of a journal to the state of a checkpoint, one after the other.

    Args:
        state: the state in the checkpoint; the replay changes it. None for a run that has no checkpoint.
        version: the version of the checkpoint.
    """

    def __init__(self, state: BufferState | None, version: int) -> None:
        self.reached = 0 if state is None else version
        """Version that the run has reached with the events applied so far."""
        self.delivered = 0
        """Number of trajectories delivered since the checkpoint, for a note to the user."""
        self._counted: list[tuple[FormedGroup, int]] = []
        """Groups that were counted as trained since the checkpoint, by any hub process, each with the oldest version
        whose tokens were counted as trained. `state` may have to undo these counts."""
        self._store: SampleStore | None = None
        """Store of the hub process whose events are being applied; None before the first event of a new run."""
        if state is not None:
            self._begin(state.settings, state, same_process=True)

    def _begin(self, settings: BufferSettings, state: BufferState | None, *, same_process: bool = False) -> None:
        """Make the store of the hub process whose events follow.

        Args:
            settings: settings of that process.
            state: the state with which it began; None if it began a new run.
            same_process: True if that process wrote the state into a checkpoint, and so continues in it.
        """
        members, cursor = settings.rules.sizes(settings.contract.group_size), state.cursor if state else None
        # The seed and the kinds do not matter, because the events hold the problems that were issued.
        source = TaskSource(0, members, cursor=cursor, samplings=settings.rules.samplings())
        self._store = SampleStore(settings, source, step=self.reached, state=state, same_process=same_process)

    def apply(self, event: Event) -> None:
        """Apply the next event.

        Raises:
            ContractError: the event cannot have happened in this state, so the journal does not belong to it.
        """
        if isinstance(event, Began):
            # A new hub process began, with the state that the events so far lead to and with settings of its own.
            state = self.state(event.step)
            self.reached = event.step
            self._begin(event.settings, state)
            return
        if (store := self._store) is None:
            raise ContractError(
                "the journal of a run without a checkpoint begins in the middle; expected the start of a hub first"
            )
        if isinstance(event, Delivered) and isinstance(event.result, Trajectory):
            self.delivered += 1
        if isinstance(event, Committed):
            if event.counts != store.counts:
                raise ContractError(
                    f"before step {event.step} the run had counted {event.counts} (tasks issued, tasks in flight, "
                    f"tokens generated), and its replay comes to {store.counts}"
                )
            oldest = store.contract.min_token_version(event.step)
            self._counted += [(FormedGroup(event.step, group), oldest) for group in store.batches.training.values()]
            self.reached = event.step + 1
        # The breaker, which ends a run if too many tasks or groups in a row fail, ended that hub process. But the state
        # is sound, because the event was applied before the breaker raised.
        with suppress(BreakerError):
            store.apply(event)
        # These are only for nodes and people, to whom the earlier process has passed them on.
        store.leases.to_cancel.clear()
        store.notes.clear()

    def state(self, until: int) -> BufferState | None:
        """Return the state for a run that continues from version `until`; None if no hub has ever started.

        Finishes the backlog, and undoes the counts of steps from `until` on: their groups are formed batches again. It
        is called at the end, and for the start of each hub process in the journal.

        Raises:
            ContractError: a task or a token is unaccounted for.
        """
        if (store := self._store) is None:
            return None
        while store.backlog:
            with suppress(BreakerError):
                store.backlog.do_slice()
        undone = [(formed, oldest) for formed, oldest in self._counted if formed.step >= until]
        self._counted = [(formed, oldest) for formed, oldest in self._counted if formed.step < until]
        for formed, oldest in undone:
            for trajectory in formed.group.trajectories():
                store.ledger.train(trajectory.trained_tokens(oldest), trajectory.action_count, times=-1)
        store.batches = FormedBatches([*(formed for formed, _ in undone), *store.batches.all_groups()])
        store.check()
        return store.snapshot()
