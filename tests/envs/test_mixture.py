from collections import Counter

import anyio.lowlevel
import pytest

from envs.arithmetic import Arithmetic, ArithmeticOptions
from envs.mixture import Mixture, MixtureOptions
from flash.config.objects import check_options
from flash.environment import HELD_OUT, Checked, Domain, Domains, Environment, Kinds, WarmStart
from flash.errors import ConfigError, EnvError

KINDS = {
    "easy": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 1}, "weight": 3},
    "hard": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 4, "operators": "*"}},
}


class Blocking:
    """A Gym-style environment without solved examples."""

    def __init__(self, word="blocked"):
        self.word = word
        self.closed = 0

    @classmethod
    def check(cls, word="blocked"):
        if word == "bad":
            raise ConfigError("word must not be bad")

    def reset(self, seed):
        return f"{self.word} {seed}", {}

    def step(self, action):
        return "", 0.5, True, False, {}

    def close(self):
        self.closed += 1
        closings.append(self.closed)


closings = []


class Scarce(Arithmetic):
    """An environment with fewer solved examples than asked for."""

    def solved_examples(self, count, seed):
        return super().solved_examples(count, seed)[:2]


class NoEnvironment:
    def reset(self, seed):
        return "", {}


BLOCKING = {"path": f"{__name__}:Blocking"}


def kinds_of(seeds, kinds=KINDS):
    options = MixtureOptions(kinds=kinds)
    return Counter(Mixture.kind_of(seed, options) for seed in seeds)


def test_it_is_an_environment_that_names_its_kinds():
    env = Mixture(MixtureOptions(kinds=KINDS))
    for protocol in (Environment, Checked, Kinds, Domains, WarmStart):
        assert isinstance(env, protocol)


@pytest.mark.parametrize("start", [0, 17, 100_000, HELD_OUT, HELD_OUT + 999])
def test_any_stretch_of_seeds_holds_each_kind_by_its_weight(start):
    counts = kinds_of(range(start, start + 100))
    assert abs(counts["easy"] - 75) <= 3
    assert counts["easy"] + counts["hard"] == 100


def test_the_kind_of_a_seed_does_not_depend_on_options_of_the_environments():
    other = {name: kind | {"options": {"digits": 3}} for name, kind in KINDS.items()}
    one, two = MixtureOptions(kinds=KINDS), MixtureOptions(kinds=other)
    assert [Mixture.kind_of(seed, one) for seed in range(50)] == [Mixture.kind_of(seed, two) for seed in range(50)]


@pytest.mark.anyio
async def test_a_problem_comes_from_the_environment_of_its_kind():
    for seed in [*range(20), *range(HELD_OUT, HELD_OUT + 20)]:
        env = Mixture(MixtureOptions(kinds=KINDS))
        shown = await env.reset(seed)
        kind = KINDS[Mixture.kind_of(seed, MixtureOptions(kinds=KINDS))]
        assert shown == await Arithmetic(ArithmeticOptions(**kind["options"])).reset(seed)
        right = str(eval(shown[0].removesuffix("=")))
        assert await env.step(right) == ("", 1.0, True, False, {})
        await env.close()


def test_each_kind_is_a_domain_with_what_it_says_of_itself():
    limits = {"group_size": 16, "accuracy_bounds": [0.1, 0.9], "max_turns": 3, "max_new_tokens": 64, "temperature": 0.5}
    domains = Mixture.domains(MixtureOptions(kinds={**KINDS, "mine": BLOCKING | limits}))
    assert domains["easy"] == Domain(weight=3)
    assert domains["mine"] == Domain(**limits | {"accuracy_bounds": (0.1, 0.9)})


@pytest.mark.anyio
@pytest.mark.parametrize(("seed", "reward"), [(7, 1.0), (HELD_OUT + 7, 0.5)])
async def test_rewards_are_scaled_in_training_alone(seed, reward):
    env = Mixture(MixtureOptions(kinds={"only": BLOCKING | {"reward_scale": 2}}))
    await env.reset(seed)
    assert (await env.step("x"))[1] == reward


@pytest.mark.anyio
async def test_a_blocking_environment_works_inside_and_is_closed_once():
    closings.clear()
    env = Mixture(MixtureOptions(kinds={"only": BLOCKING | {"options": {"word": "hello"}}}))
    assert await env.reset(7) == ("hello 7", {})
    assert await env.step("x") == ("", 0.5, True, False, {})
    await env.close()
    assert closings == [1]


@pytest.mark.anyio
async def test_closing_before_reset_closes_nothing():
    closings.clear()
    await Mixture(MixtureOptions(kinds={"only": BLOCKING})).close()
    await anyio.lowlevel.checkpoint()
    assert closings == []


@pytest.mark.anyio
async def test_a_step_before_reset_is_an_environment_error():
    with pytest.raises(EnvError, match="before reset"):
        await Mixture(MixtureOptions(kinds=KINDS)).step("1")


def test_solved_examples_come_from_all_kinds_by_weight():
    env = Mixture(MixtureOptions(kinds=KINDS))
    examples = env.solved_examples(200, seed=3)
    assert examples == env.solved_examples(200, seed=3)
    assert examples != env.solved_examples(200, seed=4)
    products = sum("*" in example.prompt for example in examples)
    assert 40 <= products <= 60
    assert set("".join(example.prompt + example.answer for example in examples)) <= set(env.alphabet())
    assert sorted(env.alphabet()) == sorted("0123456789=+*")


def test_solved_examples_need_every_kind_to_have_some():
    env = Mixture(MixtureOptions(kinds=KINDS | {"silent": BLOCKING}))
    for ask in (lambda: env.solved_examples(4, 0), env.alphabet):
        with pytest.raises(ConfigError, match="silent cannot show solved examples"):
            ask()


def test_a_kind_with_fewer_solved_examples_than_requested_is_named():
    scarce = {"path": f"{__name__}:Scarce", "options": {"digits": 1}}
    env = Mixture(MixtureOptions(kinds={"scarce": scarce}))
    assert len(env.solved_examples(2, 0)) == 2
    with pytest.raises(EnvError, match=r"`kinds\.scarce`: solved_examples\(5, seed\) must .* 5 .*, but returned 2"):
        env.solved_examples(5, 0)


def test_the_configurations_form_of_the_options_is_taken():
    assert Mixture(**check_options(Mixture, {"kinds": KINDS}, "env.options"))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({}, "at least one environment"),
        ({"a": {}}, r"`kinds.a.path`: is missing"),
        ({"a": {"path": "envs.arithmetic:Arithmetik"}}, r"`kinds.a.path`: .* did you mean `Arithmetic`"),
        ({"a": {"path": f"{__name__}:NoEnvironment"}}, r"`kinds.a.path`: .* is not an environment"),
        ({"a": {"path": "flash.environment.threaded:wrap"}}, r"`kinds.a.path`: .* is not an environment"),
        ({"a": {"path": "envs.mixture:Mixture"}}, "a mixture cannot hold a mixture"),
        ({"a": BLOCKING | {"wait": 1}}, r"`kinds.a.wait`: .*did you mean `weight`"),
        ({"a": BLOCKING | {"weight": 0}}, r"`kinds.a.weight`: expected a number above 0"),
        ({"a": BLOCKING | {"weight": float("inf")}}, r"`kinds.a.weight`: expected a number"),
        ({"a": BLOCKING | {"weight": "1"}}, r"`kinds.a.weight`: expected a number"),
        ({"a": BLOCKING | {"reward_scale": 0}}, r"`kinds.a.reward_scale`: expected a number above 0"),
        ({"a": BLOCKING | {"group_size": 0}}, r"`kinds.a.group_size`: expected an integer above 0"),
        ({"a": BLOCKING | {"max_turns": 0}}, r"`kinds.a.max_turns`: expected an integer above 0"),
        ({"a": BLOCKING | {"max_new_tokens": 1.5}}, r"`kinds.a.max_new_tokens`: expected an integer"),
        ({"a": BLOCKING | {"temperature": 0}}, r"`kinds.a.temperature`: expected a number from 0.01 to 2, got 0"),
        ({"a": BLOCKING | {"accuracy_bounds": [0.9, 0.1]}}, r"`kinds.a.accuracy_bounds`: expected \[low, high\]"),
        ({"a": BLOCKING | {"accuracy_bounds": [0.9]}}, r"`kinds.a.accuracy_bounds`"),
        ({"a": BLOCKING | {"group_sise": 4}}, r"`kinds.a.group_sise`: .*did you mean `group_size`"),
        ({"a": BLOCKING | {"group_size": 1, "drop_equal_rewards": True}}, r"`kinds.a.drop_equal_rewards`: groups of"),
        ({"a": BLOCKING | {"options": {"work": 1}}}, r"`kinds.a.options.work`: .*did you mean `word`"),
        ({"a": BLOCKING | {"options": {"word": "bad"}}}, r"`kinds.a.options`: word must not be bad"),
    ],
)
def test_a_mixture_that_cannot_work_is_refused(kinds, message):
    with pytest.raises(ConfigError, match=message):
        Mixture.check(MixtureOptions(kinds=kinds))


def test_a_mixture_that_can_work_is_not_refused():
    Mixture.check(MixtureOptions(kinds=KINDS | {"blocking": BLOCKING}))
