"""SampleBuffer: every training task between its issue and the commit of its step, as a pure state machine.

It decides; what follows from a decision is in `flash.samples.state`, whose conservation law is its own.

- *Admission* follows the age contract (`flash.samples.admission`).
- *Redundancy*: the first members of a group to finish win, the others are withdrawn at once; so are groups that miss
  their window, as far as `extra_groups` stand in for them.
- *Choice* is made by `flash.samples.choice`, filtering by `flash.samples.groups.GroupFilter`; what leaves without
  reaching a batch gives its place back.
- *Consumption*: tokens that are too old all the same are left out of the loss, and counted; or their sample is started
  again (`on_expire`). Members that would expire while another one of their group is still on its way are trained before
  it; the late ones join a later step, on top of its groups (`flash.samples.leaving`).

No call takes longer the more samples are in flight: what concerns all groups is counted as they change
(`flash.samples.pool`), and what has to be done to many of them is done in slices (`flash.samples.slices`), of which
the owner calls for the rest. After each slice the state is sound, and no batch is formed while one is left.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence

from flash.ages import SLACK
from flash.errors import ContractError
from flash.samples.choice import choose
from flash.samples.groups import Group, Member
from flash.samples.journal import (
    NO_JOURNAL,
    Began,
    Closed,
    Committed,
    Ended,
    Event,
    Issued,
    Journal,
    Lent,
    Made,
    Revoked,
    Taken,
    Tidied,
    Wasted,
)
from flash.samples.rules import AgeContract, BufferRules
from flash.samples.state import BufferState, Samples
from flash.samples.tasks import TaskSource
from flash.types import Failure, Lease, Trajectory

MEMBERS_AT_ONCE = 512
"""Members whose groups are dealt with in one slice: each takes a few microseconds, ten at most."""


class SampleBuffer:
    """See the module's docstring.

    Args:
        contract: the run's age contract.
        source: which prompt comes next; its cursor is that of the state.
        rules: what of the configuration concerns samples.
        step: the version that the trainers hold.
        state: what a former incarnation left.
        lease_ids: numbers the leases of the whole run, those of evaluations included.
        members_at_once: the number of samples whose groups are dealt with in one slice, at least one group.
        journal: is told of every change before it is made.
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
        members_at_once: int = MEMBERS_AT_ONCE,
        journal: Journal = NO_JOURNAL,
    ) -> None:
        made = Made(contract, rules, max(1, members_at_once // contract.group_size))
        self.journal = journal
        journal.record(Began(step, made))
        self.samples = Samples(made, source, step=step, state=state, lease_ids=lease_ids)
        """What there is."""

    def _do(self, event: Event) -> None:
        self.journal.record(event)
        self.samples.apply(event)

    def tidy(self) -> bool:
        """Do a slice of what was put off; tells whether more is left. Raises BreakerError."""
        if self.samples.backlog:
            self._do(Tidied())
        return bool(self.samples.backlog)

    # -- leases ------------------------------------------------------------------------------------------------------

    def at_hand(self, newest: int) -> int:
        """Tasks that `lease` could hand out to nodes whose newest engine runs this version.

        0 only if there is none for any node; of the last group some members too many may be counted."""
        return self.samples.admission.at_hand(newest)

    def lease(self, versions: Sequence[int], node: int = 0, *, nodes: Collection[int] = ()) -> Lease | None:
        """Hand out the next task that a node may run, or None.

        Args:
            versions: what the node's engines run.
            node: its number. A task goes to another node than those it failed on, as long as there is one.
            nodes: all nodes that could take it.

        Raises:
            BreakerError: every kind of environment is quarantined.
        """
        newest, admission = max(versions, default=-1), self.samples.admission
        if (member := self.samples.leases.queue.first_for(node, nodes)) is not None:
            return self._hand_out([member], versions, node)[0] if admission.admits(member, newest) else None
        if not admission.room_for_group(newest):
            return None
        domain = self.samples.domains.next(self.samples.quarantined)
        issued = Issued(self.samples.source.next_problem(domain))
        self.journal.record(issued)
        return self._hand_out(self.samples.issue(issued).members[:1], versions, node)[0]

    def lease_rest(self, lease: Lease, versions: Sequence[int], node: int = 0) -> list[Lease]:
        """The queued members of the same group, which go to the same node."""
        queued = [member for member in self.samples.pool[lease.task.group_id].members if member.state == "queued"]
        return self._hand_out(queued, versions, node) if queued else []

    def _hand_out(self, members: Sequence[Member], versions: Sequence[int], node: int) -> list[Lease]:
        """The leases on queued tasks of a group. No token is older than the slowest engine that admission allows."""
        floor, ids = self.samples.admission.floor, self.samples.leases.ids
        numbered = [(next(ids), member.task.sample_index, floor(member, versions)) for member in members]
        lent = Lent(members[0].task.group_id, node, numbered)
        self.journal.record(lent)
        return self.samples.lend(lent)

    # -- results -----------------------------------------------------------------------------------------------------

    def finish(self, lease_id: int, result: Trajectory | Failure, node: int = 0) -> None:
        """Take what a lease brought home. An unknown lease, one that was withdrawn, only books its tokens.

        Raises:
            BreakerError: too many tasks in a row were given up, or too many groups filtered out.
        """
        if lease_id in self.samples.leases.out:
            self._do(Ended(lease_id, node, result))
        else:
            self._do(Wasted(lease_id, result.sampled))

    def revoke(self, lease_ids: Iterable[int]) -> None:
        """The node of these leases is gone, or nobody has claimed them: their tasks queue again."""
        self._do(Revoked(list(lease_ids)))

    # -- consumption -------------------------------------------------------------------------------------------------

    def can_take(self, version: int) -> bool:
        """Whether `take` would get anywhere."""
        samples = self.samples
        if samples.backlog:
            return False
        return samples.batches.taken == version or self._choose(version) is not None

    def take(self, version: int) -> list[Group] | None:
        """Return the groups of the step that trains version `version`.

        None while there are too few, or while what was chosen is still being gathered: `tidy`, and ask again.
        """
        samples = self.samples
        if not samples.backlog and samples.batches.taken != version and (chosen := self._choose(version)) is not None:
            if samples.contract.max_age == 0:
                # In the order of problems, not of numbers: which replacement has which number is a matter of time.
                chosen.sort(key=lambda group_id: samples.pool[group_id].members[0].task.seed)
            self._do(Taken(version, chosen))
        if samples.backlog or samples.batches.taken != version:
            return None
        return list(samples.batches.training.values())

    def _choose(self, version: int) -> list[int] | None:
        """The groups of a step; none where it was formed before."""
        samples, window = self.samples, self.samples.rules.fifo_window
        if version in samples.batches.formed:
            return []
        before = None
        if window is not None:
            end = math.floor((version + window) * samples.contract.groups_per_batch + SLACK)
            before = samples.admission.places.first_at(end)
        groups = (samples.contract, version, samples.pool.eligible, samples.pool.census.begun)
        most = samples.domains.most(samples.quarantined)
        chosen = choose(*groups, before=before, wait=samples.rules.on_expire == "wait", most=most)
        if chosen is None and not samples.leases.out and not self.at_hand(version):
            # All places are taken, as by what a former incarnation has begun under other options: no use to wait.
            return choose(*groups, before=before, wait=False)
        return chosen

    def commit(self, version: int) -> None:
        """The step that trained `version` is done: book its groups.

        Raises:
            ContractError: no batch of this step was taken, or a task or a token is unaccounted for.
        """
        if not self.samples.batches.training or self.samples.batches.taken != version:
            raise ContractError(f"step {version} was committed, but no batch was handed out for it")
        self._do(Committed(version, self.samples.books))

    def close(self) -> None:
        """The last step is committed: what redundancy left over is withdrawn and booked."""
        self._do(Closed())
