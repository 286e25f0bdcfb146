"""The page of the cluster in a real browser: live, at a node's death, with hostile messages, of any size of cluster."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest

from flash.observe.cluster import Cluster, Event, RankNow
from flash.observe.rundir.rundir import RunDirectory
from tests.browser import Page, browser
from tests.observe.clusters import cluster, engine_now, failure, hub_now
from tests.view.recorded import HOSTILE, record
from tests.view.served import served, show
from tests.view.test_page import SCRIPTS, fits, nothing_else_runs

pytestmark = [pytest.mark.anyio, pytest.mark.integration]


def keep(run: RunDirectory, picture: Cluster) -> None:
    """Write the state of the cluster, as the run does."""
    run.cluster.write_bytes(msgspec.json.encode(picture))


def table(name: str) -> str:
    """Return a script for the texts of a table's cells, row by row."""
    rows = f"[...document.querySelectorAll('#cluster-{name} tbody tr')]"
    return f"{rows}.map(row => [...row.cells].map(one => one.innerText))"


def tile(title: str) -> str:
    """Return a script for the text of a tile."""
    titles = "[...document.querySelectorAll('#cluster-tiles article')]"
    return f"{titles}.find(one => one.querySelector('h2').innerText === '{title}')?.querySelector('.now')?.innerText"


STATE = "document.getElementById('cluster-state').innerText"


async def test_a_cluster_is_followed_through_a_death_to_its_end(tmp_path: Path, chromium: str) -> None:
    run = record(tmp_path / "run", steps=2)
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, f"{url}#cluster")
            await page.until(f"{STATE}.includes('has no snapshot of its cluster')")
            now = time.time()
            whole = hub_now(now, nodes=2)
            keep(run, cluster(now, whole))
            await page.until(f"{STATE}.includes('waits for a batch for step 8')")
            assert await page.value(tile("Nodes")) == "2 here"
            assert await page.value(tile("Requests")) == "24 running, 8 waiting"
            assert await page.value(tile("Tokens per second")) == "600"
            assert await page.value(tile("Samples on their way")) == "200 issued, 256 at most"
            assert await page.value(tile("Environment sessions")) == "40 alive, 8 in the environment"
            assert await page.value("document.getElementById('cluster-failures').innerText") == "Nothing has failed."
            text = await page.value("document.getElementById('cluster').innerText")
            assert text.count("Worry when: ") == 18
            assert (await page.value(table("engines")))[1][:5] == ["1", "1", "serving", "7 (1 behind)", "12"]
            heads = "[...document.querySelectorAll('#cluster-engines th')].map(one => [one.innerText, one.title])"
            told = dict(await page.value(heads))
            assert told["KV cache"].startswith("Share of the engine's KV cache that is in use. Worry when: it is full")
            row = dict(zip(told, (await page.value(table("engines")))[1], strict=True))
            shown = {"KV cache": "25 %", "Preempted": "3", "Prefix hits": "50 %", "Tokens/s": "300", "Swap s": "0.5"}
            assert row | shown == row
            assert (await page.value(table("stocks")))[0][1:] == ["sandboxes", "3", "2", "1", "6", "40"]
            # A node dies, one engine starts again; nobody loads the page anew.
            here, other = whole.nodes
            gone = msgspec.structs.replace(other, state="gone", gone_at=now, why="its connection ended", leases=0)
            dead = engine_now(0, now, state="returning", version=-1, deaths=1, died_at=now, why="engine 0 was killed")
            assert here.status is not None
            here = msgspec.structs.replace(here, status=msgspec.structs.replace(here.status, engines=[dead]))
            died = msgspec.structs.replace(whole, nodes=[here, gone])
            keep(run, cluster(now, died, failures=[failure("node_lost", now, "node 1: its connection ended")]))
            await page.until(f"{tile('Nodes')} === '1 here, 1 gone'")
            assert (await page.value(table("nodes")))[1][1] == "gone"
            assert "its connection ended" in (await page.value(table("nodes")))[1][-1]
            assert await page.value(tile("Engines")) == "1 returning"
            assert (await page.value(table("engines")))[0][2:4] == ["returning", "none"]
            assert "engine 0 was killed" in (await page.value(table("engines")))[0][-1]
            assert await page.value("document.querySelectorAll('#cluster .failure').length") == 1
            # Silence, and two kinds of ends.
            keep(run, cluster(now - 100, died))
            await page.until(f"{STATE}.includes('has not reported for 2 min')")
            keep(run, cluster(now, died, ended="failed", error=f"EnvError: {HOSTILE}"))
            await page.until(f"{STATE}.includes('The run failed') && {STATE}.includes('EnvError: <img')")
            keep(run, cluster(now, died, ended="finished"))
            await page.until(f"{STATE}.includes('The run has finished')")
            run.cluster.write_bytes(b"{nonsense")
            await page.until(f"{STATE}.includes('cannot be read')")
            run.cluster.unlink()
            await page.until(f"{STATE}.includes('has no snapshot')")
            assert page.complaints == []


async def test_hostile_messages_are_text_and_what_is_read_stays_while_the_run_goes_on(
    tmp_path: Path, chromium: str
) -> None:
    run = record(tmp_path / "run", steps=2)
    now = time.time()
    long = 3000 * "all of it " + "the end"
    failures = [failure("env_error", now, HOSTILE, 1200), failure(HOSTILE, now, HOSTILE), failure("other", now, long)]
    whole = hub_now(now, nodes=1, doing=HOSTILE)
    (node,) = whole.nodes
    assert node.status is not None
    dead = engine_now(0, now, deaths=1, died_at=now, why=HOSTILE)
    status = msgspec.structs.replace(node.status, host=HOSTILE, engines=[dead])
    gone = msgspec.structs.replace(node, node=1, state="gone", gone_at=now, why=HOSTILE)
    whole = msgspec.structs.replace(whole, nodes=[msgspec.structs.replace(node, status=status), gone])
    events = [Event(now, HOSTILE)]
    keep(run, cluster(now, whole, failures=failures, events=events))
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, f"{url}#cluster")
            await page.until("document.querySelectorAll('#cluster .failure').length === 3")
            await look_at_it(page, 1280)
            # Somebody reads a long message: it stays open and in place while others come.
            await page.value("document.querySelectorAll('#cluster .failure pre button')[0].focus()")
            await page.ask("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=13)
            await page.until("document.querySelector('#cluster-failures').innerText.includes('the end')")
            await page.value("document.querySelectorAll('#cluster .failure pre')[2].dataset.read = 'here'")
            keep(run, cluster(now + 1, whole, failures=failures, events=events))
            await page.until(f"{STATE}.includes('The run waits for')")
            assert await page.value("document.querySelectorAll('#cluster .failure pre')[2].dataset.read") == "here"
            await look_at_it(page, 1280)
            await show(page, f"{url}#cluster", width=400, scheme="dark")
            await page.until("document.querySelectorAll('#cluster .failure').length === 3")
            await look_at_it(page, 400)
            assert page.complaints == []
            await nothing_else_runs(page)


async def look_at_it(page: Page, width: int) -> None:
    """Nothing of it has become a part of the page, and nothing ran."""
    text = await page.value("document.body.innerText")
    assert "<script>hacked=1</script>" in text
    assert "\\u{202e}gnirts\\u{2066}" in text
    assert not set("\u202e\u2066\x1b\x07\u200b") & set(text)
    assert await page.value("typeof hacked") == "undefined"
    assert await page.value("document.title") == "Flash runs"
    assert await page.value("document.querySelectorAll('img, iframe, object, main b, main svg').length") == 0
    assert await page.value("document.scripts.length") == SCRIPTS
    assert await page.value(fits(width))


@pytest.mark.parametrize(("nodes", "engines"), [(1, 1), (8, 8), (128, 1)])
async def test_clusters_of_any_size_fit_into_windows_of_any_width(
    nodes: int, engines: int, tmp_path: Path, chromium: str
) -> None:
    run = record(tmp_path / "run", steps=1)
    now = time.time()
    whole = hub_now(now, nodes=nodes)
    told = [
        msgspec.structs.replace(
            node,
            status=msgspec.structs.replace(
                node.status, engines=[engine_now(node.node * engines + place, now) for place in range(engines)]
            ),
        )
        for node in whole.nodes
    ]
    keep(run, cluster(now, msgspec.structs.replace(whole, nodes=told)))
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            for width, scheme in ((1280, "light"), (400, "dark"), (320, "light")):
                await show(page, f"{url}#cluster", width=width, scheme=scheme)
                await page.until(f"{tile('Engines')} === '{nodes * engines} serving'")
                assert await page.value(fits(width))
                assert len(await page.value(table("nodes"))) == nodes
            # Wide tables can be scrolled by keys.
            wide = "document.querySelector('#cluster-nodes .wide')"
            assert await page.value(f"{wide}.scrollWidth > {wide}.clientWidth")
            await page.value(f"{wide}.focus()")
            key = {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39}
            for _ in range(4):
                await page.ask("Input.dispatchKeyEvent", type="keyDown", **key)
                await page.ask("Input.dispatchKeyEvent", type="keyUp", **key)
            await page.until(f"{wide}.scrollLeft > 0")
            assert page.complaints == []


async def test_a_node_that_only_trains_is_shown_with_the_host_that_its_ranks_name(
    tmp_path: Path, chromium: str
) -> None:
    run = record(tmp_path / "run", steps=1)
    now = time.time()
    whole = hub_now(now, nodes=2)
    first, second = whole.nodes
    ranks = [RankNow(0, 0, 4321, now - 9, "host-0"), RankNow(1, 1, 4322, now - 9, "trains-here")]
    nodes = [first, msgspec.structs.replace(second, status=None)]
    keep(run, cluster(now, msgspec.structs.replace(whole, nodes=nodes, ranks=ranks)))
    with served(run.path) as url:
        async with browser(chromium, tmp_path / "profile") as page:
            await show(page, f"{url}#cluster")
            await page.until(f"{tile('Nodes')} === '2 here'")
            assert [row[2] for row in await page.value(table("nodes"))] == ["host-0", "trains-here"]
            assert page.complaints == []
