"""Agents over a real port: the official client unmodified, programs, and what is no agent."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import httpx
import openai
import pytest

from envs.agent import ENDPOINT, open_endpoint
from envs.programs import OUTPUT_BYTES, run_command
from flash.environment import shared, sharing
from flash.errors import EnvError
from flash.service import app
from flash.types import Failure, Outcome, Trajectory
from tests.envs.agents import Policy, live, make, play

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, sys, openai
client = openai.OpenAI()
task = sys.stdin.read()
messages = [{"role": "user", "content": task}]
reply = client.chat.completions.create(model="policy", messages=messages)
if task == "13":
    sys.exit("no luck")
sys.stdout.write(reply.choices[0].message.content)
"""


def fast(text: str) -> Policy:
    return Policy(lambda _: [*text.encode(), 256], seconds=0.0)


async def trained(agent: Any, policy: Policy, **changes: Any) -> Trajectory:
    with anyio.fail_after(60):
        played = await play(agent, policy, in_process=False, **changes)
    assert isinstance(played, Trajectory), played
    return played


async def converses(base_url: str, api_key: str, task: str) -> str:
    """Four turns, two of them streamed, with the client's own messages as history."""
    said: list[str] = []
    messages: list[Any] = [{"role": "developer", "content": "be brief"}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        for turn in range(4):
            messages.append({"role": "user", "content": f"{task}, {turn}?"})
            if turn % 2:
                stream = await client.chat.completions.create(
                    model="policy", messages=messages, stream=True, stream_options={"include_usage": True}
                )
                chunks = [chunk async for chunk in stream]
                said.append("".join(one.delta.content or "" for chunk in chunks for one in chunk.choices))
                assert chunks[-1].usage is not None
                messages.append({"role": "assistant", "content": said[-1]})
            else:
                reply = await client.chat.completions.create(model="policy", messages=messages, temperature=1.0)
                said.append(reply.choices[0].message.content or "")
                messages.append(reply.choices[0].message)
    return "|".join(said)


async def test_the_official_client_converses_unmodified() -> None:
    played = await trained(make(f"{__name__}:converses"), fast("ñ🙂"))
    assert played.outcome == Outcome.OK
    assert played.turns[-1].note == "|".join(["ñ🙂"] * 4)
    assert [turn.observation for turn in played.turns[1:]] == [f"user: 5, {turn}?" for turn in range(1, 4)]


async def loses_its_connection(base_url: str, api_key: str, task: str) -> str:
    """Asks three times at once for the best answer, and one of the clients gives up and tries again."""
    said: list[str] = []

    async def one(timeout: float) -> None:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=timeout, max_retries=9) as client:
            reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task}])
        said.append(reply.choices[0].message.content or "")

    async with anyio.create_task_group() as calls:
        for timeout in (60, 0.3, 60):
            calls.start_soon(one, timeout)
    return "|".join(sorted(said))


async def test_a_client_that_tries_again_has_each_of_its_questions_answered_once() -> None:
    answers = iter("abc")
    policy = Policy(lambda _: [*next(answers).encode(), 256], seconds=0.2)
    played = await trained(make(f"{__name__}:loses_its_connection"), policy)
    assert played.turns[-1].note == "a|b|c"
    assert [turn.branch for turn in played.turns] == [0, 1, 2]


def blocks(base_url: str, api_key: str, task: str) -> str:
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        reply = client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task}])
    return reply.choices[0].message.content or ""


async def test_a_blocking_function_runs_in_a_thread() -> None:
    assert (await trained(make(f"{__name__}:blocks"), fast("fine"))).turns[-1].note == "fine"


async def test_the_agent_of_the_documents_works() -> None:
    page = (ROOT / "docs" / "agents.md").read_text()
    found = re.search(r"```python\n# my_agent.py\n(.*?)```", page, re.DOTALL)
    assert found is not None
    code = found.group(1)
    assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) == 5
    scope: dict[str, Any] = {}
    exec(code, scope)
    globals()["of_the_documents"] = scope["solve"]
    async with scope["CLIENT"]:
        assert (await trained(make(f"{__name__}:of_the_documents"), fast("fine"))).turns[-1].note == "fine"


@pytest.mark.slow
async def test_a_program_is_an_agent_too() -> None:
    command = [sys.executable, "-c", PROGRAM]
    assert (await trained(make(command=command), fast("fine"))).turns[-1].note == "fine"
    failed = await play(make(command=command), fast("fine"), 13, in_process=False)
    assert isinstance(failed, Failure)
    assert "ended with exit code 1: no luck" in failed.message


async def test_a_program_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    mark = f"{tmp_path}/mark"
    program = f"touch {mark}; sh -c 'sleep 1000; : {mark}' & sleep 1000; : {mark}"
    failed = await play(make(command=["sh", "-c", program]), fast("fine"), in_process=False, step_s=2)
    assert isinstance(failed, Failure)
    assert failed.outcome == Outcome.ENV_TIMEOUT
    assert await anyio.Path(mark).exists()
    assert processes_with(mark) == []


@pytest.mark.parametrize("start", ["", "setsid", "setsid -f"])
@pytest.mark.parametrize("end", ["echo fine", "sleep 1000"])
async def test_what_a_program_leaves_running_ends_with_it(start: str, end: str, tmp_path: Path) -> None:
    mark = f"{tmp_path}/mark"
    program = f"{start} sh -c 'touch {mark}; sleep 1000; : {mark}' & until [ -e {mark} ]; do sleep 0.1; done; {end}"
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:

            async def run() -> None:
                assert await run_command(["sh", "-c", program], "", "", "") == "fine\n"
                assert end == "echo fine"

            tasks.start_soon(run)
            if end != "echo fine":
                while not await anyio.Path(mark).exists():  # noqa: ASYNC110  # another process makes it
                    await anyio.sleep(0.05)
                tasks.cancel_scope.cancel()
    assert processes_with(mark) == []


async def test_a_program_that_is_not_there_or_is_killed_is_told_as_such() -> None:
    with pytest.raises(EnvError, match="`no-such-program` ended with exit code 127: No such file or directory"):
        await run_command(["no-such-program"], "", "", "")
    with pytest.raises(EnvError, match="`sh` ended with exit code -11"):
        await run_command(["sh", "-c", "kill -SEGV $$"], "", "", "")


async def test_a_lone_surrogate_in_a_task_reaches_a_program_as_a_question_mark() -> None:
    assert await run_command(["cat"], "", "", "a\ud800") == "a?"


async def test_an_answer_that_is_too_long_is_an_error_and_not_cut() -> None:
    assert len(await run_command(["sh", "-c", f"head -c {OUTPUT_BYTES} /dev/zero"], "", "", "")) == OUTPUT_BYTES
    with pytest.raises(EnvError, match="`sh` wrote more than 1048576 bytes to its standard output"):
        await run_command(["sh", "-c", f"head -c {OUTPUT_BYTES + 1} /dev/zero"], "", "", "")


def processes_with(word: str) -> list[Path]:
    return [path for path in Path("/proc").glob("[0-9]*/cmdline") if word.encode() in _read(path)]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


async def hostile(base_url: str, api_key: str, task: str) -> str:
    """Everything that is no request, and then one."""
    good = {"authorization": f"Bearer {api_key}"}
    place = f"{base_url}/chat/completions"
    async with httpx.AsyncClient(timeout=30) as client:
        for headers in ({}, {"authorization": "Bearer x"}, {"authorization": api_key}, {"x-api-key": api_key}):
            reply = await client.post(place, json={}, headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        for path in ("chat/completions", "completions", "responses", "episode/reward"):
            for body in (b"", b"{", b"\xff" * 100, b"[" * 100_000, b'{"model": "policy"}', b"x" * 1_000_000):
                reply = await client.post(f"{base_url}/{path}", content=body, headers=good)
                assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
        reply = await client.post(place, content=b" " * (app.BODY_BYTES + 1), headers=good)
        assert reply.status_code == 413
        for method, url, status in (
            ("GET", place, 405),
            ("POST", f"{base_url}/embeddings", 404),
            ("GET", f"{base_url}/models/gpt-4o", 404),
            ("GET", f"{base_url}/models/policy", 200),
            ("GET", f"{base_url}/../../etc/passwd", 404),
        ):
            reply = await client.request(method, url, headers=good)
            assert reply.status_code == status
            assert "error" in reply.json() or status == 200
    address = urlsplit(base_url)
    assert address.hostname == "127.0.0.1"
    assert address.port is not None
    for raw in (b"\x16\x03\x01\x02", b"GET / HTTP/9.9\r\n\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"):
        async with await anyio.connect_tcp(address.hostname, address.port) as stream:
            await stream.send(raw)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": task}])
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "x" * 9000}])
        assert long.value.code == "context_length_exceeded"
        reply = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": task}])
    return reply.choices[0].message.content or ""


async def test_hostile_requests_are_refused_and_the_agent_goes_on() -> None:
    played = await trained(make(f"{__name__}:hostile"), fast("still here"))
    assert (played.turns[-1].note, len(played.turns)) == ("still here", 1)


async def test_a_key_is_of_no_use_for_another_episode() -> None:
    async with sharing("test"):
        host = await shared(ENDPOINT, open_endpoint)
        _, old = host.sessions.open()
        host.sessions.close(old)
        session, new = host.sessions.open()
        async with httpx.AsyncClient(base_url=host.url) as client:
            for key, status in ((old, 401), (new, 200)):
                reply = await client.get("models", headers={"authorization": f"Bearer {key}"})
                assert reply.status_code == status
        session.end()


@pytest.mark.slow
async def test_many_agents_at_once_get_their_own_answers() -> None:
    def echo(request: Any) -> list[int]:
        shown = bytes(token for token in request.prompt if token < 256).decode()
        return [*shown.rpartition("be brief")[2].partition(",")[0].encode(), 256]

    notes: dict[int, str] = {}

    async def one(seed: int) -> None:
        played = await live(make(f"{__name__}:converses"), Policy(echo, seconds=0.01), seed)
        assert isinstance(played, Trajectory)
        notes[seed] = played.turns[-1].note

    async with sharing("test"), anyio.create_task_group() as episodes:
        for seed in range(16):
            episodes.start_soon(one, seed)
    assert notes == {seed: "|".join([str(seed)] * 4) for seed in range(16)}
