"""Which incarnation of the trainer ranks counts, and what of its work is news: random deaths and late words."""

from __future__ import annotations

import random

import pytest

from flash.errors import ContractError
from flash.hub.context import RunProgress
from flash.hub.trainers import Incarnations

RANKS = 3
STEPS = 12


class Run:
    """A run as the hub keeps it, and ranks that die whenever they like; the hub dies too, and goes on where it was."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.progress = RunProgress(0)
        self.incarnations = Incarnations(RANKS, self.progress, 0)
        self.hubs = 1
        self.booked: list[int] = []
        self.spread: list[int] = []
        self.trained: dict[tuple[int, int], list[int]] = {}
        """Of each incarnation of each hub the steps, in its order."""
        self.checkpoints = [0]
        self.late: list[int] = []
        """Incarnations whose ranks may still be heard of."""

    def begin(self) -> int:
        """All ranks of an incarnation come, and load a checkpoint."""
        numbers = {self.incarnations.rank_arrived(rank) for rank in self.dice.sample(range(RANKS), RANKS)}
        (number,) = numbers
        assert self.incarnations.present == list(range(RANKS))
        if number > 1:
            self.incarnations.start_from(self.checkpoints[-1])
        self.trained[self.hubs, number] = []
        self.publish(number)
        return number

    def publish(self, incarnation: int) -> None:
        if self.incarnations.is_current(incarnation) and self.incarnations.publish():
            self.spread.append(self.progress.trainer_version)

    def commit(self, incarnation: int) -> None:
        if not self.incarnations.is_current(incarnation):
            return
        step = self.progress.trainer_version
        self.trained[self.hubs, incarnation].append(step)
        if self.incarnations.commit():
            self.booked.append(step)
            self.progress.version += 1

    def die(self, incarnation: int) -> None:
        """One rank, or several at once; the hub hears of each."""
        for _ in self.dice.sample(range(RANKS), self.dice.randint(1, RANKS)):
            if self.incarnations.is_current(incarnation):
                assert self.incarnations.ranks_lost([self.dice.randrange(RANKS)])
        self.late.append(incarnation)

    def hub_dies(self) -> None:
        """All connections end; the next one knows the run's version and the checkpoint."""
        self.late.clear()
        self.hubs += 1
        self.progress = RunProgress(self.progress.version)
        self.incarnations = Incarnations(RANKS, self.progress, self.checkpoints[-1])
        assert self.incarnations.recovering == self.progress.trainers_behind

    def say_late(self) -> None:
        """What ranks of a lost incarnation still say is heard by nobody."""
        for incarnation in self.late:
            self.commit(incarnation)
            self.publish(incarnation)

    def until_it_ends(self) -> None:
        incarnation = self.begin()
        while self.progress.version < STEPS:
            event = self.dice.random()
            if event < 0.2:
                self.die(incarnation)
                self.say_late()
                incarnation = self.begin()
            elif event < 0.25:
                self.hub_dies()
                incarnation = self.begin()
            elif event < 0.3:
                self.say_late()
            else:
                self.commit(incarnation)
                if self.dice.random() < 0.9:  # else it dies between the two
                    self.publish(incarnation)
                else:
                    self.die(incarnation)
                    incarnation = self.begin()
                if self.progress.trainer_version == self.progress.version and self.dice.random() < 0.2:
                    self.checkpoints.append(self.progress.version)


@pytest.mark.parametrize("seed", range(300))
def test_each_step_is_booked_once_and_engines_never_go_back(seed: int) -> None:
    run = Run(seed)
    run.until_it_ends()
    assert run.booked == list(range(STEPS))
    assert run.spread == sorted(run.spread)
    for number, steps in run.trained.items():
        assert steps == list(range(steps[0], steps[0] + len(steps))) if steps else True, f"hub and incarnation {number}"


def test_the_ranks_of_a_lost_incarnation_are_not_heard_before_the_next_one_has_begun_either() -> None:
    incarnations = Incarnations(2, RunProgress(5), 5)
    assert [incarnations.rank_arrived(0), incarnations.rank_arrived(1)] == [1, 1]
    assert incarnations.ranks_lost([1])
    assert not incarnations.is_current(1)
    assert incarnations.recovering
    assert incarnations.rank_arrived(0) == 2
    assert incarnations.is_current(2)
    assert not incarnations.is_current(1)
    assert incarnations.present == [0]


def test_after_the_first_goodbye_nothing_is_lost_with_a_rank() -> None:
    incarnations = Incarnations(2, RunProgress(5), 5)
    incarnations.rank_arrived(0)
    incarnations.rank_arrived(1)
    incarnations.rank_left(1)
    assert not incarnations.ranks_lost([0])
    assert incarnations.finished
    assert not incarnations.recovering


def test_an_incarnation_cannot_begin_beyond_the_run() -> None:
    incarnations = Incarnations(1, RunProgress(5), 5)
    incarnations.end()
    incarnations.rank_arrived(0)
    with pytest.raises(ContractError, match="start from version 6 of a run that is at 5"):
        incarnations.start_from(6)
