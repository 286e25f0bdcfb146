"""The command that alarms call."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from flash.observe.alarms import Given
from flash.observe.trackers.alarm_command import SAID, AlarmCommand


def test_it_is_given_the_name_and_the_text(tmp_path: Path) -> None:
    command = AlarmCommand(f"sh -c 'echo $FLASH_ALARM >> \"$0\"; cat >> \"$0\"' '{tmp_path}/to ld'")
    command.call(Given("ess", "30% is little"))
    assert (command.warnings() + command.close()) == []
    assert (tmp_path / "to ld").read_text() == "ess\n30% is little\n"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ("sh -c 'echo no route >&2; exit 3'", "alarms.command ended with code 3: no route"),
        ("/no/such/program", "alarms.command cannot be called: "),
    ],
)
def test_what_goes_wrong_is_told_once(words: str, fault: str) -> None:
    command = AlarmCommand(words)
    command.call(Given("stale", "text"))
    (told,) = command.warnings() + command.close()
    assert told.startswith(fault)
    assert command.warnings() == []


def test_one_that_does_not_end_is_ended() -> None:
    command = AlarmCommand("sleep 1000", 0.05)
    command.call(Given("stale", "text"))
    assert command.warnings() + command.close() == ["alarms.command took longer than 0.05 s and was ended"]


def test_one_that_does_not_end_takes_what_it_started_with_it(tmp_path: Path) -> None:
    command = AlarmCommand(f"sh -c 'sleep 1000 & echo $! > {tmp_path}/child; wait'", 0.5)
    command.call(Given("stale", "text"))
    assert len(command.warnings() + command.close()) == 1
    child = int((tmp_path / "child").read_text())
    deadline = time.monotonic() + 20
    while (state := state_of(child)) not in ("", "Z"):
        assert time.monotonic() < deadline, f"{child} lives on: {state}"
        time.sleep(0.01)


def state_of(process: int) -> str:
    """As the kernel has it; none: it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def test_one_that_leaves_something_running_has_ended(tmp_path: Path) -> None:
    command = AlarmCommand(f"sh -c 'sleep 60 & echo $! > {tmp_path}/child; cat > /dev/null'")
    command.call(Given("stale", "text"))
    assert command.warnings() + command.close() == []
    os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)


def test_of_megabytes_that_it_says_only_the_first_are_told() -> None:
    command = AlarmCommand("sh -c 'head -c 20000000 /dev/zero | tr \\\\0 x >&2; exit 4'")
    command.call(Given("stale", "text"))
    (told,) = command.warnings() + command.close()
    assert told == f"alarms.command ended with code 4: {SAID * 'x'}"
