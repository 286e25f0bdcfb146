"""Whether an engine holds the weights that were published, by their fingerprints (`flash.weights.fingerprint`)."""

from __future__ import annotations

from flash.errors import WeightsError


class LoadedWeights:
    """Follows what one engine holds, version by version.

    Where a single worker holds exactly what was published first, it has to from then on. Where it does not (tensor
    parallel shards, quantised or otherwise derived weights, tensors that the engine does not load), its weights have to
    change whenever the published ones do.
    """

    def __init__(self) -> None:
        self._exact: bool | None = None
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
