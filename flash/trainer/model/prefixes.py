"""What packed sequences begin with alike is computed once.

A token's hidden state follows from the tokens up to it. So where two sequences begin alike, with the prompt of their
group or with the turns that branches of one sample share, the states of that beginning are the same numbers, and so is
the sum of the gradients that reach them. Conservation: the tokens up to any place of a sequence are those up to the
place at which it is computed.

Shape legend: P = tokens of the packed sequences, U = those that are computed, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from flash.branches import Int64Array, sort_by_prefix
from flash.sampling import Routes
from flash.waiting import run_to_end


class Computed(NamedTuple):
    """Which tokens are computed, and for whom."""

    place_U: Int64Array
    """The place in P of each token that is computed; those of a sequence are neighbours."""
    row_P: Int64Array
    """The place in U at which each token of the sequences is computed."""


class PackedSequences(Protocol):
    """Sequences one after the other, such as a micro-batch."""

    @property
    def input_P(self) -> Int64Array:
        """Token ids."""
        ...

    @property
    def position_P(self) -> Int64Array:
        """Position of each token in its own sequence."""
        ...

    @property
    def offset_S(self) -> Int64Array:
        """[S + 1] cumulative lengths, from 0 to P."""
        ...

    @property
    def computed(self) -> Computed:
        """As `shared_prefixes` of the sequences."""
        ...

    @property
    def routes(self) -> Routes | None:
        """The experts that engines chose for each token, where they told."""
        ...


def shared_prefixes(sequences: Sequence[Int64Array]) -> Computed:
    """Compute what sequences begin with alike once, where the first of them in order of tokens has it."""
    order, known = run_to_end(sort_by_prefix(sequences))
    starts = np.cumsum([0, *map(len, sequences)])
    if not any(known):
        # In their own order, which attention can take as it is.
        return Computed(np.arange(starts[-1]), np.arange(starts[-1]))
    row_P = np.empty(starts[-1], dtype=np.int64)
    places: list[Int64Array] = []
    count, before = 0, 0
    for index, same in zip(order, known, strict=True):
        start, stop = int(starts[index]), int(starts[index + 1])
        row_P[start : start + same] = row_P[starts[before] : starts[before] + same]
        row_P[start + same : stop] = np.arange(count, count + stop - start - same)
        places.append(np.arange(start + same, stop))
        count, before = count + stop - start - same, index
    return Computed(np.concatenate(places), row_P)


class Sequences(NamedTuple):
    """Token sequences as `PackedSequences`."""

    input_P: Int64Array
    position_P: Int64Array
    offset_S: Int64Array
    computed: Computed
    routes: Routes | None = None


def in_one_row(sequences: Sequence[Int64Array]) -> Sequences:
    """These, one after the other."""
    return Sequences(
        input_P=np.concatenate(sequences),
        position_P=np.concatenate([np.arange(len(ids)) for ids in sequences]),
        offset_S=np.cumsum([0, *map(len, sequences)]),
        computed=shared_prefixes(sequences),
    )
