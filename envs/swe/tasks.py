"""Tasks of a folder, one per file. A task is a repository with a bug, the report, the solution, and hidden checks.

    level = 1                             # difficulty, from 1
    held_out = false
    issue = "What does not work, for whom."
    [files]
    "money/parse.py" = "the whole text of the file"
    [[solution]]                          # edits; `old` occurs exactly once in the file after earlier edits
    file = "money/parse.py"
    old = "int(text)"
    new = "int(text.strip())"
    [[checks]]
    broken = true                         # fails before the solution; default: passes before and after it
    run = "from money.parse import cents; print(cents(' 5'))"
    shows = "5"

`envs.swe.env` shows the report, and runs the checks. Held-out tasks are for evaluation only. A check is a script that
runs in the repository's folder, and the output that it must have. The output is compared outside the sandbox, so that
nothing in the sandbox, such as an edited test or a program that exits early, can report that a check has passed.
"""

from __future__ import annotations

import functools
import os
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from envs.data.split import KEPT, Split
from envs.judging.options import SuiteCase
from flash.errors import ConfigError

SHIPPED = Path(__file__).parent / "tasks"
"""Folder of the twenty tasks that ship with Flash."""

LONGEST_NAME = 255
"""Most bytes of the name of a file or folder, as in the usual file systems of Linux."""

_Text = Annotated[str, Meta(min_length=1)]
"""A text that is not empty."""


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replacement of a piece of a file, as a part of a solution."""

    file: str
    """Path of the file in the repository."""
    old: _Text
    """Text to replace, which occurs exactly once in the file after the edits before this one."""
    new: str
    """Text in its place."""


class SweCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A script, and the output that it must have."""

    run: _Text
    """Source of a Python script, which runs in the repository's folder."""
    shows: Annotated[str, Meta(pattern=r"\S")]
    """Expected output. It is never empty, because a program that exits at once prints nothing."""
    broken: bool = False
    """True if the check fails until the bug is fixed."""

    @property
    def case(self) -> SuiteCase:
        """The check in the form that the judge takes: the script is the input of Python, and its output is compared."""
        return SuiteCase(stdin=self.run, stdout=self.shows)


class SweTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A bug to fix."""

    issue: _Text
    """Report of the bug, which the policy is shown."""
    files: Annotated[dict[str, str], Meta(min_length=1)]
    """Text of each file, by its path in the repository."""
    solution: Annotated[tuple[Edit, ...], Meta(min_length=1)]
    """Edits that fix the bug."""
    checks: Annotated[tuple[SweCheck, ...], Meta(min_length=1)]
    """Hidden checks, all of which pass after the solution."""
    level: Annotated[int, Meta(ge=1)] = 1
    """Difficulty, from 1."""
    held_out: bool = False
    """True if the task is for evaluation only."""

    @property
    def prompt(self) -> str:
        """Text that identifies the task: the report. `envs.data.split` needs this property of its rows."""
        return self.issue


def read_task(path: Path) -> SweTask:
    """Read the task of a file.

    Raises:
        ConfigError: the file is not a valid task. The message names the file and the error.
    """
    try:
        task = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), SweTask)
    except (OSError, ValueError, RecursionError) as error:  # a RecursionError: nested too deeply
        raise ConfigError(f"{path} is no task: {error}") from error
    # All folders of the repository, to find a name that is both a file and a folder.
    folders = {str(folder) for name in task.files for folder in PurePosixPath(name).parents}
    for name in task.files:
        # A name in another form, such as `./a` or `a/`, could be a second name of one file, or that of a folder.
        parts = name.split("/")
        if any(part in ("", ".", "..") or len(os.fsencode(part)) > LONGEST_NAME for part in parts) or "\0" in name:
            raise ConfigError(
                f"{path}: files are named by a path in the repository such as money/parse.py, of parts of at most "
                f"{LONGEST_NAME} bytes, but one is {name!r}"
            )
        if name in folders:
            raise ConfigError(f"{path}: {name!r} is a file, and also the folder of another file")
    files = dict(task.files)  # the files after the edits so far
    for edit in task.solution:
        found = files.get(edit.file, "").count(edit.old)
        if found != 1:
            raise ConfigError(f"{path}: `old` must stand once in {edit.file}, but stands {found} times: {edit.old!r}")
        files[edit.file] = files[edit.file].replace(edit.old, edit.new)
    if not any(check.broken for check in task.checks):
        raise ConfigError(f"{path}: one of the checks must be `broken = true`: what the report is about")
    return task


@functools.lru_cache(maxsize=KEPT)
def load_tasks(folder: Path) -> Split[SweTask]:
    """Read the tasks of a folder, ordered by level and then by file name, and split them by `held_out`.

    Raises:
        ConfigError: a file is not a valid task, or there is no task for training or none held out.
    """
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise ConfigError(f"there are no tasks in {folder}: expected files *.toml, as in {SHIPPED}")
    tasks = sorted((read_task(path) for path in paths), key=lambda task: task.level)
    train = [task for task in tasks if not task.held_out]
    held_out = [task for task in tasks if task.held_out]
    if not train or not held_out:
        raise ConfigError(f"{folder} has {len(train)} tasks to train on and {len(held_out)} held out; both need one")
    return Split(train, held_out)
