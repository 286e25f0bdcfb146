"""Work in a shell: each answer holds commands, what they wrote is shown, and a line `submit` has the work judged.

`ShellEnv` is the turn; what runs the commands, and who judges, is the environment's own. An answer that is the last one
that there may be, or that leaves no room for another one, is judged as things are.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from envs.judging.judge import Judge, SandboxOpener, shared_judge
from envs.judging.options import JudgePool, judge_pool_of
from envs.judging.programs import last_block
from envs.sandbox.api import Result
from envs.sandbox.explain import clipped, result_text, unusable_command
from envs.sandbox.open import open_sandboxes
from flash.environment import EpisodeView, StepResult
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

SUBMIT = "submit"
"""The line that ends the work."""
FENCES = ("bash", "sh", "shell")
"""Names of blocks that hold commands."""

NOTHING = "There is no command in your answer: write it in a block that begins with ```bash."
"""Where there are no blocks, up to the colon."""


class ShellOrder(msgspec.Struct, frozen=True):
    """What an answer asks for."""

    command: str = ""
    """To be run; empty: nothing."""
    submits: bool = False
    """The work is done then."""


def read_order(answer: str, *, fenced: bool) -> ShellOrder | None:
    """The commands of an answer, in its last block or, unless it is to be `fenced`, all of it. None: there are none."""
    text = last_block(answer, FENCES) if fenced else answer
    if text is None:
        text = answer if answer.strip() == SUBMIT else ""
    lines = text.strip("\n").splitlines()
    while lines and not lines[-1].strip():
        lines.pop()
    submits = bool(lines) and lines[-1].strip() == SUBMIT
    command = "\n".join(lines[:-1] if submits else lines)
    order = ShellOrder(command if command.strip() else "", submits)
    return order if order.command or submits else None


class ShellOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """What the policy may use.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    turns: int = 32
    """Answers of an episode."""
    command_timeout: float = 60.0
    """Seconds for the commands of one answer."""
    output: int = 4000
    """Characters shown of what they write: the first half and the last half."""
    sandboxes: dict[str, Any] = msgspec.field(default_factory=dict)
    """Where they run: see `envs.judging.options.JudgePool`. An episode holds one from its first answer to its last."""

    def __post_init__(self) -> None:
        for name, least in (("turns", 1), ("command_timeout", 0.1), ("output", 100)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"{name} must be at least {least}, but is {value!r}")
        _ = self.pool

    @functools.cached_property
    def pool(self) -> JudgePool:
        """The defaults, and `sandboxes`."""
        return judge_pool_of(self.sandboxes)


_Options = TypeVar("_Options", bound=ShellOptions)
_Task = TypeVar("_Task")


class ShellEnv(ABC, Generic[_Options, _Task]):
    """One task. `reset` sets `_task`."""

    opener: ClassVar[SandboxOpener] = staticmethod(open_sandboxes)
    """Opens the sandboxes of a node."""

    fenced = True
    """Whether commands stand in blocks, or are all of the answer."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._task: _Task | None = None
        self._episode: EpisodeView | None = None
        self._held = AsyncExitStack()
        """The policy's sandbox."""
        self._counts = {"turns": 0, "no_command": 0, "command_timeouts": 0}

    def inform(self, episode: EpisodeView) -> None:
        """Know of tokens: what a limit of the run would end is judged before."""
        self._episode = episode

    async def step(self, action: str) -> StepResult:
        """Run the commands, or judge."""
        if self._task is None:
            raise EnvError("step() was called before reset()")
        self._counts["turns"] += 1
        order = read_order(action, fenced=self.fenced)
        text = NOTHING if self.fenced else NOTHING.partition(":")[0]
        if order is None:
            self._counts["no_command"] += 1
        elif fault := unusable_command(order.command):
            text = fault
        elif order.command:
            result = await self._run(self._task, order.command)
            self._counts["command_timeouts"] += result.timed_out
            text = clipped(result_text(result), self._options.output)
        if (order is not None and order.submits) or self._counts["turns"] >= self._options.turns:
            return await self._judged(self._task, truncated=False)
        shown = self._shown(text)
        if self._episode is not None:
            await self._episode.prepare(shown)
            if self._episode.turns_left < 1 or self._episode.room(shown) < 1:
                return await self._judged(self._task, truncated=True)
        return shown, 0.0, False, False, {}

    async def close(self) -> None:
        """Give the sandbox back."""
        await self._held.aclose()

    @abstractmethod
    async def _run(self, task: _Task, command: str) -> Result:
        """Run commands in the policy's sandbox, for at most `command_timeout`."""

    @abstractmethod
    async def _judged(self, task: _Task, *, truncated: bool) -> StepResult:
        """Judge things as they are; the end of the episode."""

    def _shown(self, text: str) -> Observation:
        return [Message("user", text)]

    async def _judge(self) -> Judge:
        return await shared_judge(self._options.pool, type(self).opener)
