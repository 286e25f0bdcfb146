"""Headless Chromium over its DevTools protocol: enough to open a page, and look."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from subprocess import DEVNULL
from typing import Any, NoReturn

import anyio
import pytest
from websockets.asyncio.client import connect

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
START_S = 60.0
STEP_S = 20.0


def find_browser() -> str:
    """The path of a Chromium. Skips the test where there is none, or fails it with FLASH_REQUIRE_BROWSER=1."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or missing("BROWSER", "there is no Chromium: apt-get install chromium-headless-shell")


def missing(what: str, reason: str) -> NoReturn:
    """Skip the test, or fail it where FLASH_REQUIRE_… says that this machine has what it needs."""
    if os.environ.get(f"FLASH_REQUIRE_{what}") == "1":
        pytest.fail(f"FLASH_REQUIRE_{what} is set, but {reason}")
    pytest.skip(reason)


class Page:
    """One open page."""

    def __init__(self, socket: Any) -> None:
        # One answer at a time is waited for; a caller that gave up leaves its answer to the next one, who skips it.
        self._socket = socket
        self._numbers = count(1)
        self._session = ""
        self.complaints: list[str] = []
        """What the page's console and its scripts complained about."""

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send(json.dumps(message))
        with anyio.fail_after(STEP_S):
            while True:
                answer = json.loads(await self._socket.recv())
                self._note(answer)
                if answer.get("id") == number:
                    assert "error" not in answer, answer
                    return answer["result"]

    async def attach(self) -> None:
        target = (await self.ask("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.ask(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.ask("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """What a script's expression is."""
        result = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait for an expression to be true. The page tells nobody."""
        with anyio.fail_after(STEP_S):
            while True:
                if value := await self.value(
                    f"document.readyState === 'complete' && (x => x instanceof Node || x)({script})"
                ):
                    return value
                await anyio.sleep(0.05)

    async def screenshot(self) -> bytes:
        """The whole page."""
        for script in ("800", "document.documentElement.scrollHeight"):  # Its height depends on its width.
            size = {"width": 1280, "height": await self.value(script)}
            await self.ask("Emulation.setDeviceMetricsOverride", **size, deviceScaleFactor=1, mobile=False)
        return base64.b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"])

    def _note(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.complaints.append(f"{parameters['entry'].get('url')}: {parameters['entry']['text']}")


@asynccontextmanager
async def browser(path: str, profile: Path) -> AsyncIterator[Page]:
    """A browser with one page."""
    command = [path, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
    # Its output goes to a file: its many processes would keep a pipe open, or block on a full one.
    log = profile.with_suffix(".log")
    with log.open("wb") as sink:
        process = await anyio.open_process(command, stdin=DEVNULL, stdout=DEVNULL, stderr=sink, start_new_session=True)
    try:
        with anyio.fail_after(START_S):
            while True:
                found = re.search(rb"(ws://\S+)\n", await anyio.Path(log).read_bytes())
                if found:
                    break
                await anyio.sleep(0.05)
        async with connect(found[1].decode(), max_size=None, proxy=None) as socket:
            page = Page(socket)
            await page.attach()
            yield page
    finally:
        # The whole group: the command may be a script around the browser.
        os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
