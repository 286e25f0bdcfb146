"""Agent: an environment in which a foreign program, the agent, calls the policy through the API of OpenAI or Anthropic.

The roles are inverted. The agent's first request is the observation of `reset`. The policy's response is the action,
and it answers that request. The messages that the agent appends for its next request are the observation of the step.
Another environment (`tasks`) gives the task and judges the answer that the agent returns. `flash.service` serves the
endpoint, one on each rollout node; each episode has its own API key, which is valid until the episode ends.

An agent that only appends messages has an episode of one sequence of tokens. An agent that rewrites or drops messages,
sends requests in parallel, or repeats a request begins branches; each branch is a sequence of its own. The place of a
request is the branch that it continues and the number of that branch's responses that its messages contain. Parallel
requests become actions one after the other, in the order in which they arrived, but their responses are sampled in
parallel (`flash.rollout.episode.ahead`).

An agent that fails is an error of the environment, with two exceptions: a limit of the run refused one of its requests,
or the last response that it got was cut off. Then the episode is truncated and judged on an empty answer. A retry
instead would bias the group: only the samples with short responses would remain.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any, ClassVar, cast

import anyio.lowlevel
import msgspec

from envs import nested
from envs.judging.judge import SandboxOpener
from envs.mixture import Mixture
from envs.nested import load_tasks
from envs.programs import run_command
from envs.relay.boxed import BoxOptions, box_of, run_boxed, try_box
from envs.sandbox.open import open_sandboxes
from envs.tools import ToolEnv
from flash.config.objects import load_object
from flash.environment import (
    Environment,
    EpisodeView,
    Expected,
    Info,
    Informed,
    ResetResult,
    SolvedExample,
    StepResult,
    SyncEnvironment,
    WarmStart,
    shared,
    wrap,
)
from flash.environment.calls import UserTask, describe_error
from flash.environment.results import check_reset_result, check_step_result
from flash.environment.threaded import in_thread, is_async
from flash.errors import ConfigError, EnvError
from flash.http.connections import HttpLimits
from flash.http.server import HttpAddress, open_socket, serving
from flash.service.app import make_app
from flash.service.chat import AgentRequest, PolicyAnswer
from flash.service.fields import ApiError, before_stop
from flash.service.history import Continuation
from flash.service.sessions import EpisodeSession, EpisodeSessions, PendingCall
from flash.service.tools import is_well_formed, with_object
from flash.types import ASSISTANT, Message, Observation

ENDPOINT = "envs.agent"
"""Key under which the episodes of a node share their endpoint."""

LIMITS = HttpLimits(strangers=4096)
"""Connection limits of the endpoint's server. All agents of a node may connect at once, before one has sent its key."""

AgentFunction = Callable[[str, str, str], Awaitable[str] | str]
"""Function `(base_url, api_key, task)` that runs the agent and returns the answer as text."""


class AgentOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The agent and its tasks.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    tasks: dict[str, Any]
    """Table with the `path` of the environment class that gives tasks and judges answers, and its `options`. The
    environment must show text and end after one step."""
    function: str | None = None
    """`module:function` of `(base_url, api_key, task)` that returns the answer: `async def`, or run in a thread."""
    command: list[str] | None = None
    """Program and its arguments, instead of `function`. The program has OPENAI_BASE_URL, OPENAI_API_KEY,
    ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY in its environment, reads the task from standard input and writes the
    answer to standard output."""
    box: dict[str, Any] | None = None
    """Sandbox without a network in which `command` runs, instead of on the node: see `envs.relay.boxed.BoxOptions`."""
    own_reward: bool = False
    """True if the agent may end its episode with a reward of its own, with `POST {base_url}/episode/reward`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if (self.function is None) == (self.command is None):
            raise ConfigError("expected one of `function` and `command`: they say what the agent is")
        if self.command is not None and not self.command:
            raise ConfigError("`command` is empty: expected a program and its arguments")
        if self.box is not None and self.command is None:
            raise ConfigError("`box` is where a `command` runs: a `function` runs in this process")
        _ = self.boxed  # Parsed now, so that its faults are found here.

    @cached_property
    def environment(self) -> tuple[type[Any], dict[str, Any]]:
        """Class of the environment that gives tasks, and its keyword arguments. Raises ConfigError if it is invalid."""
        return load_tasks(self.tasks)

    @cached_property
    def boxed(self) -> BoxOptions | None:
        """Options of the sandbox that each agent runs in; None if agents run on the node."""
        return None if self.box is None else box_of(self.box)

    @cached_property
    def agent(self) -> AgentFunction:
        """The agent as an asynchronous function of `(base_url, api_key, task)`, on the node and not in a sandbox.

        A function that is not asynchronous runs in a thread, so that it does not block the event loop.

        Raises:
            ConfigError: the function does not exist, or takes other arguments.
        """
        if self.command is not None:
            command = self.command
            return lambda base_url, api_key, task: run_command(command, base_url, api_key, task)
        assert self.function is not None
        try:
            found: Any = load_object(self.function)
        except ConfigError as error:
            raise ConfigError(f"`function`: {error}") from error
        try:
            inspect.signature(found).bind("base_url", "api_key", "task")
        except (TypeError, ValueError) as error:
            raise ConfigError(f"`function`: {self.function} must take (base_url, api_key, task): {error}") from None
        if is_async(found):
            return cast("AgentFunction", found)

        return lambda base_url, api_key, task: in_thread(lambda: found(base_url, api_key, task))


class AgentEndpoint(msgspec.Struct, frozen=True):
    """The endpoint that the episodes of a node share."""

    url: str
    """Base URL that agents use."""
    sessions: EpisodeSessions
    """Sessions of the node's episodes, which the endpoint finds by API key."""


@asynccontextmanager
async def open_endpoint() -> AsyncGenerator[AgentEndpoint]:
    """Serve an endpoint on a free port of the loopback interface, until the block ends.

    `shared` enters the block once on each node, when `Agent.prepare` asks for it, and leaves it when the node ends.
    """
    sessions, address = EpisodeSessions(), HttpAddress()
    async with serving(make_app(sessions), open_socket(address), address, LIMITS) as url:
        yield AgentEndpoint(f"{url}/v1", sessions)


class AgentRun:
    """Run of an agent in a task beside the episode, until the agent returns, fails or is ended.

    The agent is user code, so its errors are kept here and do not end the episode's own task. At the
    end the session is notified, so that the episode stops waiting for a request.
    """

    def __init__(self, agent: AgentFunction, arguments: tuple[str, str, str], session: EpisodeSession) -> None:
        """Start the agent with `arguments`: base URL, API key and task. `session` has the agent's requests."""
        self._run = UserTask("the agent", lambda: agent(*arguments), on_end=session.agent_ended)
        """Task of the agent, with its result or error."""

    @property
    def answer(self) -> str | None:
        """Text that the agent has returned; None if it still runs, has failed or returned no text."""
        value: object = self._run.value
        return value if isinstance(value, str) else None

    @property
    def failure(self) -> str:
        """Reason of the agent's failure, as the end of a sentence; empty if the agent has answered.

        Only for an agent that has ended: a running agent has not returned anything yet.
        """
        error: BaseException | None = self._run.error
        if isinstance(error, asyncio.CancelledError):
            return ": it was cancelled from within"
        if error is not None:
            return f": it raised {describe_error(error)}"
        if self.answer is not None:
            return ""
        # Only the type, because formatting the value would run the agent's code.
        return f": it must return its answer as text, but returned a value of {type(self._run.value).__name__}"

    async def end(self) -> None:
        """Cancel the agent if it still runs, and wait for its cleanup.

        After `flash.environment.calls.CLEANUP_S` seconds of cleanup the agent is abandoned, with a warning in the log.
        """
        await self._run.end()


class Agent:
    """Environment of one episode: one agent works on one task. The rollout node makes one object for each episode."""

    opener: ClassVar[SandboxOpener] = staticmethod(open_sandboxes)
    """Function that opens the sandboxes of a node. Tests replace it by a fake."""

    _episode: EpisodeView
    """View of the episode's tokens, from `inform`."""
    _session: EpisodeSession
    """Requests of this episode's agent at the endpoint. Set by `reset`."""
    _key: str
    """API key of the episode, which the agent gets. Set by `reset`."""
    _endpoint: AgentEndpoint
    """Endpoint of the node. Set by `reset`."""

    def __init__(self, options: AgentOptions) -> None:
        self._options = options
        self._tasks: Environment | None = None
        """Environment that gives the task and judges the answer; None before `reset`."""
        self._run: AgentRun | None = None
        """Run of the agent; None before `reset`."""
        self._pending: PendingCall | None = None
        """The request that the policy answers now; None before the first request and after the agent's end."""
        self._limited = False
        """True if a request was refused because of a limit of the run: the agent's failure is then no error."""
        self._cut = False
        """True if a limit on tokens cut off the last response: the agent's failure is then no error."""
        self._calls = 0
        """Number of tool calls that the policy has made, including malformed ones."""
        self._malformed = 0
        """Number of tool calls that cannot be read or do not fit the request's tools."""

    @classmethod
    def check(cls, options: AgentOptions) -> None:
        """Refuse an agent that does not exist and tasks that cannot work. The tasks' class checks its own options.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: an option is invalid. The message names the fault.
        """
        kind, kwargs = options.environment
        nested.check(kind, kwargs)
        # A mixture draws its tasks from several environments, and each of them is checked.
        kinds = [maker.env for maker in kwargs["options"].makers.values()] if issubclass(kind, Mixture) else [kind]
        if refused := next((each for each in kinds if issubclass(each, Agent | ToolEnv)), None):
            raise ConfigError(
                f"`tasks`: {refused.__name__} cannot give tasks to an agent, because each of the two decides what the "
                f"policy is asked: name the environment of {refused.__name__}'s own `tasks` instead"
            )
        _ = options.agent  # Loaded now, so that its faults are found here.

    @classmethod
    async def prepare(cls, options: AgentOptions) -> None:
        """Prepare the tasks, try out the agent's sandbox if it has one, and open the endpoint of the node.

        Each node calls this once, before its engines start.

        Raises:
            SandboxError: the agent's sandbox cannot be started, or its image has no Python.
            Exception: any error with which the class of the tasks refuses to be prepared.
        """
        await nested.prepare(*options.environment)
        if options.boxed is not None:
            await try_box(options.boxed, cls.opener)
        await shared(ENDPOINT, open_endpoint)

    @classmethod
    def wrapped(cls, options: AgentOptions) -> tuple[type[Any], dict[str, Any]]:
        """Return the environment class of the tasks and its options.

        Optional class methods such as `kind_of`, which this class lacks, are then called on that class.
        """
        return options.environment

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode's tokens, through which requests set limits, tools and branches.

        The rollout node calls this before `reset`.
        """
        self._episode = episode

    async def reset(self, seed: int) -> ResetResult:
        """Start the agent with the task of this seed, and return the agent's first request as the observation.

        If this fails or is cancelled, `close` ends everything that was started.

        Raises:
            EnvError: the agent ended, or rewarded itself, before its first request, or the task is not one text.
            Exception: any error that the environment of the tasks raises.
        """
        self._tasks = wrap(self._make_tasks())
        if isinstance(self._tasks, Informed):
            self._tasks.inform(self._episode)
        task = _as_text(check_reset_result(await self._tasks.reset(seed))[0])
        self._endpoint = await shared(ENDPOINT, open_endpoint)
        self._session, self._key = self._endpoint.sessions.open(
            rewarding=self._options.own_reward, sampling=self._episode.sampling
        )
        self._session.queued = self._expect
        self._session.count_prompt = self._count
        self._run = AgentRun(self._agent(), (self._endpoint.url, self._key, task), self._session)
        self._pending = await self._next_request()
        if self._pending is None:
            if self._session.reward is not None:  # The agent itself may still run.
                raise EnvError("the agent ended its episode with a reward before it had asked anything")
            raise EnvError(f"the agent ended before it had asked anything{self._run.failure}")
        return self._pending.observation, {}

    async def step(self, action: str) -> StepResult:
        """Answer the agent's request with the policy's response, and return the agent's next request.

        If the agent has ended instead, its answer is judged and the episode ends. Returns (observation, reward,
        terminated, truncated, info).

        Raises:
            EnvError: the agent failed for another reason than a limit of the run, or `tasks` goes on after one answer.
            Exception: any error that the environment of the tasks raises.
        """
        self._session.answer(self._answer(action))
        self._pending = await self._next_request()
        if self._pending is not None:
            return self._pending.observation, 0.0, False, False, self._with_counts({})
        return await self._judge_answer()

    def _answer(self, action: str) -> PolicyAnswer:
        """Return the policy's last response as the endpoint sends it to the agent.

        Also counts its tool calls, and notes in `_cut` if a limit on tokens cut it off. The content ends before the
        first stop text of the request; reasoning and calls are not cut. Only the first tool call is returned if the
        request forbids parallel tool calls, and arguments become a JSON object if the API of the request needs one. A
        request in plain text, without chat messages, has no tool calls.
        """
        assert self._pending is not None
        request, response = self._pending.call.request, self._episode.last
        self._cut = response.cut
        logprobs = self._episode.scored() if request.logprobs else None
        if isinstance(self._pending.observation, str):
            content, stop = before_stop(action, request.stop)
            message = Message(ASSISTANT, content)
        else:
            spoken = self._episode.spoken(calling=request.calling)
            content, stop = before_stop(spoken.message.content, request.stop)
            message, calls = msgspec.structs.replace(spoken.message, content=content), spoken.message.tool_calls
            self._calls += len(calls) + spoken.malformed
            known = request.tools + request.loaded_tools
            self._malformed += spoken.malformed + sum(not is_well_formed(call, known) for call in calls)
            if not request.parallel:
                calls = calls[:1]
            if request.object_arguments:
                calls = tuple(map(with_object, calls))
            message = msgspec.structs.replace(message, tool_calls=calls)
        return PolicyAnswer(message, response.cut, response.prompt_tokens, response.tokens, logprobs, stop)

    def _with_counts(self, info: Info) -> Info:
        """Return the info with the counts of tool calls among its metrics; without a tool call, the info as it is.

        A metric of the tasks that has the name of a count replaces the count.
        """
        if not self._calls:
            return info
        counts = {"tool_calls": self._calls, "malformed_calls": self._malformed}
        return {**info, "metrics": {**counts, **info.get("metrics", {})}}

    async def close(self) -> None:
        """End the agent and refuse its open requests; close the environment of the tasks."""
        try:
            if self._run is not None:
                self._endpoint.sessions.close(self._key)
                await self._run.end()
        finally:
            if self._tasks is not None:
                await self._tasks.close()

    async def _next_request(self) -> PendingCall | None:
        """Wait for the agent's next request and apply its settings to the next response. None: the agent has ended.

        Requests that cannot be answered are refused with an error of the API; then the next one is awaited. Further
        requests may arrive meanwhile: the session queues them. The deadline of `reset` or `step` limits the wait.
        """
        while (pending := await self._session.next_call()) is not None:
            request, place = pending.call.request, pending.place
            # The session has found the branch whose messages this request continues, and after how many responses.
            self._episode.go_on(place.branch, place.answers)
            # The response may have been sampled ahead: `_expect` announced the request under this name.
            self._episode.comes(pending.call.name)
            refusal = await self._refusal(pending)
            if refusal is None:
                if request.max_tokens is not None:
                    self._episode.limit(request.max_tokens)
                self._episode.stop_at(request.stop)
                if request.stream:
                    self._episode.listen(pending.call.add, calling=request.calling)
                return pending
            self._session.refuse(refusal)
            await anyio.lowlevel.checkpoint()  # the agent may have thousands of open requests: let other tasks run
        return None

    def _expect(self, pending: PendingCall) -> None:
        """Announce a queued request to the episode, so that requests sent in parallel are sampled in parallel.

        The session calls this when a request arrives while another one is being answered.
        """
        request, place = pending.call.request, pending.place
        # A request for a stream gets each piece of the response while it is sampled.
        hear = pending.call.add if request.stream else None
        self._episode.expect(
            Expected(
                name=pending.call.name,
                observation=pending.observation,
                branch=place.branch,
                responses=place.answers,
                tools=request.tools,
                template=request.template,
                tokens=request.max_tokens,
                stop=request.stop,
                form=request.response_form,
                hear=hear,
                calling=request.calling,
            )
        )

    async def _count(self, request: AgentRequest, place: Continuation) -> int:
        """Return the number of tokens of the prompt of a request that is only counted, and gets no response.

        The session calls this, for the agent's calls of Anthropic's `count_tokens`. `place` is the request's place.

        Raises:
            ApiError: the messages cannot be shown.
        """
        expected = Expected(
            name="",
            observation=place.added,
            branch=place.branch,
            responses=place.answers,
            tools=request.tools,
            template=request.template,
        )
        try:
            return await self._episode.count(expected)
        except EnvError as error:
            raise ApiError(400, str(error), None, "messages") from error

    async def _refusal(self, pending: PendingCall) -> ApiError | None:
        """Return the error for a request that cannot be answered, else None. The cheap checks are made first.

        The checks also set the tools, the chat template and the form of the next response. The order of the checks
        decides the error that the agent gets. A refusal because of a limit of the run is recorded in `_limited`. Tools
        and the chat template are set only where a branch begins, after 0 responses: later turns keep them.
        """
        if self._episode.turns_left < 1:
            self._limited = True
            return ApiError(400, "The episode has had all its answers (rollout.max_turns).", "turns_exhausted")
        try:
            if not pending.place.answers:
                self._episode.offer(pending.call.request.tools)
        except EnvError as error:
            return ApiError(400, str(error), "unsupported_parameter", "tools")
        try:
            if not pending.place.answers:
                self._episode.template(pending.call.request.template)
        except EnvError as error:
            return ApiError(400, str(error), "unsupported_parameter", "chat_template_kwargs")
        try:
            shown = pending.observation
            await self._episode.prepare(shown)
            room = self._episode.room(shown)
        except EnvError as error:
            return ApiError(400, str(error), None, "messages")
        if room < 1:
            self._limited = True
            # At least one token must be left for the response, so `1 - room` tokens are missing.
            message = f"The messages are too long: with them {1 - room} tokens too many (model.max_length)."
            return ApiError(400, message, "context_length_exceeded", "messages")
        form = pending.call.request.response_form
        if form is not None:
            try:
                # The last check, because it also sets the form of the next response.
                await self._episode.form(form)
            except EnvError as error:
                field = "tool_choice" if form.call else "response_format"
                return ApiError(400, f"{error}.", "unsupported_parameter", field)
        return None

    async def _judge_answer(self) -> StepResult:
        """Return the result of the episode's last step, after the agent's end.

        The reward is the one that the agent has set (`own_reward`), or else the one that `tasks` gives for its answer.

        Raises:
            EnvError: the agent failed for another reason than a limit of the run, or `tasks` goes on after one answer.
            Exception: any error that the environment of the tasks raises.
        """
        assert self._run is not None
        assert self._tasks is not None
        if self._session.reward is not None:
            return "", self._session.reward, True, False, self._with_counts({})
        answer = self._run.answer
        if answer is None and not (self._limited or self._cut):
            raise EnvError(f"the agent failed{self._run.failure}")
        _, reward, terminated, truncated, info = check_step_result(await self._tasks.step(answer or ""))
        if not (terminated or truncated):
            raise EnvError("the environment of `tasks` goes on after a step: an agent has one answer")
        truncated = truncated or answer is None  # A limit has ended the agent's work.
        return "", reward, not truncated, truncated, self._with_counts(info)

    def _agent(self) -> AgentFunction:
        """Return the agent as a function of `(base_url, api_key, task)`, which runs it in a sandbox if `box` is set."""
        options = self._options
        if options.boxed is None:
            return options.agent
        assert options.command is not None
        return partial(run_boxed, options.boxed, options.command, opener=type(self).opener)

    def _make_tasks(self) -> Environment | SyncEnvironment:
        """Return a new environment of the tasks."""
        kind, kwargs = self._options.environment
        return kind(**kwargs)

    # -- examples that teach a tiny model, before the run, to answer at all --------------------------------------------

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        """Return `count` solved examples of the tasks. They fit an agent that sends the task as its only request."""
        return self._solved.solved_examples(count, seed)

    def alphabet(self) -> str:
        """Return the characters of the tasks' prompts and answers. They become a tiny model's vocabulary."""
        return self._solved.alphabet()

    @property
    def _solved(self) -> WarmStart:
        """The environment of the tasks, which must have solved examples. Raises ConfigError if it has none."""
        env = self._make_tasks()
        if not isinstance(env, WarmStart):
            raise ConfigError(
                "the environment of `tasks` cannot show solved examples (see flash.environment.WarmStart), which a "
                "tiny model is taught with: set model.path to an existing model"
            )
        return env


def _as_text(shown: Observation) -> str:
    """Return a task as the text for the agent: the text itself, or the content of its only message, which is a user's.

    Raises:
        EnvError: the task has another form.
    """
    match shown:
        case str():
            return shown
        case [Message(role="user", content=text)]:
            return text
        case _:
            raise EnvError('a task must be text, or one message of a user (of a data set: template = "plain")')
