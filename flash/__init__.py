"""Flash: asynchronous reinforcement-learning post-training for language models.

This module has the public names for users. Each name is imported on first use, so that `import flash` does not need
torch:

    import flash

    result = flash.train("my.toml", settings={"train.async_ratio": 2})
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from algorithms.base import Objective, ObjectiveOutput, PackedTokens
    from flash.config.load import dump, load
    from flash.config.tree import Config
    from flash.environment.interface import (
        HELD_OUT,
        Checked,
        Environment,
        Info,
        Kinds,
        Prepared,
        ResetResult,
        SolvedExample,
        StepResult,
        SyncEnvironment,
        WarmStart,
        is_held_out,
    )
    from flash.environment.shared import run_name, shared, sharing
    from flash.errors import ConfigError, EnvError, FlashError, RewardError
    from flash.observe.rundir.summary import Summary
    from flash.run.play import Played, play
    from flash.run.results import EvaluationPoint, EvaluationResult, RunResult
    from flash.run.training import evaluate, sft, train
    from flash.types import Message, Observation

_NAMES_OF = {
    "flash.config.load": ("load", "dump"),
    "flash.config.tree": ("Config",),
    "flash.run.training": ("train", "sft", "evaluate"),
    "flash.run.results": ("RunResult", "EvaluationPoint", "EvaluationResult"),
    "flash.run.play": ("play", "Played"),
    "flash.observe.rundir.summary": ("Summary",),
    "flash.environment.interface": (
        *("Environment", "SyncEnvironment", "Info", "ResetResult", "StepResult", "HELD_OUT", "is_held_out"),
        *("Checked", "Prepared", "WarmStart", "SolvedExample", "Kinds"),
    ),
    "flash.environment.shared": ("shared", "sharing", "run_name"),
    "flash.types": ("Message", "Observation"),
    "algorithms.base": ("Objective", "ObjectiveOutput", "PackedTokens"),
    "flash.errors": ("FlashError", "ConfigError", "EnvError", "RewardError"),
}
"""Public names, by the module that defines them."""

__all__ = [
    # a run
    "load",
    "dump",
    "Config",
    "train",
    "sft",
    "evaluate",
    "Summary",
    "RunResult",
    "EvaluationPoint",
    "EvaluationResult",
    # an environment
    "Environment",
    "SyncEnvironment",
    "Message",
    "Observation",
    "Info",
    "ResetResult",
    "StepResult",
    "HELD_OUT",
    "is_held_out",
    "Checked",
    "Prepared",
    "WarmStart",
    "SolvedExample",
    "Kinds",
    "play",
    "Played",
    "shared",
    "sharing",
    "run_name",
    # an objective
    "Objective",
    "ObjectiveOutput",
    "PackedTokens",
    # errors
    "FlashError",
    "ConfigError",
    "EnvError",
    "RewardError",
]

_MODULE_OF = {name: module for module, names in _NAMES_OF.items() for name in names}
"""Module that defines each public name."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is used for the first time. Python calls this for names that are not set yet."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'flash' has no attribute {name!r}")
    value = getattr(import_module(_MODULE_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names for `dir(flash)`, which completion uses: also public names that are not imported yet."""
    return sorted({*globals(), *__all__})
