"""Fixtures for tests of environments and agents."""

from __future__ import annotations

import json

import httpx
import pytest


@pytest.fixture(scope="session")
def openai_models() -> None:
    """Let the official client read one stream of the Responses API, which no server sends.

    The client builds its pydantic models when it reads the first event in a process. That takes half a second of CPU
    time, for which an event loop of a test would be blocked.
    """
    import openai

    response = {"id": "1", "object": "response", "created_at": 0, "model": "policy", "output": [], "tools": []}
    response |= {"parallel_tool_calls": True, "tool_choice": "auto"}
    events = [
        {"type": "response.created", "sequence_number": 0, "response": response | {"status": "in_progress"}},
        {"type": "response.completed", "sequence_number": 1, "response": response | {"status": "completed"}},
    ]
    text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, text=text)
    with (
        httpx.Client(transport=httpx.MockTransport(lambda _: answer)) as http,
        openai.OpenAI(base_url="http://localhost/v1", api_key="none", http_client=http) as client,
        client.responses.stream(model="policy", input="5?") as stream,
    ):
        stream.get_final_response()
