"""What was meant by words that no command takes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from flash.config.decode import nearest, suggest
from flash.config.load import as_setting

OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")


def unknown_arguments(parser: argparse.ArgumentParser, unknown: Sequence[str], given: Sequence[str]) -> str:
    """The complaint about arguments that a command does not have, with what was meant by the first of them.

    Args:
        parser: of the command.
        unknown: at least one.
        given: all that stood on the command line.
    """
    word = unknown[0]
    after = given[list(given).index(word) + 1 :] if word in given else []
    said = f"unrecognized arguments: {' '.join(unknown)}"
    options = [option for option in OPTION.findall(parser.format_help()) if option not in ("-h", "--help")]
    if "KEY=VALUE" in parser.format_usage() and (setting := as_setting(word.lstrip("-"), after)):
        return f"{said}; a setting is given as {setting}"
    return said + suggest(word.partition("=")[0], options)


def unknown_command(name: str, commands: Sequence[str]) -> str:
    """The complaint about a command that there is not."""
    near = nearest(name, commands)
    return f"there is no command {name}; " + (f"did you mean `flash {near}`?" if near else "`flash --help` lists them")
