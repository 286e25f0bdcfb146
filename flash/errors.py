"""Every error Flash raises on purpose.

    FlashError
    ├── ConfigError          wrong input, found before anything starts
    ├── CheckpointError      a checkpoint cannot be written or read
    ├── RunDirectoryError    metrics, samples or plots cannot be written
    ├── WeightsError         a published version is damaged or was loaded wrongly
    ├── ContractError        an invariant of the run was broken: a bug, the run stops
    ├── EnvError             an environment broke its interface or raised
    │   └── RewardError      the reward is missing, not a number, or its verifier failed
    ├── EngineError          an engine cannot serve a request
    │   └── EngineDeadError  an engine is gone and takes its requests with it
    ├── BreakerError         the run only fails: too many samples given up in a row
    └── TransportError       a peer cannot be reached, trusted or understood
        ├── PeerLostError    an established connection broke
        └── DeadlineError    a wait outlived its deadline (also a TimeoutError)

A message says what was wrong, what was expected and what to do. `fatal` tells the launcher whether a restart can help:
a wrong config stays wrong, a lost peer may come back.
"""

from __future__ import annotations

from typing import ClassVar


class FlashError(Exception):
    """Base of all errors raised on purpose."""

    fatal: ClassVar[bool] = True
    """True when restarting the processes cannot help."""


class ConfigError(FlashError, ValueError):
    """The input is wrong; nothing was started."""


class CheckpointError(FlashError):
    """A checkpoint could not be written or read; the previous one is untouched."""


class RunDirectoryError(FlashError):
    """The run directory cannot be written."""


class WeightsError(FlashError):
    """A weight version failed its checksum or its canary."""


class ContractError(FlashError):
    """One of the run's own invariants does not hold."""


class EnvError(FlashError):
    """An environment raised, or returned something its interface does not allow."""


class RewardError(EnvError):
    """A reward is not a finite number, or its verifier failed."""


class EngineError(FlashError):
    """An engine refused or failed one request."""


class EngineDeadError(EngineError):
    """An engine process is gone."""

    fatal = False


class BreakerError(FlashError):
    """So many samples failed in a row that going on would only waste compute."""


class TransportError(FlashError):
    """A peer cannot be reached, does not prove the token, or sends what we cannot read."""


class PeerLostError(TransportError):
    """An established connection ended."""

    fatal = False


class DeadlineError(TransportError, TimeoutError):
    """A wait outlived its deadline.

    Built from what was waited for, how long, and where to look.
    """

    fatal = False

    def __init__(self, waited_for: str, seconds: float, look_at: str) -> None:
        super().__init__(f"waited {seconds:g} s for {waited_for}; look at {look_at}")
