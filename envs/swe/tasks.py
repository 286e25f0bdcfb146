"""The tasks of a folder, a file each: a repository with a bug, the report of it, its solution, and hidden checks.

    level = 1                             # how hard it is, from 1
    held_out = false
    issue = "What does not work, for whom."
    [files]
    "money/parse.py" = "the whole text of the file"
    [[solution]]                          # edits; `old` stands once in the file
    file = "money/parse.py"
    old = "int(text)"
    new = "int(text.strip())"
    [[checks]]
    broken = true                         # fails before the solution; without it, it must not break
    run = "from money.parse import cents; print(cents(' 5'))"
    shows = "5"

A check is a script that the repository's folder runs, and what it must show. What it shows is compared outside of the
sandbox, so that nothing in there, an edited test or a program that exits early, can say that a check has passed.
"""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from envs.data.split import Split
from envs.judging.options import SuiteCase
from flash.errors import ConfigError

SHIPPED = Path(__file__).parent / "tasks"
"""Twenty tasks."""

_Text = Annotated[str, Meta(min_length=1)]


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a file, and what stands there in its place."""

    file: str
    old: _Text
    new: str


class SweCheck(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A script and what it must show."""

    run: _Text
    shows: Annotated[str, Meta(pattern=r"\S")]
    """Never nothing: a program that ends at once shows that."""
    broken: bool = False
    """It fails before the bug is mended."""

    @property
    def case(self) -> SuiteCase:
        """For the judge."""
        return SuiteCase(stdin=self.run, stdout=self.shows)


class SweTask(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One bug to mend."""

    issue: _Text
    files: Annotated[dict[str, str], Meta(min_length=1)]
    """By their paths in the repository."""
    solution: Annotated[tuple[Edit, ...], Meta(min_length=1)]
    checks: Annotated[tuple[SweCheck, ...], Meta(min_length=1)]
    level: Annotated[int, Meta(ge=1)] = 1
    held_out: bool = False

    @property
    def prompt(self) -> str:
        """What tells it from the others."""
        return self.issue

    @property
    def solved(self) -> dict[str, str]:
        """The files with the bug mended."""
        files = dict(self.files)
        for edit in self.solution:
            files[edit.file] = files[edit.file].replace(edit.old, edit.new)
        return files


def read_task(path: Path) -> SweTask:
    """The task of a file.

    Raises:
        ConfigError: naming the file and what is wrong with it.
    """
    try:
        task = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), SweTask)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path} is no task: {error}") from error
    for name in task.files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\0" in name:
            raise ConfigError(f"{path}: files are named by a path in the repository, but one is {name!r}")
    files = dict(task.files)
    for edit in task.solution:
        found = files.get(edit.file, "").count(edit.old)
        if found != 1:
            raise ConfigError(f"{path}: `old` must stand once in {edit.file}, but stands {found} times: {edit.old!r}")
        files[edit.file] = files[edit.file].replace(edit.old, edit.new)
    if not any(check.broken for check in task.checks):
        raise ConfigError(f"{path}: one of the checks must be `broken = true`: what the report is about")
    return task


@functools.lru_cache(maxsize=4)
def load_tasks(folder: Path) -> Split[SweTask]:
    """The tasks of a folder, by level and name, divided as they say.

    Raises:
        ConfigError: a file is no task, or a side would be empty.
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
