"""Streams of a command that writes nothing: the head of the answer, and a client that disconnects."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import anyio
import msgspec
import pytest

from envs.sandbox.api import Chunk, Result
from envs.sandbox.service.routes import ALIVE_S, LineStream

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


async def silent(events: list[str]) -> AsyncGenerator[Chunk | Result]:
    """Run for ever without output, and record the end."""
    try:
        await anyio.sleep_forever()
        yield Chunk("stdout", b"")
    finally:
        events.append("killed")


async def test_the_head_of_a_stream_is_sent_although_its_command_writes_nothing():
    sent: list[Any] = []

    async def receive() -> Any:
        await anyio.sleep_forever()

    async def send(message: Any) -> None:
        sent.append(message)

    with anyio.move_on_after(2.5 * ALIVE_S):
        await LineStream(silent([]))({"type": "http"}, receive, send)
    head, *lines = sent
    assert head["status"] == 200
    assert [msgspec.json.decode(line["body"]) for line in lines] == [{"type": "alive"}] * 2


async def test_a_client_that_leaves_before_any_output_ends_the_command():
    events: list[str] = []

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    with anyio.fail_after(ALIVE_S / 2):
        await LineStream(silent(events))({"type": "http"}, receive, send)
    assert events == ["killed"]
