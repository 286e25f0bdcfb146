"""One small test per rule of the peers, on workloads whose times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from benchmarks.form import Row
from benchmarks.plots import COLORS, bars, lines
from benchmarks.simulated.peers import roll_flash as agentic
from benchmarks.simulated.peers.asynchronous import Areal, ArealRules, capacity
from benchmarks.simulated.peers.roll_flash import BaselineRules as SyncRules
from benchmarks.simulated.peers.roll_flash import Cohort, RollFlash, RollRules, Synchronous
from benchmarks.simulated.peers.router import PeerEngine, Response, Router
from benchmarks.simulated.peers.world import Finished, World
from flash.config.simulate import SimulateConfig
from flash.config.tree import Config
from flash.rollout.episode.episode import response_key
from flash.simulate.clock import run_virtual
from flash.types import Canary, Published, Task

FREE: dict[str, Any] = {
    "sequence_s": 0.0,
    "context_s": 0.0,
    "prefill_s": 0.0,
    "swap_s": 0.0,
    "train_token_s": 0.0,
    "train_step_s": 0.0,
    "step_s": 1.0,
    "prompt_tokens": 1,
}
"""One second per token, everything else for nothing."""


def make_config(**tables: Any) -> Config:
    base: dict[str, Any] = {
        "run": {"name": "peers", "steps": 3},
        "model": {"path": "none", "max_length": 10_000},
        "env": {"path": "none:None"},
        "rollout": {"group_size": 2, "max_new_tokens": 1000},
        "train": {"batch_size": 4, "async_ratio": 0},
        "simulate": FREE | {"gpus": 3, "rollout_gpus": 2, "response_tokens": 10},
    }
    return msgspec.convert(base | {name: base.get(name, {}) | table for name, table in tables.items()}, Config)


def lengths(config: Config, groups: int) -> list[list[int]]:
    """Response tokens of the first groups, as every policy draws them."""
    work, size = World(config, colocated=False).workload, config.rollout.group_size
    tasks = [[Task(group * size + i, group, i, 0) for i in range(size)] for group in range(groups)]
    return [[work.response_tokens(response_key(task, 0)) for task in group] for group in tasks]


# -- synchronous -----------------------------------------------------------------------------------------------------


def test_a_synchronous_step_lasts_as_long_as_its_longest_sample() -> None:
    config = make_config(run={"steps": 1}, simulate={"response_tokens": {"kind": "uniform", "low": 1, "high": 100}})
    longest = max(max(group) for group in lengths(config, 2))
    assert Synchronous.simulate(config, SyncRules(colocated=False, replicate=True)).seconds == pytest.approx(longest)


def test_a_synchronous_batch_is_rewarded_after_all_of_it_is_generated() -> None:
    config = make_config(run={"steps": 1}, simulate={"response_tokens": [5, 9, 80], "reward_s": 7})
    longest = max(max(group) for group in lengths(config, 2))
    assert Synchronous.simulate(config, SyncRules()).seconds == pytest.approx(longest + 7)


def test_filtering_makes_a_synchronous_step_issue_whole_further_batches() -> None:
    config = make_config(run={"steps": 4}, rollout={"drop_equal_rewards": True}, simulate={"success": 0.5})
    report = Synchronous.simulate(config, SyncRules(colocated=False, replicate=True))
    assert report.seconds % 10 == pytest.approx(0)
    assert report.generated_tokens == report.seconds / 10 * 40
    assert report.generated_tokens > report.trained_tokens == 4 * 40


def test_environments_in_lock_step_wait_for_the_slowest_in_each_turn() -> None:
    config = make_config(
        run={"steps": 1},
        train={"batch_size": 16},
        simulate={"turns": 5, "env_s": {"kind": "uniform", "low": 0, "high": 100}},
    )
    locked = Synchronous.simulate(config, SyncRules(replicate=True, colocated=False))
    alone = Synchronous.simulate(config, SyncRules(replicate=True, colocated=False, env_async=True))
    assert 50 + 5 * 80 < locked.seconds <= 50 + 5 * 100
    assert alone.seconds < 50 + 5 * 80


def test_the_candidates_of_one_request_share_an_engine() -> None:
    crowded = {"sequence_s": 1.0, "response_tokens": 10}
    config = make_config(run={"steps": 1}, train={"batch_size": 2}, simulate=crowded)
    assert Synchronous.simulate(config, SyncRules(colocated=False)).seconds == pytest.approx(10 * 3)
    assert Synchronous.simulate(config, SyncRules(colocated=False, replicate=True)).seconds == pytest.approx(10 * 2)


# -- ROLL Flash ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", range(12))
def test_a_prompt_that_ends_while_its_step_is_dropped_is_not_counted(passes: int) -> None:
    """Ending a prompt takes several passes of the event loop; in each of them its step may be dropped."""
    config = make_config()

    async def scenario() -> None:
        async with anyio.create_task_group() as prompts:
            run = RollFlash(config, RollRules(extra_prompts=0))
            await run._world.publish()
            run._advance(0, prompts)
            await anyio.sleep(10.0)
            for _ in range(passes):
                await anyio.lowlevel.checkpoint()
            run._drop(1)
            await anyio.sleep(1.0)
            assert run._completed == 0

    run_virtual(scenario)


def engine_of(tokens: Callable[[int], int], places: int = 1) -> PeerEngine:
    return PeerEngine(msgspec.convert(FREE, SimulateConfig), places, tokens, 1 << 30)


def published(version: int) -> Published:
    return Published(version, "tcp", b"", Canary([], []))


def test_queued_requests_run_to_their_end_in_a_pause() -> None:
    ended: dict[int, float] = {}

    async def scenario() -> tuple[float, dict[int, Response]]:
        engine = engine_of(lambda key: 10)
        await engine.load(published(0), keep_cache=False)
        router, responses, paused = Router([engine], limit=1), {}, 0.0

        async def ask(key: int) -> None:
            responses[key] = await router.generate([1], key, 100, None)
            ended[key] = anyio.current_time()

        async with anyio.create_task_group() as requests:
            for key in range(3):
                requests.start_soon(ask, key)
            await anyio.sleep(3.5)
            await router.pause()
            paused = anyio.current_time()
            await engine.load(published(1), keep_cache=False)
            router.resume()
        return paused, responses

    paused, responses = run_virtual(scenario)
    # Two queued requests of 10 s each. The one that ran is aborted in its fourth second: 3 of its 10 tokens are kept.
    assert paused == pytest.approx(24)
    assert ended[1] < ended[2] == pytest.approx(24)
    assert ended[0] == pytest.approx(31)
    assert (responses[0].tokens, responses[0].oldest_version, responses[0].discarded) == (10, 0, 0)


def test_a_turn_that_a_pause_aborts_starts_again_where_partial_responses_are_not_kept() -> None:
    async def scenario() -> tuple[float, Response]:
        engine = engine_of(lambda key: 10)
        await engine.load(published(0), keep_cache=False)
        router, responses = Router([engine], limit=1, keep_partial=False), []

        async def ask() -> None:
            responses.append(await router.generate([1], 0, 100, None))

        async with anyio.create_task_group() as requests:
            requests.start_soon(ask)
            await anyio.sleep(3.5)
            await router.pause()
            await engine.load(published(1), keep_cache=False)
            router.resume()
        return anyio.current_time(), responses[0]

    seconds, response = run_virtual(scenario)
    assert seconds == pytest.approx(14)
    assert (response.tokens, response.discarded, response.oldest_version) == (10, 3, 1)


@pytest.mark.parametrize("limit", [1, 3])
def test_no_engine_gets_more_requests_than_the_limit(limit: int) -> None:
    most = 0

    async def scenario() -> None:
        nonlocal most
        engine = engine_of(lambda key: 5 + key, places=100)
        await engine.load(published(0), keep_cache=False)
        router = Router([engine], limit)
        async with anyio.create_task_group() as requests:
            for key in range(7):
                requests.start_soon(router.generate, [1], key, 100, None)
            while router._waiting or engine.pressure.running or anyio.current_time() < 1:
                most = max(most, engine.pressure.running + engine.pressure.waiting)
                await anyio.sleep(0.5)

    run_virtual(scenario)
    assert most == limit


def waiting_batch(take: Callable[[Cohort], Awaitable[object]]) -> list[str]:
    """What happens first: the batch, or the end of the prompt that runs."""
    order: list[str] = []

    async def scenario() -> None:
        cohort = Cohort()
        cohort.running[7] = anyio.CancelScope()
        cohort.finished.append([Finished(Task(0, 0, 0, 0), 1.0, 0.0, 1, 1, 0)])

        async def batch() -> None:
            await take(cohort)
            order.append("batch")

        async with anyio.create_task_group() as group:
            group.start_soon(batch)
            await anyio.sleep(100)
            order.append("prompt")
            del cohort.running[7]
            cohort.change()

    run_virtual(scenario)
    return order


def test_a_batch_waits_for_the_prompts_of_an_older_step_before_it_takes_newer_ones() -> None:
    assert waiting_batch(lambda cohort: cohort.take(2)) == ["prompt", "batch"]
    assert waiting_batch(lambda cohort: cohort.take(1)) == ["batch", "prompt"]


def test_prompts_older_than_the_async_ratio_are_dropped_and_none_is_trained() -> None:
    tokens = [*[5] * 9, 200]
    simulate = {"response_tokens": tokens, "train_step_s": 3.0, "gpus": 5, "rollout_gpus": 4}
    config = make_config(run={"steps": 30}, simulate=simulate)
    for ratio in (1, 2):
        report = RollFlash.simulate(config, RollRules(async_ratio=ratio))
        assert 1 <= report.oldest_age <= ratio


def test_extra_prompts_finish_a_step_earlier_and_waste_tokens() -> None:
    config = make_config(
        run={"steps": 10},
        rollout={"drop_equal_rewards": True},
        train={"batch_size": 8},
        simulate={"response_tokens": {"kind": "uniform", "low": 1, "high": 100}},
    )
    batches = Synchronous.simulate(config, SyncRules(colocated=False, replicate=True))
    queued, redundant = (RollFlash.simulate(config, RollRules(extra_prompts=extra)) for extra in (0, 8))
    assert redundant.step_s < queued.step_s < batches.step_s
    assert redundant.waste > queued.waste


def test_only_filtered_prompts_are_replaced_not_the_batch() -> None:
    config = make_config(run={"steps": 8}, rollout={"drop_equal_rewards": True})
    batches = Synchronous.simulate(config, SyncRules(colocated=False, replicate=True))
    replaced = RollFlash.simulate(config, RollRules())
    assert replaced.trained_tokens == batches.trained_tokens < replaced.generated_tokens < batches.generated_tokens


def test_a_loser_runs_on_to_its_end_and_keeps_its_environment_from_the_next_step() -> None:
    config = make_config(
        run={"steps": 2},
        rollout={"group_size": 1},
        train={"batch_size": 1},
        simulate={"response_tokens": 1, "env_s": [10, 1000]},
    )
    seconds = {seed: _agentic_seconds(config, seed) for seed in range(40)}
    # Of two environments the quick one wins the first step at 11 s. If it is slow in the second step, the slow one of
    # the first is free again at 1001 s at the earliest: with luck the second step ends before that.
    assert min(seconds.values()) == pytest.approx(22)
    assert max(seconds.values()) > 1000


def _agentic_seconds(config: Config, seed: int) -> float:
    seeded = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, seed=seed))
    return agentic.RollAgentic.simulate(seeded, agentic.AgenticRules(extra_per_group=1)).seconds


def test_a_batch_of_many_turns_waits_for_each_older_step() -> None:
    async def scenario() -> None:
        run = agentic.RollAgentic(make_config(), agentic.AgenticRules(async_ratio=2))
        oldest, first, second = (agentic._Episode(step, []) for step in (0, 1, 1))
        for episode in (oldest, first, second):
            episode.finished.append(Finished(Task(0, 0, 0, 0), 1.0, 0.0, 1, 1, 0))
        run._step, run._open[0], run._complete = 2, [oldest], [first, second]
        with anyio.move_on_after(1) as waiting:
            await run._batch()
        assert waiting.cancelled_caught
        run._open[0], run._complete = [], [first, second, oldest]
        await run._batch()
        assert run._complete == [second]

    run_virtual(scenario)


def test_redundant_groups_hide_slow_environments() -> None:
    config = make_config(
        run={"steps": 8},
        train={"batch_size": 8},
        simulate={"response_tokens": 1, "env_s": 10, "fail_slow": 0.1},
    )
    without = agentic.RollAgentic.simulate(config, agentic.AgenticRules())
    more = agentic.RollAgentic.simulate(config, agentic.AgenticRules(extra_groups=4))
    assert more.step_s < without.step_s / 2


def test_an_environment_that_stops_is_started_again_after_the_deadline_of_its_step() -> None:
    config = make_config(run={"steps": 6}, deadlines={"env_step": 500.0}, simulate={"env_s": 1, "fail_stop": 0.2})
    report = agentic.RollAgentic.simulate(config, agentic.AgenticRules())
    assert report.seconds > 500
    assert report.generated_tokens > report.trained_tokens == 6 * 40


# -- AReaL -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eta", "version", "accepted", "running", "most", "expected"),
    [
        (0, 0, 0, 0, None, 4),
        (0, 0, 3, 1, None, 0),
        (0, 1, 3, 1, None, 4),
        (2, 0, 0, 0, None, 12),
        (2, 5, 20, 6, None, 6),
        (2, 5, 20, 6, 8, 2),
        (0.5, 0, 0, 0, None, 6),
    ],
)
def test_the_capacity_is_bounded_by_staleness_and_by_concurrency(
    eta: float, version: int, accepted: int, running: int, most: int | None, expected: int
) -> None:
    rules = ArealRules(eta=eta, max_concurrent=most)
    assert capacity(rules, version, 4, accepted, running) == expected


@pytest.mark.slow
def test_the_admission_of_areal_does_not_bound_the_age_of_stragglers() -> None:
    tokens = [*[10] * 49, 800]
    simulate = {"response_tokens": tokens, "train_step_s": 10.0, "gpus": 5, "rollout_gpus": 4}
    config = make_config(run={"steps": 60}, train={"batch_size": 16}, simulate=simulate)
    assert Areal.simulate(config, ArealRules(eta=2)).oldest_age > 10
    assert Areal.simulate(config, ArealRules(eta=0)).oldest_age == 0


def test_more_staleness_is_faster_until_the_trainer_is_the_limit() -> None:
    simulate = {
        "response_tokens": {"kind": "uniform", "low": 10, "high": 200},
        "train_step_s": 50.0,
        "gpus": 5,
        "rollout_gpus": 4,
    }
    config = make_config(run={"steps": 20}, train={"batch_size": 16}, simulate=simulate)
    seconds = [Areal.simulate(config, ArealRules(eta=eta)).step_s for eta in (0, 1, 8)]
    assert seconds[0] > seconds[1] > seconds[2] == pytest.approx(50, rel=0.02)


# -- figures ---------------------------------------------------------------------------------------------------------


def test_published_numbers_are_points_without_a_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "figure.svg"
    rows = [Row(f"{gpus} GPUs", "speedup", "x", 2.0, reference) for gpus, reference in ((8, 1.5), (16, 2.5))]
    lines("Speed", "GPUs", "x", "speedup")(rows, file)
    drawn = file.read_text()
    assert f"fill: none; stroke: {COLORS['ours']}" in drawn
    assert f"fill: none; stroke: {COLORS['reference']}" not in drawn


def test_a_figure_of_many_lines_or_of_none_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [Row(f"8 GPUs, workload {number}", "speedup", "x", 2.0) for number in range(6)]
    lines("Speed", "GPUs", "x", "speedup")(rows, tmp_path / "lines.svg")
    bars("Speed", "x", "no such metric")(rows, tmp_path / "bars.svg")
