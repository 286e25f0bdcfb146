"""VLLMEngine: a vLLM engine in the node loop, behind the `Engine` protocol.

`flash.rollout.proxy.LLMProxy` calls `generate`, which hands the request to vLLM and yields its tokens. The functions at
the end of the file translate the request, and the pieces that vLLM returns.

The proxy also calls `load` for each policy version (the weights after one training step). A *swap* pauses the engine,
lets its workers fetch the weights from the trainer, and resumes. A swap also proves that the weights are right: by a
*fingerprint* (a checksum of all tensors), and by the *canary*, a fixed text whose log-probs must agree with the
trainer's. vLLM labels each token with the version that was set at the end of the last swap. The label changes only
while no step runs, so it is exact.

vLLM's `AsyncLLM` is in this process. Its *core*, which schedules steps, is a process of its own, and starts the
*workers*, which compute. This object owns the core and the workers: they end with `close` and with this process. If one
of them dies, all requests of the engine fail.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

import anyio
import anyio.to_thread
import msgspec
import numpy as np

from flash.config import waits
from flash.config.tree import Config
from flash.errors import (
    ConfigError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    EngineRefusal,
    FlashError,
    WeightsError,
)
from flash.foreign import grammars, vllm, vllm_processes
from flash.rollout.engine import Pressure, Progress, ResponseRequest, TokenTally
from flash.rollout.vllm.processes import CORES, EngineProcesses
from flash.rollout.vllm.start import TIES, configure, engine_environment
from flash.rollout.vllm.state import Adapter, Adapters, PressureGauge, StepWatch
from flash.sampling import Kept, Routes, Sampling, join_kept
from flash.types import Completion, Published, VersionRun
from flash.waiting import deadline, unwrapped_group
from flash.weights.versions import LoadedWeights, LoadFailure, UpdateInfo, check_canary, decode_update

FIRST_VERSION = -1
"""Version of an engine that has not loaded a version yet, so that it has the weights of the model folder."""
CANARY_PRIORITY = -1
"""Priority of the canary in vLLM: before every sample (0), so that it never waits for a running sequence to end."""
GOOD_ENDS = ("stop", "length")
"""vLLM's finish reasons of a complete response. Any other reason means that vLLM has given up the response."""
SEEDS = 1 << 63
"""Number of different seeds that torch's generators accept."""
TOKENS_PER_LETTER = 8
"""Largest number of tokens that one character of a text may take: one for each of its four bytes, and as many special
tokens that have no text."""
SECOND_LOOK_S = 1.0
"""Seconds until an engine that seems to hang is checked once more. If the event loop was blocked, it first has to read
the reports of steps that the engine has sent meanwhile."""


class VLLMEngine:
    """An inference engine that vLLM runs in processes of its own, with the weights of one policy version at a time.

    Args:
        config: the configuration of the run.
        index: number of this engine among all engines of the run. `reassign` changes it.
        gpus: indices of the engine's GPUs among the GPUs that this process sees; empty on the CPU.
        remember: called in a thread with the process id of the engine's core. The function records which shared memory
            the engine's processes use, so that this memory is freed with the job if the processes are killed. It is
            called repeatedly while the engine starts, because this process may be killed together with the core, and
            once at the end of the start.
        cpus: CPU cores of all engines, if they compute on the CPU; None: the cores of this process.
        ends: tokens that end a response, in addition to the end tokens in the model's files.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        gpus: Sequence[int] = (),
        remember: Callable[[int], None] = lambda core: None,
        cpus: Sequence[int] | None = None,
        ends: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._index = index
        self._gpus = list(gpus)
        self._remember = remember
        self._cpus = cpus
        self._llm: Any = None
        """vLLM's `AsyncLLM`; None before the start and after `close`."""
        self._version = FIRST_VERSION
        self._salt = FIRST_VERSION
        """Version whose weights will compute a new request. As soon as a swap has paused the engine, this is the
        version that is being loaded. vLLM shares its KV cache only between requests with the same salt."""
        self._joined: dict[str, Any] | None = None
        """`UpdateInfo.init` with which the workers were last initialised; None if they never were. It changes when
        other trainer ranks publish the weights."""
        self._adapters = Adapters(config.adapters)
        """LoRA adapters that the engine holds, at most `config.adapters` (0: it loads whole models), and their numbers
        of requests."""
        # This object checks the fingerprint of each load. `exact=True`: the fingerprint must equal the published one,
        # as it can for an adapter in a single worker. None: the first load shows if the two can be equal.
        self._loaded = LoadedWeights(exact=True if config.adapters and config.engine.tensor_parallel == 1 else None)
        self._request_ids = itertools.count()
        self._sampling = SamplingParameters(ends)
        """Maker of vLLM's parameters for requests."""
        self._closing = False
        """True if the engine is being closed, so that failing requests are no sign of a death."""
        self._processes = EngineProcesses(self._die)
        self._steps = StepWatch(waits.hang_s(config))
        """Watch of the time since the last step, by which `wait_dead` finds an engine that hangs."""
        self._death: EngineDeadError | None = None
        """Error that says how the engine died; None while it lives, and also after a `close` without a death."""
        self._died = anyio.Event()
        """Event that is set when `_death` is set."""
        self._answer_scope: anyio.CancelScope | None = None
        """Scope of the start or swap that waits for vLLM's answers. `_die` cancels it."""
        self._gauge = PressureGauge()
        """Computes the engine's load (`pressure`) from the numbers of each step."""
        self._replays = grammars.GrammarReplays()
        """Maker of replays. A replay runs the grammar of a response over its sampled tokens once more, and so finds the
        tokens that could have been drawn: vLLM itself does not report them."""

    @property
    def version(self) -> int:
        """Policy version that is loaded and verified; `FIRST_VERSION` before the first load."""
        return self._version

    @property
    def pressure(self) -> Pressure:
        """Load of the engine at the end of its last step."""
        return self._gauge.pressure

    async def start(self) -> None:
        """Start the processes and load the model. The engine is then ready to generate.

        If the start fails or is cancelled, all processes are ended.

        Raises:
            ConfigError: vLLM has no attention for this model on this machine, or refuses an argument.
            DeadlineError: the engine was not ready within deadlines.engine_start.
            EngineDeadError: a process of the engine was killed; another start may work.
            EngineError: vLLM refused its configuration or failed; the reason is in its log.
        """
        seconds = self._config.deadlines.engine_start
        try:
            with deadline(seconds, f"engine {self._index} to start", "vLLM's log above") as self._answer_scope:
                async with unwrapped_group() as group:
                    group.start_soon(self._processes.follow_start, self._remember)
                    # vLLM's constructor blocks until the model is loaded, so it runs in a thread. This is possible
                    # because it binds nothing to an event loop and installs no signal handler. vLLM's tasks on the loop
                    # start with the first call below.
                    await anyio.to_thread.run_sync(self._construct, abandon_on_cancel=True)
                    group.cancel_scope.cancel()
                self._processes.watch()
                self._gauge.set_cache(vllm.cache_tokens(self._llm))
                # The first call starts vLLM's reading task, without which an engine's death goes unnoticed.
                await self._llm.get_supported_tasks()
                await self._llm.update_weight_version(str(FIRST_VERSION))
                await anyio.to_thread.run_sync(self._remember, self._processes.core)
        except Exception as error:
            # vLLM's start raises errors of many types, such as ValueError and errors of pydantic. The cause must be
            # found before `_abandon_start` kills the processes.
            killed = self._processes.killed_in_start(error)
            await self._abandon_start()
            if killed is not None:
                raise EngineDeadError(f"engine {self._index} is dead: while it started, {killed}") from error
            self._check_death()
            if isinstance(error, DeadlineError | ConfigError):
                raise
            raise EngineError(f"engine {self._index} did not start: {error}; see vLLM's log above") from error
        except BaseException:
            # After a cancellation, no other code would end the processes that have started.
            await self._abandon_start()
            raise
        finally:
            self._answer_scope = None

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response: pieces while it is sampled, then the completion. Implements `Engine.generate`.

        The response ends with an end token or a stop text, or when it reaches the token limit or the context length. If
        the caller cancels or closes the iterator, the request is aborted in vLLM. Raises EngineRefusal if the prompt
        does not fit or vLLM refuses the request, EngineDeadError if the engine does not run (any more), and EngineError
        if vLLM has failed the request or returned unusable results.
        """
        self._check_alive()
        check_prompt(request.prompt, self._config.model.max_length)
        llm, vocabulary = self._llm, vllm.vocabulary(self._llm)
        request_id = f"{self._index}.{next(self._request_ids)}"
        token_ids: list[int] = []
        logprobs: list[float] = []
        kept: list[Kept] = []
        finished = False
        queue: Any = None
        self._steps.begin_request(anyio.current_time())
        adapter = self._adapters.begin_request()
        try:
            # Because of the salt, a new request does not use the cache of older weights, which a swap may have kept.
            prompt = {"type": "token", "prompt_token_ids": request.prompt, "cache_salt": str(self._salt)}
            parameters = self._sampling.of(request, vocabulary)
            # From here on the request is in the engine's process; its tokens come back through `queue`.
            reasoning = {} if request.grammar is None else grammars.reasoning_arguments(request.grammar.reasoning)
            queue = await llm.add_request(
                request_id, prompt, parameters, lora_request=adapter.lora_request, **reasoning
            )
            # If the request has moved here, a stop text may have begun in the tokens that the other engine has sampled.
            vllm.search_stop_text_in_prompt(llm, queue, request.prompt, stop_text_tokens(request))
            starts = vllm.version_starts(llm, queue)
            forget = vllm.trim_logprobs(llm, queue) if request.sampling.has_kept_sets else None
            replay = None
            # With `top_k`, the log-probs show the kept sets. At temperature 0 nothing is drawn, or trained.
            if request.grammar is not None and not (forget or request.sampling.temperature == 0):
                begun = request.prompt, request.generated, reasoning
                replay = await self._replays.begin(llm, parameters, *begun)
            while True:
                output = queue.get_nowait() or await queue.get()
                piece = output.outputs[0]
                start = len(token_ids)
                token_ids += piece.token_ids
                new, new_kept = read_logprobs(piece.logprobs, piece.token_ids, request.sampling, vocabulary)
                logprobs += new
                if replay is not None:
                    new_kept = Kept.of_masks(await replay.masks(piece.token_ids), piece.token_ids)
                if new_kept is not None:
                    kept.append(new_kept)
                if forget is not None:
                    # Free vLLM's memory for the log-probs that were just read.
                    forget()
                if output.finished:
                    break
                versions = version_runs(adapter.version_starts or starts(), start, len(token_ids))
                yield Progress(piece.token_ids, new, versions, new_kept)
            finished = True
        except Exception as error:
            # Every error is caught, because vLLM's errors have no common base class.
            raise self._flash_error(error) from error
        finally:
            self._steps.end_request()
            # An unfinished request is aborted: vLLM has failed, or the caller has closed or cancelled this iterator.
            if not finished:
                await self._abort(request_id, queue, request.tally)
            self._adapters.end_request(adapter)
        # When an engine is closed or dies, vLLM also ends its requests as if they were finished.
        if piece.finish_reason not in GOOD_ENDS:
            self._check_alive()
        finish = read_finish(piece, request, len(token_ids), f"request {request_id} of engine {self._index}")
        spans = adapter.version_starts or [(span.version, span.start) for span in piece.weight_versions or ()]
        all_kept = join_kept(kept, [one.tokens for one in kept])
        replays = self._config.rollout.routing_replay
        routes = read_routes(piece, len(request.prompt) + len(token_ids) - 1) if replays else None
        yield Completion(token_ids, logprobs, version_runs(spans, 0, len(token_ids)), finish, all_kept, routes)

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Replace the weights by the weights of a published version. Implements `Engine.load`.

        `keep_cache`: True if running sequences keep the KV cache that was computed with the old weights. New requests
        never use the KV cache of older weights. After an error the weights are undefined. If the engine was paused, it
        stays paused until it is closed or a later load succeeds. If the caller is cancelled, the engine counts as dead,
        because its weights are unknown.

        Returns the mean absolute difference between the engine's and the trainer's log-probs of the canary, in nats.
        Raises WeightsError if the version is damaged or the loaded weights are wrong, EngineDeadError if the engine has
        died or was too slow to get the version, and EngineError or DeadlineError if the load has failed otherwise.
        """
        self._check_alive()
        version = published.version
        observed, held, adapter = list[float](), list[list[int]](), self._adapters.newest
        waited_for, look_at = f"engine {self._index} to load version {version}", "vLLM's log and the trainer's rank 0"
        try:
            info = decode_update(published.update_info)
            # An engine with several adapters may have to wait until the requests under an old adapter have ended.
            emptying = waits.emptying_s(self._config) if self._adapters.several else 0.0
            with self._answer_deadline(emptying + self._config.deadlines.swap, waited_for, look_at):
                tokens = published.canary.token_ids
                observed, held, adapter = await self._swap(info, version, tokens, keep_cache=keep_cache)
        except FlashError:
            raise
        except Exception as error:
            # An error in one of vLLM's workers arrives as a bare Exception.
            raise self._swap_error(error, version) from error
        except anyio.get_cancelled_exc_class():
            # The engine is paused now, and its weights are unknown, so it cannot be used again.
            self._die("it was left in the middle of a swap")
            raise
        finally:
            # An engine with several adapters serves on after a failure, too, so it must go on making steps.
            if self._adapters.several:
                self._steps.resume(anyio.current_time())
        self._steps.resume(anyio.current_time())
        self._loaded.check(info.fingerprint, held, engine=self._index, version=version)
        gap = check_canary(published.canary, observed, engine=self._index, version=version)
        self._version = version
        self._salt, self._adapters.newest = version, adapter
        return gap

    @contextmanager
    def _answer_deadline(self, seconds: float, what: str, look_at: str) -> Generator[None]:
        """End the block, which waits for vLLM's answers, at a deadline or when the engine dies.

        When the engine dies, `_die` cancels the scope, because vLLM never answers calls to a dead engine. `what` and
        `look_at` are the parts of the DeadlineError's message.

        Raises:
            DeadlineError: vLLM took longer than `seconds`.
            EngineDeadError: the engine has died meanwhile.
        """
        try:
            with deadline(seconds, what, look_at) as self._answer_scope:
                yield
        except DeadlineError:
            # `deadline` raises this error also if `_die` has cancelled the scope.
            self._check_alive()
            raise
        finally:
            self._answer_scope = None

    def reassign(self, number: int) -> None:
        """Set the engine's number in the run, which error messages contain. Running requests continue."""
        self._index = number

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine is dead, and return the error that says how it died.

        Waits for the death of a process, and watches that the engine makes steps while it has requests. If it makes no
        step for `waits.hang_s`, it counts as dead.
        """
        while self._death is None:
            with anyio.move_on_after(self._steps.seconds_left(anyio.current_time())):
                await self._died.wait()
            if self._death is None and not self._steps.seconds_left(anyio.current_time()):
                await anyio.sleep(SECOND_LOOK_S)
                if not self._steps.seconds_left(anyio.current_time()):
                    self._die(f"it has made no step for {waits.hang_s(self._config):g} s, while requests run")
        return self._death

    async def close(self) -> None:
        """End the engine and its processes. Running requests fail. Closing twice does nothing."""
        self._closing = True
        self._processes.unwatch()
        llm, self._llm = self._llm, None
        if llm is not None:
            vllm.fail_requests(llm)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._shut_down, llm)
            if self._death is not None:
                # Drop the traceback and the causes: their frames hold the AsyncLLM, which would then never be
                # collected.
                self._death.__traceback__ = self._death.__cause__ = self._death.__context__ = None
            # An AsyncLLM shuts down once more when it is collected. At the end of the interpreter that would fail.
            del llm
            gc.collect()

    def _shut_down(self, llm: Any) -> None:
        """End all processes. This blocks, so it runs in a thread.

        Half of deadlines.close is for an orderly end, which frees shared memory. After that the processes are killed.
        """
        llm.shutdown(timeout=self._config.deadlines.close / 2)
        self._processes.end(self._config.deadlines.close / 2)

    def _construct(self) -> None:
        """Build the AsyncLLM. Blocks until the model is loaded, in a thread, which may outlive a failed start."""
        with engine_environment(self._config, self._cpus), self._processes.starting():
            make_llm = configure(self._config, self._index, self._gpus, self._on_step)
            vllm_processes.start_cores_with(CORES)
            if not self._closing:
                self._llm = make_llm()
        if self._closing and self._llm is not None:
            # The start was given up meanwhile, so no other code ends these processes.
            self._llm.shutdown(timeout=0)

    def _on_step(self, stats: Any) -> None:
        """Note a step: the numbers that show the engine's load, and the time, by which hangs are detected.

        vLLM calls this with its `SchedulerStats` after each step.
        """
        self._gauge.read(**vllm.step_numbers(stats))
        self._steps.step(anyio.current_time())

    def _die(self, cause: str) -> EngineDeadError:
        """Mark the engine as dead, end its requests, and return the error that says how it died.

        Wakes `wait_dead` and a waiting start or swap. If the engine is dead already, the error with the first cause is
        returned.
        """
        if self._death is None:
            self._processes.unwatch()
            self._death = EngineDeadError(f"engine {self._index} is dead: {cause}; vLLM's log above may say more")
            self._died.set()
            if self._llm is not None:
                vllm.fail_requests(self._llm)
            if self._answer_scope is not None:
                # vLLM never completes calls to an engine that has died.
                self._answer_scope.cancel()
        return self._death

    async def _abandon_start(self) -> None:
        """End all processes of a start that has failed, also those that the thread of the start is about to start."""
        self._closing = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._processes.end_starting, self._config.deadlines.close)
        await self.close()

    async def _swap(
        self, info: UpdateInfo, version: int, canary: Sequence[int], *, keep_cache: bool
    ) -> tuple[list[float], list[list[int]], Adapter]:
        """Pause the engine, load a version, and resume. `load` calls this, and checks the results.

        If the engine holds several adapters, a new one is loaded without a pause, and gets requests only when `load`
        has checked it.

        Args:
            info: the place from which the workers fetch the version.
            version: number of the version.
            canary: token ids of the canary.
            keep_cache: True if running sequences keep the KV cache that was computed with the old weights.

        Returns:
            The engine's log-probs of the canary tokens after the first one, the fingerprint of each worker's weights,
            and the adapter of the version (number 0 for a whole model).

        Raises the errors of `_load_error` if a worker cannot load the version, and any error of vLLM.
        """
        llm, pauses = self._llm, not self._adapters.several
        adapter, dropped = await self._adapters.wait_and_add(version)
        if pauses:
            # No other task runs between these two lines: requests that come from now on are behind the pause in vLLM's
            # queue, so they are computed with the new weights, as the new salt says.
            self._salt, self._adapters.newest = version, adapter
            await vllm.pause(llm, keep_cache=keep_cache)
        # The watch for hangs stops only after the pause, because the pause waits for the running step, which may hang.
        self._steps.pause()
        if pauses and not keep_cache:
            # vLLM preempts all sequences here to drop their cache. These preemptions do not mean that the cache is
            # full, so the gauge must ignore them.
            self._gauge.excuse_preemptions()
        if info.init is not None and info.init != self._joined:
            # The workers join once per publisher. After the trainer ranks have restarted, the publisher is a new one.
            await vllm.join_transfer(llm, info.init)
            self._joined = info.init
        failure, held = await vllm.update_weights(llm, info.update, str(version), adapter.number, dropped)
        if failure is not None:
            raise self._load_error(LoadFailure.from_plain(failure), version)
        # The canary is added before the engine resumes, so that it runs in the first step.
        queue = await llm.add_request(
            f"{self._index}.canary.{version}",
            {"type": "token", "prompt_token_ids": list(canary)},
            vllm.scoring_parameters(),
            lora_request=adapter.lora_request,
            priority=CANARY_PRIORITY,
        )
        if pauses:
            await llm.resume_generation()
        output = await queue.get()
        positions = output.prompt_logprobs
        observed = [positions[at][token].logprob for at, token in enumerate(canary) if at > 0]
        return observed, held, adapter

    async def _abort(self, request_id: str, queue: Any, tally: TokenTally) -> None:
        """Abort a request in vLLM, and add its sampled tokens that were in no piece yet to `tally.lost`.

        This also works while the caller is cancelled. `queue` has the request's output; it is None if vLLM has not
        accepted the request.
        """
        if self._llm is None or self._death is not None:
            return
        # If the engine cannot be reached, there is nothing left to abort.
        with anyio.CancelScope(shield=True), suppress(Exception):
            await self._llm.abort(request_id)
            if queue is not None:
                tally.lost += vllm.take_undelivered(queue)

    def _check_death(self) -> None:
        """Raise EngineDeadError if the engine has died."""
        if self._death is not None:
            raise self._death

    def _check_alive(self) -> None:
        """Raise EngineDeadError if the engine has died, is closed or was not started."""
        self._check_death()
        if self._llm is None:
            raise EngineDeadError(f"engine {self._index} is closed, or was not started")

    def _flash_error(self, error: Exception) -> FlashError:
        """Return the `FlashError` by which the proxy learns of an error of vLLM.

        If the error shows that the engine's core has died, the engine is also marked as dead.
        """
        if isinstance(error, FlashError):
            return error
        if vllm.is_core_death(error):
            # Requests of an engine that is being closed end with the same error.
            if self._closing:
                return EngineDeadError(f"engine {self._index} is closed")
            return self._die(self._processes.how_core_ended())
        if vllm.is_refusal(error):
            return EngineRefusal(f"engine {self._index} refused a request: {error}")
        return EngineError(f"engine {self._index} failed a request: {type(error).__name__}: {error}")

    def _swap_error(self, error: Exception, version: int) -> FlashError:
        """Return the error that `load` raises for an error of vLLM in a swap to `version`."""
        typed = self._flash_error(error)
        if isinstance(typed, EngineDeadError):
            return typed
        return self._load_error(LoadFailure("failed", vllm.worker_error(error)), version)

    def _load_error(self, failure: LoadFailure, version: int) -> FlashError:
        """Return the error that `load` raises for a failure that a worker reported.

        If the failure is `gone` (the trainer no longer holds the version), the engine is also marked as dead, so that
        its requests move to other engines and it is restarted.
        """
        if failure.kind == "gone":
            # The engine was too slow, for example because its processes were stopped for some time. A restarted engine
            # loads the newest version.
            return self._die(f"it came too late for version {version} ({failure.message})")
        message = f"engine {self._index} could not load version {version}: {failure.message}"
        # A damaged version is damaged for every engine, so the error stops the run. Any other failure concerns only
        # this engine.
        return WeightsError(message) if failure.kind == "damaged" else EngineError(message)


class FixedEngine(VLLMEngine):
    """A `VLLMEngine` that keeps the weights of the model folder, for runs that only sample (`flash.run.sampling`)."""

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Label tokens with the version's number, but load no weights. Returns 0. Raises EngineDeadError if dead."""
        self._check_alive()
        await self._llm.update_weight_version(str(published.version))
        self._version = self._salt = published.version
        return 0.0


# -- requests and responses in the form of vLLM ----------------------------------------------------------------------


class SamplingParameters:
    """Makes vLLM's parameters for requests. Equal parameters are one object, because making them takes time.

    Args:
        end_tokens: tokens that end a response, in addition to the end tokens in the model's files.
    """

    def __init__(self, end_tokens: Sequence[int] = ()) -> None:
        self._end_tokens = tuple(end_tokens)
        self._cache: dict[tuple[Sampling, int], Any] = {}
        """vLLM's parameters by their settings and the largest number of tokens."""

    def of(self, request: ResponseRequest, vocabulary: int) -> Any:
        """Return vLLM's parameters of a request, for a model with `vocabulary` tokens."""
        sampling = request.sampling
        # vLLM counts new tokens only. To it, tokens that another engine has sampled are part of the prompt. And it
        # refuses a `min_tokens` above `max_tokens`.
        min_tokens = min(max(sampling.min_tokens - request.generated, 0), request.max_new_tokens)
        if request.stop or min_tokens != sampling.min_tokens:
            stop = (*sampling.stop, *request.stop)
            sampling = msgspec.structs.replace(sampling, stop=stop, min_tokens=min_tokens)
        key = sampling, request.max_new_tokens
        parameters = self._cache.get(key) if request.grammar is None else None
        if parameters is None:
            fields = msgspec.structs.asdict(sampling)
            fields |= {name: list(fields[name]) for name in ("stop", "stop_token_ids")} | {
                "logit_bias": dict(fields["logit_bias"])
            }
            fields["stop_token_ids"] += self._end_tokens
            # vLLM returns the log-probs of this many of the most likely tokens. From them `read_logprobs` finds which
            # tokens could have been drawn.
            likeliest = min(sampling.top_k + TIES, vocabulary) if sampling.has_kept_sets else 0
            tag = None if request.grammar is None else request.grammar.tag
            parameters = vllm.sampling_parameters(
                fields, request.max_new_tokens, likeliest=likeliest, tag=tag, generated=request.generated
            )
            # Environments and agents may use any number of different stop texts and forms, which would fill the cache.
            if not request.stop and request.grammar is None:
                self._cache[key] = parameters
        if request.seed is None or sampling.temperature == 0:  # at temperature 0 nothing is drawn
            return parameters
        # A response that has moved here must not use the random numbers of its first tokens again.
        return vllm.with_seed(parameters, (request.seed + request.generated) % SEEDS)


def stop_text_tokens(request: ResponseRequest) -> int:
    """Return how many tokens at the end of the prompt may hold the beginning of a text that ends the response.

    Only the last `request.generated` tokens of the prompt count: other engines have sampled them as the beginning of
    this response, so vLLM has to search in them, too.
    """
    longest = max(map(len, (*request.sampling.stop, *request.stop)), default=1)
    return min(request.generated, TOKENS_PER_LETTER * (longest - 1))


def read_logprobs(
    flat: Any, token_ids: Sequence[int], sampling: Sampling, vocabulary: int
) -> tuple[list[float], Kept | None]:
    """Return the log-probs of sampled tokens, and the other tokens that could have been drawn in their places.

    A token could have been drawn if its probability is above 0. Settings such as `top_k` leave tokens out, and the
    trainer has to normalise over the tokens that were left. The second result is None if the settings leave no token
    out.

    Args:
        flat: vLLM's `FlatLogprobs`: for each position the sampled token, then the most likely tokens.
        token_ids: the sampled tokens.
        sampling: settings of the distribution from which the tokens were drawn.
        vocabulary: number of tokens of the model.

    Raises:
        EngineError: more than `TIES` tokens are exactly as likely as the last token that `top_k` keeps.
    """
    if not sampling.has_kept_sets or not token_ids:
        return flat.logprobs, Kept() if sampling.has_kept_sets else None
    # vLLM lists the sampled token again among the most likely tokens, except in pieces that it has joined.
    ids, logprobs, starts, ends = map(np.array, (flat.token_ids, flat.logprobs, flat.start_indices, flat.end_indices))
    kept = np.isfinite(logprobs)
    # The returned tokens are sorted. If even the last one could have been drawn, then perhaps also tokens that were not
    # returned.
    if kept[ends - 1].any() and sampling.top_k + TIES < vocabulary:
        raise EngineError(
            f"more than {TIES} tokens are exactly as likely as the last one that top_k = {sampling.top_k} keeps, so it "
            "is not known which tokens could have been drawn; use a model.head_dtype or dtype in which logits differ, "
            "or another top_k"
        )
    # Remove both entries of the sampled token: the kept set has only the other tokens.
    kept &= ids != np.repeat(ids[starts], ends - starts)
    return logprobs[starts].tolist(), Kept.of(ids[kept], np.add.reduceat(kept, starts, dtype=np.int64))


def read_routes(piece: Any, computed: int) -> Routes:
    """Return the experts that the engine chose for each token of the prompt and the response, except the last token.

    With `rollout.routing_replay` the trainer sends each token of a mixture-of-experts model to the same experts, so
    that its log-probs agree with the engine's. The model never runs on the last token, because no token is sampled
    after it, so that token has no experts. `computed` is the number of the other tokens. `piece` is the last piece of
    the request, vLLM's `CompletionOutput`.

    Raises:
        EngineError: vLLM returned the experts of another number of tokens.
    """
    experts = piece.routed_experts
    if experts is None or len(experts) != computed:
        count = "none" if experts is None else len(experts)
        raise EngineError(f"vLLM should return the experts of {computed} tokens, but returned those of {count}")
    return Routes.of(experts)


def check_prompt(prompt: Sequence[int], max_length: int) -> None:
    """Raise EngineRefusal if a prompt is empty, or leaves no room for a token in a context of `max_length` tokens."""
    if not 0 < len(prompt) < max_length:
        raise EngineRefusal(
            f"a prompt of {len(prompt)} tokens does not fit: it needs at least 1 token and has to leave room for "
            f"1 more in the context of {max_length} (model.max_length)"
        )


def version_runs(starts: Sequence[tuple[str, int]], first: int, stop: int) -> list[VersionRun]:
    """Return the versions of the response's tokens [first, stop), run-length encoded.

    `starts`: vLLM's version labels in ascending order, each with the index of the first token that it holds for.
    """
    ends = [start for _, start in starts[1:]] + [stop]
    return [
        VersionRun(version=int(label), count=min(end, stop) - max(start, first))
        for (label, start), end in zip(starts, ends, strict=True)
        if min(end, stop) > max(start, first)
    ]


def read_finish(piece: Any, request: ResponseRequest, tokens: int, name: str) -> Literal["stop", "length", "text"]:
    """Return the reason for the end of a response, in the form of `Completion.finish`.

    Args:
        piece: the last piece of the response, vLLM's `CompletionOutput`.
        request: the request.
        tokens: number of tokens of the response.
        name: name of the request and its engine in the error message.

    Raises:
        EngineError: vLLM has ended the response for another reason, such as an abort.
    """
    if piece.finish_reason in GOOD_ENDS:
        by_text = isinstance(piece.stop_reason, str) or piece.stop_reason in request.sampling.stop_token_ids
        return "text" if by_text else piece.finish_reason
    reason = repr(piece.finish_reason) + (f" ({piece.stop_reason})" if piece.stop_reason is not None else "")
    raise EngineError(
        f"{name} was ended by vLLM, though it was not complete: vLLM says {reason} after {tokens} of at most "
        f"{request.max_new_tokens} tokens, on a prompt of {len(request.prompt)}; vLLM's log above may say why, "
        "VLLM_LOGGING_LEVEL=INFO shows more of it"
    )
