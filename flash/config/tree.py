"""The configuration of a run: one typed tree.

Every field has a docstring that says its meaning and unit; docs/configuration.md is made from them.
`flash.config.load` reads TOML files and overrides into this tree. Reading it needs neither torch nor vllm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field

from flash.config.learning import AlgorithmConfig, CriticConfig, LoraConfig, SftConfig, TrainConfig
from flash.config.observe import AlarmsConfig, ObserveConfig, TrackConfig
from flash.config.section import (
    HIGHEST_TEMPERATURE,
    BelowOne,
    Biases,
    Deadline,
    LearningRate,
    NonNegative,
    NonNegativeFloat,
    Penalty,
    Positive,
    Section,
    Seed,
    Temperature,
    Texts,
    TokenIds,
    TopK,
    TopP,
    why_kept_tokens_unknown,
)
from flash.config.simulate import SimulateConfig
from flash.sampling import Sampling

MOST_ADAPTERS = 8
"""Versions beside each other in an engine, each of which takes its memory whether it is there or not."""


class RunConfig(Section, frozen=True):
    """The run as a whole."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")]
    """The run's folder below `output_dir`."""
    output_dir: str = "outputs"
    """Folder of all runs."""
    seed: Seed = 0
    """Every random choice derives from it."""
    steps: Positive = 100
    """Optimizer steps, each a batch and a version."""
    resume: bool = False
    """Go on [where it was](when-it-fails.md#what-is-kept)."""
    log_samples: NonNegative = 4
    """Readable samples kept of each step."""
    log_samples_mb: Positive = 1000
    """Most MB of them; beyond, every second step's go."""


class ModelConfig(Section, frozen=True):
    """The policy."""

    path: str
    """Hugging Face folder or hub id, or a [`.gguf` file](quickstart.md#a-pretrained-model)."""
    fetch: str | None = None
    """What a missing `path` is made from: a name of `flash fetch`, or a `.gguf` file."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """[Precision](weights.md#precision) of engine and passes; master weights are float32."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Of the output layer; `model`: as `dtype`, with more mismatch."""
    max_length: Positive = 4096
    """Most tokens of prompt and responses."""
    trust_remote_code: bool = False
    """Let a hub model bring its own code."""
    tool_parser: str | None = None
    """vLLM's parser of calls, needed for tools: `hermes` (Qwen3), `llama3_json`, `mistral`."""
    reasoning_parser: str | None = None
    """vLLM's parser of reasoning, such as `qwen3`."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """[Arguments of the chat template](environments.md#chat-messages), such as `{ enable_thinking = false }`."""


class TinyModelConfig(Section, frozen=True):
    """How to make a missing `model.path`: a small Qwen3, warm-started on the environment's examples."""

    layers: Positive = 3
    """Decoder layers."""
    width: Positive = 128
    """Hidden size."""
    tied: bool = True
    """Share the embeddings."""
    warm_start_steps: NonNegative = 800
    """Most supervised steps; it stops early when good enough."""
    batch_size: Positive = 64
    """Examples per supervised step."""
    learning_rate: LearningRate = 2e-3
    """Peak of the warm start."""
    seed: Seed = 0
    """Of initial weights and examples."""


class EnvConfig(Section, frozen=True):
    """The environment, by import path."""

    path: str
    """`module:Class`, [yours](environments.md) or [one that ships](environment-list.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    folders: list[str] = field(default_factory=list[str])
    """More folders of modules."""


class RolloutConfig(Section, frozen=True):
    """How samples are made."""

    group_size: Positive = 8
    """Samples per prompt."""
    max_concurrent: Positive | Literal["auto"] = "auto"
    """Most episodes alive on a node; `auto`: to fill its engines."""
    max_new_tokens: Positive = 1024
    """Most tokens of a response, in each turn."""
    max_turns: Positive = 64
    """Responses after which an episode is truncated."""
    swap: Literal["recompute", "keep", "abort", "drain"] = "recompute"
    """What [new weights](asynchrony.md#weights-and-running-sequences) do to running sequences."""
    on_expire: Literal["mask", "requeue", "wait"] = "mask"
    """What happens to a sample whose tokens [get too old](asynchrony.md#the-contract)."""
    fifo_window: Annotated[float, Meta(ge=1, le=1e6)] | None = None
    """Batches, [in order of issue](asynchrony.md#techniques), among which a step chooses. None: all."""
    share_drift: NonNegativeFloat = 1.0
    """Batches by which a domain may be ahead of its share."""
    extra_groups: NonNegative = 0
    """Redundant groups; those too old are cancelled."""
    extra_per_group: NonNegative = 0
    """Redundant samples; the first to finish win."""
    drop_equal_rewards: bool = False
    """Replace groups whose rewards are all equal."""
    accuracy_bounds: tuple[float, float] | None = None
    """Replace groups whose mean reward is outside [low, high]."""
    queue_scheduling: bool = True
    """Off: samples start in batches."""
    replicate_prompts: bool = True
    """Off: the samples of a prompt go to one engine together."""
    max_branches: Positive = 16
    """Most sequences of an agent's episode; more are refused."""
    max_episode_tokens: Positive | None = None
    """Most tokens of all branches. None: max_branches · model.max_length."""
    env_async: bool = True
    """Off: a node's environments step together."""
    temperature: Temperature = 1.0
    """Of sampling, and of the trainer's log-probs."""
    top_k: TopK = 0
    """[Likeliest tokens](asynchrony.md#sampling) to draw from; 0: all."""
    top_p: TopP = 1.0
    """Their least total probability."""
    min_p: BelowOne = 0.0
    """Least share of the likeliest's."""
    min_tokens: NonNegative = 0
    """Shortest response."""
    stop: Texts = ()
    """Texts that end a response, and stay."""
    stop_token_ids: TokenIds = ()
    """Tokens that do."""
    logit_bias: Biases = ()
    """Added: `[[token, bias]]`."""
    repetition_penalty: Penalty = 1.0
    """Of the context's tokens."""
    routing_replay: bool = False
    """Train with the engine's experts; on GPUs."""
    seeded: bool | None = None
    """A seed per response, to [repeat a run](asynchrony.md#repeating-a-run), at a cost. None: on the CPU at α = 0."""
    retries: NonNegative = 2
    """Retries of a sample that failed for infrastructure."""
    breaker: Positive = 64
    """Samples given up in a row that stop the run."""
    quarantine: Positive = 16
    """The same of one kind, which is then left out."""


class EngineConfig(Section, frozen=True):
    """The vLLM engines."""

    count: Positive = 1
    """Engines per rollout node."""
    tensor_parallel: Positive = 1
    """GPUs per engine."""
    share_gpus: bool = False
    """Run on the trainers' GPUs."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory; too high: out of memory at start."""
    kv_cache_gib: Annotated[float, Meta(ge=0.001, le=1e6)] = 1.0
    """KV cache of a CPU engine, GiB."""
    max_sequences: Annotated[int, Meta(gt=0, le=65_536)] = 256
    """Sequences decoded at once."""
    enforce_eager: bool = False
    """No compiled graphs: faster start, slower steps. Without a C++ compiler CPU engines do so too."""
    stream_interval: Positive = 16
    """Tokens between deliveries, and most lost with an engine."""
    max_restarts: NonNegative = 3
    """In a row, after 1, 2, 4, … s; service of ten starts counts anew."""
    vllm: dict[str, Any] = field(default_factory=dict[str, Any])
    """[More arguments](scaling.md#engines) of vLLM's `AsyncEngineArgs`."""


class WeightsConfig(Section, frozen=True):
    """How [weights](weights.md) reach the engines."""

    backend: Literal["auto", "tcp", "gloo", "nccl", "ipc"] = "auto"
    """`auto`: tcp without GPUs, ipc on shared ones, else nccl."""
    deltas: bool = False
    """With `tcp`: each worker of an engine keeps a copy on the host, and gets [what has changed](weights.md#deltas)."""
    canary_tolerance: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Most mean difference of log-probs, nats. None: six times what `dtype` does, at least 1e-4 (float32), 0.02
    (float16), 0.15 (bfloat16)."""
    canary_tokens: Annotated[int, Meta(ge=2)] = 32
    """Length of the compared text."""


class EvalConfig(Section, frozen=True):
    """Held-out evaluation: at the start, every `every` steps, and at the end."""

    every: NonNegative = 10
    """Steps; 0: only first and last."""
    problems: Annotated[int, Meta(gt=0, le=1_000_000)] = 128
    """Held-out problems."""
    samples: Annotated[int, Meta(gt=0, le=10_000)] = 1
    """Answers per problem; pass@k for this k."""
    temperature: Annotated[float, Meta(ge=0, le=HIGHEST_TEMPERATURE)] = 0.0
    """0: greedy."""


class CheckpointConfig(Section, frozen=True):
    """[What survives a crash](when-it-fails.md#what-is-kept)."""

    every: Positive = 20
    """Steps; the last always writes one."""
    keep: Positive = 2
    """Complete ones kept."""
    batches: Literal["kept", "all", "none"] = "kept"
    """Recorded batches, for replay and restarts: since the oldest checkpoint, all or none."""
    journal: Literal["write", "fsync", "off"] = "write"
    """Samples since the checkpoint survive the processes (`write`), the machine (`fsync`), or neither (`off`)."""
    export: bool = True
    """Write `model/` at the end."""


class ClusterConfig(Section, frozen=True):
    """Nodes, trainer ranks and devices of the job."""

    nodes: Positive = 1
    """Machines at the start; `flash join` adds others."""
    gpus_per_node: Annotated[int, Meta(ge=0, le=1024)] | Literal["auto"] = "auto"
    """0: all on the CPU."""
    trainer_ranks: Positive = 1
    """Trainer processes per trainer node."""
    trainer_nodes: Positive = 1
    """The first nodes train; GPUs left carry engines."""
    hub_host: str | None = None
    """First node's address. None: one that others reach; 127.0.0.1 for one node outside SLURM."""
    hub_port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Hub's TCP port; 0: any free one."""
    max_restarts: NonNegative = 3
    """Restarts: of the trainer ranks together, and of each node loop."""
    node_cpus: list[NonNegative] | None = None
    """Cores of node loop and engines. None: all."""
    trainer_cpus: list[NonNegative] | None = None
    """Cores of the trainer ranks. None: all. Those that engines use meanwhile are halved."""

    def trainer_ranks_on(self, node: int) -> int:
        """Trainer processes on this node."""
        return self.trainer_ranks if node < self.trainer_nodes else 0

    def node_of(self, rank: int) -> int:
        """The node of a trainer rank."""
        return rank // self.trainer_ranks


class ParallelConfig(Section, frozen=True):
    """How the trainer ranks divide model and work: FSDP over those that `tensor` leaves."""

    tensor: Positive = 1
    """Neighbouring ranks of a node that divide each layer and train the same samples."""
    context: Positive = 1
    """Neighbours beyond these that divide each row of tokens and train the same samples."""
    expert: Positive = 1
    """Neighbouring ranks that divide the experts of a mixture: a multiple of `tensor`."""

    @property
    def ranks_per_shard(self) -> int:
        """Neighbouring ranks that train the same samples."""
        return self.tensor * self.context

    def data_shard(self, rank: int) -> int:
        """The part of a batch that a trainer rank trains."""
        return rank // self.ranks_per_shard


class DeadlinesConfig(Section, frozen=True):
    """Seconds after which a wait ends. `generate` and `episode` stand still while a node has no engine."""

    connect: Deadline = 60
    """A peer opens its port and proves the token."""
    rendezvous: Deadline = 600
    """All processes of the job appear."""
    request: Deadline = 60
    """A peer answers; silent nodes lose their work, silent trainer ranks restart."""
    hub: Deadline = 300
    """The hub answers; else it and the trainer ranks start again."""
    engine_start: Deadline = 900
    """An engine loads its model and answers."""
    engine_step: Deadline = 300
    """An engine with requests makes a step, or is dead."""
    generate: Deadline = 1800
    """One response."""
    env_reset: Deadline = 60
    """An environment resets."""
    env_step: Deadline = 120
    """An environment steps, reward included."""
    episode: Deadline = 7200
    """One episode, from reset to reward."""
    swap: Deadline = 300
    """An engine loads a version and passes the canary."""
    batch: Deadline = 3600
    """Enough groups finish for a step, from the first ready engine on."""
    step: Deadline = 3600
    """A trainer finishes a step."""
    collective: Deadline = 600
    """All ranks join a collective."""
    sink: Deadline = 60
    """Trackers take the rest at the end."""
    close: Deadline = 8
    """An environment closes; a node's engines end."""
    shutdown: Deadline = 60
    """After an interrupt, step and checkpoint end; a leaving node's samples end."""


class Config(Section, frozen=True):
    """A whole run: one field per table of the file."""

    run: RunConfig
    model: ModelConfig
    env: EnvConfig
    tiny_model: TinyModelConfig | None = None
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    train: TrainConfig = TrainConfig()
    lora: LoraConfig | None = None
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    sft: SftConfig | None = None
    weights: WeightsConfig = WeightsConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()
    track: TrackConfig = TrackConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    cluster: ClusterConfig = ClusterConfig()
    parallel: ParallelConfig = ParallelConfig()
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
    def gpus_per_node(self) -> int:
        """`cluster.gpus_per_node`, with `auto` resolved by `flash.config.load`."""
        assert isinstance(self.cluster.gpus_per_node, int), "resolved by flash.config.load.load"
        return self.cluster.gpus_per_node

    @property
    def weights_backend(self) -> Literal["tcp", "gloo", "nccl", "ipc"]:
        """`weights.backend`, with `auto` resolved for this hardware."""
        if self.weights.backend != "auto":
            return self.weights.backend
        if self.gpus_per_node == 0 or self.lora is not None:
            return "tcp"
        return "ipc" if self.engine.share_gpus else "nccl"

    @property
    def seeded(self) -> bool:
        """`rollout.seeded`, with None resolved for this run."""
        if self.rollout.seeded is not None:
            return self.rollout.seeded
        return self.train.async_ratio == 0 and self.gpus_per_node == 0

    @property
    def sampling(self) -> Sampling:
        """How a run samples where no domain has it otherwise."""
        return Sampling(**{name: getattr(self.rollout, name) for name in Sampling.__struct_fields__})

    def why_kept_tokens_unknown(self, sampling: Sampling) -> str | None:
        """Return why the trainer cannot know which tokens `top_k` of these settings keeps; None if it can."""
        model, drafted = self.model, "speculative_config" in self.engine.vllm
        return why_kept_tokens_unknown(sampling, dtype=model.dtype, head_dtype=model.head_dtype, drafted=drafted)

    @property
    def adapters(self) -> int:
        """Versions of its adapters that an engine holds at once; where it is one, the next takes its place. 0: none."""
        if self.lora is None:
            return 0
        return min(self.train.max_age + 1, MOST_ADAPTERS) if self.rollout.swap == "drain" else 1

    def engines_on(self, node: int) -> int:
        """Engines on this node: `engine.count`, as far as the GPUs left by the trainers reach."""
        if self.gpus_per_node == 0 or self.engine.share_gpus:
            return self.engine.count
        free = self.gpus_per_node - self.cluster.trainer_ranks_on(node)
        return min(self.engine.count, free // self.engine.tensor_parallel)

    def engine_gpus(self, node: int, engine: int) -> list[int]:
        """The GPUs of the engine-th engine on this node: after the trainers' own, unless they are shared."""
        if self.gpus_per_node == 0:
            return []
        first = 0 if self.engine.share_gpus else self.cluster.trainer_ranks_on(node)
        width = self.engine.tensor_parallel
        return list(range(first + engine * width, first + (engine + 1) * width))

    @property
    def trainer_world_size(self) -> int:
        """Trainer processes over all nodes."""
        return self.cluster.trainer_ranks * self.cluster.trainer_nodes

    @property
    def data_shards(self) -> int:
        """Parts into which a batch is dealt."""
        return self.trainer_world_size // self.parallel.ranks_per_shard
