import msgspec
import pytest

from benchmarks.real import agentic as real_agentic
from benchmarks.real import rlvr as real_rlvr
from benchmarks.real.compare import MODES, compare
from benchmarks.training import PINNED, Measured
from flash.config.load import load

WORKLOADS = [real_rlvr.WORKLOAD, real_agentic.WORKLOAD]


@pytest.fixture(autouse=True)
def no_models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.stem)
def test_the_modes_of_a_workload_differ_in_nothing_but_what_is_compared(workload):
    synchronous, between, streamed, ours = (load([workload], [*PINNED, *overrides]) for overrides in MODES.values())
    assert msgspec.structs.replace(between.train, stream=True) == streamed.train
    assert (synchronous.train.async_ratio, between.train.async_ratio, ours.train.async_ratio) == (0, 0, 2)
    barriers = [config.rollout.barriers for config in (synchronous, between, ours)]
    assert barriers == [["batch", "group", "turn"], [], []]
    for section in ("model", "tiny_model", "env", "engine", "algorithm", "eval", "cluster"):
        assert getattr(synchronous, section) == getattr(between, section) == getattr(ours, section)
    assert synchronous.train.batch_size == ours.train.batch_size
    assert ours.cluster.node_cpus == [0]
    assert ours.cluster.trainer_cpus == [1]


def measured(seconds, low, high):
    summary = {"samples": 64, "trainer_wait_share": 0.25, "engine_idle_share": 0.5, "max_age": 1.0}
    evals = [{"mean_reward": reward, "low": low, "high": high} for reward in (0.1, (low + high) / 2)]
    metrics = [
        {"trainer_wait_s": 1.0, "trainer_step_s": 2.0 + step % 2 * 2, "reward_mean": float(step)} for step in range(12)
    ]
    return Measured(seconds, summary, evals, metrics)


@pytest.mark.parametrize(("low", "agree"), [(0.55, 1.0), (0.65, 0.0)])
def test_the_rows_compare_the_first_mode_with_the_others(low, agree):
    seconds = (90.0, 60.0, 40.0)
    runs = iter([*(measured(duration, 0.5, 0.6) for duration in seconds), measured(30.0, low, 0.7)])
    rows = compare(real_rlvr.WORKLOAD, 4, goal=2.5, reference=2.24, train=lambda *_: next(runs))
    assert [(row.metric, row.ours) for row in rows[:4]] == [
        *(("speedup", times) for times in (3.0, 1.5, 1.5)),
        ("overlap", agree),
    ]
    assert rows[0].met
    assert (rows[3].met is True) == (agree == 1.0)
    of_ours = {row.metric: row.ours for row in rows if row.case == "techniques, α = 2"}
    assert of_ours["trainer_busy_share"] == 0.75
    assert of_ours["engine_busy_share"] == 0.5
    assert of_ours["trainer_step_s_per_step"] == 3.0
    assert (of_ours["first_rewards"], of_ours["last_rewards"]) == (4.5, 6.5)
