"""Agent: a program that is not ours, which takes the policy for an endpoint of the OpenAI API.

The inverted environment: what the agent asks first is what `reset` shows, our answer to it is the action, and what it
appends and asks next is the observation of the step. Another environment gives the task and judges what the agent
returns. `flash.service` is the endpoint; each episode has a key of its own, which ends with it.

An agent that only appends to what was said has an episode of one sequence. One that rewrites or drops some of it, that
asks several things at once or the same thing twice, begins branches, each a sequence of its own; what it asks at once
is answered in the order in which it came. One that fails is an error of the environment, unless what failed it is a
limit of the run, or it was last told an answer that was cut off: then the episode is truncated, and judged on an empty
answer. Tried again, a group would keep its short answers alone.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import anyio.lowlevel
import msgspec

from envs import nested
from envs.agent_run import AgentRun, Function
from envs.judging.judge import SandboxOpener
from envs.nested import load_tasks
from envs.programs import run_command
from envs.relay.boxed import BoxOptions, box_of, run_boxed, try_box
from envs.sandbox.open import open_sandboxes
from flash.config.objects import load_object
from flash.environment import (
    Environment,
    EpisodeView,
    Expected,
    Info,
    ResetResult,
    SolvedExample,
    StepResult,
    SyncEnvironment,
    WarmStart,
    shared,
    wrap,
)
from flash.environment.results import check_reset_result, check_step_result
from flash.environment.threaded import in_thread, is_async
from flash.errors import ConfigError, EnvError
from flash.http.connections import HttpLimits
from flash.http.server import HttpAddress, open_socket, serving
from flash.service.app import make_app
from flash.service.chat import PolicyAnswer
from flash.service.errors import ApiError
from flash.service.fields import before
from flash.service.sessions import EpisodeSession, EpisodeSessions, PendingCall
from flash.service.tools import is_well_formed
from flash.types import ASSISTANT, Message, Observation

ENDPOINT = "envs.agent"
"""What the episodes of a node share their endpoint under."""

LIMITS = HttpLimits(strangers=4096)
"""Of the endpoint's server: all agents of a node may arrive at once, before any of them has shown its key."""


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Which agent, and what it is to do.

    Raises:
        ConfigError: naming the option, what was expected and what was given.
    """

    tasks: dict[str, Any]
    """A table with the `path` of the environment's class that gives tasks and judges answers, and its `options`. It
    shows text, and one step ends it."""
    function: str | None = None
    """`module:function` of `(base_url, api_key, task)`, which returns the answer; `async def`, or run in a thread."""
    command: list[str] | None = None
    """Or a program and its arguments. It has OPENAI_BASE_URL and OPENAI_API_KEY in its environment, reads the task from
    its standard input and writes the answer to its standard output."""
    box: dict[str, Any] | None = None
    """A sandbox without a network that `command` runs in, instead of on the node: see `envs.relay.boxed.BoxOptions`."""
    own_reward: bool = False
    """Whether the agent may end its episode with a reward of its own, by `POST {base_url}/episode/reward`."""

    def __post_init__(self) -> None:
        if (self.function is None) == (self.command is None):
            raise ConfigError("expected one of `function` and `command`: they say what the agent is")
        if self.command is not None and not self.command:
            raise ConfigError("`command` is empty: expected a program and its arguments")
        if self.box is not None and self.command is None:
            raise ConfigError("`box` is where a `command` runs: a `function` runs in this process")
        _ = self.boxed

    @cached_property
    def environment(self) -> tuple[type[Any], dict[str, Any]]:
        """The class that gives tasks, and its keyword arguments."""
        return load_tasks(self.tasks)

    @cached_property
    def boxed(self) -> BoxOptions | None:
        """The sandbox of each agent, if it has one."""
        return None if self.box is None else box_of(self.box)

    @cached_property
    def agent(self) -> Function:
        """The agent as a function."""
        if self.command is not None:
            command = self.command
            return lambda base_url, api_key, task: run_command(command, base_url, api_key, task)
        assert self.function is not None
        found: Any = load_object(self.function)
        try:
            inspect.signature(found).bind("base_url", "api_key", "task")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`function`: {self.function} must take (base_url, api_key, task): {error}") from None
        if is_async(found):
            return cast("Function", found)

        return lambda base_url, api_key, task: in_thread(lambda: found(base_url, api_key, task))


class AgentEndpoint(msgspec.Struct, frozen=True):
    """What the episodes of a node share."""

    url: str
    """The agents' base URL."""
    sessions: EpisodeSessions


@asynccontextmanager
async def open_endpoint() -> AsyncGenerator[AgentEndpoint]:
    """An endpoint at any free port of the loopback."""
    sessions, address = EpisodeSessions(), HttpAddress()
    async with serving(make_app(sessions), open_socket(address), address, LIMITS) as url:
        yield AgentEndpoint(f"{url}/v1", sessions)


class Agent:
    """One agent at one task."""

    opener: ClassVar[SandboxOpener] = staticmethod(open_sandboxes)
    """Opens the sandboxes of a node."""

    _episode: EpisodeView
    _session: EpisodeSession
    _key: str
    _endpoint: AgentEndpoint

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._tasks: Environment | None = None
        self._run: AgentRun | None = None
        self._pending: PendingCall | None = None
        """What the policy answers."""
        self._limited = False
        """Whether a call was refused for a limit of the run."""
        self._cut = False
        """Whether the last response was cut off."""
        self._calls = 0
        self._malformed = 0
        """Calls of functions that the policy has made, and those of them that cannot be taken for one."""

    @classmethod
    def check(cls, options: AgentOptions) -> None:
        """Refuse an agent that is not there, and tasks that cannot work; their class checks its own options.

        Raises:
            ConfigError: naming what is wrong.
        """
        nested.check(*options.environment)
        _ = options.agent

    @classmethod
    async def prepare(cls, options: AgentOptions) -> None:
        """Open the endpoint, and what the tasks want."""
        await nested.prepare(*options.environment)
        if options.boxed is not None:
            await try_box(options.boxed, cls.opener)
        await shared(ENDPOINT, open_endpoint)

    @classmethod
    def wrapped(cls, options: AgentOptions) -> tuple[type[Any], dict[str, Any]]:
        """Return the class of the tasks, which knows their kinds, domains and names."""
        return options.environment

    def inform(self, episode: EpisodeView) -> None:
        """Know of tokens."""
        self._episode = episode

    async def reset(self, seed: int) -> ResetResult:
        """Give the agent its task, and show what it asks first."""
        self._tasks = wrap(self._make())
        task = _as_text(check_reset_result(await self._tasks.reset(seed))[0])
        self._endpoint = await shared(ENDPOINT, open_endpoint)
        self._session, self._key = self._endpoint.sessions.open(
            rewarding=self._options.own_reward, sampling=self._episode.sampling
        )
        self._session.queued = self._expect
        self._run = AgentRun(self._agent(), (self._endpoint.url, self._key, task), self._session)
        self._pending = await self._asked()
        if self._pending is None:
            raise EnvError(f"the agent ended before it had asked anything{self._run.why}")
        return self._pending.shown, {}

    async def step(self, action: str) -> StepResult:
        """Answer the agent, and show what it asks next; judge it when it has ended."""
        self._session.answer(self._answer(action))
        self._pending = await self._asked()
        if self._pending is not None:
            return self._pending.shown, 0.0, False, False, self._counted({})
        return await self._judged()

    def _answer(self, action: str) -> PolicyAnswer:
        """The last response as the agent is told it, its calls counted."""
        assert self._pending is not None
        asked, said = self._pending.call.asked, self._episode.last
        self._cut = said.cut
        scored = self._episode.scored() if asked.logprobs else None
        if isinstance(self._pending.shown, str):
            content, stop = before(action, asked.stop)
            message = Message(ASSISTANT, content)
        else:
            spoken = self._episode.spoken(calling=asked.calling)
            content, stop = before(spoken.message.content, asked.stop)
            message, calls = msgspec.structs.replace(spoken.message, content=content), spoken.message.tool_calls
            self._calls += len(calls) + spoken.malformed
            self._malformed += spoken.malformed + sum(not is_well_formed(call, asked.tools) for call in calls)
            if not asked.parallel:
                message = msgspec.structs.replace(message, tool_calls=calls[:1])
        return PolicyAnswer(message, said.cut, said.prompt_tokens, said.tokens, scored, stop)

    def _counted(self, info: Info) -> Info:
        if not self._calls:
            return info
        counts = {"tool_calls": self._calls, "malformed_calls": self._malformed}
        return {**info, "metrics": {**counts, **info.get("metrics", {})}}

    async def close(self) -> None:
        """End the agent, and whatever it still asks."""
        try:
            if self._run is not None:
                self._endpoint.sessions.close(self._key)
                await self._run.end()
        finally:
            if self._tasks is not None:
                await self._tasks.close()

    async def _asked(self) -> PendingCall | None:
        """The next call that can be answered; None when the agent has ended."""
        while (pending := await self._session.next_call()) is not None:
            asked, place = pending.call.asked, pending.place
            self._episode.go_on(place.branch, place.answers)
            self._episode.comes(pending.call.name)
            refusal = await self._refusal(pending)
            if refusal is None:
                if asked.max_tokens is not None:
                    self._episode.limit(asked.max_tokens)
                self._episode.stop_at(asked.stop)
                if asked.stream:
                    self._episode.listen(pending.call.add, calling=asked.calling)
                return pending
            self._session.refuse(refusal)
            await anyio.lowlevel.checkpoint()  # an agent may have asked for thousands at once
        return None

    def _expect(self, pending: PendingCall) -> None:
        """What is asked at once is sampled at once."""
        asked, place = pending.call.asked, pending.place
        hear = pending.call.add if asked.stream else None
        self._episode.expect(
            Expected(
                *(pending.call.name, pending.shown, place.branch, place.answers, asked.tools, asked.template),
                tokens=asked.max_tokens,
                stop=asked.stop,
                hear=hear,
                calling=asked.calling,
            )
        )

    async def _refusal(self, pending: PendingCall) -> ApiError | None:
        """Return why a call cannot be answered, if it cannot: what takes no time to tell comes first."""
        if self._episode.turns_left < 1:
            self._limited = True
            return ApiError(400, "The episode has had all its answers (rollout.max_turns).", "turns_exhausted")
        if pending.place.begins and self._episode.branches_left < 1:
            self._limited = True
            message = (
                "The messages do not go on from what was said, and the episode has had all its branches "
                "(rollout.max_branches)."
            )
            return ApiError(400, message, "branches_exhausted", "messages")
        try:
            if not pending.place.answers:
                self._episode.offer(pending.call.asked.tools)
        except EnvError as error:
            return ApiError(400, str(error), "unsupported_parameter", "tools")
        try:
            if not pending.place.answers:
                self._episode.template(pending.call.asked.template)
        except EnvError as error:
            return ApiError(400, str(error), "unsupported_parameter", "chat_template_kwargs")
        try:
            shown = pending.shown
            await self._episode.prepare(shown)
            room = self._episode.room(shown)
        except EnvError as error:
            return ApiError(400, str(error), None, "messages")
        if room < 1:
            self._limited = True
            message = (
                f"The messages are too long: with them {1 - room} tokens too many (model.max_length, "
                "rollout.max_episode_tokens)."
            )
            return ApiError(400, message, "context_length_exceeded", "messages")
        return None

    async def _judged(self) -> StepResult:
        assert self._run is not None
        assert self._tasks is not None
        if self._session.reward is not None:
            return "", self._session.reward, True, False, self._counted({})
        answer = self._run.answer
        if answer is None and not (self._limited or self._cut):
            raise EnvError(f"the agent failed{self._run.why}")
        _, reward, terminated, truncated, info = check_step_result(await self._tasks.step(answer or ""))
        if not (terminated or truncated):
            raise EnvError("the environment of `tasks` goes on after a step: an agent has one answer")
        truncated = truncated or answer is None
        return "", reward, not truncated, truncated, self._counted(info)

    def _agent(self) -> Function:
        options = self._options
        if options.boxed is None:
            return options.agent
        assert options.command is not None
        return partial(run_boxed, options.boxed, options.command, opener=type(self).opener)

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


def _as_text(shown: Observation) -> str:
    """A task as an agent is given it: a text, or what a user says alone."""
    match shown:
        case str():
            return shown
        case [Message(role="user", content=text)]:
            return text
        case _:
            raise EnvError('a task must be text, or one message of a user (of a data set: template = "plain")')
