"""Whether a sandbox that has run somebody's program is as it was before.

`wipe` kills every process and removes every file of the sandbox's user, and then compares what a program could have
left behind with a `Look` at the sandbox from before: processes, files with owner, mode and extended attributes, mounts,
System V and POSIX queues and memory, sockets, counters of the network, limits, priority, CPUs, rights. Times of folders
and devices that stay are set to now. Equal means clean. Anything else, also a look that fails, means that the sandbox
must not be used again; no attempt is made to mend it.

Why the answer can be believed. The caller has no job, session or other call in progress there. The agent, which no
command can kill, read or trace, kills all others with one signal before the look, so that nobody is left to deceive
it. The look runs programs of the image, whose files cannot be written to. Where any of this does not hold (another
profile than `strict`, no container at all), `look` says so, and nothing is ever used again.

What it does not compare: counters that only grow, such as the next process id, the next inode of each file system in
memory, the next id (and sequence number) of System V queues, semaphores and memory, the CPU time used, and the most
memory that the control group ever had. Two programs in a row that both mean to could pass a few bits that way; none of
it changes how a program runs.
"""

from __future__ import annotations

import anyio
import msgspec

from envs.sandbox.sandbox import Commands, Sandbox

SECONDS = 10.0
"""For one look."""
KILL_AFTER_S = 0.001
"""Life of the command whose end takes everything along."""

_ATTRIBUTES = r"""
import os, sys
for path in sys.stdin.buffer.read().split(b"\0")[:-1]:
    try:
        if sys.argv[1] == "wipe":
            for name in os.listxattr(path, follow_symlinks=False):
                if name.startswith("user."):
                    os.removexattr(path, name, follow_symlinks=False)
        for name in sorted(os.listxattr(path, follow_symlinks=False)):
            print(ascii((path, name, os.getxattr(path, name, follow_symlinks=False))))
    except OSError as error:
        if error.errno != 95:
            raise
"""
"""Extended attributes of the files named on standard input; 95: such files have none."""
_SCRIPT = r"""
what=$1; attributes=$2; shift 2
cd / || exit 90
# The agent, which started us, is process 1 and closed to everybody else. Nobody else is here.
if [ "$PPID" != 1 ] || [ -r /proc/1/environ ]; then exit 91; fi
for process in /proc/[0-9]*; do
    if [ "$process" != /proc/1 ] && [ "$process" != /proc/$$ ]; then exit 92; fi
done
if [ "$what" = wipe ]; then
    find "$@" -xdev -mindepth 1 -uid "$(id -u)" -delete 2>/dev/null
    # What cannot be removed has times, which a program can set or leave.
    for place in "$@" /dev/*; do
        if [ -L "$place" ] && [ "$place" != /dev/ptmx ]; then continue; fi
        if [ -w "$place" ] && ! touch -c "$place"; then exit 95; fi
    done
fi
find "$@" -xdev -printf '%y %m %U %G %l %p\n' || exit 93
ls -ldn "$@" || exit 94
# Python takes longer than all of this: it starts only where somebody may have given attributes to what stays.
own="-uid $(id -u) -o ! -perm -1000"
if [ -n "$(find "$@" -xdev '(' -type d -o -type f ')' -writable '(' $own ')' -print -quit)" ]; then
    find "$@" -xdev -print0 | python3 -ISc "$attributes" "$what" || exit 96
fi
network=
for name in sockstat sockstat6 snmp snmp6 netstat dev; do
    if [ -e /proc/self/net/$name ]; then network="$network /proc/self/net/$name"; fi
done
exec cat /proc/sysvipc/* $network /proc/self/net/unix /proc/self/mountinfo /proc/self/limits \
    /proc/self/status /proc/self/stat
"""

_PAUSES = (0.0, 0.05)
"""Seconds before each attempt: what was killed may take a moment to be gone."""
_ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C"}
_ELSEWHERE = ("/proc", "/sys")
"""Written to by the kernel and its owner only."""
_STATUS = ("Uid", "Gid", "Groups", "Umask", "NoNewPrivs", "Seccomp", "Speculation", "Cap", "Cpus", "Mems", "THP")
"""Lines of /proc/self/status that are the same for every command of a clean sandbox."""
_MARKS = ("Max file locks", "Max realtime timeout")
"""Limits of /proc/self/limits by which the agent knows each command's processes: others every time."""
_STAT = (16, 37, 38)
"""Fields after the name in /proc/self/stat: nice value, real-time priority, scheduling policy."""


class Look(msgspec.Struct, frozen=True):
    """What a sandbox was like at one moment."""

    folders: tuple[str, ...]
    """Where files may be."""
    state: str


async def look(sandbox: Sandbox) -> Look | None:
    """What the sandbox is like; None when that cannot be told for certain.

    Raises:
        SandboxError: it cannot be asked.
    """
    if sandbox.spec.profile != "strict":
        return None
    mounts = await sandbox.run(["cat", "/proc/self/mountinfo"], timeout=SECONDS, cwd="/", env=_ENV)
    folders = _folders(mounts.stdout.decode("utf-8", "backslashreplace"))
    return await _look(sandbox, "look", folders) if mounts.ok and folders else None


async def wipe(sandbox: Commands, before: Look) -> bool:
    """Clear the sandbox, and tell whether it is as it was `before`.

    Raises:
        SandboxError: it cannot be asked.
    """
    for pause in _PAUSES:
        await anyio.sleep(pause)
        # The end of a command that is stopped while nothing else was asked for ends every other process with it.
        ended = await sandbox.run(["sleep", "60"], timeout=KILL_AFTER_S, cwd="/", env=_ENV)
        if ended.timed_out and await _look(sandbox, "wipe", before.folders) == before:
            return True
    return False


async def _look(sandbox: Commands, what: str, folders: tuple[str, ...]) -> Look | None:
    command = ["/bin/sh", "-c", _SCRIPT, "sh", what, _ATTRIBUTES, *folders]
    found = await sandbox.run(command, timeout=SECONDS, cwd="/", env=_ENV)
    state = _constant(found.stdout.decode("utf-8", "backslashreplace"))
    return None if not found.ok or found.stdout_truncated or state is None else Look(folders, state)


def _folders(mountinfo: str) -> tuple[str, ...]:
    """The file systems that may be written to; none where the root is one of them."""
    found: list[str] = []
    read_only = False
    for line in mountinfo.splitlines():
        words = line.split()
        if len(words) < 6:
            return ()
        place, options = words[4], words[5].split(",")
        if place == "/":
            read_only = "ro" in options
        elif not place.startswith(_ELSEWHERE) and "rw" in options:
            found.append(place)
    return tuple(dict.fromkeys(found)) if read_only else ()


def _constant(text: str) -> str | None:
    """What is the same each time in a clean sandbox; None when the end is missing."""
    lines, _, stat = text.rstrip("\n").rpartition("\n")
    fields = stat.rpartition(")")[2].split()
    if len(fields) <= max(_STAT):
        return None
    kept = [" ".join(fields[place] for place in _STAT)]
    status = False
    for line in lines.splitlines():
        status = status or line.startswith("Name:\t")
        if (status and not line.startswith(_STATUS)) or line.startswith(_MARKS):
            continue
        words = line.split()
        if "inuse" in words:
            # Not all that follows is of this sandbox: some of it is the whole machine's.
            line = " ".join(
                words[place] for place in range(len(words)) if {"inuse", "tw"} & set(words[place - 1 : place])
            )
        if not status and len(words) > 8 and words[0][0] in "dl" and len(words[0]) >= 10:
            line = f"{words[0]} {words[2]} {words[3]} {words[8]}"  # of `ls`: neither times nor the number of entries
        kept.append(line)
    return "\n".join(kept)
