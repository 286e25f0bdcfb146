"""The stages of a run: what it waits for at the moment, for how long at most, and where to look when it never comes."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from flash.config import waits
from flash.config.tree import Config


class Stage(Enum):
    """What a run waits for."""

    FIRST_VERSION = auto()
    """The trainer ranks start and publish the version that they hold."""
    AWAY = auto()
    """The trainer ranks start again, after one was lost."""
    AGAIN = auto()
    """They train again what they have lost."""
    STARTING = auto()
    """No engine has loaded a version yet."""
    RETURNING = auto()
    """No engine is left, and others start in their places."""
    BATCH = auto()
    """Enough groups for a step."""
    STEP = auto()
    """The trainer ranks have a batch."""
    LOADING = auto()
    """The trainer ranks wait for engines to load what they have published."""
    BETWEEN = auto()
    """The trainer ranks publish what they have trained, or write a checkpoint, before they ask for the next batch."""
    SAVING = auto()
    """After the last step: a checkpoint and the export."""
    ENDING = auto()
    """After an interrupt."""


class Beginning(NamedTuple):
    """What a run does before its first step, for people."""

    doing: str
    done: str = ""
    """How much of it, where that can be told."""


STARTING_ENGINES = "starting engines"
"""What a run does before its first step that lasts longest: a first start of vLLM compiles."""

OF_TRAINERS = {
    Stage.FIRST_VERSION: "rendezvous",
    Stage.AWAY: "rendezvous",
    Stage.AGAIN: "step",
    Stage.STEP: "step",
    Stage.BETWEEN: "step",
    Stage.SAVING: "step",
}
"""Stages that the trainer ranks alone can end, each with its entry of `[deadlines]`."""

LOOK_AT = {
    Stage.FIRST_VERSION: "the trainer ranks, and deadlines.rendezvous",
    Stage.AWAY: "the trainer ranks' output, and deadlines.rendezvous",
    Stage.AGAIN: "the trainer ranks",
    Stage.STARTING: "vLLM's output, and deadlines.engine_start",
    Stage.RETURNING: "vLLM's output, deadlines.engine_start and engine.max_restarts",
    Stage.BATCH: "engines and environments",
    Stage.STEP: "the trainer ranks",
    Stage.LOADING: "the output of that node, and deadlines.swap",
    Stage.BETWEEN: "the trainer ranks and the disk of the run directory, and deadlines.step",
    Stage.SAVING: "the trainer ranks, and deadlines.step",
}


def stage_s(stage: Stage, config: Config) -> float:
    """How long a stage may last."""
    deadlines = config.deadlines
    if stage in OF_TRAINERS:
        return float(getattr(deadlines, OF_TRAINERS[stage]))
    match stage:
        case Stage.STARTING:
            return waits.first_version_s(config)
        case Stage.RETURNING:
            # The node says why before that, where none will.
            return waits.engine_return_s(config) + deadlines.request
        case Stage.BATCH:
            return deadlines.batch
        case Stage.LOADING:
            return waits.new_version_s(config)
        case _:
            return deadlines.shutdown


def last_work(stage: Stage, step: int) -> str:
    """What a run does that is interrupted in this stage, in words."""
    match stage:
        case Stage.STEP:
            return f"finishing step {step} and writing a checkpoint"
        case Stage.FIRST_VERSION | Stage.AWAY | Stage.AGAIN:
            return "ending its processes"
        case _:
            return f"writing a checkpoint of version {step}"


def waited_for(stage: Stage, *, step: int, groups: str, behind: str) -> str:
    """A stage in words; `groups`: how many are complete, `behind`: which engines the trainers wait for."""
    match stage:
        case Stage.FIRST_VERSION:
            return "the trainer ranks to publish their first version"
        case Stage.AWAY:
            return f"the trainer ranks to start again, at version {step}"
        case Stage.AGAIN:
            return f"the trainer ranks to train step {step} again"
        case Stage.STARTING:
            return "an engine to start and to load its first version"
        case Stage.RETURNING:
            return "an engine to come back"
        case Stage.BATCH:
            return f"a batch for step {step} ({groups} groups are complete)"
        case Stage.STEP:
            return f"the trainer ranks to finish step {step}"
        case Stage.LOADING:
            return f"{behind} to load version {step}"
        case Stage.BETWEEN:
            return (
                f"the trainer ranks to publish version {step} and to ask for a batch, after a checkpoint if one was due"
            )
        case Stage.SAVING:
            return "the trainer ranks to leave the last checkpoint and the model"
        case Stage.ENDING:
            return "the trainer ranks to stop"
