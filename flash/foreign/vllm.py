"""Flash's calls of vLLM, except the calls of AsyncLLM that its documentation describes.

They are here so that a new version of vLLM changes one module. The modules of `flash.rollout.vllm` use them. vLLM's
`AsyncLLM` (`llm` below) is in the node loop. It sends requests to the engine's *core*, a process which schedules steps.
The core lets *workers*, further processes, compute them.

The attributes that are used are listed in `flash.foreign.vllm_touched`. Code that runs inside vLLM's workers is in
`flash.foreign.vllm_worker`, and how processes start and end is in `flash.foreign.vllm_processes`. vLLM is imported
inside the functions, so that this module can be imported without it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any, get_args

from flash.foreign.grammars import GENERATED, parameters_of_checked_grammars

# -- starting and ending ---------------------------------------------------------------------------------------------


class NoAttentionError(ValueError):
    """Failure of `engine_maker`: vLLM has no attention kernel on this machine for the model."""


def engine_maker(arguments: dict[str, Any]) -> Callable[..., Any]:
    """Check an engine's arguments, and return a function that builds its AsyncLLM, given its `stat_loggers`.

    `flash.rollout.vllm.start` calls this before an engine starts, and in the dry run, after it has registered our
    weight receiver. `arguments` are those of vLLM's `AsyncEngineArgs`, by name.

    Raises:
        NoAttentionError: vLLM's attention on the CPU does not support the model. Without this check the engine would
            fail as well, but only after minutes.
        TypeError, ValueError, NotImplementedError, AssertionError: vLLM refuses an argument.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    checked = AsyncEngineArgs(**arguments).create_engine_config()
    if current_platform.is_cpu() and not checked.model_config.use_mla:
        _check_head_size(checked.model_config)
    # Without vLLM's default loggers. vLLM still turns statistics on if it gets a stat logger: see `disable_statistics`.
    return partial(AsyncLLM.from_vllm_config, checked, disable_log_stats=True)


def _check_head_size(model: Any) -> None:
    """Raise NoAttentionError if vLLM's attention on the CPU does not support the model's head width."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    size, sizes = model.get_head_size(), CPUAttentionBackend.get_supported_head_sizes()
    if size not in sizes:
        raise NoAttentionError(
            f"the heads of {model.model} are {size} wide, and vLLM's attention on the CPU supports only widths of "
            f"{', '.join(map(str, sizes))}; choose another model, or an engine on a GPU"
        )


def accept_typed_replies() -> None:
    """Let this process decode the answers of a core that may send pickles. The ipc weight backend needs such a core.

    The node loop calls this before it starts such an engine. A core with the variable VLLM_ALLOW_INSECURE_SERIALIZATION
    names the types of its answers. vLLM reads the variable in this process, too, at each answer. But Flash has then
    restored the environment variables, so the value is set here. Without it, the first answer would end vLLM's reading
    task, and the caller would wait forever.
    """
    from vllm import envs

    envs.VLLM_ALLOW_INSECURE_SERIALIZATION = True


def disable_statistics(llm: Any) -> None:
    """Turn off vLLM's statistics of requests in this process, because they take time for each token.

    vLLM turns them on when it gets a stat logger, although `engine_maker` passes `disable_log_stats`. The statistics of
    steps, which the engine's core makes, still reach the logger that `stat_logger` has made. Call this before vLLM's
    reading task starts, at the first call from an event loop: the task reads the setting once, at its start.
    """
    llm.log_stats = llm.output_processor.log_stats = False


def cache_tokens(llm: Any) -> int:
    """Return the number of tokens that the KV cache of an engine can hold; 0 if vLLM does not report it. Called once
    the engine has started."""
    return llm.vllm_config.cache_config.kv_cache_size_tokens or 0


def fail_requests(llm: Any) -> None:
    """End all requests of an engine with an error, and end vLLM's reading task. Called when the engine is closed or has
    died.

    vLLM would end them later, and log each request as a failure.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    llm.output_processor.propagate_error(EngineDeadError())
    if llm.output_handler is not None:
        llm.output_handler.cancel()


def is_core_death(error: BaseException) -> bool:
    """Return True if an error of vLLM means that the engine's core has ended. The engine then counts as dead."""
    from vllm.v1.engine.exceptions import EngineDeadError

    return isinstance(error, EngineDeadError)


def worker_error(error: BaseException) -> str:
    """Return a worker's error message, cut out of vLLM's error about a load of weights; for another error, its type and
    message."""
    found = re.search(r"Worker failed with error '(.*)', please check the stack trace", str(error), re.DOTALL)
    return found.group(1) if found else f"{type(error).__name__}: {error}"


def is_refusal(error: BaseException) -> bool:
    """Return True if an error of vLLM means that a request is invalid, so that no engine would serve it."""
    from vllm.exceptions import VLLMClientError

    return isinstance(error, VLLMClientError | ValueError)


# -- requests --------------------------------------------------------------------------------------------------------


def sampling_parameters(
    settings: Mapping[str, Any], max_tokens: int, *, likeliest: int = 0, tag: str | None = None, generated: int = 0
) -> Any:
    """Return vLLM's parameters of a request for one response, whose tokens and log-probs are delivered in pieces.

    The engine calls this, and shares the result among requests with equal settings.

    Args:
        settings: settings of sampling and stopping, by vLLM's own names; `stop`, the texts that end the response, must
            be among them.
        max_tokens: largest number of tokens of the response.
        likeliest: number of most likely tokens whose log-probs are reported in addition to the sampled token's.
        tag: structural tag of the grammar under which the tokens are sampled; None: no grammar.
        generated: number of tokens at the end of the prompt after which the grammar continues.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

    kind: Any = SamplingParams
    if tag is not None:
        grammar = StructuredOutputsParams(structural_tag=tag)
        settings = {**settings, "structured_outputs": grammar, "extra_args": {GENERATED: generated}}
        kind = parameters_of_checked_grammars()
    return kind(
        **settings,
        max_tokens=max_tokens,
        logprobs=likeliest,
        flat_logprobs=True,
        # vLLM needs the text only to find stop texts.
        detokenize=bool(settings["stop"]),
        output_kind=RequestOutputKind.DELTA,
        # By default vLLM copies the parameters for each request. It only adds the model's end-of-text tokens to the
        # parameters. These are the same for all requests, so equal requests can share one object.
        skip_clone=True,
    )


def with_seed(parameters: Any, seed: int) -> Any:
    """Return a copy of the parameters with a seed. The request then has a random generator of its own."""
    own = copy(parameters)
    own.seed = seed
    return own


def vocabulary(llm: Any) -> int:
    """Return the size of the vocabulary: the number of tokens for which the model of an engine has logits."""
    return llm.model_config.get_vocab_size()


def scoring_parameters() -> Any:
    """Return vLLM's parameters of a request for the log-probs of its prompt. After each load of weights, the canary, a
    short text, is such a prompt."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=1.0,
        max_tokens=1,  # vLLM samples at least one token
        prompt_logprobs=0,  # of the prompt's own tokens, and of none beside them
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def version_starts(llm: Any, queue: Any) -> Callable[[], Sequence[tuple[str, int]]]:
    """Return a function that returns the weight versions of a running request so far. Called when a request has been
    added.

    Each version is a label (`update_weights`) with the index of the first token that was sampled with it. `queue` is
    vLLM's queue with the output of the request.
    """
    # None if the request has ended already. All its output is in the queue then, and the function is not called.
    state = llm.output_processor.request_states.get(queue.request_id)
    return lambda: state.weight_version_starts


def trim_logprobs(llm: Any, queue: Any) -> Callable[[], None]:
    """Return a function that frees the log-probs of a running request that were delivered already. The engine calls it
    for each piece of a response that reports the most likely tokens beside each sampled one (`top_k`).

    vLLM would keep kilobytes of them per token until the response ends, and would decode each of these tokens if the
    response has stop texts. Nothing uses that. `queue` is vLLM's queue with the output of the request.
    """
    state = llm.output_processor.request_states.get(queue.request_id)
    if state is None:  # the request has ended, and all its output is in the queue
        return lambda: None
    processor = state.logprobs_processor
    # Without a tokenizer vLLM decodes no tokens here.
    processor.tokenizer = None

    def trim() -> None:
        """Free the log-probs that were delivered since the last call."""
        # The log-probs of the last tokens may not have been delivered yet.
        processor.logprobs = processor.logprobs[-state.stream_interval :]

    return trim


def search_stop_text_in_prompt(llm: Any, queue: Any, prompt: Sequence[int], moved: int) -> None:
    """Let a request that was just added search for stop texts also in the end of its prompt.

    The last tokens of the prompt may belong to the response, which has moved here from another engine. vLLM would
    search only in the tokens that it samples itself, and would miss a stop text that began before the move. Slow
    tokenizers, those without a backend of the `tokenizers` package, are not supported: nothing is changed.

    Args:
        llm: the AsyncLLM.
        queue: vLLM's queue with the output of the request.
        prompt: tokens of the prompt, with those of the response at its end.
        moved: number of these tokens of the response; 0: nothing is changed.
    """
    state = llm.output_processor.request_states.get(queue.request_id) if moved else None
    if state is None:
        return
    from tokenizers.decoders import DecodeStream
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

    detokenizer = state.detokenizer
    if not isinstance(detokenizer, FastIncrementalDetokenizer):
        return
    # Start over, as if the response began `moved` tokens before the end of the prompt.
    detokenizer.stream = DecodeStream(ids=list(prompt[:-moved]), skip_special_tokens=detokenizer.skip_special_tokens)
    detokenizer.output_text = "".join(map(detokenizer.decode_next, prompt[-moved:]))


def take_undelivered(queue: Any) -> int:
    """Empty the queue of a request that the engine has just aborted. Return the number of sampled tokens that its
    caller has not received, which count as lost."""
    tokens = 0
    while (output := queue.get_nowait()) is not None:
        tokens += sum(len(piece.token_ids) for piece in output.outputs)
    return tokens


# -- weights ---------------------------------------------------------------------------------------------------------


async def pause(llm: Any, *, keep_cache: bool) -> None:
    """Stop an engine's scheduler between two steps, until `resume_generation`. Requests keep their tokens.

    The engine calls this before it loads a version. `keep_cache`: True to keep the KV cache; False to compute it again
    with the weights that are loaded next.
    """
    # `AsyncLLM.pause_generation` is not used, because it sleeps for 20 ms after the pause.
    await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=not keep_cache)


async def join_transfer(llm: Any, init_info: dict[str, Any]) -> None:
    """Initialise the weight receiver of each worker for new trainer ranks, which publish the weights. The engine calls
    this before the first load from these ranks.

    A *weight receiver* is the object in a worker with which it gets new weights: Flash's
    `flash.weights.worker.WeightReceiver`, or vLLM's own one with the ipc backend. `init_info` is `UpdateInfo.init`.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info))


async def update_weights(
    llm: Any, update_info: dict[str, Any], label: str, adapter: int = 0, dropped: Sequence[int] = ()
) -> tuple[dict[str, str] | None, list[list[int]]]:
    """Load new weights into a paused engine; or load a LoRA adapter. The engine calls this for each version.

    vLLM labels all tokens that it samples afterwards with `label`. With several adapters these labels are wrong, and
    `version_starts` in `flash.rollout.vllm.state` replaces them.

    Args:
        llm: the AsyncLLM.
        update_info: describes the place from which each worker fetches the version, which is the weights after one
            training step (`UpdateInfo.update`).
        label: label of the version.
        adapter: number of the adapter to load; 0 to load the model's weights.
        dropped: numbers of adapters that are removed from the engine. Used only with `adapter`.

    Returns:
        None if all workers have loaded the version. Otherwise the first failure that a worker reported, as plain
        data of a `flash.weights.versions.LoadFailure`; the label is then not set. The second result is the fingerprint
        of each worker's weights, or of the adapter. A fingerprint is a list of checksums, which trainer and worker
        compute in the same way.
    """
    loads = await ask_workers(llm, "flash_load", update_info, adapter, [*dropped])
    failure = next((failure for failure, _ in loads if failure is not None), None)
    if failure is None:
        await llm.update_weight_version(label)
    return failure, [list(sums) for _, sums in loads]


def supported_rank(rank: int) -> int:
    """Return the smallest maximum rank of adapters that vLLM can be configured with, and that is at least `rank`, the
    rank of the run's adapters."""
    from vllm.config.lora import MaxLoRARanks

    return min(supported for supported in get_args(MaxLoRARanks) if supported >= rank)


def adapter_request(name: str, number: int) -> Any:
    """Return the object with which a request runs under adapter `number`, which the workers hold.

    Blocks of the prefix cache are shared only between requests whose adapters have the same name.
    """
    from vllm.lora.request import LoRARequest

    # The last argument is the path of the adapter. vLLM does not read it, because the workers have the adapter already.
    return LoRARequest(name, number, "held by the workers")


async def ask_workers(llm: Any, method: str, *arguments: object) -> list[Any]:
    """Call a method of each worker (`flash.weights.worker.WorkerExtension`) between two steps. Return the results."""
    return await llm.collective_rpc(method, args=arguments)


def register_backend(name: str, module: str, class_name: str) -> None:
    """Register a weight receiver of ours with vLLM in this process, as weight transfer backend `name`.

    The node loop and the core of each engine call this. `module` and `class_name` name the receiver's class.
    """
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    WeightTransferEngineFactory.register_engine(name, module, class_name)


# -- load ------------------------------------------------------------------------------------------------------------


def step_numbers(stats: Any) -> dict[str, Any]:
    """Return the numbers in vLLM's `SchedulerStats` of one step, as arguments of `flash.rollout.vllm.state`'s
    `PressureGauge.read`, by name.

    They are numbers of requests (`running`, `waiting`, and `resumed` after a preemption), of prompt tokens (all, and
    `cached_tokens`), and of tokens of speculative decoding (`drafted`, `accepted`) in this step. `kv_used` is the share
    of the KV cache that is in use, from 0 to 1.
    """
    drafts = stats.spec_decoding_stats
    return {
        "running": stats.num_running_reqs,
        "waiting": stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
        "kv_used": stats.kv_cache_usage,
        "resumed": stats.prefix_cache_stats.preempted_requests,
        "prompt_tokens": stats.prefix_cache_stats.queries,
        "cached_tokens": stats.prefix_cache_stats.hits,
        "drafted": 0 if drafts is None else drafts.num_draft_tokens,
        "accepted": 0 if drafts is None else drafts.num_accepted_tokens,
    }


def stat_logger(record: Callable[[Any], None]) -> Any:
    """Return a class of stat loggers for vLLM, which passes the `SchedulerStats` of each step to `record`.

    An engine gets it when it starts, for its gauges. The class derives from vLLM's Prometheus logger, because vLLM
    creates one itself if it gets none. That logger would take time in each step, and all engines of a process would
    share its registry.
    """
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Reader(PrometheusStatLogger):
        """Stat logger that passes statistics on. The methods without effect replace methods that use Prometheus."""

        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            """Register nothing with Prometheus."""

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            """Pass the statistics of one step on, if it has any."""
            if scheduler_stats is not None:
                record(scheduler_stats)

        def log_engine_initialized(self) -> None:
            """Log nothing."""

        def log(self) -> None:
            """Log nothing."""

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
            """Record nothing."""

        def record_admission_rejection(self, reason: str) -> None:
            """Record nothing."""

    return Reader
