"""The stages of a run: what the run waits for, the deadline of the wait, and where to look if the deadline passes.

`RunStages` finds the stage from the state of the other parts of the hub, and changes nothing. `Hub.run` watches that no
stage outlives its deadline, and `flash.run.node_loop` shows people the phases before the first step. An *incarnation*
is the set of trainer ranks that run from one restart of the ranks to the next.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from flash.config import waits
from flash.config.tree import Config
from flash.hub.context import HubContext
from flash.hub.fleet import NodeRegistry
from flash.hub.steps import TrainingSteps
from flash.hub.trainers import Incarnations

RANKS = "the trainer ranks"
"""Words for the ranks in the phrases below."""


class Stage(Enum):
    """Event that a run waits for: a phrase, the place to look at if the event never happens, and a key in
    `[deadlines]`.

    If a stage outlives its deadline, the incarnation of the trainer ranks ends if only they can end the stage.
    Otherwise the run ends with an error.
    """

    FIRST_VERSION = (f"{RANKS} to publish their first version", f"{RANKS}, and deadlines.rendezvous", "rendezvous")
    """This hub process has just begun."""
    RECOVERING = (
        f"{RANKS} to start again, at version {{step}}",
        f"{RANKS}' output, and deadlines.rendezvous",
        "rendezvous",
    )
    """A rank was lost, perhaps under a previous hub, and the next incarnation has not published yet."""
    REPEATING = (f"{RANKS} to train step {{step}} again", RANKS, "step")
    """The ranks train steps again that were lost with an incarnation."""
    STARTING = ("an engine to start and to load its first version", "vLLM's output, and deadlines.engine_start")
    """The ranks have published, and no engine has reported a version yet."""
    RETURNING = ("an engine to come back", "vLLM's output, deadlines.engine_start and cluster.max_restarts")
    """All engines have died, and new engines start in their places."""
    BATCH = ("a batch for step {step} ({groups} groups are complete)", "engines and environments", "step")
    """The ranks wait for groups, for a whole batch or for the next round of it."""
    STEP = (f"{RANKS} to finish step {{step}}", RANKS, "step")
    """The ranks train."""
    LOADING = ("{behind} to load version {step}", "the output of that node, and deadlines.swap")
    """The ranks wait until engines have loaded the version before the one that they publish."""
    BETWEEN = (
        f"{RANKS} to publish version {{step}} and to ask for a batch, after a checkpoint if one was due",
        f"{RANKS} and the disk of the run directory, and deadlines.step",
        "step",
    )
    """Between two steps."""
    SAVING = (f"{RANKS} to write the last checkpoint and to export the model", f"{RANKS}, and deadlines.step", "step")
    """After the last step."""
    EVALUATING = ("the last evaluation to end ({answers})", "the engines, eval.problems and deadlines.step", "step")
    """The ranks have saved everything, and keep the weights for engines that start."""
    ENDING = (f"{RANKS} to stop", "", "shutdown")
    """After an interrupt."""

    def __init__(self, description: str, look_at: str, deadline: str = "") -> None:
        self.description = description
        """Phrase for the event, for people, with placeholders that `RunStages.describe` fills."""
        self.look_at = look_at
        """Place where people should look if the stage outlives its deadline."""
        self.deadline = deadline
        """Key in `[deadlines]`; empty if the stage may last as long as several deadlines together."""

    @property
    def of_trainers(self) -> bool:
        """True if only the trainer ranks can end the stage."""
        return self.deadline in ("rendezvous", "step") and self not in (Stage.BATCH, Stage.EVALUATING)

    def seconds(self, config: Config) -> float:
        """Return the seconds that the stage may last."""
        if self is Stage.STARTING:
            return waits.first_version_s(config)
        if self is Stage.RETURNING:
            # If no engine can come back, the node reports the reason. The last summand is the time for that report.
            return waits.engine_return_s(config) + config.deadlines.request
        if self is Stage.LOADING:
            return waits.new_version_s(config)
        return float(getattr(config.deadlines, self.deadline))


class StartupPhase(NamedTuple):
    """A phase of a run before its first step, for people."""

    doing: str
    """Phrase for the phase. A phase ends when its phrase changes."""
    done: str = ""
    """Part of the phase that is done, such as `3 of 8 groups`; empty if it cannot be measured."""


STARTING_ENGINES = "starting engines"
"""The phase that lasts longest: the first start of vLLM compiles kernels."""


class RunStages:
    """Finds and describes the stage of the run.

    Args:
        context: the shared objects of the hub.
        registry: the nodes.
        incarnations: the trainer ranks.
        steps: the training steps.
    """

    def __init__(
        self, context: HubContext, registry: NodeRegistry, incarnations: Incarnations, steps: TrainingSteps
    ) -> None:
        self._progress, self._fleet, self._contract = context.progress, context.fleet, context.contract
        self._samples, self._evaluations = context.buffer.samples, context.evaluations
        self._registry = registry
        self._incarnations = incarnations
        self._steps = steps
        self._first_version = self._progress.version
        """Version of the run when this hub process began."""
        self._run_steps = context.config.run.steps

    @property
    def now(self) -> Stage:
        """Stage of the run at this moment."""
        return Stage.ENDING if self._progress.stopping == "interrupted" else self._working_stage

    @property
    def _working_stage(self) -> Stage:
        """Stage that the run has, or would have if it was not interrupted.

        The first condition that holds decides. For example, while the ranks start again, it does not matter if a batch
        is complete.
        """
        if self._incarnations.recovering:
            return Stage.RECOVERING
        if self._progress.trainers_behind:
            return Stage.REPEATING
        if self._progress.published is None:
            return Stage.FIRST_VERSION
        if self._steps.ranks_train:
            return Stage.STEP
        finished = self._progress.stopping == "finished"
        # Without an engine nothing goes on, except in a run that has trained all steps and has no evaluation left.
        if not self._fleet.started and not (finished and self._evaluations.done):
            return Stage.RETURNING if self._fleet.waits_for_engines else Stage.STARTING
        if self._steps.ranks_wait_for_engines:
            return Stage.LOADING
        if finished and not self._incarnations.saved:
            return Stage.SAVING
        if finished:
            return Stage.RETURNING if self._fleet.waits_for_engines else Stage.EVALUATING
        if not self._steps.ranks_wait_for_batch:
            return Stage.BETWEEN
        return Stage.RETURNING if self._fleet.waits_for_engines else Stage.BATCH

    @property
    def _complete_groups(self) -> str:
        """Phrase with the number of complete groups, and the number that a batch needs."""
        batches = self._samples.batches
        # A step may take its groups in several rounds. The groups of earlier rounds have left the pool, but they count
        # for its batch.
        dealt = len(batches.training) if batches.open else 0
        return f"{dealt + self._samples.pool.ready_groups} of {self._contract.groups_per_batch}"

    def describe(self, stage: Stage) -> str:
        """Return a phrase for the event that the run waits for in this stage, with the numbers of this moment."""
        progress = self._progress
        text = stage.description.format(
            step=progress.trainer_version if stage is Stage.REPEATING else progress.version,
            groups=self._complete_groups,
            behind=self._fleet.describe_behind(progress.newest),
            answers=self._evaluations.progress,
        )
        # While engines start, the fleet does not know them yet, but the registry does.
        no_engines = self._registry.engines == 0 if stage is Stage.STARTING else not self._fleet
        if stage in (Stage.STARTING, Stage.BATCH, Stage.EVALUATING) and no_engines:
            text += ", while no node has an engine: `flash join` brings one"
        return text

    @property
    def last_work(self) -> str:
        """Phrase for the work that is left for an interrupted run, or for this run if it was interrupted now.

        `Hub.interrupt` returns it for people. If this work does not end within `deadlines.shutdown`, `Hub.run` reports
        the phrase of that moment as unfinished.
        """
        stage, step = self._working_stage, self._progress.version
        # An interrupted run gives up a step that has only a part of its groups (`open`).
        if stage is Stage.STEP and self._progress.batch != "open":
            return f"finishing step {step} and writing a checkpoint"
        # In these stages the ranks have nothing new to save: they are only starting, train steps again that the run
        # keeps, or have saved everything.
        if stage in (Stage.FIRST_VERSION, Stage.RECOVERING, Stage.REPEATING, Stage.EVALUATING):
            return "ending its processes"
        # Groups that are being collected are still dealt, and mostly make a whole batch. After the last step the state
        # is also `forming`, while the groups that are left are withdrawn.
        if self._progress.batch == "forming" and step < self._run_steps:
            return f"finishing step {step} and writing a checkpoint"
        # The ranks must not write a checkpoint of weights that belong to no version.
        if self._steps.weights_between_versions:
            return "ending its processes"
        if self._steps.checkpoint_written:
            return "exporting the model" if self._steps.ranks_export else "ending its processes"
        return f"writing a checkpoint of version {step}"

    def startup_phase(self) -> StartupPhase | None:
        """Return the phase of the run before its first step; None after that step, or if the run has ended before.

        The first step is the first one under this hub process, so a run that continues has these phases again.
        """
        progress = self._progress
        if progress.version > self._first_version or progress.error is not None:
            return None
        if progress.stopping == "interrupted" or (progress.stopping == "finished" and self._evaluations.done):
            return None
        if progress.published is None:
            if progress.trainers_behind and not self._incarnations.recovering:
                return StartupPhase("training again", f"{progress.version - progress.trainer_version} steps left")
            return StartupPhase("starting engines and trainers")
        if not self._fleet.started:
            return StartupPhase(STARTING_ENGINES)
        if answers := self._evaluations.progress:
            return StartupPhase("first evaluation", answers)
        if self._steps.step_begun:
            return StartupPhase("first step")
        return StartupPhase("first batch", f"{self._complete_groups} groups")

    async def phase_ended(self, doing: str) -> None:
        """Wait until the startup phase `doing` has ended. It waits for the signal `run`, and sets no deadline.

        `flash.run.node_loop` calls this, to show the next phase.
        """
        while (now := self.startup_phase()) is not None and now.doing == doing:
            await self._progress.wait("run")
