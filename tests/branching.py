"""Make trajectories with branches out of trajectories without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, zip_longest

from msgspec.structs import replace

from flash.sampling import join_kept, join_routes
from flash.types import Span, Trajectory, VersionRun, append_versions


def joined(parts: Sequence[Trajectory]) -> Trajectory:
    """Join trajectories into one sample, each as a branch. The turns alternate between the branches."""
    begins = tuple(accumulate((part.length for part in parts[:-1]), initial=0))
    versions: list[VersionRun] = []
    for part in parts:
        append_versions(versions, part.versions)
    of_branches = [[replace(turn, branch=number) for turn in part.turns] for number, part in enumerate(parts)]
    turns = [turn for row in zip_longest(*of_branches) for turn in row if turn is not None]
    return replace(
        parts[0],
        token_ids=b"".join(part.token_ids for part in parts),
        action_spans=[
            Span(begin + span.start, begin + span.stop)
            for begin, part in zip(begins, parts, strict=True)
            for span in part.action_spans
        ],
        logprobs=b"".join(part.logprobs for part in parts),
        versions=versions,
        turns=turns,
        reward=math.fsum(turn.reward for turn in turns),
        branches=begins,
        kept=join_kept([part.kept for part in parts], [part.action_count for part in parts]),
        routes=join_routes([part.routes for part in parts], [part.length for part in parts]),
    )
