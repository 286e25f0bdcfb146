"""Episodes of `flash check-env`: an environment is played without a model, and the checks read what happened.

`flash.run.checks.env.checks` makes one `Trial` and passes it to each check. The episodes run in the real
`EpisodePlayer` (`flash.run.play.play_answers`), with the deadlines of the configuration. A *policy* gives the answers
in place of the model. `CutEnvironment` cancels an episode while a method of the environment awaits something.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import tempfile
import time
import types
from collections.abc import Awaitable, Callable, Generator, Iterable
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import anyio
import msgspec

from flash.config.tree import Config
from flash.environment.calls import shortened, typed_errors
from flash.environment.interface import Environment, Info, SolvedExample, StepResult, WarmStart
from flash.environment.load import LoadedEnvironment
from flash.environment.places import lines_awaited, place_in
from flash.errors import EnvError, FlashError
from flash.foreign.forking import python_command
from flash.run.play import Played, play, play_answers
from flash.types import Failure, Observation
from flash.waiting import first_error

_T = TypeVar("_T")

PARALLEL = 8
"""Number of episodes that `Trial.play_many` plays at the same time."""
EXAMPLES = 500
"""Largest number of solved examples in which `Trial.known_answers` looks for a problem."""
EXAMPLES_SHARE = 0.25
"""Share of the time of a check in which these are made."""
HOLD_S = 0.4
"""Seconds for which `CutEnvironment` holds a method at an `await` until the cancellation arrives. The cancellation does
not arrive if the code shields itself against it. Longer than `SPIN_S` of `flash.environment.calls`, such code would be
abandoned."""
ROLE = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
"""Mark of a chat message's role in a shown text, which is no part of the prompt."""

Policy = Callable[[int, list[str]], str]
"""Function that answers in place of the model. The arguments are the problem's seed and the texts shown so far."""


class Episode(msgspec.Struct, frozen=True):
    """An episode that was played for a check."""

    seed: int
    """Seed of the problem."""
    shown: list[str]
    """Texts that the environment showed, one before each answer."""
    answers: list[str]
    """Answers of the policy."""
    rewards: list[float]
    """Reward of each answer; empty if the episode failed."""
    failure: Failure | None
    """Reason why the episode has no reward; None if it has one."""
    reset_s: float
    """Seconds from the call of the constructor to the first observation."""
    step_s: list[float]
    """Seconds of each step; empty if the episode failed."""

    @property
    def reward(self) -> float:
        """Reward of the whole episode."""
        return sum(self.rewards)


class _EnoughSeenError(EnvError):
    """Raised in place of an answer to end an episode after its first observation."""


class Trial:
    """An environment under test: it plays episodes until the time of the present check is over.

    Args:
        config: its tables `[env]`, `[rollout]` and `[deadlines]` are used.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.env = LoadedEnvironment(config.env.path, config.env.options)
        self.episodes: list[Episode] = []
        """Episodes played so far, without those of `keep=False`."""
        self.until = 0.0
        """Time of `perf_counter` at which the present check should end. `is_late` compares with it."""
        self.is_playable = False
        """True if the check `interface` has played a training problem and a held-out one to their ends."""
        self.unfinished = ""
        """Phrase for the episode that took longest of those that the end of the present check has cancelled; empty if
        there is none."""
        self.unfinished_s = 0.0
        """Seconds that the episode of `unfinished` took."""
        self._known: dict[int, list[str]] | None = None
        """Result of `known_answers`; None before its first call that had time enough."""

    @property
    def is_late(self) -> bool:
        """True if the present check should play no further episodes."""
        return perf_counter() >= self.until

    async def play(
        self, seed: int, policy: Policy, env: LoadedEnvironment | None = None, *, keep: bool = True
    ) -> Episode:
        """Play one episode and return it.

        Args:
            seed: seed of the problem.
            policy: gives the answers.
            env: environment in place of the one under test.
            keep: True if the episode is added to `episodes`.
        """
        shown: list[str] = []
        answers: list[str] = []
        start = perf_counter()
        reset_s = 0.0

        def answer(text: str) -> str:
            nonlocal reset_s
            if not shown:
                reset_s = perf_counter() - start
            shown.append(text)
            answers.append(policy(seed, shown))
            return answers[-1]

        try:
            result = await play_answers(self.config, env or self.env, answer, seed)
        except asyncio.CancelledError:
            self._note_unfinished(seed, answers, perf_counter() - start)
            raise
        turns = [] if isinstance(result, Failure) else result.turns
        failure = result if isinstance(result, Failure) else None
        rewards, step_s = [turn.reward for turn in turns], [turn.env_s for turn in turns]
        episode = Episode(seed, shown, answers, rewards, failure, reset_s, step_s)
        if keep:
            self.episodes.append(episode)
        return episode

    def _note_unfinished(self, seed: int, answers: list[str], seconds: float) -> None:
        """Store the phrase about a cancelled episode in `unfinished`, if none took longer.

        Args:
            seed: seed of the problem.
            answers: answers of the policy so far.
            seconds: time from the start of the episode to its cancellation.
        """
        if seconds > self.unfinished_s:
            when = f"after the answer {shortened(repr(answers[-1]), 80)}" if answers else "before its first answer"
            self.unfinished = f"seed {seed} was {seconds:.2g} s under way, {when}"
            self.unfinished_s = seconds

    async def play_many(self, seeds: Iterable[int], policy: Policy, *, keep: bool = True) -> list[Episode]:
        """Play the problems of these seeds, several at the same time, until all are played or the check is late.

        Returns the episodes in the order of their seeds.
        """
        left, played = iter(seeds), list[Episode]()

        async def work() -> None:
            for seed in left:
                played.append(await self.play(seed, policy, keep=keep))
                if self.is_late:
                    return

        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(PARALLEL):
                    tasks.start_soon(work)
        except* FlashError as errors:  # callers expect an error and no group
            raise first_error(errors) from None
        return sorted(played, key=lambda episode: episode.seed)

    async def look(self, seeds: Iterable[int]) -> dict[int, str]:
        """Return the first observation of each seed. Seeds whose reset fails, or that come too late, are left out."""

        def stop(seed: int, shown: list[str]) -> str:
            raise _EnoughSeenError("seen")

        seen = await self.play_many(seeds, stop, keep=False)
        return {episode.seed: episode.shown[0] for episode in seen if episode.shown}

    async def known_answers(self, count: int) -> dict[int, list[str]]:
        """Return the known answers to the first training problems by seed, one text per turn.

        An answer comes from the class method `solution_of`, or else from a solved example with the same prompt. Seeds
        without a known answer are left out, and those for which time is too short. Later calls return the result of the
        first one that had time enough.

        Raises:
            EnvError: a method of the environment failed.
        """
        if self._known is not None:
            return self._known
        known = await self.answers_to(await self.look(range(count)))
        if not self.is_late:
            self._known = known
        return known

    async def answers_to(self, prompts: dict[int, str]) -> dict[int, list[str]]:
        """Return the known answers to the problems with these prompts, by seed, as `known_answers` does. Raises the
        errors of `known_answers`."""
        # The methods may read a data set, which blocks.
        return await anyio.to_thread.run_sync(self._answers_to, prompts)

    def _answers_to(self, prompts: dict[int, str]) -> dict[int, list[str]]:
        """Return the known answers to the problems with these prompts, by seed. Runs in a thread."""
        made: object = self.made()
        examples: dict[str, list[str]] | None = None
        known: dict[int, list[str]] = {}
        for seed, prompt in ((seed, plain(shown)) for seed, shown in prompts.items()):
            if self.is_late:  # nothing can cancel this thread
                break
            if (solution := self.env.solution_of(seed)) is not None:
                known[seed] = [solution]
            elif isinstance(made, WarmStart):
                if examples is None:
                    seconds = EXAMPLES_SHARE * (self.until - perf_counter())
                    examples = _answers_by_prompt(examples_within(made, EXAMPLES, seconds))
                # Many environments draw the problem of a seed and the first example of the same seed alike.
                answers = examples.get(prompt) or _answers_by_prompt(examples_within(made, 1, 0.0, seed)).get(prompt)
                if answers is not None:
                    known[seed] = answers
        return known

    def made(self) -> object:
        """Return an object of the environment's class outside of an episode, of which no episode method may be called.

        Raises:
            EnvError: the constructor failed.
        """
        with typed_errors("start"):
            made: Any = self.env.make()
        return getattr(made, "blocking", made)


def examples_within(env: WarmStart, most: int, seconds: float, seed: int = 0) -> list[SolvedExample]:
    """Return at least one solved example, and at most `most`: as many as can be made in `seconds`.

    The time that the first one takes is measured: some environments need a second for each.

    Raises:
        EnvError: the method of the environment failed.
    """
    start = perf_counter()
    with typed_errors("solved_examples"):
        examples = env.solved_examples(1, seed)
        count = min(most, int(seconds / max(perf_counter() - start, 1e-6)))
        return env.solved_examples(count, seed) if count > 1 else examples


def _answers_by_prompt(examples: list[SolvedExample]) -> dict[str, list[str]]:
    """Return the answers of solved examples by the first prompt, one text per turn."""
    return {one.prompt: [one.answer, *(turn.answer for turn in one.later)] for one in examples}


def plain(shown: str) -> str:
    """Return a shown text without the marks of the roles of chat messages."""
    return ROLE.sub("", shown)


def empty(seed: int, shown: list[str]) -> str:
    """Answer nothing. A policy."""
    return ""


def echo(seed: int, shown: list[str]) -> str:
    """Repeat the text that was shown last. A policy."""
    return plain(shown[-1])


def guess(seed: int, shown: list[str]) -> str:
    """Answer a random word of the texts shown so far, or a random number. A policy."""
    rng = random.Random(f"{seed} {len(shown)}")
    words = re.findall(r"\w+", plain("\n".join(shown)))
    return rng.choice([*words, str(rng.randrange(100))])


def always(text: str) -> Policy:
    """Return the policy that gives this answer in each turn."""
    return lambda seed, shown: text


def first(text: str) -> Policy:
    """Return the policy that gives this answer in the first turn, and then empty ones."""
    return lambda seed, shown: text if len(shown) == 1 else ""


def in_turn(answers: dict[int, list[str]]) -> Policy:
    """Return the policy that gives the answers of each seed in turn, and then empty ones."""
    return lambda seed, shown: answers[seed][len(shown) - 1] if len(shown) <= len(answers[seed]) else ""


async def play_apart(config: Config, answers: dict[int, list[str]]) -> dict[int, Played]:
    """Play an episode with given answers for each seed, in a new process, in which Python's `hash` gives other values
    and the local date is another one.

    Raises:
        FlashError: the process failed.
    """
    with tempfile.TemporaryDirectory(prefix="flash-check-") as folder:
        file = Path(folder) / "played.json"
        ran = await anyio.run_process(
            [*python_command(f"from {__name__} import play_given; play_given()"), str(file)],
            input=msgspec.json.encode((config, answers)),
            # The user may have fixed the hash values.
            env={**os.environ, "PYTHONHASHSEED": "1", "TZ": _other_date()},
            check=False,
        )
        if ran.returncode or not file.is_file():
            last = (ran.stderr.decode("utf-8", "replace").strip().splitlines() or ["no output"])[-1]
            raise FlashError(f"the process ended with exit code {ran.returncode}: {last}")
        return msgspec.json.decode(file.read_bytes(), type=dict[int, Played])


def _other_date() -> str:
    """Return a time zone in which the local date differs from the one of this process."""
    now = time.time()
    # 14 hours before and 12 hours behind UTC, the dates differ from each other.
    ahead = time.gmtime(now + 14 * 3600).tm_yday != time.localtime(now).tm_yday
    return "AHEAD-14" if ahead else "BEHIND+12"


def play_given() -> None:
    """Play the episodes that `play_apart` gives, and write the results to the file that is named on the command line.
    The body of its process."""
    config, answers = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[Config, dict[int, list[str]]])
    played = {seed: play(config, texts, seed) for seed, texts in answers.items()}
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(played))


# -- cancellation ------------------------------------------------------------------------------------------------------


class Cut:
    """Place at which an episode is cancelled, and what the code did then.

    Args:
        method: name of the method.
        at: number of the `await` in the method's calls, from 1.
    """

    def __init__(self, method: str, at: int) -> None:
        self.method, self.at = method, at
        self.scope = anyio.CancelScope()
        """Scope of the episode. `_Cuts` cancels it in `reset` and `step`; `close` ends at its deadline."""
        self.awaits = 0
        """Number of awaits so far."""
        self.place = ""
        """Line that awaited when the episode was cancelled; empty if the method has fewer awaits than `at`."""
        self.delivered = False
        """True if the cancellation has arrived in the code."""
        self.swallowed = False
        """True if the method returned a result after its cancellation."""


class CutEnvironment(LoadedEnvironment):
    """The environment under test, whose episode is cancelled at one `await`."""

    def __init__(self, config: Config, cut: Cut) -> None:
        super().__init__(config.env.path, config.env.options)
        self._cut = cut

    def make(self, kind: str = "") -> Environment:
        """Return an environment for one episode. Implements `LoadedEnvironment.make`."""
        return (_InformedCuts if self.is_informed else _Cuts)(super().make(kind), self._cut)


class _Cuts:
    """An `Environment` around the one under test. It holds one method at an `await`, and cancels the episode there."""

    def __init__(self, env: Any, cut: Cut) -> None:
        self._env, self._cut = env, cut

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Implement `Environment.reset`."""
        return await self._run("reset", self._env.reset(seed))

    async def step(self, action: str) -> StepResult:
        """Implement `Environment.step`."""
        return await self._run("step", self._env.step(action))

    async def close(self) -> None:
        """Implement `Environment.close`."""
        await self._run("close", self._env.close())

    @types.coroutine
    def _run(self, method: str, awaitable: Awaitable[_T]) -> Generator[Any, Any, _T]:
        """Run a method as `await` does. At the `await` of the cut, cancel the episode, and wait for the cancellation.

        While it waits, nothing is lost: the future that the code awaits is passed on to the event loop first.
        """
        cut, steps = self._cut, awaitable.__await__()
        thrown: BaseException | None = None
        while True:
            try:
                awaited = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                cut.swallowed |= cut.method == method and cut.delivered
                return end.value
            thrown = None
            cut.awaits += cut.method == method
            cuts_here = cut.method == method and cut.awaits == cut.at and not cut.place
            try:
                if cuts_here:
                    cut.place = place_in(lines_awaited(awaitable)) or method
                    if method != "close":
                        cut.scope.cancel()
                yield awaited
                if cuts_here:
                    # The awaited thing may be ready before the cancellation has arrived.
                    yield from asyncio.sleep(HOLD_S).__await__()
            except BaseException as error:
                thrown = error
                cut.delivered |= cut.method == method and bool(cut.place) and isinstance(error, asyncio.CancelledError)


class _InformedCuts(_Cuts):
    """Environment of `_Cuts` that gets the view of its episode."""

    def inform(self, episode: Any) -> None:
        """Implement `Informed.inform`."""
        self._env.inform(episode)
