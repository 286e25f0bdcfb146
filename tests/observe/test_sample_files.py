"""Readable samples: their text, their files, and the number that is kept."""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flash.errors import RunDirectoryError
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import (
    Sample,
    SampleTurn,
    TokenValues,
    read_outlines,
    read_samples,
    readable,
    sampled_steps,
    samples_of,
    thin_samples,
    write_samples,
)
from flash.types import Outcome, Span, TokenUse, TrainedSample, VersionRun
from tests.observe.test_rundir import trajectory
from tests.ordinary_user import as_ordinary_user

PAGE = Path(__file__).parents[2] / "docs" / "view.md"


def made(step: int, text: str = "a sum") -> Sample:
    """Return a readable sample of `step` with one turn and two response tokens."""
    turns = [SampleTurn("1+1=", text, 0.5, 0.1, 0.2, {"correct": 1.0, "é": math.pi}, "a note", 0)]
    return Sample(
        step=step,
        task_id=17,
        group_id=2,
        sample_index=1,
        seed=(1 << 64) - 1,
        environment="sums",
        outcome=Outcome.TRUNCATED,
        reward=0.5,
        turns=turns,
        tokens=["1+1=", " a", " sum"],
        branches=[0],
        action_spans=[Span(1, 3)],
        versions=[VersionRun(step, 1), VersionRun(step - 1, 1)],
        ages={0: 1, 1: 1},
        values=TokenValues(
            [-0.5, -2.0], [-0.25, -4.0], [0.5, 0.125], [1.0, -1.0], [TokenUse.TRAINED, TokenUse.CLIPPED]
        ),
        group_rewards=[0.5, 1.0],
    )


def test_a_readable_sample_has_versions_ages_and_what_the_trainer_found() -> None:
    trained = trajectory([VersionRun(10, 3), VersionRun(12, 1)])
    numbers = np.array([-1.0, -2.0, np.nan, -0.123456789], dtype="<f4").tobytes()
    seen = TrainedSample(0, numbers, numbers, numbers, bytes([0, 1, 2, 3]))
    sample = readable(trained, 12, ["1", "+", "a", "b", "c", "d"], group_rewards=[0.5, 1.0], seen=seen)
    assert (sample.ages, sample.versions) == ({0: 1, 2: 3}, [VersionRun(10, 3), VersionRun(12, 1)])
    assert (sample.step, sample.task_id, sample.group_id, sample.sample_index, sample.seed) == (12, 17, 2, 1, 99)
    assert sample.turns == [SampleTurn("1+1=", "2", 0.5, 0.1, 0.2, start=trained.turns[0].start)]
    assert sample.values.uses == [TokenUse.TRAINED, TokenUse.CLIPPED, TokenUse.REJECTED, TokenUse.TOO_OLD]
    assert sample.values.logprobs[3] == pytest.approx(-0.123456789)
    assert math.isnan(sample.values.logprobs[2])
    assert len(sample.values.sampled_logprobs) == 4
    assert readable(trained, 12, sample.tokens).values == TokenValues(sample.values.sampled_logprobs)


def test_what_is_told_of_another_sample_is_left_out() -> None:
    trained = trajectory([VersionRun(10, 4)])
    seen = TrainedSample(0, bytes(4), bytes(4), bytes(4), bytes(1))
    assert readable(trained, 12, ["t"] * 6, seen=seen).values.uses == []


def test_samples_come_back_as_they_were(directory: RunDirectory) -> None:
    file = write_samples(directory, 12, [made(12), made(12, "another")])
    assert file.name == "step-000012.arrow"
    assert read_samples(directory, 12) == [made(12), made(12, "another")]
    first, second = read_outlines(directory, 12)
    assert (first.turns[0].action, second.turns[0].action) == ("a sum", "another")
    assert (first.outcome, first.environment, first.ages) == (Outcome.TRUNCATED, "sums", {0: 1, 1: 1})
    assert read_samples(directory, 13) == []
    other = msgspec.structs.replace(made(12), group_id=3)
    write_samples(directory, 12, [made(12), other])
    assert read_samples(directory, 12, 3) == [other]


@settings(max_examples=20)
@given(text=st.text(), number=st.floats(), note=st.text())
def test_any_text_and_number_comes_back(
    tmp_path_factory: pytest.TempPathFactory, text: str, number: float, note: str
) -> None:
    directory = RunDirectory.open(tmp_path_factory.mktemp("samples") / "run", "")
    sample = msgspec.structs.replace(
        made(3), turns=[SampleTurn(text, note, number, 0.0, 0.0, {text: number}, note)], tokens=[text, note, ""]
    )
    write_samples(directory, 3, [sample])
    (back,) = read_samples(directory, 3)
    assert msgspec.json.encode(back) == msgspec.json.encode(sample)


def test_anybody_who_reads_arrow_makes_a_table_of_them(directory: RunDirectory) -> None:
    long = msgspec.structs.replace(made(0), tokens=["token "] * 30_000)
    for samples in ([made(0)], [long, made(0)]):
        table = pa.ipc.open_file(str(write_samples(directory, 0, samples))).read_all()
        assert table.num_rows == len(samples)
        assert table["advantages"].to_pylist()[-1] == [1.0, -1.0]
        assert table["turns"].to_pylist()[-1][0]["metrics"] == [("correct", 1.0), ("é", math.pi)]
    assert samples_of(directory, 0).stat().st_size < 200_000, "what repeats itself is compressed"


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-40], lambda data: b"", lambda data: data[: len(data) // 2] + bytes(len(data) // 2)]
)
def test_what_is_damaged_is_no_sample(directory: RunDirectory, spoil: object) -> None:
    file = write_samples(directory, 1, [made(1)])
    assert callable(spoil)
    file.write_bytes(spoil(file.read_bytes()))
    assert read_samples(directory, 1) == []
    assert read_outlines(directory, 1) == []


def test_every_byte_may_be_wrong_and_the_reader_lives(directory: RunDirectory) -> None:
    data = write_samples(directory, 1, [made(1)]).read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.integers(0, len(data), 300).tolist():
        spoilt = bytearray(data)
        spoilt[place] ^= int(rng.integers(1, 256))
        samples_of(directory, 1).write_bytes(spoilt)
        assert len(read_samples(directory, 1)) <= 1


def test_a_closed_folder_of_samples_is_an_error(directory: RunDirectory) -> None:
    directory.trajectories.chmod(0)
    with as_ordinary_user(), pytest.raises(RunDirectoryError, match=r"cannot read .*: Permission denied"):
        read_samples(directory, 3)
    directory.trajectories.chmod(0o755)


def test_beyond_the_budget_every_second_step_goes_but_the_ends_stay(directory: RunDirectory) -> None:
    sizes = [write_samples(directory, step, [made(step)]).stat().st_size for step in range(20)]
    assert thin_samples(directory, sum(sizes)) == sum(sizes)
    left = thin_samples(directory, sum(sizes) // 3)
    assert sampled_steps(directory) == [0, 4, 8, 12, 16, 19]
    assert left == sum(sizes[step] for step in sampled_steps(directory)) <= sum(sizes) // 3
    thin_samples(directory, 1)
    assert sampled_steps(directory) == [0, 19]


def test_samples_that_find_no_folder_are_an_error(directory: RunDirectory) -> None:
    directory.trajectories.rmdir()
    with pytest.raises(RunDirectoryError, match=r"cannot write .*step-000001\.arrow: .*; the folder .* is gone"):
        write_samples(directory, 1, [made(1)])


def test_the_documented_way_to_read_them_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = re.findall(r"```python\n(import pyarrow.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    (file,) = re.findall(r'"(outputs/mine/.*?)"', code)
    monkeypatch.chdir(tmp_path)
    directory = RunDirectory.open(Path("outputs/mine"), "")
    assert write_samples(directory, 12, [made(12, "a\u2028sum")]) == Path(file)
    exec(compile(ast.parse(code), str(PAGE), "exec"), {})
    assert capsys.readouterr().out == "0.5 ['a\\u2028sum']\n"
