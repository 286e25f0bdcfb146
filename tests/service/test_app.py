"""The service over HTTP: its responses if it has a bug of its own, or if a client asks for too much."""

from __future__ import annotations

from typing import Any

import anyio
import httpx
import pytest

from flash.http.server import MAX_JSON_VALUES
from flash.service.app import KEEP_ALIVE_S, kept_alive, make_app
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.fields import ApiError
from flash.service.history import Continuation
from flash.service.sessions import EpisodeSessions, PendingCall
from flash.types import Message


@pytest.mark.anyio
async def test_a_bug_of_ours_is_answered_in_the_form_of_the_api() -> None:
    def fails(pending: PendingCall) -> None:
        raise RuntimeError("a bug")

    sessions = EpisodeSessions()
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
async def test_clients_of_anthropic_get_errors_in_the_form_of_their_api() -> None:
    async def fails(request: AgentRequest, place: Continuation) -> int:
        raise RuntimeError("a bug")

    sessions = EpisodeSessions()
    session, key = sessions.open()
    session.count_prompt = fails
    transport = httpx.ASGITransport(make_app(sessions), raise_app_exceptions=False)
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}]}
    version, got = {"anthropic-version": "2023-06-01"}, list[tuple[int, str, str]]()
    async with httpx.AsyncClient(transport=transport, base_url="http://agents") as client:
        for method, path, headers in (
            ("POST", "/v1/messages/count_tokens", {"x-api-key": key}),
            ("POST", "/v1/messages/count_tokens", {"authorization": f"Bearer {key}"}),
            ("POST", "/v1/messages", {"x-api-key": "another", "authorization": f"Bearer {key}"}),
            ("POST", "/v1/messages", {"x-api-key": key, "content-encoding": "gzip"}),
            ("GET", "/v1/messages", {"x-api-key": key}),
            ("GET", "/v1/models/claude", {"x-api-key": key, **version}),
            ("GET", "/v1/files", {"x-api-key": key, **version}),
        ):
            reply = await client.request(method, path, json=body, headers=headers)
            assert reply.json().keys() == {"type", "error"}
            error = reply.json()["error"]
            got.append((reply.status_code, error["type"], error.get("details", {}).get("error_code", "")))
        plain = await client.get("/v1/models", headers={"x-api-key": key})
    session.end()
    assert got == [
        (500, "api_error", "internal_error"),
        (500, "api_error", "internal_error"),
        (401, "authentication_error", "invalid_api_key"),
        (415, "invalid_request_error", ""),
        (405, "invalid_request_error", "method_not_allowed"),
        (404, "not_found_error", "model_not_found"),
        (404, "not_found_error", "unknown_url"),
    ]
    assert (plain.status_code, plain.json()["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_left_before_its_last_answer_gets_its_first_ones_again(stream: bool) -> None:
    sessions = EpisodeSessions()
    session, key = sessions.open()
    transport, headers = httpx.ASGITransport(make_app(sessions)), {"authorization": f"Bearer {key}"}
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "n": 2, "stream": stream}
    got: list[list[str]] = []

    async def request_answers() -> None:
        """Ask for two answers, and note which the client got."""
        reply = await client.post("/v1/chat/completions", json=body)
        got.append([f"answer {number}" for number in range(5) if f"answer {number}" in reply.text])

    async def sample(number: int) -> None:
        """Answer the next call."""
        with anyio.fail_after(5):
            assert await session.next_call() is not None
        session.answer(PolicyAnswer(Message("assistant", f"answer {number}"), cut=False, prompt_tokens=1, tokens=1))
        await anyio.wait_all_tasks_blocked()

    async with (
        httpx.AsyncClient(transport=transport, base_url="http://agents", headers=headers) as client,
        anyio.create_task_group() as clients,
    ):
        async with anyio.create_task_group() as leaving:
            leaving.start_soon(request_answers)
            await sample(0)
            leaving.cancel_scope.cancel()
        clients.start_soon(request_answers)
        await anyio.wait_all_tasks_blocked()
        await sample(1)
        assert got == [["answer 0", "answer 1"]]
        clients.start_soon(request_answers)  # The earlier request is complete, so an equal one is no retry of it.
        for number in (2, 3):
            await sample(number)
    session.end()
    assert got == [["answer 0", "answer 1"], ["answer 2", "answer 3"]]


@pytest.mark.anyio
async def test_countless_lists_are_refused_before_they_are_read_and_an_empty_key_is_none() -> None:
    sessions = EpisodeSessions()
    session, key = sessions.open()
    headers = {"authorization": f"Bearer {key}"}
    lists = b'{"model": "policy", "prompt": [' + b"[]," * MAX_JSON_VALUES + b"[]]}"
    body = {"model": "policy", "messages": [{"role": "user", "content": "1+1="}], "n": 2}
    transport = httpx.ASGITransport(make_app(sessions))
    async with httpx.AsyncClient(transport=transport, base_url="http://agents", headers=headers) as client:
        reply = await client.post("/v1/completions", content=lists)
        assert (reply.status_code, "lists, objects and keys" in reply.text) == (413, True)
        async with anyio.create_task_group() as calls:
            calls.start_soon(lambda: client.post("/v1/chat/completions", json=body, headers={"idempotency-key": ""}))
            for _ in range(2):
                with anyio.fail_after(5):
                    assert await session.next_call() is not None
                session.refuse(ApiError(400, "no"))
    session.end()


@pytest.mark.anyio
async def test_a_wrong_method_a_compressed_body_and_a_call_of_another_kind_are_named() -> None:
    sessions = EpisodeSessions()
    session, key = sessions.open()
    call = {"id": "1", "type": "custom", "function": {"name": "f", "arguments": "{}"}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "x"}]
    body = {"model": "policy", "messages": said}
    transport = httpx.ASGITransport(make_app(sessions))
    headers = {"authorization": f"Bearer {key}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://agents", headers=headers) as client:
        wrong = await client.get("/v1/chat/completions")
        packed = await client.post("/v1/chat/completions", json=body, headers={"content-encoding": "gzip"})
        custom = await client.post("/v1/chat/completions", json=body)
    session.end()
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert packed.status_code == 415
    assert "only functions can be called, but the type of a call is 'custom'" in custom.json()["error"]["message"]


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_stream_in_which_nothing_happens_is_kept_alive_by_comments() -> None:
    sent: list[tuple[float, bytes]] = []
    start = anyio.current_time()

    async def send(message: Any) -> None:
        sent.append((anyio.current_time() - start, message.get("body", b"start")))

    async with kept_alive(send) as forward:
        await anyio.sleep(2 * KEEP_ALIVE_S)
        await forward({"type": "http.response.start"})
        await anyio.sleep(0.9 * KEEP_ALIVE_S)
        await forward({"type": "http.response.body", "body": b"one", "more_body": True})
        await anyio.sleep(2.5 * KEEP_ALIVE_S)
        await forward({"type": "http.response.body", "body": b"two", "more_body": True})
        await forward({"type": "http.response.body", "body": b"end"})
        await anyio.sleep(2 * KEEP_ALIVE_S)
    assert [(round(when / KEEP_ALIVE_S, 6), body) for when, body in sent] == [
        (2, b"start"),
        (2.9, b"one"),
        (3.9, b": waiting\n\n"),
        (4.9, b": waiting\n\n"),
        (5.4, b"two"),
        (5.4, b"end"),
    ]


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_client_that_has_left_does_not_fail_a_stream_that_waits() -> None:
    async def send(message: Any) -> None:
        if message.get("body"):
            raise OSError("the client has left")

    async with kept_alive(send) as forward:
        await forward({"type": "http.response.start"})
        await anyio.sleep(3 * KEEP_ALIVE_S)
        with pytest.raises(OSError, match="has left"):
            await forward({"type": "http.response.body", "body": b"one", "more_body": True})
