"""Checks of `flash check-env`: each plays episodes of the environment, and judges one thing in one line.

`flash.cli.check_env` calls `examine_environment` on a watched event loop. `CHECKS` lists the checks in their order. A
check is a function of the `Trial`, which plays the episodes and keeps them for later checks. It returns a `Finding`: a
pass, a warning, a failure, or that it was skipped, with a text and an advice. A FlashError that a check raises, such as
an EnvError of the environment, becomes a failure. All checks share the time that the user allows; each has a share of
it, and plays fewer episodes of a slow environment. "The failures below" in a text is the later check `failures`.

Terms: the *problem* of an episode follows from its seed. Seeds from `HELD_OUT` on give held-out problems, which only
evaluations ask; smaller seeds give training problems. A *policy* is a function that answers in place of a model. *Known
answers* are right answers that the environment's class gives itself. A *game* is an episode of several turns.
"""

from __future__ import annotations

import statistics
import tracemalloc
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from time import perf_counter

import anyio
import msgspec

from flash.config.tree import Config
from flash.environment.calls import EnvTimeoutError, UserTask, shortened
from flash.environment.interface import HELD_OUT
from flash.environment.shared import sharing
from flash.errors import EnvError, FlashError
from flash.run.checks.doctor import Finding
from flash.run.checks.env.resources import (
    BlockSampler,
    Holdings,
    growing_place,
    growth_without_jumps,
    own_temporary_folder,
    said,
    traced_bytes,
    tracing,
    variables,
)
from flash.run.checks.env.trial import (
    Cut,
    CutEnvironment,
    Episode,
    Policy,
    Trial,
    always,
    echo,
    empty,
    first,
    guess,
    in_turn,
    play_apart,
)
from flash.types import Outcome
from flash.waiting import deadline

PROBLEMS = 10_000
"""Largest number of training problems, and of held-out ones, whose prompts are compared."""
LOOKED = 300
"""Number of problems of each side after which `problems` looks at the other side. An evaluation asks about as many."""
REPEATS = 100
"""Number of seeds without a new prompt after which a side has no more, if it is at least twice the prompts so far."""
REPEATED = 8
"""Number of problems that are played again to compare observations and rewards."""
REWARDED = 32
"""Number of problems that each simple policy answers."""
TIMED = 50
"""Number of episodes, one after the other, whose calls are timed."""
LEAK_EPISODES = 1000
"""Largest number of episodes after which leaks are counted."""
MOST_AWAITS = 40
"""Largest number of awaits of a method at which an episode is cancelled."""
BATCH = 20
"""Number of episodes that the check `leaks` plays between two looks at the clock and the memory."""
FEW = 10
"""Number of seeds from which a check judges how many different problems they show."""
ALIKE = 20
"""Number of seeds per different prompt from which too few problems are a warning."""
CHANCE_FACTOR, CHANCE_MARGIN = 1.05, 0.02
"""A shortcut passes up to this factor of the reward of pure chance, plus this reward: means of few episodes vary."""
LARGE_SHARE = 0.5
"""Share of the reward of known answers from which a shortcut is a failure, and not only a warning."""
SLOW_SHARE = 0.25
"""Share of a deadline from which the slowest call is a warning: in a run a busy node makes calls slower."""
OBJECT_GROWTH = 1000
"""Bytes per episode by which the objects of Python may grow. Their sizes are exact, but libraries keep a few, too."""
GROWTH, LEAST_GROWTH = 10_000, 4_000_000
"""Bytes by which the resident memory may grow per episode, and in all: allocators take memory in large pieces."""
SHOWN = 300
"""Largest number of characters of an error message, and of a shown prompt."""
ONE_TURN_SHARE, GAME_SHARE = 0.05, 0.25
"""Shares of the reward of known answers from which a shortcut is a warning: with one answer, and in a game."""
CLOSE_S = 0.3
"""Limit of `close` in seconds while it is cancelled, and of a `close` that is known to hang. The deadline of a run
would take too long for each of them."""
TIME_SHARE = 0.9
"""Share of the time of `problems` after which it stops the episodes that run, to report what it has seen."""
NEEDS_REWARD = frozenset({"rewards", "shortcuts", "failures", "training"})
"""Names of the checks that are skipped if each answer fails."""
STEADY = (
    "draw what is random from a generator made from the seed, and keep the state of an episode in `self`; of a judge, "
    "use temperature 0"
)
"""Advice about rewards that change."""
SLOW = "the environment is slow: allow more with --minutes"
"""Advice of a check that had too little time."""

STRANGE = (
    *("", " ", "\n" * 50, "x" * 100_000, "9" * 5000, "-1", "1e999", "nan", "inf", "1/0", "½", "٣", "None", "%s{0}"),
    *("\x00\x1b[0m", "🙂\u202e", "((((", "[1,", '{"a":', "\\boxed{", "<answer>", "</think>", "```python\n", "#### "),
)
"""Answers that programs often fail on. A model may give any of them."""
FORMS = ("<answer></answer>", "\\boxed{}", "#### ", "The answer is", "Answer:", '{"answer": ""}', "```\n```", "-", "0")
"""Usual forms of an answer without an answer in them."""
OPTIONS = "A B C D E F (A) (B) (C) (D) yes no true false up down left right"
"""Answer that names usual options."""
NUMBERS = " ".join(map(str, range(201)))
"""Answer that names small numbers."""

Check = Callable[[Trial], Awaitable[Finding]]
"""Function that makes one check."""
# These make a finding of one state. Their arguments are the text and the advice.
passed, skipped = partial(Finding, "pass"), partial(Finding, "skipped")
warning, failure = partial(Finding, "warning"), partial(Finding, "failure")


async def interface(trial: Trial) -> Finding:
    """Play a training problem and a held-out one with the answer of the dry run, the last character of the prompt.

    If the environment fails on that answer, others are tried. Then an environment is closed after its `reset`. Sets
    `trial.is_playable` if both problems are shown; without it `examine_environment` makes no other check. Sets
    `trial.always_fails` if each answer to the training problem raises an error: then nothing gets a reward.
    """
    played: list[Episode] = []
    always: Finding | None = None  # the failure of each answer to a problem
    fault: Finding | None = None  # the failure of one answer, although another one could be played
    for seed in (0, HELD_OUT):
        one = await trial.play(seed, lambda seed, shown: shown[-1][-1:])
        if one.failure is not None:
            text = f"{one.failure.outcome}: {shortened(one.failure.message, 3 * SHOWN)}"
            if (other := await _other_than(trial, one)) is not None:
                fault = fault or failure(
                    f"{text}; the answer was {_short(one.answers[-1])}",
                    "return reward 0.0 for an answer that cannot be read; the other checks need answers that can be "
                    "read",
                )
                one = other
            elif one.answers and one.failure.outcome in (Outcome.ENV_ERROR, Outcome.REWARD_ERROR):
                trial.always_fails |= seed == 0
                follow = "only the checks that need no reward follow" if seed == 0 else "nothing can be evaluated"
                always = always or failure(f"{text}; each answer that was tried fails", f"mend this first: {follow}")
            else:  # `reset` fails, or a call hangs, as it would in each other check
                return failure(text, "mend this first; nothing else was checked")
        played.append(one)
    trial.is_playable = True
    try:
        await trial.close_early(0)
    except EnvError as error:
        fault = fault or failure(
            f"an episode that ends before its first answer: {shortened(str(error), 3 * SHOWN)}",
            "a run ends episodes at any time: `close` must not wait for a step that never comes",
        )
        if isinstance(error, EnvTimeoutError):  # the next checks would wait for each such close
            trial.config = _with_close_limit(trial.config, CLOSE_S)
    trained, held_out = (counted(len(one.shown), "turn") for one in played)
    shown = _short(played[0].shown[0])
    return always or fault or passed(f"a training problem had {trained}, and a held-out one {held_out}; shown: {shown}")


def _with_close_limit(config: Config, seconds: float) -> Config:
    """Return a configuration with another deadline of `close`."""
    return msgspec.structs.replace(config, deadlines=msgspec.structs.replace(config.deadlines, close=seconds))


async def _other_than(trial: Trial, failed: Episode) -> Episode | None:
    """Play the problem of a failed episode with other answers. Returns the first episode that does not fail; None if
    each one fails, or if the time of the check is over. Raises EnvError if the known answers cannot be made."""
    if not failed.answers:  # `reset` has failed, so no answer can help
        return None
    known = await trial.answers_to({failed.seed: failed.shown[0]})
    for policy in (empty, guess, *([in_turn(known)] if known else [])):
        if (one := await trial.play(failed.seed, policy)).failure is None:
            return one
        if trial.is_late:
            break
    return None


class _Prompts:
    """First prompts of the training problems, or of the held-out ones, as far as `problems` has seen them.

    Prompts are compared by hash, so that many of them need little memory.

    Args:
        first: first seed.
        most: largest number of seeds.
    """

    def __init__(self, first: int, most: int) -> None:
        self._first, self._next, self._end = first, first, first + most
        self._newest = first
        """Highest seed that has shown a new prompt."""
        self.seeds = 0
        """Number of seeds whose prompt was seen."""
        self.found: dict[bytes, tuple[int, str]] = {}
        """First seed and beginning of each prompt, by hash."""

    @property
    def is_over(self) -> bool:
        """True if all seeds were tried, or the last ones have repeated earlier prompts only."""
        return self._next == self._end or self._next - self._newest > max(REPEATS, 2 * len(self.found))

    def distinct(self, seeds: int) -> int:
        """Return the number of different prompts of the first `seeds` seeds."""
        return sum(seed < self._first + seeds for seed, _ in self.found.values())

    async def look_on(self, trial: Trial, seconds: float) -> bool:
        """Look at the next `LOOKED` problems, or at fewer if the check is late. Return False if `seconds` passed and
        episodes were cut off."""
        seeds = range(self._next, min(self._next + LOOKED, self._end))
        self._next = seeds.stop
        with anyio.move_on_after(seconds) as scope:
            await trial.look(seeds, self._see)
        return not scope.cancelled_caught

    def _see(self, seed: int, shown: str) -> None:
        """Count a prompt."""
        self.seeds += 1
        name = blake2b(shown.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if name not in self.found:
            self.found[name] = seed, _short(shown)
            self._newest = max(self._newest, seed)


async def problems(trial: Trial) -> Finding:
    """Compare the prompts of training problems with each other, and with the prompts of held-out problems.

    As many problems are compared as the time allows, at most `PROBLEMS` of each side.
    """
    # Number of held-out problems; None: there is no limit.
    limit, end, in_time = trial.env.held_out_problems(), trial.until, True
    over = end + (2 * TIME_SHARE - 1) * (end - perf_counter())  # `end` is at half of the time
    trained = _Prompts(0, PROBLEMS)
    held_out = _Prompts(HELD_OUT, PROBLEMS if limit is None else min(limit, PROBLEMS))
    while in_time and not (trained.is_over and held_out.is_over):
        if not trained.is_over:
            share = 1.0 if held_out.is_over else 0.5
            trial.until = perf_counter() + share * (end - perf_counter())
            in_time &= await trained.look_on(trial, share * (over - perf_counter()))
        trial.until = end
        if not held_out.is_over:
            in_time &= await held_out.look_on(trial, over - perf_counter())
        if trial.is_late:
            break
    both = trained.found.keys() & held_out.found.keys()
    distinct, distinct_held_out = len(trained.found), len(held_out.found)
    percent = f" ({100 * len(both) / distinct_held_out:.3g}%)" if both else ""
    text = (
        f"{trained.seeds} training seeds show {counted(distinct, 'prompt')}, {held_out.seeds} held-out seeds "
        f"{counted(distinct_held_out, 'prompt')}, and {len(both)} of these{percent} are in both"
    )
    if both and distinct == 1 and any(len(one.shown) > 1 for one in trial.episodes):
        # A game may begin with the same text each time, and differ in its later turns, which nobody has compared.
        return warning(
            text,
            "later turns may differ, but the prompts do not show that held-out problems differ from the trained ones",
        )
    if both:
        seed, shown = min(held_out.found[name] for name in both)
        twin = min(trained.found[name][0] for name in both if held_out.found[name][0] == seed)
        more = "" if trained.is_over else "; a longer run trains more problems, and so more of these"
        return failure(
            f"{text}, such as {shown} of seeds {twin} and {seed}",
            "divide the problems themselves, for example by a hash of the prompt: `flash.is_held_out(seed)` says which "
            f"side a seed asks for{more}",
        )
    if not in_time or not (trained.seeds and held_out.seeds):
        return warning(f"{text}{trial.unfinished and f'; {trial.unfinished}'}", SLOW)
    # More seeds than these repeat the problems of a collection, which is no fault.
    looked, asked = min(trained.seeds, LOOKED), min(held_out.seeds, LOOKED, trial.config.eval.problems)
    if looked >= FEW and trained.distinct(looked) <= max(1, looked // ALIKE):
        return warning(text, "a run sees few different problems: draw them from `random.Random(seed)`")
    if limit is None and asked >= FEW and held_out.distinct(asked) < asked / 2:
        return warning(
            text,
            "an evaluation asks some problems several times, so that its interval is too narrow: return their number "
            "from `held_out_problems`, or set eval.problems to it",
        )
    return passed(text)


async def determinism(trial: Trial) -> Finding:
    """Play problems again with the same answers: alone, side by side, and in another process. Compare what they show
    and their rewards."""
    end = trial.until
    trial.until = (perf_counter() + end) / 2  # half of the time is for playing again
    first_time: dict[int, Episode] = {}  # the first episode of each seed that did not fail
    known = await trial.known_answers(REWARDED)
    start = perf_counter()
    for seed in (half + number for number in range(REPEATED // 2) for half in (0, HELD_OUT)):
        # Perhaps only right answers show that a reward is noisy, or given once. Perhaps the environment fails on right
        # answers, and only wrong ones can be played. So even seeds begin with right answers, and odd seeds with wrong
        # ones, and the other policy is tried after a failure.
        policies = [in_turn(known), guess] if seed in known else [guess]
        if seed % 2:
            policies.reverse()
        for policy in policies:
            one = await trial.play(seed, policy)
            if one.failure is None or (trial.always_fails and one.shown):
                first_time[seed] = one
                break
        if trial.is_late:
            break
    if not first_time:
        return failure("no episode could be played", "see the failures below")
    trial.until = end
    answers = {seed: one.answers for seed, one in first_time.items()}
    alone = [await trial.play(seed, in_turn(answers)) for seed in answers]
    beside = await trial.play_many(answers, in_turn(answers))
    for when, episodes in (("again", alone), ("beside other episodes", beside)):
        if fault := _first_difference(first_time, episodes, when):
            return fault
    names = [] if trial.is_late else await _shared_names(trial)
    try:
        # A second after the first episode, a prompt that shows the time in whole seconds has changed.
        await anyio.sleep(max(0.0, min(start + 1.1, trial.until) - perf_counter()))
        with trial.working("the process that plays the problems again"):
            apart = await play_apart(trial.config, answers)
    except FlashError as error:
        return failure(f"the problems cannot be played in another process: {shortened(str(error), SHOWN)}")
    if fault := _first_difference(first_time, apart, "in another process"):
        return fault
    if names:
        return warning(
            f"{' and '.join(names[:3])} changed with the problem of an episode, and all episodes of a process share it",
            "keep the state of an episode in `self`: otherwise the problem of another episode may judge an answer",
        )
    equal = "prompts" if trial.always_fails else "prompts and rewards"
    return passed(f"{counted(len(answers), 'seed')} gave equal {equal} again, side by side, and in another process")


async def _shared_names(trial: Trial) -> list[str]:
    """Return the variables of modules and classes that have one value for each problem.

    Two problems are shown, and the first one again. A variable that is then as before, and was not meanwhile, holds the
    state of an episode. A counter or a cache is never as before.
    """
    seen: list[dict[str, object]] = []
    for seed in (0, 1, 0):
        await trial.look([seed], lambda seed, shown: seen.append(variables()))
    if len(seen) < 3:  # a reset has failed
        return []
    first_time, other, again = seen
    return [name for name in other if first_time.get(name) == again.get(name) != other[name] and name in first_time]


def _first_difference(first_time: Mapping[int, Episode], episodes: Sequence[Episode], when: str) -> Finding | None:
    """Return the finding about the first of these episodes that differs from the one in `first_time` with the same
    seed; None if none does. `when`: see `_differences`."""
    for one in episodes:
        was = first_time[one.seed]
        if one.failure is not None and was.failure is None:
            return failure(f"seed {one.seed} fails {when}: {shortened(one.failure.message, SHOWN)}")
        if one.shown and (fault := _differences(was, one, one.seed, when)):
            return fault
    return None


def _differences(was: Episode, again: Episode, seed: int, when: str) -> Finding | None:
    """Return the finding about the difference of two episodes with one seed and equal answers; None if there is none.

    Other prompts are a failure; other observations after an answer, or other rewards, are a warning.

    Args:
        was: first episode.
        again: second episode. It has failed only if the first one has.
        seed: seed of the problem.
        when: circumstances of the second episode, as a phrase of the message: `again`, `beside other episodes` or
            `in another process`.
    """
    shown, shown_again, rewards, rewards_again = was.shown, again.shown, was.rewards, again.rewards
    if shown[0] != shown_again[0]:
        advice = {
            "again": "draw what is random from `random.Random(seed)`",
            "beside other episodes": "keep the state of an episode in `self`, not in the module, in the class or in "
            "the generator of `random`, which all episodes share",
            "in another process": "each process must show the same problems: give a seed to what a module shuffles or "
            "draws at its import; Python's `hash` and the order of sets of texts differ between processes, as do the "
            "time and its zone: use `hashlib` or `zlib.crc32`, sort, and draw dates from `random.Random(seed)`",
        }[when]
        return failure(f"seed {seed} shows {_short(shown[0])}, and {when} {_short(shown_again[0])}", advice)
    if shown != shown_again:
        pairs = enumerate(zip(shown, shown_again, strict=False))
        # Without an observation that differs, one of the two episodes has ended earlier.
        turn = next((turn for turn, (one, two) in pairs if one != two), min(len(shown), len(shown_again)))
        return warning(
            f"the same answers to seed {seed} lead to other observations {when}, after turn {turn}",
            "draw what happens in a step from a generator that `reset` has made from the seed, and keep the state of "
            "an episode in `self`: all episodes share the module and the attributes of the class",
        )
    if rewards != rewards_again:
        return warning(
            f"the same answers to seed {seed} get reward {sum(rewards):g}, and {when} {sum(rewards_again):g}",
            f"a noisy reward slows learning: {STEADY}",
        )
    return None


async def rewards(trial: Trial) -> Finding:
    """Report range, zeros and noise of the rewards, and the mean reward of empty, random and known answers.

    All episodes count that were played so far, also by earlier checks. *Noise* is the largest standard deviation of the
    rewards that the same answers to the same problem got.
    """
    means = {name: await mean_of(trial, policy) for name, policy in {"empty": empty, "random": guess}.items()}
    known = await trial.known_answers(REWARDED)
    tried = await trial.play_many(known, in_turn(known))
    solved = [one for one in tried if one.failure is None]
    means["known"] = _mean(solved)
    totals = [one.reward for one in trial.episodes if one.failure is None]
    if not totals:
        return failure("no episode got a reward", "see the failures below")
    same: dict[tuple[int, tuple[str, ...]], list[float]] = {}
    for one in [*trial.episodes, *await _play_rewarded_again(trial)]:
        if one.failure is None:
            same.setdefault((one.seed, tuple(one.answers)), []).append(one.reward)
    noise = max((statistics.pstdev(values) for values in same.values()), default=0.0)
    zeros = sum(total == 0 for total in totals) / len(totals)
    text = f"{min(totals):g} to {max(totals):g}, {zeros:.0%} zeros, noise {noise:.2g}; mean of " + ", ".join(
        f"{name} answers {mean:.3g}" for name, mean in means.items() if mean is not None
    )
    if tried and not solved:
        return failure(text, "each known answer fails: see the failures below")
    if solved:
        # If no reward is positive, wrong answers have negative rewards, and right ones may get 0.
        worthless = 0.0 if max(totals) > 0 else min(totals)
        unrewarded = [one.seed for one in solved if one.reward <= worthless]
        if len(unrewarded) == len(solved):
            return failure(text, "no known answer gets a reward: see that the verifier fits the form of the answers")
        if unrewarded:
            some = f"{len(unrewarded)} of {len(solved)} known answers get no reward, as with seed {unrewarded[0]}"
            return warning(text, f"{some}: see that the verifier fits them")
        if (means["random"] or 0.0) >= (means["known"] or 0.0):
            return warning(text, "random answers get as much as known ones: the reward does not depend on the answer")
    elif max(totals) == min(totals):
        known_too = "a class with `solution_of` also has a known answer tried"
        if trial.knows_answers:
            late = "time was too short for known answers: allow more with --minutes"
            known_too = late if trial.is_late else "no problem that was played is among the solved examples"
        return warning(text, f"a model learns nothing from equal rewards; {known_too}")
    if noise > 0:
        return warning(text, f"the same answer to the same problem gets different rewards: {STEADY}")
    return passed(text)


async def _play_rewarded_again(trial: Trial) -> list[Episode]:
    """Play some episodes again whose reward was not the usual one, side by side, and return the new ones.

    Without known answers the check `determinism` has perhaps seen no reward but 0, which is never noisy.
    """
    done = [one for one in trial.episodes if one.failure is None]
    usual = statistics.mode(one.reward for one in done)
    unusual = {one.seed: one.answers for one in done if one.reward != usual}
    answers = dict([*unusual.items()][:REPEATED])
    return await trial.play_many(answers, in_turn(answers), keep=False) if answers and not trial.is_late else []


async def shortcuts(trial: Trial) -> Finding:
    """Look for *shortcuts*: answers that get a reward though they answer nothing, and that a model would soon find.

    The shortcut with the highest mean reward is judged: by its share of the reward of known answers, and against the
    reward of pure chance.
    """
    policies: dict[str, Policy] = {
        "an empty answer": empty,
        "an echo of the prompt": echo,
        "a list of options": always(OPTIONS),
        "a list of numbers": always(NUMBERS),
    }
    known = await trial.known_answers(REWARDED)
    if known:
        policies["a list of the answers to other problems"] = lambda seed, shown: " ".join(
            dict.fromkeys(texts[0] for other, texts in known.items() if other != seed)
        )
    thorough = len(policies)  # number of policies that play `REWARDED` episodes; the forms play fewer
    policies |= {f"the form {form!r}": always(form) for form in FORMS}
    best = _mean(await trial.play_many(known, in_turn(known)))
    # Pure chance: without its prompt, the best guess is the answer to another problem. So each problem gets the known
    # answer to the next one.
    others = dict(zip(known, [*known.values()][1:] + [*known.values()][:1], strict=True))
    chance = _mean(await trial.play_many(others or range(REWARDED), in_turn(others) if others else guess)) or 0.0
    tried: dict[str, float] = {}
    for name, policy in policies.items():
        if (mean := await mean_of(trial, policy, REWARDED if len(tried) < thorough else REWARDED // 4)) is not None:
            tried[name] = mean
        if trial.is_late:
            break
    if not tried:
        return skipped("no such answer could be played in time")
    totals = [one.reward for one in trial.episodes if one.failure is None]
    best = max(totals) if best is None else best  # without known answers: the highest reward of any episode so far
    name, most = max(tried.items(), key=lambda item: item[1])
    lowest = min(*totals, 0.0)
    # If no reward is positive, wrong answers have negative rewards, and right ones may get 0.
    worthless = 0.0 if best > 0 else lowest
    share = (most - lowest) / (best - lowest) if best > lowest else 0.0
    most_of = "known answers get" if known else "the highest reward is"
    text = f"{name} gets most of {counted(len(tried), 'shortcut')}: {most:.3g} on average, where {most_of} {best:.3g}"
    # In a game, always the same move sometimes wins.
    small = ONE_TURN_SHARE if all(len(one.rewards) <= 1 for one in trial.episodes) else GAME_SHARE
    if most <= worthless:
        return passed(f"none of {counted(len(tried), 'shortcut')} gets a reward; {most_of} {best:.3g}")
    if share < small or most <= chance * CHANCE_FACTOR + CHANCE_MARGIN:
        return passed(text)
    advice = "a model finds this quickly: give this answer reward 0"
    return failure(text, advice) if share >= LARGE_SHARE else warning(text, advice)


async def failures(trial: Trial) -> Finding:
    """Give answers on which programs often fail, and count the failed episodes of all checks so far by type of failure.

    Each answer of `STRANGE` is the first answer to another problem; empty answers follow.
    """
    for seed, answer in enumerate(STRANGE):
        await trial.play(seed, first(answer))
        if trial.is_late:
            break
    failed = [one.failure for one in trial.episodes if one.failure is not None]
    text = f"{len(failed)} of {counted(len(trial.episodes), 'episode')}, also with strange answers, failed"
    if not failed:
        return passed(text)
    answer = next(one.answers[:1] for one in trial.episodes if one.failure is failed[0])
    kinds = Counter(one.outcome.value for one in failed)
    return failure(
        f"{text} ({', '.join(f'{name} {count}' for name, count in kinds.items())}), as with the answer "
        f"{_short(*answer, most=40) if answer else '(none)'}: {shortened(failed[0].message, SHOWN)}",
        "return reward 0.0 for an answer that cannot be read: a sample that fails is lost, and teaches nothing",
    )


async def speed(trial: Trial) -> Finding:
    """Report the times of reset and step in episodes that are played one after the other.

    They are compared with the deadline of a call in a run. In a failed episode only `reset` counts, with 0 s if it
    failed itself; the check `failures` reports such episodes.
    """
    resets, steps = list[float](), list[float]()
    for seed in range(TIMED):
        played = await trial.play(seed, guess)
        resets.append(played.reset_s)
        steps += played.step_s
        if trial.is_late:
            break
    text, limit = f"reset {_times(resets)}; step {_times(steps)}", trial.config.deadlines.env_step
    if max(resets + steps) > limit * SLOW_SHARE:
        advice = f"make it faster, or raise deadlines.env_step ({limit:g} s)"
        return warning(text, f"the slowest call comes near its deadline: {advice}")
    return passed(text)


async def event_loop(trial: Trial) -> Finding:
    """Play episodes while a thread looks for calls of the user's code that block the event loop.

    Names the line that blocked it longest in all. No earlier check has answered the problems from seed 100 on, so a
    cache of the environment does not hide its slow work. Half of the answers are known ones, if there are any, and some
    have a usual form: perhaps only an answer that can be read leads to the slow work.
    """
    seeds = range(100, 100 + TIMED)
    known = await trial.answers_to(await trial.look(seeds[::2])) if trial.knows_answers else {}
    right, forms = in_turn(known), dict(zip(seeds[1::4], FORMS, strict=False))

    def answer(seed: int, shown: list[str]) -> str:
        """Give the known answer, a form, or a guess. A policy."""
        if seed in known:
            return right(seed, shown)
        return forms[seed] if seed in forms else guess(seed, shown)

    sampler = BlockSampler()
    with sampler.watching():
        played = await trial.play_many(seeds, answer)
    if not sampler.places:
        return passed(f"no call of {counted(len(played), 'episode')} blocked it for 0.1 s")
    place, blocks = max(sampler.places.items(), key=lambda item: sum(item[1]))  # a line, and the seconds of its blocks
    text = f"{place} blocked it {counted(len(blocks), 'time')}, for {max(blocks):.2g} s at most"
    if len(blocks) < 2 and max(blocks) < 1:  # such as a module that the first episode imports
        return passed(f"{text}, in {counted(len(played), 'episode')}")
    return failure(text, "all episodes of a node wait meanwhile: use plain `def`, which runs in a thread, or await")


async def leaks(trial: Trial) -> Finding:
    """Play up to `LEAK_EPISODES` episodes in two halves, and find resources whose number grows in both halves.

    Both halves play the same problems. So a cache or a pool, which the first half fills, does not grow in the second
    one. Files in the folder for temporary files and memory are only a warning.
    """
    end = trial.until
    # These episodes import modules and start threads of pools, which stay and do not count.
    await trial.play_many(range(3 * REPEATED), guess, keep=False)
    with own_temporary_folder(), tracing():
        before = await Holdings.settled()
        trial.until = (perf_counter() + end) / 2
        first_half, _ = await _play_batches(trial, LEAK_EPISODES // 2)
        middle, snapshot = await Holdings.settled(before), tracemalloc.take_snapshot()
        trial.until = end
        second_half, sizes = await _play_batches(trial, first_half)
        after, last_snapshot = await Holdings.settled(before), tracemalloc.take_snapshot()
    held = (before, middle, after)
    grown = {kind: more for kind, more in after.more_than(before).items() if _grew_twice(kind, held)}
    text = counted(first_half + second_half, "episode")
    if grown:
        return failure(
            f"after {text} there are {said(grown)} more than before",
            "release in `close` what `reset` and `step` open; `close` is also called after an error",
        )
    files = min(middle.temporary - before.temporary, after.temporary - middle.temporary)
    if files >= min(first_half, second_half) / 2:  # at least one for every second episode
        return warning(
            f"after {text} there are {after.temporary - before.temporary} more files and folders in the folder for "
            "temporary files",
            "remove in `close` what an episode has made there",
        )
    last = f"in each of the last {counted(second_half, 'episode')}"
    # Bytes per episode by which Python's objects grew, and bytes by which the memory of the process grew in all.
    objects, resident = growth_without_jumps(sizes) / BATCH, after.resident - middle.resident
    if objects > OBJECT_GROWTH:
        place = growing_place(snapshot, last_snapshot)
        return warning(
            f"memory grew by {objects / 1000:.3g} kB {last}{place and f', most of it made at {place}'}",
            "see which list, dict or cache of the module or class grows",
        )
    if middle.resident > before.resident and resident > max(LEAST_GROWTH, second_half * GROWTH):
        return warning(
            f"memory grew by {resident / second_half / 1000:.0f} kB {last}, though Python's objects did not",
            "see which objects of a library in C are kept or never freed",
        )
    resident = max(0, after.resident - before.resident)
    return passed(f"after {text} no file, thread, task or process is left; memory grew by {resident / 1e6:.1f} MB")


async def _play_batches(trial: Trial, most: int) -> tuple[int, list[int]]:
    """Play the problems from seed 0 on, in batches of `BATCH`, for `leaks`: until at least `most` episodes are played,
    or the time of `trial` is over after the first batch.

    Returns the number of episodes, and the bytes of Python's objects after each batch. Must run within `tracing()`.
    """
    played, sizes = 0, list[int]()
    while played == 0 or (played < most and not trial.is_late):
        played += len(await trial.play_many(range(played, played + BATCH), guess, keep=False))
        sizes.append(traced_bytes())
    return played, sizes


def _grew_twice(kind: str, held: Sequence[Holdings]) -> bool:
    """Return True if the number of resources of a kind has grown in both halves of the check `leaks`.

    `held` has the resources before, between and after the halves; `kind` is one of `KINDS`.
    """
    before, middle, after = (one.named[kind].total() for one in held)
    return before < middle < after


async def cancellation(trial: Trial) -> Finding:
    """Cancel an episode at each `await` of reset, step and close, and look for code that swallows the cancellation or
    leaves resources behind.

    Each episode is cancelled at one `await`, the next one at the following `await`. `reset` and `step` are cancelled
    directly; `close` by its deadline, as in a run, which is shortened to `CLOSE_S` for this.
    """
    # These episodes import modules and start threads of pools, which stay and do not count.
    for seed in range(2):
        await trial.play(seed, guess, keep=False)
    # A call is *abandoned* if it goes on after its cancellation. `UserTask.abandoned` counts them in this process.
    before, cuts, abandoned = await Holdings.settled(), 0, UserTask.abandoned
    calm = trial.config
    hasty = _with_close_limit(calm, CLOSE_S)
    try:
        for method in ("reset", "step", "close"):
            trial.config = hasty if method == "close" else calm
            for at in range(1, MOST_AWAITS + 1):
                cut = Cut(method, at)
                with cut.scope:
                    await trial.play(0, guess, CutEnvironment(calm, cut), keep=False)
                if not cut.place:  # the method has fewer awaits
                    break
                cuts += 1
                where = f"`{method}` was cancelled at {cut.place}"
                if cut.swallowed or UserTask.abandoned > abandoned:
                    return failure(f"{where}, and went on", "do not catch CancelledError there, or raise it again")
                after = await Holdings.settled(before)
                if more := after.more_than(before):
                    return failure(
                        f"after {where} there is more than before: {said(more)}",
                        "release it in `finally`, or in `close`, which is also called after a cancellation",
                    )
                if trial.is_late:
                    return passed(f"nothing was left after {counted(cuts, 'cancellation')}; time was too short for all")
    finally:
        trial.config = calm
    if not cuts:
        return passed("reset, step and close await nothing, so they cannot be cancelled")
    return passed(f"nothing was left after a cancellation at each of {counted(cuts, 'await')}")


async def training(trial: Trial) -> Finding:
    """Train a tiny model on the environment (`flash.run.checks.env.training`). A model that has not improved is a
    warning, no failure."""
    from flash.run.checks.env.training import train_tiny

    return await train_tiny(trial)


CHECKS: dict[str, tuple[Check, float]] = {
    "interface": (interface, 3.0),
    "problems": (problems, 1.0),
    "determinism": (determinism, 1.0),
    "rewards": (rewards, 1.0),
    "shortcuts": (shortcuts, 1.0),
    "failures": (failures, 1.0),
    "speed": (speed, 0.5),
    "event loop": (event_loop, 0.5),
    "leaks": (leaks, 2.0),
    "cancellation": (cancellation, 1.0),
    "training": (training, 8.0),
}
"""Function of each check in the order of the output, with its weight: its time is the remaining time times its weight,
divided by the weights of the remaining checks."""


async def examine_environment(
    config: Config,
    seconds: float,
    report: Callable[[Finding], None],
    checks: Mapping[str, tuple[Check, float]] = CHECKS,
) -> None:
    """Make all checks one after the other. `flash check-env` calls this on an event loop whose blocks are reported.

    A failure of the environment's `prepare`, or an environment that shows no problem to the check `interface`, ends the
    checks. If each answer fails, the checks that need a reward are skipped.

    Args:
        config: configuration with the environment.
        seconds: time for all checks. Time that one check does not need is left to the later ones.
        report: called with the finding of each check.
        checks: the checks, as `CHECKS`.
    """
    end, shares = perf_counter() + seconds, sum(share for _, share in checks.values())
    trial = Trial(config)
    async with sharing(config.run.name, close_s=config.deadlines.close):
        try:
            with deadline(config.deadlines.env_step, "the environment to be ready", "its `prepare`"):
                await trial.env.prepare()
        except FlashError as error:
            report(failure(str(error), "mend this first; nothing else was checked", check="interface"))
            return
        for name, (check, share) in checks.items():
            own = max(1.0, (end - perf_counter()) * share / shares)
            shares -= share
            if trial.always_fails and name in NEEDS_REWARD:
                report(skipped("each answer fails: see `interface`", check=name))
                continue
            # A check looks at `until` between two episodes. The other half of its time is for the episodes that run
            # then; the scope cancels an episode that takes longer.
            trial.begin_check(perf_counter() + own / 2)
            finding = None
            with anyio.move_on_after(own):
                try:
                    finding = await check(trial)
                except FlashError as error:
                    finding = failure(shortened(str(error), SHOWN))
            if finding is None:
                # Without a first episode nothing is checked, and a workflow must not take that for a pass.
                state = failure if name == "interface" else warning
                # Only work that took a large part of the time explains why the check has no result.
                slow = f"; {trial.unfinished}" if trial.unfinished_s > own / 4 else ""
                hung = f"; {shortened(trial.hung, SHOWN)}" if trial.hung and not slow else ""
                finding = state(f"no result within {own:.0f} s{slow}{hung}", "mend this first" if hung else SLOW)
            report(msgspec.structs.replace(finding, check=name))
            if name == "interface" and not trial.is_playable:
                return


async def mean_of(trial: Trial, policy: Policy, count: int = REWARDED) -> float | None:
    """Return the mean reward of a policy on the first `count` training problems, or on fewer if time is short; None if
    each episode failed."""
    return _mean(await trial.play_many(range(count), policy))


def _mean(episodes: Sequence[Episode]) -> float | None:
    """Return the mean reward of the episodes that have not failed; None if there is none."""
    totals = [one.reward for one in episodes if one.failure is None]
    return statistics.fmean(totals) if totals else None


def _times(seconds: Sequence[float]) -> str:
    """Return the median and the 99th percentile of times in seconds, as text in milliseconds."""
    if not seconds:
        return "not measured"
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"{1000 * statistics.median(ordered):.3g} ms in the median, {1000 * high:.3g} ms at the 99th percentile"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun in the right form, such as `1 turn` or `3 turns`."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _short(text: str, most: int = 80) -> str:
    """Return a text for the user, quoted, and cut after `most` characters."""
    return repr(text if len(text) <= most else text[:most] + "…")
