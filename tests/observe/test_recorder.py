"""The recorder: a thread does slow writes, in order, and its errors are reported."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from flash.config.tree import Config
from flash.errors import AlarmError, RunDirectoryError
from flash.observe.cluster import read_cluster
from flash.observe.recorder import Recorder
from flash.observe.rundir.batches import Batches
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import read_samples, sampled_steps, samples_of
from flash.samples.batches import gather
from flash.types import Batch, Outcome, Task, TokenUse, TrainedSample
from tests.observe.clusters import hub_now
from tests.observe.sample_rows import eval_row, metrics_row
from tests.samples.cases import finish_all, lease_all, make_buffer, trajectory

WAIT_S = 10.0
"""Longest wait for the other thread, in seconds."""


class Slow:
    """Tokenizer that reports a call, and answers when the test allows it."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may = threading.Event()

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Wait until the test allows the answer, and return the numbers of the tokens."""
        self.asked.set()
        assert self.may.wait(WAIT_S)
        return [str(token) for token in token_ids]


class AskedFuture(Future[Any]):
    """Future that calls `meanwhile` when it is asked whether it is done, as another thread may do at that moment."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._meanwhile = meanwhile

    def done(self) -> bool:
        """Return the state from before the call of `meanwhile`."""
        done = super().done()
        self._meanwhile()
        return done


class Interleaved(ThreadPoolExecutor):
    """Executor that calls a function at once, and returns an `AskedFuture`."""

    meanwhile: Callable[[], None] = staticmethod(lambda: None)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the function at once, and return its result."""
        future = AskedFuture(lambda: self.meanwhile())
        future.set_result(fn(*args, **kwargs))
        return future


def make_config(folder: Path, **more: Any) -> Config:
    """Return the configuration of a run in `folder`, with these tables in addition."""
    return msgspec.convert(
        {
            "run": {"name": "run", "output_dir": str(folder), "log_samples": 1},
            "model": {"path": "none"},
            "env": {"path": "none:None"},
            "cluster": {"gpus_per_node": 0},
            **more,
        },
        Config,
    )


def make_recorder(folder: Path, tokenizer: Slow, now: Callable[[], float] = lambda: 0.0, **more: Any) -> Recorder:
    """Return the recorder of a new run in `folder`."""
    config = make_config(folder, **more)
    return Recorder(config, tokenizer, now=now, resume_at=None, restarts=0)


def test_the_loop_goes_on_while_samples_are_written_and_all_are_there_at_the_end(tmp_path: Path) -> None:
    tokenizer = Slow()
    with make_recorder(tmp_path, tokenizer) as recorder:
        for step in range(3):
            recorder.batch(Batch(step, 0, [trajectory(Task(step, step, 0, 0), 0)], []))
            recorder.trained(step, [])
        assert tokenizer.asked.wait(WAIT_S)
        assert not list(recorder.directory.trajectories.iterdir())
        tokenizer.may.set()
    assert len(list(recorder.directory.trajectories.iterdir())) == 3
    assert [sample.step for sample in recorder.directory.read_samples()] == [0, 1, 2]


def test_rows_are_of_the_samples_that_the_ledger_books_as_trained(tmp_path: Path) -> None:
    """A member whose tokens are all too old trains none of them if other members of its group are recent."""
    tokenizer = Slow()
    tokenizer.may.set()
    buffer = make_buffer(alpha=1, batch=8, group=4, steps=20)
    finish_all(buffer, lease_all(buffer, 0), 0)
    samples = 0
    with make_recorder(tmp_path, tokenizer) as recorder:
        for step in range(3):
            if step == 2:
                *recent, old = lease_all(buffer, 2)
                finish_all(buffer, recent, 2)
                finish_all(buffer, [old], 0)
            groups = buffer.next_round(step)
            assert groups is not None
            samples += sum(len(group.trajectories()) for group in groups)
            recorder.batch(gather(groups, step, step - 1))
            buffer.commit(step)
    assert buffer.samples.ledger.given_up == {Outcome.STALE: 1}
    assert buffer.samples.ledger.trained == samples - 1 == len(recorder.directory.read_samples())


def test_samples_that_cannot_be_written_are_an_error(tmp_path: Path) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    recorder = make_recorder(tmp_path, tokenizer)
    folder = recorder.directory.path
    shutil.rmtree(folder)
    with (
        pytest.raises(
            RunDirectoryError, match=f"cannot write {folder}/.*: No such file.*; the folder {folder} is gone: "
        ),
        recorder,
    ):
        recorder.batch(Batch(0, 0, [trajectory(Task(0, 0, 0, 0), 0)], []))


def test_pictures_that_find_no_room_are_told_and_the_run_has_ended_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    with make_recorder(tmp_path, tokenizer) as recorder:
        recorder.step({"step": 0, "reward": 0.5, "time": 1.0})
        shutil.rmtree(recorder.directory.plots)
        recorder.directory.plots.write_text("in the way")
        recorder.finish({"issued": 0}, {}, interrupted=False)
    assert recorder.directory.summary.exists()
    told = "".join(capsys.readouterr())
    assert "cannot write" in told
    assert f"`flash plot {recorder.directory.path}` draws them at any time" in " ".join(told.split())


def test_rows_are_forced_to_the_disk_before_a_checkpoint(tmp_path: Path) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    with make_recorder(tmp_path, tokenizer) as recorder:
        recorder.step({"step": 0, "reward": 0.5, "time": 1.0})
        assert recorder.directory.sync_rows() == [recorder.directory.metrics]
        recorder.directory.metrics.unlink()
        recorder.directory.metrics.mkdir()  # which shows that `written` comes to this file
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl"):
            recorder.written()
        recorder.directory.metrics.rmdir()


def test_a_sample_is_written_with_what_its_step_found_once_that_is_committed(tmp_path: Path) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    with make_recorder(tmp_path, tokenizer) as recorder:
        batch = [trajectory(Task(0, 0, member, 0), 0) for member in range(2)]
        recorder.batch(Batch(0, 0, batch, []))
        recorder.batches.written()
        assert sampled_steps(recorder.directory) == []
        count = batch[0].action_count
        numbers = bytes(4 * count)
        recorder.trained(0, [TrainedSample(0, numbers, numbers, numbers, bytes([TokenUse.CLIPPED] * count))])
        recorder.batches.written()
        (sample,) = read_samples(recorder.directory, 0)
    assert sample.values.uses == [TokenUse.CLIPPED] * count
    assert sample.group_rewards == [one.reward for one in batch]


def test_a_thread_may_wait_for_all_writes_while_the_loop_begins_the_next_one(tmp_path: Path) -> None:
    directory = RunDirectory.open(tmp_path / "run", "")
    with Interleaved(1) as writer:
        batches = Batches(make_config(tmp_path), directory, Slow(), writer)
        batches.begin(Batch(0, 0, [trajectory(Task(0, 0, 0, 0), 0)], []))
        writer.meanwhile = batches.written
        batches.begin(Batch(1, 0, [trajectory(Task(1, 1, 0, 0), 0)], []))
        assert batches.steps() == [0, 1]


def test_samples_of_the_step_that_failed_are_left_to_be_read(tmp_path: Path) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    recorder = make_recorder(tmp_path, tokenizer)
    recorder.batch(Batch(4, 0, [trajectory(Task(0, 0, 0, 0), 0)], []))
    error = ZeroDivisionError()
    recorder.__exit__(type(error), error, None)
    assert sampled_steps(recorder.directory) == [4]


def test_a_budget_of_samples_is_kept_by_steps_all_over_the_run(tmp_path: Path) -> None:
    tokenizer = Slow()
    tokenizer.may.set()
    directory = RunDirectory.open(tmp_path / "run", "")
    with ThreadPoolExecutor(1) as writer:
        batches = Batches(make_config(tmp_path), directory, tokenizer, writer, most_bytes=1_000_000)
        for step in range(50):
            batches.begin(Batch(step, 0, [trajectory(Task(step, step, 0, 0), 0, tokens=3000)], []))
            batches.commit(step, [])
        batches.written()
    steps = sampled_steps(directory)
    assert sum(samples_of(directory, step).stat().st_size for step in steps) <= 1_000_000
    assert steps[0] == 0
    assert steps[-1] == 49
    assert any(10 < step < 40 for step in steps)


@pytest.mark.parametrize(
    ("reactions", "wish", "follows"),
    [
        ({}, None, ""),
        ({"nonfinite": "checkpoint"}, "checkpoint", "; alarms.reactions has a checkpoint written after the next step"),
        ({"nonfinite": "stop"}, "stop", "; alarms.reactions ends the run, which leaves a checkpoint"),
    ],
)
def test_an_alarm_is_told_and_wants_what_the_configuration_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], reactions: dict[str, Any], wish: str | None, follows: str
) -> None:
    with make_recorder(tmp_path, Slow(), alarms={"reactions": reactions}) as recorder:
        assert recorder.step(metrics_row(0)) is None
        assert recorder.step(metrics_row(1, loss=None)) == wish
        assert recorder.step(metrics_row(2, loss=None)) is None
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: 50% of")]
    assert len(warnings) == 1
    assert warnings[0].endswith(f"(the last 2 steps){follows}")
    assert str(recorder.stopped).endswith("; alarms.reactions.nonfinite is stop, --resume goes on") == (wish == "stop")


def test_an_alarm_that_is_raised_after_the_end_does_not_make_the_run_a_failed_one(tmp_path: Path) -> None:
    recorder = make_recorder(tmp_path, Slow(), alarms={"reactions": {"nonfinite": "stop"}})
    recorder.step(metrics_row(0, loss=None))
    recorder.step(metrics_row(1, loss=None))
    stopped = recorder.stopped
    assert stopped is not None
    recorder.finish({"issued": 0}, {}, interrupted=True)
    with pytest.raises(AlarmError), recorder:
        raise stopped
    kept = read_cluster(recorder.directory)
    assert kept is not None
    assert (kept.ended, kept.failures) == ("interrupted", [])


def test_nothing_is_wanted_after_the_last_step(tmp_path: Path) -> None:
    with make_recorder(tmp_path, Slow(), alarms={"reactions": {"nonfinite": "stop"}}) as recorder:
        assert recorder.step(metrics_row(99, loss=None)) is None
    assert recorder.stopped is None


def test_an_alarm_has_the_command_called_and_its_failure_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"sh -c 'cat > \"$0\"; exit 3' {tmp_path}/told"
    with make_recorder(tmp_path, Slow(), alarms={"command": command}) as recorder:
        recorder.step(metrics_row(0, loss=None))
    assert (tmp_path / "told").read_text().startswith("100% of the steps had a loss")
    assert "warning: alarms.command ended with code 3" in capsys.readouterr().out


def test_the_last_picture_of_the_cluster_is_written_from_the_thread_that_ends_the_run(tmp_path: Path) -> None:
    """Only the loop may read the run's clock, because it is the loop's clock."""
    loop, tokenizer = threading.get_ident(), Slow()
    tokenizer.may.set()

    def now() -> float:
        assert threading.get_ident() == loop
        return 0.0

    with ThreadPoolExecutor(1) as other, make_recorder(tmp_path, tokenizer, now) as recorder:
        recorder.cluster(hub_now(0.0))
        recorder.failure("env_error", "boom")
        recorder.note("node 1 joins")
        recorder.step(metrics_row(0))
        other.submit(recorder.finish, {"generated_tokens": 1}, {}, interrupted=True).result()
    kept = read_cluster(recorder.directory)
    assert kept is not None
    assert (kept.ended, [each.message for each in kept.failures]) == ("interrupted", ["boom"])
    assert [event.text for event in kept.events] == ["node 1 joins"]


def test_an_evaluation_without_all_of_its_answers_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with make_recorder(tmp_path, Slow()) as recorder:
        recorder.failure("env_error", "the first")
        recorder.evaluation(eval_row(0, 0.5))
        assert "the first" not in capsys.readouterr().out
        recorder.failure("reward_error", "node 0: it raised\nBad")
        recorder.evaluation(eval_row(1, 0.5, missing=2))
    expected = (
        "warning: answers of the evaluation are missing; the last failure is reward_error: node 0: it raised\\nBad"
    )
    assert expected in " ".join(capsys.readouterr().out.split())


def test_the_error_that_ends_a_run_is_kept_with_the_cluster(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError), make_recorder(tmp_path, Slow()) as recorder:
        raise RunDirectoryError("the disk is gone")
    kept = read_cluster(recorder.directory)
    assert kept is not None
    assert (kept.ended, kept.error, kept.hub) == ("failed", "RunDirectoryError: the disk is gone", None)


def test_an_error_about_a_file_whose_name_is_no_text_is_kept_too(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot parse"), make_recorder(tmp_path, Slow()) as recorder:
        raise ValueError("cannot parse rows-\udcff.jsonl")
    kept = read_cluster(recorder.directory)
    assert kept is not None
    assert (kept.ended, kept.error) == ("failed", "ValueError: cannot parse rows-\\udcff.jsonl")
