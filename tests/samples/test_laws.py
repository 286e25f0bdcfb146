"""Random interleavings of everything that can happen to a sample, under every combination of rules.

Law 2 (conservation), law 3 (the age contract), and the absence of deadlock hold after each of them.
"""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flash.ages import max_age, window
from flash.hub.work import LeaseClaims
from flash.samples.batches import gather, split_into_shards
from flash.samples.buffer import SampleBuffer
from flash.samples.groups import GroupFilter
from flash.samples.journal import Event, MemoryJournal, Replay
from flash.samples.rules import RoundSize
from flash.samples.store import BufferState
from flash.types import Failure, Lease, Outcome, VersionRun
from flash.waiting import run_to_end
from tests.samples.cases import make_buffer, trajectory

STEPS = 6
"""Number of steps of a run."""
OLDER = st.sampled_from([0, 0, 1, None])
"""Versions by which the largest age of a token exceeds ⌈α⌉; None: the default of the largest age."""


def bound_of(alpha: float, older: int | None) -> int:
    """Return the largest age of a trained token, in versions. `older` is a value of `OLDER`."""
    return max_age(alpha, None) if older is None or alpha == 0 else window(alpha) + older


def kind_of(seed: int) -> str:
    """Return the kind of the problem with this seed. Neighbouring problems are of different kinds."""
    return "even" if seed % 2 == 0 else "odd"


class Incarnation(RuleBasedStateMachine):
    """A buffer, the leases it gave out, and a trainer that holds a version."""

    @initialize(
        alpha=st.sampled_from([0.0, 0.25, 1.0, 2.5]),
        older=OLDER,
        group=st.sampled_from([2, 4]),
        batches=st.sampled_from([1, 2, 4]),
        nodes=st.integers(1, 8),
        at_once=st.sampled_from([None, 1]),
        rules=st.fixed_dictionaries(
            {
                "retries": st.integers(0, 2),
                "on_expire": st.sampled_from(["mask", "requeue", "wait"]),
                "fifo_window": st.sampled_from([None, 1.0, 1.5]),
                "extra_per_group": st.integers(0, 2),
                "extra_groups": st.integers(0, 2),
                "waves": st.booleans(),
                "filter": st.sampled_from([GroupFilter(), GroupFilter(drop_equal_rewards=True)]),
                "round": st.sampled_from([None, RoundSize(1, 1, 1000), RoundSize(1, 2, 8)]),
            }
        ).filter(lambda rules: rules["on_expire"] != "wait" or not (rules["extra_groups"] or rules["round"])),
    )
    def begin(
        self,
        alpha: float,
        older: int | None,
        group: int,
        batches: int,
        nodes: int,
        at_once: int | None,
        rules: dict[str, Any],
    ) -> None:
        """Begin a new run with random settings. `batches` is the number of groups of a batch."""
        batch = group * batches
        self.settings: dict[str, Any] = {"alpha": alpha, "batch": batch, "group": group, "steps": STEPS} | rules
        self.settings["max_token_age"] = bound_of(alpha, older)
        self.settings |= {"quarantine": 1000, "at_once": at_once}
        self.journal = MemoryJournal()
        self.stored: bytes | None = None
        """The last checkpoint."""
        self.stored_version = self.stored_trained = 0
        self.incarnations = 0
        """Number of restarts of the hub."""
        self.buffer = self.make(None, 0)
        self.alpha, self.batch, self.group, self.rules = alpha, batch, group, rules
        self.begun = alpha, rules["extra_groups"]
        """Largest α and number of redundant groups of all incarnations so far."""
        self.nodes = range(nodes)
        self.version = 0
        self.put_back = 0
        """Samples of formed batches that were put back under a stricter contract."""
        self.formed: set[int] = set()
        """Steps whose batches a previous incarnation has formed, perhaps under another contract."""
        self.leases: dict[int, tuple[Lease, int]] = {}
        """Leases that nodes hold, each with the version of its first token."""
        self.training = self.taking = False
        """True while a whole batch is trained, and while groups are taken in slices."""
        self.taken: list[int] = []
        """Groups of the rounds of the running step so far."""

    def make(self, state: BufferState | None, version: int) -> SampleBuffer:
        """Return a buffer of this run, which continues from `state` at `version`."""
        return make_buffer(
            **self.settings,
            kind_of=kind_of,
            state=state,
            step=version,
            journal=self.journal,
            incarnation=self.incarnations,
        )

    @property
    def oldest(self) -> int:
        """Oldest version of a token that the next step may train."""
        return self.version - self.settings["max_token_age"]

    @rule()
    def tidy(self) -> None:
        """Do one slice of the postponed work."""
        self.buffer.do_slice()

    def tidy_up(self) -> None:
        """Do all postponed work."""
        while self.buffer.do_slice():
            pass

    @rule(behind=st.integers(0, 3), node=st.integers(0, 7), ahead=st.integers(0, 1))
    def lease(self, behind: int, node: int, ahead: int) -> None:
        """Lease a task to a node with two engines, which are `behind` and `behind + ahead` versions old."""
        engines = [max(0, self.version - behind), max(0, self.version - behind - ahead)]
        lease = self.buffer.lease(engines, node % len(self.nodes), nodes=self.nodes)
        if lease is not None:
            start = min(version for version in engines if version >= lease.min_version)
            self.leases[lease.lease_id] = lease, start

    @rule()
    def lease_all(self) -> None:
        """Lease all tasks that engines of the newest version may run."""
        for node in self.nodes:
            while (lease := self.buffer.lease([self.version], node, nodes=self.nodes)) is not None:
                self.leases[lease.lease_id] = lease, self.version

    @precondition(lambda self: len(self.leases) > 2)
    @rule(late=st.integers(0, 1000))
    def finish_all_but_one(self, late: int) -> None:
        """Deliver the results of all leases but one, so that the group of the late one may be trained in parts."""
        left = sorted(self.leases)[late % len(self.leases)]
        for lease_id in [lease_id for lease_id in self.leases if lease_id != left]:
            if lease_id in self.buffer.samples.leases.to_cancel:
                continue
            lease, start = self.leases.pop(lease_id)
            self.buffer.deliver(lease_id, trajectory(lease.task, start, reward=float(lease_id % 2)))

    @precondition(lambda self: not self.training and self.version < STEPS)
    @rule(late=st.integers(0, 1000))
    def whole_step(self, late: int) -> None:
        """Lease and deliver what is needed, and train a step: most of the time this happens."""
        self.lease_all()
        if len(self.leases) > 2:
            self.finish_all_but_one(late)
        self.tidy_up()
        self.take()
        if self.taking:
            self.tidy_up()
            self.take()
        if self.training:
            self.commit()

    def pop(self, pick: int) -> tuple[Lease, int]:
        """Remove and return one of the leases, with the version of its first token. `pick` chooses it."""
        key = sorted(self.leases)[pick % len(self.leases)]
        return self.leases.pop(key)

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 1000), newer=st.integers(0, 2), reward=st.sampled_from([0.0, 1.0]))
    def finish(self, pick: int, newer: int, reward: float) -> None:
        """Deliver a finished sample. Its last token may be up to `newer` versions newer than its first one."""
        lease, start = self.pop(pick)
        later = min(self.version, start + newer)
        runs = [VersionRun(start, 2)] + ([VersionRun(later, 1)] if later > start else [])
        tokens = sum(run.count for run in runs)
        self.buffer.deliver(lease.lease_id, trajectory(lease.task, start, tokens, reward, runs))

    @precondition(lambda self: self.leases)
    @rule(
        pick=st.integers(0, 1000),
        outcome=st.sampled_from([Outcome.ENV_ERROR, Outcome.ENGINE_ERROR, Outcome.CANCELLED, Outcome.REWARD_ERROR]),
    )
    def fail(self, pick: int, outcome: Outcome) -> None:
        """Deliver a failure."""
        lease, _ = self.pop(pick)
        self.buffer.deliver(lease.lease_id, Failure(lease.task, outcome, "x", 1), node=pick % len(self.nodes))

    @precondition(lambda self: self.leases)
    @rule(pick=st.integers(0, 1000))
    def lose_node(self, pick: int) -> None:
        """Lose a node that holds one lease."""
        lease, _ = self.pop(pick)
        self.buffer.revoke([lease.lease_id])

    @precondition(lambda self: self.buffer.samples.leases.to_cancel)
    @rule(tokens=st.integers(0, 5))
    def cancel(self, tokens: int) -> None:
        """Cancel the leases that the buffer has withdrawn. Each had sampled `tokens` tokens."""
        for lease_id in self.buffer.samples.leases.to_cancel:
            if lease_id in self.leases:
                lease, _ = self.leases.pop(lease_id)
                self.buffer.deliver(lease_id, Failure(lease.task, Outcome.CANCELLED, "x", tokens))
        self.buffer.samples.leases.to_cancel.clear()

    @precondition(lambda self: not self.training and self.version < STEPS)
    @rule()
    def take(self) -> None:
        """Take the next round of the step, if enough groups are complete. Check its groups and the ages of tokens."""
        groups = self.buffer.next_round(self.version)
        # What was chosen may still be gathered: other things happen meanwhile.
        self.taking = groups is None and bool(self.buffer.samples.backlog)
        if groups is None:
            return
        assert groups
        self.training = not self.buffer.samples.batches.open
        self.taken += [group.group_id for group in groups]
        assert len(self.taken) == len({*self.taken})
        if not self.training:
            assert all(group.complete and not group.earlier for group in groups)
        assert all(len(group.trajectories()) + len(group.earlier) <= self.group for group in groups)
        for shard in run_to_end(split_into_shards(gather(groups, self.version, self.oldest), 2)):
            for sample in shard.samples:
                kept = [run for run in sample.trajectory.versions if run.version >= shard.min_version]
                assert all(run.version >= self.oldest for run in kept)
                if self.rules["on_expire"] == "requeue" and self.version not in self.formed:
                    assert kept == sample.trajectory.versions

    @precondition(lambda self: self.training)
    @rule()
    def commit(self) -> None:
        """Commit the step. After the last one, close the buffer: nothing may be left in it."""
        self.buffer.commit(self.version)
        self.version += 1
        self.training, self.taken = False, []
        if self.version == STEPS:
            self.buffer.close()
            self.tidy_up()
            assert self.buffer.samples.in_flight == 0

    @precondition(lambda self: self.buffer.samples.batches.open and not self.taking)
    @rule()
    def give_up_the_step(self) -> None:
        """Interrupt the run in the middle of a step: the groups of its rounds are ready again."""
        ready = self.buffer.samples.pool.ready_groups
        self.buffer.put_back()
        self.tidy_up()
        assert self.buffer.samples.pool.ready_groups == ready + len(self.taken)
        self.taken = []

    @precondition(lambda self: self.settled)
    @rule()
    def checkpoint(self) -> None:
        """Store the state, and begin a new file of the journal."""
        self.stored = msgspec.msgpack.encode(self.buffer.samples.snapshot())
        self.stored_version, self.stored_trained = self.version, self.buffer.samples.ledger.trained
        self.journal.begin(self.version)

    def replay(self) -> Replay:
        """Return a replay of the last checkpoint and the journal after it."""
        stored = None if self.stored is None else msgspec.msgpack.decode(self.stored, type=BufferState)
        replay = Replay(stored, self.stored_version)
        for event in self.journal.events:
            replay.apply(msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=Event))
        return replay

    @precondition(lambda self: self.settled)
    @rule()
    def law_the_journal_leads_to_the_same_state(self) -> None:
        """A replay of the journal leads to the state of the running buffer."""
        assert self.replay().state(until=self.version) == self.buffer.samples.snapshot()

    @rule(
        unwritten=st.integers(0, 3),
        back=st.booleans(),
        lost=st.integers(1, 4),
        options=st.none()
        | st.tuples(
            st.sampled_from([0.0, 0.25, 1.0, 2.5]), OLDER, st.integers(0, 2), st.sampled_from(["mask", "requeue"])
        )
        | st.tuples(st.sampled_from([0.0, 0.25, 1.0, 2.5]), OLDER, st.just(0), st.just("wait")),
    )
    def die(self, unwritten: int, back: bool, lost: int, options: tuple[float, int | None, int, str] | None) -> None:
        """Restart the hub where it was or from the checkpoint, perhaps with other options. Nothing that was written is
        lost, no step is booked twice, and each lease is claimed by a living node or its task is queued again."""
        issued, generated = self.buffer.samples.ledger.issued, self.buffer.samples.ledger.generated_tokens
        if unwritten:
            del self.journal.events[-unwritten:]
        replay = self.replay()
        self.version = self.stored_version if back else replay.reached
        self.incarnations += 1
        if options is not None:
            self.alpha, older, extra_groups, on_expire = options
            self.rules = {**self.rules, "extra_groups": extra_groups, "on_expire": on_expire}
            if on_expire == "wait":
                self.rules["round"] = None
            bound = bound_of(self.alpha, older)
            self.settings |= {"alpha": self.alpha, "max_token_age": bound, **self.rules}
            self.begun = max(self.begun[0], self.alpha), max(self.begun[1], extra_groups)
        state = replay.state(self.version)
        if state is not None and self.version - self.oldest < state.settings.contract.max_age:
            self.put_back += sum(len(formed.group.trajectories()) for formed in state.formed)
        self.buffer = self.make(state, self.version)
        self.formed = {formed.step for formed in state.formed} if state is not None else set[int]()
        if back:
            assert self.buffer.samples.ledger.trained == self.stored_trained
        if not unwritten:
            assert (self.buffer.samples.ledger.issued, self.buffer.samples.ledger.generated_tokens) == (
                issued,
                generated,
            )
        out = {member.lease_id for member in self.buffer.samples.leases.out.values()}
        claims = LeaseClaims(self.buffer.samples.leases, ended_node=-1)
        living = [each for each, start in self.leases.values() if start <= self.version and each.lease_id % lost]
        kept = [lease.lease_id for lease in claims.claim([*living, *living])]
        unclaimed = claims.expire()
        assert sorted([*kept, *unclaimed]) == sorted(out), "a lease is had twice, or by nobody"
        self.buffer.revoke(unclaimed)
        self.tidy_up()
        self.leases = {lease_id: self.leases[lease_id] for lease_id in kept}
        self.training, self.taking, self.taken = False, False, []

    @property
    def settled(self) -> bool:
        """True if a checkpoint may be made."""
        return not (self.training or self.taken or self.taking or self.buffer.samples.backlog)

    def twin(self) -> SampleBuffer:
        """Return a buffer that continues from the state of this one."""
        stored = msgspec.msgpack.encode(self.buffer.samples.snapshot())
        state = msgspec.msgpack.decode(stored, type=BufferState)
        return make_buffer(**self.settings, kind_of=kind_of, state=state, step=self.version)

    @invariant()
    def law_2_conservation(self) -> None:
        """The ledger accounts for every task and every token."""
        self.buffer.samples.check()

    @invariant()
    def every_problem_was_issued_once(self) -> None:
        """Each group has a problem of its own, and no group is counted as ended twice."""
        cursor = self.buffer.samples.source.cursor
        assert cursor.next_problem == cursor.next_group
        assert cursor.equal <= cursor.ended <= cursor.next_group

    @invariant()
    def law_3_admission(self) -> None:
        """Outstanding groups hold at most (1 + α) batches' worth of places, rounded up, and the redundant ones."""
        alpha, extra_groups = self.begun
        places = (1 + alpha) * self.batch + self.group * (1 + extra_groups)
        if self.settled:
            state = self.buffer.samples.snapshot()
            late = sum(group.alive for group in state.groups if group.earlier)
            late += self.put_back + sum(len(formed.group.trajectories()) for formed in state.formed)
            assert self.buffer.samples.in_flight - late <= places * (1 + self.rules["extra_per_group"] / self.group)

    @invariant()
    def something_can_always_happen(self) -> None:
        """No deadlock: work is out, or can be handed out to an engine of the current version, or a batch is ready."""
        if self.version >= STEPS or not self.settled or self.leases:
            return
        leases = [self.twin().lease([self.version], node, nodes=self.nodes) for node in self.nodes]
        assert any(lease is not None for lease in leases) or self.can_take()

    def can_take(self) -> bool:
        """Return True if the next step could take groups now."""
        twin = self.twin()
        while (groups := twin.next_round(self.version)) is None and twin.samples.backlog:
            twin.do_slice()
        return groups is not None


TestLaws = Incarnation.TestCase
TestLaws.settings = settings(max_examples=60, stateful_step_count=50)
