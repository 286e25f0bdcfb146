"""The tools of a server of the Model Context Protocol, which is started as a program and talked with over its pipes.

Each episode has a process of its own, in a task of the node. It runs on this machine with the rights of the run,
outside of any sandbox, and is given what the policy writes: name only servers that may be given anything.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import anyio
import anyio.to_thread
import msgspec

from envs.tools.runner import Runner, ToolPlace, within
from flash.errors import ConfigError, EnvError
from flash.waiting import first_error

START_S = 60.0
"""Seconds for a server to start and to name its tools."""
COMPLAINT = 500
"""Characters shown of what a server that failed complained of, from the end."""


class McpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which server.

    Raises:
        ConfigError: there is no command, or the package `mcp` is missing.
    """

    command: list[str]
    """The program and its arguments."""
    env: dict[str, str] = {}
    """Variables beside HOME, PATH and the like."""
    timeout: float = 30.0
    """Seconds for one call."""
    repeatable: bool = False
    """Its answers follow from the calls before them, so that they may be used again (`cache`)."""

    def __post_init__(self) -> None:
        if not self.command:
            raise ConfigError("`command` is empty: expected a program and its arguments")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")


class McpServer:
    """All tools of one server."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._session: Any = None
        self._why = ""
        """How it failed."""
        self._listed: list[dict[str, Any]] = []
        self._settled = anyio.Event()
        self._ending = anyio.Event()
        self._over = anyio.Event()
        self._scope = anyio.CancelScope()
        """Of its life."""
        self._begun = False

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """Start the server, and ask it for its tools.

        Raises:
            EnvError: it does not start, or does not answer.
        """
        (await place.tasks()).start_soon(self._live)
        self._begun = True
        with anyio.move_on_after(START_S):
            await self._settled.wait()
        if self._session is None:
            why = self._why or f"it did not answer within {START_S:g} s"
            raise EnvError(f"the MCP server `{self._options.command[0]}` does not start: {why}")
        state = f"mcp {self._options.command}" if self._options.repeatable else None
        return [self._runner(tool, state) for tool in self._listed]

    async def close(self) -> None:
        """End the server; one that has not named its tools by now is killed."""
        self._ending.set()
        if self._session is None:
            self._scope.cancel()
        if self._begun:
            await self._over.wait()

    def _runner(self, tool: dict[str, Any], state: str | None) -> Runner:
        name: str = tool["name"]

        async def call(arguments: dict[str, Any]) -> str:
            return await within(self._options.timeout, self._call(name, arguments))

        about = tool.get("description") or ""
        return Runner(
            name=name, description=about, parameters=tool["inputSchema"], call=call, state=state, changes=True
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._session.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise EnvError(f"the MCP server `{self._options.command[0]}` has ended") from error
            return f"error: {error.error.message}"
        return shown_result(plain(result))

    async def _live(self) -> None:
        """Keep the server until the episode ends; what fails before it has named its tools is kept for `open`."""
        with tempfile.TemporaryFile("w+") as complaints:
            try:
                with self._scope:
                    await self._serve(complaints)
            except Exception as error:  # the boundary to a program and a library that are not ours
                first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
                complaints.seek(0)
                said = complaints.read().strip()[-COMPLAINT:]
                self._why = f"{type(first).__name__}: {first}" + (f": {said}" if said else "")
            finally:
                self._settled.set()
                self._over.set()

    async def _serve(self, complaints: Any) -> None:
        try:
            # In a thread: it takes seconds.
            await anyio.to_thread.run_sync(import_module, "mcp")
        except ModuleNotFoundError as error:
            raise ConfigError("MCP servers need the package `mcp`, which comes with vLLM: pip install mcp") from error
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.types import PaginatedRequestParams

        program, *words = self._options.command
        server = StdioServerParameters(command=program, args=words, env=self._options.env)
        async with stdio_client(server, errlog=complaints) as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            cursor: str | None = None
            while True:
                page = plain(await session.list_tools(params=PaginatedRequestParams(cursor=cursor)))
                self._listed += page["tools"]
                cursor = page.get("nextCursor")
                if cursor is None:
                    break
            self._session = session
            self._settled.set()
            await self._ending.wait()


def plain(model: Any) -> dict[str, Any]:
    """Return an answer as the protocol spells it."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def shown_result(result: dict[str, Any]) -> str:
    """Return the result of a call as the policy reads it: its pieces, or its structured form where these are empty."""
    text = "\n".join(map(_text, result.get("content", [])))
    if not text and "structuredContent" in result:
        text = msgspec.json.encode(result["structuredContent"]).decode()
    return f"error: {text}" if result.get("isError") else text


def _text(block: dict[str, Any]) -> str:
    """Return the text of a piece; a picture, a sound or a file is named, with its address where it has one."""
    piece: dict[str, Any] = block.get("resource", block)
    if "text" in piece:
        return piece["text"]
    named = [block.get("type"), piece.get("title") or piece.get("name"), piece.get("uri"), piece.get("mimeType")]
    description = piece.get("description")
    return f"[{' '.join(filter(None, named))}]" + (f" {description}" if description else "")
