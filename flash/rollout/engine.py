"""What the rollout side needs of an inference engine, in five methods and two properties.

An engine serves many `generate` calls at once. `load` swaps weights under sequences in flight: it pauses between two
engine steps, loads, resumes; sequences go on and their later tokens carry the new version.
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
    """Most tokens to sample. Does not count the `generated` ones."""
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
    """Called by the engine when the request is aborted, with the number of sampled tokens that were in no piece yet."""
    generated: int = 0
    """Number of tokens at the end of `prompt` that belong to this response: earlier engines have sampled them."""


class Progress(msgspec.Struct, frozen=True):
    """A piece of a response that is still being generated."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[VersionRun]
    """Policy version of each token of this piece, run-length."""
    kept: Kept | None = None
    """Where the request's sampling keeps some tokens only."""


class Pressure(msgspec.Struct, frozen=True):
    """How full an engine is."""

    running: int
    """Sequences it decodes."""
    waiting: int
    """Requests that it has accepted and not begun."""
    kv_used: float
    """Share of its KV cache that is taken, from 0 to 1."""
    preemptions: int
    """Sequences it put back for want of KV cache, since its start."""
    kv_tokens: int = 0
    """Tokens that its KV cache holds, of those that run and of those that ran; 0: it has not told, or never fills."""
    prefix_hit_share: float | None = None
    """Of the prompt tokens of late, those that its prefix cache held; None: it has not told."""
    accepted_share: float | None = None
    """Of the tokens drafted of late, those that were accepted; None: none were drafted."""
    drafted: int = 0
    """Tokens drafted since the start."""
    accepted: int = 0
    """Those of them that stayed."""


class Engine(Protocol):
    """One inference engine. All methods may raise `EngineError`; `EngineDeadError` when it is gone for good."""

    @property
    def version(self) -> int:
        """The policy version loaded and verified; −1 before the first `load`."""
        ...

    async def start(self) -> None:
        """Load the model and be ready to generate. Bounded by deadlines.engine_start."""
        ...

    @property
    def pressure(self) -> Pressure:
        """How full it is, as far as it has told."""
        ...

    def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response: any number of `Progress`, then one `Completion` that holds all of it.

        The `Completion` holds the new tokens only, not the `request.generated` ones. Closing or cancelling the iterator
        aborts the request in the engine.
        """
        ...

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Swap to a published version with sequences in flight; return the canary's mean difference.

        Their KV cache is made again under the new weights, or kept from the old ones.

        Raises:
            WeightsError: a tensor fails its checksum (named), or the canary differs by more than the tolerance.
            EngineError, DeadlineError: it failed for a reason of its own, or took too long; it serves nothing before it
                has loaded a version.
        """
        ...

    def reassign(self, number: int) -> None:
        """From now on it has this number, the next hub's, and goes on with what it does."""
        ...

    async def wait_dead(self) -> EngineDeadError:
        """Return, with the reason, when the engine dies on its own, or hangs. Never returns while it lives."""
        ...

    async def close(self) -> None:
        """End the engine and its processes."""
        ...
