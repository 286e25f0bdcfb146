"""Make buffers and trajectories for the tests of samples and of the hub."""

from __future__ import annotations

from collections.abc import Callable, Generator
from itertools import count
from typing import Any

import numpy as np
from anyio.lowlevel import checkpoint

from flash.hub.protocol import SnapshotReply
from flash.samples.buffer import MEMBERS_PER_SLICE, SampleBuffer
from flash.samples.groups import Member
from flash.samples.journal import NO_JOURNAL, Journal
from flash.samples.rules import AgeContract, BufferRules
from flash.samples.store import BufferState
from flash.samples.tasks import TaskQueue, TaskSource
from flash.sampling import PLAIN
from flash.types import Lease, Outcome, Span, Task, Trajectory, Turn, VersionRun


class KeptStates:
    """Keeps the hub's states in memory: a `flash.hub.recovery.SaveState`."""

    def __init__(self) -> None:
        self.by_version: dict[int, bytes] = {}
        """Encoded state of each version with a checkpoint."""

    async def __call__(self, version: int, pieces: Generator[bytearray]) -> SnapshotReply:
        """Keep the state of a version, and let other tasks run after each piece."""
        state = bytearray()
        for piece in pieces:
            state += piece
            await checkpoint()
        self.by_version[version] = bytes(state)
        return SnapshotReply(len(state), crc32=0)


def trajectory(
    task: Task,
    version: int,
    tokens: int = 3,
    reward: float = 1.0,
    versions: list[VersionRun] | None = None,
) -> Trajectory:
    """Return a sample with one turn: two tokens of a prompt, and `tokens` sampled tokens.

    `versions` are the versions of the sampled tokens. None: `version` has sampled all of them.
    """
    return Trajectory(
        task=task,
        outcome=Outcome.OK,
        reward=reward,
        token_ids=np.arange(tokens + 2, dtype="<i4").tobytes(),
        action_spans=[Span(2, tokens + 2)],
        logprobs=np.zeros(tokens, dtype="<f4").tobytes(),
        versions=versions or [VersionRun(version, tokens)],
        turns=[Turn("p", "c", reward, 0.0, 0.0, 0.0)],
    )


def make_buffer(
    alpha: float = 1.0,
    batch: int = 4,
    group: int = 2,
    steps: int = 10,
    extra_groups: int = 0,
    step: int = 0,
    state: BufferState | None = None,
    kind_of: Callable[[int], str] = lambda seed: "",
    at_once: int | None = None,
    journal: Journal = NO_JOURNAL,
    incarnation: int = 0,
    max_token_age: int | None = None,
    **rules: Any,
) -> SampleBuffer:
    """Return a buffer with settings that suit most tests.

    Args:
        alpha: the asynchronous ratio.
        batch: number of samples of a step.
        group: number of samples of a group, without redundant samples.
        steps: number of steps of the run.
        extra_groups: number of redundant groups.
        step: the version from which the run continues.
        state: the state that an earlier buffer has left; None in a new run.
        kind_of: returns the kind of the problem with a seed.
        at_once: number of groups in one slice of postponed work; None: as in a run.
        journal: records the events.
        incarnation: number of the hub process, so that two buffers of a run give different numbers to leases.
        max_token_age: largest age of a trained token, in versions; None: as in `AgeContract`.
        rules: fields of `BufferRules`.
    """
    contract = AgeContract(alpha, batch, group, steps, extra_groups, max_token_age)
    rules = {"retries": 1, "breaker": 1000, "sampling": PLAIN} | rules
    members = group + rules.get("extra_per_group", 0)
    source = TaskSource(0, members, kind_of, state.cursor if state else None)
    return SampleBuffer(
        contract,
        source,
        BufferRules(**rules),
        step=step,
        state=state,
        lease_ids=count(incarnation << 32),
        members_per_slice=MEMBERS_PER_SLICE if at_once is None else at_once * group,
        journal=journal,
    )


def void(buffer: SampleBuffer) -> SampleBuffer:
    """Revoke all leases of a buffer, as if its nodes had ended with the hub before it. Returns the buffer."""
    buffer.revoke([member.lease_id for member in buffer.samples.leases.out.values()])
    while buffer.do_slice():
        pass
    return buffer


def in_order(queue: TaskQueue) -> list[Member]:
    """Return the waiting tasks in the order in which they would go out."""
    members: list[Member] = []
    while queue:
        members.append(queue.first)
        queue.take(queue.first)
    for member in members:
        queue.put(member)
    return members


def lease_all(buffer: SampleBuffer, version: int, node: int = 0) -> list[Lease]:
    """Lease all tasks that a node with an engine of this version may run."""
    leases: list[Lease] = []
    while (lease := buffer.lease([version], node)) is not None:
        leases.append(lease)
    return leases


def finish_all(buffer: SampleBuffer, leases: list[Lease], version: int, reward: float = 1.0) -> None:
    """Deliver a finished sample for each lease, sampled by this version."""
    for lease in leases:
        buffer.deliver(lease.lease_id, trajectory(lease.task, version, reward=reward))
