"""The rows of a file that another process may be writing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def written_rows(file: Path) -> list[dict[str, Any]]:
    """Those that have been written to their ends; a reader can see a part of the last one."""
    if not file.exists():
        return []
    *lines, _ = file.read_text().split("\n")
    return [json.loads(line) for line in lines]
