"""What a tool is: a name, a schema, and a coroutine that takes arguments and gives text.

A toolset makes the runners of one episode. What it needs of the node, a sandbox or a place for tasks of its own, it
finds in the episode's `ToolPlace`. A fault that the policy can do something about, such as a file that is not there, is
part of the text; what is wrong with the infrastructure is raised.
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
from flash.service.tools import Function, described
from flash.types import Tool

SANDBOX = "sandbox"
"""The state of the tools that share the episode's sandbox."""


TASKS = "envs.tools"
"""What the tasks of a node's tools are shared under."""


class ToolSandboxes(msgspec.Struct, frozen=True):
    """Where the tools of an environment run."""

    spec: Spec
    pool: JudgePool
    opener: SandboxOpener


class ToolPlace:
    """One episode's."""

    def __init__(self, work: ToolSandboxes) -> None:
        self._work = work
        self._held = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._one = anyio.Lock()

    async def sandbox(self) -> Sandbox:
        """The episode's sandbox.

        Raises:
            SandboxError: it cannot be had.
        """
        async with self._one:  # calls of one turn arrive together
            if self._sandbox is None:
                judge: Judge = await shared_judge(self._work.pool, self._work.opener)
                borrowed = judge.sandboxes.borrow(self._work.spec, self._work.pool.wait)
                self._sandbox = await self._held.enter_async_context(borrowed)
            return self._sandbox

    async def tasks(self) -> TaskGroup:
        """Tasks of the node, which a tool ends itself."""
        return await shared(TASKS, _open_tasks)

    async def close(self) -> None:
        """Give the sandbox back."""
        await self._held.aclose()


@asynccontextmanager
async def _open_tasks() -> AsyncGenerator[TaskGroup]:
    async with anyio.create_task_group() as tasks:
        yield tasks
        tasks.cancel_scope.cancel()


class Cut(str):
    """The answer of a call that was ended by its deadline: nobody knows what it had done by then."""


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    """One function that the policy may call."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object."""
    call: Callable[[dict[str, Any]], Awaitable[str]]
    """Carries it out. Ends within the tool's own deadline."""
    state: str | None = ""
    """What its answer depends on beside the arguments: nothing, what calls with the same name here have led to, or, by
    None, things that cannot be known, so that no answer is used again."""
    changes: bool = False
    """It may change that."""

    @property
    def tool(self) -> Tool:
        """As chat templates take it."""
        return described(Function(self.name, self.description, self.parameters))


@runtime_checkable
class Toolset(Protocol):
    """Some tools of one episode. Its class is called with the options of the configuration."""

    async def open(self, place: ToolPlace) -> Sequence[Runner]:
        """The tools. Raises FlashError where they cannot be had."""
        ...

    async def close(self) -> None:
        """Release what they hold. Called once, also when `open` has failed."""
        ...


def schema(**properties: str) -> dict[str, Any]:
    """The schema of required arguments that are text: each name with what it means."""
    described = {name: {"type": "string", "description": meaning} for name, meaning in properties.items()}
    return {"type": "object", "properties": described, "required": list(properties)}


async def within(seconds: float, answer: Awaitable[str]) -> str:
    """The answer, or a `Cut` that says that there was none in time."""
    with anyio.move_on_after(seconds):
        return await answer
    return Cut(f"error: no answer within {seconds:g} s")
