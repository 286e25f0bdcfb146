"""A journal, replayed from any earlier state, leads to the present state, whatever has happened in between."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flash.errors import BreakerError, ContractError
from flash.samples.buffer import SampleBuffer
from flash.samples.journal import Committed, Delivered, Event, MemoryJournal, Replay
from flash.samples.store import BufferState
from flash.types import Failure, Lease, Outcome, VersionRun
from tests.samples.cases import finish_all, lease_all, make_buffer, trajectory, void


def make(**options: Any) -> SampleBuffer:
    """Make a buffer with two groups of two samples in a step."""
    defaults: dict[str, Any] = {"alpha": 1, "batch": 4, "group": 2, "steps": 20}
    return make_buffer(**defaults | options)


class Watching(MemoryJournal):
    """Keeps the state of its buffer at every event at which a checkpoint could have been made."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer: SampleBuffer | None = None
        """Buffer whose states are kept. None until it is made, because it records its first event itself."""
        self.moments: dict[int, bytes] = {}
        """States by the number of events before them."""

    def record(self, event: Event) -> None:
        """Keep the state before the event, if a checkpoint is possible then. Record the event."""
        if self.buffer is not None:
            # `snapshot` asserts that no batch is in training and no backlog is left.
            with suppress(AssertionError):
                self.moments[len(self.events)] = msgspec.msgpack.encode(self.buffer.samples.snapshot())
        super().record(event)


class Incarnation:
    """Lets things happen to a buffer at random."""

    def __init__(self, buffer: SampleBuffer, dice: random.Random, version: int = 0) -> None:
        self._buffer = buffer
        self._dice = dice
        self._held: dict[int, Lease] = {}
        """Leases that nodes hold, by number."""
        self.version = version
        self.training = False
        """True while a step is trained."""
        self.batches: dict[int, set[int]] = {}
        """Groups of each step."""

    def go_on(self, events: int) -> None:
        """Let this number of random events happen. An error of the breaker leaves a sound state, and is ignored."""
        happens = (self.lease, self.lease, self.end, self.end, self.end, self.cancel, self.lose, self.tidy, self.train)
        for _ in range(events):
            with suppress(BreakerError):
                self._dice.choice(happens)()

    def lease(self) -> None:
        """Lease one task, and sometimes the rest of its group, to a random node."""
        lease = self._buffer.lease([self.version], self._dice.randrange(3), nodes=range(3))
        if lease is not None:
            rest = self._buffer.lease_rest(lease, [self.version]) if self._dice.random() < 0.5 else []
            self._held |= {each.lease_id: each for each in (lease, *rest)}

    def end(self) -> None:
        """Deliver a random result of a random lease."""
        if not self._held:
            return
        dice, lease = self._dice, self._held.pop(self._dice.choice(sorted(self._held)))
        outcome = dice.choice([Outcome.ENV_ERROR, Outcome.CANCELLED])
        made = trajectory(lease.task, max(lease.min_version, self.version), 1 + dice.randrange(5), dice.random())
        failed = Failure(lease.task, outcome, "boom", dice.randrange(3))
        self._buffer.deliver(lease.lease_id, made if dice.random() < 0.7 else failed, dice.randrange(3))

    def cancel(self) -> None:
        """Cancel one of the leases that the buffer has withdrawn."""
        if self._buffer.samples.leases.to_cancel and (
            lease := self._held.pop(self._buffer.samples.leases.to_cancel.pop(), None)
        ):
            self._buffer.deliver(lease.lease_id, Failure(lease.task, Outcome.CANCELLED, "late", 2))

    def lose(self) -> None:
        """Lose the nodes of some leases."""
        if self._held:
            lost = self._dice.sample(sorted(self._held), self._dice.randint(1, len(self._held)))
            self._held = {number: lease for number, lease in self._held.items() if number not in lost}
            self._buffer.revoke(lost)

    def tidy(self) -> None:
        """Do one slice of the postponed work."""
        self._buffer.do_slice()

    def train(self) -> None:
        """Begin the next step if its batch can be formed. Commit the step if one is trained already."""
        if not self.training:
            groups = self._buffer.next_round(self.version)
            if groups is not None:
                self.training, self.batches[self.version] = True, {group.group_id for group in groups}
        else:
            self.training = False
            self.version += 1
            self._buffer.commit(self.version - 1)


def replayed(state: BufferState | None, version: int, events: Sequence[Event]) -> Replay:
    """Return a replay of these events, encoded and decoded, after the checkpoint `state` of a version."""
    replay = Replay(state, version)
    for event in events:
        replay.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event))
    return replay


RULES = st.fixed_dictionaries(
    {
        "alpha": st.sampled_from([0.0, 1.0, 2.5]),
        "at_once": st.sampled_from([None, 1, 2]),
        "on_expire": st.sampled_from(["mask", "requeue", "wait"]),
        "extra_per_group": st.integers(0, 2),
        "extra_groups": st.integers(0, 2),
        "retries": st.integers(0, 1),
        "quarantine": st.sampled_from([2, 1000]),
        "breaker": st.sampled_from([3, 1000]),
        "waves": st.booleans(),
    }
)


@given(st.integers(0, 1 << 30), RULES)
def test_a_state_and_the_events_after_it_give_every_later_state(seed: int, rules: dict[str, Any]) -> None:
    dice, journal = random.Random(seed), Watching()
    buffer = make(**rules, kind_of=lambda seed: "ab"[seed % 2], journal=journal)
    journal.buffer = buffer
    Incarnation(buffer, dice).go_on(80)
    moments = sorted(journal.moments)
    pairs = [(None, later) for later in dice.sample(moments, min(3, len(moments)))]
    pairs += [tuple(sorted(dice.sample(moments, 2))) for _ in range(5 * (len(moments) > 1))]
    for begin, end in pairs:
        state = None if begin is None else msgspec.msgpack.decode(journal.moments[begin], type=BufferState)
        version = sum(isinstance(event, Committed) for event in journal.events[: begin or 0])
        replay = replayed(state, version, journal.events[begin or 0 : end])
        expected = msgspec.msgpack.decode(journal.moments[end], type=BufferState)
        assert replay.state(until=1000) == expected


@pytest.mark.slow
@given(st.integers(0, 1 << 30), RULES)
def test_a_run_goes_on_from_any_version_since_the_checkpoint_however_often_its_hub_has_died(
    seed: int, rules: dict[str, Any]
) -> None:
    dice, journal = random.Random(seed), MemoryJournal()
    state, version, batches = None, 0, dict[int, set[int]]()
    for number in range(4):
        buffer = make(**rules, state=state, step=version, journal=journal, incarnation=number)
        if dice.random() < 0.8:
            void(buffer)
        incarnation = Incarnation(buffer, dice, version)
        incarnation.go_on(60)
        for step, groups in incarnation.batches.items():
            assert batches.setdefault(step, groups) == groups, "another batch for the same step"
        reached = incarnation.version
        assert replayed(None, 0, journal.events).reached == reached
        version = dice.choice([reached, dice.randint(0, reached)])
        found = replayed(None, 0, journal.events).state(until=version)
        assert found is not None
        trained = {formed.step: set[int]() for formed in found.formed}
        for formed in found.formed:
            trained[formed.step].add(formed.group.group_id)
        if reached not in batches and reached in trained:  # chosen, and not gathered yet
            batches[reached] = trained[reached]
        assert trained == {step: groups for step, groups in batches.items() if step >= version}
        if version == reached and not buffer.samples.backlog:
            assert found.ledger.trained == buffer.samples.ledger.trained
        state = msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=BufferState)


def one_step(buffer: SampleBuffer, step: int) -> None:
    """Lease and finish all tasks of this version, and form the batch of the step."""
    finish_all(buffer, lease_all(buffer, step), step)
    assert buffer.next_round(step) is not None


def test_what_was_trained_since_the_checkpoint_is_trained_again_in_the_same_batches_and_booked_once() -> None:
    journal = MemoryJournal()
    buffer = make(journal=journal)
    batches: list[list[int]] = []
    for step in range(3):
        finish_all(buffer, lease_all(buffer, step), step)
        groups = buffer.next_round(step)
        assert groups is not None
        batches.append([group.group_id for group in groups])
        if step < 2:
            buffer.commit(step)
    state = replayed(None, 0, journal.events).state(until=0)
    again = make(state=state)
    again.samples.check()
    assert (again.samples.ledger.issued, again.samples.ledger.trained) == (buffer.samples.ledger.issued, 0)
    assert again.samples.ledger.generated_tokens == buffer.samples.ledger.generated_tokens
    for step, expected in enumerate(batches):
        assert again.has_round(step)
        groups = again.next_round(step)
        assert groups is not None
        assert [group.group_id for group in groups] == expected
        assert again.lease([step]) is None, "what was generated is generated again"
        again.commit(step)
        again.samples.check()
    assert (again.samples.ledger.trained, again.samples.in_flight) == (12, buffer.samples.in_flight - 4)


@pytest.mark.parametrize("on_expire", ["mask", "requeue", "wait"])
def test_under_a_lower_ratio_no_batch_is_trained_again_of_which_less_would_count(on_expire: str) -> None:
    options: dict[str, Any] = {"on_expire": on_expire, "batch": 4, "group": 2, "steps": 20}
    journal = MemoryJournal()
    buffer = make(alpha=2, journal=journal, **options)
    finish_all(buffer, lease_all(buffer, 0), 0)
    for step in range(3):
        trained(buffer, step)
    state = replayed(None, 0, journal.events).state(until=1)
    assert state is not None
    assert {formed.step for formed in state.formed} == {1, 2}
    again = void(make(alpha=0, state=state, step=1, incarnation=1, **options))
    for step in range(1, 4):
        finish_all(again, lease_all(again, step), step)
        groups = again.next_round(step)
        assert groups is not None
        assert [group.trained_tokens(step) for group in groups] == [6, 6]
        again.commit(step)
        while again.do_slice():
            pass
        again.samples.check()
    # Under the same ratio they are the same batches.
    state = replayed(None, 0, journal.events).state(until=1)
    same = void(make(alpha=2, state=state, step=1, incarnation=1, **options))
    assert [group.group_id for group in same.next_round(1) or []] == [2, 3]


def test_a_batch_of_former_problems_that_is_put_together_anew_begins_nothing() -> None:
    options: dict[str, Any] = {"on_expire": "requeue", "batch": 4, "group": 2, "steps": 20}
    journal = MemoryJournal()
    buffer = make(alpha=1, journal=journal, problems="old", **options)
    finish_all(buffer, lease_all(buffer, 0), 0)
    trained(buffer, 0)
    trained(buffer, 1)
    state = replayed(None, 0, journal.events).state(until=1)
    other = MemoryJournal()
    void(make(alpha=1, state=state, step=1, incarnation=1, journal=other, problems="new", **options))
    state = replayed(None, 0, [*journal.events, *other.events]).state(until=1)
    again = void(make(alpha=0, state=state, step=1, incarnation=2, problems="new", **options))
    assert min(lease.task.group_id for lease in lease_all(again, 1)) == 4
    again.samples.check()


def trained(buffer: SampleBuffer, step: int) -> None:
    """Train a step whose batch can be formed, and do all postponed work."""
    assert buffer.next_round(step) is not None
    buffer.commit(step)
    while buffer.do_slice():
        pass


def test_what_the_versions_have_sampled_that_a_run_goes_back_from_is_trained_by_no_step_before_them() -> None:
    options: dict[str, Any] = {"batch": 4, "group": 2, "steps": 20}
    journal = MemoryJournal()
    buffer = make(alpha=2, journal=journal, **options)
    finish_all(buffer, lease_all(buffer, 0), 0)
    for step in range(4):
        trained(buffer, step)
        finish_all(buffer, lease_all(buffer, step + 1), step + 1)
    state = replayed(None, 0, journal.events).state(until=1)
    again = void(make(alpha=0, state=state, step=1, incarnation=1, **options))
    for step in range(1, 5):
        while (groups := again.next_round(step)) is None:
            finish_all(again, lease_all(again, step), step)
        assert [group.newest_version for group in groups] == [step, step]
        again.commit(step)
        while again.do_slice():
            pass
        again.samples.check()


def test_parts_of_a_group_that_were_trained_come_together_again() -> None:
    """Three members of group 1 are trained at step 1, and the fourth one at step 2."""
    journal = MemoryJournal()
    buffer = make(alpha=1, batch=8, group=4, steps=20, journal=journal)
    old = lease_all(buffer, 0)
    finish_all(buffer, [lease for lease in old if lease.task.group_id != 1][:8], 0)
    finish_all(buffer, [lease for lease in old if lease.task.group_id == 1][:3], 0, reward=0.5)
    trained(buffer, 0)
    finish_all(buffer, [lease for lease in old if lease.task.group_id == 3], 0)
    trained(buffer, 1)
    finish_all(buffer, lease_all(buffer, 2), 2)
    late = next(lease for lease in old if lease.task.task_id == 7)
    buffer.deliver(late.lease_id, trajectory(late.task, 2, 6, versions=[VersionRun(0, 4), VersionRun(2, 2)]))
    trained(buffer, 2)
    state = replayed(None, 0, journal.events).state(until=1)
    assert state is not None
    parts = [(each.step, len(each.group.trajectories())) for each in state.formed if each.group.group_id == 1]
    assert parts == [(1, 3), (2, 1)]
    state.unform_batches(2)
    (group,) = (group for group in state.groups if group.group_id == 1)
    assert sorted(member.task.sample_index for member in group.members) == [0, 1, 2, 3]
    assert len(group.trajectories()) == 4
    assert group.earlier == []
    assert group.complete


def test_a_run_that_is_told_to_end_before_it_has_trained_all_of_it_again_books_the_rest() -> None:
    journal = MemoryJournal()
    buffer = make(journal=journal)
    for step in range(3):
        one_step(buffer, step)
        buffer.commit(step)
    state = replayed(None, 0, journal.events).state(until=0)
    again = make(state=state)
    one_step(again, 0)
    again.commit(0)
    again.close()
    assert again.samples.in_flight == 0
    again.samples.check()
    more = make(state=again.samples.snapshot(), step=1, incarnation=1)
    assert more.lease([1]) is not None, "what was withdrawn leaves its places to a run that is told to go on"


def test_after_the_breaker_has_ended_a_run_it_can_be_resumed_and_counts_anew() -> None:
    journal = MemoryJournal()
    buffer = make(retries=0, breaker=3, journal=journal)
    leases = lease_all(buffer, 0)
    failures = [Failure(lease.task, Outcome.ENV_ERROR, "boom", 1) for lease in leases]
    for lease, failure in zip(leases[:2], failures, strict=False):
        buffer.deliver(lease.lease_id, failure)
    with pytest.raises(BreakerError):
        buffer.deliver(leases[2].lease_id, failures[2])
    state = replayed(None, 0, journal.events).state(until=0)
    again = void(make(retries=0, breaker=3, state=state, incarnation=1))
    assert again.samples.ledger.given_up == {Outcome.ENV_ERROR: 3}
    leases = lease_all(again, 0)
    again.deliver(leases[0].lease_id, Failure(leases[0].task, Outcome.ENV_ERROR, "boom", 1))
    finish_all(again, leases[1:], 0)
    assert again.next_round(0) is not None
    again.samples.check()


def test_a_journal_that_does_not_belong_to_the_state_is_noticed() -> None:
    journal = MemoryJournal()
    buffer = make(journal=journal)
    one_step(buffer, 0)
    buffer.commit(0)
    with pytest.raises(ContractError, match="begins in the middle"):
        replayed(None, 0, journal.events[1:])
    ended = next(event for event in journal.events if isinstance(event, Delivered))
    with pytest.raises(ContractError, match=r"lease \d+, which no node holds"):
        replayed(None, 0, [*journal.events, ended])
    lacking = [event for event in journal.events if not isinstance(event, Delivered)]
    with pytest.raises((ContractError, KeyError)):
        replayed(None, 0, lacking)
