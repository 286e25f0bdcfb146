"""What a simulated run came to."""

from __future__ import annotations

import msgspec

from flash.simulate.bounds import Bound


class SimReport(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run, from its first lease of a training sample to its last commit. Seconds are simulated ones
    unless they are called real; shares are of that time, the mean over engines."""

    seconds: float
    steps: int
    samples: int
    """Trained samples."""
    trained_tokens: int
    generated_tokens: int
    step_s: float
    """Seconds per step. The first step, which waits for the first samples, is left out when there are more than 2."""
    samples_per_s: float
    """Trained samples per second over the same steps; one whose tokens are all too old is none."""
    tokens_per_s: float
    """Trained tokens per second over the same steps."""
    stale_share: float
    """Share of the generated tokens that had become too old."""
    stale_samples: int
    """Samples that had no other tokens."""
    trainer_busy: float
    trainer_idle: dict[str, float]
    """Shares by cause: `batch`, it waits for samples; `publish`, for engines to load the version before."""
    engine_busy: float
    """Share of the time with at least one running sequence."""
    engine_idle: dict[str, float]
    """Shares by cause: `swap`, it loads a version; `environments`, all episodes of its node are in theirs;
    `admission`, the age contract has no room for more samples; `end`, the run needs no more."""
    slot_use: float
    """Mean share of the engines' places that are taken."""
    ages: dict[int, int]
    """Trained tokens by age: versions between sampling and training."""
    ledger: dict[str, int]
    """Where every task and every generated token went."""
    mean_trained_length: float
    """Response tokens of a trained sample."""
    mean_issued_length: float
    """Response tokens of an issued sample, were it to end: trained ones that are shorter tell of a bias."""
    rows: list[dict[str, float]]
    """The metrics of each step, as a real run records them."""
    real_s: float
    """Real seconds that the simulation took."""
    loop_lag_p99_ms: float
    """Of all passes of the event loop, 1 % took longer than this in real time."""


class SweepCell(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated configuration of a sweep: what it came to, and what it is measured against."""

    values: dict[str, str]
    """The swept keys' values, as they were given; empty where nothing is swept."""
    report: SimReport
    bounds: list[Bound]

    @property
    def oldest(self) -> int:
        """Age of the oldest trained token."""
        return max((age for age, tokens in self.report.ages.items() if tokens), default=0)

    @property
    def waste(self) -> float:
        """Share of the generated tokens that nothing was learnt from."""
        ledger = self.report.ledger
        return ledger.get("discarded_tokens", 0) / max(ledger.get("generated_tokens", 0), 1)
