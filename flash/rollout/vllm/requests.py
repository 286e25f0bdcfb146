"""A request as vLLM takes it; the versions of its tokens, and its end, as vLLM tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from flash.errors import EngineError, EngineRefusal
from flash.foreign import vllm
from flash.rollout.engine import GenerateRequest
from flash.types import Sampling, VersionRun

GOOD_ENDS = ("stop", "length")
"""vLLM's words for the ends that a response should have."""
SEEDS = 1 << 63
"""Seeds that torch's generators take."""


class SamplingParameters:
    """vLLM's parameters of requests, made once for all that sample alike."""

    def __init__(self) -> None:
        self._made: dict[tuple[Sampling, int], Any] = {}

    def of(self, request: GenerateRequest) -> Any:
        """Those of a request."""
        alike = request.sampling, request.max_new_tokens
        made = None if request.stop else self._made.get(alike)
        if made is None:
            distribution = msgspec.structs.asdict(request.sampling)
            made = vllm.sampling_parameters(distribution, request.max_new_tokens, request.stop)
            if not request.stop:  # of which there are as many as agents think of
                self._made[alike] = made
        if request.seed is None or request.sampling.temperature == 0:
            return made
        # A response that moved here goes on with other draws than those that its first tokens had.
        return vllm.seeded(made, (request.seed + request.done) % SEEDS)


def check_prompt(prompt: Sequence[int], longest: int) -> None:
    """Raise EngineRefusal for a prompt that does not fit a context of so many tokens."""
    if not 0 < len(prompt) < longest:
        raise EngineRefusal(
            f"a prompt of {len(prompt)} tokens does not fit: it needs at least 1 token and has to leave room for "
            f"1 more in the context of {longest} (model.max_length)"
        )


def version_runs(starts: Sequence[tuple[str, int]], first: int, stop: int) -> list[VersionRun]:
    """Versions of the tokens [first, stop), from vLLM's labels and the tokens at which they begin."""
    ends = [start for _, start in starts[1:]] + [stop]
    return [
        VersionRun(version=int(label), count=min(end, stop) - max(start, first))
        for (label, start), end in zip(starts, ends, strict=True)
        if min(end, stop) > max(start, first)
    ]


def finish_of(piece: Any, asked: GenerateRequest, tokens: int, whose: str) -> Literal["stop", "length", "text"]:
    """Why a response ended, from its last piece.

    Args:
        piece: vLLM's `CompletionOutput`.
        asked: what it answers.
        tokens: how many it has.
        whose: the engine's and the request's name, in words.

    Raises:
        EngineError: vLLM has ended it for a reason of its own.
    """
    if piece.finish_reason in GOOD_ENDS:
        return "text" if isinstance(piece.stop_reason, str) else piece.finish_reason
    said = repr(piece.finish_reason) + (f" ({piece.stop_reason})" if piece.stop_reason is not None else "")
    raise EngineError(
        f"{whose} was ended by vLLM, and nobody had asked for that: it says {said} after {tokens} of at most "
        f"{asked.max_new_tokens} tokens, on a prompt of {len(asked.prompt)}; why may stand in vLLM's own "
        "words above, of which VLLM_LOGGING_LEVEL=INFO shows more"
    )
