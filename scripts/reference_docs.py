"""Write docs/configuration.md from the configuration tree, and docs/commands.md from the parsers: `make docs`."""

from __future__ import annotations

from pathlib import Path

from flash.cli.main import command_reference
from flash.config.reference import markdown

DOCS = Path(__file__).resolve().parent.parent / "docs"

if __name__ == "__main__":
    (DOCS / "configuration.md").write_text(markdown(), encoding="utf-8")
    (DOCS / "commands.md").write_text(command_reference(), encoding="utf-8")
