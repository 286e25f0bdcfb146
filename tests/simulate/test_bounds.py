"""The bounds on a step, against worked examples and against each other."""

import msgspec
import pytest

from flash.config.learning import TrainConfig
from flash.config.simulate import Lognormal, SimulateConfig
from flash.config.tree import Config, EngineConfig, EnvConfig, ModelConfig, RolloutConfig, RunConfig
from flash.simulate.bounds import (
    async_bound,
    best_split,
    bounds,
    draw_episodes,
    quantities,
    queue_bound,
    sync_bound,
)


def config(alpha: float = 2.0, **settings: object) -> Config:
    """Ten-token answers to free prompts at one second a token and sequence: 8 GPUs generate, 8 train."""
    defaults: dict[str, object] = {
        "step_s": 1.0,
        "sequence_s": 0.0,
        "context_s": 0.0,
        "prefill_s": 0.0,
        "swap_s": 0.0,
        "train_token_s": 0.1,
        "train_step_s": 0.0,
        "prompt_tokens": 10,
        "response_tokens": 10,
    }
    return Config(
        run=RunConfig(name="bounds"),
        model=ModelConfig(path="none"),
        env=EnvConfig(path="none:None"),
        engine=EngineConfig(max_sequences=4),
        rollout=RolloutConfig(group_size=8, max_new_tokens=100),
        train=TrainConfig(batch_size=64, async_ratio=alpha),
        simulate=SimulateConfig(**(defaults | settings)),
    )


def step_bounds(config: Config, **ledger: int) -> dict[str, float]:
    """Return the seconds of each bound of a configuration, by its name. `ledger` has counts of a run."""
    found = bounds(quantities(config, ledger))
    return {bound.name: bound.step_s for bound in found}


def test_the_formulas_give_what_they_give_by_hand():
    assert queue_bound(10, 100, 5, 50) == 10 / 5 + 100 / 50
    assert sync_bound(100, 10, 60, 2, 5) == 100 * 10 / 5 + 60 + 100 * 2 / 5
    assert async_bound(100, 10, 60, 2, 5, 2) == 100 / 5 * (10 + 2) + 60 / 3
    assert best_split(100, 10, 60, 2, 5, 2) == 200 / (1000 + 5 * 60 / 3 + 200)


def test_both_phases_take_the_asynchronous_bound_or_less_at_the_best_split():
    samples, mean, longest, train, workers, alpha = 100, 10, 60, 2, 5, 2
    share = best_split(samples, mean, longest, train, workers, alpha)
    whole = async_bound(samples, mean, longest, train, workers, alpha)
    assert samples * train / (share * workers) == pytest.approx(whole)
    assert samples * mean / ((1 - share) * workers) + longest / (alpha + 1) <= whole


def test_a_constant_workload_is_plugged_in_as_it_is():
    found = quantities(config(), {})
    assert found.per_engine == 4
    assert found.generate_s == pytest.approx(10 / 4)
    assert found.longest_s == pytest.approx(10)
    assert found.latency_s == pytest.approx(10)
    assert found.train_s == pytest.approx(0.1 * 20)
    assert found.in_flight == 64 * 3
    assert step_bounds(config())["capacity"] == pytest.approx(64 * 2.5 / 8)


def test_what_filters_throw_away_counts_as_generated_and_not_as_trained():
    plain, filtered = quantities(config(), {}), quantities(config(), {"trained": 300, "filtered": 100})
    assert filtered.samples == pytest.approx(plain.samples * 4 / 3)
    slow_trainer = config(train_token_s=10.0)
    assert step_bounds(slow_trainer, trained=300, filtered=100)["capacity"] == step_bounds(slow_trainer)["capacity"]


def test_the_printed_quantities_give_the_bounds_also_if_filters_throw_samples_away():
    q = quantities(config(0.0), {"trained": 300, "filtered": 100})
    samples, train = q.samples, q.train_s
    found = {bound.name: bound for bound in bounds(q)}
    assert f"N {samples:.4g}, " in found["this split, synchronous"].values
    assert f"μ_tr {train:.3g} GPU·s" in found["this split, synchronous"].values
    assert found["this split, synchronous"].step_s == pytest.approx(
        samples * q.generate_s / 8 + q.longest_s + samples * train / 8
    )
    assert found["synchronous, all GPUs in turn"].step_s == pytest.approx(
        samples * q.generate_all_s / 16 + q.longest_s + samples * train / 16
    )


def test_the_longest_of_many_is_longer_than_the_longest_of_few():
    drawn = draw_episodes(
        SimulateConfig(response_tokens=Lognormal(mean=100, deviation=200, low=1, high=5000)), 5000, 64
    )
    lengths = [drawn.longest_s(count, 1.0) for count in (1, 10, 100, 1000)]
    assert lengths == sorted(lengths)
    assert lengths[0] == pytest.approx(drawn.mean_tokens)
    assert lengths[-1] <= 5000


def test_responses_are_cut_at_the_limit_of_the_run():
    drawn = draw_episodes(SimulateConfig(response_tokens=500), 100, 64)
    assert drawn.mean_tokens == 100


def test_an_episode_of_many_turns_carries_its_context_along():
    settings = SimulateConfig(
        prompt_tokens=100, response_tokens=10, observation_tokens=20,
        turns=3, env_s=2, reset_s=1, reward_s=4,
    )  # fmt: skip
    drawn = draw_episodes(settings, 100, 64)
    assert drawn.mean_tokens == 30
    assert drawn.observations == 40
    assert drawn.context == pytest.approx((105 + 135 + 165) / 3)
    assert drawn.mean_env_s == 1 + 3 * 2 + 4
    assert draw_episodes(settings, 100, 2).mean_tokens == 20


def test_few_samples_in_flight_leave_engines_half_empty():
    few = msgspec.structs.replace(config(), rollout=RolloutConfig(group_size=8, max_new_tokens=100, max_concurrent=16))
    assert quantities(few, {}).per_engine == 2


def test_a_kv_cache_limits_what_an_engine_decodes():
    assert quantities(config(kv_tokens=30), {}).per_engine == pytest.approx(2)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 2.0, 8.0])
def test_no_upper_bound_is_below_the_capacity(alpha: float):
    found = bounds(quantities(config(alpha, response_tokens=Lognormal(mean=10, deviation=20, high=100)), {}))
    capacity = found[-1]
    assert capacity.lower
    measured_against = found[-2]
    assert not measured_against.lower
    assert measured_against.step_s >= capacity.step_s


@pytest.mark.parametrize("redundant", [{"extra_per_group": 1}, {"extra_groups": 1}])
def test_redundant_samples_leave_no_lower_bound(redundant: dict[str, int]):
    plain = config(response_tokens=1, env_s=[*[1] * 19, 1000])
    rollout = RolloutConfig(group_size=8, max_new_tokens=100, **redundant)
    found = quantities(msgspec.structs.replace(plain, rollout=rollout), {})
    assert [bound.lower for bound in bounds(found)] == [False] * 4
    assert bounds(quantities(plain, {}))[-1].lower


def test_below_one_version_of_lead_the_phases_add_up():
    assert step_bounds(config(0.0))["this split, synchronous"] == pytest.approx(64 * 2.5 / 8 + 10 + 64 * 2 / 8)
    assert step_bounds(config(2.0))["this split, asynchronous"] == pytest.approx(64 * 2.5 / 8 + 10 / 3)
