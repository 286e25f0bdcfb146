"""A request as vLLM takes it; the versions of its tokens, and its end, as vLLM tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from flash.config.section import HIGHEST_TOP_K
from flash.errors import EngineError, EngineRefusal
from flash.foreign import vllm
from flash.rollout.engine import ResponseRequest
from flash.sampling import Kept, Routes, Sampling
from flash.types import VersionRun

GOOD_ENDS = ("stop", "length")
"""vLLM's words for the ends that a response should have."""
SEEDS = 1 << 63
"""Seeds that torch's generators take."""
LETTER = 8
"""Tokens that a letter may take: at most four, and as many special ones that have no text."""

TIES = 8
"""Tokens beyond `top_k` that are asked for: vLLM also keeps those that are exactly as likely as the last."""
MOST_LOGPROBS = HIGHEST_TOP_K + TIES
"""Of a token, that an engine tells."""


class SamplingParameters:
    """vLLM's parameters of requests, made once for all that sample alike.

    Args:
        ends: tokens that end a response beside those that the model's files name.
    """

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self._ends = tuple(ends)
        self._made: dict[tuple[Sampling, int], Any] = {}

    def of(self, request: ResponseRequest, vocabulary: int) -> Any:
        """Those of a request to an engine whose model has so many tokens."""
        sampling = request.sampling
        # As vLLM counts: of a response that moved here its first tokens are prompt.
        least = min(max(sampling.min_tokens - request.generated, 0), request.max_new_tokens)
        if request.stop or least != sampling.min_tokens:
            stop = (*sampling.stop, *request.stop)
            sampling = msgspec.structs.replace(sampling, stop=stop, min_tokens=least)
        alike = sampling, request.max_new_tokens
        made = self._made.get(alike)
        if made is None:
            how = msgspec.structs.asdict(sampling)
            how |= {name: list(how[name]) for name in ("stop", "stop_token_ids")} | {
                "logit_bias": dict(how["logit_bias"])
            }
            how["stop_token_ids"] += self._ends
            told = min(sampling.top_k + TIES, vocabulary) if sampling.keeps else 0
            made = vllm.sampling_parameters(how, request.max_new_tokens, likeliest=told)
            if not request.stop:  # of which there are as many as agents think of
                self._made[alike] = made
        if request.seed is None or sampling.temperature == 0:
            return made
        # A response that moved here goes on with other draws than those that its first tokens had.
        return vllm.seeded(made, (request.seed + request.generated) % SEEDS)


def tail(request: ResponseRequest) -> int:
    """How many tokens at its prompt's end may begin a text that ends the response: its own ones, where it moved."""
    longest = max(map(len, (*request.sampling.stop, *request.stop)), default=1)
    return min(request.generated, LETTER * (longest - 1))


class Told(NamedTuple):
    """What an engine tells of some tokens that it has sampled."""

    logprobs: list[float]
    kept: Kept | None


def told(flat: Any, token_ids: Sequence[int], sampling: Sampling, vocabulary: int) -> Told:
    """Log-probs of tokens, and which others could have been drawn: those that have any probability.

    Args:
        flat: vLLM's `FlatLogprobs` of them: of each token its own, then those of the likeliest ones.
        token_ids: the tokens.
        sampling: how they were drawn.
        vocabulary: the tokens that the model has.

    Raises:
        EngineError: more are as likely as the last that `top_k` keeps than were asked for.
    """
    if not sampling.keeps or not token_ids:
        return Told(flat.logprobs, Kept() if sampling.keeps else None)
    # vLLM names the sampled one again among the likeliest, but not in pieces that it has put together.
    ids, logprobs, starts, ends = map(np.array, (flat.token_ids, flat.logprobs, flat.start_indices, flat.end_indices))
    kept = np.isfinite(logprobs)
    if kept[ends - 1].any() and sampling.top_k + TIES < vocabulary:
        raise EngineError(
            f"more than {TIES} tokens are exactly as likely as the last that top_k = {sampling.top_k} keeps, and which "
            "they are is not known; expected model.head_dtype and dtype in which logits differ, or another top_k"
        )
    kept &= ids != np.repeat(ids[starts], ends - starts)
    return Told(logprobs[starts].tolist(), Kept.of(ids[kept], np.add.reduceat(kept, starts, dtype=np.int64)))


def routes_of(piece: Any, computed: int) -> Routes:
    """The experts of the tokens that were computed for a response, from its last piece: vLLM's `CompletionOutput`.

    Raises:
        EngineError: it tells of other tokens.
    """
    chosen = piece.routed_experts
    if chosen is None or len(chosen) != computed:
        count = "none" if chosen is None else len(chosen)
        raise EngineError(f"the experts of {computed} tokens were to be told, got those of {count}")
    return Routes.of(chosen)


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


def finish_of(piece: Any, asked: ResponseRequest, tokens: int, whose: str) -> Literal["stop", "length", "text"]:
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
        asked_for = isinstance(piece.stop_reason, str) or piece.stop_reason in asked.sampling.stop_token_ids
        return "text" if asked_for else piece.finish_reason
    said = repr(piece.finish_reason) + (f" ({piece.stop_reason})" if piece.stop_reason is not None else "")
    raise EngineError(
        f"{whose} was ended by vLLM, and nobody had asked for that: it says {said} after {tokens} of at most "
        f"{asked.max_new_tokens} tokens, on a prompt of {len(asked.prompt)}; why may stand in vLLM's own "
        "words above, of which VLLM_LOGGING_LEVEL=INFO shows more"
    )
