"""SampleBuffer: leases training tasks, takes their results, and forms the batch of each step. Pure state.

The hub calls `lease` when a node has room, `deliver` with each result, `next_batch` when a trainer rank asks for a
step, and `commit` when the step is trained. Each call decides, records an event in the journal, and then applies it to
the `SampleStore`. `flash.samples.store` describes the states of tasks.

- *Admission* follows the age contract (`flash.samples.leases.Admission`).
- *Redundancy*: the first members of a group to finish win, and the others are withdrawn at once. In each step up to
  `rollout.extra_groups` groups are withdrawn that have a running member whose first tokens may be too old for the step:
  redundant groups take their places.
- *Choice* (`choose`): a step takes complete groups, those with the oldest tokens first.
- *Age*: too old tokens are left out of the loss and counted, or their sample starts again (`on_expire`). If finished
  members would become too old before the rest of their group is done, they are trained without the rest. The rest is
  trained in a later step, in addition to the groups of that step.

The time of a call does not grow with the number of samples in flight. Work on many groups goes into a backlog. The
owner calls `do_slice` until the backlog is empty; no batch is formed before that.
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
    Revoked,
    SliceDone,
    Taken,
)
from flash.samples.rules import AgeContract, BufferRules, BufferSettings
from flash.samples.store import BufferState, SampleStore
from flash.samples.tasks import TaskSource
from flash.types import Failure, Lease, Trajectory

MEMBERS_PER_SLICE = 512
"""Number of members whose groups are processed in one slice. Each member takes at most ten microseconds."""


class SampleBuffer:
    """Decides which node gets which task, and which groups a step trains.

    Args:
        contract: the run's age contract.
        source: gives the next problem. Its cursor is the cursor of `state`.
        rules: settings of the buffer.
        step: the version that the trainer ranks hold.
        state: the state that a previous hub has left; None in a new run.
        lease_ids: numbers of new leases, which training and evaluation share. None: the numbers from 0.
        members_per_slice: number of samples whose groups are processed in one slice. A slice has at least one group.
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
        self.samples = SampleStore(settings, source, step=step, state=state, lease_ids=lease_ids)

    def _record_and_apply(self, event: Event) -> None:
        self.journal.record(event)
        self.samples.apply(event)

    def do_slice(self) -> bool:
        """Do one slice of the backlog. Returns True if work is left.

        Raises:
            BreakerError: too many groups were filtered out in a row.
            ContractError: the ledger does not account for each task and token.
        """
        if self.samples.backlog:
            self._record_and_apply(SliceDone())
        return bool(self.samples.backlog)

    # -- leases ------------------------------------------------------------------------------------------------------

    def available(self, newest: int) -> int:
        """Return the number of tasks that `lease` could give to nodes whose newest engine runs version `newest`.

        The number may be too high, because it counts all members of the last group. It is 0 only if no node can get a
        task.
        """
        return self.samples.admission.available(newest)

    def lease(self, versions: Sequence[int], node: int = 0, *, nodes: Collection[int] = ()) -> Lease | None:
        """Lease the next task that a node may run, from the queue or from a new group. Returns None if there is none.

        Args:
            versions: versions that the node's engines run.
            node: the node's number. A task that has failed on it goes to another node, as long as there is one.
            nodes: all nodes that could take the task.

        Raises:
            BreakerError: every kind of environment is in quarantine.
        """
        newest, admission = max(versions, default=-1), self.samples.admission
        if (member := self.samples.leases.queue.first_for(node, nodes)) is not None:
            return self._lease_members([member], versions, node)[0] if admission.admits(member, newest) else None
        if not admission.room_for_group(newest):
            return None
        domain = self.samples.domains.next(self.samples.quarantined)
        # `lease` needs the tasks and leases that the events make, so it does not apply the events with `apply`.
        issued = Issued(self.samples.source.next_problem(domain))
        self.journal.record(issued)
        return self._lease_members(self.samples.issue(issued).members[:1], versions, node)[0]

    def lease_rest(self, lease: Lease, versions: Sequence[int], node: int = 0) -> list[Lease]:
        """Lease the queued members of the group of `lease` to the node that got `lease`."""
        queued = [member for member in self.samples.pool[lease.task.group_id].members if member.state == "queued"]
        return self._lease_members(queued, versions, node) if queued else []

    def _lease_members(self, members: Sequence[Member], versions: Sequence[int], node: int) -> list[Lease]:
        """Lease queued tasks of one group to a node whose engines run `versions`.

        Each lease carries its floor: the oldest version that a token of the task can have, which is the version of the
        slowest engine of the node that may run the task.
        """
        admission, ids = self.samples.admission, self.samples.leases.ids
        numbered = [
            (next(ids), member.task.sample_index, admission.oldest_version(member, versions)) for member in members
        ]
        leased = Leased(members[0].task.group_id, node, numbered)
        self.journal.record(leased)
        return self.samples.lease(leased)

    # -- results -----------------------------------------------------------------------------------------------------

    def deliver(self, lease_id: int, result: Trajectory | Failure, node: int = 0) -> None:
        """Store the result of a lease from a node. If the lease is no longer out, only the tokens are counted.

        Raises:
            BreakerError: too many tasks were given up in a row, or too many groups were filtered out in a row.
        """
        if lease_id in self.samples.leases.out:
            self._record_and_apply(Delivered(lease_id, node, result))
        else:
            self._record_and_apply(DeliveredLate(lease_id, result.sampled_tokens))

    def revoke(self, lease_ids: Iterable[int]) -> None:
        """Queue the tasks of leases again, since their node is gone or no node has claimed them."""
        self._record_and_apply(Revoked(list(lease_ids)))

    # -- batches -----------------------------------------------------------------------------------------------------

    def has_batch(self, version: int) -> bool:
        """Return True if `next_batch` would return a batch, or begin to form one."""
        samples = self.samples
        if samples.backlog:
            return False
        return samples.batches.step == version or self._choose(version) is not None

    def next_batch(self, version: int) -> list[Group] | None:
        """Return the groups of the step that trains version `version`.

        None while too few groups are complete, or while the chosen groups are still being collected. In the second case
        the caller calls `do_slice` and then this function again.
        """
        samples = self.samples
        if not samples.backlog and samples.batches.step != version and (chosen := self._choose(version)) is not None:
            if samples.contract.max_age == 0:
                # A synchronous run can be repeated: the order is that of problems. The numbers of groups depend on
                # which of several groups was replaced first, and so on time.
                chosen.sort(key=lambda group_id: samples.pool[group_id].members[0].task.seed)
            self._record_and_apply(Taken(version, chosen))
        if samples.backlog or samples.batches.step != version:
            return None
        return list(samples.batches.training.values())

    def _choose(self, version: int) -> list[int] | None:
        """Return the numbers of the groups of a step; None if the step has to wait.

        The list is empty if a previous hub had formed the batch of this step, since its groups are already recorded.
        """
        samples, window = self.samples, self.samples.rules.fifo_window
        if version in samples.batches.formed:
            return []
        before = None
        if window is not None:
            end = math.floor((version + window) * samples.contract.groups_per_batch + SLACK)
            before = samples.admission.places.first_at(end)
        groups = (samples.contract, version, samples.pool.eligible, samples.pool.counts.begun)
        limits = samples.domains.limits(samples.quarantined)
        chosen = choose(*groups, before=before, wait=samples.rules.on_expire == "wait", limits=limits)
        if chosen is None and not samples.leases.out and not self.available(version):
            # No further group can become complete, because all places are taken, for example by groups that a previous
            # hub began under other settings. Waiting would never end.
            return choose(*groups, before=before, wait=False)
        return chosen

    def commit(self, version: int) -> None:
        """Count the groups of the step that trained `version` as trained.

        Raises:
            ContractError: no batch of this step was taken, or a task or a token is unaccounted for.
        """
        if not self.samples.batches.training or self.samples.batches.step != version:
            raise ContractError(f"step {version} was committed, but no batch was formed for it")
        self._record_and_apply(Committed(version, self.samples.counts))

    def close(self) -> None:
        """Withdraw all groups that are left after the last step, and count their tokens as discarded."""
        self._record_and_apply(Closed())


def choose(
    contract: AgeContract,
    step: int,
    eligible: EligibleGroups,
    begun: Mapping[int, Sequence[int]],
    *,
    before: int | None,
    wait: bool,
    limits: Mapping[str, int] | None = None,
) -> list[int] | None:
    """Return the numbers of the groups of a step, those with the oldest tokens first; None while the step has to wait.

    If enough groups are eligible, the step takes them and does not wait for slower groups. It waits only if too few of
    them have a number below `before`, if `limits` leaves too few of them, or if `wait` is True and another group would
    be trained too late. This function runs after each result, so it must not loop over all groups; it loops over
    versions, of which there are few.

    Args:
        contract: the run's age contract.
        step: the version that is trained.
        eligible: the groups that may be trained.
        begun: by the oldest version of a group's tokens: the number of groups that have begun and that no step has
            taken yet, complete ones included, and how many of these are not complete.
        before: only groups with a smaller number may be chosen. None: all.
        wait: if True, return None while taking this batch would cost another group tokens: the steps after this one
            could not train that group before its oldest token is too old.
        limits: largest number of groups of each kind; kinds without an entry have no limit.
    """
    chosen = eligible.first(contract.groups_per_batch, before, limits)
    if chosen is None or (wait and not _all_in_time(contract, step + 1, begun, chosen)):
        return None
    return [group_id for groups in chosen.values() for group_id in groups]


def _all_in_time(
    contract: AgeContract, step: int, begun: Mapping[int, Sequence[int]], chosen: Mapping[int, Sequence[int]]
) -> bool:
    """Return True if all groups except the chosen ones can be trained from `step` on before their first tokens expire.

    The steps from `step` to s have room for s - step + 1 batches. So, for every s, the groups whose first token can be
    trained in step s at the latest must be no more than this room. If complete groups alone exceed this room, that
    step does not count: waiting would not change it.
    """
    total, waiting = 0, False
    for oldest in sorted(begun):
        groups, incomplete = begun[oldest]
        total += groups - len(chosen.get(oldest, ()))
        waiting = waiting or incomplete > 0
        last = contract.last_step(oldest)
        if waiting and total > max(0, last - step + 1) * contract.groups_per_batch:
            return False
    return True
