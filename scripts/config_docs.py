"""Write docs/configuration.md from the configuration tree: `python scripts/config_docs.py`, or `make docs`."""

from __future__ import annotations

from pathlib import Path

from flash.config.reference import markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"

if __name__ == "__main__":
    PAGE.write_text(markdown(), encoding="utf-8")
