"""Readable samples of a run: texts, tokens and values of a few trained samples of each step.

`flash.observe.rundir.batches` makes them with `readable` and writes them with `write_samples`, in a thread of the
recorder; `flash view` reads them. `flash sample` also makes them, for transcripts of answers that no step trains. A
step has one Arrow file, which any reader of Arrow can open as a table. Columns are read one by one, so a search of
samples does not read their tokens. Files are replaced atomically. If all files together are larger than
`flash.observe.rundir.batches.MOST_BYTES`, every second file is deleted, so that the rest is spread over the whole run.

An *action token* is a token that the policy sampled, in contrast to a token of an observation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import ipc

from flash.ages import age_of
from flash.branches import spans_by_turn
from flash.errors import RunDirectoryError
from flash.observe.rundir.recording import step_named
from flash.observe.rundir.rundir import RunDirectory, write_atomically, writing
from flash.types import Outcome, Span, TrainedSample, Trajectory, VersionRun

SUFFIX = ".arrow"
"""End of the name of a file with readable samples."""
WORTH_COMPRESSING = 64 << 10
"""Bytes of a step's samples from which on they are compressed. For less, starting to compress takes longer than it
saves."""
COMPRESSED = ipc.IpcWriteOptions(compression="lz4")
"""Options for writing compressed files."""
TOKENS_AT_ONCE = 8192
"""Largest number of tokens of the samples that are made columns together. A larger sample is converted alone."""
KEPT_AT_LEAST = 2
"""Smallest number of files that `thin_samples` leaves: the first and the last."""
T = TypeVar("T")
# The four constants below are the format of a file. Their names are those of the fields of `SampleTurn`,
# `SampleOutline` and `Sample`.
_TURN = pa.struct(
    [
        ("observation", pa.string()),
        ("action", pa.string()),
        ("reward", pa.float64()),
        ("generate_s", pa.float64()),
        ("env_s", pa.float64()),
        ("metrics", pa.map_(pa.string(), pa.float64())),
        ("note", pa.string()),
        ("branch", pa.int32()),
        ("start", pa.float64()),
    ]
)
_OUTLINE: list[tuple[str, Any]] = [
    ("step", pa.int64()),
    ("task_id", pa.int64()),
    ("group_id", pa.int64()),
    ("sample_index", pa.int64()),
    ("seed", pa.uint64()),
    ("environment", pa.string()),
    ("outcome", pa.string()),
    ("reward", pa.float64()),
    ("ages", pa.map_(pa.int64(), pa.int64())),
    ("turns", pa.list_(_TURN)),
]
_TOKENS: list[tuple[str, Any]] = [
    ("tokens", pa.list_(pa.string())),
    ("branches", pa.list_(pa.int64())),
    ("action_spans", pa.list_(pa.struct([("start", pa.int64()), ("stop", pa.int64())]))),
    ("versions", pa.list_(pa.struct([("version", pa.int64()), ("count", pa.int64())]))),
    ("sampled_logprobs", pa.list_(pa.float32())),
    ("logprobs", pa.list_(pa.float32())),
    ("entropies", pa.list_(pa.float32())),
    ("advantages", pa.list_(pa.float32())),
    ("uses", pa.list_(pa.uint8())),
    ("group_rewards", pa.list_(pa.float64())),
]
_COLUMNS = [*_OUTLINE, *_TOKENS]
SCHEMA = pa.schema(_COLUMNS)
"""Columns of a file: first those of `SampleOutline`, then those of the tokens."""


class SampleTurn(msgspec.Struct, frozen=True):
    """Turn of a sample in readable form."""

    observation: str
    """Text that the policy was shown before the response."""
    action: str
    """Text of the response that the policy sampled."""
    reward: float
    """Reward that the environment gave for the response."""
    generate_s: float
    """Seconds from the request to the last token of the response."""
    env_s: float
    """Seconds of the environment's step after the response."""
    metrics: dict[str, float] = {}
    """Numbers that the environment reported for the turn."""
    note: str = ""
    """Text that the environment left for people who read the sample."""
    branch: int = 0
    """Number of the turn's branch in its episode."""
    start: float = 0.0
    """Time when the response was requested, in Unix seconds."""


class TokenValues(msgspec.Struct, frozen=True):
    """Values of the action tokens: each list has a number per action token, in the order of the tokens."""

    sampled_logprobs: list[float]
    """Log-prob with which the engine sampled the token, in nats."""
    logprobs: list[float] = []
    """Log-prob of the token that the trainer computed before its step, in nats. This and the following lists are empty
    if no trainer reported values. In a branch without a trained token, all values are NaN."""
    entropies: list[float] = []
    """Entropy of the trainer's distribution at the token, in nats."""
    advantages: list[float] = []
    """Advantage that the objective was given for the token; NaN for a token that is too old to be trained."""
    uses: list[int] = []
    """Use of each token in the loss, an integer of `flash.types.TokenUse`: 0 trained, 1 clipped, 2 rejected, 3 too old.
    """


class Sample(msgspec.Struct, frozen=True):
    """Sample in readable form: an episode and, in a run, the use that its step made of it."""

    step: int
    """Step that trained the sample; 0 in `flash sample`."""
    task_id: int
    """Number of the task that asked for the sample, unique in a run."""
    group_id: int
    """Number of the group: the samples with the same problem, whose rewards are compared."""
    sample_index: int
    """Index of the sample's task among the members of its group."""
    seed: int
    """Seed with which the environment was reset, which chooses the problem."""
    environment: str
    """Name of the environment in a run with several; otherwise empty."""
    outcome: Outcome
    """`ok` or `truncated`: the environment or a limit ended the episode."""
    reward: float
    """Reward of the whole episode."""
    turns: list[SampleTurn]
    """Turns in the order in which the episode played them."""
    tokens: list[str]
    """Text of each token of observations and responses, branch by branch."""
    branches: list[int]
    """Index of the first token of each branch."""
    action_spans: list[Span]
    """Positions in `tokens` of the action tokens: one range [start, stop) for each of `turns`."""
    versions: list[VersionRun]
    """Policy version of the action tokens, run-length encoded in the order of `tokens`."""
    ages: dict[int, int]
    """Number of action tokens of each age, in versions between sampling and training."""
    values: TokenValues
    group_rewards: list[float]
    """Rewards of all samples of the group in the batch."""


def readable(
    trajectory: Trajectory,
    step: int,
    tokens: Sequence[str],
    *,
    group_rewards: Sequence[float] = (),
    seen: TrainedSample | None = None,
) -> Sample:
    """Return the readable form of a trajectory.

    Args:
        trajectory: the sample, with its tokens as numbers.
        step: step that trained it, from which the ages of its tokens count.
        tokens: text of each of the trajectory's T tokens.
        group_rewards: rewards of all samples of the group in the batch.
        seen: values of the action tokens that the trainer has computed and reported; None if there are none.
    """
    assert len(tokens) == trajectory.length, "one text per token"
    ages: dict[int, int] = {}
    for run in trajectory.versions:
        age = age_of(run.version, step)
        ages[age] = ages.get(age, 0) + run.count
    task = trajectory.task
    return Sample(
        step=step,
        task_id=task.task_id,
        group_id=task.group_id,
        sample_index=task.sample_index,
        seed=task.seed,
        environment=task.kind,
        outcome=Outcome(trajectory.outcome),
        reward=trajectory.reward,
        turns=[
            SampleTurn(t.observation, t.action, t.reward, t.generate_s, t.env_s, t.metrics, t.note, t.branch, t.start)
            for t in trajectory.turns
        ],
        tokens=list(tokens),
        branches=list(trajectory.branches),
        action_spans=spans_by_turn(trajectory),
        versions=trajectory.versions,
        ages=dict(sorted(ages.items())),
        values=_values(trajectory, seen),
        group_rewards=list(group_rewards),
    )


def _values(trajectory: Trajectory, seen: TrainedSample | None) -> TokenValues:
    """Return the values of the action tokens: those of the engine, and those of the trainer if it reported any."""
    sampled = _numbers(trajectory.logprobs)
    # Values for another number of tokens cannot be assigned to the tokens. `uses` has one byte for each token.
    if seen is None or len(seen.uses) != len(sampled):
        return TokenValues(sampled)
    logprobs, entropies, advantages = map(_numbers, (seen.logprobs, seen.entropies, seen.advantages))
    return TokenValues(sampled, logprobs, entropies, advantages, list(seen.uses))


def _numbers(values: bytes) -> list[float]:
    """Return the numbers that bytes hold as little-endian float32. Raises ValueError if a part of a number is left."""
    return np.frombuffer(values, dtype="<f4").tolist()


class SampleOutline(msgspec.Struct, frozen=True):
    """Readable sample without its tokens, for lists and searches. The fields mean what they mean in `Sample`."""

    step: int
    group_id: int
    sample_index: int
    environment: str
    outcome: Outcome
    reward: float
    turns: list[SampleTurn]
    ages: dict[int, int]


def write_samples(directory: RunDirectory, step: int, samples: Iterable[Sample]) -> Path:
    """Write the readable samples of a step, and return the file. A step that is made again replaces its file.

    `samples` should be a generator: freeing many samples at once would block other threads.

    Raises:
        RunDirectoryError: the disk is full, or the folder cannot be written.
    """
    parts = [pa.record_batch([_column(part, *column) for column in _COLUMNS], SCHEMA) for part in _parts(samples)]
    table = pa.Table.from_batches(parts, SCHEMA).combine_chunks()
    options = COMPRESSED if table.nbytes > WORTH_COMPRESSING else ipc.IpcWriteOptions()
    sink = pa.BufferOutputStream()
    with ipc.new_file(sink, SCHEMA, options=options) as writer:
        writer.write_table(table)
    file = samples_of(directory, step)
    write_atomically(file, sink.getvalue(), durably=False)
    return file


def read_samples(directory: RunDirectory, step: int, group_id: int | None = None) -> list[Sample]:
    """Return the readable samples of a step, or of one group of it; empty if the file is missing or damaged.

    Rows that do not have the form of a sample are left out. `group_id` None means all groups.

    Raises RunDirectoryError if this user has no permission to read the file.
    """
    rows = _read(samples_of(directory, step), SCHEMA.names, group_id)
    return [found for row in rows if (found := _sample(row)) is not None]


def read_outlines(directory: RunDirectory, step: int) -> list[SampleOutline]:
    """Return the readable samples of a step without their tokens; empty if the file is missing or damaged.

    Rows that do not have the form of a sample are left out.

    Raises RunDirectoryError if this user has no permission to read the file.
    """
    rows = _read(samples_of(directory, step), list(SampleOutline.__struct_fields__))
    return [found for row in rows if (found := _converted(row, SampleOutline)) is not None]


def samples_of(directory: RunDirectory, step: int) -> Path:
    """Return the path of the file with a step's readable samples."""
    return directory.trajectories / f"step-{step:06d}{SUFFIX}"


def sampled_steps(directory: RunDirectory) -> list[int]:
    """Return the steps that have readable samples, in order."""
    named = (step_named(file.stem) for file in directory.trajectories.glob(f"*{SUFFIX}"))
    return sorted(step for step in named if step is not None)


def thin_samples(directory: RunDirectory, most_bytes: int) -> int:
    """Delete every second file, again and again, until the other files have at most `most_bytes` together.

    Returns the bytes of the files that are left. The first and the last file are always kept, also if they are larger.
    Only one thread may write and thin the samples of a run.

    Raises:
        RunDirectoryError: a file cannot be deleted.
        OSError: the size of a file cannot be read.
    """
    files = [samples_of(directory, step) for step in sampled_steps(directory)]
    sizes = {file: file.stat().st_size for file in files}
    while sum(sizes[file] for file in files) > most_bytes and len(files) > KEPT_AT_LEAST:
        deleted = files[1:-1:2]
        with writing(directory.trajectories):
            for file in deleted:
                file.unlink(missing_ok=True)
        files = [file for file in files if file not in set(deleted)]
    return sum(sizes[file] for file in files)


def _parts(samples: Iterable[Sample]) -> Iterator[list[Sample]]:
    """Divide samples into parts, each of which `write_samples` makes a record batch of Arrow.

    Parts are small (TOKENS_AT_ONCE), because making a column of a part blocks other threads. Without samples there is
    one empty part.
    """
    part, tokens = list[Sample](), 0
    for sample in samples:
        if part and tokens + len(sample.tokens) > TOKENS_AT_ONCE:
            yield part
            part, tokens = [], 0
        part.append(sample)
        tokens += len(sample.tokens)
    yield part


def _column(samples: Sequence[Sample], name: str, kind: pa.DataType) -> pa.Array:
    """Return the column `name` of the file, with one cell of the Arrow type `kind` for each sample."""
    return pa.array([_cell(sample, name) for sample in samples], kind)


def _cell(sample: Sample, name: str) -> Any:
    """Return the value of a sample in the column `name`, in a form that Arrow can convert.

    Arrow converts neither enums nor structs. It wants a map as pairs, and a struct as a dict.
    """
    match name:
        case "outcome":
            return str(sample.outcome)
        case "ages":
            return list(sample.ages.items())
        case "turns":
            return [msgspec.structs.asdict(turn) | {"metrics": list(turn.metrics.items())} for turn in sample.turns]
        case "action_spans" | "versions":
            return [msgspec.structs.asdict(one) for one in getattr(sample, name)]
        case _ if name in TokenValues.__struct_fields__:
            return getattr(sample.values, name)
        case _:
            return getattr(sample, name)


def _read(file: Path, columns: Sequence[str], group_id: int | None = None) -> list[dict[str, Any]]:
    """Return the rows of a file of samples, with these columns only. Each row is a dict from the column to its value.

    `group_id` chooses the rows of one group, for which `columns` must have "group_id"; None means all rows. The result
    is empty if the file is missing or damaged, or lacks one of the columns. Columns are found by their places in
    SCHEMA: a file of another version of Flash, with other places, gives other columns, which `_converted` refuses.

    Raises RunDirectoryError if this user has no permission to read the file.
    """
    assert group_id is None or "group_id" in columns, "the rows of a group are found by this column"
    options = ipc.IpcReadOptions(included_fields=[SCHEMA.get_field_index(name) for name in columns])
    try:
        if not file.is_file():  # a pipe would block
            return []
        with pa.OSFile(str(file)) as source:
            table = ipc.open_file(source, options=options).read_all()
            # A damaged file may have lengths beyond its end, or text that is not UTF-8. Reading them could crash.
            table.validate(full=True)
            if group_id is not None:
                table = table.filter(pc.field("group_id") == group_id)
            # "lossy": of equal keys in a damaged map the last one counts. "strict" would raise KeyError.
            return table.to_pylist(maps_as_pydicts="lossy")
    except PermissionError as error:
        raise RunDirectoryError(f"cannot read {file}: {error.strerror or error}") from error
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return []


def _sample(row: dict[str, Any]) -> Sample | None:
    """Return the sample of a row of the file, with all columns; None if it does not have that form. Changes `row`."""
    # In the file, the values of tokens are columns of their own.
    row["values"] = {name: row.get(name) for name in TokenValues.__struct_fields__}
    # `Span` and `VersionRun` are encoded as arrays (`array_like`), so msgspec expects tuples and no dicts.
    for name in ("action_spans", "versions"):
        row[name] = [tuple(one.values()) for one in row.get(name) or ()]
    return _converted(row, Sample)


def _converted(row: dict[str, Any], kind: type[T]) -> T | None:
    """Return a row as a struct of type `kind`; None if it does not have that form, as in a damaged file."""
    try:
        return msgspec.convert(row, kind)
    except msgspec.ValidationError:
        return None
