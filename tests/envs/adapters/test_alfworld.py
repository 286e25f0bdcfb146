"""ALFWorld's games: which files are played, and what is missing when there are none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from envs.adapters.alfworld import Alfworld, AlfworldOptions
from envs.textworld.games import ShownGame, names_of
from flash.environment import HELD_OUT, Environment
from flash.errors import ConfigError, EnvError
from flash.types import Message
from tests.envs.adapters.alfworld_folder import write_game

pytestmark = pytest.mark.anyio


class Told(Alfworld):
    """Whose games go on for ever."""


@pytest.fixture
def asked() -> list[str]:
    """The files that are played."""
    files: list[str] = []

    async def play(episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
        files.append(file)
        return ShownGame("a room", ["look"], [], 0.0, False, False)

    Told.player = play
    return files


async def test_each_side_has_its_games_and_some_are_left_out(tmp_path: Path, asked: list[str]) -> None:
    train = {write_game(tmp_path, "train", f"pick-Apple-{number}") for number in range(3)}
    write_game(tmp_path, "train", "pick-AppleSliced-1")
    write_game(tmp_path, "train", "pick_and_place_with_movable_recep-1")
    write_game(tmp_path, "train", "heat-Egg-1", solvable=False)
    seen, unseen = (write_game(tmp_path, side, "pick-Apple-1") for side in ("valid_seen", "valid_unseen"))
    options = AlfworldOptions(folder=str(tmp_path), max_moves=1)
    for seed in range(8):
        env = Told(options)
        shown, info = await env.reset(seed)
        assert isinstance(shown[0], Message)
        assert shown[0].content.endswith("a room\n\nCommands: look")
        assert info["game"].startswith("pick-Apple-")
        assert (await env.step("look"))[2]
    assert {*asked} == train
    await Told(options).reset(HELD_OUT)
    await Told(AlfworldOptions(folder=str(tmp_path), held_out="valid_seen")).reset(HELD_OUT)
    assert asked[-2:] == [unseen, seen]


async def test_the_only_game_that_can_be_solved_is_found_from_every_seed(tmp_path: Path, asked: list[str]) -> None:
    train = [write_game(tmp_path, "train", f"pick-Apple-{number}", solvable=number == 2) for number in range(12)]
    held_out = write_game(tmp_path, "valid_unseen", "pick-Apple-1")
    options = AlfworldOptions(folder=str(tmp_path))
    for seed in (*range(60), HELD_OUT, HELD_OUT + 1):
        await Told(options).reset(seed)
    assert asked == [train[2]] * 60 + [held_out] * 2


async def test_games_that_nobody_can_solve_are_an_error(tmp_path: Path, asked: list[str]) -> None:
    for side in ("train", "valid_unseen"):
        write_game(tmp_path, side, "pick-Apple-1", solvable=False)
    with pytest.raises(EnvError, match=r"none of the 1 games .*/json_2\.1\.1/train can be solved"):
        await Told(AlfworldOptions(folder=str(tmp_path))).reset(1)
    assert asked == []


def test_what_is_missing_is_said_before_a_run(tmp_path: Path) -> None:
    found = {"textworld": object(), "fast_downward": object()}
    write_game(tmp_path, "train", "pick-Apple-1")
    options = AlfworldOptions(folder=str(tmp_path))
    with pytest.raises(ConfigError, match=r"no games of ALFWorld in .*json_2\.1\.1/valid_unseen: .*alfworld-download"):
        Alfworld.check(options, found.get)
    write_game(tmp_path, "valid_unseen", "pick-Apple-1")
    Alfworld.check(options, found.get)
    del found["fast_downward"]
    with pytest.raises(ConfigError, match=r"fast_downward is not installed: .*textworld\[pddl\]"):
        Alfworld.check(options, found.get)


def test_things_are_called_by_kind_and_number() -> None:
    assert names_of(["agent1", "apple_bar_1", "apple_bar_2", "sink_bar_1_bar_sinkbasin", "sink_bar_2"]) == {
        "agent1": "agent1",
        "apple_bar_1": "apple 2",
        "apple_bar_2": "apple 1",
        "sink_bar_1_bar_sinkbasin": "sinkbasin 1",
        "sink_bar_2": "sink 1",
    }


@pytest.mark.integration
async def test_a_real_game_is_won_by_its_commands(tmp_path: Path) -> None:
    pytest.importorskip("fast_downward", reason="is compiled for minutes when textworld[pddl] is installed")
    for side in ("train", "valid_unseen"):
        write_game(tmp_path, side, "pick-Apple-1")
    options = AlfworldOptions(folder=str(tmp_path), template="plain", timeout=120)
    Alfworld.check(options)
    env = Alfworld(options)
    assert isinstance(env, Environment)
    shown, _ = await env.reset(3)
    begun = "You see sinkbasin 1, and table 1.\n\nTake an apple.\n\nCommands: go to sinkbasin 1, go to table 1\n> "
    assert shown == begun
    assert (await env.step("dance"))[0] == "\nNothing happens.\n\nCommands: go to sinkbasin 1, go to table 1\n> "
    shown, reward, *_ = await env.step("go to sinkbasin 1")
    assert (
        shown == "\nOn the sinkbasin 1, you see apple 1.\n\nCommands: go to table 1, take apple 1 from sinkbasin 1\n> "
    )
    assert reward == 0.0
    won = {"metrics": {"won": 1.0, "moves": 3.0}}
    assert await env.step("take apple 1 from sinkbasin 1") == ("", 1.0, True, False, won)
    await env.close()
