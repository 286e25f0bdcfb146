"""What crosses a boundary: frozen structs, encoded by msgspec, arrays as raw bytes.

A `Task` asks for one sample. A node holds a `Lease` on it while its episode lives, and answers with a `Trajectory` or
a `Failure`. The hub deals trained groups to trainer ranks as a `Shard`. A trainer announces new weights as
`Published`.

Token arrays are little-endian bytes: int32 ids, float32 log-probs. Versions are run-length pairs over the action
tokens, kept sets ragged (`flash.sampling`). What there is one of per sample is out of the garbage collector's sight
(`gc=False`): it can be part of no cycle, and looking through a hundred thousand of them would stop the hub for half a
second.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from flash.ages import recent
from flash.sampling import PLAIN, Kept, Routes, Sampling

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Split = Literal["train", "eval"]

ASSISTANT = "assistant"
"""The role of who answers."""
TOOL = "tool"
"""The role of what a function returned."""


class Outcome(StrEnum):
    """How a sample ended. Everything but `ok` and `truncated` is a failure and carries no reward."""

    OK = "ok"
    TRUNCATED = "truncated"
    ENV_ERROR = "env_error"
    ENV_TIMEOUT = "env_timeout"
    TOO_LONG = "too_long"
    REWARD_ERROR = "reward_error"
    ENGINE_ERROR = "engine_error"
    ENGINE_KILLED = "engine_killed"
    STALE = "stale"
    CANCELLED = "cancelled"
    FILTERED = "filtered"


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One call of a function, as an assistant's message has it."""

    id: str
    name: str
    arguments: str
    """JSON, as it was written."""


Tool = dict[str, Any]
"""A function that may be called, as the OpenAI API describes it: `{"type": "function", "function": {"name": …}}`."""


RESERVED_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of transformers' `apply_chat_template` that nobody sets beside what is shown."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chat message of a prompt."""

    role: str
    content: str
    reasoning: str = ""
    """What an assistant thought before it spoke, where the template keeps the two apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    """Of the call that the content of a tool's message answers."""
    name: str = ""
    """Of the function that was called."""


class Piece(msgspec.Struct, frozen=True):
    """What an assistant says beyond its earlier pieces."""

    content: str = ""
    reasoning: str = ""


Observation = str | list[Message]
"""What an environment shows: plain text, or chat messages that go through the model's chat template."""


class Task(msgspec.Struct, frozen=True, gc=False):
    """One sample to make: member `sample_index` of group `group_id`, whose environment is reset with `seed`."""

    task_id: int
    """Unique in a run and split: group_id · members of a group + sample_index."""
    group_id: int
    sample_index: int
    seed: int
    """The environment's seed; equal for all members of a group, so that they share the prompt."""
    split: Split = "train"
    attempt: int = 0
    """How many times this task was tried before."""
    kind: str = ""
    """The kind of environment, where the run mixes several (see envs.mixture)."""
    sampling: Sampling = PLAIN
    """How its responses are sampled."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right and the duty to run one task."""

    lease_id: int
    task: Task
    min_version: int
    """The task may only run on engines whose weights are at least this version, so that no token of it is older."""


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` consecutive action tokens sampled by policy version `version`."""

    version: int
    count: int


def append_versions(runs: list[VersionRun], later: Iterable[VersionRun]) -> None:
    """Continue the versions of some tokens with those of later ones: neighbours of equal version become one run."""
    for run in later:
        if runs and runs[-1].version == run.version:
            run = VersionRun(run.version, runs.pop().count + run.count)
        runs.append(run)


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, stop) of `Trajectory.token_ids`."""

    start: int
    stop: int


class Completion(msgspec.Struct, frozen=True):
    """What the engine sampled for one prompt. `len(logprobs) == len(token_ids) == sum of version counts`."""

    token_ids: list[int]
    logprobs: list[float]
    """Behaviour log-prob of each token, of the distribution it was sampled from."""
    versions: list[VersionRun]
    finish: Literal["stop", "length", "text"]
    """`stop`: the model ended its answer. `length`: the token limit did. `text`: one of the texts or tokens that it was
    to end at did, and is its last."""
    kept: Kept | None = None
    """Where its sampling keeps some tokens only."""
    routes: Routes | None = None
    """Of the prompt and all tokens but the last, which the engine has not computed; where it is to tell."""


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One response and what the environment made of it."""

    observation: str
    """What was shown before the response, as text."""
    action: str
    """The response, as text."""
    reward: float
    start: float
    """Unix seconds at which the response was asked for."""
    generate_s: float
    """Seconds from there to its last token."""
    env_s: float
    """Seconds of the environment's step after it."""
    metrics: dict[str, float] = {}
    """What the environment measured."""
    note: str = ""
    """What it says of the response, for people."""
    branch: int = 0
    """Which branch of the episode the response is in."""


class Trajectory(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One finished sample: exactly what was sampled, and what it earned.

    Its tokens are one sequence, which later turns only append to; or several, one behind the other, where what is said
    has branches. Each branch has a prompt of its own and is trained as a sequence of its own. What it shares with
    another one is prompt in it, so that no token is trained twice.
    """

    task: Task
    outcome: Outcome
    """OK or TRUNCATED."""
    reward: float
    """The sum of the turns' rewards."""
    token_ids: bytes
    """int32 [T]: observations and responses, as the engine saw and sampled them."""
    action_spans: list[Span]
    """Which positions the policy sampled, ascending, one span per turn. Everything else is masked out of the loss."""
    logprobs: bytes
    """float32 [A]: behaviour log-prob per action token, in the order of the spans."""
    versions: list[VersionRun]
    """Policy version per action token, run-length."""
    turns: list[Turn]
    """What happened, in the order in which it happened; at least one. Those of one branch are in the order of its
    spans."""
    lost_tokens: int = 0
    """Tokens that were sampled for it and are not among these: of requests that were aborted when they moved."""
    branches: tuple[int, ...] = (0,)
    """Where each branch begins in `token_ids`, ascending; in each something was sampled."""
    kept: Kept | None = None
    """Of its action tokens, where its sampling keeps some tokens only."""
    routes: Routes | None = None
    """Of all tokens, where engines tell which experts they chose."""
    teacher: bytes | None = None
    """float32 [A]: the teacher's log-prob of each action token, where a server holds it."""

    def tokens(self) -> Int32Array:
        """The whole sequence, int32 [T]: a view of `token_ids`."""
        return np.frombuffer(self.token_ids, dtype="<i4")

    def behaviour(self) -> Float32Array:
        """Behaviour log-probs, float32 [A]: a view of `logprobs`."""
        return np.frombuffer(self.logprobs, dtype="<f4")

    def env_metrics(self) -> dict[str, float]:
        """What the environment measured; of several turns the last word counts."""
        return {name: value for turn in self.turns for name, value in turn.metrics.items()}

    @property
    def length(self) -> int:
        """T, prompt and response, over all branches."""
        return len(self.token_ids) // 4

    @property
    def action_count(self) -> int:
        """A: tokens that the policy sampled."""
        return len(self.logprobs) // 4

    @property
    def sampled(self) -> int:
        """Tokens that were sampled for it, those that were lost on the way included."""
        return self.action_count + self.lost_tokens

    @property
    def size(self) -> int:
        """Bytes that it takes, about."""
        text = sum(len(turn.observation) + len(turn.action) for turn in self.turns)
        told = (self.kept.size if self.kept else 0) + (len(self.routes.ids) if self.routes else 0)
        return len(self.token_ids) + len(self.logprobs) + len(self.teacher or b"") + text + told

    def action_mask(self) -> BoolArray:
        """bool [T]: True where the policy sampled."""
        mask = np.zeros(self.length, dtype=np.bool_)
        for span in self.action_spans:
            mask[span.start : span.stop] = True
        return mask

    def action_versions(self) -> Int32Array:
        """int32 [A]: the policy version of each action token."""
        return np.repeat(
            np.array([run.version for run in self.versions], dtype=np.int32),
            [run.count for run in self.versions],
        )

    def trained_tokens(self, min_version: int) -> int:
        """How many action tokens are recent enough to be trained."""
        return sum(run.count for run in self.versions if recent(run.version, min_version))

    @property
    def oldest_version(self) -> int:
        """The oldest version among the action tokens."""
        return min(run.version for run in self.versions)

    def entry(self, min_version: int = 0) -> BatchSample:
        """What the batch must know of it, in a step that trains tokens of `min_version` or newer."""
        trained = [run.version for run in self.versions if recent(run.version, min_version)]
        return BatchSample(
            group_id=self.task.group_id,
            reward=self.reward,
            oldest_version=min(trained, default=self.oldest_version),
            tokens=self.action_count,
            truncated=self.outcome == Outcome.TRUNCATED,
            turns=[turn.reward for turn in self.turns],
        )


class Failure(msgspec.Struct, frozen=True, tag=True, gc=False):
    """One lease that ended without a trajectory. Never a reward of 0."""

    task: Task
    outcome: Outcome
    message: str
    tokens: int
    """Generated tokens lost with it."""

    @property
    def sampled(self) -> int:
        """Tokens that were sampled for it."""
        return self.tokens


class BatchSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every trainer rank knows of one sample of a batch, whichever rank was dealt it."""

    group_id: int
    reward: float
    oldest_version: int
    """The oldest version among its trained tokens; below the step's `min_version` when none is trained."""
    tokens: int
    """Action tokens of all branches, those that are too old to be trained included."""
    truncated: bool
    """A limit ended it, not the environment."""
    turns: list[float]
    """Reward of each turn, in order of time over all branches; they sum to `reward`."""


class Batch(msgspec.Struct, frozen=True):
    """What a step trains, before it is dealt to the ranks."""

    step: int
    """The policy version the trainer holds."""
    min_version: int
    """As in `Shard`."""
    trajectories: list[Trajectory]
    """Group by group."""
    earlier: list[BatchSample]
    """As in `Shard`."""


class ShardSample(msgspec.Struct, frozen=True, gc=False):
    """One trajectory dealt to a rank; `index` is its place in `Shard.batch`."""

    index: int
    trajectory: Trajectory


class Shard(msgspec.Struct, frozen=True):
    """One trainer rank's part of a batch, and what it must know of the whole batch."""

    step: int
    """The policy version the trainer holds; training on this batch makes version step + 1."""
    min_version: int
    """Action tokens sampled by an older version are left out of the loss (they are booked as stale)."""
    samples: list[ShardSample]
    batch: list[BatchSample]
    """All samples of the batch, over all ranks."""
    total_tokens: int
    """Trained action tokens over all ranks: the denominator of token means."""
    total_sequences: int
    """Branches of samples with at least one trained token over all ranks: the denominator of sequence means."""
    earlier: list[BatchSample] = []
    """Samples that an earlier step has trained, whose groups go on in this batch: advantages count them."""


class Canary(msgspec.Struct, frozen=True):
    """A fixed text and the trainer's log-probs for it under one version."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of token i+1 given tokens 0…i at temperature 1: one fewer than `token_ids`."""
    tolerance: float = 0.0
    """Most that an engine's may differ from them in the mean of the absolute differences, in nats."""


class Published(msgspec.Struct, frozen=True):
    """An immutable weight version that engines are to load."""

    version: int
    backend: Literal["tcp", "gloo", "nccl", "ipc"]
    update_info: bytes
    """msgpack of what the backend's receiver needs to get the tensors of this version."""
    canary: Canary
    incarnation: int = 0
    """Which incarnation of the trainer ranks holds it (`flash.hub.trainers`); the hub says so."""


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """Who was busy with what: one bar of the run's timeline. Times are Unix seconds."""

    lane: str
    name: str
    start: float
    stop: float


RETRIED = frozenset({Outcome.ENV_ERROR, Outcome.ENV_TIMEOUT, Outcome.REWARD_ERROR, Outcome.ENGINE_ERROR})
"""Failures of the infrastructure: tried again within the budget. A cancelled task is always tried again, and one whose
prompt is too long never is: it would fail for certain, as would the other samples of its group."""


class Stock(msgspec.Struct, frozen=True):
    """What environments of a node borrow, as sandboxes."""

    name: str
    in_use: int
    """Lent, or being started."""
    ready: int
    """Warm: can be lent at once."""
    waiting: int
    """Who wants one, and gets none yet."""
    most: int
    """In use and ready together."""
    made: int
    """Started since the node began."""
