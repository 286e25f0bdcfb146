"""Config: the configuration of a run, one typed tree of tables.

Every field has a docstring that gives its meaning and unit; docs/configuration.md is generated from these docstrings.
`flash.config.load` reads TOML files and overrides into this tree. The tree needs neither torch nor vllm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from msgspec import Meta, field

from flash.ages import window
from flash.config.learning import AlgorithmConfig, CriticConfig, LoraConfig, SftConfig, TrainConfig
from flash.config.section import (
    HIGHEST_TEMPERATURE,
    SAMPLING_KEYS,
    BelowOne,
    Biases,
    Deadline,
    Ends,
    LearningRate,
    NonNegative,
    Penalty,
    Positive,
    Section,
    Seed,
    Temperature,
    TopK,
    TopP,
    sampling_of,
    why_kept_tokens_unknown,
)
from flash.config.simulate import SimulateConfig
from flash.sampling import Sampling

MOST_ADAPTERS = 8
"""Largest number of adapter versions (`[lora]`) that an engine holds at once. An engine reserves memory for each of
them in advance."""
LOADS_IN_WINDOWS = 2
"""Number of loads of new versions through which a response may run under its old adapter. The unit is a window: ⌈α⌉
versions, where α is `train.async_ratio`. In simulated runs whose longest answers had three times the mean length, one
window made steps 6 and 12 % slower at α = 2 and 1, and four windows made them no faster."""


class RunConfig(Section, frozen=True):
    """Name, length, seed and recorded samples of the run."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}\Z")]
    """Name of the run. Its files are in the folder of this name below `output_dir`."""
    output_dir: str = "outputs"
    """Folder that holds the folders of all runs. With several nodes it must be on a shared file system."""
    seed: Seed = 0
    """Seed from which every random choice of the run derives. Change it to repeat an experiment with other random
    choices."""
    steps: Positive = 100
    """Number of training steps. Each step trains one batch and makes one policy version."""
    resume: bool = False
    """Continue the run in the run's folder [from its saved state](when-it-fails.md#what-is-kept). The `--resume` option
    sets this key."""
    log_samples: NonNegative = 4
    """Number of samples of each step that are written in readable form. 0: none. If all files together grow beyond
    1 GB, the samples of every second step are deleted."""


class ModelConfig(Section, frozen=True):
    """Model that is trained (the policy): its files, precision, length and chat format."""

    path: str
    """Hugging Face model folder, hub id, or [`.gguf` file](quickstart.md#a-pretrained-model)."""
    fetch: str | None = None
    """Source from which a missing folder `path` is made: a model name that `flash fetch` lists, or a `.gguf` file.
    None: the folder must exist."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """[Precision](weights.md#precision) of the engines and of the trainer's passes. The trainer's master weights are
    always float32. `auto`: bfloat16 on GPUs and on CPUs that have instructions for it, float32 on other CPUs."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Precision of the output layer. `model` uses `dtype`, which is faster but increases the mismatch between engine
    and trainer."""
    max_length: Positive = 4096
    """Largest length of a sequence (prompt and responses together), in tokens."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for a model that needs its own code and that you trust."""
    tool_parser: str | None = None
    """Name of vLLM's parser for tool calls, such as `hermes` (Qwen3), `llama3_json` or `mistral`. Required if the
    environment uses tools."""
    reasoning_parser: str | None = None
    """Name of vLLM's parser for reasoning text, such as `qwen3`. None: reasoning is not separated from the answer."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    """[Arguments for the chat template](environments.md#chat-messages), such as `{ enable_thinking = false }`."""


class TinyModelConfig(Section, frozen=True):
    """Recipe for a small Qwen3 that is made if the folder `model.path` is missing. It is first trained on solved
    examples of the environment (warm start)."""

    layers: Positive = 3
    """Number of decoder layers."""
    width: Positive = 128
    """Hidden size."""
    warm_start_steps: NonNegative = 800
    """Largest number of supervised steps. The warm start ends earlier once the model is good enough. 0: no warm
    start."""
    batch_size: Positive = 64
    """Number of examples per supervised step."""
    learning_rate: LearningRate = 2e-3
    """Peak learning rate of the warm start."""


class EnvConfig(Section, frozen=True):
    """Environment in which the policy acts."""

    path: str
    """Import path `module:Class` of the environment: [your own](environments.md) or [one that is part of
    Flash](environment-list.md)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments that the environment class is called with."""
    folders: list[str] = field(default_factory=list[str])
    """Additional folders from which Python imports modules. The folder of the config file and the working directory are
    always searched."""


class RolloutConfig(Section, frozen=True):
    """Settings of sampling: groups, lengths, asynchrony, token distribution and failures."""

    group_size: Positive = 8
    """Number of samples per prompt. The samples of one prompt form a group."""
    max_concurrent: Positive | Literal["auto"] = "auto"
    """Largest number of episodes that run on a node at once. `auto`: as many as fit into the engines' KV caches."""
    max_new_tokens: Positive = 1024
    """Largest length of one response, in tokens. In an episode of several turns it limits each response."""
    max_turns: Positive = 64
    """Number of responses after which an episode is truncated, over all its [branches](agents.md#history)."""
    swap: Literal["recompute", "keep", "abort", "drain"] = "recompute"
    """Treatment of running sequences when an engine loads [new weights](asynchrony.md#weights-and-running-sequences):
    recompute their KV cache, keep the old cache, abort and resend them, or drain (wait until they end)."""
    on_expire: Literal["mask", "requeue", "wait"] = "mask"
    """Treatment of a sample with tokens that [are too old](asynchrony.md#the-contract). `mask`: leave these tokens out
    of the loss. `requeue`: start the sample again. `wait`: hold steps back so that no token becomes too old."""
    fifo_window: Annotated[float, Meta(ge=1, le=1e6)] | None = None
    """Number of batches, [in the order of issue](asynchrony.md#techniques), among which a step chooses its groups.
    1: strict order. None: a step may take any complete group. Set it to 2 if early steps contain too many short
    answers."""
    extra_groups: NonNegative = 0
    """Number of redundant groups in flight. In each step, up to this many groups are cancelled because their first
    tokens could become too old, and redundant groups take their places. 0: none."""
    extra_per_group: NonNegative = 0
    """Number of redundant samples per group. The first `group_size` samples to finish are used, and the others are
    cancelled. 0: none. This saves time with few very slow samples, but favours short answers."""
    drop_equal_rewards: bool = False
    """Replace groups in which all samples have the same reward, since most estimators give them no advantage."""
    accuracy_bounds: tuple[float, float] | None = None
    """Replace groups with a mean reward outside of [low, high]. None: keep all."""
    barriers: list[Literal["batch", "group", "turn"]] = field(default_factory=list)
    """Parts of sampling that [wait for each other](asynchrony.md#techniques), for comparison with synchronous systems.
    `batch`: the samples of the next batch start only when all samples of the last one have ended. `group`: the samples
    of a group go to one node together and wait for each other. `turn`: all episodes of a node generate together and
    then step together. Empty: each sample goes on by itself."""
    temperature: Temperature = 1.0
    """Temperature of sampling. The trainer computes its log-probs at the same temperature."""
    top_k: TopK = 0
    """Number of [most likely tokens](asynchrony.md#sampling) among which each token is drawn. 0: all tokens."""
    top_p: TopP = 1.0
    """Nucleus sampling: keep the most likely tokens with probabilities that sum to `top_p`, of those that `top_k`
    keeps. 1: keep all. Needs `top_k`."""
    min_p: BelowOne = 0.0
    """Drop tokens less probable than `min_p` times the most likely token. 0: drop none. Needs `top_k`."""
    min_tokens: NonNegative = 0
    """Number of tokens before which the model cannot end a response. 0: no minimum. Needs `top_k`."""
    stop: Ends = ()
    """Texts and token ids that end a response, in addition to the model's own end tokens, such as `["END", 151645]`.
    The text stays in the response."""
    logit_bias: Biases = ()
    """Values that are added to the logits of tokens, as a list of `[token id, value]`. Needs `top_k`."""
    repetition_penalty: Penalty = 1.0
    """Penalty for tokens that the context already contains. Above 1 they become less likely; 1: no penalty. Needs
    `top_k`."""
    routing_replay: bool = False
    """Train a mixture of experts with the experts that the engine chose for each token. Works only on GPUs."""
    seeded: bool | None = None
    """Draw each response with its own seed, so that [a run can be repeated](asynchrony.md#repeating-a-run), at lower
    throughput. None: true at async_ratio = 0 on the CPU, otherwise false."""
    retries: NonNegative = 2
    """Number of further attempts at a sample that failed because of the infrastructure, such as an error of the
    environment."""
    breaker: Positive = 64
    """Number of samples given up in a row, of any kind, that stop the run. After a quarter as many of one
    [kind](environments.md#several-environments), problems of this kind are left out."""


class EngineConfig(Section, frozen=True):
    """vLLM engines that generate the responses."""

    count: Positive = 1
    """Number of engines per rollout node."""
    tensor_parallel: Positive = 1
    """Number of GPUs per engine. On the CPU: worker processes per engine."""
    share_gpus: bool = False
    """Run the engines on the GPUs of the trainers. Set it if there are too few GPUs for both."""
    memory_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.9
    """Share of a GPU's memory that an engine may use. Lower it if an engine runs out of memory at its start."""
    kv_cache_gib: Annotated[float, Meta(ge=0.001, le=1e6)] = 1.0
    """Size of the KV cache of each engine on the CPU, in GiB. It has no effect on GPUs."""
    max_sequences: Annotated[int, Meta(gt=0, le=65_536)] = 256
    """Largest number of sequences that an engine decodes at once."""
    enforce_eager: bool = False
    """Run without compiled graphs: engines start faster, but their steps are slower. Engines on the CPU also do so if
    no C++ compiler is found."""
    stream_interval: Positive = 16
    """Number of tokens of a response between two deliveries from the engine to the node. If an engine dies, each of its
    responses loses at most this many tokens."""
    vllm: dict[str, Any] = field(default_factory=dict[str, Any])
    """[Further arguments](scaling.md#engines) for vLLM's `AsyncEngineArgs`."""


class WeightsConfig(Section, frozen=True):
    """Transfer of [weights](weights.md) from the trainer to the engines, and its check."""

    backend: Literal["auto", "tcp", "tcp_deltas", "gloo", "nccl", "ipc"] = "auto"
    """Method of transfer. `auto`: tcp without GPUs or with `[lora]`, ipc on shared GPUs, else nccl. `tcp_deltas` sends
    only [the elements that have changed](weights.md#deltas); each engine worker then keeps a copy of all weights in
    host memory. `gloo` works as nccl does, over host memory."""
    canary_tolerance: Annotated[float, Meta(gt=0, le=10)] | None = None
    """Largest mean difference between the log-probs of engine and trainer on a test text, in nats. None: six times the
    measured rounding error of `dtype`, at least 1e-4 (float32), 0.02 (float16), 0.15 (bfloat16)."""


class EvalConfig(Section, frozen=True):
    """Evaluation on held-out problems: at the start, every `every` steps, and at the end."""

    every: NonNegative = 10
    """Number of steps between two evaluations. 0: evaluate only at the start and at the end."""
    problems: Annotated[int, Meta(gt=0, le=1_000_000)] = 128
    """Number of held-out problems."""
    samples: Annotated[int, Meta(gt=0, le=10_000)] = 1
    """Number of answers per problem; more than 1 needs a temperature above 0. If all rewards are 0 or 1, the best of
    these k answers gives pass@k."""
    temperature: Annotated[float, Meta(ge=0, le=HIGHEST_TEMPERATURE)] = 0.0
    """Temperature of evaluation. 0: greedy decoding."""


class CheckpointConfig(Section, frozen=True):
    """Checkpoints and other state that [survives a crash](when-it-fails.md#what-is-kept)."""

    every: Positive = 20
    """Number of steps between two checkpoints. The last step always writes one."""
    keep: Positive = 2
    """Number of complete checkpoints that are kept; older ones are deleted."""
    batches: Literal["kept", "all", "none"] = "kept"
    """Recorded batches that are kept for replay and restarts. `kept`: those since the oldest kept checkpoint. `all`:
    all. `none`: none; then the loss of a trainer rank restarts all processes."""
    journal: Literal["write", "fsync", "off"] = "write"
    """Record of samples since the last checkpoint. `write`: it survives the death of processes. `fsync`: it also
    survives the death of the machine, but is slower. `off`: these samples are lost."""


TrackerName = Literal["trackio", "wandb", "tensorboard", "mlflow"]
"""Name of a tracker, which is also the name of its Python package."""


class TrackConfig(Section, frozen=True):
    """[Trackers](view.md#in-a-tracker) that receive the run's metrics and show runs side by side."""

    to: list[str] = field(default_factory=list[str])
    """Trackers: `wandb`, `trackio`, `tensorboard` or `mlflow`, which must be installed on the first node, or the import
    path `module:function` of [your own](metrics.md#your-tracker). Empty: none."""
    project: Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[\w.-]+$")] = "flash"
    """Project name in trackio and Weights & Biases, and experiment name in MLflow."""

    @property
    def trackers(self) -> list[TrackerName]:
        """Names of the trackers that Flash knows, each once."""
        return [name for name in get_args(TrackerName) if name in self.to]

    @property
    def sinks(self) -> list[str]:
        """Import paths of the user's own trackers, each once."""
        return [path for path in dict.fromkeys(self.to) if ":" in path]


AlarmName = Literal[
    "stale",
    "masked",
    "failures",
    "mismatch",
    "ess",
    "clipping",
    "entropy",
    "equal_rewards",
    "lag",
    "trainer_waits",
    "engines_idle",
    "nonfinite",
]
"""Name of an alarm. The table of columns (`flash.observe.columns`) has its limit."""


class AlarmsConfig(Section, frozen=True):
    """Reactions to [alarms](metrics.md#alarms), with which a run warns of numbers that are beyond their limits."""

    reactions: dict[AlarmName, Literal["off", "checkpoint", "stop"]] = field(default_factory=dict)
    """Reactions to single alarms, by name, such as `{ lag = "off", nonfinite = "stop" }`. `off`: the alarm is never
    raised. `checkpoint`: the run writes a checkpoint. `stop`: the run ends. An alarm that is not named only warns."""
    command: str | None = None
    """Command that is started at each alarm, without a shell. It gets the message on standard input and the alarm's
    name in the environment variable FLASH_ALARM. None: no command."""

    @property
    def off(self) -> list[AlarmName]:
        """Names of the alarms that are never raised."""
        return [name for name, reaction in self.reactions.items() if reaction == "off"]


class ClusterConfig(Section, frozen=True):
    """Nodes, trainer ranks and devices of the job."""

    nodes: Positive = 1
    """Number of machines at the start. `flash join` adds others later."""
    gpus_per_node: Annotated[int, Meta(ge=0, le=1024)] | Literal["auto"] = "auto"
    """Number of GPUs of each node that the run uses. 0: run everything on the CPU. `auto`: all GPUs that are found."""
    trainer_ranks: Positive = 1
    """Number of trainer processes (ranks) per trainer node."""
    trainer_nodes: Positive = 1
    """Number of nodes with trainer ranks: the first nodes of the job. GPUs that trainers do not use run engines."""
    hub: str = ":0"
    """Address `HOST:PORT` of the first node, at which other nodes reach the hub. `:PORT` finds the host automatically:
    127.0.0.1 if there is one node and no SLURM. Port 0 is any free one. Set the port if a firewall must let it
    through."""
    max_restarts: NonNegative = 3
    """Largest number of restarts: of all trainer ranks together, of each node loop, and [in a
    row](when-it-fails.md#what-a-run-mends) of each engine."""
    node_cpus: list[NonNegative] | None = None
    """Numbers of the CPU cores that the node loop and engines use. None: all cores."""
    trainer_cpus: list[NonNegative] | None = None
    """Numbers of the CPU cores that the trainer ranks use. None: all cores. Without GPUs, cores that engines use at the
    same time are divided in half between both."""

    @property
    def hub_host(self) -> str | None:
        """Host of `hub`, an IPv6 address without its brackets; None if it is found automatically."""
        return self.hub.rpartition(":")[0].strip("[]") or None

    @property
    def hub_port(self) -> int:
        """Port of `hub`; 0 for any free port. The check of the configuration refuses a `hub` of another form."""
        port = self.hub.rpartition(":")[2]
        return int(port) if port.isdecimal() else 0

    def trainer_ranks_on(self, node: int) -> int:
        """Return the number of trainer ranks on the node with this number, from 0: `trainer_ranks` on the first
        `trainer_nodes` nodes of the job, and 0 on all others."""
        return self.trainer_ranks if node < self.trainer_nodes else 0

    def node_of(self, rank: int) -> int:
        """Return the number of the node on which a trainer rank runs, from 0. `rank` counts the ranks of all nodes."""
        return rank // self.trainer_ranks


class ParallelConfig(Section, frozen=True):
    """Division of model and work among the trainer ranks. The ranks that remain after `tensor` form the FSDP group."""

    tensor: Positive = 1
    """Number of neighbouring ranks of a node that divide each layer and train the same samples. 1: layers are not
    divided."""
    context: Positive = 1
    """Number of neighbouring groups of `tensor` ranks that divide the tokens of each row and train the same samples. 1:
    rows are not divided. Raise it for very long sequences."""
    expert: Positive = 1
    """Number of neighbouring ranks that divide the experts of a mixture of experts; a multiple of `tensor`. 1: experts
    are not divided."""

    @property
    def ranks_per_shard(self) -> int:
        """Number of neighbouring ranks that train the same samples."""
        return self.tensor * self.context

    def data_shard(self, rank: int) -> int:
        """Return the number of the batch part (data shard) that a trainer rank trains. `rank` counts the ranks of all
        nodes; neighbouring ranks that divide model or rows have the same shard."""
        return rank // self.ranks_per_shard


HUB_PATIENCE = 5
"""Limit for the hub to answer, as a multiple of `deadlines.request`."""


class DeadlinesConfig(Section, frozen=True):
    """Time limits, in seconds. Raise a limit if an error names it and the waited-for part was only slow. `generate` and
    `episode` do not count time in which the node has no engine."""

    rendezvous: Deadline = 600
    """Limit for all processes of the job to appear."""
    request: Deadline = 60
    """Limit for a peer to connect or to answer. The samples of a silent node go to other nodes; silent trainer ranks
    are restarted. A hub that is silent for five times as long is restarted, with the trainer ranks."""
    engine_start: Deadline = 900
    """Limit for an engine to load its model and to answer."""
    generate: Deadline = 1800
    """Limit for one response."""
    env_step: Deadline = 120
    """Limit for the reset of an environment, and for a step of it, reward included."""
    episode: Deadline = 7200
    """Limit for one episode, from reset to reward."""
    swap: Deadline = 300
    """Limit for an engine to load a version and to pass the canary."""
    step: Deadline = 3600
    """Limit for enough groups of a step to finish, counted from the first ready engine, and then for the trainer to
    finish the step."""
    collective: Deadline = 600
    """Limit for all ranks to join a collective operation."""
    close: Deadline = 8
    """Limit for an environment to close, and for the engines of a node to end. After an interrupt or an error also the
    limit for trackers, the sink and the alarm command to take the last rows, if it is less than 60 seconds."""
    shutdown: Deadline = 60
    """Limit for the running step and checkpoint to end after an interrupt, and for a leaving node to finish its
    samples."""

    @property
    def hub(self) -> float:
        """Limit for the hub to answer a launcher, or the report of a step, in seconds. A launcher on the machine of the
        hub restarts a hub that does not answer it. This also restarts all trainer ranks, so the limit is longer than
        that for other peers."""
        return HUB_PATIENCE * self.request


class Config(Section, frozen=True):
    """Configuration of a whole run: one field per table of the file."""

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
    track: TrackConfig = TrackConfig()
    alarms: AlarmsConfig = AlarmsConfig()
    cluster: ClusterConfig = ClusterConfig()
    parallel: ParallelConfig = ParallelConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    simulate: SimulateConfig | None = None

    @property
    def run_dir(self) -> Path:
        """Folder of the run: `run.output_dir/run.name`."""
        return Path(self.run.output_dir) / self.run.name

    @property
    def groups_per_batch(self) -> int:
        """Number of groups (prompts) that a step trains: batch_size / group_size."""
        return self.train.batch_size // self.rollout.group_size

    @property
    def gpus_per_node(self) -> int:
        """Value of `cluster.gpus_per_node`, in which `flash.config.load` has replaced `auto` by a number."""
        assert isinstance(self.cluster.gpus_per_node, int), "resolved by flash.config.load.load"
        return self.cluster.gpus_per_node

    @property
    def weights_backend(self) -> Literal["tcp", "gloo", "nccl", "ipc"]:
        """Value of `weights.backend`, with `auto` replaced by the method for this hardware. `tcp` also stands for
        `tcp_deltas`."""
        match self.weights.backend:
            case "tcp_deltas":
                return "tcp"
            case "auto" if self.gpus_per_node == 0 or self.lora is not None:  # adapters travel only by tcp
                return "tcp"
            case "auto":  # nccl cannot connect an engine and a trainer on one GPU
                return "ipc" if self.engine.share_gpus else "nccl"
            case backend:
                return backend

    @property
    def seeded(self) -> bool:
        """Value of `rollout.seeded`, with None replaced by the value for this run."""
        if self.rollout.seeded is not None:
            return self.rollout.seeded
        return self.train.async_ratio == 0 and self.gpus_per_node == 0

    @property
    def sampling(self) -> Sampling:
        """Sampling settings of the run, from the keys of the same names in `[rollout]`. A domain, one kind of problems
        of an environment, may replace them by settings of its own."""
        return sampling_of({name: getattr(self.rollout, name) for name in SAMPLING_KEYS})

    def why_kept_tokens_unknown(self, sampling: Sampling) -> str | None:
        """Return why the trainer cannot know which tokens `top_k` of these settings keeps; None if it can.

        The checks of `[rollout]` and of an environment's domains refuse such settings.
        """
        model, drafted = self.model, "speculative_config" in self.engine.vllm
        return why_kept_tokens_unknown(sampling, dtype=model.dtype, head_dtype=model.head_dtype, drafted=drafted)

    @property
    def adapters(self) -> int:
        """Number of adapter versions that an engine holds at once. 1: the next version replaces it. 0: there are no
        adapters.

        With `rollout.swap = "drain"`, running responses end under their old version. With room for n + 1 adapters, a
        response may run through n loads, and the load after these waits until it ends.
        """
        if self.lora is None:
            return 0
        if self.rollout.swap != "drain":
            return 1
        # A token that is more than `max_age` versions old is not trained, so a response needs no more loads than that.
        loads = min(LOADS_IN_WINDOWS * window(self.train.async_ratio), self.train.max_age)
        return min(loads + 1, MOST_ADAPTERS)

    def engines_on(self, node: int) -> int:
        """Return the number of engines on the node with this number, from 0: `engine.count`, or fewer if the trainers
        leave too few GPUs."""
        if self.gpus_per_node == 0 or self.engine.share_gpus:
            return self.engine.count
        free = self.gpus_per_node - self.cluster.trainer_ranks_on(node)
        return min(self.engine.count, free // self.engine.tensor_parallel)

    def engine_gpus(self, node: int, engine: int) -> list[int]:
        """Return the numbers of the GPUs of an engine of a node; empty on the CPU. They follow the trainers' GPUs
        unless GPUs are shared. `node` counts the nodes of the job, and `engine` the engines of the node, from 0."""
        if self.gpus_per_node == 0:
            return []
        first = 0 if self.engine.share_gpus else self.cluster.trainer_ranks_on(node)
        width = self.engine.tensor_parallel
        return list(range(first + engine * width, first + (engine + 1) * width))

    @property
    def trainer_world_size(self) -> int:
        """Number of trainer ranks on all nodes."""
        return self.cluster.trainer_ranks * self.cluster.trainer_nodes

    @property
    def data_shards(self) -> int:
        """Number of parts (data shards) into which a batch is divided."""
        return self.trainer_world_size // self.parallel.ranks_per_shard
