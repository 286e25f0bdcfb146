"""Lakes: every one can be crossed, the perfect player wins it, and nothing else earns anything."""

from __future__ import annotations

import itertools
import random
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from envs.frozen_lake import RULES, FrozenLake, FrozenLakeOptions, FrozenLakeReplay, Lake, read_move
from envs.generated import in_held_out_part
from flash.environment import HELD_OUT, Environment, WarmStart
from flash.errors import ConfigError, EnvError
from flash.types import Message

GAMES = [
    FrozenLake(FrozenLakeOptions()),
    FrozenLake(FrozenLakeOptions(size=8, holes=0.3, shortest=4)),
]
SEEDS = [*range(40), *range(HELD_OUT, HELD_OUT + 20)]

game = pytest.mark.parametrize("env", GAMES, ids=["small", "large"])


def lake(text: str, slip: float = 0.0) -> Lake:
    lines = text.split()
    signs = "".join(lines)
    holes = frozenset(cell for cell, sign in enumerate(signs) if sign == "O")
    return Lake(len(lines), holes, signs.index("G"), signs.index("P"), slip)


@game
@pytest.mark.anyio
async def test_a_perfect_player_wins_every_game_and_earns_one_at_its_end(env: FrozenLake) -> None:
    assert isinstance(env, Environment)
    assert isinstance(env, WarmStart)
    for seed in SEEDS:
        shown, _ = await env.reset(seed)
        rewards, over = [], False
        while not over:
            assert lake(shown).show() + "\n" == shown
            shown, reward, over, truncated, info = await env.step(lake(shown).best())
            rewards.append(reward)
            assert not truncated
        assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
        assert info["metrics"] == {"unreadable": 0.0, "moves": float(len(rewards))}
        with pytest.raises(EnvError, match="after the end"):
            await env.step("U")


@game
@pytest.mark.anyio
async def test_no_ground_is_on_both_sides_and_a_seed_shows_the_same_map(env: FrozenLake) -> None:
    for seed in SEEDS:
        shown, _ = await env.reset(seed)
        assert in_held_out_part(lake(shown).ground) == (seed >= HELD_OUT)
        assert (await env.reset(seed))[0] == shown


@game
def test_solved_examples_are_whole_training_games_in_the_alphabet(env: FrozenLake) -> None:
    examples = env.solved_examples(30, 1)
    assert examples == env.solved_examples(30, 1)
    assert examples != env.solved_examples(30, 2)
    alphabet = env.alphabet()
    assert len(set(alphabet)) == len(alphabet)
    for example in examples:
        turns = [example, *example.later]
        assert not in_held_out_part(lake(example.prompt).ground)
        for turn, following in itertools.pairwise(turns):
            assert lake(turn.prompt).moved(turn.answer) == lake(following.prompt)
        assert lake(turns[-1].prompt).moved(turns[-1].answer).won
        assert {*alphabet} >= set("".join(turn.prompt + turn.answer for turn in turns))


@pytest.mark.parametrize(
    ("answer", "move"),
    [
        ("U", "U"),
        (" r\n", "R"),
        ("I go left.", "L"),
        ("Up is a hole, so: **Down**", "D"),
        ("", None),
        ("UR", None),
        ("north", None),
        ("left or so", None),
    ],
)
def test_a_move_is_the_last_word(answer: str, move: str | None) -> None:
    assert read_move(answer) == move


@pytest.mark.anyio
async def test_a_hole_ends_the_game_and_so_do_its_moves_and_neither_earns_anything() -> None:
    env = FrozenLake(FrozenLakeOptions(max_moves=5))
    fell = ran_out = 0
    for seed in range(20):
        rng = random.Random(seed)
        board = lake((await env.reset(seed))[0])
        for moves in range(1, 6):
            move = rng.choice("UDLR")
            board = board.moved(move)
            _, reward, over, _, _ = await env.step(move)
            assert over == (board.won or board.lost or moves == 5)
            assert reward == (1.0 if board.won else 0.0)
            if over:
                break
        fell, ran_out = fell + board.lost, ran_out + (not board.lost and not board.won)
    assert fell
    assert ran_out


@pytest.mark.anyio
async def test_what_is_no_move_uses_one_up() -> None:
    env = FrozenLake(FrozenLakeOptions(max_moves=2))
    shown, _ = await env.reset(3)
    assert await env.step("hm") == (shown, 0.0, False, False, {"metrics": {"unreadable": 1.0}})
    assert await env.step("") == ("", 0.0, True, False, {"metrics": {"unreadable": 1.0, "moves": 2.0}})


@pytest.mark.anyio
async def test_slips_follow_from_the_seed_and_are_as_many_as_asked_for() -> None:
    env = FrozenLake(FrozenLakeOptions(size=12, slip=0.3, max_moves=40, holes=0.05))
    went: list[bool] = []
    for seed in range(40):
        walks: list[list[Any]] = []
        for _ in range(2):
            shown, over = (await env.reset(seed))[0], False
            walks.append([])
            while not over:
                before = lake(shown)
                shown, _, over, _, _ = await env.step("R")
                walks[-1].append(shown)
                if shown and before.moved("R") != before:
                    went.append(lake(shown) == before.moved("R"))
        assert walks[0] == walks[1]
    assert 0.25 < went.count(False) / len(went) < 0.35


def test_on_slippery_ice_the_perfect_player_leans_on_the_edge_beside_a_hole() -> None:
    assert lake("P.. OO. G..").best() == "R"
    assert lake("PO. ... G..").best() == "D"
    assert lake("PO. ... G..", slip=0.6).best() == "L"


@pytest.mark.anyio
async def test_an_agent_that_plays_by_itself_is_judged_as_the_game_is() -> None:
    options = FrozenLakeOptions()
    played, replayed = FrozenLake(options), FrozenLakeReplay(options)
    assert played.solved_examples(5, 1) == replayed.solved_examples(5, 1)
    for seed in range(20):
        rng = random.Random(seed)
        shown, over, reward, moves = (await played.reset(seed))[0], False, 0.0, ""
        assert (await replayed.reset(seed))[0] == shown
        while not over:
            moves += lake(shown).best() if rng.random() < 0.9 else rng.choice("UDLR")
            shown, reward, over, _, _ = await played.step(moves[-1])
        assert (await replayed.step(moves + "\n"))[1] == reward
    await replayed.reset(1)
    assert (await replayed.step("I went up, then right"))[1] == 0.0
    await replayed.reset(1)
    assert (await replayed.step(""))[1] == 0.0


@pytest.mark.anyio
async def test_a_chat_says_the_rules_once() -> None:
    env = FrozenLake(FrozenLakeOptions(template="chat"))
    (first,), _ = await env.reset(1)
    assert isinstance(first, Message)
    assert first.content.startswith(RULES)
    (later,), *_ = await env.step("no")
    assert first.content == RULES + later.content
    assert env.solved_examples(1, 1)[0].prompt.startswith(RULES)
    assert set(RULES) <= set(env.alphabet())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 2}, "size must be"),
        ({"holes": 0.0}, "holes must be"),
        ({"slip": 1.0}, "slip must be"),
        ({"max_moves": 0}, "max_moves must be"),
        ({"max_moves": 5, "shortest": 6}, "shortest must be from 1 to max_moves = 5"),
    ],
)
def test_options_that_no_game_can_have_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrozenLakeOptions(**options)


@pytest.mark.slow
@pytest.mark.anyio
async def test_each_seed_has_a_lake_if_the_options_pass_the_check() -> None:
    options = FrozenLakeOptions(size=8, shortest=16)
    FrozenLake.check(options)
    for seed in range(HELD_OUT, HELD_OUT + 12):
        await FrozenLake(options).reset(seed)
        await anyio.lowlevel.checkpoint()


def test_what_only_a_look_at_the_maps_shows_is_refused_before_a_run() -> None:
    FrozenLake.check(FrozenLakeOptions(shortest=5))
    with pytest.raises(ConfigError, match="fits the options"):
        FrozenLakeReplay.check(FrozenLakeOptions(size=3, shortest=9))
    with pytest.raises(ConfigError, match="sees no slips"):
        FrozenLakeReplay.check(FrozenLakeOptions(slip=0.1))
