"""SampleStore: the state of every training task between its issue and the commit of its step.

The store has no tasks, clocks or files. It changes only by events (`flash.samples.journal`), and equal events lead to
equal states: in a running hub (`flash.samples.buffer` decides on an event and applies it) and in a replay.

A task is issued in a group (`issue`), is leased to a node (`lend`), and its result is delivered (`_deliver`). Then
`_settle` decides whether the group waits, is ready, is filtered out, or leaves. A step takes groups (`_take`) and
counts them as trained (`_commit`). After a step was formed, `_age_group` looks at each remaining group: members too old
for the next step leave, start again, or are trained before the rest. The *floor* of a member is the oldest version that
a token of it may have. A task is *given up* if it ends without being trained or filtered.

A group occupies a *place*, which it frees if it leaves untrained (`flash.samples.leases.Places`). *Lost* members were
given up, *beaten* members are redundant and too late, and *alive* members are queued, leased or done. A *closed* group
is of a problem that the present run does not have, so none of its members is started.

Conservation: every issued task is queued, leased, done, in a batch, or counted in the ledger as trained, filtered or
given up. Its tokens are counted as trained or discarded. `in_flight` counts tasks independently of the ledger.

The time of an event does not grow with the number of samples: work on many groups goes into the `backlog` and is done
in slices, each by one event. Each slice leaves a consistent state. No batch is formed while the backlog has work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from functools import partial
from itertools import count, islice
from typing import Literal

import msgspec

from algorithms.advantages import are_equal
from flash.errors import ContractError
from flash.samples.groups import FormedBatches, FormedGroup, Group, GroupPool, Ledger, Member
from flash.samples.journal import (
    Closed,
    Committed,
    Delivered,
    DeliveredLate,
    Event,
    Issued,
    Lent,
    Revoked,
    Taken,
    Tidied,
)
from flash.samples.leases import Admission, LeaseTable, Places, as_issued
from flash.samples.rules import Breaker, BufferSettings, DomainShares, DomainTotals, Streaks
from flash.samples.tasks import Cursor, TaskSource
from flash.types import Failure, Lease, Outcome

FILTER_BREAKER = 20
"""Number of batches: the run stops if as many groups as these batches have are filtered out in a row."""


class Backlog:
    """Work on many numbered items, in order, that is done in slices, so that no slice blocks the event loop for long.

    Args:
        slice_size: number of items in one slice.
    """

    def __init__(self, slice_size: int) -> None:
        self._slice_size = slice_size
        self._left: deque[tuple[Callable[[int], None], Iterator[int]]] = deque()

    def add(self, do: Callable[[int], None], numbers: Iterable[int]) -> None:
        """Add work: call `do` with each number, after the work added before. Then do one slice of all work."""
        # The numbers are copied, because the work itself may change the collection that they come from.
        self._left.append((do, iter(list(numbers))))
        self.work()

    def work(self) -> bool:
        """Do one slice. Returns True if work is left."""
        room = self._slice_size
        while self._left and room > 0:
            do, numbers = self._left[0]
            done = 0
            for number in islice(numbers, room):
                done += 1
                do(number)
            if done < room:
                self._left.popleft()
            room -= done
        return bool(self._left)

    def __bool__(self) -> bool:
        return bool(self._left)


class BufferState(msgspec.Struct):
    """State of a buffer in a checkpoint: everything that later events need."""

    # The encoded names of fields are part of the format of checkpoints.
    settings: BufferSettings = msgspec.field(name="made")
    """Settings of the buffer whose state this is."""
    cursor: Cursor
    """Position of the task source."""
    places: Places
    """Places of the groups, for admission."""
    groups: list[Group]
    """Groups of the pool, in the order of issue."""
    ledger: Ledger
    formed: list[FormedGroup] = msgspec.field(default_factory=list[FormedGroup], name="again")
    """Groups in batches that were formed and are not trained yet."""
    withdrawn: dict[int, Outcome] = {}
    """Reason of each withdrawn lease that its node has not reported yet, by the number of the lease."""
    streaks: Streaks = msgspec.field(default_factory=Streaks)
    """Counts of the breaker, which stops a run that only produces failed tasks or filtered groups."""
    domain_totals: DomainTotals | None = msgspec.field(default=None, name="shared")
    """Numbers of groups by domain, from which the shares of the domains follow. None if none were counted yet."""

    def unform_batches(self, step: int) -> set[int]:
        """Put the groups of formed batches back among the other groups.

        Called when a run resumes with a smaller largest age of tokens. Then the steps of these batches could train
        fewer of the tokens, so the batches have to be formed again.

        Returns the numbers of the groups with a token of a version > `step`. The run makes these versions again, so
        groups with tokens of the earlier versions of the same number must not be trained.
        """
        groups = {group.group_id: group for group in self.groups}
        for formed in sorted(self.formed, key=lambda formed: formed.step, reverse=True):
            part = formed.group
            groups.setdefault(part.group_id, part).rejoin(part)
            totals = self.domain_totals
            if totals is not None and part.kind in totals.trained and not part.earlier:
                totals.trained[part.kind] -= 1
        self.groups = [groups[group_id] for group_id in sorted(groups)]
        self.formed = []
        return {group.group_id for group in self.groups if group.newest > step}


class SampleStore:
    """State of all training tasks, groups and leases of a run, and of its ledger.

    Args:
        settings: settings by which the buffer decides.
        source: gives the tasks of groups. Its cursor is the cursor of `state`.
        step: the version that the trainer ranks hold.
        state: the state to continue from. None in a new run.
        same_incarnation: True if the same hub process continues, as in a replay. False if a new hub process starts from
            the state: it counts streaks of failures from zero, ends the quarantine of kinds, and expects no reports of
            withdrawn leases. Leases that nodes hold stay leased in both cases.
        lease_ids: numbers of new leases, which training and evaluation share. None: the numbers from 0.
    """

    def __init__(
        self,
        settings: BufferSettings,
        source: TaskSource,
        *,
        step: int,
        state: BufferState | None,
        same_incarnation: bool = False,
        lease_ids: Iterator[int] | None = None,
    ) -> None:
        contract, rules = settings.contract, settings.rules
        state = state or BufferState(settings, source.cursor, Places(), [], Ledger())
        stricter = contract.max_age < state.settings.contract.max_age
        from_future = state.unform_batches(step) if stricter else set[int]()
        self._settings = settings
        self.contract = contract
        self.rules = rules
        self.source = source
        self.pool = GroupPool(settings.slice_size)
        self.batches = FormedBatches(state.formed)
        self.backlog = Backlog(settings.slice_size)
        streaks = state.streaks if same_incarnation else None
        # A new hub process tries all kinds again: the user may have repaired an environment before resuming the run.
        tried_again = [] if same_incarnation else source.end_quarantine()
        self._breaker = Breaker(rules.breaker, rules.quarantine, FILTER_BREAKER * contract.groups_per_batch, streaks)
        self.leases = LeaseTable(lease_ids or count(), rules.retries, as_issued)
        next_step = max(step, self.batches.next_unformed)
        self.admission = Admission(contract, rules, source, state.places, self.leases, next_step)
        self.ledger = state.ledger
        self.domains = DomainShares(
            rules.domains,
            contract.groups_per_batch,
            rules.drift,
            # If a domain leaves quarantine, all domains start from zero. Otherwise that domain would make up for all
            # groups that it has missed, and the next batches would have groups of that domain only.
            None if tried_again else state.domain_totals,
            (group.kind for group in state.groups if not group.earlier),
        )
        self._withdrawable = 0
        """Number of groups that may still be withdrawn before the next step is formed. A group is withdrawn if a leased
        member may have tokens that are too old for the step (`_outgrown`)."""
        self.notes: list[str] = []
        """Messages for the user. The owner of the store reads and empties the list."""
        if tried_again:
            kinds = ", ".join(map(repr, tried_again))
            self.notes.append(f"environments of these kinds were in quarantine and are tried again: {kinds}")
        self._noted_failures: set[Outcome] = set()
        """Outcomes of failures for which `notes` has got an example, so that each is noted once."""
        self._restore(state, from_future, same_incarnation)

    def _restore(self, state: BufferState, from_future: set[int], same_incarnation: bool) -> None:
        """Put the groups of an earlier state into the pool, and decide about each under the present settings.

        `from_future`: numbers of the groups with tokens of versions that the run makes again. They are withdrawn.
        """
        if same_incarnation:
            self.leases.reasons.update(state.withdrawn)
        before, now = state.settings.rules.problems, self.rules.problems
        other_problems = bool(before and now and before != now)
        for group in (*state.groups, *(formed.group for formed in state.formed)):
            group.closed = group.closed or other_problems
        for group in state.groups:
            for member in group.members:
                if member.state == "leased":
                    self.leases.out[member.lease_id] = member
                elif member.state == "queued":
                    self.leases.put(member)
            self.pool.put_waiting(group)
            if group.group_id in from_future:
                self._withdraw(group)
            elif other_problems and not (group.complete and not group.earlier):
                self._end_unfinished(group)
            elif not group.complete or group.earlier:
                self._put_waiting(group)
            elif same_incarnation or self.rules.filter_of(group.kind).keeps(group):
                self.pool.put_ready(group)
            else:
                self._filter_out(group)
        if not same_incarnation:  # the age contract may have changed, and more groups may be too old
            self._age_groups()
        if other_problems:
            self.notes.append(
                "the environment's problems have changed since the last run: no more samples are started in the "
                f"{len(state.groups)} groups of the earlier problems. Groups with finished samples are trained as they "
                "are, and the other groups are given up"
            )

    def _end_unfinished(self, group: Group) -> None:
        """Give up the queued and leased members of a group, because the run's problems have changed.

        Finished members are trained without the others if the filter keeps the group. A group without finished members
        leaves.
        """
        self._drop_pending(group, "lost", Outcome.CANCELLED)
        if group.alive == 0:
            self._leave(group)
        elif group.earlier:
            # A part of the group was trained before. The next step takes the finished members as a late part.
            self._put_waiting(group)
        elif self.rules.filter_of(group.kind).keeps(group):
            self.pool.put_ready(group)
        else:
            self._filter_out(group)

    def snapshot(self) -> BufferState:
        """Return a copy of the present state. Later changes do not affect it.

        Call this only while no batch is in training and no backlog is left.
        """
        assert not self.batches.training, "a batch in training belongs to no consistent state"
        assert not self.backlog, "the backlog would be lost"
        counts = self.source.cursor, self.admission.places, self.ledger, self._breaker.streaks, self.domains.totals
        cursor, places, ledger, streaks, totals = deepcopy(counts)
        groups, formed, withdrawn = self.pool.copies(), self.batches.left(), dict(self.leases.reasons)
        return BufferState(self._settings, cursor, places, groups, ledger, formed, withdrawn, streaks, totals)

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Make the change of an event, which `flash.samples.buffer` has decided on in the present state.

        Raises:
            BreakerError: too many tasks were given up in a row, or too many groups were filtered out in a row. The
                change of the event is made before the error is raised.
            ContractError: the event does not fit the state, or the ledger does not account for each task and token.
        """
        match event:
            case Delivered():
                self._deliver(event)
            case Lent():
                self.lend(event)
            case Issued():
                self.issue(event)
            case DeliveredLate():
                self.ledger.generated_tokens += event.tokens
                self.ledger.discard(self.leases.take_reason(event.lease_id), event.tokens)
            case Revoked():
                self.backlog.add(self._revoke, event.lease_ids)
            case Tidied():
                self.backlog.work()
            case Taken():
                self._take(event)
            case Committed():
                self._commit(event)
            case Closed():
                self._close()
            case _:
                raise ContractError(f"the event {type(event).__name__} cannot be applied to a buffer")

    def issue(self, event: Issued) -> Group:
        """Issue a group for a problem: create its tasks and queue them. Returns the group."""
        tasks = self.admission.issue(event.problem)
        wanted = len(tasks) - self.rules.extra_per_group
        group = Group(tasks[0].group_id, wanted, [Member(task) for task in tasks])
        for member in group.members:
            self.leases.put(member)
        self.pool.put_waiting(group)
        self.domains.issued(group.kind)
        self.ledger.issued += len(tasks)
        return group

    def lend(self, event: Lent) -> list[Lease]:
        """Lease the members that the event names to the event's node. Returns the leases, in the order of the event.

        The members must be queued. They leave the queue, and count as leased until their results are delivered or their
        leases are withdrawn. The buffer calls this directly, without `apply`, because it needs the leases.

        Each lease has a number, the index of its member in the group, and the member's floor: the oldest version that a
        token of its sample may have.
        """
        group = self.pool[event.group_id]
        leases = [self.leases.grant(group.members[index], floor, number) for number, index, floor in event.leases]
        # After a restart of the hub, a node may claim the training leases that it held, so the state keeps their node.
        # `grant` does not set the node, because leases of evaluation tasks are never claimed.
        for _, index, _ in event.leases:
            group.members[index].node = event.node
        # The pool keeps counts of each group's members by state, which have to follow each change.
        self.pool.recount(group)
        return leases

    def _deliver(self, event: Delivered) -> None:
        """Store the result of a lease and decide about its group.

        Raises:
            BreakerError: too many tasks were given up in a row, or too many groups were filtered out in a row.
            ContractError: no node holds the lease.
        """
        member, result = self.leases.out.pop(event.lease_id, None), event.result
        if member is None:
            raise ContractError(f"a result was delivered for lease {event.lease_id}, which no node holds")
        group, given_up = self.pool[member.task.group_id], False
        self.ledger.generated_tokens += result.sampled_tokens
        if isinstance(result, Failure):
            self.ledger.discard(result.outcome, result.tokens)
            given_up = self._fail(member, result, event.node)
        else:
            member.state, member.trajectory, member.floor = "done", result, result.oldest_version
            self.ledger.discard(Outcome.CANCELLED, result.lost_tokens)
            self._breaker.finished(member.task)
        self._settle(group)
        if self.rules.waves and not self.leases.out:
            # All leases have ended, so the next wave of groups may be leased.
            self.admission.openings += 1
        # The breaker is called last, because it may raise. The group's state is consistent by then, so that a run can
        # be resumed from this state.
        if given_up and isinstance(result, Failure) and self._breaker.given_up(member.task, result):
            self._quarantine(member.task.kind, result)

    def _fail(self, member: Member, failure: Failure, node: int) -> bool:
        """Queue a failed task again, or give it up. Returns True if it was given up."""
        if failure.outcome not in self._noted_failures and failure.outcome is not Outcome.CANCELLED:
            self._noted_failures.add(failure.outcome)
            self.notes.append(f"the first sample that failed ({failure.outcome}): {failure.message}")
        if self.leases.retry(member, failure.outcome, node):
            self.ledger.retry(failure.outcome)
            self.admission.openings += 1
            return False
        self._drop(member, "lost", failure.outcome)
        if failure.outcome is Outcome.TOO_LONG:  # the other members have the same prompt
            self._drop_pending(self.pool[member.task.group_id], "lost", failure.outcome)
        return True

    def _revoke(self, lease_id: int) -> None:
        """Queue the task of a lease again, unless the lease was withdrawn before. Work of the backlog."""
        if (member := self.leases.revoke(lease_id)) is not None:
            self.ledger.retry(Outcome.CANCELLED)
            self.pool.recount(self.pool[member.task.group_id])
            self.admission.openings += 1

    def _quarantine(self, kind: str, failure: Failure) -> None:
        """Issue no more problems of a kind whose tasks keep failing. Give up the queued and leased tasks of this kind.

        Finished members of its groups stay and may be trained. `failure`: the last failure, for the note to the user.
        """
        self.source.quarantine(kind)
        of_kind = (group_id for group_id in self.pool if self.pool[group_id].kind == kind)
        self.backlog.add(partial(self._give_up_pending, failure.outcome), of_kind)
        self.notes.append(
            f"environments of kind {kind!r} are in quarantine: {self.rules.quarantine} of their samples in a row were "
            f"given up; the last one ({failure.outcome}): {failure.message}"
        )

    def _give_up_pending(self, outcome: Outcome, group_id: int) -> None:
        """Give up the queued and leased members of a group, and decide about the group. Work of the backlog."""
        if (group := self.pool.get(group_id)) is not None:
            self._drop_pending(group, "lost", outcome)
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """Decide after a member has finished or left whether its group is ready, is filtered out, leaves, or waits.

        A group that has left the pool already is ignored.
        """
        if self.pool.get(group.group_id) is None:
            return
        if group.complete:
            self._drop_pending(group, "beaten", Outcome.CANCELLED)
            self._count_ended(group)
        if self.pool.is_ready(group.group_id):
            self.pool.recount(group)
        elif group.alive == 0:
            self._leave(group)
        elif self._too_old(group):
            self._expire(group)
        elif group.complete and not group.earlier:
            self._admit_or_filter(group)
        else:
            self._put_waiting(group)

    def _count_ended(self, group: Group) -> None:
        """Count a group once for the metrics: when it is complete, or when its first part is trained."""
        rewards = [trajectory.reward for trajectory in group.trajectories()]
        if rewards and not group.counted:
            group.counted = True
            self.source.cursor.ended += 1
            self.source.cursor.equal += are_equal(rewards)

    def _admit_or_filter(self, group: Group) -> None:
        """Keep a complete group for a step, or filter it out."""
        if self.rules.filter_of(group.kind).keeps(group):
            self.pool.put_ready(group)
            self._breaker.kept()
            return
        self._filter_out(group)
        if in_a_row := self.domains.filtered(group.kind, self.quarantined):
            self.notes.append(
                f"of the domain {group.kind!r} {in_a_row} groups in a row were filtered out: its problems are all too "
                "easy or too hard. Until one of its groups is trained, filtered groups of this domain are not replaced"
            )
        self._breaker.filtered(group.kind)

    def _take(self, event: Taken) -> None:
        """Put the batch of a step into training.

        If a batch of this step was formed and not trained before a restart of the hub, this batch is taken. Otherwise
        the batch has the groups that the event names, and the late parts of groups that earlier steps have trained in
        part.
        """
        step = self.batches.step = event.step
        if step in self.batches.formed:
            formed = self.batches.formed[step]
            self.backlog.add(lambda group_id: self.batches.train(self.batches.take(step, group_id)), formed)
            return
        groups = (*event.groups, *self.pool.late_groups())
        for group_id in event.groups:
            self._count_ended(self.pool[group_id])
            self.domains.trained(self.pool[group_id].kind)
        self.pool.put_chosen(groups)
        self.backlog.add(lambda group_id: self.batches.train(self.pool.take(group_id)), groups)
        if step + 1 > self.admission.next_step:
            self.admission.next_step = step + 1
            self._withdrawable = self.contract.extra_groups
            self._age_groups()

    def _commit(self, event: Committed) -> None:
        """Count the groups of a step as trained in the ledger.

        Raises:
            ContractError: the ledger does not account for each task and token.
        """
        self.batches.step = None
        min_version = self.contract.min_token_version(event.step)
        self.backlog.add(partial(self._book_trained, min_version), self.batches.training)
        self.check()

    def _book_trained(self, min_version: int, group_id: int) -> None:
        """Count a group, or a part of a group, as trained in the ledger. Work of the backlog.

        `min_version`: oldest version whose tokens the step has trained. Older tokens count as discarded.
        """
        for trajectory in self.batches.trained(group_id).trajectories():
            self.ledger.train(trajectory.trained_tokens(min_version), trajectory.action_count)

    def _close(self) -> None:
        """Withdraw all groups that are left after the last step: redundant groups, and batches that are not trained."""
        for step, groups in list(self.batches.formed.items()):
            self.backlog.add(partial(self._withdraw_formed, step), groups)
        self.backlog.add(self._withdraw_number, self.pool)

    def _withdraw_number(self, group_id: int) -> None:
        """Withdraw the group with this number, if it is still in the pool. Work of the backlog."""
        if (group := self.pool.get(group_id)) is not None:
            self._withdraw(group)

    def _withdraw_formed(self, step: int, group_id: int) -> None:
        """Remove a group from a formed batch that will not be trained. Work of the backlog."""
        group = self.batches.take(step, group_id)
        for trajectory in group.trajectories():
            self.ledger.discard(Outcome.CANCELLED, trajectory.action_count)
            self.ledger.give_up(Outcome.CANCELLED)
        # The place becomes free, because the run may be resumed with more steps and can use the place again.
        if not group.earlier:
            self.admission.give_back(group_id)

    # -- members and groups that leave -------------------------------------------------------------------------------

    def _drop(self, member: Member, state: Literal["lost", "beaten"], outcome: Outcome) -> None:
        """Give up a member: it never becomes queued again. A leased member's lease is withdrawn.

        The tokens of a finished member count as discarded.

        Args:
            member: the member, which is alive.
            state: its new state.
            outcome: the reason, under which the ledger counts the member.
        """
        self.leases.remove(member, outcome)
        if member.trajectory is not None:
            self.ledger.discard(outcome, member.trajectory.action_count)
            member.trajectory = None
        member.state = state
        self.ledger.give_up(outcome)

    def _drop_pending(self, group: Group, state: Literal["lost", "beaten"], outcome: Outcome) -> None:
        """Give up the members of a group that are queued or leased."""
        for member in group.members:
            if member.state in ("queued", "leased"):
                self._drop(member, state, outcome)

    def _drop_done(self, group: Group, state: Literal["lost", "beaten"], outcome: Outcome) -> None:
        """Give up the finished members of a group."""
        for member in group.members:
            if member.state == "done":
                self._drop(member, state, outcome)

    def _leave(self, group: Group) -> None:
        """Remove a group from the pool. Its members are given up or filtered already.

        If no part of the group was trained, its place is free again, so that another group can replace it.
        """
        self.pool.remove(group.group_id)
        if not group.earlier:
            self.admission.give_back(group.group_id)
            self.domains.left(group.kind)

    def _filter_out(self, group: Group) -> None:
        """Remove a complete group that the filter does not keep, for example because all its rewards are equal."""
        self.ledger.filtered += group.alive
        for trajectory in group.trajectories():
            self.ledger.discard(Outcome.FILTERED, trajectory.action_count)
        self._leave(group)

    def _withdraw(self, group: Group) -> None:
        """Give up all members of a group that will not be trained, and remove the group."""
        self._drop_pending(group, "beaten", Outcome.CANCELLED)
        self._drop_done(group, "beaten", Outcome.CANCELLED)
        self._leave(group)

    def _expire(self, group: Group) -> None:
        """Give up the finished members of a group, because their tokens are too old for the next step.

        The group leaves unless members are queued or leased.
        """
        self._drop_done(group, "lost", Outcome.STALE)
        if group.pending == 0:
            self._leave(group)
        else:
            self.pool.recount(group)

    # -- age ---------------------------------------------------------------------------------------------------------

    def _age_groups(self) -> None:
        """Call `_age_group` for all groups, after `admission.next_step` has changed or a run was resumed."""
        if (oldest := next(iter(self.pool), None)) is not None:
            self.admission.places.forget(oldest)
        self.backlog.add(self._age_group, self.pool)

    def _age_group(self, group_id: int) -> None:
        """Decide about a group that is too old for the next step, or may be too old for the step after it.

        Such a group is withdrawn, loses its old members, has them started again, or waits for the next step, which may
        train its finished members. The settings `extra_groups` and `on_expire` decide. Work of the backlog.
        """
        group = self.pool.get(group_id)
        if group is None:
            return
        begun, step = self.pool.census.oldest(group_id), self.admission.next_step
        if begun is None or begun >= self.contract.window_start(step + 1):
            return  # no token was sampled yet, or the window of each member includes the next two steps
        oldest = self.contract.min_token_version(step)
        if self._withdrawable and self._outgrown(group, oldest):
            # A redundant group (`extra_groups`) replaces each group that is withdrawn here.
            self._withdrawable -= 1
            self._withdraw(group)
            return
        if self.rules.on_expire == "requeue":
            if group.closed and begun < oldest:
                # Members of a closed group are not started again: its problem is not one of the present run.
                self._expire(group)
                return
            self._start_again(group, oldest)
        if self._too_old(group):
            self._expire(group)
        elif not self.pool.is_ready(group_id):
            self._put_waiting(group)

    def _outgrown(self, group: Group, oldest: int) -> bool:
        """Return True if a waiting group has a leased member that may have tokens of a version before `oldest`."""
        if self.pool.is_ready(group.group_id) or group.earlier:
            return False
        return any(member.state == "leased" and member.floor < oldest for member in group.members)

    def _too_old(self, group: Group) -> bool:
        """Return True if the next step can train no token of the group. False for a group that is still incomplete.

        A group that earlier steps have trained in part counts as complete here.
        """
        if not (group.complete or group.earlier):
            return False
        return group.trained_tokens(self.contract.min_token_version(self.admission.next_step)) == 0

    def _put_waiting(self, group: Group) -> None:
        """Let a group wait in the pool for its queued and leased members.

        A member whose oldest token has version v should be trained by one of the steps v to v + ⌈α⌉, where α is the
        async ratio. These steps are its *window* (`AgeContract.window_start`). The group is marked as expiring if the
        next step is the last one in the window of a finished member. Then that step may train the finished members
        without the others.
        """
        expiring = False
        if self.rules.on_expire == "mask" and self.contract.splits and not group.complete and not group.earlier:
            step = self.admission.next_step
            expiring = (
                group.expiring(self.contract.window_start(step + 1))
                and group.trained_tokens(self.contract.min_token_version(step)) > 0
                and self.rules.filter_of(group.kind).keeps(group)
            )
        self.pool.put_waiting(group, expiring=expiring)

    def _start_again(self, group: Group, oldest: int) -> None:
        """Queue the members again that may have a token older than version `oldest`. Their tokens are discarded.

        Each member keeps its place in the queue.
        """
        old = [member for member in group.members if member.state in ("leased", "done") and member.floor < oldest]
        for member in old:
            if member.trajectory is not None:
                self.ledger.discard(Outcome.STALE, member.trajectory.action_count)
                member.trajectory = None
            else:
                self.leases.remove(member, Outcome.STALE)
            self.ledger.retry(Outcome.STALE)
            self.leases.put(member)
            self.admission.openings += 1
        if old:
            self.pool.put_waiting(group)

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def quarantined(self) -> list[str]:
        """Kinds whose problems are not issued any more, because too many of their tasks were given up in a row."""
        return self.source.cursor.quarantined

    @property
    def in_flight(self) -> int:
        """Number of tasks that were issued and are not trained, filtered or given up."""
        return self.pool.census.in_flight + self.batches.in_flight

    @property
    def buffered_tokens(self) -> int:
        """Number of action tokens of trajectories that wait for a step or are in a batch."""
        return self.pool.census.tokens + self.batches.tokens

    @property
    def books(self) -> tuple[int, int, int]:
        """Number of tasks issued, of tasks in flight and of tokens generated.

        Equal events lead to equal numbers, so a replay compares them with the recorded numbers (`Committed.books`).
        """
        return self.ledger.issued, self.in_flight, self.ledger.generated_tokens

    def totals(self) -> dict[str, int]:
        """Return the ledger as flat numbers, for summaries."""
        return self.ledger.totals(self.in_flight)

    def check(self) -> None:
        """Compare the ledger with the tasks and tokens in the pool and in batches.

        Raises:
            ContractError: the ledger does not account for each issued task and each generated token.
        """
        self.ledger.check(self.in_flight, self.buffered_tokens)
