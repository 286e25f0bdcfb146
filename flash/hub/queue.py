"""TaskQueue: the tasks that wait, in order.

They stand in lines, one for each set of nodes on which its tasks have failed. A node that avoids some of them looks at
the heads of the lines, of which there are few, and not at the tasks, of which there are many.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection

from flash.hub.groups import Member
from flash.types import Task

Place = tuple[int, ...]
"""Where a task stands in the queue: lower places go out first."""

RUN = 1024
"""Tasks of a run at most: moving so many takes less than finding the place."""


class TaskQueue:
    """See the module's docstring. What a task avoids does not change while it waits.

    Args:
        place: the place of a task, that of no other one.
        run: tasks of a run before it is cut in two.
    """

    def __init__(self, place: Callable[[Task], Place], run: int = RUN) -> None:
        self._place_of = place
        self._longest = run
        self._lines: dict[frozenset[int], _Line] = {}
        """None of them is empty."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> Member:
        """The task that goes out next; there has to be one."""
        return min((line.first for line in self._lines.values()), key=self._place)

    def first_for(self, node: int, nodes: Collection[int]) -> Member | None:
        """The task that goes out next to a node: none that has failed there, unless it has failed on all `nodes`."""
        lines = (line for failed, line in self._lines.items() if node not in failed or failed.issuperset(nodes))
        return min((line.first for line in lines), key=self._place, default=None)

    def put(self, member: Member) -> None:
        """A task waits, at its place."""
        failed = frozenset(member.avoid)
        if (line := self._lines.get(failed)) is None:
            line = self._lines[failed] = _Line(self._place, self._longest)
        line.put(member)
        self._size += 1

    def take(self, member: Member) -> None:
        """A task that waits does so no more."""
        failed = frozenset(member.avoid)
        line = self._lines[failed]
        line.take(member)
        if not line:
            del self._lines[failed]
        self._size -= 1

    def _place(self, member: Member) -> Place:
        return self._place_of(member.task)


class _Line:
    """Tasks in order, in short runs: what comes or goes moves a run and not the whole line."""

    def __init__(self, place: Callable[[Member], Place], longest: int) -> None:
        self._place = place
        self._longest = longest
        self._runs: list[list[Member]] = []
        """None of them is empty."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    @property
    def first(self) -> Member:
        return self._runs[0][0]

    def put(self, member: Member) -> None:
        if not self._runs:
            self._runs.append([member])
            return
        at = min(self._run_of(member), len(self._runs) - 1)
        run = self._runs[at]
        insort(run, member, key=self._place)
        if len(run) > self._longest:
            middle = len(run) // 2
            self._runs[at : at + 1] = [run[:middle], run[middle:]]

    def take(self, member: Member) -> None:
        at = index = 0
        # Most go out from the front.
        if member is not self.first:
            at = self._run_of(member)
            index = bisect_left(self._runs[at], self._place(member), key=self._place)
        run = self._runs[at]
        assert run[index] is member, "a queued member is in the queue"
        del run[index]
        if not run:
            del self._runs[at]

    def _run_of(self, member: Member) -> int:
        """The first run that ends at this task or behind it."""
        return bisect_left(self._runs, self._place(member), key=lambda run: self._place(run[-1]))
