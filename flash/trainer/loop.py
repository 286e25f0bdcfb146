"""What a trainer rank does from start to goodbye.

publish the version it starts with → ask the hub for a shard → train → commit → publish → … → the hub says stop →
checkpoint, and at the end of the run the Hugging Face export. What ranks do that have started again, and train what
others have trained before them, is the same: the hub knows. Every rank makes the same calls in the same order,
because gathering weights, training and checkpoints are collectives; only rank 0 speaks for the group.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from flash.config import waits
from flash.config.tree import Config
from flash.errors import CheckpointError
from flash.hub import protocol as p
from flash.trainer import checkpoint
from flash.trainer.checkpoint_files import FileEntry
from flash.trainer.model.adapters import engine_tensors
from flash.trainer.performance import StepMeter, StepProfiler
from flash.trainer.step import Trainer
from flash.transport.frames import ReplyT, Request
from flash.types import Activity, Published, Shard
from flash.weights.publisher import WeightPublisher


class RankHub(Protocol):
    """What a rank asks the hub, as `flash.run.trainer_rank.RankHubClient`."""

    def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send one request and wait for its reply, for `timeout` seconds at most."""
        ...

    def fetch(self, step: int, did: list[Activity], timeout: float) -> p.BatchReply:
        """The whole shard of a step; the hub is also told what the rank was busy with."""
        ...


class TrainerLoop:
    """One trainer rank."""

    def __init__(
        self,
        config: Config,
        rank: int,
        trainer: Trainer,
        publisher: WeightPublisher,
        hub: RankHub,
        tokenizer: Any,
        profiler: StepProfiler,
    ) -> None:
        self._config = config
        self._rank = rank
        self._trainer = trainer
        self._publisher = publisher
        self._hub = hub
        self._tokenizer = tokenizer
        self._profiler = profiler
        self._meter = StepMeter(trainer.mesh)
        self._activities: list[Activity] = []
        self._saved_version = -1
        self._sent = 0
        """Bytes of the version that was published last."""
        self._keeps = True
        """Whether the hub takes part in a checkpoint of what this rank holds now."""
        self._saves = False
        """Whether somebody wants one."""

    def run(self) -> None:
        """Train until the hub says stop.

        Consumes shards. Waits for the hub, which knows what is late and gives up before this rank does. Produces
        versions, commits and checkpoints.
        """
        self._publish()
        while (shard := self._next_shard()) is not None:
            with self._doing("train") as seconds:
                self._meter.begin()
                metrics = self._trainer.train_step(shard)
                metrics |= self._meter.finish(self._trainer.flops)
            self._commit(shard, metrics, seconds[0])
            self._publish()
            due = self._saves or self._trainer.version % self._config.checkpoint.every == 0
            if self._keeps and due:
                self._checkpoint()
        self._leave()

    def _next_shard(self) -> Shard | None:
        self._profiler.begin_step(self._trainer.version)
        did, self._activities = self._activities, []
        with self._doing("wait") as seconds:
            timeout = waits.batch_s(self._config)
            reply = self._hub.fetch(self._trainer.version, did, timeout)
        self._finished, self._keeps, self._saves = reply.finished, reply.keeps, reply.saves
        self._waited = seconds[0]
        return reply.shard

    def _commit(self, shard: Shard, metrics: dict[str, float], trained: float) -> None:
        if self._rank == 0:
            own = {"trainer_wait_s": self._waited, "trainer_step_s": trained, "version_bytes": self._sent}
            self._call(p.Commit(shard.step, metrics | own, self._trainer.seen))

    def _publish(self) -> None:
        """Gather the weights, announce them as a version, with the canary the engines will be held to."""
        trainer, version = self._trainer, self._trainer.version
        with self._doing("publish"):
            canary = trainer.canaries.canary(trainer.model)

            def announce(update_info: bytes) -> None:
                published = Published(version, self._config.weights_backend, update_info, canary)
                self._call(p.PublishRequest(published), waits.taken_s(self._config))

            self._sent = self._publisher.publish(version, engine_tensors(trainer.model, self._config.lora), announce)

    def _checkpoint(self) -> None:
        with self._doing("checkpoint"):
            checkpoint.save(
                self._config.run_dir, self._trainer, self._keep_hub_state, keep=self._config.checkpoint.keep
            )
        self._saved_version = self._trainer.version

    def _keep_hub_state(self, file: Path) -> FileEntry:
        kept = self._call(p.SnapshotRequest(), waits.kept_s(self._config))
        if (found := file.stat().st_size) != kept.size:
            raise CheckpointError(f"the hub wrote {kept.size} bytes of its state, and {file} has {found}")
        return FileEntry(file.name, kept.size, kept.crc32)

    def _leave(self) -> None:
        if self._keeps and self._saved_version != self._trainer.version:
            self._checkpoint()
        if self._finished and self._config.checkpoint.export:
            checkpoint.export_hf(self._trainer.model, self._tokenizer, self._config.run_dir / "model")
        self._profiler.close()
        # Rank 0 holds the weights of the last version as long as an engine may start that needs them.
        self._call(p.Goodbye(self._rank, self._activities), waits.leaving_s(self._config))

    def _call(self, request: Request[ReplyT], timeout: float | None = None) -> ReplyT:
        return self._hub.call(request, timeout=timeout or self._config.deadlines.hub)

    @contextmanager
    def _doing(self, name: str) -> Generator[list[float]]:
        """Draw a bar on the timeline; the list holds its seconds afterwards."""
        seconds = [0.0]
        start, begun = time.time(), time.perf_counter()
        yield seconds
        seconds[0] = time.perf_counter() - begun
        self._activities.append(Activity(f"trainer {self._rank}", name, start, start + seconds[0]))
