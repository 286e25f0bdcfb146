"""The contract between Flash and environments: what an environment is, and what it may use.

`interface` holds the protocols, `threaded` runs blocking environments, `shared` is what the episodes of a node share.
"""

from flash.environment.interface import (
    HELD_OUT,
    Checked,
    Collected,
    Domain,
    Domains,
    Environment,
    EpisodeView,
    Expected,
    Info,
    Informed,
    Kinds,
    Prepared,
    ResetResult,
    Said,
    SolvedExample,
    Spoken,
    StepResult,
    SyncEnvironment,
    WarmStart,
    Wrapping,
    is_held_out,
)
from flash.environment.shared import run_name, shared, sharing
from flash.environment.threaded import wrap

__all__ = [
    "Environment",
    "SyncEnvironment",
    "Info",
    "ResetResult",
    "StepResult",
    "Checked",
    "Prepared",
    "Informed",
    "EpisodeView",
    "Expected",
    "Said",
    "Kinds",
    "Collected",
    "Domain",
    "Domains",
    "Wrapping",
    "WarmStart",
    "SolvedExample",
    "Spoken",
    "HELD_OUT",
    "is_held_out",
    "wrap",
    "shared",
    "sharing",
    "run_name",
]
