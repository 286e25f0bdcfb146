"""The `[simulate]` table: what stands in for hardware and workload when a run is simulated.

The defaults describe a 7B model on one 80 GB GPU per engine, in round numbers; `flash calibrate` fits them to a
measured run. Distributions are texts such as `constant(300)`, `normal(10, 3)`, `lognormal(1000, 1500, high=8192)`,
`exponential(5)`: mean and standard deviation, cut at `low` (0) and `high`; or `values(1, 2, 40)`, each as likely as the
others.
"""

from __future__ import annotations

from flash.config.section import Fraction, NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section


class SimulateConfig(Section, frozen=True):
    """Simulated hardware and workload, for `flash simulate`."""

    gpus: Positive = 16
    """GPUs of the job: engines and trainers together."""
    rollout_gpus: Positive = 8
    """GPUs that serve engines; the others train."""
    gpus_per_engine: Positive = 1
    """GPUs of one engine; the step times below are of a whole engine."""
    nodes: Positive = 1
    """Node loops that the engines are dealt to."""
    step_s: NonNegativeFloat = 0.012
    """Seconds of a decoding step, whatever it holds: reading the weights, launching kernels."""
    sequence_s: NonNegativeFloat = 0.00006
    """Seconds that each running sequence adds to a step."""
    context_s: NonNegativeFloat = 2e-8
    """Seconds that each token of context adds to a step: reading the KV cache."""
    prefill_s: NonNegativeFloat = 0.00004
    """Seconds of prefill per prompt token that is not in the KV cache."""
    kv_tokens: NonNegative = 0
    """Tokens that an engine's KV cache holds; 0 means that it never fills."""
    swap_s: NonNegativeFloat = 0.5
    """Seconds of an engine's pause while it loads a version."""
    train_token_s: NonNegativeFloat = 0.0001
    """Seconds of one GPU to train one token, prompt tokens included."""
    train_step_s: NonNegativeFloat = 1.0
    """Seconds that each step takes beside its tokens: optimizer, gathering and announcing the weights."""
    prompt_tokens: str = "constant(300)"
    """Tokens of the first observation."""
    response_tokens: str = "lognormal(1000, 1200, low=1, high=8192)"
    """Tokens of one response."""
    length_correlation: Fraction = 0.0
    """How alike the responses to one prompt are in length: 0 independent, 1 equal. Hard prompts have long answers."""
    observation_tokens: str = "constant(50)"
    """Tokens of each later observation."""
    turns: str = "constant(1)"
    """Responses of one episode."""
    reset_s: str = "constant(0)"
    """Seconds of an environment's reset."""
    env_s: str = "constant(0)"
    """Seconds of an environment's step; in the last one, without the reward."""
    reward_s: str = "constant(0)"
    """Seconds of the reward, in the last step."""
    fail_slow: Fraction = 0.0
    """Share of episodes whose environment is slow."""
    fail_slow_factor: PositiveFloat = 10.0
    """How many times longer a slow environment takes."""
    fail_stop: Fraction = 0.0
    """Share of episodes whose environment never answers one of its steps."""
    success: str = "constant(0.5)"
    """Chance of a prompt that a sample of it earns the reward 1, drawn once per prompt."""
