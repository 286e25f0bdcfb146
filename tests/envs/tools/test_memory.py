"""Answers that are used again are those that the call would have had."""

from __future__ import annotations

import random
from typing import Any

import anyio
import pytest

from envs.tools.memory import Answers, Memory
from envs.tools.runner import Cut, Runner

pytestmark = [pytest.mark.anyio, pytest.mark.virtual]


class Box:
    """A list that calls append to and read; counts what was carried out."""

    def __init__(self) -> None:
        self.items: list[str] = []
        self.carried_out = 0
        self.delay = 1.0

    def runners(self) -> dict[str, Runner]:
        kinds: dict[str, tuple[str | None, bool]] = {
            "add": ("box", True),
            "look": ("box", False),
            "pure": ("", False),
            "dice": (None, True),
        }
        return {
            name: Runner(
                name=name, description="", parameters={}, call=self._caller(name), state=state, changes=changes
            )
            for name, (state, changes) in kinds.items()
        }

    def _caller(self, name: str) -> Any:
        async def call(arguments: dict[str, Any]) -> str:
            self.carried_out += 1
            await anyio.sleep(self.delay)
            item = arguments.get("item", "")
            if item == "late":
                return Cut("late")
            if name == "add":
                self.items.append(item)
            return f"{name} {item} of {self.items}" if name in ("add", "look") else f"{name} {item}"

        return call


@pytest.mark.parametrize("seed", range(20))
async def test_every_answer_is_the_one_that_an_episode_without_memory_gets(seed: int) -> None:
    rng = random.Random(seed)
    answers = Answers(most=rng.choice([3, 1000]))
    for _ in range(6):
        box, plain, memory = Box(), Box(), Memory(answers)
        for _ in range(rng.randrange(8)):
            name, item = (
                rng.choice(["add", "look", "pure", "dice"]),
                rng.choice(["a", "b", "late"] if seed % 2 else "ab"),
            )
            remembered = await memory.call(box.runners()[name], {"item": item})
            assert remembered == await plain.runners()[name].call({"item": item})
        assert box.carried_out <= plain.carried_out


async def test_an_episode_that_does_what_another_did_carries_nothing_out() -> None:
    answers, script = Answers(), [("add", "a"), ("look", ""), ("add", "b"), ("look", "")]
    counts = []
    for _ in range(2):
        box, memory = Box(), Memory(answers)
        told = [await memory.call(box.runners()[name], {"item": item}) for name, item in script]
        assert told[-1] == "look  of ['a', 'b']"
        counts.append((box.carried_out, memory.used_again))
    assert counts == [(4, 0), (0, 4)]


async def test_a_call_that_is_cancelled_leaves_nothing_to_be_used_again() -> None:
    answers = Answers()
    box, memory = Box(), Memory(answers)
    with anyio.move_on_after(0.5):
        await memory.call(box.runners()["add"], {"item": "a"})
    await memory.call(box.runners()["add"], {"item": "b"})
    assert await memory.call(box.runners()["look"], {}) == "look  of ['b']"
    other = Box()
    assert await Memory(answers).call(other.runners()["look"], {}) == "look  of []"
    assert other.carried_out == 1


async def test_calls_of_one_state_keep_their_order_and_others_run_at_once() -> None:
    box, memory = Box(), Memory(Answers())
    async with anyio.create_task_group() as tasks:
        for item in "abc":
            tasks.start_soon(memory.call, box.runners()["add"], {"item": item})
    assert box.items == ["a", "b", "c"]
    start = anyio.current_time()
    async with anyio.create_task_group() as tasks:
        for item in "abc":
            tasks.start_soon(memory.call, box.runners()["pure"], {"item": item})
    assert anyio.current_time() - start == pytest.approx(1.0)
