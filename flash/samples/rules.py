"""Rules: the settings of a run's samples, the shares of its domains, and the breaker that stops a run which only fails.

`AgeContract` bounds how far sampling may be ahead of training, and `BufferRules` has the other settings. Both are made
from the configuration and are part of each checkpoint. `flash.samples.store.SampleStore` and its parts decide by them.

A *kind* is a name that the environment gives to some of its problems, for example the name of one environment in a
mixture. A *domain* is a kind that has a share of the groups and settings of its own. `DomainShares` chooses the domain
of the next group, and limits the groups of each domain in a step.

A task is *given up* if its last attempt has failed, and a complete group is *filtered out* if it is not worth training.
`Breaker` counts both in a row. If too many tasks of one kind are given up, the kind goes into *quarantine*: no more
tasks of this kind are issued. `DomainShares` and `Breaker` are pure state machines. Checkpoints hold their counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

from flash.ages import SLACK, last_step, version_of, window
from flash.config.check_learning import why_not_streamed
from flash.config.decode import examine
from flash.config.section import SAMPLING_KEYS, faults_with_teacher, sampling_faults, sampling_of
from flash.config.tree import Config, RolloutConfig
from flash.environment.fingerprint import fingerprint
from flash.environment.interface import Domain
from flash.errors import BreakerError, ConfigError
from flash.samples.groups import GroupFilter
from flash.sampling import PLAIN, Sampling
from flash.types import Failure, Task

FILTERED_BATCHES = 4
"""Limit of a domain's groups that are filtered out in a row, in batches of the domain's share. Further filtered groups
are not replaced, and count for the domain's share like trained groups. Otherwise a domain that is solved, or much too
hard, would never reach its share, and would so hold the other domains back."""
FILTERED_GROUPS = 16
"""Smallest limit of a domain's groups that are filtered out in a row, in groups. For a small share of a small batch,
`FILTERED_BATCHES` alone would give a limit of one or two groups."""
QUARANTINE_PART = 4
"""Part of `rollout.breaker`, as a divisor, that puts a kind into quarantine. It is well above 1, so that a kind that
fails together with others is left out before the breaker stops the run."""
ROUNDS = 8
"""Number of rounds of a streamed step whose groups have too few tokens to fill a micro-batch on each rank. More rounds
leave less work for the time after the last sample. But each round costs an exchange between the ranks, and fills its
last micro-batches badly."""


class AgeContract(msgspec.Struct, frozen=True):
    """The age contract of a run: how far sampling may be ahead of training.

    α is the asynchronous ratio, and B is the number of samples of a step. Then (1 + α)·B tasks may be in flight, so
    that a sample begins at most ⌈α⌉ versions before the step that should train it. Step n trains version n on tokens
    that a version ≥ n − `max_age` sampled. This limit is larger than ⌈α⌉ by default, so that the early tokens of long
    answers are trained. Redundant tasks and groups are not included in these numbers. `flash.samples.tasks.Admission`
    enforces the limit on tasks in flight. Tokens that are too old are left out of the loss, or the store gives their
    samples up.

    The *place* of a group is its number in the order of issue. Groups that ended without being trained do not count.
    """

    async_ratio: float
    """α (`train.async_ratio`)."""
    batch_size: int
    """B: number of samples of a step."""
    group_size: int
    """Number of samples of a group, without redundant samples."""
    steps: int
    """Number of steps of the whole run."""
    extra_groups: int = 0
    """Number of redundant groups in flight. They take the places of groups that are too slow."""
    max_token_age: int | None = None
    """Largest age of a trained token, in versions. The contract of a run always has a number. None, in checkpoints and
    journals of earlier versions of Flash: ⌈α⌉."""

    @classmethod
    def of(cls, config: Config) -> AgeContract:
        """Return the contract of a run with this configuration."""
        rollout, train = config.rollout, config.train
        return cls(
            train.async_ratio,
            train.batch_size,
            rollout.group_size,
            config.run.steps,
            rollout.extra_groups,
            # Not `max_token_age` itself: a replay needs the limit by which the run decided, whatever the default is.
            train.max_age,
        )

    def min_engine_version(self, place: int, sample_index: int) -> int:
        """Return the oldest engine version that may run member `sample_index` of the group at `place`.

        Version v admits the k-th sample of the run, counted from 1, if k ≤ (v + 1 + α)·B. Samples of groups that left
        untrained do not count, because places leave these groups out.
        """
        # Redundant members need no version of their own: they may start with the last regular member.
        member = min(sample_index, self.group_size - 1)
        # Redundant groups are in flight in addition, so the count begins after the first `extra_groups` places.
        k = (place - self.extra_groups) * self.group_size + member + 1
        return max(0, math.ceil(k / self.batch_size - 1 - self.async_ratio - SLACK))

    def places_admitted(self, version: int, sample_index: int) -> int:
        """Return the number of places, from the first one, at which `version` admits member `sample_index`.

        This is the inverse of `min_engine_version`.
        """
        member = min(sample_index, self.group_size - 1)
        samples = (version + 1 + self.async_ratio + SLACK) * self.batch_size
        return math.floor((samples - member - 1) / self.group_size) + 1 + self.extra_groups

    @property
    def max_age(self) -> int:
        """Largest age of a trained token, in versions."""
        return window(self.async_ratio) if self.max_token_age is None else self.max_token_age

    def min_token_version(self, step: int) -> int:
        """Return the oldest version whose tokens the step that trains version `step` may use."""
        return version_of(self.max_age, step)

    def window_start(self, step: int) -> int:
        """Return `step` − ⌈α⌉, the oldest version that may sample the first token of a sample for step `step`.

        Seen from a sample: if version v sampled its first token, one of the steps v to v + ⌈α⌉ should train the sample.
        These steps are its *window*. At their end, finished members of a group stop waiting for unfinished members.
        `max_age` does not change the window: it only allows older tokens, while admission still follows α.
        """
        return version_of(window(self.async_ratio), step)

    def last_step(self, token_version: int) -> int:
        """Return the last step that may train a token of this version. The buffer uses it if steps wait for groups."""
        return last_step(token_version, self.max_age)

    @property
    def trains_parts(self) -> bool:
        """True if a group may be trained in parts, in several steps. With α = 0 a step waits for whole groups."""
        return window(self.async_ratio) >= 1

    @property
    def groups_per_batch(self) -> int:
        """Number of groups that one step trains."""
        return self.batch_size // self.group_size

    @property
    def place_count(self) -> int:
        """Number of places of the whole run. The steps need no group at a later place, so none is issued there."""
        return self.steps * self.groups_per_batch + self.extra_groups


class DomainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one domain, from the environment (`Domain`). Where the environment gives None, the run's setting."""

    weight: float
    """Share of the groups, relative to the weights of the other domains."""
    group_size: int
    """Number of samples of a group, without redundant samples."""
    filter: GroupFilter
    """Filter of the domain's complete groups."""
    sampling: Sampling = PLAIN
    """Sampling settings of the domain's samples."""
    max_turns: int = 0
    """Number of responses after which an episode is truncated."""
    max_new_tokens: int = 0
    """Longest response, in tokens."""

    @classmethod
    def of(cls, name: str, domain: Domain, rollout: RolloutConfig) -> DomainSettings:
        """Combine the settings of the domain `name` with the settings of the run.

        The first fault that is found is raised.

        Raises:
            ConfigError: a value is not allowed, or tokens that are drawn with these settings cannot be trained.
        """
        own = msgspec.structs.asdict(domain)
        combined = {key: getattr(rollout, key) if value is None else value for key, value in own.items()}
        # A value of the environment is checked like the key of this name in the configuration. `examine` returns the
        # value and its problems.
        types = {field.name: field.type for field in msgspec.structs.fields(RolloutConfig)}
        given = {key: value for key, value in own.items() if key in types and value is not None}
        faults = [
            (key, problem.message) for key, value in given.items() for problem in examine(value, types[key], key)[1]
        ]
        sampling = sampling_of({key: combined.pop(key) for key in SAMPLING_KEYS})
        for option, fault in faults or sampling_faults(sampling):
            raise ConfigError(f"env.path: {option} of the domain {name!r}: {fault}")
        group_filter = GroupFilter(combined.pop("drop_equal_rewards"), combined.pop("accuracy_bounds"))
        return cls(filter=group_filter, sampling=sampling, **combined)


class ProblemKinds(NamedTuple):
    """Kinds and domains of the environment's problems, which the hub and the nodes need.

    The hub chooses problems by domain, and a node plays each task with the limits of its domain.
    """

    kind_of: Callable[[int], str]
    """Returns the kind of the problem that the environment shows for a seed."""
    domains: Mapping[str, DomainSettings]
    """Settings of each domain; empty if there are none."""

    @classmethod
    def of(cls, config: Config, kind_of: Callable[[int], str], domains: Mapping[str, Domain]) -> ProblemKinds:
        """Return the kinds and domains of an environment's problems. The hub and each node call this when they start.

        Args:
            config: the run's configuration. It completes the settings of the domains.
            kind_of: the environment's function that returns the kind of the problem with a seed.
            domains: the environment's settings of each domain.

        Raises:
            ConfigError: a domain has a value that is not allowed, or tokens that are drawn with its sampling settings
                cannot be trained.
        """
        settings = {name: DomainSettings.of(name, domain, config.rollout) for name, domain in domains.items()}
        for name, own in settings.items():
            # With top_k the trainer must know which tokens were kept.
            if (fault := config.why_kept_tokens_unknown(own.sampling)) is not None:
                raise ConfigError(f"env.path: top_k of the domain {name!r}: {fault}")
            # The server of a teacher gives log-probs at temperature 1, over all tokens.
            for option, fault in faults_with_teacher(own.sampling, config.algorithm.teacher):
                raise ConfigError(f"env.path: {option} of the domain {name!r}: {fault}")
        return cls(kind_of, settings)


def _unnamed(seed: int) -> str:
    """Return the kind of any problem of an environment without kinds: the empty name."""
    return ""


ONE_KIND = ProblemKinds(_unnamed, MappingProxyType({}))
"""Problems of an environment without kinds: all are of one kind, whose name is empty, and there are no domains."""


class RoundSize(msgspec.Struct, frozen=True):
    """Least size of a round: the complete groups with which a step begins or goes on while its batch is not whole.

    A round has at least `least` groups and, in addition, `groups` groups or `tokens` tokens.
    """

    least: int
    """Number of groups with which each data shard (the ranks that train the same samples) gets a sample."""
    groups: int
    """Number of groups that are enough: a batch has `ROUNDS` rounds of this size."""
    tokens: int
    """Number of sampled tokens that are enough: they fill a micro-batch on each data shard."""

    @classmethod
    def of(cls, config: Config) -> RoundSize:
        """Return the least size of a round of a run with this configuration."""
        least = math.ceil(config.data_shards / config.rollout.group_size)
        groups = math.ceil(config.groups_per_batch / ROUNDS)
        return cls(least, max(least, groups), config.data_shards * config.train.max_tokens_per_microbatch)

    def reached(self, groups: int, tokens: int) -> bool:
        """Return True if so many groups with so many sampled tokens make a round."""
        return groups >= self.groups or (groups >= self.least and tokens >= self.tokens)


class BufferRules(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a `SampleBuffer` beside the age contract, from `[rollout]` and the environment."""

    retries: int = 2
    """Number of attempts beyond the first at a task that fails because of the infrastructure."""
    breaker: int = 64
    """Number of tasks given up in a row that stops the run."""
    quarantine: int = 16
    """Number of tasks of one kind given up in a row that puts the kind into quarantine."""
    on_expire: Literal["mask", "requeue", "wait"] = "mask"
    """Treatment of samples with tokens that are too old: leave these tokens out of the loss, start the sample again, or
    hold the step back until the sample is done."""
    fifo_window: float | None = None
    """Number of batches, in the order of issue, from whose groups a step chooses. None: from all complete groups."""
    extra_per_group: int = 0
    """Number of redundant members of each group, so that it does not have to wait for its slowest members."""
    whole_groups: bool = False
    """True if the tasks of a group are leased to one node together."""
    waves: bool = False
    """True if groups start in waves: the groups of one batch, and the next wave only when no task is unfinished."""
    filter: GroupFilter = GroupFilter()
    """Filter of groups whose kind is not a domain."""
    sampling: Sampling
    """Sampling settings of tasks whose kind is not a domain."""
    domains: dict[str, DomainSettings] = {}
    """Settings of each domain. Empty if there are no domains."""
    drift: float = 1.0
    """Number of batches by which a domain may be ahead of its share. A larger value would wait less for slow domains,
    and a smaller one would wait more often."""
    problems: str = ""
    """Fingerprint of the environment's set of problems; empty if unknown. If it has changed when a run is resumed, the
    unfinished groups of the earlier set are not continued."""
    round: RoundSize | None = None
    """Least size of a round of a streamed step. None: a step waits for its whole batch."""

    @classmethod
    def of(cls, config: Config, domains: Mapping[str, DomainSettings] = ONE_KIND.domains) -> BufferRules:
        """Return the settings of a run with this configuration, whose environment has these domains.

        The hub calls this once, when it starts.
        """
        rollout = config.rollout
        return cls(
            retries=rollout.retries,
            breaker=rollout.breaker,
            quarantine=max(1, rollout.breaker // QUARANTINE_PART),
            on_expire=rollout.on_expire,
            fifo_window=rollout.fifo_window,
            extra_per_group=rollout.extra_per_group,
            whole_groups="group" in rollout.barriers,
            waves="batch" in rollout.barriers,
            filter=GroupFilter(rollout.drop_equal_rewards, rollout.accuracy_bounds),
            sampling=config.sampling,
            domains=dict(domains),
            problems=fingerprint(config.env),
            round=None if why_not_streamed(config) is not None else RoundSize.of(config),
        )

    def filter_of(self, kind: str) -> GroupFilter:
        """Return the filter for groups of a kind: the filter of its domain, or of the run if the kind is no domain."""
        return self.domains[kind].filter if kind in self.domains else self.filter

    def sizes(self, group_size: int) -> dict[str, int]:
        """Return the number of members of a group, including redundant members, by domain.

        The entry under the empty name is for all other kinds: the run's `group_size` plus the redundant members.
        """
        named = {name: domain.group_size for name, domain in self.domains.items()}
        return {name: size + self.extra_per_group for name, size in {"": group_size, **named}.items()}

    def samplings(self) -> dict[str, Sampling]:
        """Return the sampling settings by domain. The settings of all other kinds are under the empty name."""
        return {"": self.sampling, **{name: domain.sampling for name, domain in self.domains.items()}}


class BufferSettings(msgspec.Struct, frozen=True):
    """All settings on which the decisions of a buffer depend. The journal and each checkpoint keep them."""

    contract: AgeContract
    rules: BufferRules
    # The encoded name is part of the format of checkpoints and journals.
    slice_size: int = msgspec.field(name="at_once")
    """Number of groups in one slice of the backlog, which is the store's postponed work on many groups."""


# -- domains ---------------------------------------------------------------------------------------------------------


class DomainTotals(msgspec.Struct):
    """Counts of `DomainShares` that a checkpoint keeps. The keys are the names of the domains."""

    weights: dict[str, float]
    """Weights of the domains when the groups were counted."""
    trained: dict[str, int]
    """Number of groups that were trained, complete or in parts."""
    filtered: dict[str, int] = {}
    """Number of groups that were filtered out since the last trained group of the domain."""
    passed: dict[str, int] = {}
    """Number of groups that were filtered out and count as turns of their domain (see `DomainShares`)."""


class DomainShares:
    """Divides the groups of a run among its domains, by their weights.

    A *turn* of a domain is a group that counts for its share: a trained group, or a filtered group that is not
    replaced. A group that leaves without being trained is replaced by a group of its domain. Otherwise the next group
    is of the domain that is furthest below its share, where groups in flight count as trained. More than
    `FILTERED_BATCHES` batches of a domain's groups may be filtered out in a row. Then further filtered groups count as
    turns and are not replaced, until a group of the domain is trained.

    A step takes any complete groups, so a fast domain can get ahead. But the domain's trained groups may exceed its
    share of all trained groups by at most `drift` batches and one group. At this limit a step waits for groups of the
    other domains, as long as such groups can still become complete. Domains in quarantine have no share; their
    remaining groups may always be trained.

    Invariant: within one step, and if no domain goes into quarantine, the replacing groups are about the same problems,
    in whatever order groups end. So a synchronous run (α = 0) can be repeated.

    Conservation: a group counts as alive from its issue on. When it is trained, it counts as trained instead, for the
    rest of the run. When it leaves untrained, it no longer counts, unless it is filtered out and counts as a turn.

    Args:
        settings: settings of each domain. If there are none, this class decides nothing.
        batch: number of groups of a step.
        drift: number of batches by which a domain may be ahead.
        totals: counts from a checkpoint; ignored if they were made under other weights.
        alive: the domain of each group that was issued, and has neither left nor been trained.
    """

    def __init__(
        self,
        settings: Mapping[str, DomainSettings],
        batch: int,
        drift: float,
        totals: DomainTotals | None = None,
        alive: Iterable[str] = (),
    ) -> None:
        self._weights = {name: each.weight for name, each in settings.items()}
        self._batch = batch
        self._max_ahead = drift * batch + 1
        """Number of groups by which the trained groups of a domain may exceed its share."""
        nothing = dict.fromkeys(self._weights, 0)
        self.totals = DomainTotals(self._weights, dict(nothing), dict(nothing), dict(nothing))
        if totals is not None and totals.weights == self._weights:
            self.totals.trained |= totals.trained
            self.totals.filtered |= totals.filtered
            self.totals.passed |= totals.passed
        self._owed = dict(nothing)
        """Number of groups of each domain that left untrained and are not replaced yet."""
        self._alive = nothing
        """Number of groups of each domain that were issued, and have neither left nor been trained."""
        for name in alive:
            self._add(self._alive, name, 1)

    # -- decisions ---------------------------------------------------------------------------------------------------

    def next_domain(self, quarantined: Collection[str]) -> str | None:
        """Return the domain of the next group. None if there are no domains, or all are in `quarantined`."""
        shares = self._shares(quarantined)
        if not shares:
            return None
        # Choose the first domain that is owed a group, not the domain that is owed most groups. That choice would
        # depend on the order in which groups left, so a synchronous run could not be repeated.
        if (owed := next((name for name in shares if self._owed[name]), None)) is not None:
            return owed
        counted = {name: self._turns(name) + self._alive[name] for name in shares}
        total = 1 + sum(counted.values())  # With the next group.
        return max(shares, key=lambda name: shares[name] * total - counted[name])

    def limits(self, quarantined: Collection[str], missing: int | None = None) -> dict[str, int] | None:
        """Return the largest number of groups of each domain that the next step may take. None without domains.

        Domains in `quarantined` have no entry, and so no limit. `missing` is the number of groups that the step has not
        taken yet; None: all of its groups.
        """
        if not self._weights:
            return None
        shares = self._shares(quarantined)
        total = (self._batch if missing is None else missing) + sum(map(self._turns, shares))
        return {
            name: max(0, math.floor(share * total + self._max_ahead + SLACK) - self._turns(name))
            for name, share in shares.items()
        }

    # -- events ------------------------------------------------------------------------------------------------------

    def issued(self, name: str) -> None:
        """Count a group that was issued. If its domain was owed a group, the domain is owed one less."""
        self._add(self._alive, name, 1)
        if self._owed.get(name):
            self._owed[name] -= 1

    def left_untrained(self, name: str) -> None:
        """Count a group that has left without a trained member. The domain is owed a group instead."""
        self._add(self._alive, name, -1)
        self._add(self._owed, name, 1)

    def filtered(self, name: str, quarantined: Collection[str]) -> int:
        """Count a complete group that was filtered out. Call `left_untrained` first.

        Beyond the limit (`FILTERED_BATCHES`), the group counts as a turn of its domain and is not replaced: the group
        that `left_untrained` has added to the owed groups is taken back. Groups of domains in quarantine, and of kinds
        that are no domains, are not counted.

        Returns:
            The number of groups filtered out in a row if it has just reached the limit, so that the caller can notify
            the user once; otherwise 0.
        """
        if (share := self._shares(quarantined).get(name)) is None:
            return 0
        in_a_row = self.totals.filtered[name] = self.totals.filtered.get(name, 0) + 1
        limit = max(FILTERED_GROUPS, math.ceil(FILTERED_BATCHES * self._batch * share))
        if in_a_row > limit:
            self._add(self.totals.passed, name, 1)
            self._add(self._owed, name, -1)
        return in_a_row if in_a_row == limit else 0

    def trained(self, name: str) -> None:
        """Count a group, or the first part of a group, that a step has taken for training."""
        self._add(self._alive, name, -1)
        self._add(self.totals.trained, name, 1)
        # The count of filtered groups in a row is reset here, and not when the filter keeps a group. A reset at that
        # time would depend on the order in which groups end, and a synchronous run could not be repeated.
        self.totals.filtered.pop(name, None)

    def put_back(self, name: str) -> None:
        """Undo `trained` for a group that a step has taken and will not train."""
        self._add(self._alive, name, 1)
        self._add(self.totals.trained, name, -1)

    # -- metrics -----------------------------------------------------------------------------------------------------

    def row(self, quarantined: Collection[str]) -> dict[str, float]:
        """Return metrics of a step: each domain's part of the trained groups, and the largest drift, in batches.

        The drift is the difference between a domain's trained groups and its share. The result is empty before a group
        of a domain is trained.
        """
        total = sum(self.totals.trained.values())
        if not total:
            return {}
        row = {f"domain/{name}/share": trained / total for name, trained in self.totals.trained.items()}
        shares = self._shares(quarantined)
        counted = sum(self.totals.trained[name] for name in shares)
        off = [abs(self.totals.trained[name] - share * counted) for name, share in shares.items()]
        return {**row, "share_drift": max(off, default=0.0) / self._batch}

    def _turns(self, name: str) -> int:
        """Return the number of a domain's turns: groups that were trained, or filtered out and not replaced."""
        return self.totals.trained[name] + self.totals.passed[name]

    def _shares(self, quarantined: Collection[str]) -> dict[str, float]:
        """Return the intended share of each domain that is not in quarantine. The shares sum to 1."""
        weights = {name: weight for name, weight in self._weights.items() if name not in quarantined}
        total = sum(weights.values())
        return {name: weight / total for name, weight in weights.items()}

    def _add(self, counts: dict[str, int], name: str, count: int) -> None:
        """Add `count` to the number of a domain in `counts`. Does nothing if `name` is no domain of this run."""
        # A group without an entry is of a kind that is no domain, or of a domain that a resumed run does not have.
        if name in counts:
            counts[name] += count


# -- breaker ---------------------------------------------------------------------------------------------------------


class Streaks(msgspec.Struct):
    """Failures in a row, up to now: the state of the `Breaker`, which a checkpoint keeps."""

    given_up: int = 0
    """Number of tasks that were given up since a task last finished, or since a kind last went into quarantine."""
    given_up_of_kind: dict[str, int] = {}
    """Number of tasks of each kind that were given up since a task of the kind last finished. Decides on quarantine."""
    filtered: int = 0
    """Number of groups that were filtered out since a group was last kept."""
    filtered_of_kind: dict[str, int] = {}
    """The count `filtered`, divided by kind. Only the error message uses it."""


class Breaker:
    """Stops a run in which too many tasks or groups in a row fail, and finds kinds that have to go into quarantine.

    Such a run would only waste compute: its environment or its engines are broken, or it has nothing to learn from.

    Args:
        tasks: number of tasks given up in a row, over all kinds, that stops the run.
        tasks_of_kind: number of tasks of one kind given up in a row that puts the kind into quarantine.
        groups: number of groups filtered out in a row that stops the run.
        streaks: the counts to continue. None: all begin at 0.
    """

    def __init__(self, tasks: int, tasks_of_kind: int, groups: int, streaks: Streaks | None = None) -> None:
        self._tasks = tasks
        self._tasks_of_kind = tasks_of_kind
        self._groups = groups
        self.streaks = streaks or Streaks()

    def finished(self, task: Task) -> None:
        """Record that a task has finished. This resets the counts of given-up tasks: in all, and of its kind."""
        self.streaks.given_up = 0
        self.streaks.given_up_of_kind.pop(task.kind, None)

    def given_up(self, task: Task, failure: Failure) -> bool:
        """Record that a task was given up because of `failure`. Returns True if its kind goes into quarantine.

        In that case the count over all kinds begins at 0 again, because the other kinds may work. The unnamed kind
        never goes into quarantine: it may be the only kind of the run, which the breaker then has to stop.

        Raises:
            BreakerError: too many tasks, of any kinds, were given up and none finished between.
        """
        in_a_row = self.streaks.given_up_of_kind.get(task.kind, 0) + 1
        if task.kind and in_a_row >= self._tasks_of_kind:
            self.streaks.given_up_of_kind.pop(task.kind, None)
            self.streaks.given_up = 0
            return True
        self.streaks.given_up_of_kind[task.kind] = in_a_row
        self.streaks.given_up += 1
        if self.streaks.given_up >= self._tasks:
            raise BreakerError(
                f"{self.streaks.given_up} samples in a row were given up and none finished between; "
                f"the last one ({failure.outcome}): {failure.message}. Repair the cause, or raise rollout.breaker "
                "or rollout.retries."
            )
        return False

    def kept(self) -> None:
        """Record that the filter has kept a complete group. This resets the counts of filtered groups."""
        self.streaks.filtered = 0
        self.streaks.filtered_of_kind.clear()

    def filtered(self, kind: str) -> None:
        """Record that a complete group was filtered out.

        Raises:
            BreakerError: too many groups, of any kinds, were filtered out and none was kept between. The group is
                counted before the error is raised.
        """
        of_kind = self.streaks.filtered_of_kind
        self.streaks.filtered += 1
        of_kind[kind] = of_kind.get(kind, 0) + 1
        if self.streaks.filtered >= self._groups:
            # Kinds are listed only if some kind has a name.
            kinds = f" ({', '.join(f'{of_kind[name]} of {name}' for name in sorted(of_kind))})" if any(of_kind) else ""
            raise BreakerError(
                f"{self.streaks.filtered} groups in a row{kinds} were filtered out and none was kept, so there is "
                "nothing to learn from. The problems are all too easy or too hard, or rollout.accuracy_bounds is too "
                "narrow."
            )
