"""To which command a process belongs, also while it becomes another program."""

import os
import subprocess
from collections import Counter
from collections.abc import Sequence

from envs.sandbox.agent.proc import EXEC_LOOKS, SETTLED_LOOKS, marks_of, shown

MARKED = b"PATH=/bin\0FLASH_COMMAND=agent-1-7\0"


def mark_of(pid: int, show: object = shown) -> str:
    return marks_of([pid], show)[pid]


class Proc:
    """Shows of a process these environments one after the other, the last one for ever, and these arguments."""

    def __init__(self, environments: Sequence[bytes], arguments: bytes) -> None:
        self.environments, self.arguments = environments, arguments
        self.asked: Counter[str] = Counter()

    def __call__(self, pid: int, name: str) -> bytes | None:
        self.asked[name] += 1
        if name == "cmdline":
            return self.arguments
        return self.environments[min(self.asked[name], len(self.environments)) - 1]


def test_a_process_in_the_middle_of_an_exec_is_looked_at_until_it_shows_its_mark():
    assert mark_of(os.getpid(), Proc([b"", b"", b"", b"", b"", MARKED], b"")) == "agent-1-7"


def test_an_exec_that_ends_between_two_looks_hides_no_mark():
    assert mark_of(os.getpid(), Proc([b"", MARKED], b"sleep\0")) == "agent-1-7"


def test_a_process_without_an_environment_has_no_mark():
    proc = Proc([b""], b"sleep\0")
    assert mark_of(os.getpid(), proc) == ""
    assert proc.asked["environ"] == SETTLED_LOOKS


def test_a_process_that_never_shows_anything_is_not_waited_for_without_end():
    proc = Proc([b""], b"")
    assert mark_of(os.getpid(), proc) == ""
    assert proc.asked["environ"] == EXEC_LOOKS


def test_of_real_processes_marked_and_not_and_ended():
    looked: Counter[int] = Counter()

    def looks(pid: int, name: str) -> bytes | None:
        looked[pid] += name == "environ"
        return shown(pid, name)

    marked = subprocess.Popen(["sleep", "30"], env={"FLASH_COMMAND": "agent-1-7"})
    bare = subprocess.Popen(["/bin/sleep", "30"], env={})
    ended = subprocess.Popen(["/bin/true"], env={})
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        assert [mark_of(child.pid, looks) for child in (marked, bare, ended)] == ["agent-1-7", "", ""]
        assert looked[ended.pid] == 1
    finally:
        for child in (marked, bare, ended):
            child.kill()
            child.wait()
