"""Function `flash.play`: plays an episode of an environment with given answers, for tests of environments.

Users call it in their tests and notebooks. The real episode code runs, with its deadlines and checks. The given answers
replace the model, and each character is one token.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence

import anyio
import msgspec

from flash.config.tree import Config
from flash.environment.interface import is_held_out
from flash.environment.load import LoadedEnvironment
from flash.environment.shared import sharing
from flash.errors import EnvError
from flash.rollout.engine import ResponseRequest
from flash.rollout.episode.episode import EpisodePlayer, EpisodeProgress, EpisodeSettings, text_of
from flash.rollout.episode.phases import Phases
from flash.rollout.episode.tokenizer import Tokenizer
from flash.run.loop_watch import WatchedLoop
from flash.samples.rules import ProblemKinds
from flash.sampling import Grammar
from flash.types import (
    Completion,
    Failure,
    Lease,
    Observation,
    Outcome,
    ResponseForm,
    Task,
    Tool,
    Trajectory,
    VersionRun,
)
from flash.waiting import deadline

_log = logging.getLogger(__name__)

END = 0
"""Token id that ends an answer. All other token ids are characters."""
NO_LIMIT = 1 << 30
"""Longest sequence in characters, which no episode reaches. A model's limit does not apply, because it counts the
model's own tokens."""


class Played(msgspec.Struct, frozen=True):
    """Result of an episode that `flash.play` has played."""

    shown: list[str]
    """Texts that the environment showed, one before each answer."""
    rewards: list[float]
    """Reward of each answer."""
    metrics: dict[str, float]
    """Values of `info["metrics"]`. If several steps return a metric, the last value counts."""
    notes: list[str]
    """Text of `info["note"]` of each step."""
    truncated: bool
    """True if the environment or `rollout.max_turns` cut the episode off."""

    @property
    def reward(self) -> float:
        """Reward of the whole episode: the sum of `rewards`."""
        return sum(self.rewards)


def play(config: Config, answers: Sequence[str], seed: int = 0) -> Played:
    """Play one episode of the environment without a model: each observation is answered with the next of these texts.

    As in a run, results and deadlines are checked, and blocking methods run in threads. All episodes of a process are
    played on one event loop, in a thread of its own. So a client at the top of a module, which belongs to the loop that
    used it first, works in every episode, also in a notebook.

    Args:
        config: from `flash.load`; its environment, `[rollout]` and `[deadlines]` are used.
        answers: one for each turn. Answers that are left when the episode ends are ignored.
        seed: seed of the problem. Seeds from `flash.HELD_OUT` on are held-out problems.

    Raises:
        EnvError: the environment raised an error, returned a wrong value, or continues after the last answer.
        ConfigError: there is no such environment, or it does not accept its options.
    """
    playing = asyncio.run_coroutine_threadsafe(_played(config, answers, seed), _loop())
    try:
        return playing.result()
    except BaseException:
        playing.cancel()  # at Ctrl-C; no effect if the episode has ended
        raise


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the loop that episodes are played on; the first call in a process starts it.

    It runs in a daemon thread until the process ends, and does not delay that end.
    """
    loop = WatchedLoop()
    loop.call_soon(loop.watch, _log.warning)
    # anyio kills its worker processes when the loop's main task ends. An episode must not be that task: the next one
    # would be given a killed worker.
    threading.Thread(
        target=loop.run_until_complete, args=(anyio.sleep_forever(),), name="flash.play", daemon=True
    ).start()
    return loop


# A forked child inherits the loop, but not the thread that runs it. It starts a loop of its own.
os.register_at_fork(after_in_child=_loop.cache_clear)


async def _played(config: Config, answers: Sequence[str], seed: int) -> Played:
    """Prepare the environment and play the episode, for `play`, on the loop of `_loop`. Raises the errors of `play`."""
    env = LoadedEnvironment(config.env.path, config.env.options)
    async with sharing(config.run.name, close_s=config.deadlines.shutdown):
        with deadline(config.deadlines.env_step, "the environment to be ready", "its `prepare`"):
            await env.prepare()
        result = await play_answers(config, env, answers, seed)
    if isinstance(result, Failure):
        raise EnvError(result.message)
    turns = result.turns
    return Played(
        [turn.observation for turn in turns],
        [turn.reward for turn in turns],
        result.env_metrics(),
        [turn.note for turn in turns],
        result.outcome is Outcome.TRUNCATED,
    )


async def play_answers(
    config: Config,
    env: LoadedEnvironment,
    answers: Sequence[str] | Callable[[str], str],
    seed: int,
    *,
    one_turn: bool = False,
) -> Trajectory | Failure:
    """Play one episode in which these texts are the model's responses, one after the other. Returns its result.

    `flash.play` and `flash check-env` call this, and the dry run with the own answer of a problem. An error of the
    environment, and an EnvError of `answers`, is returned as a `Failure`.

    Args:
        config: its `[rollout]` and `[deadlines]` are used.
        env: the environment, whose `prepare` has been called.
        answers: one for each turn; or a function that gets the text that was shown last, and returns the answer.
        seed: seed of the problem.
        one_turn: True if the episode is cut off after its first turn.

    Raises:
        FlashError: the environment's classmethods about its problems have failed, or its domains are invalid.
    """
    problems = ProblemKinds.of(config, env.kind_of, env.domains())
    kind = env.kind_of(seed)
    settings = msgspec.structs.replace(
        EpisodeSettings.of_run(config, problems.domains).for_kind(kind),
        max_length=NO_LIMIT,
    )
    if one_turn:
        settings = msgspec.structs.replace(settings, max_turns=1)
    sampling = problems.domains[kind].sampling if kind in problems.domains else config.sampling
    split = "eval" if is_held_out(seed) else "train"
    # An agent gets these sampling settings with its problem, although nothing is sampled here.
    task = Task(0, 0, 0, seed, kind=kind, split=split, sampling=sampling)
    player = EpisodePlayer(env.make, _Characters(), _Answers(answers), settings, Phases(), now=anyio.current_time)
    return await player.play(Lease(0, task, 0), EpisodeProgress())


class _Answers:
    """Stand-in for the model and its engines: it returns the given answers, one after the other."""

    def __init__(self, answers: Sequence[str] | Callable[[str], str]) -> None:
        self._answers = answers
        self._given = 0
        """Number of answers that were returned."""

    async def generate(self, request: ResponseRequest) -> Completion:
        """Return the next answer as a completion. Raises EnvError if no answer is left.

        The episode player calls this in place of `LLMProxy.generate`, for each response.
        """
        if callable(self._answers):
            # The prompt has all earlier observations and answers. The last observation follows the end of the last
            # answer.
            answer = self._answers("".join(map(chr, request.prompt)).rpartition(chr(END))[2])
        elif self._given < len(self._answers):
            answer = self._answers[self._given]
        else:
            raise EnvError(
                f"the episode goes on after {self._given} answer(s): give one answer for each response "
                "that it asks for, or end it (an environment returns `terminated`; an agent returns its answer)"
            )
        self._given += 1
        tokens = [*map(ord, answer), END]
        request.on_tokens(tokens)  # as an engine reports tokens while it samples them
        # The log-probs (0) and the version (0) of the tokens have no meaning here; nothing is trained.
        return Completion(tokens, [0.0] * len(tokens), [VersionRun(0, len(tokens))], "stop")


class _Characters(Tokenizer):
    """Tokenizer with one token per character, so that no model is needed. The methods are those of `Tokenizer`."""

    def render(self, observation: Observation, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of the first observation. Tools are not rendered."""
        return [ord(character) for character in text_of(observation)]

    def follow(self, observation: Observation, end: int | None, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the tokens of a later observation. `end`, the token that ended the response before, has no effect."""
        return self.render(observation)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a response."""
        return "".join(chr(token) for token in token_ids if token != END)

    def check_reads_calls(self) -> None:
        """Do nothing: given answers call no functions."""

    async def grammar(self, form: ResponseForm, tools: Sequence[Tool]) -> Grammar:
        """Return a grammar without effect: given answers are not changed."""
        return Grammar("")
