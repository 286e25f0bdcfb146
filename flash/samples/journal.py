"""Journal: the events that change the samples, in the order in which they happened, and the replay of them.

`SampleBuffer` records each event before `apply` makes the change. An event holds the decisions of the buffer, such as
the task of a lease (which assigns one task to one node) or the groups of a step. Work on many groups waits in the
*backlog* of the store and is done in slices. Each slice is an event, too, so that a replay has slices and results in
the order of the run. Events are encoded as arrays with a number instead of a name, so a new field must be the last
field, and numbers must not change. `flash.run.journal` keeps the events in files.

When a run starts again, `flash.run.restart` reads a checkpoint and the journal after it, passes each event to
`Replay.apply`, and then calls `Replay.state`. All results that were delivered after the checkpoint are kept.

Invariant: no result, batch or commit is acknowledged to a peer before its event is `written`. A lease may be sent to
its node earlier: after a crash the next hub refuses the claim of a lease that it does not know.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Protocol

import msgspec

from flash.errors import BreakerError, ContractError
from flash.samples.groups import FormedBatches, FormedGroup
from flash.samples.rules import BufferSettings
from flash.samples.store import BufferState, SampleStore
from flash.samples.tasks import Problem, TaskSource
from flash.types import Failure, Trajectory


class Began(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """A hub process has started. Leases that a previous hub process granted stay valid until they end."""

    step: int
    """Version from which the run continues. Steps from this number on are trained again, even if the journal has their
    commits."""
    settings: BufferSettings
    """Settings by which this hub process decides."""


class Issued(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The next group was issued."""

    problem: Problem
    """Problem of the group. The tasks follow from it and from the state."""


class Leased(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Queued members of a group, which are its tasks, were leased to a node."""

    group_id: int
    node: int
    """Number of the node that holds the leases."""
    leases: list[tuple[int, int, int]]
    """For each lease: its number, the index of the member in its group, and `Lease.min_version`, the oldest version of
    an engine that may run the task."""


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A node has delivered the result of a lease."""

    lease_id: int
    node: int
    """Number of the node. If the task has failed and is tried again, it avoids this node."""
    result: Trajectory | Failure


class DeliveredLate(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """A node has delivered the result of a lease that had been withdrawn or revoked. Only its tokens are counted.

    The hub withdraws a lease whose sample is not needed any more, and revokes the leases of a node that it takes for
    lost.
    """

    lease_id: int
    tokens: int
    """Number of action tokens that were sampled for the result."""


class Revoked(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The tasks of these leases are queued again: their node is lost, or no node has claimed them after a restart."""

    lease_ids: list[int]


class SliceDone(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A slice of the backlog was done, and nothing else."""


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """The batch of a step, or the next groups of a batch that is not whole yet, were chosen."""

    step: int
    groups: list[int]
    """Numbers of the groups of the batch. Empty if a previous hub had formed the batch of this step. Groups of which an
    earlier step has trained a part are not listed; their finished members join the batch in addition."""
    open: bool = False
    """True if the batch is not whole with these groups."""


class Committed(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """All trainer ranks have trained a step, and its samples count as trained."""

    step: int
    counts: tuple[int, int, int]
    """Number of tasks issued, tasks in flight and tokens generated, before this event. A replay must come to the same
    numbers."""


class Closed(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """The last step was committed, and all remaining groups were withdrawn."""


class PutBack(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """The run was interrupted before the batch of a step was whole. The groups that were taken are ready again."""


Event = Began | Issued | Leased | Delivered | DeliveredLate | Revoked | SliceDone | Taken | Committed | Closed | PutBack
"""Change of the samples, as the journal records it."""


def apply(store: SampleStore, event: Event) -> None:
    """Make the change of an event, on which a buffer has decided in this state, in this process or before a crash.

    Raises:
        BreakerError: too many tasks were given up in a row, or too many groups were filtered out in a row. The change
            of the event is made before the error is raised.
        ContractError: the event does not fit the state, or the ledger does not account for each task and token.
    """
    match event:
        case Delivered():
            store.deliver(event.lease_id, event.node, event.result)
        case Leased():
            store.lease(event.group_id, event.node, event.leases)
        case Issued():
            store.issue(event.problem)
        case DeliveredLate():
            store.deliver_late(event.lease_id, event.tokens)
        case Revoked():
            store.revoke(event.lease_ids)
        case SliceDone():
            store.backlog.do_slice()
        case Taken():
            store.take(event.step, event.groups, is_open=event.open)
        case PutBack():
            store.put_back()
        case Committed():
            store.commit(event.step)
        case Closed():
            store.close()
        case Began():
            raise ContractError("the start of a hub cannot be applied to a store: it makes a new one")


class Journal(Protocol):
    """Interface of a journal. `flash.run.journal.FileJournal` keeps the events in files."""

    def record(self, event: Event) -> None:
        """Record an event that is about to be applied. Returns at once; the event need not be on disk yet."""
        ...

    async def written(self) -> None:
        """Wait until all events recorded so far are safely stored.

        The hub calls this before it acknowledges a result, a batch or a commit. The peer waits meanwhile and gives up
        after its own timeout, so this must not take long.
        """
        ...

    def begin(self, version: int) -> int:
        """Start a new file for the events after the checkpoint of a version. Returns the number of the file.

        The checkpoint keeps this number, so that a restarted run knows where to continue reading.
        """
        ...


class NoJournal:
    """Journal that keeps no event, for `checkpoint.journal = "off"`, simulations and tests.

    After a crash the run continues from the checkpoint, and generates later samples again. All calls return at once.
    """

    def record(self, event: Event) -> None: ...

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        """Return 0, because there are no files."""
        return 0


class MemoryJournal:
    """Journal that keeps all events in memory, for tests."""

    def __init__(self) -> None:
        self.files: list[list[Event]] = [[]]
        """Events of each file, in the order of the files. The number of a file is its index."""

    @property
    def events(self) -> list[Event]:
        """Events since the last checkpoint, that is, the last call of `begin`."""
        return self.files[-1]

    def after(self, number: int) -> list[Event]:
        """Return the events of the file with this number and of all later files."""
        return [event for file in self.files[number:] for event in file]

    def record(self, event: Event) -> None:
        """Append the event to the newest file."""
        self.events.append(event)

    async def written(self) -> None: ...

    def begin(self, version: int) -> int:
        """Begin a new file. Returns its number."""
        self.files.append([])
        return len(self.files) - 1


NO_JOURNAL = NoJournal()
"""Journal of all runs without a journal. It has no state, so all of them can share this object."""


class Replay:
    """Applies the events of a journal to the state of a checkpoint, one after the other.

    The run may continue from any version between the checkpoint's and the version that it has `reached`, which is the
    usual choice. An earlier version is chosen if records of the later steps are missing. Steps from that version on are
    trained again. Batches of such steps that were formed already are trained as they were (`FormedBatches`). If the
    ledger counts their samples as trained, `state` undoes this. The journal may contain the events of several hub
    processes, each of which continued from such a version.

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
            state: the state from which the events lead on; None if the process began a new run.
            same_process: True if that process wrote the state into a checkpoint itself. False if it started from the
                state (`SampleStore`).
        """
        members, cursor = settings.rules.sizes(settings.contract.group_size), state.cursor if state else None
        # The source needs no run seed and no `kind_of`: it chooses no problem, because the events hold the problems
        # that were issued.
        source = TaskSource(0, members, cursor=cursor, samplings=settings.rules.samplings())
        self._store = SampleStore(settings, source, step=self.reached, state=state, same_process=same_process)

    def apply(self, event: Event) -> None:
        """Apply the next event.

        Raises ContractError if it cannot have happened in this state, so that the journal does not belong to the state.
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
            apply(store, event)
        # The earlier process has passed these lists on to nodes and users.
        store.leases.to_cancel.clear()
        store.notes.clear()

    def state(self, until: int) -> BufferState | None:
        """Return the state for a run that continues from version `until`; None if no hub has ever started.

        Finishes the backlog, and undoes the counts of steps from `until` on: their groups are formed batches again. The
        result is a copy, but the replay's own state changes, too. The restart calls this at the end, and `apply` for
        the start of each hub process in the journal. Raises ContractError if the ledger does not account for each task
        and token.
        """
        if (store := self._store) is None:
            return None
        self._finish_backlog(store)
        if store.batches.open:
            # The ranks have not made a version of these groups, so the next hub may choose them again.
            store.put_back()
            self._finish_backlog(store)
        undone = [(formed, oldest) for formed, oldest in self._counted if formed.step >= until]
        self._counted = [(formed, oldest) for formed, oldest in self._counted if formed.step < until]
        for formed, oldest in undone:
            for trajectory in formed.group.trajectories():
                store.ledger.train(trajectory.trained_tokens(oldest), trajectory.action_count, times=-1)
        store.batches = FormedBatches([*(formed for formed, _ in undone), *store.batches.all_groups()])
        store.check()
        return store.snapshot()

    def _finish_backlog(self, store: SampleStore) -> None:
        """Do all postponed work, which a snapshot must not have."""
        while store.backlog:
            # As in `apply`: the state is sound when the breaker raises.
            with suppress(BreakerError):
                store.backlog.do_slice()
