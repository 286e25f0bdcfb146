"""The configured environment: it is made with its options, and its optional classmethods are protected."""

import re

import pytest

from envs.arithmetic import Arithmetic
from flash.environment import Environment
from flash.environment.load import LoadedEnvironment
from flash.errors import ConfigError, EnvError

prepared = []
"""Options of each call of `Several.prepare`."""


class Plain:
    """A blocking environment with keyword arguments, as users write them."""

    def __init__(self, word: str = "x", count: int = 1) -> None:
        self.word, self.count = word, count

    def reset(self, seed):
        return self.word * self.count, {}

    def step(self, action):
        return "", 1.0, True, False, {}

    def close(self):
        pass


class Informed(Plain):
    """An environment that would get a view of its episode, if its methods were not blocking."""

    def inform(self, episode):
        self.episode = episode

    async def reset(self, seed):
        return self.word, {}


class Several(Plain):
    """An environment with several kinds of problems, and with resources to prepare."""

    @classmethod
    async def prepare(cls, **options):
        prepared.append(options)

    @classmethod
    def kind_of(cls, seed, word="x", count=1):
        return f"{word}{seed % count}"


@pytest.mark.anyio
async def test_an_environment_with_keyword_arguments_is_made_once_per_episode():
    loaded = LoadedEnvironment(f"{__name__}:Plain", {"word": "ab", "count": 2})
    one, other = loaded.make(), loaded.make("any kind")
    assert one is not other
    assert isinstance(one, Environment)
    assert await one.reset(0) == ("abab", {})
    assert await one.step("") == ("", 1.0, True, False, {})


@pytest.mark.anyio
async def test_an_environment_with_a_struct_of_options_is_made_with_it():
    env = LoadedEnvironment("envs.arithmetic:Arithmetic", {"digits": 1}).make()
    assert isinstance(env, Arithmetic)
    prompt, _ = await env.reset(0)
    assert len(str(prompt)) == len("1+2=")


@pytest.mark.anyio
async def test_the_optional_classmethods_are_called_with_the_options():
    loaded = LoadedEnvironment(f"{__name__}:Several", {"word": "k", "count": 3})
    await loaded.prepare()
    assert prepared == [{"word": "k", "count": 3}]
    assert [loaded.kind_of(seed) for seed in range(4)] == ["k0", "k1", "k2", "k0"]


@pytest.mark.anyio
async def test_a_class_without_optional_methods_has_one_unnamed_kind_and_nothing_to_prepare():
    loaded = LoadedEnvironment(f"{__name__}:Plain", {})
    await loaded.prepare()
    assert loaded.kind_of(7) == ""


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("envs.arithmetic:Arithmetik", {}, "did you mean `Arithmetic`"),
        ("envs.arithmetic:Arithmetic", {"digit": 2}, r"`env\.options\.digit`: Arithmetic has no such option"),
        ("envs.arithmetic:Arithmetic", {"digits": 0}, "`env.options`: Arithmetic refuses them: digits must be"),
        (f"{__name__}:Informed", {}, "`.*:Informed` has `inform`, so its step must be an `async def`"),
    ],
)
def test_a_wrong_path_or_option_is_refused_when_it_is_loaded(path, options, message):
    with pytest.raises(ConfigError, match=message):
        LoadedEnvironment(path, options)


class Failing(Plain):
    """An environment whose classmethods raise an error or return a wrong type, as the option `fault` says."""

    @classmethod
    def _ask(cls, fault):
        """Raise SystemExit for "exits" and ConfigError for "config"; else return a value of a wrong type."""
        if fault == "exits":
            raise SystemExit(3)
        if fault == "config":
            raise ConfigError("row 3 has no answer")
        return b"seven"

    def __init__(self, fault=""):
        pass

    @classmethod
    async def prepare(cls, fault=""):
        cls._ask(fault)

    @classmethod
    def kind_of(cls, seed, fault=""):
        return cls._ask(fault)

    @classmethod
    def domains(cls, fault=""):
        return {"seven": cls._ask(fault)}

    @classmethod
    def held_out_problems(cls, fault=""):
        return cls._ask(fault)

    @classmethod
    def solution_of(cls, seed, fault=""):
        return cls._ask(fault)


class Around(Plain):
    """An environment whose `wrapped` tries to end the process."""

    def __init__(self):
        pass

    @classmethod
    def wrapped(cls):
        raise SystemExit("nothing is wrapped")


def asked(fault):
    """Return a function for each classmethod of `Failing`, by the name of the call in error messages."""
    loaded = LoadedEnvironment(f"{__name__}:Failing", {"fault": fault})
    return {
        "kind_of (seed 7)": lambda: loaded.kind_of(7),
        "domains": loaded.domains,
        "held_out_problems": loaded.held_out_problems,
        "solution_of (seed 7)": lambda: loaded.solution_of(7),
    }


def test_an_exception_of_a_classmethod_becomes_an_error_that_names_the_call():
    for name, call in asked("exits").items():
        with pytest.raises(EnvError, match=rf"environment {re.escape(name)} raised SystemExit: 3 \(.*test_load.py:"):
            call()
    for call in asked("config").values():
        with pytest.raises(ConfigError, match=r"^row 3 has no answer$"):
            call()
    with pytest.raises(EnvError, match="environment wrapped raised SystemExit: nothing is wrapped"):
        LoadedEnvironment(f"{__name__}:Around", {}).kind_of(7)


def test_a_classmethod_that_returns_another_type_is_an_error():
    for name, call in asked("").items():
        with pytest.raises(EnvError, match=rf"environment {re.escape(name)} must .* b'seven' of type bytes"):
            call()


@pytest.mark.anyio
async def test_an_exception_of_prepare_becomes_an_error_that_names_it():
    with pytest.raises(EnvError, match="environment prepare raised SystemExit: 3"):
        await LoadedEnvironment(f"{__name__}:Failing", {"fault": "exits"}).prepare()
    with pytest.raises(ConfigError, match=r"^row 3 has no answer$"):
        await LoadedEnvironment(f"{__name__}:Failing", {"fault": "config"}).prepare()
