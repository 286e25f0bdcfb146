"""TextWorld: games that are generated and played in worker processes, and what is done when those fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from envs.textworld import TextWorld, TextWorldOptions
from envs.textworld.game import command_of, play_in_worker
from envs.textworld.games import GAME_FILE, GameOf, ShownGame, generate, move_to_final_place
from flash.environment import HELD_OUT, Environment, WarmStart
from flash.errors import ConfigError, EnvError
from flash.types import Message


@dataclass
class Told:
    """Shows what a test says."""

    shown: list[ShownGame]
    asked: list[tuple[str, list[str]]] = field(default_factory=list)

    async def __call__(self, episode: int, file: str, commands: Sequence[str], timeout: float) -> ShownGame:
        self.asked.append((file, [*commands]))
        return self.shown.pop(0)


def shown(text: str, score: float, *, won: bool = False, lost: bool = False) -> ShownGame:
    return ShownGame(text, ["go east", "look"], [], score, won, lost)


class Generated(TextWorld):
    """Whose games are there."""

    async def _generated(self, game: GameOf) -> str:
        return f"/games/{game.name}"


async def episode(player: Told, commands: list[str], **options: Any) -> list[Any]:
    """All that the environment says of one game."""

    class Played(Generated):
        pass

    Played.player = player
    env = Played(TextWorldOptions(template="plain", **options))
    return [await env.reset(7), *[await env.step(command) for command in commands]]


@pytest.mark.anyio
async def test_progress_is_what_a_step_adds_to_the_score() -> None:
    player = Told([shown("begin", 0), shown("A", 0.5), shown("B", 0.25), shown("C", 1, won=True)])
    first, *steps = await episode(player, ["think\n> go east \n", "look", "x"], games=5)
    assert first == ("begin\n\nCommands: go east, look\n> ", {})
    assert steps == [
        ("\nA\n\nCommands: go east, look\n> ", 0.5, False, False, {}),
        ("\nB\n\nCommands: go east, look\n> ", -0.25, False, False, {}),
        ("", 0.75, True, False, {"metrics": {"won": 1.0, "moves": 3.0}}),
    ]
    assert player.asked[-1] == ("/games/coin_collector-1-2", ["go east", "look", "x"])


@pytest.mark.anyio
async def test_the_end_may_be_all_that_counts_and_moves_run_out() -> None:
    player = Told([shown("begin", 0), shown("A", 0.5), shown("B", 1, won=True)])
    steps = await episode(player, ["x", "y"], reward="end", admissible=False)
    assert [step[1] for step in steps[1:]] == [0.0, 1.0]
    assert steps[1][0] == "\nA\n> "
    player = Told([shown("begin", 0), shown("A", 0.5), shown("B", 0.5)])
    steps = await episode(player, ["x", "y"], max_moves=2)
    assert steps[2] == ("", 0.0, True, False, {"metrics": {"won": 0.0, "moves": 2.0}})
    player = Told([shown("begin", 0), shown("burnt", 0.5, lost=True)])
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
    assert TextWorld.held_out_problems(options) == 3


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


def test_a_game_that_another_process_has_generated_first_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "game"
    for name in ("first", "second"):
        scratch = tmp_path / name
        scratch.mkdir()
        (scratch / GAME_FILE).write_text(name)
        move_to_final_place(scratch, place)
        assert not scratch.exists()
    assert (place / GAME_FILE).read_text() == "first"


def test_a_generated_game_that_cannot_be_moved_raises_the_cause(tmp_path: Path) -> None:
    scratch, place = tmp_path / "scratch", tmp_path / "game"
    scratch.mkdir()
    place.write_text("a file where the folder of the game should be")
    with pytest.raises(NotADirectoryError):
        move_to_final_place(scratch, place)


@pytest.mark.integration
def test_a_game_that_cannot_be_made_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="level"):
        generate(GameOf("coin_collector", 0, 1, held_out=False), str(tmp_path))
    assert not list(tmp_path.iterdir())


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
    await TextWorld.prepare(options)
    (message,), _ = await env.reset(3)
    assert isinstance(message, Message)
    assert message.content == example.prompt
    assert "Commands: " in message.content
    (unknown,), reward, over, *_ = await env.step("dance with the coin")
    assert isinstance(unknown, Message)
    assert (reward, over) == (0.0, False)
    turns = [example, *example.later]
    _, earned, *_ = await env.step(turns[0].answer)
    # In a worker that has seen nothing of it.
    with pytest.raises(EnvError, match="did not answer 'look' within 1e-06 s, or its process died"):
        await play_in_worker(0, env._file, ["look"], 1e-6)
    for turn in turns[1:]:
        _, reward, over, _, info = await env.step(turn.answer)
        earned += reward
    assert (earned, over, info["metrics"]["won"]) == (1.0, True, 1.0)
    assert set(example.prompt + example.answer) <= set(env.alphabet())
