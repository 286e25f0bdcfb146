"""What an engine is held to once it has loaded a version.

Its fingerprint (`flash.weights.fingerprint`) proves that it holds the weights that were published. The canary, a short
text whose log-probs engine and trainer must agree on, proves that it computes with them. How far apart two healthy ones
are follows from the precision in which they compute, which the trainer has measured (`flash.trainer.model.canary`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from flash.errors import WeightsError
from flash.types import Canary


class LoadedWeights:
    """Follows what one engine holds, version by version.

    Where a single worker holds exactly what was published first, it has to from then on, and from the first version on
    if that is known (`exact`). Where it does not (tensor parallel shards, quantised or otherwise derived weights,
    tensors that the engine does not load), its weights have to change whenever the published ones do.
    """

    def __init__(self, *, exact: bool | None = None) -> None:
        self._exact = exact
        self._published: list[int] = []
        self._held: list[list[int]] = []

    def check(self, published: list[int], held: list[list[int]], *, engine: int, version: int) -> None:
        """Compare what was published as `version` with what each worker of the engine holds now.

        Raises:
            WeightsError: it holds something else.
        """
        if self._exact is None:
            self._exact = held == [published]
        if self._exact:
            stale = held != [published]
        else:
            changed = published != self._published
            stale = changed and any(old == new for old, new in zip(self._held, held, strict=False))
        if stale:
            kept = "the weights of the version before" if self._held == held else "other weights than were published"
            raise WeightsError(
                f"engine {engine}, version {version}: after loading it holds {kept} (fingerprint {held}, published "
                f"{published}). vLLM has accepted the tensors and not put them all in place"
            )
        self._published, self._held = published, held


def check_canary(canary: Canary, observed: Sequence[float], *, engine: int, version: int) -> float:
    """Compare an engine's log-probs with the trainer's; return their mean difference.

    The mean of the absolute differences is held to the tolerance. Rounding makes single large ones, most of all where
    it sends a token to another expert; what an engine computes wrongly shows at most tokens.

    Args:
        canary: the text, the trainer's log-probs, one per token after the first, and the tolerance.
        observed: the engine's log-probs of the same positions.
        engine: index of the engine, for the message.
        version: the version just loaded, for the message.

    Raises:
        WeightsError: they differ by more than the tolerance. NaN never passes.
    """
    if len(observed) != len(canary.logprobs):
        raise WeightsError(
            f"engine {engine}, version {version}: the canary has {len(canary.logprobs)} positions, "
            f"the engine answered for {len(observed)}"
        )
    pairs = zip(canary.logprobs, observed, strict=True)
    gaps = [math.inf if math.isnan(ours - theirs) else abs(ours - theirs) for ours, theirs in pairs]
    mean, worst = sum(gaps) / len(gaps), gaps.index(max(gaps))
    if mean > canary.tolerance:
        raise WeightsError(
            f"engine {engine}, version {version}: the canary's log-probs differ by {mean:.3g} nats in the mean between "
            f"engine and trainer, by more than {canary.tolerance:.3g}; most at position {worst + 1} (token "
            f"{canary.token_ids[worst + 1]}): {observed[worst]:.6f} in the engine and {canary.logprobs[worst]:.6f} in "
            "the trainer. The engine does not compute with the weights that were published; but if canary_error in "
            "metrics.jsonl has grown slowly over many steps, it is rounding: raise weights.canary_tolerance"
        )
    return mean
