"""Draws the pictures of README.md and docs/view.md: `python -m tests.view.pictures FOLDER RUN_DIR`.

RUN_DIR is that of a real run, best one that goes on: `./launch.sh` makes one. Needs a Chromium in the path.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import anyio

from tests.browser import Page, browser, find_browser
from tests.view.served import served, show

WIDE, NARROW = 1280, 400
SECONDS = 12
"""Seconds of the timeline in its picture."""
BARS = "document.getElementById('bars')"
FIRST = "document.querySelector('#list tbody tr')"
WRONG = "[...document.querySelectorAll('#list tbody tr')].find(row => row.querySelector('.reward').innerText === '0')"
DRAWN = "document.querySelector('#charts .plot').data"


async def draw(folder: Path, run: Path) -> None:
    """Draw a picture of each view, and of the overview on a telephone."""
    with served(run) as url, tempfile.TemporaryDirectory() as profile:
        async with browser(find_browser(), Path(profile) / "profile") as page:
            await show(page, url)
            await page.until(DRAWN)
            await keep(page, folder / "view-overview.png", WIDE, 870)
            await show(page, url, width=NARROW, scheme="dark")
            await page.until(DRAWN)
            await keep(page, folder / "view-telephone.png", NARROW, 800)
            await show(page, f"{url}#samples")
            await page.until(FIRST)
            await page.value(f"({WRONG} ?? {FIRST}).click()")
            await page.until("document.querySelector('#group .token')")
            await page.value("document.querySelector('.wide').style.maxHeight = '150px'")
            await keep(page, folder / "view-samples.png", WIDE, 650)
            await show(page, f"{url}#timeline", scheme="dark")
            await page.until(f"{BARS}.data")
            begin = f"({BARS}.layout.xaxis.range[0] + {BARS}.layout.xaxis.range[1]) / 2"
            part = f"(begin => ({{'xaxis.range[0]': begin, 'xaxis.range[1]': begin + {1000 * SECONDS}}}))({begin})"
            await page.value(f"Plotly.relayout({BARS}, {part}).then(() => true)")
            await page.until("document.getElementById('timeline-note').innerText === ''")
            await keep(page, folder / "view-timeline.png", WIDE, 400)
            await show(page, f"{url}#cluster")
            await page.until("document.querySelector('#cluster-nodes tbody tr')")
            await keep(page, folder / "view-cluster.png", WIDE, 1000)


async def keep(page: Page, file: Path, width: int, height: int) -> None:
    """Write a picture of the upper part of the window, once all is drawn."""
    await anyio.sleep(1)
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    picture = await page.ask("Page.captureScreenshot", format="png", clip=clip)
    await anyio.Path(file).write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    anyio.run(draw, Path(sys.argv[1]), Path(sys.argv[2]))
