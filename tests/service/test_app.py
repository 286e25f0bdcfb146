"""The service over HTTP where it has a bug of its own: what is answered then still has the form of the API."""

from __future__ import annotations

import httpx
import pytest

from flash.service.app import make_app
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
