"""Tools of a server of the Model Context Protocol. The server is started as a program and uses its standard streams.

Each episode has its own process. A task of the node runs it, because the client of the package `mcp` must be opened and
closed in the same task, and an episode's `open` and `close` are called from different ones. The process runs on this
machine with the rights of the run and outside of any sandbox, and it receives the text that the policy writes. So
configure only servers that are safe with any input.
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
"""Seconds that a server has to start and to list its tools."""
STDERR_SHOWN = 500
"""Number of characters of a failed server's standard error in an error message, taken from its end."""


class McpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Command of the server, and limits.

    Raises:
        ConfigError: there is no command, or the timeout is not positive.
    """

    command: list[str]
    """Program and its arguments."""
    env: dict[str, str] = {}
    """Environment variables in addition to HOME, PATH and the like."""
    timeout: float = 30.0
    """Seconds that one call may take."""
    repeatable: bool = False
    """True if answers depend only on the earlier calls of the episode, so that they may be reused (`cache`)."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not self.command:
            raise ConfigError("`command` is empty: expected a program and its arguments")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, but is {self.timeout!r}")


class McpServer:
    """Toolset with all tools of one server."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._session: Any = None
        """Connection to the server; None until its tools are listed."""
        self._failure = ""
        """Reason why the server failed before its tools were listed; empty if it did not."""
        self._listed: list[dict[str, Any]] = []
        """Tools of the server, in the protocol's form."""
        self._settled = anyio.Event()
        """Set when the tools are listed, or when the server has failed."""
        self._ending = anyio.Event()
        """Set by `close`: the server's task should end the server."""
        self._over = anyio.Event()
        """Set when the server's task is over."""
        self._scope = anyio.CancelScope()
        """Scope of the server's task, from its start to its end."""
        self._begun = False
        """True if the server's task was started, so that `close` must wait for its end."""

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """Start the server in a task of its own, and wait for its list of tools. `place` gives the task group.

        If this is cancelled, `close` ends the server.

        Raises:
            EnvError: the server does not start, or does not answer within `START_S`.
        """
        (await place.tasks()).start_soon(self._run_server)
        self._begun = True
        with anyio.move_on_after(START_S):
            await self._settled.wait()
        if self._session is None:
            why = self._failure or f"it did not answer within {START_S:g} s"
            raise EnvError(f"the MCP server `{self._options.command[0]}` does not start: {why}")
        state = f"mcp {self._options.command}" if self._options.repeatable else None
        return [self._runner(tool, state) for tool in self._listed]

    async def close(self) -> None:
        """End the server and wait for its end. A server that has not listed its tools yet is killed."""
        self._ending.set()
        if self._session is None:
            self._scope.cancel()
        if self._begun:
            await self._over.wait()

    def _runner(self, tool: dict[str, Any], state: str | None) -> Runner:
        """Return one tool of the server as a function of the policy. It is assumed to change the server's state.

        `tool` is an entry of `_listed`, and `state` the value for `Runner.state`.
        """
        name: str = tool["name"]

        async def call(arguments: dict[str, Any]) -> str:
            """Call the tool at the server, within the option `timeout`."""
            return await within(self._options.timeout, self._call(name, arguments))

        about = tool.get("description") or ""
        return Runner(
            name=name, description=about, parameters=tool["inputSchema"], call=call, state=state, changes=True
        )

    async def _call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text. Errors that the server reports are part of the text.

        Raises:
            EnvError: the server has ended.
        """
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED

        try:
            result = await self._session.call_tool(name, arguments)
        except MCPError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise EnvError(f"the MCP server `{self._options.command[0]}` has ended") from error
            return f"error: {error.error.message}"
        return shown_result(plain(result))

    async def _run_server(self) -> None:
        """Run the server until the episode ends. The body of the task that `open` starts.

        It is unblocked by `close`. An error before the tools are listed is kept for `open`, with the end of the
        server's standard error. It raises nothing, because an error would cancel all tasks of the node's task group.
        """
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as stderr:
            try:
                with self._scope:
                    await self._connect(stderr)
            except Exception as error:  # boundary to a foreign program and a foreign library
                first = first_error(error) if isinstance(error, BaseExceptionGroup) else error
                stderr.seek(0)
                shown_error = stderr.read().strip()[-STDERR_SHOWN:]
                self._failure = f"{type(first).__name__}: {first}" + (f": {shown_error}" if shown_error else "")
            finally:
                self._settled.set()
                self._over.set()

    async def _connect(self, stderr: Any) -> None:
        """Start the server, list its tools page by page, and keep it until `close` is called.

        `stderr` is the file for the server's standard error. Sets `_listed`, then `_session`, then `_settled`.

        Raises:
            ConfigError: the package `mcp` is not installed.
            Exception: any error of the package or of the server.
        """
        try:
            # In a thread, because the import takes seconds.
            await anyio.to_thread.run_sync(import_module, "mcp")
        except ModuleNotFoundError as error:
            raise ConfigError("MCP servers need the package `mcp`, which comes with vLLM: pip install mcp") from error
        from mcp import ClientSession, StdioServerParameters, stdio_client
        from mcp.types import PaginatedRequestParams

        program, *words = self._options.command
        server = StdioServerParameters(command=program, args=words, env=self._options.env)
        async with stdio_client(server, errlog=stderr) as (read, write), ClientSession(read, write) as session:
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
    """Return a message of the package `mcp` as JSON values, with the protocol's own names: `inputSchema`, `isError`."""
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def shown_result(result: dict[str, Any]) -> str:
    """Return the result of a call as text: its content, or its structured form as JSON if the content is empty."""
    text = "\n".join(map(_text, result.get("content", [])))
    if not text and "structuredContent" in result:
        text = msgspec.json.encode(result["structuredContent"]).decode()
    return f"error: {text}" if result.get("isError") else text


def _text(block: dict[str, Any]) -> str:
    """Return the text of a content block. A picture, a sound or a file is replaced by its name and its address."""
    piece: dict[str, Any] = block.get("resource", block)
    if "text" in piece:
        return piece["text"]
    named = [block.get("type"), piece.get("title") or piece.get("name"), piece.get("uri"), piece.get("mimeType")]
    description = piece.get("description")
    return f"[{' '.join(filter(None, named))}]" + (f" {description}" if description else "")
