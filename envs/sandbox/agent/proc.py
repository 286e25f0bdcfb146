"""Which processes live in a sandbox, and to which command each belongs.

Each command has a number, which its processes carry in two of their hard limits, one counting up and one down. A
process may lower a hard limit of its own and never raise one: none can take the number of another command, earlier or
later, nor lose its own, whatever it executes, forks or calls itself. Neither limit limits anything here: Linux has no
use for the one any more, and the other is about real-time priorities.
"""

import os
import resource

UP, DOWN = 15, 10
"""RLIMIT_RTTIME and RLIMIT_LOCKS: the limits that carry a command's number. Python has no name for the second one."""
CLOCK_TICK = os.sysconf("SC_CLK_TCK")
"""Ticks in a second of CPU."""
ENDED = (b"Z", b"X")
"""States of threads that have ended."""


class Stat:
    """What /proc/PID/stat says of a process."""

    def __init__(self, pid: int) -> None:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.state = fields[0]
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.ticks = sum(int(field) for field in fields[11:15])
        """CPU of it and the children it waited for."""
        self.threads = int(fields[17])
        """That are left of it, its first one always; 0 while it becomes another program, or is being reaped."""
        self.start = int(fields[19])
        """When it started, in ticks since the machine did."""

    def ended(self) -> bool:
        """Nothing of it runs any more. The state is that of its first thread only, which may end before the others."""
        return self.state in ENDED and self.threads == 1


def processes() -> "list[Stat]":
    """All that live in the sandbox but the agent, zombies left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                stat = Stat(int(name))
            except (OSError, ValueError, IndexError):
                continue
            if not stat.ended():
                found.append(stat)
    return found


def adopted() -> "list[int]":
    """Our children: those that we started, and those whose parents have ended."""
    own = os.getpid()
    try:
        with open("/proc/self/task/{}/children".format(own), "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return [stat.pid for stat in processes() if stat.parent == own]


def tree(leader: int, number: int, since: int = 0) -> "list[int]":
    """What belongs to a command: its session and group, their descendants, and what carries its number."""
    inside = {leader}
    every = processes()
    grown = True
    while grown:
        grown = False
        for stat in every:
            if stat.pid not in inside and (
                stat.session == leader or stat.group == leader or (stat.parent in inside and stat.parent != 0)
            ):
                inside.add(stat.pid)
                grown = True
    inside.update(stat.pid for stat in every if stat.pid not in inside and number_of(stat.pid) == number)
    return [stat.pid for stat in every if stat.pid in inside and stat.start >= since]


def load(pids: "list[int]") -> "tuple[int, bool]":
    """Return the ticks of CPU that processes and their ended children had, and True if a thread is ready to run."""
    ticks, wants = 0, False
    for pid in pids:
        try:
            ticks += Stat(pid).ticks
            for thread in [] if wants else os.listdir("/proc/{}/task".format(pid)):
                with open("/proc/{}/task/{}/stat".format(pid, thread), "rb") as file:
                    wants = wants or file.read().rpartition(b")")[2].split()[0] == b"R"
        except (OSError, ValueError, IndexError):
            continue  # It has ended meanwhile.
    return ticks, wants


class CommandNumbers:
    """Gives each command a number, beginning at one that no other agent of the machine has: tests run several."""

    def __init__(self) -> None:
        self.last = int.from_bytes(os.urandom(3), "big") << 16

    def new(self) -> int:
        """The next one."""
        self.last += 1
        return self.last


MIDDLE = 1 << 42
"""What a number is added to and taken from."""


def carry(number: int) -> None:
    """Give this process the number of a command, for good. Raises OSError or ValueError where it cannot have it."""
    resource.setrlimit(UP, (MIDDLE + number, MIDDLE + number))
    resource.setrlimit(DOWN, (MIDDLE - number, MIDDLE - number))


def number_of(pid: int) -> "int | None":
    """The command that a process belongs to; None where it has none, is gone, or is not for us to see."""
    try:
        up, down = resource.prlimit(pid, UP)[1], resource.prlimit(pid, DOWN)[1]
    except (OSError, ValueError):
        return None
    return up - MIDDLE if up != resource.RLIM_INFINITY and up - MIDDLE == MIDDLE - down else None
