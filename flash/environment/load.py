"""The configured environment, found by its import path: its episodes, what they share, and its kinds of problems."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, cast

from flash.config.objects import check_options, load_object
from flash.config.tree import Config
from flash.environment.interface import Environment, Kinds, Prepared
from flash.environment.threaded import wrap


def make_env(config: Config) -> Callable[[str], Environment]:
    """A factory of the configured environment; its options are checked once. It finds a task's kind by its seed."""
    env = load_object(config.env.path)
    options = check_options(env, config.env.options, "env.options")
    return lambda kind: wrap(env(**options))


def prepare_env(config: Config) -> Callable[[], Awaitable[None]] | None:
    """Opens what the episodes of a node share; None where the environment has nothing of the kind."""
    env: Any = load_object(config.env.path)
    if not isinstance(env, Prepared):
        return None
    return partial(env.prepare, **check_options(cast("type[object]", env), config.env.options, "env.options"))


def kind_of(config: Config) -> Callable[[int], str]:
    """The kind of the problem of a seed, for environments that have several; one unnamed kind for the others."""
    env: Any = load_object(config.env.path)
    if not isinstance(env, Kinds):
        return lambda seed: ""
    options = check_options(cast("type[object]", env), config.env.options, "env.options")
    return lambda seed: env.kind_of(seed, **options)
