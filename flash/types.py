"""Types that cross a boundary between processes: frozen structs, encoded by msgspec, with arrays as raw bytes.

A `Task` asks for one sample. A node holds a `Lease` of the task while the *episode* runs, in which an environment and
the model take turns. The node answers with a `Trajectory` or a `Failure`. The hub forms the `Batch` of a step and
splits it among the trainer ranks, each of which gets a `Shard`. The ranks report each token's part in the loss as
`TrainedSample`, and announce new weights as `Published`.

*Version* n is the weights after n training steps. An *action token* is a token that the policy sampled; all other
tokens are prompts and observations. An episode may have *branches*, that is, several histories of messages. The
*behaviour* log-prob of a token is its log-prob under the distribution from which it was sampled.

Token arrays are little-endian bytes: int32 ids, float32 log-probs. Policy versions are run-length encoded over the
action tokens. Shape legend: T = all tokens of a trajectory, A = its action tokens.

Structs of which there is at least one per sample are hidden from the garbage collector (`gc=False`). Such structs
cannot be part of a reference cycle, and looking through a hundred thousand of them would stop the hub for half a
second.
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
"""Use of a task: training, or an evaluation."""

ASSISTANT = "assistant"
"""Role of the model's messages in a chat."""
TOOL = "tool"
"""Role of the messages in a chat that hold the result of a function."""


# -- tasks and their results -----------------------------------------------------------------------------------------


class Outcome(StrEnum):
    """The end of an attempt at a task, and the reason under which the ledger counts tasks and tokens.

    `OK` and `TRUNCATED` are outcomes of trajectories. All other outcomes have no reward. An episode never ends with
    `STALE` or `FILTERED`: only the hub uses these two reasons.
    """

    OK = "ok"
    """The environment ended the episode."""
    TRUNCATED = "truncated"
    """A limit of the run ended the episode, or the environment reported the episode as truncated."""
    ENV_ERROR = "env_error"
    """The environment raised an error."""
    ENV_TIMEOUT = "env_timeout"
    """A call of the environment took longer than its deadline."""
    TOO_LONG = "too_long"
    """The prompt leaves no room for a response."""
    REWARD_ERROR = "reward_error"
    """The reward is missing or not a finite number, or its verifier failed."""
    ENGINE_ERROR = "engine_error"
    """An engine could not serve a request."""
    ENGINE_KILLED = "engine_killed"
    """Several engines died under the same request. It is given to no other engine, because it might kill that engine,
    too."""
    STALE = "stale"
    """The tokens are too old to be trained."""
    CANCELLED = "cancelled"
    """The task was withdrawn, or its node was lost."""
    FILTERED = "filtered"
    """The group of the sample is not worth training, for example because all its rewards are equal."""


RETRIED = frozenset({Outcome.ENV_ERROR, Outcome.ENV_TIMEOUT, Outcome.REWARD_ERROR, Outcome.ENGINE_ERROR})
"""Failures of the infrastructure, which are tried again at most `rollout.retries` times. A cancelled task is always
tried again. A task whose prompt is too long is never tried again, because it would fail again.
"""


class Task(msgspec.Struct, frozen=True, gc=False):
    """A request for one sample: member `sample_index` of group `group_id`."""

    task_id: int
    """Number of the task, unique in a run and split; in `flash sft`, the number of the row, as `group_id`."""
    group_id: int
    """Number of the group, from 0 in the order of issue."""
    sample_index: int
    """Index of the task among the members of its group."""
    seed: int
    """Seed with which the environment is reset. All members of a group have the same seed, and therefore the same
    prompt."""
    split: Split = "train"
    """`train`, or `eval` for a held-out task of an evaluation."""
    attempt: int = 0
    """Number of earlier attempts that failed."""
    kind: str = ""
    """Kind of the problem: a name that the environment gives it, such as the name of one environment of a mixture.
    Empty if the environment has no kinds."""
    sampling: Sampling = PLAIN
    """Distribution from which the responses are sampled."""


class Lease(msgspec.Struct, frozen=True, gc=False):
    """Assignment of one task to one node, which must run it."""

    lease_id: int
    """Number of the lease, unique in a run."""
    task: Task
    min_version: int
    """Lowest version of an engine that may run the task. No token of the sample has an older version."""


class VersionRun(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`count` consecutive action tokens that policy version `version` sampled."""

    version: int
    count: int
    """Number of tokens."""


def append_versions(runs: list[VersionRun], later: Iterable[VersionRun]) -> None:
    """Append the versions of later tokens to `runs`, in place. Neighbours of the same version become one run."""
    for run in later:
        if runs and runs[-1].version == run.version:
            run = VersionRun(run.version, runs.pop().count + run.count)
        runs.append(run)


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positions [start, stop) of tokens in a trajectory."""

    start: int
    stop: int


class Completion(msgspec.Struct, frozen=True):
    """The response that engines sampled for one prompt, or a piece of it.

    Invariant: `len(logprobs) == len(token_ids) == sum of the counts of versions`.
    """

    token_ids: list[int]
    """Sampled tokens, without the prompt."""
    logprobs: list[float]
    """Behaviour log-prob of each token."""
    versions: list[VersionRun]
    """Policy version of each token."""
    finish: Literal["stop", "length", "text"]
    """Reason for the end of the response. `stop`: the model ended it. `length`: it reached the token limit. `text`: it
    ends with one of the texts of `Sampling.stop` or one of the tokens of `Sampling.stop_token_ids`."""
    kept: Kept | None = None
    """Kept set of each token: the tokens that could have been drawn. None if neither the sampling settings nor a
    grammar leave a token out."""
    routes: Routes | None = None
    """Experts (of a mixture-of-experts model) chosen for each token of the prompt and of the response, except the last
    one: the model never runs on it. None if the engine does not report them."""


class Turn(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A response of the model, and the step of the environment after it."""

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

    The tokens are one sequence, to which each turn has appended. If the episode has branches, they are several
    sequences, one after another. Each branch has a prompt of its own and is trained as a sequence of its own. Tokens
    that it shares with an earlier branch are part of its prompt, so that no token is trained twice.
    """

    task: Task
    outcome: Outcome
    """`OK` or `TRUNCATED`."""
    reward: float
    """Sum of the turns' rewards."""
    token_ids: bytes
    """int32 [T]: observations and responses of all branches, as the engine saw and sampled them."""
    action_spans: list[Span]
    """Positions of the action tokens, ascending, one span per turn. The loss leaves out all other positions."""
    logprobs: bytes
    """float32 [A]: behaviour log-prob of each action token, in the order of the spans."""
    versions: list[VersionRun]
    """Policy version of each action token, in the order of the spans."""
    turns: list[Turn]
    """Turns in order of time; at least one. The turns of one branch are in the order of the branch's spans."""
    lost_tokens: int = 0
    """Number of tokens that were sampled and are not in `token_ids`, because their requests were aborted to be sent to
    another engine."""
    branches: tuple[int, ...] = (0,)
    """Position in `token_ids` at which each branch begins, ascending. Each branch has at least one action token."""
    kept: Kept | None = None
    """Kept set of each action token. None if neither the sampling settings nor a grammar leave a token out."""
    routes: Routes | None = None
    """Experts (of a mixture-of-experts model) chosen for each of the T tokens. None if engines do not report them."""
    teacher: bytes | None = None
    """float32 [A]: log-prob of each action token under a teacher, a model from which the policy learns. None unless a
    teacher runs on a server."""

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
        """Approximate size in bytes, by which a shard is split into messages."""
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
        """Return the number of action tokens that `min_version` or a newer version sampled.

        A step with this `min_version` trains these tokens. It leaves older tokens out.
        """
        return sum(run.count for run in self.versions if young_enough(run.version, min_version))

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the action tokens."""
        return min(run.version for run in self.versions)

    def batch_sample(self, min_version: int = 0) -> BatchSample:
        """Return the facts that all trainer ranks get about this sample (`Shard.batch`).

        The step trains only tokens of `min_version` or newer versions.
        """
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
    """The end of a lease without a trajectory. It never becomes a reward of 0, because the policy is not at fault."""

    task: Task
    outcome: Outcome
    """Kind of the failure, which decides whether the task is tried again (`RETRIED`)."""
    message: str
    """The error, for people."""
    tokens: int
    """Number of tokens that were sampled for the lease and are lost."""

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens sampled for the lease. `Trajectory` has the same property, so that both kinds of results can
        be counted alike."""
        return self.tokens


# -- batches ---------------------------------------------------------------------------------------------------------


class BatchSample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Facts about one sample of a batch that every trainer rank gets, whichever rank trains the sample.

    From them each rank computes advantages, which compare the rewards of a group.
    """

    group_id: int
    reward: float
    """Reward from the environment, before any shaping."""
    oldest_version: int
    """Oldest policy version among the trained tokens; below the step's `min_version` if no token is trained."""
    tokens: int
    """Number of action tokens of all branches, including tokens that are too old to be trained."""
    truncated: bool
    """True if the outcome is `TRUNCATED`: the episode was cut before its natural end."""
    turns: list[float]
    """Reward of each turn, in order of time over all branches. Their sum is `reward`."""


class Batch(msgspec.Struct, frozen=True):
    """The samples that a step trains, or the samples of one round of it, before they are split among the ranks.

    A *round* is the samples of a step that the ranks train before they ask for more. A step has several rounds if the
    ranks train the first groups while the other groups are still sampled (`train.stream`); otherwise it has one.
    """

    step: int
    """Policy version that the trainer holds. Training on this batch makes version step + 1."""
    min_version: int
    """Oldest version whose action tokens are trained. Older tokens are left out of the loss and counted as stale."""
    trajectories: list[Trajectory]
    """Samples, group by group."""
    earlier: list[BatchSample]
    """Samples that earlier steps have trained, of groups that are continued in this batch. Advantages compare the
    rewards of this batch with the rewards of these samples, too."""
    rounds: list[int] = []
    """Number of samples of each round, in order. Empty: the step has one round."""


class Round(msgspec.Struct, frozen=True):
    """Position of a round in the batch of its step. The default is the only round of a step."""

    samples_before: int = 0
    """Number of samples in earlier rounds of the step."""
    groups_before: int = 0
    """Number of groups in earlier rounds of the step."""
    groups: int = 0
    """Number of groups of the whole batch, without groups that earlier steps have trained in part. With 0, all groups
    of the round count. The minibatch of each group follows from this number."""
    last: bool = True
    """True if no round of the step follows."""


ONLY_ROUND = Round()
"""Round of a step that has one round."""


class ShardSample(msgspec.Struct, frozen=True, gc=False):
    """A sample of a shard."""

    index: int
    """Index of the sample in `Shard.batch`."""
    trajectory: Trajectory


class Shard(msgspec.Struct, frozen=True):
    """The part of one round that a trainer rank trains, and the facts that it needs about the whole round."""

    step: int
    """Policy version that the trainer holds. Training on this batch makes version step + 1."""
    min_version: int
    """Oldest version whose action tokens are trained. Older tokens are left out of the loss and counted as stale."""
    samples: list[ShardSample]
    """Samples that this rank trains."""
    batch: list[BatchSample]
    """All samples of the round, over all ranks."""
    total_tokens: int
    """Number of trained action tokens of the round over all ranks."""
    total_sequences: int
    """Number of branches of the round with at least one trained token over all ranks."""
    earlier: list[BatchSample] = []
    """Value of `Batch.earlier` for the groups of the round."""
    round: Round = ONLY_ROUND
    """Position of the round in its step."""


class TokenUse(IntEnum):
    """Use of an action token in the loss of its step."""

    TRAINED = 0
    """The token contributed to the gradient in full."""
    CLIPPED = 1
    """The objective removed or reduced the token's gradient, in the first pass over its minibatch."""
    REJECTED = 2
    """A correction of the loss (`algorithms.corrections`) left the token out, or gave it the weight 0."""
    TOO_OLD = 3
    """A policy older than `min_version` sampled the token."""


class TrainedSample(msgspec.Struct, frozen=True, gc=False):
    """Results of training at each action token of one sample, in the order of `Trajectory.logprobs`, little-endian.

    Trainer ranks report it for some samples of each step (`samples_to_show`), and the run keeps it with their text for
    people. The advantage of a token that is too old is NaN. In a branch without a trained token, all values are NaN.
    """

    index: int
    """Index of the sample in the batch."""
    logprobs: bytes
    """float32 [A]: log-prob under the policy before the step, at the sampling temperature."""
    entropies: bytes
    """float32 [A]: entropy of this policy's distribution, in nats."""
    advantages: bytes
    """float32 [A]: advantage that the objective was given for the token."""
    uses: bytes
    """uint8 [A]: `TokenUse` of each token."""


def samples_to_show(trained: Iterable[bool], count: int) -> list[int]:
    """Return the indices of the samples of a batch that a run keeps for people: the first `count` with a trained token.

    The trainer ranks and the run's recorder call this independently, and must choose the same samples. `trained` is
    True for each sample of the batch that has a trained token.
    """
    return list(itertools.islice((index for index, has_tokens in enumerate(trained) if has_tokens), count))


# -- weights ---------------------------------------------------------------------------------------------------------


class Canary(msgspec.Struct, frozen=True):
    """A short fixed text, and the trainer's log-probs of its tokens under one version.

    An engine that has loaded the version must compute nearly the same log-probs; otherwise its weights are wrong.
    """

    token_ids: list[int]
    """Tokens of the text."""
    logprobs: list[float]
    """Log-prob of token i+1 given tokens 0…i at temperature 1: one fewer than `token_ids`."""
    tolerance: float = 0.0
    """Largest allowed mean of the absolute differences between an engine's log-probs and `logprobs`, in nats."""


class Published(msgspec.Struct, frozen=True):
    """Announcement of a version of the weights, which engines load. A version never changes."""

    version: int
    """Number of the version."""
    backend: Literal["tcp", "gloo", "nccl", "ipc"]
    """Way in which engines receive the tensors."""
    update_info: bytes
    """Information that the backend's receiver in an engine needs to get the tensors of this version, as msgpack."""
    canary: Canary
    """Text with which an engine checks that it has loaded the right weights."""
    incarnation: int = 0
    """Number of the incarnation that holds this version. An incarnation is the set of trainer ranks that run from one
    restart of the ranks to the next. The hub sets the number."""


# -- messages --------------------------------------------------------------------------------------------------------


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call of a function in a message of the model."""

    id: str
    name: str
    """Name of the function."""
    arguments: str
    """JSON, exactly as the model wrote it."""


Tool = dict[str, Any]
"""Function that the model may call, as the OpenAI API describes it: `{"type": "function", "function": {"name": …}}`."""


ANY_CALL = "*"
"""Value of `ResponseForm.call` for any of the offered functions."""


class ResponseForm(msgspec.Struct, frozen=True):
    """Form that a response must have. Tokens that do not lead to this form are forbidden while it is sampled.

    With reasoning (`model.reasoning_parser`), the form holds after the reasoning, which is free. The arguments of each
    call follow the JSON schema of its function.
    """

    schema: dict[str, Any] | None = None
    """JSON schema of the text; None: free text."""
    call: str = ""
    """Function that the response must call: a name, or `ANY_CALL` for at least one of the offered functions. The
    response then has no text. Empty: the response need not call a function."""
    calling: bool = True
    """True if the response may call the offered functions instead of having text in the form of `schema`."""
    single: bool = False
    """True if the response may have only one call."""


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
    """A message of a chat, in a prompt or from the model."""

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
    """A bar of the run's timeline: something that a worker did from `start` to `stop`."""

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
    """Number of instances that are in use or being started for an environment."""
    ready: int
    """Number of instances that are running without a user and can be used at once."""
    waiting: int
    """Number of environments that wait for an instance."""
    most: int
    """Largest allowed number of instances, in use and ready together."""
    made: int
    """Number of instances that were started since the node began."""
