"""The tables `[train]`, `[lora]`, `[algorithm]`, `[critic]`, `[sft]`: what a step is, what it trains and optimises."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from algorithms.base import Advantage, Aggregation, CriticTarget
from algorithms.corrections import Correction
from algorithms.references import Kl, Teacher
from algorithms.rhythm import Rhythm
from algorithms.shaping import Shaping
from algorithms.staleness import Lag, NoStaleness, Staleness
from flash.ages import max_age
from flash.config.section import (
    BelowOne,
    Fraction,
    LearningRate,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    Texts,
)


class TrainConfig(Section, frozen=True):
    """A step of the trainer."""

    batch_size: Positive = 256
    """Samples per step, a multiple of rollout.group_size."""
    async_ratio: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """α: (1 + α) batches on their way, tokens at most ⌈α⌉ versions old. 0: synchronous."""
    max_token_age: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """Most versions that a token may be old, [above ⌈α⌉](asynchrony.md#the-contract) for long answers. None: ⌈α⌉."""
    allow_uncorrected: bool = False
    """Permit α > 0 with an objective that ignores behaviour log-probs."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: [Muon](algorithms.md#muon) for the policy's hidden matrices, AdamW for the rest."""
    learning_rate: LearningRate = 1e-6
    """Peak."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up, until the last step."""
    final_learning_rate: Fraction = 0.0
    """Rate at which decay ends; at most `learning_rate`."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Of AdamW."""
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    """Of AdamW."""
    weight_decay: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Decoupled."""
    max_grad_norm: PositiveFloat = 1.0
    """Global norm to which gradients are clipped."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """A non-finite gradient stops the run, or its update is left out."""
    minibatches: Positive = 1
    """Updates per pass over a batch; groups stay whole."""
    updates_per_batch: Positive = 1
    """Passes over a batch."""
    max_tokens_per_microbatch: Positive = 8192
    """Tokens per forward pass and rank; results stay when it is lower."""
    activation_checkpointing: bool = False
    """A third more time, far less memory."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """Of AdamW; `bfloat16` is rounded at random."""
    offload: list[Literal["activations", "moments", "weights"]] = field(default_factory=list)
    """What waits in host memory. `weights` of all models take gradients and moments along, are updated there, and
    copied in each pass."""
    profile: str = ""
    """Steps that [torch's profiler](view.md#where-a-steps-time-goes) records, `FIRST:LAST`, both included; the first
    step of a run is 0. Empty: none."""

    @property
    def profiled_steps(self) -> range:
        """The steps that `profile` names, which must have been checked; empty if there are none."""
        if not self.profile:
            return range(0)
        first, last = map(int, self.profile.split(":"))
        return range(first, last + 1)

    @property
    def max_age(self) -> int:
        """The most versions that a trained token may be old."""
        return max_age(self.async_ratio, self.max_token_age)


class LoraConfig(Section, frozen=True):
    """[Adapters](weights.md#lora) are trained, and the weights of the model stay. Without the table all are trained."""

    rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Width of an adapter."""
    alpha: PositiveFloat = 32.0
    """What an adapter makes counts alpha / rank times."""
    targets: Texts = ()
    """Last names of its layers, such as `q_proj`. Empty: all linear ones but the output layer."""


class AlgorithmConfig(Section, frozen=True):
    """What is optimised: [objectives](algorithms.md) says how to choose."""

    objective: str = "grpo"
    """A [name](algorithms.md#the-objectives), or `module:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The objective's options."""
    advantage: Advantage | None = None
    """How rewards become [advantages](algorithms.md#advantages-algorithmadvantage). None: the objective's own."""
    gamma: Fraction = 1.0
    """Discount, per turn with `turn`, per token with `gae`."""
    aggregation: Aggregation | None = None
    """How token losses become [one number](algorithms.md#aggregation-algorithmaggregation). None: the objective's
    own."""
    constant_length: Positive | None = None
    """Divisor of `constant`, in tokens. None: rollout.max_new_tokens."""
    corrections: list[Correction] = field(default_factory=list)
    """Factors of the loss, [by exp(proximal − behaviour)](algorithms.md#corrections-algorithmcorrections)."""
    staleness: Staleness = NoStaleness()
    """How much less [old samples](algorithms.md#staleness-algorithmstaleness) count."""
    lag: Lag | None = Lag()
    """Lowers the rate [by distance](algorithms.md#a-step-that-knows-its-lag-algorithmlag). None: off."""
    kl: Kl | None = None
    """Pull towards a [reference](algorithms.md#kl-to-a-reference-algorithmkl)."""
    teacher: Teacher | None = None
    """[Distillation](algorithms.md#a-teacher-algorithmteacher) on the policy's own samples."""
    entropy_bonus: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Coefficient of the policy's entropy, maximised."""
    shaping: list[Shaping] = field(default_factory=list)
    """What [length](algorithms.md#reward-shaping-algorithmshaping) adds to rewards, in this order."""
    mask_truncated: bool = False
    """Samples that a limit has ended leave the loss, and stay in their group's baseline."""
    rhythm: Rhythm | None = None
    """Multiplies advantages by [attention](algorithms.md#the-rhythm-of-attention-algorithmrhythm)."""


class CriticConfig(Section, frozen=True):
    """The value models of `advantage = "gae"`."""

    path: str | None = None
    """Folder or hub id, with the policy's tokenizer. None: model.path."""
    tiny_layers: Positive | None = None
    """Layers of the tiny model made at a missing `path`. None: it must exist."""
    count: Positive | None = None
    """[Critics](algorithms.md#asyppo-several-small-critics). None: the objective's own."""
    target: CriticTarget | None = None
    """`lambda`: advantage plus value; `monte_carlo`: the discounted rewards. None: the objective's own."""
    learning_rate: LearningRate = 1e-5
    """Constant."""
    warmup_steps: NonNegative = 0
    """First steps in which only critics learn."""
    clip: PositiveFloat | None = 0.2
    """How far a value may move in a step. None: unbounded."""
    lam: Fraction = 0.95
    """λ of GAE: 0 trusts the critics, 1 the rewards."""
    max_grad_norm: PositiveFloat = 1.0
    """Global norm to which its gradients are clipped."""


class SftConfig(Section, frozen=True):
    """[Supervised fine-tuning](recipes.md#supervised-fine-tuning), of `flash sft` alone."""

    data: str
    """A table with [rows to learn](recipes.md#supervised-fine-tuning): .jsonl, .json, .csv, .parquet or .arrow."""
    held_out: str | None = None
    """Another table, for the loss of its first `eval.problems` rows. None: no loss of held-out rows."""
    epochs: Annotated[float, Meta(gt=0, le=10_000)] = 1.0
    """Passes over the rows; `run.steps` follows."""
