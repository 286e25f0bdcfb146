"""The `[simulate]` table: the hardware and the workload that a simulated run has.

The defaults describe a 7B model on one 80 GB GPU per engine, in round numbers; `flash calibrate` fits them to a
measured run. Distributions are texts such as `constant(300)`, `normal(10, 3)`, `lognormal(1000, 1500, high=8192)` and
`exponential(5)`, with mean and standard deviation, limited to [`low` (0), `high`]; or `values(1, 2, 40)`, all equally
likely.
"""

from __future__ import annotations

from flash.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class SimulateConfig(Section, frozen=True):
    """Simulated [hardware and workload](simulator.md); only `flash simulate` uses this table. Lengths and times are
    distributions: `constant(300)`, `normal(10, 3)`, `exponential(5)`, `lognormal(mean, deviation, low=0, high=8192)`,
    `values(1, 2, 40)`."""

    gpus: Positive = 16
    """Number of GPUs, of engines and trainers together."""
    rollout_gpus: Positive = 8
    """Number of GPUs that run engines; the others train."""
    gpus_per_engine: Positive = 1
    """Number of GPUs per engine. The times below are those of a whole engine."""
    nodes: Positive = 1
    """Number of node loops among which the engines are divided."""
    step_s: NonNegativeFloat = 0.012
    """Fixed part of the time of a decoding step, in seconds."""
    sequence_s: NonNegativeFloat = 0.00006
    """Additional seconds of a decoding step per running sequence."""
    context_s: NonNegativeFloat = 2e-8
    """Additional seconds of a decoding step per token of context."""
    prefill_s: NonNegativeFloat = 0.00004
    """Additional seconds of a decoding step per prompt token that is not in the cache."""
    kv_tokens: NonNegative = 0
    """Size of an engine's KV cache, in tokens. 0: unlimited."""
    swap_s: NonNegativeFloat = 0.5
    """Seconds that an engine needs to load a version."""
    train_token_s: NonNegativeFloat = 0.0001
    """Seconds of one GPU per token of a batch, prompts included."""
    train_step_s: NonNegativeFloat = 1.0
    """Fixed part of the time of a training step, in seconds."""
    prompt_tokens: str = "constant(300)"
    """Length of the first observation, in tokens."""
    response_tokens: str = "lognormal(1000, 1200, low=1, high=8192)"
    """Length of one response, in tokens."""
    length_correlation: Fraction = 0.0
    """Correlation between the lengths of responses to the same prompt. 0: independent. 1: equal."""
    observation_tokens: str = "constant(50)"
    """Length of each later observation, in tokens."""
    turns: str = "constant(1)"
    """Number of responses of an episode."""
    reset_s: str = "constant(0)"
    """Seconds that the reset of an environment takes."""
    env_s: str = "constant(0)"
    """Seconds that a step of an environment takes."""
    reward_s: str = "constant(0)"
    """Seconds that the reward takes, after the last step."""
    fail_slow: Fraction = 0.0
    """Share of environments that are slow."""
    fail_slow_factor: PositiveFloat = 10.0
    """Factor by which slow environments take longer."""
    fail_stop: Fraction = 0.0
    """Share of environments that never answer one of their steps."""
    success: str = "constant(0.5)"
    """Probability of the reward 1, drawn once per prompt."""
