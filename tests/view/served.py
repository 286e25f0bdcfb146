"""The page as a user has it: served by the command, in a window of some size."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.browser import Page


@contextmanager
def served(*runs: Path) -> Iterator[str]:
    """Run `flash view` for the time of the block, and yield its address. Ctrl-C must end it without an error."""
    command = [sys.executable, "-m", "flash", "view", *map(str, runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"\[showing (.*) at (http://127\.0\.0\.1:\d+/) - Ctrl-C ends it\]\n", line)
            assert found, line
            assert found[1] == "; ".join(run.name for run in runs)
            yield found[2]
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == 0
            assert process.stdout.read() == ""
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


async def show(page: Page, url: str, *, width: int = 1280, scheme: str = "light") -> None:
    """Open the address in a window of this width, which is tall enough for all charts to be drawn."""
    await page.ask(
        "Emulation.setDeviceMetricsOverride", width=width, height=7000, deviceScaleFactor=1, mobile=width < 600
    )
    await page.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    await page.open(url)
    await page.until("document.querySelector('#link.good')")
