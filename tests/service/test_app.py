"""The service over HTTP: what is answered where it has a bug of its own, or a client asks for too much."""

from __future__ import annotations

import anyio
import httpx
import pytest

from flash.service.app import BRACKETS, make_app
from flash.service.errors import ApiError
from flash.service.sessions import Heard, Sessions


@pytest.mark.anyio
async def test_a_bug_of_ours_is_answered_in_the_form_of_the_api() -> None:
    def fails(heard: Heard) -> None:
        raise RuntimeError("a bug")

    sessions = Sessions()
    session, key = sessions.open()
    session.queued = fails
    transport = httpx.ASGITransport(make_app(sessions), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "n": 2}
    async with httpx.AsyncClient(transport=transport, base_url="http://agents", headers=headers) as client:
        reply = await client.post("/v1/chat/completions", json=body)
    session.end()
    assert reply.status_code == 500
    assert reply.json()["error"] == {
        "message": "The service failed: RuntimeError.",
        "type": "server_error",
        "param": None,
        "code": "internal_error",
    }


@pytest.mark.anyio
async def test_countless_lists_are_refused_before_they_are_read_and_an_empty_key_is_none() -> None:
    sessions = Sessions()
    session, key = sessions.open()
    headers = {"authorization": f"Bearer {key}"}
    lists = b'{"model": "policy", "prompt": [' + b"[]," * BRACKETS + b"[]]}"
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "n": 2}
    transport = httpx.ASGITransport(make_app(sessions))
    async with httpx.AsyncClient(transport=transport, base_url="http://agents", headers=headers) as client:
        reply = await client.post("/v1/completions", content=lists)
        assert (reply.status_code, "lists and objects" in reply.text) == (413, True)
        async with anyio.create_task_group() as calls:
            calls.start_soon(lambda: client.post("/v1/chat/completions", json=body, headers={"idempotency-key": ""}))
            for _ in range(2):
                with anyio.fail_after(5):
                    assert await session.heard() is not None
                session.refuse(ApiError(400, "no"))
    session.end()
