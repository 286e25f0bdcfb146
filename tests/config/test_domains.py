"""Checks of domains (kinds of problems with settings of their own) against the rest of the configuration."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from envs.mixture import Mixture
from flash.config.check import check_env
from flash.config.decode import ConfigProblem
from flash.config.tree import Config

SUMS = {"path": "envs.arithmetic:Arithmetic"}


def problems(kinds: dict[str, Any], **rollout: Any) -> list[ConfigProblem]:
    """Return the problems of a mixture with these kinds, and with these keys of `[rollout]`."""
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "fake", "max_length": 64},
        "env": {"path": "envs.mixture:Mixture", "options": {"kinds": kinds}},
        "rollout": {"group_size": 4, "max_new_tokens": 32} | rollout,
    }
    return list(check_env(msgspec.convert(base, Config)))


def test_domains_with_limits_of_their_own_are_accepted() -> None:
    assert problems({"a": SUMS | {"max_new_tokens": 63, "group_size": 8}, "b": SUMS}) == []
    assert problems({"a": SUMS}, fifo_window=1.0) == [], "a single domain can keep the order"


@pytest.mark.parametrize(
    ("own", "rollout", "key", "message"),
    [
        ({"max_new_tokens": 64}, {}, "env.options.kinds.a.max_new_tokens", "expected at most 63"),
        ({"group_size": 1}, {"drop_equal_rewards": True}, "env.options.kinds.a.group_size", "equal rewards"),
        ({}, {"fifo_window": 1.0}, "rollout.fifo_window", "several domains"),
        ({"weight": -1}, {}, "env.options", "`kinds.a.weight`"),
    ],
)
def test_an_option_of_a_domain_that_cannot_work_is_refused_with_its_key(
    own: Any, rollout: Any, key: str, message: str
) -> None:
    (problem,) = problems({"a": SUMS | own, "b": SUMS}, **rollout)
    assert (problem.key, message in problem.message) == (key, True), problem


class AroundMixture:
    """Environment around a mixture, with kinds of its own and so without domains."""

    def __init__(self, kinds: dict[str, Any]) -> None: ...

    def reset(self, seed: int) -> None: ...

    def step(self, action: str) -> None: ...

    def close(self) -> None: ...

    @classmethod
    def wrapped(cls, kinds: dict[str, Any]) -> tuple[type[Any], dict[str, Any]]:
        return Mixture, {"kinds": kinds}

    @classmethod
    def kind_of(cls, seed: int, **options: Any) -> str:
        return "one"


class Failing(AroundMixture):
    """Environment whose `domains` raises an error."""

    @classmethod
    def domains(cls, **options: Any) -> dict[str, Any]:
        raise RuntimeError("no domains today")


class Exiting(AroundMixture):
    """Environment whose `domains` tries to end the process."""

    @classmethod
    def domains(cls, **options: Any) -> dict[str, Any]:
        raise SystemExit("no domains today")


class Listing(AroundMixture):
    """Environment whose `domains` returns dicts in place of `Domain` structs."""

    @classmethod
    def domains(cls, **options: Any) -> Any:
        return {"one": {"weight": 1.0}}


class Wrapping(AroundMixture):
    """Environment without kinds of its own, whose `wrapped` tries to end the process."""

    kind_of = None  # type: ignore[assignment]

    @classmethod
    def wrapped(cls, **options: Any) -> Any:
        raise SystemExit("nothing")


def problems_around(name: str) -> list[ConfigProblem]:
    """Return the problems of the class with this name around a mixture, one of whose limits is too large."""
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "fake", "max_length": 64},
        "env": {
            "path": f"tests.config.test_domains:{name}",
            "options": {"kinds": {"a": SUMS | {"max_new_tokens": 64}}},
        },
    }
    return list(check_env(msgspec.convert(base, Config)))


def test_domains_that_a_wrapper_hides_are_not_checked() -> None:
    assert problems_around("AroundMixture") == []


def test_an_error_of_domains_is_a_problem_of_the_options() -> None:
    for name, message in [
        ("Failing", "RuntimeError: no domains today"),
        ("Exiting", "SystemExit: no domains today"),
        ("Listing", "AttributeError: 'dict' object has no attribute 'max_new_tokens'"),
        ("Wrapping", "SystemExit: nothing"),
    ]:
        assert problems_around(name) == [ConfigProblem("env.options", f"{name} refuses them: {message}")]
