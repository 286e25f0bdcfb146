"""Process of one trainer rank of `flash sft`: trains the batches of a course, without a hub and without engines.

`flash.run.processes.worker` calls `run_sft_rank` in a process that the launcher has started. A *course*
(`flash.run.sft_rows.Course`) decides which rows of the data set each step trains. Trainer, checkpoints and run
directory are the same as in other runs. The first rank writes the run directory.

Invariant: all ranks make the same calls in the same order, since each step and each decision is a collective, an
operation in which all ranks take part.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist

from flash.config.tree import Config
from flash.foreign.torch import collective_failed, file_store, private_store
from flash.observe.observer import Wish
from flash.observe.recorder import Recorder
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.launch_state import SCRATCH
from flash.run.processes.supervisor import End
from flash.run.sft_rows import SFT_ROWS, Course, CourseTokens
from flash.run.trainer_rank import describe_peers, meet
from flash.samples.batches import split_into_shards
from flash.trainer import checkpoint
from flash.trainer.checkpoint_files import FileEntry, choose_checkpoint, file_entry, hub_state
from flash.trainer.performance import StepMeter, StepProfiler
from flash.trainer.step import Trainer
from flash.types import Batch, Shard
from flash.waiting import run_to_end

log = logging.getLogger("flash")

REPORTED_METRICS = (
    *("loss", "entropy", "grad_norm", "learning_rate", "skipped_steps", "loss_scale"),
    *("tokens", "trained_tokens", "shared_token_share", "memory_gib", "mfu"),
)
"""Names of the trainer's metrics that have a meaning for rows that no engine has sampled, and are reported."""
MARK = b"sft"
"""First bytes of the checkpoint file that holds the hub's state in other runs. The digest of the rows follows them."""
WISHES: Mapping[Wish | None, int] = {None: 0, "checkpoint": 1, "stop": 2}
"""Priority of each wish that an alarm or a signal can have after a step: none, a checkpoint, or the end of the run. All
ranks carry out the wish of highest priority that any of them has."""


def run_sft_rank(order: ProcessOrder, config: Config) -> End:
    """Train until no batch is left. Return how the training ended, for the launcher.

    A signal ends the training early, with a checkpoint. `order` is the launcher's order, with the number of this rank
    and of the restarts. The ranks find each other through a store, which is torch's table of values that all ranks can
    read and write. It is a file in the scratch folder, because there is no hub that could give the ranks an address.
    """
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())  # the loop looks at `stop` after each step
    ranks = config.trainer_world_size
    file = Path(os.environ[SCRATCH]) / f"store-{order.restarts}"  # an old store names the ranks of an earlier start
    with ExitStack() as stack:
        try:
            meet(order.local, config, order.local, private_store() if ranks == 1 else file_store(file, ranks), stack)
            return _train(order, config, stop, stack)
        except Exception as error:
            # Any other error is this rank's own, which `flash.run.processes.worker` prints and reports.
            if not collective_failed(error):
                raise
            # Another rank has ended or hangs. One line is enough here: that rank reports the cause.
            peers = describe_peers(order.local, config)
            log.error("trainer rank %d: a collective with %s failed: %s", order.local, peers, error)
            return End.FAILED


def _train(order: ProcessOrder, config: Config, stop: threading.Event, stack: ExitStack) -> End:
    """Restore this rank from the newest checkpoint if the run resumes or restarts, and run its training loop.

    `run_sft_rank` calls this once the ranks have met. Only the first rank looks for the checkpoint, and sends its path
    to the others, so that all of them choose the same one.

    Args:
        order: order of the launcher, with the number of this rank and of the restarts.
        config: the run's configuration.
        stop: set by a signal.
        stack: closes the recorder and the profiler at the end of the process.
    """
    resumes, chosen, first = config.run.resume or order.restarts > 0, [""], order.local == 0
    tokenizer = HfTokenizer(config.model)
    notes: list[str] = []
    if resumes and first:
        newest, notes = choose_checkpoint(config.run_dir)
        chosen = [str(newest or "")]
    dist.broadcast_object_list(chosen, src=0)
    course, trainer = Course(config, CourseTokens.load(Path(os.environ[SCRATCH]) / SFT_ROWS)), Trainer(config)
    if chosen[0]:  # empty: a new run, or none of its checkpoints is complete
        checkpoint.load(Path(chosen[0]), trainer)
    recorder = None
    if first:
        resume_at = trainer.version if resumes else None
        # The recorder uses its tokenizer in a thread of its own, so it gets a separate one.
        now, restarts = time.time, order.restarts
        recorder = Recorder(config, HfTokenizer(config.model), now=now, resume_at=resume_at, restarts=restarts)
        stack.enter_context(recorder)
        if chosen[0]:
            notes.append(other_rows(Path(chosen[0]), course))
        for note in filter(None, (tokenizer.missing_ends(), *notes)):
            recorder.note(note)
    profiler = StepProfiler(config.train.profiled_steps, config.run_dir, order.local, cuda=config.gpus_per_node > 0)
    stack.callback(profiler.close)
    return SftLoop(config, trainer, course, tokenizer, recorder, profiler, stop).run()


def other_rows(folder: Path, course: Course) -> str:
    """Return a message if the steps before the checkpoint in `folder` have learned other rows than those of `course`.

    Empty if the rows are the same, or if the checkpoint has no digest of them. The first rank notes the message when a
    run continues: the data set may have been changed meanwhile. The run goes on, since this may be intended.

    Raises:
        CheckpointError: the checkpoint is damaged.
    """
    with hub_state(folder) as kept:  # the file that `SftLoop._checkpoint` has written
        mark, _, digest = bytes(kept).partition(b" ")
    if mark != MARK or not digest or digest == course.digest().encode():
        return ""
    return (
        "sft.data: its rows, or their tokens, are not those that the steps of the checkpoint have learned: the rows of "
        "each step follow from all of them, so that some are learned twice in this epoch and others not at all"
    )


class SftLoop:
    """Training loop of a rank, over the batches of a course.

    Args:
        config: the run's configuration.
        trainer: trainer of this rank.
        course: gives the batch of each step.
        tokenizer: tokenizer for the exported model.
        recorder: recorder of the run on the first rank; None on the others.
        profiler: records the steps that `train.profile` names.
        stop: set by a signal handler if the training must end.
    """

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        course: Course,
        tokenizer: HfTokenizer,
        recorder: Recorder | None,
        profiler: StepProfiler,
        stop: threading.Event,
    ) -> None:
        self._config, self._trainer, self._course = config, trainer, course
        self._tokenizer, self._recorder, self._stop = tokenizer, recorder, stop
        self._profiler = profiler
        self._meter = StepMeter(trainer.mesh)
        """Meter of the memory that each step takes, and of the share of the cards' peak arithmetic."""

    def run(self) -> End:
        """Train until no batch is left, an alarm stops the run, or `stop` is set. Returns how the training ended.

        All ranks call this once. Consumes batches; a thread reads the next one during a step. Waits for that thread and
        for the other ranks. Produces rows of metrics, evaluations, checkpoints, and the exported model at the end.

        Raises:
            AlarmError: an alarm has stopped the run. Raised on the first rank only.
        """
        trainer, steps, wish = self._trainer, self._config.run.steps, 0
        with ThreadPoolExecutor(1, thread_name_prefix="rows") as ahead:
            if trainer.version == 0:
                self._evaluate()
            coming = ahead.submit(self._course.batch, trainer.version) if trainer.version < steps else None
            while coming is not None and wish < WISHES["stop"]:
                self._profiler.begin_step(trainer.version)
                begun = time.perf_counter()
                batch, batch_metrics = coming.result()
                batch_metrics["trainer_wait_s"] = time.perf_counter() - begun
                coming = ahead.submit(self._course.batch, batch.step + 1) if batch.step + 1 < steps else None
                wish = self._strongest_wish(self._step(batch, batch_metrics))
                is_last = coming is None
                if is_last or (self._config.eval.every and trainer.version % self._config.eval.every == 0):
                    self._evaluate()
                if wish or is_last or trainer.version % self._config.checkpoint.every == 0:
                    self._checkpoint()
        self._profiler.close()
        finished = trainer.version >= steps
        if finished:
            self._tokenizer.add_ends(trainer.model.generation_config)
            checkpoint.export_hf(trainer.model, self._tokenizer.inner, self._config.run_dir / "model")
        return self._end(interrupted=not finished)

    def _step(self, batch: Batch, batch_metrics: dict[str, float]) -> Wish | None:
        """Train one batch, and report its metrics on the first rank. All ranks call this.

        Returns the wish of the alarms that these metrics cause: a checkpoint, the end of the run, or None. Other ranks
        return None. `batch_metrics`: metrics of `Course.batch`, and the seconds for which this rank has waited for it.
        """
        begun = time.perf_counter()
        shard = self._own_shard(batch)
        self._meter.begin()
        metrics = self._trainer.train_step(shard)
        metrics |= self._meter.finish(self._trainer.flops)
        if self._recorder is None:
            return None
        seconds = time.perf_counter() - begun
        interval = max(seconds + batch_metrics["trainer_wait_s"], 1e-9)  # a divisor
        self._recorder.batch(batch)
        # `shown`: values of single tokens, such as their loss, of the few samples that the run shows.
        self._recorder.trained(batch.step, self._trainer.shown)
        return self._recorder.step(
            batch_metrics
            | {name: metrics[name] for name in REPORTED_METRICS if name in metrics}
            | {
                "step": batch.step,
                "version": self._trainer.version,
                "time": time.time(),
                "nll": metrics["nll_mean"],
                "trainer_step_s": seconds,
                "interval_s": interval,
                "trainer_wait_share": batch_metrics["trainer_wait_s"] / interval,
                "tokens_per_second": metrics["tokens"] / interval,
            }
        )

    def _own_shard(self, batch: Batch) -> Shard:
        """Return this rank's shard of a batch. Every rank computes the whole division, since no hub sends shards."""
        mesh = self._trainer.mesh
        return run_to_end(split_into_shards(batch, mesh.data_shards, self._config.train.minibatches))[mesh.data_shard]

    def _strongest_wish(self, wish: Wish | None) -> int:
        """Return the priority, from `WISHES`, of the strongest wish of all ranks. All ranks call this after each step.

        `wish` is the wish of this rank's alarms. Only the first rank has alarms, and a signal may have reached only
        some ranks, so the ranks must agree.
        """
        asked = WISHES["stop" if self._stop.is_set() else wish]
        most = torch.tensor(asked, device=self._trainer.mesh.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return int(most)

    def _evaluate(self) -> None:
        """Compute the loss of the held-out rows, if there are any, and report it on the first rank.

        All ranks call this: before the first step, after each `eval.every` steps, and after the last step.
        """
        version = self._trainer.version
        if (batch := self._course.held_out(version)) is None:
            return
        loss = self._trainer.mean_loss(self._own_shard(batch))
        if self._recorder is not None:
            rows = len({one.task.group_id for one in batch.trajectories})
            row = {"step": version, "held_out_nll": loss, "problems": rows, "time": time.time()}
            self._recorder.evaluation(row)

    def _checkpoint(self) -> None:
        """Write a checkpoint, with the digest of the rows in place of the hub's state. All ranks call this."""

        def write_digest(file: Path) -> FileEntry:
            """Write the file of the hub's state in a checkpoint. The first rank calls this."""
            file.write_bytes(MARK + b" " + self._course.digest().encode())
            return file_entry(file, file.parent)

        checkpoint.save(self._config.run_dir, self._trainer, write_digest, keep=self._config.checkpoint.keep)

    def _end(self, *, interrupted: bool) -> End:
        """Write the summary on the first rank, and return how the training ended. Waits for all ranks.

        `interrupted`: True if some steps are left.

        Raises:
            AlarmError: an alarm has stopped the run. Raised on the first rank only.
        """
        if self._recorder is not None:
            rows = self._recorder.directory.read_metrics()  # also of the steps before a resume
            counts = {"trained": "samples", "trained_tokens": "trained_tokens"}
            ledger = {name: int(sum(row[column] for row in rows)) for name, column in counts.items()}
            # Restarts after the last step, the second argument, are counted in runs with a hub only.
            self._recorder.finish(ledger, {}, interrupted=interrupted)
        dist.barrier()  # otherwise the exit of one rank would fail the others
        if self._recorder is not None and self._recorder.stopped is not None:
            raise self._recorder.stopped
        return End.INTERRUPTED if interrupted else End.OVER
