"""To which command a process belongs, whatever it makes of itself."""

import os
import resource
import signal
import sys
from collections.abc import Iterator

import pytest

from envs.sandbox.agent.process import DOWN, MIDDLE, UP, CommandNumbers, number_of, spawn

NUMBER = 1 << 30


@pytest.fixture
def started() -> Iterator[list[int]]:
    pids: list[int] = []
    yield pids
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def start(pids: list[int], program: str) -> bytes:
    """Start a program of Python's of command `NUMBER`, which then sleeps. What it printed."""
    reading, writing = os.pipe()
    code = f"import os, resource, sys\n{program}\nos.write(1, b';')\nimport time; time.sleep(60)"
    pids.append(spawn(sys.executable, ["python", "-ISc", code], {}, "/", {1: writing}, False, NUMBER))
    os.close(writing)
    printed = b""
    while not printed.endswith(b";"):
        printed += os.read(reading, 1)
    os.close(reading)
    return printed[:-1]


def test_a_process_carries_the_number_of_its_command(started: list[int]) -> None:
    start(started, "")
    assert number_of(started[0]) == NUMBER
    assert number_of(os.getpid()) is None


def test_what_it_executes_and_forks_carries_it_too(started: list[int]) -> None:
    program = """
pid = os.fork()
if pid == 0:
    os.setsid()
    os.execve("/bin/sleep", ["other", "60"], {"FLASH_COMMAND": "other"})
os.write(1, b"%d" % pid)
"""
    child = int(start(started, program))
    try:
        assert number_of(child) == NUMBER
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("other", [NUMBER - 1, NUMBER + 1, 1, NUMBER + (1 << 30)])
def test_it_can_take_no_other_number(started: list[int], other: int) -> None:
    tries = "\n".join(
        f"try: resource.setrlimit({which}, ({value}, {value}))\nexcept ValueError: pass"
        for which, value in ((UP, MIDDLE + other), (DOWN, MIDDLE - other))
    )
    start(started, tries)
    assert number_of(started[0]) != other


def test_a_limit_that_is_lowered_loses_the_number_and_gives_no_other(started: list[int]) -> None:
    start(started, f"resource.setrlimit({DOWN}, (5, 5))")
    assert number_of(started[0]) is None


def test_a_process_that_is_gone_has_none(started: list[int]) -> None:
    start(started, "")
    pid = started[0]
    os.kill(pid, signal.SIGKILL)
    os.waitpid(started.pop(), 0)
    assert number_of(pid) is None


def test_a_program_that_is_not_there_is_told() -> None:
    for _ in range(100):
        try:
            pid = spawn("/no/such/program", ["x"], {}, "/", {}, False, NUMBER)
        except FileNotFoundError:
            return
        # On a machine so busy that the child has not begun in time, it tells it by its own end.
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 126
    pytest.fail("it was never told")


def test_no_number_comes_twice() -> None:
    first, second = CommandNumbers(), CommandNumbers()
    drawn = [numbers.new() for _ in range(100) for numbers in (first, second)]
    assert len({*drawn}) == 200
    assert max(drawn) < MIDDLE
    assert drawn[::2] == sorted(drawn[::2])


def test_the_limits_that_carry_it_are_unlimited_here() -> None:
    assert resource.getrlimit(UP)[1] == resource.getrlimit(DOWN)[1] == resource.RLIM_INFINITY
