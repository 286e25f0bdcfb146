"""Dealing a step's groups to the trainer ranks: token-balanced, with the denominators of the whole batch."""

from __future__ import annotations

from flash.hub.groups import Group
from flash.types import GroupReward, Shard, ShardSample


def deal(groups: list[Group], step: int, min_version: int, ranks: int) -> list[Shard]:
    """One shard per rank. Longest samples first, each to the rank with the fewest tokens so far."""
    trajectories = [(group.group_id, t) for group in groups for t in group.trajectories()]
    rewards = [GroupReward(group_id, t.reward) for group_id, t in trajectories]
    earlier = [GroupReward(group.group_id, reward) for group in groups for reward in group.earlier]
    trained = [t.trained_tokens(min_version) for _, t in trajectories]
    dealt: list[list[ShardSample]] = [[] for _ in range(ranks)]
    load = [0] * ranks
    for index in sorted(range(len(trajectories)), key=lambda i: (-trajectories[i][1].length, i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        dealt[rank].append(ShardSample(index, trajectories[index][1]))
        load[rank] += trajectories[index][1].length
    return [
        Shard(
            step=step,
            min_version=min_version,
            samples=samples,
            rewards=rewards,
            total_tokens=sum(trained),
            total_sequences=sum(count > 0 for count in trained),
            earlier=earlier,
        )
        for samples in dealt
    ]
