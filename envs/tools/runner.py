"""Interface of tools. A tool has a name, a schema, and a coroutine function that takes arguments and returns text.

`ToolEnv` opens the toolsets that the configuration names, for each episode, and closes them at its end.

A toolset makes the runners of one episode. The `ToolPlace` of the episode gives it the resources of the node that it
needs: a sandbox, or a group for its own tasks. A fault that the policy can act on, such as a missing file, is part of
the returned text. A fault of the infrastructure is raised.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Protocol, runtime_checkable

import anyio
import msgspec
from anyio.abc import TaskGroup

from envs.judging.judge import Judge, SandboxOpener, shared_judge
from envs.judging.options import JudgePool
from envs.sandbox.api import Spec
from envs.sandbox.sandbox import Sandbox
from flash.environment import shared
from flash.service.tools import Function, as_tool
from flash.types import Tool

SANDBOX = "sandbox"
"""Value of `Runner.state` for the tools that share the episode's sandbox."""

TASKS = "envs.tools"
"""Key under which the tools of a node share their task group."""


class ToolSandboxes(msgspec.Struct, frozen=True):
    """Sandboxes in which the tools of an environment run: their description, pool and opener."""

    spec: Spec
    """Kind of the sandboxes."""
    pool: JudgePool
    """Options of the node's pool that lends them."""
    opener: SandboxOpener
    """Function that opens the pool."""


class ToolPlace:
    """Resources for the tools of one episode: its sandbox, and the node's task group. `ToolEnv` makes and closes it."""

    def __init__(self, work: ToolSandboxes) -> None:
        self._work = work
        self._resources = AsyncExitStack()
        """Stack with the borrowed sandbox, which `close` returns."""
        self._sandbox: Sandbox | None = None
        """Sandbox of the episode; None until the first call that needs it."""
        self._borrowing = anyio.Lock()
        """Lock around the borrowing of the sandbox."""

    async def sandbox(self) -> Sandbox:
        """Return the episode's sandbox. The first call borrows it, so that an episode without such calls needs none.

        Raises:
            SandboxError: no sandbox is available.
        """
        async with self._borrowing:  # the calls of one turn arrive together, and must not borrow two sandboxes
            if self._sandbox is None:
                judge: Judge = await shared_judge(self._work.pool, self._work.opener)
                borrowed = judge.sandboxes.borrow(self._work.spec, self._work.pool.wait)
                self._sandbox = await self._resources.enter_async_context(borrowed)
            return self._sandbox

    async def tasks(self) -> TaskGroup:
        """Return a task group of the node, for tasks that outlive a call.

        A toolset must end the tasks that it starts.
        """
        return await shared(TASKS, _open_tasks)

    async def close(self) -> None:
        """Return the sandbox to its pool."""
        await self._resources.aclose()


@asynccontextmanager
async def _open_tasks() -> AsyncGenerator[TaskGroup]:
    """Provide the task group of the node, in the form that `shared` takes. Remaining tasks are cancelled at its end."""
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()  # the node ends


class Cut(str):
    """Answer of a call that its deadline ended. It is unknown which of the call's effects have happened.

    It is a text for the policy like any other answer. By its type, `ToolEnv` counts such calls, and
    `envs.tools.memory` does not reuse their answers.
    """


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the policy may call."""

    name: str
    """Name by which the policy calls the function."""
    description: str
    """Description that the policy is shown."""
    parameters: dict[str, Any]
    """JSON schema of the arguments; its type is object."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Coroutine function that carries out a call. It must end within the tool's own deadline."""
    state: str | None = ""
    """State on which answers depend, besides the arguments. Empty: none. A name: all earlier calls of the episode in
    the state of this name. None: unknown, so that no answer is reused."""
    changes: bool = False
    """True if a call may change the state."""

    @property
    def tool(self) -> Tool:
        """The function in the form that chat templates take."""
        return as_tool(Function(self.name, self.description, self.parameters))


@runtime_checkable
class Toolset(Protocol):
    """Tools of one episode. The class is called with the options of the configuration."""

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """Return the tools. Raises FlashError if they cannot be opened."""
        ...

    async def close(self) -> None:
        """Release all resources. Called once, also if `open` has failed."""
        ...


def schema(**properties: str) -> dict[str, Any]:
    """Return a schema whose arguments are all required texts. Each keyword is an argument with its description."""
    as_tool = {name: {"type": "string", "description": meaning} for name, meaning in properties.items()}
    return {"type": "object", "properties": as_tool, "required": list(properties)}


async def within(seconds: float, answer: Awaitable[str]) -> str:
    """Wait for an answer, and return it. Without one within `seconds`, cancel it and return a `Cut` with an error
    text. Raises the errors of `answer`."""
    with anyio.move_on_after(seconds):
        return await answer
    return Cut(f"error: no answer within {seconds:g} s")
