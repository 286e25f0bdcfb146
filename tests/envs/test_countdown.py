"""Countdown: every problem has its solution, and only expressions that are right and fair earn anything."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envs.countdown import Countdown, CountdownOptions, draw, what_is_wrong
from envs.generated import in_held_out_part
from flash.environment import HELD_OUT, Environment, WarmStart
from flash.errors import ConfigError, EnvError
from flash.types import Message

GIVEN, TARGET = (3, 7, 8, 12), 47


@pytest.mark.anyio
async def test_solutions_earn_one_on_both_sides_and_the_sides_never_meet() -> None:
    env = Countdown(CountdownOptions())
    assert isinstance(env, Environment)
    for seed in [*range(100), *range(HELD_OUT, HELD_OUT + 30)]:
        problem = draw(random.Random(seed), CountdownOptions(), held_out=seed >= HELD_OUT)
        assert await env.reset(seed) == (problem.prompt, {})
        assert in_held_out_part(problem.key) == (seed >= HELD_OUT)
        assert 10 <= problem.target <= 100
        assert problem.target not in problem.numbers
        for right in (problem.solution, problem.expression, f"{problem.expression} = {problem.target}"):
            assert await env.step(right) == ("", 1.0, True, False, {"note": ""})
        assert (await env.step(problem.expression + "+1"))[1] == 0.0


def test_solved_examples_go_step_by_step_in_whole_numbers() -> None:
    env = Countdown(CountdownOptions(operators="*/-", highest=400))
    assert isinstance(env, WarmStart)
    examples = env.solved_examples(100, 1)
    assert examples == env.solved_examples(100, 1)
    assert "".join(example.answer for example in examples).count("+") == 0
    for example in examples:
        *given_numbers, target = map(int, example.prompt.removesuffix(":").split())
        *steps, expression = example.answer.split("\n")
        assert len(steps) == 3
        assert steps[-1].endswith(f"={target}")
        for step in steps:
            left, _, result = step.partition("=")
            assert not what_is_wrong(
                left, tuple(map(int, left.translate(str.maketrans("*/-", "   ")).split())), int(result)
            )
        assert not what_is_wrong(expression, tuple(given_numbers), target)
        assert set(example.prompt + example.answer) <= set(env.alphabet())


@pytest.mark.parametrize(
    "answer",
    [
        "7*8-12+3",
        "(7 * 8) - (12 - 3)",
        "7×8−12+3 = 47",
        "first 12*3 = 36, too small\n7*8-12+3\n",
        "<answer>1</answer> no: <answer> 3+7*8-12 </answer> done",
        "((((7))))*8-12+3",
    ],
)
def test_right_answers_are_right_however_they_are_written(answer: str) -> None:
    assert what_is_wrong(answer, GIVEN, TARGET) == ""


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "the end stands where a number is expected"),
        ("47", "uses 47 more often"),
        ("7*7-8/(12-8)", "uses 7, 8 more often"),
        ("7*8-12", "is 44, not 47"),
        ("7*8-12+3=48", "does not end in 47"),
        ("47=7*8-12+3", "does not end in 47"),
        ("7*8-12+3=47=47", "does not end in 47"),
        ("7*8-12+3\nthat is it", "belongs to no expression"),
        ("7/(8-8)", "divides by 0"),
        ("12**3", "stands where a number is expected"),
        ("-3+7*8", "stands where a number is expected"),
        ("7*8-12+3)", "is not expected there"),
        ("(7*8-12+3", "not closed"),
        ("7 8", "is not expected there"),
        ("__import__('os').abort()", "belongs to no expression"),
        ("(" * 5000, "longer than 200"),
        ("9" * 5000, "longer than 200"),
        ("7*8-12+٣", "belongs to no expression"),
        ("7*8-12+³", "belongs to no expression"),
    ],
)
def test_wrong_answers_are_wrong_and_it_is_said_why(answer: str, why: str) -> None:
    assert why in what_is_wrong(answer, GIVEN, TARGET)


@pytest.mark.slow
@given(st.text(alphabet="0123789+-*/() =\n<answer>", max_size=60) | st.text(max_size=60))
def test_no_text_makes_the_judge_fail(answer: str) -> None:
    assert isinstance(what_is_wrong(answer, GIVEN, TARGET), str)


def test_fractions_in_between_are_exact() -> None:
    assert what_is_wrong("8/(3-8/3)", (3, 3, 8, 8), 24) == ""
    assert what_is_wrong("8/(3-8/3)", (3, 3, 8, 8), 23) == "'8/(3-8/3)' is 24, not 23"


@pytest.mark.anyio
async def test_a_chat_is_told_in_words() -> None:
    env = Countdown(CountdownOptions(template="chat"))
    (message,), _ = await env.reset(1)
    assert isinstance(message, Message)
    assert "use each at most once" in message.content
    assert set(message.content) <= set(env.alphabet())
    assert (await env.step("2+2"))[4]["note"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": 1}, "numbers must be"),
        ({"largest": 2}, "largest must be"),
        ({"lowest": 5, "highest": 4}, "in this order"),
        ({"operators": "^"}, "operators must be"),
        ({"operators": ""}, "operators must be"),
    ],
)
def test_options_without_problems_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CountdownOptions(**options)


def test_a_range_that_is_never_reached_is_refused_before_a_run() -> None:
    with pytest.raises(ConfigError, match="hardly ever reach"):
        Countdown.check(CountdownOptions(numbers=2, largest=5, lowest=26, highest=90))


@pytest.mark.anyio
async def test_a_step_before_reset_is_an_environment_error() -> None:
    with pytest.raises(EnvError, match="before reset"):
        await Countdown(CountdownOptions()).step("1")
