"""An environment within another's options keeps the domains, kinds and names of its problems."""

from __future__ import annotations

from typing import Any

import pytest

from envs.mixture import Mixture, MixtureOptions
from flash.config.check import check_env
from flash.config.tree import Config, EnvConfig, ModelConfig, RolloutConfig, RunConfig
from flash.environment import Domain
from flash.environment.load import LoadedEnvironment
from flash.errors import ConfigError
from flash.samples.rules import ProblemKinds
from flash.samples.tasks import TaskSource

PROPERTIES: dict[str, Any] = {
    "weight": 3.0,
    "group_size": 16,
    "drop_equal_rewards": True,
    "accuracy_bounds": [0.1, 0.9],
    "max_turns": 3,
    "max_new_tokens": 64,
    "temperature": 0.5,
    "top_k": 7,
    "top_p": 0.9,
    "min_p": 0.1,
    "min_tokens": 2,
    "stop": ["END", 5],
    "logit_bias": [[7, 1.0]],
    "repetition_penalty": 1.1,
}
"""A value for each property of a domain that is not the run's default."""


class Outer:
    """A wrapper as users write them."""

    def __init__(self, tasks: dict[str, Any]) -> None:
        self.tasks = tasks

    @classmethod
    def wrapped(cls, tasks: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
        return Mixture, {"options": MixtureOptions(kinds=tasks["options"]["kinds"])}

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 0.0, True, False, {}

    def close(self) -> None:
        pass


AGENT: dict[str, Any] = {"command": ["cat"]}
TOOLS: dict[str, Any] = {"tools": {"python": {"path": "envs.tools.sandboxed:Python"}}}
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "agent": ("envs.agent:Agent", AGENT),
    "tools": ("envs.tools.env:ToolEnv", TOOLS),
    "a user's": (f"{__name__}:Outer", {}),
}


def mixture(**properties: Any) -> dict[str, Any]:
    kinds = {
        "easy": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 1}},
        "hard": {"path": "envs.arithmetic:Arithmetic", "options": {"digits": 4}, **properties},
    }
    return {"path": "envs.mixture:Mixture", "options": {"kinds": kinds}}


def loaded(wrapper: str, inner: dict[str, Any]) -> LoadedEnvironment:
    path, options = WRAPPERS[wrapper]
    return LoadedEnvironment(path, {"tasks": inner, **options})


def test_every_property_of_a_domain_is_in_the_table():
    assert set(PROPERTIES) == set(Domain.__struct_fields__)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", PROPERTIES)
def test_every_property_of_a_domain_is_seen_through_every_wrapper(wrapper: str, name: str):
    inner = mixture(**{"top_k": PROPERTIES["top_k"], name: PROPERTIES[name]})  # top_p and min_p need a top_k
    plain = LoadedEnvironment(inner["path"], inner["options"])
    config = Config(run=RunConfig(name="n"), model=ModelConfig(path="m"), env=EnvConfig(path=inner["path"]))
    env = loaded(wrapper, inner)
    assert env.domains() == plain.domains()
    assert getattr(env.domains()["hard"], name) == getattr(plain.domains()["hard"], name) != getattr(Domain(), name)
    seen, expected = (ProblemKinds.of(config, one.kind_of, one.domains()) for one in (env, plain))
    assert seen.domains == expected.domains
    assert seen.domains["easy"] != seen.domains["hard"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_kinds_of_problems_are_those_of_the_wrapped_environment(wrapper: str):
    inner = mixture(weight=2)
    plain, env = LoadedEnvironment(inner["path"], inner["options"]), loaded(wrapper, inner)
    for seed in range(50):
        assert env.kind_of(seed) == plain.kind_of(seed) != ""


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_tasks_bear_the_kind_by_which_one_environment_is_quarantined_alone(wrapper: str):
    env = loaded(wrapper, mixture())
    source = TaskSource(0, {"": 2}, env.kind_of)
    assert {task.kind for _ in range(4) for task in source.issue(source.next_problem())} == {"easy", "hard"}
    source.quarantine("easy")
    assert {task.kind for _ in range(4) for task in source.issue(source.next_problem())} == {"hard"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_check_of_a_configuration_sees_domains_through_every_wrapper(wrapper: str):
    path, options = WRAPPERS[wrapper]
    env = EnvConfig(path=path, options={"tasks": mixture(group_size=1), **options})
    rollout = RolloutConfig(drop_equal_rewards=True, fifo_window=0.5)
    config = Config(run=RunConfig(name="n"), model=ModelConfig(path="m"), env=env, rollout=rollout)
    problems = {problem.key: problem.message for problem in check_env(config)}
    assert sorted(problems) == ["env.options … kinds.hard.group_size", "rollout.fifo_window"]


def test_wrappers_within_each_other_are_seen_through():
    path, options = WRAPPERS["agent"]
    tools = {"path": WRAPPERS["tools"][0], "options": {"tasks": mixture(group_size=5), **TOOLS}}
    env = LoadedEnvironment(path, {"tasks": tools, **options})
    assert env.domains()["hard"].group_size == 5


def test_a_wrapper_around_one_environment_has_one_unnamed_kind():
    inner = {"path": "envs.arithmetic:Arithmetic", "options": {}}
    env = loaded("tools", inner)
    assert (env.kind_of(7), env.domains()) == ("", {})


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_mixture_whose_domains_would_be_lost_in_another_is_refused(wrapper: str):
    path, options = WRAPPERS[wrapper]
    kinds = {"nested": {"path": path, "options": {"tasks": mixture(), **options}}}
    with pytest.raises(ConfigError, match=r"`kinds.nested.path`: a mixture cannot hold a mixture"):
        Mixture.check(MixtureOptions(kinds=kinds))
