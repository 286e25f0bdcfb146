"""Credit of a batch: shaped rewards, advantages by estimator, rewards of turns at tokens, and weights by age."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from algorithms.base import Advantage
from algorithms.shaping import Overlong
from algorithms.staleness import ExponentialStaleness, LinearStaleness
from flash.config.learning import AlgorithmConfig
from flash.errors import ContractError
from flash.trainer.packing import pack
from flash.trainer.plan import Credit, assign_credit
from flash.types import BatchSample, Outcome, Shard, Span, Trajectory, Turn, VersionRun
from tests.branching import joined
from tests.trainer.trainer_cases import make_shard, make_trajectory

NOW = [VersionRun(0, 3)]
"""Three action tokens of version 0: two in the first turn of `make_trajectory`, and one in the second."""


def credit_of(shard: Shard, estimator: Advantage = "group", **algorithm: object) -> Credit:
    """Return the credit of a batch with these options of `[algorithm]`."""
    return assign_credit(shard, AlgorithmConfig(**algorithm), estimator)


def sample(group: int, reward: float, runs: list[VersionRun] = NOW) -> Trajectory:
    """Return a sample of a group, whose action tokens come from these versions."""
    return make_trajectory(group, 0, runs, np.random.default_rng(0), reward=reward)


def with_turns(trajectory: Trajectory, rewards: list[float]) -> Trajectory:
    """Return the trajectory with two turns with these rewards. `make_trajectory` makes two spans from two tokens on."""
    turns = [Turn("", "", reward, 0.0, 0.0, 0.0) for reward in rewards]
    return msgspec.structs.replace(trajectory, turns=turns, reward=sum(rewards))


def test_members_trained_in_an_earlier_step_count_for_the_advantages_of_their_group() -> None:
    late = make_shard([sample(0, 1.0), sample(1, 0.0)])
    whole = make_shard([sample(0, 1.0), sample(0, 0.0)])
    earlier = msgspec.structs.replace(late, earlier=[sample(0, 0.0).batch_sample()])
    assert credit_of(late).advantage_B.tolist() == [0.0, 0.0], "alone in its group a sample says nothing"
    assert credit_of(earlier).advantage_B.tolist() == [credit_of(whole).advantage_B[0], 0.0]
    assert len(credit_of(earlier).staleness_B) == len(credit_of(earlier).reward_B) == 2


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("group", [1.0, -1.0, 0.0]),
        ("group_mean", [1.5, -1.5, 0.0]),
        ("leave_one_out", [3.0, -3.0, 0.0]),
        ("batch", [3.0, 0.0, 5.0]),
        ("gae", [0.0, 0.0, 0.0]),
    ],
)
def test_each_estimator_gives_its_advantages(estimator: Advantage, expected: list[float]) -> None:
    shard = make_shard([sample(0, 3.0), sample(0, 0.0), sample(1, 5.0)])
    assert credit_of(shard, estimator).advantage_B.tolist() == pytest.approx(expected)


def test_turns_have_advantages_of_their_own_at_their_own_tokens() -> None:
    shard = make_shard([with_turns(sample(0, 0.0), [1.0, 0.0]), with_turns(sample(0, 0.0), [0.0, 3.0])])
    credit = credit_of(shard, "turn", gamma=0.5)
    # The returns of the first turns are 1 and 1.5, those of the second turns 0 and 3.
    assert [turn.tolist() for turn in credit.turn_advantages_B] == [[-1.0, -1.0], [1.0, 1.0]]
    unlike = make_shard([with_turns(sample(0, 0.0), [1.0, 0.0]), with_turns(sample(0, 0.0), [0.0, 1.0])])
    (micro,) = pack(unlike.samples, min_version=0, max_tokens=64)
    assert micro.turn_T.tolist() == [0, 0, 1, 0, 0, 1]
    assert credit_of(unlike, "turn").advantages(micro).tolist() == [0.0, 0.0, -1.0, 0.0, 0.0, 1.0]


def test_rewards_of_turns_stand_at_their_last_tokens_and_shaping_in_the_last_turn() -> None:
    shard = make_shard([with_turns(sample(0, 0.0), [1.0, 2.0]), with_turns(sample(0, 0.0), [5.0, 0.0])])
    (micro,) = pack(shard.samples, min_version=0, max_tokens=64)
    assert credit_of(shard, "gae").earned(micro).tolist() == [0.0, 1.0, 2.0, 0.0, 5.0, 0.0]
    shaping = [Overlong(limit=4, buffer=2, penalty=0.5)]
    assert credit_of(shard, "gae", shaping=shaping).earned(micro).tolist() == [0.0, 1.0, 1.75, 0.0, 5.0, -0.25]


def test_rewards_at_tokens_that_are_too_old_move_to_the_last_trained_token_before() -> None:
    runs = [
        [VersionRun(3, 1), VersionRun(2, 2)],
        [VersionRun(3, 2), VersionRun(1, 1)],
        [VersionRun(1, 2), VersionRun(3, 1)],
    ]
    shard = make_shard([with_turns(sample(0, 0.0, versions), [1.0, 2.0]) for versions in runs], step=3, min_version=3)
    (micro,) = pack(shard.samples, min_version=3, max_tokens=64)
    assert micro.turn_T.tolist() == [0, 0, 1] * 3
    # All trained tokens of the last sample come after its first turn.
    assert credit_of(shard, "gae").earned(micro).tolist() == [3.0, 0.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 2.0]


def test_a_branch_gets_the_rewards_of_its_sample_from_its_own_first_turn_on() -> None:
    first = with_turns(sample(0, 0.0), [1.0, 2.0])
    other = with_turns(sample(0, 0.0), [10.0, 20.0])
    shard = make_shard([joined([first, other])])
    (micro,) = pack(shard.samples, min_version=0, max_tokens=64)
    assert micro.turn_T.tolist() == [0, 0, 2, 1, 1, 3]
    # The rewards of the turns in order of time: 1, 10, 2, 20.
    assert credit_of(shard, "gae").earned(micro).tolist() == [0.0, 11.0, 22.0, 0.0, 12.0, 20.0]
    assert [turns.tolist() for turns in credit_of(shard, "gae").turns_B] == [[1.0, 10.0, 2.0, 20.0]]


def test_each_branch_has_the_weight_and_the_advantage_of_its_sample() -> None:
    shard = make_shard([sample(0, 1.0), joined([sample(0, 0.0), sample(0, 0.0), sample(0, 3.0)])])
    (micro,) = pack(shard.samples, min_version=0, max_tokens=64)
    assert micro.index_S.tolist() == [0, 1, 1, 1]
    credit = credit_of(shard)
    assert credit.advantage_B.tolist() == [-1.0, 1.0], "samples are compared, not branches"
    assert credit.weights(micro).tolist() == [1.0] * 12


def test_shaping_changes_advantages_and_not_the_reward_that_objectives_see() -> None:
    longer = sample(0, 1.0, [VersionRun(0, 6)])
    shard = make_shard([longer, sample(0, 1.0)])
    assert credit_of(shard).advantage_B.tolist() == [0.0, 0.0]
    shaped = credit_of(shard, shaping=[Overlong(limit=6, buffer=3)])
    assert shaped.advantage_B.tolist() == [-1.0, 1.0]
    assert shaped.reward_B.tolist() == [1.0, 1.0]


def test_weights_by_age_have_mean_one_over_the_samples_with_a_trained_token() -> None:
    runs = [[VersionRun(3, 2)], [VersionRun(1, 3), VersionRun(2, 1)], [VersionRun(1, 4)], [VersionRun(2, 1)]]
    trajectories = [sample(0, 0.0, one) for one in runs]
    shard = make_shard(trajectories, step=3, min_version=2)
    weights = credit_of(shard, staleness=ExponentialStaleness(decay=0.5)).staleness_B
    # The oldest trained token of the second sample has age 1, because its older tokens are masked.
    assert weights.tolist() == pytest.approx([1.5, 0.75, 0.0, 0.75])
    assert credit_of(shard).staleness_B.tolist() == [1.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize(("step", "min_version"), [(9, 5), (2, -2)])
def test_linear_weights_fall_to_zero_just_beyond_the_age_limit_of_the_batch(step: int, min_version: int) -> None:
    shard = make_shard(
        [sample(0, 0.0, [VersionRun(step - age, 2)]) for age in (0, 1, 2)], step=step, min_version=min_version
    )
    weights = credit_of(shard, staleness=LinearStaleness()).staleness_B
    assert weights.tolist() == pytest.approx([5 / 4, 4 / 4, 3 / 4])  # 1 − age / (4 + 1), over their mean


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_and_its_sample_is_named(value: float) -> None:
    shard = make_shard([sample(4, 1.0), sample(5, 0.0)])
    spoilt = [shard.batch[0], msgspec.structs.replace(shard.batch[1], reward=value)]
    with pytest.raises(ContractError, match=rf"sample 1 \(group 5\) has the reward {value}"):
        credit_of(msgspec.structs.replace(shard, batch=spoilt))
    earlier = [msgspec.structs.replace(shard.batch[0], turns=[value])]
    with pytest.raises(ContractError, match=r"a sample trained earlier \(group 4\)"):
        credit_of(msgspec.structs.replace(shard, earlier=earlier))


def test_an_advantage_that_is_not_finite_is_refused_and_its_sample_is_named() -> None:
    shard = make_shard([sample(0, 1.0), sample(3, -1.7e308), sample(3, 1.7e308), sample(3, 1.7e308)])
    with pytest.raises(ContractError, match=r"sample 1 \(group 3\) has an advantage that is not finite"):
        credit_of(shard, "group_mean")


@pytest.mark.parametrize("estimator", ["turn", "gae"])
def test_missing_rewards_of_turns_are_refused_by_estimators_that_use_them(estimator: Advantage) -> None:
    shard = make_shard([sample(0, 1.0), sample(0, 0.0)])
    spoilt = [shard.batch[0], msgspec.structs.replace(shard.batch[1], turns=[1.0])]
    broken = msgspec.structs.replace(shard, batch=spoilt)
    with pytest.raises(ContractError, match=r"sample 1 \(group 0\) has 1 rewards for 2 turns"):
        credit_of(broken, estimator)
    assert credit_of(broken, "group").advantage_B.tolist() == [1.0, -1.0]


def test_batch_samples_describe_their_trajectories() -> None:
    one = with_turns(sample(7, 0.0, [VersionRun(1, 2), VersionRun(3, 2)]), [1.0, 0.5])
    cut = msgspec.structs.replace(one, outcome=Outcome.TRUNCATED)
    assert one.batch_sample(0) == BatchSample(7, 1.5, 1, 4, False, [1.0, 0.5])
    assert one.batch_sample(2).oldest_version == 3, "tokens that are masked have no say in the age"
    assert one.batch_sample(4).oldest_version < 4, "nothing of it is trained"
    assert cut.batch_sample().truncated
    assert Span(4, 6) in one.action_spans
