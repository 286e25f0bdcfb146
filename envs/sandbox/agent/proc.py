"""What /proc says of the processes of a sandbox: which live, and which of them belong to a command."""

import os
import time

MARK = "FLASH_COMMAND"
"""Environment variable by which a process is known to belong to a command, also after it left its process group."""
EXEC_LOOKS, SETTLED_LOOKS, EXEC_PAUSE = 200, 3, 0.001
"""How often processes that show no environment are looked at, how often with arguments, and the seconds between."""
ENDED = (b"Z", b"X")
"""States of processes that have ended."""
PF_KTHREAD = 0x200000
"""Flag of a thread of the kernel."""


class Stat:
    """What /proc/PID/stat says of a process."""

    def __init__(self, pid: int) -> None:
        with open("/proc/{}/stat".format(pid), "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        self.pid = pid
        self.state = fields[0]
        self.parent, self.group, self.session = (int(field) for field in fields[1:4])
        self.flags = int(fields[6])
        self.ticks = sum(int(field) for field in fields[11:15])
        """CPU of it and the children it waited for."""
        self.start = int(fields[19])
        """When it started, in ticks since the machine did."""


def processes() -> "list[Stat]":
    """All that live in the sandbox but the agent, zombies left out."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                stat = Stat(int(name))
            except (OSError, ValueError, IndexError):
                continue
            if stat.state not in ENDED:
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


def tree(leader: int, mark: str, since: int = 0) -> "list[int]":
    """What belongs to a command: its session and group, their descendants, and what carries its mark."""
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
    marks = marks_of([stat.pid for stat in every if stat.pid not in inside])
    inside.update(pid for pid, shows in marks.items() if shows == mark)
    return [stat.pid for stat in every if stat.pid in inside and stat.start >= since]


def shown(pid: int, name: str) -> "bytes | None":
    """What /proc shows of a process under a name; None where it is gone, or not for us to see."""
    try:
        with open("/proc/{}/{}".format(pid, name), "rb") as file:
            return file.read(1 << 17)
    except OSError:
        return None


def marks_of(pids: "list[int]", show: object = shown) -> "dict[int, str]":
    """Of the commands that processes belong to, as far as their environments say.

    In the middle of an exec a process has neither arguments nor an environment: it is looked at until it has, all
    such together. An environment that shows nothing beside arguments counts after some looks, since the exec may have
    ended between both.
    """
    marks = dict.fromkeys(pids, "")
    open_ones = dict.fromkeys(pids, 0)
    """To how often each has shown arguments."""
    for _ in range(EXEC_LOOKS):
        for pid in list(open_ones):
            environment = show(pid, "environ")
            if environment is None or not may_exec(pid):
                del open_ones[pid]
                continue
            marks[pid] = mark_in(environment)
            open_ones[pid] += bool(show(pid, "cmdline"))
            if environment or open_ones[pid] == SETTLED_LOOKS:
                del open_ones[pid]
        if not open_ones:
            break
        time.sleep(EXEC_PAUSE)
    return marks


def mark_in(environment: bytes) -> str:
    """The mark that an environment holds."""
    begin = MARK.encode() + b"="
    for entry in environment.split(b"\0"):
        if entry.startswith(begin):
            return entry[len(begin) :].decode("utf-8", "replace")
    return ""


def may_exec(pid: int) -> bool:
    """Whether it lives and is a program's: a zombie and a thread of the kernel have no arguments either."""
    try:
        stat = Stat(pid)
    except (OSError, ValueError, IndexError):
        return False
    return stat.state not in ENDED and not stat.flags & PF_KTHREAD
