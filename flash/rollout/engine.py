"""Engine: the protocol between the proxy and an inference engine, and the requests and responses that pass it.

The proxy calls `generate` for many requests at once. The supervisor calls `start` and `close`, and has the proxy call
`load` for each policy version. `load` swaps weights under running sequences: the engine pauses between two steps, loads
and goes on, and later tokens carry the new version.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Protocol

import msgspec

from flash.errors import EngineDeadError
from flash.sampling import PLAIN, Kept, Sampling
from flash.types import Completion, Published, VersionRun


def ignore_tokens(tokens: Sequence[int]) -> None:
    """Do nothing: the caller does not need the tokens before the response is complete."""


def ignore_count(tokens: int) -> None:
    """Do nothing: the caller does not count lost tokens."""


class ResponseRequest(msgspec.Struct, frozen=True):
    """A request for one response of the policy. It goes from the episode through the proxy to an engine.

    If the request moves to another engine, the proxy sends that engine a copy in which `prompt`, `max_new_tokens` and
    `generated` account for the tokens that were sampled before.
    """

    prompt: list[int]
    """Token ids of the prompt, followed by the `generated` tokens of the response that exist already."""
    max_new_tokens: int
    """Most tokens to sample, without the `generated` tokens."""
    key: int
    """Number that names the response; the same in every attempt at its task. A simulated engine derives the length of
    the response from it. Other engines ignore it."""
    sampling: Sampling = PLAIN
    """Distribution that each token is drawn from."""
    stop: tuple[str, ...] = ()
    """Texts that end the response, beside `sampling.stop`. The response ends with the tokens of the text."""
    seed: int | None = None
    """Seed of the random draws: the tokens then depend on it and on the weights alone. None: the engine uses its own
    random state, so the tokens also depend on the other requests that it serves."""
    group_id: int = 0
    """Group of the sample. The router prefers the engine that has served the group before."""
    task_id: int = 0
    """Task of the sample. The router prefers the engine that has served the task before. Ids grow with time, so the
    router also orders its wait queue by (`group_id`, `task_id`)."""
    min_version: int = 0
    """Oldest policy version that may sample any of the tokens."""
    timeout_s: float = math.inf
    """Seconds until the proxy aborts the request. The time in the wait queue counts; an outage, in which no engine
    serves, does not."""
    on_tokens: Callable[[Sequence[int]], None] = ignore_tokens
    """Called by the proxy with the new tokens of each `Progress`. The last tokens come with the `Completion` only."""
    on_lost: Callable[[int], None] = ignore_count
    """Called by the engine when the request is aborted, with the number of sampled tokens that were in no piece yet.
    The episode gives this function."""
    generated: int = 0
    """Number of tokens at the end of `prompt` that belong to this response: earlier engines have sampled them."""


class Progress(msgspec.Struct, frozen=True):
    """A piece of a response that is still being generated."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token, under the distribution that it was drawn from."""
    versions: list[VersionRun]
    """Policy version of each token, run-length encoded."""
    kept: Kept | None = None
    """Tokens that could have been drawn at each position; None unless the request's sampling leaves some out."""


class Pressure(msgspec.Struct, frozen=True):
    """Load of an engine, as of its last step."""

    running: int
    """Sequences that it decodes."""
    waiting: int
    """Requests that it has accepted and not begun."""
    kv_used: float
    """Share of the KV cache that is in use, from 0 to 1."""
    preemptions: int
    """Sequences that it has preempted for lack of KV cache, since its start."""
    kv_tokens: int = 0
    """Tokens that the KV cache can hold; 0: the engine does not report it, or the cache never fills."""
    prefix_hit_share: float | None = None
    """Share of the recent prompt tokens that the prefix cache held; None: the engine does not report it."""
    accepted_share: float | None = None
    """Share of the recent draft tokens that were accepted; None: there were none."""
    drafted: int = 0
    """Draft tokens since the start."""
    accepted: int = 0
    """Draft tokens that were accepted, since the start."""


class Engine(Protocol):
    """An inference engine that serves many requests at once.

    All methods may raise `EngineError`, and `EngineDeadError` if the engine is gone for good. `fake_engine.FakeEngine`
    is one for tests.
    """

    @property
    def version(self) -> int:
        """Policy version that is loaded and verified; −1 before the first `load`."""
        ...

    async def start(self) -> None:
        """Load the model and be ready to generate. Bounded by deadlines.engine_start."""
        ...

    @property
    def pressure(self) -> Pressure:
        """Load of the engine, as of its last step."""
        ...

    def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response: any number of `Progress`, then one `Completion` with all of it.

        The `Completion` holds the new tokens only, not the `request.generated` ones. Closing or cancelling the iterator
        aborts the request in the engine.
        """
        ...

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Swap to a published version while sequences run. Returns the mean log-prob difference on the canary, in nats.

        Args:
            published: the version.
            keep_cache: keep the KV cache of the running sequences; else it is computed again under the new weights.

        Raises:
            WeightsError: a named tensor fails its checksum, or the canary differs by more than the tolerance.
            EngineError, DeadlineError: the swap failed for another reason, or took too long. The engine serves nothing
                before it has loaded a version.
        """
        ...

    def reassign(self, number: int) -> None:
        """Give the engine the number that it has at the next hub. Its requests go on."""
        ...

    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine dies by itself or hangs, and return the error that says how it died."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
