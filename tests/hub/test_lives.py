"""Which life of the trainer ranks counts, and what of its work is news: random schedules of deaths and late words."""

from __future__ import annotations

import random

import pytest

from flash.errors import ContractError
from flash.hub.ranks.lives import Lives

RANKS = 3
STEPS = 12


class Run:
    """A run as the hub keeps it, and ranks that die whenever they like; the hub dies too, and goes on where it was."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.lives = Lives(RANKS, 0, 0)
        self.hubs = 1
        self.version = 0
        self.booked: list[int] = []
        self.spread: list[int] = []
        self.trained: dict[tuple[int, int], list[int]] = {}
        """Of each life of each hub the steps, in its order."""
        self.checkpoints = [0]
        self.late: list[int] = []
        """Lives whose ranks may still be heard of."""

    def begin(self) -> int:
        """All ranks of a life come, and load a checkpoint."""
        numbers = {self.lives.arrives(rank) for rank in self.dice.sample(range(RANKS), RANKS)}
        (number,) = numbers
        assert self.lives.complete
        if number > 1:
            self.lives.begins_at(self.checkpoints[-1], self.version)
        self.trained[self.hubs, number] = []
        self.publish(number)
        return number

    def publish(self, life: int) -> None:
        if self.lives.counts(life) and self.lives.publishes(self.version):
            self.spread.append(self.lives.held)

    def commit(self, life: int) -> None:
        if not self.lives.counts(life):
            return
        step = self.lives.held
        self.trained[self.hubs, life].append(step)
        if self.lives.commits(self.version):
            self.booked.append(step)
            self.version += 1

    def die(self, life: int) -> None:
        """One rank, or several at once; the hub hears of each."""
        for _ in self.dice.sample(range(RANKS), self.dice.randint(1, RANKS)):
            if self.lives.counts(life):
                assert self.lives.lost(self.dice.randrange(RANKS))
        self.late.append(life)

    def hub_dies(self) -> None:
        """All connections end; the next one knows the run's version and the checkpoint."""
        self.late.clear()
        self.hubs += 1
        self.lives = Lives(RANKS, self.checkpoints[-1], self.version)
        assert self.lives.away == self.lives.behind(self.version)

    def say_late(self) -> None:
        """What ranks of a lost life still say is heard by nobody."""
        for life in self.late:
            self.commit(life)
            self.publish(life)

    def until_it_ends(self) -> None:
        life = self.begin()
        while self.version < STEPS:
            event = self.dice.random()
            if event < 0.2:
                self.die(life)
                self.say_late()
                life = self.begin()
            elif event < 0.25:
                self.hub_dies()
                life = self.begin()
            elif event < 0.3:
                self.say_late()
            else:
                self.commit(life)
                if self.dice.random() < 0.9:  # else it dies between the two
                    self.publish(life)
                else:
                    self.die(life)
                    life = self.begin()
                if self.lives.held == self.version and self.dice.random() < 0.2:
                    self.checkpoints.append(self.version)


@pytest.mark.parametrize("seed", range(300))
def test_each_step_is_booked_once_and_engines_never_go_back(seed: int) -> None:
    run = Run(seed)
    run.until_it_ends()
    assert run.booked == list(range(STEPS))
    assert run.spread == sorted(run.spread)
    for number, steps in run.trained.items():
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True, f"hub and life {number}"


def test_the_ranks_of_a_lost_life_are_not_heard_before_the_next_one_has_begun_either() -> None:
    lives = Lives(2, 5, 5)
    assert [lives.arrives(0), lives.arrives(1)] == [1, 1]
    assert lives.lost(1)
    assert not lives.counts(1)
    assert lives.away
    assert lives.arrives(0) == 2
    assert lives.counts(2)
    assert not lives.counts(1)
    assert not lives.complete


def test_after_the_first_goodbye_nothing_is_lost_with_a_rank() -> None:
    lives = Lives(2, 5, 5)
    lives.arrives(0)
    lives.arrives(1)
    lives.leaves(1)
    assert not lives.lost(0)
    assert lives.finished
    assert not lives.away


def test_a_life_cannot_begin_beyond_the_run() -> None:
    lives = Lives(1, 5, 5)
    lives.end()
    lives.arrives(0)
    with pytest.raises(ContractError, match="start from version 6 of a run that is at 5"):
        lives.begins_at(6, 5)
