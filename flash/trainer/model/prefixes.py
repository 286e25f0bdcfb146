"""Shared prefixes: tokens that several packed sequences begin with are computed once.

The hidden state of a token depends only on the tokens up to it. Two sequences may begin with the same tokens: the
prompt of their group, or turns that branches of one sample share. Then the states of this beginning are equal in both,
so they can be computed once, and the gradients that reach them can be added.

Conservation: for any token of a sequence, the tokens up to it equal those up to the token that is computed in its
place.

`flash.trainer.packing` calls `shared_prefixes` for each micro-batch; `flash.trainer.model.packed` lays the result out.
This module imports no torch, as packing runs in processes without it.

Shape legend: P = tokens of the packed sequences, U = computed tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from flash.branches import Int64Array, sort_by_prefix
from flash.sampling import Routes
from flash.waiting import run_to_end


class Computed(NamedTuple):
    """The tokens that are computed, and the places at which each token finds its result."""

    place_U: Int64Array
    """Place in P of each computed token; the computed tokens of a sequence are neighbours."""
    row_P: Int64Array
    """Place in U at which each token of the sequences is computed."""


class PackedSequences(Protocol):
    """Sequences one after another, such as a micro-batch."""

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
        """Cumulative lengths, [S + 1], from 0 to P."""
        ...

    @property
    def computed(self) -> Computed:
        """Result of `shared_prefixes` for the sequences."""
        ...

    @property
    def routes(self) -> Routes | None:
        """Experts that engines chose for each token; None if the engines do not report them."""
        ...


def shared_prefixes(sequences: Sequence[Int64Array]) -> Computed:
    """Return the layout in which each shared prefix is computed once.

    Of the sequences with this prefix, the first one in the order of their tokens computes it.
    """
    order, known = run_to_end(sort_by_prefix(sequences))
    starts = np.cumsum([0, *map(len, sequences)])
    if not any(known):
        # Nothing is shared. The sequences keep their order, so that attention need not gather their tokens.
        return Computed(np.arange(starts[-1]), np.arange(starts[-1]))
    row_P = np.empty(starts[-1], dtype=np.int64)
    places: list[Int64Array] = []
    count, previous = 0, 0
    for index, shared in zip(order, known, strict=True):
        start, stop = int(starts[index]), int(starts[index + 1])
        row_P[start : start + shared] = row_P[starts[previous] : starts[previous] + shared]
        row_P[start + shared : stop] = np.arange(count, count + stop - start - shared)
        places.append(np.arange(start + shared, stop))
        count, previous = count + stop - start - shared, index
    return Computed(np.concatenate(places), row_P)


class SequenceRow(NamedTuple):
    """Token sequences one after another; a plain implementation of `PackedSequences`."""

    input_P: Int64Array
    position_P: Int64Array
    offset_S: Int64Array
    computed: Computed
    routes: Routes | None = None


def in_one_row(sequences: Sequence[Int64Array]) -> SequenceRow:
    """Return the sequences one after another, with their prefixes shared."""
    return SequenceRow(
        input_P=np.concatenate(sequences),
        position_P=np.concatenate([np.arange(len(ids)) for ids in sequences]),
        offset_S=np.cumsum([0, *map(len, sequences)]),
        computed=shared_prefixes(sequences),
    )
