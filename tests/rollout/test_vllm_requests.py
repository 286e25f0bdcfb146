"""What vLLM tells of sampled tokens, as it reaches whoever reads a response late."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import pytest
from vllm.logprobs import FlatLogprobs

from flash.errors import EngineError
from flash.rollout.vllm.requests import TIES, Told, told
from flash.sampling import Kept, Sampling

VOCABULARY = 100
HOW = Sampling(top_k=3)


def piece(drawn: int, likeliest: Sequence[int]) -> FlatLogprobs:
    """Of one token: its log-prob, then those of the likeliest ones, itself among them."""
    flat, told = FlatLogprobs(), HOW.top_k + TIES
    ids = [*likeliest, *range(90, 90 + told - len(likeliest))]
    logprobs = [-1.0 - place if place < len(likeliest) else float("-inf") for place in range(told)]
    flat.append_fast(
        [drawn, *ids], [logprobs[ids.index(drawn)], *logprobs], chain(range(told + 1)), [None] * (told + 1)
    )
    return flat


def test_law_4_pieces_that_vllm_has_put_together_say_what_they_said_alone() -> None:
    """It does where a token comes before the one ahead of it was read."""
    drawn, likeliest = [7, 4, 9, 9], [[5, 6, 7], [4], [9, 8], [1, 2, 9]]
    pieces = [piece(*one) for one in zip(drawn, likeliest, strict=True)]
    whole = piece(drawn[0], likeliest[0])
    for later in pieces[1:]:
        whole.extend(later)
    expected = Told([-3.0, -1.0, -1.0, -3.0], Kept.of([5, 6, 8, 1, 2], [2, 0, 1, 2]))
    assert told(whole, drawn, HOW, VOCABULARY) == expected
    alone = [told(flat, [token], HOW, VOCABULARY) for flat, token in zip(pieces, drawn, strict=True)]
    assert [one.logprobs[0] for one in alone] == expected.logprobs
    assert [one.kept for one in alone] == [expected.kept and expected.kept.part(at, at + 1) for at in range(4)]


@pytest.mark.parametrize("drawn", [0, TIES + 2])
def test_more_ties_than_were_asked_for_are_an_error(drawn: int) -> None:
    ids = range(HOW.top_k + TIES)
    whole = piece(1, [1])
    whole.extend(piece(drawn, ids))
    assert told(whole, [1, drawn], HOW, len(ids)).kept is not None
    with pytest.raises(EngineError, match="exactly as likely"):
        told(whole, [1, drawn], HOW, VOCABULARY)
