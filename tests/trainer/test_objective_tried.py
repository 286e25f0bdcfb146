"""An objective is tried on a few tokens before anything starts."""

from __future__ import annotations

import pytest
import torch

from algorithms import OBJECTIVES
from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from flash.config.learning import AlgorithmConfig
from flash.errors import ConfigError
from flash.trainer.objective import try_objective


class Raises(Objective, frozen=True):
    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        raise RuntimeError("size mismatch")


class OneNumber(Objective, frozen=True):
    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput(tokens.logp_T.mean(), {})


class Constant(Objective, frozen=True):
    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput(tokens.advantage_T, {})


class BadGradient(Objective, frozen=True):
    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput((tokens.logp_T - tokens.logp_T.detach()).sqrt(), {})


class MaskedNan(Objective, frozen=True):
    """Only what is trained counts."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput(torch.where(tokens.mask_T, -tokens.logp_T, torch.nan), {})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_passes(name: str) -> None:
    try_objective(AlgorithmConfig(objective=name))


def test_masked_slots_may_hold_anything() -> None:
    try_objective(AlgorithmConfig(objective=f"{__name__}:MaskedNan"))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Raises, r"Raises raised RuntimeError: size mismatch \(.*test_objective_tried.py, line \d+\)"),
        (OneNumber, r"with one number per token, shape \(8,\), but returned loss_T of shape \(\)"),
        (Constant, "does not depend on tokens.logp_T"),
        (BadGradient, "gives a gradient of inf on ordinary tokens"),
    ],
)
def test_one_that_cannot_work_is_refused_with_its_name(kind: type[Objective], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        try_objective(AlgorithmConfig(objective=f"{__name__}:{kind.__name__}"))
