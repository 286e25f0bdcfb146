"""The tables `[train]`, `[lora]`, `[algorithm]`, `[critic]` and `[sft]`: the training step and its objective."""

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
    """Training step: batch, asynchrony, optimizer and memory."""

    batch_size: Positive = 256
    """Number of samples per step; a multiple of rollout.group_size."""
    async_ratio: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """Asynchronous ratio α: up to (1 + α) batches are in flight, and a sample begins at most ⌈α⌉ versions before the
    step that should train it. 0: sampling and training alternate. Raise it if the trainer waits for a few slow
    samples."""
    max_token_age: Annotated[int, Meta(ge=0, le=1000)] | None = None
    """[Largest age](asynchrony.md#the-contract) of a trained token, in versions; at least ⌈α⌉. None: 4·⌈α⌉, so that the
    early tokens of long answers are trained."""
    allow_uncorrected: bool = False
    """Allow training on old samples with an objective that does not correct for their age (it ignores behaviour
    log-probs)."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """Optimizer. `muon`: [Muon](algorithms.md#muon) for the policy's hidden matrices, and AdamW for all other
    weights."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Number of steps in which the learning rate rises linearly to its peak. 0: no warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate's decay from the end of the warm-up to the last step."""
    final_learning_rate: Fraction = 0.0
    """Learning rate at the end of the decay; at most `learning_rate`."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates β₁ and β₂ of AdamW's moments."""
    weight_decay: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Coefficient of decoupled weight decay. 0: none."""
    max_grad_norm: PositiveFloat = 1.0
    """Global norm to which a larger gradient is clipped, that of the policy and that of each critic."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """Reaction to a gradient that is not finite: stop the run, or skip the update."""
    minibatches: Positive = 1
    """Number of updates per pass over a batch. The samples of a group stay in one minibatch."""
    updates_per_batch: Positive = 1
    """Number of passes over a batch."""
    max_tokens_per_microbatch: Positive = 8192
    """Number of tokens per forward pass and rank. Lower it if the trainer runs out of memory; the results stay the
    same."""
    activation_checkpointing: bool = False
    """Compute activations again in the backward pass: a step takes about a third longer and needs far less memory."""
    offload: list[Literal["activations", "moments", "weights"]] = field(default_factory=list)
    """Training state that is kept in host memory instead of GPU memory. With `weights`, the weights, gradients and
    moments of all models stay on the host and are updated there, and each pass copies the weights to the GPU."""
    stream: bool | None = None
    """Begin a step while its batch is still sampled: train the groups that are complete, and update the weights when
    the batch is whole. [Some settings](asynchrony.md#streamed-steps) need the whole batch first. None: true if
    `async_ratio` is above 0 and `minibatches` is 1."""
    profile: str = ""
    """Steps that [torch's profiler](view.md#where-a-steps-time-goes) records: `FIRST:LAST`, both included, counted from
    0. Empty: none."""

    @property
    def profiled_steps(self) -> range:
        """Steps that the trainer ranks profile; empty if there are none. The check of the configuration has already
        refused a `profile` of another form."""
        if not self.profile:
            return range(0)
        first, last = map(int, self.profile.split(":"))
        return range(first, last + 1)

    @property
    def streamed(self) -> bool:
        """True if steps begin before their batch is whole, unless another setting needs the whole batch first.

        This is `stream`, or its default: a run at α = 0 should be exactly repeatable, and with several minibatches the
        times of samples would decide which update trains them.
        """
        return self.async_ratio > 0 and self.minibatches == 1 if self.stream is None else self.stream

    @property
    def max_age(self) -> int:
        """Largest age of a trained token, in versions: `max_token_age`, or 4·⌈α⌉ if that is None. The rules of the hub
        and the checks of the trainer use this number."""
        return max_age(self.async_ratio, self.max_token_age)


class LoraConfig(Section, frozen=True):
    """[Adapters (LoRA)](weights.md#lora), which are trained while the model's own weights stay fixed. Without this
    table all weights are trained."""

    rank: Annotated[int, Meta(ge=1, le=512)] = 16
    """Rank (width) of an adapter."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: the output of an adapter is multiplied by alpha / rank."""
    targets: Texts = ()
    """Last part of the names of the layers that get adapters, such as `q_proj`. Empty: all linear layers except the
    output layer."""


class AlgorithmConfig(Section, frozen=True):
    """Objective and its parts; [objectives](algorithms.md) helps to choose."""

    objective: str = "grpo"
    """[Name of an objective](algorithms.md#the-objectives), or the import path `module:Class` of your own."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the objective."""
    advantage: Advantage | None = None
    """Estimator that turns rewards into [advantages](algorithms.md#advantages-algorithmadvantage). None: the
    objective's default."""
    gamma: Fraction = 1.0
    """Discount factor of rewards: per turn with advantage `turn`, per token with `gae`. 1: no discount."""
    aggregation: Aggregation | None = None
    """Method that turns the losses of all tokens into [one number](algorithms.md#aggregation-algorithmaggregation).
    None: the objective's default."""
    corrections: list[Correction] = field(default_factory=list)
    """Factors of the token losses, computed from the ratio [exp(proximal −
    behaviour)](algorithms.md#corrections-algorithmcorrections) of log-probs."""
    staleness: Staleness = NoStaleness()
    """Lower weight of [old samples](algorithms.md#staleness-algorithmstaleness)."""
    lag: Lag | None = Lag()
    """Lower learning rate if the policy has moved [far from the sampling
    policies](algorithms.md#a-step-that-knows-its-lag-algorithmlag). None: the rate follows its schedule alone."""
    kl: Kl | None = None
    """Penalty for the distance from a [reference model](algorithms.md#kl-to-a-reference-algorithmkl). None: no
    penalty."""
    teacher: Teacher | None = None
    """Teacher for [distillation](algorithms.md#a-teacher-algorithmteacher) on the policy's own samples. None: no
    teacher."""
    entropy_bonus: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Coefficient of the policy's entropy, which is maximised. 0: no bonus."""
    shaping: list[Shaping] = field(default_factory=list)
    """Changes of the rewards by [response length](algorithms.md#reward-shaping-algorithmshaping), applied in this
    order."""
    mask_truncated: bool = False
    """Leave samples that a limit has ended out of the loss. Their rewards still count in the baseline of their
    group."""
    rhythm: Rhythm | None = None
    """Larger advantages for tokens that are chosen [by
    attention](algorithms.md#the-rhythm-of-attention-algorithmrhythm). None: all tokens of a response count alike."""


class CriticConfig(Section, frozen=True):
    """Critics: the value models of `advantage = "gae"`."""

    path: str | None = None
    """Folder or hub id of the critics' model, which must have the policy's tokenizer. With `[tiny_model]`, a missing
    folder is made, too: a tiny model with a third of the policy's layers. None: model.path."""
    target: CriticTarget | None = None
    """Target of the values. `lambda`: advantage plus value. `monte_carlo`: the discounted sum of rewards. None: the
    objective's default."""
    learning_rate: LearningRate = 1e-5
    """Learning rate of the critics, constant over the run."""
    warmup_steps: NonNegative = 0
    """Number of first steps in which only the critics are trained. 0: the policy is trained from the start."""
    clip: PositiveFloat | None = 0.2
    """Largest change of a value in a step. None: no limit."""
    lam: Fraction = 0.95
    """λ of GAE. 0: advantages rely on the critics' values alone. 1: they rely on the rewards alone."""


class SftConfig(Section, frozen=True):
    """[Supervised fine-tuning](recipes.md#supervised-fine-tuning); only `flash sft` uses this table."""

    data: str
    """File with the [rows to learn](recipes.md#supervised-fine-tuning): .jsonl, .json, .csv, .parquet or .arrow."""
    held_out: str | None = None
    """File with held-out rows; the loss of its first `eval.problems` rows is measured. None: no held-out loss."""
    epochs: Annotated[float, Meta(gt=0, le=10_000)] = 1.0
    """Number of passes over the rows. `run.steps` is computed from it."""
