"""The contract between Flash and environments.

- `interface` has the protocols of environments.
- `load` finds the configured environment; `fingerprint` distinguishes sets of problems.
- `calls` protects Flash from errors and hangs in each call of an environment; `results` checks the results; `places`
  finds the line of the user's code for error messages.
- `threaded` runs blocking environments; `shared` holds the resources that the episodes of a node share.
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
from flash.types import ANY_CALL, ResponseForm

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
    "ANY_CALL",
    "Expected",
    "ResponseForm",
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
