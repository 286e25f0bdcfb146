"""Errors that come from another process keep their class and message."""

from __future__ import annotations

import signal

import pytest

from flash import errors
from flash.errors import SIGNAL_CAUSES, DeadlineError, FlashError, describe_exit_code, error_of

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, FlashError)]


def test_an_error_of_another_process_is_of_the_same_class_and_says_the_same() -> None:
    for kind in CLASSES:
        error = error_of(kind.__name__, "waited in vain")
        assert type(error) is kind
        assert str(error) == "waited in vain"


def test_an_error_with_arguments_of_its_own_keeps_its_message() -> None:
    told = str(DeadlineError("a reply", 3, "its log"))
    assert str(error_of("DeadlineError", told)) == told


def test_no_error_is_taken_for_the_failure_of_a_file() -> None:
    assert not [kind for kind in CLASSES if issubclass(kind, OSError)]


@pytest.mark.parametrize("kind", [errors.EnvError, errors.ConfigError, errors.SandboxTimeoutError])
def test_a_message_can_be_sent_whatever_it_quotes(kind: type[FlashError]) -> None:
    told = str(kind("no such file: caf\udce9.txt"))
    assert told.encode() == rb"no such file: caf\udce9.txt"


@pytest.mark.parametrize("name", ["ValueError", "ClassVar", "error_of", ""])
def test_a_name_that_is_no_class_of_the_tree_gives_no_error(name: str) -> None:
    assert error_of(name, "whatever") is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "ended with exit code 3"),
        (-9, "was killed by signal 9 (SIGKILL), perhaps because memory ran out: see dmesg"),
        (-6, f"was killed by signal 6 (SIGABRT){SIGNAL_CAUSES[signal.SIGABRT]}"),
        (-11, "was killed by signal 11 (SIGSEGV)"),
    ],
)
def test_the_end_of_a_process_is_said_with_a_usual_cause(code: int, words: str) -> None:
    assert describe_exit_code(code) == words
