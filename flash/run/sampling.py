"""Rollouts without training, for `flash eval` and `flash rollout`: a hub and a node with its engines, in this process.

`flash.cli.sampling` calls `evaluate` and `roll_out` on the event loop of the command, and prints the result. Hub,
scheduler, episodes, proxy and engines are the same as in a run. A stand-in replaces the trainer rank: it announces the
model as version 0, takes the batch if there is one, and leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anyio
import msgspec

from flash.config import waits
from flash.config.tree import Config, ParallelConfig
from flash.environment.load import LoadedEnvironment
from flash.hub import protocol as p
from flash.hub.hub import Hub, InProcessCaller
from flash.hub.protocol import fetch_shard
from flash.hub.recovery import RecoveredState
from flash.observe.observer import MemoryObserver
from flash.rollout.engine import Engine
from flash.rollout.episode.tokenizer import Tokenizer
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.run.node_loop import limit_held_out_problems, report_startup
from flash.samples.rules import ProblemKinds
from flash.types import Canary, Failure, Outcome, Published, Trajectory
from flash.waiting import first_error

RUN_COLUMNS = ("step", "version_min", "version_max", "time")
"""Columns of an evaluation's row that have a meaning in a run only."""

MakeEngines = Callable[[Config], Sequence[Callable[[int], Engine]]]
"""Function that returns one constructor for each engine of a configuration. A constructor takes the engine's number."""
ShowLine = Callable[[str], None]
"""Function that shows a line to the user."""


class Sampled(msgspec.Struct, frozen=True):
    """Result of rollouts or of an evaluation, which `flash rollout` or `flash eval` prints."""

    evaluation: dict[str, float]
    """Row of the evaluation as in evals.jsonl, without the columns `RUN_COLUMNS`; empty for rollouts."""
    trajectories: list[Trajectory]
    """Trajectories in the order of the problems."""
    notes: list[str]
    """Messages for people, mostly about failures."""
    failures: list[Failure]
    """Last failure of each task that was given up, in the order of the tasks. No metric counts these tasks."""


async def evaluate(
    config: Config, env: LoadedEnvironment, tokenizer: Tokenizer, engines: MakeEngines, show: ShowLine
) -> Sampled:
    """Evaluate a model on the held-out problems of `[eval]`, as a run does. Held-out problems are never trained.

    For `flash eval`.

    Args:
        config: configuration with the model, the environment and `[eval]`.
        env: the environment.
        tokenizer: the model's tokenizer.
        engines: makes the engines.
        show: called with lines about the progress.

    Raises:
        FlashError: the environment cannot be played, or the engines are gone.
    """
    config = await limit_held_out_problems(config, env, show)
    # Without any step the hub evaluates version 0 and ends. The batch is never filled; it must hold a whole group.
    trainer = _StandInTrainer(
        on_this_machine(config, steps=0, batch=config.rollout.group_size), env, tokenizer, engines
    )
    await trainer.run(show)
    (row,) = trainer.observer.evaluations
    return Sampled(
        {name: value for name, value in row.items() if name not in RUN_COLUMNS},
        trainer.evaluated,
        trainer.observer.notes,
        trainer.given_up(trainer.evaluated, "eval"),
    )


async def roll_out(
    config: Config, episodes: int, env: LoadedEnvironment, tokenizer: Tokenizer, engines: MakeEngines, show: ShowLine
) -> Sampled:
    """Play one episode of each of `episodes` training problems, with the sampling settings of training.

    For `flash rollout`. The problems are taken from the first one on. A problem that fails for good is replaced by the
    next one. The episodes are the batch of a single step, which the stand-in takes. The other arguments are those of
    `evaluate`.

    Raises:
        FlashError: the environment cannot be played or always fails, or the engines are gone.
    """
    # One sample of each problem, and all of them: no redundant sample is started, and none is filtered out.
    rollout = msgspec.structs.replace(
        config.rollout,
        group_size=1,
        extra_per_group=0,
        extra_groups=0,
        drop_equal_rewards=False,
        accuracy_bounds=None,
    )
    config = on_this_machine(msgspec.structs.replace(config, rollout=rollout), steps=1, batch=episodes)
    trainer = _StandInTrainer(config, env, tokenizer, engines)
    await trainer.run(show)
    played = trainer.observer.samples[0]  # the batch of step 0
    return Sampled({}, played, trainer.observer.notes, trainer.given_up(played, "train"))


def on_this_machine(config: Config, *, steps: int, batch: int) -> Config:
    """Return a configuration for this machine alone, in which all devices serve engines and none trains.

    Args:
        config: configuration of a run, maybe for several nodes.
        steps: number of steps, each of which takes a batch and trains nothing; 0 for an evaluation.
        batch: number of samples of a batch.
    """
    replace = msgspec.structs.replace
    # The stand-in counts as one trainer rank. `share_gpus` lets engines have all GPUs, since this rank uses none. The
    # adapters of a run (`lora`) are merged into the model that is sampled (`flash.run.models.model_folder`).
    return replace(
        config,
        run=replace(config.run, steps=steps),
        train=replace(config.train, batch_size=batch, async_ratio=0.0, stream=False),
        engine=replace(config.engine, share_gpus=True),
        weights=replace(config.weights, backend="tcp"),
        cluster=replace(config.cluster, nodes=1, trainer_nodes=1, trainer_ranks=1),
        parallel=ParallelConfig(),
        lora=None,
    )


class _StandInTrainer:
    """Owner of the hub and of the node, which also makes the requests of the only trainer rank.

    Call `run` once. Then `observer`, `evaluated` and `given_up` have the results. The arguments are those of
    `evaluate`, with a configuration from `on_this_machine`. All tasks run on one event loop, so nothing needs a lock.
    """

    def __init__(self, config: Config, env: LoadedEnvironment, tokenizer: Tokenizer, engines: MakeEngines) -> None:
        self._config = config
        self.observer = MemoryObserver()
        self.evaluated: list[Trajectory] = []
        """Trajectories of held-out problems, in the order of the tasks."""
        self._failed: dict[tuple[str, int], Failure] = {}
        """Last failure of each task, by split ("train" or "eval") and number of the task."""
        now = anyio.current_time
        # Rollouts need no evaluation before the first step, so version 0 counts as evaluated.
        evaluated = (0,) if config.run.steps else ()
        problems, recovered = ProblemKinds.of(config, env.kind_of, env.domains()), RecoveredState(evaluated=evaluated)
        self._hub = Hub(config, self.observer, now=now, problems=problems, recovered=recovered)
        link = HubLink(0, 0, InProcessCaller(self._hub, self._record_results))
        played = NodeEnvironment(env.make, problems, env.prepare, rehearsed=True)
        self._node = RolloutNode(config, link, engines(config), tokenizer, played, now=now)

    async def run(self, show: ShowLine) -> None:
        """Run the hub, the node and the stand-in, from the start of the engines to their end.

        `show` is called with lines about the start of the engines.

        Raises:
            FlashError: the environment cannot be played or always fails, or the engines are gone.
        """
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._node.run)
                group.start_soon(self._act_as_trainer)
                group.start_soon(report_startup, self._hub, self._config, show)
                await self._hub.run()
                self.evaluated.sort(key=lambda trajectory: trajectory.task.task_id)
        except BaseExceptionGroup as errors:  # of the tasks above: show the error with the most information
            raise first_error(errors) from None

    def given_up(self, played: Sequence[Trajectory], split: str) -> list[Failure]:
        """Return the last failure of each task that never succeeded. Called after `run`.

        Args:
            played: the successful samples.
            split: "train" or "eval"; a task of each split may have the same number.
        """
        done = {trajectory.task.task_id for trajectory in played}
        failed = (one for (of, task), one in sorted(self._failed.items()) if of == split and task not in done)
        return list(failed)

    async def _act_as_trainer(self) -> None:
        """Announce the model, take the batches, and leave: the requests that a trainer rank makes.

        A task of `run`. Waits for replies of the hub. Produces nothing: `MemoryObserver` keeps the batches.
        """
        hub, deadlines = InProcessCaller(self._hub), self._config.deadlines
        # The engines (`FixedEngine`) keep the weights of the model folder, so the description of the weights is empty.
        # So is the canary, a text with log-probs by which other engines check the weights that they have loaded.
        await hub.call(p.PublishRequest(Published(0, "tcp", b"", Canary([], []))), timeout=deadlines.engine_start)
        for step in range(self._config.run.steps):
            await fetch_shard(hub, 0, step, deadlines.step)
            await hub.call(p.Commit(step, metrics={}), timeout=deadlines.request)
        # A rank asks for batches until a reply has none. This reply has none, since no step is left.
        await fetch_shard(hub, 0, self._config.run.steps, deadlines.step)
        await hub.call(p.Goodbye(rank=0, activities=[]), timeout=waits.leaving_s(self._config))

    def _record_results(self, request: msgspec.Struct, reply: msgspec.Struct) -> None:
        """Record the results that the node delivers to the hub: failures, and trajectories of the evaluation.

        `InProcessCaller` calls this with each request of the node and its reply.
        """
        if isinstance(request, p.DeliverRequest):
            results = [ended.result for ended in request.ended]
            for one in results:
                if isinstance(one, Failure) and one.outcome is not Outcome.CANCELLED:
                    self._failed[one.task.split, one.task.task_id] = one
            self.evaluated += [one for one in results if isinstance(one, Trajectory) and one.task.split == "eval"]
