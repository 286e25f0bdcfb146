"""ToolEnv: problems of another environment, with functions that the policy may call before it answers.

The model's chat template renders the functions into the prompt. vLLM's parser for the model (`model.tool_parser`) reads
the calls from the sampled text. The calls of one turn run at the same time, and their results are the next observation.
A call that cannot be carried out has an error message as its result, from which the policy can learn. The first answer
without a call is the final one: the other environment (`tasks`) judges it, and the episode ends if that environment
ends it.

A toolset makes the functions (`Runner`) of one episode: see `envs.tools.runner`. The rollout node calls `reset`, `step`
and `close` of each episode; `check` and `prepare` run once, before the run begins.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cached_property
from typing import Any, ClassVar, cast

import anyio
import msgspec

from envs import nested
from envs.judging.judge import SandboxOpener, shared_judge
from envs.judging.options import JudgePool, Language, judge_pool_of, limits_of, spec_of
from envs.nested import ClassTable, load_tasks
from envs.sandbox.open import open_sandboxes
from envs.sandbox.text import clipped
from envs.tools.memory import Answers, Memory
from envs.tools.runner import SANDBOX, Cut, Runner, ToolPlace, ToolSandboxes, Toolset
from flash.config.objects import check_options, load_object
from flash.environment import Environment, EpisodeView, Info, Informed, StepResult, shared, wrap
from flash.environment.results import check_reset_result, check_step_result
from flash.errors import ConfigError, encodable
from flash.types import TOOL, Message, Observation, ToolCall
from flash.waiting import first_error

UNREADABLE = (
    "A call of a function begins in your answer, but could not be read. Write it in the form that you were shown, with "
    "its arguments as one JSON object."
)
"""Observation after an answer in which vLLM's parser found the beginning of a call, but no complete call."""

_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}
"""Python types that `msgspec` decodes for each type name of a JSON schema."""


class ToolOptions(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Problems, tools, and limits of the tools.

    Raises:
        ConfigError: an option is invalid. The message names it, what was expected and what was given.
    """

    tasks: dict[str, Any]
    """Table with the `path` of the environment class that gives problems and judges answers, and its `options`."""
    tools: dict[str, dict[str, Any]]
    """For each name, a table with the `path` of a toolset's class, and its `options`: see `envs.tools.runner`."""
    system_prompt: str | None = None
    """System message before each problem."""
    image: str = "flash-sandbox-python"
    """Image of the sandbox that the tools of an episode share, if one of them uses it."""
    output: int = 4000
    """Characters shown of a result: the first half and the last half."""
    most: int = 8
    """Largest number of calls of one answer that are carried out."""
    cache: bool = False
    """Reuse the answer of an equal call in the same state, from any episode of the node: see `envs.tools.memory`."""
    limits: dict[str, Any] = msgspec.field(default_factory=dict)
    """Limits of the sandbox: see `envs.judging.options.JudgingLimits`."""
    sandboxes: dict[str, Any] = msgspec.field(default_factory=dict)
    """Origin of the sandboxes: see `envs.judging.options.JudgePool`."""

    def __post_init__(self) -> None:
        """Refuse invalid options with a ConfigError. msgspec calls this whenever the struct is made."""
        if not self.tools:
            raise ConfigError("`tools` is empty: expected a table for each toolset")
        for name, least in (("output", 100), ("most", 1)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name} must be at least {least}, but is {getattr(self, name)!r}")
        _ = self.pool, self.language, limits_of(self.limits)  # Parsed now, so that their faults are found here.

    @cached_property
    def environment(self) -> tuple[type[Any], dict[str, Any]]:
        """Class of the environment that gives problems, and its keyword arguments.

        Raises ConfigError if it is invalid.
        """
        return load_tasks(self.tasks)

    @cached_property
    def toolsets(self) -> dict[str, tuple[type[Any], dict[str, Any]]]:
        """Class and keyword arguments of each toolset, by name. Raises ConfigError if a table is invalid."""
        return {name: _toolset(name, table) for name, table in self.tools.items()}

    @cached_property
    def pool(self) -> JudgePool:
        """The default sandboxes, with `sandboxes` applied."""
        return judge_pool_of(self.sandboxes)

    @property
    def language(self) -> Language:
        """Description of the sandbox: its image, and the program that the image must have. `prepare` checks both.

        `-` stands for no file: Python reads a program from standard input.
        """
        return Language(image=self.image, file="-", run=("python3", "-"))

    def work(self, opener: SandboxOpener) -> ToolSandboxes:
        """Return a description of the sandboxes in which tools run. `opener` opens them."""
        return ToolSandboxes(spec_of(self.language, limits_of(self.limits)), self.pool, opener)


class ToolEnv:
    """Environment of one episode: one problem of the environment `tasks`, with tools.

    The rollout node makes one object for each episode.
    """

    opener: ClassVar[SandboxOpener] = staticmethod(open_sandboxes)
    """Function that opens the sandboxes of a node. Tests replace it by a fake."""

    _episode: EpisodeView
    """View of the episode's tokens, from `inform`."""
    _env: Environment
    """Environment of the problems. Set by `reset`."""
    _memory: Memory | None = None
    """Reuse of answers; None without the option `cache`."""

    def __init__(self, options: ToolOptions) -> None:
        self._options = options
        self._resources = AsyncExitStack()
        """Stack with the tools, their sandbox and the environment, which `close` closes."""
        self._runners: dict[str, Runner] = {}
        """Tools of the episode by name."""
        self._counts = {"tool_calls": 0, "malformed_calls": 0, "late_calls": 0}
        """Metrics of the episode: calls, calls that cannot be carried out, and calls that a deadline ended."""

    @classmethod
    def check(cls, options: ToolOptions) -> None:
        """Refuse tools that do not exist and problems that cannot work. The problems' class checks its own options.

        The process that reads the configuration calls this.

        Raises:
            ConfigError: an option is invalid. The message names the fault.
        """
        nested.check(*options.environment)
        _ = options.toolsets

    @classmethod
    async def prepare(cls, options: ToolOptions) -> None:
        """Prepare the problems and open each tool once, so that missing parts are found before the run begins.

        Each node calls this once, before its engines start.

        Raises:
            ConfigError: two tools have the same name.
            FlashError: a tool cannot be opened.
        """
        await nested.prepare(*options.environment)
        async with AsyncExitStack() as held:
            runners = await _open(options, held, cls.opener)
        if any(runner.state == SANDBOX for runner in runners.values()):
            judge = await shared_judge(options.pool, cls.opener)
            await judge.try_out(options.language, limits_of(options.limits))

    @classmethod
    def wrapped(cls, options: ToolOptions) -> tuple[type[Any], dict[str, Any]]:
        """Return the environment class of the problems and its options.

        Optional class methods such as `kind_of`, which this class lacks, are then called on that class.
        """
        return options.environment

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode's tokens: `step` reads the calls of the last answer from it.

        The rollout node calls this before `reset`.
        """
        self._episode = episode

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Open the tools, offer them to the policy, and return the problem. `close` ends what a failed call has opened.

        Raises:
            FlashError: a tool cannot be opened, or the run has no parser of calls (model.tool_parser).
            Exception: any error that the environment of the problems raises.
        """
        options = self._options
        self._runners = await _open(options, self._resources, type(self).opener)
        if options.cache:
            self._memory = Memory(await shared(("envs.tools.answers", msgspec.json.encode(options)), _open_answers))
        self._episode.offer([runner.tool for runner in self._runners.values()])
        kind, kwargs = options.environment
        self._env = wrap(kind(**kwargs))
        self._resources.push_async_callback(self._env.close)
        if isinstance(self._env, Informed):
            self._env.inform(self._episode)
        observation, info = check_reset_result(await self._env.reset(seed))
        system = [Message("system", options.system_prompt)] if options.system_prompt else []
        return [*system, *_messages(observation)], info

    async def step(self, action: str) -> StepResult:
        """Carry out the calls of an answer and return their results. An answer without calls is judged.

        An answer whose call cannot be read at all gets an explanation instead of results. If the run's limits on turns
        or tokens leave no room for another answer, the problem is judged now, on an empty answer. Returns (observation,
        reward, terminated, truncated, info).

        Raises:
            FlashError: a tool failed in a way that the policy has not caused.
            Exception: any error that the environment of the problems raises.
        """
        spoken = self._episode.spoken()
        calls = spoken.message.tool_calls
        self._counts["tool_calls"] += len(calls) + spoken.malformed
        if calls:
            shown = await self._results(calls)
        elif spoken.malformed:
            self._counts["malformed_calls"] += 1
            shown = [Message("user", UNREADABLE)]
        else:
            return await self._judge(spoken.message.content)
        await self._episode.prepare(shown)  # renders a large observation in a thread, so that `room` does not block
        if self._episode.turns_left < 1 or self._episode.room(shown) < 1:
            # Otherwise the run would cut the episode without a reward. An empty answer gets the reward that the
            # environment of the problems gives for no answer.
            _, reward, _, _, info = check_step_result(await self._env.step(""))
            return "", reward, False, True, self._with_counts(info)
        return shown, 0.0, False, False, {}

    async def close(self) -> None:
        """Close the environment, the tools and their sandbox, in this order. An error does not keep the rest open."""
        await self._resources.aclose()

    async def _judge(self, answer: str) -> StepResult:
        """Pass a final answer to the environment of the problems, and return its result as the result of the step.

        Counts are added to the info of its last step. Before that, its observation becomes messages.
        """
        observation, reward, terminated, truncated, info = check_step_result(await self._env.step(answer))
        if terminated or truncated:
            return observation, reward, terminated, truncated, self._with_counts(info)
        return _messages(observation), reward, False, False, info

    async def _results(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Carry out calls at the same time, and return their results in the order of the calls.

        Calls after the first `most` are not carried out, so that one answer cannot occupy the node. Their result says
        so. If a call raises an error, the others are cancelled and the first error is raised.
        """
        texts = [""] * len(calls)

        async def carry_out(place: int) -> None:
            """Carry out the call at this index, and store its result at the same index."""
            texts[place] = await self._result(calls[place])

        try:
            async with anyio.create_task_group() as tasks:
                for place in range(len(calls)):
                    if place < self._options.most:
                        tasks.start_soon(carry_out, place)
                    else:
                        texts[place] = f"error: not carried out: no more than {self._options.most} calls at once"
        except BaseExceptionGroup as group:
            raise first_error(group) from group
        return [
            Message(TOOL, text, tool_call_id=call.id, name=call.name) for text, call in zip(texts, calls, strict=True)
        ]

    async def _result(self, call: ToolCall) -> str:
        """Carry out one call. Returns its result, cut to `output` characters, or the error of a malformed call.

        Calls of one answer run at the same time; each changes the counts only between its awaits. Raises FlashError if
        the tool failed in a way that the policy has not caused.
        """
        try:
            runner, arguments = read_call(call, self._runners)
        except MalformedCallError as error:
            self._counts["malformed_calls"] += 1
            return f"error: {error}"
        answer = await (runner.call(arguments) if self._memory is None else self._memory.call(runner, arguments))
        self._counts["late_calls"] += isinstance(answer, Cut)
        # A result that cannot be encoded must not fail the episode: the policy caused it, and the episode would be
        # retried.
        return encodable(clipped(answer, self._options.output))

    def _with_counts(self, info: Info) -> Info:
        """Return the info of the last step with the episode's counts of calls among its metrics."""
        counts: dict[str, float] = dict(self._counts)
        if self._memory is not None:
            counts["cached_calls"] = self._memory.used_again
        return {**info, "metrics": {**counts, **info.get("metrics", {})}}


class MalformedCallError(Exception):
    """Error: a call of the policy cannot be carried out. The message is shown to the policy."""


def read_call(call: ToolCall, runners: Mapping[str, Runner]) -> tuple[Runner, dict[str, Any]]:
    """Return the tool that is called and its arguments, checked against the first level of the tool's schema.

    Deeper levels are left to the tool, because a full check of JSON schemas would need another package.

    Raises:
        MalformedCallError: there is no such tool, or the arguments are not a JSON object that fits the schema.
    """
    runner = runners.get(call.name)
    if runner is None:
        raise MalformedCallError(f"there is no function {call.name!r}; there are {', '.join(runners)}")
    try:
        # Models write a call without arguments also as an empty text.
        value: object = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedCallError(f"the arguments of {call.name} are no JSON: {error}") from None
    if not isinstance(value, dict):
        raise MalformedCallError(f"the arguments of {call.name} must be one JSON object, not {call.arguments[:100]}")
    arguments = cast("dict[str, Any]", value)
    _check(call.name, arguments, runner.parameters)
    return runner, arguments


def _check(name: str, arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Check names and types of arguments against the first level of a schema. Raises MalformedCallError at a fault.

    Additional arguments are allowed if the schema says so or lists no properties. An argument whose type the schema
    does not name is not checked.
    """
    properties: Mapping[str, Any] = schema.get("properties", {})
    known = ", ".join(properties) or "none"
    for key in schema.get("required", ()):
        if key not in arguments:
            raise MalformedCallError(f"{name} needs the argument {key!r}; its arguments are {known}")
    for key, value in arguments.items():
        if key not in properties:
            if schema.get("additionalProperties") is True or not properties:
                continue
            raise MalformedCallError(f"{name} has no argument {key!r}; its arguments are {known}")
        wanted = properties[key].get("type") if isinstance(properties[key], dict) else None
        if isinstance(wanted, str) and wanted in _KINDS and not _is(value, wanted):
            raise MalformedCallError(f"the argument {key!r} of {name} must be of type {wanted}, but is {value!r:.100}")


def _is(value: object, kind: str) -> bool:
    """Return True if a value has a type of JSON schema. A boolean is no number, and 3.0 counts as an integer."""
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS[kind]) or (kind == "integer" and isinstance(value, float) and value.is_integer())


def _toolset(name: str, table: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
    """Load the class of the toolset `name`, and check its options. Raises ConfigError if the table is invalid."""
    where = f"tools.{name}"
    named = ClassTable(**check_options(ClassTable, table, where))
    try:
        found: Any = load_object(named.path)
    except ConfigError as error:
        raise ConfigError(f"`{where}.path`: {error}") from error
    if not isinstance(found, type) or not issubclass(found, Toolset):
        raise ConfigError(f"`{where}.path`: {named.path} is no toolset: expected a class with open and close")
    kind = cast("type[Any]", found)
    return kind, check_options(kind, named.options, f"{where}.options")


async def _open(options: ToolOptions, held: AsyncExitStack, opener: SandboxOpener) -> dict[str, Runner]:
    """Open the tools of an episode and return them by name. `held` closes them, also if this function fails.

    `opener` opens the node's sandboxes. No sandbox is borrowed here: the first call that needs one borrows it.

    Raises:
        ConfigError: two tools have the same name.
        FlashError: a tool cannot be opened.
    """
    place = ToolPlace(options.work(opener))
    held.push_async_callback(place.close)
    runners: dict[str, Runner] = {}
    for name, (kind, kwargs) in options.toolsets.items():
        toolset: Toolset = kind(**kwargs)
        held.push_async_callback(toolset.close)
        for runner in await toolset.open(place):
            if runner.name in runners:
                raise ConfigError(f"`tools.{name}` has a function `{runner.name}`, which another toolset has too")
            runners[runner.name] = runner
    return runners


@asynccontextmanager
async def _open_answers() -> AsyncGenerator[Answers]:
    """Provide the known answers that all episodes of a node share, in the form that `shared` takes."""
    yield Answers()


def _messages(observation: Observation) -> list[Message]:
    """Return an observation as messages: tools need a chat, so a text becomes a message of the user."""
    return [Message("user", observation)] if isinstance(observation, str) else observation
