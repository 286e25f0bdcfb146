"""Again: batches that a former life of the hub had formed, which are trained again as they were. Pure state.

A run goes on from a version, and the hub knows which batches were formed from there on: the same batches make the same
steps, and nothing is generated twice. Their samples are in flight until their step is committed.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from flash.hub.groups import Group


class Formed(msgspec.Struct, gc=False):
    """What the batch of a step has of a group: all of it, or a part."""

    step: int
    group: Group


class Again:
    """See the module's docstring."""

    def __init__(self, formed: Iterable[Formed]) -> None:
        self._steps: dict[int, dict[int, Group]] = {}
        self.in_flight = 0
        self.tokens = 0
        """Action tokens of all that is left."""
        for each in formed:
            self._steps.setdefault(each.step, {})[each.group.group_id] = each.group
            self._count(each.group, 1)

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    @property
    def following(self) -> int:
        """The first step after all of these; 0 if there are none."""
        return max(self._steps, default=-1) + 1

    @property
    def steps(self) -> list[int]:
        """Those whose batches nobody has taken yet."""
        return list(self._steps)

    def groups(self, step: int) -> list[int]:
        """What a step trains, in order."""
        return list(self._steps[step])

    def take(self, step: int, group_id: int) -> Group:
        """What a step has of a group goes into training."""
        group = self._steps[step].pop(group_id)
        if not self._steps[step]:
            del self._steps[step]
        self._count(group, -1)
        return group

    def left(self) -> list[Formed]:
        """All that no step has taken yet."""
        return [Formed(step, group) for step, groups in self._steps.items() for group in groups.values()]

    def _count(self, group: Group, change: int) -> None:
        for trajectory in group.trajectories():
            self.in_flight += change
            self.tokens += change * trajectory.action_count
