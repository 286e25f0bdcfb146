"""Gloo rank of two: trains, saves and fails as the tests of test_ranks.py need. Each rank writes its results."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from flash.errors import CheckpointError, ContractError
from flash.samples.batches import split_into_shards
from flash.trainer import checkpoint
from flash.trainer.critic import Critic
from flash.trainer.model.canary import canary_logprobs
from flash.trainer.packing import MicroBatch
from flash.types import Batch, Shard
from flash.waiting import run_to_end
from tests.trainer.critic_cases import critic_gradient, set_head
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    forked_shard,
    gradient_of,
    kept,
    make_config,
    part_of,
    random_shard,
    rounds_of,
    train_in_rounds,
    weights_of,
)

CANARY = [3, 1, 4, 1, 5]
"""Token ids of a text whose log-probs are compared."""
EXPERTS = "experts"
"""Name of the folder, beside the model's, of a model with a single expert."""
SPLITS = {
    "even": ([0, 2, 4, 6, 8, 10, 12], [1, 3, 5, 7, 9, 11]),
    "uneven": ([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [12]),
    "all on one": (list(range(13)), []),
    "trees": tuple(
        [sample.index for sample in shard.samples]
        for shard in run_to_end(
            split_into_shards(Batch(0, 0, [one.trajectory for one in forked_shard().samples], []), 2)
        )
    ),
}
"""Indices of the samples of each of the two ranks."""
# A case has tables of the configuration, and: `split` (key of `SPLITS`) or `rounds` (samples of each round), `aged` or
# `trees` (batch of `aged_shard` or of `forked_shard`, else of `random_shard`), `experts` (the model with one expert).
CASES: dict[str, dict[str, Any]] = {
    **{f"{split}, {mode}": {"split": split, "algorithm": {"aggregation": mode}} for split, mode in (
       ("even", "token_mean"), ("uneven", "token_mean"), ("uneven", "seq_mean_token_mean"),
       ("all on one", "seq_mean_token_mean"))},
    "trees": {"split": "trees", "trees": True, "algorithm": {"objective": "ppo"}, "critic": {}},
    "minibatches": {"split": "uneven", "train": {"minibatches": 2}},
    "limit": {"split": "uneven", "aged": True, "algorithm": {"objective": "m2po", "options": {"tau": 0.2}}},
    "whitened": {"split": "uneven", "aged": True, "algorithm": {"objective": "reinforce_pp"}},
    "kl and entropy": {
        "split": "even", "aged": True, "algorithm": {"kl": {"coefficient": 0.3}, "entropy_bonus": 0.2},
        "train": {"minibatches": 2, "activation_checkpointing": True, "offload": ["activations"]},
    },
    "on the host": {
        "split": "uneven", "aged": True, "critic": {},
        "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.3}, "options": {"proximal": "ewma"}},
        "train": {"offload": ["weights"], "activation_checkpointing": True, "max_grad_norm": 0.1},
    },
    "adapters on the host": {
        "split": "uneven", "aged": True, "lora": {"rank": 4}, "train": {"offload": ["weights"], "minibatches": 2},
    },
    "fewer experts than ranks": {"split": "uneven", "experts": True},
    "kl in the reward": {
        "split": "all on one", "aged": True,
        "algorithm": {"advantage": "batch", "kl": {"estimator": "k1", "coefficient": 0.3, "place": "reward"}},
        "train": {"minibatches": 2},
    },
    "teacher": {
        "split": "uneven", "aged": True, "algorithm": {"teacher": {"reward": True}}, "train": {"minibatches": 2},
    },
    "staleness and correction": {
        "split": "uneven", "aged": True,
        "algorithm": {
            "staleness": {"kind": "linear"},
            "corrections": [{"kind": "icepop", "low": 0.01}, {"kind": "geometric", "low": 0.02, "high": 0.2}],
        },
    },
    "lag": {
        "split": "uneven", "aged": True,
        "algorithm": {"lag": {"budget": 8.0}}, "train": {"minibatches": 2},
    },
    "adapters": {
        "split": "uneven", "aged": True, "lora": {"rank": 4}, "algorithm": {"kl": {"coefficient": 0.3}},
        "train": {"minibatches": 2},
    },
    "ewma": {
        "split": "uneven", "aged": True,
        "algorithm": {"options": {"proximal": "ewma"}}, "train": {"minibatches": 2},
    },
    **{
        f"rhythm, {split}": {
            "split": split, "aged": True,
            "algorithm": {"rhythm": {"credit": credit, "nearest": 2, "farthest": 12}},
        }
        for split, credit in (("uneven", "coupled"), ("all on one", "local"), ("even", "global"))
    },
    "rounds, adapters and minibatches": {
        "rounds": [4, 4, 5], "aged": True, "lora": {"rank": 4}, "train": {"minibatches": 2},
        "algorithm": {"options": {"proximal": "ewma"}, "kl": {"coefficient": 0.3}},
    },
    "supervised": {"split": "uneven", "algorithm": {"objective": "algorithms.objectives.reinforce:Supervised"}},
    "critic": {"split": "uneven", "aged": True, "algorithm": {"objective": "ppo"}, "critic": {}},
    "critics": {
        "split": "uneven", "aged": True,
        "algorithm": {"objective": "asyppo", "entropy_bonus": 0.2},
        "critic": {}, "train": {"updates_per_batch": 2},
    },
    "decoupled critics": {
        "split": "all on one", "aged": True,
        "algorithm": {"objective": "asyppo", "options": {"decoupled": True}, "staleness": {"kind": "linear"}},
        "critic": {}, "train": {"minibatches": 2},
    },
}  # fmt: skip


def case_config(model: Path, case: dict[str, Any]) -> Any:
    """Return the configuration of a case. A teacher is the policy's own first model."""
    train = {"learning_rate": 1e-3, "max_grad_norm": 1e9, "max_tokens_per_microbatch": 40, "async_ratio": 2.0}
    train |= {"stream": "rounds" in case}
    tables = {"train": train | case.get("train", {}), "algorithm": case.get("algorithm", {})}
    if "teacher" in tables["algorithm"]:
        tables["algorithm"] = tables["algorithm"] | {"teacher": case["algorithm"]["teacher"] | {"path": str(model)}}
    others = {name: case[name] for name in ("critic", "lora") if name in case}
    return make_config(model.with_name(EXPERTS) if case.get("experts") else model, **tables, **others)


def case_batch(trainer: Trainer, case: dict[str, Any]) -> Shard:
    """Return the case's complete batch. Also sets the trainer's version to the batch's, and different critics."""
    for index, critic in enumerate(trainer.critics):
        set_head(critic, index)
    make = aged_shard if case.get("aged") else forked_shard if case.get("trees") else random_shard
    shard = make()
    trainer.version = shard.step
    return shard


def gradients(model: Path, names: Sequence[str], rank: int) -> dict[str, Any]:
    """Take a step in each of the cases `names`, and return the results by case."""
    results: dict[str, Any] = {}
    for name in names:
        case = CASES[name]
        trainer = Trainer(case_config(model, case))
        batch = case_batch(trainer, case)
        if "rounds" in case:
            minibatches = case.get("train", {}).get("minibatches", 1)
            metrics = train_in_rounds(
                trainer, [shards[rank] for shards in rounds_of(batch, case["rounds"], 2, minibatches)]
            )
        else:
            metrics = trainer.train_step(part_of(batch, SPLITS[case["split"]][rank]))
        results[name] = {
            "metrics": metrics,
            "gradient": gradient_of(trainer),
            "weights": weights_of(trainer),
            "critics": [critic_gradient(critic) for critic in trainer.critics],
            "seen": trainer.shown,
        }
        results["canary"] = canary_logprobs(trainer.model, CANARY)  # after the loop: of the last case
    return results


def refused(trainer: Trainer, rank: int) -> str:
    """Train with a part that is invalid only on rank 1. Returns the error."""
    shard = part_of(random_shard(), SPLITS["even"][rank])
    if rank == 1:
        spoilt = msgspec.structs.replace(shard.samples[0].trajectory, logprobs=b"")
        shard = msgspec.structs.replace(
            shard, samples=[msgspec.structs.replace(shard.samples[0], trajectory=spoilt), *shard.samples[1:]]
        )
    try:
        trainer.train_step(shard)
    except ContractError as error:
        return str(error)
    return ""


class Spoilt(Critic):
    """Critic whose values are NaN."""

    def values(self, micro: MicroBatch) -> torch.Tensor:
        """Return NaN for each action token."""
        return super().values(micro) * torch.nan


def spoilt_values(model: Path, rank: int) -> str:
    """Train with critic values that are NaN only on rank 1. Returns the error."""
    case = CASES["critic"]
    trainer = Trainer(case_config(model, case))
    if rank == 1:
        trainer.critics[0].__class__ = Spoilt
    try:
        trainer.train_step(part_of(case_batch(trainer, case), SPLITS["even"][rank]))
    except ContractError as error:
        return str(error)
    return ""


def failed_save(trainer: Trainer, run_dir: Path, rank: int) -> str:
    """Save a checkpoint that only rank 1 cannot write. Returns the error."""
    trainer.version += 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        checkpoint.save(run_dir, trainer, kept(b"hub"), keep=2)
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def main(model: Path, folder: Path, names: Sequence[str], rank: int) -> None:
    """Run rank 0 or 1 through the cases `names`, failures and checkpoints, and write its results to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    results = gradients(model, names, rank)
    trainer = Trainer(case_config(model, {}))
    results["spoilt values"] = spoilt_values(model, rank)
    results["refused"] = refused(trainer, rank)
    trainer.train_step(part_of(random_shard(), SPLITS["uneven"][rank]))
    checkpoint.save(folder, trainer, kept(b"hub"), keep=2)
    results["saved"] = weights_of(trainer)
    restored = Trainer(case_config(model, {"train": {"offload": ["weights"]}}))
    checkpoint.load(folder / "checkpoints" / "step-000001", restored)
    results["restored"] = weights_of(restored)
    muon = Trainer(case_config(model, {"train": {"optimizer": "muon", "offload": ["weights"]}}))
    muon.train_step(part_of(random_shard(), SPLITS["uneven"][rank]))
    results["muon"] = weights_of(muon)
    results["failed save"] = failed_save(trainer, folder, rank)
    torch.save(results, folder / f"results-{rank}.pt")
    dist.destroy_process_group()
