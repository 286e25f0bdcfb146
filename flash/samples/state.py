"""Samples: what happens to every training task between its issue and the commit of its step. Pure state.

Each change is an event (`flash.samples.journal`), and `apply` makes it: the same events make the same state, in a
buffer that has decided on them (`flash.samples.buffer`) and in one that reads them again (`flash.samples.replay`).

Conservation: every issued task is queued, leased, done, in training or booked in the ledger; `in_flight` counts them
here, independently of the ledger.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import count

import msgspec

from algorithms.advantages import are_equal
from flash.errors import ContractError
from flash.samples.admission import Admission, Places
from flash.samples.breaker import Breaker, Streaks
from flash.samples.domains import DomainShares, Shared
from flash.samples.groups import Batches, Formed, Group, Member
from flash.samples.journal import Closed, Committed, Ended, Event, Issued, Lent, Made, Revoked, Taken, Tidied, Wasted
from flash.samples.leases import LeaseTable, as_issued
from flash.samples.leaving import Departures
from flash.samples.ledger import Ledger
from flash.samples.pool import GroupPool
from flash.samples.slices import Backlog
from flash.samples.tasks import Cursor, TaskSource
from flash.types import Failure, Lease, Outcome

FILTER_BREAKER = 20
"""Batches' worth of groups filtered out in a row, none kept between, that stop a run which filters everything."""


class BufferState(msgspec.Struct):
    """What a checkpoint keeps of the buffer: all that has to be known for the events that follow."""

    made: Made
    cursor: Cursor
    places: Places
    groups: list[Group]
    ledger: Ledger
    formed: list[Formed] = msgspec.field(default_factory=list[Formed], name="again")
    """What is to be trained again."""
    withdrawn: dict[int, Outcome] = {}
    """Why leases were withdrawn that have not been reported yet."""
    streaks: Streaks = msgspec.field(default_factory=Streaks)
    shared: Shared | None = None
    """What domains have had."""

    def put_back(self, step: int) -> set[int]:
        """Batches that were formed are none any more: under another contract their steps could train less of them.

        The groups with a token of a version after `step`, which is to be made again: they wait for nobody any more.
        """
        groups = {group.group_id: group for group in self.groups}
        for formed in sorted(self.formed, key=lambda formed: formed.step, reverse=True):
            part = formed.group
            groups.setdefault(part.group_id, part).rejoin(part)
            if self.shared is not None and part.kind in self.shared.trained and not part.earlier:
                self.shared.trained[part.kind] -= 1
        self.groups = [groups[group_id] for group_id in sorted(groups)]
        self.formed = []
        return {group.group_id for group in self.groups if group.newest > step}


class Samples:
    """See the module's docstring.

    Args:
        made: what decides.
        source: gives the tasks of groups; its cursor is that of the state.
        step: the version that the trainers hold.
        state: what there was before; None at the beginning.
        goes_on: the incarnation that left the state goes on. Otherwise streaks begin anew, and of leases that were
            withdrawn nothing is reported any more. Those that are out stay out.
        lease_ids: numbers the leases of the whole run, those of evaluations included.
    """

    def __init__(
        self,
        made: Made,
        source: TaskSource,
        *,
        step: int,
        state: BufferState | None,
        goes_on: bool = False,
        lease_ids: Iterator[int] | None = None,
    ) -> None:
        contract, rules = made.contract, made.rules
        state = state or BufferState(made, source.cursor, Places(), [], Ledger())
        ahead = state.put_back(step) if contract.max_age < state.made.contract.max_age else set[int]()
        self._made = made
        self.contract = contract
        self.rules = rules
        self.source = source
        self.pool = GroupPool(made.at_once)
        self.batches = Batches(state.formed)
        self.backlog = Backlog(made.at_once)
        """What was put off."""
        streaks = state.streaks if goes_on else None
        # A new incarnation tries all kinds again: whoever resumes a run may have mended what failed.
        tried_again = [] if goes_on else source.end_quarantine()
        self._breaker = Breaker(rules.breaker, rules.quarantine, FILTER_BREAKER * contract.groups_per_batch, streaks)
        self.leases = LeaseTable(lease_ids or count(), rules.retries, as_issued)
        next_step = max(step, self.batches.following)
        self.admission = Admission(contract, rules, source, state.places, self.leases, next_step)
        self.ledger = state.ledger
        self.domains = DomainShares(
            rules.domains,
            contract.groups_per_batch,
            rules.drift,
            None if tried_again else state.shared,
            (group.kind for group in state.groups if not group.earlier),
        )
        self._departures = Departures(
            contract, rules, self.pool, self.leases, self.ledger, self.admission, self.domains, self.backlog
        )
        self.notes: list[str] = []
        """What people should know: the owner empties it."""
        if tried_again:
            kinds = ", ".join(map(repr, tried_again))
            self.notes.append(f"kinds of environments that were in quarantine are tried again: {kinds}")
        self._told: set[Outcome] = set()
        """Failures of which an example was noted."""
        self._restore(state, ahead, goes_on)

    def _restore(self, state: BufferState, ahead: set[int], goes_on: bool) -> None:
        if goes_on:
            self.leases.reasons.update(state.withdrawn)
        rules = self.rules
        had, now = state.made.rules.problems, rules.problems
        others = bool(had and now and had != now)
        for group in (*state.groups, *(formed.group for formed in state.formed)):
            group.closed = group.closed or others
        for group in state.groups:
            for member in group.members:
                if member.state == "leased":
                    self.leases.out[member.lease_id] = member
                elif member.state == "queued":
                    self.leases.put(member)
            self.pool.waits(group)
            if group.group_id in ahead:
                self._departures.withdraw(group)
            elif others and not (group.complete and not group.earlier):
                self._end_as_it_is(group)
            elif not group.complete or group.earlier:
                self._departures.watch(group)
            elif goes_on or rules.filter_of(group.kind).keeps(group):
                self.pool.ready(group)
            else:
                self._departures.filtered(group)
        if not goes_on:  # under another contract more of it may be too old
            self._departures.begins()
        if others:
            self.notes.append(
                f"the problems are others than before: in the {len(state.groups)} groups of the old ones nothing more "
                "begins; those with finished samples are trained as they are, the others leave"
            )

    def _end_as_it_is(self, group: Group) -> None:
        """No other member of a group begins or ends: what is home is trained."""
        self._departures.drop_rest(group, "lost", Outcome.CANCELLED)
        if group.alive == 0:
            self._departures.leave(group)
        elif group.earlier:
            self._departures.watch(group)
        elif self.rules.filter_of(group.kind).keeps(group):
            self.pool.ready(group)
        else:
            self._departures.filtered(group)

    def snapshot(self) -> BufferState:
        """The state between two steps, as it is now, whatever comes after.

        Call it while no batch is in training, and nothing is left to `tidy`.
        """
        assert not self.batches.training, "a batch in training belongs to no consistent state"
        assert not self.backlog, "what was put off would be forgotten"
        counts = self.source.cursor, self.admission.places, self.ledger, self._breaker.streaks, self.domains.shared
        cursor, places, ledger, streaks, shared = deepcopy(counts)
        groups, formed, withdrawn = self.pool.copies(), self.batches.left(), dict(self.leases.reasons)
        return BufferState(self._made, cursor, places, groups, ledger, formed, withdrawn, streaks, shared)

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Make a change; it is one that `flash.samples.buffer` has decided on in this very state.

        Raises:
            BreakerError: too many tasks in a row were given up, or too many groups filtered out. The change is made.
            ContractError: a task or a token is unaccounted for.
        """
        match event:
            case Ended():
                self._end(event)
            case Lent():
                self.lend(event)
            case Issued():
                self.issue(event)
            case Wasted():
                self.ledger.generated_tokens += event.tokens
                self.ledger.discard(self.leases.reason(event.lease_id), event.tokens)
            case Revoked():
                self.backlog.add(self._revoke, event.lease_ids)
            case Tidied():
                self.backlog.work()
            case Taken():
                self._gather(event)
            case Committed():
                self._commit(event)
            case Closed():
                self._close()
            case _:
                raise ContractError(f"{type(event).__name__} changes no buffer")

    def issue(self, event: Issued) -> Group:
        tasks = self.admission.issue(event.problem)
        wanted = len(tasks) - self.rules.extra_per_group
        group = Group(tasks[0].group_id, wanted, [Member(task) for task in tasks])
        for member in group.members:
            self.leases.put(member)
        self.pool.waits(group)
        self.domains.issued(group.kind)
        self.ledger.issued += len(tasks)
        return group

    def lend(self, event: Lent) -> list[Lease]:
        group = self.pool[event.group_id]
        leases = [self.leases.grant(group.members[index], floor, number) for number, index, floor in event.leases]
        for _, index, _ in event.leases:
            group.members[index].node = event.node
        self.pool.changed(group)
        return leases

    def _end(self, event: Ended) -> None:
        member, result = self.leases.out.pop(event.lease_id, None), event.result
        if member is None:
            raise ContractError(f"lease {event.lease_id} is not out")
        group, given_up = self.pool[member.task.group_id], False
        self.ledger.generated_tokens += result.sampled
        if isinstance(result, Failure):
            self.ledger.discard(result.outcome, result.tokens)
            given_up = self._fail(member, result, event.node)
        else:
            member.state, member.trajectory, member.floor = "done", result, result.oldest_version
            self.ledger.discard(Outcome.CANCELLED, result.lost_tokens)
            self._breaker.finished(member.task)
        self._settle(group)
        if self.rules.waves and not self.leases.out:
            self.admission.openings += 1
        # Last, since it may raise: the group is in order, and a run may go on from here.
        if given_up and isinstance(result, Failure) and self._breaker.given_up(member.task, result):
            self._quarantine(member.task.kind, result)

    def _fail(self, member: Member, failure: Failure, node: int) -> bool:
        """Queue a task again that has failed, or give it up: tells whether it was given up."""
        if failure.outcome not in self._told and failure.outcome is not Outcome.CANCELLED:
            self._told.add(failure.outcome)
            self.notes.append(f"the first sample that failed ({failure.outcome}): {failure.message}")
        if self.leases.again(member, failure.outcome, node):
            self.ledger.retry(failure.outcome)
            self.admission.openings += 1
            return False
        self._departures.drop(member, "lost", failure.outcome)
        if failure.outcome is Outcome.TOO_LONG:  # the others have the same prompt
            self._departures.drop_rest(self.pool[member.task.group_id], "lost", failure.outcome)
        return True

    def _revoke(self, lease_id: int) -> None:
        if (member := self.leases.revoke(lease_id)) is not None:
            self.ledger.retry(Outcome.CANCELLED)
            self.pool.changed(self.pool[member.task.group_id])
            self.admission.openings += 1

    def _quarantine(self, kind: str, failure: Failure) -> None:
        """Give up what is on its way of a kind that keeps failing; finished members stay."""
        self.source.quarantine(kind)
        of_kind = (group_id for group_id in self.pool if self.pool[group_id].members[0].task.kind == kind)
        self.backlog.add(partial(self._give_up_rest, failure.outcome), of_kind)
        self.notes.append(
            f"environments of kind {kind!r} are in quarantine: {self.rules.quarantine} of their samples in a row were "
            f"given up; the last one ({failure.outcome}): {failure.message}"
        )

    def _give_up_rest(self, outcome: Outcome, group_id: int) -> None:
        """What of a group is on its way is given up."""
        if (group := self.pool.get(group_id)) is None:
            return
        self._departures.drop_rest(group, "lost", outcome)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """A member has come home or left: the group may be complete, filtered out, or empty."""
        if self.pool.get(group.group_id) is None:
            return
        if group.complete:
            self._departures.drop_rest(group, "beaten", Outcome.CANCELLED)
            self._count_ended(group)
        if self.pool.is_ready(group.group_id):
            self.pool.changed(group)
        elif group.alive == 0:
            self._departures.leave(group)
        elif self._departures.useless(group):
            self._departures.expire(group)
        elif group.complete and not group.earlier:
            self._admit_or_filter(group)
        else:
            self._departures.watch(group)

    def _count_ended(self, group: Group) -> None:
        """Count a group once, when it is complete or the first part of it is trained."""
        rewards = [trajectory.reward for trajectory in group.trajectories()]
        if rewards and not group.told:
            group.told = True
            self.source.cursor.ended += 1
            self.source.cursor.equal += are_equal(rewards)

    def _admit_or_filter(self, group: Group) -> None:
        if self.rules.filter_of(group.kind).keeps(group):
            self.pool.ready(group)
            self._breaker.kept()
            return
        self._departures.filtered(group)
        if in_a_row := self.domains.filtered(group.kind, self.quarantined):
            self.notes.append(
                f"of the domain {group.kind!r} {in_a_row} groups in a row were filtered out: its problems are all too "
                "easy or too hard. Until one is trained it has its turns, and what comes to nothing is not made up for"
            )
        self._breaker.filtered(group.kind)

    def _gather(self, event: Taken) -> None:
        """Put a batch into training."""
        step = self.batches.taken = event.step
        if step in self.batches.formed:
            formed = self.batches.formed[step]
            self.backlog.add(lambda group_id: self.batches.train(self.batches.take(step, group_id)), formed)
            return
        groups = (*event.groups, *self.pool.late())
        for group_id in event.groups:
            self._count_ended(self.pool[group_id])
            self.domains.trains(self.pool[group_id].kind)
        self.pool.chosen(groups)
        self.backlog.add(lambda group_id: self.batches.train(self.pool.take(group_id)), groups)
        self._departures.next_is(step + 1)

    def _commit(self, event: Committed) -> None:
        self.batches.taken = None
        min_version = self.contract.min_token_version(event.step)
        self.backlog.add(partial(self._book, min_version), self.batches.training)
        self.check()

    def _book(self, min_version: int, group_id: int) -> None:
        """A group, or a part of it, was trained on its tokens of this version or newer."""
        for trajectory in self.batches.trained(group_id).trajectories():
            self.ledger.train(trajectory.trained_tokens(min_version), trajectory.action_count)

    def _close(self) -> None:
        """What is left over is withdrawn: by redundancy, or since the run was told to end before it trains it again."""
        for step, groups in list(self.batches.formed.items()):
            self.backlog.add(partial(self._withdraw_formed, step), groups)
        self.backlog.add(self._withdraw, self.pool)

    def _withdraw(self, group_id: int) -> None:
        if (group := self.pool.get(group_id)) is not None:
            self._departures.withdraw(group)

    def _withdraw_formed(self, step: int, group_id: int) -> None:
        group = self.batches.take(step, group_id)
        for trajectory in group.trajectories():
            self.ledger.discard(Outcome.CANCELLED, trajectory.action_count)
            self.ledger.give_up(Outcome.CANCELLED)
        if not group.earlier:  # as in `Departures.leave`: the run may go on, told to make more steps
            self.admission.give_back(group_id)

    @property
    def quarantined(self) -> list[str]:
        """Kinds of which no more problems are issued."""
        return self.source.cursor.quarantined

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Tasks issued and neither trained, filtered nor given up."""
        return self.pool.census.in_flight + self.batches.in_flight

    @property
    def buffered_tokens(self) -> int:
        """Action tokens of trajectories that wait for a step or are in one."""
        return self.pool.census.tokens + self.batches.tokens

    @property
    def books(self) -> tuple[int, int, int]:
        """What two states have in common that the same events have led to."""
        return self.ledger.issued, self.in_flight, self.ledger.generated_tokens

    def totals(self) -> dict[str, int]:
        """The ledger as flat numbers, for summaries."""
        return self.ledger.totals(self.in_flight)

    def check(self) -> None:
        """Compare the ledger with what is here. Raises ContractError."""
        self.ledger.check(self.in_flight, self.buffered_tokens)
