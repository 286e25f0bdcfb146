import statistics

import pytest

from envs.counting import Counting, CountingOptions
from envs.generated import in_held_out_part
from flash.environment import HELD_OUT, Environment, WarmStart
from flash.errors import ConfigError, EnvError


def solve(prompt, signs):
    """The rule once more, in one piece."""
    left, digit = signs.index(prompt[0]), int(prompt[1])
    below = range(left - 1, -1, -1)
    return "".join(f"{signs[at]}{(digit + sum(range(at, left))) % 10}" for at in below)


async def prompt_of(seed, **options):
    return (await Counting(CountingOptions(**options)).reset(seed))[0]


def test_it_is_an_environment_that_shows_solved_examples():
    assert isinstance(Counting(CountingOptions()), Environment)
    assert isinstance(Counting(CountingOptions()), WarmStart)


def test_the_example_of_the_docstring_is_right():
    assert solve("D4", Counting(CountingOptions()).alphabet()) == "C6B7A7"


@pytest.mark.anyio
async def test_only_the_right_answer_earns_everything():
    env = Counting(CountingOptions())
    for seed in (0, 1, 2, HELD_OUT):
        prompt, _ = await env.reset(seed)
        right = solve(prompt, env.alphabet())
        assert await env.step(right) == ("", 1.0, True, False, {})
        for wrong in (right + "0", right[:-1], "", "0" + right):
            assert (await env.step(wrong))[1] < 1.0


@pytest.mark.anyio
async def test_an_answer_earns_its_share_of_right_characters_of_the_longer_one():
    env = Counting(CountingOptions())
    prompt, _ = await env.reset(0)
    right = solve(prompt, env.alphabet())
    half = right[: len(right) // 2]
    assert (await env.step(half))[1] == len(half) / len(right)
    assert (await env.step(right * 2))[1] == 0.5
    assert (await env.step("?" + right[1:]))[1] == (len(right) - 1) / len(right)
    assert (await env.step(""))[1] == 0.0


@pytest.mark.anyio
async def test_the_same_seed_shows_the_same_problem():
    for seed in (0, 12345, HELD_OUT + 7):
        assert await prompt_of(seed) == await prompt_of(seed)


@pytest.mark.anyio
async def test_training_and_held_out_problems_never_meet():
    train = {await prompt_of(seed) for seed in range(3000)}
    held_out = {await prompt_of(HELD_OUT + seed) for seed in range(1000)}
    assert not any(map(in_held_out_part, train))
    assert all(map(in_held_out_part, held_out))


@pytest.mark.anyio
async def test_lengths_have_the_median_asked_for_and_a_long_tail():
    alphabet = Counting(CountingOptions()).alphabet()
    lengths = [2 * alphabet.index((await prompt_of(seed))[0]) for seed in range(4000)]
    assert 22 <= statistics.median(lengths) <= 26
    assert max(lengths) == 480
    assert 0.005 < sum(length > 10 * 24 for length in lengths) / len(lengths) < 0.02


def test_solved_examples_are_right_repeatable_and_never_held_out():
    env = Counting(CountingOptions())
    examples = env.solved_examples(300, seed=1)
    assert examples == env.solved_examples(300, seed=1)
    assert examples != env.solved_examples(300, seed=2)
    alphabet = env.alphabet()
    assert len(set(alphabet)) == len(alphabet)
    for example in examples:
        assert example.answer == solve(example.prompt, alphabet)
        assert not in_held_out_part(example.prompt)


def test_solved_examples_are_often_long():
    lengths = [len(example.answer) for example in Counting(CountingOptions()).solved_examples(300, seed=0)]
    assert 0.2 < sum(length > 240 for length in lengths) / len(lengths) < 0.3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"longest": 1}, "longest must be"),
        ({"longest": 1_000_000}, "longest must be"),
        ({"median": 0}, "median must be"),
        ({"median": 13, "longest": 12}, "median must be"),
        ({"spread": -1.0}, "spread must be"),
        ({"spread": float("inf")}, "spread must be"),
    ],
)
def test_lengths_that_do_not_fit_together_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        CountingOptions(**options)


def test_lengths_that_leave_no_held_out_problem_are_refused_before_the_run():
    with pytest.raises(ConfigError, match="give another median, or a larger spread"):
        Counting.check(CountingOptions(median=4, spread=0.0))
    Counting.check(CountingOptions(median=6, spread=0.0))


@pytest.mark.anyio
async def test_a_step_before_reset_is_an_environment_error():
    with pytest.raises(EnvError, match="before reset"):
        await Counting(CountingOptions()).step("1")
