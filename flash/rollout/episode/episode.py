"""Episode: one environment's life, from reset to the last reward.

reset → render the observation once → generate → step → render what follows, once → generate → … → trajectory.
Tokens are only ever appended: observations as they were rendered, responses exactly as they were sampled; to the branch
that the environment goes on in, where it has several. Whatever
goes wrong becomes a typed `Failure`; only cancellation passes through. The environment is closed exactly once.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from functools import partial
from hashlib import blake2b
from typing import Protocol, cast

import anyio
import msgspec
from anyio.abc import TaskGroup

from flash.environment.calls import EnvTimeoutError, called, checked, made
from flash.environment.interface import Environment, Info, Informed, ResetResult, StepResult
from flash.environment.results import (
    check_reset_result,
    check_step_result,
    metrics_of,
    note_of,
    template_arguments,
)
from flash.errors import DeadlineError, EngineError, EnvError, PoisonError, PromptTooLongError, RewardError
from flash.rollout.engine import ResponseRequest, ignore_count
from flash.rollout.episode.ahead import ResponsesAhead
from flash.rollout.episode.phases import FreePhases
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.episode.transcript import EpisodeLimits
from flash.rollout.episode.view import TranscriptView
from flash.rollout.outage import OutageClock
from flash.types import (
    Completion,
    Failure,
    Lease,
    Observation,
    Outcome,
    Task,
    Trajectory,
    Turn,
)
from flash.waiting import unwrapped_group

KEYS_PER_TASK = 4096
"""Turns of a task whose responses have a key of their own."""


class Responder(Protocol):
    """Where responses come from; `LLMProxy` is one."""

    async def generate(self, request: ResponseRequest) -> Completion:
        """Sample one response, within the deadline of an episode. Raises EngineError, DeadlineError."""
        ...


class EpisodeSettings(EpisodeLimits, frozen=True, kw_only=True):
    """What all episodes of a run share."""

    seed: int | None
    """Every response is drawn with a seed of its own that follows from this one. None: engines draw as they like."""
    reset_s: float
    step_s: float
    close_s: float
    generate_s: float
    episode_s: float
    """Deadlines, in seconds."""
    domains: dict[str, EpisodeSettings] = msgspec.field(default_factory=dict)
    """By kind of problem, where it has limits of its own."""

    def of(self, kind: str) -> EpisodeSettings:
        """What holds for a kind."""
        return self.domains.get(kind, self)


class EpisodeProgress:
    """How far an episode got. Owned by the caller, who can read it also when the episode is cancelled."""

    def __init__(self) -> None:
        self.tokens = 0
        """Action tokens sampled so far, over all turns and branches."""
        self.lost = 0
        """Tokens that were sampled for it and never arrived: their request was aborted before its next piece."""

    def asks(self) -> None:
        """A response is asked for. An owner that wants to know overrides this."""


def response_key(task: Task, turn: int) -> int:
    """Names the response of a turn (from 0), the same in each attempt at the task."""
    return (task.task_id * KEYS_PER_TASK + turn) * 2 + (task.split == "eval")


def response_seed(seed: int, task: Task, turn: int) -> int:
    """Return the seed of a turn's response: another one for each attempt, so that a failure does not come again.

    The problem counts, and not the task's number: groups that replace others are numbered in the order of time.
    """
    named = f"{seed} {task.split} {task.seed} {task.sample_index} {turn} {task.attempt}".encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest()) >> 1


class Episode:
    """Runs leases, any number at once.

    Args:
        make_env: makes the environment of a task's kind.
        tokenizer: the model's.
        proxy: generates.
        settings: limits and deadlines.
        phases: when environments may step, and when episodes may generate.
        outages: of the engines; None: they always serve.
        now: Unix seconds on the loop's clock.
    """

    def __init__(
        self,
        make_env: Callable[[str], Environment],
        tokenizer: Tokenizer,
        proxy: Responder,
        settings: EpisodeSettings,
        phases: FreePhases,
        outages: OutageClock | None = None,
        *,
        now: Callable[[], float],
    ) -> None:
        self._outages = outages or OutageClock()
        self._rendering = anyio.Lock()
        self._make_env = make_env
        self._tokenizer = tokenizer
        self._proxy = proxy
        self._settings = settings
        self._phases = phases
        self._now = now

    async def run(self, lease: Lease, progress: EpisodeProgress) -> Trajectory | Failure:
        """Live through the episode; never raises except for cancellation and programmer errors."""
        settings = self._settings.of(lease.task.kind)
        transcript = TranscriptView(self._tokenizer, settings, lease.task.sampling, self._rendering)
        state = _EpisodeState(lease, progress, transcript, settings)
        try:
            with anyio.move_on_after(settings.episode_s) as state.scope:
                return await self._live(state)
            return state.too_long(settings.episode_s)
        except RewardError as error:
            return state.failed(Outcome.REWARD_ERROR, str(error))
        except EnvTimeoutError as error:
            return state.failed(Outcome.ENV_TIMEOUT, str(error))
        except PromptTooLongError as error:
            return state.failed(Outcome.TOO_LONG, str(error))
        except EnvError as error:
            return state.failed(Outcome.ENV_ERROR, str(error))
        except PoisonError as error:
            return state.failed(Outcome.ENGINE_KILLED, str(error))
        except (EngineError, DeadlineError) as error:
            return state.failed(Outcome.ENGINE_ERROR, str(error))

    async def _live(self, state: _EpisodeState) -> Trajectory:
        kind, seed = state.task.kind, state.task.seed
        env = made(f"start (seed {seed})", lambda: self._make_env(kind))
        self._phases.enter(state.lease)
        try:
            try:
                trajectory = await self._play(env, state)
            finally:
                # Before closing, which may take its time: other episodes need not wait for it.
                self._phases.leave(state.lease)
        except BaseException:  # cancellation too: what goes wrong in closing must not hide it
            await self._close(env, state)
            raise
        problem = await self._close(env, state)
        if problem is not None:
            raise problem
        return trajectory

    async def _play(self, env: Environment, state: _EpisodeState) -> Trajectory:
        """Turn by turn, with what is asked for ahead beside it, where the environment can."""
        if _informed(env) is None or not self._phases.free:
            return state.ended(await self._turns(env, state, None))
        outcome = Outcome.CANCELLED
        async with unwrapped_group() as group:
            outcome = await self._turns(env, state, group)
            group.cancel_scope.cancel()
        if state.ahead is not None:
            state.ahead.drop()
        return state.ended(outcome)

    async def _turns(self, env: Environment, state: _EpisodeState, tasks: TaskGroup | None) -> Outcome:
        """Turn by turn, until the environment ends the episode or a limit does.

        `tasks` runs responses that are sampled ahead; None: none are.
        """
        if tasks is not None:
            sample = partial(self._sample, state)
            state.ahead = ResponsesAhead(state.new_request, sample, state.progress, tasks, now=self._now)
            state.transcript.sample_ahead(state.ahead)
        transcript, settings = state.transcript, self._settings.of(state.task.kind)
        observation = await self._reset(env, state)
        await transcript.prepare(observation)
        transcript.show(self._prompt(observation, transcript))
        while True:
            completion, start = await self._respond(state)
            transcript.say(completion)
            generate_s, branch = self._now() - start, transcript.branch
            action = self._tokenizer.decode(completion.token_ids)
            (following, reward, terminated, truncated, info), env_s = await self._step(env, state, action)
            measured, note = checked(env, "step", state.task.seed, partial(_logged, info))
            transcript.turns.append(
                Turn(text_of(observation), action, reward, start, generate_s, env_s, measured, note, branch)
            )
            cut = completion.finish == "length"
            if terminated or truncated:
                return Outcome.TRUNCATED if truncated or cut else Outcome.OK
            if len(transcript.turns) == settings.max_turns:
                return Outcome.TRUNCATED
            await transcript.prepare(following)
            if transcript.room(following) < 1:
                return Outcome.TRUNCATED
            transcript.show(transcript.render(following))
            observation = following

    # -- the environment ---------------------------------------------------------------------------------------------

    async def _reset(self, env: Environment, state: _EpisodeState) -> Observation:
        seed = state.task.seed
        what = f"reset (seed {seed})"

        def reset() -> Awaitable[ResetResult]:
            if (informed := _informed(env)) is not None:
                informed.inform(state.transcript)
            return env.reset(seed)

        state.waits_for(Outcome.ENV_TIMEOUT, f"environment {what}", "the environment's class")
        result = await called(what, self._settings.reset_s, "env_reset", reset, env=env, context=state.context)
        observation, info = checked(env, "reset", seed, lambda: check_reset_result(result))
        if arguments := checked(env, "reset", seed, lambda: template_arguments(info)):
            state.transcript.template(arguments)
        return observation

    async def _step(self, env: Environment, state: _EpisodeState, action: str) -> tuple[StepResult, float]:
        """The environment's checked result, and the seconds it took."""
        state.waits_for(
            Outcome.ENGINE_ERROR, "the responses of other episodes", "rollout.env_async and replicate_prompts"
        )
        await self._phases.generated(state.lease)
        what = f"step {state.turn()} (seed {state.task.seed})"
        state.waits_for(Outcome.ENV_TIMEOUT, f"environment {what}", "the environment's class")
        start = self._now()
        result = await called(
            what, self._settings.step_s, "env_step", lambda: env.step(action), env=env, context=state.context
        )
        took = self._now() - start
        return checked(env, "step", state.task.seed, lambda: check_step_result(result)), took

    async def _close(self, env: Environment, state: _EpisodeState) -> EnvError | None:
        """Close also while being cancelled, within the deadline. Returns what went wrong."""
        what = f"close (seed {state.task.seed})"
        try:
            seconds, context = self._settings.close_s, state.context
            await called(what, seconds, "close", env.close, env=env, context=context, shield=True)
        except EnvError as problem:
            return problem
        return None

    # -- the policy --------------------------------------------------------------------------------------------------

    async def _respond(self, state: _EpisodeState) -> tuple[Completion, float]:
        """Return the next response, and when it was requested in Unix seconds."""
        state.waits_for(Outcome.ENV_TIMEOUT, "the environments of other episodes", "rollout.env_async")
        await self._phases.stepped(state.lease)
        state.waits_for(Outcome.ENGINE_ERROR, f"response {state.turn()} (seed {state.task.seed})", "the engines")
        if state.ahead is not None and (expected := state.transcript.take_ahead()) is not None:
            return await state.ahead.take(expected), expected.start
        request = state.transcript.next_request(state.new_request)
        start = self._now()
        # The episode waits for the engines: an outage does not count in its deadline. Responses that are sampled ahead
        # are not waited for, so there an outage counts.
        with self._outages.left_out(state.scope):
            return await self._sample(state, request, ignore_count), start

    async def _sample(self, state: _EpisodeState, request: ResponseRequest, count: Callable[[int], None]) -> Completion:
        """Have the engines sample one response. Calls `count` with the number of its tokens as they come.

        Raises:
            EngineError, DeadlineError: there is no response.
        """
        counted = 0

        def add(tokens: int) -> None:
            nonlocal counted
            counted += tokens
            state.progress.tokens += tokens
            count(tokens)

        def on_tokens(tokens: Sequence[int]) -> None:
            add(len(tokens))
            request.on_tokens(tokens)

        state.progress.asks()
        completion = await self._proxy.generate(msgspec.structs.replace(request, on_tokens=on_tokens))
        add(len(completion.token_ids) - counted)
        if not completion.token_ids:
            raise EngineError(f"an engine ended a response (seed {state.task.seed}) without a token")
        return completion

    def _prompt(self, observation: Observation, transcript: TranscriptView) -> list[int]:
        """Tokens of the first observation."""
        tokens = transcript.render(observation)
        if not tokens:
            raise EnvError(f"the observation {observation!r} gives an empty prompt")
        if len(tokens) >= self._settings.max_length:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens and leaves no room for an answer: model.max_length is "
                f"{self._settings.max_length}; raise it, or leave long problems out (of a data set with "
                "env.options.longest_prompt, in characters)"
            )
        return tokens


class _EpisodeState:
    """How far the episode of one lease is: what was said, and what it waits for now."""

    def __init__(
        self, lease: Lease, progress: EpisodeProgress, transcript: TranscriptView, settings: EpisodeSettings
    ) -> None:
        self.lease = lease
        self.task = lease.task
        self.progress = progress
        self.transcript = transcript
        self.ahead: ResponsesAhead | None = None
        """Responses that are sampled ahead; None: the environment cannot expect any, or may not."""
        self._settings = settings
        self._requests = 0
        """Requests made so far; the next one has this number."""
        self.scope = anyio.CancelScope()
        """Has the episode's deadline."""
        self.context = copy_context()
        """The context variables of the environment's calls: `step` sees what `reset` has set."""
        self._waits = (Outcome.ENV_TIMEOUT, "", "")

    def turn(self) -> int:
        """The turn under way, counted from 1 as people do."""
        return len(self.transcript.turns) + 1

    def new_request(
        self, prompt: list[int], max_new_tokens: int, stop: tuple[str, ...], on_tokens: Callable[[Sequence[int]], None]
    ) -> ResponseRequest:
        """Return the next request of the episode; requests are numbered in the order in which they are made."""
        number, self._requests = self._requests, self._requests + 1
        task, settings = self.task, self._settings
        return ResponseRequest(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            key=response_key(task, number),
            sampling=task.sampling,
            stop=stop,
            seed=None if settings.seed is None else response_seed(settings.seed, task, number),
            group_id=task.group_id,
            task_id=task.task_id,
            min_version=self.lease.min_version,
            timeout_s=settings.generate_s,
            on_tokens=on_tokens,
            on_lost=self._lose,
        )

    def _lose(self, tokens: int) -> None:
        """Count tokens of an aborted request that were in no piece."""
        self.progress.lost += tokens

    def waits_for(self, late: Outcome, what: str, look_at: str) -> None:
        """Note what comes next, and what its lateness would be called."""
        self._waits = (late, what, look_at)

    def too_long(self, seconds: float) -> Failure:
        """The episode's deadline came first."""
        late, what, look_at = self._waits
        return self.failed(
            late,
            f"the episode took longer than {seconds:g} s; it was waiting for {what}; look at {look_at}, or raise "
            "deadlines.episode",
        )

    def ended(self, outcome: Outcome) -> Trajectory:
        """The episode with all that was said."""
        return self.transcript.trajectory(self.task, outcome, self.progress.lost)

    def failed(self, outcome: Outcome, message: str) -> Failure:
        """The episode without a trajectory."""
        return Failure(self.task, outcome, message, self.progress.tokens + self.progress.lost)


def _informed(env: Environment) -> Informed | None:
    """Asked of the class, which remembers: with an instance each name of the protocol is looked up again."""
    return cast("Informed", env) if issubclass(type(env), Informed) else None


def _logged(info: Info) -> tuple[dict[str, float], str]:
    return metrics_of(info), note_of(info)


def text_of(observation: Observation) -> str:
    """An observation as people read it."""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message.role}: {message.content}" for message in observation)
