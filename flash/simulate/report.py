"""SimReport and SweepCell: the results of a simulated run and of one configuration of a sweep."""

from __future__ import annotations

import msgspec

from flash.simulate.bounds import Bound


class SimReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one simulated run, from the first lease of a training sample to the last commit.

    Seconds are simulated unless they are called real. Shares are shares of `seconds`; shares of engines are means
    over all engines.
    """

    seconds: float
    """Seconds of the run."""
    steps: int
    """Steps that were trained."""
    samples: int
    """Samples that were trained."""
    trained_tokens: int
    """Response tokens that entered the loss."""
    generated_tokens: int
    """Response tokens that engines sampled, including discarded ones."""
    step_s: float
    """Seconds per step. If there are more than 2 steps, the first is left out, since it waits for the first samples,
    unless all of them end at once."""
    samples_per_s: float
    """Trained samples per second, over the steps of `step_s`. Samples whose tokens are all too old do not count."""
    tokens_per_s: float
    """Trained tokens per second, over the steps of `step_s`."""
    stale_share: float
    """Share of the generated tokens that were discarded because they were too old."""
    stale_samples: int
    """Samples that were given up because all their tokens were too old."""
    trainer_busy: float
    """Share of the time in which the trainer trains."""
    trainer_idle: dict[str, float]
    """Shares of the trainer's idle time by cause. `batch`: it waits for samples. `publish`: it waits until the engines
    have loaded the version before."""
    engine_busy: float
    """Share of the time in which an engine has at least one running sequence."""
    engine_idle: dict[str, float]
    """Shares of the engines' idle time by cause. `swap`: the engine loads a version. `environments`: no episode of the
    node has a request at an engine. `admission`: the age contract has no room for more samples. `end`: the run needs no
    more samples."""
    slot_use: float
    """Mean share of the engines' places for sequences that are in use."""
    ages: dict[int, int]
    """Trained tokens by age, the number of versions between sampling and training."""
    ledger: dict[str, int]
    """Ledger of the run: counts of tasks and of generated tokens by their fate."""
    mean_trained_length: float
    """Mean response tokens of a trained sample."""
    mean_issued_length: float
    """Mean response tokens that issued samples have, or would have at their end. If trained samples are shorter, the
    run prefers short samples."""
    rows: list[dict[str, float]]
    """Metrics of each step, as in a real run."""
    real_s: float
    """Real seconds that the simulation took."""
    loop_lag_p99_ms: float
    """Real milliseconds that 99 % of the passes of the event loop did not exceed."""


class SweepCell(msgspec.Struct, frozen=True, kw_only=True):
    """Simulated configuration of a sweep, with its results and its bounds."""

    values: dict[str, str]
    """Values of the swept keys, as the user gave them; empty if no key is swept."""
    report: SimReport
    """Results of the simulated run."""
    bounds: list[Bound]
    """Theoretical bounds on the time of a step."""

    @property
    def oldest(self) -> int:
        """Age of the oldest trained token, in versions."""
        return max((age for age, tokens in self.report.ages.items() if tokens), default=0)

    @property
    def waste(self) -> float:
        """Share of the generated tokens that were discarded."""
        ledger = self.report.ledger
        return ledger.get("discarded_tokens", 0) / max(ledger.get("generated_tokens", 0), 1)
