"""SampleBuffer: admission and the age contract, as a pure state machine.

The age contract (α = async ratio, B = samples per step, G = groups per step): every token trained by the step that
makes version n+1 was sampled by a version ≥ n − α. It is kept in three places:

- admission: the k-th sample counted from the start (samples of returned groups not counted) is handed out only to an
  engine whose version v satisfies k ≤ (v + 1 + α)·B, and never beyond the last step's need;
- choice: a batch takes the complete groups with the oldest tokens first, and never waits for a straggler while G others
  are complete; a group without any recent token leaves as stale and gives its place back;
- consumption: tokens that are too old all the same are left out of the loss, and counted.

Conservation: every issued task is queued, leased, done, in training or booked in the ledger; `in_flight` counts them
here, independently of the ledger.
"""

from __future__ import annotations

import math
from collections import deque

import msgspec

from flash.errors import BreakerError, ContractError
from flash.hub.groups import Group, Member
from flash.hub.ledger import Ledger
from flash.hub.tasks import TaskSource
from flash.types import Failure, Lease, Outcome, Task, Trajectory

RETRIED = frozenset({Outcome.ENV_ERROR, Outcome.ENV_TIMEOUT, Outcome.REWARD_ERROR, Outcome.ENGINE_ERROR})
"""Failures of the infrastructure: tried again within the budget. A cancelled task is always tried again."""


class AgeContract(msgspec.Struct, frozen=True):
    """The numbers admission and consumption follow."""

    async_ratio: float
    batch_size: int
    group_size: int
    steps: int

    def min_engine_version(self, sample: int) -> int:
        """The oldest engine version that may start the `sample`-th sample (from 1)."""
        # The tolerance keeps (v + 1 + α)·B = k true when α·B is a whole number that floats cannot hold.
        return max(0, math.ceil(sample / self.batch_size - 1 - self.async_ratio - 1e-9))

    def min_token_version(self, trainer_version: int) -> int:
        """The oldest version whose tokens the next step may train."""
        return math.ceil(trainer_version - self.async_ratio - 1e-9)

    @property
    def groups_per_batch(self) -> int:
        """G."""
        return self.batch_size // self.group_size

    @property
    def last_slot(self) -> int:
        """Groups the whole run needs."""
        return self.steps * self.groups_per_batch


class BufferState(msgspec.Struct):
    """What a checkpoint keeps of the buffer."""

    next_group: int
    returned: int
    groups: list[Group]
    ledger: Ledger


class SampleBuffer:
    """Every training task between its issue and the commit of its step."""

    def __init__(
        self,
        contract: AgeContract,
        source: TaskSource,
        *,
        retries: int,
        breaker: int,
        state: BufferState | None = None,
    ) -> None:
        self._contract = contract
        self._source = source
        self._retries = retries
        self._breaker = breaker
        self._failed_in_a_row = 0
        self._next_lease = 0
        self._leases: dict[int, Task] = {}
        self._queue: deque[Task] = deque()
        self._groups: dict[int, Group] = {}
        self._training: dict[int, Group] = {}
        self._returned = 0
        self.ledger = Ledger()
        if state is not None:
            self._restore(state)

    def _restore(self, state: BufferState) -> None:
        """Continue from a checkpoint: leases of the former life are void, their tasks queue again in order."""
        self._source.next_group = state.next_group
        self._returned = state.returned
        self.ledger = state.ledger
        for group in state.groups:
            self._groups[group.group_id] = group
            for member in group.members:
                if member.state == "leased":
                    member.state = "queued"
                if member.state == "queued":
                    self._queue.append(member.task)

    def snapshot(self) -> BufferState:
        """The state between two steps; call it while no batch is in training."""
        assert not self._training, "a batch in training belongs to no consistent state"
        groups = list(self._groups.values())
        return BufferState(self._source.next_group, self._returned, groups, self.ledger)

    # -- admission ---------------------------------------------------------------------------------------------------

    def lease(self, engine_version: int) -> Lease | None:
        """Hand out the next task that an engine of this version may run, or None."""
        if not self._queue and self._room_for_group(engine_version):
            self._issue_group()
        if not self._queue:
            return None
        task = self._queue[0]
        needed = self._needed_version(task)
        if needed > engine_version:
            return None
        self._queue.popleft()
        self._member(task).state = "leased"
        lease = Lease(self._next_lease, task, needed)
        self._next_lease += 1
        self._leases[lease.lease_id] = task
        return lease

    def _needed_version(self, task: Task) -> int:
        slot = self._groups[task.group_id].slot
        return self._contract.min_engine_version(slot * self._contract.group_size + task.sample_index + 1)

    def _room_for_group(self, engine_version: int) -> bool:
        slot = self._source.next_group - self._returned
        first = self._contract.min_engine_version(slot * self._contract.group_size + 1)
        return slot < self._contract.last_slot and first <= engine_version

    def _issue_group(self) -> None:
        slot = self._source.next_group - self._returned
        tasks = self._source.issue_group()
        group = Group(tasks[0].group_id, slot, [Member(task) for task in tasks])
        self._groups[group.group_id] = group
        self._queue.extend(tasks)
        self.ledger.issued += len(tasks)

    # -- results -----------------------------------------------------------------------------------------------------

    def finish(self, lease_id: int, result: Trajectory | Failure) -> None:
        """Take what a lease brought home. An unknown lease (revoked, or of a former life) only books its tokens.

        Raises:
            BreakerError: too many tasks in a row were given up.
        """
        task = self._leases.pop(lease_id, None)
        tokens = result.tokens if isinstance(result, Failure) else result.action_count
        self.ledger.generated_tokens += tokens
        if task is None:
            self.ledger.discard(Outcome.CANCELLED, tokens)
        elif isinstance(result, Failure):
            self.ledger.discard(result.outcome, tokens)
            self._fail(task, result)
        else:
            member = self._member(task)
            member.state, member.trajectory = "done", result
            self._failed_in_a_row = 0

    def revoke(self, lease_id: int) -> None:
        """A lease's node is gone: its task queues again, at the front."""
        task = self._leases.pop(lease_id)
        self.ledger.retry(Outcome.CANCELLED)
        self._requeue(task)

    def _fail(self, task: Task, failure: Failure) -> None:
        if failure.outcome is Outcome.CANCELLED:
            self.ledger.retry(failure.outcome)
            self._requeue(task)
        elif failure.outcome in RETRIED and task.attempt < self._retries:
            self.ledger.retry(failure.outcome)
            self._requeue(msgspec.structs.replace(task, attempt=task.attempt + 1))
        else:
            self._lose(task, failure)

    def _requeue(self, task: Task) -> None:
        member = self._member(task)
        member.task, member.state = task, "queued"
        self._queue.appendleft(task)

    def _lose(self, task: Task, failure: Failure) -> None:
        self._member(task).state = "lost"
        self.ledger.give_up(failure.outcome)
        group = self._groups[task.group_id]
        if group.alive == 0:
            self._return(group)
        self._failed_in_a_row += 1
        if self._failed_in_a_row >= self._breaker:
            raise BreakerError(
                f"{self._failed_in_a_row} samples in a row were given up and none finished between; "
                f"the last one ({failure.outcome}): {failure.message}. Fix the cause, or raise rollout.breaker "
                "or rollout.retries."
            )

    def _return(self, group: Group) -> None:
        """A group leaves without reaching a batch: the groups issued after it move up, the last place is free again."""
        del self._groups[group.group_id]
        self._returned += 1
        for later in self._groups.values():
            later.slot -= later.slot > group.slot

    def _member(self, task: Task) -> Member:
        return self._groups[task.group_id].members[task.sample_index]

    # -- consumption -------------------------------------------------------------------------------------------------

    def take(self, version: int) -> list[Group] | None:
        """The groups of the step that trains version `version`, or None while too few are complete."""
        min_version = self._contract.min_token_version(version)
        ready = [group for group in self._groups.values() if group.complete]
        for group in [group for group in ready if group.trained_tokens(min_version) == 0]:
            self._expire(group)
            ready.remove(group)
        if len(ready) < self._contract.groups_per_batch:
            return None
        ready.sort(key=lambda group: (group.oldest_version, group.group_id))
        chosen = ready[: self._contract.groups_per_batch]
        for group in chosen:
            self._training[group.group_id] = self._groups.pop(group.group_id)
        return chosen

    def _expire(self, group: Group) -> None:
        for trajectory in group.trajectories():
            self.ledger.give_up(Outcome.STALE)
            self.ledger.discard(Outcome.STALE, trajectory.action_count)
        self._return(group)

    def commit(self, version: int) -> None:
        """The step that trained `version` is done: book its groups.

        Raises:
            ContractError: no batch of this step was taken.
        """
        if not self._training:
            raise ContractError(f"step {version} was committed, but no batch was handed out for it")
        min_version = self._contract.min_token_version(version)
        for group in self._training.values():
            for trajectory in group.trajectories():
                trained = trajectory.trained_tokens(min_version)
                self.ledger.trained_tokens += trained
                self.ledger.discard(Outcome.STALE, trajectory.action_count - trained)
                if trained:
                    self.ledger.trained += 1
                else:
                    self.ledger.give_up(Outcome.STALE)
        self._training.clear()
        self.check()

    # -- counts ------------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Tasks issued and neither trained, filtered nor given up."""
        groups = (*self._groups.values(), *self._training.values())
        return sum(group.alive for group in groups)

    @property
    def buffered_tokens(self) -> int:
        """Action tokens of trajectories that wait for a step or are in one."""
        groups = (*self._groups.values(), *self._training.values())
        return sum(t.action_count for group in groups for t in group.trajectories())

    @property
    def ready_groups(self) -> int:
        """Complete groups that wait for a step."""
        return sum(group.complete for group in self._groups.values())

    @property
    def leased(self) -> int:
        """Tasks that nodes are working on."""
        return len(self._leases)

    def check(self) -> None:
        """Compare the ledger with what is here. Raises ContractError."""
        self.ledger.check(self.in_flight, self.buffered_tokens)
