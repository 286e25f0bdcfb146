from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from flash.config.tree import Config
from flash.errors import RunDirectoryError
from flash.observe.rundir.rundir import RunDirectory, SampleTimes, TurnTimes, sample_times, write_atomically
from flash.observe.rundir.samples import readable, write_samples
from flash.observe.rundir.summary import summarise
from flash.types import Batch, Outcome, Span, Task, Trajectory, Turn, VersionRun
from tests.branching import joined
from tests.observe.sample_rows import eval_row, metrics_row, spans


def trajectory(versions: list[VersionRun], prompt: int = 2) -> Trajectory:
    """Return a sample of one turn, whose response tokens these versions have sampled."""
    actions = sum(run.count for run in versions)
    return Trajectory(
        task=Task(task_id=17, group_id=2, sample_index=1, seed=99),
        outcome=Outcome.OK,
        reward=0.5,
        token_ids=np.arange(prompt + actions, dtype="<i4").tobytes(),
        action_spans=[Span(prompt, prompt + actions)],
        logprobs=np.zeros(actions, dtype="<f4").tobytes(),
        versions=versions,
        turns=[Turn("1+1=", "2", 0.5, 1000.0, 0.1, 0.2)],
    )


def lines(path: Path) -> list[dict[str, object]]:
    """Return the rows of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_come_back_as_they_were_written(directory: RunDirectory) -> None:
    directory.append_metrics(metrics_row(0))
    directory.append_metrics(metrics_row(1))
    directory.append_evaluation(eval_row(0, 0.3))
    directory.append_spans(spans(2))
    directory.append_spans(spans(1))
    assert directory.read_metrics() == [metrics_row(0), metrics_row(1)]
    assert directory.read_evaluations() == [eval_row(0, 0.3)]
    assert directory.read_spans() == spans(2) + spans(1)


def test_a_row_is_on_disk_when_the_call_returns(directory: RunDirectory) -> None:
    directory.append_metrics(metrics_row(0))
    assert json.loads(directory.metrics.read_text()) == metrics_row(0)


def test_each_hub_of_a_run_has_a_higher_number_than_those_before_it(directory: RunDirectory) -> None:
    assert [directory.hub_numbers.begin() for _ in range(3)] == [1, 2, 3]
    again = RunDirectory.open(directory.path, "", resume_at=0)
    assert again.hub_numbers.begin() == 4
    (again.path / "hub-lives").write_text("four")
    with pytest.raises(RunDirectoryError, match=r"hub-lives, which counts .* cannot be read: .*delete it once"):
        again.hub_numbers.begin()
    assert RunDirectory.open(directory.path, "").hub_numbers.begin() == 1


def test_the_resolved_configuration_is_written(directory: RunDirectory) -> None:
    assert directory.config.read_text() == "[run]\nname = 'sample'\n"


def test_resuming_rolls_the_rows_back_to_the_checkpoint_and_keeps_them_aside(directory: RunDirectory) -> None:
    for step in range(6):
        directory.append_metrics(metrics_row(step))
        sample = readable(trajectory([VersionRun(step, 1)]), step, ["1", "+", "2"])
        write_samples(directory, step, [sample])
    for step in (0, 4, 6):
        directory.append_evaluation(eval_row(step, 0.5))
    directory.append_spans(spans(6))

    resumed = RunDirectory.open(directory.path, "x = 1\n", resume_at=4)

    assert [row["step"] for row in resumed.read_metrics()] == [0, 1, 2, 3]
    assert [row["step"] for row in resumed.read_evaluations()] == [0, 4]
    assert resumed.read_spans() == spans(6)
    assert [file.name for file in sorted(resumed.trajectories.iterdir())] == [f"step-00000{n}.arrow" for n in range(4)]
    aside = resumed.earlier / "001"
    assert [row["step"] for row in lines(aside / "metrics.jsonl")] == [4, 5]
    assert [row["step"] for row in lines(aside / "evals.jsonl")] == [6]
    assert len(list((aside / "trajectories").iterdir())) == 2


def test_an_evaluation_that_saw_newer_weights_than_the_checkpoint_is_rolled_back(directory: RunDirectory) -> None:
    directory.append_evaluation(eval_row(4, 0.5, version_max=5))
    assert RunDirectory.open(directory.path, "", resume_at=4).read_evaluations() == []


def test_each_incarnation_sets_its_rows_aside_in_its_own_folder(directory: RunDirectory) -> None:
    for incarnation in range(3):
        for step in range(incarnation, 4):
            directory.append_metrics(metrics_row(step, incarnation=incarnation))
        directory = RunDirectory.open(directory.path, "", resume_at=incarnation + 1)
    assert [row["step"] for row in directory.read_metrics()] == [0, 1, 2]
    assert [
        [row["incarnation"] for row in lines(file)] for file in sorted(directory.earlier.glob("*/metrics.jsonl"))
    ] == [
        [0, 0, 0],
        [1, 1],
        [2],
    ]
    assert [row["incarnation"] for row in directory.read_earlier_metrics()] == [0, 0, 0, 1, 1, 2]


def test_a_folder_that_somebody_has_put_into_earlier_does_not_stop_a_resume(directory: RunDirectory) -> None:
    (directory.earlier / "001 copy").mkdir(parents=True)
    directory.append_metrics(metrics_row(0))
    resumed = RunDirectory.open(directory.path, "", resume_at=0)
    assert [row["step"] for row in lines(resumed.earlier / "001" / "metrics.jsonl")] == [0]


def test_rows_that_somebody_has_damaged_do_not_stop_a_resume(directory: RunDirectory) -> None:
    directory.append_metrics({"step": None, "wall_s": None})
    directory.append_evaluation({"step": "two", "version_max": None})
    resumed = RunDirectory.open(directory.path, "", resume_at=1)
    assert resumed.read_metrics() == [{"step": None, "wall_s": None}]
    assert resumed.read_evaluations() == [{"step": "two", "version_max": None}]


def test_a_resume_with_nothing_to_undo_sets_nothing_aside(directory: RunDirectory) -> None:
    directory.append_metrics(metrics_row(0))
    resumed = RunDirectory.open(directory.path, "", resume_at=1)
    assert resumed.read_metrics() == [metrics_row(0)]
    assert not resumed.earlier.exists()


def test_a_new_run_in_an_old_directory_starts_empty_and_loses_nothing(directory: RunDirectory) -> None:
    directory.append_metrics(metrics_row(0))
    directory.append_evaluation(eval_row(0, 0.3))
    directory.append_spans(spans(1))
    directory.write_ledger({"issued": 3})
    (directory.checkpoints / "version-1").mkdir()

    fresh = RunDirectory.open(directory.path, "")

    assert fresh.read_metrics() == fresh.read_evaluations() == fresh.read_spans() == []
    assert not fresh.ledger.exists()
    assert not (fresh.checkpoints / "version-1").exists()
    aside = RunDirectory(directory.path.with_name(f"{directory.path.name}.1"))
    assert aside.read_metrics() == [metrics_row(0)]
    assert aside.read_spans() == spans(1)
    assert json.loads(aside.ledger.read_text()) == {"issued": 3}
    assert (aside.checkpoints / "version-1").exists()


def test_a_line_torn_by_a_crash_is_never_read_and_never_joins_the_next_one(directory: RunDirectory) -> None:
    directory.append_metrics(metrics_row(0))
    with directory.metrics.open("a") as file:
        file.write('{"step": 1, "rew')
    assert directory.read_metrics() == [metrics_row(0)]

    resumed = RunDirectory.open(directory.path, "", resume_at=1)
    resumed.append_metrics(metrics_row(1))
    assert resumed.read_metrics() == [metrics_row(0), metrics_row(1)]


def test_damaged_lines_are_left_out_and_their_number_is_told(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    for step in range(3):
        directory.append_metrics(metrics_row(step))
    lines = directory.metrics.read_text().splitlines(keepends=True)
    directory.metrics.write_text(lines[0] + lines[1][:20] + "\x00\n" + lines[2])
    assert directory.read_metrics() == [metrics_row(0), metrics_row(2)]
    assert [record.getMessage() for record in caplog.records] == [f"{directory.metrics}: 1 damaged lines are skipped"]


def test_a_full_disk_is_one_clear_error_for_a_row(directory: RunDirectory) -> None:
    directory.metrics.symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl: No space left on device; free space"):
        directory.append_metrics(metrics_row(0))


def test_a_line_that_the_disk_took_in_part_is_taken_back_and_does_not_join_the_next_one(
    directory: RunDirectory,
) -> None:
    directory.append_metrics(metrics_row(0))
    size = directory.metrics.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Limit the size of a file, so that writes fail in the middle, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, hard))
    try:
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl: File too large"):
            directory.append_metrics(metrics_row(1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert directory.metrics.stat().st_size == size
    directory.append_metrics(metrics_row(2))
    assert directory.read_metrics() == [metrics_row(0), metrics_row(2)]


APPENDS: dict[str, Callable[[RunDirectory, int], None]] = {
    "metrics.jsonl": lambda directory, step: directory.append_metrics(metrics_row(step)),
    "evals.jsonl": lambda directory, step: directory.append_evaluation(eval_row(step, 0.3)),
    "spans.jsonl": lambda directory, step: directory.append_spans(spans(step + 1)),
    "samples.jsonl": lambda directory, step: directory.append_samples([SampleTimes(step, 0, 0.5, [])]),
}


@pytest.mark.parametrize("name", APPENDS)
def test_a_file_of_rows_that_is_deleted_while_the_run_writes_it_is_put_back(
    directory: RunDirectory, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    file, append = directory.path / name, APPENDS[name]
    whole = RunDirectory.open(directory.path.with_name("whole"), "")
    for step in range(6):
        if step in (2, 3, 5):
            file.unlink()
        append(directory, step)
        append(whole, step)
    assert file.read_bytes() == (whole.path / name).read_bytes()
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"{file} was deleted or replaced while the run wrote it: its rows are put back"] * 3


def test_a_file_that_replaces_one_of_rows_is_kept_beside_it(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    directory.append_metrics(metrics_row(0))
    other = directory.path / "other"
    other.write_text("{}\n")
    other.replace(directory.metrics)
    directory.append_metrics(metrics_row(1))
    assert directory.read_metrics() == [metrics_row(0), metrics_row(1)]
    assert (directory.path / "metrics.jsonl.replaced").read_text() == "{}\n"
    assert caplog.records[0].getMessage().endswith("put back; the other file is now metrics.jsonl.replaced")


def test_a_file_of_rows_that_is_cut_while_the_run_writes_it_is_told_of_once(
    directory: RunDirectory, caplog: pytest.LogCaptureFixture
) -> None:
    directory.append_metrics(metrics_row(0))
    directory.metrics.write_text("")
    for step in (1, 2):
        directory.append_metrics(metrics_row(step))
    assert directory.read_metrics() == [metrics_row(1), metrics_row(2)]
    (said,) = (record.getMessage() for record in caplog.records)
    assert "was cut from " in said


def test_a_full_disk_leaves_the_previous_file_whole(directory: RunDirectory) -> None:
    directory.write_ledger({"issued": 1})
    Path(f"{directory.ledger}.tmp").symlink_to("/dev/full")
    with pytest.raises(RunDirectoryError, match=r"ledger\.json: No space left on device; free space"):
        directory.write_ledger({"issued": 2})
    assert json.loads(directory.ledger.read_text()) == {"issued": 1}
    assert not Path(f"{directory.ledger}.tmp").is_symlink()


def test_a_folder_that_cannot_be_made_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryError, match=r"run\.output_dir"):
        RunDirectory.open(tmp_path / "file" / "run", "")


def test_a_folder_that_is_gone_while_files_are_written_into_it_is_named(directory: RunDirectory) -> None:
    shutil.rmtree(directory.batches)
    with pytest.raises(RunDirectoryError, match=f"the folder {directory.batches} is gone"):
        directory.write_batch(Batch(0, 0, [], []), keep_all=True)


def test_a_file_of_no_run_that_cannot_be_written_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / "value.json").mkdir()
    with pytest.raises(RunDirectoryError, match=f"value.json: Is a directory; check that you may write to {tmp_path}$"):
        write_atomically(tmp_path / "value.json", b"")


@pytest.mark.parametrize("read", [RunDirectory.read_metrics, RunDirectory.read_samples, RunDirectory.read_spans])
def test_nobody_waits_for_a_pipe_in_place_of_a_file(directory: RunDirectory, read: Callable[..., object]) -> None:
    for file in (directory.metrics, directory.samples, directory.spans):
        os.mkfifo(file)
    with pytest.raises(RunDirectoryError, match="it is a pipe or a device, expected a regular file"):
        read(directory)


def test_an_atomic_write_replaces_the_file_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "value.json"
    write_atomically(target, b"old")
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [target]


def test_a_trained_sample_is_told_turn_by_turn_in_numbers() -> None:
    versions = [VersionRun(3, 2), VersionRun(5, 3), VersionRun(4, 1)]
    sample = msgspec.structs.replace(
        trajectory(versions),
        token_ids=np.arange(13, dtype="<i4").tobytes(),
        action_spans=[Span(2, 5), Span(7, 7), Span(10, 13)],
        turns=[
            Turn("1+1=", "2", 0.0, 1000.0, 0.1, 0.2),
            Turn("more", "", 0.0, 1001.0, 0.3, 0.4),
            Turn("2+2=", "4", 0.5, 1002.0, 0.5, 0.6),
        ],
    )
    assert sample_times(sample, 6) == SampleTimes(
        step=6,
        group_id=2,
        reward=0.5,
        turns=[
            TurnTimes(2, 3, 1000.0, 0.1, 0.2, 3),
            TurnTimes(2, 0, 1001.0, 0.3, 0.4, -1),
            TurnTimes(3, 3, 1002.0, 0.5, 0.6, 4),
        ],
    )


def test_turns_of_branches_are_told_in_order_of_time_each_with_what_it_was_shown() -> None:
    one, other = trajectory([VersionRun(3, 2)]), trajectory([VersionRun(5, 1), VersionRun(4, 3)])
    sample = joined([one, other, one])
    times = sample_times(sample, 6)
    assert [(turn.branch, turn.observation_tokens, turn.tokens, turn.oldest_version) for turn in times.turns] == [
        (0, 2, 2, 3),
        (1, 2, 4, 4),
        (2, 2, 2, 3),
    ]
    shown = readable(sample, 6, ["t"] * sample.length)
    assert shown.branches == [0, 4, 10]
    assert shown.action_spans == [Span(2, 4), Span(6, 10), Span(12, 14)]
    assert [turn.branch for turn in shown.turns] == [0, 1, 2]


def test_resuming_rolls_the_samples_back_with_their_steps(directory: RunDirectory) -> None:
    samples = [sample_times(trajectory([VersionRun(step, 1)]), step) for step in (0, 0, 1, 2)]
    directory.append_samples(samples)
    resumed = RunDirectory.open(directory.path, "", resume_at=1)
    assert resumed.read_samples() == samples[:2]
    assert [row["step"] for row in lines(resumed.earlier / "001" / "samples.jsonl")] == [1, 2]


def test_the_summary_is_written_with_its_documented_keys(directory: RunDirectory, config: Config) -> None:
    summary = summarise(config, [metrics_row(0)], [], ledger={"issued": 64}, restarts=0)
    directory.write_summary(summary)
    written = json.loads(directory.summary.read_text())
    assert written["ledger"] == {"issued": 64}
    assert set(written) >= {
        "initial_reward",
        "final_reward",
        "steps",
        "samples",
        "wall_seconds",
        "tokens_per_second",
        "async_ratio",
        "trainer_wait_share",
        "engine_idle_share",
        "max_age",
        "ledger",
    }
