"""A user for each sandbox: the kernel counts some things by user, over all containers.

Under one user for all, a single sandbox takes the machine's inotify instances, POSIX queues, pending signals or buffers
of pipes, and the others find none left. User namespaces would not help: what is counted in one is counted as its maker
as well, who is root for all of them, and its share is as small.

Users are drawn at random, so that several services on one engine hardly ever meet; those of the containers that this
process knows never.
"""

from __future__ import annotations

import random

from flash.errors import ConfigError, SandboxStartError

USERS = range(0x70000000, 0x7FFFFFFF)
"""Belongs to nobody by default: neither to people and services of a distribution nor to systemd's containers
(https://systemd.io/UIDS-GIDS)."""
_LAST = (1 << 32) - 2
USER_LABEL = "flash.user"
"""Label of a container with a user of its own: its number."""


def parse_users(text: str) -> range:
    """`FIRST-LAST` as a range.

    Raises:
        ConfigError: it is none.
    """
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= _LAST):
        raise ConfigError(f"--users {text!r}: expected FIRST-LAST, two numbers from 1 to {_LAST}, the first not larger")
    return range(int(first), int(last) + 1)


class Users:
    """Gives numbers of `range` to containers, each to one."""

    def __init__(self, numbers: range) -> None:
        self._numbers = numbers
        self._drawn: set[int] = set()
        """Given to a container that is being made."""
        self._used: dict[str, int] = {}
        """Container to its user."""

    def draw(self) -> int:
        """A user that nobody has.

        Raises:
            SandboxStartError: there is none left.
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
        """Its container was not made, or is kept now."""
        self._drawn.discard(number)

    def keep(self, container_id: str, number: int) -> None:
        """A container has it."""
        self._used[container_id] = number

    def release(self, container_id: str) -> None:
        """A container is gone."""
        self._used.pop(container_id, None)
