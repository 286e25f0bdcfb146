"""A vLLM engine in the node loop: stream, abort, pause → swap → resume, canary.

vLLM's engine core is a child process, its workers are grandchildren; this object owns them. They leave with `close`,
with this process, or take the engine's requests with them when they die on their own.

vLLM stamps each token with the version label that was set at the end of the last weight update. The label only changes
while no step is running, so the stamps are exact.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import os
import re
import signal
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any, Literal

import anyio
import anyio.to_thread

from flash.config.tree import Config
from flash.errors import DeadlineError, EngineDeadError, EngineError, FlashError, WeightsError
from flash.foreign import vllm
from flash.rollout.engine import GenerateRequest, Pressure, Progress, SamplingSettings
from flash.rollout.vllm_pressure import PressureGauge
from flash.rollout.vllm_start import configure, engine_environment
from flash.types import Completion, Published, VersionRun
from flash.waiting import deadline
from flash.weights.canary import check_canary
from flash.weights.update import UpdateInfo, decode_update, place_engine

FIRST_VERSION = -1
"""The version of an engine that loaded none: it serves whatever the model folder holds."""
CANARY_PRIORITY = -1
"""Goes before every sample (0), so that the canary never waits for a running sequence to end."""

_running_cores: set[int] = set()
"""Process ids of this process's started engine cores: the others are still starting."""
_WORKER_ERROR = re.compile(r"Worker failed with error '(.*)', please check the stack trace", re.DOTALL)


class VLLMEngine:
    """One AsyncLLM behind the `Engine` protocol.

    Args:
        config: the run.
        index: this engine's number among all engines of the run.
        gpus: the GPUs it uses, counted among those visible to this process; empty on the CPU.
    """

    def __init__(self, config: Config, index: int, gpus: Sequence[int] = ()) -> None:
        self._config = config
        self._index = index
        self._gpus = list(gpus)
        self._llm: Any = None
        self._version = FIRST_VERSION
        self._joined: dict[str, Any] | None = None
        self._request_ids = itertools.count()
        self._params: dict[SamplingSettings, Any] = {}
        self._closing = False
        self._core: Any = None
        self._core_fd = -1
        self._death: EngineDeadError | None = None
        self._died = anyio.Event()
        self._swap_scope: anyio.CancelScope | None = None
        self._gauge = PressureGauge()

    @property
    def version(self) -> int:
        """The policy version loaded and verified; −1 before the first `load`."""
        return self._version

    @property
    def pressure(self) -> Pressure:
        """As of the engine's last step."""
        return self._gauge.pressure

    async def start(self) -> None:
        """Load the model and be ready to generate.

        vLLM's constructor blocks until the model is loaded, so it runs in a thread; it binds nothing to an event loop
        and installs no signal handler, and what belongs to the loop starts with the first call made here.

        Raises:
            DeadlineError: not ready within deadlines.engine_start.
            EngineError: vLLM refused its configuration or its process ended; the reason is in its log.
        """
        seconds = self._config.deadlines.engine_start
        try:
            with deadline(seconds, f"engine {self._index} to start", "vLLM's log above"):
                await anyio.to_thread.run_sync(self._construct, abandon_on_cancel=True)
                self._watch()
                # The first call starts vLLM's reading task, without which an engine's death goes unnoticed.
                await self._llm.get_supported_tasks()
                await self._llm.update_weight_version(str(FIRST_VERSION))
        except DeadlineError:
            await self._give_up()
            raise
        except Exception as error:  # vLLM's start fails with anything, from ValueError to pydantic's errors
            await self._give_up()
            raise EngineError(f"engine {self._index} did not start: {error}; see vLLM's log above") from error
        except BaseException:  # cancelled: nobody else would end what has started
            await self._give_up()
            raise

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response: any number of `Progress`, then one `Completion` that holds all of it.

        The response ends at the model's end-of-text token, at `max_new_tokens`, or at the end of the context. Its
        deadline is the caller's, who owns the request; closing or cancelling the iterator aborts it in the engine.

        Raises:
            EngineDeadError: the engine is gone.
            EngineError: the engine refuses the request.
        """
        self._check_prompt(request.prompt)
        llm = self._llm
        request_id = f"{self._index}.{next(self._request_ids)}"
        token_ids: list[int] = []
        logprobs: list[float] = []
        finished = False
        try:
            # The salt keeps the prefixes of older weights apart, where a swap kept them.
            prompt = {"type": "token", "prompt_token_ids": request.prompt, "cache_salt": str(self._version)}
            queue = await llm.add_request(request_id, prompt, self._sampling_params(request.sampling))
            starts = vllm.version_starts(llm, queue)
            while True:
                output = queue.get_nowait() or await queue.get()
                piece = output.outputs[0]
                start = len(token_ids)
                token_ids += piece.token_ids
                logprobs += piece.logprobs.logprobs
                if output.finished:
                    break
                versions = _version_runs(starts(), start, len(token_ids))
                yield Progress(piece.token_ids, piece.logprobs.logprobs, versions)
            finished = True
        except Exception as error:  # vLLM's errors have no common base: all of them become ours here
            raise self._typed(error) from error
        finally:
            if not finished:
                await self._abort(request_id)
        spans = [(span.version, span.start) for span in piece.weight_versions or ()]
        yield Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=_version_runs(spans, 0, len(token_ids)),
            finish=self._finish(piece.finish_reason),
        )

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Swap to a published version with sequences in flight; return the largest canary difference.

        The engine pauses between two steps; sequences in flight keep their tokens. Their KV cache is forgotten and
        made again under the new weights, or kept; new requests never share the cache of older weights. After an error
        the engine's weights are undefined, and it stays paused if it was: only `close` is of use then.

        Raises:
            WeightsError: a tensor fails its checksum (named), or the canary differs by more than the tolerance.
            EngineDeadError: the engine died on the way.
            DeadlineError: it took longer than deadlines.swap.
        """
        self._check_alive()
        seconds = self._config.deadlines.swap
        version = published.version
        observed: list[float] = []
        waited_for, look_at = f"engine {self._index} to load version {version}", "vLLM's log and the trainer's rank 0"
        try:
            with deadline(seconds, waited_for, look_at) as self._swap_scope:
                info = decode_update(published.update_info)
                observed = await self._swap(info, version, published.canary.token_ids, keep_cache=keep_cache)
        except DeadlineError:
            self._check_alive()  # its death cancels the swap too
            raise
        except Exception as error:  # whatever went wrong in vLLM's worker arrives as a bare Exception
            raise self._swap_error(error, version) from error
        finally:
            self._swap_scope = None
        gap = check_canary(
            published.canary,
            observed,
            tolerance=self._config.canary_tolerance,
            engine=self._index,
            version=version,
        )
        self._version = version
        return gap

    async def wait_dead(self) -> EngineDeadError:
        """Return, with the reason, when the engine dies on its own. Never returns while it lives."""
        await self._died.wait()
        assert self._death is not None
        return self._death

    async def close(self) -> None:
        """End the engine and its processes. Requests in flight fail; closing twice does nothing."""
        self._closing = True
        self._unwatch()
        llm, self._llm = self._llm, None
        if llm is not None:
            vllm.fail_requests(llm)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._shut_down, llm)
            # AsyncLLM shuts down once more when it is collected, which fails if that is at the interpreter's end.
            del llm
            gc.collect()

    def _shut_down(self, llm: Any) -> None:
        """End all processes; blocks. Half of the time for an orderly end, which frees shared memory; then by force."""
        llm.shutdown(timeout=self._config.deadlines.shutdown / 2)
        if self._core is None:
            return
        _kill_group(self._core.pid)
        self._core.join(self._config.deadlines.shutdown / 2)
        _running_cores.discard(self._core.pid)

    def _construct(self) -> None:
        """Build the AsyncLLM; blocks until the model is loaded. Runs in a thread."""
        with engine_environment(self._config):
            make_llm = configure(self._config, self._index, self._gpus, self._gauge)
            if not self._closing:
                self._llm = make_llm()
        if self._closing and self._llm is not None:
            # The one who waited has left: nobody else knows of these processes.
            self._llm.shutdown(timeout=0)

    def _watch(self) -> None:
        """Notice the engine core's death, through a file descriptor that becomes readable then."""
        self._core = vllm.core_process(self._llm)
        _running_cores.add(self._core.pid)
        self._core_fd = os.pidfd_open(self._core.pid)
        asyncio.get_running_loop().add_reader(self._core_fd, self._on_death)

    def _unwatch(self) -> None:
        if self._core_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._core_fd)
            os.close(self._core_fd)
            self._core_fd = -1

    def _on_death(self) -> None:
        self._unwatch()
        self._death = EngineDeadError(
            f"engine {self._index}: its process {self._core.pid} ended on its own; see vLLM's log above"
        )
        self._died.set()
        if self._swap_scope is not None:
            # vLLM never completes the calls that a dead engine was to answer.
            self._swap_scope.cancel()

    async def _give_up(self) -> None:
        """Leave no process of a start that did not succeed."""
        self._closing = True
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._end_starting)
        await self.close()

    def _end_starting(self) -> None:
        """End the engine cores of this process that are still starting; blocks.

        Ours is not known to us yet, so that other engines' go with it: a failed start ends the run anyway.
        """
        for core in multiprocessing.active_children():
            if core.name.startswith(vllm.CORE_PROCESS) and core.pid not in _running_cores:
                core.kill()
                _kill_group(core.pid)
                core.join(self._config.deadlines.shutdown)

    async def _swap(self, info: UpdateInfo, version: int, canary: Sequence[int], *, keep_cache: bool) -> list[float]:
        """Pause, load, resume; returns the engine's log-probs of the canary."""
        llm = self._llm
        await vllm.pause(llm, keep_cache=keep_cache)
        if not keep_cache:
            self._gauge.all_put_back()
        if info.init is not None and info.init != self._joined:
            placed = place_engine(info.init, self._index, self._config.engine.tensor_parallel)
            await vllm.join_transfer(llm, placed)
            self._joined = info.init
        await vllm.update_weights(llm, info.update, str(version))
        # Asked before the resume, so that it runs in the first step.
        queue = await llm.add_request(
            f"{self._index}.canary.{version}",
            {"type": "token", "prompt_token_ids": list(canary)},
            vllm.scoring_parameters(),
            priority=CANARY_PRIORITY,
        )
        await llm.resume_generation()
        output = await queue.get()
        positions = output.prompt_logprobs
        return [positions[at][token].logprob for at, token in enumerate(canary) if at > 0]

    def _sampling_params(self, sampling: SamplingSettings) -> Any:
        params = self._params.get(sampling)
        if params is None:
            params = vllm.sampling_parameters(sampling.temperature, sampling.max_new_tokens)
            self._params[sampling] = params
        return params

    async def _abort(self, request_id: str) -> None:
        """Free a request's place in the engine, also when the one who asked was cancelled."""
        if self._llm is None or self._death is not None:
            return
        # An engine that cannot be told any more has nothing left to abort.
        with anyio.CancelScope(shield=True), suppress(Exception):
            await self._llm.abort(request_id)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise self._death
        if self._llm is None:
            raise EngineDeadError(f"engine {self._index} is closed, or was not started")

    def _check_prompt(self, prompt: Sequence[int]) -> None:
        self._check_alive()
        longest = self._config.model.max_length
        if not 0 < len(prompt) < longest:
            raise EngineError(
                f"a prompt of {len(prompt)} tokens does not fit: it needs at least 1 token and has to leave room for "
                f"1 more in the context of {longest} (model.max_length)"
            )

    def _finish(self, reason: str | None) -> Literal["stop", "length"]:
        if reason == "stop":
            return "stop"
        if reason == "length":
            return "length"
        self._check_alive()
        raise EngineError(f"engine {self._index} ended a request early: {reason}")

    def _typed(self, error: Exception) -> FlashError:
        """Our name for an error of vLLM's."""
        if isinstance(error, FlashError):
            return error
        if vllm.is_core_death(error):
            return self._death or EngineDeadError(f"engine {self._index} is gone; see vLLM's log above")
        if vllm.is_refusal(error):
            return EngineError(f"engine {self._index} refused a request: {error}")
        return EngineError(f"engine {self._index} failed a request: {type(error).__name__}: {error}")

    def _swap_error(self, error: Exception, version: int) -> FlashError:
        typed = self._typed(error)
        if isinstance(typed, EngineDeadError):
            return typed
        found = _WORKER_ERROR.search(str(error))
        reason = found.group(1) if found else f"{type(error).__name__}: {error}"
        return WeightsError(f"engine {self._index} could not load version {version}: {reason}")


def _version_runs(starts: Sequence[tuple[str, int]], first: int, stop: int) -> list[VersionRun]:
    """Versions of the tokens [first, stop), from vLLM's labels and the tokens at which they begin."""
    ends = [start for _, start in starts[1:]] + [stop]
    return [
        VersionRun(version=int(label), count=min(end, stop) - max(start, first))
        for (label, start), end in zip(starts, ends, strict=True)
        if min(end, stop) > max(start, first)
    ]


def _kill_group(core_pid: int | None) -> None:
    """End what is left of an engine: workers share the process group that their core opened."""
    if core_pid is not None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(core_pid, signal.SIGKILL)
