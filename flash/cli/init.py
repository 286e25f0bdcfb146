"""`flash init`: a small project of one's own, which trains as it is."""

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
"""What lies in `project/`, and what it is."""
NAME = "my-project"
"""What the project is called there."""
LONGEST = 128
"""Characters of a run's name."""


def add_parser(commands: CommandParsers) -> argparse.ArgumentParser:
    parser = commands.add_parser("init", help="write a small project: environment, reward, config and test")
    parser.add_argument("folder", type=Path, help="a folder that is empty or does not exist")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Write the files, and say how to go on."""
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
    """The folder's name, as a run may be called. Raises ConfigError: nothing is left of it."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.absolute().name).strip("-.")[:LONGEST]
    if not name:
        raise ConfigError(f"cannot name a run after {folder}: expected a letter or a digit in the folder's name")
    return name
