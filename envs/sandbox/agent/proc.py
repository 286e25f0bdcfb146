"""The processes of a sandbox, and the command to which each belongs.

Each command has a number. Its processes carry it in two of their hard limits. One limit rises with the number, the
other falls. A process may lower its hard limits and never raise them. So it cannot take the number of another command,
nor lose its own, whatever it executes, forks or calls itself. Neither limit has an effect here: Linux no longer uses
the one, and the other is about real-time priorities.
"""

import os
import resource

UP, DOWN = 15, 10
"""RLIMIT_RTTIME and RLIMIT_LOCKS, the limits that carry a command's number. Python has no name for the second one."""
CLOCK_TICK = os.sysconf("SC_CLK_TCK")
"""Clock ticks per second of CPU time."""
ENDED = (b"Z", b"X")
"""States of threads that have ended."""

MIDDLE = 1 << 42
"""Value from which a number is added and subtracted."""


class Stat:
    """Fields of /proc/PID/stat, read once. Raises OSError, ValueError or IndexError if the process is gone."""

    def __init__(self, pid: int) -> None:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.state = fields[0]
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.ticks = sum(int(field) for field in fields[11:15])
        """CPU time, in ticks, of the process and its reaped children."""
        self.threads = int(fields[17])
        """Threads left. The first one always counts; 0 during exec or while it is reaped."""
        self.start = int(fields[19])
        """Start time, in ticks since the machine started."""

    def ended(self) -> bool:
        """Return True if no thread runs. The state is that of the first thread, which may end before the others."""
        return self.state in ENDED and self.threads == 1


def processes() -> "list[Stat]":
    """Return all processes of the sandbox, without the agent and zombies."""
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
    """Return our children: processes that we started, and orphans."""
    own = os.getpid()
    try:
        with open("/proc/self/task/{}/children".format(own), "rb") as file:
            return [int(word) for word in file.read().split()]
    except OSError:
        return [stat.pid for stat in processes() if stat.parent == own]


def tree(leader: int, number: int, since: int = 0) -> "list[int]":
    """Return the processes of a command: its session and group, their descendants, and all with its number.

    Args:
        leader: process that the command started with.
        number: number of the command.
        since: processes that started before this uptime, in ticks, are left out.
    """
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
    """Return the CPU ticks of processes and their reaped children, and True if a thread is ready to run."""
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
    """Numbers commands, from a start that no other agent of the machine has: tests run several agents."""

    def __init__(self) -> None:
        self.last = int.from_bytes(os.urandom(3), "big") << 16

    def new(self) -> int:
        """Return the next number."""
        self.last += 1
        return self.last


def carry(number: int) -> None:
    """Give this process the number of a command, permanently. Raises OSError or ValueError on failure."""
    resource.setrlimit(UP, (MIDDLE + number, MIDDLE + number))
    resource.setrlimit(DOWN, (MIDDLE - number, MIDDLE - number))


def number_of(pid: int) -> "int | None":
    """Return the number of a process's command; None if it has none, is gone, or is not readable for us."""
    try:
        up, down = resource.prlimit(pid, UP)[1], resource.prlimit(pid, DOWN)[1]
    except (OSError, ValueError):
        return None
    return up - MIDDLE if up != resource.RLIM_INFINITY and up - MIDDLE == MIDDLE - down else None
