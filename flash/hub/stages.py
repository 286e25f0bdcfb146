"""The stages of a run: what it waits for at the moment, for how long at most, and where to look when it never comes."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from flash.config import waits
from flash.config.tree import Config
from flash.hub.context import HubContext, HubPart
from flash.hub.fleet import NodeRegistry
from flash.hub.steps import TrainingSteps
from flash.hub.trainers import Incarnations

RANKS = "the trainer ranks"


class Stage(Enum):
    """What a run waits for: in words, where to look when it never comes, and its entry of `[deadlines]`."""

    FIRST_VERSION = (f"{RANKS} to publish their first version", f"{RANKS}, and deadlines.rendezvous", "rendezvous")
    AWAY = (f"{RANKS} to start again, at version {{step}}", f"{RANKS}' output, and deadlines.rendezvous", "rendezvous")
    """After one was lost."""
    AGAIN = (f"{RANKS} to train step {{step}} again", RANKS, "step")
    """What they have lost."""
    STARTING = ("an engine to start and to load its first version", "vLLM's output, and deadlines.engine_start")
    RETURNING = ("an engine to come back", "vLLM's output, deadlines.engine_start and engine.max_restarts")
    """No engine is left, and others start in their places."""
    BATCH = ("a batch for step {step} ({groups} groups are complete)", "engines and environments", "batch")
    STEP = (f"{RANKS} to finish step {{step}}", RANKS, "step")
    LOADING = ("{behind} to load version {step}", "the output of that node, and deadlines.swap")
    """The trainer ranks wait for engines to load what they have published."""
    BETWEEN = (
        f"{RANKS} to publish version {{step}} and to ask for a batch, after a checkpoint if one was due",
        f"{RANKS} and the disk of the run directory, and deadlines.step",
        "step",
    )
    SAVING = (f"{RANKS} to leave the last checkpoint and the model", f"{RANKS}, and deadlines.step", "step")
    """After the last step."""
    EVALUATING = ("the last evaluation to end ({answers})", "the engines, eval.problems and deadlines.step", "step")
    """The trainer ranks have saved everything, and keep the weights for engines that start."""
    ENDING = (f"{RANKS} to stop", "", "shutdown")
    """After an interrupt."""

    def __init__(self, words: str, look_at: str, deadline: str = "") -> None:
        self.words = words
        self.look_at = look_at
        self.deadline = deadline
        """Empty where the stage may last as long as several of them."""

    @property
    def of_trainers(self) -> bool:
        """True if the trainer ranks alone can end it."""
        return self.deadline in ("rendezvous", "step") and self is not Stage.EVALUATING

    def seconds(self, config: Config) -> float:
        """How long it may last."""
        if self is Stage.STARTING:
            return waits.first_version_s(config)
        if self is Stage.RETURNING:
            # The node says why before that, where none will.
            return waits.engine_return_s(config) + config.deadlines.request
        if self is Stage.LOADING:
            return waits.new_version_s(config)
        return float(getattr(config.deadlines, self.deadline))


class StartupPhase(NamedTuple):
    """What a run does before its first step, for people."""

    doing: str
    done: str = ""
    """How much of it, where that can be told."""


STARTING_ENGINES = "starting engines"
"""What a run does before its first step that lasts longest: a first start of vLLM compiles."""


class RunStages(HubPart):
    """See the module's docstring. It asks those who know."""

    def __init__(
        self, parts: HubContext, members: NodeRegistry, incarnations: Incarnations, steps: TrainingSteps
    ) -> None:
        super().__init__(parts)
        self._members = members
        self._incarnations = incarnations
        self._steps = steps
        self._first_version = self._progress.version

    @property
    def now(self) -> Stage:
        """What the run waits for at the moment."""
        return Stage.ENDING if self._progress.stopping == "interrupted" else self._at_work

    @property
    def _at_work(self) -> Stage:
        """The same, interrupted or not."""
        if self._incarnations.away:
            return Stage.AWAY
        if self._progress.behind:
            return Stage.AGAIN
        if self._progress.published is None:
            return Stage.FIRST_VERSION
        if self._steps.training:
            return Stage.STEP
        finished = self._progress.stopping == "finished"
        if not self._fleet.started and not (finished and self._evaluations.done):
            return Stage.RETURNING if self._fleet.waits_for_engines else Stage.STARTING
        if self._steps.waits_for_engines:
            return Stage.LOADING
        if finished and not self._incarnations.saved:
            return Stage.SAVING
        if finished:
            return Stage.RETURNING if self._fleet.waits_for_engines else Stage.EVALUATING
        if not self._steps.asked:
            return Stage.BETWEEN
        return Stage.RETURNING if self._fleet.waits_for_engines else Stage.BATCH

    @property
    def _groups(self) -> str:
        return f"{self._samples.pool.ready_groups} of {self._contract.groups_per_batch}"

    def waited_for(self, stage: Stage) -> str:
        """A stage of this moment, in words."""
        step = self._progress.held if stage is Stage.AGAIN else self._progress.version
        words = stage.words.format(
            step=step,
            groups=self._groups,
            behind=self._fleet.behind(self._progress.newest),
            answers=self._evaluations.progress,
        )
        alone = self._members.engines == 0 if stage is Stage.STARTING else not self._fleet
        if stage in (Stage.STARTING, Stage.BATCH, Stage.EVALUATING) and alone:
            words += ", while no node has an engine: `flash join` brings one"
        return words

    @property
    def last_work(self) -> str:
        """What the run still does, or would, when it is interrupted, in words."""
        stage, step = self._at_work, self._progress.version
        if stage is Stage.STEP:
            return f"finishing step {step} and writing a checkpoint"
        if stage in (Stage.FIRST_VERSION, Stage.AWAY, Stage.AGAIN, Stage.EVALUATING):
            return "ending its processes"
        return f"writing a checkpoint of version {step}"

    def beginning(self) -> StartupPhase | None:
        """What the run does before its first step; None from then on, and when it has ended before."""
        progress = self._progress
        if progress.version > self._first_version or progress.error is not None:
            return None
        if progress.stopping == "interrupted" or (progress.stopping == "finished" and self._evaluations.done):
            return None
        if progress.published is None:
            if progress.behind and not self._incarnations.away:
                return StartupPhase("training again", f"{progress.version - progress.held} steps left")
            return StartupPhase("starting engines and trainers")
        if not self._fleet.started:
            return StartupPhase(STARTING_ENGINES)
        if answers := self._evaluations.progress:
            return StartupPhase("first evaluation", answers)
        if self._steps.training:
            return StartupPhase("first step")
        return StartupPhase("first batch", f"{self._groups} groups")

    async def past(self, doing: str) -> None:
        """Wait, under the caller's deadline, until the beginning does something else."""
        while (now := self.beginning()) is not None and now.doing == doing:
            await self._progress.wait("run")
