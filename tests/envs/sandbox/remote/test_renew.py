"""A remote sandbox whose service is silent, out of reach for a while, or reports the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import httpx
import msgspec
import pytest

from envs.sandbox.protocol import Info
from envs.sandbox.remote.client import LEASE_S, RENEW_S, STATE_S, TREE_S, RemoteSandbox, SandboxClient
from envs.sandbox.remote.http import MARGIN_S, REPEAT_S, HttpClient
from flash.errors import SandboxBusyError, SandboxClosedError, SandboxLostError, SandboxTimeoutError
from tests.envs.sandbox.services import SPEC

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]

INFO = Info(
    id="x",
    owner="admin",
    state="ready",
    sandbox_state="ready",
    reason="",
    spec=SPEC,
    host="here",
    generation=0,
    created_at=0.0,
    lease_s=LEASE_S,
    position=None,
)


async def answers(seconds: float) -> Info:
    await anyio.sleep(seconds)
    return INFO


async def silent(seconds: float) -> Info:
    """Accepts the connection, and never answers."""
    await anyio.sleep(seconds + MARGIN_S)
    raise SandboxTimeoutError("waited")


async def unreachable(seconds: float) -> Info:
    """Refuses connections for as long as a call is repeated."""
    await anyio.sleep(REPEAT_S)
    raise SandboxLostError("cannot be reached")


async def busy(seconds: float) -> Info:
    raise SandboxBusyError("this token has too many connections open")


async def ended(seconds: float) -> Info:
    return msgspec.structs.replace(INFO, state="failed")


async def unknown(seconds: float) -> Info:
    raise SandboxClosedError("there is no sandbox x")


async def silent_after_a_loss(seconds: float) -> Info:
    await anyio.sleep_forever()
    return INFO


async def test_a_call_that_was_lost_with_its_service_raises_soon():
    sandbox = sandbox_of(unreachable, silent_after_a_loss)
    begin = anyio.current_time()
    with pytest.raises(SandboxLostError):
        await sandbox.call_once("run", Info, INFO, 10.0)
    assert anyio.current_time() - begin <= REPEAT_S + STATE_S
    assert sandbox.state == "ready"


class Service:
    """What a sandbox needs of its client. The service behaves in one way after the other, and keeps to the last."""

    def __init__(self, *behaviours: Callable[[float], Awaitable[Info]]) -> None:
        self.http = self
        self._behaviours = list(behaviours)

    async def ask(self, method: str, path: str, answer: type, *, seconds: float, **_: Any) -> Info:
        behaviour = self._behaviours.pop(0) if len(self._behaviours) > 1 else self._behaviours[0]
        return await behaviour(seconds)


def sandbox_of(*behaviours: Callable[[float], Awaitable[Info]]) -> RemoteSandbox:
    service: Any = Service(*behaviours)
    return RemoteSandbox(service, INFO)


@pytest.mark.parametrize("behaviour", [silent, unreachable, busy])
async def test_a_sandbox_is_lost_when_its_lease_has_run_out_without_an_answer(behaviour):
    sandbox = sandbox_of(answers, answers, behaviour)
    begin = anyio.current_time()
    await sandbox.renew()
    assert sandbox.state == "lost"
    # The second answered request renewed the lease when it was sent.
    assert anyio.current_time() - begin == pytest.approx(RENEW_S + LEASE_S)
    await sandbox.wait_ended()


@pytest.mark.parametrize("behaviour", [silent, unreachable, busy])
async def test_a_service_that_answers_again_within_the_lease_keeps_its_sandbox(behaviour):
    sandbox = sandbox_of(answers, behaviour, answers)
    with anyio.move_on_after(10 * LEASE_S) as scope:
        await sandbox.renew()
    assert scope.cancelled_caught
    assert sandbox.state == "ready"


@pytest.mark.parametrize(("behaviour", "state"), [(ended, "lost"), (unknown, "closed")])
async def test_the_end_that_a_service_reports_is_noticed(behaviour, state):
    sandbox = sandbox_of(silent, behaviour)
    await sandbox.renew()
    assert sandbox.state == state


async def test_an_upload_has_as_much_time_as_in_a_local_sandbox():
    async def slowly(seconds: float):
        for _ in range(int(seconds)):
            await anyio.sleep(1.0)
            yield b"x"

    client: Any = SandboxClient("http://service", "t" * 32)
    client.http = HttpClient("http://service", "t" * 32, transport=httpx.MockTransport(lambda _: httpx.Response(204)))
    sandbox = RemoteSandbox(client, INFO)
    await sandbox.put_archive("tree", slowly(TREE_S))
    begin = anyio.current_time()
    with pytest.raises(SandboxTimeoutError):
        await sandbox.put_archive("tree", slowly(2 * TREE_S))
    assert anyio.current_time() - begin == pytest.approx(TREE_S + MARGIN_S)
