"""Several domains in one run get their shares, whatever their speed, group size and filters. Time is virtual."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from itertools import count
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from flash.config.tree import Config, EnvConfig, ModelConfig, RolloutConfig, RunConfig
from flash.environment.interface import Domain
from flash.errors import BreakerError, ConfigError, ContractError
from flash.samples.buffer import SampleBuffer
from flash.samples.groups import GroupFilter
from flash.samples.journal import MemoryJournal, Replay
from flash.samples.rules import AgeContract, BufferRules, DomainSettings, DomainShares, ProblemKinds
from flash.samples.store import BufferState
from flash.samples.tasks import TaskSource
from flash.sampling import PLAIN, Sampling
from flash.types import Failure, Lease, Outcome, VersionRun
from tests.samples.cases import lease_all, trajectory, void

ANY = GroupFilter()
"""Filter that keeps all groups."""
DIFFERENT = GroupFilter(drop_equal_rewards=True)
"""Filter that keeps only groups with different rewards."""


def own(weight: float, group_size: int, kept: GroupFilter) -> DomainSettings:
    """Return the settings of a domain with this weight, size of groups and filter."""
    return DomainSettings(weight=weight, group_size=group_size, filter=kept)


def rules(**weights: float) -> dict[str, DomainSettings]:
    """Return domains with these weights, groups of two samples, and no filter."""
    return {name: own(weight, 2, ANY) for name, weight in weights.items()}


def by_turns(names: str) -> Any:
    """Return a function from a seed to the kind of its problem: each letter of `names` in turn."""
    return lambda seed: names[seed % len(names)]


def buffer_of(
    domains: dict[str, DomainSettings],
    *,
    alpha: float = 1.0,
    groups: int = 4,
    steps: int = 10,
    drift: float = 1.0,
    journal: MemoryJournal | None = None,
    state: BufferState | None = None,
    step: int = 0,
    **more: Any,
) -> SampleBuffer:
    """Return a buffer of a run with these domains.

    Args:
        domains: settings of each domain, by names of one letter.
        alpha: the asynchronous ratio.
        groups: number of groups of a step.
        steps: number of steps of the run.
        drift: number of batches by which a domain may be ahead of its share.
        journal: records the events; None: a journal that the test does not need.
        state: the state that an earlier buffer has left; None in a new run.
        step: the version from which the run continues.
        more: further fields of `BufferRules`.
    """
    more = {"sampling": PLAIN} | more
    made = BufferRules(retries=1, breaker=10_000, quarantine=4, domains=domains, drift=drift, **more)
    cursor = None if state is None else state.cursor
    source = TaskSource(0, made.sizes(2), by_turns("".join(domains)), cursor, made.samplings())
    contract = AgeContract(alpha, 2 * groups, 2, steps)
    return SampleBuffer(contract, source, made, step=step, state=state, journal=journal or MemoryJournal())


# -- decisions -------------------------------------------------------------------------------------------------------


def test_issues_follow_the_weights_closely() -> None:
    domains = DomainShares(rules(a=3, b=1), batch=4, drift=1)
    issued = Counter[str]()
    for number in range(1, 401):
        name = domains.next_domain([])
        assert name is not None
        domains.issued(name)
        issued[name] += 1
        assert abs(issued["a"] - 0.75 * number) <= 1


def test_what_leaves_untrained_is_made_up_for_in_its_own_domain() -> None:
    domains = DomainShares(rules(a=1, b=1), batch=4, drift=1)
    for _ in range(20):
        domains.issued(domains.next_domain([]) or "")
    for _ in range(5):
        domains.left_untrained("b")
    again = Counter[str]()
    for _ in range(5):
        name = domains.next_domain([]) or ""
        domains.issued(name)
        again[name] += 1
    assert again == {"b": 5}


def test_a_domain_in_quarantine_has_no_share_and_the_others_have_its() -> None:
    domains = DomainShares(rules(a=1, b=1, c=2), batch=4, drift=0)
    assert domains.next_domain(["c"]) in ("a", "b")
    assert domains.limits(["c"]) == {"a": 3, "b": 3}
    assert domains.next_domain(["a", "b", "c"]) is None


def test_a_domain_may_be_ahead_by_the_drift_and_a_group_and_no_more() -> None:
    domains = DomainShares(rules(a=1, b=1), batch=4, drift=0.5)
    for _ in range(5):
        domains.issued("a")
        domains.trained("a")
    # Of nine groups after the next step 4.5 are its share, and it may have three more.
    assert domains.limits([]) == {"a": 2, "b": 7}
    assert domains.row([])["domain/a/share"] == 1
    assert domains.row([])["share_drift"] == 2.5 / 4


def test_counts_go_on_from_a_checkpoint_and_begin_anew_under_other_weights() -> None:
    domains = DomainShares(rules(a=1, b=1), batch=4, drift=1)
    domains.issued("a")
    domains.trained("a")
    assert DomainShares(rules(a=1, b=1), 4, 1, domains.totals).next_domain([]) == "b"
    assert DomainShares(rules(a=2, b=1), 4, 1, domains.totals).row([]) == {}


def test_a_domain_that_is_only_filtered_out_has_its_turns_until_a_group_of_it_is_trained() -> None:
    domains = DomainShares(rules(a=1, b=1), batch=8, drift=0)

    def issue() -> str:
        name = domains.next_domain([])
        assert name is not None
        domains.issued(name)
        return name

    told: list[int] = []
    for _ in range(16):
        assert issue() == "a" or not told
        domains.left_untrained("a")
        told.append(domains.filtered("a", []))
    assert told == [0] * 15 + [16]
    for _ in range(30):
        if issue() == "a":
            domains.left_untrained("a")
            assert domains.filtered("a", []) == 0
        else:
            domains.trained("b")
    assert 14 <= domains.totals.trained["b"] <= 16, "they take turns"
    most = domains.limits([])
    assert most is not None
    assert most["b"] >= 4, "what came to nothing holds nobody back"
    again = DomainShares(rules(a=1, b=1), 8, 0, domains.totals)
    assert again.limits([]) == most
    again.trained("a")
    assert [again.filtered("a", []) for _ in range(16)][-1] == 16


def test_a_domain_without_problems_is_told_by_its_name() -> None:
    with pytest.raises(ContractError, match="'c'"):
        TaskSource(0, 1, by_turns("ab")).next_problem("c")


# -- a buffer --------------------------------------------------------------------------------------------------------


def test_each_domain_has_groups_of_its_own_size_and_filter() -> None:
    domains = {
        "a": own(1, 2, ANY),
        "b": own(1, 4, DIFFERENT),
    }
    buffer = buffer_of(domains, groups=2, alpha=0)
    leases = lease_all(buffer, 0)
    assert Counter(lease.task.kind for lease in leases) == {"a": 2, "b": 4}
    assert len({lease.task.task_id for lease in leases}) == 6
    for lease in leases:
        buffer.deliver(lease.lease_id, trajectory(lease.task, 0))
    assert buffer.samples.ledger.filtered == 4, "all rewards of b were equal"
    again = lease_all(buffer, 0)
    assert {lease.task.kind for lease in again} == {"b"}


def test_samples_of_each_domain_have_its_temperature_also_after_a_replay_and_a_restart_that_changes_it() -> None:
    journal, run = MemoryJournal(), RolloutConfig(temperature=0.9)
    domains = {"a": DomainSettings.of("a", Domain(temperature=0.3, group_size=2), run)}
    domains["b"] = DomainSettings.of("b", Domain(group_size=2), run)
    buffer = buffer_of(domains, alpha=0, journal=journal)
    lent = lease_all(buffer, 0)
    assert Counter((lease.task.kind, lease.task.sampling.temperature) for lease in lent) == {
        ("a", 0.3): 4,
        ("b", 0.9): 4,
    }
    replay = Replay(None, 0)
    for event in journal.after(0):
        replay.apply(event)
    state = replay.state(until=0)
    assert state is not None
    hotter = {name: replace(domain, sampling=Sampling(1.2)) for name, domain in domains.items()}
    resumed = buffer_of(hotter, alpha=1, state=state)
    resumed.revoke([lease.lease_id for lease in lent])
    again = {lease.task for lease in lease_all(resumed, 0)}
    old = {task for task in again if task.sampling != Sampling(1.2)}
    assert old == {lease.task for lease in lent}, "what was begun goes on as it began"
    assert again > old


@pytest.mark.slow
@settings(max_examples=50)
@given(st.integers(0, 10**6))
def test_at_a_ratio_of_zero_the_same_problems_are_issued_in_whatever_order_groups_end(seed: int) -> None:
    draw = random.Random(seed)
    names = "abc"[: draw.randint(2, 3)]
    domains = {name: own(draw.choice([1, 2, 3]), 2, DIFFERENT) for name in names}
    equal = {name: draw.choice([0.1, 0.5, 0.95, 1.0]) for name in names[1:]} | {"a": 0.3}
    groups, drift = draw.randint(2, 6), draw.choice([0.0, 0.5, 1.0])

    def issued(order: int) -> list[tuple[list[tuple[str, int]], list[int]]]:
        """Return the problems that each step has issued, and those that it trains, in order."""
        dice, steps = random.Random(order), list[tuple[list[tuple[str, int]], list[int]]]()
        buffer = buffer_of(domains, alpha=0, groups=groups, steps=5, drift=drift)
        for version in range(5):
            problems, out = set[tuple[str, int]](), lease_all(buffer, version)
            while out:
                problems |= {(lease.task.kind, lease.task.seed) for lease in out}
                task = (lease := out.pop(dice.randrange(len(out)))).task
                differs = task.sample_index and random.Random(f"{seed} {task.seed}").random() >= equal[task.kind]
                buffer.deliver(lease.lease_id, trajectory(task, version, reward=float(bool(differs))))
                if dice.random() < 0.5 or not out:
                    out += lease_all(buffer, version)
            taken = buffer.next_round(version)
            assert taken is not None
            steps.append((sorted(problems), [group.members[0].task.seed for group in taken]))
            buffer.commit(version)
        return steps

    assert issued(1) == issued(2) == issued(3)


@pytest.mark.parametrize(
    ("domain", "message"),
    [
        (Domain(temperature=0.0), "temperature of the domain 'c': expected a number from 0.01 to 2, got 0"),
        (Domain(top_k=-1), "top_k of the domain 'c': expected an integer from 0 to 1024, got -1"),
        (
            Domain(top_p=0.9),
            "top_p of the domain 'c': needs top_k, from 1 to 1024: the trainer can compute it",
        ),
        (Domain(top_k=0), "top_p of the domain 'c': needs top_k"),
    ],
)
def test_a_domain_cannot_sample_what_cannot_be_trained(domain: Domain, message: str) -> None:
    run = RolloutConfig(top_k=20, top_p=0.5) if domain.top_k == 0 else RolloutConfig()
    with pytest.raises(ConfigError, match=f"env.path: {message}"):
        DomainSettings.of("c", domain, run)


def test_a_domain_keeps_no_sets_where_logits_are_too_coarse_to_tell_which() -> None:
    model = ModelConfig(path="model", dtype="bfloat16", head_dtype="model")
    config = Config(run=RunConfig(name="n"), model=model, env=EnvConfig(path="envs.mixture:Mixture"))
    assert not ProblemKinds.of(config, lambda seed: "a", {"a": Domain()}).domains["a"].sampling.has_kept_sets
    with pytest.raises(
        ConfigError, match=r"top_k of the domain 'a': .* does not know which .* with logits in bfloat16"
    ):
        ProblemKinds.of(config, lambda seed: "a", {"a": Domain(top_k=5)})


def test_a_domain_has_its_own_sampling_and_else_the_runs() -> None:
    run = RolloutConfig(temperature=0.9, top_k=20, top_p=0.8, stop=("\n",))
    own = DomainSettings.of("a", Domain(top_p=0.5, stop=("x", 5, "y"), logit_bias=((3, 1.0),)), run)
    assert own.sampling == Sampling(0.9, 20, 0.5, stop=("x", "y"), stop_token_ids=(5,), logit_bias=((3, 1.0),))


def test_a_step_does_not_wait_for_the_slow_domain_until_the_drift_is_used_up() -> None:
    buffer = buffer_of(rules(a=1, b=1), groups=4, alpha=3, drift=1.0)
    slow: list[Lease] = []
    for version in range(10):
        for lease in lease_all(buffer, version):
            if lease.task.kind == "b":
                slow.append(lease)
            else:
                buffer.deliver(lease.lease_id, trajectory(lease.task, version))
        if not buffer.has_round(version):
            break
        assert buffer.next_round(version) is not None
        buffer.commit(version)
    assert version == 2, "a batch ahead and a group: 4 of 4 and 4 of 8, and 1 of 12 too many"
    for lease in slow:
        buffer.deliver(lease.lease_id, trajectory(lease.task, version))
    assert buffer.has_round(version)


class Timed:
    """A run in virtual time. Each domain has a latency. A step starts as soon as it can and takes a second."""

    def __init__(
        self, seed: int, domains: dict[str, DomainSettings], latency: dict[str, float], **options: Any
    ) -> None:
        """Make a run. `latency` has the usual seconds of a sample, by domain, and `options` is for `buffer_of`."""
        self.drawn = (seed, domains, latency, options)
        self.dice = random.Random(seed)
        self.journal = MemoryJournal()
        self.buffer = buffer_of(domains, journal=self.journal, **options)
        self.domains, self.latency = domains, latency
        self.alpha, self.groups = options["alpha"], options["groups"]
        self.steps, self.drift = options["steps"], options["drift"]
        self.version, self.now = 0, 0.0
        self.crowded = False
        """True if groups of some domains may have taken all places. Then a step takes them although they are ahead."""
        self.events: list[tuple[float, int, Lease, int]] = []
        """Heap of the samples that run: the time of the end, a number that makes the order unique, the lease, and the
        version that has sampled the first token."""
        self.order = count()
        self.trained = Counter[str]()
        """Number of trained groups, by domain."""
        self.counted: set[int] = set()
        """Groups that are counted in `trained`. A group that is trained in parts counts once."""

    def __repr__(self) -> str:
        """Return an expression that makes this run again, for the report of hypothesis."""
        return f"Timed{self.drawn}"

    def run(self) -> None:
        """Train all steps. `ready_at` is the time at which the trainer is ready for the next step."""
        ready_at = 0.0
        while self.version < self.steps:
            for lease in lease_all(self.buffer, self.version):
                seconds = self.latency[lease.task.kind] * self.dice.uniform(0.5, 2)
                heapq.heappush(self.events, (self.now + seconds, next(self.order), lease, self.version))
            if ready_at <= self.now and self.step():
                ready_at = self.now + 1.0
                continue
            times = [self.events[0][0]] if self.events else []
            times += [ready_at] if ready_at > self.now else []
            assert times, f"the run stalls at step {self.version}: nothing is on its way"
            self.now = min(times)
            while self.events and self.events[0][0] <= self.now:
                self.end(*heapq.heappop(self.events)[2:])
        self.check()

    def end(self, lease: Lease, began: int) -> None:
        """Deliver a sample that version `began` has begun, unless its lease was withdrawn."""
        if lease.lease_id in self.buffer.samples.leases.to_cancel:
            return
        versions = [VersionRun(began, 1), VersionRun(self.version, 2)] if began < self.version else None
        reward = float(self.dice.random() < 0.5)
        self.buffer.deliver(lease.lease_id, trajectory(lease.task, began, reward=reward, versions=versions))
        self.tidy()

    def step(self) -> bool:
        """Train a step if its batch can be formed. Returns False if not."""
        if not self.buffer.has_round(self.version):
            return False
        if not self.drift and not self.buffer.samples.leases.out and not self.buffer.available(self.version):
            self.crowded = True
        groups = self.buffer.next_round(self.version)
        self.tidy()
        groups = groups or self.buffer.next_round(self.version)
        assert groups is not None
        oldest = self.version - math.ceil(self.alpha)
        for group in groups:
            if group.group_id not in self.counted:
                self.counted.add(group.group_id)
                self.trained[group.kind] += 1
            # Law 3; what is older is left out of the loss.
            assert group.earlier or group.trained_tokens(oldest) > 0
        self.buffer.commit(self.version)
        self.tidy()
        self.version += 1
        self.check()
        return True

    def tidy(self) -> None:
        """Do all postponed work."""
        while self.buffer.do_slice():
            pass

    def check(self) -> None:
        """Check the ledger, and that no domain is further from its share than the drift allows."""
        self.buffer.samples.check()
        if self.drawn[3].get("on_expire") == "wait":
            assert not self.drift or Outcome.STALE not in self.buffer.samples.ledger.discarded_tokens
        if self.crowded:
            return
        total, weights = sum(self.trained.values()), sum(domain.weight for domain in self.domains.values())
        most = self.drift * self.groups + 1
        for name, domain in self.domains.items():
            off = self.trained[name] - total * domain.weight / weights
            assert off <= most + 1e-6, f"{name} is ahead by {off} groups"
            assert off >= -most * (len(self.domains) - 1) - 1e-6, f"{name} starves by {-off} groups"


@st.composite
def runs(draw: st.DrawFn) -> Timed:
    """Draw a run with two to four domains, whose weights and latencies may differ much."""
    names = "abcd"[: draw(st.integers(2, 4))]
    domains = {
        name: own(
            draw(st.sampled_from([1, 2, 5, 50])), draw(st.integers(2, 4)), draw(st.sampled_from([ANY, DIFFERENT]))
        )
        for name in names
    }
    latency = {name: draw(st.sampled_from([0.01, 0.3, 3.0, 50.0])) for name in names}
    return Timed(
        draw(st.integers(0, 1000)),
        domains,
        latency,
        alpha=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
        groups=draw(st.integers(1, 6)),
        steps=draw(st.integers(2, 12)),
        drift=draw(st.sampled_from([0.0, 0.5, 1.0, 3.0])),
        on_expire=draw(st.sampled_from(["mask", "requeue", "wait"])),
    )


@settings(max_examples=30)
@given(runs())
def test_domains_of_any_speed_keep_their_shares_and_the_laws_and_every_run_ends(timed: Timed) -> None:
    timed.run()
    assert timed.version == timed.steps


def test_a_replayed_journal_comes_to_the_same_shares() -> None:
    domains = {
        "a": own(1, 2, DIFFERENT),
        "b": own(2, 4, ANY),
    }
    timed = Timed(3, domains, {"a": 0.01, "b": 5.0}, alpha=1.0, groups=3, steps=6, drift=1.0)
    timed.run()
    replay = Replay(None, 0)
    for event in timed.journal.after(0):
        replay.apply(event)
    state = replay.state(until=6)
    assert state is not None
    assert state.domain_totals == timed.buffer.samples.snapshot().domain_totals
    assert state.cursor == timed.buffer.samples.snapshot().cursor


def test_a_step_takes_what_is_left_of_a_domain_in_quarantine_whatever_versions_it_is_of() -> None:
    buffer = buffer_of(rules(a=1, b=100), groups=3, alpha=1)
    leases = lease_all(buffer, 0)
    assert {lease.task.kind for lease in leases} == {"b"}
    for number, lease in enumerate(leases[::2]):
        buffer.deliver(lease.lease_id, trajectory(lease.task, version=number // 2))
    for _ in range(2):  # each once more
        for lease in [each for each in [*leases, *lease_all(buffer, 1)] if each.lease_id in buffer.samples.leases.out]:
            buffer.deliver(lease.lease_id, Failure(lease.task, Outcome.REWARD_ERROR, "boom", 0))
    assert "in quarantine" in buffer.samples.notes[-1]
    groups = buffer.next_round(1)
    assert groups is not None
    assert [group.group_id for group in groups] == [0, 1, 2]


def test_a_step_of_what_another_mixture_has_begun_waits_for_no_domain_that_has_no_place() -> None:
    before = buffer_of(rules(a=1), groups=3, alpha=0, drift=0)
    for lease in lease_all(before, 0):
        before.deliver(lease.lease_id, trajectory(lease.task, 0))
    buffer = buffer_of(rules(a=1, b=50), groups=3, alpha=0, drift=0, state=before.samples.snapshot())
    assert lease_all(buffer, 0) == []
    assert buffer.next_round(0) is not None
    buffer.commit(0)
    assert {lease.task.kind for lease in lease_all(buffer, 1)} == {"b"}


def test_the_first_sample_of_a_smaller_group_goes_out_when_there_is_room_for_a_group() -> None:
    domains = {
        "b": own(1, 4, ANY),
        "a": own(1, 1, ANY),
    }
    buffer = buffer_of(domains, groups=1, alpha=0.5)
    assert Counter(lease.task.kind for lease in lease_all(buffer, 0)) == {"b": 4, "a": 1}


def test_a_solved_domain_neither_ends_a_run_that_drops_equal_rewards_nor_takes_it_for_itself() -> None:
    domains = {
        "s": own(1, 2, DIFFERENT),
        "o": own(1, 2, DIFFERENT),
    }
    buffer = buffer_of(domains, groups=4, alpha=1, steps=12)
    issued: Counter[str] = Counter()
    for step in range(12):
        while (groups := buffer.next_round(step)) is None:
            leases = lease_all(buffer, step)
            issued.update(lease.task.kind for lease in leases)
            for lease in leases:
                reward = 1.0 if lease.task.kind == "s" else float(lease.task.sample_index)
                buffer.deliver(lease.lease_id, trajectory(lease.task, step, reward=reward))
        assert {group.kind for group in groups} == {"o"}
        buffer.commit(step)
    assert issued["s"] <= issued["o"] + 2 * 2 * 16
    assert [note for note in buffer.samples.notes if "of the domain 's' 16 groups in a row were filtered out" in note]
    buffer.samples.check()


def test_a_run_of_which_every_domain_is_filtered_out_ends_and_names_them() -> None:
    domains = {
        "a": own(1, 2, DIFFERENT),
        "b": own(3, 2, DIFFERENT),
    }
    buffer = buffer_of(domains, groups=2)

    def only_equal() -> None:
        while True:
            for lease in lease_all(buffer, 0):
                buffer.deliver(lease.lease_id, trajectory(lease.task, 0))

    with pytest.raises(BreakerError, match=r"40 groups in a row \([0-9]+ of a, [0-9]+ of b\) were filtered out"):
        only_equal()


def test_shares_count_anew_when_a_domain_comes_out_of_quarantine() -> None:
    domains = rules(a=1, b=1)
    journal = MemoryJournal()
    buffer = buffer_of(domains, groups=2, alpha=0, journal=journal)
    for step in range(3):
        while buffer.next_round(step) is None:
            for lease in lease_all(buffer, step):
                bad = Failure(lease.task, Outcome.ENV_ERROR, "boom", 1)
                buffer.deliver(lease.lease_id, bad if lease.task.kind == "a" else trajectory(lease.task, step))
        buffer.commit(step)
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(buffer.samples.snapshot()), type=BufferState)
    replay = Replay(None, 0)
    for event in journal.events:
        replay.apply(event)
    assert replay.state(until=3) == stored
    again = void(buffer_of(domains, groups=2, alpha=0, state=stored, step=3))
    assert again.samples.notes[0] == "environments of these kinds were in quarantine and are tried again: 'a'"
    assert Counter(lease.task.kind for lease in lease_all(again, 3)) == {"a": 2, "b": 2}
    assert again.samples.domains.row([]) == {}
