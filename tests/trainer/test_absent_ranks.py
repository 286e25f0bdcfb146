"""Layouts of 64 and 512 ranks: their groups, the collectives in them, and the published weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from flash.config.tree import ParallelConfig
from tests.trainer import absent_ranks
from tests.trainer.absent_ranks import CASES, WHOLE, Seen, Told
from tests.trainer.packed_cases import tiny
from tests.trainer.trainer_cases import run_ranks

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

SIZES = {"num_attention_heads": 8, "num_key_value_heads": 8, "intermediate_size": 64, "moe_intermediate_size": 64}
EXPERTS = {"num_experts": 16, "num_local_experts": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model of each kind."""
    folder = tmp_path_factory.mktemp("absent")
    for kind in ("qwen3", "qwen3_moe"):
        tiny(kind, tie_word_embeddings=False, **SIZES | EXPERTS).save_pretrained(folder / kind)
    return folder


@pytest.fixture(scope="module")
def seen(folder: Path) -> Callable[[str], dict[int, Seen]]:
    """Return a function that runs the ranks of a case and returns their results."""

    @cache
    def of(name: str) -> dict[int, Seen]:
        # Run each rank of the case in a process of its own, once for all tests.
        some = CASES[name].some
        run_ranks(absent_ranks.main, len(some), folder, name)
        files = [folder / f"{name}-{index}.pt" for index in range(len(some))]
        return {rank: torch.load(file, weights_only=False) for rank, file in zip(some, files, strict=True)}

    return of


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_in_the_grids_of_their_layout(name: str, seen: Callable[[str], dict[int, Seen]]) -> None:
    case, parallel = CASES[name], ParallelConfig(**CASES[name].parallel)
    cube = np.arange(case.ranks).reshape(-1, parallel.context, parallel.tensor)
    plane = np.arange(case.ranks).reshape(-1, parallel.expert)
    for rank, of_rank in seen(name).items():
        shard, place, part = np.argwhere(cube == rank)[0]
        row, column = np.argwhere(plane == rank)[0]
        expected = {"fsdp": cube[:, :, part].ravel(), "data": cube[:, place, part]}
        if parallel.tensor > 1:
            expected["tensor"] = cube[shard, place]
        if parallel.context > 1:
            expected["context"] = cube[shard, :, part]
        if parallel.expert > 1:
            expected |= {"expert": plane[row], "like experts": plane[:, column]}
        assert of_rank.groups == {one: tuple(ranks.tolist()) for one, ranks in expected.items()}


@pytest.mark.parametrize("name", CASES)
def test_ranks_of_a_group_make_the_same_collectives_in_the_same_order(
    name: str, seen: Callable[[str], dict[int, Seen]]
) -> None:
    """Otherwise ranks would wait for each other forever, or read data that is meant for another call."""
    ranks = seen(name)

    def between(one: int, other: int) -> list[Told]:
        # Return the collectives of rank `one` in which rank `other` takes part.
        return [told for told in ranks[one].heard if other in told.group]

    for one in ranks:
        assert between(one, one) == ranks[one].heard
        for other in ranks:
            assert between(one, other) == between(other, one)
    used = {told.group for told in ranks[0].heard}
    assert used >= {group for grid, group in ranks[0].groups.items() if grid != "data" and len(group) > 1}


@pytest.mark.parametrize("name", CASES)
def test_every_rank_has_a_gradient_of_its_part_and_gathers_whole_tensors(
    name: str, seen: Callable[[str], dict[int, Seen]]
) -> None:
    for of_rank in seen(name).values():
        assert of_rank.ungiven == []
        assert of_rank.published == of_rank.expected


def test_the_first_of_many_ranks_takes_a_step_with_every_part_of_a_step(folder: Path) -> None:
    run_ranks(absent_ranks.main_whole, len(WHOLE), folder)
    for index, case in enumerate(WHOLE.values()):
        metrics = torch.load(folder / f"whole-{index}.pt", weights_only=False)
        assert metrics["skipped_steps"] == metrics["critic_skipped"] == 0
        assert metrics["tokens"] % (case.ranks // ParallelConfig(**case.parallel).ranks_per_shard) == 0
        assert {"kl_reference", "critic_loss"} <= metrics.keys()
