from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.real.objective_cost import (
    GROUP_SIZE,
    GROUPS,
    StepCase,
    apart,
    in_chunks,
    over_whole_logits,
    random_shard,
    step_costs,
)


def test_both_ways_compute_the_same() -> None:
    target_T = torch.randint(0, 11, (5,), generator=torch.Generator().manual_seed(1))
    found: list[tuple[Tensor, ...]] = []
    for way in (in_chunks, over_whole_logits):
        generator = torch.Generator().manual_seed(0)
        hidden_TD, weight_VD = (torch.randn(rows, 4, generator=generator).requires_grad_() for rows in (5, 11))
        logp_T, entropy_T = way(hidden_TD, weight_VD, target_T)
        assert not entropy_T.requires_grad
        (logp_T @ torch.arange(5.0)).backward()
        assert hidden_TD.grad is not None
        assert weight_VD.grad is not None
        found.append((logp_T.detach(), entropy_T, hidden_TD.grad, weight_VD.grad))
    torch.testing.assert_close(found[0], found[1])


def test_the_batch_keeps_the_counts_and_the_ages_that_it_states() -> None:
    shard = random_shard(3)
    assert len(shard.samples) == len(shard.batch) == GROUPS * GROUP_SIZE
    assert sum(sample.trajectory.trained_tokens(shard.min_version) for sample in shard.samples) == shard.total_tokens
    assert {entry.oldest_version for entry in shard.batch} == {2}


@pytest.mark.integration
def test_the_parts_of_a_step_add_up_with_and_without_a_critic() -> None:
    costs = apart(step_costs, StepCase(["grpo", "ppo"], steps=1, groups=2))
    assert list(costs) == ["grpo", "ppo"]
    for cost in costs.values():
        parts = (cost.model_s, cost.objective_s, cost.optimizer_s, cost.rest_s)
        assert all(part > 0 for part in parts)
        assert cost.objective_s < cost.model_s
