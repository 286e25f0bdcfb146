"""Machine: its GPUs, cores and C++ compiler, and the checks of the tables that decide where processes run.

`count_gpus` finds the GPUs when a configuration is read (`flash.config.load`). `engine_cpus` and `trainer_threads`
divide the cores of a machine without GPUs between its engines and its trainer ranks; both run there on the CPU.
`why_eager` says why engines on the CPU cannot compile their graphs.

Each `check_TABLE` yields every problem of one table: `[cluster]`, `[parallel]`, `[engine]` or `[weights]`.
`flash.config.check` calls them. Each `advise_TABLE` yields warnings about settings that are valid but probably
unintended.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any, cast

import msgspec

from flash.config.decode import ConfigProblem, describe, show, suggest
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.foreign import vllm_arguments

NVIDIA_DRIVER = Path("/proc/driver/nvidia/gpus")
"""Folder with one entry per GPU of the machine, which NVIDIA's kernel driver provides."""

DEVICES = Path("/dev")
"""Folder of device files. A process uses a GPU through a file `nvidia0`, `nvidia1` and so on."""

CUDA_NAME = re.compile(r"\d|GPU-|MIG-")
"""Pattern of the beginning of a valid name of a GPU in CUDA_VISIBLE_DEVICES: a number or an id."""

NVIDIA_SMI_TIMEOUT = 30.0
"""Timeout of `nvidia-smi`, in seconds. The tool takes a few seconds if the driver is not loaded yet."""


def count_gpus(driver: Path = NVIDIA_DRIVER, devices: Path = DEVICES) -> int:
    """Return the number of NVIDIA GPUs that this process may use.

    CUDA itself is not asked: processes that are forked after its first use could not use the GPUs. If
    CUDA_VISIBLE_DEVICES is set, its names are counted as CUDA reads them, and the GPUs are not looked at. Called when a
    configuration with `cluster.gpus_per_node = "auto"` is read, and by checks of the machine. Tests replace `driver`
    and `devices`.

    Raises:
        ConfigError: `nvidia-smi` did not answer in time.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names: list[str] = []
        for name in map(str.strip, visible.split(",")):
            # CUDA ignores an invalid name and all names after it. Some versions of SLURM set `NoDevFiles` for a job
            # without GPUs.
            if CUDA_NAME.match(name) is None:
                break
            if name in names:  # CUDA then ignores the whole list
                return 0
            names.append(name)
        return len(names)
    present = sum(1 for _ in driver.iterdir()) if driver.is_dir() else 0
    # In a container the driver's folder names all GPUs of the machine, but only the GPUs that were given to the
    # container have device files.
    usable = min(present, sum(1 for _ in devices.glob("nvidia[0-9]*")))
    if usable > 0:
        return usable
    # The tool makes the device files if no process has used a GPU since the machine started. It also knows the GPUs of
    # WSL, where the driver has no such folder.
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return 0
    try:
        listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False, timeout=NVIDIA_SMI_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"`nvidia-smi -L` did not answer within {NVIDIA_SMI_TIMEOUT:g} s; set cluster.gpus_per_node"
        ) from None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0


COMPILER = "g++"
"""Compiler that torch's inductor calls on Linux, unless CXX names another one."""

HEADERS = Path(sysconfig.get_path("include"), "Python.h")
"""Header file of Python that is included first; it is missing if Python's headers are not installed."""

COMPILER_TIMEOUT_S = 20.0
"""Timeout for asking a compiler for its version, in seconds. The file system that holds it may be slow at first."""


def engine_cpus(config: Config, node: int, cpus: Sequence[int]) -> list[int]:
    """Return the cores on which the CPU engines of a node run, when the node starts them.

    `cpus`: the cores that the node loop may use. The second half of the cores that trainer ranks use, too, is left to
    them; of an odd number the engines keep one more.
    """
    contested = _contested(config, node, cpus, config.cluster.trainer_cpus)
    given_up = contested[(len(contested) + 1) // 2 :]
    return [cpu for cpu in cpus if cpu not in given_up]


def trainer_threads(config: Config, node: int, cpus: Sequence[int]) -> int:
    """Return the number of threads of each trainer rank on the CPU, at least 1. Each rank calls this when it starts.

    The ranks leave half of the cores that engines use, too, to the engines; of an odd number one more. `node`: number
    of the node. `cpus`: the cores that all ranks of the node may use.
    """
    contested = _contested(config, node, cpus, config.cluster.node_cpus)
    return max(1, (len(cpus) - (len(contested) + 1) // 2) // config.cluster.trainer_ranks)


def _contested(config: Config, node: int, own: Sequence[int], others: Sequence[int] | None) -> list[int]:
    """Return the cores that both the engines and the trainer ranks of a node would use at the same time.

    Each side gets half of them: one thread that waits for its core delays its whole operation. If engines and trainers
    take turns, no core is contested, and each side may use all.

    Args:
        config: the run's configuration.
        node: number of the node.
        own: cores that the calling side may use.
        others: cores that the other side may use; None: all.
    """
    take_turns = config.train.async_ratio == 0
    if config.gpus_per_node > 0 or take_turns or not config.cluster.trainer_ranks_on(node):
        return []
    return [cpu for cpu in own if others is None or cpu in others]


def runs_eagerly(config: Config) -> bool:
    """Return True if engines of this configuration run without compiled graphs on this machine. Called when an engine
    starts."""
    return config.engine.enforce_eager or why_eager(config) is not None


def why_eager(config: Config) -> str | None:
    """Return the warning for engines that run eagerly although the configuration did not ask for it; None if none do.

    The warning says what would make the engines compile their graphs.
    """
    if config.gpus_per_node > 0 or config.engine.enforce_eager or (lacking := missing_compiler()) is None:
        return None
    return (
        f"engines run without compiled graphs, as if this key were true: {lacking}. Their steps are slower. "
        f"To have them compiled {compiler_advice()}"
    )


def missing_compiler(headers: Path = HEADERS) -> str | None:
    """Return a phrase for the thing that is missing on this machine to compile graphs for the CPU; None if nothing is
    missing. Tests replace `headers`."""
    name = compiler()
    if not _prints_version(name, os.environ.get("PATH", os.defpath)):
        named = f"{name!r}, which CXX names, does not run" if "CXX" in os.environ else f"{name} is not on PATH"
        return f"torch finds no C++ compiler ({named})"
    if not headers.is_file():
        return f"Python's headers are not installed ({headers})"
    return None


def compiler_advice() -> str:
    """Return the advice how to install a compiler and Python's headers, for `missing_compiler`."""
    return f"install {COMPILER} and Python's headers (Debian, Ubuntu: apt install g++ python3-dev), or set CXX"


def compiler() -> str:
    """Return the compiler that torch calls, chosen as `torch._inductor.config.cpp.cxx` chooses it."""
    return os.environ.get("CXX", COMPILER)


@cache
def _prints_version(name: str, path: str) -> bool:
    """Return True if a program found on `path` prints its version, which is how torch checks for a compiler. `path` has
    the form of the variable PATH. False also if the program does not answer within COMPILER_TIMEOUT_S. Cached, because
    each engine that starts asks."""
    try:
        asked = subprocess.run(
            [name, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=COMPILER_TIMEOUT_S,
            env=os.environ | {"PATH": path},
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return False
    return asked.returncode == 0


CPU_INFO = Path("/proc/cpuinfo")
"""File in which Linux lists the features of each core."""

BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""Names in `CPU_INFO` of instructions that compute in bfloat16, on x86 and on Arm."""


def computes_bfloat16(info: Path = CPU_INFO) -> bool:
    """Return True if this CPU has instructions for bfloat16, or if its features are unknown. Tests replace `info`."""
    try:
        lines = info.read_text().splitlines()
    except OSError:
        return True
    # There is one line for each core, with this name on x86 and on Arm. All cores have the same features.
    features = [line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))]
    return not features or not BFLOAT16_FEATURES.isdisjoint(features[0])


def advise_dtype(config: Config, info: Path = CPU_INFO) -> Iterator[ConfigProblem]:
    """Warn of bfloat16 on a CPU that must emulate it. The warning depends on the machine and not on the settings alone,
    so it is not part of `flash.config.check.unwise`. Tests replace `info`."""
    if config.gpus_per_node == 0 and config.model.dtype == "bfloat16" and not computes_bfloat16(info):
        message = (
            "this CPU has no instructions for bfloat16 and computes it several times slower than float32: set "
            'model.dtype = "float32", which takes twice the memory for weights'
        )
        yield ConfigProblem("model.dtype", message)


# -- [cluster] and [parallel] ----------------------------------------------------------------------------------------

MOST_PORT = 65_535
"""Largest number of a TCP port."""
PROCESSES_PER_CORE = 4
"""Largest number of processes of one kind per core. With more, starting them takes longer than every deadline."""


def check_cluster(config: Config) -> Iterator[ConfigProblem]:
    """Check that nodes, GPUs and cores are enough for the trainer ranks.

    Also check that the named cores exist here, each once, and that the address of the hub, the process that coordinates
    a run, has its form.
    """
    yield from _placement(config) if config.sft is None else _one_node(config)
    cores = os.cpu_count() or 1
    for key, cpus in (
        ("cluster.node_cpus", config.cluster.node_cpus),
        ("cluster.trainer_cpus", config.cluster.trainer_cpus),
    ):
        if cpus is not None and (not cpus or max(cpus) >= cores or len(set(cpus)) < len(cpus)):
            message = f"expected one or more of this machine's cores 0 to {cores - 1}, each once, got {cpus}"
            yield ConfigProblem(key, message)
    yield from _crowded(config, "cluster.trainer_ranks", config.cluster.trainer_ranks)
    parts = re.fullmatch(r".*:([0-9]{1,5})", config.cluster.hub)
    if parts is None or int(parts[1]) > MOST_PORT:
        yield ConfigProblem("cluster.hub", f"expected HOST:PORT or :PORT, got {show(config.cluster.hub)}")


def advise_cluster(config: Config) -> Iterator[ConfigProblem]:
    """Warn of more trainer ranks on the CPU than cores: they take turns, which slows each collective."""
    cores = os.cpu_count() or 1
    if config.gpus_per_node == 0 and config.cluster.trainer_ranks > cores:
        message = f"{config.cluster.trainer_ranks} ranks share the {cores} cores of this machine"
        yield ConfigProblem("cluster.trainer_ranks", message)


def _placement(config: Config) -> Iterator[ConfigProblem]:
    """Check that trainers have their nodes and GPUs, and that they leave GPUs for engines."""
    cluster, engine, gpus = config.cluster, config.engine, config.gpus_per_node
    if cluster.trainer_nodes > cluster.nodes:
        message = f"expected at most cluster.nodes = {cluster.nodes}, got {cluster.trainer_nodes}"
        yield ConfigProblem("cluster.trainer_nodes", message)
    if gpus == 0:
        return
    if cluster.trainer_ranks > gpus:
        message = f"expected at most the {gpus} GPUs of a node, got {cluster.trainer_ranks}"
        yield ConfigProblem("cluster.trainer_ranks", message)
    elif not engine.share_gpus and not any(config.engines_on(node) for node in range(cluster.nodes)):
        message = (
            f"no node has {engine.tensor_parallel} GPUs left for an engine: each has {gpus}, and trainers take "
            f"{cluster.trainer_ranks}; lower this or engine.tensor_parallel, or set engine.share_gpus = true"
        )
        yield ConfigProblem("cluster.trainer_ranks", message)


def _one_node(config: Config) -> Iterator[ConfigProblem]:
    """Check that the ranks of `flash sft` are on one node and have a GPU each. It runs no engines."""
    for name in ("nodes", "trainer_nodes"):
        if (nodes := getattr(config.cluster, name)) > 1:
            yield ConfigProblem(f"cluster.{name}", f"expected 1: `flash sft` trains on one node, got {nodes}")
    ranks, gpus = config.cluster.trainer_ranks, config.gpus_per_node
    if 0 < gpus < ranks:
        yield ConfigProblem("cluster.trainer_ranks", f"expected at most the {gpus} GPUs of a node, got {ranks}")


def _crowded(config: Config, key: str, wanted: int) -> Iterator[ConfigProblem]:
    """Yield a problem if `wanted`, a number of processes of one kind, is too large for the cores of a machine without
    GPUs."""
    most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if config.gpus_per_node == 0 and wanted > most:
        yield ConfigProblem(key, f"expected at most {most} processes, {PROCESSES_PER_CORE} to a core, got {wanted}")


def check_parallel(config: Config) -> Iterator[ConfigProblem]:
    """Check that groups of ranks are complete and lie within a node, and that they divide nothing that must stay whole.

    `algorithm.rhythm` needs all heads of a layer at once, and adapters (`[lora]`) are not divided, except by FSDP.
    """
    parallel, ranks = config.parallel, config.cluster.trainer_ranks
    if ranks % parallel.tensor:
        message = f"expected a divisor of cluster.trainer_ranks = {ranks}, got {parallel.tensor}"
        yield ConfigProblem("parallel.tensor", message)
    elif (left := ranks // parallel.tensor) % parallel.context:
        message = f"expected a divisor of cluster.trainer_ranks / parallel.tensor = {left}, got {parallel.context}"
        yield ConfigProblem("parallel.context", message)
    if parallel.expert > 1 and (ranks % parallel.expert or parallel.expert % parallel.tensor):
        message = (
            f"expected a divisor of cluster.trainer_ranks = {ranks} and a multiple of parallel.tensor = "
            f"{parallel.tensor}, got {parallel.expert}"
        )
        yield ConfigProblem("parallel.expert", message)
    for name, count in (("tensor", parallel.tensor), ("context", parallel.context)):
        if count > 1 and config.algorithm.rhythm is not None:
            message = f"expected 1, as algorithm.rhythm looks at all heads of a layer, got {count}"
            yield ConfigProblem(f"parallel.{name}", message)
    for name in parallel.__struct_fields__:
        if config.lora is not None and (count := getattr(parallel, name)) > 1:
            message = (
                "expected 1, as layers, rows and experts with adapters ([lora]) cannot be divided among ranks, "
                f"got {count}"
            )
            yield ConfigProblem(f"parallel.{name}", message)


# -- [engine] --------------------------------------------------------------------------------------------------------

# Reasons that several entries of `NOT_PASSED` share.
SAME_MODEL = "engines and trainer must have the same model, which model.path names"
OWN_WORKERS = (
    "an engine must be engine.tensor_parallel workers on one node, each of which loads new weights and verifies them"
)
OLD_KV_CACHE = "blocks of the KV cache that are stored elsewhere would stay after the engine has loaded new weights"
OTHER_DISTRIBUTION = (
    "the trainer would compute log-probs under another distribution than the one that tokens are drawn from"
)
NOT_PASSED: dict[str, str] = {
    "model": "use model.path",
    "dtype": "use model.dtype",
    "max_model_len": "use model.max_length",
    "hf_overrides": f"{SAME_MODEL} and model.head_dtype",
    "trust_remote_code": "use model.trust_remote_code",
    "seed": "use run.seed",
    "tensor_parallel_size": "use engine.tensor_parallel",
    "data_parallel_*": "engines are independent of each other: use engine.count",
    "max_num_seqs": "use engine.max_sequences",
    "enforce_eager": "use engine.enforce_eager",
    "stream_interval": "use engine.stream_interval",
    "gpu_memory_utilization": "use engine.memory_fraction",
    "kv_cache_memory_bytes": "use engine.kv_cache_gib on the CPU, engine.memory_fraction on GPUs",
    "device_ids": "use cluster.gpus_per_node, engine.count and engine.tensor_parallel",
    "weight_transfer_config": "use weights.backend",
    "reasoning_parser*": "use model.reasoning_parser",
    "structured_outputs_config": "Flash computes with xgrammar which tokens a form of responses forbids",
    "max_logprobs": "use rollout.top_k",
    "spec_*": "use speculative_config",
    **dict.fromkeys(("model_weights", "hf_config_path", "config_format", "*revision", "tokenizer*"), SAME_MODEL),
    **dict.fromkeys(("skip_tokenizer_init", "model_class_overrides", "convert", "runner"), SAME_MODEL),
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size", "master_*", "nnodes"), OWN_WORKERS),
    **dict.fromkeys(("node_rank", "distributed_executor_backend", "worker_cls", "worker_extension_cls"), OWN_WORKERS),
    **dict.fromkeys(
        ("enable_eplb", "eplb_config", "*elastic_ep*"), f"{OWN_WORKERS}, so experts must stay where they are"
    ),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_*"), OLD_KV_CACHE),
    **dict.fromkeys(
        ("cpu_offload_*", "offload_*"), "new weights might not reach weights that were moved out of the GPU"
    ),
    **dict.fromkeys(("logits_processors", "watermark_config", "logprobs_mode"), OTHER_DISTRIBUTION),
    **dict.fromkeys(("*lora", "*loras", "*lora_*"), "set [lora]"),
    **dict.fromkeys(("aux_output_config", "return_sampling_mask"), "Flash does not read the result"),
    "*_routed_experts": "set rollout.routing_replay",
    "scheduling_policy": "the canary must run before all samples",
    "disable_log_stats": "Flash computes metrics from these statistics",
    "max_num_queued_*": "requests that an engine refuses would fail: use rollout.max_concurrent",
}
"""Arguments of vLLM that users may not set, as patterns of names, with the setting to use instead or the reason."""

QUANTIZED_ON_LOADING = ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8")
"""Kinds of quantization that vLLM computes from the weights of each version when they arrive."""
DRAFT_METHODS = ("ngram", "suffix")
"""Methods of speculative decoding that draft from the text itself, without a model."""


def check_engine(config: Config) -> Iterator[ConfigProblem]:
    """Check that the engines have the GPUs, cores and memory that they need, and that vLLM takes their arguments."""
    engine, gpus = config.engine, config.gpus_per_node
    # With more trainer ranks than GPUs, `check_cluster` has the problem that the user has to solve first.
    if engine.share_gpus and config.cluster.trainer_ranks <= gpus < engine.count * engine.tensor_parallel:
        message = f"{engine.count} engines on {engine.tensor_parallel} GPUs each need more than the {gpus} of a node"
        yield ConfigProblem("engine.count", message)
    # The problem of too many processes names the larger of the two factors.
    key = "engine.count" if engine.count > engine.tensor_parallel else "engine.tensor_parallel"
    yield from _crowded(config, key, engine.count * engine.tensor_parallel)
    if gpus == 0:
        memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
        if engine.kv_cache_gib * engine.count >= memory_gib:
            message = (
                f"expected less than the {memory_gib:.0f} GiB of this machine's memory for {engine.count} engine(s) "
                f"together, got {engine.kv_cache_gib:g} for each"
            )
            yield ConfigProblem("engine.kv_cache_gib", message)
    known = vllm_arguments.argument_names() if engine.vllm else []
    found = [
        ConfigProblem(f"engine.vllm.{name}", fault)
        for name, value in engine.vllm.items()
        if (fault := _argument_fault(name, value, known)) is not None
    ]
    yield from found or _vllm_values(config)


def advise_engine(config: Config) -> Iterator[ConfigProblem]:
    """Warn of engines on the CPU that cannot compile their graphs."""
    if (why := why_eager(config)) is not None:
        yield ConfigProblem("engine.enforce_eager", why)


def _argument_fault(name: str, value: Any, known: Sequence[str]) -> str | None:
    """Return the error message for an argument of vLLM; None if the argument is valid.

    `known`: names of the arguments that the installed vLLM has. It is empty if vLLM is not installed; then only
    arguments that Flash sets itself are refused.
    """
    why = next((why for pattern, why in NOT_PASSED.items() if fnmatch(name, pattern)), None)
    if why is not None:
        return f"is not passed on: {why}"
    if not known:
        return None
    if name not in known:
        return f"the installed vLLM's AsyncEngineArgs have no such argument{suggest(name, known)}"
    kind = vllm_arguments.type_of(name)
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return f"expected {describe(kind)}, got {show(value)}"
    except TypeError:  # a type that msgspec cannot check
        pass
    return None


def _vllm_values(config: Config) -> Iterator[ConfigProblem]:
    """Yield the problems of argument values that would affect weights or the distribution of sampled tokens. Called if
    all arguments of `[engine.vllm]` are valid by themselves."""
    given, table = config.engine.vllm, "engine.vllm"
    # The default of `get` is any permitted value: a table without the argument is right.
    if given.get("quantization", QUANTIZED_ON_LOADING[0]) not in (*QUANTIZED_ON_LOADING, "online"):
        message = "needs weights that are quantized in their files, but the trainer's weights are not quantized"
        expected = f"expected {', '.join(QUANTIZED_ON_LOADING)}, or `online` with quantization_config"
        yield ConfigProblem(f"{table}.quantization", f"{show(given['quantization'])} {message}: {expected}")
    if given.get("load_format") == "dummy":
        yield ConfigProblem(
            f"{table}.load_format", "expected another value: with random weights `flash eval` would measure nothing"
        )
    if given.get("enable_chunked_prefill") and config.gpus_per_node == 0 and config.seeded:
        message = (
            "expected false on the CPU, where a seeded response whose prompt is processed in parts kills its engine"
        )
        yield ConfigProblem(f"{table}.enable_chunked_prefill", f"{message}; or rollout.seeded = false")
    drafts = given.get("speculative_config")
    if not isinstance(drafts, dict):
        return
    key, drafts = f"{table}.speculative_config", cast("dict[str, Any]", drafts)
    if config.gpus_per_node == 0:
        # vLLM's kernel for the CPU, which gives each drafted token the temperature of its response, writes into a copy.
        yield ConfigProblem(key, "expected none on the CPU, where vLLM draws drafted tokens from another distribution")
    if drafts.get("method") not in DRAFT_METHODS or "model" in drafts:
        message = f"expected method = {' or '.join(map(show, DRAFT_METHODS))} and no model"
        yield ConfigProblem(key, f"{message}: the weights of a draft model would never be updated")
    if drafts.get("rejection_sample_method", "standard") != "standard":
        yield ConfigProblem(f"{key}.rejection_sample_method", f'expected "standard": {OTHER_DISTRIBUTION}')


# -- [weights] -------------------------------------------------------------------------------------------------------

LOOSE_TOLERANCE = 0.5
"""Canary tolerance, in nats, above which the canary detects nothing. The canary compares the log-probs of engine and
trainer on a test text after each load of weights. Engines that computed with other weights differed by 0.6 nats and
more."""


def check_weights(config: Config) -> Iterator[ConfigProblem]:
    """Check that the transfer backend works on these devices. `check_lora` checks that it can transfer adapters."""
    backend, key = config.weights_backend, "weights.backend"
    if backend in ("tcp", "gloo"):  # they work on all devices
        return
    if config.gpus_per_node == 0:
        yield ConfigProblem(key, f"{backend} needs GPUs and cluster.gpus_per_node is 0: expected tcp or auto")
    elif backend == "ipc" and not config.engine.share_gpus:
        yield ConfigProblem(key, "ipc needs engine.share_gpus = true: expected nccl, tcp or auto")
    elif backend == "ipc" and config.cluster.nodes > 1:
        yield ConfigProblem(
            key, f"ipc works only within one machine and cluster.nodes is {config.cluster.nodes}: expected tcp"
        )
    elif backend == "nccl" and config.engine.share_gpus:
        yield ConfigProblem(
            key, "nccl cannot connect two processes on one GPU (engine.share_gpus): expected ipc, tcp or auto"
        )


def advise_weights(config: Config) -> Iterator[ConfigProblem]:
    """Warn of a canary that would accept an engine with other weights."""
    tolerance = config.weights.canary_tolerance
    if tolerance is not None and tolerance > LOOSE_TOLERANCE:
        message = f"with {tolerance:g} nats the canary does not notice an engine that computes with other weights"
        yield ConfigProblem("weights.canary_tolerance", message)
