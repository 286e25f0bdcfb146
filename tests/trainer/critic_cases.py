"""Cases for the tests of the critic: sequences with returns, and a plain float64 model as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from flash.config.tree import Config
from flash.trainer.critic import Critic, CriticBatch
from flash.trainer.mesh import trainer_mesh
from flash.trainer.packing import DUMMY, MicroBatch
from tests.trainer.trainer_cases import VOCABULARY, make_config, reference_model, whole

WIDTH = 32
"""Hidden size of the tiny model."""


@dataclass(frozen=True)
class Sequenced:
    """A sequence of tokens, and numbers for each of its action tokens (tokens that the policy sampled)."""

    ids: np.ndarray
    """Token ids of the whole sequence."""
    actions: np.ndarray
    """Positions of the action tokens, ascending."""
    mask: np.ndarray
    """bool: True for action tokens that are trained."""
    returns: np.ndarray
    """Regression targets of the values."""
    old: np.ndarray
    """Values at the start of the step."""


def random_sequences(seed: int = 0, lengths: Sequence[int] = (9, 3, 17, 2, 6, 11)) -> list[Sequenced]:
    """Return sequences of these lengths. Some action tokens are masked, and in the third sequence all of them are."""
    rng = np.random.default_rng(seed)
    sequences = []
    for index, length in enumerate(lengths):
        prompt = int(rng.integers(1, max(length // 2, 2)))
        actions = np.array([at for at in range(prompt, length) if at == prompt or rng.random() < 0.8])
        sequences.append(
            Sequenced(
                ids=rng.integers(0, VOCABULARY, length),
                actions=actions,
                mask=(rng.random(len(actions)) < 0.8) & (index != 2),
                returns=rng.normal(0.5, 1.0, len(actions)),
                old=rng.normal(0.3, 0.5, len(actions)),
            )
        )
    return sequences


def micro_of(sequences: Sequence[Sequenced]) -> MicroBatch:
    """Return a micro-batch of these sequences, in this order."""
    lengths = np.array([len(one.ids) for one in sequences])
    offset = np.concatenate([[0], np.cumsum(lengths)])
    counts = [len(one.actions) for one in sequences]
    action = np.concatenate([one.actions + start for one, start in zip(sequences, offset[:-1], strict=True)])
    ids = np.concatenate([one.ids for one in sequences])
    return replace(
        DUMMY,
        input_P=ids,
        position_P=np.concatenate([np.arange(length) for length in lengths]),
        offset_S=offset,
        before_T=action - 1,
        target_T=ids[action],
        mask_T=np.concatenate([one.mask for one in sequences]),
        sequence_T=np.repeat(np.arange(len(sequences)), counts),
    )


def trained(sequences: Sequence[Sequenced]) -> int:
    """Return the number of action tokens that are trained."""
    return sum(int(one.mask.sum()) for one in sequences)


def returns_of(sequences: Sequence[Sequenced]) -> torch.Tensor:
    """Return the targets of all action tokens, sequence by sequence."""
    return torch.from_numpy(np.concatenate([one.returns for one in sequences])).float()


def old_of(sequences: Sequence[Sequenced]) -> torch.Tensor:
    """Return the values of all action tokens at the start of the step, sequence by sequence."""
    return torch.from_numpy(np.concatenate([one.old for one in sequences])).float()


def update(critic: Critic, parts: Sequence[Sequence[Sequenced]], total: int) -> None:
    """Update the critic once on micro-batches with these sequences. An empty part becomes a dummy micro-batch.

    `total` is the number of trained tokens over all ranks.
    """
    nothing = torch.full((1,), torch.nan)
    lessons = [
        CriticBatch(micro_of(part), returns_of(part), old_of(part)) if part else CriticBatch(DUMMY, nothing, nothing)
        for part in parts
    ]
    critic.update(lessons, total)


def critic_config(model: Path, *, train: dict[str, Any] | None = None, **critic: Any) -> Config:
    """Return a configuration with a critic, whose gradient is never clipped unless `train` says so.

    `train` and `critic` replace keys of the tables of these names.
    """
    table = {"learning_rate": 1e-3} | critic
    return make_config(model, critic=table, train=train or {}, algorithm={"objective": "ppo"})


def make_critic(model: Path, **options: Any) -> Critic:
    """Return a critic with a random head, because a head of zeros would hide every error in front of it."""
    critic = Critic(critic_config(model, **options), trainer_mesh("cpu"))
    set_head(critic)
    return critic


def set_head(critic: Critic, seed: int = 3) -> None:
    """Set the weights of the critic's head to `random_head(seed)`, also if they are sharded."""
    weight, bias = random_head(seed)
    for parameter, value in ((critic.model.head.weight, weight), (critic.model.head.bias, bias)):
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.copy_(distribute_tensor(value, parameter.device_mesh, parameter.placements))


def random_head(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random weights [1, WIDTH] and a bias [1] for a value head."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, WIDTH, generator=generator) / WIDTH**0.5, torch.randn(1, generator=generator)


class Reference:
    """Plain Hugging Face model in float64 with a value head; it computes one sequence at a time."""

    def __init__(self, model: Path, seed: int = 3) -> None:
        """Take the backbone of the model in the folder `model`, and the head `random_head(seed)`."""
        self.backbone: Any = reference_model(model).base_model
        weight, bias = random_head(seed)
        self.weight = weight.double().requires_grad_()
        self.bias = bias.double().requires_grad_()

    def values(self, one: Sequenced) -> torch.Tensor:
        """Return V of the state before each action token: the head's value of the preceding token's hidden state."""
        hidden = self.backbone(input_ids=torch.from_numpy(one.ids)[None]).last_hidden_state[0]
        return torch.stack([hidden[at - 1] @ self.weight[0] + self.bias[0] for at in one.actions])

    def loss(self, sequences: Sequence[Sequenced], clip: float | None) -> torch.Tensor:
        """Return the critic's loss, computed from the formula, token by token. `clip` is None for no clip."""
        total = torch.zeros((), dtype=torch.float64)
        for one in sequences:
            for value, target, old, kept in zip(self.values(one), one.returns, one.old, one.mask, strict=True):
                if not kept:
                    continue
                error = (value - target) ** 2
                if clip is not None:
                    near = min(max(value, old - clip), old + clip)
                    error = max(error, (near - target) ** 2)
                total = total + error
        return total / trained(sequences)

    def gradient(self, sequences: Sequence[Sequenced], clip: float | None) -> dict[str, torch.Tensor]:
        """Return the gradient of the loss, by the critic's parameter names."""
        self.loss(sequences, clip).backward()
        named = {f"backbone.{name}": value for name, value in self.backbone.named_parameters()}
        named |= {"head.weight": self.weight, "head.bias": self.bias}
        return {name: value.grad for name, value in named.items() if value.grad is not None}


def critic_gradient(critic: Critic) -> dict[str, torch.Tensor]:
    """Return the gradient of the only update so far, by parameter name.

    Adam's first moment is (1 − β1) times this gradient.
    """
    share = 1 - critic.optimizer.param_groups[0]["betas"][0]
    return {
        name: critic.optimizer.state[parameter]["exp_avg"].full_tensor() / share
        for name, parameter in critic.model.named_parameters()
    }


def critic_weights(critic: Critic) -> dict[str, torch.Tensor]:
    """Return full copies of the critic's weights, by parameter name."""
    return {name: whole(value).clone() for name, value in critic.model.named_parameters()}
