"""Episodes of `flash check-env`: an environment is played without a model, and the checks read what happened.

`flash.run.checks.env.checks` makes one `Trial` and passes it to each check. The episodes run in the real
`EpisodePlayer` (`flash.run.play.play_answers`), with the deadlines of the configuration. A *policy* gives the answers
in place of the model. `CutEnvironment` cancels an episode while a method of the environment awaits something.

The *problem* of an episode follows from its seed; seeds from `HELD_OUT` of `flash.environment.interface` on are
held-out problems. *Known answers* are right answers that the environment's class gives itself. A check is *late* when
its time is over. The checks run one after another on one event loop, so the state of a `Trial` needs no lock.
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
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
import msgspec

from flash.config.tree import Config
from flash.environment.calls import call_function, call_method, shortened, typed_errors
from flash.environment.interface import Environment, Info, SolvedExample, StepResult, WarmStart
from flash.environment.load import LoadedEnvironment
from flash.environment.places import lines_awaited, place_in
from flash.environment.shared import sharing
from flash.errors import EnvError, FlashError
from flash.foreign.forking import python_command
from flash.run.loop_watch import run_watched
from flash.run.play import play_answers
from flash.types import Failure, Observation, Outcome
from flash.waiting import first_error

_T = TypeVar("_T")
"""Result of a method of an environment."""

PARALLEL = 8
"""Number of episodes that `Trial.play_many` plays at the same time."""
EXAMPLES = 500
"""Largest number of solved examples in which `Trial.known_answers` looks for a problem."""
EXAMPLES_SHARE = 0.25
"""Share of the remaining time of a check in which these examples are made."""
GROWTH = 2
"""Factor by which the number of solved examples grows from one call of `solved_examples` to the next."""
HOLD_S = 0.4
"""Seconds for which `CutEnvironment` holds a method at an `await` until the cancellation arrives. The cancellation does
not arrive if the code shields itself against it. It must be below `SPIN_S` of `flash.environment.calls` (seconds):
after that time the caller gives up a cancelled call."""
ROLE = re.compile(r"^(system|user|assistant|tool): ", re.MULTILINE)
"""Mark of a chat message's role in a shown text. It stands before each message and is no part of it."""

OPTIONS_LINE = re.compile(r"^[^:\n]{1,40}: *([^,:.\n]+(?:,[^,:.\n]+)+)$", re.MULTILINE)
"""Line that offers options: a short name, a colon, and items that commas divide."""

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
    """Seconds from the call of the constructor to the first observation; 0 if the episode failed before that."""
    step_s: list[float]
    """Seconds of each step; empty if the episode failed."""

    @property
    def reward(self) -> float:
        """Reward of the whole episode."""
        return sum(self.rewards)


class _EnoughSeenError(EnvError):
    """Raised by a policy in place of an answer, to end an episode after its first observation."""


class Trial:
    """An environment under test: it plays episodes until the time of the present check is over.

    Args:
        config: its tables `[env]`, `[rollout]` and `[deadlines]` are used. The check `cancellation` replaces it for
            some episodes by one with a shorter deadline.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.env = LoadedEnvironment(config.env.path, config.env.options)
        self.episodes: list[Episode] = []
        """Episodes played so far, without those of `keep=False`."""
        self.until = 0.0
        """Time of `perf_counter` at which the present check should play no further episodes. The check may set it, for
        its parts."""
        self.is_playable = False
        """Set by the check `interface`: True if `reset` shows a training problem and a held-out one, so that further
        checks are possible."""
        self.always_fails = False
        """Set by the check `interface`: True if each answer to a training problem fails, so that there is no reward."""
        self.hung = ""
        """Error message of the first call since `begin_check` that exceeded its deadline; empty if there is none."""
        self.unfinished = ""
        """Phrase for the work that took longest of the work that the end of the present check has cancelled, such as an
        episode; empty if there is none."""
        self.unfinished_s = 0.0
        """Seconds that the work of `unfinished` took."""
        self._known: dict[int, list[str]] | None = None
        """Result of `known_answers`; None before its first call that had time enough."""

    @property
    def is_late(self) -> bool:
        """True if the present check should play no further episodes."""
        return perf_counter() >= self.until

    def begin_check(self, until: float) -> None:
        """Begin a check, which should play no episodes after the time `until` of `perf_counter`."""
        self.until, self.hung = until, ""
        self.unfinished, self.unfinished_s = "", 0.0

    async def play(
        self, seed: int, policy: Policy, env: LoadedEnvironment | None = None, *, keep: bool = True
    ) -> Episode:
        """Play one episode and return it. An EnvError of the environment or the policy becomes the episode's `failure`.

        A cancelled episode is noted in `unfinished`; it is not added to `episodes`.

        Args:
            seed: seed of the problem.
            policy: gives the answers.
            env: environment in place of the one under test; None: the one under test.
            keep: True if the episode is added to `episodes`.

        Raises:
            FlashError: a class method of the environment failed, such as `kind_of`.
        """
        shown: list[str] = []
        answers: list[str] = []
        start = perf_counter()
        reset_s = 0.0

        def answer(text: str) -> str:
            """Note the shown text and the answer of the policy to it. The episode calls this for each response."""
            nonlocal reset_s
            if not shown:
                reset_s = perf_counter() - start
            shown.append(text)
            answers.append(policy(seed, shown))
            return answers[-1]

        try:
            result = await play_answers(self.config, env or self.env, answer, seed)
        except asyncio.CancelledError:
            when = f"after the answer {shortened(repr(answers[-1]), 80)}" if answers else "before its first answer"
            self._note_unfinished(f"seed {seed}", perf_counter() - start, f", {when}")
            raise
        turns = [] if isinstance(result, Failure) else result.turns
        failure = result if isinstance(result, Failure) else None
        if failure is not None and failure.outcome is Outcome.ENV_TIMEOUT:
            self.hung = self.hung or failure.message
        rewards, step_s = [turn.reward for turn in turns], [turn.env_s for turn in turns]
        episode = Episode(seed, shown, answers, rewards, failure, reset_s, step_s)
        if keep:
            self.episodes.append(episode)
        return episode

    def _note_unfinished(self, what: str, seconds: float, where: str = "") -> None:
        """Store a phrase about cancelled work in `unfinished`, unless other work took longer.

        The end of a check cancels up to `PARALLEL` episodes at once; the slowest one explains most.

        Args:
            what: name of the work, such as `seed 5`.
            seconds: time from the start of the work to its cancellation.
            where: end of the phrase, such as `, before its first answer`.
        """
        if seconds > self.unfinished_s:
            self.unfinished = f"{what} was {seconds:.2g} s under way{where}"
            self.unfinished_s = seconds

    @contextmanager
    def working(self, what: str) -> Generator[None]:
        """Note the block in `unfinished` if it is cancelled. `what` names its work, which is no episode."""
        start = perf_counter()
        try:
            yield
        except asyncio.CancelledError:
            self._note_unfinished(what, perf_counter() - start)
            raise

    async def play_many(self, seeds: Iterable[int], policy: Policy, *, keep: bool = True) -> list[Episode]:
        """Play the problems of these seeds, `PARALLEL` at the same time, until all are played or the check is late.

        Even a late check plays the first `PARALLEL` of them. Returns the episodes, also the failed ones, in the order
        of their seeds. `keep`: see `play`.

        Raises:
            FlashError: a class method of the environment failed, such as `kind_of`. The other episodes are cancelled.
        """
        left, played = iter(seeds), list[Episode]()

        async def work() -> None:
            """Play the next problem of `left` again and again. All workers share this iterator."""
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

    async def look(self, seeds: Iterable[int], see: Callable[[int, str], None] | None = None) -> dict[int, str]:
        """Return the first observation of each seed. Seeds whose reset fails, or that come too late, are left out.

        `see` is called with each seed and its observation at once, so that a cancelled call has seen some.
        """

        def stop(seed: int, shown: list[str]) -> str:
            """End the episode. A policy."""
            if see is not None:
                see(seed, shown[0])
            raise _EnoughSeenError("seen")

        seen = await self.play_many(seeds, stop, keep=False)
        return {episode.seed: episode.shown[0] for episode in seen if episode.shown}

    async def close_early(self, seed: int) -> None:
        """Reset an environment and close it without a step, as a run does if an episode ends before its first answer.

        Does nothing for an environment that gets a view of its episode, because there is no episode here.

        Raises:
            EnvError: the close failed, or took longer than its deadline (EnvTimeoutError). The message names the line.
        """
        if self.env.is_informed:
            return
        deadlines, context = self.config.deadlines, copy_context()
        kind = self.env.kind_of(seed)
        env = call_function(f"start (seed {seed})", lambda: self.env.make(kind))
        try:
            what, seconds = f"reset (seed {seed})", deadlines.env_step
            await call_method(what, seconds, "env_step", lambda: env.reset(seed), env=env, context=context)
        finally:
            what, seconds = f"close (seed {seed})", deadlines.close
            await call_method(what, seconds, "close", env.close, env=env, context=context, shield=True)

    @property
    def knows_answers(self) -> bool:
        """True if the environment's class has a method that gives known answers.

        Raises:
            EnvError: the constructor or the method `wrapped` of the environment failed.
        """
        return self.env.is_solved or isinstance(self.made(), WarmStart)

    async def known_answers(self, count: int) -> dict[int, list[str]]:
        """Return the known answers to the training problems of the seeds below `count`, by seed, one text per turn.

        An answer comes from the class method `solution_of`, or else from a solved example with the same prompt. Seeds
        without a known answer are left out, and seeds for which time is too short. Later calls return the result of the
        first call that had time enough, whatever their `count`; all callers pass the same number.

        Raises:
            EnvError: a method of the environment failed.
        """
        if self._known is not None:
            return self._known
        known = await self.answers_to(await self.look(range(count))) if self.knows_answers else {}
        if not self.is_late:
            self._known = known
        return known

    async def answers_to(self, prompts: dict[int, str]) -> dict[int, list[str]]:
        """Return the known answers to the problems of the seeds in `prompts`, by seed, as `known_answers` does.

        `prompts` is a dict from the seed to the first text that was shown. Raises the errors of `known_answers`.
        """
        with self.working("the making of known answers"):
            # The methods may read a data set, which blocks.
            known = await anyio.to_thread.run_sync(self._answers_to, prompts)
            await anyio.lowlevel.checkpoint()  # a cancellation has waited for the thread
            return known

    def _answers_to(self, prompts: dict[int, str]) -> dict[int, list[str]]:
        """Do the work of `answers_to`, in a thread. The event loop awaits its end, also after a cancellation."""
        made: object = self.made()
        examples: dict[str, list[str]] | None = None  # answers by prompt; made for the first seed that needs them
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
        # An environment with plain `def` methods is wrapped, and `blocking` is the user's own object.
        return getattr(made, "blocking", made)


def examples_within(env: WarmStart, most: int, seconds: float, seed: int = 0) -> list[SolvedExample]:
    """Return at least one solved example, and at most `most`: as many as can be made in about `seconds`.

    Some environments need a second for each, and keep the first ones. So the number grows step by step, as long as the
    time of the last step shows that the next one will be in time. `seed` determines the examples. Blocks, so callers
    run it in a thread.

    Raises:
        EnvError: the method of the environment failed.
    """
    count, end = 1, perf_counter() + seconds
    with typed_errors("solved_examples"):
        while True:
            start = perf_counter()
            examples = env.solved_examples(count, seed)
            more, now = min(most, GROWTH * count), perf_counter()
            # The next call may have `more - count` examples to make that no call has made, and each may take long.
            if more == count or now + (now - start) * more / count > end:
                return examples
            count = more


def _answers_by_prompt(examples: list[SolvedExample]) -> dict[str, list[str]]:
    """Return the answers of solved examples: dict from the first prompt to one text per turn."""
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
    """Answer a random word of the texts shown so far, or a random number. A policy.

    Every second answer on average is an option, if the last text offers some: a text adventure understands `go east`,
    but no single word of it. The answer follows from the arguments, so a repeated episode gets the same answers.
    """
    rng = random.Random(f"{seed} {len(shown)}")
    if (offered := options_in(plain(shown[-1]))) and rng.random() < 0.5:
        return rng.choice(offered)
    words = re.findall(r"\w+", plain("\n".join(shown)))
    return rng.choice([*words, str(rng.randrange(100))])


def options_in(text: str) -> list[str]:
    """Return the items of the last list in a text: a line such as `Commands: go east, look`, with at least two items.

    Returns an empty list if the text has no such line.
    """
    lists = OPTIONS_LINE.findall(text)
    return [item.strip() for item in lists[-1].split(",")] if lists else []


def always(text: str) -> Policy:
    """Return the policy that gives this answer in each turn."""
    return lambda seed, shown: text


def first(text: str) -> Policy:
    """Return the policy that gives this answer in the first turn, and then empty ones."""
    return lambda seed, shown: text if len(shown) == 1 else ""


def in_turn(answers: dict[int, list[str]]) -> Policy:
    """Return the policy that gives the answers of each seed in turn, and then empty ones.

    `answers`: dict from every seed that is played to its answers, one per turn.
    """
    return lambda seed, shown: answers[seed][len(shown) - 1] if len(shown) <= len(answers[seed]) else ""


async def play_apart(config: Config, answers: dict[int, list[str]]) -> list[Episode]:
    """Play an episode with given answers for each seed, in a new process, in which Python's `hash` gives other values
    and the local date is another one. The check `determinism` calls this.

    Args:
        config: configuration with the environment.
        answers: dict from the seed to the answers, one per turn.

    Returns:
        The episodes in the order of `answers`, also the failed ones.

    Raises:
        FlashError: the process failed. A cancellation kills the process.
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
        return msgspec.json.decode(file.read_bytes(), type=list[Episode])


def _other_date() -> str:
    """Return a time zone in which the local date differs from the one of this process."""
    now = time.time()
    # The zones 14 hours before and 12 hours behind UTC never have the same date, so the date of one of them differs
    # from the local one. The sign is that of POSIX: negative east of Greenwich.
    ahead = time.gmtime(now + 14 * 3600).tm_yday != time.localtime(now).tm_yday
    return "AHEAD-14" if ahead else "BEHIND+12"


def play_given() -> None:
    """Play the episodes that standard input names, and write the results to the file that the command line names.

    This is the body of the process that `play_apart` starts. An error ends the process, and `play_apart` reports its
    last line.
    """
    config, answers = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[Config, dict[int, list[str]]])

    async def play_all() -> list[Episode]:
        """Prepare the environment, and play the episodes one after the other."""
        trial = Trial(config)
        async with sharing(config.run.name, close_s=config.deadlines.close):
            await trial.env.prepare()
            return [await trial.play(seed, in_turn(answers)) for seed in answers]

    Path(sys.argv[1]).write_bytes(msgspec.json.encode(run_watched(lambda message: None, play_all)))


# -- cancellation ------------------------------------------------------------------------------------------------------


class Cut:
    """Place at which an episode is cancelled, and the behaviour of the code then, for the check `cancellation`.

    Args:
        method: name of the method: `reset`, `step` or `close`.
        at: number of the `await`, from 1, counted over all calls of the method in the episode.
    """

    def __init__(self, method: str, at: int) -> None:
        self.method, self.at = method, at
        self.scope = anyio.CancelScope()
        """Scope that the check puts around the episode. `_Cuts` cancels it in `reset` and `step`. In `close` it only
        waits: the deadline of the call cancels `close`, because the end of an episode is shielded from its scope."""
        self.awaits = 0
        """Number of awaits of the method so far."""
        self.place = ""
        """Line that awaited when the episode was cancelled; empty if the method has fewer awaits than `at`."""
        self.delivered = False
        """True if the cancellation has arrived in the code."""
        self.swallowed = False
        """True if the method returned a result after its cancellation."""


class CutEnvironment(LoadedEnvironment):
    """The environment under test, whose episode is cancelled at the `await` of a `Cut`.

    Args:
        config: configuration with the environment.
        cut: the place; it also gets the results.
    """

    def __init__(self, config: Config, cut: Cut) -> None:
        super().__init__(config.env.path, config.env.options)
        self._cut = cut

    def make(self, kind: str = "") -> Environment:
        """Return an environment for one episode, inside a `_Cuts`. Overrides `LoadedEnvironment.make`."""
        return (_InformedCuts if self.is_informed else _Cuts)(super().make(kind), self._cut)


class _Cuts:
    """An `Environment` around the environment under test. It holds one method at an `await`, and cancels the episode
    there."""

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

        Args:
            method: name of the method.
            awaitable: the running call of the method under test.

        Returns:
            The result of the method. Its errors are raised unchanged, also CancelledError.
        """
        cut, steps = self._cut, awaitable.__await__()
        thrown: BaseException | None = None  # error that the event loop has raised at the last `await`
        while True:  # one round is one `await` of the method
            try:
                awaited = steps.send(None) if thrown is None else steps.throw(thrown)
            except StopIteration as end:
                # A method that returns after its cancellation has caught CancelledError and gone on.
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
                # The future that the code awaits goes to the event loop first, as without a cut. So the cancellation
                # arrives in the code at this `await`, and the event that it awaits is not lost.
                yield awaited
                if cuts_here:
                    # The awaited thing may be ready before the cancellation has arrived.
                    yield from asyncio.sleep(HOLD_S).__await__()
            except BaseException as error:
                thrown = error
                cut.delivered |= cut.method == method and bool(cut.place) and isinstance(error, asyncio.CancelledError)


class _InformedCuts(_Cuts):
    """`_Cuts` around an environment with the method `inform`, which takes a view of the episode before `reset`."""

    def inform(self, episode: Any) -> None:
        """Implement `Informed.inform`."""
        self._env.inform(episode)
