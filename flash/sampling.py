"""How tokens are drawn, and which could have been.

Law: a token's log-prob, the engine's and the trainer's, is that of the distribution it was drawn from. Where tokens are
left out, those that were not, the *kept set*, travel with each that was drawn: the trainer renormalises over them.
Where a mixture's experts are chosen for a token, so can those that the engine chose: the trainer takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What makes of the policy's logits the distribution that a sample's tokens are drawn from, and where it ends.

    It goes with the sample: the engine draws from this distribution, and the trainer takes log-probs under it. Fields
    have the names that vLLM has for them; new ones come last.
    """

    temperature: float = 1.0
    """Logits are divided by it. 0 is greedy, of which nothing can be trained."""
    top_k: int = 0
    """Only so many of the likeliest tokens are kept, and those as likely as the last; 0: all."""
    top_p: float = 1.0
    """Of these the likeliest whose probabilities add up to it."""
    min_p: float = 0.0
    """And none less likely than this share of the likeliest's probability."""
    min_tokens: int = 0
    """A response does not end by itself before it has so many."""
    stop: tuple[str, ...] = ()
    """Texts of which the first ends a response; its tokens are the last."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that do, beside the model's own."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Added to the logits of tokens, before all else."""
    repetition_penalty: float = 1.0
    """Then the logits of all tokens that the context has, prompt and responses, are divided by it where they are
    positive, and multiplied where not."""

    @property
    def keeps(self) -> bool:
        """Whether tokens are left out, so that each that is drawn comes with those that were not."""
        return self.top_k > 0 and self.temperature > 0


PLAIN = Sampling()
"""The policy's own distribution."""


class Kept(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of each of some sampled tokens, the others that could have been drawn in its place: ragged."""

    ids: bytes = b""
    """int32: those of the first token, then those of the next one, and so on."""
    counts: bytes = b""
    """int32: how many each has."""

    @classmethod
    def of(cls, ids: Sequence[int] | Int32Array, counts: Sequence[int] | Int32Array) -> Kept:
        """From numbers."""
        return cls(np.asarray(ids, dtype="<i4").tobytes(), np.asarray(counts, dtype="<i4").tobytes())

    @property
    def tokens(self) -> int:
        """How many sampled tokens these are of."""
        return len(self.counts) // 4

    @property
    def size(self) -> int:
        """Bytes that it takes."""
        return len(self.ids) + len(self.counts)

    def numbers(self) -> tuple[Int32Array, Int32Array]:
        """Ids and counts: views."""
        return np.frombuffer(self.ids, dtype="<i4"), np.frombuffer(self.counts, dtype="<i4")

    def part(self, start: int, stop: int) -> Kept:
        """Those of the tokens [start, stop)."""
        counts = self.numbers()[1]
        begin, end = int(counts[:start].sum()), int(counts[:stop].sum())
        return Kept(self.ids[4 * begin : 4 * end], self.counts[4 * start : 4 * stop])

    def parts(self, sizes: Iterable[int]) -> Iterator[Kept]:
        """Those of the first so many tokens, of the next ones, and so on."""
        counts = self.numbers()[1]
        start = begin = 0
        for size in sizes:
            stop = start + size
            end = begin + int(counts[start:stop].sum())
            yield Kept(self.ids[4 * begin : 4 * end], self.counts[4 * start : 4 * stop])
            start, begin = stop, end

    def fault(self, tokens: int) -> str | None:
        """Why it cannot be that of so many sampled tokens."""
        if len(self.ids) % 4 or len(self.counts) % 4:
            return "kept sets with parts of numbers"
        ids, counts = self.numbers()
        if len(counts) != tokens or (counts < 0).any() or int(counts.sum(dtype=np.int64)) != len(ids):
            return f"{tokens} sampled tokens, and kept sets of {len(counts)} with {len(ids)} tokens"
        return "a kept token below 0" if (ids < 0).any() else None


def together(parts: Iterable[Kept]) -> Kept:
    """The sets of some tokens, then those of later ones."""
    parts = list(parts)
    return Kept(b"".join(part.ids for part in parts), b"".join(part.counts for part in parts))


class Routes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of each of some tokens, the experts that its engine chose in each decoder layer.

    Layers without experts, and tokens of which the engine told nothing, have the number of which all bits are set.
    """

    ids: bytes
    """uint8 or uint16, [tokens, layers, experts of a token]."""
    layers: int
    each: int
    """Experts of a token."""
    bits: int = 8

    @classmethod
    def of(cls, chosen: npt.NDArray[np.integer]) -> Routes:
        """From numbers, [tokens, layers, experts of a token]; negative ones are not known."""
        _, layers, each = chosen.shape
        bits = 8 if chosen.max(initial=0) < 255 else 16
        wide = np.where(chosen < 0, (1 << bits) - 1, chosen).astype(f"<u{bits // 8}")
        return cls(wide.tobytes(), layers, each, bits)

    @property
    def tokens(self) -> int:
        """How many tokens these are of."""
        return len(self.ids) // self._row

    @property
    def _row(self) -> int:
        return self.layers * self.each * self.bits // 8

    def numbers(self) -> Int32Array:
        """[tokens, layers, experts of a token]; -1: not known."""
        flat = np.frombuffer(self.ids, dtype=f"<u{self.bits // 8}").astype(np.int32)
        flat[flat == (1 << self.bits) - 1] = -1
        return flat.reshape(-1, self.layers, self.each)

    def part(self, start: int, stop: int) -> Routes:
        """Those of the tokens [start, stop)."""
        return msgspec.structs.replace(self, ids=self.ids[self._row * start : self._row * stop])

    def padded(self, tokens: int) -> Routes:
        """With tokens that nothing is known of, up to so many."""
        return msgspec.structs.replace(self, ids=self.ids + b"\xff" * (self._row * tokens - len(self.ids)))

    def fault(self, tokens: int) -> str | None:
        """Why it cannot be that of so many tokens."""
        if self.bits not in (8, 16) or self.layers < 1 or self.each < 1 or len(self.ids) != tokens * self._row:
            return f"{tokens} tokens, and {len(self.ids)} bytes of experts of {self.layers} layers, {self.each} each"
        return None


def routed(parts: Sequence[Routes | None], tokens: Sequence[int]) -> Routes | None:
    """The routes of some tokens, then those of later ones, `tokens` by part; None where no part has any."""
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    empty = msgspec.structs.replace(first, ids=b"")
    whole = [(empty if part is None else part).padded(count) for part, count in zip(parts, tokens, strict=True)]
    if any(part.bits != first.bits for part in whole):
        return Routes.of(np.concatenate([part.numbers() for part in whole]))
    return msgspec.structs.replace(first, ids=b"".join(part.ids for part in whole))
