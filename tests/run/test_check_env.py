"""Checks of `flash check-env`: each finds the environment that has exactly its fault, and passes one that has none."""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import anyio
import anyio.lowlevel
import msgspec
import pytest

import flash
from flash.config.tree import Config
from flash.environment import SolvedExample, is_held_out, sharing
from flash.observe.stats import Interval
from flash.run.checks.doctor import Finding
from flash.run.checks.env import checks
from flash.run.checks.env.resources import growth_without_jumps, variables
from flash.run.checks.env.training import config_of, judged
from flash.run.checks.env.trial import Trial, guess, options_in
from flash.run.loop_watch import run_watched

LIBC = ctypes.CDLL(None)
"""The C library, whose memory Python does not count."""
LIBC.malloc.argtypes, LIBC.malloc.restype, LIBC.free.argtypes = [ctypes.c_size_t], ctypes.c_void_p, [ctypes.c_void_p]

LEFT: list[Any] = []
"""Resources that faulty environments leave behind. Each test releases them and empties the list."""


class Good:
    """Asks for the sum of two numbers, and has no fault."""

    def __init__(self) -> None:
        self.answer = ""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        """Return the prompt and the right answer of a problem. Derived classes change it."""
        one = 2 * rng.randrange(10_000) + held_out
        return f"Add {one} to 5000: ", str(one + 5000)

    async def reset(self, seed: int) -> Any:
        shown, self.answer = self.draw(random.Random(seed), is_held_out(seed))
        await anyio.lowlevel.checkpoint()
        return shown, {}

    async def step(self, action: str) -> Any:
        await anyio.lowlevel.checkpoint()
        return "", float(action.strip() == self.answer), True, False, {}

    async def close(self) -> None:
        await anyio.lowlevel.checkpoint()

    @classmethod
    def solution_of(cls, seed: int) -> str | None:
        return cls().draw(random.Random(seed), is_held_out(seed))[1]


class Blocking:
    """Environment like `Good`, with plain methods that block."""

    def __init__(self) -> None:
        self.good = Good()

    def reset(self, seed: int) -> Any:
        time.sleep(0.001)
        shown, self.good.answer = self.good.draw(random.Random(seed), is_held_out(seed))
        return shown, {}

    def step(self, action: str) -> Any:
        time.sleep(0.001)
        return "", float(action.strip() == self.good.answer), True, False, {}

    def close(self) -> None: ...


def make_config(env: type[object], **deadlines: float) -> Config:
    """Return a configuration with an environment of this file, and with other deadlines in seconds."""
    tree = {
        "run": {"name": "test"},
        "model": {"path": "none"},
        "env": {"path": f"{__name__}:{env.__name__}"},
        "cluster": {"gpus_per_node": 0},
        "rollout": {"max_turns": 8},
        "deadlines": deadlines,
    }
    return msgspec.convert(tree, Config)


def found(check: checks.Check, env: type[object], seconds: float = 5.0, **deadlines: float) -> Finding:
    """Return the finding of one check about an environment, which has `seconds` for its episodes. Releases afterwards
    all resources that the environment has put into `LEFT`."""

    async def main() -> Finding:
        async with sharing("test"):
            trial = Trial(make_config(env, **deadlines))
            trial.until = perf_counter() + seconds
            return await check(trial)

    try:
        return run_watched(lambda message: None, main)
    finally:
        for one in LEFT:
            if isinstance(one, subprocess.Popen):
                one.kill()
                one.wait()
            elif isinstance(one, threading.Event):
                one.set()
            elif hasattr(one, "close"):
                one.close()
        LEFT.clear()


@pytest.mark.parametrize("check", [check for name, (check, _) in checks.CHECKS.items() if name != "training"])
def test_an_environment_without_a_fault_passes_each_check(check: checks.Check) -> None:
    finding = found(check, Good)
    assert finding.state == "pass", finding


# -- interface and problems --------------------------------------------------------------------------------------------


class NoReward(Good):
    """Returns None as its reward."""

    async def step(self, action: str) -> Any:
        return "", None, True, False, {}


class NotMade(Good):
    """Fails in its constructor."""

    def __init__(self) -> None:
        raise ValueError("no such game")


class Hangs(Good):
    """Hangs in `reset`."""

    async def reset(self, seed: int) -> Any:
        await anyio.sleep(60)


class NeverSteps(Good):
    """Hangs in each step."""

    async def step(self, action: str) -> Any:
        await anyio.sleep(60)


def test_an_error_of_the_interface_has_the_message_of_the_dry_run() -> None:
    finding = found(checks.interface, NoReward)
    assert finding.state == "failure"
    assert finding.text.startswith("reward_error: environment step (seed 0): the reward must be a finite number")
    assert "NoReward.step (" in finding.text
    assert (
        "env_error: environment start (seed 0) raised ValueError: no such game" in found(checks.interface, NotMade).text
    )
    late = found(checks.interface, Hangs, env_step=0.1)
    assert late.text.startswith("env_timeout: environment reset (seed 0) took longer than 0.1 s, at ")


def report_of(env: type[object], *names: str, seconds: float = 60.0) -> list[Finding]:
    """Return the findings of the named checks about an environment, or of all checks."""
    reported: list[Finding] = []
    some = {name: checks.CHECKS[name] for name in names or checks.CHECKS}
    run_watched(lambda message: None, checks.examine_environment, make_config(env), seconds, reported.append, some)
    return reported


@pytest.mark.parametrize("env", [NotMade, NeverSteps])
def test_nothing_else_is_checked_after_an_environment_that_shows_nothing_or_hangs(env: type[object]) -> None:
    reported: list[Finding] = []
    config = make_config(env, env_step=0.1)
    run_watched(lambda message: None, checks.examine_environment, config, 60.0, reported.append)
    assert [(one.check, one.state) for one in reported] == [("interface", "failure")]
    assert reported[0].advice == "mend this first; nothing else was checked"


class VerifierRaises(Good):
    """Reads a value in each step that is not there."""

    async def step(self, action: str) -> Any:
        await anyio.lowlevel.checkpoint()
        return "", float({}["solution"] == action), True, False, {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "said"), [(VerifierRaises, "raised KeyError: 'solution'"), (NoReward, "must be a finite number")]
)
def test_a_verifier_that_always_fails_is_named_once_and_all_else_is_checked(env: type[object], said: str) -> None:
    reported = report_of(env, seconds=150.0)
    needs_reward = ("rewards", "shortcuts", "failures", "training")
    assert [(one.check, one.state) for one in reported] == [
        (name, "failure" if name == "interface" else "skipped" if name in needs_reward else "pass")
        for name in checks.CHECKS
    ], reported
    assert said in reported[0].text
    assert reported[0].text.endswith("; each answer that was tried fails")
    assert [one.check for one in reported if said in one.text] == ["interface"]
    assert f"({__file__}:" in reported[0].text
    assert reported[2].text.startswith("8 seeds gave equal prompts again, side by side")


class HashedAndRaises(VerifierRaises):
    """Draws its prompts with `hash`, and raises in each step."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        return f"Say {hash(str(rng.random()))}: ", "x"


def test_prompts_that_change_are_named_though_each_step_fails() -> None:
    finding = report_of(HashedAndRaises, "interface", "determinism")[1]
    assert finding.state == "failure"
    assert "and in another process 'Say " in finding.text


class HeldOutRaises(Good):
    """Raises for each answer to a held-out problem."""

    async def step(self, action: str) -> Any:
        if int(self.answer) % 2:
            raise KeyError("solution")
        return await super().step(action)


def test_held_out_problems_that_always_fail_are_named_and_rewards_are_checked() -> None:
    reported = report_of(HeldOutRaises, "interface", "rewards")
    assert [(one.check, one.state) for one in reported] == [("interface", "failure"), ("rewards", "pass")]
    assert "(seed 2147483648) raised KeyError" in reported[0].text
    assert reported[0].advice == "mend this first: nothing can be evaluated"


class ClosesAfterAStep(Good):
    """Waits in `close` for a step."""

    async def reset(self, seed: int) -> Any:
        self.over = anyio.Event()
        return await super().reset(seed)

    async def step(self, action: str) -> Any:
        self.over.set()
        return await super().step(action)

    async def close(self) -> None:
        await self.over.wait()


class ThreadNeverEnds(Blocking):
    """Waits in `close`, in a thread, for a step."""

    def __init__(self) -> None:
        super().__init__()
        LEFT.append(threading.Event())
        self.over: threading.Event = LEFT[-1]

    def step(self, action: str) -> Any:
        self.over.set()
        return super().step(action)

    def close(self) -> None:
        self.over.wait()


@pytest.mark.parametrize("env", [ClosesAfterAStep, ThreadNeverEnds])
def test_a_close_that_hangs_after_an_early_end_is_named_with_its_line(env: type[Any]) -> None:
    finding = found(checks.interface, env, close=0.2)
    line = env.close.__code__.co_firstlineno + 1
    assert finding.state == "failure"
    early, _, said = finding.text.partition(": ")
    assert early == "an episode that ends before its first answer"
    assert said.startswith(f"environment close (seed 0) took longer than 0.2 s, at {__file__}:{line}")


class NeverCloses(Good):
    """Hangs in each `close`."""

    async def close(self) -> None:
        await anyio.sleep(1000)


def test_a_check_without_a_result_names_the_call_that_hung() -> None:
    reported: list[Finding] = []
    config = make_config(NeverCloses, close=1.2)
    some = {"interface": (checks.interface, 1.0)}
    run_watched(lambda message: None, checks.examine_environment, config, 1.0, reported.append, some)
    assert reported[0].text.startswith("no result within 1 s; environment close (seed 0) took longer than 1.2 s, at ")


class ReadsNumbers(Good):
    """Raises on each answer that is no number."""

    async def step(self, action: str) -> Any:
        return "", float(int(action) == int(self.answer)), True, False, {}


@pytest.mark.slow
def test_an_answer_that_raises_does_not_hide_what_other_answers_show() -> None:
    reported: list[Finding] = []
    some = {name: checks.CHECKS[name] for name in ("interface", "determinism", "rewards", "shortcuts")}
    run_watched(
        lambda message: None, checks.examine_environment, make_config(ReadsNumbers), 60.0, reported.append, some
    )
    assert [(one.check, one.state) for one in reported] == [
        ("interface", "failure"),
        ("determinism", "pass"),
        ("rewards", "pass"),
        ("shortcuts", "pass"),
    ]
    assert "raised ValueError: invalid literal for int() with base 10: ' '" in reported[0].text


class KindFails(Good):
    """Fails to name the kind of one problem."""

    @classmethod
    def kind_of(cls, seed: int) -> str:
        if seed == 3:
            raise ValueError("no such kind")
        return ""


def test_an_error_of_a_class_method_is_a_failure_of_the_check_and_the_others_go_on() -> None:
    reported: list[Finding] = []
    some = {"interface": (checks.interface, 1.0), "problems": (checks.problems, 1.0), "speed": (checks.speed, 1.0)}
    run_watched(lambda message: None, checks.examine_environment, make_config(KindFails), 60.0, reported.append, some)
    assert [(one.check, one.state) for one in reported] == [
        ("interface", "pass"),
        ("problems", "failure"),
        ("speed", "failure"),
    ]
    assert reported[1].text.startswith("environment kind_of (seed 3) raised ValueError: no such kind")


class Shared(Good):
    """Has the same problems for training and for evaluations."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        return super().draw(rng, held_out=False)


class OneProblem(Good):
    """Has one training problem and one held-out problem."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        return f"Say {'no' if held_out else 'yes'}: ", "no" if held_out else "yes"


class HiddenNumber(Good):
    """Shows the same prompt for each problem. Only later turns differ."""

    async def reset(self, seed: int) -> Any:
        self.turns = 0
        return "Guess my number: ", {}

    async def step(self, action: str) -> Any:
        self.turns += 1
        return "It is larger: ", 0.0, self.turns == 2, False, {}


async def play_and_compare(trial: Trial) -> Finding:
    """Make the check `problems` after the check `interface`, whose episodes it reads."""
    await checks.interface(trial)
    return await checks.problems(trial)


def test_a_game_that_shows_its_problems_only_in_later_turns_gets_a_warning() -> None:
    finding = found(play_and_compare, HiddenNumber)
    assert finding.state == "warning"
    assert "1 prompt, and 1 of these (100%) are in both" in finding.text


def test_held_out_problems_that_are_trained_and_problems_that_are_all_alike_are_named() -> None:
    finding = found(checks.problems, Shared, 1.0)
    assert finding.state == "failure"
    assert "%) are in both, such as 'Add " in finding.text
    finding = found(checks.problems, OneProblem)
    assert finding.state == "warning"
    assert "300 training seeds show 1 prompt," in finding.text


class LateTwin(Good):
    """Has twenty held-out problems, of which the last one is the training problem of seed 400."""

    async def reset(self, seed: int) -> Any:
        return f"Add 1 to {400 if seed == flash.HELD_OUT + 19 else seed}: ", {}

    @classmethod
    def held_out_problems(cls) -> int:
        return 20


def test_a_held_out_problem_that_is_trained_late_is_found_with_its_share() -> None:
    finding = found(checks.problems, LateTwin)
    assert finding.state == "failure"
    assert ", 20 held-out seeds 20 prompts, and 1 of these (5%) are in both" in finding.text
    assert finding.text.endswith("such as 'Add 1 to 400: ' of seeds 400 and 2147483667")


class TwoHundred(Good):
    """Has two hundred training problems and forty held-out ones."""

    async def reset(self, seed: int) -> Any:
        number = (seed - flash.HELD_OUT) % 40 + 200 if is_held_out(seed) else seed % 200
        return f"Add 1 to {number}: ", {}


def test_a_collection_is_compared_until_its_problems_repeat() -> None:
    finding = found(checks.problems, TwoHundred)
    assert finding.text == (
        "600 training seeds show 200 prompts, 300 held-out seeds 40 prompts, and 0 of these are in both"
    )
    assert finding.state == "warning"  # an evaluation asks 128
    trial_config = make_config(TwoHundred)
    few = msgspec.structs.replace(trial_config, eval=msgspec.structs.replace(trial_config.eval, problems=40))
    reported: list[Finding] = []
    some = {"problems": (checks.problems, 1.0)}
    run_watched(lambda message: None, checks.examine_environment, few, 10.0, reported.append, some)
    assert reported[0].state == "pass", reported


# -- determinism -------------------------------------------------------------------------------------------------------


class OtherEachTime(Good):
    """Draws another problem each time, whatever the seed."""

    async def reset(self, seed: int) -> Any:
        return await super().reset(random.randrange(1_000_000))


class SharedGenerator(Good):
    """Seeds Python's global generator, which parallel episodes share."""

    async def reset(self, seed: int) -> Any:
        random.seed(seed)
        await anyio.sleep(0.001)
        return f"Say {random.random()}: ", {}


class Hashed(Good):
    """Draws its prompts with `hash`, which differs between processes."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        return f"Say {hash(str(rng.random()))}: ", "x"


class HashedHeldOut(Good):
    """Draws only its held-out prompts with `hash`, which differs between processes."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        number = rng.random()
        return f"Say {hash(str(number)) if held_out else number}: ", "x"


class Clock(Good):
    """Shows the time in seconds in its prompt."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        return f"At {int(time.time())} say {rng.random()}: ", "x"


class Today(Good):
    """Shows the local date in its prompt."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        return f"On {time.strftime('%F')} say {rng.random()}: ", "x"


class NoisyReward(Good):
    """Gives a random reward."""

    async def step(self, action: str) -> Any:
        return "", random.random(), True, False, {}


class RewardsOnce(Good):
    """Rewards only the first right answer to each problem."""

    async def step(self, action: str) -> Any:
        right = action == self.answer and self.answer not in LEFT
        LEFT.append(action)
        return "", float(right), True, False, {}


class SlipsAnyhow(Good):
    """Shows a random observation after each answer."""

    async def step(self, action: str) -> Any:
        self.turns = getattr(self, "turns", 0) + 1
        return f"{random.random()} ", 0.0, self.turns == 3, False, {}


@pytest.mark.parametrize(
    ("env", "state", "said"),
    [
        (OtherEachTime, "failure", ", and again 'Add "),
        (SharedGenerator, "failure", "and beside other episodes 'Say "),
        (Hashed, "failure", "and in another process 'Say "),
        (HashedHeldOut, "failure", "and in another process 'Say "),
        (Clock, "failure", "seed 0 shows 'At "),
        (Today, "failure", "and in another process 'On "),
        (RewardsOnce, "warning", "the same answers to seed 0 get reward 1, and again 0"),
        (NoisyReward, "warning", "the same answers to seed 0 get reward "),
        (SlipsAnyhow, "warning", "lead to other observations again, after turn 1"),
    ],
)
def test_problems_and_rewards_that_change_are_named(env: type[object], state: str, said: str) -> None:
    finding = found(checks.determinism, env)
    assert finding.state == state
    assert said in finding.text
    assert finding.advice


class SharedAnswer(Good):
    """Keeps the answer to a problem in the class. No guess is right, so no reward shows that."""

    secret = ""

    async def reset(self, seed: int) -> Any:
        shown, info = await super().reset(seed)
        type(self).secret = self.answer
        return shown, info

    async def step(self, action: str) -> Any:
        return "", float(action == self.secret + "!"), True, False, {}


class SharedTable(Good):
    """Keeps the answer to a problem in a table of the class."""

    table: ClassVar[dict[str, str]] = {}

    async def reset(self, seed: int) -> Any:
        shown, info = await super().reset(seed)
        self.table["answer"] = self.answer
        return shown, info


class CountsEpisodes(Good):
    """Counts its episodes in the class, and keeps its problems there, which is no fault."""

    episodes = 0
    kept: ClassVar[dict[int, str]] = {}

    async def reset(self, seed: int) -> Any:
        type(self).episodes += 1
        shown, info = await super().reset(seed)
        self.kept[seed] = shown
        return shown, info


@pytest.mark.parametrize(("env", "name"), [(SharedAnswer, "SharedAnswer.secret"), (SharedTable, "SharedTable.table")])
def test_the_state_of_an_episode_in_a_class_is_named(env: type[object], name: str) -> None:
    finding = found(checks.determinism, env)
    assert finding.state == "warning"
    assert finding.text.startswith(f"`{name}` (test_check_env.py) changed with the problem of an episode")


class Unshowable:
    """Object whose text cannot be made."""

    def __repr__(self) -> str:
        raise SystemExit(3)


class HoldsUnshowable:
    """Holds such an object, after a value that can be shown."""

    shown = 7
    held: ClassVar[list[Unshowable]] = [Unshowable()]


def test_a_variable_whose_text_cannot_be_made_is_left_out() -> None:
    names = variables()
    assert names["`HoldsUnshowable.shown` (test_check_env.py)"] == 7
    assert "`HoldsUnshowable.held` (test_check_env.py)" not in names


def test_a_counter_and_a_cache_in_a_class_are_no_state_of_an_episode() -> None:
    finding = found(checks.determinism, CountsEpisodes)
    assert finding.state == "pass", finding


class UsesFlash(Good):
    """Uses a name of the package `flash` itself."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        assert flash.HELD_OUT > 0  # a name of the package itself
        return super().draw(rng, held_out)


@pytest.mark.slow
def test_a_clone_called_flash_in_the_working_directory_does_not_hide_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flash").mkdir()
    (tmp_path / "flash" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    finding = found(checks.determinism, UsesFlash)
    assert finding.state == "pass", finding


def test_a_file_of_the_user_with_the_name_of_a_standard_module_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('not the standard one')")
    monkeypatch.chdir(tmp_path)
    assert found(checks.determinism, Good).state == "pass"


# -- rewards -----------------------------------------------------------------------------------------------------------


def test_options_that_a_text_offers_are_guessed_as_a_whole() -> None:
    text = "You are in a kitchen: it is cold.\n\nCommands: go east, open red door, look\n> "
    guesses = {guess(seed, ["Find, if you can: a, b", text]) for seed in range(100)}
    assert {"go east", "open red door", "look"} < guesses
    assert options_in("You see: a bed, a table. And a door.") == []


class GivesInfinity(Good):
    """Gives an infinite reward for the answer `inf`."""

    async def step(self, action: str) -> Any:
        return "", float("inf") if action == "inf" else 0.0, True, False, {}


def test_an_answer_that_raises_or_gives_no_number_is_named_with_the_type_of_its_failure() -> None:
    finding = found(checks.failures, ReadsNumbers)
    assert finding.state == "failure"
    assert "(env_error 22), as with the answer '': environment step 1 (seed 0) raised ValueError: " in finding.text
    finding = found(checks.failures, GivesInfinity)
    assert finding.text.startswith("1 of 24 episodes, also with strange answers, failed (reward_error 1), as with the ")
    assert "answer 'inf': environment step (seed 8): the reward must be a finite number" in finding.text


class NeverRewards(Good):
    """Rewards only an answer that is not the known one."""

    async def step(self, action: str) -> Any:
        return "", float(action == "so be it"), True, False, {}


class RewardsAText(Good):
    """Gives a text as the reward of a right answer."""

    async def step(self, action: str) -> Any:
        return "", "1.0" if action == self.answer else 0.0, True, False, {}


def test_known_answers_that_fail_are_reported_apart_from_known_answers_without_a_reward() -> None:
    finding = found(checks.rewards, RewardsAText)
    assert (finding.state, finding.advice) == ("failure", "each known answer fails: see the failures below")


class HangsAfterSilence(Good):
    """Hangs after an empty answer."""

    async def step(self, action: str) -> Any:
        if not action:
            await anyio.sleep(1000)
        return await super().step(action)


def test_the_answer_is_named_after_which_an_environment_hangs() -> None:
    reported: list[Finding] = []
    some = {"interface": (checks.interface, 1.0), "rewards": (checks.rewards, 1.0)}
    run_watched(
        lambda message: None, checks.examine_environment, make_config(HangsAfterSilence), 2.0, reported.append, some
    )
    assert [(one.check, one.state) for one in reported] == [("interface", "pass"), ("rewards", "warning")]
    assert reported[1].text.endswith(" s under way, after the answer ''")


class SometimesRight(Good):
    """Gives a reward of random size for each answer that has a digit 1, and knows no answers."""

    async def step(self, action: str) -> Any:
        return "", random.random() if "1" in action and action != "1" else 0.0, True, False, {}

    @classmethod
    def solution_of(cls, seed: int) -> str | None:
        return None


def test_a_noisy_reward_is_found_without_known_answers() -> None:
    finding = found(checks.rewards, SometimesRight)
    assert finding.state == "warning"
    assert finding.advice.startswith("the same answer to the same problem gets different rewards: draw what is random")


class RewardsAnything(Good):
    """Rewards every answer."""

    async def step(self, action: str) -> Any:
        return "", 1.0, True, False, {}


def test_known_answers_without_a_reward_and_rewards_for_anything_are_named() -> None:
    finding = found(checks.rewards, NeverRewards)
    assert (finding.state, finding.text.partition(";")[0]) == ("failure", "0 to 0, 100% zeros, noise 0")
    assert "no known answer gets a reward" in finding.advice
    finding = found(checks.rewards, RewardsAnything)
    assert finding.state == "warning"
    assert "mean of empty answers 1, random answers 1, known answers 1" in finding.text


class Costs(Good):
    """Takes 1 for a wrong answer, and gives 0 for a right one."""

    async def step(self, action: str) -> Any:
        return "", float(action == self.answer) - 1, True, False, {}


class CostsButSilence(Good):
    """Takes 1 for a wrong answer, but not for an empty one, and gives 0 otherwise."""

    async def step(self, action: str) -> Any:
        return "", float(action in ("", self.answer)) - 1, True, False, {}


def test_where_only_wrong_answers_cost_something_right_ones_count_as_rewarded() -> None:
    finding = found(checks.rewards, Costs)
    assert finding.state == "pass", finding
    assert found(checks.shortcuts, Costs).text == "none of 14 shortcuts gets a reward; known answers get 0"
    finding = found(checks.shortcuts, CostsButSilence)
    assert (finding.state, finding.text.partition(" gets")[0]) == ("failure", "an empty answer")


class HiddenOptions(Good):
    """Looks for one of four words, which the prompt does not name, anywhere in the answer."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        return f"What is the colour of {rng.random()}{held_out}? ", rng.choice(("red", "blue", "green", "black"))

    async def step(self, action: str) -> Any:
        return "", float(self.answer in action), True, False, {}


class Contains(Good):
    """Rewards each answer that contains the right one, which the prompt contains, too."""

    def draw(self, rng: random.Random, held_out: bool) -> tuple[str, str]:
        one = rng.randrange(100)
        return f"What is {one} + 0 + {held_out:d} · 1000?", str(one + 1000 * held_out)

    async def step(self, action: str) -> Any:
        return "", float(self.answer in action), True, False, {}


class RewardsForm(Good):
    """Gives a quarter of the reward for the form of an answer."""

    async def step(self, action: str) -> Any:
        return "", 0.25 * ("\\boxed{" in action) + (self.answer in action.split()), True, False, {}


class RewardsSilence(Good):
    """Rewards an empty answer like a right one."""

    async def step(self, action: str) -> Any:
        return "", float(not action or action == self.answer), True, False, {}


@pytest.mark.parametrize(
    ("env", "state", "said"),
    [
        (
            Contains,
            "failure",
            "an echo of the prompt gets most of 14 shortcuts: 1 on average, where known answers get 1",
        ),
        (RewardsForm, "warning", "the form '\\\\boxed{}' gets most of 14 shortcuts: 0.25 on average"),
        (HiddenOptions, "failure", "a list of the answers to other problems gets most of 14 shortcuts: 1 on average"),
        (RewardsSilence, "failure", "an empty answer gets most of 14 shortcuts: 1 on average"),
    ],
)
def test_a_reward_without_an_answer_is_named(env: type[object], state: str, said: str) -> None:
    finding = found(checks.shortcuts, env)
    assert (finding.state, finding.text.startswith(said)) == (state, True), finding


# -- time --------------------------------------------------------------------------------------------------------------


class Slow(Good):
    """Takes 0.2 s for each step, without blocking."""

    async def step(self, action: str) -> Any:
        await anyio.sleep(0.2)
        return await super().step(action)


class BlocksIfRight(Good):
    """Blocks the event loop for 0.15 s in a step with the right answer."""

    async def step(self, action: str) -> Any:
        if action == self.answer:
            time.sleep(0.15)  # noqa: ASYNC251 - this is the fault
        return await super().step(action)


def test_a_call_that_blocks_the_event_loop_only_for_right_answers_is_named() -> None:
    finding = found(checks.event_loop, BlocksIfRight, 2.0)
    assert finding.state == "failure"
    assert finding.text.startswith(f"{__file__}:{BlocksIfRight.step.__code__.co_firstlineno + 2} blocked it ")


class Blocks(Good):
    """Blocks the event loop for 0.15 s in each step."""

    async def step(self, action: str) -> Any:
        time.sleep(0.15)  # noqa: ASYNC251 - this is the fault
        return await super().step(action)


@pytest.mark.slow
def test_slow_calls_are_measured_and_calls_that_block_the_event_loop_are_named() -> None:
    finding = found(checks.speed, Slow, 1.0)
    assert finding.state == "pass"
    assert float(finding.text.partition("step ")[2].partition(" ms")[0]) >= 200
    assert found(checks.speed, Slow, 1.0, env_step=0.6).state == "warning"
    assert found(checks.determinism, Slow, 20.0).state == "pass"
    finding = found(checks.event_loop, Blocks, 1.0)
    line = Blocks.step.__code__.co_firstlineno + 1
    assert finding.state == "failure"
    assert finding.text.startswith(f"{__file__}:{line} blocked it ")


# -- resources ---------------------------------------------------------------------------------------------------------


class LeaksFiles(Good):
    """Opens a file in each episode, and does not close it."""

    async def reset(self, seed: int) -> Any:
        LEFT.append(open(__file__))  # noqa: SIM115, ASYNC230 - this is the fault
        return await super().reset(seed)


class LeaksTasks(Good):
    """Starts a task in each episode, and does not cancel it."""

    async def reset(self, seed: int) -> Any:
        self.background = asyncio.create_task(asyncio.sleep(1000))
        return await super().reset(seed)


class LeaksThreads(Good):
    """Starts a thread in each episode that does not end."""

    async def reset(self, seed: int) -> Any:
        LEFT.append(event := threading.Event())
        threading.Thread(target=event.wait, daemon=True, name="mine").start()
        return await super().reset(seed)


class LeaksProcesses(Good):
    """Starts a process in each of the first 200 episodes, and does not end it."""

    async def close(self) -> None:
        if len(LEFT) < 200:
            LEFT.append(subprocess.Popen(["sleep", "1000"]))  # noqa: ASYNC220 - this is the fault


class LeaksMemory(Good):
    """Keeps 100 kB of each episode."""

    async def reset(self, seed: int) -> Any:
        LEFT.append(bytearray(b"x") * 100_000)
        return await super().reset(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "said"),
    [
        (LeaksFiles, f"open files ({__file__})"),
        (LeaksTasks, "tasks ("),
        (LeaksThreads, "threads (mine)"),
        (LeaksProcesses, "child processes (sleep)"),
    ],
)
def test_resources_that_an_episode_leaves_behind_are_counted_and_named(env: type[object], said: str) -> None:
    finding = found(checks.leaks, env, 0.4)
    assert finding.state == "failure"
    assert said in finding.text


class LeaksFolders(Good):
    """Makes a temporary folder in each episode, and does not remove it."""

    async def reset(self, seed: int) -> Any:
        tempfile.mkdtemp()
        return await super().reset(seed)


@pytest.mark.slow
def test_temporary_files_that_remain_after_each_episode_are_a_warning() -> None:
    before = tempfile.gettempdir(), os.environ.get("TMPDIR")
    finding = found(checks.leaks, LeaksFolders, 0.4)
    assert finding.state == "warning"
    assert finding.text.endswith(" more files and folders in the folder for temporary files")
    assert (tempfile.gettempdir(), os.environ.get("TMPDIR")) == before


class LeaksLittle(Good):
    """Keeps a hundred small objects of each step."""

    async def step(self, action: str) -> Any:
        LEFT.append([object() for _ in range(100)])
        return await super().step(action)


class LeaksInC(Good):
    """Takes memory that Python does not know of."""

    async def reset(self, seed: int) -> Any:
        LEFT.append(TakenInC(500_000))
        return await super().reset(seed)


class TakenInC:
    """Memory of the C library, which a test gives back."""

    def __init__(self, size: int) -> None:
        self.address = LIBC.malloc(size)
        ctypes.memset(self.address, 1, size)  # unused memory is not resident

    def close(self) -> None:
        LIBC.free(self.address)


class GrowsOnce(Good):
    """Makes a table larger, once in many episodes."""

    async def reset(self, seed: int) -> Any:
        LEFT.append(seed)
        if len(LEFT) == 700:
            LEFT.append(bytearray(2_000_000))
        return await super().reset(seed)


class Caches(Good):
    """Keeps the problems that it has shown, which are as many as its seeds."""

    kept: ClassVar[dict[int, bytearray]] = {}

    async def reset(self, seed: int) -> Any:
        self.kept.setdefault(seed, bytearray(50_000))
        return await super().reset(seed)


@pytest.mark.slow
def test_memory_that_grows_with_each_episode_is_a_warning() -> None:
    finding = found(checks.leaks, LeaksMemory, 10)
    assert finding.state == "warning"
    assert 90 < float(finding.text.partition("grew by ")[2].partition(" kB")[0]) < 120


@pytest.mark.slow
def test_the_line_is_named_that_makes_the_objects_that_remain() -> None:
    finding = found(checks.leaks, LeaksLittle, 10)
    assert finding.state == "warning"
    assert finding.text.endswith(f", most of it made at {__file__}:{LeaksLittle.step.__code__.co_firstlineno + 1}")


def test_growth_of_memory_leaves_out_the_largest_and_the_smallest_steps() -> None:
    sizes = [*range(0, 100_000, 5000)]
    assert growth_without_jumps(sizes) == 5000
    assert growth_without_jumps([*sizes[:7], *(size - 900_000 for size in sizes[7:])]) == 5000
    assert growth_without_jumps([*sizes[:7], *(size + 900_000 for size in sizes[7:])]) == 5000
    assert growth_without_jumps(sizes[:3]) == 0


@pytest.mark.slow
def test_memory_that_a_library_in_c_keeps_is_a_warning() -> None:
    finding = found(checks.leaks, LeaksInC, 4)
    assert finding.state == "warning"
    assert finding.text.endswith(" episodes, though Python's objects did not")


@pytest.mark.slow
def test_a_cache_of_problems_and_a_table_that_grows_once_are_no_leaks() -> None:
    try:
        finding = found(checks.leaks, Caches, 10)
    finally:
        Caches.kept.clear()
    assert finding.state == "pass", finding
    finding = found(checks.leaks, GrowsOnce, 20)
    assert finding.state == "pass", finding


class CancelledLeaksFile(Good):
    """Leaves a file open if its `step` is cancelled."""

    async def step(self, action: str) -> Any:
        file = open(__file__)  # noqa: SIM115, ASYNC230 - this is the fault
        LEFT.append(file)
        await anyio.sleep(0.001)
        file.close()
        return await super().step(action)


class CancelledLeaksTask(Good):
    """Leaves a task behind if its `close` is cancelled."""

    async def reset(self, seed: int) -> Any:
        self.ready = asyncio.create_task(asyncio.sleep(5))
        await asyncio.wait([self.ready], timeout=0.001)
        return await super().reset(seed)

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.ready.cancel()


class Swallows(Good):
    """Catches the cancellation of its `step`, and returns a result."""

    async def step(self, action: str) -> Any:
        try:
            await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            return "", 0.0, True, False, {}
        return await super().step(action)


class CleansUp(Good):
    """Releases in `close` and in `finally` what it holds, also with awaits that are shielded."""

    async def reset(self, seed: int) -> Any:
        self.file = open(__file__)  # noqa: SIM115, ASYNC230
        self.process = await asyncio.create_subprocess_exec("sleep", "1000")
        return await super().reset(seed)

    async def step(self, action: str) -> Any:
        task = asyncio.create_task(asyncio.sleep(1000))
        try:
            await asyncio.sleep(0.001)
            return await super().step(action)
        finally:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        self.file.close()
        if hasattr(self, "process"):
            self.process.kill()
            with anyio.CancelScope(shield=True):
                await self.process.wait()


class Shielded(Good):
    """Waits in `close` for the end of its background work, which no cancellation interrupts."""

    async def reset(self, seed: int) -> Any:
        self.over = anyio.Event()
        return await super().reset(seed)

    async def close(self) -> None:
        asyncio.get_running_loop().call_later(0.01, self.over.set)
        with anyio.move_on_after(5, shield=True):
            await self.over.wait()


@pytest.mark.parametrize(
    ("env", "where", "said"),
    [
        (CancelledLeaksFile, "after `step` was cancelled at ", f"there is more than before: 1 open file ({__file__})"),
        (CancelledLeaksTask, "after `close` was cancelled at ", "there is more than before: 1 task ("),
        (Swallows, "`step` was cancelled at ", ", and went on"),
    ],
)
def test_a_cancellation_that_leaves_something_or_is_swallowed_is_named(
    env: type[object], where: str, said: str
) -> None:
    finding = found(checks.cancellation, env, 20)
    assert finding.state == "failure"
    assert finding.text.startswith(f"{where}{__file__}:")
    assert said in finding.text


@pytest.mark.parametrize("env", [CleansUp, Shielded])
def test_an_environment_that_cleans_up_may_be_cancelled_at_each_await(env: type[object]) -> None:
    finding = found(checks.cancellation, env, 20)
    assert finding.state == "pass", finding


@pytest.mark.slow
@pytest.mark.parametrize("check", [checks.determinism, checks.event_loop, checks.leaks, checks.cancellation])
def test_an_environment_whose_methods_block_passes_in_threads(check: checks.Check) -> None:
    finding = found(check, Blocking)
    assert finding.state == "pass", finding


# -- known answers and training ----------------------------------------------------------------------------------------


class Taught:
    """Shows the problem of a solved example with the same seed, in two turns."""

    async def reset(self, seed: int) -> Any:
        self.word, self.turn = f"{seed % 100:02}", 0
        return f"first of {self.word}: ", {}

    async def step(self, action: str) -> Any:
        right = action == self.word[self.turn]
        self.turn += 1
        return "second: ", float(right), self.turn == 2, False, {}

    async def close(self) -> None: ...

    def alphabet(self) -> str:
        return "0123456789 :firstofsecond"

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        words = [f"{(seed + number) % 100:02}" for number in range(count)]
        return [SolvedExample(f"first of {w}: ", w[0], (SolvedExample("second: ", w[1]),)) for w in words]


def test_solved_examples_are_known_answers_also_of_several_turns() -> None:
    finding = found(checks.rewards, Taught)
    assert finding.text.endswith("known answers 2")


class TaughtLate(Taught):
    """Has solved examples of other problems, each of which takes a second, and gives no reward."""

    async def step(self, action: str) -> Any:
        return "", 0.0, True, False, {}

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        time.sleep(count)
        return super().solved_examples(count, seed + 50)


def test_known_answers_that_come_too_late_are_no_lack_of_a_method() -> None:
    finding = found(checks.rewards, TaughtLate, 0.5)
    assert finding.advice == (
        "a model learns nothing from equal rewards; time was too short for known answers: allow more with --minutes"
    )


class TaughtSlowly(Taught):
    """Needs a tenth of a second for each example."""

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        LEFT.append(count)
        time.sleep(0.1 * count)
        return super().solved_examples(count, seed)


async def count_examples(trial: Trial) -> Finding:
    """Look for known answers, and return the number of examples that were made for them."""
    await trial.known_answers(32)
    return Finding("pass", str(sum(LEFT)))


def test_examples_that_take_long_are_made_only_while_there_is_time() -> None:
    assert int(found(count_examples, TaughtSlowly, 2.0).text) <= 20


class TaughtFromACache(TaughtSlowly):
    """Needs a tenth of a second for each example that it has not made before."""

    made: ClassVar[set[int]] = set()

    def solved_examples(self, count: int, seed: int) -> list[SolvedExample]:
        new = {seed + number for number in range(count)} - self.made
        self.made.update(new)
        LEFT.append(len(new))
        time.sleep(0.1 * len(new))
        return Taught.solved_examples(self, count, seed)


def test_a_first_example_from_a_cache_does_not_hide_that_others_take_long() -> None:
    TaughtFromACache.made.add(0)
    assert int(found(count_examples, TaughtFromACache, 2.0).text) <= 20


class TaughtInAChat(Taught):
    """Shows the prompts of `Taught` as chat messages."""

    async def reset(self, seed: int) -> Any:
        shown, info = await super().reset(seed)
        return [{"role": "user", "content": shown}], info

    async def step(self, action: str) -> Any:
        shown, *rest = await super().step(action)
        return [{"role": "user", "content": shown}], *rest


def test_solved_examples_are_also_known_for_prompts_in_a_chat() -> None:
    assert found(checks.rewards, TaughtInAChat).text.endswith("known answers 2")


def test_a_run_for_a_tiny_model_has_room_for_all_turns(tmp_path: Path) -> None:
    config = config_of(make_config(Taught), Taught().solved_examples(200, 0), tmp_path)
    assert config.rollout.max_turns == 4
    assert config.rollout.max_new_tokens == 4
    assert config.model.max_length >= 2 * len("first of 00: 4444second: 4444")
    assert config.tiny_model is not None


def test_a_gain_is_a_pass_and_none_is_a_warning() -> None:
    before, after = Interval(0.2, 0.15, 0.25), Interval(0.6, 0.5, 0.7)
    assert judged([before, after], "it was ended after 9 s", "", failed=False).state == "pass"
    finding = judged([before, before], "it was ended after 9 s", "", failed=False)
    assert (finding.state, finding.text.startswith("no gain seen: held-out reward 0.200 (0.150 to 0.250)")) == (
        "warning",
        True,
    )
    short = judged([before], "it was ended after 9 s", "", failed=False)
    assert short.advice == "allow more with --minutes"
    broken = judged([], "it ended with exit code 2 after 9 s", "flash: error: x", failed=True)
    assert broken.text == "no second evaluation: it ended with exit code 2 after 9 s; last line: flash: error: x"
    assert not broken.advice, "more time would not help"
    assert found(checks.training, Good).state == "skipped"


TRAINS = """
import anyio
from pathlib import Path
from flash.run.checks.env.training import _training

async def main():
    async with _training(Path("run.toml"), Path("output.txt")) as process:
        while not Path("imported").exists():
            await anyio.sleep(0.05)
        print(process.pid, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""
"""Program that starts a training whose environment never ends its import, and prints the id of its process."""


def test_a_training_ends_when_the_command_that_has_started_it_is_killed(tmp_path: Path) -> None:
    (tmp_path / "imported_for_ever.py").write_text(
        "import pathlib, time\npathlib.Path('imported').touch()\ntime.sleep(1000)\n"
    )
    (tmp_path / "run.toml").write_text('run.name = "x"\nmodel.path = "x"\nenv.path = "imported_for_ever:Env"\n')
    with subprocess.Popen([sys.executable, "-c", TRAINS], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        training = os.pidfd_open(int(command.stdout.readline()))
        command.kill()
    try:
        assert select.select([training], [], [], 60)[0], "the training goes on"
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(training, signal.SIGKILL)
        os.close(training)


# -- all of them -------------------------------------------------------------------------------------------------------


class Forever(Good):
    """Hangs in `reset` with seed 7."""

    async def reset(self, seed: int) -> Any:
        if seed == 7:
            await anyio.sleep(1000)
        return await super().reset(seed)


def test_a_check_without_a_result_in_its_time_is_a_warning_and_the_others_go_on() -> None:
    reported: list[Finding] = []
    some = {"problems": (checks.problems, 1.0), "speed": (checks.speed, 1.0), "interface": (checks.interface, 8.0)}
    run_watched(lambda message: None, checks.examine_environment, make_config(Forever), 3.0, reported.append, some)
    # The check `problems` reports what it has seen.
    assert " training seeds show " in reported[0].text
    assert reported[0].text.partition("; ")[2].startswith("seed 7 was ")
    assert reported[0].text.endswith(" s under way, before its first answer")
    assert [(one.check, one.state) for one in reported] == [
        ("problems", "warning"),
        ("speed", "warning"),
        ("interface", "pass"),
    ]
    assert reported[1].text.startswith("no result within 1 s; seed 7 was ")
    assert reported[1].text.endswith(" s under way, before its first answer")


class NeverStarts(Good):
    """Hangs in each `reset`."""

    async def reset(self, seed: int) -> Any:
        await anyio.sleep(1000)


def test_an_environment_that_gives_no_first_episode_in_time_fails() -> None:
    reported: list[Finding] = []
    run_watched(lambda message: None, checks.examine_environment, make_config(NeverStarts), 5.0, reported.append)
    assert [(one.check, one.state) for one in reported] == [("interface", "failure")]
    assert reported[0].text.startswith("no result within 1 s; seed 0 was ")
