"""Turns the trajectories of a shard (the part of a batch that one rank trains) into packed micro-batches; no torch.

`flash.trainer.plan` calls `split_minibatches` and `pack`; `flash.trainer.step` trains the result. A *micro-batch* holds
whole sequences one after another, without padding. Logits are computed only at positions that predict an *action
token*, a token that the policy sampled. A sample is one sequence, or one sequence per *branch*. Each sequence has the
index of its sample in the batch, so all branches of a sample get the advantage of the sample.

The hidden state of a token depends only on the tokens up to it. So a *shared prefix*, the tokens with which several
sequences begin (the prompt of a group, or the turns before branches of a sample part), is computed once, and counts
once against the token budget. `flash.trainer.model.packed` lays the computed tokens out in one row.

Conservation: every trained token of the samples given to `pack` is in exactly one micro-batch. A token whose result
another sequence computes has the same tokens before it in both sequences.

Shape legend: P = packed tokens, U = computed tokens, T = action tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from flash.ages import young_enough
from flash.branches import Int64Array, sort_by_prefix, split_branches
from flash.errors import ContractError
from flash.samples.batches import MinibatchPlace, minibatch_of
from flash.sampling import PLAIN, Routes, Sampling, join_routes
from flash.trainer.kept import KeptTokens, join_kept_tokens, kept_tokens, no_kept_sets
from flash.types import Shard, ShardSample, Trajectory
from flash.waiting import run_to_end

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class Computed(NamedTuple):
    """The tokens that are computed, and the place of the result for each token."""

    place_U: Int64Array
    """Place in P of each computed token; the computed tokens of a sequence are neighbours."""
    row_P: Int64Array
    """Place in U at which each token of the sequences is computed."""


class PackedSequences(Protocol):
    """Sequences one after another: the input of a model. `MicroBatch` and `SequenceRow` have this form."""

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
    """Return the layout in which each shared prefix is computed once, by the first sequence in token order.

    `MicroBatch.computed` uses this layout. A short common beginning, a small share of its sequence, does not count as
    shared (`flash.branches.sort_by_prefix`).
    """
    # `order` has the sequences' indices, sorted by their tokens; `known` the number of leading tokens that each shares
    # with the one before it in this order. `sort_by_prefix` pauses for the hub's event loop; here it need not.
    order, known = run_to_end(sort_by_prefix(sequences))
    starts = np.cumsum([0, *map(len, sequences)])
    if not any(known):
        # Nothing is shared. The sequences keep their order, so that attention need not gather their tokens.
        return Computed(np.arange(starts[-1]), np.arange(starts[-1]))
    # In sorted order, each sequence takes the results of shared tokens from the same places as the sequence before it,
    # and computes its other tokens. `count` is the number of computed tokens so far.
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


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass of one rank, and of the loss of its action tokens. Nothing in it changes."""

    input_P: Int64Array
    """Token ids."""
    position_P: Int64Array
    """Position of each token in its own sequence, from 0 at the start of each sequence."""
    offset_S: Int64Array
    """[S + 1] cumulative sequence lengths, from 0 to P."""
    before_T: Int64Array
    """Index in P of the token before each action token, which is where the action token is predicted."""
    target_T: Int64Array
    """Token ids of the action tokens."""
    behaviour_T: Float32Array
    """Log-prob of each action token under the policy that sampled it; finite where `mask_T` is True."""
    teacher_T: Float32Array
    """Log-prob of each action token under a teacher that runs on a server; NaN if the run has no such teacher."""
    mask_T: BoolArray
    """True for action tokens that are trained; False for tokens that are too old."""
    version_T: Int64Array
    """Policy version that sampled each action token."""
    sequence_T: Int64Array
    """Index in S of each action token's sequence."""
    turn_T: Int64Array
    """Turn of each action token: its number among the turns of the sample, from 0. A turn is one response of the policy
    with the environment's step after it."""
    index_S: Int64Array
    """Index in `Shard.batch` of each sequence's sample."""
    kinds_S: tuple[str, ...]
    """Name of each sequence's environment in a mixture; empty if there is only one environment."""
    sampling_S: tuple[Sampling, ...]
    """Sampling parameters of each sequence."""
    kept: KeptTokens
    """Kept sets of the action tokens."""
    routes: Routes | None = None
    """Experts that the engine chose for each of the P tokens; None if the engine did not report them."""

    @property
    def index_T(self) -> Int64Array:
        """Index in `Shard.batch` of each action token's sample."""
        return self.index_S[self.sequence_T]

    @property
    def temperature_T(self) -> Float64Array:
        """Temperature at which each action token was sampled."""
        return np.array([sampling.temperature for sampling in self.sampling_S])[self.sequence_T]

    @property
    def sequences(self) -> int:
        """S, the number of sequences."""
        return len(self.offset_S) - 1

    @property
    def computed(self) -> Computed:
        """Tokens that the model computes: beginnings that sequences share are computed once."""
        # A plain property, as the protocol `PackedSequences` demands. `_computed` keeps the value.
        return self._computed

    @cached_property
    def _computed(self) -> Computed:
        """Value of `computed`, which is calculated when it is first used and then kept."""
        return shared_prefixes(np.split(self.input_P, self.offset_S[1:-1]))


DUMMY = MicroBatch(
    input_P=np.zeros(2, dtype=np.int64),
    position_P=np.arange(2, dtype=np.int64),
    offset_S=np.array([0, 2], dtype=np.int64),
    before_T=np.zeros(1, dtype=np.int64),
    target_T=np.zeros(1, dtype=np.int64),
    behaviour_T=np.zeros(1, dtype=np.float32),
    teacher_T=np.zeros(1, dtype=np.float32),
    mask_T=np.zeros(1, dtype=np.bool_),
    version_T=np.zeros(1, dtype=np.int64),
    sequence_T=np.zeros(1, dtype=np.int64),
    turn_T=np.zeros(1, dtype=np.int64),
    index_S=np.zeros(1, dtype=np.int64),
    kinds_S=("",),
    sampling_S=(PLAIN,),
    kept=no_kept_sets(1),
)
"""Micro-batch of one masked token. It adds exactly zero to every sum, and lets a rank that has no sequences left make
the same collectives as the other ranks."""


def split_minibatches(shard: Shard, minibatches: int) -> list[tuple[MinibatchPlace, list[ShardSample]]]:
    """Return the minibatches of a round, each with this rank's samples. The list of samples may be empty.

    A minibatch is the part of a batch for one optimizer update. Every rank assigns a group to the same minibatch, and
    all samples of a group are in one minibatch.
    """
    number_of, places = minibatch_of([entry.group_id for entry in shard.batch], minibatches, shard.round)
    parts: dict[int, list[ShardSample]] = {place.number: [] for place in places}
    for sample in shard.samples:
        parts[number_of[shard.batch[sample.index].group_id]].append(sample)
    return [(place, parts[place.number]) for place in places]


@dataclass(frozen=True)
class _Sequence:
    """A branch of a sample (one of its token sequences) that has at least one token to train."""

    index: int
    """Index in `Shard.batch` of the sample."""
    trajectory: Trajectory
    """Trajectory of this branch alone."""
    turns: Int64Array
    """For each action span (response) of the branch, the number of its turn in the sample."""


def _sequences(sample: ShardSample, min_version: int) -> list[_Sequence]:
    """Return the branches of a sample that have a token to train, in the order of the branches.

    A branch without such a token is left out: it would cost a forward pass and change nothing. A token is trained if
    its version is `min_version` or newer.
    """
    branches = split_branches(sample.trajectory)
    if len(branches) == 1:
        turns = [np.arange(len(branches[0].action_spans))]
    else:
        branch_of = np.array([turn.branch for turn in sample.trajectory.turns], dtype=np.int64)
        turns = [np.flatnonzero(branch_of == number) for number in range(len(branches))]
    return [
        _Sequence(sample.index, branch, own_turns)
        for branch, own_turns in zip(branches, turns, strict=True)
        if branch.trained_tokens(min_version) > 0
    ]


def pack(
    samples: Sequence[ShardSample], *, min_version: int, max_tokens: int, share_rows: bool = True
) -> list[MicroBatch]:
    """Pack samples into micro-batches that compute at most `max_tokens` tokens each.

    Sequences that begin with the same tokens, such as the sequences of one group, form a tree. A tree stays in one
    micro-batch if it fits, because each micro-batch that holds a part of the tree computes the shared beginning again.
    A larger tree is cut where the fewest tokens have to be computed twice. The largest tree is placed first. Each tree
    goes into the first micro-batch with room.

    Args:
        samples: the samples of this rank in one minibatch.
        min_version: oldest policy version whose tokens are trained.
        max_tokens: token budget of a micro-batch, `train.max_tokens_per_microbatch`.
        share_rows: False gives each sequence a micro-batch of its own, for models that cannot keep packed sequences
            apart.

    Raises:
        ContractError: a sequence is longer than the budget, is not well-formed, or has a trained token whose behaviour
            log-prob is not a finite number.
    """
    # Choose the sequences, and check that each fits into a micro-batch.
    trained = [sequence for sample in samples for sequence in _sequences(sample, min_version)]
    for sequence in trained:
        if (length := sequence.trajectory.length) > max_tokens:
            raise ContractError(
                f"sample {sequence.index} has {length} tokens, more than train.max_tokens_per_microbatch = "
                f"{max_tokens}; raise it to at least model.max_length"
            )
    if not share_rows:
        return [_concatenate([sequence], min_version) for sequence in trained]
    # Sort the sequences so that sequences with a common beginning are neighbours, and cut them into trees.
    order, shared = run_to_end(sort_by_prefix([sequence.trajectory.tokens() for sequence in trained]))
    lengths = [trained[place].trajectory.length for place in order]
    trees = _trees(lengths, shared, max_tokens)
    # Put each tree into the first micro-batch with room; `room` is the number of tokens that still fit into each.
    batches: list[list[_Sequence]] = []
    room: list[int] = []
    for tokens, start, stop in sorted(trees, key=lambda tree: -tree[0]):
        place = next((place for place, left in enumerate(room) if tokens <= left), len(room))
        if place == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[place] += [trained[each] for each in order[start:stop]]
        room[place] -= tokens
    return [_concatenate(batch, min_version) for batch in batches]


def _trees(lengths: Sequence[int], shared: Sequence[int], max_tokens: int) -> list[tuple[int, int, int]]:
    """Cut sequences, in the order of `sort_by_prefix`, into runs that compute at most `max_tokens` tokens.

    A run ends where the next sequence shares no token with its neighbour (the end of a tree), or where the budget ends.

    Args:
        lengths: tokens of each sequence, none above `max_tokens`.
        shared: number of leading tokens that each sequence shares with the sequence before it (`sort_by_prefix`).
        max_tokens: token budget of a run.

    Returns:
        For each run: the number of computed tokens, and its first and stop place in the order of the sequences.
    """
    found: list[tuple[int, int, int]] = []
    start = 0
    while start < len(lengths):
        # `sizes`: number of computed tokens of the run if it ends after its first sequence, its second, and so on.
        stop, tokens, sizes = start, 0, list[int]()
        while stop < len(lengths) and (stop == start or shared[stop] > 0):
            tokens += lengths[stop] - (shared[stop] if stop > start else 0)
            if tokens > max_tokens:
                # Cut where the two neighbours share the least; among equal places, as late as possible.
                stop = min(range(start + 1, stop + 1), key=lambda place: (shared[place], -place))
                break
            sizes.append(tokens)
            stop += 1
        found.append((sizes[stop - start - 1], start, stop))
        start = stop
    return found


def select_sequences(micro: MicroBatch, keep_S: BoolArray) -> MicroBatch:
    """Return a micro-batch with only the sequences where `keep_S` is True, from which a critic learns; else `DUMMY`.

    `DUMMY` lets a rank that has no such sequence make the same collectives as the other ranks.
    """
    if keep_S.all():
        return micro
    if not keep_S.any():
        return DUMMY
    length_S = np.diff(micro.offset_S)
    # Make masks of the tokens and action tokens of the chosen sequences.
    keep_P, keep_T = np.repeat(keep_S, length_S), keep_S[micro.sequence_T]
    # In fields that are indices, an old index becomes the number of kept entries before it.
    return MicroBatch(
        input_P=micro.input_P[keep_P],
        position_P=micro.position_P[keep_P],
        offset_S=_offsets(length_S[keep_S]),
        before_T=(np.cumsum(keep_P) - 1)[micro.before_T[keep_T]],
        target_T=micro.target_T[keep_T],
        behaviour_T=micro.behaviour_T[keep_T],
        teacher_T=micro.teacher_T[keep_T],
        mask_T=micro.mask_T[keep_T],
        version_T=micro.version_T[keep_T],
        sequence_T=(np.cumsum(keep_S) - 1)[micro.sequence_T[keep_T]],
        turn_T=micro.turn_T[keep_T],
        index_S=micro.index_S[keep_S],
        kinds_S=tuple(compress(micro.kinds_S, keep_S)),
        sampling_S=tuple(compress(micro.sampling_S, keep_S)),
        kept=micro.kept.select(keep_T),
        routes=micro.routes and Routes.of(micro.routes.numbers()[keep_P]),
    )


def _offsets(lengths: Int64Array) -> Int64Array:
    """Return [S + 1] cumulative lengths, from 0."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _concatenate(sequences: Sequence[_Sequence], min_version: int) -> MicroBatch:
    """Return one micro-batch of these sequences, of which there must be at least one, in this order.

    Tokens older than version `min_version` get the mask False.

    Raises:
        ContractError: a sequence is not well-formed, its kept sets are missing or malformed, or a trained token has a
            behaviour log-prob that is not finite. The message names the sample.
    """
    trajectories = [sequence.trajectory for sequence in sequences]
    positions = [_action_positions(sequence) for sequence in sequences]
    kept: list[KeptTokens] = []
    turns: list[Int64Array] = []
    for sequence, position_T in zip(sequences, positions, strict=True):
        try:
            kept.append(kept_tokens(sequence.trajectory, position_T))
        except ContractError as error:
            raise ContractError(f"sample {sequence.index} {error}") from None
        # Each turn has exactly one action span.
        starts = [span.start for span in sequence.trajectory.action_spans]
        turns.append(sequence.turns[np.searchsorted(starts, position_T, side="right") - 1])
    lengths = np.array([trajectory.length for trajectory in trajectories], dtype=np.int64)
    counts = np.array([len(position_T) for position_T in positions], dtype=np.int64)
    offset_S = _offsets(lengths)
    input_P = np.concatenate([trajectory.tokens() for trajectory in trajectories]).astype(np.int64)
    action_T = np.concatenate(positions) + np.repeat(offset_S[:-1], counts)
    version_T = np.concatenate([trajectory.action_versions() for trajectory in trajectories]).astype(np.int64)
    micro = MicroBatch(
        input_P=input_P,
        position_P=np.arange(len(input_P)) - np.repeat(offset_S[:-1], lengths),
        offset_S=offset_S,
        before_T=action_T - 1,
        target_T=input_P[action_T],
        behaviour_T=np.concatenate([trajectory.behaviour() for trajectory in trajectories]).astype(np.float32),
        teacher_T=np.concatenate([_teacher_logprobs(trajectory) for trajectory in trajectories]).astype(np.float32),
        mask_T=young_enough(version_T, min_version),
        version_T=version_T,
        sequence_T=np.repeat(np.arange(len(sequences)), counts),
        turn_T=np.concatenate(turns),
        index_S=np.array([sequence.index for sequence in sequences], dtype=np.int64),
        kinds_S=tuple(trajectory.task.kind for trajectory in trajectories),
        sampling_S=tuple(trajectory.task.sampling for trajectory in trajectories),
        kept=join_kept_tokens(kept),
        routes=join_routes([trajectory.routes for trajectory in trajectories], lengths.tolist()),
    )
    _check_behaviour(micro, sequences)
    return micro


def _teacher_logprobs(trajectory: Trajectory) -> Float32Array:
    """Return the teacher's log-probs that came with a trajectory; NaN for each action token if none came.

    The hub has checked that they are float32 numbers, one per action token, when the sample arrived.
    """
    if trajectory.teacher is None:
        return np.full(trajectory.action_count, np.nan, dtype=np.float32)
    return np.frombuffer(trajectory.teacher, dtype="<f4")


def _check_behaviour(micro: MicroBatch, sequences: Sequence[_Sequence]) -> None:
    """Check that each trained token has a finite log-prob under the policy that sampled it.

    Raises:
        ContractError: a trained token has a log-prob that is not finite.
    """
    wrong_T = micro.mask_T & ~np.isfinite(micro.behaviour_T)
    if wrong_T.any():
        first = int(np.flatnonzero(wrong_T)[0])
        place = int(micro.sequence_T[first])
        token = first - int(np.searchsorted(micro.sequence_T, place))
        task = sequences[place].trajectory.task
        raise ContractError(
            f"sample {sequences[place].index} (group {task.group_id}) has the behaviour log-prob "
            f"{micro.behaviour_T[first]} at its action token {token}; expected the finite log-prob with which the "
            "engine sampled it"
        )


def _action_positions(sequence: _Sequence) -> Int64Array:
    """Return the positions of a sequence's action tokens in the sequence, int64, once it is checked.

    Raises:
        ContractError: the sequence was sampled greedily, starts with an action token, or has unequal numbers of action
            tokens, log-probs and versions. A sequence without any action token does not come here (`_sequences`).
    """
    trajectory = sequence.trajectory
    positions = np.flatnonzero(trajectory.action_mask())
    if trajectory.task.sampling.temperature <= 0:
        raise ContractError(
            f"sample {sequence.index} was sampled greedily: tokens sampled at temperature 0 cannot be trained"
        )
    counts = (len(positions), trajectory.action_count, len(trajectory.action_versions()))
    if len(set(counts)) != 1:
        raise ContractError(
            "sample {} has {} action tokens, {} log-probs and {} versions; expected equal counts".format(
                sequence.index, *counts
            )
        )
    if positions[0] == 0:
        raise ContractError(f"sample {sequence.index} starts with an action token; expected a prompt before it")
    return positions


class SequenceRow(NamedTuple):
    """Token sequences one after another, without samples or a loss; `PackedSequences` explains the fields."""

    input_P: Int64Array
    position_P: Int64Array
    offset_S: Int64Array
    computed: Computed
    routes: Routes | None = None


def in_one_row(sequences: Sequence[Int64Array]) -> SequenceRow:
    """Return the sequences one after another, with shared prefixes.

    The canary, the check of packing and the memory plan call this with tokens that come from no sample.
    """
    return SequenceRow(
        input_P=np.concatenate(sequences),
        position_P=np.concatenate([np.arange(len(ids)) for ids in sequences]),
        offset_S=np.cumsum([0, *map(len, sequences)]),
        computed=shared_prefixes(sequences),
    )
