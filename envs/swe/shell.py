"""ShellEnv: an environment in which each answer holds shell commands and each observation shows their output.

`ShellEnv` implements the turn. A subclass (`envs.swe.env`, `envs.adapters.harbor`) runs the commands in a sandbox and
judges the result. A line `submit` ends the work and has it judged. The work is also judged in its current state after
the last answer that is allowed, and after an answer that leaves no room for another one.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import AsyncExitStack
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from envs.judging.judge import Judge, SandboxOpener, shared_judge
from envs.judging.options import JudgePool, judge_pool_of
from envs.judging.programs import final_part, last_block
from envs.sandbox.api import MAX_TIMEOUT_S, Result
from envs.sandbox.open import open_sandboxes
from envs.sandbox.text import clipped, result_text, unusable_command
from flash.environment import EpisodeView, StepResult
from flash.errors import ConfigError, EnvError
from flash.types import Message, Observation

SUBMIT = "submit"
"""Line that ends the work."""
FENCES = ("bash", "sh", "shell")
"""Names of fenced blocks that hold commands."""

NOTHING = "There is no command in your answer: write it in a block that begins with ```bash."
"""Observation after an answer without commands. Without fenced blocks, only the text before the colon is shown."""


class ShellOrder(msgspec.Struct, frozen=True):
    """Content of an answer: commands, a submission, or both."""

    command: str = ""
    """Commands to run; empty: none."""
    submits: bool = False
    """True if the answer submits the work."""


def read_order(answer: str, *, fenced: bool) -> ShellOrder | None:
    """Return the commands of an answer, from its last block if `fenced`, else from the complete text.

    A last line `submit` of these commands submits the work. An answer that is only `submit`, apart from its reasoning,
    needs no block. Returns None if there are neither commands nor a submission.
    """
    text = last_block(answer, FENCES) if fenced else answer
    if text is None:
        text = SUBMIT if final_part(answer).strip() == SUBMIT else ""
    # Not `splitlines`: it also splits at characters that are part of a command, such as a form feed.
    lines = text.replace("\r\n", "\n").strip("\n").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    submits = bool(lines) and lines[-1].strip() == SUBMIT
    command = "\n".join(lines[:-1] if submits else lines)
    order = ShellOrder(command if command.strip() else "", submits)
    return order if order.command or submits else None


class ShellOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Options for the turns, and for the sandboxes that the policy may use.

    Raises:
        ConfigError: an option is wrong. The message names it, with the given value and the expected one.
    """

    turns: int = 32
    """Number of answers in an episode."""
    command_timeout: float = 60.0
    """Seconds that the commands of one answer may take."""
    output: int = 4000
    """Characters shown of the commands' output: the first half and the last half."""
    sandboxes: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options of the pool of sandboxes: see `envs.judging.options.JudgePool`. An episode holds a sandbox from its first
    answer to its last."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        for name, least in (("turns", 1), ("command_timeout", 0.1), ("output", 100)):
            value = getattr(self, name)
            if not value >= least:
                raise ConfigError(f"{name} must be at least {least}, but is {value!r}")
        if self.command_timeout > MAX_TIMEOUT_S:
            raise ConfigError(f"command_timeout can be at most {MAX_TIMEOUT_S:g}, but is {self.command_timeout!r}")
        _ = self.pool  # Parsed now, so that its faults are found here.

    @functools.cached_property
    def pool(self) -> JudgePool:
        """The pool's options: `sandboxes`, and defaults for the rest."""
        return judge_pool_of(self.sandboxes)


_Options = TypeVar("_Options", bound=ShellOptions)
_Task = TypeVar("_Task")


class ShellEnv(ABC, Generic[_Options, _Task]):
    """Environment of one task in a shell. The `reset` of a subclass sets `_task`.

    The rollout node makes one object for each episode.
    """

    opener: ClassVar[SandboxOpener] = staticmethod(open_sandboxes)
    """Function that opens the sandboxes of a node."""

    fenced = True
    """True if commands stand in fenced blocks; False if the complete answer is commands."""

    def __init__(self, options: _Options) -> None:
        self._options = options
        self._task: _Task | None = None
        """Task of the episode; None before `reset`."""
        self._episode: EpisodeView | None = None
        """View of the episode's tokens and turns, from `inform`."""
        self._resources = AsyncExitStack()
        """Stack on which a subclass puts the policy's sandbox. `close` closes it, which returns the sandbox."""
        self._counts = {"turns": 0, "no_command": 0, "command_timeouts": 0}
        """Metrics of the episode: answers, answers without a command, and commands that were stopped."""

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode, which knows how many tokens and turns are left.

        `step` needs it to judge the work before the run's limits end the episode. The rollout node calls this before
        `reset`; without it, no limits of the run are known.
        """
        self._episode = episode

    async def step(self, action: str) -> StepResult:
        """Run the commands of an answer and return their output, or judge the work if this was the last answer.

        Returns (observation, reward, terminated, truncated, info).

        Raises:
            EnvError: `reset` was not called before, or judging failed.
            SandboxError: the policy's sandbox cannot be borrowed or has failed.
        """
        if self._task is None:
            raise EnvError("step() was called before reset()")
        self._counts["turns"] += 1
        order = read_order(action, fenced=self.fenced)
        # Shown unless the answer has a command.
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
            # Without room for another answer, the run would cut the episode, and the work would get no reward.
            await self._episode.prepare(shown)  # renders a large observation in a thread, so that `room` is fast
            if self._episode.turns_left < 1 or self._episode.room(shown) < 1:
                return await self._judged(self._task, truncated=True)
        return shown, 0.0, False, False, {}

    async def close(self) -> None:
        """Return the sandbox to its pool."""
        await self._resources.aclose()

    @abstractmethod
    async def _run(self, task: _Task, command: str) -> Result:
        """Run commands in the policy's sandbox, for at most `command_timeout` seconds."""

    @abstractmethod
    async def _judged(self, task: _Task, *, truncated: bool) -> StepResult:
        """Judge the work in its current state, and return the result of the episode's last step.

        `truncated` is True if the run's limits end the work, and not the policy or the option `turns`.
        """

    def _shown(self, text: str) -> Observation:
        """Return a text as an observation: a message of the user. A subclass may show plain text."""
        return [Message("user", text)]

    async def _judge(self) -> Judge:
        """Return this node's judge, which holds the pool of sandboxes. The first call on the node opens the pool."""
        return await shared_judge(self._options.pool, type(self).opener)
