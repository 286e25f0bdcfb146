"""Checks of a configuration that concern machines: devices for ranks and engines, cores, vLLM, the run directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch
from typing import Any, cast

import msgspec

from flash.config.check_models import unreachable
from flash.config.decode import ConfigProblem, describe, show, suggest
from flash.config.tree import Config
from flash.foreign import vllm_arguments
from flash.foreign.vllm_parsers import Package, names

SAME_MODEL = "engine and trainer have one model, that of model.path"
ONE_PLACE = "an engine is engine.tensor_parallel workers of one node, which take weights and prove them"
OUTLIVED = "blocks of the KV cache that lie elsewhere would outlive a swap of weights"
UNFOLLOWED_BY_TRAINER = "the trainer would take log-probs of another distribution than tokens are drawn from"
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
    "max_logprobs": "use rollout.top_k",
    "spec_*": "use speculative_config",
    **dict.fromkeys(("model_weights", "hf_config_path", "config_format", "*revision", "tokenizer*"), SAME_MODEL),
    **dict.fromkeys(("skip_tokenizer_init", "model_class_overrides", "convert", "runner"), SAME_MODEL),
    **dict.fromkeys(("pipeline_parallel_size", "prefill_context_parallel_size", "master_*", "nnodes"), ONE_PLACE),
    **dict.fromkeys(("node_rank", "distributed_executor_backend", "worker_cls", "worker_extension_cls"), ONE_PLACE),
    **dict.fromkeys(("enable_eplb", "eplb_config", "*elastic_ep*"), f"{ONE_PLACE}: experts may not move"),
    **dict.fromkeys(("kv_transfer_config", "kv_offloading_*"), OUTLIVED),
    **dict.fromkeys(("cpu_offload_*", "offload_*"), "weights that were moved out are not known to take a new version"),
    **dict.fromkeys(("logits_processors", "watermark_config", "logprobs_mode"), UNFOLLOWED_BY_TRAINER),
    **dict.fromkeys(("*lora", "*loras", "*lora_*"), "set [lora]"),
    **dict.fromkeys(("aux_output_config", "return_sampling_mask"), "no one would read it"),
    "*_routed_experts": "set rollout.routing_replay",
    "scheduling_policy": "the canary goes before all samples",
    "disable_log_stats": "metrics are made of them",
    "max_num_queued_*": "requests that an engine turns away would fail: use rollout.max_concurrent",
}
"""Arguments of vLLM that users may not set, as patterns of names, with the setting to use instead or the reason."""

MADE_ANEW = ("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8")
"""Kinds of quantization that vLLM computes from the weights of each version when they arrive."""
DRAFTS = ("ngram", "suffix")
"""Methods of speculative decoding that draft from the text itself, without a model."""


def parser_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the installed vLLM has the parsers that are named. Without vLLM nothing is checked."""
    named: dict[Package, tuple[str, str | None]] = {
        "tool_parsers": ("tool_parser", config.model.tool_parser),
        "reasoning": ("reasoning_parser", config.model.reasoning_parser),
    }
    for package, (key, name) in named.items():
        if name is not None and (known := names(package)) and name not in known:
            yield ConfigProblem(f"model.{key}", f"vLLM has no {name!r}; it has {', '.join(known)}")


def vllm_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the installed vLLM has the given arguments, and that none of them is one that Flash sets."""
    given = config.engine.vllm
    known = vllm_arguments.names() if given else []
    found = [
        ConfigProblem(f"engine.vllm.{name}", fault)
        for name, value in given.items()
        if (fault := _argument_fault(name, value, known)) is not None
    ]
    yield from found or _vllm_values(config)


def _argument_fault(name: str, value: Any, known: Sequence[str]) -> str | None:
    """Return the error message for an argument of vLLM; None if the argument is valid. `known`: names that vLLM has."""
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
    """Yield the problems of argument values that would affect weights or the distribution of sampled tokens."""
    given, table = config.engine.vllm, "engine.vllm"
    if given.get("quantization", MADE_ANEW[0]) not in (*MADE_ANEW, "online"):
        message = "is of weights that are quantized in their files, and each version comes as it is trained"
        expected = f"expected {', '.join(MADE_ANEW)}, or `online` beside quantization_config"
        yield ConfigProblem(f"{table}.quantization", f"{show(given['quantization'])} {message}: {expected}")
    if given.get("load_format") == "dummy":
        yield ConfigProblem(f"{table}.load_format", "expected another: `flash eval` serves what an engine loads")
    if given.get("enable_chunked_prefill") and config.gpus_per_node == 0 and config.seeded:
        message = "expected false on the CPU, where a seeded response that is begun in parts ends its engine"
        yield ConfigProblem(f"{table}.enable_chunked_prefill", f"{message}; or rollout.seeded = false")
    drafts = given.get("speculative_config")
    if not isinstance(drafts, dict):
        return
    key, drafts = f"{table}.speculative_config", cast("dict[str, Any]", drafts)
    if config.gpus_per_node == 0:
        # vLLM's kernel for the CPU, which gives each drafted token the temperature of its response, writes into a copy.
        yield ConfigProblem(key, "expected none on the CPU, where vLLM draws what it drafts from other distributions")
    if drafts.get("method") not in DRAFTS or "model" in drafts:
        message = f"expected method = {' or '.join(map(show, DRAFTS))} and no model"
        yield ConfigProblem(key, f"{message}: a draft's own weights would stay those of the start")
    if drafts.get("rejection_sample_method", "standard") != "standard":
        yield ConfigProblem(f"{key}.rejection_sample_method", f'expected "standard": {UNFOLLOWED_BY_TRAINER}')


PROCESSES_PER_CORE = 4
"""Largest number of processes of one kind per core. With more, starting them takes longer than every deadline."""


def placement_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that trainers and engines have the devices that they need."""
    cluster, engine, gpus = config.cluster, config.engine, config.gpus_per_node
    if cluster.trainer_nodes > cluster.nodes:
        message = f"expected at most cluster.nodes = {cluster.nodes}, got {cluster.trainer_nodes}"
        yield ConfigProblem("cluster.trainer_nodes", message)
    if gpus == 0:
        return
    if cluster.trainer_ranks > gpus:
        message = f"expected at most the {gpus} GPUs of a node, got {cluster.trainer_ranks}"
        yield ConfigProblem("cluster.trainer_ranks", message)
    elif engine.share_gpus:
        if engine.count * engine.tensor_parallel > gpus:
            message = (
                f"{engine.count} engines on {engine.tensor_parallel} GPUs each need more than the {gpus} of a node"
            )
            yield ConfigProblem("engine.count", message)
    elif not any(config.engines_on(node) for node in range(cluster.nodes)):
        message = (
            f"no node has {engine.tensor_parallel} GPUs left for an engine: each has {gpus}, and trainers take "
            f"{cluster.trainer_ranks}; lower this or engine.tensor_parallel, or set engine.share_gpus = true"
        )
        yield ConfigProblem("cluster.trainer_ranks", message)


def parallel_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that groups of ranks are complete and lie within a node.

    Also refuse to divide layers or rows with `algorithm.rhythm`, which needs all heads of a layer at once.
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


def weights_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the transfer backend works with the devices of trainers and engines."""
    backend, key = config.weights_backend, "weights.backend"
    if config.weights.deltas and (backend != "tcp" or config.lora is not None):
        whole = f"{backend} sends whole versions" if backend != "tcp" else "adapters ([lora]) change everywhere"
        yield ConfigProblem("weights.deltas", f"expected false, as {whole}")
    if backend in ("tcp", "gloo"):
        return
    if config.gpus_per_node == 0:
        yield ConfigProblem(key, f"{backend} needs GPUs and cluster.gpus_per_node is 0: expected tcp or auto")
    elif backend == "ipc" and not config.engine.share_gpus:
        yield ConfigProblem(key, "ipc needs engine.share_gpus = true: expected nccl, tcp or auto")
    elif backend == "ipc" and config.cluster.nodes > 1:
        yield ConfigProblem(key, f"ipc ends at the machine and cluster.nodes is {config.cluster.nodes}: expected tcp")
    elif backend == "nccl" and config.engine.share_gpus:
        yield ConfigProblem(
            key, "nccl cannot join two processes on one GPU (engine.share_gpus): expected ipc, tcp or auto"
        )


def cpu_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the named cores exist on this machine, and that each is named once."""
    cores = os.cpu_count() or 1
    for key, cpus in (
        ("cluster.node_cpus", config.cluster.node_cpus),
        ("cluster.trainer_cpus", config.cluster.trainer_cpus),
    ):
        if cpus is not None and (not cpus or max(cpus) >= cores or len(set(cpus)) < len(cpus)):
            message = f"expected one or more of this machine's cores 0 to {cores - 1}, each once, got {cpus}"
            yield ConfigProblem(key, message)


def rank_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the trainer ranks of a node without GPUs have enough cores."""
    yield from _crowded(config, "cluster.trainer_ranks", config.cluster.trainer_ranks)


def worker_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the engine processes of a node without GPUs have enough cores."""
    engine = config.engine
    key = "engine.count" if engine.count > engine.tensor_parallel else "engine.tensor_parallel"
    yield from _crowded(config, key, engine.count * engine.tensor_parallel)


def _crowded(config: Config, key: str, wanted: int) -> Iterator[ConfigProblem]:
    most = PROCESSES_PER_CORE * (os.cpu_count() or 1)
    if config.gpus_per_node == 0 and wanted > most:
        yield ConfigProblem(key, f"expected at most {most} processes, {PROCESSES_PER_CORE} to a core, got {wanted}")


def memory_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the KV caches of a node without GPUs fit into its memory."""
    if config.gpus_per_node > 0:
        return
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if config.engine.kv_cache_gib * config.engine.count >= memory_gib:
        message = (
            f"expected less than the {memory_gib:.0f} GiB of this machine's memory for {config.engine.count} engine(s) "
            f"together, got {config.engine.kv_cache_gib:g} for each"
        )
        yield ConfigProblem("engine.kv_cache_gib", message)


def offload_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that offloading and moments in bfloat16 are used only with AdamW, and that offloaded activations are
    checkpointed."""
    train, key = config.train, "train.offload"
    if train.optimizer == "muon":
        message = (
            'moments in bfloat16, or alone on the host, are AdamW\'s; expected train.optimizer = "adamw", got "muon"'
        )
        # With offloaded weights the moments are on the host anyway, with any optimizer.
        alone = "moments" in train.offload and "weights" not in train.offload
        asked = {"train.moments": train.moments != "float32", key: alone}
        yield from (ConfigProblem(place, message) for place, is_asked in asked.items() if is_asked)
    if "activations" in train.offload and not train.activation_checkpointing:
        message = "`activations` are inputs of layers that run again: set train.activation_checkpointing = true"
        yield ConfigProblem(key, message)


def output_rule(config: Config) -> Iterator[ConfigProblem]:
    """Check that the run directory can be made."""
    folder = config.run_dir.absolute()
    if (fault := unreachable(str(folder))) is not None:
        yield ConfigProblem("run.output_dir", f"{show(str(folder))} cannot be used: {fault}")
        return
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        yield ConfigProblem("run.output_dir", f"expected a folder, and {folder} is none")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield ConfigProblem("run.output_dir", f"expected a folder that can be written, and {folder} cannot")


Rule = Callable[[Config], Iterator[ConfigProblem]]
"""Check of a resolved configuration that yields its problems."""

MACHINE_RULES: tuple[Rule, ...] = (parallel_rule, cpu_rule, rank_rule, offload_rule, output_rule)
"""Rules for everything that trains."""
ENGINE_RULES: tuple[Rule, ...] = (placement_rule, weights_rule, parser_rule, vllm_rule, worker_rule, memory_rule)
"""Rules for everything that runs engines."""
