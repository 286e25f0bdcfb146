"""Translation of one request for vLLM, and of what vLLM returns for it: log-probs, kept tokens, versions, experts, end.

Pure functions, called by `VLLMEngine.generate`. vLLM's own objects (`Any` here) come from `flash.foreign.vllm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from flash.config.section import HIGHEST_TOP_K
from flash.errors import EngineError, EngineRefusal
from flash.foreign import vllm
from flash.rollout.engine import ResponseRequest
from flash.sampling import Kept, Routes, Sampling
from flash.types import VersionRun

GOOD_ENDS = ("stop", "length")
"""vLLM's finish reasons that a response should have."""
SEEDS = 1 << 63
"""Number of seeds that torch's generators accept."""
TOKENS_PER_LETTER = 8
"""Most tokens that one letter of a text may take: four of its bytes, and as many special tokens that have no text."""

TIES = 8
"""Tokens beyond `top_k` whose log-probs are requested: vLLM also keeps those that are exactly as likely as the last."""
MAX_LOGPROBS = HIGHEST_TOP_K + TIES
"""Most log-probs that an engine returns for one position."""


class SamplingParameters:
    """Makes vLLM's parameters of requests; requests that sample alike share one object.

    Args:
        end_tokens: tokens that end a response, beside those that the model's files name.
    """

    def __init__(self, end_tokens: Sequence[int] = ()) -> None:
        self._end_tokens = tuple(end_tokens)
        self._cache: dict[tuple[Sampling, int], Any] = {}

    def of(self, request: ResponseRequest, vocabulary: int) -> Any:
        """Return vLLM's parameters of a request, for a model with `vocabulary` tokens."""
        sampling = request.sampling
        # vLLM counts new tokens only: the first tokens of a response that moved here are prompt to it.
        min_tokens = min(max(sampling.min_tokens - request.generated, 0), request.max_new_tokens)
        if request.stop or min_tokens != sampling.min_tokens:
            stop = (*sampling.stop, *request.stop)
            sampling = msgspec.structs.replace(sampling, stop=stop, min_tokens=min_tokens)
        key = sampling, request.max_new_tokens
        parameters = self._cache.get(key)
        if parameters is None:
            fields = msgspec.structs.asdict(sampling)
            fields |= {name: list(fields[name]) for name in ("stop", "stop_token_ids")} | {
                "logit_bias": dict(fields["logit_bias"])
            }
            fields["stop_token_ids"] += self._end_tokens
            likeliest = min(sampling.top_k + TIES, vocabulary) if sampling.keeps else 0
            parameters = vllm.sampling_parameters(fields, request.max_new_tokens, likeliest=likeliest)
            # Agents may invent any number of stop texts, which would fill the cache.
            if not request.stop:
                self._cache[key] = parameters
        if request.seed is None or sampling.temperature == 0:
            return parameters
        # A response that moved here must not draw the numbers again that its first tokens were drawn with.
        return vllm.seeded(parameters, (request.seed + request.generated) % SEEDS)


def stop_text_tokens(request: ResponseRequest) -> int:
    """Return how many of the last `request.generated` tokens of the prompt may begin a text that ends the response."""
    longest = max(map(len, (*request.sampling.stop, *request.stop)), default=1)
    return min(request.generated, TOKENS_PER_LETTER * (longest - 1))


def read_logprobs(
    flat: Any, token_ids: Sequence[int], sampling: Sampling, vocabulary: int
) -> tuple[list[float], Kept | None]:
    """Return the log-probs of sampled tokens and, if sampling leaves tokens out, the others that it could have drawn.

    A token could have been drawn if its probability is above 0.

    Args:
        flat: vLLM's `FlatLogprobs`: for each position the sampled token, then the most likely ones.
        token_ids: the sampled tokens.
        sampling: the distribution that they were drawn from.
        vocabulary: number of tokens of the model.

    Raises:
        EngineError: more than `TIES` tokens are exactly as likely as the last one that `top_k` keeps.
    """
    if not sampling.keeps or not token_ids:
        return flat.logprobs, Kept() if sampling.keeps else None
    # vLLM lists the sampled token again among the most likely ones, except in pieces that it has joined.
    ids, logprobs, starts, ends = map(np.array, (flat.token_ids, flat.logprobs, flat.start_indices, flat.end_indices))
    kept = np.isfinite(logprobs)
    # If the last returned token could have been drawn, tokens that were not returned could perhaps be drawn too.
    if kept[ends - 1].any() and sampling.top_k + TIES < vocabulary:
        raise EngineError(
            f"more than {TIES} tokens are exactly as likely as the last one that top_k = {sampling.top_k} keeps, so it "
            "is not known which tokens could have been drawn; use a model.head_dtype or dtype in which logits differ, "
            "or another top_k"
        )
    # The sampled token is not one of the others.
    kept &= ids != np.repeat(ids[starts], ends - starts)
    return logprobs[starts].tolist(), Kept.of(ids[kept], np.add.reduceat(kept, starts, dtype=np.int64))


def read_routes(piece: Any, computed: int) -> Routes:
    """Return the experts of the `computed` tokens of a request, from its last piece (vLLM's `CompletionOutput`).

    Raises:
        EngineError: vLLM returned the experts of another number of tokens.
    """
    experts = piece.routed_experts
    if experts is None or len(experts) != computed:
        count = "none" if experts is None else len(experts)
        raise EngineError(f"vLLM should return the experts of {computed} tokens, but returned those of {count}")
    return Routes.of(experts)


def check_prompt(prompt: Sequence[int], max_length: int) -> None:
    """Raise EngineRefusal if a prompt does not fit a context of `max_length` tokens."""
    if not 0 < len(prompt) < max_length:
        raise EngineRefusal(
            f"a prompt of {len(prompt)} tokens does not fit: it needs at least 1 token and has to leave room for "
            f"1 more in the context of {max_length} (model.max_length)"
        )


def version_runs(starts: Sequence[tuple[str, int]], first: int, stop: int) -> list[VersionRun]:
    """Return the versions of the tokens [first, stop), given vLLM's version labels, each with its first token."""
    ends = [start for _, start in starts[1:]] + [stop]
    return [
        VersionRun(version=int(label), count=min(end, stop) - max(start, first))
        for (label, start), end in zip(starts, ends, strict=True)
        if min(end, stop) > max(start, first)
    ]


def read_finish(piece: Any, request: ResponseRequest, tokens: int, name: str) -> Literal["stop", "length", "text"]:
    """Return why a response ended.

    Args:
        piece: its last piece, vLLM's `CompletionOutput`.
        request: the request.
        tokens: number of its tokens.
        name: names the engine and the request in the error.

    Raises:
        EngineError: vLLM has ended the response for a reason of its own.
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
