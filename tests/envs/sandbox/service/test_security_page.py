"""The live page in a real browser: what sandboxes print and are called is text, and other sites reach nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import msgspec
import pytest

from envs.sandbox.service.server import Address
from flash.errors import SandboxError, SandboxStartError
from tests.browser import browser
from tests.envs.sandbox.services import SPEC, TOKEN, running

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

SCRIPT = "<img src=x onerror='hacked=1'><script>hacked=1</script>\"'`${hacked=1}</td></table><svg onload=hacked=1>"
"""Runs where a page takes text for HTML, an attribute or a script."""

SCREEN = "document.getElementById('screen').textContent.replaceAll('\\n', '')"
"""What the terminal shows, in one line."""


async def test_nothing_that_a_sandbox_says_runs_in_the_page(tmp_path, chromium):
    async with (
        running(tmp_path, address=Address(port=0)) as world,
        world.client.acquire(msgspec.structs.replace(SPEC, image=f"any{SCRIPT}")) as sandbox,
        browser(chromium, tmp_path / "profile") as page,
    ):
        world.backend.faults.start = SandboxStartError(f"the engine says {SCRIPT}")
        with pytest.raises(SandboxError):
            async with world.client.acquire(msgspec.structs.replace(SPEC, image=f"broken{SCRIPT}")):
                pass
        world.backend.faults.start = None
        await sandbox.run(["echo", SCRIPT], timeout=10)
        await sandbox.write(SCRIPT.replace("/", "-"), b"x")
        with pytest.raises(SandboxError):
            await sandbox.read(f"{SCRIPT}\udcff")

        await page.log_in(world.url, TOKEN)
        await page.until("document.getElementById('failures').innerText.includes('<svg')")
        await page.until("document.getElementById('sandboxes').innerText.includes('any<img')")
        await page.value(f"document.querySelector('[data-sandbox=\"{sandbox.sandbox_id}\"]').click()")
        await page.until("document.getElementById('timeline').innerText.includes('${hacked=1}')")
        await page.value("document.getElementById('attach').click()")
        await page.until("document.getElementById('screen-note').innerText.startsWith('Connected')")
        await sandbox.write(
            "evil", f"{SCRIPT}\033]0;{SCRIPT}\007\033]52;c;aGFja2Vk\007\033[6n\033[c\033P+q\033\\".encode()
        )
        await page.type("cat evil; echo the end\n")
        await page.until(f"{SCREEN}.includes('<svg onload=hacked=1>')")
        await page.until(f"{SCREEN}.split('the end').length > 2")
        assert await page.value("typeof hacked") == "undefined"
        assert await page.value("document.title") == "Flash sandboxes"
        assert await page.value("document.querySelectorAll('img, iframe, object, table table').length") == 0
        assert await page.value("document.scripts.length") == 2
        assert [each for each in page.complaints if "401" not in each] == []


async def test_the_page_runs_only_its_own_scripts(tmp_path, chromium):
    """What is put into it all the same, does not run: the policy of the page forbids it."""
    async with (
        running(tmp_path, address=Address(port=0)) as world,
        browser(chromium, tmp_path / "profile") as page,
    ):
        await page.log_in(world.url, TOKEN)
        html = "<img src=x onerror=hacked=1><b id=b onclick=hacked=1>"
        await page.value(f"document.body.insertAdjacentHTML('beforeend', '{html}')")
        made = "document.createElement('script')"
        await page.value(f"(made => (made.textContent = 'hacked=1', document.body.append(made)))({made})")
        await page.value("document.getElementById('b').click()")
        blocked = "fetch('https://example.org').then(() => 'sent', () => 'blocked')"
        assert await page.value(blocked) == "blocked"
        assert await page.value("typeof hacked") == "undefined"
        assert await page.value("document.cookie") == ""


@asynccontextmanager
async def other_site(text: str) -> AsyncIterator[str]:
    """A page at another port of this machine: browsers send our cookie along from there, as from no other site."""
    head = f"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: {len(text)}\r\nconnection: close\r\n\r\n"

    async def answer(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send((head + text).encode())

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, answer)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


ATTACKS = """
const base = "%s", box = base + "/v1/sandboxes/%s", said = {};
const tried = (name, promise) => promise.then(value => { said[name] = value; }, () => { said[name] = "refused"; });
const post = (url, body, type) => fetch(url, { method: "POST", credentials: "include", mode: "no-cors", body,
  headers: { "content-type": type } }).then(() => "sent");
const socket = new Promise((open, fail) => {
  const made = new WebSocket(box.replace("http", "ws") + "/terminal");
  made.onopen = () => open("open");
  made.onerror = fail;
});
const load = (tag, url) => new Promise((open, fail) => {
  const made = document.createElement(tag);
  made.onload = () => open("loaded");
  made.onerror = fail;
  made.src = url;
  document.body.append(made);
});
window.all = Promise.all([
  tried("read", fetch(base + "/v1/status", { credentials: "include" }).then(answer => answer.text())),
  tried("order", post(base + "/v1/sandboxes", '{"spec":{"image":"any"}}', "text/plain")),
  tried("run", post(box + "/run", '{"command":"touch hacked","timeout":9}', "text/plain")),
  tried("json", fetch(box + "/run", { method: "POST", credentials: "include", body: "{}",
    headers: { "content-type": "application/json" } })),
  tried("token", fetch(base + "/v1/status", { headers: { authorization: "Bearer %s" } }).then(() => "read")),
  tried("delete", fetch(box, { method: "DELETE", credentials: "include" })),
  tried("socket", socket),
  tried("script", load("script", base + "/static/page.js")),
  tried("image", load("img", base + "/v1/status")),
]).then(() => JSON.stringify(said));
"""


async def test_another_site_reaches_nothing_although_the_browser_is_logged_in(tmp_path, chromium):
    async with (
        running(tmp_path, address=Address(port=0)) as world,
        world.client.acquire(SPEC) as sandbox,
        browser(chromium, tmp_path / "profile") as page,
    ):
        await page.log_in(world.url, TOKEN)
        script = ATTACKS % (world.url, sandbox.sandbox_id, TOKEN)
        form = f'<form method=post action="{world.url}/logout"></form><iframe src="{world.url}/"></iframe>'
        async with other_site(f"<!doctype html><body>{form}<script>{script}</script>") as url:
            await page.open(url)
            await page.until("window.all")
            said = msgspec.json.decode(await page.value("window.all"))
            # Without CORS a page never learns what became of a request; the server must have refused it.
            assert said.pop("order") in ("sent", "refused")
            assert said.pop("run") in ("sent", "refused")
            assert set(said.values()) == {"refused"}, said
            assert await page.value("document.querySelector('iframe').contentDocument") is None
            await page.value("document.forms[0].submit()")
            await page.until(f"location.href.startsWith('{world.url}')")
            assert "not carried out" in await page.value("document.body.innerText")
        assert [lease.id for lease in world.pool.state.leases()] == [sandbox.sandbox_id]
        assert await sandbox.list() == []
        # And it is logged in still.
        await page.open(world.url)
        await page.until(f"document.querySelector('[data-sandbox=\"{sandbox.sandbox_id}\"]')")
