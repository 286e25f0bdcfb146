"""Tools in the episode's sandbox: Python, a shell, files. All of them share the sandbox's working directory.

The configuration names a class of this module as a toolset; `envs.tools.env` opens it for each episode.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from envs.sandbox.api import MAX_TIMEOUT_S, Result
from envs.sandbox.sandbox import Sandbox
from envs.sandbox.text import result_text, unusable_command, unusable_path
from envs.tools.runner import SANDBOX, Cut, Runner, ToolPlace, schema, within
from flash.errors import ConfigError, SandboxFileError, SandboxLimitError, encodable

READ_BYTES = 1 << 18
"""Most bytes of a file that `read_file` reads. The rest of a larger file is not shown."""


class CommandOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limit of a call's duration.

    Raises:
        ConfigError: the timeout is not positive, or longer than a day.
    """

    timeout: float = 10.0
    """Seconds that one call may take."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not 0 < self.timeout <= MAX_TIMEOUT_S:
            raise ConfigError(
                f"timeout must be a positive number of seconds, at most {MAX_TIMEOUT_S:g}, but is {self.timeout!r}"
            )


class Python:
    """Toolset with `python(code)`: runs a program in a new process."""

    def __init__(self, options: CommandOptions) -> None:
        self._options = options

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """Return the tool."""

        async def call(arguments: dict[str, Any]) -> str:
            """Run the program of a call and return its output. Raises SandboxError if the sandbox fails."""
            sandbox = await place.sandbox()
            code = arguments["code"].encode("utf-8", "replace")
            return await _command_result(sandbox.run(["python3", "-"], timeout=self._options.timeout, stdin=code))

        about = "Runs a Python program and gives what it prints. Files stay for later calls, variables do not."
        code = schema(code="The program.")
        return [Runner(name="python", description=about, parameters=code, call=call, state=SANDBOX, changes=True)]

    async def close(self) -> None:
        """Do nothing: no resource is held."""


class Bash:
    """Toolset with `bash(command)`: runs shell commands in a new process."""

    def __init__(self, options: CommandOptions) -> None:
        self._options = options

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """Return the tool."""

        async def call(arguments: dict[str, Any]) -> str:
            """Run the command of a call and return its output; an unusable command gets an error text.

            Raises SandboxError if the sandbox fails.
            """
            if fault := unusable_command(arguments["command"]):
                return fault
            sandbox = await place.sandbox()
            # Output and errors are joined, so that the policy sees them in the order in which they were written.
            command = f"exec 2>&1; {arguments['command']}"
            return await _command_result(sandbox.run(command, timeout=self._options.timeout))

        about = "Runs shell commands and gives what they write. Files stay for later calls, nothing else does."
        command = schema(command="One or more lines of shell.")
        return [Runner(name="bash", description=about, parameters=command, call=call, state=SANDBOX, changes=True)]

    async def close(self) -> None:
        """Do nothing: no resource is held."""


class FileTools:
    """Toolset with `read_file(path)`, `write_file(path, text)` and `list_files(path)`."""

    def __init__(self, options: CommandOptions) -> None:
        self._options = options

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """Return the three tools."""

        async def read(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
            """Return the text of the file `path`: at most `READ_BYTES` of it."""
            return (await sandbox.read(arguments["path"], limit=READ_BYTES)).decode("utf-8", "replace")

        async def write(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
            """Replace the file `path` by `text`."""
            await sandbox.write(arguments["path"], arguments["text"].encode("utf-8", "replace"))
            return "written"

        async def entries(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
            """Return the names in the folder `path`, one per line; names of folders end with a slash."""
            found = await sandbox.list(arguments["path"])
            return encodable("\n".join(f"{entry.name}/" if entry.kind == "folder" else entry.name for entry in found))

        path, text = "Relative to the working directory.", "All of the file."
        return [
            self._runner(place, "read_file", "Gives the text of a file.", schema(path=path), read, changes=False),
            self._runner(place, "write_file", "Writes a file.", schema(path=path, text=text), write, changes=True),
            self._runner(place, "list_files", "Lists a folder.", schema(path=path), entries, changes=False),
        ]

    def _runner(
        self,
        place: ToolPlace,
        name: str,
        description: str,
        parameters: dict[str, Any],
        work: Callable[[Sandbox, dict[str, Any]], Awaitable[str]],
        *,
        changes: bool,
    ) -> Runner:
        """Return a tool whose argument `path` is checked before the sandbox is used.

        An error of the file or of a limit of the sandbox is the tool's result: the policy caused it and can act on it.

        Args:
            place: resources of the episode, with its sandbox.
            name: name of the tool for the policy.
            description: description of the tool for the policy.
            parameters: JSON schema of the arguments, one of which is `path`.
            work: function that carries out a call in the sandbox, with these arguments.
            changes: True if the tool changes files.
        """

        async def call(arguments: dict[str, Any]) -> str:
            """Check the path of a call, carry it out, and return its result or the error text.

            Raises SandboxError if the sandbox fails for another reason.
            """
            if fault := unusable_path(arguments["path"]):
                return fault
            sandbox = await place.sandbox()
            try:
                return await within(self._options.timeout, work(sandbox, arguments))
            except (SandboxFileError, SandboxLimitError) as error:
                return f"error: {error}"

        return Runner(
            name=name, description=description, parameters=parameters, call=call, state=SANDBOX, changes=changes
        )

    async def close(self) -> None:
        """Do nothing: no resource is held."""


async def _command_result(running: Awaitable[Result]) -> str:
    """Wait for a command and return its result as text: a `Cut` if its time ran out.

    A limit of the sandbox that the policy has hit is also a result. Raises SandboxError if the sandbox fails.
    """
    try:
        result = await running
    except SandboxLimitError as error:
        return f"error: {error}"
    return Cut(result_text(result)) if result.timed_out else result_text(result)
