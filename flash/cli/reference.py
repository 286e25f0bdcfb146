"""The commands' reference page, made from what their parsers say.

argparse shows what a parser holds as text only, in a form that differs from one Python to the next.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import argparse
from collections.abc import Iterator

INTRODUCTION = """\
# Commands

<!-- Made by scripts/reference_docs.py from the parsers in flash/cli: change them there and run `make docs`. -->

`flash` is `.venv/bin/flash` of this repository. Exit codes: 0 success, 2 an error that is named, 130 an interrupt, 141
an output that nobody reads. `KEY=VALUE`: [configuration](configuration.md). `flash COMMAND --help` says the same.
"""


SEVERAL = 3
"""Arguments that a command has in common with one before it from which on these are only named."""


def markdown(parser: argparse.ArgumentParser) -> str:
    """The whole reference, one section per command."""
    return "\n".join([INTRODUCTION, *_commands(parser)])


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for choices in parser._actions:
        if not isinstance(choices, argparse._SubParsersAction):
            continue
        helps = {action.dest: action.help for action in choices._choices_actions}
        before: dict[str, list[str]] = {}
        for name, command in choices.choices.items():
            yield f"## `{command.prog}`\n"
            yield f"{_sentence(helps[name])}\n"
            rows = before[command.prog] = list(_rows(command))
            alike = next((prog for prog, theirs in before.items() if len({*rows} & {*theirs}) >= SEVERAL), command.prog)
            own = rows if alike == command.prog else [row for row in rows if row not in before[alike]]
            if own:
                yield "| argument | meaning |\n|---|---|"
                yield from own
                yield ""
            if len(own) < len(rows):
                names = (row.split("`")[1].split(" ")[0].replace("\\|", "|") for row in rows if row not in own)
                yield f"As for `{alike}`: {', '.join(f'`{name}`' for name in names)}.\n"
            yield from _commands(command)


def _rows(command: argparse.ArgumentParser) -> Iterator[str]:
    for action in command._actions:
        if isinstance(action, argparse._HelpAction | argparse._SubParsersAction):
            continue
        meaning = (action.help or "") % {"default": action.default}
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in (_shown(action), meaning))} |"


def _shown(action: argparse.Action) -> str:
    """How it is written: `--port PORT`, `RUN_DIR…`."""
    name = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if action.choices is not None:
        name = ", ".join(map(str, action.choices))
    if not action.option_strings:
        return f"`{name}{'…' if action.nargs in ('*', '+') else ''}`"
    value = "" if action.nargs == 0 else f" {name}{'…' if action.nargs in ('*', '+') else ''}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _sentence(text: str | None) -> str:
    assert text, "a command says what it is for"
    return text[0].upper() + text[1:] + ("" if text.endswith(("…", ".")) else ".")
