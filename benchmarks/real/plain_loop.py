"""A training step beside the loop that one would write by hand with transformers, on the same tokens.

512 sequences of 12 + 16 tokens, a model of 1.05 million parameters, `grpo`, one update per batch. The plain loop pads
nothing, since all are of one length: model, log-softmax, the clipped objective, backward, clip, AdamW. Ours does what a
run does: it checks and packs the shard, takes the same gradient over packed sequences under FSDP2, and gathers
statistics. The two take turns in one process, on one thread, in processor time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from benchmarks.form import Args, Row, main
from benchmarks.real.objective_cost import PROMPT, apart, make_tiny_model, random_shard, step_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from flash.types import Shard

GROUPS, GROUP_SIZE = 64, 8
ANSWER = 16
"""Tokens of each answer: no padding, which is the plain loop's best case."""
LAYERS = 4
AT_ONCE = 256
"""Sequences of one forward pass, as many as fit into one of ours: all at once is slower."""
GOAL = 1.05


class Case(msgspec.Struct, frozen=True):
    """How often both are measured."""

    steps: int


def rows(args: Args) -> list[Row]:
    """Median times of a step, and their ratio."""
    ours, plain = apart(measure, Case(2 if args.quick else 9))
    case = f"step, grpo, {GROUPS * GROUP_SIZE} × {PROMPT + ANSWER} tokens, against a plain loop"
    return [
        Row(case, "step_ms", "ms", 1e3 * ours, 1e3 * plain),
        Row(case, "ratio_to_plain_s", "×", ours / plain, None, GOAL),
    ]


def measure(case: Case) -> tuple[float, float]:
    """Seconds of processor time of our step and of the plain one. Makes a process group."""
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
        config = step_config("grpo", folder, 2 * case.steps + 2)
        replace = msgspec.structs.replace
        config = replace(config, train=replace(config.train, batch_size=GROUPS * GROUP_SIZE, minibatches=1))
        trainer = Trainer(config)
        model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    ours: list[float] = []
    plain: list[float] = []
    for step in range(case.steps + 1):
        shard = random_shard(step, GROUPS, (ANSWER, ANSWER))
        start = time.process_time()
        trainer.train_step(shard)
        middle = time.process_time()
        plain_step(model, optimizer, shard)
        ours.append(middle - start)
        plain.append(time.process_time() - middle)
    dist.destroy_process_group()
    return statistics.median(ours[1:]), statistics.median(plain[1:])


def plain_step(model: PreTrainedModel, optimizer: object, shard: Shard) -> None:
    """One step of GRPO by hand."""
    import torch

    trajectories = [sample.trajectory for sample in shard.samples]
    input_BT = torch.from_numpy(np.stack([one.tokens() for one in trajectories]).astype(np.int64))
    old_BA = torch.from_numpy(np.stack([one.behaviour() for one in trajectories]))
    reward_GM = torch.tensor([one.reward for one in trajectories]).view(-1, GROUP_SIZE)
    advantage_B1 = ((reward_GM - reward_GM.mean(1, keepdim=True)) / (reward_GM.std(1, keepdim=True) + 1e-6)).view(-1, 1)
    for rows in range(0, len(input_BT), AT_ONCE):
        part = slice(rows, rows + AT_ONCE)
        answer_BA = input_BT[part, -ANSWER:]
        logits_BAV = model(input_ids=input_BT[part], use_cache=False, logits_to_keep=ANSWER + 1).logits[:, :-1]
        logp_BA = logits_BAV.float().log_softmax(-1).gather(-1, answer_BA[..., None])[..., 0]
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
