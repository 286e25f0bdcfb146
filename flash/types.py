"""Types that cross a boundary between processes: frozen structs, encoded by msgspec, with arrays as raw bytes.

A `Task` asks for one sample. A node holds a `Lease` on it while its episode runs, and answers with a `Trajectory` or a
`Failure`. The hub deals the groups of a step to trainer ranks, each of which gets a `Shard`. Trainer ranks announce new
weights as `Published`, and report each token's part in the loss as `TrainedSample`.

Token arrays are little-endian bytes: int32 ids, float32 log-probs. Policy versions are run-length encoded over the
action tokens. Shape legend: T = all tokens of a trajectory, A = its action tokens, which the policy sampled.

Structs of which there is at least one per sample are hidden from the garbage collector (`gc=False`). They cannot be
part of a cycle, and to look through a hundred thousand of them would stop the hub for half a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from flash.ages import young_enough
from flash.sampling import PLAIN, Kept, Routes, Sampling

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]

Split = Literal["train", "eval"]

ASSISTANT = "assistant"
"""Role of the model's messages."""
TOOL = "tool"
"""Role of the messages with a function's result."""


# -- tasks and their results -----------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """The end of a sample. Every outcome but `OK` and `TRUNCATED` is a failure and carries no reward."""

    OK = "ok"
    TRUNCATED = "truncated"
    """A limit of the run ended the episode."""
    ENV_ERROR = "env_error"
    """The environment raised an error."""
    ENV_TIMEOUT = "env_timeout"
    """A call of the environment outlived its deadline."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a response."""
    REWARD_ERROR = "reward_error"
    """The reward is missing or not a finite number, or its verifier failed."""
    ENGINE_ERROR = "engine_error"
    """An engine could not serve a request."""
    ENGINE_KILLED = "engine_killed"
    """Several engines died under the same request, so it is given to no other engine."""
    STALE = "stale"
    """The tokens are too old to be trained."""
    CANCELLED = "cancelled"
    """The sample was withdrawn, or its node was lost."""
    FILTERED = "filtered"
    """The sample's group is not worth a place in a batch."""


RETRIED = frozenset({Outcome.ENV_ERROR, Outcome.ENV_TIMEOUT, Outcome.REWARD_ERROR, Outcome.ENGINE_ERROR})
"""Failures of the infrastructure, which are tried again within `rollout.retries`. A cancelled task is always tried
again. A task whose prompt is too long is never tried again: it would fail again, as would all samples of its group."""


class Task(msgspec.Struct, frozen=True, gc=False):
    """A sample to make: member `sample_index` of group `group_id`."""

    task_id: int
    """Number of the task, unique in a run and split."""
    group_id: int
    """Number of the group, from 0 in the order of issue."""
    sample_index: int
    """Index of the task among the members of its group."""
    seed: int
    """Seed with which the environment is reset. All members of a group have the same seed, and
    therefore the same prompt."""
    split: Split = "train"
    """`train`, or `eval` for a held-out task of an evaluation."""
    attempt: int = 0
    """Number of earlier attempts that failed."""
    kind: str = ""
    """Kind of environment, in a run that mixes several (`envs.mixture`); else empty."""
    sampling: Sampling = PLAIN
    """Distribution from which the responses are sampled."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right and the duty of a node to run one task."""

    lease_id: int
    """Number of the lease, unique in a run."""
    task: Task
    min_version: int
    """Lowest version of an engine that may run the task. No token of it is older than this."""


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` consecutive action tokens that policy version `version` sampled."""

    version: int
    count: int


def append_versions(runs: list[VersionRun], later: Iterable[VersionRun]) -> None:
    """Append the versions of later tokens to `runs`. Neighbours of the same version become one run."""
    for run in later:
        if runs and runs[-1].version == run.version:
            run = VersionRun(run.version, runs.pop().count + run.count)
        runs.append(run)


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, stop) of tokens in a trajectory."""

    start: int
    stop: int


class Completion(msgspec.Struct, frozen=True):
    """Tokens that an engine sampled for one prompt. `len(logprobs) == len(token_ids) == sum of version counts`."""

    token_ids: list[int]
    logprobs: list[float]
    """Behaviour log-prob of each token: under the distribution from which it was sampled."""
    versions: list[VersionRun]
    """Policy version of each token."""
    finish: Literal["stop", "length", "text"]
    """Reason for the end of the response. `stop`: the model ended it. `length`: it reached the token limit. `text`: it
    ends with one of the texts or tokens of `Sampling.stop` or `stop_token_ids`."""
    kept: Kept | None = None
    """Kept set of each token. None if the sampling settings keep all tokens."""
    routes: Routes | None = None
    """Experts chosen for the prompt and for all tokens but the last, which the engine has not computed. None if the
    engine does not report them."""


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A response, and the step of the environment after it."""

    observation: str
    """Text that was shown before the response."""
    action: str
    """Text of the response."""
    reward: float
    """Reward of the environment's step."""
    start: float
    """Time at which the response was requested, in Unix seconds."""
    generate_s: float
    """Seconds from `start` to the last token."""
    env_s: float
    """Seconds of the environment's step."""
    metrics: dict[str, float] = {}
    """Metrics that the environment measured in this step."""
    note: str = ""
    """Comment of the environment on the response, for people."""
    branch: int = 0
    """Index of the branch that the response is in."""


class Trajectory(msgspec.Struct, frozen=True, tag=True, gc=False):
    """A finished sample: the tokens exactly as they were sampled, and the rewards.

    The tokens are one sequence, to which later turns append. If the history of the episode has branches, they are
    several sequences, one after another. Each branch has a prompt of its own and is trained as a sequence of its
    own. Tokens that it shares with another branch are part of its prompt, so that no token is trained twice.
    """

    task: Task
    outcome: Outcome
    """`OK` or `TRUNCATED`."""
    reward: float
    """Sum of the turns' rewards."""
    token_ids: bytes
    """int32 [T]: observations and responses of all branches, as the engine saw and sampled them."""
    action_spans: list[Span]
    """Positions that the policy sampled, ascending, one span per turn. The loss leaves out all other positions."""
    logprobs: bytes
    """float32 [A]: behaviour log-prob of each action token, in the order of the spans."""
    versions: list[VersionRun]
    """Policy version of each action token, in the order of the spans."""
    turns: list[Turn]
    """Turns in order of time; at least one. The turns of one branch are in the order of the branch's spans."""
    lost_tokens: int = 0
    """Tokens that were sampled and are not in `token_ids`: their requests were aborted to move to another engine."""
    branches: tuple[int, ...] = (0,)
    """Position in `token_ids` at which each branch begins, ascending. Each branch has at least one action token."""
    kept: Kept | None = None
    """Kept set of each action token. None if the sampling settings keep all tokens."""
    routes: Routes | None = None
    """Experts chosen for each of the T tokens. None if the engines do not report them."""
    teacher: bytes | None = None
    """float32 [A]: log-prob of each action token under a teacher that runs on a server. None without such a teacher."""

    def tokens(self) -> Int32Array:
        """Return `token_ids` as int32 [T], a view."""
        return np.frombuffer(self.token_ids, dtype="<i4")

    def behaviour(self) -> Float32Array:
        """Return `logprobs` as float32 [A], a view."""
        return np.frombuffer(self.logprobs, dtype="<f4")

    def env_metrics(self) -> dict[str, float]:
        """Return the environment's metrics by name. If several turns have a metric, the last one counts."""
        return {name: value for turn in self.turns for name, value in turn.metrics.items()}

    @property
    def length(self) -> int:
        """T: tokens of prompts and responses, over all branches."""
        return len(self.token_ids) // 4

    @property
    def action_count(self) -> int:
        """A: tokens that the policy sampled."""
        return len(self.logprobs) // 4

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens sampled for this sample, including tokens that were lost on the way."""
        return self.action_count + self.lost_tokens

    @property
    def size(self) -> int:
        """Approximate size in bytes."""
        text = sum(len(turn.observation) + len(turn.action) for turn in self.turns)
        from_engine = (self.kept.size if self.kept else 0) + (len(self.routes.ids) if self.routes else 0)
        return len(self.token_ids) + len(self.logprobs) + len(self.teacher or b"") + text + from_engine

    def action_mask(self) -> BoolArray:
        """Return bool [T]: True where the policy sampled the token."""
        mask = np.zeros(self.length, dtype=np.bool_)
        for span in self.action_spans:
            mask[span.start : span.stop] = True
        return mask

    def action_versions(self) -> Int32Array:
        """Return int32 [A]: the policy version of each action token."""
        return np.repeat(
            np.array([run.version for run in self.versions], dtype=np.int32),
            [run.count for run in self.versions],
        )

    def trained_tokens(self, min_version: int) -> int:
        """Return the number of action tokens that `min_version` or a newer version sampled."""
        return sum(run.count for run in self.versions if young_enough(run.version, min_version))

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the action tokens."""
        return min(run.version for run in self.versions)

    def batch_sample(self, min_version: int = 0) -> BatchSample:
        """Return the facts that all ranks get, for a step that trains only tokens of `min_version` or newer."""
        trained = [run.version for run in self.versions if young_enough(run.version, min_version)]
        return BatchSample(
            group_id=self.task.group_id,
            reward=self.reward,
            oldest_version=min(trained, default=self.oldest_version),
            tokens=self.action_count,
            truncated=self.outcome == Outcome.TRUNCATED,
            turns=[turn.reward for turn in self.turns],
        )


class Failure(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The end of a lease without a trajectory. It never becomes a reward of 0."""

    task: Task
    outcome: Outcome
    message: str
    """The error, for people."""
    tokens: int
    """Sampled tokens that are lost."""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens sampled for this sample."""
        return self.tokens


# -- batches ---------------------------------------------------------------------------------------------------------


class BatchSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts about one sample of a batch that every trainer rank gets, whichever rank trains the sample."""

    group_id: int
    reward: float
    """Reward from the environment, before any shaping."""
    oldest_version: int
    """Oldest policy version among the trained tokens; below the step's `min_version` if no token is trained."""
    tokens: int
    """Action tokens of all branches, including tokens that are too old to be trained."""
    truncated: bool
    """True if a limit ended the episode, and not the environment."""
    turns: list[float]
    """Reward of each turn, in order of time over all branches. Their sum is `reward`."""


class Batch(msgspec.Struct, frozen=True):
    """The samples that a step trains, before they are dealt to ranks."""

    step: int
    """Policy version that the trainer holds."""
    min_version: int
    """Oldest version whose action tokens are trained. Older tokens are left out of the loss and booked as stale."""
    trajectories: list[Trajectory]
    """Samples, group by group."""
    earlier: list[BatchSample]
    """Samples that an earlier step has trained, of groups that are continued in this batch. Advantages count them."""


class ShardSample(msgspec.Struct, frozen=True, gc=False):
    """A sample dealt to a rank."""

    index: int
    """Index of the sample in `Shard.batch`."""
    trajectory: Trajectory


class Shard(msgspec.Struct, frozen=True):
    """The part of a batch that one trainer rank trains, and the facts that it needs about the whole batch."""

    step: int
    """Policy version that the trainer holds. Training on this batch makes version step + 1."""
    min_version: int
    """Oldest version whose action tokens are trained. Older tokens are left out of the loss and booked as stale."""
    samples: list[ShardSample]
    """Samples that this rank trains."""
    batch: list[BatchSample]
    """All samples of the batch, over all ranks."""
    total_tokens: int
    """Trained action tokens over all ranks: the denominator of means over tokens."""
    total_sequences: int
    """Branches with at least one trained token over all ranks: the denominator of means over sequences."""
    earlier: list[BatchSample] = []
    """Samples that an earlier step has trained, of groups that are continued in this batch. Advantages count them."""


class TokenUse(IntEnum):
    """Use of an action token in the loss."""

    TRAINED = 0
    CLIPPED = 1
    """The objective removed or cut the token's gradient, in the first pass over its minibatch."""
    REJECTED = 2
    """A correction left the token out of the loss, or gave it the weight 0."""
    TOO_OLD = 3
    """A policy older than `min_version` sampled the token."""


class TrainedSample(msgspec.Struct, frozen=True, gc=False):
    """Results of training at each action token of one sample, in the order of `Trajectory.logprobs`, little-endian.

    Trainer ranks report it, and the run keeps it with the readable samples. The advantage of a token that is too old is
    NaN. In a branch without a trained token, all values are NaN.
    """

    index: int
    """Index of the sample in the batch."""
    logprobs: bytes
    """float32 [A]: log-prob under the policy before the step, at the sampling temperature."""
    entropies: bytes
    """float32 [A]: entropy of this policy's distribution, in nats."""
    advantages: bytes
    """float32 [A]: advantage that the objective got."""
    uses: bytes
    """uint8 [A]: a `TokenUse` each."""


def samples_to_show(trained: Iterable[bool], count: int) -> list[int]:
    """Return the indices of the samples of a batch that a run keeps readable: the first `count` with a trained token.

    `trained` is True for each sample of the batch that has a trained token.
    """
    return list(itertools.islice((index for index, has_tokens in enumerate(trained) if has_tokens), count))


# -- weights ---------------------------------------------------------------------------------------------------------


class Canary(msgspec.Struct, frozen=True):
    """A fixed text, and the trainer's log-probs for it under one version.

    An engine that has loaded the version must compute nearly the same log-probs; otherwise its weights are wrong.
    """

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of token i+1 given tokens 0…i at temperature 1: one fewer than `token_ids`."""
    tolerance: float = 0.0
    """Largest allowed mean of the absolute differences between an engine's log-probs and these, in nats."""


class Published(msgspec.Struct, frozen=True):
    """An immutable version of the weights, which engines load."""

    version: int
    backend: Literal["tcp", "gloo", "nccl", "ipc"]
    """Way in which engines receive the tensors."""
    update_info: bytes
    """Information that the backend's receiver needs to get the tensors of this version, as msgpack."""
    canary: Canary
    incarnation: int = 0
    """Incarnation of the trainer ranks that hold this version. The hub fills it in."""


# -- messages --------------------------------------------------------------------------------------------------------


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a function in a message of the model."""

    id: str
    name: str
    """Name of the function."""
    arguments: str
    """JSON, exactly as the model wrote it."""


Tool = dict[str, Any]
"""A function that may be called, as the OpenAI API describes it: `{"type": "function", "function": {"name": …}}`."""


RESERVED_ARGUMENTS = frozenset(
    {
        *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
"""Arguments of transformers' `apply_chat_template` that Flash sets itself. Neither the configuration nor a request may
set them."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat message of a prompt."""

    role: str
    content: str
    reasoning: str = ""
    """Reasoning before the answer, if the chat template separates the two."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of functions that the model made in this message."""
    tool_call_id: str = ""
    """Id of the call whose result the message contains."""
    name: str = ""
    """Name of the function that was called."""


class Piece(msgspec.Struct, frozen=True):
    """The part of a model's answer that is new since the last piece, while the answer is sampled."""

    content: str = ""
    """New text of the answer."""
    reasoning: str = ""
    """New text of the reasoning before the answer."""


Observation = str | list[Message]
"""Content that an environment shows to the model: plain text, or messages for the model's chat template."""


# -- observation of a run --------------------------------------------------------------------------------------------


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """Something that a worker did, which is drawn as a bar of the run's timeline."""

    lane: str
    """Worker, such as `trainer 0`."""
    name: str
    """Name of what the worker did, such as `generate`."""
    start: float
    """Unix seconds."""
    stop: float
    """Unix seconds."""


class Stock(msgspec.Struct, frozen=True):
    """Numbers of a resource that the environments of a node share, such as a pool of sandboxes."""

    name: str
    """Name of the resource, for people."""
    in_use: int
    """Instances that are in use or being started for an environment."""
    ready: int
    """Instances that are warm and can be used at once."""
    waiting: int
    """Environments that wait for an instance."""
    most: int
    """Largest number of instances, in use and ready together."""
    made: int
    """Instances that were started since the node began."""
