"""Exact match: the cheapest verifier, and the default of `envs.dataset`."""

from __future__ import annotations

import unicodedata

from envs.judging.programs import final_part
from envs.rewards.verifier import inline


@inline
def exact_match(completion: str, answer: str) -> float:
    """Return 1.0 if a completion, without its reasoning, is equal to the answer, else 0.0.

    Any run of white space counts as one blank, and white space at the ends does not count.
    """
    # Letters with accents have two forms in Unicode that look the same.
    said, wanted = (unicodedata.normalize("NFC", text).split() for text in (final_part(completion), answer))
    return float(said == wanted)
