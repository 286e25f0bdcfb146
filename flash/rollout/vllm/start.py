"""Arguments of vLLM, and the environment variables of its processes.

When a `VLLMEngine` starts, it calls `configure` inside `engine_environment`, in a thread of the node's process.

vLLM's processes inherit the environment variables that this process has when they start. So `engine_environment`
changes the variables for that time, and restores them exactly. All engines of a process share one environment, so that
they can start at the same time. When an engine restarts during a run, programs that users' environments start meanwhile
inherit the changed variables, too.
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
from flash.config.section import HIGHEST_TOP_K
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.foreign import vllm, vllm_processes
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.weights.engine_process import NODE_PID, RECEIVER, register, silence_triton

LAUNCHER_NAMES = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"})
"""torchrun's variables that describe this process. An engine that inherited them would act as a rank of the trainer:
its seeded sampling would fail, and its tensor parallel workers would wait for peers that do not exist."""
LAUNCHER_PREFIXES = ("GROUP_", "MASTER_", "ROLE_", "TORCHELASTIC_")
"""Prefixes of torchrun's other variables."""

SCRATCH = "FLASH_SCRATCH"
"""Variable with the path of the job's folder for temporary files (`flash.run.processes.launch_state`)."""

LATE = frozenset({"HF_HUB_OFFLINE", "PYTHONWARNINGS", NODE_PID, "VLLM_CPU_OMP_THREADS_BIND", "VLLM_RPC_BASE_PATH"})
"""Variables of an engine that its processes read or apply when they start. The fork server needs none of them."""

UNLOADABLE = re.compile(r"[\s:]")
"""Characters that end a path in LD_PRELOAD, so that a path must not contain them."""

CPU_BLOCK = 32
"""Number of tokens in a block of the KV cache on the CPU: the smallest size with which vLLM's fast attention works
there. Prompts are shared by whole blocks, and vLLM's default of 128 tokens is more than most prompts have."""

TIES = 8
"""Number of tokens beyond `top_k` whose log-probs are requested: vLLM also keeps tokens that are exactly as likely as
the last token of the `top_k`."""
MAX_LOGPROBS = HIGHEST_TOP_K + TIES
"""Largest number of log-probs that an engine returns for one position."""

_configuring = threading.Lock()
"""Lock held while vLLM is imported and configured, because both change state of the whole process."""
_environment_lock = threading.Lock()
"""Lock held while this module changes `os.environ` or the two variables below. vLLM changes `os.environ` without it."""
_starting = 0
"""Number of engines that are inside `engine_environment` now."""
_saved: dict[str, str] = {}
"""Environment variables to restore when the last engine leaves `engine_environment`."""


def registered_maker(arguments: dict[str, Any]) -> Callable[..., Any]:
    """Register our weight receiver, which the arguments name. Check the arguments of an engine, and return a function
    that builds its AsyncLLM.

    Raises the errors of `vllm.engine_maker`. `configure` turns them into a ConfigError if the user is at fault.
    """
    register()
    return vllm.engine_maker(arguments)


def configure(
    config: Config,
    index: int,
    gpus: Sequence[int],
    stepped: Callable[[Any], None],
    *,
    maker: Callable[[dict[str, Any]], Callable[..., Any]] = registered_maker,
    prefix: str = sys.prefix,
) -> Callable[[], Any]:
    """Check the arguments of an engine, and return a function that builds its AsyncLLM, which starts its processes.

    This function and the returned one must be called inside `engine_environment`. Only the check holds a lock. The
    start is a separate function without a lock, so several engines can start at the same time.

    Args:
        config: the configuration of the run.
        index: number of the engine in the run.
        gpus: indices of the engine's GPUs among the GPUs that this process sees.
        stepped: called with vLLM's statistics after each step.
        maker: checks vLLM's arguments and returns its constructor; tests replace it.
        prefix: folder in which vLLM is installed; tests replace it.

    Raises:
        ConfigError: vLLM has no attention for the model on this machine, or refuses an argument of engine.vllm.
        TypeError, ValueError, NotImplementedError, AssertionError: vLLM refuses an argument of Flash's own.
    """
    with _configuring, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        silence_triton()
        arguments = engine_args(config, index, gpus)
        try:
            build = partial(_build, maker(arguments), stepped)
            # With ipc, vLLM's core process may send pickles (`engine_variables`).
            if config.weights_backend == "ipc":
                vllm.accept_typed_replies()
        except vllm.NoAttentionError as error:
            raise ConfigError(f"model.path: {error}") from error
        except (TypeError, ValueError, NotImplementedError, AssertionError) as error:
            # Without arguments of the user, a refusal is an error of Flash.
            if not config.engine.vllm:
                raise
            passed = ", ".join(config.engine.vllm)
            raise ConfigError(f"engine.vllm: vLLM refuses its arguments, {passed} among them: {error}") from error
        finally:
            _fix_preload(prefix)
        return build


def _fix_preload(prefix: str) -> None:
    """Let the dynamic linker find the libraries that vLLM preloads into its processes on the CPU.

    vLLM has just set LD_PRELOAD in this process. In this variable a space or a colon ends a path. A path with such
    characters is replaced by a path through a link. If there is no folder for a link, LD_PRELOAD gets the value that it
    had before `engine_environment`.

    `prefix`: folder of the Python environment in which vLLM is installed.
    """
    with _environment_lock:
        libraries = _loadable_paths(os.environ.get("LD_PRELOAD", ""), prefix) or _saved.get("LD_PRELOAD")
        # No other variable is written, because an engine that another thread starts may be setting some.
        if libraries is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = libraries


def _loadable_paths(libraries: str, prefix: str) -> str:
    """Return the value of LD_PRELOAD with paths that the dynamic linker can read; empty if that is not possible.

    `libraries` is a value of LD_PRELOAD: paths of libraries, separated by colons. `prefix` is the folder of the Python
    environment, in which the libraries are. A link `environment` to `prefix`, in the job's temporary folder, replaces
    `prefix` if it has a space or a colon.
    """
    if not UNLOADABLE.search(prefix) or prefix not in libraries:
        return libraries
    folder = os.environ.get(SCRATCH, "")
    if not folder or UNLOADABLE.search(folder):
        return ""
    link = Path(folder) / "environment"
    with suppress(FileExistsError):
        link.symlink_to(prefix)
    return libraries.replace(prefix, str(link))


def _build(make_llm: Callable[..., Any], stepped: Callable[[Any], None]) -> Any:
    """Build the AsyncLLM, which calls `stepped` after each step and makes no other statistics in this process."""
    llm = make_llm(stat_loggers=[vllm.stat_logger(stepped)])
    vllm.disable_statistics(llm)
    return llm


def engine_args(config: Config, index: int, gpus: Sequence[int]) -> dict[str, Any]:
    """Return vLLM's arguments, by name, for the engine with number `index`. Arguments in `engine.vllm` replace ours.

    `gpus`: indices of the engine's GPUs among the GPUs that this process sees; not used on the CPU.
    """
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
        # The trainer needs log-probs of the distribution from which tokens are drawn. A token that cannot be drawn has
        # minus infinity.
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": MAX_LOGPROBS,
        # `flash.foreign.grammars` describes the forms of responses for xgrammar, and knows the tokens that it forbids.
        # A grammar begins after the reasoning.
        "structured_outputs_config": {"backend": "xgrammar", "reasoning_parser": config.model.reasoning_parser or ""},
        # With priorities the canary (the text that checks new weights) goes before waiting samples.
        "scheduling_policy": "priority",
        # Our weight receiver gets new weights inside the workers. With ipc, vLLM's own receiver gets them.
        "weight_transfer_config": {"backend": "ipc" if config.weights_backend == "ipc" else RECEIVER},
        # vLLM adds the methods of this class to its workers. With them Flash checks the weights.
        "worker_extension_cls": "flash.weights.worker.WorkerExtension",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if config.rollout.routing_replay:
        args["enable_return_routed_experts"] = True
    if config.gpus_per_node == 0 and config.seeded:
        # If vLLM computes a prompt in parts, it rewinds the request's random generator. torch's generator for the CPU
        # cannot do that, and the engine would die.
        args["enable_chunked_prefill"] = False
    args |= adapter_arguments(config)
    if config.gpus_per_node == 0:
        args |= {"block_size": CPU_BLOCK, "kv_cache_memory_bytes": int(config.engine.kv_cache_gib * 2**30)}
    else:
        args |= {"gpu_memory_utilization": config.engine.memory_fraction, "device_ids": list(gpus)}
    return args | config.engine.vllm


def adapter_arguments(config: Config) -> dict[str, Any]:
    """Return vLLM's arguments for LoRA adapters; empty if the run trains whole models."""
    lora = config.lora
    if lora is None:
        return {}
    targets: Sequence[str] = lora.targets
    if not targets:
        from flash.foreign.transformers import linear_layers, without_weights

        # Without names vLLM would also compute with adapters of the output layer, which are 0 and only cost time.
        targets = linear_layers(without_weights(config.model.path, trusted=config.model.trust_remote_code))
    return {
        "enable_lora": True,
        "max_loras": config.adapters,
        "max_lora_rank": vllm.supported_rank(lora.rank),
        "lora_target_modules": [*targets],
    }


def engine_variables(
    config: Config, inherited: Mapping[str, str], cpus: Sequence[int], node_pid: int
) -> dict[str, str]:
    """Return all environment variables of an engine's processes.

    Args:
        config: the configuration of the run.
        inherited: environment variables of this process.
        cpus: CPU cores that engines may use.
        node_pid: process id of the node loop. The engine ends when this process ends.
    """
    variables = {
        name: value
        for name, value in inherited.items()
        if name not in LAUNCHER_NAMES and not name.startswith(LAUNCHER_PREFIXES)
    }
    # This variable would override the size of the KV cache in the engine's arguments.
    variables.pop("VLLM_CPU_KVCACHE_SPACE", None)
    # Only `_cpu_binding` may set this variable: a worker on a GPU would bind itself to these cores.
    variables.pop("VLLM_CPU_OMP_THREADS_BIND", None)
    # This variable permits pickles from the network. Only the ipc weight backend needs it, to send its handles.
    variables.pop("VLLM_ALLOW_INSECURE_SERIALIZATION", None)
    if config.weights_backend == "ipc":
        variables["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    # A model in a folder needs nothing from the Hugging Face Hub.
    if Path(config.model.path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    variables |= {
        NODE_PID: str(node_pid),
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM, torch and their imports log many warnings at each start, which would hide the lines of the run.
        "VLLM_LOGGING_LEVEL": inherited.get("VLLM_LOGGING_LEVEL", "ERROR"),
        "TORCH_CPP_LOG_LEVEL": inherited.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "PYTHONWARNINGS": inherited.get("PYTHONWARNINGS", "ignore"),
        "VLLM_ENGINE_READY_TIMEOUT_S": str(int(config.deadlines.engine_start)),
    }
    if config.rollout.routing_replay:
        # Only vLLM's second model runner returns the experts that it chose.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if SCRATCH in inherited:
        # Otherwise vLLM would leave its sockets in /tmp.
        variables["VLLM_RPC_BASE_PATH"] = inherited[SCRATCH]
    if config.gpus_per_node == 0 and runs_eagerly(config):
        # Even if vLLM runs eagerly, its sampler compiles a comparison of two tensors in the first swap, for which a C++
        # compiler is needed.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    if config.gpus_per_node == 0:
        variables |= _cpu_binding(config, sorted(cpus))
    elif config.model.dtype == "float32":
        # By default Triton's matrix products, which float32 attention uses, have only the 10 bits of TF32.
        variables["TRITON_F32_DEFAULT"] = inherited.get("TRITON_F32_DEFAULT", "ieee")
    return variables


def server_variables(config: Config, node: int) -> dict[str, str]:
    """Return the environment variables of the fork server that are not set, or have another value, in this process.

    This process is the launcher.

    The node loop of machine `node` and its engines are forked from the fork server, which has imported vLLM already. So
    it must have the variables that vLLM, torch and OpenMP read when they are loaded. Variables that vLLM reads later
    are left out, because engines get them when they start.
    """
    cpus = engine_cpus(config, node, config.cluster.node_cpus or sorted(os.sched_getaffinity(0)))
    variables = engine_variables(config, os.environ, cpus, os.getpid())
    if config.gpus_per_node == 0 and (libraries := _loadable_paths(vllm_processes.preload_libraries(), sys.prefix)):
        variables["LD_PRELOAD"] = ":".join(filter(None, [libraries, os.environ.get("LD_PRELOAD")]))
    # torch reads this variable when it is loaded, so a server whose engines compile must have another value.
    variables.setdefault("TORCHDYNAMO_DISABLE", "0")
    return {name: value for name, value in variables.items() if name not in LATE and os.environ.get(name) != value}


def _cpu_binding(config: Config, cpus: Sequence[int]) -> dict[str, str]:
    """Return the variables that decide how many threads a CPU engine has, and on which cores they run.

    The workers of a single engine are bound, each to its share of the cores. One core is left for the node loop and
    vLLM's core. Several engines only get a number of threads, because all engines of a process share these variables.
    """
    workers = config.engine.count * config.engine.tensor_parallel
    free = cpus[:-1] if len(cpus) > workers else cpus
    # Several threads divide a batch by its size, so the last bits of a log-prob would depend on the other requests, and
    # a seeded response could not be repeated.
    threads = 1 if config.seeded else max(1, len(free) // workers)
    if config.engine.count > 1:
        return {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    # A worker that finds no core of its own shares the first one.
    shares = [free[rank * threads : (rank + 1) * threads] or free[:1] for rank in range(workers)]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, share)) for share in shares),
        "OMP_NUM_THREADS": str(threads),
    }


@contextmanager
def engine_environment(config: Config, cpus: Sequence[int] | None = None) -> Generator[None]:
    """Give this process the environment variables of the engines inside the block.

    Several threads may be inside at the same time. The first one sets the variables, and the last one restores them.
    The arguments of the others are ignored, because all engines of a process share one environment. Changes made to
    os.environ inside the block are undone.

    Args:
        config: the configuration of the run.
        cpus: CPU cores for engines that run on the CPU. None: all cores of this process.
    """
    global _starting
    with _environment_lock:
        if _starting == 0:
            _saved.clear()
            _saved.update(os.environ)
            _set_environment(engine_variables(config, _saved, cpus or sorted(os.sched_getaffinity(0)), os.getpid()))
        _starting += 1
    try:
        yield
    finally:
        with _environment_lock:
            _starting -= 1
            if _starting == 0:
                _set_environment(_saved)


def ready_tokenizer(config: Config) -> HfTokenizer:
    """Return the model's tokenizer with the parsers of its responses.

    If the parsers are vLLM's, this blocks for seconds to import vLLM, which reads the engines' environment variables.

    Raises:
        ConfigError: there is no usable tokenizer, or a configured parser cannot work with it.
    """
    with engine_environment(config):
        return HfTokenizer(config.model).ready()


def _set_environment(variables: Mapping[str, str]) -> None:
    """Make os.environ equal to `variables`. The environment is never empty meanwhile, because other threads read it."""
    os.environ.update(variables)
    for name in set(os.environ) - set(variables):
        del os.environ[name]
