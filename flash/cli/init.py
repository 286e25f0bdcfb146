"""`flash init`: write a small project of the user's own, which can be trained without changes."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from importlib import resources
from pathlib import Path

from flash.cli.arguments import CommandParsers, check_folder_writable
from flash.errors import ConfigError
from flash.observe.rundir.rundir import write_atomically, writing

FILES = {
    "my_env.py": "the environment",
    "my_reward.py": "the reward",
    "test_environment.py": "tests for any environment",
    "test_my_env.py": "tests of this one and its reward",
    "pytest.ini": "how they are found",
    "run.toml": "the configuration",
    "README.md": "what to do next",
}
"""Files in `project/`, each with its description."""
NAME = "my-project"
"""Name of the project in the files of `project/`, which is replaced by the run's name."""
LONGEST = 128
"""Largest length of a run's name, in characters."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        "init", help="Write a small project of your own: an environment, a reward, a configuration and tests."
    )
    parser.add_argument("folder", type=Path, help="Folder of the project. It is empty, or does not exist yet.")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the files, and print the next steps."""
    folder: Path = arguments.folder
    check_folder_writable(folder)
    name = run_name(folder)
    with writing(folder):
        folder.mkdir(exist_ok=True)
    for file in FILES:
        text = (resources.files("flash.cli") / "project" / file).read_text(encoding="utf-8")
        write_atomically(folder / file, text.replace(NAME, name).encode())
    width = max(map(len, FILES))
    for file, what in FILES.items():
        sys.stdout.write(f"{file.ljust(width)}  {what}\n")
    steps = [f"cd {shlex.quote(str(folder))}", "python -m pytest", "flash train run.toml", f"flash view outputs/{name}"]
    if sys.prefix != sys.base_prefix and os.environ.get("VIRTUAL_ENV") != sys.prefix:
        steps.insert(0, f". {shlex.quote(sys.prefix)}/bin/activate")
    sys.stdout.write("\nGo on with:\n" + "".join(f"    {step}\n" for step in steps))
    return 0


def run_name(folder: Path) -> str:
    """Return a valid run name made from the name of a folder. Raises ConfigError if no valid character is left."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-.")[:LONGEST]
    if not name:
        raise ConfigError(f"cannot name a run after {folder}: expected a letter or a digit in the folder's name")
    return name
