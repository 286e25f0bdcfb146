"""The rules of a run's samples: the age contract, and what else the configuration says about them.

With α = async ratio and B = samples per step: admission lets (1 + α)·B samples be on their way, and every token
trained by the step that makes version n+1 was sampled by a version ≥ n − ⌈α⌉, or n less the bound that is given for
tokens (`flash.ages`): then long answers keep their beginnings, while what is admitted and waited for stays under α.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from flash.ages import SLACK, last_step, max_age, version_of, window
from flash.config.decode import examine
from flash.config.section import sampling_faults, untaught
from flash.config.tree import Config, RolloutConfig
from flash.environment.fingerprint import fingerprint
from flash.environment.interface import Domain
from flash.errors import ConfigError
from flash.samples.groups import GroupFilter
from flash.sampling import PLAIN, Sampling


class AgeContract(msgspec.Struct, frozen=True):
    """One run's contract. Redundant samples and groups come on top of what it counts."""

    async_ratio: float
    batch_size: int
    group_size: int
    steps: int
    extra_groups: int = 0
    max_token_age: int | None = None
    """Most versions that a trained token may be old; None: ⌈α⌉."""

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
        """The most versions that a trained token may be old."""
        return max_age(self.async_ratio, self.max_token_age)

    def min_token_version(self, step: int) -> int:
        """The oldest version whose tokens the step that trains version `step` may use."""
        return version_of(self.max_age, step)

    def window_start(self, step: int) -> int:
        """The oldest version that may begin a sample for this step, whatever the bound of tokens: who is done does not
        wait for the others of its group any longer."""
        return version_of(window(self.async_ratio), step)

    def last_step(self, token_version: int) -> int:
        """The last step that may train a token of this version."""
        return last_step(token_version, self.max_age)

    @property
    def splits(self) -> bool:
        """True if a group may be trained in parts: at any α > 0 its finished members have a last chance."""
        return window(self.async_ratio) >= 1

    @property
    def groups_per_batch(self) -> int:
        """G: the groups that one step trains."""
        return self.batch_size // self.group_size

    @property
    def last_slot(self) -> int:
        """Groups the whole run may have at once or behind it."""
        return self.steps * self.groups_per_batch + self.extra_groups


class DomainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for the problems of one kind: what its domain says, else what the run does.

    Fields that `Domain` has by the same name are filled by themselves.
    """

    weight: float
    """Its share of the groups, in proportion to the others'."""
    group_size: int
    """Samples of a group, redundant ones not counted."""
    filter: GroupFilter
    sampling: Sampling = PLAIN
    max_turns: int = 0
    """Responses after which an episode is truncated."""
    max_new_tokens: int = 0
    """Longest response, in tokens."""

    @classmethod
    def of(cls, name: str, domain: Domain, rollout: RolloutConfig) -> DomainSettings:
        """What a domain leaves open is the run's.

        Raises:
            ConfigError: nothing can be trained as it is sampled.
        """
        own = msgspec.structs.asdict(domain)
        holds = {name: getattr(rollout, name) if value is None else value for name, value in own.items()}
        types = {field.name: field.type for field in msgspec.structs.fields(RolloutConfig)}
        given = {name: value for name, value in own.items() if name in types and value is not None}
        faults = [
            (name, problem.message) for name, value in given.items() for problem in examine(value, types[name], name)[1]
        ]
        sampling = Sampling(**{name: holds.pop(name) for name in Sampling.__struct_fields__})
        for option, fault in faults or sampling_faults(sampling):
            raise ConfigError(f"env.path: {option} of the domain {name!r}: {fault}")
        kept = GroupFilter(holds.pop("drop_equal_rewards"), holds.pop("accuracy_bounds"))
        return cls(filter=kept, sampling=sampling, **holds)


class Problems(NamedTuple):
    """What a run knows of its environment's problems."""

    kind_of: Callable[[int], str]
    """The kind of the problem of a seed."""
    domains: Mapping[str, DomainSettings]
    """Of the kinds that have shares and limits of their own."""

    @classmethod
    def of(
        cls,
        config: Config,
        kind_of: Callable[[int], str],
        domains: Mapping[str, Domain],
    ) -> Problems:
        """Those that the environment of a run says.

        Raises:
            ConfigError: nothing can be trained as a domain is sampled.
        """
        rollout = config.rollout
        settings = {name: DomainSettings.of(name, domain, rollout) for name, domain in domains.items()}
        for name, own in settings.items():
            if (fault := config.unknown_sets(own.sampling)) is not None:
                raise ConfigError(f"env.path: top_k of the domain {name!r}: {fault}")
            for option, fault in untaught(own.sampling, config.algorithm.teacher):
                raise ConfigError(f"env.path: {option} of the domain {name!r}: {fault}")
        return cls(kind_of, settings)


def _unnamed(seed: int) -> str:
    return ""


ALIKE = Problems(_unnamed, MappingProxyType({}))
"""Problems of one kind."""


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
    sampling: Sampling
    domains: dict[str, DomainSettings] = {}
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

    def samplings(self) -> dict[str, Sampling]:
        """How the samples of each domain are sampled; those of other kinds under the empty name."""
        return {"": self.sampling, **{name: domain.sampling for name, domain in self.domains.items()}}


def age_contract(config: Config) -> AgeContract:
    """The contract of a run."""
    rollout, train = config.rollout, config.train
    return AgeContract(
        train.async_ratio,
        train.batch_size,
        rollout.group_size,
        config.run.steps,
        rollout.extra_groups,
        train.max_token_age,
    )


def buffer_rules(config: Config, domains: Mapping[str, DomainSettings] = ALIKE.domains) -> BufferRules:
    """The part of the configuration that the buffer uses, and what holds for its domains."""
    rollout = config.rollout
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
        sampling=config.sampling,
        domains=dict(domains),
        drift=rollout.share_drift,
        problems=fingerprint(config.env),
    )
