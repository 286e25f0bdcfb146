"""A step in several rounds has the gradient and the metrics of a step in one round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from flash.errors import ContractError
from flash.types import Outcome, Shard
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    gradient_of,
    make_config,
    make_shard,
    random_shard,
    relative_error,
    rounds_of,
    train_in_rounds,
    weights_of,
    whole,
)

SIZES = [4, 3, 1, 5]
"""Number of samples of each group of `random_shard` and `aged_shard`: a round for each group."""


# Tables of the configuration, by the name of the case.
CASES: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": {"objective": "grpo"}},
    "dapo": {"algorithm": {"objective": "dapo"}},
    "dr_grpo": {"algorithm": {"objective": "dr_grpo"}},
    "decoupled_ppo": {},
    "tis": {"algorithm": {"objective": "tis"}},
    "topr_weighted": {"algorithm": {"objective": "topr_weighted"}},
    "cispo": {"algorithm": {"objective": "cispo"}},
    "gspo": {"algorithm": {"objective": "gspo"}},
    "rloo": {"algorithm": {"objective": "rloo", "aggregation": "seq_mean_token_sum"}},
    "turns": {"algorithm": {"advantage": "turn"}},
    "mean over sequences": {"algorithm": {"aggregation": "seq_mean_token_mean"}},
    "kl and entropy": {"algorithm": {"kl": {"coefficient": 0.3}, "entropy_bonus": 0.2}},
    "kl in the reward": {"algorithm": {"kl": {"estimator": "k1", "coefficient": 0.3, "place": "reward"}}},
    "corrections": {"algorithm": {"corrections": [{"kind": "icepop", "low": 0.5}, {"kind": "geometric", "low": 0.02}]}},
    "truncated": {"algorithm": {"mask_truncated": True}},
    "lag": {"algorithm": {"lag": {"budget": 8.0}}},
    "lora": {"lora": {"rank": 4}, "algorithm": {"kl": {"coefficient": 0.3}}},
    "passes": {"train": {"updates_per_batch": 2}},
    "minibatches": {"train": {"minibatches": 2}, "algorithm": {"options": {"proximal": "ewma"}}},
    "minibatches and passes": {
        "train": {"minibatches": 2, "updates_per_batch": 2}, "algorithm": {"options": {"proximal": "loglinear"}},
    },
    "small micro-batches": {"train": {"max_tokens_per_microbatch": 40}},
}  # fmt: skip


def make_trainer(model: Path, case: dict[str, Any]) -> Trainer:
    """Return a new trainer of a case, at version 3, which `aged_shard` needs."""
    train = {"async_ratio": 2.0, "stream": True, "max_tokens_per_microbatch": 400} | case.get("train", {})
    algorithm = {"objective": "decoupled_ppo", "lag": None} | case.get("algorithm", {})
    trainer = Trainer(make_config(model, **(case | {"train": train, "algorithm": algorithm})))
    trainer.version = 3
    return trainer


def batch_of(case: dict[str, Any]) -> Shard:
    """Return the batch of a case. If the case masks truncated samples, every third sample is truncated."""
    shard = aged_shard()
    if "mask_truncated" not in case.get("algorithm", {}):
        return shard
    outcomes = [Outcome.OK, Outcome.OK, Outcome.TRUNCATED]
    made = [replace(one.trajectory, outcome=outcomes[one.index % 3]) for one in shard.samples]
    return make_shard(made, step=shard.step, min_version=shard.min_version)


@pytest.mark.parametrize("name", CASES)
def test_rounds_give_the_gradient_and_the_metrics_of_the_whole_batch(tied_model: Path, name: str) -> None:
    case = CASES[name]
    shard, minibatches = batch_of(case), case.get("train", {}).get("minibatches", 1)
    # The rounds of two groups also lie across the bound of the minibatches.
    sizes = [4, 4, 5] if minibatches > 1 else SIZES
    unstreamed, streamed = make_trainer(tied_model, case), make_trainer(tied_model, case)
    expected = unstreamed.train_step(shard)
    found = train_in_rounds(streamed, [shards[0] for shards in rounds_of(shard, sizes, minibatches=minibatches)])
    updates = minibatches * case.get("train", {}).get("updates_per_batch", 1)
    # Adam divides by the size of the gradient, so later updates have larger differences.
    assert relative_error(gradient_of(streamed), gradient_of(unstreamed)) < (1e-6 if updates == 1 else 1e-4)
    expected["shared_token_share"] = found["shared_token_share"]  # a round shares only its own beginnings
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [(one.index, one.uses) for one in streamed.shown] == [(one.index, one.uses) for one in unstreamed.shown]


def test_a_round_without_a_trained_token_changes_nothing(untied_model: Path) -> None:
    shard = random_shard()
    trajectories = [one.trajectory for one in shard.samples]
    rounds = [shards[0] for shards in rounds_of(shard, SIZES)]
    first = replace(rounds[0], samples=[], total_tokens=0, total_sequences=0)
    alone, with_it = (Trainer(make_config(untied_model, train={"stream": True})) for _ in range(2))
    train_in_rounds(with_it, [first, *rounds[1:]])
    rest = make_shard(trajectories[SIZES[0] :])
    alone.train_step(rest)
    assert relative_error(gradient_of(with_it), gradient_of(alone)) < 1e-6


def test_the_gradient_of_a_round_has_the_same_size_after_a_round_without_a_trained_token(untied_model: Path) -> None:
    rounds = [shards[0] for shards in rounds_of(random_shard(), SIZES)]
    first = replace(rounds[0], samples=[], total_tokens=0, total_sequences=0)
    alone, with_it = (Trainer(make_config(untied_model, train={"stream": True})) for _ in range(2))
    alone.train_round(rounds[1])
    for one in (first, rounds[1]):
        with_it.train_round(one)
    # The update divides by the real number of tokens, so this is only seen before it.
    found, expected = (
        {name: whole(parameter.grad) for name, parameter in trainer.model.named_parameters()}
        for trainer in (with_it, alone)
    )
    assert relative_error(found, expected) < 1e-6


def test_a_step_that_is_given_up_leaves_no_gradient(untied_model: Path) -> None:
    shard = random_shard()
    fresh, trainer = (Trainer(make_config(untied_model, train={"stream": True})) for _ in range(2))
    before = weights_of(trainer)
    trainer.train_round(rounds_of(shard, SIZES)[0][0])
    trainer.give_up_step()
    assert all(torch.equal(value, before[name]) for name, value in weights_of(trainer).items())
    assert trainer.train_step(shard) == fresh.train_step(shard)
    assert relative_error(gradient_of(trainer), gradient_of(fresh)) == 0


def test_a_method_that_needs_the_whole_batch_refuses_a_part_of_it(untied_model: Path) -> None:
    trainer = Trainer(make_config(untied_model, train={"stream": True}, algorithm={"advantage": "batch"}))
    with pytest.raises(ContractError, match="advantages are compared over the whole batch"):
        trainer.train_round(rounds_of(random_shard(), SIZES)[0][0])
