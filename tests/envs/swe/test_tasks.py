"""Every task is one: broken before, whole with its solution, and nothing else than mending it passes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from envs.swe.tasks import SHIPPED, SweTask, load_tasks, read_task
from flash.environment import HELD_OUT
from flash.errors import ConfigError

TASKS = {path.stem: read_task(path) for path in sorted(SHIPPED.glob("*.toml"))}

FORKED = """
import io, os, sys
for folder, script in eval(sys.stdin.read()):
    read, write = os.pipe()
    if os.fork() == 0:
        os.chdir(folder)
        os.dup2(write, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stdin, sys.stdout = io.StringIO(script), os.fdopen(1, "w", closefd=False)
        try:
            exec(compile(script, "<stdin>", "exec"), {"__name__": "__main__"})
        finally:
            sys.stdout.flush()
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as output:
        print(ascii(output.read()))
    os.wait()
"""
"""Program that prints the output of scripts. It runs each in a folder, in a process that has imported no file of it."""


def results(folder: Path, task: SweTask, versions: dict[str, dict[str, str]]) -> dict[str, list[bool]]:
    """Return for each version of the files which checks pass on it."""
    for version, files in versions.items():
        for name, text in files.items():
            path = folder / version / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    scripts = [(str(folder / version), check.run) for version in versions for check in task.checks]
    command = [sys.executable, "-B", "-I", "-c", f"import sys; sys.path.insert(0, '')\n{FORKED}"]
    done = subprocess.run(command, input=repr(scripts), capture_output=True, text=True, check=True)
    shown = iter([eval(line) for line in done.stdout.splitlines()])
    found = {version: [next(shown).rstrip() == check.shows.rstrip() for check in task.checks] for version in versions}
    assert next(shown, None) is None
    return found


def solved(task: SweTask) -> dict[str, str]:
    """Return the files after the solution's edits."""
    files = dict(task.files)
    for edit in task.solution:
        files[edit.file] = files[edit.file].replace(edit.old, edit.new)
    return files


@pytest.mark.parametrize("name", TASKS)
def test_a_task_is_broken_before_and_whole_with_its_solution_and_nothing_else_passes(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    broken = [check.broken for check in task.checks]
    ending = {file: f"import os\nprint('ok')\nos._exit(0)\n{text}" for file, text in task.files.items()}
    empty = dict.fromkeys(task.files, "")
    found = results(tmp_path, task, {"untouched": task.files, "solved": solved(task), "ending": ending, "empty": empty})
    assert found["untouched"] == [not one for one in broken]
    assert all(found["solved"])
    assert not any(found["ending"])
    assert not any(found["empty"])


def test_there_are_twenty_of_rising_difficulty_and_some_of_each_level_are_held_out() -> None:
    tasks = load_tasks(SHIPPED)
    assert len(TASKS) == 20
    assert [task.level for task in tasks.train] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3
    assert [task.level for task in tasks.held_out] == [1, 2, 3, 4, 5]
    assert {tasks.of_seed(seed).issue for seed in range(15)} == {task.issue for task in tasks.train}
    assert {tasks.of_seed(HELD_OUT + seed).issue for seed in range(5)} == {task.issue for task in tasks.held_out}


RIGHT = """
level = 1
issue = "x"
[files]
"a.py" = "print(1)"
[[solution]]
file = "a.py"
old = "1"
new = "2"
[[checks]]
broken = true
run = "import a"
shows = "2"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"a.py" = ', '"../a.py" = ', "a path in the repository"),
        ('"a.py" = ', '"/a.py" = ', "a path in the repository"),
        ('"a.py" = ', '"./a.py" = ', "a path in the repository"),
        ('"a.py" = ', '"b/" = "x"\n"a.py" = ', "a path in the repository"),
        ('"a.py" = ', f'"{"é" * 128}" = "x"\n"a.py" = ', "a path in the repository"),
        ('"a.py" = ', '"a.py/b" = "x"\n"a.py" = ', "'a.py' is a file, and also the folder of another file"),
        ("level = 1", f"level = {'[' * 3000}{']' * 3000}", "is no task"),
        ('old = "1"', 'old = "3"', "must stand once in a.py, but stands 0 times"),
        ("broken = true", "broken = false", "one of the checks must be `broken = true`"),
        ('shows = "2"', 'shows = " "', "is no task"),
        ('issue = "x"', "", "missing required field `issue`"),
        ("[files]", "[file]", "unknown field `file`"),
        ('issue = "x"', "issue =", "is no task"),
        ('issue = "x"', f"issue = {'[' * 5000}", "is no task"),
        ('issue = "x"', f"issue = {'1' * 5000}", "is no task"),
    ],
)
def test_a_wrong_task_is_refused_with_its_file_and_what_is_wrong(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "one.toml"
    path.write_text(RIGHT)
    assert solved(read_task(path)) == {"a.py": "print(2)"}
    path.write_text(RIGHT.replace(old, new))
    with pytest.raises(ConfigError, match=r"one\.toml") as caught:
        read_task(path)
    assert message in str(caught.value)


def test_a_folder_needs_tasks_on_both_sides(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are no tasks in"):
        load_tasks(tmp_path / "none")
    (tmp_path / "one.toml").write_text(RIGHT)
    with pytest.raises(ConfigError, match="has 1 tasks to train on and 0 held out"):
        load_tasks(tmp_path)
