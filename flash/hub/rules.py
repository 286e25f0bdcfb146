"""What the configuration says about samples, beside the age contract."""

from __future__ import annotations

from typing import Literal

import msgspec

from flash.config.tree import RolloutConfig
from flash.hub.groups import GroupFilter


class BufferRules(msgspec.Struct, frozen=True, kw_only=True):
    """What a `SampleBuffer` does with samples that fail, outgrow the window or come too many."""

    retries: int = 2
    breaker: int = 64
    quarantine: int = 16
    on_expire: Literal["mask", "requeue", "wait"] = "mask"
    fifo_window: float | None = None
    extra_per_group: int = 0
    whole_groups: bool = False
    """The samples of a group go to one node together."""
    waves: bool = False
    """Groups start in batches, the next batch when the last one is home."""
    filter: GroupFilter = GroupFilter()


def buffer_rules(rollout: RolloutConfig) -> BufferRules:
    """The part of the configuration that the buffer uses."""
    return BufferRules(
        retries=rollout.retries,
        breaker=rollout.breaker,
        quarantine=rollout.quarantine,
        on_expire=rollout.on_expire,
        fifo_window=rollout.fifo_window,
        extra_per_group=rollout.extra_per_group,
        whole_groups=not rollout.replicate_prompts,
        waves=not rollout.queue_scheduling,
        filter=GroupFilter(rollout.drop_equal_rewards, rollout.accuracy_bounds),
    )
