from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import anyio
import msgspec
import pytest

from benchmarks.real import textworld
from benchmarks.real.remote_textworld import Delays, RemoteOptions, RemoteTextWorld
from benchmarks.real.textworld import ASYNC, LOCK_STEP, MODES, OWN, REDUNDANT, WORKLOAD, Round, rows_of
from benchmarks.training import PINNED, Measured
from envs.textworld.games import GameOf, ShownGame
from flash.config.check import check
from flash.config.load import load
from flash.config.objects import check_options
from flash.config.simulate import Lognormal
from flash.environment import HELD_OUT
from flash.errors import ConfigError


def test_the_modes_differ_in_nothing_but_what_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    modes = {mode: load([WORKLOAD], [*PINNED, *overrides]) for mode, overrides in MODES.items()}
    compared = [(one.train.async_ratio, one.rollout.barriers, one.rollout.extra_groups) for one in modes.values()]
    assert compared == [(0, ["turn"], 0), (0, [], 0), (1, [], 0), (1, [], 1)]
    for config in modes.values():
        rollout = msgspec.structs.replace(config.rollout, barriers=[], extra_groups=0, extra_per_group=0)
        train = msgspec.structs.replace(config.train, async_ratio=0)
        assert msgspec.structs.replace(config, rollout=rollout, train=train) == modes[OWN]
    assert check(modes[REDUNDANT]) == []


def measured(seconds: float, won: float) -> Measured:
    ledger = {"generated_tokens": 400, "trained_tokens": 300}
    summary = {"samples": 64, "trainer_wait_share": 0.25, "engine_idle_share": 0.5, "max_age": 1.0, "ledger": ledger}
    evals = [{"mean_reward": reward, "samples": 96} for reward in (0.25, won)]
    return Measured(seconds, summary, evals, [{"trainer_step_s": 2.0}, {"trainer_step_s": 4.0}])


def a_round(scale: float, *, won: float = 0.5) -> Round:
    seconds = {LOCK_STEP: 120.0, OWN: 60.0, ASYNC: 40.0, REDUNDANT: 30.0 * scale}
    return {mode: measured(each, won if mode == REDUNDANT else 0.5) for mode, each in seconds.items()}


def test_ratios_are_within_a_round_and_their_median_counts() -> None:
    rows = rows_of([a_round(1), a_round(2), a_round(0.5)])
    found = {(row.case, row.metric): row for row in rows}
    of = f"{REDUNDANT}, over lock-step"
    assert [found[of, name].ours for name in ("speedup", "speedup_least", "speedup_most")] == [4.0, 2.0, 8.0]
    assert found[of, "speedup"].met
    assert found[f"{OWN}, over lock-step", "speedup"].ours == 2.0
    assert found[ASYNC, "trainer_step_s_per_step"].ours == 3.0
    assert found[ASYNC, "trained_token_share"].ours == 0.75
    assert found[ASYNC, "first_accuracy"].ours == 0.25


@pytest.mark.parametrize(("won", "agree"), [(0.55, True), (0.75, False)])
def test_accuracies_of_all_rounds_together_are_compared_with_those_of_lock_step(won: float, agree: bool) -> None:
    rows = rows_of([a_round(1, won=won)] * 3)
    met = {row.case.partition(",")[2]: row.met for row in rows if row.metric == "overlap"}
    assert met[" redundant, final accuracy that of lock-step"] == agree
    last = {row.metric: row.ours for row in rows if row.case == REDUNDANT}
    assert last["final_accuracy"] == pytest.approx(won, abs=0.01)
    assert 0.08 < last["final_accuracy_high"] - last["final_accuracy_low"] < 0.14


def test_each_round_begins_with_another_mode() -> None:
    trained: list[list[str]] = []

    def train(_: Path, name: str, overrides: list[str]) -> Measured:
        trained.append(overrides)
        return measured(1.0, 0.5)

    assert set(textworld.one_round(1, steps=5, train=train)) == set(MODES)
    assert trained[0] == [*PINNED, *MODES[OWN], "run.steps=5", "run.seed=1"]
    assert trained[-1] == [*PINNED, *MODES[LOCK_STEP], "run.steps=5", "run.seed=1"]


def drawn(*seeds: int) -> list[float]:
    """How late two answers of each of these episodes are, in a process of their own."""
    delays, late = Delays(Lognormal(mean=1, deviation=1), Counter()), list[float]()
    for seed in seeds:
        delays.begin(seed)
        late += [delays.next_s(), delays.next_s()]
    return late


def test_delays_follow_from_the_seed_the_instance_and_the_turn() -> None:
    late = drawn(3, 3, 4)
    assert len(set(late)) == 6
    assert min(late) > 0
    assert drawn(3, 4, 3) == [*late[:2], *late[4:], *late[2:4]]
    assert drawn(HELD_OUT + 3) == [0, 0]


class At(RemoteTextWorld):
    """A game that is there and over with the first command."""

    async def _generated(self, game: GameOf) -> str:
        return game.name

    @staticmethod
    async def player(episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
        return ShownGame(file, [], [], 0.0, False, bool(commands))


@pytest.mark.virtual
@pytest.mark.anyio
async def test_an_answer_is_waited_for_and_the_beginning_is_not() -> None:
    env = At(RemoteOptions(latency=7, template="plain"))
    begun = anyio.current_time()
    await env.reset(3)
    assert anyio.current_time() == begun
    assert (await env.step("look"))[2]
    assert anyio.current_time() == begun + 7


def test_a_delay_that_is_no_distribution_is_refused() -> None:
    with pytest.raises(ConfigError, match=r'`env.options.latency`: expected a number, .*, got "soon"'):
        check_options(RemoteTextWorld, {"latency": "soon"}, "env.options")
