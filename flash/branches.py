"""Branches of a trajectory, and common beginnings of sequences.

An episode may have several *branches*: histories of messages that the environment or an agent continues separately. The
tokens of a trajectory are the tokens of its branches, one branch after the other. The trainer trains each branch as a
sequence of its own, and each action token (a token that the policy sampled) belongs to exactly one branch.

Sequences that begin with the same tokens form a tree, whether they are branches of one episode or not. A trainer rank
computes each token of such a tree once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from itertools import islice, pairwise, repeat
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flash.ages import young_enough
from flash.types import Span, Trajectory, Turn, VersionRun

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer[Any]]

LEAST_SHARED = 0.1
"""Smallest share of a sequence that a common beginning must have to be computed only once. A smaller share would cost
more than it saves, because attention over a shared beginning is computed in two parts, which are then merged."""
TOKENS_PER_SLICE = 1 << 18
"""Number of tokens that are sorted or compared in one slice. A slice takes a few milliseconds."""


def divide_versions(runs: Iterable[VersionRun], counts: Sequence[int]) -> list[list[VersionRun]]:
    """Return the versions of the first `counts[0]` tokens, of the next `counts[1]` tokens, and so on.

    `runs` has the versions of all these tokens, run-length encoded, and may have more. A run that reaches over the end
    of a part is divided.
    """
    later_runs, parts = iter(runs), list[list[VersionRun]]()
    version = left = 0  # Version of the current run, and the number of its tokens that no part has yet.
    for count in counts:
        part: list[VersionRun] = []
        while count > 0:
            if left == 0:
                version, left = msgspec.structs.astuple(next(later_runs))
                continue
            taken = min(left, count)
            part.append(VersionRun(version, taken))
            count, left = count - taken, left - taken
        parts.append(part)
    return parts


def branch_tokens(trajectory: Trajectory) -> list[int]:
    """Return the number of action tokens of each branch of a trajectory."""
    # The spans are in the order of the branches, so one pass over both is enough.
    counts, number = [0] * len(trajectory.branches), 0
    for span in trajectory.action_spans:
        while number + 1 < len(counts) and span.start >= trajectory.branches[number + 1]:
            number += 1
        counts[number] += span.stop - span.start
    return counts


def count_trained_branches(trajectory: Trajectory, min_version: int) -> int:
    """Return the number of branches with an action token that `min_version` or a newer version sampled.

    Each such branch becomes a sequence for the trainer. The hub counts the sequences of a batch for the denominators of
    the loss.
    """
    # Most trajectories have one branch, and need no division of the versions.
    if len(trajectory.branches) == 1:
        return int(trajectory.trained_tokens(min_version) > 0)
    parts = divide_versions(trajectory.versions, branch_tokens(trajectory))
    return sum(any(young_enough(run.version, min_version) for run in part) for part in parts)


def split_branches(trajectory: Trajectory) -> list[Trajectory]:
    """Return each branch as a trajectory of its own, with the reward of the whole trajectory.

    The trainer packs these trajectories, and a teacher (a model on a server that the policy imitates) scores them.
    Positions count from the first token of the branch, and `turns` has only the turns of the branch. `lost_tokens` is 0
    if there are several branches, so that lost tokens are not counted several times.
    """
    if len(trajectory.branches) == 1:
        return [trajectory]
    counts = branch_tokens(trajectory)
    versions, spans = divide_versions(trajectory.versions, counts), iter(trajectory.action_spans)
    kept = repeat(None) if trajectory.kept is None else trajectory.kept.parts(counts)
    turns: list[list[Turn]] = [[] for _ in counts]
    for turn in trajectory.turns:
        turns[turn.branch].append(turn)
    parts: list[Trajectory] = []
    # The arrays are bytes with four bytes for each number, so number i begins at byte 4 · i. `first` is the index of
    # the branch's first action token.
    first = 0
    for number, (begin, end) in enumerate(pairwise((*trajectory.branches, trajectory.length))):
        own_spans = islice(spans, len(turns[number]))
        stop = first + counts[number]
        parts.append(
            msgspec.structs.replace(
                trajectory,
                token_ids=trajectory.token_ids[4 * begin : 4 * end],
                action_spans=[Span(span.start - begin, span.stop - begin) for span in own_spans],
                logprobs=trajectory.logprobs[4 * first : 4 * stop],
                versions=versions[number],
                turns=turns[number],
                lost_tokens=0,
                branches=(0,),
                kept=next(kept),
                routes=trajectory.routes and trajectory.routes.part(begin, end),
                teacher=trajectory.teacher and trajectory.teacher[4 * first : 4 * stop],
            )
        )
        first = stop
    return parts


def spans_by_turn(trajectory: Trajectory) -> list[Span]:
    """Return the span of each turn, in the order of the turns, which is the order of time.

    `Trajectory.action_spans` has the spans in the order of the branches. The samples that a run shows to people, and
    the trainer's numbers for them, need the spans turn by turn.
    """
    if len(trajectory.branches) == 1:
        return trajectory.action_spans
    # Sorting is stable, so the turns of one branch keep their order, which is also the order of its spans.
    by_branch = sorted(range(len(trajectory.turns)), key=lambda turn: trajectory.turns[turn].branch)
    of_turn = dict(zip(by_branch, trajectory.action_spans, strict=True))
    return [of_turn[turn] for turn in range(len(trajectory.turns))]


def sort_by_prefix(sequences: Sequence[IntArray]) -> Generator[None, None, tuple[list[int], list[int]]]:
    """Sort sequences by their tokens, and count the leading tokens that each shares with the one just before it.

    In this order, a sequence shares at least as many leading tokens with the sequence just before it as with any
    earlier sequence. Yields after each slice of `TOKENS_PER_SLICE` tokens, so that the event loop can do other work in
    between.

    Returns:
        The indices of the sequences in this order, and for each of them the number of shared tokens, which need not be
        computed again. A number below the share `LEAST_SHARED` of the sequence is replaced by 0.
    """
    # `order` and `keys` are sorted by the tokens: big-endian bytes have the same order as token ids.
    order, keys = list[int](), list[bytes]()
    seen = 0
    for index, tokens in enumerate(sequences):
        key = tokens.astype(">u4").tobytes()
        place = bisect_right(keys, key)
        keys.insert(place, key)
        order.insert(place, index)
        if (seen := seen + len(tokens)) >= TOKENS_PER_SLICE:
            seen = 0
            yield
    # The keys are as large as all tokens. Freeing them at once would block the event loop, so 64 are freed at a time.
    while keys:
        del keys[-64:]
        yield
    # No sequence stands before the first one, so it shares nothing.
    shared = [0] * bool(order)
    for before, after in pairwise(order):
        common, length = _common_tokens(sequences[before], sequences[after]), len(sequences[after])
        shared.append(common if common >= LEAST_SHARED * length else 0)
        if (seen := seen + length) >= TOKENS_PER_SLICE:
            seen = 0
            yield
    return order, shared


def _common_tokens(one: IntArray, other: IntArray) -> int:
    """Return the number of tokens that two sequences begin with in common."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
