"""A request as vLLM takes it, and the versions of its tokens as vLLM tells them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flash.foreign import vllm
from flash.rollout.engine import GenerateRequest, SamplingSettings
from flash.types import VersionRun

SEEDS = 1 << 63
"""Seeds that torch's generators take."""


class SamplingParameters:
    """vLLM's parameters of requests, made once for all that sample alike."""

    def __init__(self) -> None:
        self._made: dict[SamplingSettings, Any] = {}

    def of(self, request: GenerateRequest) -> Any:
        """Those of a request."""
        sampling = request.sampling
        if sampling not in self._made:
            self._made[sampling] = vllm.sampling_parameters(sampling.temperature, sampling.max_new_tokens)
        if request.seed is None or sampling.temperature == 0:
            return self._made[sampling]
        # A response that moved here goes on with other draws than those that its first tokens had.
        return vllm.seeded(self._made[sampling], (request.seed + request.done) % SEEDS)


def version_runs(starts: Sequence[tuple[str, int]], first: int, stop: int) -> list[VersionRun]:
    """Versions of the tokens [first, stop), from vLLM's labels and the tokens at which they begin."""
    ends = [start for _, start in starts[1:]] + [stop]
    return [
        VersionRun(version=int(label), count=min(end, stop) - max(start, first))
        for (label, start), end in zip(starts, ends, strict=True)
        if min(end, stop) > max(start, first)
    ]
