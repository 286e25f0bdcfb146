"""Samples: what happens to every training task between its issue and the commit of its step. Pure state.

Each change is an event (`flash.hub.journal`), and `apply` makes it: the same events make the same state, in a buffer
that has decided on them (`flash.hub.buffer`) and in one that reads them again (`flash.hub.replayed`).

Conservation: every issued task is queued, leased, done, in training or booked in the ledger; `in_flight` counts them
here, independently of the ledger.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import partial
from itertools import count

import msgspec

from flash.errors import ContractError
from flash.hub.admission import Admission
from flash.hub.again import Again, Formed
from flash.hub.ageing import Ageing
from flash.hub.breaker import Breaker, Streaks
from flash.hub.chores import Chores
from flash.hub.domains import Domains, Shared
from flash.hub.exits import Exits
from flash.hub.groups import Group, Member
from flash.hub.journal import Closed, Committed, Ended, Event, Issued, Lent, Made, Revoked, Taken, Tidied, Wasted
from flash.hub.leases import LeaseTable, as_issued
from flash.hub.ledger import Ledger
from flash.hub.places import Places
from flash.hub.pool import GroupPool
from flash.hub.tasks import Cursor, TaskSource
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
    again: list[Formed] = []
    """What is to be trained again."""
    withdrawn: dict[int, Outcome] = {}
    """Why leases were withdrawn that have not been reported yet."""
    streaks: Streaks = msgspec.field(default_factory=Streaks)
    shared: Shared | None = None
    """What domains have had."""


class Samples:
    """See the module's docstring. `leases.withdrawn` and `notes` fill up for the owner, who empties them.

    Args:
        made: what decides.
        source: gives the tasks of groups; its cursor is that of the state.
        step: the version that the trainers hold.
        state: what there was before.
        goes_on: the life that left the state goes on. Otherwise streaks begin anew, and of leases that were withdrawn
            nothing is reported any more. Those that are out stay out.
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
        self._made = made
        self._contract = contract
        self._rules = rules
        self._source = source
        self._pool = GroupPool(made.at_once)
        self._again = Again(state.again if state is not None else ())
        self._chores = Chores(made.at_once)
        self._taken: int | None = None
        """The step of which a batch was chosen."""
        streaks = state.streaks if state is not None and goes_on else None
        # A new life tries all kinds again: whoever resumes a run may have mended what failed.
        tried_again = [] if goes_on else source.end_quarantine()
        self._breaker = Breaker(rules.breaker, rules.quarantine, FILTER_BREAKER * contract.groups_per_batch, streaks)
        self.leases = LeaseTable(lease_ids or count(), rules.retries, as_issued)
        self._places = Places() if state is None else state.places
        next_step = max(step, self._again.following)
        self._admission = Admission(contract, rules, source, self._places, self.leases, next_step)
        self.ledger = Ledger() if state is None else state.ledger
        self._domains = Domains(
            rules.domains,
            contract.groups_per_batch,
            rules.drift,
            None if state is None or tried_again else state.shared,
            () if state is None else (group.kind for group in state.groups if not group.earlier),
        )
        self._exits = Exits(self._pool, self.leases, self.ledger, self._admission, self._domains)
        parts = (self._pool, self._exits, self._admission, self._places, self._chores)
        self._ageing = Ageing(contract, rules, *parts)
        self.notes: list[str] = []
        """What people should know."""
        if tried_again:
            kinds = ", ".join(map(repr, tried_again))
            self.notes.append(f"kinds of environments that were in quarantine are tried again: {kinds}")
        self._told: set[Outcome] = set()
        """Failures of which an example was noted."""
        if state is not None:
            self._restore(state, goes_on)

    def _restore(self, state: BufferState, goes_on: bool) -> None:
        if goes_on:
            self.leases.reasons.update(state.withdrawn)
        had, now = state.made.rules.problems, self._rules.problems
        others = bool(had and now and had != now)
        for group in state.groups:
            group.closed = group.closed or others
            for member in group.members:
                if member.state == "leased":
                    self.leases.take_up(member)
                elif member.state == "queued":
                    self.leases.put(member)
            self._pool.add(group)
            if others and not (group.complete and not group.earlier):
                self._end_as_it_is(group)
            elif group.complete and not group.earlier:
                self._pool.ready(group)
            else:
                self._ageing.watch(group)
        if not goes_on:  # under another contract more of it may be too old
            self._ageing.begins()
        if others:
            self.notes.append(
                f"the problems are others than before: in the {len(state.groups)} groups of the old ones nothing more "
                "begins; those with finished samples are trained as they are, the others leave"
            )

    def _end_as_it_is(self, group: Group) -> None:
        """No other member of a group begins or ends: what is home is trained."""
        self._exits.drop_rest(group, "lost", Outcome.CANCELLED)
        if group.alive == 0:
            self._exits.leave(group)
        elif group.earlier:
            self._ageing.watch(group)
        elif self._rules.filter_of(group.kind).keeps(group):
            self._pool.ready(group)
        else:
            self._exits.filtered(group)

    def copy_ahead(self) -> Generator[None]:
        """Copy in slices what a snapshot keeps of the groups: it has to copy only those that change meanwhile."""
        return self._pool.copy_ahead()

    def snapshot(self) -> BufferState:
        """The state between two steps, as it is now, whatever comes after.

        Call it while no batch is in training, and nothing is left to `tidy`.
        """
        assert not self._pool.training, "a batch in training belongs to no consistent state"
        assert not self._chores, "what was put off would be forgotten"
        return BufferState(
            self._made,
            self._source.cursor.copy(),
            self._places.copy(),
            self._pool.copies(),
            self.ledger.copy(),
            self._again.left(),
            dict(self.leases.reasons),
            self._breaker.streaks.copy(),
            self._domains.state(),
        )

    @property
    def untidy(self) -> bool:
        """Whether something was put off."""
        return bool(self._chores)

    # -- events ------------------------------------------------------------------------------------------------------

    def apply(self, event: Event) -> None:
        """Make a change; it is one that `flash.hub.buffer` has decided on in this very state.

        Raises:
            BreakerError: too many tasks in a row were given up, or too many groups filtered out. The change is made.
            ContractError: a task or a token is unaccounted for.
        """
        match event:
            case Ended():
                self._end(event)
            case Lent():
                self._lend(event)
            case Issued():
                self._issue(event)
            case Wasted():
                self.ledger.generated_tokens += event.tokens
                self.ledger.discard(self.leases.reason(event.lease_id), event.tokens)
            case Revoked():
                self._chores.add(self._revoke, event.lease_ids)
            case Tidied():
                self._chores.work()
            case Taken():
                self._gather(event)
            case Committed():
                self._commit(event)
            case Closed():
                self._close()
            case _:
                raise ContractError(f"{type(event).__name__} changes no buffer")

    def _issue(self, event: Issued) -> Group:
        tasks = self._admission.issue(event.problem)
        wanted = len(tasks) - self._rules.extra_per_group
        group = Group(tasks[0].group_id, wanted, [Member(task) for task in tasks])
        for member in group.members:
            self.leases.put(member)
        self._pool.add(group)
        self._domains.issued(group.kind)
        self.ledger.issued += len(tasks)
        return group

    def _lend(self, event: Lent) -> list[Lease]:
        group = self._pool[event.group_id]
        leases = [self.leases.grant(group.members[index], floor, number) for number, index, floor in event.leases]
        for _, index, _ in event.leases:
            group.members[index].node = event.node
        self._pool.changed(group)
        return leases

    def _end(self, event: Ended) -> None:
        member, result = self.leases.ended(event.lease_id), event.result
        if member is None:
            raise ContractError(f"lease {event.lease_id} is not out")
        group, given_up = self._pool.of(member), False
        self.ledger.generated_tokens += result.sampled
        if isinstance(result, Failure):
            self.ledger.discard(result.outcome, result.tokens)
            given_up = self._fail(member, result, event.node)
        else:
            member.state, member.trajectory, member.floor = "done", result, result.oldest_version
            self.ledger.discard(Outcome.CANCELLED, result.lost_tokens)
            self._breaker.finished(member.task)
        self._settle(group)
        if self._rules.waves and not self.leases.out:
            self._admission.openings += 1
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
            self._admission.openings += 1
            return False
        self._exits.drop(member, "lost", failure.outcome)
        return True

    def _revoke(self, lease_id: int) -> None:
        if (member := self.leases.revoke(lease_id)) is not None:
            self.ledger.retry(Outcome.CANCELLED)
            self._pool.changed(self._pool.of(member))
            self._admission.openings += 1

    def _quarantine(self, kind: str, failure: Failure) -> None:
        """Give up what is on its way of a kind that keeps failing; finished members stay."""
        self._source.quarantine(kind)
        of_kind = (group_id for group_id in self._pool if self._pool[group_id].members[0].task.kind == kind)
        self._chores.add(partial(self._give_up_rest, failure.outcome), of_kind)
        self.notes.append(
            f"environments of kind {kind!r} are in quarantine: {self._rules.quarantine} of their samples in a row were "
            f"given up; the last one ({failure.outcome}): {failure.message}"
        )

    def _give_up_rest(self, outcome: Outcome, group_id: int) -> None:
        """What of a group is on its way is given up."""
        if (group := self._pool.get(group_id)) is None:
            return
        self._exits.drop_rest(group, "lost", outcome)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """A member has come home or left: the group may be complete, filtered out, or empty."""
        if self._pool.get(group.group_id) is None:
            return
        if group.complete:
            self._exits.drop_rest(group, "beaten", Outcome.CANCELLED)
        if self._pool.is_ready(group.group_id):
            self._pool.changed(group)
        elif group.alive == 0:
            self._exits.leave(group)
        elif self._ageing.useless(group):
            self._exits.expire(group)
        elif group.complete and not group.earlier:
            self._admit_or_filter(group)
        else:
            self._ageing.watch(group)

    def _admit_or_filter(self, group: Group) -> None:
        if self._rules.filter_of(group.kind).keeps(group):
            self._pool.ready(group)
            self._domains.kept(group.kind)
            self._breaker.kept()
            return
        self._exits.filtered(group)
        if in_a_row := self._domains.filtered(group.kind, self._source.cursor.quarantined):
            self.notes.append(
                f"of the domain {group.kind!r} {in_a_row} groups in a row were filtered out: its problems are all too "
                "easy or too hard. Until one is kept it has its turns, and what comes to nothing is not made up for"
            )
        self._breaker.filtered(group.kind)

    def _gather(self, event: Taken) -> None:
        """Put a batch into training."""
        step = self._taken = event.step
        if step in self._again:
            self._chores.add(partial(self._train_again, step), self._again.groups(step))
            return
        groups = (*event.groups, *self._pool.late())
        self._pool.chosen(groups)
        for group_id in event.groups:
            self._domains.trains(self._pool[group_id].kind)
        self._chores.add(self._pool.train, groups)
        self._ageing.next_is(step + 1)

    def _train_again(self, step: int, group_id: int) -> None:
        self._pool.train_part(self._again.take(step, group_id))

    def _commit(self, event: Committed) -> None:
        self._taken = None
        min_version = self._contract.min_token_version(event.step)
        self._chores.add(partial(self._exits.trained, min_version=min_version), self._pool.training)
        self.check()

    def _close(self) -> None:
        """What is left over is withdrawn: by redundancy, or since the run was told to end before it trains it again."""
        for step in self._again.steps:
            self._chores.add(partial(self._withdraw_again, step), self._again.groups(step))
        self._chores.add(self._withdraw, self._pool)

    def _withdraw(self, group_id: int) -> None:
        if (group := self._pool.get(group_id)) is not None:
            self._exits.withdraw(group)

    def _withdraw_again(self, step: int, group_id: int) -> None:
        group = self._again.take(step, group_id)
        for trajectory in group.trajectories():
            self.ledger.discard(Outcome.CANCELLED, trajectory.action_count)
            self.ledger.give_up(Outcome.CANCELLED)
        if not group.earlier:  # as in `Exits.leave`: the run may go on, told to make more steps
            self._admission.give_back(group_id)

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Tasks issued and neither trained, filtered nor given up."""
        return self._pool.in_flight + self._again.in_flight

    @property
    def buffered_tokens(self) -> int:
        """Action tokens of trajectories that wait for a step or are in one."""
        return self._pool.tokens + self._again.tokens

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a step."""
        return self._pool.ready_groups

    @property
    def shares(self) -> dict[str, float]:
        """What domains have had of the trained groups, for the metrics."""
        return self._domains.row(self._source.cursor.quarantined)

    @property
    def books(self) -> tuple[int, int, int]:
        """What two states have in common that the same events have led to."""
        return self.ledger.issued, self.in_flight, self.ledger.generated_tokens

    def check(self) -> None:
        """Compare the ledger with what is here. Raises ContractError."""
        self.ledger.check(self.in_flight, self.buffered_tokens)
