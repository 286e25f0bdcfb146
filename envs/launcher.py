"""Launcher: runs a program to its end, and then kills every process that the program has started.

`envs.programs` starts it for each episode of an agent that is a program. It also kills processes that have begun a
session of their own, which a signal to the process group would miss. A process that loses its parent becomes a child of
this process (PR_SET_CHILD_SUBREAPER), so that none escapes. SIGTERM ends the program as well. The script imports only
the standard library, because it must start quickly.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

PR_SET_CHILD_SUBREAPER = 36
"""Option of the system call `prctl` that makes this process adopt orphans."""
NOT_STARTED = 127
"""Exit code if the program cannot be started, as in a shell."""


def main(command: list[str]) -> None:
    """Run the program, kill its descendants, and exit with its exit code or signal. Never returns."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, _stop)
    program = os.fork()
    if not program:
        _become(command)
    ended, status = os.wait()
    while ended != program:  # an adopted orphan has ended before the program
        ended, status = os.wait()
    # A second SIGTERM must not interrupt the killing.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_children()
    # Exit in the way in which the program has ended, so that the caller sees its exit code or its signal.
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:  # its action cannot be set
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _become(command: list[str]) -> None:
    """Execute the program in this process, a new child. Exits with `NOT_STARTED` if it cannot be started."""
    try:
        # A handler of the parent would be inherited until `execvp`.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{error.strerror}: {command[0]}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def _stop(*_: object) -> None:
    """Handle SIGTERM: kill all descendants and exit with code 143, as a shell reports SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_children()
    os._exit(128 + signal.SIGTERM)


def end_children() -> None:
    """Kill child processes until there are none.

    The children of a killed process become children of this process, so the loop reaches all descendants. Blocks until
    the last one has ended.
    """
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for child in _children():
            with suppress(PermissionError):  # it runs as another user by now: only wait for it
                os.kill(child, signal.SIGKILL)
        os.waitpid(-1, 0)


def _children() -> list[int]:
    """Return the process ids of this process's children, also of adopted ones, from `/proc`."""
    found: list[int] = []
    for name in os.listdir("/proc"):
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The second field after the command, which ends with the last parenthesis, is the parent's id.
                if name.isdigit() and int(file.read().rpartition(b")")[2].split()[1]) == os.getpid():
                    found.append(int(name))
        except OSError:
            continue  # the process has ended, or the entry is no process
    return found


if __name__ == "__main__":
    main(sys.argv[1:])
