"""What an episode gives its tools: one sandbox, begun when it is first used, and a place for tasks of their own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import msgspec
from anyio.abc import TaskGroup

from envs.judging.judge import Judge, SandboxOpener, shared_judge
from envs.judging.options import JudgePool
from envs.sandbox.api import Spec
from envs.sandbox.sandbox import Sandbox
from flash.environment import shared

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
