"""The command that alarms call."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flash.observe.trackers.feed import Feed
from flash.observe.trackers.receivers import ERROR_BYTES, AlarmCommand

WAIT_S = 30.0
NOBODY = 65534

MISSED = "alarms.command missed 1 of 1: 1 failed, 0 dropped"


def called(command: str, name: str = "stale", text: str = "text", seconds: float = 20.0) -> list[str]:
    """Call the command once, and return the messages about the call."""
    feed = Feed(AlarmCommand(command, seconds))
    feed.put("alarm", {"name": name, "text": text})
    feed.end(WAIT_S)
    return feed.close()


def test_it_is_given_the_name_and_the_text(tmp_path: Path) -> None:
    command = f"sh -c 'echo $FLASH_ALARM >> \"$0\"; cat >> \"$0\"' '{tmp_path}/to ld'"
    assert called(command, "ess", "30% is little") == []
    assert (tmp_path / "to ld").read_text() == "ess\n30% is little\n"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("sh -c 'echo no route >&2; exit 3'", "alarms.command ended with code 3: no route"),
        ("/no/such/program", "alarms.command cannot be started: "),
    ],
)
def test_what_goes_wrong_is_told_once_and_counted(words: str, fault: str) -> None:
    feed = Feed(AlarmCommand(words))
    for _ in range(2):
        feed.put("alarm", {"name": "stale", "text": "text"})
    feed.end(WAIT_S)
    told, counted = feed.close()
    assert told.startswith(fault)
    assert counted == "alarms.command missed 2 of 2: 2 failed, 0 dropped"


def test_one_that_does_not_end_is_ended() -> None:
    assert called("sleep 1000", seconds=0.05) == ["alarms.command took longer than 0.05 s and was killed", MISSED]


def test_one_that_does_not_end_takes_what_it_started_with_it(tmp_path: Path) -> None:
    assert len(called(f"sh -c 'sleep 1000 & echo $! > {tmp_path}/child; wait'", seconds=2.0)) == 2
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while (state := state_of(child)) not in ("", "Z"):
        assert time.monotonic() < deadline, f"{child} lives on: {state}"
        time.sleep(0.01)


def test_at_the_end_of_the_run_it_is_ended_and_alarms_that_wait_are_dropped(tmp_path: Path) -> None:
    feed = Feed(AlarmCommand(f"sh -c 'echo $$ > {tmp_path}/pid; sleep 1000'", 1000.0))
    for _ in range(3):
        feed.put("alarm", {"name": "stale", "text": "text"})
    process = started(tmp_path / "pid")
    feed.end(0.0)
    assert feed.close() == [
        "alarms.command did not take the rest in 0 s and was ended",
        "alarms.command missed 3 of 3: 0 failed, 3 dropped",
    ]
    deadline = time.monotonic() + 20
    while state_of(process) not in ("", "Z"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user that may not kill the command")
@pytest.mark.parametrize(
    ("seconds", "limit", "told"),
    [
        (1000.0, 0.1, "alarms.command did not take the rest in 0.1 s and still runs"),
        (2.0, WAIT_S, "alarms.command took longer than 2 s and process {} cannot be killed"),
    ],
)
def test_one_of_another_user_is_left_behind_and_the_run_ends_well(
    tmp_path: Path, seconds: float, limit: float, told: str
) -> None:
    command = AlarmCommand(f"sh -c 'echo $$ > {tmp_path}/pid; sleep 1000'", seconds)
    feed = Feed(command)
    feed.put("alarm", {"name": "stale", "text": "text"})
    process = started(tmp_path / "pid")
    try:
        with as_nobody():
            feed.end(limit)
            warnings = feed.close()
    finally:
        os.killpg(process, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while state_of(process):
        assert time.monotonic() < deadline
        command.kill()  # takes the exit code of the process
        time.sleep(0.01)
    assert warnings[0] == told.format(process)
    assert len(warnings) == 2


@contextmanager
def as_nobody() -> Generator[None]:
    """Be a user in the block who may send no signal to processes of root."""
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)


def started(file: Path) -> int:
    """Return the process id that a command has written to a file, once it is there."""
    deadline = time.monotonic() + 20
    while not file.exists() or not file.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(file.read_text())


def state_of(process: int) -> str:
    """Return the kernel's state letter of a process; empty if it does not exist."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_one_that_leaves_something_running_has_ended(tmp_path: Path) -> None:
    assert called(f"sh -c 'sleep 60 & echo $! > {tmp_path}/child; cat > /dev/null'") == []
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_of_megabytes_that_it_says_only_the_first_are_told() -> None:
    told, _ = called("sh -c 'head -c 20000000 /dev/zero | tr \\\\0 x >&2; exit 4'")
    assert told == f"alarms.command ended with code 4: {ERROR_BYTES * 'x'}"
