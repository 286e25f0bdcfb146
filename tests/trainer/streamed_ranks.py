"""Gloo rank that trains a batch as a whole and again in rounds, for test_streamed_ranks.py. It writes its results."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from msgspec.structs import replace

from flash.sampling import Routes
from flash.types import Shard, ShardSample, Trajectory
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    branched_shard,
    forked_shard,
    gradient_of,
    make_config,
    make_shard,
    partly_kept,
    rounds_of,
    train_in_rounds,
    weights_of,
)

RANKS = 4
"""Number of ranks that train each case."""
DENSE, OTHER, EXPERTS = "dense", "other", "experts"
"""Folders of the models: two of the same kind with different weights, and a mixture of experts."""
UNEVEN = [4, 3, 1, 5]
"""Samples of each round of `aged_shard`: a round for each group. The round of one sample leaves most ranks nothing."""


def by_group(shard: Shard) -> Shard:
    """Return the shard with its samples in the order of their groups."""
    ordered = sorted((one.trajectory for one in shard.samples), key=lambda one: one.task.group_id)
    return make_shard(ordered, step=shard.step, min_version=shard.min_version)


def continued_shard() -> Shard:
    """Return `aged_shard` without the first two samples of its last group, which an earlier step has trained.

    The last group has the indices 8 to 12.
    """
    shard = aged_shard()
    later = make_shard(
        [one.trajectory for one in shard.samples if one.index not in (8, 9)],
        step=shard.step,
        min_version=shard.min_version,
    )
    return replace(later, earlier=shard.batch[8:10])


def routed_shard() -> Shard:
    """Return `branched_shard` with the experts of each token, as an engine reports them; some samples have none."""
    shard = branched_shard()
    routed: list[Trajectory] = []
    for one in shard.samples:
        ends = (*one.trajectory.branches, one.trajectory.length)
        tokens = one.trajectory.tokens()
        experts = [experts_after(tokens[begin : at + 1]) for begin, end in pairwise(ends) for at in range(begin, end)]
        routed.append(replace(one.trajectory, routes=Routes.of(np.stack(experts)) if one.index % 3 else None))
    return replace(shard, samples=[ShardSample(index, one) for index, one in enumerate(routed)])


def experts_after(tokens: np.ndarray) -> np.ndarray:
    """Return [layers, experts of a token] for the last of these tokens. Equal beginnings have equal experts."""
    rng = np.random.default_rng(zlib.crc32(tokens.tobytes()))
    return np.stack([rng.permutation(4)[:2] for _ in range(2)])


class Case(NamedTuple):
    """A step that is trained in rounds: its settings, its model and its batch."""

    tables: dict[str, dict[str, Any]]
    """Tables of the configuration."""
    model: str = DENSE
    """Folder of the policy's model."""
    shard: Callable[[], Shard] = aged_shard
    """Function that makes the whole batch."""
    rounds: list[int] = UNEVEN
    """Number of samples of each round."""


# Options of the cases below. With replay, the trainer uses the experts that the engine reported.
REPLAY = {"rollout": {"routing_replay": True}}
AVERAGE = {"options": {"proximal": "ewma"}}
"""Proximal policy with which minibatches can be streamed."""
CASES = {
    "corrections": Case({"algorithm": {"corrections": [{"kind": "icepop", "low": 0.5}]}}),
    "minibatches": Case({"train": {"minibatches": 2}, "algorithm": AVERAGE}, rounds=[4, 4, 5]),
    "passes, on the host": Case(
        {"train": {"updates_per_batch": 2, "offload": ["weights"], "activation_checkpointing": True}}
    ),
    "adapters": Case({"lora": {"rank": 4}, "algorithm": {"kl": {"coefficient": 0.3}}}),
    "teacher and reference": Case(
        {
            "algorithm": {
                "teacher": {"reward": True, "path": OTHER},
                # The estimator k3 has an exponential function, which would enlarge rounding errors.
                "kl": {"estimator": "k2", "coefficient": 0.3, "reference": OTHER},
            }
        }
    ),
    "branches": Case({"algorithm": {"advantage": "turn"}}, shard=lambda: by_group(forked_shard()), rounds=[6, 4, 1]),
    "a group that an earlier step has begun": Case({}, shard=continued_shard, rounds=[4, 3, 4]),
    "routing replay": Case(REPLAY, EXPERTS, routed_shard, [4, 4]),
    "tensor": Case({"parallel": {"tensor": 2}}),
    "context, with kept sets": Case({"parallel": {"context": 2}}, shard=lambda: partly_kept(aged_shard())),
    "expert": Case({"parallel": {"expert": 2}}, EXPERTS),
    "all": Case({"parallel": {"tensor": 2, "context": 2, "expert": 2}} | REPLAY, EXPERTS, routed_shard, [4, 4]),
}
"""Steps of four ranks. In a layout, fewer data shards are left, each of several ranks."""


def updates(case: Case) -> int:
    """Return the number of updates in the case's step."""
    train = case.tables.get("train", {})
    return train.get("minibatches", 1) * train.get("updates_per_batch", 1)


def trainer_of(folder: Path, case: Case) -> Trainer:
    """Return a new trainer of a case, at the version that the step trains."""
    tables = dict(case.tables)
    tables["train"] = {"async_ratio": 2.0, "stream": True, "max_tokens_per_microbatch": 40} | tables.get("train", {})
    algorithm = dict(tables.get("algorithm", {}))
    for table, key in (("teacher", "path"), ("kl", "reference")):
        if key in algorithm.get(table, {}):
            algorithm[table] = algorithm[table] | {key: str(folder / algorithm[table][key])}
    trainer = Trainer(make_config(folder / case.model, **tables | {"algorithm": algorithm}))
    trainer.version = case.shard().step
    return trainer


def main(folder: Path, rank: int) -> None:
    """Run one of `RANKS` ranks. It writes its results, by case and by "whole" or "rounds", to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=timedelta(seconds=60)
    )
    results: dict[tuple[str, str], Any] = {}
    for name, case in CASES.items():
        shard, minibatches = case.shard(), case.tables.get("train", {}).get("minibatches", 1)
        for way, sizes in (("whole", []), ("rounds", case.rounds)):
            trainer = trainer_of(folder, case)
            rounds = rounds_of(shard, sizes, trainer.mesh.data_shards, minibatches)
            mine = [shards[trainer.mesh.data_shard] for shards in rounds]
            results[name, way] = {
                "metrics": train_in_rounds(trainer, mine),
                "gradient": gradient_of(trainer),
                "weights": weights_of(trainer),
                "samples": [len(one.samples) for one in mine],
            }
    torch.save(results, folder / f"results-{rank}.pt")
    dist.destroy_process_group()
