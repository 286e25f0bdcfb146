"""Draws the pictures of docs/view.md, of two runs that are made up: `python -m tests.view.pictures FOLDER`.

Needs a Chromium in the path.
"""

from __future__ import annotations

import base64
import sys
import tempfile
from pathlib import Path

import anyio

from flash.observe.rundir import RunDirectory, readable
from flash.types import Batch
from tests.browser import Page, browser, find_browser
from tests.view.recorded import GROUP, record, sample, token_texts
from tests.view.served import served, show

STEPS = 60
SAID = (
    "12 + 34: 2 and 4 make 6, and 10 and 30 make 40, so the sum is 46.",
    "First the tens: 10 + 30 = 40. Then the ones: 2 + 4 = 6. Together 46.",
)
BARS = "document.getElementById('bars')"
FIRST = "document.querySelector('#list tbody tr')"


def make_runs(folder: Path) -> list[Path]:
    """One run that has ended, and one that is behind and does better."""
    first, second = record(folder / "first", STEPS), record(folder / "second", 2 * STEPS // 3, shift=0.08)
    first.summary.write_text("{}")
    for run, step in ((first, STEPS - 1), (second, 2 * STEPS // 3 - 1)):
        answer(run, step)
    return [first.path, second.path]


def answer(run: RunDirectory, step: int) -> None:
    """Have the members of a step's group say different things."""
    texts = [SAID[member % len(SAID)] for member in range(GROUP)]
    samples = [sample(step, member, text) for member, text in enumerate(texts)]
    shown = [readable(one, step, token_texts(text)) for one, text in zip(samples, texts, strict=True)]
    run.write_trajectories(step, shown[:2])
    run.write_batch(Batch(step, step - 1, samples, []), keep_all=True)


async def draw(folder: Path, runs: list[Path]) -> None:
    """One picture of each view, and of the overview on a telephone."""
    with served(*runs) as url, tempfile.TemporaryDirectory() as profile:
        async with browser(find_browser(), Path(profile) / "profile") as page:
            await show(page, url)
            await page.until("document.querySelector('#charts .plot').data")
            await keep(page, folder / "view-overview.png", 1280, 870)
            await show(page, url, width=400, scheme="dark")
            await page.until("document.querySelector('#charts .plot').data")
            await keep(page, folder / "view-telephone.png", 400, 800)
            await show(page, f"{url}#samples")
            await page.until(FIRST)
            await page.value(f"{FIRST}.click()")
            await page.until("document.querySelector('#group .token')")
            await page.value("document.querySelector('.wide').style.maxHeight = '200px'")
            await keep(page, folder / "view-samples.png", 1280, 700)
            await show(page, f"{url}#timeline", scheme="dark")
            await page.until(f"{BARS}.data")
            begin = f"{BARS}.layout.xaxis.range[0] + 60000"
            part = f"{{'xaxis.range[0]': {begin}, 'xaxis.range[1]': {begin} + 12000}}"
            await page.value(f"Plotly.relayout({BARS}, {part}).then(() => true)")
            await page.until(f"{BARS}.layout.annotations.length && {BARS}.layout.annotations.length <= 20")
            await keep(page, folder / "view-timeline.png", 1280, 400)


async def keep(page: Page, file: Path, width: int, height: int) -> None:
    """What the upper part of the window shows."""
    clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
    picture = await page.ask("Page.captureScreenshot", format="png", clip=clip)
    await anyio.Path(file).write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        anyio.run(draw, Path(sys.argv[1]), make_runs(Path(made)))
