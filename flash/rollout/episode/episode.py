"""EpisodePlayer: plays episodes, each from the reset of its environment to the trajectory.

The scheduler calls `EpisodePlayer.play` for each lease. A lease assigns one task to this node. A task asks for one
sample of a problem; the tasks about a problem are a group, whose rewards are compared.

`EpisodePlayer._take_turns` resets the environment and renders the first observation (turns it into tokens). Then it
requests a response, lets the environment step, and renders the next observation, again and again until the episode
ends. Then the transcript becomes the trajectory. The node's `LLMProxy` samples the responses. The scheduler delivers
the trajectory, or a `Failure`, to the hub. A turn is a response and the step of the environment after it. A branch is
one of the sequences of tokens that an episode has if the environment goes back to an earlier place.

Invariants: tokens are only appended (`flash.rollout.episode.transcript`). Every error becomes a `Failure` with a typed
outcome; only cancellation and programmer errors are raised. The environment is closed exactly once. Each wait has a
deadline of its own or ends at the deadline of the episode, and the failure names the event that the episode waited for.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from contextvars import copy_context
from functools import partial
from hashlib import blake2b
from typing import Protocol, cast

import anyio
import msgspec

from flash.config.tree import Config
from flash.environment.calls import EnvTimeoutError, call_function, call_method, check_returned
from flash.environment.interface import Environment, Informed, ResetResult, StepResult
from flash.environment.results import (
    check_reset_result,
    check_step_result,
    metrics_of,
    note_of,
    template_arguments,
)
from flash.errors import DeadlineError, EngineError, EnvError, PoisonError, PromptTooLongError, RewardError
from flash.rollout.engine import ResponseRequest, TokenTally, ignore_tokens
from flash.rollout.engine_state import OutageClock
from flash.rollout.episode.ahead import ResponsesAhead
from flash.rollout.episode.phases import Phases
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.episode.transcript import EpisodeLimits, Transcript
from flash.rollout.episode.view import TranscriptView
from flash.samples.rules import ONE_KIND, DomainSettings
from flash.sampling import Grammar
from flash.types import Completion, Failure, Lease, Observation, Outcome, Task, Trajectory, Turn
from flash.waiting import unwrapped_group

KEYS_PER_TASK = 4096
"""Number of different keys of a task. If a task makes more requests than this, `response_key` returns keys of another
task."""


class Responder(Protocol):
    """Interface of an object that samples responses. `LLMProxy` implements it."""

    async def generate(self, request: ResponseRequest) -> Completion:
        """Sample one response.

        Raises:
            PoisonError: the request has killed several engines, so it is not given to another one.
            EngineError: the engines have failed the request.
            DeadlineError: the response took longer than `request.timeout_s`.
            EnvError, RewardError: `request.on_tokens` raised it, because the environment listens to the response.
        """
        ...


class EpisodeSettings(EpisodeLimits, frozen=True, kw_only=True):
    """Limits and deadlines of all episodes of a run.

    The inherited fields are `max_length` (tokens of a branch), `max_turns` (responses of an episode), `max_new_tokens`
    (tokens of a response), and `forms` (True if a response may be sampled under a grammar).
    """

    seed: int | None
    """The run's seed, from which `response_seed` makes the seed of every response. None: responses have no seed, and
    each engine uses its own random state."""
    step_s: float
    """Seconds in which an environment must reset, and in which it must step."""
    close_s: float
    """Seconds in which an environment must close."""
    generate_s: float
    """Seconds in which a response must be complete."""
    episode_s: float
    """Seconds that an episode may take. The time to close its environment does not count. The time in which the episode
    waits for a response while no engine serves does not count either."""
    domains: dict[str, EpisodeSettings] = msgspec.field(default_factory=dict)
    """Settings of each domain, by name. A domain is a kind of problems for which the environment sets limits of its
    own (`flash.environment.interface.Domain`)."""

    @staticmethod
    def of_run(config: Config, domains: Mapping[str, DomainSettings] = ONE_KIND.domains) -> EpisodeSettings:
        """Return the settings of a run and of its `domains`, which are given by name (by default none)."""
        teacher = config.algorithm.teacher
        run = EpisodeSettings(
            # The server of a teacher (a model to imitate) gives log-probs over all tokens, but a form forbids some.
            forms=teacher is None or teacher.url is None,
            seed=config.run.seed if config.seeded else None,
            max_new_tokens=config.rollout.max_new_tokens,
            max_length=config.model.max_length,
            max_turns=config.rollout.max_turns,
            step_s=config.deadlines.env_step,
            close_s=config.deadlines.close,
            generate_s=config.deadlines.generate,
            episode_s=config.deadlines.episode,
        )
        own = {
            name: msgspec.structs.replace(run, max_turns=domain.max_turns, max_new_tokens=domain.max_new_tokens)
            for name, domain in domains.items()
        }
        return msgspec.structs.replace(run, domains=own)

    def for_kind(self, kind: str) -> EpisodeSettings:
        """Return the settings of the domain of a kind of problems, or `self` if the kind has no domain."""
        return self.domains.get(kind, self)


class EpisodeProgress(TokenTally):
    """Token counts of an episode. The caller of `EpisodePlayer.play` owns them, and can read them after a cancellation.

    The inherited count `lost` has all tokens that were sampled for the episode and will not be in its trajectory. An
    engine counts the tokens of aborted requests. `EpisodePlayer` counts the tokens of responses that were sampled ahead
    and not needed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0
        """Number of action tokens (tokens of responses) sampled so far, over all turns and branches. This includes
        responses that are still being sampled, also ahead of their turn, and excludes tokens counted in `lost`."""

    def on_request(self) -> None:
        """Do nothing. `EpisodePlayer` calls this before each request to the engines. The scheduler overrides it."""


def response_key(task: Task, request: int) -> int:
    """Return the number that identifies request number `request`, counted from 0, of a task.

    Simulated engines derive the length of the response from this key (`flash.simulate.workload`). The key is equal in
    each attempt at the task, so that a repeated attempt has the same simulated lengths.
    """
    # Training tasks and tasks of evaluations are both numbered from 0: the last bit keeps their keys apart.
    return (task.task_id * KEYS_PER_TASK + request) * 2 + (task.split == "eval")


def response_seed(seed: int, task: Task, request: int) -> int:
    """Return a seed for request number `request`, counted from 0, of a task. `seed` is the run's seed.

    The result is below 2⁶³, because torch's generators accept no larger seeds. Each attempt has other seeds, so that a
    failure is not repeated. The seed depends on the problem and not on the task's number. The task's number depends on
    timing, because a group that replaces another group gets the next free number, so equal runs would get different
    seeds.
    """
    named = f"{seed} {task.split} {task.seed} {task.sample_index} {request} {task.attempt}".encode()
    return int.from_bytes(blake2b(named, digest_size=8).digest()) >> 1


class EpisodePlayer:
    """Plays all episodes of a node, any number at the same time. The node makes one player.

    The state of one episode is in its `EpisodeProgress`, `_EpisodeState` and `Transcript`.

    Args:
        make_env: makes an environment for a kind of problems.
        tokenizer: the model's tokenizer.
        proxy: samples responses.
        settings: limits and deadlines.
        phases: decides when environments may step, and when responses may be requested.
        outages: clock of the outages, in which the node has no engine that serves. An outage does not count in the
            deadline of an episode that waits for a response. None: all time counts.
        score: gives the result of an episode to the teacher, a model on a server of its own, and returns the result
            with the teacher's log-probs. None: no such teacher.
        now: returns the present time in Unix seconds.
    """

    def __init__(
        self,
        make_env: Callable[[str], Environment],
        tokenizer: Tokenizer,
        proxy: Responder,
        settings: EpisodeSettings,
        phases: Phases,
        outages: OutageClock | None = None,
        *,
        score: Callable[[Trajectory | Failure], Awaitable[Trajectory | Failure]] | None = None,
        now: Callable[[], float],
    ) -> None:
        self._outages = outages or OutageClock()
        self._rendering = anyio.Lock()
        """Held while a thread renders a large observation, so that at most one thread of the node renders."""
        self._make_env = make_env
        self._tokenizer = tokenizer
        self._proxy = proxy
        self._settings = settings
        self._phases = phases
        self._score = score
        self._now = now

    async def play(self, lease: Lease, progress: EpisodeProgress) -> Trajectory | Failure:
        """Play the episode of a lease. Return its trajectory, or a failure with the reason why there is no trajectory.

        Only cancellation and programmer errors are raised. `progress` counts tokens while the episode runs.
        """
        result = await self._play(lease, progress)
        # The environment is closed by now, and the teacher has a deadline of its own (`ServedTeacher`).
        return result if self._score is None else await self._score(result)

    async def _play(self, lease: Lease, progress: EpisodeProgress) -> Trajectory | Failure:
        """Play an episode. Turn each error of the environment and the engines, and a late end, into a failure."""
        settings = self._settings.for_kind(lease.task.kind)
        transcript = Transcript(self._tokenizer, settings, self._rendering)
        state = _EpisodeState(lease, progress, transcript, settings)
        # Every block below either sets the outcome or raises, but the type checker cannot know this.
        outcome = Outcome.CANCELLED
        try:
            with state.scope:
                async with self._environment(state) as env:
                    # Responses can only be sampled ahead for an environment that uses the view of its episode
                    # (`TranscriptView`), and not while episodes wait for each other.
                    if _informed(env) is not None and self._phases.free:
                        async with self._sampling_ahead(state):
                            outcome = await self._take_turns(env, state)
                    else:
                        outcome = await self._take_turns(env, state)
                # Only now is `progress.lost` complete: the blocks have counted the tokens of responses that the episode
                # did not use.
                return transcript.trajectory(lease.task, outcome, progress.lost)
            return state.deadline_failure()
        # The first three errors are kinds of EnvError, so they are caught before it.
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

    async def _take_turns(self, env: Environment, state: _EpisodeState) -> Outcome:
        """Reset the environment, then alternate responses and steps until the environment or a limit ends the episode.

        Returns `Outcome.OK`, or `Outcome.TRUNCATED` if the environment or a limit has cut the episode, or the limit of
        tokens has cut its last response. Other outcomes are raised as errors, which `_play` turns into a `Failure`.
        """
        transcript, seed = state.transcript, state.task.seed
        observation = await self._reset(env, state)
        await self._prepare(observation, state)
        transcript.add_observation(self._first_prompt(observation, state))
        while True:
            completion, start = await self._respond(state)
            transcript.add_response(completion)
            # Read the branch of this response before the step, in which the environment may choose another branch for
            # the next observation.
            generate_s, branch = self._now() - start, transcript.branch
            action = self._tokenizer.decode(completion.token_ids)
            (following, reward, terminated, truncated, info), env_s = await self._step(env, state, action)
            metrics, note = check_returned(env, "step", seed, lambda info=info: (metrics_of(info), note_of(info)))
            transcript.turns.append(
                Turn(text_of(observation), action, reward, start, generate_s, env_s, metrics, note, branch)
            )
            if terminated or truncated:
                cut = completion.finish == "length"
                return Outcome.TRUNCATED if truncated or cut else Outcome.OK
            if len(transcript.turns) == state.settings.max_turns:
                return Outcome.TRUNCATED
            await self._prepare(following, state)
            # An observation without room for a response is not added, because nothing could follow it.
            if transcript.room(following) < 1:
                return Outcome.TRUNCATED
            transcript.add_observation(transcript.render(following))
            observation = following

    # -- the environment ---------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _environment(self, state: _EpisodeState) -> AsyncGenerator[Environment]:
        """Make the environment of an episode, and close it at the end of the block, even after a cancellation.

        Also reports the beginning and the end of the episode to `phases`.

        Raises:
            EnvError, RewardError: the environment cannot be made, or the block has raised no error and closing failed.
        """
        task = state.task
        env = call_function(f"start (seed {task.seed})", lambda: self._make_env(task.kind))
        self._phases.enter(state.lease)
        try:
            try:
                yield env
            finally:
                # Leave before closing, which may take long, so that other episodes do not wait for the closing.
                self._phases.leave(state.lease)
        except BaseException:  # this includes a cancellation
            with suppress(EnvError):  # an error while closing must not hide the first one
                await self._close(env, state)
            raise
        await self._close(env, state)

    async def _reset(self, env: Environment, state: _EpisodeState) -> Observation:
        """Reset the environment, and return the first observation.

        An environment with a method `inform` first gets the view of its episode. The arguments of the chat template
        that `reset` has returned in its info are set in the transcript.

        Raises:
            EnvTimeoutError: the reset exceeded its deadline.
            RewardError: the environment raised it.
            EnvError: the environment raised another error, or returned something that is not allowed.
        """
        seed = state.task.seed
        what = f"reset (seed {seed})"

        def reset() -> Awaitable[ResetResult]:
            """Give the environment its view, then call its `reset`."""
            # `inform` is a user's code, too, so it runs under the same protection.
            if (informed := _informed(env)) is not None:
                informed.inform(TranscriptView(state.transcript, state.task.sampling, state.ahead))
            return env.reset(seed)

        state.waits_for(Outcome.ENV_TIMEOUT, f"environment {what}", "the environment's class")
        result = await call_method(what, state.settings.step_s, "env_step", reset, env=env, context=state.context)
        observation, info = check_returned(env, "reset", seed, lambda: check_reset_result(result))
        if arguments := check_returned(env, "reset", seed, lambda: template_arguments(info)):
            state.transcript.set_template_arguments(arguments)
        return observation

    async def _step(self, env: Environment, state: _EpisodeState, action: str) -> tuple[StepResult, float]:
        """Let the environment take an action, once `phases` allows it.

        Returns the checked result of `step`, and the seconds that the step took.

        Raises:
            EnvTimeoutError: the step exceeded its deadline.
            RewardError: the environment raised it, or returned a reward that is not a finite number.
            EnvError: the environment raised another error, or returned something that is not allowed.
        """
        seed = state.task.seed
        state.waits_for(Outcome.ENGINE_ERROR, "the responses of other episodes", "rollout.barriers")
        await self._phases.generated(state.lease)
        what = f"step {state.turn()} (seed {seed})"
        state.waits_for(Outcome.ENV_TIMEOUT, f"environment {what}", "the environment's class")
        start = self._now()
        returned = await call_method(
            what, state.settings.step_s, "env_step", lambda: env.step(action), env=env, context=state.context
        )
        env_s = self._now() - start
        return check_returned(env, "step", seed, lambda: check_step_result(returned)), env_s

    async def _close(self, env: Environment, state: _EpisodeState) -> None:
        """Close the environment within a deadline of its own, even while the episode is being cancelled.

        Raises EnvError if the environment raised an error, or did not close in time (EnvTimeoutError).
        """
        what, seconds = f"close (seed {state.task.seed})", state.settings.close_s
        await call_method(what, seconds, "close", env.close, env=env, context=state.context, shield=True)

    # -- the policy --------------------------------------------------------------------------------------------------

    async def _prepare(self, observation: Observation, state: _EpisodeState) -> None:
        """Render the next observation in a thread if it is large, so that other episodes go on meanwhile.

        A small observation is rendered later, by `Transcript.room` or `Transcript.render`. Raises EnvError if a large
        one cannot be shown.
        """
        what = f"observation {state.turn()} to become tokens (seed {state.task.seed})"
        state.waits_for(Outcome.ENV_TIMEOUT, what, "the size of the environment's observations")
        await state.transcript.prepare(observation)

    def _first_prompt(self, observation: Observation, state: _EpisodeState) -> list[int]:
        """Return the tokens of the first observation, which must have at least one token and leave room for a response.

        A later observation may be empty, because tokens are before it. A later observation without room ends the
        episode, but a first one without room makes it fail, because there is no response yet that could be trained.

        Raises:
            EnvError: the observation cannot be shown, or has no token.
            PromptTooLongError: the observation leaves no room for a response.
        """
        tokens, longest = state.transcript.render(observation), state.settings.max_length
        if not tokens:
            raise EnvError(
                f"the observation {observation!r} that reset() returned gives an empty prompt; return a text with at "
                "least one character"
            )
        if len(tokens) >= longest:
            raise PromptTooLongError(
                f"the prompt has {len(tokens)} tokens and leaves no room for an answer: model.max_length is "
                f"{longest}; raise it, or leave long problems out (of a data set with "
                "env.options.longest_prompt, in characters)"
            )
        return tokens

    async def _respond(self, state: _EpisodeState) -> tuple[Completion, float]:
        """Return the next response, and the time of its request in Unix seconds.

        The response may have been sampled ahead (`flash.rollout.episode.ahead`). Otherwise it is requested now, with
        the options that the environment has set for it. Waits until `phases` allows the request.

        Raises:
            EngineError, DeadlineError: the response could not be sampled.
            EnvError, RewardError: the environment listens to the response, and its function raised an error.
        """
        state.waits_for(Outcome.ENV_TIMEOUT, "the environments of other episodes", "rollout.barriers")
        await self._phases.stepped(state.lease)
        state.waits_for(Outcome.ENGINE_ERROR, f"response {state.turn()} (seed {state.task.seed})", "the engines")
        transcript = state.transcript
        options, room = transcript.take_options(), transcript.tokens_left()
        most = min(room, state.settings.max_new_tokens, room if options.tokens is None else options.tokens)
        format = transcript.branches[transcript.branch].format
        grammar = None if options.form is None else await format.grammar(options.form)
        # In an outage no engine of the node serves. The time of an outage does not count in the deadline of an episode
        # that waits for a response, here and below. It counts while the episode waits for anything else, also if a
        # response is sampled ahead meanwhile.
        if state.ahead is not None and options.name:
            # A response that was sampled ahead is taken only if it answers exactly this prompt under these limits.
            expected = state.ahead.find(options.name, transcript.tokens, most, options.stop, grammar)
            if expected is not None:
                with self._outages.extending(state.scope):
                    return await state.ahead.take(expected), expected.start
        on_tokens = ignore_tokens
        if options.hear is not None:
            reader = format.start_reading(transcript.tokens, calling=options.calling)
            on_tokens = reader.forward_to(options.hear, len(transcript.tokens))
        request = state.new_request(list(transcript.tokens), most, options.stop, grammar, on_tokens)
        start = self._now()
        with self._outages.extending(state.scope):
            return await self._sample(state, request, lambda tokens: None), start

    async def _sample(self, state: _EpisodeState, request: ResponseRequest, count: Callable[[int], None]) -> Completion:
        """Let the engines sample one response, and count its tokens in `state.progress` while they arrive.

        `count` is called with the number of new tokens, too: `ResponsesAhead` keeps such numbers for each response.

        Raises:
            EngineError, DeadlineError: the response could not be sampled.
            EnvError, RewardError: the environment listens to the response, and its function raised an error.
        """
        counted = 0

        def add(tokens: int) -> None:
            """Count new tokens: for this response, for the episode, and for the caller."""
            nonlocal counted
            counted += tokens
            state.progress.tokens += tokens
            count(tokens)

        def on_tokens(tokens: Sequence[int]) -> None:
            """Count a piece, and pass it on to the environment if it listens to the response."""
            add(len(tokens))
            request.on_tokens(tokens)

        state.progress.on_request()
        # The proxy calls `on_tokens` for each piece, except for the last one.
        completion = await self._proxy.generate(msgspec.structs.replace(request, on_tokens=on_tokens))
        # The last tokens of a response are in the completion only.
        add(len(completion.token_ids) - counted)
        if not completion.token_ids:
            raise EngineError(f"an engine ended a response (seed {state.task.seed}) without a token")
        return completion

    @asynccontextmanager
    async def _sampling_ahead(self, state: _EpisodeState) -> AsyncGenerator[None]:
        """Let the environment have responses sampled ahead (before it shows their observations) inside the block.

        Sets `state.ahead`. At the end of the block, requests that still run are cancelled. After a block without an
        error, the tokens of all responses that the episode did not take move from `progress.tokens` to `progress.lost`.
        After an error they stay, because a failure counts both.
        """
        async with unwrapped_group() as tasks:
            sample = partial(self._sample, state)
            ahead = ResponsesAhead(state.transcript, self._rendering, state.new_request, sample, tasks, now=self._now)
            state.ahead = ahead
            yield
            tasks.cancel_scope.cancel()
        dropped = ahead.drop()
        state.progress.tokens -= dropped
        state.progress.lost += dropped


class _EpisodeState:
    """State of one episode: the transcript, the requests, and the event that the episode waits for now."""

    def __init__(
        self, lease: Lease, progress: EpisodeProgress, transcript: Transcript, settings: EpisodeSettings
    ) -> None:
        self.lease = lease
        self.task = lease.task
        self.progress = progress
        self.transcript = transcript
        self.settings = settings
        """Settings of the domain of the task."""
        self.ahead: ResponsesAhead | None = None
        """Responses that are sampled ahead. None if nothing is sampled ahead (`EpisodePlayer._sampling_ahead`)."""
        self.scope = anyio.move_on_after(settings.episode_s)
        """Scope that has the episode's deadline. The time counts from the start of the episode."""
        self.context = copy_context()
        """Context variables for the environment's calls, so that `step` sees the values that `reset` has set."""
        self._requests = 0
        """Number of requests made so far, also of responses that are sampled ahead. The next request gets this
        number."""
        self._late_outcome = Outcome.ENV_TIMEOUT
        """Outcome of the failure that `deadline_failure` returns; set by `waits_for`."""
        self._awaited = ""
        """Phrase for the event that the episode waits for; set by `waits_for`."""
        self._advice = ""
        """Phrase for the thing that the user should check if the deadline passes; set by `waits_for`."""

    def turn(self) -> int:
        """Return the number of the turn in progress, counted from 1."""
        return len(self.transcript.turns) + 1

    def new_request(
        self,
        prompt: list[int],
        max_new_tokens: int,
        stop: tuple[str, ...],
        grammar: Grammar | None,
        on_tokens: Callable[[Sequence[int]], None],
    ) -> ResponseRequest:
        """Return the next request of the episode. Requests are numbered in the order in which they are made.

        This number is not the number of the turn, because requests of responses that are sampled ahead count, too.

        Args:
            prompt: tokens before the response.
            max_new_tokens: largest number of tokens of the response.
            stop: texts that end the response.
            grammar: form that the response must have, in the language of the engines; None: no form.
            on_tokens: called with new tokens while the response is sampled.
        """
        number, self._requests = self._requests, self._requests + 1
        task, settings = self.task, self.settings
        return ResponseRequest(
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            key=response_key(task, number),
            sampling=task.sampling,
            stop=stop,
            grammar=grammar,
            seed=None if settings.seed is None else response_seed(settings.seed, task, number),
            group_id=task.group_id,
            task_id=task.task_id,
            min_version=self.lease.min_version,
            timeout_s=settings.generate_s,
            on_tokens=on_tokens,
            tally=self.progress,
        )

    def waits_for(self, late_outcome: Outcome, what: str, look_at: str) -> None:
        """Record the event that the episode waits for from now on, for the failure if its deadline passes meanwhile.

        This is called before each wait. `deadline_failure` uses the newest record.

        Args:
            late_outcome: outcome of the failure.
            what: phrase for the event.
            look_at: phrase for the thing that the user should check.
        """
        self._late_outcome, self._awaited, self._advice = late_outcome, what, look_at

    def deadline_failure(self) -> Failure:
        """Return the failure of an episode that took longer than `episode_s`. `waits_for` has recorded its reason."""
        return self.failed(
            self._late_outcome,
            f"the episode took longer than {self.settings.episode_s:g} s; it was waiting for {self._awaited}; look at "
            f"{self._advice}, or raise deadlines.episode",
        )

    def failed(self, outcome: Outcome, message: str) -> Failure:
        """Return a failure of the episode with this reason. It also has the number of tokens sampled for it."""
        return Failure(self.task, outcome, message, self.progress.tokens + self.progress.lost)


def _informed(env: Environment) -> Informed | None:
    """Return the environment if it has a method `inform` and so uses the view of its episode; None otherwise."""
    # The class is checked, not the object: `issubclass` caches its results, while `isinstance` would look up all names
    # of the protocol again for each episode.
    return cast("Informed", env) if issubclass(type(env), Informed) else None


def text_of(observation: Observation) -> str:
    """Return an observation as a text for people, who read it in the samples of a run."""
    if isinstance(observation, str):
        return observation
    return "\n".join(f"{message.role}: {message.content}" for message in observation)
