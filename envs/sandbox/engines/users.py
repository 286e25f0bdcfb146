"""User ids for sandboxes, one for each: the kernel counts some resources per user, over all containers.

If all sandboxes had the same user, a single sandbox could take all of the machine's inotify instances, POSIX queues,
pending signals or pipe buffers. User namespaces would not help: a resource counted in a namespace also counts for the
namespace's creator, which is root for all of them, and whose limit is as small.

Ids are drawn at random, so that several services on one engine rarely use the same one. The containers that this
process knows never share one.
"""

from __future__ import annotations

import random

from flash.errors import ConfigError, SandboxStartError

USERS = range(0x70000000, 0x7FFFFFFF)
"""Range of ids that no user has by default: neither people and services of a distribution nor systemd's containers
(https://systemd.io/UIDS-GIDS)."""
_LAST = (1 << 32) - 2
USER_LABEL = "flash.user"
"""Label with the user id of a container that has one of its own."""


def parse_users(text: str) -> range:
    """Return the range that `FIRST-LAST` names.

    Raises:
        ConfigError: the text is not such a range.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= _LAST):
        raise ConfigError(f"--users {text!r}: expected FIRST-LAST, two numbers from 1 to {_LAST}, the first not larger")
    return range(int(first), int(last) + 1)


class Users:
    """Assigns user ids of a range to containers, each to one container."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers
        self._drawn: set[int] = set()
        """Ids of containers that are being created."""
        self._used: dict[str, int] = {}
        """User id of each container by its id."""

    def draw(self) -> int:
        """Draw an id that no known container has, and reserve it.

        Raises:
            SandboxStartError: all ids are in use.
        """
        taken = self._drawn | set(self._used.values())
        if len(taken) >= len(self._numbers):
            raise SandboxStartError(
                f"each of the {len(self._numbers)} users for sandboxes is in use; give the service a longer range"
            )
        while (number := random.choice(self._numbers)) in taken:
            pass
        self._drawn.add(number)
        return number

    def give_up(self, number: int) -> None:
        """Release a reservation: the container was not created, or `keep` has recorded its id."""
        self._drawn.discard(number)

    def keep(self, container_id: str, number: int) -> None:
        """Record the user id of a container."""
        self._used[container_id] = number

    def release(self, container_id: str) -> None:
        """Release the user id of a container that is gone."""
        self._used.pop(container_id, None)
