"""The branches of a trajectory: each is trained as a sequence of its own, and its action tokens nowhere else.

And what sequences begin with alike, branches or not: a tree, each of whose tokens a trainer rank computes once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable, Sequence
from itertools import islice, pairwise, repeat
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from flash.ages import recent
from flash.types import Span, Trajectory, Turn, VersionRun

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer[Any]]

LEAST_SHARED = 0.1
"""Share of a sequence that it must have in common with another one for it to be computed once. Below it the way there
costs more: attention is computed in two parts and merged."""
TOKENS_AT_ONCE = 1 << 18
"""Tokens of sequences that are sorted or compared in one slice, of a few milliseconds."""


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
    kept = repeat(None) if trajectory.kept is None else trajectory.kept.parts(counts)
    turns: list[list[Turn]] = [[] for _ in counts]
    for turn in trajectory.turns:
        turns[turn.branch].append(turn)
    made: list[Trajectory] = []
    acted = 0
    for number, (begin, end) in enumerate(pairwise((*trajectory.branches, trajectory.length))):
        own = islice(spans, len(turns[number]))
        made.append(
            msgspec.structs.replace(
                trajectory,
                token_ids=trajectory.token_ids[4 * begin : 4 * end],
                action_spans=[Span(span.start - begin, span.stop - begin) for span in own],
                logprobs=trajectory.logprobs[4 * acted : 4 * (acted + counts[number])],
                versions=versions[number],
                turns=turns[number],
                lost_tokens=0,
                branches=(0,),
                kept=next(kept),
                routes=trajectory.routes and trajectory.routes.part(begin, end),
                teacher=trajectory.teacher and trajectory.teacher[4 * acted : 4 * (acted + counts[number])],
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


def in_common(sequences: Sequence[IntArray]) -> Generator[None, None, tuple[list[int], list[int]]]:
    """The places of sequences in order of tokens, and what each need not compute, as the one just before it has it.

    In this order no earlier sequence has more in common with one than the one just before. It yields after each
    `TOKENS_AT_ONCE`, so that others can be served in between.
    """
    order, keys = list[int](), list[bytes]()
    seen = 0
    for index, tokens in enumerate(sequences):
        key = tokens.astype(">u4").tobytes()
        place = bisect_right(keys, key)
        keys.insert(place, key)
        order.insert(place, index)
        if (seen := seen + len(tokens)) >= TOKENS_AT_ONCE:
            seen = 0
            yield
    while keys:  # to free them takes its time, too
        del keys[-64:]
        yield
    known = [0] * bool(order)
    for before, after in pairwise(order):
        same, length = _common(sequences[before], sequences[after]), len(sequences[after])
        known.append(same if same >= LEAST_SHARED * length else 0)
        if (seen := seen + length) >= TOKENS_AT_ONCE:
            seen = 0
            yield
    return order, known


def _common(one: IntArray, other: IntArray) -> int:
    """How many tokens two sequences begin with alike."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
