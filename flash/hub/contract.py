"""The age contract: the numbers that admission, choice and consumption follow.

With α = async ratio and B = samples per step: admission lets (1 + α)·B samples be on their way, and every token
trained by the step that makes version n+1 was sampled by a version ≥ n − ⌈α⌉. Ages are whole numbers: a sample that α
admits one version early is one version old, whatever the fraction.
"""

from __future__ import annotations

import math

import msgspec

from flash.config.tree import SLACK, max_age


class AgeContract(msgspec.Struct, frozen=True):
    """One run's contract. Redundant samples and groups come on top of what it counts."""

    async_ratio: float
    batch_size: int
    group_size: int
    steps: int
    extra_groups: int = 0

    def min_engine_version(self, slot: int, sample_index: int) -> int:
        """The oldest engine version that may start this sample of the group at this place.

        The k-th sample counted from the start, those of returned groups not counted, is admitted by the published
        version v if k ≤ (v + 1 + α)·B.
        """
        member = min(sample_index, self.group_size - 1)
        k = (slot - self.extra_groups) * self.group_size + member + 1
        return max(0, math.ceil(k / self.batch_size - 1 - self.async_ratio - SLACK))

    def slots_admitted(self, version: int, sample_index: int) -> int:
        """The groups, counted from the start, of which a published version may start this sample."""
        member = min(sample_index, self.group_size - 1)
        samples = (version + 1 + self.async_ratio + SLACK) * self.batch_size
        return math.floor((samples - member - 1) / self.group_size) + 1 + self.extra_groups

    @property
    def max_age(self) -> int:
        """⌈α⌉: the most versions that a trained token may be old."""
        return max_age(self.async_ratio)

    def min_token_version(self, step: int) -> int:
        """The oldest version whose tokens the step that trains version `step` may use."""
        return step - self.max_age

    def last_step(self, token_version: int) -> int:
        """The last step that may train a token of this version."""
        return token_version + self.max_age

    @property
    def groups_per_batch(self) -> int:
        """G: the groups that one step trains."""
        return self.batch_size // self.group_size

    @property
    def last_slot(self) -> int:
        """Groups the whole run may have at once or behind it."""
        return self.steps * self.groups_per_batch + self.extra_groups
