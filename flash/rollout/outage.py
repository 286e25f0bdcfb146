"""The outage clock: for how long there may be no engine, which is time that deadlines may leave out.

Who notices an outage says when it begins and when it ends, and moves no deadline. Whose deadline is to leave it out
says so itself, by `left_out`, for as long as it waits for engines: meanwhile it comes later by what an outage may still
last, and what of that was not needed is taken back.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager

import anyio


class OutageClock:
    """See the module's docstring.

    Args:
        longest_s: seconds that an outage may last; what it lasts beyond is left out of no deadline.
        now: seconds on the loop's clock.
    """

    def __init__(self, longest_s: float = 0.0, now: Callable[[], float] = anyio.current_time) -> None:
        self._longest_s = longest_s
        self._now = now
        self._since: float | None = None
        self._heeding: set[anyio.CancelScope] = set()

    @property
    def left(self) -> float:
        """Seconds for which the outage may still last; 0 while there is none."""
        return 0.0 if self._since is None else max(0.0, self._since + self._longest_s - self._now())

    def begins(self) -> None:
        """No engine is left. Nothing happens while an outage lasts."""
        if self._since is None:
            self._since = self._now()
            self._tell(self.left)

    def ends(self) -> None:
        """An engine serves. Nothing happens while there is no outage."""
        if self._since is not None:
            self._tell(-self.left)
            self._since = None

    @contextmanager
    def left_out(self, own: anyio.CancelScope) -> Generator[None]:
        """Within the block an outage does not count in the caller's own deadline."""
        # A deadline that is set is a timer made anew, for each response.
        if self._since is not None:
            own.deadline += self.left
        self._heeding.add(own)
        try:
            yield
        finally:
            self._heeding.discard(own)
            if self._since is not None:  # who waits no more, and comes again in the same outage, would add it twice
                own.deadline -= self.left

    def _tell(self, later: float) -> None:
        for scope in self._heeding:
            scope.deadline += later
