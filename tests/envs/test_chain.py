import itertools
import statistics

import anyio
import pytest

from envs.chain import ChainedSums, ChainOptions, _instances
from envs.generated import in_held_out_part
from flash.environment import HELD_OUT, Environment, WarmStart
from flash.errors import ConfigError, EnvError


@pytest.fixture(autouse=True)
def no_earlier_instances():
    _instances.cache_clear()


def solve(prompt):
    return str(eval("+".join(operand.lstrip("0") or "0" for operand in prompt.removesuffix("=").split("+"))))


async def play(env, seed, wrong_at=None):
    """The prompts and the results of an episode that is right but for one turn."""
    prompt, _ = await env.reset(seed)
    prompts, results, done = [], [], False
    while not done:
        prompts.append(prompt)
        answer = "no" if len(results) == wrong_at else solve(prompt)
        result = await env.step(answer)
        results.append(result)
        prompt, done = result[0], result[2]
    return prompts, results


async def step_seconds(env, seed):
    """How long each step of an episode takes."""
    prompt, _ = await env.reset(seed)
    seconds, done = [], False
    while not done:
        start = anyio.current_time()
        prompt, _, done, _, _ = await env.step(solve(prompt))
        seconds.append(anyio.current_time() - start)
    return seconds


def test_it_is_an_environment_that_shows_solved_examples():
    assert isinstance(ChainedSums(ChainOptions()), Environment)
    assert isinstance(ChainedSums(ChainOptions()), WarmStart)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_each_sum_begins_with_the_last_digits_of_the_result_before_it():
    for seed in (0, 1, 77, HELD_OUT, HELD_OUT + 5):
        prompts, results = await play(ChainedSums(ChainOptions(digits=2, turns=20)), seed)
        assert len(prompts) == 20
        for before, after in itertools.pairwise(prompts):
            assert after.startswith(f"{int(solve(before)) % 100:02d}+")
        assert [result[1] for result in results] == [1 / 20] * 20
        assert [result[2] for result in results] == [False] * 19 + [True]
        assert results[-1][0] == ""


@pytest.mark.anyio
@pytest.mark.virtual
async def test_the_same_seed_shows_the_same_chain():
    for seed in (3, HELD_OUT + 3):
        one, other = (ChainedSums(ChainOptions(turns=6)) for _ in range(2))
        assert await play(one, seed) == await play(other, seed)


@pytest.mark.anyio
@pytest.mark.virtual
@pytest.mark.parametrize("wrong_at", [0, 2])
async def test_a_wrong_answer_ends_the_episode(wrong_at):
    _, results = await play(ChainedSums(ChainOptions(turns=4)), 9, wrong_at)
    assert len(results) == wrong_at + 1
    assert results[-1] == ("", 0.0, True, False, {})
    assert sum(result[1] for result in results) == wrong_at / 4


@pytest.mark.anyio
@pytest.mark.virtual
async def test_on_request_the_chain_goes_on_after_a_wrong_answer():
    env = ChainedSums(ChainOptions(turns=4, end_at_error=False))
    prompts, results = await play(env, 9, wrong_at=1)
    assert [result[1] for result in results] == [0.25, 0.0, 0.25, 0.25]
    assert prompts == (await play(env, 9))[0]


@pytest.mark.anyio
@pytest.mark.virtual
async def test_held_out_chains_are_made_of_held_out_sums_and_training_chains_of_others():
    for number in range(100):
        prompts, _ = await play(ChainedSums(ChainOptions(turns=5)), number)
        assert not any(map(in_held_out_part, prompts))
        prompts, _ = await play(ChainedSums(ChainOptions(turns=5)), HELD_OUT + number)
        assert all(map(in_held_out_part, prompts))


def test_every_first_operand_has_sums_on_both_sides():
    for left in range(100):
        sides = {in_held_out_part(f"{left:02d}+{right}=") for right in range(10, 100)}
        assert sides == {True, False}


@pytest.mark.anyio
@pytest.mark.virtual
async def test_solved_examples_are_whole_training_chains():
    env = ChainedSums(ChainOptions(digits=3, turns=3))
    examples = env.solved_examples(50, seed=1)
    assert examples == env.solved_examples(50, seed=1)
    assert examples != env.solved_examples(50, seed=2)
    for example in examples:
        turns = [example, *example.later]
        assert len(turns) == 3
        for turn in turns:
            assert turn.answer == solve(turn.prompt)
            assert not in_held_out_part(turn.prompt)
            assert set(turn.prompt + turn.answer) <= set(env.alphabet())
        assert turns[1].prompt[:3] == turns[0].answer[-3:]


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.virtual
async def test_latencies_have_the_mean_and_deviation_asked_for():
    env = ChainedSums(ChainOptions(turns=500, latency_mean=0.3, latency_std=0.15))
    seconds = [one for seed in range(40) for one in await step_seconds(env, seed)]
    assert statistics.mean(seconds) == pytest.approx(0.3, rel=0.02)
    assert statistics.stdev(seconds) == pytest.approx(0.15, rel=0.05)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_latencies_differ_between_instances_of_a_seed_and_repeat_in_another_process():
    env = ChainedSums(ChainOptions(turns=3, latency_mean=1.0, latency_std=1.0))
    first, second = await step_seconds(env, 5), await step_seconds(env, 5)
    assert first != pytest.approx(second, rel=0.01)
    _instances.cache_clear()  # as a new process begins
    assert await step_seconds(env, 5) == pytest.approx(first)
    assert await step_seconds(env, 5) == pytest.approx(second)


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_share_of_the_instances_is_slow_in_every_step():
    env = ChainedSums(ChainOptions(turns=4, latency_mean=1.0, fail_slow=0.25, slow_factor=8.0))
    episodes = [await step_seconds(env, seed) for seed in range(400)]
    for seconds in episodes:
        assert seconds == pytest.approx([8.0 if seconds[0] > 4 else 1.0] * 4)
    assert 0.2 < sum(seconds[0] > 4 for seconds in episodes) / 400 < 0.3


@pytest.mark.anyio
@pytest.mark.virtual
async def test_a_share_of_the_instances_never_answers_one_of_its_steps():
    env = ChainedSums(ChainOptions(turns=4, fail_stop=0.25))
    stopped_after = []
    for seed in range(400):
        finished = 0
        with anyio.move_on_after(10) as scope:
            prompt, _ = await env.reset(seed)
            for _ in range(4):
                prompt = (await env.step(solve(prompt)))[0]
                finished += 1
        if scope.cancelled_caught:
            stopped_after.append(finished)
    assert 0.2 < len(stopped_after) / 400 < 0.3
    assert set(stopped_after) == {0, 1, 2, 3}


@pytest.mark.anyio
async def test_a_step_outside_of_an_episode_is_an_environment_error():
    env = ChainedSums(ChainOptions(turns=1))
    with pytest.raises(EnvError, match="before reset"):
        await env.step("1")
    await env.reset(0)
    await env.step("1")
    with pytest.raises(EnvError, match="after the end"):
        await env.step("1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 1}, "digits must be"),
        ({"digits": 99}, "digits must be"),
        ({"turns": 0}, "turns must be"),
        ({"latency_mean": -1.0}, "latency_mean must be"),
        ({"latency_mean": 1.0, "latency_std": float("nan")}, "latency_std must be"),
        ({"latency_std": 1.0}, "needs a latency_mean"),
        ({"fail_slow": 1.5}, "fail_slow must be"),
        ({"fail_stop": -0.5}, "fail_stop must be"),
        ({"slow_factor": 0.5}, "slow_factor must be"),
    ],
)
def test_options_that_make_no_chain_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        ChainOptions(**options)
