"""Lock for making a model folder: one process makes it, and the others wait."""

from __future__ import annotations

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from flash.errors import ConfigError, DeadlineError
from flash.run.processes.locks import Busy, in_turn
from flash.trainer.checkpoint_files import remove_leftovers

FULL = (errno.ENOSPC, errno.EDQUOT)
"""errno values of a full disk and of an exhausted quota."""


@contextmanager
def making(path: Path, what: str, wait_s: float) -> Generator[None]:
    """Allow no other process to make the model at a path while the block runs.

    Incomplete folders that killed processes have left beside the path are removed first. `what` names the model in
    error messages.

    Raises:
        ConfigError: the model cannot be made there.
        DeadlineError: another process has been making it for `wait_s` seconds.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with in_turn(path.with_name(f".{path.name}.lock"), f"making {what}", wait_s):
            remove_leftovers(path)
            yield
    except Busy as holder:
        raise DeadlineError(f"{holder} to make {what}", wait_s, "the output of that process") from None
    except OSError as error:
        remedy = "free some room there" if error.errno in FULL else "check that you may write there"
        raise ConfigError(f"cannot make {what}: {error}; {remedy}") from error
