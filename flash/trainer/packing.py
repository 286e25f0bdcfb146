"""Trajectories to packed micro-batches, in numpy.

A micro-batch holds whole sequences one after the other, without padding; what they begin with alike is computed once
(`flash.trainer.model.prefixes`), and counts once for its size. Only positions that predict an action token get a
logit. A sample is one sequence, or one for each of its branches; all of them have its place in the batch, and so its
advantage. Conservation: every trained token of the samples given to `pack` is in exactly one micro-batch.

Shape legend: P = packed tokens, T = action tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress

import numpy as np
import numpy.typing as npt

from flash.ages import recent
from flash.branches import Int64Array, in_common, sequences
from flash.errors import ContractError
from flash.samples.batches import minibatch_of
from flash.samples.slices import at_once
from flash.sampling import PLAIN, Routes, Sampling, routed
from flash.trainer.kept import NOTHING_KEPT, KeptTokens, all_kept, kept_tokens
from flash.trainer.model.prefixes import Computed, shared_prefixes
from flash.types import Shard, ShardSample, Trajectory

Float64Array = npt.NDArray[np.float64]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass of one rank."""

    input_P: Int64Array
    """Token ids."""
    position_P: Int64Array
    """Position of each token in its own sequence: restarts at 0."""
    offset_S: Int64Array
    """[S + 1] cumulative sequence lengths, from 0 to P."""
    keep_T: Int64Array
    """Index into P of the token before each action token: where that action token is predicted."""
    target_T: Int64Array
    """The action tokens."""
    behaviour_T: Float32Array
    """Log-prob under the policy that sampled; finite where `mask_T` is True."""
    teacher_T: Float32Array
    """Log-prob under a teacher that a server holds; not a number where none was asked."""
    mask_T: BoolArray
    """False for action tokens that are too old to be trained."""
    version_T: Int64Array
    """Policy version that sampled each action token."""
    sequence_T: Int64Array
    """Which of the S sequences each action token belongs to."""
    turn_T: Int64Array
    """Which turn of its sample each action token belongs to, from 0."""
    index_S: Int64Array
    """Place of each sequence's sample in `Shard.batch`."""
    kinds_S: tuple[str, ...]
    """The environment of each sequence, where a mixture has several."""
    sampling_S: tuple[Sampling, ...]
    """How each sequence was sampled."""
    kept: KeptTokens
    """What the action tokens were drawn from."""
    routes: Routes | None = None
    """Of all P, where engines told them."""

    @property
    def index_T(self) -> Int64Array:
        """Place in `Shard.batch` of each action token's sequence."""
        return self.index_S[self.sequence_T]

    @property
    def temperature_T(self) -> Float64Array:
        """At which each action token was sampled."""
        return np.array([sampling.temperature for sampling in self.sampling_S])[self.sequence_T]

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.offset_S) - 1

    @property
    def computed(self) -> Computed:
        """What the sequences begin with alike is computed once."""
        return self._computed

    @cached_property
    def _computed(self) -> Computed:
        return shared_prefixes(np.split(self.input_P, self.offset_S[1:-1]))


DUMMY = MicroBatch(
    input_P=np.zeros(2, dtype=np.int64),
    position_P=np.arange(2, dtype=np.int64),
    offset_S=np.array([0, 2], dtype=np.int64),
    keep_T=np.zeros(1, dtype=np.int64),
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
    kept=NOTHING_KEPT,
)
"""A masked token: adds exactly nothing, and lets a rank without work join the collectives of the others."""


def split_minibatches(shard: Shard, minibatches: int) -> list[list[ShardSample]]:
    """This rank's samples of each minibatch. All ranks cut the batch at the same groups; a group is never divided."""
    place = minibatch_of([entry.group_id for entry in shard.batch], minibatches)
    parts: list[list[ShardSample]] = [[] for _ in range(minibatches)]
    for sample in shard.samples:
        parts[place[shard.batch[sample.index].group_id]].append(sample)
    return parts


@dataclass(frozen=True)
class _Sequence:
    """A branch that has a token to train."""

    index: int
    """Of its sample."""
    trajectory: Trajectory
    """The branch alone."""
    turns: Int64Array
    """Of each of its spans, which turn of the sample it is."""


def _sequences(sample: ShardSample, min_version: int) -> list[_Sequence]:
    branches = sequences(sample.trajectory)
    trained = [number for number, one in enumerate(branches) if one.trained_tokens(min_version) > 0]
    if len(branches) == 1:
        turns = [np.arange(len(branches[0].action_spans))]
    else:
        branch_of = np.array([turn.branch for turn in sample.trajectory.turns], dtype=np.int64)
        turns = [np.flatnonzero(branch_of == number) for number in range(len(branches))]
    return [_Sequence(sample.index, branches[number], turns[number]) for number in trained]


def pack(
    samples: Sequence[ShardSample], *, min_version: int, max_tokens: int, together: bool = True
) -> list[MicroBatch]:
    """Micro-batches of at most `max_tokens` tokens that are computed, the largest trees first; or one of each sequence.

    A tree are sequences that begin alike, those of a group above all. It stays in one micro-batch if it can, for what
    it has in common is computed once in each; else it is cut where least is lost. A branch without a token to train is
    left out: it would cost a forward pass and change nothing.

    Raises:
        ContractError: a sequence is longer than the budget, is not well-formed, or has a trained token whose behaviour
            log-prob is not a finite number.
    """
    trained = [sequence for sample in samples for sequence in _sequences(sample, min_version)]
    for sequence in trained:
        if (length := sequence.trajectory.length) > max_tokens:
            raise ContractError(
                f"sample {sequence.index} has {length} tokens, more than train.max_tokens_per_microbatch = "
                f"{max_tokens}; raise it to at least model.max_length"
            )
    if not together:
        return [_concatenate([sequence], min_version) for sequence in trained]
    order, known = at_once(in_common([sequence.trajectory.tokens() for sequence in trained]))
    length = [trained[place].trajectory.length for place in order]
    batches: list[list[_Sequence]] = []
    room: list[int] = []
    trees = _trees(length, known, max_tokens)
    for tokens, start, stop in sorted(trees, key=lambda tree: -tree[0]):
        place = next((place for place, left in enumerate(room) if tokens <= left), len(room))
        if place == len(room):
            batches.append([])
            room.append(max_tokens)
        batches[place] += [trained[each] for each in order[start:stop]]
        room[place] -= tokens
    return [_concatenate(batch, min_version) for batch in batches]


def _trees(length: Sequence[int], known: Sequence[int], most: int) -> list[tuple[int, int, int]]:
    """Runs of sequences as tokens, of `most` at most, start and stop; `known` as of `in_common`, in its order."""
    found: list[tuple[int, int, int]] = []
    start = 0
    while start < len(length):
        stop, tokens, sizes = start, 0, list[int]()
        while stop < len(length) and (stop == start or known[stop] > 0):
            tokens += length[stop] - (known[stop] if stop > start else 0)
            if tokens > most:
                # Where the sequences on both sides have the least in common, and as late as can be.
                stop = min(range(start + 1, stop + 1), key=lambda place: (known[place], -place))
                break
            sizes.append(tokens)
            stop += 1
        found.append((sizes[stop - start - 1], start, stop))
        start = stop
    return found


def only(micro: MicroBatch, keep_S: BoolArray) -> MicroBatch:
    """The micro-batch without its other sequences; a dummy where none is left."""
    if keep_S.all():
        return micro
    if not keep_S.any():
        return DUMMY
    length_S = np.diff(micro.offset_S)
    keep_P, keep_T = np.repeat(keep_S, length_S), keep_S[micro.sequence_T]
    return MicroBatch(
        input_P=micro.input_P[keep_P],
        position_P=micro.position_P[keep_P],
        offset_S=_offsets(length_S[keep_S]),
        keep_T=(np.cumsum(keep_P) - 1)[micro.keep_T[keep_T]],
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
        kept=micro.kept.only(keep_T),
        routes=micro.routes and Routes.of(micro.routes.numbers()[keep_P]),
    )


def _offsets(lengths: Int64Array) -> Int64Array:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])


def _concatenate(sequences: Sequence[_Sequence], min_version: int) -> MicroBatch:
    """One micro-batch of these sequences, in this order."""
    actions = [_action_positions(sequence) for sequence in sequences]
    lengths = np.array([sequence.trajectory.length for sequence in sequences], dtype=np.int64)
    counts = np.array([len(positions) for positions in actions], dtype=np.int64)
    offset_S = _offsets(lengths)
    input_P = np.concatenate([sequence.trajectory.tokens() for sequence in sequences]).astype(np.int64)
    action_T = np.concatenate(actions) + np.repeat(offset_S[:-1], counts)
    version_T = np.concatenate([sequence.trajectory.action_versions() for sequence in sequences]).astype(np.int64)
    micro = MicroBatch(
        input_P=input_P,
        position_P=np.arange(len(input_P)) - np.repeat(offset_S[:-1], lengths),
        offset_S=offset_S,
        keep_T=action_T - 1,
        target_T=input_P[action_T],
        behaviour_T=np.concatenate([sequence.trajectory.behaviour() for sequence in sequences]).astype(np.float32),
        teacher_T=np.concatenate([_taught(sequence.trajectory) for sequence in sequences]).astype(np.float32),
        mask_T=recent(version_T, min_version),
        version_T=version_T,
        sequence_T=np.repeat(np.arange(len(sequences)), counts),
        turn_T=np.concatenate([_turns(*pair) for pair in zip(sequences, actions, strict=True)]),
        index_S=np.array([sequence.index for sequence in sequences], dtype=np.int64),
        kinds_S=tuple(sequence.trajectory.task.kind for sequence in sequences),
        sampling_S=tuple(sequence.trajectory.task.sampling for sequence in sequences),
        kept=all_kept([_kept(*pair) for pair in zip(sequences, actions, strict=True)]),
        routes=routed([sequence.trajectory.routes for sequence in sequences], lengths.tolist()),
    )
    _check_behaviour(micro, sequences)
    return micro


def _turns(sequence: _Sequence, positions: Int64Array) -> Int64Array:
    """int64: which turn of its sample each action token belongs to; each turn has one span."""
    starts = [span.start for span in sequence.trajectory.action_spans]
    return sequence.turns[np.searchsorted(starts, positions, side="right") - 1]


def _taught(trajectory: Trajectory) -> Float32Array:
    if trajectory.teacher is None:
        return np.full(trajectory.action_count, np.nan, dtype=np.float32)
    return np.frombuffer(trajectory.teacher, dtype="<f4")


def _kept(sequence: _Sequence, positions: Int64Array) -> KeptTokens:
    try:
        return kept_tokens(sequence.trajectory, positions)
    except ContractError as error:
        raise ContractError(f"sample {sequence.index} {error}") from None


def _check_behaviour(micro: MicroBatch, sequences: Sequence[_Sequence]) -> None:
    wrong_T = micro.mask_T & ~np.isfinite(micro.behaviour_T)
    if wrong_T.any():
        first = int(np.flatnonzero(wrong_T)[0])
        place = int(micro.sequence_T[first])
        token = first - int(np.searchsorted(micro.sequence_T, place))
        task = sequences[place].trajectory.task
        raise ContractError(
            f"sample {sequences[place].index} (group {task.group_id}) has the behaviour log-prob "
            f"{micro.behaviour_T[first]} at its action token {token}; expected what the engine sampled it with"
        )


def _action_positions(sequence: _Sequence) -> Int64Array:
    """int64: where in the sequence its action tokens are; log-probs and versions must fit them."""
    trajectory = sequence.trajectory
    positions = np.flatnonzero(trajectory.action_mask())
    if trajectory.task.sampling.temperature <= 0:
        raise ContractError(f"sample {sequence.index} was sampled greedily: at temperature 0 nothing can be trained")
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
