"""TextWorld: games that are generated and played in other processes, and what is done when those fail."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from envs.textworld import TextWorld, TextWorldOptions
from envs.textworld.game import command_of
from envs.textworld.games import GameOf, Play, ShownGame
from envs.textworld.player import Player, open_player
from flash.environment import HELD_OUT, Environment, WarmStart, sharing
from flash.errors import ConfigError, EnvError
from flash.types import Message
from tests.envs.players import played_by

FAKE = (sys.executable, str(Path(__file__).parent / "textworld_fake.py"))


@pytest.mark.integration
@pytest.mark.anyio
async def test_a_player_that_hangs_or_dies_is_replaced_and_its_games_go_on(tmp_path: Path) -> None:
    async with open_player(FAKE) as player:

        async def play(episode: int, *commands: str, timeout: float = 30) -> str:
            return (await player.play(episode, str(tmp_path / "hung"), commands, timeout)).text

        assert await play(1, "a") == "['a'] 1"
        assert await play(2, "x") == "['x'] 2"
        assert await play(1, "a", "b") == "['a', 'b'] 3"
        with pytest.raises(EnvError, match=r"did not answer 'hang' within 1 s"):
            await play(2, "x", "hang", timeout=1)
        (tmp_path / "hung").touch()
        assert await play(1, "a", "b", "c") == "['a', 'b', 'c'] 3"
        assert await play(2, "x", "hang") == "['x', 'hang'] 5"
        with pytest.raises(EnvError, match=r"died over 'die'"):
            await play(2, "x", "die")
        assert await play(2, "y") == "['y'] 1"
        assert player.started == 3


@pytest.mark.integration
@pytest.mark.anyio
async def test_a_player_that_has_died_is_ended_as_well() -> None:
    async with open_player(FAKE) as player:
        await player.play(1, "", ["a"], 30)
        process = player._process
        assert process is not None
        process.kill()
        await process.wait()


@pytest.mark.integration
@pytest.mark.anyio
async def test_an_answer_to_a_request_that_was_cancelled_is_nobody_elses(tmp_path: Path) -> None:
    async with open_player(FAKE) as player:
        await player.play(1, "", ["a"], 30)
        with anyio.move_on_after(0.1) as scope:
            await player.play(1, "", ["a", "slow"], 30)
        assert scope.cancelled_caught
        assert (await player.play(2, "", ["x"], 30)).text == "['x'] 3"
        assert player.started == 1


@pytest.mark.integration
@pytest.mark.anyio
async def test_a_player_that_stops_in_the_middle_of_an_answer_is_replaced() -> None:
    async with open_player(FAKE, message_s=0.5) as player:
        with anyio.fail_after(60), pytest.raises(EnvError, match="in the middle of a message over 'half'"):
            await player.play(1, "", ["half"], 30)
        assert (await player.play(2, "", ["x"], 30)).text == "['x'] 1"


@pytest.mark.integration
@pytest.mark.anyio
async def test_the_deadline_of_a_game_counts_from_when_its_process_is_loaded() -> None:
    async with open_player((*FAKE, "slow")) as player:
        with anyio.move_on_after(0.1) as scope:
            await player.load()
        assert scope.cancelled_caught
        assert (await player.play(1, "", ["a"], 2.5)).text == "['a'] 1"
        assert player.started == 1


@pytest.mark.integration
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("loading", "message"),
    [
        ("hangs", "did not load TextWorld within 0.5 s"),
        ("fails", "died while it loaded TextWorld: `.* fails` says why"),
    ],
)
async def test_a_process_that_does_not_load_is_named_as_that(loading: str, message: str) -> None:
    async with open_player((*FAKE, loading), start_s=0.5 if loading == "hangs" else 30) as player:
        with anyio.fail_after(60), pytest.raises(EnvError, match=message):
            await player.play(1, "", ["a"], 30)


class Told(Player):
    """A player that shows what a test says."""

    def __init__(self, *shown: ShownGame) -> None:
        self.shown = list(shown)
        self.asked: list[Play] = []

    async def play(self, episode: int, file: str, commands: Any, timeout: float) -> ShownGame:
        self.asked.append(Play(0, episode, file, list(commands)))
        return self.shown.pop(0)


def shown(text: str, score: float, *, won: bool = False, lost: bool = False) -> ShownGame:
    return ShownGame(0, text, ["go east", "look"], [], score, won, lost)


class Generated(TextWorld):
    """Whose games are there."""

    async def _generated(self, game: GameOf) -> str:
        return f"/games/{game.name}"


async def episode(player: Player, commands: list[str], **options: Any) -> list[Any]:
    """All that the environment says of one game."""
    env = Generated(TextWorldOptions(template="plain", **options))
    async with played_by(player):
        return [await env.reset(7), *[await env.step(command) for command in commands]]


@pytest.mark.anyio
async def test_progress_is_what_a_step_adds_to_the_score() -> None:
    player = Told(shown("begin", 0), shown("A", 0.5), shown("B", 0.25), shown("C", 1, won=True))
    first, *steps = await episode(player, ["think\n> go east \n", "look", "x"], games=5)
    assert first == ("begin\n\nCommands: go east, look\n> ", {})
    assert steps == [
        ("\nA\n\nCommands: go east, look\n> ", 0.5, False, False, {}),
        ("\nB\n\nCommands: go east, look\n> ", -0.25, False, False, {}),
        ("", 0.75, True, False, {"metrics": {"won": 1.0, "moves": 3.0}}),
    ]
    assert player.asked[-1].commands == ["go east", "look", "x"]
    assert player.asked[-1].file == "/games/coin_collector-1-2"


@pytest.mark.anyio
async def test_the_end_may_be_all_that_counts_and_moves_run_out() -> None:
    player = Told(shown("begin", 0), shown("A", 0.5), shown("B", 1, won=True))
    steps = await episode(player, ["x", "y"], reward="end", admissible=False)
    assert [step[1] for step in steps[1:]] == [0.0, 1.0]
    assert steps[1][0] == "\nA\n> "
    player = Told(shown("begin", 0), shown("A", 0.5), shown("B", 0.5))
    steps = await episode(player, ["x", "y"], max_moves=2)
    assert steps[2] == ("", 0.0, True, False, {"metrics": {"won": 0.0, "moves": 2.0}})
    player = Told(shown("begin", 0), shown("burnt", 0.5, lost=True))
    assert (await episode(player, ["cook"]))[1][1:3] == (0.5, True)


@pytest.mark.parametrize(
    ("action", "command"),
    [
        ("go east", "go east"),
        (" so:\n> take coin \n", "take coin"),
        ("", ""),
        ("x" * 500, "x" * 100),
        ("\\no \\st", "no st"),
    ],
)
def test_a_command_is_the_last_line(action: str, command: str) -> None:
    assert command_of(action) == command


def test_seeds_take_turns_among_the_games_of_their_side() -> None:
    options = TextWorldOptions(kind="simple", level=2, games=3)
    assert options.game_of(4) == GameOf("simple", 2, 1, False)
    assert options.game_of(HELD_OUT + 4) == GameOf("simple", 2, HELD_OUT + 1, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "simple", "level": 4}, "from 1 to 3 for simple"),
        ({"level": 0}, "from 1 to 300 for coin_collector"),
        ({"games": 0}, "games must be"),
        ({"max_moves": 0}, "max_moves must be"),
        ({"timeout": 0.0}, "timeout must be"),
    ],
)
def test_options_that_no_game_can_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TextWorldOptions(**options)


@pytest.mark.integration
@pytest.mark.anyio
async def test_a_real_game_is_won_by_its_own_solution(tmp_path: Path) -> None:
    pytest.importorskip("jericho", reason="needs a C compiler when the environment is made", exc_type=ImportError)
    options = TextWorldOptions(level=2, games=1, folder=str(tmp_path))
    TextWorld.check(options)
    env = TextWorld(options)
    assert isinstance(env, Environment)
    assert isinstance(env, WarmStart)
    (example,) = env.solved_examples(1, 0)
    async with sharing("test"):
        (message,), _ = await env.reset(3)
        assert isinstance(message, Message)
        assert message.content == example.prompt
        assert "Commands: " in message.content
        (unknown,), reward, over, *_ = await env.step("dance with the coin")
        assert isinstance(unknown, Message)
        assert (reward, over) == (0.0, False)
        earned = 0.0
        for turn in (example, *example.later):
            _, reward, over, _, info = await env.step(turn.answer)
            earned += reward
        assert (earned, over, info["metrics"]["won"]) == (1.0, True, 1.0)
    assert set(example.prompt + example.answer) <= set(env.alphabet())
