"""SampleStore: the state of every training task between its issue and the commit of its step.

The store owns no anyio task, clock or file. It changes only by events (`flash.samples.journal`), and equal events lead
to equal states: in a running hub, where `flash.samples.buffer` decides on an event and applies it, and in a replay.
Each event calls one method.

A group of tasks is issued (`issue`), its members are leased to nodes (`lease`), and the nodes deliver results
(`deliver`). After a member has changed, `_decide_by_members` decides whether its group waits, is ready for a step, is
filtered out, or leaves. A step takes groups (`take`) in one or several *rounds*, and counts them as trained (`commit`).
After the last round, `_decide_by_age` looks at each group that is left, and withdraws, gives up or restarts members
that are too old.

`flash.samples.groups` explains the states of members and groups. A task is *given up* if it ends untrained and
unfiltered. A group is *complete* when enough members are done, and *partly trained* if a step has trained some of them.
It is *closed* if the environment of the resumed run does not have its problem: then no member is started any more. Its
*place* is its number for admission (`flash.samples.tasks.Places`); a group that leaves untrained gives its place back.

Conservation: every issued task is queued, leased, done, in a batch, or counted in the ledger as trained, filtered or
given up. Its tokens are counted as trained or discarded. `in_flight` counts tasks independently of the ledger.
Applying an event takes a bounded time: work on many groups goes into the `backlog` and is done in slices, by this event
and later ones. So each of them may raise the errors of any slice (BreakerError). Each slice leaves a consistent state.
No batch is formed while the backlog has work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import count, islice
from typing import Literal

import msgspec

from algorithms.advantages import are_equal
from flash.errors import ContractError
from flash.samples.groups import FormedBatches, FormedGroup, Group, GroupPool, Ledger, Member
from flash.samples.rules import Breaker, BufferSettings, DomainShares, DomainTotals, Streaks
from flash.samples.tasks import Admission, Cursor, LeaseTable, Places, Problem, TaskSource, by_issue
from flash.types import Failure, Lease, Outcome, Trajectory

FILTER_BREAKER = 20
"""Number of batches. If the groups of this many batches in a row are all filtered out, the run stops, because it learns
nothing."""


class Backlog:
    """Queue of postponed work on numbered groups or leases, done in slices that do not block the event loop for long.

    Args:
        slice_size: number of items in one slice.
    """

    def __init__(self, slice_size: int) -> None:
        self._slice_size = slice_size
        self._left: deque[tuple[Callable[[int], None], Iterator[int]]] = deque()

    def add(self, do: Callable[[int], None], numbers: Iterable[int]) -> None:
        """Add the work to call `do` with each number. Then do one slice of all work: small work is done at once."""
        # The numbers are copied, because the work itself may change the collection that they come from.
        self._left.append((do, iter(list(numbers))))
        self.do_slice()

    def do_slice(self) -> bool:
        """Call the functions for the next `slice_size` numbers. Returns True if work is left.

        If a function raises an error, the slice ends with this error. The numbers after it are left for later slices.
        """
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
        """Return True if work is left."""
        return bool(self._left)


class BufferState(msgspec.Struct):
    """State of a buffer in a checkpoint: everything that a replay of later events, or the next hub, needs."""

    # The encoded names of fields are part of the format of checkpoints.
    settings: BufferSettings = msgspec.field(name="made")
    """Settings of the buffer whose state this is."""
    cursor: Cursor
    """Position of the task source."""
    places: Places
    """Places of the groups, by which admission decides which task may start."""
    groups: list[Group]
    """Groups that no step has taken yet, in the order of issue."""
    ledger: Ledger
    """Counts of all tasks and tokens of the run."""
    formed: list[FormedGroup] = msgspec.field(default_factory=list[FormedGroup], name="again")
    """Groups, or parts of groups, in batches that were formed and are not trained yet."""
    withdrawn: dict[int, Outcome] = {}
    """Reason of each withdrawn lease that its node has not reported yet, by the number of the lease."""
    streaks: Streaks = msgspec.field(default_factory=Streaks)
    """Counts of the breaker, which ends a run in which too many tasks or groups in a row fail."""
    domain_totals: DomainTotals | None = msgspec.field(default=None, name="shared")
    """Numbers of groups by domain, from which the shares of the domains follow. None if none were counted yet. A
    *domain* is a kind of problem that has a share of the groups."""

    def unform_batches(self, step: int) -> set[int]:
        """Put the groups of formed batches back among the other groups.

        A new store calls this if the run resumes with a smaller largest age of tokens. The formed batches have tokens
        that are too old by the new limit, so they have to be formed again from all groups.

        Args:
            step: the version from which the run continues.

        Returns:
            The numbers of the groups that have a token of a version newer than `step`. Since other batches are trained
            now, the run will make other weights under these numbers, so the groups must not be trained.
        """
        groups = {group.group_id: group for group in self.groups}
        # Several parts of one group may be in different batches. The newest part comes first, because `rejoin` undoes
        # the splits in reverse order.
        for formed in sorted(self.formed, key=lambda formed: formed.step, reverse=True):
            part = formed.group
            groups.setdefault(part.group_id, part).rejoin(part)
            # The group was counted for its domain when the batch was formed. Undo this: the group is counted again when
            # a step takes it.
            totals = self.domain_totals
            if totals is not None and part.kind in totals.trained and not part.partly_trained:
                totals.trained[part.kind] -= 1
        self.groups = [groups[group_id] for group_id in sorted(groups)]
        self.formed = []
        return {group.group_id for group in self.groups if group.newest_version > step}


class SampleStore:
    """State of all training tasks, groups and leases of a run, and of its ledger.

    `SampleBuffer` makes one for a running hub, and `Replay` makes one for each hub process whose events it applies.

    Args:
        settings: settings by which the buffer decides.
        source: gives the tasks of groups. Its cursor is the cursor of `state`.
        step: the version from which the run continues.
        state: the state to continue from, which the store changes. None in a new run.
        same_process: True if the events that follow are of the hub process that wrote `state`, as in a replay.
            False if a new hub process starts from the state. It then counts streaks of failures from zero, and does not
            keep the reasons of withdrawn leases. It also ends the quarantine of kinds: a kind whose tasks keep failing
            gets no more tasks until then. Leases that nodes hold stay leased in both cases.
        lease_ids: numbers of new leases, which training and evaluation share. None: the numbers from 0.
    """

    def __init__(
        self,
        settings: BufferSettings,
        source: TaskSource,
        *,
        step: int,
        state: BufferState | None,
        same_process: bool = False,
        lease_ids: Iterator[int] | None = None,
    ) -> None:
        contract, rules = settings.contract, settings.rules
        state = state or BufferState(settings, source.cursor, Places(), [], Ledger())
        former_max_age = state.settings.contract.max_age
        # With a smaller largest age, batches that a previous hub has formed would have tokens that are too old.
        unreached = state.unform_batches(step) if contract.max_age < former_max_age else set[int]()
        self._settings = settings
        self.contract = contract
        self.rules = rules
        self.source = source
        self.pool = GroupPool(settings.slice_size)
        self.batches = FormedBatches(state.formed)
        self.backlog = Backlog(settings.slice_size)
        streaks = state.streaks if same_process else None
        # A new hub process tries all kinds again: the user may have repaired an environment before resuming the run.
        tried_again = [] if same_process else source.end_quarantine()
        self._breaker = Breaker(rules.breaker, rules.quarantine, FILTER_BREAKER * contract.groups_per_batch, streaks)
        self.leases = LeaseTable(lease_ids or count(), rules.retries, by_issue)
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
            (group.kind for group in state.groups if not group.partly_trained),
        )
        self._withdrawable = 0
        """Number of groups that may still be withdrawn for their age before the next batch is formed. A batch that is
        taken sets it to `rollout.extra_groups`: so many redundant groups can take the places of withdrawn ones."""
        self.notes: list[str] = []
        """Messages for the user. The hub reads and empties the list after each delivery."""
        if contract.max_age != former_max_age:
            # The limit may change without a changed key: it follows from the async ratio and from Flash's own default.
            self.notes.append(
                f"from step {step} on, the largest age of a trained token is {contract.max_age} versions, and before "
                f"it was {former_max_age} (train.max_token_age)"
            )
        if tried_again:
            kinds = ", ".join(map(repr, tried_again))
            self.notes.append(f"environments of these kinds were in quarantine and are tried again: {kinds}")
        self._noted_failures: set[Outcome] = set()
        """Outcomes of failures for which `notes` has got an example, so that each is noted once."""
        self._restore(state, unreached, same_process)

    def _restore(self, state: BufferState, unreached: set[int], same_process: bool) -> None:
        """Put the groups of an earlier state into the pool, and decide about each under the present settings.

        Each group is withdrawn, put among the waiting or ready groups, or filtered out. If the run has other problems,
        an unfinished group starts no more members: those that are finished are trained, if the filter keeps the group.
        It is given up if no member is finished.

        Args:
            state: the earlier state. Its groups become the groups of the pool and may be changed.
            unreached: numbers of the groups with tokens of versions newer than the version from which the run
                continues. The run will make other weights under these numbers, so the groups are withdrawn.
            same_process: True in a replay, which repeats the events of the hub process that wrote `state`; False in a
                new hub process.
        """
        if same_process:
            self.leases.withdrawal_reasons.update(state.withdrawn)
        # `problems` is a fingerprint of the environment's set of problems. If it is empty, the set is unknown, and
        # counts as unchanged.
        before, now = state.settings.rules.problems, self.rules.problems
        other_problems = bool(before and now and before != now)
        # Also close the groups of formed batches: if a later resume unforms the batches, no member of them may start.
        for group in (*state.groups, *(formed.group for formed in state.formed)):
            group.closed = group.closed or other_problems
        for group in state.groups:
            # The queue and the leases are not stored: they follow from the states of the members.
            for member in group.members:
                if member.state == "leased":
                    self.leases.out[member.lease_id] = member
                elif member.state == "queued":
                    self.leases.put(member)
            # Every group enters the pool first. The decisions below may remove it again.
            self.pool.put_waiting(group)
            unfinished = not group.complete or group.partly_trained
            if group.group_id in unreached:
                self._withdraw(group)
            elif unfinished and other_problems:
                self._end_closed(group)
            elif unfinished:
                self._put_waiting(group)
            # The previous hub process has removed all groups that its filter did not keep. A new process may have
            # another filter, so it asks the filter again.
            elif same_process or self.rules.filter_of(group.kind).keeps(group):
                self.pool.mark_ready(group)
            else:
                self._filter_out(group)
        if not same_process:
            # The settings may allow a smaller age now, so more groups may be too old.
            self._decide_all_by_age()
        if other_problems:
            self.notes.append(
                "the environment's problems have changed since the last run: no more samples are started in the "
                f"{len(state.groups)} groups of the earlier problems. Groups with finished samples are trained as they "
                "are, and the other groups are given up"
            )

    def _end_closed(self, group: Group) -> None:
        """Give up the queued and leased members of a closed group, and decide about the finished members.

        The finished members are trained alone if the filter keeps the group. A group without finished members leaves.
        """
        self._give_up_pending(group, "lost", Outcome.CANCELLED)
        if group.alive == 0:
            self._remove(group)
        elif group.partly_trained:
            # The next step takes the finished members as a late part. Late parts are never filtered out.
            self._put_waiting(group)
        elif self.rules.filter_of(group.kind).keeps(group):
            self.pool.mark_ready(group)
        else:
            self._filter_out(group)

    def snapshot(self) -> BufferState:
        """Return a copy of the present state. Later changes do not affect it.

        The hub calls this for each checkpoint, and a replay for each state that it returns. No batch may be in
        training, and no backlog may be left.
        """
        assert not self.batches.training, "a batch in training belongs to no consistent state"
        assert not self.backlog, "the backlog would be lost"
        counts = self.source.cursor, self.admission.places, self.ledger, self._breaker.streaks, self.domains.totals
        cursor, places, ledger, streaks, totals = deepcopy(counts)
        groups, formed, withdrawn = self.pool.copies(), self.batches.all_groups(), dict(self.leases.withdrawal_reasons)
        return BufferState(self._settings, cursor, places, groups, ledger, formed, withdrawn, streaks, totals)

    # -- events ------------------------------------------------------------------------------------------------------

    def issue(self, problem: Problem) -> Group:
        """Issue a group for a problem: create its tasks, queue them, and count them. Returns the group."""
        tasks = self.admission.issue(problem)
        # `extra_per_group` members are redundant: the group is complete without its slowest members.
        results_needed = len(tasks) - self.rules.extra_per_group
        group = Group(tasks[0].group_id, results_needed, [Member(task) for task in tasks])
        for member in group.members:
            self.leases.put(member)
        self.pool.put_waiting(group)
        self.domains.issued(group.kind)
        self.ledger.issued += len(tasks)
        return group

    def lease(self, group_id: int, node: int, leases: Sequence[tuple[int, int, int]]) -> list[Lease]:
        """Lease queued members of a group to a node. Returns the leases, in the given order.

        The members leave the queue, and count as leased until their results are delivered or their leases are withdrawn
        or revoked. Each member keeps the number of its node.

        `leases`: for each lease its number, the index of the member in the group, and `Lease.min_version`.
        """
        group = self.pool[group_id]
        granted = [self.leases.grant(group.members[index], oldest, number) for number, index, oldest in leases]
        # After a restart of the hub, a node may claim the training leases that it held, so the state keeps their node.
        # `grant` does not set the node, because leases of evaluation tasks are never claimed.
        for _, index, _ in leases:
            group.members[index].node = node
        # The pool keeps counts of each group's members by state, which have to follow each change.
        self.pool.recount(group)
        return granted

    def deliver(self, lease_id: int, node: int, result: Trajectory | Failure) -> None:
        """Store the result of a lease and decide about its group. A failed task is queued again or given up.

        Raises:
            BreakerError: too many tasks were given up in a row, or too many groups were filtered out in a row.
            ContractError: no node holds the lease.
        """
        if (member := self.leases.out.pop(lease_id, None)) is None:
            raise ContractError(f"a result was delivered for lease {lease_id}, which no node holds")
        group, given_up = self.pool[member.task.group_id], False
        self.ledger.generated_tokens += result.sampled_tokens
        if isinstance(result, Failure):
            self.ledger.discard(result.outcome, result.tokens)
            given_up = self._fail(member, result, node)
        else:
            member.state, member.trajectory, member.oldest_version = "done", result, result.oldest_version
            self.ledger.discard(Outcome.CANCELLED, result.lost_tokens)
            self._breaker.finished(member.task)
        self._decide_by_members(group)
        if self.rules.waves and not self.leases.out:
            # All leases have ended, so the next wave of groups may be leased.
            self.admission.openings += 1
        # The breaker is called last, because it may raise. The group's state is consistent by then, so that a run can
        # be resumed from this state.
        if given_up and isinstance(result, Failure) and self._breaker.given_up(member.task, result):
            self._quarantine(member.task.kind, result)

    def deliver_late(self, lease_id: int, tokens: int) -> None:
        """Count the tokens of a result whose lease was withdrawn or revoked before. The result is not kept.

        `tokens`: number of action tokens that were sampled for the lease.
        """
        self.ledger.generated_tokens += tokens
        self.ledger.discard(self.leases.take_reason(lease_id), tokens)

    def revoke(self, lease_ids: Iterable[int]) -> None:
        """Queue the tasks of leases again, in slices.

        Their node is lost or silent, or no node has claimed the leases after a restart of the hub.
        """
        self.backlog.add(self._queue_again, lease_ids)

    def _fail(self, member: Member, failure: Failure, node: int) -> bool:
        """Queue a failed task again, or give it up. Returns True if it was given up.

        A task whose prompt leaves no room for a response is given up together with all unfinished members of its group.
        The first failure with each outcome, except a cancelled task, becomes a note for the user.
        """
        if failure.outcome not in self._noted_failures and failure.outcome is not Outcome.CANCELLED:
            self._noted_failures.add(failure.outcome)
            self.notes.append(f"the first sample that failed ({failure.outcome}): {failure.message}")
        if self.leases.retry(member, failure.outcome, node):
            self.ledger.retry(failure.outcome)
            self.admission.openings += 1
            return False
        self._give_up(member, "lost", failure.outcome)
        if failure.outcome is Outcome.TOO_LONG:
            # The other members have the same prompt.
            self._give_up_pending(self.pool[member.task.group_id], "lost", failure.outcome)
        return True

    def _queue_again(self, lease_id: int) -> None:
        """Queue the task of a revoked lease again. The backlog calls this for each lease of `revoke`.

        If the lease was withdrawn before, nothing is queued, and `leases.revoke` forgets the reason of the withdrawal.
        """
        if (member := self.leases.revoke(lease_id)) is not None:
            # The ledger counts the lost attempt. The number of the task's attempts stays, because it has not failed.
            self.ledger.retry(Outcome.CANCELLED)
            self.pool.recount(self.pool[member.task.group_id])
            # Makes the hub offer tasks to waiting nodes (`Admission.openings`).
            self.admission.openings += 1

    def _quarantine(self, kind: str, failure: Failure) -> None:
        """Issue no more problems of a kind whose tasks keep failing. Give up the queued and leased tasks of this kind.

        A kind is the environment of a task, in a run that mixes several. Finished members of the kind's groups stay and
        may be trained. `failure` is the last failure, for the note to the user. Raises the error of
        `_decide_by_members`.
        """
        self.source.quarantine(kind)
        of_kind = (group_id for group_id in self.pool if self.pool[group_id].kind == kind)
        self.backlog.add(partial(self._end_quarantined, failure.outcome), of_kind)
        self.notes.append(
            f"environments of kind {kind!r} are in quarantine: {self.rules.quarantine} of their samples in a row were "
            f"given up; the last one ({failure.outcome}): {failure.message}"
        )

    def _end_quarantined(self, outcome: Outcome, group_id: int) -> None:
        """Give up the queued and leased members of a group, and decide about the group. The backlog calls this.

        Raises the error of `_decide_by_members`.
        """
        if (group := self.pool.get(group_id)) is not None:
            self._give_up_pending(group, "lost", outcome)
            self._decide_by_members(group)

    def _decide_by_members(self, group: Group) -> None:
        """Decide whether a group of the pool is ready, is filtered out, leaves or waits, after a member has changed.

        The change is that a member has finished, failed, or was given up. A group that has just become complete loses
        its other members, which are redundant. Raises BreakerError if too many groups were filtered out in a row. The
        decision is made before the error is raised.
        """
        if group.complete:
            self._give_up_pending(group, "beaten", Outcome.CANCELLED)
            self._count_ended(group)
        if self.pool.is_ready(group.group_id):
            # The group was ready before, or a step has chosen it and takes it, with this member, in a later slice.
            self.pool.recount(group)
        elif group.alive == 0:
            # All members have failed.
            self._remove(group)
        elif self._has_only_old_tokens(group):
            self._give_up_too_old(group)
        elif group.complete and not group.partly_trained:
            self._keep_or_filter(group)
        else:
            # Members are missing, or the group is partly trained: the next step takes its finished members unfiltered.
            self._put_waiting(group)

    def _count_ended(self, group: Group) -> None:
        """Count a group, and whether the rewards of its finished members are all equal, for the metrics.

        Each group is counted once: when it is complete, or when a step takes its first part.
        """
        rewards = [trajectory.reward for trajectory in group.trajectories()]
        if rewards and not group.counted:
            group.counted = True
            self.source.cursor.ended += 1
            self.source.cursor.equal += are_equal(rewards)

    def _keep_or_filter(self, group: Group) -> None:
        """Keep a complete group for a step, or filter it out.

        Raises BreakerError if too many groups were filtered out in a row. The group is removed before that.
        """
        if self.rules.filter_of(group.kind).keeps(group):
            self.pool.mark_ready(group)
            self._breaker.kept()
            return
        self._filter_out(group)
        if in_a_row := self.domains.filtered(group.kind, self.quarantined):
            self.notes.append(
                f"of the domain {group.kind!r} {in_a_row} groups in a row were filtered out: its problems are all too "
                "easy or too hard. Until one of its groups is trained, filtered groups of this domain are not replaced"
            )
        self._breaker.filtered(group.kind)

    def take(self, step: int, group_ids: Sequence[int], *, is_open: bool) -> None:
        """Put groups of a step into training, in slices. If they make its batch whole, decide about the age of the
        groups that stay.

        The last round has the groups with the numbers `group_ids`, and the late parts of partly trained groups. But if
        a previous hub had formed a batch for this step that was not trained, that batch is taken instead.

        Args:
            step: the version that the step trains.
            group_ids: numbers of the groups.
            is_open: True if the batch is not whole with these groups. All of them must be complete.
        """
        self.batches.step, self.batches.open = step, is_open
        if step in self.batches.formed:
            # Decisions about ages were made when this batch was formed the first time.
            formed = self.batches.formed[step]
            self.backlog.add(
                lambda group_id: self.batches.add_to_step(self.batches.take_formed(step, group_id)), formed
            )
            return
        groups = (*group_ids, *([] if is_open else self.pool.late_groups()))
        for group_id in group_ids:
            self._count_ended(self.pool[group_id])
            self.domains.trained(self.pool[group_id].kind)
        # The groups are taken in slices. A result that arrives meanwhile must not make a chosen group wait again.
        self.pool.mark_chosen(groups)
        self.backlog.add(lambda group_id: self.batches.add_to_step(self.pool.take(group_id)), groups)
        if not is_open and step + 1 > self.admission.next_step:
            self.admission.next_step = step + 1
            self._withdrawable = self.contract.extra_groups
            self._decide_all_by_age()

    def put_back(self) -> None:
        """Put the groups of the running step back among the ready groups, in slices. The step ends untrained.

        `TrainingSteps` calls this after an interrupt of the run, if more rounds of the step would have to follow: the
        run ends without waiting for them. A resumed run trains the groups. The batch is not whole, so each of its
        groups is complete and was taken whole. Groups stay in `batches.training` until their slice.
        """
        assert self.batches.open, "a whole batch is trained"
        self.batches.step, self.batches.open = None, False
        self.backlog.add(self._put_back, self.batches.training)

    def _put_back(self, group_id: int) -> None:
        """Make a group of the given-up step ready again. The backlog calls this after `put_back`."""
        group = self.batches.remove_from_step(group_id)
        self.domains.put_back(group.kind)
        self.pool.put_waiting(group)
        self.pool.mark_ready(group)

    def commit(self, step: int) -> None:
        """Count the groups of the running step as trained in the ledger, in slices. The step is over.

        Groups stay in `batches.training` until their slice. Raises ContractError if the ledger does not account for
        each task and token (`check`).
        """
        self.batches.step = None
        min_version = self.contract.min_token_version(step)
        self.backlog.add(partial(self._count_trained, min_version), self.batches.training)
        self.check()

    def _count_trained(self, min_version: int, group_id: int) -> None:
        """Count a group, or a part of a group, as trained in the ledger. The backlog calls this after `commit`.

        `min_version` is the oldest version whose tokens the step has trained. Older tokens count as discarded.
        """
        for trajectory in self.batches.remove_from_step(group_id).trajectories():
            self.ledger.train(trajectory.trained_tokens(min_version), trajectory.action_count)

    def close(self) -> None:
        """Withdraw all groups that are left after the last step: redundant groups, and batches that are not trained.

        A previous hub may have formed batches for steps after the last step, if `run.steps` was reduced since then.
        """
        for step, groups in list(self.batches.formed.items()):
            self.backlog.add(partial(self._withdraw_formed, step), groups)
        self.backlog.add(self._withdraw_number, self.pool)

    def _withdraw_number(self, group_id: int) -> None:
        """Withdraw the group with this number, if it is still in the pool. The backlog calls this after `close`."""
        if (group := self.pool.get(group_id)) is not None:
            self._withdraw(group)

    def _withdraw_formed(self, step: int, group_id: int) -> None:
        """Remove a group from a formed batch that will not be trained. The backlog calls this after `close`."""
        group = self.batches.take_formed(step, group_id)
        for trajectory in group.trajectories():
            self.ledger.discard(Outcome.CANCELLED, trajectory.action_count)
            self.ledger.give_up(Outcome.CANCELLED)
        # The place becomes free, because the run may be resumed with more steps and can use the place again.
        if not group.partly_trained:
            self.admission.give_back(group_id)

    # -- members and groups that leave -------------------------------------------------------------------------------

    def _give_up(self, member: Member, state: Literal["lost", "beaten"], outcome: Outcome) -> None:
        """Give up a member: it is never started again. A leased member's lease is withdrawn.

        The tokens of a finished member count as discarded. The caller recounts, removes or decides about the group.

        Args:
            member: a queued, leased or finished member.
            state: its new state. `lost` makes the group smaller; `beaten` is a member that is not needed any more.
            outcome: the reason, under which the ledger counts the member.
        """
        self.leases.remove(member, outcome)
        if member.trajectory is not None:
            self.ledger.discard(outcome, member.trajectory.action_count)
            member.trajectory = None
        member.state = state
        self.ledger.give_up(outcome)

    def _give_up_pending(self, group: Group, state: Literal["lost", "beaten"], outcome: Outcome) -> None:
        """Give up the members of a group that are queued or leased."""
        for member in group.members:
            if member.state in ("queued", "leased"):
                self._give_up(member, state, outcome)

    def _give_up_done(self, group: Group, state: Literal["lost", "beaten"], outcome: Outcome) -> None:
        """Give up the finished members of a group."""
        for member in group.members:
            if member.state == "done":
                self._give_up(member, state, outcome)

    def _remove(self, group: Group) -> None:
        """Remove a group from the pool. All its members are counted in the ledger already.

        If no part of the group was trained, its place is free again, so that another group can replace it.
        """
        self.pool.remove(group.group_id)
        if not group.partly_trained:
            self.admission.give_back(group.group_id)
            self.domains.left_untrained(group.kind)

    def _filter_out(self, group: Group) -> None:
        """Remove a complete group that the filter does not keep, for example because all its rewards are equal.

        The ledger counts its members as filtered, and their tokens as discarded.
        """
        # All members that are alive are done, because a complete group has lost its other members.
        self.ledger.filtered += group.alive
        for trajectory in group.trajectories():
            self.ledger.discard(Outcome.FILTERED, trajectory.action_count)
        self._remove(group)

    def _withdraw(self, group: Group) -> None:
        """Give up all members of a group that is not needed or must not be trained, and remove the group."""
        self._give_up_pending(group, "beaten", Outcome.CANCELLED)
        self._give_up_done(group, "beaten", Outcome.CANCELLED)
        self._remove(group)

    def _give_up_too_old(self, group: Group) -> None:
        """Give up the finished members of a group, because their tokens are too old for the next step.

        If members are queued or leased, the group waits for them. Otherwise it leaves.
        """
        self._give_up_done(group, "lost", Outcome.STALE)
        if group.pending == 0:
            self._remove(group)
        else:
            self.pool.recount(group)

    # -- age ---------------------------------------------------------------------------------------------------------

    def _decide_all_by_age(self) -> None:
        """Call `_decide_by_age` for all groups, after `admission.next_step` has changed or a run was resumed.

        Also shortens the stored list of places, which would grow with each group that leaves.
        """
        if (first := next(iter(self.pool), None)) is not None:
            self.admission.places.forget(first)
        self.backlog.add(self._decide_by_age, self.pool)

    def _decide_by_age(self, group_id: int) -> None:
        """Decide about a group whose window (`AgeContract.window_start`) ends with the next step, or has ended before.

        Such a group is withdrawn, loses members that are too old, has them started again, or waits for the next step,
        which may train its finished members. The settings `extra_groups` and `on_expire` decide. Younger groups are not
        changed. The backlog calls this for each group after `_decide_all_by_age`.
        """
        group = self.pool.get(group_id)
        if group is None:
            return  # A slice of the backlog has removed it.
        oldest, step = self.pool.counts.oldest(group_id), self.admission.next_step
        if oldest is None or oldest >= self.contract.window_start(step + 1):
            return  # No token was sampled yet, or each member may wait for two more steps (`window_start`).
        min_version = self.contract.min_token_version(step)
        # With redundant groups (`extra_groups`), a slow group is withdrawn, and a redundant group takes its place. This
        # happens at the age limit and not at the end of the window: until then all its tokens can be trained, and
        # simulated runs were slower if they threw these away.
        if self._withdrawable and self._may_get_old_tokens(group, min_version):
            self._withdrawable -= 1
            self._withdraw(group)
            return
        if self.rules.on_expire == "requeue":
            if group.closed and oldest < min_version:
                # Members of a closed group are not started again, because the present run does not have its problem.
                self._give_up_too_old(group)
                return
            self._restart_old_members(group, min_version)
        if self._has_only_old_tokens(group):
            self._give_up_too_old(group)
        elif not self.pool.is_ready(group_id):
            # The group may have to be marked as expiring now.
            self._put_waiting(group)

    def _may_get_old_tokens(self, group: Group, min_version: int) -> bool:
        """Return True if a waiting group has a leased member that may sample tokens older than `min_version`.

        Returns False for a ready group, because a step can take it as it is. Also returns False for a partly trained
        group, because its place would not become free for a redundant group.
        """
        if self.pool.is_ready(group.group_id) or group.partly_trained:
            return False
        return any(member.state == "leased" and member.oldest_version < min_version for member in group.members)

    def _has_only_old_tokens(self, group: Group) -> bool:
        """Return True if a group is complete or partly trained, and the next step can train none of its tokens.

        A group that still waits for its first members may get younger tokens, so the result is False then.
        """
        if not (group.complete or group.partly_trained):
            return False
        return group.trained_tokens(self.contract.min_token_version(self.admission.next_step)) == 0

    def _put_waiting(self, group: Group) -> None:
        """Let a group wait in the pool for its queued and leased members. Mark it if it is *expiring*.

        A member whose oldest token has version v should be trained by one of the steps v to v + ⌈α⌉. These steps are
        its *window* (`AgeContract.window_start`); α is the asynchronous ratio (`train.async_ratio`). The group
        is expiring if the next step is the last step in the window of a finished member. Then that step may train the
        finished members alone, if the filter keeps the group and some token is young enough.
        """
        splittable = self.rules.on_expire == "mask" and self.contract.trains_parts
        expiring = False
        if splittable and not group.complete and not group.partly_trained:
            step = self.admission.next_step
            expiring = (
                group.expiring(self.contract.window_start(step + 1))
                and group.trained_tokens(self.contract.min_token_version(step)) > 0
                and self.rules.filter_of(group.kind).keeps(group)
            )
        self.pool.put_waiting(group, expiring=expiring)

    def _restart_old_members(self, group: Group, min_version: int) -> None:
        """Queue the leased and finished members again that may have a token older than `min_version`.

        The tokens of these members are discarded, and their leases are withdrawn. Each member keeps its place in the
        order of the queue.
        """
        old = [
            member
            for member in group.members
            if member.state in ("leased", "done") and member.oldest_version < min_version
        ]
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
            # The group may have been ready. Now it waits again.
            self.pool.put_waiting(group)

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def quarantined(self) -> list[str]:
        """Kinds whose problems are not issued any more, because too many of their tasks were given up in a row."""
        return self.source.cursor.quarantined

    @property
    def in_flight(self) -> int:
        """Number of tasks that were issued and are not trained, filtered or given up."""
        return self.pool.counts.in_flight + self.batches.in_flight

    @property
    def buffered_tokens(self) -> int:
        """Number of action tokens of trajectories that wait for a step or are in a batch."""
        return self.pool.counts.tokens + self.batches.tokens

    @property
    def counts(self) -> tuple[int, int, int]:
        """Number of tasks issued, tasks in flight and tokens generated.

        The buffer records these numbers with each commit (`Committed.counts`). Equal events lead to equal numbers, so a
        replay compares its own numbers, and refuses a journal that does not belong to its checkpoint.
        """
        return self.ledger.issued, self.in_flight, self.ledger.generated_tokens

    def totals(self) -> dict[str, int]:
        """Return the ledger as flat numbers, for summaries."""
        return self.ledger.totals(self.in_flight)

    def check(self) -> None:
        """Compare the ledger with the tasks and tokens in the pool and in batches: the law of conservation.

        `commit` calls this, `Hub.run` at the end of the run, and a replay for each state that it returns. Raises
        ContractError if the ledger does not account for each issued task and each generated token.
        """
        self.ledger.check(self.in_flight, self.buffered_tokens)
