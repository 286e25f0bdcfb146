"""The `[simulate]` table: what stands in for hardware and workload when a run is simulated.

The defaults describe a 7B model on one 80 GB GPU per engine, in round numbers; `flash calibrate` fits them to a
measured run. Distributions are texts such as `constant(300)`, `normal(10, 3)`, `lognormal(1000, 1500, high=8192)`,
`exponential(5)`: mean and standard deviation, cut at `low` (0) and `high`; or `values(1, 2, 40)`, each as likely as the
others.
"""

from __future__ import annotations

from flash.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class SimulateConfig(Section, frozen=True):
    """Simulated [hardware and workload](simulator.md). Lengths and times are texts: `constant(300)`, `normal(10, 3)`,
    `exponential(5)`, `lognormal(mean, deviation, low=0, high=8192)`, `values(1, 2, 40)`."""

    gpus: Positive = 16
    """Engines and trainers together."""
    rollout_gpus: Positive = 8
    """GPUs of engines; the others train."""
    gpus_per_engine: Positive = 1
    """The times below are of a whole engine."""
    nodes: Positive = 1
    """Node loops with engines."""
    step_s: NonNegativeFloat = 0.012
    """Seconds of a decoding step by itself."""
    sequence_s: NonNegativeFloat = 0.00006
    """Seconds per running sequence."""
    context_s: NonNegativeFloat = 2e-8
    """Seconds per token of context."""
    prefill_s: NonNegativeFloat = 0.00004
    """Seconds per uncached prompt token."""
    kv_tokens: NonNegative = 0
    """KV cache of an engine, tokens; 0: unbounded."""
    swap_s: NonNegativeFloat = 0.5
    """Seconds of a swap."""
    train_token_s: NonNegativeFloat = 0.0001
    """Seconds of a GPU per token, prompts included."""
    train_step_s: NonNegativeFloat = 1.0
    """Seconds of a step beside its tokens."""
    prompt_tokens: str = "constant(300)"
    """Of the first observation."""
    response_tokens: str = "lognormal(1000, 1200, low=1, high=8192)"
    """Of one response."""
    length_correlation: Fraction = 0.0
    """How alike answers to a prompt are in length: 0 not, 1 equal."""
    observation_tokens: str = "constant(50)"
    """Of each later observation."""
    turns: str = "constant(1)"
    """Responses of an episode."""
    reset_s: str = "constant(0)"
    """Seconds of a reset."""
    env_s: str = "constant(0)"
    """Seconds of a step."""
    reward_s: str = "constant(0)"
    """Seconds of the reward, after the last step."""
    fail_slow: Fraction = 0.0
    """Share of slow environments."""
    fail_slow_factor: PositiveFloat = 10.0
    """How much slower these are."""
    fail_stop: Fraction = 0.0
    """Share that never answers one of its steps."""
    success: str = "constant(0.5)"
    """Chance of the reward 1, drawn per prompt."""
