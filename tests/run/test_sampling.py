"""Evaluations and rollouts without training, on the virtual clock and fake engines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import anyio
import msgspec
import pytest

from flash.cli.sampling import print_failures, transcript
from flash.config.tree import Config
from flash.environment.interface import HELD_OUT
from flash.environment.load import LoadedEnvironment
from flash.errors import ConfigError
from flash.observe.console import environment_lines, evaluation_line
from flash.observe.rundir.samples import readable
from flash.rollout.engine import Engine
from flash.rollout.fake_engine import FakeEngine
from flash.run.sampling import Sampled, evaluate, roll_out
from flash.simulate.clock import run_virtual
from tests.rollout.test_episode import EOS, CharTokenizer


class Parity:
    """Environment whose right answer is `e` for even seeds and `o` for odd ones. The reward is divided by the number of
    turns. `broken`: each `reset` fails; `flaky`: it fails for each fourth seed."""

    def __init__(self, turns: int = 1, broken: bool = False, flaky: bool = False) -> None:
        self.turns, self.broken, self.flaky = turns, broken, flaky

    async def reset(self, seed: int) -> Any:
        self.seed, self.turn = seed, 0
        if self.broken or (self.flaky and seed % 4 == 3):
            raise RuntimeError("no such game")
        return f"seed {seed}:", {}

    async def step(self, action: str) -> Any:
        self.turn += 1
        reward = float(action == "eo"[self.seed % 2]) / self.turns
        measured = {"seeds": 1.0, "x": float(self.seed % 2)}
        return "again:", reward, self.turn == self.turns, False, {"metrics": measured}

    async def close(self) -> None: ...


told: list[str] = []
"""Lines about the progress that the last call of `play` has shown."""


def make_config(**changes: Any) -> Config:
    """Return a configuration of a run on four nodes, with changed tables."""
    base: dict[str, Any] = {
        "run": {"name": "test", "steps": 50, "seed": 1},
        "model": {"path": "fake", "max_length": 64},
        "env": {"path": f"{__name__}:Parity"},
        "rollout": {"group_size": 8, "max_new_tokens": 4, "drop_equal_rewards": True, "extra_groups": 2},
        "train": {"batch_size": 32, "async_ratio": 2.0},
        "eval": {"problems": 6, "samples": 2, "temperature": 1.0},
        "cluster": {"gpus_per_node": 0, "nodes": 4, "trainer_nodes": 2, "trainer_ranks": 2},
    }
    return msgspec.convert(base | changes, Config)


def play(
    how: Any, config: Config, *, engine: type[FakeEngine] = FakeEngine, **more: Any
) -> tuple[Sampled, list[FakeEngine]]:
    """Call `evaluate` or `roll_out` with fake engines. Returns the result and the engines; the shown lines are in
    `told`."""
    made: list[FakeEngine] = []
    told.clear()

    def make() -> FakeEngine:
        """Make a fake engine that always answers `e`."""
        made.append(engine(lambda prompt: [ord("e"), EOS]))
        return made[-1]

    def engines(config: Config) -> Sequence[Callable[[int], Engine]]:
        """Return a constructor for each engine of the configuration."""
        return [lambda number: make()] * config.engines_on(0)

    async def go() -> Sampled:
        """Load the environment, and call the function under test."""
        env = LoadedEnvironment(config.env.path, config.env.options)
        return await how(config=config, env=env, tokenizer=CharTokenizer(), engines=engines, show=told.append, **more)

    return run_virtual(go), made


def test_an_evaluation_plays_the_held_out_problems_of_the_config_and_gives_a_runs_row() -> None:
    sampled, (engine,) = play(evaluate, make_config())
    row = sampled.evaluation
    assert (row["mean_reward"], row["best_of_k"], row["binary"]) == (0.5, 0.5, 1.0)
    assert (row["problems"], row["samples"], row["missing"]) == (6, 12, 0)
    assert row["low"] < 0.5 < row["high"]
    seeds = [trajectory.task.seed for trajectory in sampled.trajectories]
    assert seeds == [HELD_OUT + problem for problem in range(6) for _ in range(2)]
    assert len({request.seed for request in engine.requests}) == 12


def test_rollouts_play_the_first_training_problems_once_each_whatever_the_run_filters() -> None:
    config = make_config(env={"path": f"{__name__}:Parity", "options": {"turns": 2}})
    sampled, _ = play(roll_out, config, episodes=5)
    first = 1 << 20
    assert [trajectory.task.seed for trajectory in sampled.trajectories] == [first + number for number in range(5)]
    assert [len(trajectory.turns) for trajectory in sampled.trajectories] == [2] * 5
    assert [trajectory.reward for trajectory in sampled.trajectories] == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_a_transcript_shows_each_turn_and_no_command_to_the_terminal() -> None:
    config = make_config(env={"path": f"{__name__}:Parity", "options": {"turns": 2}})
    sampled, _ = play(roll_out, config, episodes=1)
    (played,) = sampled.trajectories
    turns = [msgspec.structs.replace(turn, action="e\x1b[31m\ne") for turn in played.turns]
    text = transcript(readable(msgspec.structs.replace(played, turns=turns), 0, ["t"] * played.length))
    head, *lines = text.splitlines()
    assert head == f"--- seed {1 << 20}: ok, reward 1, 4 tokens"
    assert lines[:5] == ["[1] shown:", f"    seed {1 << 20}:", "[1] answer, reward 0.5:", "    e\\x1b[31m", "    e"]
    assert lines[5] == "[2] shown:"


def test_problems_that_fail_are_reported_and_replaced_by_others() -> None:
    config = make_config(env={"path": f"{__name__}:Parity", "options": {"flaky": True}})
    sampled, _ = play(roll_out, config, episodes=5)
    assert len(sampled.trajectories) == 5
    assert any("no such game" in note for note in sampled.notes)


@pytest.mark.parametrize(("how", "more", "of"), [(evaluate, {}, "2 of 12"), (roll_out, {"episodes": 5}, "1 of 6")])
def test_episodes_that_failed_for_good_are_counted_with_the_last_reason(
    how: Any, more: dict[str, Any], of: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(env={"path": f"{__name__}:Parity", "options": {"flaky": True}})
    sampled, _ = play(how, config, **more)
    assert print_failures(sampled) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"{of} episodes failed, and are in no figure; the last one (env_error): environment reset")
    assert "no such game" in said
    if how is evaluate:
        assert "5 problems, 2 answers missing" in evaluation_line(sampled.evaluation)
    whole, _ = play(how, make_config(), **more)
    assert print_failures(whole) == 0
    assert capsys.readouterr().out == ""
    assert "missing" not in evaluation_line(whole.evaluation)


def test_metrics_of_the_environment_are_in_the_row_of_an_evaluation() -> None:
    sampled, _ = play(evaluate, make_config())
    assert environment_lines(sampled.evaluation) == ["env/seeds  1.000", "env/x      0.500"]


@pytest.mark.parametrize(("how", "more"), [(evaluate, {}), (roll_out, {"episodes": 3})])
def test_an_environment_that_cannot_be_played_ends_the_command_with_the_reason(how: Any, more: dict[str, Any]) -> None:
    config = make_config(env={"path": f"{__name__}:Parity", "options": {"broken": True}})
    with pytest.raises(ConfigError, match="no such game"):
        play(how, config, **more)


def test_the_progress_of_a_start_is_shown_when_it_changes_and_every_ten_seconds() -> None:
    class Slow(FakeEngine):
        """Engine whose start takes 25 s."""

        async def start(self) -> None:
            await anyio.sleep(25)
            await super().start()

    play(evaluate, make_config(), engine=Slow)
    assert told == [
        *(f"starting engines … {seconds} s" for seconds in (0, 10, 20)),
        "first evaluation, 0 of 12 answers … 25 s",
    ]
    play(roll_out, make_config(), episodes=3)
    assert told == ["starting engines … 0 s", "first batch, 0 of 3 groups … 0 s"]
