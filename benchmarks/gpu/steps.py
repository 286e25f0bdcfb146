"""Training steps of random models, which several parts of the GPU check measure."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from benchmarks.gpu.sizes import Shape
from flash.config.machine import count_gpus
from flash.config.tree import Config
from flash.types import Outcome, Shard, ShardSample, Span, Task, Trajectory, Turn, VersionRun

GIB = 2**30
"""Bytes of a GiB."""
GROUP_SIZE = 8
"""Samples of a group."""
PROMPT = 12
"""Tokens of a prompt."""
IMPORTS = ("flash.trainer.step", "flash.trainer.memory", "transformers.models.qwen3.modeling_qwen3")
"""Modules that the processes of `apart` need."""
Result = TypeVar("Result")


def apart(call: Callable[[Any], Result], argument: Any) -> Result:
    """Call a function in a new process, which has its own memory and process group, and return its result.

    The function, its argument and the result travel as pickles, so the function must be one of a module.
    Without a GPU, the process is forked from a server that has imported `IMPORTS`, which take longer than a small step.
    """
    if count_gpus() > 0:
        # A forked process cannot use CUDA if one of the imports has initialised it in the server.
        context = multiprocessing.get_context("spawn")
    else:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*IMPORTS])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(call, argument).result()


def save_random(what: tuple[Shape, str, Literal["float32", "bfloat16"], bool]) -> None:
    """Save a model with random weights, in a process of `apart`, since it changes torch's default dtype.

    `what` is the model's shape, its folder, its dtype, and True to make it on the card.
    """
    import torch
    from transformers import Qwen3ForCausalLM

    shape, folder, dtype, gpu = what
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    with torch.device("cuda" if gpu else "cpu"):
        Qwen3ForCausalLM(shape.config()).save_pretrained(folder)


def step_config(
    folder: str, dtype: Literal["float32", "bfloat16"], longest: int, sequences: int, steps: int, *, gpu: bool
) -> Config:
    """Return the configuration of `steps` steps with one minibatch and GRPO.

    A step has `sequences` answers of at most `longest` tokens. `folder` is that of the model.
    """
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "gpu-check", "steps": steps},
        "model": {"path": folder, "dtype": dtype, "max_length": longest + 64},
        "env": {"path": "envs.arithmetic:Arithmetic"},
        "rollout": {"group_size": GROUP_SIZE, "max_new_tokens": longest},
        "train": {"batch_size": sequences, "minibatches": 1, "max_tokens_per_microbatch": 16_384},
        "cluster": {"gpus_per_node": 1 if gpu else 0},
        "engine": {"share_gpus": gpu},
        "algorithm": {"objective": "grpo", "lag": None},
    }
    return msgspec.convert(tables, Config)


def random_shard(step: int, groups: int, answers: tuple[int, int], vocabulary: int) -> Shard:
    """Return a batch of random answers for a training step, labelled with the version before that of the step.

    `answers` are the smallest and the largest length of an answer. Token ids are below `vocabulary`.
    """
    rng = np.random.default_rng(step)
    version = max(step - 1, 0)
    trajectories: list[Trajectory] = []
    for group in range(groups):
        prompt = rng.integers(0, vocabulary, PROMPT)
        for member in range(GROUP_SIZE):
            answer = int(rng.integers(*answers, endpoint=True))
            reward = float(rng.random() < 0.5)
            logprobs = rng.normal(-math.log(vocabulary), 0.2, answer)
            trajectories.append(
                Trajectory(
                    task=Task(group * GROUP_SIZE + member, group, member, seed=group),
                    outcome=Outcome.OK,
                    reward=reward,
                    token_ids=np.append(prompt, rng.integers(0, vocabulary, answer)).astype("<i4").tobytes(),
                    action_spans=[Span(PROMPT, PROMPT + answer)],
                    logprobs=logprobs.astype("<f4").tobytes(),
                    versions=[VersionRun(version, answer)],
                    turns=[Turn("", "", reward, 0.0, 0.0, 0.0)],
                )
            )
    return Shard(
        step=step,
        min_version=version,
        samples=[ShardSample(index, one) for index, one in enumerate(trajectories)],
        batch=[one.batch_sample(version) for one in trajectories],
        total_tokens=sum(one.action_count for one in trajectories),
        total_sequences=len(trajectories),
    )
