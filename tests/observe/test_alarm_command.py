"""The command that alarms call."""

from __future__ import annotations

from pathlib import Path

import pytest

from flash.observe import alarm_command
from flash.observe.alarm_command import AlarmCommand
from flash.observe.alarms import Given


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


def test_one_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm_command, "COMMAND_S", 0.05)
    command = AlarmCommand("sleep 1000")
    command.call(Given("stale", "text"))
    assert command.warnings() + command.close() == ["alarms.command took longer than 0.05 s and was ended"]
