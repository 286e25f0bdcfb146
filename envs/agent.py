"""Agent: a program that is not ours, which takes the policy for an endpoint of the OpenAI API.

The inverted environment: what the agent asks first is what `reset` shows, our answer to it is the action, and what it
appends and asks next is the observation of the step. Another environment gives the task and judges what the agent
returns. `flash.service` is the endpoint; each episode has a key of its own, which ends with it.

An episode is one conversation in which messages are only appended. An agent that rewrites or drops what was said, or
asks twice at once, ends its episode as `branched`. One that fails is an error of the environment, unless what failed it
is a limit of the run: then the episode is truncated, and judged on an empty answer.
"""

from __future__ import annotations

import inspect
import os
import signal
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import cached_property
from subprocess import PIPE
from typing import Any, cast

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import ByteReceiveStream, TaskGroup

from envs.sandbox.service.limits import Limits
from envs.sandbox.service.server import Address, open_socket, serving
from flash.config.objects import check_options, load_environment, load_object
from flash.environment import (
    Environment,
    EpisodeView,
    Info,
    Prepared,
    SolvedExample,
    StepResult,
    SyncEnvironment,
    WarmStart,
    shared,
    wrap,
)
from flash.environment.results import check_reset_result, check_step_result
from flash.errors import ConfigError, EnvError
from flash.service.app import make_app
from flash.service.chat import Answer, ApiError
from flash.service.sessions import Call, Session, Sessions
from flash.types import Message

HOST = "envs.agent"
"""What the episodes of a node share their endpoint under."""

LIMITS = Limits(strangers=4096)
"""Of the endpoint's server: all agents of a node may arrive at once, before any of them has shown its key."""

OUTPUT_BYTES = 1 << 20
"""Kept of what a command writes, from its beginning."""

STDERR_SHOWN = 500
"""Characters shown of what a command that failed complained of, from the end."""

Function = Callable[[str, str, str], Awaitable[str] | str]
"""`(base_url, api_key, task)`; returns the answer."""


class Tasks(msgspec.Struct, frozen=True):
    """The environment that gives tasks and judges answers."""

    path: str
    """`module:Class`. It shows text, and one step ends it."""
    options: dict[str, Any] = msgspec.field(default_factory=dict)


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Which agent, and what it is to do.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    tasks: dict[str, Any]
    """A table with the `path` of the environment's class that gives tasks and judges answers, and its `options`."""
    function: str | None = None
    """`module:function` of `(base_url, api_key, task)`, which returns the answer; `async def`, or run in a thread."""
    command: list[str] | None = None
    """Or a program and its arguments. It has OPENAI_BASE_URL and OPENAI_API_KEY in its environment, reads the task from
    its standard input and writes the answer to its standard output."""

    def __post_init__(self) -> None:
        if (self.function is None) == (self.command is None):
            raise ConfigError("expected one of `function` and `command`: they say what the agent is")
        if self.command is not None and not self.command:
            raise ConfigError("`command` is empty: expected a program and its arguments")

    @cached_property
    def environment(self) -> tuple[type[Any], dict[str, Any]]:
        """The class that gives tasks, and its keyword arguments."""
        tasks = Tasks(**check_options(Tasks, self.tasks, "tasks"))
        try:
            kind = load_environment(tasks.path)
        except ConfigError as error:
            raise ConfigError(f"`tasks.path`: {error}") from error
        return kind, check_options(kind, tasks.options, "tasks.options")

    @cached_property
    def agent(self) -> Function:
        """The agent as a function."""
        if self.command is not None:
            command = self.command
            return lambda base_url, api_key, task: _run_command(command, base_url, api_key, task)
        assert self.function is not None
        found: Any = load_object(self.function)
        try:
            inspect.signature(found).bind("base_url", "api_key", "task")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`function`: {self.function} must take (base_url, api_key, task): {error}") from None
        if inspect.iscoroutinefunction(found):
            return cast("Function", found)

        def in_thread(base_url: str, api_key: str, task: str) -> Awaitable[str]:
            # A limiter of its own: the default one holds 40 threads for the whole process.
            limiter = anyio.CapacityLimiter(1)
            return anyio.to_thread.run_sync(found, base_url, api_key, task, abandon_on_cancel=True, limiter=limiter)

        return in_thread


class Host(msgspec.Struct, frozen=True):
    """What the episodes of a node share."""

    url: str
    """The agents' base URL."""
    sessions: Sessions
    agents: TaskGroup
    """Where the agents run."""


@asynccontextmanager
async def open_host() -> AsyncGenerator[Host]:
    """An endpoint at any free port of the loopback."""
    sessions, address = Sessions(), Address(port=0)
    async with (
        serving(make_app(sessions), open_socket(address), address, LIMITS) as url,
        anyio.create_task_group() as agents,
    ):
        yield Host(f"{url}/v1", sessions, agents)
        agents.cancel_scope.cancel()


class Agent:
    """One agent at one task."""

    _episode: EpisodeView
    _session: Session
    _key: str
    _host: Host

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._tasks: Environment | None = None
        self._run: _Run | None = None
        self._limited = False
        """Whether a call was refused for a limit of the run."""

    @classmethod
    def check(cls, options: AgentOptions) -> None:
        """Refuse an agent that is not there, and tasks that cannot work; their class checks its own options.

        Raises:
            ConfigError: naming what is wrong.
        """
        kind, kwargs = options.environment
        own_check = getattr(kind, "check", None)
        if own_check is not None:
            own_check(**kwargs)
        _ = options.agent

    @classmethod
    async def prepare(cls, options: AgentOptions) -> None:
        """Open the endpoint, and what the tasks want."""
        kind, kwargs = options.environment
        if isinstance(kind, Prepared):
            await kind.prepare(**kwargs)
        await shared(HOST, open_host)

    def inform(self, episode: EpisodeView) -> None:
        """Know of tokens."""
        self._episode = episode

    async def reset(self, seed: int) -> tuple[list[Message], Info]:
        """Give the agent its task, and show what it asks first."""
        self._tasks = wrap(self._make())
        task, _ = check_reset_result(await self._tasks.reset(seed))
        if not isinstance(task, str):
            raise EnvError('a task must be text, not chat messages (of a data set: template = "plain")')
        self._host = await shared(HOST, open_host)
        self._session, self._key = self._host.sessions.open()
        self._run = _Run(self._options.agent, (self._host.url, self._key, task), self._session)
        self._host.agents.start_soon(self._run.live)
        call = await self._asked()
        if call is None:
            raise EnvError(f"the agent ended before it had asked anything{self._run.why}")
        return call.added, {}

    async def step(self, action: str) -> StepResult:
        """Answer the agent, and show what it asks next; judge it when it has ended."""
        said = self._episode.last
        self._session.answer(Answer(action, said.cut, said.prompt_tokens, said.tokens))
        call = await self._asked()
        if call is not None:
            return call.added, 0.0, False, False, {}
        return await self._judged()

    async def close(self) -> None:
        """End the agent, and whatever it still asks."""
        try:
            if self._run is not None:
                self._host.sessions.close(self._key)
                await self._run.end()
        finally:
            if self._tasks is not None:
                await self._tasks.close()

    async def _asked(self) -> Call | None:
        """The next call that can be answered; None when the agent has ended."""
        while (call := await self._session.heard()) is not None:
            refusal = self._refusal(call)
            if refusal is None:
                if call.max_tokens is not None:
                    self._episode.limit(call.max_tokens)
                return call
            self._session.refuse(refusal)
        return None

    def _refusal(self, call: Call) -> ApiError | None:
        if self._episode.turns_left < 1:
            self._limited = True
            return ApiError(400, "The episode has had all its answers (rollout.max_turns).", "turns_exhausted")
        try:
            room = self._episode.room(call.added)
        except EnvError as error:
            return ApiError(400, str(error), None, "messages")
        if room < 1:
            self._limited = True
            message = f"The messages are too long: with them {1 - room} tokens too many (model.max_length)."
            return ApiError(400, message, "context_length_exceeded", "messages")
        return None

    async def _judged(self) -> StepResult:
        assert self._run is not None
        assert self._tasks is not None
        answer = self._run.answer
        if answer is None and not self._limited:
            raise EnvError(f"the agent failed{self._run.why}")
        _, reward, terminated, truncated, info = check_step_result(await self._tasks.step(answer or ""))
        if not (terminated or truncated):
            raise EnvError("the environment of `tasks` goes on after a step: an agent has one answer")
        truncated = truncated or answer is None
        return "", reward, not truncated, truncated, info

    def _make(self) -> Environment | SyncEnvironment:
        kind, kwargs = self._options.environment
        return kind(**kwargs)

    # -- a tiny model is taught the tasks as they are ----------------------------------------------------------------

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Of the tasks, for an agent that asks for just that."""
        return self._solved.solved_examples(count, seed)

    def alphabet(self) -> str:
        """Of the tasks."""
        return self._solved.alphabet()

    @property
    def _solved(self) -> WarmStart:
        env = self._make()
        if not isinstance(env, WarmStart):
            raise ConfigError(
                "the environment of `tasks` cannot show solved examples (see flash.environment.WarmStart), which a "
                "tiny model is taught with: set model.path to an existing model"
            )
        return env


class _Run:
    """An agent at work, in a task of the node's."""

    def __init__(self, agent: Function, arguments: tuple[str, str, str], session: Session) -> None:
        self._agent = agent
        self._arguments = arguments
        self._session = session
        self._scope = anyio.CancelScope()
        self._over = anyio.Event()
        self.answer: str | None = None
        """What it returned; None when it failed."""
        self.why = ""
        """How it failed, as the end of a sentence."""

    async def live(self) -> None:
        """Run it to its end; raises nothing but a cancellation from outside."""
        try:
            with self._scope:
                await self._work()
        finally:
            self._session.agent_ended()
            self._over.set()

    async def _work(self) -> None:
        try:
            returned = self._agent(*self._arguments)
            answer = cast("object", await returned if inspect.isawaitable(returned) else returned)
        # The supervised boundary to code that is not ours, which may call sys.exit: that would end the whole node.
        except (Exception, SystemExit) as error:
            self.why = f": it raised {type(error).__name__}: {error}{_place(error)}"
        except anyio.get_cancelled_exc_class():
            if anyio.current_effective_deadline() == float("-inf"):
                raise
            # Something inside of it was cancelled, not the agent: passed on it would end every agent of the node.
            self.why = ": it was cancelled from within"
        else:
            if isinstance(answer, str):
                self.answer = answer
            else:
                self.why = f": it must return its answer as text, but returned {answer!r}"

    async def end(self) -> None:
        """End it, wherever it is."""
        self._scope.cancel()
        await self._over.wait()


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""


async def _run_command(command: list[str], base_url: str, api_key: str, task: str) -> str:
    """A program as an agent. Raises EnvError when it fails."""
    variables = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    process = await anyio.open_process(
        command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=variables, start_new_session=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    written, complaint = bytearray(), bytearray()
    try:
        async with anyio.create_task_group() as streams:
            streams.start_soon(_gather, process.stdout, written)
            streams.start_soon(_gather, process.stderr, complaint)
            with suppress(anyio.BrokenResourceError):  # it need not read its task
                await process.stdin.send(task.encode())
            await process.stdin.aclose()
        code = await process.wait()
    finally:
        # With all that it has started.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()
    if code != 0:
        said = complaint.decode("utf-8", "replace").strip()[-STDERR_SHOWN:]
        raise EnvError(f"`{command[0]}` ended with exit code {code}: {said}")
    return written.decode("utf-8", "replace")


async def _gather(stream: ByteReceiveStream, into: bytearray) -> None:
    """Read all there is, and keep OUTPUT_BYTES of it."""
    async for piece in stream:
        into += piece[: OUTPUT_BYTES - len(into)]
