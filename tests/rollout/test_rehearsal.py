"""The first turn that is played before any engine starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import anyio
import msgspec
import pytest

from flash.environment.interface import HELD_OUT, EpisodeView
from flash.errors import ConfigError
from flash.rollout.episode.episode import EpisodeSettings
from flash.rollout.episode.rehearsal import PROBLEMS, rehearse
from flash.samples.tasks import SEED_STRIDE
from flash.sampling import Grammar, Sampling
from flash.simulate.clock import run_virtual
from flash.types import ResponseForm, Tool, Trajectory
from tests.rollout.test_episode import SETTINGS, CharTokenizer

ALWAYS = 1000
"""A number of problems that is larger than the number that are tried."""


class Stage:
    """An environment whose first `bad` problems fail at `place`. It notes seeds, actions and calls of `close`."""

    def __init__(self, bad: int = 0, place: str = "step", endless: bool = False) -> None:
        self.bad, self.place, self.endless = bad, place, endless
        self.seeds: list[int] = []
        self.actions: list[str] = []
        self.closed = 0

    def _fail(self, place: str) -> None:
        """Raise an error if this problem fails here."""
        if self.place == place and len(self.seeds) <= self.bad:
            raise ValueError(f"bad {place}")

    async def reset(self, seed: int) -> Any:
        """Note the seed, and ask for a word."""
        self.seeds.append(seed)
        self._fail("reset")
        return "say a word", {}

    async def step(self, action: str) -> Any:
        """Note the action, and end the episode unless it is endless."""
        if self.place == "hang":
            await anyio.sleep_forever()
        self._fail("step")
        self.actions.append(action)
        return "and on", 0.5, not self.endless, False, {}

    async def close(self) -> None:
        """Count the call."""
        self.closed += 1


class Formed(Stage):
    """An environment that asks for a number, and fails if it gets another answer that is complete."""

    def inform(self, episode: EpisodeView) -> None:
        """Keep the view of the episode."""
        self._episode = episode

    async def reset(self, seed: int) -> Any:
        """Ask for a number."""
        await self._episode.form(ResponseForm({"type": "integer"}))
        return await super().reset(seed)

    async def step(self, action: str) -> Any:
        """Read the number unless the response was cut off."""
        if not self._episode.last.cut:
            int(action)
        return await super().step(action)


class FormTokenizer(CharTokenizer):
    """A tokenizer that can make a grammar of any form."""

    async def grammar(self, form: ResponseForm, tools: Sequence[Tool]) -> Grammar:
        """Return a grammar, whatever the form."""
        return Grammar("a number")


CHARACTERS = CharTokenizer()


def played(
    stage: Stage, run_seed: int = 0, settings: EpisodeSettings = SETTINGS, tokenizer: CharTokenizer = CHARACTERS
) -> Trajectory:
    """Return the trajectory of a rehearsal in the environment `stage`."""

    async def go() -> Trajectory:
        return await rehearse(
            *(tokenizer, lambda kind: stage, str, settings),
            samplings={"": Sampling(temperature=0.7)},
            run_seed=run_seed,
            now=anyio.current_time,
        )

    return run_virtual(go)


@pytest.mark.parametrize("endless", [False, True])
def test_one_turn_of_the_first_training_problem_is_played_and_closed(endless: bool) -> None:
    stage = Stage(endless=endless)
    trajectory = played(stage, run_seed=2)
    assert stage.seeds == [2 * SEED_STRIDE]
    assert stage.seeds[0] < HELD_OUT
    assert stage.actions == ["d"]
    assert stage.closed == 1
    assert trajectory.reward == 0.5
    assert trajectory.task.sampling.temperature == 0.7, "an agent is told of the run's own"


def test_an_answer_that_should_have_a_form_counts_as_cut_off_because_it_has_none() -> None:
    stage = Formed()
    assert played(stage, tokenizer=FormTokenizer()).reward == 0.5
    assert stage.actions == ["d"]


@pytest.mark.parametrize("place", ["reset", "step"])
def test_a_problem_that_fails_now_and_then_does_not_stop_a_run(place: str) -> None:
    stage = Stage(bad=PROBLEMS - 1, place=place)
    played(stage)
    assert stage.seeds == list(range(PROBLEMS))
    assert stage.closed == PROBLEMS


@pytest.mark.parametrize(
    ("place", "said"), [("reset", "bad reset"), ("step", "bad step"), ("hang", "took longer than")]
)
def test_an_environment_that_always_fails_is_refused_with_its_reason(place: str, said: str) -> None:
    stage = Stage(bad=ALWAYS, place=place)
    with pytest.raises(ConfigError, match=rf"cannot be played; {PROBLEMS} problems were tried.*{said}"):
        played(stage)
    assert stage.closed == PROBLEMS


def test_a_problem_of_a_domain_is_played_for_one_turn_under_its_limits() -> None:
    own = msgspec.structs.replace(SETTINGS, max_turns=4)
    stage = Stage(endless=True)
    settings = msgspec.structs.replace(SETTINGS, domains={"0": own})
    trajectory = played(stage, settings=settings)
    assert len(trajectory.turns) == 1
