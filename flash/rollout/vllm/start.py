"""How vLLM is started: its arguments, and the environment variables of its processes.

vLLM's processes have this process's environment of the moment in which they begin, so it is changed for that long and
then put back exactly as it was. All engines of a process share one environment, which lets them start at the same time.
Where an engine is started again, what environments start meanwhile inherits it too.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from flash.config.machine import engine_cpus, runs_eagerly
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.foreign import vllm, vllm_processes
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.vllm.adapters import adapter_arguments
from flash.rollout.vllm.requests import MOST_LOGPROBS
from flash.weights.plugin import NODE_PID, RECEIVER

LAUNCHER_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
"""torchrun's variables that describe this process. An engine that saw them would take itself for a rank of the trainer:
its seeded sampling fails, and tensor parallel workers wait for peers that do not exist."""
LAUNCHER_PREFIXES = ("GROUP_", "MASTER_", "ROLE_", "TORCHELASTIC_")
"""The rest of torchrun's variables, by prefix."""

SCRATCH = "FLASH_SCRATCH"
"""The variable that names the job's folder for temporary files (`flash.run.processes.scratch`)."""

UNLOADABLE = re.compile(r"[\s:]")
"""What ends a path in LD_PRELOAD."""

CPU_BLOCK = 32
"""Tokens of a block of the KV cache on the CPU: the least with which its fast attention runs."""

_configuring = threading.Lock()
"""vLLM's imports and its configuration pass through process-wide state."""
_lock = threading.Lock()
_users = 0
_saved: dict[str, str] = {}


def configure(
    config: Config,
    index: int,
    gpus: Sequence[int],
    stepped: Callable[[Any], None],
    *,
    maker: Callable[[dict[str, Any]], Callable[..., Any]] = vllm.engine_maker,
    prefix: str = sys.prefix,
) -> Callable[[], Any]:
    """Check the arguments of engine `index`; what is returned builds its AsyncLLM, which tells of each step's load.

    To be called inside `engine_environment`, both of them. `maker` is vLLM's, `prefix` where vLLM is installed.

    Raises:
        ConfigError: vLLM has no attention for the model here, or refuses an argument of engine.vllm.
    """
    with _configuring, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = engine_args(config, index, gpus)
        try:
            made = partial(_build, maker(arguments), stepped)
            if config.weights_backend == "ipc":
                vllm.take_typed_answers()
        except vllm.NoAttentionError as error:
            raise ConfigError(f"model.path: {error}") from error
        except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
            if not config.engine.vllm:
                raise
            passed = ", ".join(config.engine.vllm)
            raise ConfigError(f"engine.vllm: vLLM refuses its arguments, {passed} among them: {error}") from error
        finally:
            _mend_preload(prefix)
        return made


def _mend_preload(prefix: str) -> None:
    """Name the libraries that vLLM preloads into its processes on the CPU by paths that ld.so can take.

    It takes a space and a colon for the end of a path. Where no link without them can be made, nothing is preloaded.
    """
    preloaded = os.environ.get("LD_PRELOAD", "")
    if mended := _loadable(preloaded, prefix):
        os.environ["LD_PRELOAD"] = mended
    else:
        _replace({name: value for name, value in os.environ.items() if name != "LD_PRELOAD"} | _inherited("LD_PRELOAD"))


def _loadable(libraries: str, prefix: str) -> str:
    if not UNLOADABLE.search(prefix) or prefix not in libraries:
        return libraries
    folder = os.environ.get(SCRATCH, "")
    if not folder or UNLOADABLE.search(folder):
        return ""
    link = Path(folder) / "environment"
    with suppress(FileExistsError):
        link.symlink_to(prefix)
    return libraries.replace(prefix, str(link))


def _inherited(name: str) -> dict[str, str]:
    return {name: _saved[name]} if name in _saved else {}


def _build(make_llm: Callable[..., Any], stepped: Callable[[Any], None]) -> Any:
    llm = make_llm(stat_loggers=[vllm.stat_logger(stepped)])
    vllm.count_nothing_here(llm)
    return llm


def engine_args(config: Config, index: int, gpus: Sequence[int]) -> dict[str, Any]:
    """vLLM's arguments for engine `index`."""
    args: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.model.max_length,
        "hf_overrides": {"head_dtype": config.model.head_dtype},
        "trust_remote_code": config.model.trust_remote_code,
        "seed": config.run.seed + index,
        "tensor_parallel_size": config.engine.tensor_parallel,
        "max_num_seqs": config.engine.max_sequences,
        "enforce_eager": runs_eagerly(config),
        "stream_interval": config.engine.stream_interval,
        "enable_prefix_caching": True,
        # Of the distribution that is sampled from: all tokens that are not kept are at minus infinity.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MOST_LOGPROBS,
        # Lets the canary go before waiting samples.
        "scheduling_policy": "priority",
        "weight_transfer_config": {"backend": "ipc" if config.weights_backend == "ipc" else RECEIVER},
        "worker_extension_cls": "flash.weights.worker.WorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.rollout.routing_replay:
        args["enable_return_routed_experts"] = True
    if config.gpus_per_node == 0 and config.seeded:
        # A prompt that is prefilled in parts has vLLM turn its generator back, which torch's for the CPU cannot: the
        # engine would die.
        args["enable_chunked_prefill"] = False
    args |= adapter_arguments(config)
    if config.gpus_per_node == 0:
        # Prompts are shared by whole blocks; vLLM's 128 on the CPU are more than most prompts have.
        blocks = {"block_size": CPU_BLOCK}
        args |= blocks | {"kv_cache_memory_bytes": int(config.engine.kv_cache_gib * 2**30)}
    else:
        args |= {"gpu_memory_utilization": config.engine.memory_fraction, "device_ids": list(gpus)}
    return args | config.engine.vllm


def engine_variables(
    config: Config, inherited: Mapping[str, str], cpus: Sequence[int], node_pid: int
) -> dict[str, str]:
    """The whole environment of an engine.

    Args:
        config: the run.
        inherited: this process's environment.
        cpus: CPU cores that engines may use.
        node_pid: the process whose end ends the engine.
    """
    variables = {
        name: value
        for name, value in inherited.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    # Would override the KV cache size that the engine is given.
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
    # Ours alone: a worker of a GPU would take it for cores that it is to be bound to.
    variables.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    # Permits pickles from the network: only for the backend whose handles cannot travel otherwise.
    variables.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    if config.weights_backend == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    if Path(config.model.path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    variables |= {
        NODE_PID: str(node_pid),
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM, torch and their imports warn about themselves at each start, which would bury the run's own lines.
        "VLLM_LOGGING_LEVEL": inherited.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": inherited.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONWARNINGS": inherited.get("PYTHONWARNINGS", "ignore"),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.deadlines.engine_start)),
    }
    if config.rollout.routing_replay:
        # The first runner does not tell of experts.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if SCRATCH in inherited:
        # Its sockets, which it would leave in /tmp.
        variables["VLLM_RPC_BASE_PATH"] = inherited[SCRATCH]
    if config.gpus_per_node == 0 and runs_eagerly(config):
        # vLLM's sampler compiles a comparison of two tensors all the same, with a C++ compiler, in the first swap.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if config.gpus_per_node == 0:
        variables |= _cpu_binding(config, sorted(cpus))
    elif config.model.dtype == "float32":
        # Triton's products, which attention in float32 is made of, have the 10 bits of TF32 else; torch's have all.
        variables["TRITON_F32_DEFAULT"] = inherited.get("TRITON_F32_DEFAULT", "ieee")
    return variables


def server_variables(config: Config, node: int) -> dict[str, str]:
    """Of the process from which this machine's node loop and engines are forked, what differs from ours.

    What is read when vLLM and OpenMP are loaded, but nothing that a node loop is not to have.
    """
    cpus = engine_cpus(config, node, config.cluster.node_cpus or sorted(os.sched_getaffinity(0)))
    variables = engine_variables(config, os.environ, cpus, os.getpid())
    if config.gpus_per_node == 0 and (libraries := _loadable(vllm_processes.preloaded(), sys.prefix)):
        variables["LD_PRELOAD"] = ":".join(filter(None, [libraries, os.environ.get("LD_PRELOAD")]))
    own = ("HF_HUB_OFFLINE", "PYTHONWARNINGS", NODE_PID)
    return {name: value for name, value in variables.items() if name not in own and os.environ.get(name) != value}


def _cpu_binding(config: Config, cpus: Sequence[int]) -> dict[str, str]:
    """Where the model's threads run on a CPU engine.

    A single engine's workers are pinned, each to its share of the cores, and one core is left to the scheduler and the
    node loop. Several engines only get a number of threads, because they share these variables. Seeded responses have
    one thread: several cut a batch up by its size, and the last bits of a log-prob would depend on the company.
    """
    workers = config.engine.count * config.engine.tensor_parallel
    free = cpus[:-1] if len(cpus) > workers else cpus
    threads = 1 if config.seeded else max(1, len(free) // workers)
    if config.engine.count > 1:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    shares = [free[rank * threads : (rank + 1) * threads] or free[:1] for rank in range(workers)]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def engine_environment(config: Config, cpus: Sequence[int] | None = None) -> Generator[None]:
    """Give this process the engines' environment while at least one of them is being started.

    `cpus`: the cores that they compute on, where they do on cores; None: those of this process.
    """
    global _users
    with _lock:
        if _users == 0:
            _saved.clear()
            _saved.update(os.environ)
            _replace(engine_variables(config, _saved, cpus or sorted(os.sched_getaffinity(0)), os.getpid()))
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _replace(_saved)


def ready_tokenizer(config: Config) -> HfTokenizer:
    """The model's tokenizer, with what reads responses; blocks for seconds where that is vLLM's.

    Raises:
        ConfigError: there is no usable tokenizer, or a parser that is named cannot work with it.
    """
    with engine_environment(config):
        return HfTokenizer(config.model).ready()


def _replace(variables: Mapping[str, str]) -> None:
    """Make os.environ equal `variables`, without a moment in which it is empty."""
    os.environ.update(variables)
    for name in set(os.environ) - set(variables):
        del os.environ[name]
