"""Places: the number of each group among those issued and not returned, which is what admission counts. Pure state."""

from __future__ import annotations

from bisect import bisect_left, insort

import msgspec


class Places(msgspec.Struct):
    """A group that is returned moves all later ones up by one: only the returned are kept, nobody is renumbered."""

    before: int = 0
    """Groups returned that were issued before all in `returned`."""
    returned: list[int] = []
    """Groups returned since the oldest in flight was issued, in order of issue."""

    def copy(self) -> Places:
        """The same places, which later changes do not reach."""
        return Places(self.before, list(self.returned))

    def of(self, group_id: int) -> int:
        """The place of a group, from 0; of the next one to be issued, too."""
        return group_id - self.before - bisect_left(self.returned, group_id)

    def first_at(self, place: int) -> int:
        """The first group, issued or not, that has this place or a later one."""
        numbers = range(len(self.returned))
        earlier = bisect_left(numbers, place + self.before, key=lambda at: self.returned[at] - at)
        return place + self.before + earlier

    def give_back(self, group_id: int) -> None:
        """A group leaves without having been trained."""
        insort(self.returned, group_id)

    def forget(self, oldest: int) -> None:
        """No group before this one will be asked for any more."""
        gone = bisect_left(self.returned, oldest)
        self.before += gone
        del self.returned[:gone]
