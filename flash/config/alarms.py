"""When a run says that it goes wrong, and what it does about it."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from flash.config.section import Fraction, NonNegativeFloat, Positive, Section

MISMATCH = 0.01
"""bfloat16 makes 1e-4 to 3e-3 in dense models; from about here on runs have been seen to collapse (Liu, Li et al. 2025,
"When Speed Kills Stability")."""

AlarmName = Literal[
    "stale",
    "masked",
    "failures",
    "mismatch",
    "ess",
    "clipping",
    "entropy",
    "equal_rewards",
    "age",
    "lag",
    "trainer_waits",
    "engines_idle",
    "nonfinite",
]
"""The limits below, by name."""


class AlarmsConfig(Section, frozen=True):
    """Limits beyond which a run warns, with what to do about it; `none` turns one off. An alarm is given once, and
    again only after its number has been well. [Metrics](metrics.md#alarms) says more."""

    window: Positive = 10
    """Steps that are looked at together."""
    stale: Fraction | None = 0.1
    """Most of the tokens that may be too old to be trained."""
    masked: Fraction | None = 0.1
    """Most of the trained tokens that may get weight 0 from the objective's cap or algorithm.corrections."""
    failures: Fraction | None = 0.1
    """Most of the episodes that may fail, tried again or given up."""
    mismatch: NonNegativeFloat | None = MISMATCH
    """Largest mismatch of engine and trainer at equal weights: the mean of w − 1 − log w over the tokens of age 0.
    bfloat16 makes 1e-4 to 3e-3 in dense models; from about 0.01 on runs have been seen to collapse."""
    ess: Fraction | None = 0.5
    """Least effective sample size, as a share of the tokens."""
    clipping: Fraction | None = 0.5
    """Most of the tokens whose gradient the objective may cut off or limit."""
    entropy: NonNegativeFloat | None = 0.02
    """Least entropy of the policy's next-token distribution, in nats."""
    equal_rewards: Fraction | None = 0.5
    """Most of the steps in which all advantages may be 0, as where the rewards of each group are equal."""
    age: NonNegativeFloat | None = None
    """Largest mean age of the trained tokens, in versions."""
    lag: Fraction | None = 0.5
    """Least share of the scheduled learning rate that algorithm.lag may leave."""
    trainer_waits: Fraction | None = 0.9
    """Most of its time that the trainer may wait for batches."""
    engines_idle: Fraction | None = 0.9
    """Most of their time that the engines may have no request."""
    nonfinite: Fraction | None = 0.0
    """Most of the steps whose loss, entropy or gradient may be no finite number, or whose update was left out."""
    checkpoint: list[AlarmName] = field(default_factory=list)
    """Those that have a checkpoint written after the next step: `["ess", "entropy"]`."""
    stop: list[AlarmName] = field(default_factory=list)
    """Those that end the run with an error, after a checkpoint: it can be resumed."""
    command: str | None = None
    """Called at each alarm, without a shell, with its text as standard input and its name as FLASH_ALARM: `notify.sh`,
    `curl -s -d @- https://example.org/hook`."""
