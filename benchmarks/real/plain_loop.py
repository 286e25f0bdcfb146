"""A training step beside the loop that one would write by hand with transformers, on the same tokens.

`grpo`, one update per batch. The plain loop pads nothing, since all are of one length: model, log-softmax of the
answers' logits, the clipped objective, backward, clip, AdamW. Ours does what a run does: it checks and packs the shard,
computes what a group's eight samples share once, takes the same gradient under FSDP2, and gathers statistics.

Two models. A tiny one of 1.05 million parameters in float32, 512 sequences of 12 + 16 tokens; both loops take turns in
one process, on one thread, in processor time. And SmolLM2-135M-Instruct, 64 sequences of 48 + 32 tokens, in bfloat16
with master weights in float32 (the plain loop by autocast); each in a process of its own, whose memory at its peak is
told, ours with recomputed activations too.

And trees: our step with the tiny model on sequences of 512 tokens that begin alike as the case says, beside sequences
of the same lengths that have nothing in common; action tokens are among the shared ones. They take turns in one
process, on one thread, in processor time. Memory is what the process holds at most beyond what it held before.
"""

from __future__ import annotations

import os
import resource
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec
import numpy as np

from benchmarks.form import Args, Row, main
from benchmarks.real.objective_cost import apart, make_tiny_model, random_shard, step_config
from flash.types import Shard, ShardSample

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from flash.config.tree import Config
    from flash.trainer.step import Trainer

GROUP_SIZE = 8
GOAL = 1.05
MODEL = "outputs/models/smollm2-135m"
VOCABULARY = 49_152


class Sizes(NamedTuple):
    """A batch."""

    groups: int
    prompt: int
    answer: int
    """Tokens of each answer: no padding, which is the plain loop's best case."""
    at_once: int
    """Sequences of one forward pass of the plain loop, about as many as fit into one of ours: all at once is slower."""


TINY, REAL = Sizes(64, 12, 16, 256), Sizes(8, 48, 32, 32)
LAYERS = 4
"""Of the tiny model."""


class Case(msgspec.Struct, frozen=True):
    """What is measured."""

    steps: int
    kind: Literal["ours", "ours, recomputed", "plain"] = "ours"


def rows(args: Args) -> list[Row]:
    """Median times of a step, their ratios, and memory."""
    steps = 2 if args.quick else 9
    ours, plain = apart(in_turns, Case(steps))
    case = f"step, grpo, {TINY.groups * GROUP_SIZE} × {TINY.prompt + TINY.answer} tokens, against a plain loop"
    out = [
        Row(case, "step_ms", "ms", 1e3 * ours, 1e3 * plain),
        Row(case, "ratio_to_plain_s", "×", ours / plain, None, GOAL),
        *tree_rows(args),
    ]
    if args.quick and not Path(MODEL).is_dir():
        return out
    case = f"SmolLM2-135M, {REAL.groups * GROUP_SIZE} × ({REAL.prompt} + {REAL.answer}) tokens, bfloat16"
    plain, memory = apart(alone, Case(1 if args.quick else 3, "plain"))
    out.append(Row(f"{case}, plain loop", "peak_gib", "GiB", memory))
    for kind, name in (("ours", ""), ("ours, recomputed", ", recomputed")):
        ours, memory = apart(alone, Case(1 if args.quick else 3, kind))
        out += [
            Row(case + name, "step_s", "s", ours, plain),
            Row(case + name, "ratio_to_plain_s", "×", ours / plain, None, GOAL if kind == "ours" else None),
            Row(case + name, "peak_gib", "GiB", memory),
        ]
    return out


class Trees(NamedTuple):
    """Sequences that begin alike."""

    share: float
    """Of a sequence's tokens that its tree has in common."""
    fan_out: int
    """Sequences of a tree."""
    deep: bool = False
    """Whether each parts from the first at another place, evenly up to `share` of its tokens."""

    @property
    def name(self) -> str:
        """As the rows have it."""
        forks = ", each from another turn on" if self.deep else ""
        return f"trees of {self.fan_out} sequences of {LENGTH} tokens, {self.share:.0%} in common{forks}"


LENGTH = 512
"""Tokens of a sequence in a tree."""
TREES = [
    *(Trees(share, fan_out) for fan_out in (2, 8) for share in (0.0, 0.25, 0.5, 0.75, 0.9)),
    Trees(0.9, 8, deep=True),
]
QUICK_TREES = [Trees(0.75, 8)]


class TreeCosts(NamedTuple):
    """Of a step, shared and not."""

    seconds: tuple[float, float]
    gib: tuple[float, float]


def tree_rows(args: Args) -> list[Row]:
    """Tokens per second of processor time and memory, with what sequences begin with alike and without."""
    trees = QUICK_TREES if args.quick else TREES
    out: list[Row] = []
    for case, costs in zip(trees, apart(tree_costs, (trees, 1 if args.quick else 3)), strict=True):
        (shared, alone), (shared_gib, alone_gib) = costs
        tokens = 2 * GROUP_SIZE * LENGTH
        out += [
            Row(case.name, "tokens_per_s", "tokens/s", tokens / shared, tokens / alone),
            Row(case.name, "speedup", "×", alone / shared),
            Row(case.name, "peak_gib", "GiB", shared_gib, alone_gib),
        ]
    return out


def tree_costs(case: tuple[list[Trees], int]) -> list[TreeCosts]:
    """By case, medians over so many steps. Makes a process group."""
    import torch
    import torch.distributed as dist
    from transformers.utils.logging import disable_progress_bar

    from flash.trainer.step import Trainer

    disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trees, steps = case
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, LAYERS)
        config = configured(folder, 2 * len(trees) * (steps + 1), Sizes(2, 12, LENGTH - 12, 4))
        model = msgspec.structs.replace(config.model, max_length=LENGTH)
        trainer = Trainer(msgspec.structs.replace(config, model=model))
    out: list[TreeCosts] = []
    for one in trees:
        found: list[list[tuple[float, float]]] = [[], []]
        # The first of each is not counted.
        for _ in range(steps + 1):
            for place, forks in enumerate((one, one._replace(share=0.0))):
                found[place].append(measured_step(trainer, forked_shard(trainer.version, forks)))
        medians = [tuple(map(statistics.median, zip(*each[1:], strict=True))) for each in found]
        out.append(TreeCosts(*zip(*medians, strict=True)))
    dist.destroy_process_group()
    return out


def measured_step(trainer: Trainer, shard: Shard) -> tuple[float, float]:
    """Seconds of processor time, and GiB beyond what was held before."""
    # From here on the most that was held is counted anew.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = held("VmRSS")
    start = time.process_time()
    trainer.train_step(shard)
    return time.process_time() - start, (held("VmHWM") - before) / 2**20


def held(what: str) -> int:
    """KiB of this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what))


def forked_shard(step: int, trees: Trees) -> Shard:
    """Two groups whose samples begin alike tree by tree, and each tree otherwise than all others."""
    shard = random_shard(step, 2, (LENGTH - 12, LENGTH - 12))
    first: dict[int, np.ndarray] = {}
    samples: list[ShardSample] = []
    for sample in shard.samples:
        tree, place = divmod(sample.index, trees.fan_out)
        ids = sample.trajectory.tokens().copy()
        turns = place + 1 if trees.deep else trees.fan_out
        kept = int(trees.share * LENGTH * turns / trees.fan_out)
        ids[:kept] = first.setdefault(tree, ids)[:kept]
        ids[0] = tree if kept else sample.index
        samples.append(ShardSample(sample.index, msgspec.structs.replace(sample.trajectory, token_ids=ids.tobytes())))
    return msgspec.structs.replace(shard, samples=samples)


def in_turns(case: Case) -> tuple[float, float]:
    """Seconds of processor time of our step and of the plain one with the tiny model. Makes a process group."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from flash.trainer.step import Trainer

    disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        make_tiny_model(folder, LAYERS)
        trainer = Trainer(configured(folder, case.steps, TINY))
        model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ours: list[float] = []
    plain: list[float] = []
    for step in range(case.steps + 1):
        shard = random_shard(step, TINY.groups, (TINY.answer, TINY.answer), prompt=TINY.prompt)
        start = time.process_time()
        trainer.train_step(shard)
        middle = time.process_time()
        plain_step(model, optimizer, shard, TINY)
        ours.append(middle - start)
        plain.append(time.process_time() - middle)
    dist.destroy_process_group()
    return statistics.median(ours[1:]), statistics.median(plain[1:])


def alone(case: Case) -> tuple[float, float]:
    """Seconds of a step with the real model on all cores, and the peak of this process's memory in GiB."""
    import torch
    import torch.distributed as dist
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from flash.run.models.models import make_missing_model
    from flash.trainer.step import Trainer

    disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = configured(MODEL, case.steps, REAL)
    model_of = msgspec.structs.replace(config.model, dtype="bfloat16", fetch="smollm2-135m", max_length=128)
    train = msgspec.structs.replace(config.train, activation_checkpointing=case.kind == "ours, recomputed")
    config = msgspec.structs.replace(config, model=model_of, train=train)
    make_missing_model(config)
    shards = [
        random_shard(step, REAL.groups, (REAL.answer, REAL.answer), VOCABULARY, REAL.prompt)
        for step in range(case.steps + 1)
    ]
    seconds: list[float] = []
    if case.kind == "plain":
        model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
        for shard in shards:
            start = time.perf_counter()
            plain_step(model, optimizer, shard, REAL, half=True)
            seconds.append(time.perf_counter() - start)
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        trainer = Trainer(config)
        for shard in shards:
            start = time.perf_counter()
            trainer.train_step(shard)
            seconds.append(time.perf_counter() - start)
        dist.destroy_process_group()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return statistics.median(seconds[1:]), peak / 2**20


def configured(folder: str, steps: int, sizes: Sizes) -> Config:
    """One update per batch; as many tokens at once as the plain loop has."""
    config = step_config("grpo", folder, 2 * steps + 2)
    most = sizes.at_once * (sizes.prompt + sizes.answer)
    size = sizes.groups * GROUP_SIZE
    train = msgspec.structs.replace(config.train, batch_size=size, minibatches=1, max_tokens_per_microbatch=most)
    return msgspec.structs.replace(config, train=train)


def plain_step(model: PreTrainedModel, optimizer: object, shard: Shard, sizes: Sizes, *, half: bool = False) -> None:
    """One step of GRPO by hand."""
    import torch

    trajectories = [sample.trajectory for sample in shard.samples]
    input_BT = torch.from_numpy(np.stack([one.tokens() for one in trajectories]).astype(np.int64))
    old_BA = torch.from_numpy(np.stack([one.behaviour() for one in trajectories]))
    reward_GM = torch.tensor([one.reward for one in trajectories]).view(-1, GROUP_SIZE)
    advantage_B1 = ((reward_GM - reward_GM.mean(1, keepdim=True)) / (reward_GM.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    for rows in range(0, len(input_BT), sizes.at_once):
        part = slice(rows, rows + sizes.at_once)
        answer_BA = input_BT[part, -sizes.answer :]
        with torch.autocast("cpu", torch.bfloat16) if half else nullcontext():
            output = model(input_ids=input_BT[part], use_cache=False, logits_to_keep=sizes.answer + 1)
        logp_BA = output.logits[:, :-1].float().log_softmax(-1).gather(-1, answer_BA[..., None])[..., 0]
        loss = grpo_loss(logp_BA, old_BA[part], advantage_B1[part])
        (loss * (len(answer_BA) / len(input_BT))).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.step()
    optimizer.zero_grad()


def grpo_loss(logp_BA: Tensor, old_BA: Tensor, advantage_B1: Tensor) -> Tensor:
    """The clipped objective, averaged over tokens."""
    ratio_BA = (logp_BA - old_BA).exp()
    unclipped_BA, clipped_BA = ratio_BA * advantage_B1, ratio_BA.clamp(0.8, 1.2) * advantage_B1
    return -unclipped_BA.minimum(clipped_BA).mean()


if __name__ == "__main__":
    main("plain_loop", __doc__ or "", rows)
