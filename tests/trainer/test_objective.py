"""An objective is tried on a few tokens before anything else starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from algorithms import OBJECTIVES
from algorithms.base import Objective, ObjectiveOutput, PackedTokens
from flash.errors import ConfigError
from flash.trainer.objective import try_objective
from tests.trainer.trainer_cases import make_config


class Raises(Objective, frozen=True):
    """Objective with a bug that raises."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        raise RuntimeError("size mismatch")


class Interrupted(Objective, frozen=True):
    """Objective during whose first call the user presses Ctrl-C."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        raise KeyboardInterrupt


class OneNumber(Objective, frozen=True):
    """Objective that returns its mean loss in place of a loss per token."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput(tokens.logp_T.mean(), {})


class Constant(Objective, frozen=True):
    """Objective whose loss does not depend on the policy."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput(tokens.advantage_T, {})


class BadGradient(Objective, frozen=True):
    """Objective with a finite loss and an infinite gradient: the square root at 0."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput((tokens.logp_T - tokens.logp_T.detach()).sqrt(), {})


class Blind(Objective, frozen=True):
    """Plain policy gradient that fails to declare that it does not correct for old samples."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput(-tokens.advantage_T * tokens.logp_T, {})


class MaskedNan(Objective, frozen=True):
    """Objective whose loss is NaN at masked tokens, which must not count."""

    def __call__(self, tokens: PackedTokens) -> ObjectiveOutput:
        return ObjectiveOutput(torch.where(tokens.mask_T, -tokens.logp_T, torch.nan), {})


def tried(name: str, async_ratio: float = 0.0, **algorithm: Any) -> None:
    """Try an objective in a run with these options. Raises the ConfigError of `try_objective`."""
    algorithm |= {"objective": name}
    try_objective(make_config(Path("model"), algorithm=algorithm, train={"async_ratio": async_ratio}))


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("async_ratio", [0.0, 1.0])
def test_every_objective_passes(name: str, async_ratio: float) -> None:
    tried(name, async_ratio)


def test_masked_slots_may_hold_anything() -> None:
    tried(f"{__name__}:MaskedNan")


def test_the_users_interrupt_is_not_reported_as_a_fault_of_the_objective() -> None:
    with pytest.raises(KeyboardInterrupt):
        tried(f"{__name__}:Interrupted")


def test_an_objective_that_ignores_the_behaviour_policy_is_refused_for_old_samples() -> None:
    tried(f"{__name__}:Blind")
    tried(f"{__name__}:Blind", 1.0, corrections=[{"kind": "token_tis"}])
    with pytest.raises(ConfigError, match=r"Blind gives the same loss and gradient whatever tokens\.behaviour_T is"):
        tried(f"{__name__}:Blind", 1.0)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Raises, r"Raises raised RuntimeError: size mismatch \(.*test_objective.py:\d+\)"),
        (OneNumber, r"with one number per token, shape \(8,\), but returned loss_T of shape \(\)"),
        (Constant, "does not depend on tokens.logp_T"),
        (BadGradient, "gives a gradient of inf on ordinary tokens"),
    ],
)
def test_a_faulty_objective_is_refused_by_name(kind: type[Objective], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tried(f"{__name__}:{kind.__name__}")
