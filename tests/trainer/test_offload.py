"""Offloading: steps with weights, gradients and moments on the host, by FSDP's own policy, change no result.

two_ranks.py and parallel_ranks.py test several ranks. On the CPU, weights are on the host anyway, so card_ranks.py
takes the same step on another device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from flash.trainer import checkpoint
from flash.trainer.mesh import process_group_backend, trainer_mesh
from flash.trainer.model.model import named_full_tensors
from tests.trainer import card_ranks
from tests.trainer.critic_cases import set_head
from tests.trainer.trainer_cases import (
    Trainer,
    aged_shard,
    kept,
    make_config,
    moments_of,
    run_ranks,
    weights_of,
    whole,
    write_model,
)

STEP = 3
"""Version that the first step of a test trains."""
HOST: dict[str, Any] = {"offload": ["weights"]}
"""Options of `[train]` that keep weights, gradients and moments on the host."""
CASES: dict[str, dict[str, Any]] = {
    "clipped, run again": {"train": {"max_grad_norm": 0.1, "activation_checkpointing": True}},
    "critic, reference and average": {
        "algorithm": {
            "objective": "decoupled_ppo", "options": {"proximal": "ewma"}, "advantage": "gae",
            "kl": {"coefficient": 0.3, "refresh": 1},
        },
        "critic": {},
        "train": {"minibatches": 2},
    },
    "adapters in bfloat16": {
        "lora": {"rank": 4}, "model": {"dtype": "bfloat16"}, "algorithm": {"kl": {"coefficient": 0.3}},
    },
    "the model in bfloat16": {"model": {"dtype": "bfloat16"}},
    "muon": {"train": {"optimizer": "muon"}},
}  # fmt: skip


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the tables of each case in turn."""
    return CASES[request.param]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return the folder of a model of this test alone, whose checkpoints lie beside it."""
    return write_model(tmp_path / "model", tied=True)


def trainer_of(model: Path, case: dict[str, Any], **how: Any) -> Trainer:
    """Return a new trainer of a case, at version `STEP`. `how` are options of `[train]`."""
    train = {"async_ratio": 2.0, "max_tokens_per_microbatch": 40} | case.get("train", {}) | how
    trainer = Trainer(make_config(model, **case | {"train": train}))
    for critic in trainer.critics:
        set_head(critic)
    trainer.version = STEP
    return trainer


def models_of(trainer: Trainer) -> list[nn.Module]:
    """Return the policy, the reference and the critics of a trainer."""
    beside = [] if trainer.reference is None else [trainer.reference]
    return [trainer.model, *beside, *(critic.model for critic in trainer.critics)]


def parts_of(model: nn.Module) -> list[Any]:
    """Return FSDP's state of each weight."""
    groups: list[Any] = [one for one in model.modules() if isinstance(one, FSDPModule)]
    return [part for one in groups for part in one._get_fsdp_state()._fsdp_param_group.fsdp_params]


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Return all trained tensors, the optimizers' states, and the averages of weights."""
    weights = [whole(one) for model in models_of(trainer) for one in model.parameters()]
    optimizers = [trainer.optimizer, *(critic.optimizer for critic in trainer.critics)]
    kept = [one for optimizer in optimizers for state in optimizer.state.values() for one in state.values()]
    return [*weights, *kept, *(trainer.average or {}).values()]


@pytest.mark.slow
def test_steps_equal_those_with_weights_on_the_device(model: Path, case: dict[str, Any]) -> None:
    plain, host = trainer_of(model, case), trainer_of(model, case, **HOST)
    for step in (STEP, STEP + 1):
        expected, found = (one.train_step(aged_shard(step, step)) for one in (plain, host))
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    for mine, other in zip(state_of(host), state_of(plain), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_weights_are_copied_to_the_device_only_while_their_layer_runs(model: Path) -> None:
    case = CASES["critic, reference and average"]
    plain, host = trainer_of(model, case), trainer_of(model, case, **HOST)
    assert not any(part.offload_to_cpu for one in models_of(plain) for part in parts_of(one))
    assert len(models_of(host)) == 3
    for one in models_of(host):
        assert len(parts_of(one)) >= len([*one.parameters()])
        assert all(part.offload_to_cpu for part in parts_of(one))
    gathered: list[int] = []
    first, second = (host.model.get_submodule(f"model.layers.{layer}") for layer in (0, 1))

    def look(*_: Any) -> None:
        # Before each layer runs, note the bytes of the gathered weights of the first layer.
        gathered.append(sum(one.untyped_storage().size() for one in parts_of(first)[0].all_gather_outputs))

    first.mlp.register_forward_pre_hook(look)
    second.mlp.register_forward_pre_hook(look)
    host.train_step(aged_shard(STEP, STEP))
    assert gathered[::2]
    assert 0 not in gathered[::2]
    assert not any(gathered[1::2])


def test_a_gpu_reads_pinned_memory_and_gloo_reduces_norms_on_the_host() -> None:
    mesh = trainer_mesh("cpu", offloads=True)
    assert (mesh.weight_device, trainer_mesh("cpu").weight_device) == ("cpu", "cpu")
    on_gpu = type(mesh)(torch.device("cuda"), mesh.parallel, mesh.fsdp, mesh.data, offloads=True)
    assert on_gpu.weight_device == "cpu"
    assert isinstance(on_gpu.offload_policy, CPUOffloadPolicy)
    assert on_gpu.offload_policy.pin_memory
    assert process_group_backend(cuda=True, offloads=True) == "cpu:gloo,cuda:nccl"
    assert (process_group_backend(cuda=True, offloads=False), process_group_backend(cuda=False, offloads=True)) == (
        "nccl",
        "gloo",
    )


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [{}, HOST], ids=["with weights on the device", "on the host"])
def test_a_run_resumes_from_a_checkpoint_of_weights_on_the_host(model: Path, resumed: dict[str, Any]) -> None:
    case = CASES["critic, reference and average"]
    host, other = trainer_of(model, case, **HOST), trainer_of(model, case, **resumed)
    host.train_step(aged_shard(STEP, STEP))
    other.train_step(aged_shard(9, STEP))
    checkpoint.load(checkpoint.save(model.parent, host, kept(b"hub"), keep=1), other)
    assert all(map(torch.equal, state_of(other), state_of(host)))
    assert weights_of(other).keys() == dict(named_full_tensors(host.model)).keys()
    step = STEP + 1
    expected = host.train_step(aged_shard(step, step))
    assert other.train_step(aged_shard(step, step)) == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert moments_of(other).keys() == moments_of(host).keys()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("ranks", "layers", "tables"),
    [
        (2, 6, {}),  # more layers than a plan runs
        (2, 4, {"lora": {"rank": 4}}),
        (1, 4, {"train": {"optimizer": "muon"}}),
    ],
    ids=["two", "two, adapters", "one, muon"],
)
def test_a_device_holds_only_the_layers_that_run(
    tmp_path: Path, ranks: int, layers: int, tables: dict[str, Any]
) -> None:
    wide = write_model(tmp_path / "wide", tied=True, num_hidden_layers=layers, hidden_size=64, intermediate_size=256)
    train = {"max_tokens_per_microbatch": 128} | tables.get("train", {})
    seen: list[dict[str, Any]] = []
    for how in ({}, HOST):
        whole = tables | {"model": {"dtype": "bfloat16"}, "train": train | how}
        run_ranks(card_ranks.main, 1, wide, whole, ranks, how is HOST)
        seen.append(torch.load(wide / "seen.pt"))
    plain, host = seen
    assert host["with gradients"] == host["trained"] > 0
    assert (host["computed on"], host["published on"], host["kept on"]) == ({"card"}, {"card"}, {"cpu"})
    assert plain["waiting"] > 0.9 * plain["weights"]
    assert host["waiting"] < 100, "buffers"
    assert host["most"] < plain["most"] - plain["waiting"]
    assert host["most"] == pytest.approx(host["planned"], rel=0.1)
