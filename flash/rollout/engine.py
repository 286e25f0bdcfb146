"""What the rollout side needs of an inference engine, in five methods and two properties.

An engine serves many `generate` calls at once. `load` swaps weights under sequences in flight: it pauses between two
engine steps, loads, resumes; sequences go on and their later tokens carry the new version.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from flash.errors import EngineDeadError
from flash.sampling import PLAIN, Kept, Sampling
from flash.types import Completion, Published, VersionRun


def ignored(tokens: int) -> None:
    """For who does not ask what was lost."""


class GenerateRequest(msgspec.Struct, frozen=True):
    """One response asked of an engine."""

    prompt: list[int]
    """Token ids."""
    max_new_tokens: int
    """Without `done`."""
    key: int
    """Names the response: equal whenever the same one is asked for again. A simulated engine derives its length from
    it; one that samples need not look at it."""
    sampling: Sampling = PLAIN
    stop: tuple[str, ...] = ()
    """Texts of which the first ends the response, beside those of its sampling; its tokens are the response's last."""
    done: int = 0
    """The last tokens of the prompt that are the response's own, sampled before its request moved to this engine."""
    seed: int | None = None
    """What the tokens are drawn with, so that they depend on it and on the weights alone. None: with the engine's own
    randomness, so that they also depend on what else it serves."""
    lost: Callable[[int], None] = ignored
    """Told, when the request is aborted, how many tokens had been sampled for it that were in no piece yet."""


class EpisodeRequest(NamedTuple):
    """One response that an episode asks of its node's engines."""

    request: GenerateRequest
    """What to sample."""
    min_version: int
    """The oldest engine version that may sample any of its tokens."""
    affinity: tuple[int, int]
    """The group's and the task's number; the engine that served them before is preferred."""
    progress: Callable[[Sequence[int]], None]
    """Told the new tokens as they come; the last ones come with the completion."""
    timeout: float
    """Seconds until the request is aborted; waiting for an engine counts, but not a time without engines that ends."""


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

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response: any number of `Progress`, then one `Completion` that holds all of it.

        `Completion` holds the new tokens, without `request.done`. Closing or cancelling the iterator aborts the request
        in the engine.
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
