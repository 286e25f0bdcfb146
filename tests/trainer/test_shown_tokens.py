"""Reports of single tokens by a step, against loops over samples and tokens in float64."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flash.branches import branch_tokens, split_branches
from flash.types import Shard, TokenUse, TrainedSample, VersionRun
from tests.branching import joined
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    branched_shard,
    make_config,
    make_shard,
    make_trajectory,
    reference_model,
    trainer_at,
)


def floats(values: bytes) -> np.ndarray:
    """Return the float32 numbers of a field of `TrainedSample`."""
    return np.frombuffer(values, "<f4")


def naive(model: Path, shard: Shard, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Return log-prob and entropy of each action token. Each branch goes alone through the plain model."""
    reference, logprobs, entropies = reference_model(model), list[float](), list[float]()
    for branch in split_branches(shard.samples[index].trajectory):
        ids = torch.tensor(branch.tokens().tolist())
        with torch.no_grad():
            rows = reference(input_ids=ids[None]).logits[0].log_softmax(-1)
        for place in np.flatnonzero(branch.action_mask()).tolist():
            logprobs.append(rows[place - 1, ids[place]].item())
            entropies.append(-(rows[place - 1].exp() * rows[place - 1]).sum().item())
    return np.array(logprobs), np.array(entropies)


@pytest.mark.parametrize("updates", [1, 2])
def test_tokens_of_the_first_trained_samples_are_shown_with_all_their_branches(tied_model: Path, updates: int) -> None:
    trajectories = [one.trajectory for one in branched_shard().samples]
    rng = np.random.default_rng(1)
    parts = [make_trajectory(0, 1, [VersionRun(version, 4)], rng, reward=0.5) for version in (2, 1, 3)]
    trajectories[1] = joined(parts)
    shard = make_shard(trajectories, step=3, min_version=2)
    trainer = trainer_at(
        3,
        tied_model,
        run={"log_samples": 5},
        algorithm={"objective": "grpo", "advantage": "group_mean"},
        train={"async_ratio": 1.0, "minibatches": 2, "updates_per_batch": updates},
    )
    trainer.train_step(shard)
    trained = [one.index for one in shard.samples if one.trajectory.trained_tokens(2) > 0]
    assert [seen.index for seen in trainer.shown] == trained[:5]
    assert trained[:5] != list(range(5)), "one has nothing to train"
    without = 0
    for seen in trainer.shown:
        trajectory = shard.samples[seen.index].trajectory
        mask = trajectory.action_versions() >= 2
        part_of_one = np.repeat(
            [one.trained_tokens(2) > 0 for one in split_branches(trajectory)], branch_tokens(trajectory)
        )
        without += int((~part_of_one).any())
        logprobs, entropies = naive(tied_model, shard, seen.index)
        # The second minibatch is computed after the first has changed the weights.
        exact = shard.batch[seen.index].group_id == 0
        tolerance = 1e-4 if exact else 0.5
        assert floats(seen.logprobs)[part_of_one] == pytest.approx(logprobs[part_of_one], abs=tolerance)
        assert floats(seen.entropies)[part_of_one] == pytest.approx(entropies[part_of_one], abs=tolerance)
        assert np.isnan(floats(seen.logprobs)[~part_of_one]).all()
        group = [one.reward for one in shard.batch if one.group_id == shard.batch[seen.index].group_id]
        advantage = shard.batch[seen.index].reward - np.mean(group)
        assert floats(seen.advantages)[mask] == pytest.approx(advantage, abs=1e-5)
        assert np.isnan(floats(seen.advantages)[~mask]).all()
        assert ((np.frombuffer(seen.uses, np.uint8) == TokenUse.TOO_OLD) == ~mask).all()
    assert without == 1, "a branch has nothing to train"


@pytest.mark.parametrize(
    ("corrections", "use", "metric"),
    [
        ([], TokenUse.CLIPPED, "clip_fraction"),
        ([{"kind": "icepop", "low": 0.2, "high": 3.0}], TokenUse.REJECTED, "masked_correction_share"),
        ([{"kind": "geometric", "low": 0.02, "high": 0.2}], TokenUse.REJECTED, "masked_correction_share"),
    ],
)
def test_clipped_and_rejected_tokens_are_marked(
    tied_model: Path, corrections: list[dict[str, Any]], use: TokenUse, metric: str
) -> None:
    shard = aged_shard()
    options = {"objective": "grpo", "corrections": corrections}
    trainer = trainer_at(3, tied_model, run={"log_samples": 99}, algorithm=options, train={"async_ratio": 2.0})
    metrics = trainer.train_step(shard)
    uses = joined_uses(trainer.shown)
    trained = int((uses != TokenUse.TOO_OLD).sum())
    assert trained == shard.total_tokens
    assert int((uses == use).sum()) / trained == pytest.approx(metrics[metric], abs=1e-6)
    assert 0 < metrics[metric] < 1


def test_a_minibatch_without_a_trained_token_does_not_change_shown_samples(tied_model: Path) -> None:
    rng = np.random.default_rng(2)
    parts = [
        make_trajectory(group, member, [VersionRun(version, 3)], rng, reward=member)
        for group, version in ((0, 3), (1, 0))
        for member in (0, 1)
    ]
    shard = make_shard(parts, step=3, min_version=2)
    trainer = trainer_at(3, tied_model, train={"async_ratio": 1.0, "minibatches": 2})
    trainer.train_step(shard)
    seen = trainer.shown[0]
    assert seen.index == 0
    assert floats(seen.logprobs) == pytest.approx(naive(tied_model, shard, 0)[0], abs=1e-4)
    assert np.isfinite(floats(seen.advantages)).all()


def joined_uses(seen: Sequence[TrainedSample]) -> np.ndarray:
    """Return the use of each token of all shown samples."""
    return np.frombuffer(b"".join(one.uses for one in seen), np.uint8)


def test_a_run_that_shows_no_samples_gets_none(tied_model: Path) -> None:
    trainer = Trainer(make_config(tied_model, run={"log_samples": 0}, train={"async_ratio": 2.0}))
    trainer.version = 3
    trainer.train_step(aged_shard())
    assert trainer.shown == []
