"""The live page in a real browser. FLASH_SCREENSHOT=FILE keeps a picture of it."""

from __future__ import annotations

import os
import re
from contextlib import AsyncExitStack

import anyio
import msgspec
import pytest

from envs.sandbox.pool.host import HostSettings
from envs.sandbox.protocol.wire import Order
from envs.sandbox.service.server import Address
from flash.errors import SandboxError, SandboxStartError
from tests.browser import browser
from tests.envs.sandbox.services import SPEC, TOKEN, running

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

SMALL = msgspec.structs.replace(SPEC, image="flash-sandbox-python", memory_mib=256)


def text(id: str) -> str:
    """The text of a part of the page."""
    return f"document.getElementById('{id}').innerText"


def shown(id: str) -> str:
    """The button of a sandbox."""
    return f"document.querySelector('[data-sandbox=\"{id}\"]')"


async def fill(world, stack: AsyncExitStack) -> list[str]:
    """Failures of several causes, a host that is full, owners who wait, a sandbox that starts."""
    broken = msgspec.structs.replace(SMALL, image="registry/broken:1")
    world.backend.faults.start = SandboxStartError("exec /bin/sh: exec format error; the image is for another machine")
    for spec in (broken, msgspec.structs.replace(SMALL, cpus=900.0)):
        with pytest.raises(SandboxError):
            async with world.client.acquire(spec):
                pass
    world.backend.faults.start = None
    for owner in ("step-41", "step-41"):
        await stack.enter_async_context(world.client.acquire(SMALL, owner=owner))
    with anyio.fail_after(20):
        while (status := await world.client.status()).hosts[0].warm == 0:
            await world.client.status(since=status.version, wait=1.0)
    # The next one takes what stands ready, the one after it never starts, and then there is no room.
    world.backend.faults.start_delay = 3600.0
    waiting = []
    for number, owner in enumerate(["step-42"] * 4 + ["evaluation"] * 2):
        info = await world.client.order(Order(spec=SMALL, owner=owner), f"{number}", wait=0.0)
        waiting.append(info.id)
    return waiting


async def test_the_live_page_shows_the_pool_and_gives_a_terminal(tmp_path, chromium):
    settings = HostSettings(warm_max=0, look_s=0.5, cpu_factor=5.0 / (os.cpu_count() or 1))
    async with (
        running(tmp_path, address=Address(port=0), host_settings=settings, warm=[(SMALL, 1)]) as world,
        AsyncExitStack() as stack,
        world.client.acquire(SMALL, owner="step-41") as sandbox,
        browser(chromium, tmp_path / "profile") as page,
    ):
        await sandbox.run("pytest -q || exit 1", timeout=10)
        await sandbox.run("echo 'print(6 * 7)' > answer.py; echo \"PS1='\\w \\$ '\" > .bashrc; sleep 0.2", timeout=10)
        await sandbox.run("python3 answer.py", timeout=10)
        waiting = await fill(world, stack)

        await page.open(world.url)
        await page.until("document.querySelector('input[name=token]')")
        assert sandbox.sandbox_id not in await page.value("document.body.innerText")
        await page.log_in(world.url, TOKEN)

        await page.until(shown(sandbox.sandbox_id))
        assert "admin/step-41" in await page.value(text("sandboxes"))
        hosts = await page.value(text("hosts"))
        assert "here" in hosts
        # CPUs busy, memory in use, CPUs promised, memory promised.
        assert len(re.findall(r"[\d.]+ of [\d.]+ GiB", hosts)) == 2
        assert re.search(rf"[\d.]+ of {os.cpu_count()}\b", hosts)
        await page.until(f"{text('tiles')}.includes('warm hit rate')")
        await page.until(f"/admin.step-42\\s+[1-4]/.test({text('queue')})")
        assert "SandboxStartError" in await page.value(text("failures"))
        assert "registry/broken:1" in await page.value(text("failures"))
        assert "starting" in await page.value(text("sandboxes"))

        # What changes is shown without a reload.
        last = waiting.pop()
        await page.until(shown(last))
        await world.client.end(last)
        await page.until(f"!{shown(last)}")

        await page.value(f"{shown(sandbox.sandbox_id)}.click()")
        timeline = await page.until(f"(text => text.includes('answer.py') && text)({text('timeline')})")
        assert "exit 0" in timeline
        await page.value("document.getElementById('attach').click()")
        await page.until(f"{text('screen-note')}.startsWith('Connected')")
        await page.until(f"{text('screen')}.includes(' $ ')")
        await page.type("echo $((6*7)) '<b>'; printf '\\033[31mred\\033[0m\\n'\n")
        await page.until(f"{text('screen')}.includes('42 <b>')")
        await page.until("document.querySelector('#screen .f1')?.innerText === 'red'")
        await page.type("cat answer.py; python3 answer.py\n")
        await page.until(f"{text('screen')}.includes('print(6 * 7)')")
        if target := os.environ.get("FLASH_SCREENSHOT"):
            await anyio.Path(target).write_bytes(await page.screenshot())
        await page.type("exit\n")
        await page.until(f"{text('screen-note')}.startsWith('Closed')")
        # The login page answers 401; nothing else may complain.
        assert [each for each in page.complaints if "401" not in each] == []
        world.backend.faults.start_delay = 0.0
        for id in waiting:
            await world.client.end(id)
