"""The branches of a trajectory: each is trained as a sequence of its own, and its action tokens nowhere else.

And what sequences begin with alike, branches or not: a tree, each of whose tokens a trainer rank computes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flash.ages import recent
from flash.types import Span, Trajectory, VersionRun

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer[Any]]

LEAST_SHARED = 0.1
"""Share of a sequence that it must have in common with another one for it to be computed once. Below it the way there
costs more: attention is computed in two parts and merged."""


def divide_versions(runs: Iterable[VersionRun], counts: Sequence[int]) -> list[list[VersionRun]]:
    """The versions of the first `counts[0]` tokens, of the next `counts[1]`, and so on."""
    left, parts = iter(runs), list[list[VersionRun]]()
    version = rest = 0
    for count in counts:
        part: list[VersionRun] = []
        while count > 0:
            if rest == 0:
                version, rest = msgspec.structs.astuple(next(left))
                continue
            taken = min(rest, count)
            part.append(VersionRun(version, taken))
            count, rest = count - taken, rest - taken
        parts.append(part)
    return parts


def branch_tokens(trajectory: Trajectory) -> list[int]:
    """Action tokens of each branch."""
    counts, number = [0] * len(trajectory.branches), 0
    for span in trajectory.action_spans:
        while number + 1 < len(counts) and span.start >= trajectory.branches[number + 1]:
            number += 1
        counts[number] += span.stop - span.start
    return counts


def trained_branches(trajectory: Trajectory, min_version: int) -> int:
    """How many branches have a token to train: the sequences that the trainer makes of it."""
    if len(trajectory.branches) == 1:
        return int(trajectory.trained_tokens(min_version) > 0)
    parts = divide_versions(trajectory.versions, branch_tokens(trajectory))
    return sum(any(recent(run.version, min_version) for run in part) for part in parts)


def sequences(trajectory: Trajectory) -> list[Trajectory]:
    """Each branch on its own, its reward that of the whole; itself where there is one."""
    if len(trajectory.branches) == 1:
        return [trajectory]
    counts = branch_tokens(trajectory)
    versions, spans = divide_versions(trajectory.versions, counts), iter(trajectory.action_spans)
    made: list[Trajectory] = []
    acted = 0
    for number, (begin, end) in enumerate(pairwise((*trajectory.branches, trajectory.length))):
        turns = [turn for turn in trajectory.turns if turn.branch == number]
        made.append(
            msgspec.structs.replace(
                trajectory,
                token_ids=trajectory.token_ids[4 * begin : 4 * end],
                action_spans=[Span(span.start - begin, span.stop - begin) for span in islice(spans, len(turns))],
                logprobs=trajectory.logprobs[4 * acted : 4 * (acted + counts[number])],
                versions=versions[number],
                turns=turns,
                lost_tokens=0,
                branches=(0,),
                kept=trajectory.kept and trajectory.kept.part(acted, acted + counts[number]),
            )
        )
        acted += counts[number]
    return made


def spans_by_turn(trajectory: Trajectory) -> list[Span]:
    """The span of each turn."""
    if len(trajectory.branches) == 1:
        return trajectory.action_spans
    by_branch = sorted(range(len(trajectory.turns)), key=lambda turn: trajectory.turns[turn].branch)
    of_turn = dict(zip(by_branch, trajectory.action_spans, strict=True))
    return [of_turn[turn] for turn in range(len(trajectory.turns))]


def in_common(sequences: Sequence[IntArray]) -> tuple[list[int], list[int]]:
    """The places of sequences in order of tokens, and what each need not compute, as the one just before it has it.

    In this order no earlier sequence has more in common with one than the one just before.
    """
    order = sorted(range(len(sequences)), key=lambda index: sequences[index].astype(">u4").tobytes())
    known = [0] * bool(order)
    known += [_common(sequences[before], sequences[after]) for before, after in pairwise(order)]
    worth = [same >= LEAST_SHARED * len(sequences[index]) for index, same in zip(order, known, strict=True)]
    return order, [same if counts else 0 for same, counts in zip(known, worth, strict=True)]


def _common(one: IntArray, other: IntArray) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
