import re

import anyio
import anyio.lowlevel
import pytest

from envs.arithmetic import OPERATORS, Arithmetic, ArithmeticOptions, last_number
from envs.generated import in_held_out_part
from flash.environment import HELD_OUT, Environment
from flash.errors import ConfigError, EnvError

TWO_DIGIT_SUMS = {f"{a}+{b}=" for a in range(10, 100) for b in range(10, 100)}


def test_it_is_an_environment():
    assert isinstance(Arithmetic(ArithmeticOptions()), Environment)


@pytest.mark.anyio
async def test_the_same_seed_shows_the_same_problem():
    for seed in (0, 1, 12345, HELD_OUT, HELD_OUT + 7):
        assert await Arithmetic(ArithmeticOptions()).reset(seed) == await Arithmetic(ArithmeticOptions()).reset(seed)


@pytest.mark.anyio
async def test_only_the_right_number_is_rewarded():
    env = Arithmetic(ArithmeticOptions())
    prompt, _ = await env.reset(3)
    right = str(eval(prompt.removesuffix("=")))
    for answer, reward in [(right, 1.0), (f" {right}\n", 1.0), (right + "0", 0.0), ("0" + right, 0.0), ("", 0.0)]:
        assert await env.step(answer) == ("", reward, True, False, {})


async def prompts_of(seeds):
    env = Arithmetic(ArithmeticOptions())
    prompts = set()
    for seed in seeds:
        prompts.add((await env.reset(seed))[0])
        if seed % 1000 == 0:
            await anyio.lowlevel.checkpoint()
    return prompts


@pytest.mark.slow
@pytest.mark.anyio
async def test_training_and_held_out_problems_never_meet():
    train = await prompts_of(range(90_000))
    held_out = await prompts_of(range(HELD_OUT, HELD_OUT + 10_000))
    assert not train & held_out
    assert train | held_out <= TWO_DIGIT_SUMS
    assert len(train | held_out) > 0.999 * len(TWO_DIGIT_SUMS)


def test_about_a_tenth_of_the_problems_is_held_out():
    held_out = sum(map(in_held_out_part, TWO_DIGIT_SUMS))
    assert 0.08 < held_out / len(TWO_DIGIT_SUMS) < 0.12


@pytest.mark.parametrize("operators", list(OPERATORS))
def test_the_easiest_setting_has_problems_on_both_sides(operators):
    prompts = [f"{a}{operators}{b}=" for a in range(10) for b in range(10)]
    assert 0 < sum(map(in_held_out_part, prompts)) < len(prompts)


@pytest.mark.parametrize(("digits", "operators"), [(1, "+"), (2, "+"), (3, "+-*"), (2, "-")])
def test_solved_examples_are_right_repeatable_and_never_held_out(digits, operators):
    env = Arithmetic(ArithmeticOptions(digits=digits, operators=operators))
    examples = env.solved_examples(500, seed=1)
    assert examples == env.solved_examples(500, seed=1)
    assert examples != env.solved_examples(500, seed=2)
    alphabet = env.alphabet()
    assert len(set(alphabet)) == len(alphabet)
    for example in examples:
        assert eval(example.prompt.removesuffix("=")) == int(example.answer)
        assert not in_held_out_part(example.prompt)
        assert set(example.prompt + example.answer) <= set(alphabet)


def test_operands_have_exactly_the_digits_asked_for():
    for example in Arithmetic(ArithmeticOptions(digits=3)).solved_examples(200, seed=0):
        left, right = example.prompt.removesuffix("=").split("+")
        assert len(left) == len(right) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [({"digits": 0}, "digits must be"), ({"digits": 99}, "digits must be")]
    + [({"operators": operators}, "operators must be") for operators in ("", "/", "++", "+/")],
)
def test_options_that_name_no_problem_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ArithmeticOptions(**options)


@pytest.mark.anyio
async def test_a_step_before_reset_is_an_environment_error():
    with pytest.raises(EnvError, match="before reset"):
        await Arithmetic(ArithmeticOptions()).step("1")


@pytest.mark.anyio
async def test_a_chat_model_is_asked_a_question_about_the_same_problem():
    options = ArithmeticOptions(operators="+-*", template="chat")
    for seed in (3, 4, 5, HELD_OUT):
        (message,), _ = await Arithmetic(options).reset(seed)
        prompt, _ = await Arithmetic(ArithmeticOptions(operators="+-*")).reset(seed)
        assert message.role == "user"
        asked = message.content.removeprefix("What is ").removesuffix("? Reply with only the number.")
        assert asked.replace(" ", "") + "=" == prompt


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        ("7", "7"),
        ("The answer is 46.", "46"),
        ("12 + 34 = 46", "46"),
        ("12-46", "46"),
        ("12 - 46", "46"),
        ("12 - 46 = -34", "-34"),
        ("It is -34!", "-34"),
        ("1,234,567", "1234567"),
        ("3, 4", "4"),
        ("1.5", "5"),
        ("nothing", None),
        ("", None),
        ("-", None),
    ],
)
def test_the_last_number_of_an_answer_counts(answer, number):
    assert last_number(answer) == number


@pytest.mark.anyio
async def test_a_chat_model_is_rewarded_for_the_right_last_number():
    env = Arithmetic(ArithmeticOptions(digits=1, operators="-", template="chat"))
    (message,), _ = await env.reset(1)
    left, right = map(int, re.findall(r"\d", message.content))
    for answer, reward in [(f"{left} - {right} = {left - right}.", 1.0), (str(left - right + 1), 0.0), ("no", 0.0)]:
        assert await env.step(answer) == ("", reward, True, False, {})
