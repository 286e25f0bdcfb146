"""The commands' reference page."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from flash.cli.main import COMMANDS, parsers
from scripts.reference_docs import commands_page

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == commands_page(parsers()[0]), "run `make docs`"


def test_every_command_has_a_section() -> None:
    named = re.findall(r"^## `flash ([\w-]+)`$", commands_page(parsers()[0]), flags=re.MULTILINE)
    assert len(named) == len(COMMANDS)


def test_arguments_are_shown_as_they_are_written() -> None:
    parser = argparse.ArgumentParser(prog="flash")
    command = parser.add_subparsers().add_parser("play", help="play a game")
    command.add_argument("games", nargs="+", metavar="FOLDER|NAME", help="default: 100 %%")
    command.add_argument("--quiet", "-q", action="store_true")
    command.add_argument("--port", type=int, default=8, help="default: %(default)s")
    assert commands_page(parser).partition("## ")[2].splitlines()[2:] == [
        "Play a game.",
        "",
        "| argument | meaning |",
        "|---|---|",
        r"| `FOLDER\|NAME…` | default: 100 % |",
        "| `--quiet`, `-q` |  |",
        "| `--port PORT` | default: 8 |",
    ]


def test_arguments_that_a_command_shares_with_one_before_it_are_only_named() -> None:
    parser = argparse.ArgumentParser(prog="flash")
    commands = parser.add_subparsers()
    for name in ("play", "watch"):
        command = commands.add_parser(name, help=f"{name} a game")
        command.add_argument("what", metavar="FOLDER|NAME", help="of the game")
        command.add_argument("--port", type=int, help="a free one")
        command.add_argument("--quiet", action="store_true", help="say nothing")
        command.add_argument(f"--{name}er", help="who does")
    assert commands_page(parser).partition("## `flash watch`")[2].splitlines()[4:] == [
        "| argument | meaning |",
        "|---|---|",
        "| `--watcher WATCHER` | who does |",
        "",
        "As for `flash play`: `FOLDER|NAME`, `--port`, `--quiet`.",
    ]
