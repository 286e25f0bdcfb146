"""A real server of the Model Context Protocol, in a process of its own, made with the official package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from envs.judging.options import JudgePool
from envs.sandbox.api import Spec
from envs.tools.mcp_server import McpOptions, McpServer, plain, shown_result
from envs.tools.runner import ToolPlace, ToolSandboxes
from flash.environment import sharing
from flash.errors import EnvError
from tests.envs.sandboxes import ScriptedProvider

pytestmark = [pytest.mark.anyio, pytest.mark.integration]

PNG: dict[str, Any] = {"type": "image", "data": "aGk=", "mimeType": "image/png"}
LINK: dict[str, Any] = {"type": "resource_link", "name": "log", "uri": "file:///log.txt", "mimeType": "text/plain"}


@pytest.mark.parametrize(
    ("result", "shown"),
    [
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": [{"type": "text", "text": ""}]}, ""),
        ({"content": []}, ""),
        ({"content": [], "structuredContent": {"sum": 3, "of": None}}, '{"sum":3,"of":null}'),
        ({"content": [{"type": "text", "text": ""}], "structuredContent": {"sum": 3}}, '{"sum":3}'),
        ({"content": [], "structuredContent": {}}, "{}"),
        ({"content": [{"type": "text", "text": "three"}], "structuredContent": {"sum": 3}}, "three"),
        ({"content": [PNG]}, "[image image/png]"),
        ({"content": [{"type": "audio", "data": "aGk=", "mimeType": "audio/wav"}]}, "[audio audio/wav]"),
        ({"content": [LINK]}, "[resource_link log file:///log.txt text/plain]"),
        (
            {"content": [{**LINK, "description": "All of it."}]},
            "[resource_link log file:///log.txt text/plain] All of it.",
        ),
        ({"content": [{**LINK, "title": "The log"}]}, "[resource_link The log file:///log.txt text/plain]"),
        ({"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}]}, "inside"),
        ({"content": [{"type": "resource", "resource": {"uri": "file:///a", "text": ""}}]}, ""),
        (
            {"content": [{"type": "resource", "resource": {"uri": "file:///a", "blob": "aGk=", "mimeType": "a/b"}}]},
            "[resource file:///a a/b]",
        ),
        ({"content": [{"type": "text", "text": "no"}], "isError": True}, "error: no"),
        ({"content": [], "structuredContent": {"why": "x"}, "isError": True}, 'error: {"why":"x"}'),
    ],
)
def test_every_form_of_a_result_is_shown_with_all_that_it_says(result: dict[str, Any], shown: str) -> None:
    """The official package reads each form."""
    from mcp.types import CallToolResult

    assert shown_result(plain(CallToolResult.model_validate(result))) == shown


SERVER = """
import asyncio, os, sys
from mcp.server import MCPServer
server = MCPServer("numbers")
total = 0

@server.tool()
async def add(number: int) -> str:
    "Adds to the total."
    global total
    total += number
    return f"{total} in {os.getpid()}"

@server.tool()
async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "waited"

@server.tool()
def fail() -> str:
    raise ValueError("no such luck")

@server.tool()
def end() -> str:
    os._exit(1)

server.run("stdio")
"""


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.timeout(120)
async def test_tools_of_a_server_are_listed_called_and_ended_with_their_episode(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    place = ToolPlace(ToolSandboxes(Spec(image="none"), JudgePool(), ScriptedProvider().open))
    async with sharing("test"):
        server = McpServer(McpOptions(command=[sys.executable, str(tmp_path / "server.py")], timeout=2))
        runners = {runner.name: runner for runner in await server.open(place)}
        assert sorted(runners) == ["add", "end", "fail", "wait"]
        assert runners["add"].description == "Adds to the total."
        assert runners["add"].parameters["properties"]["number"]["type"] == "integer"
        assert (await runners["add"].call({"number": 2})).startswith("2 in ")
        total, _, pid = (await runners["add"].call({"number": 3})).split()
        assert total == "5"
        assert (await runners["fail"].call({})).startswith("error: ")
        assert (await runners["add"].call({"number": "x"})).startswith("error: ")
        assert await runners["wait"].call({"seconds": 60}) == "error: no answer within 2 s"
        results: list[str] = []

        async def one(seconds: float) -> None:
            results.append(await runners["wait"].call({"seconds": seconds}))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one, 0.1)
        assert results == ["waited"] * 3
        assert alive(int(pid))
        with pytest.raises(EnvError, match="has ended"):
            await runners["end"].call({})
        await server.close()
        assert not alive(int(pid))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["/nowhere/server"], "No such file or directory"),
        ([sys.executable, "-c", "raise SystemExit('no key')"], "no key"),
        ([sys.executable, "-c", r"import os; os.write(2, b'no \xff key'); raise SystemExit(1)"], "no \ufffd key"),
    ],
)
async def test_a_server_that_does_not_start_is_an_error_that_says_why(command: list[str], why: str) -> None:
    place = ToolPlace(ToolSandboxes(Spec(image="none"), JudgePool(), ScriptedProvider().open))
    async with sharing("test"):
        server = McpServer(McpOptions(command=command))
        with pytest.raises(EnvError, match=why):
            await server.open(place)
        await server.close()


async def test_a_server_that_never_answers_is_killed_when_its_episode_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    program = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    place = ToolPlace(ToolSandboxes(Spec(image="none"), JudgePool(), ScriptedProvider().open))
    async with sharing("test"):
        server = McpServer(McpOptions(command=[sys.executable, "-c", program]))
        async with anyio.create_task_group() as opening:
            opening.start_soon(server.open, place)
            with anyio.fail_after(60):
                while not (pid.exists() and pid.read_text()):  # noqa: ASYNC110 - another process writes it
                    await anyio.sleep(0.05)
            opening.cancel_scope.cancel()
        with anyio.fail_after(20):
            await server.close()
        assert not alive(int(pid.read_text()))
