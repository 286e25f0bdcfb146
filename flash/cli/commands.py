"""What the modules of commands share."""

from __future__ import annotations

import argparse
from typing import Protocol


class CommandParsers(Protocol):
    """Where a command adds its parser."""

    def add_parser(self, name: str, *, help: str) -> argparse.ArgumentParser:
        """The parser of a new command."""
        ...
