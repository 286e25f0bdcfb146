"""SampleBuffer: leases training tasks, takes their results, and forms the batch of each step.

The hub calls `lease` when a node has room, and `deliver` with each result. It calls `next_round` when a trainer rank
asks for groups of a step, and `commit` when the step is trained. Each call decides, records an event in the journal,
and then applies it to the `SampleStore`, which holds the state. A *group* is the tasks about one problem, which are its
*members*.

- *Admission* (`flash.samples.tasks.Admission`): a task is leased only to a node with an engine whose version is new
  enough by the age contract. The contract bounds how far sampling may be ahead of training.
- *Redundancy*: a group may have more members than it needs. When enough are done, the others are withdrawn. There may
  also be more groups than needed. In each step, up to `rollout.extra_groups` groups that are too slow may leave.
- *Choice* (`choose`): a step takes groups of which enough members are done, groups with the oldest tokens first. While
  too few groups are complete for a whole batch, a step may take these and wait for the others (`RoundSize`): it would
  take them anyway. Each such part of a batch is a *round*; else a step has one round.
- *Age*: tokens that are too old are left out of the loss, or their task starts again (`rollout.on_expire`). Finished
  members whose window (`AgeContract.window_start`) ends do not wait for the rest of their group.

The time of a call does not grow with the number of tasks in flight. Work on many groups goes into the store's backlog.
The hub calls `do_slice` until the backlog is empty, and no batch is formed before this. The buffer starts no tasks and
does no I/O, except that it passes its events to the journal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flash.ages import SLACK
from flash.errors import ContractError
from flash.samples.groups import EligibleGroups, Group, Member
from flash.samples.journal import (
    NO_JOURNAL,
    Began,
    Closed,
    Committed,
    Delivered,
    DeliveredLate,
    Event,
    Issued,
    Journal,
    Leased,
    PutBack,
    Revoked,
    SliceDone,
    Taken,
    apply,
)
from flash.samples.rules import AgeContract, BufferRules, BufferSettings
from flash.samples.store import BufferState, SampleStore
from flash.samples.tasks import TaskSource
from flash.types import Failure, Lease, Trajectory

MEMBERS_PER_SLICE = 512
"""Number of members whose groups are processed in one slice of the backlog. A member takes at most ten microseconds, so
a slice blocks the event loop for a few milliseconds."""


class SampleBuffer:
    """Decides which node gets which task, and which groups a step trains.

    Args:
        contract: the run's age contract.
        source: gives the next problem. Its cursor is the cursor of `state`.
        rules: settings of the buffer.
        step: the version from which the run continues.
        state: the state that a previous hub has left; None in a new run.
        lease_ids: numbers of new leases, which training and evaluation share. None: the numbers from 0.
        members_per_slice: number of members whose groups are processed in one slice. A slice has at least one group.
        journal: records every event before it is applied.
    """

    def __init__(
        self,
        contract: AgeContract,
        source: TaskSource,
        rules: BufferRules,
        *,
        step: int = 0,
        state: BufferState | None = None,
        lease_ids: Iterator[int] | None = None,
        members_per_slice: int = MEMBERS_PER_SLICE,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        settings = BufferSettings(contract, rules, max(1, members_per_slice // contract.group_size))
        self.journal = journal
        journal.record(Began(step, settings))
        # The store is made after the event is recorded, because a replay makes one at this event, too.
        self.samples = SampleStore(settings, source, step=step, state=state, lease_ids=lease_ids)
        self._taken = 0
        """Number of groups of the running step in rounds that `next_round` has returned."""

    def _record_and_apply(self, event: Event) -> None:
        """Record an event in the journal, then change the store by it. Raises the errors of `journal.apply`."""
        self.journal.record(event)
        apply(self.samples, event)

    def do_slice(self) -> bool:
        """Do one slice of the backlog, the store's postponed work. Returns True if work is left.

        The hub calls this until no work is left, and serves other requests after each slice. Raises BreakerError if too
        many groups were filtered out in a row. So may every method that changes the samples, because it may do a slice.
        """
        if self.samples.backlog:
            self._record_and_apply(SliceDone())
        return bool(self.samples.backlog)

    # -- leases ------------------------------------------------------------------------------------------------------

    def available(self, newest: int) -> int:
        """Return the number of tasks that `lease` could give to nodes whose newest engine runs version `newest`.

        The number may be too high. It is 0 only if no node can get a task (`Admission.available`).
        """
        return self.samples.admission.available(newest)

    def lease(self, versions: Sequence[int], node: int = 0, *, nodes: Collection[int] = ()) -> Lease | None:
        """Lease the next task that a node may run, from the queue or from a new group.

        Returns None if there is no such task, for example because the engines of the node run versions that are too
        old. A new group is issued only if no task of the queue can go to this node.

        Args:
            versions: versions that the node's engines run.
            node: the node's number. A queued task that has failed on this node is leased to it only if the task has
                failed on all `nodes`.
            nodes: all nodes that could take the task. If empty, earlier failures do not matter.

        Raises:
            BreakerError: all of the next problems are of kinds in quarantine (`TaskSource.next_problem`).
            ContractError: a domain is due, and none of the next problems is of this domain.
        """
        newest, admission = max(versions, default=-1), self.samples.admission
        if (member := self.samples.leases.queue.first_for(node, nodes)) is not None:
            # If the engines are too old for this task, they are too old for a new group, too.
            return self._lease_members([member], versions, node)[0] if admission.admits(member, newest) else None
        if not admission.room_for_group(newest):
            return None
        domain = self.samples.domains.next_domain(self.samples.quarantined)
        problem = self.samples.source.next_problem(domain)
        # The group and the leases of these events are needed here, so the store is called directly, not with `apply`.
        self.journal.record(Issued(problem))
        return self._lease_members(self.samples.issue(problem).members[:1], versions, node)[0]

    def lease_rest(self, lease: Lease, versions: Sequence[int], node: int = 0) -> list[Lease]:
        """Lease the queued members of the group of `lease` to the node that got `lease`. Returns their leases.

        The hub calls this after `lease` if the members of a group go to one node together.
        """
        queued = [member for member in self.samples.pool[lease.task.group_id].members if member.state == "queued"]
        return self._lease_members(queued, versions, node) if queued else []

    def _lease_members(self, members: Sequence[Member], versions: Sequence[int], node: int) -> list[Lease]:
        """Lease queued members of one group to a node whose engines run `versions`.

        `Lease.min_version` is the oldest of these versions that may run the task. No token of the sample can be older
        than this version.
        """
        admission, ids = self.samples.admission, self.samples.leases.ids
        numbered = [
            (next(ids), member.task.sample_index, admission.oldest_version(member, versions)) for member in members
        ]
        group_id = members[0].task.group_id
        self.journal.record(Leased(group_id, node, numbered))
        return self.samples.lease(group_id, node, numbered)

    # -- results -----------------------------------------------------------------------------------------------------

    def deliver(self, lease_id: int, result: Trajectory | Failure, node: int = 0) -> None:
        """Store the result of a lease from a node, and decide about its group.

        If the lease was withdrawn or revoked before, the result is dropped and only its tokens are counted. Raises
        BreakerError if too many tasks were given up in a row, or too many groups were filtered out in a row.
        """
        if lease_id in self.samples.leases.out:
            self._record_and_apply(Delivered(lease_id, node, result))
        else:
            self._record_and_apply(DeliveredLate(lease_id, result.sampled_tokens))

    def revoke(self, lease_ids: Iterable[int]) -> None:
        """Queue the tasks of leases again, because their node is lost, or has not claimed them after a restart."""
        self._record_and_apply(Revoked(list(lease_ids)))

    # -- batches -----------------------------------------------------------------------------------------------------

    def has_round(self, version: int) -> bool:
        """Return True if `next_round` could return groups of the step that trains version `version` now.

        False while a backlog is left. The hub calls this after each result, to wake the trainer ranks that wait for a
        round, and for each waiting rank when it is woken. The call changes nothing.
        """
        if self.samples.backlog:
            return False
        return self._round_taken(version) or self._choose(version) is not None

    def next_round(self, version: int) -> list[Group] | None:
        """Return the groups of the next round of the step that trains version `version`.

        The batch of the step is whole if `samples.batches.open` is False afterwards. The groups leave the pool in
        slices: if `None` is returned and there is a backlog, the caller calls `do_slice` and then this function again.
        If there is no backlog, too few groups are complete.
        """
        samples = self.samples
        if samples.backlog:
            return None
        if not self._round_taken(version) and (chosen := self._choose(version)) is not None:
            groups, is_open = chosen
            if samples.contract.max_age == 0:
                # A synchronous run must give the same batches if it is repeated. So groups are sorted by problem and
                # not by number, which depends on which of several groups was replaced first.
                groups.sort(key=lambda group_id: samples.pool[group_id].members[0].task.seed)
            self._taken = self._taken_of(version)
            self._record_and_apply(Taken(version, groups, is_open))
        if samples.backlog or not self._round_taken(version):
            return None
        found = list(samples.batches.training.values())[self._taken :]
        self._taken += len(found)
        return found

    def _taken_of(self, version: int) -> int:
        """Return the number of groups that the step of this version has taken out of the pool."""
        return len(self.samples.batches.training) if self.samples.batches.step == version else 0

    def _round_taken(self, version: int) -> bool:
        """Return True if groups of the step are taken that `next_round` has not returned yet."""
        return self._taken < self._taken_of(version)

    def _choose(self, version: int) -> tuple[list[int], bool] | None:
        """Return the numbers of the groups of a step's next round, and True if more rounds follow.

        Returns None if the step has to wait, or its batch is whole already. The list is empty if a previous hub had
        formed the batch of this step: `SampleStore` then takes that batch.
        """
        samples, window = self.samples, self.samples.rules.fifo_window
        if version in samples.batches.formed:
            return [], False
        before = None
        if window is not None:
            # With `rollout.fifo_window`, only groups at the places of the next `window` batches may be chosen.
            end = math.floor((version + window) * samples.contract.groups_per_batch + SLACK)
            before = samples.admission.places.first_at(end)
        if samples.batches.step == version and not samples.batches.open:
            return None  # The batch is whole.
        missing = samples.contract.groups_per_batch - self._taken_of(version)
        arguments = (samples.contract, version, missing, samples.pool.eligible, samples.pool.counts.begun)
        limits = samples.domains.limits(samples.quarantined, missing)
        chosen = choose(*arguments, before=before, wait=samples.rules.on_expire == "wait", limits=limits)
        if chosen is None and not samples.leases.out and not self.available(version):
            # No task is leased or can be leased, so no further group will become complete. For example, groups that a
            # previous hub began under other settings have taken all places. With the limits of domains, or while it
            # waits for other groups, the step would wait forever.
            chosen = choose(*arguments, before=before, wait=False)
        if chosen is not None:
            return chosen, False
        if samples.rules.round is None:
            return None
        # All these groups will be in the batch. Of groups that are not complete, more members may still finish.
        pool = samples.pool
        eligible = pool.eligible.first(missing, before, limits)
        ready = [group_id for some in eligible.values() for group_id in some if pool.is_ready(group_id)]
        tokens = sum(map(pool.counts.tokens_of, ready))
        return (ready, True) if ready and samples.rules.round.reached(len(ready), tokens) else None

    def commit(self, version: int) -> None:
        """Count the groups of the step that trained `version` as trained. The counting may leave a backlog.

        Raises ContractError if no whole batch of this step was taken, or if the ledger does not account for each task
        and token.
        """
        batches = self.samples.batches
        if not batches.training or batches.open or batches.step != version:
            raise ContractError(f"step {version} was committed, but no whole batch was formed for it")
        self._taken = 0
        self._record_and_apply(Committed(version, self.samples.counts))

    def put_back(self) -> None:
        """Make the groups of the running step ready again, because the run ends before its batch is whole."""
        self._taken = 0
        self._record_and_apply(PutBack())

    def close(self) -> None:
        """Withdraw all groups that are left after the last step. Their tokens count as discarded."""
        self._record_and_apply(Closed())


def choose(
    contract: AgeContract,
    step: int,
    size: int,
    eligible: EligibleGroups,
    begun: Mapping[int, Sequence[int]],
    *,
    before: int | None,
    wait: bool,
    limits: Mapping[str, int] | None = None,
) -> list[int] | None:
    """Return the numbers of the groups that make a step's batch whole, oldest tokens first; None while it has to wait.

    If enough groups are eligible, the step takes them and does not wait for slower groups. There are two exceptions:
    `before` or `limits` may leave too few groups, and with `wait` another group may have to come first.

    This function runs after each result, so it must not loop over all groups. It loops over versions, which are few.

    Args:
        contract: the run's age contract.
        step: the version that is trained.
        size: number of groups that the batch still needs.
        eligible: the groups that may be trained.
        begun: by the oldest version of a group's tokens: the number of groups, complete or not, that have begun and
            that no step has taken yet, and how many of these are not complete.
        before: only groups with a smaller number may be chosen. None: all.
        wait: if True, the result is None while later steps could not train all other groups before their oldest tokens
            are too old.
        limits: largest number of groups of each kind of problem; kinds without an entry have no limit.
    """
    chosen = eligible.first(size, before, limits)
    if sum(map(len, chosen.values())) < size or (wait and not _all_in_time(contract, step + 1, begun, chosen)):
        return None
    return [group_id for groups in chosen.values() for group_id in groups]


def _all_in_time(
    contract: AgeContract, step: int, begun: Mapping[int, Sequence[int]], chosen: Mapping[int, Sequence[int]]
) -> bool:
    """Return True if, from `step` on, all groups except the chosen ones can be trained before they are too old.

    A group is too old when its oldest token is too old. The chosen groups are trained in the step before `step`. The
    steps from `step` to s have room for s - step + 1 batches. For every s, the groups that must be trained in step s or
    earlier have to fit into this room. `begun` (explained in `choose`) and `chosen` have the groups by the version of
    their oldest token.
    """
    total, any_incomplete = 0, False
    for oldest in sorted(begun):
        groups, incomplete = begun[oldest]
        total += groups - len(chosen.get(oldest, ()))
        any_incomplete = any_incomplete or incomplete > 0
        room = max(0, contract.last_step(oldest) - step + 1) * contract.groups_per_batch
        # If all these groups are complete, waiting does not help, because only a step can take them away.
        if any_incomplete and total > room:
            return False
    return True
