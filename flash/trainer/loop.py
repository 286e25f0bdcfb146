"""Runs one trainer rank: it publishes a version, fetches shards from the hub, trains them, commits, and repeats this.

`flash.run.trainer_rank` builds a `TrainerLoop` and calls `run`. The hub is the process that holds the samples and the
progress of the run. A version is the weights after a step. A shard is the part of a round that this rank trains, and a
round is a part of a step's batch, or all of it. The ranks train the first rounds while others are still sampled.
The loop is the same after a restart, when steps are trained a second time: the hub decides which shard comes next.
Publishing, training and checkpoints are collectives (ranks exchange data), so all ranks make the same calls in the same
order. Rank 0 speaks to the hub for all ranks: it commits (reports) the steps, announces the versions, and asks the hub
to save its state for a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flash.config import waits
from flash.config.tree import Config
from flash.errors import CheckpointError
from flash.hub import protocol as p
from flash.trainer import checkpoint
from flash.trainer.checkpoint_files import FileEntry
from flash.trainer.model.adapters import engine_tensors
from flash.trainer.performance import StepMeter, StepProfiler
from flash.trainer.step import Trainer
from flash.types import Activity, Published
from flash.weights.publisher import WeightPublisher


class TrainerLoop:
    """Publishes, trains, commits and saves the steps of one trainer rank, until the hub ends training."""

    def __init__(
        self,
        config: Config,
        rank: int,
        trainer: Trainer,
        publisher: WeightPublisher,
        hub: p.BlockingHubCaller,
        tokenizer: Any,
        profiler: StepProfiler,
    ) -> None:
        """Make the loop of a rank; the caller closes `publisher`, and `profiler` if `run` raises.

        Args:
            config: the run.
            rank: rank of this process among the trainer ranks.
            trainer: the policy, at the version from which the rank begins.
            publisher: gives the weights of each version to the engines.
            hub: connection to the hub.
            tokenizer: tokenizer of transformers, for the Hugging Face export.
            profiler: records the steps of `train.profile`.
        """
        self._config = config
        self._rank = rank
        self._trainer = trainer
        self._publisher = publisher
        self._hub = hub
        self._tokenizer = tokenizer
        self._profiler = profiler
        self._meter = StepMeter(trainer.mesh)
        # Blocks of work since the last report to the hub. The run's pages draw each as a bar of the timeline.
        self._activities: list[Activity] = []
        self._published_bytes = 0  # bytes of the newest version that are sent to each engine worker, on rank 0
        self._saved_version = -1  # version of the last checkpoint that this process took part in; -1: none

    def run(self) -> None:
        """Train one step after another, until the hub ends training for all ranks.

        Each wait is for a reply of the hub. The hub notices a rank, node or engine that is late, and ends the wait. The
        timeouts here are longer, and end only a wait for a hub that is gone. At the end the rank takes part in a
        checkpoint of the last version, unless it has written one already or the hub cannot take part (`may_save`). If
        the run has trained all of its steps, the Hugging Face export follows.

        Raises:
            FlashError: a step or a checkpoint failed, the hub refused a request or did not answer in time, or the hub
                has ended this set of rank processes, because another rank failed and all ranks restart.
        """
        config, trainer, hub = self._config, self._trainer, self._hub
        # Engines that start, or start again, need the weights before they can sample for the first batch.
        self._publish()
        while (reply := self._train()).shard is not None:
            self._publish()
            # `may_save` is False while the ranks train earlier steps again: the hub's state belongs to a later version
            # then, and the two parts of a checkpoint must be of one version. `must_save` is True if the hub asks for a
            # checkpoint after this step although none is due.
            if reply.may_save and (reply.must_save or trainer.version % config.checkpoint.every == 0):
                self._save_checkpoint()

        # Training has ended. Save the last version, and export the model if all steps are trained (`finished`).
        if reply.may_save and self._saved_version != trainer.version:
            self._save_checkpoint()
        if reply.finished:
            checkpoint.export_hf(trainer.model, self._tokenizer, config.run_dir / "model")
        self._profiler.close()
        # The hub replies when the last evaluation is over, or at once after an interrupt. Until then an engine may
        # start and load the last version from rank 0.
        hub.call(p.Goodbye(self._rank, self._activities), waits.leaving_s(config))

    def _train(self) -> p.BatchReply:
        """Train the rounds of one step as they come, and commit the step. A collective. Returns the last reply.

        A reply without a shard ends training. Rounds of the step that were trained before such a reply are dropped.

        Raises:
            FlashError: a round could not be trained (`Trainer.train_round`), or the hub did not answer in time or is
                lost.
        """
        config, trainer, hub = self._config, self._trainer, self._hub
        self._profiler.begin_step(trainer.version)
        self._meter.begin()
        waited_s, metrics = 0.0, dict[str, float]()
        busy_times: list[tuple[float, float]] = []  # start and end of each round's training, in Unix seconds
        while True:
            activities, self._activities = self._activities, []
            round_number = len(busy_times)
            with self._timed("wait") as waited:
                reply = p.fetch_shard_blocking(
                    hub, self._rank, trainer.version, round_number, activities, waits.batch_s(config)
                )
            waited_s += waited[0]
            if (shard := reply.shard) is None:  # the hub ends training
                trainer.give_up_step()
                return reply
            start = time.time()
            with self._timed("train") as busy:
                trainer.train_round(shard)
                if shard.round.last:
                    metrics = trainer.finish_step()
                    metrics |= self._meter.finish(trainer.flops, waited_s)
            busy_times.append((start, start + busy[0]))
            if shard.round.last:
                break
        # Commit the step: every rank has the same metrics, and one report is enough.
        if self._rank == 0:
            metrics |= {
                "trainer_wait_s": waited_s,
                "trainer_step_s": sum(stop - start for start, stop in busy_times),
                "version_bytes": self._published_bytes,
            }
            # `shown` has the numbers of the few samples that the run's pages show.
            hub.call(p.Commit(shard.step, metrics, trainer.shown, busy_times), config.deadlines.hub)
        return reply

    def _publish(self) -> None:
        """Gather the weights, publish them as a version, and announce it to the hub. A collective.

        The announcement includes the canary: a short text with the trainer's log-probs of its tokens, against which
        each engine is checked after it has loaded the version. Rank 0 announces, and the hub replies once every engine
        has the version before this one. So engines are at most one version behind. After an interrupt the hub replies
        at once.

        Raises:
            FlashError: the weights could not be published, or the hub did not answer in time or is lost.
        """
        config, trainer, version = self._config, self._trainer, self._trainer.version
        with self._timed("publish"):
            canary = trainer.canaries.canary(trainer.model)
            offer = self._publisher.publish(version, engine_tensors(trainer.model, config.lora))
            if offer is not None:  # rank 0 alone gets one
                self._published_bytes = offer.sent_bytes
                published = Published(version, config.weights_backend, offer.update_info, canary)
                self._hub.call(p.PublishRequest(published), waits.taken_s(config))

    def _save_checkpoint(self) -> None:
        """Write a checkpoint of this version, with the hub's state. A collective.

        Raises:
            CheckpointError: on every rank, if any rank or the hub could not write.
            TransportError: on rank 0 alone, if the hub did not answer in time or is lost.
        """

        def write_hub_state(file: Path) -> FileEntry:
            # The hub writes its state into the folder of the checkpoint, and replies with size and checksum. If the
            # file here has another size, the hub wrote elsewhere: it must share the run directory with this rank. The
            # CheckpointError is then raised on all ranks by `checkpoint.save`.
            kept = self._hub.call(p.SnapshotRequest(), waits.kept_s(self._config))
            if (found := file.stat().st_size) != kept.size:
                raise CheckpointError(f"the hub wrote {kept.size} bytes of its state, and {file} has {found}")
            return FileEntry(file.name, kept.size, kept.crc32)

        with self._timed("checkpoint"):
            checkpoint.save(self._config.run_dir, self._trainer, write_hub_state, keep=self._config.checkpoint.keep)
        self._saved_version = self._trainer.version

    @contextmanager
    def _timed(self, name: str) -> Generator[list[float]]:
        """Record the block as an activity of the timeline, which the next request for a shard reports to the hub.

        Yields a list of one number: 0 during the block, and afterwards the duration of the block in seconds. If the
        block raises, nothing is recorded.
        """
        seconds = [0.0]
        start, begun = time.time(), time.perf_counter()
        yield seconds
        seconds[0] = time.perf_counter() - begun
        self._activities.append(Activity(f"trainer {self._rank}", name, start, start + seconds[0]))
