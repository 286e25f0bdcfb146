"""What the configuration says about samples, beside the age contract."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Literal

import msgspec

from flash.config.tree import Config, RolloutConfig
from flash.environment.interface import NO_DOMAINS, Domain
from flash.hub.groups import GroupFilter


class DomainRules(msgspec.Struct, frozen=True):
    """What is different in one of several domains."""

    weight: float
    """Its share of the groups, in proportion to the others'."""
    group_size: int
    """Samples of a group, redundant ones not counted."""
    filter: GroupFilter


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
    domains: dict[str, DomainRules] = {}
    """By the kind of their problems; empty: nothing is decided by kind."""
    drift: float = 1.0
    """Batches by which a domain may be ahead of its share."""
    problems: str = ""
    """Tells one set of problems from another: the samples of a group are all of one. Empty: not known."""

    def filter_of(self, kind: str) -> GroupFilter:
        """What filters the groups of a kind."""
        return self.domains[kind].filter if kind in self.domains else self.filter

    def sizes(self, group_size: int) -> dict[str, int]:
        """Members of a group of each domain, redundant ones included; those of other kinds under the empty name."""
        named = {name: domain.group_size for name, domain in self.domains.items()}
        return {name: size + self.extra_per_group for name, size in {"": group_size, **named}.items()}


def buffer_rules(config: Config, domains: Mapping[str, Domain] = NO_DOMAINS) -> BufferRules:
    """The part of the configuration that the buffer uses, and what its environment says of its domains."""
    rollout = config.rollout
    told = json.dumps([config.env.path, config.env.options], sort_keys=True, default=str)
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
        domains={name: _domain_rules(rollout, domain) for name, domain in domains.items()},
        drift=rollout.share_drift,
        problems=hashlib.sha256(told.encode()).hexdigest(),
    )


def _domain_rules(rollout: RolloutConfig, domain: Domain) -> DomainRules:
    """What the domain leaves open is the run's."""
    drop, bounds = domain.drop_equal_rewards, domain.accuracy_bounds
    own = GroupFilter(rollout.drop_equal_rewards if drop is None else drop, bounds or rollout.accuracy_bounds)
    return DomainRules(domain.weight, domain.group_size or rollout.group_size, own)
