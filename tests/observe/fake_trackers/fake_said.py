"""Common part of the fakes: each call writes a line to the file FAKE_TRACKER_LOG; FAKE_TRACKER chooses a failure."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def said(call: str, **what: Any) -> None:
    """Record a call, or fail in the way that FAKE_TRACKER chooses."""
    ill = os.environ.get("FAKE_TRACKER", "")
    print("a tracker prints what it likes")  # noqa: T201 - as they do
    ill, _, once = ill.partition(" once ")
    if once and Path(once).exists():
        ill = ""
    elif once and ill == f"raise {call}":
        Path(once).touch()
    if ill == f"raise {call}":
        raise ConnectionError("no route to the tracker\n\x1b[31m")
    if ill == f"hang {call}":
        time.sleep(1000)
    if ill == f"exit {call}":
        sys.stderr.flush()
        os._exit(7)
    with Path(os.environ["FAKE_TRACKER_LOG"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"call": call, **what}) + "\n")
