"""The page in a real browser, served by the command."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from flash.observe.rundir.samples import samples_of
from tests.browser import Page, browser
from tests.observe.sample_rows import eval_row, metrics_row
from tests.view.recorded import HOSTILE, append_step, record
from tests.view.served import served, show

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

DRAWN = "[...document.querySelectorAll('#charts .plot')].filter(one => one.data).length"
BACKGROUND = "getComputedStyle(document.querySelector('.plot .main-svg')).backgroundColor"
SCRIPTS = 2


def curve(chart: str, place: int = -1) -> str:
    """Return a script for the numbers of a chart's curve, as JSON."""
    plot = f"document.querySelector('[data-chart={chart}] .plot')"
    return f"(found => found && JSON.stringify(found.y))({plot}.data?.at({place}))"


async def numbers(page: Page, script: str) -> list[float | None]:
    """Return the numbers of a script of `curve`, as soon as the curve is drawn."""
    return json.loads(await page.until(script))


def fits(width: int) -> str:
    """Return a script that is true if nothing is wider than the window."""
    return f"document.documentElement.scrollWidth <= {width}"


async def test_the_overview_shows_runs_over_each_other_and_goes_on_with_them(tmp_path: Path, chromium: str) -> None:
    first, second = record(tmp_path / "first"), record(tmp_path / "second", steps=12, shift=0.1)
    first.summary.write_text("{}")
    with served(first.path, second.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, url)
            await page.until(f"{DRAWN} === 14")
            assert len(await numbers(page, curve("entropy", 0))) == 30
            assert len(await numbers(page, curve("entropy"))) == 12
            runs = await page.until(
                "(text => text.includes('ended') && text)(document.getElementById('runs').innerText)"
            )
            assert re.search(r"first\s+ended after step 29\s+second\s+step 11 of 60, \d+ days ago", runs)
            text = await page.value("document.getElementById('charts').innerText")
            assert text.count("Worry when: ") == 14
            # What the run records meanwhile is shown without a reload.
            append_step(second, 12)
            second.append_evaluation(eval_row(20, 0.77))
            await page.until(f"JSON.parse({curve('entropy')} ?? '[]').length === 13")
            await page.until(f"JSON.parse({curve('held_out', -2)} ?? '[]').at(-1) === 0.77")
            # Hours, one run less, and a telephone in the dark.
            await page.value(
                "document.getElementById('axis').value = 'hours', document.getElementById('axis').onchange()"
            )
            x = "document.querySelector('[data-chart=entropy] .plot').data.at(-1).x.at(-1)"
            await page.until(f"Math.abs({x} - 36 / 3600) < 1e-9")
            await page.value("document.querySelector('#runs input').click()")
            await page.until("document.querySelector('[data-chart=reward] .plot').data.length === 1")
            assert await page.value(fits(1280))
            assert await page.value(BACKGROUND) == "rgb(255, 255, 255)"
            await show(page, url, width=400, scheme="dark")
            await page.until(f"{DRAWN} === 14")
            assert await page.value(fits(400))
            assert await page.value(BACKGROUND) == "rgb(29, 33, 37)"
            assert page.complaints == []


async def test_a_value_without_neighbours_is_a_point(tmp_path: Path, chromium: str) -> None:
    run = record(tmp_path / "run", steps=0)
    for step in range(4):
        run.append_metrics(metrics_row(step, entropy=0.5 if step == 1 else None))
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, url)
            assert await numbers(page, curve("entropy")) == [None, 0.5, None, None]
            plot = "document.querySelector('[data-chart=entropy] .plot')"
            widths = f"[...{plot}.querySelectorAll('.point')].map(one => one.getBoundingClientRect().width)"
            assert [width > 3 for width in await page.value(widths)].count(True) == 1
            assert page.complaints == []


async def test_samples_are_found_and_what_models_write_is_text(tmp_path: Path, chromium: str) -> None:
    run = record(tmp_path / f"run {'<b>x'}", steps=8, said=HOSTILE)
    append_step(run, 8, said="a needle in it")
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, f"{url}#samples")
            await page.until("document.querySelectorAll('#list tbody tr').length === 18")
            await ask_for(page, text="NEEDLE")
            await page.until("document.querySelectorAll('#list tbody tr').length === 2")
            await ask_for(page, text="", step="5", outcome="truncated")
            await page.until("document.querySelectorAll('#list tbody tr').length === 1")
            await page.value("document.querySelector('#list tbody tr').click()")
            members = await page.until(
                "(text => text.includes('hidden') && text)(document.getElementById('group').innerText)"
            )
            assert "Rewards of the group: 0, 1, 0, 1; mean 0.5. 2 of 4 are readable." in members
            assert "<script>hacked=1</script>" in members
            assert "\\u{202e}gnirts\\u{2066} \\u{1b}[2J\\u{1b}]0;title\\u{7} \\u{200b}hidden" in members
            assert not set("\u202e\u2066\x1b\x07\u200b") & set(await page.value("document.body.innerText"))
            assert len(re.findall("Member", members)) == 2
            titles = "[...document.querySelectorAll('.chosen .token[title]')].map(one => one.title)"
            first, second = (await page.value(titles))[:2]
            assert first == "log-prob -0.01, ratio 1.5, advantage 1, entropy 0.05, version 4, age 1, trained"
            assert "advantage" not in second
            assert second.endswith("version 5, age 0, too old to be trained")
            for colouring, shade in [("log-prob", "l5"), ("ratio", "p3"), ("advantage", "p4"), ("entropy", "l5"),
                                     ("version", "a1"), ("mask", "too_old"), ("mask", "clipped")]:  # fmt: skip
                await colour(page, colouring)
                assert await page.value(f"document.querySelectorAll('.chosen .said .{shade}').length") > 0, colouring
                assert await page.value(f"document.querySelectorAll('#group .hint .{shade}').length") == 1, colouring
            await colour(page, "nothing")
            assert await page.value("document.querySelectorAll('#group .said .token:not([class=token])').length") == 0
            await with_keys_alone(page)
            # Nothing of it has become a part of the page, and nothing ran.
            assert await page.value("typeof hacked") == "undefined"
            assert await page.value("document.title") == "Flash runs"
            assert await page.value("document.querySelectorAll('img, iframe, object, main b, pre svg').length") == 0
            assert await page.value("document.scripts.length") == SCRIPTS
            await show(page, f"{url}#samples", width=400, scheme="dark")
            await page.until("document.querySelector('#list tbody tr')")
            assert await page.value(fits(400))
            assert page.complaints == []
            await nothing_else_runs(page)


async def test_a_group_of_long_answers_is_coloured_by_advantages(tmp_path: Path, chromium: str) -> None:
    # This group has more tokens than a function of JavaScript takes arguments.
    run = record(tmp_path / "run", steps=0)
    append_step(run, 0, said="word " * 130_000)
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, f"{url}#samples")
            await page.until("document.querySelector('#list tbody tr')")
            await page.value("document.querySelector('#list tbody tr').click()")
            await page.until("document.querySelector('#group .token')")
            await colour(page, "advantage")
            assert await page.value("document.querySelectorAll('.chosen .said .p4, .chosen .said .n4').length") == 2999
            assert page.complaints == []


async def test_a_group_whose_samples_were_deleted_meanwhile_says_so(tmp_path: Path, chromium: str) -> None:
    run = record(tmp_path / "run", steps=2)
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, f"{url}#samples")
            await page.until("document.querySelectorAll('#list tbody tr').length === 4")
            samples_of(run, 1).unlink()
            await page.value("document.querySelector('#list tbody tr').click()")
            group = "document.getElementById('group')"
            assert "The samples of step 1 cannot be read" in await page.until(f"!{group}.hidden && {group}.innerText")
            assert page.complaints == []


async def colour(page: Page, by: str) -> None:
    """Press `c` until the tokens are coloured by the values with this name."""
    for _ in range(8):
        if await page.value("document.querySelector('#group select').selectedOptions[0].text") == by:
            return
        await press(page, "c", "document.querySelector('#group .members')")
    raise AssertionError(f"no key leads to {by}")


async def with_keys_alone(page: Page) -> None:
    """Go from the open group back to the list, down by one, and into that sample."""
    await page.value("document.querySelector('#list tbody tr').focus()")
    await ask_for(page, step="", outcome="")
    await page.until("document.querySelectorAll('#list tbody tr').length === 18")
    await page.value("document.querySelector('#list tbody tr').focus()")
    await press(page, "ArrowDown")
    await press(page, "Enter")
    await page.until("document.activeElement === document.querySelector('#group select')")
    assert "Step 8, group 8" in await page.value("document.getElementById('group').innerText")
    await press(page, "Escape")
    assert await page.value("document.getElementById('group').hidden")
    second = "document.querySelectorAll('#list tbody tr')[1]"
    assert await page.value(f"document.activeElement === {second}")


async def press(page: Page, key: str, on: str = "document.activeElement") -> None:
    """Press a key at an element; without `on`, at the one with the focus."""
    await page.value(f"void {on}.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))")


async def nothing_else_runs(page: Page) -> None:
    """Check that scripts which get into the page all the same do not run, because its policy forbids it."""
    html = "<img src=x onerror=hacked=1><b id=b onclick=hacked=1>"
    await page.value(f"document.body.insertAdjacentHTML('beforeend', '{html}')")
    made = "document.createElement('script')"
    await page.value(f"(made => (made.textContent = 'hacked=1', document.body.append(made)))({made})")
    await page.value("document.getElementById('b').click()")
    assert await page.value("fetch('https://example.org').then(() => 'sent', () => 'blocked')") == "blocked"
    assert await page.value("typeof hacked") == "undefined"


async def test_the_timeline_shows_each_bar_when_one_looks_closer(tmp_path: Path, chromium: str) -> None:
    run = record(tmp_path / "run")
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, f"{url}#timeline")
            await page.until(f"{NOTE}.includes('shares of time')")
            bars = "document.getElementById('bars')"
            assert await page.value(f"{bars}.layout.yaxis.ticktext") == [
                "engine 0 · 100 %",
                "engine 1 · 60 %",
                "trainer 0 · 75 %",
            ]
            # The trainer waits for half a second in each step of two.
            part = f"{{'xaxis.range[0]': {at(10.5)}, 'xaxis.range[1]': {at(12)}}}"
            await page.value(f"Plotly.relayout({bars}, {part}).then(() => true)")
            await page.until(f"{NOTE} === '' && {bars}.layout.yaxis.ticktext[2] === 'trainer 0 · 100 %'")
            assert await page.value(f"{bars}.layout.annotations.map(one => one.text)") == ["5"]
            await to_the_samples_of_a_bar(page)
            await page.value("document.getElementById('whole').click()")
            await page.until(f"{NOTE}.includes('shares of time')")
            assert await page.value(fits(1280))
            await show(page, f"{url}#timeline", width=400, scheme="dark")
            await page.until(f"{bars}.data && {fits(400)}")
            assert page.complaints == []


async def test_runs_that_are_broken_hostile_or_removed_hide_no_other(tmp_path: Path, chromium: str) -> None:
    broken, hostile, good = (record(tmp_path / name, steps=4, said=HOSTILE) for name in ("broken", "<b>x", "good"))
    broken.metrics.unlink()
    broken.metrics.mkdir()
    hostile.spans.write_bytes(b'["<b>a","{{b}}",1,2]\n' + 100 * b"\xff\n[" + b"\n")
    hostile.cluster.write_bytes(b'{"hub": {"nodes": [{"<script>"')
    hostile.config.write_text(f"[model]\npath = {json.dumps(HOSTILE)}\n")
    with served(broken.path, hostile.path, good.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, url)
            runs = "document.getElementById('runs').innerText"
            await page.until(f"{runs}.includes('metrics.jsonl: Is a directory') && {runs}.includes('step 3 of 60')")
            await page.until(f"JSON.parse({curve('entropy')} ?? '[]').length === 4")
            append_step(good, 4)
            await page.until(f"JSON.parse({curve('entropy')} ?? '[]').length === 5")
            for view in ("samples", "timeline", "cluster", "overview"):
                await page.value(f"void (location.hash = '{view}')")
                await page.until(f"!document.getElementById('{view}').hidden")
                choice = f"document.querySelector('#{view} .which select')"
                for place in range(3 if view != "overview" else 0):
                    await page.value(f"({choice}.value = '{place}', {choice}.dispatchEvent(new Event('change')))")
                    await page.value("new Promise(done => setTimeout(() => done(true), 300))")
            # One is removed while it is looked at.
            shutil.rmtree(good.path)
            await page.until(f"{runs}.includes('gone: its directory was moved or removed')")
            assert await page.value("document.querySelector('#link.good') !== null")
            assert await page.value("typeof hacked") == "undefined"
            assert await page.value("document.querySelectorAll('img, iframe, object, main b').length") == 0
            # What cannot be read is refused, and nothing else has gone wrong.
            assert all("500 (Internal Server Error)" in complaint for complaint in page.complaints), page.complaints


async def to_the_samples_of_a_bar(page: Page) -> None:
    """A trainer's bar leads to its step, an engine's to what was under way; then back."""
    rows = "[...document.querySelectorAll('#list tbody td.step')].map(cell => cell.textContent)"
    await click(page, "train")
    await page.until(f"location.hash === '#samples' && JSON.stringify({rows}) === '[\"5\",\"5\"]'")
    assert await page.value("document.getElementById('query-time').hidden")
    await page.value("void (location.hash = 'timeline')")
    await click(page, "generate")
    await page.until("location.hash === '#samples' && !document.getElementById('query-time').hidden")
    seen = await page.until(f"({rows}).length < 20 && ({rows}).length > 0 && {rows}")
    assert set(seen) <= {"5", "6"}
    await page.value("document.getElementById('query-time').click()")
    await page.until(f"({rows}).length === 60")
    await page.value("void (location.hash = 'timeline')")


async def click(page: Page, activity: str) -> None:
    """Press the mouse on the first bar of an activity."""
    trace = f"document.getElementById('bars').data.findIndex(one => one.name === '{activity}')"
    bar = f"document.querySelectorAll('#bars .barlayer .trace')[{trace}]?.querySelector('.point')"
    box = await page.until(f"(box => box?.width > 1 && JSON.stringify(box))({bar}?.getBoundingClientRect())")
    place = json.loads(box)
    at = {"x": place["x"] + place["width"] / 2, "y": place["y"] + place["height"] / 2, "button": "left"}
    await page.ask("Input.dispatchMouseEvent", type="mouseMoved", **at)
    for kind in ("mousePressed", "mouseReleased"):
        await page.ask("Input.dispatchMouseEvent", type=kind, clickCount=1, **at)


NOTE = "document.getElementById('timeline-note').innerText"


def at(seconds: float) -> str:
    """Return a script for a moment of the run on the axis of the timeline."""
    return f"(document.getElementById('bars').layout.xaxis.range[0] + {1000 * seconds})"


async def ask_for(page: Page, **questions: Any) -> None:
    """Fill these fields of the form of the search, and search."""
    for name, value in questions.items():
        await page.value(f"document.getElementById('query').elements.{name}.value = {json.dumps(value)}")
    await page.value("document.getElementById('query').oninput()")
