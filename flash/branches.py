"""The branches of a trajectory: each is trained as a sequence of its own, and its action tokens nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice, pairwise

import msgspec

from flash.ages import recent
from flash.types import Span, Trajectory, VersionRun


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
