"""Engine: the interface between the proxy of a node and an inference engine, with its requests and responses.

The proxy (`flash.rollout.proxy.LLMProxy`) calls `generate` for many requests at once. The supervisor
(`flash.rollout.supervisor`) calls `start` and `close`, and lets the proxy call `load` for each policy version, which is
the state of the weights after one training step.

`load` is also called a *swap*: it replaces the weights while sequences run. The engine pauses between two steps, loads
the weights and continues, and later tokens are labelled with the new version. An engine that holds several LoRA
adapters loads a new one without a pause. In such an engine each sequence ends with the version with which it began.

The *canary* is a fixed short text that is published with each version, with the trainer's log-probs of its tokens
(`Published.canary`). After each load the engine must give it nearly the same log-probs. If the differences are too
large, the engine does not compute with the published weights, and its samples would be wrong.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

from flash.errors import EngineDeadError
from flash.sampling import PLAIN, Grammar, Kept, Sampling
from flash.types import Completion, Published, VersionRun


def ignore_tokens(tokens: Sequence[int]) -> None:
    """Do nothing. Default of `ResponseRequest.on_tokens`, for callers that only need the complete response."""


class TokenTally:
    """Counter that a caller gives to engines with its requests, and may read at any time.

    Engines only add to it, so no engine has to call a function of the episode.
    """

    def __init__(self) -> None:
        self.lost = 0
        """Number of tokens that engines have sampled and that no caller received, because the request was aborted."""


class ResponseRequest(msgspec.Struct, frozen=True):
    """A request for one response of the policy. The episode gives it to the proxy, which gives it to an engine.

    `group_id`, `task_id`, `min_version`, `timeout_s` and `on_tokens` are for the proxy and its router; engines ignore
    them. If the request moves to another engine, the proxy sends that engine a copy. In the copy, the tokens that
    earlier engines have sampled are appended to `prompt`, counted in `generated`, and subtracted from `max_new_tokens`.
    """

    prompt: list[int]
    """Token ids of the prompt, followed by the `generated` tokens of the response that exist already."""
    max_new_tokens: int
    """Largest number of tokens to sample, without the `generated` tokens."""
    key: int
    """Number that identifies the response. The number is equal in every attempt at the task. A simulated engine derives
    the length of the response from it, so that simulations can be repeated. Other engines ignore it."""
    sampling: Sampling = PLAIN
    """Temperature and other settings of the distribution that each token is drawn from."""
    stop: tuple[str, ...] = ()
    """Texts that end the response, beside `sampling.stop`. The response ends with the tokens of the text."""
    grammar: Grammar | None = None
    """Form that the response must have; None: every text is allowed."""
    seed: int | None = None
    """Seed of the random draws: the tokens then depend only on the seed, the prompt and the weights. None: the engine
    uses its own random state, so the tokens also depend on the other requests that it serves."""
    group_id: int = 0
    """Group of the sample. All samples of a group have the same prompt, so the router prefers the engine that has
    served the group before: that engine has the prompt in its cache."""
    task_id: int = 0
    """Task of the sample. The router prefers the engine that has served earlier turns of the task, because their tokens
    are in its cache. Ids grow with time, so the router also orders its wait queue by (`group_id`, `task_id`)."""
    min_version: int = 0
    """Oldest policy version that may sample any of the tokens. The hub sets it when it leases the task to this node, so
    that the tokens are not too old when they are trained. An engine with an older version does not get the request."""
    timeout_s: float = math.inf
    """Seconds until the proxy aborts the request. The time in the wait queue counts. An outage, in which no engine
    serves, does not count."""
    on_tokens: Callable[[Sequence[int]], None] = ignore_tokens
    """Function that the proxy calls with the new tokens of each `Progress`. The function is not called for the last
    tokens of the response, which only the `Completion` holds. If the function raises an error, the request is aborted,
    and `generate` of the proxy raises this error."""
    tally: TokenTally = msgspec.field(default_factory=TokenTally)
    """Counter of the caller. If the request is aborted, the engine adds the sampled tokens that were in no `Progress`
    yet to `tally.lost`. All requests of an episode share one counter."""
    generated: int = 0
    """Number of tokens at the end of `prompt` that belong to this response: earlier engines have sampled them."""


class Progress(msgspec.Struct, frozen=True):
    """A piece of a response that is still being generated: the tokens since the last piece."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token under the distribution that it was drawn from, so after temperature and `top_k`."""
    versions: list[VersionRun]
    """Policy version of each token, run-length encoded."""
    kept: Kept | None = None
    """For each position, the other tokens that could have been drawn. The trainer normalises over the same tokens. None
    if neither the request's sampling nor a grammar leaves a token out."""


class Pressure(msgspec.Struct, frozen=True):
    """Load of an engine at the end of its last step.

    From `waiting`, `kv_used` and `kv_tokens` the proxy computes how many requests the engine may hold
    (`flash.rollout.concurrency`). The other numbers are for people and metrics. A *draft token* is a guess of
    speculative decoding, which the model accepts or rejects.
    """

    running: int
    """Number of sequences that the engine decodes."""
    waiting: int
    """Number of requests that the engine has accepted and not begun."""
    kv_used: float
    """Share of the KV cache that is in use, from 0 to 1."""
    preemptions: int
    """Number of sequences that the engine has preempted for lack of KV cache, since its start."""
    kv_tokens: int = 0
    """Number of tokens that the KV cache can hold. 0 if the engine does not report it, or if the cache never fills."""
    prefix_hit_share: float | None = None
    """Share of the recent prompt tokens that the prefix cache held. None if the engine does not report it."""
    accepted_share: float | None = None
    """Share of the recent draft tokens that were accepted. None if there were no draft tokens."""
    drafted: int = 0
    """Number of draft tokens since the start of the engine."""
    accepted: int = 0
    """Number of draft tokens that were accepted, since the start of the engine."""


class Engine(Protocol):
    """Interface of an inference engine that serves many requests at once.

    `start`, `generate` and `load` may raise `EngineError`. The three methods raise `EngineDeadError` if the engine has
    ended and cannot be used again. `flash.rollout.vllm.engine` implements this interface with vLLM, and `FakeEngine` of
    `flash.rollout.fake_engine` implements it for tests.
    """

    @property
    def version(self) -> int:
        """Policy version that is loaded and verified; -1 before the first `load`."""
        ...

    async def start(self) -> None:
        """Load the model, and return when the engine is ready to generate.

        Raises:
            ConfigError: the model cannot be served on this machine.
            DeadlineError: the engine was not ready within `deadlines.engine_start`.
            EngineError: the engine did not start.
        """
        ...

    @property
    def pressure(self) -> Pressure:
        """Load of the engine at the end of its last step."""
        ...

    def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response: any number of `Progress`, then one `Completion` with all new tokens.

        The `Completion` does not hold the `request.generated` tokens, which earlier engines have sampled. Closing or
        cancelling the iterator aborts the request in the engine. The proxy cancels it to move a request to another
        engine.

        Raises:
            EngineRefusal: the request is invalid, for example too long. Any engine would refuse it.
            EngineDeadError: the engine has died.
            EngineError: the engine has failed this request. Another engine may try.
        """
        ...

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Replace the weights by the weights of a published version, while sequences run.

        The sequences are paused and continue with the new weights. An engine that holds several adapters does not
        pause: its sequences end with the version with which they began. `LLMProxy.load` calls this.

        Args:
            published: the version.
            keep_cache: if True, running sequences keep their KV cache, which was computed with the old weights. If
                False, the cache is computed again with the new weights.

        Returns:
            The mean absolute difference between the engine's and the trainer's log-probs of the canary, in nats.

        Raises:
            WeightsError: a tensor, or the loaded weights as a whole, do not have the checksum that was published with
                the version; or the log-probs of the canary differ by more than its tolerance.
            EngineError: the load failed for another reason.
            DeadlineError: the load took too long.

        After an error the weights are undefined. The engine must then be closed, or load a version successfully, before
        it answers requests again.
        """
        ...

    def reassign(self, number: int) -> None:
        """Set the engine's number in the run, which error messages contain.

        A node that has lost its hub moves to the next hub, where its engines may have other numbers. The supervisor's
        `EnginePlace.renumber` then calls this. Running requests continue.
        """
        ...

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine dies by itself or hangs, and return the error that says how it died.

        `LLMProxy.wait_dead` waits for this, so that the supervisor starts the engine again.
        """
        ...

    async def close(self) -> None:
        """End the engine and its processes. Requests that still run fail. The supervisor also closes a dead engine,
        because its remaining processes hold memory."""
        ...
