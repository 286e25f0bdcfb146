"""What top-k, top-p and the like do to the ratio, and what it costs to follow them.

The model is SmolLM2-135M-Instruct (`flash fetch`), in float32 on the CPU. A real vLLM engine samples answers in chat
form in several ways, all at once, and a trainer of the same weights says of the tokens what it makes of them.

`k3` is the mean of exp(d) − 1 − d, where d is the difference of the two log-probs: over the kept sets, as a run has it,
and *unfiltered*, as a trainer has it that knows of the temperature alone. `kept` is the mean size of a kept set and
`bytes` what a token takes in a trajectory: id, log-prob and kept set. `node_us` is the processor time of the process
that reads the engine, per token, without the engine's own processes; `trainer_us` that of a forward and a backward
pass, per sampled token.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio

from benchmarks.form import Args, Row, main
from benchmarks.real.mismatch import NEW_TOKENS, QUESTIONS, config_for, load_own_weights, rounded
from flash.config.tree import Config
from flash.sampling import Sampling
from flash.types import Completion, Message, Outcome, ShardSample, Span, Task, Trajectory, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from flash.trainer.packing import MicroBatch

ANSWERS, QUICK_ANSWERS = 32, 8
WAYS = {
    "temperature 1": Sampling(),
    "top_k 50": Sampling(top_k=50),
    "top_k 50, top_p 0.95": Sampling(top_k=50, top_p=0.95),
    "top_k 50, top_p 0.8, temperature 0.7": Sampling(0.7, top_k=50, top_p=0.8),
    "top_k 50, min_p 0.05": Sampling(top_k=50, min_p=0.05),
    "top_k 200, repetition_penalty 1.1": Sampling(top_k=200, repetition_penalty=1.1),
    "top_k 1024": Sampling(top_k=1024),
}


async def sample(config: Config, count: int) -> dict[str, tuple[list[Trajectory], float]]:
    """For each way the answers, and seconds of this process's processor time."""
    from flash.rollout.engine import ResponseRequest
    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.rollout.vllm.engine import VLLMEngine

    engine, tokenizer = VLLMEngine(config, 0, []), HfTokenizer(config.model)
    await engine.start()
    await load_own_weights(engine, config)

    async def one(number: int, sampling: Sampling, done: list[Trajectory]) -> None:
        prompt = tokenizer.render([Message("user", QUESTIONS[number % len(QUESTIONS)])])
        asked = ResponseRequest(prompt, NEW_TOKENS, key=number, sampling=sampling, seed=number)
        (said,) = [piece async for piece in engine.generate(asked) if isinstance(piece, Completion)]
        done.append(trajectory(number, prompt, said, sampling))

    async def all_of(numbers: Sequence[int], sampling: Sampling) -> tuple[list[Trajectory], float]:
        done, begun = list[Trajectory](), time.process_time()
        async with anyio.create_task_group() as group:
            for number in numbers:
                group.start_soon(one, number, sampling, done)
        return sorted(done, key=lambda one: one.task.task_id), time.process_time() - begun

    try:
        await all_of(range(len(QUESTIONS)), Sampling())  # kernels warm up, prompts are cached
        return {name: await all_of(range(count), sampling) for name, sampling in WAYS.items()}
    finally:
        await engine.close()


def trajectory(number: int, prompt: list[int], said: Completion, sampling: Sampling) -> Trajectory:
    """An answer as it would be trained."""
    import numpy as np

    tokens = prompt + said.token_ids
    return Trajectory(
        task=Task(number, number, 0, seed=number, sampling=sampling),
        outcome=Outcome.OK,
        reward=0.0,
        token_ids=np.array(tokens, dtype="<i4").tobytes(),
        action_spans=[Span(len(prompt), len(tokens))],
        logprobs=np.array(said.logprobs, dtype="<f4").tobytes(),
        versions=said.versions,
        turns=[Turn("", "", 0.0, 0.0, 0.0, 0.0)],
        kept=said.kept,
    )


def k3(model: PreTrainedModel, micros: Sequence[MicroBatch]) -> float:
    """Of the trainer's log-probs against the engine's."""
    import torch

    from flash.trainer.model.logprobs import policy_logprobs

    with torch.no_grad():
        now_T = torch.cat([policy_logprobs(model, micro).logp_T.double() for micro in micros])
    gap_T = now_T - torch.cat([torch.from_numpy(micro.behaviour_T).double() for micro in micros])
    return float((gap_T.exp() - 1 - gap_T).mean())


def seconds_of_training(model: PreTrainedModel, micros: Sequence[MicroBatch]) -> float:
    """Processor time of a forward and a backward pass over all."""
    from flash.trainer.model.logprobs import policy_logprobs

    begun = time.process_time()
    for micro in micros:
        policy_logprobs(model, micro).logp_T.sum().backward()
    return time.process_time() - begun


def measure(args: Args) -> list[Row]:
    """All ways."""
    from dataclasses import replace

    from flash.foreign.torch import single_process_group
    from flash.run.models.models import make_missing_model
    from flash.trainer.mesh import trainer_mesh
    from flash.trainer.model.model import load_model, shard_model
    from flash.trainer.packing import no_kept_sets, pack

    config = config_for("float32", "float32")
    make_missing_model(config)
    found = anyio.run(sample, config, QUICK_ANSWERS if args.quick else ANSWERS)
    rows: list[Row] = []
    with single_process_group("gloo"):
        whole = load_model(config.model)
        rounded(whole)
        model = shard_model(whole, trainer_mesh("cpu"), config.model)
        for name, (answers, node_s) in found.items():
            samples = [ShardSample(index, one) for index, one in enumerate(answers)]
            micros = pack(samples, min_version=0, max_tokens=4096)
            unfiltered = [replace(micro, kept=no_kept_sets(len(micro.target_T))) for micro in micros]
            tokens = sum(one.action_count for one in answers)
            others = sum(len(one.kept.ids) // 4 for one in answers if one.kept is not None)
            size = 8 + sum(one.kept.size for one in answers if one.kept is not None) / tokens
            rows += [
                Row(name, "k3", "", k3(model, micros)),
                Row(name, "k3_unfiltered", "", k3(model, unfiltered)),
                Row(name, "kept", "tokens", 1 + others / tokens if WAYS[name].has_kept_sets else float("nan")),
                Row(name, "bytes", "per token", size),
                Row(name, "node_us", "us/token", node_s / tokens * 1e6),
                Row(name, "trainer_us", "us/token", seconds_of_training(model, micros) / tokens * 1e6),
            ]
    return rows


if __name__ == "__main__":
    main("kept_sets", __doc__ or "", measure)
