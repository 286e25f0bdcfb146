"""The tables `[observe]`, `[track]` and `[alarms]`: where metrics are sent, and when a run warns."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from flash.config.section import Fraction, NonNegativeFloat, Positive, Section


class ObserveConfig(Section, frozen=True):
    """Receiver of the run's metrics, written by you."""

    sink: str | None = None
    """Import path `module:function` of [your own tracker](metrics.md#your-tracker). None: none."""


TrackerName = Literal["trackio", "wandb", "tensorboard", "mlflow"]
"""Name of a tracker, which is also the name of its Python package."""


class TrackConfig(Section, frozen=True):
    """[Trackers](view.md#in-a-tracker) that receive the run's metrics and show runs side by side."""

    to: list[TrackerName] = field(default_factory=list[TrackerName])
    """Names of the trackers. Each of them must be installed on the first node. Empty: none."""
    project: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.-]+$")] = "flash"
    """Project name in trackio and Weights & Biases, and experiment name in MLflow."""


MISMATCH = 0.01
"""Largest healthy mismatch between engine and trainer. bfloat16 causes 1e-4 to 3e-3 in dense models, and runs were seen
to collapse above about 0.01 (Liu, Li et al. 2025, "When Speed Kills Stability")."""

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
"""Name of an alarm, which is also the key of its limit in `[alarms]`."""


class AlarmsConfig(Section, frozen=True):
    """Limits beyond which a run [warns](metrics.md#alarms); `none` turns an alarm off."""

    window: Positive = 10
    """Number of steps over which a metric is averaged before it is compared with its limit."""
    stale: Fraction | None = 0.1
    """Largest share of tokens that are too old to be trained."""
    masked: Fraction | None = 0.1
    """Largest share of tokens with weight 0 because of a cap or a correction."""
    failures: Fraction | None = 0.1
    """Largest share of attempts at a sample that fail."""
    mismatch: NonNegativeFloat | None = MISMATCH
    """Largest mean w − 1 − log w of tokens of age 0, a measure of the mismatch between engine and trainer. bfloat16
    causes 1e-4 to 3e-3 in dense models; runs have collapsed above 0.01."""
    ess: Fraction | None = 0.5
    """Smallest effective sample size, as a share of the tokens."""
    clipping: Fraction | None = 0.5
    """Largest share of tokens with a clipped gradient."""
    entropy: NonNegativeFloat | None = 0.02
    """Smallest entropy of the policy, in nats."""
    equal_rewards: Fraction | None = 0.5
    """Largest share of steps in which no sample has an advantage."""
    age: NonNegativeFloat | None = None
    """Largest mean age of trained tokens, in versions."""
    lag: Fraction | None = 0.5
    """Smallest share of the scheduled learning rate that `algorithm.lag` leaves."""
    trainer_waits: Fraction | None = 0.9
    """Largest share of time that the trainer waits for batches."""
    engines_idle: Fraction | None = 0.9
    """Largest share of time that engines have no request."""
    nonfinite: Fraction | None = 0.0
    """Largest share of steps with a loss, entropy or gradient that is not finite."""
    checkpoint: list[AlarmName] = field(default_factory=list)
    """Names of alarms that make the run write a checkpoint."""
    stop: list[AlarmName] = field(default_factory=list)
    """Names of alarms that end the run."""
    command: str | None = None
    """Command that is started at each alarm, without a shell. It gets the message on standard input and the alarm's
    name in the environment variable FLASH_ALARM. None: no command."""
