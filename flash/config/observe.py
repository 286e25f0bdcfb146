"""The tables `[observe]`, `[track]` and `[alarms]`: who is told of a run, and when it says that it goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from flash.config.section import Fraction, NonNegativeFloat, Positive, Section


class ObserveConfig(Section, frozen=True):
    """Who is told of a run."""

    sink: str | None = None
    """`module:function`, [your tracker](metrics.md#your-tracker)."""


TrackerName = Literal["trackio", "wandb", "tensorboard", "mlflow"]
"""Each is the name of a Python package too."""


class TrackConfig(Section, frozen=True):
    """[Trackers](view.md#in-a-tracker) that show a run beside others."""

    to: list[TrackerName] = field(default_factory=list[TrackerName])
    """Each must be installed on the first node."""
    project: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.-]+$")] = "flash"
    """Project of trackio and Weights & Biases, experiment of MLflow."""


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
    """Limits beyond which a run [warns](metrics.md#alarms); `none` turns one off."""

    window: Positive = 10
    """Steps in the mean."""
    stale: Fraction | None = 0.1
    """Most tokens too old to train."""
    masked: Fraction | None = 0.1
    """Most tokens of weight 0 by cap or corrections."""
    failures: Fraction | None = 0.1
    """Most attempts that fail."""
    mismatch: NonNegativeFloat | None = MISMATCH
    """Largest mean w−1−log w at age 0. bfloat16 makes 1e-4 to 3e-3 in dense models; from 0.01 on runs have
    collapsed."""
    ess: Fraction | None = 0.5
    """Least effective sample size."""
    clipping: Fraction | None = 0.5
    """Most tokens with a cut gradient."""
    entropy: NonNegativeFloat | None = 0.02
    """Least entropy, nats."""
    equal_rewards: Fraction | None = 0.5
    """Most steps without any advantage."""
    age: NonNegativeFloat | None = None
    """Largest mean age, versions."""
    lag: Fraction | None = 0.5
    """Least share of the learning rate that `lag` leaves."""
    trainer_waits: Fraction | None = 0.9
    """Most time the trainer waits for batches."""
    engines_idle: Fraction | None = 0.9
    """Most time engines have no request."""
    nonfinite: Fraction | None = 0.0
    """Most steps with a non-finite loss, entropy or gradient."""
    checkpoint: list[AlarmName] = field(default_factory=list)
    """Alarms that write a checkpoint."""
    stop: list[AlarmName] = field(default_factory=list)
    """Alarms that end the run."""
    command: str | None = None
    """Run at each alarm, without a shell: text as input, name in FLASH_ALARM."""
