"""Sampling: the distribution from which tokens are drawn, and the data that the trainer needs to compute it again.

Invariant: engine and trainer both report the log-prob of a token under the distribution from which the token was drawn.

Sampling settings such as `top_k` leave tokens out of the distribution, and so does a *grammar*, which describes the
form that a response must have. The tokens that remain are the *kept set*, which includes the drawn token. The trainer
cannot compute the set again exactly, because its log-probs differ slightly from the engine's, and it knows no grammar.
So the engine sends the kept set of each drawn token (`Kept`), and the trainer normalises over this set.

In a mixture-of-experts model, a small difference may also choose other experts. The experts that the engine chose for
each token can travel as *routes* (`Routes`), and the trainer then uses the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


class Sampling(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Settings that turn the policy's logits into the distribution of a sample's tokens, and that end its responses.

    The settings travel with the task and its sample: the engine draws tokens from this distribution, and the trainer
    computes log-probs under it. Fields have vLLM's names. The encoding has no names, so a new field must be the last.
    """

    temperature: float = 1.0
    """Divisor of the logits. 0 is greedy: the most likely token is always chosen. Such tokens cannot be trained."""
    top_k: int = 0
    """Keep only this many of the most likely tokens, and tokens as likely as the last of them. 0: keep all tokens."""
    top_p: float = 1.0
    """Nucleus sampling: of the tokens that `top_k` keeps, keep the most likely whose probabilities sum to `top_p`."""
    min_p: float = 0.0
    """Drop tokens less probable than `min_p` times the most likely token."""
    min_tokens: int = 0
    """Number of tokens before which the model cannot end a response."""
    stop: tuple[str, ...] = ()
    """Texts that end a response. The tokens of the text are the last ones of the response."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, beside the model's own end tokens."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of a token and the number that is added to its logit, before everything else."""
    repetition_penalty: float = 1.0
    """Penalty of all tokens that occur in the context, in the prompt or in responses. After `logit_bias`, a positive
    logit of such a token is divided by this number, and any other logit is multiplied by it."""

    @property
    def has_kept_sets(self) -> bool:
        """True if `top_k` leaves tokens out, so that each drawn token comes with its kept set.

        `top_p` and `min_p` leave out tokens only together with `top_k`: the configuration refuses them without it. At
        temperature 0 there are no kept sets, because such tokens cannot be trained.
        """
        return self.top_k > 0 and self.temperature > 0


PLAIN = Sampling()
"""Settings that change nothing: tokens are drawn from the policy's own distribution."""


class Grammar(msgspec.Struct, frozen=True):
    """Form that a response must have, in the language of the engines: it forbids tokens while the response is sampled.

    `flash.rollout.episode.tokenizer.HfTokenizer.grammar` makes it from a `ResponseForm` of the environment.
    """

    tag: str
    """JSON of a structural tag of the package xgrammar, which describes all possible texts of the response."""
    reasoning: dict[str, Any] | None = None
    """Arguments of the chat template, from which the parser of reasoning finds out if the model reasons. The grammar
    then holds after the reasoning. None: the grammar holds from the first token."""


WHOLE = -1
"""Entry of `Kept.counts` for a token that was drawn from the whole vocabulary."""
FIRST_MASK = -2
"""Entry of `Kept.counts` for a token whose kept set is the first of `Kept.masks`; −3 is the second mask, and so on."""


class Kept(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Kept sets of some consecutive sampled tokens: for each, the tokens that could have been drawn.

    A kept set also contains the drawn token. That token is not stored, because it is known. A grammar may allow nearly
    the whole vocabulary, for example inside a string. Such a large set is stored as a mask, once for all its tokens.
    """

    ids: bytes = b""
    """int32: token ids of the first set without its drawn token, then of the second set, and so on."""
    counts: bytes = b""
    """int32: number of stored tokens of each set. A negative number is `WHOLE`, or `FIRST_MASK` − i for mask i."""
    masks: tuple[bytes, ...] = ()
    """Large sets, each once and all of one length: bit i, counted from the lowest bit of the first byte, is 1 if token
    i could have been drawn."""

    @classmethod
    def of(cls, ids: Sequence[int] | Int32Array, counts: Sequence[int] | Int32Array) -> Kept:
        """Encode the token ids of all sets, one set after the other, and the size of each set, without drawn tokens."""
        return cls(np.asarray(ids, dtype="<i4").tobytes(), np.asarray(counts, dtype="<i4").tobytes())

    @classmethod
    def of_masks(cls, masks: Sequence[bytes | None], token_ids: Sequence[int]) -> Kept:
        """Encode the mask of each drawn token, in the form of `Kept.masks`. None: the whole vocabulary.

        A set of few tokens is stored as their ids, if these take less memory than the mask. `token_ids` are the drawn
        tokens, which are left out of the ids.
        """
        ids, counts, large = list[Int32Array](), list[int](), dict[bytes, int]()
        for mask, token in zip(masks, token_ids, strict=True):
            if mask is None:
                counts.append(WHOLE)
                continue
            octets = np.frombuffer(mask, dtype=np.uint8)
            if 4 * np.bitwise_count(octets).sum(dtype=np.int64) > len(mask):
                counts.append(FIRST_MASK - large.setdefault(mask, len(large)))
                continue
            # Only few bytes have bits, so only these are unpacked.
            places = np.flatnonzero(octets)
            at, bit = np.nonzero(np.unpackbits(octets[places, None], axis=1, bitorder="little"))
            kept = 8 * places[at] + bit
            ids.append(kept[kept != token].astype("<i4"))
            counts.append(len(ids[-1]))
        return cls(b"".join(each.tobytes() for each in ids), np.array(counts, dtype="<i4").tobytes(), tuple(large))

    @property
    def tokens(self) -> int:
        """Number of sampled tokens, each of which has one set."""
        return len(self.counts) // 4

    @property
    def size(self) -> int:
        """Size in bytes."""
        return len(self.ids) + len(self.counts) + sum(map(len, self.masks))

    def numbers(self) -> tuple[Int32Array, Int32Array]:
        """Return `ids` and `counts` as int32 arrays, which are views."""
        return np.frombuffer(self.ids, dtype="<i4"), np.frombuffer(self.counts, dtype="<i4")

    def part(self, start: int, stop: int) -> Kept:
        """Return the sets of the sampled tokens with the indices [start, stop)."""
        return list(self.parts((start, stop - start)))[1]

    def parts(self, sizes: Iterable[int]) -> Iterator[Kept]:
        """Yield the sets of the first `sizes[0]` sampled tokens, of the next `sizes[1]`, and so on.

        One pass over the counts serves all parts.
        """
        counts = self.numbers()[1]
        start = begin = 0
        for size in sizes:
            own = counts[start : start + size]
            start += size
            # Negative counts are sets without ids.
            end = begin + int(own.clip(0).sum())
            masks: tuple[bytes, ...] = ()
            if self.masks:
                # A part holds only the masks of its own tokens, which are numbered from 0 again.
                used, number = np.unique(FIRST_MASK - own[own <= FIRST_MASK], return_inverse=True)
                own = own.copy()
                own[own <= FIRST_MASK] = FIRST_MASK - number
                masks = tuple(self.masks[each] for each in used)
            yield Kept(self.ids[4 * begin : 4 * end], own.tobytes(), masks)
            begin = end

    def fault(self, tokens: int) -> str | None:
        """Check that these are kept sets of `tokens` sampled tokens. Returns a phrase for a fault, or None.

        The hub checks the results of nodes with this, and the trainer its samples.
        """
        if len(self.ids) % 4 or len(self.counts) % 4:
            return "kept sets whose bytes are not whole int32 numbers"
        ids, counts = self.numbers()
        if len(counts) != tokens:
            return f"{tokens} sampled tokens, but kept sets for {len(counts)}, with {len(ids)} tokens"
        if int(counts.clip(0).sum(dtype=np.int64)) != len(ids):
            return f"kept sets whose sizes do not sum to the number of their tokens, {len(ids)}"
        if (counts <= FIRST_MASK - len(self.masks)).any():
            return f"a kept set that is none of its {len(self.masks)} masks"
        if len({len(mask) for mask in self.masks}) > 1:
            return "masks of different lengths"
        return "a kept token with a negative id" if (ids < 0).any() else None


def join_kept(parts: Sequence[Kept | None], tokens: Sequence[int]) -> Kept | None:
    """Join the kept sets of consecutive parts of a response. Returns None if no part has kept sets.

    Args:
        parts: kept sets of each part. None if its tokens were drawn from the whole vocabulary.
        tokens: number of tokens of each part.
    """
    if all(part is None for part in parts):
        return None
    ids, counts, masks = list[bytes](), list[bytes](), dict[bytes, int]()
    for part, count in zip(parts, tokens, strict=True):
        if part is None:
            part = Kept(counts=np.full(count, WHOLE, dtype="<i4").tobytes())
        ids.append(part.ids)
        own = part.numbers()[1]
        if part.masks:
            # Parts may share masks, which the whole holds only once.
            joined = np.array([masks.setdefault(mask, len(masks)) for mask in part.masks])
            masked = own <= FIRST_MASK
            own = own.copy()
            own[masked] = FIRST_MASK - joined[FIRST_MASK - own[masked]]
        counts.append(own.tobytes())
    return Kept(b"".join(ids), b"".join(counts), tuple(masks))


class Routes(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Routes: the experts that the engine chose for each of some consecutive tokens in each decoder layer.

    An expert that is not known has a number with all bits set. An expert is not known where a layer has no experts, or
    where the engine has not reported them. The trainer then chooses the expert itself.
    """

    ids: bytes
    """uint8 or uint16 [tokens, layers, each]: numbers of the chosen experts, little-endian."""
    layers: int
    """Number of decoder layers."""
    each: int
    """Number of experts chosen for a token in a layer."""
    bits: int = 8
    """Bits of one number: 8 or 16."""

    @classmethod
    def of(cls, chosen: npt.NDArray[np.integer]) -> Routes:
        """Encode an array [tokens, layers, each]. Negative numbers mean that the expert is not known."""
        _, layers, each = chosen.shape
        # 255 in 8 bits means unknown, so an expert of this number needs 16 bits.
        bits = 8 if chosen.max(initial=0) < 255 else 16
        wide = np.where(chosen < 0, (1 << bits) - 1, chosen).astype(f"<u{bits // 8}")
        return cls(wide.tobytes(), layers, each, bits)

    @property
    def tokens(self) -> int:
        """Number of tokens that these routes are for."""
        return len(self.ids) // self._row_bytes

    @property
    def _row_bytes(self) -> int:
        """Bytes for one token."""
        return self.layers * self.each * self.bits // 8

    def numbers(self) -> Int32Array:
        """Return int32 [tokens, layers, each]. Experts that are not known are -1."""
        flat = np.frombuffer(self.ids, dtype=f"<u{self.bits // 8}").astype(np.int32)
        flat[flat == (1 << self.bits) - 1] = -1
        return flat.reshape(-1, self.layers, self.each)

    def part(self, start: int, stop: int) -> Routes:
        """Return the routes of the tokens with the indices [start, stop)."""
        return msgspec.structs.replace(self, ids=self.ids[self._row_bytes * start : self._row_bytes * stop])

    def padded(self, tokens: int) -> Routes:
        """Return routes of `tokens` tokens: these routes, then tokens whose experts are not known.

        Routes of `tokens` or more tokens are returned unchanged. Bytes of ones are unknown experts in both widths.
        """
        return msgspec.structs.replace(self, ids=self.ids + b"\xff" * (self._row_bytes * tokens - len(self.ids)))

    def fault(self, tokens: int) -> str | None:
        """Check that these are routes of `tokens` tokens. Returns a phrase for a fault; None if all is right.

        The hub checks the results of nodes with this.
        """
        if self.bits not in (8, 16) or self.layers < 1 or self.each < 1 or len(self.ids) != tokens * self._row_bytes:
            return f"{tokens} tokens, but {len(self.ids)} bytes of experts for {self.layers} layers, {self.each} each"
        return None


def join_routes(parts: Sequence[Routes | None], tokens: Sequence[int]) -> Routes | None:
    """Join the routes of consecutive parts of a sequence. Returns None if no part has routes.

    Args:
        parts: routes of each part. None if they are not known. A part may have routes for its first tokens only.
        tokens: number of tokens of each part. Tokens without routes get unknown experts.
    """
    first = next((part for part in parts if part is not None), None)
    if first is None:
        return None
    empty = msgspec.structs.replace(first, ids=b"")
    padded = [(empty if part is None else part).padded(count) for part, count in zip(parts, tokens, strict=True)]
    if any(part.bits != first.bits for part in padded):
        # `of` chooses the bits by the largest number in the array, so parts of one response may differ.
        return Routes.of(np.concatenate([part.numbers() for part in padded]))
    return msgspec.structs.replace(first, ids=b"".join(part.ids for part in padded))
