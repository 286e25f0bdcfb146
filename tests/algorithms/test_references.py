"""KL to a reference, distillation from a teacher, and the interpolated proximal policy."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
import torch

from algorithms.references import Estimator, Kl, distilled, kl, loglinear

ESTIMATORS: list[Estimator] = ["k1", "k2", "k3"]


def naive(estimator: Estimator, logp: float, reference: float) -> tuple[float, float]:
    """Return the estimate of a token and its derivative by the policy's log-prob, from the definitions."""
    delta = logp - reference
    ratio = math.exp(reference - logp)
    return {"k1": (delta, 1.0), "k2": (delta**2 / 2, delta), "k3": (ratio - 1 + delta, 1 - ratio)}[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
def test_values_and_gradients_equal_the_formulas(estimator: Estimator, dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logp_T = -torch.rand(50, generator=generator, dtype=torch.float64).to(dtype)
    reference_T = -torch.rand(50, generator=generator, dtype=torch.float64).to(dtype)
    leaf_T = logp_T.clone().requires_grad_()
    value_T = kl(estimator, leaf_T, reference_T)
    value_T.sum().backward()
    assert leaf_T.grad is not None
    pairs = [naive(estimator, *pair) for pair in zip(logp_T.tolist(), reference_T.tolist(), strict=True)]
    expected = torch.tensor(pairs, dtype=torch.float64)
    torch.testing.assert_close(value_T.detach().double(), expected[:, 0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(leaf_T.grad.double(), expected[:, 1], rtol=tolerance, atol=tolerance)


def expected_gradients(estimator: Estimator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return three expected gradients by the logits of a policy over six actions.

    They are the gradients of the estimator as a loss, of KL(π ‖ ref) and of KL(ref ‖ π).
    """
    generator = torch.Generator().manual_seed(1)
    start_A = torch.randn(6, generator=generator, dtype=torch.float64)
    reference_A = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    gradients = []
    for which in ("estimate", "forward", "reverse"):
        logits_A = start_A.clone().requires_grad_()
        logp_A = logits_A.log_softmax(0)
        if which == "estimate":
            mean = (logp_A.exp().detach() * kl(estimator, logp_A, reference_A)).sum()
        elif which == "forward":
            mean = (logp_A.exp() * (logp_A - reference_A)).sum()
        else:
            mean = (reference_A.exp() * (reference_A - logp_A)).sum()
        mean.backward()
        assert logits_A.grad is not None
        gradients.append(logits_A.grad)
    return tuple(gradients)


def test_k1_in_the_loss_has_zero_expected_gradient() -> None:
    estimate, forward, _ = expected_gradients("k1")
    assert estimate.abs().max() < 1e-15
    assert forward.abs().max() > 0.01


def test_k2_in_the_loss_has_the_gradient_of_kl_to_the_reference() -> None:
    estimate, forward, _ = expected_gradients("k2")
    torch.testing.assert_close(estimate, forward, rtol=1e-12, atol=1e-14)


def test_k3_in_the_loss_has_the_gradient_of_kl_from_the_reference() -> None:
    estimate, _, reverse = expected_gradients("k3")
    torch.testing.assert_close(estimate, reverse, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_k1_and_of_k3_is_the_divergence(estimator: Estimator) -> None:
    generator = torch.Generator().manual_seed(2)
    logp_A, reference_A = torch.randn(2, 6, generator=generator, dtype=torch.float64).log_softmax(1)
    divergence = (logp_A.exp() * (logp_A - reference_A)).sum()
    torch.testing.assert_close((logp_A.exp() * kl(estimator, logp_A, reference_A)).sum(), divergence)


def test_k3_is_exact_next_to_zero_and_never_negative() -> None:
    delta_T = torch.tensor([1e-9, -1e-9, 1e-4, 0.0], dtype=torch.float64)
    value_T = kl("k3", delta_T, torch.zeros(4, dtype=torch.float64))
    assert (value_T >= 0).all()
    assert value_T[2].item() == pytest.approx(0.5e-8 - 1e-12 / 6, rel=1e-6)


@pytest.mark.parametrize(
    "plain",
    [
        {},
        {"coefficient": 0.0},
        {"coefficient": -0.1},
        {"coefficient": 0.1, "estimator": "k4"},
        {"coefficient": 0.1, "place": "advantage"},
        {"coefficient": 0.1, "target": 0.01},
    ],
)
def test_options_out_of_range_or_unknown_are_refused(plain: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(plain, Kl)


def test_by_default_k3_in_the_loss_to_the_initial_policy() -> None:
    assert msgspec.convert({"coefficient": 0.01}, Kl) == Kl(
        estimator="k3", coefficient=0.01, place="loss", reference=None
    )


@pytest.mark.parametrize("behind", [0.0, 1.0])
def test_the_expected_gradient_is_that_of_the_reverse_kl(behind: float) -> None:
    """Check it with the importance ratio, for samples of the policy itself and of another policy."""
    generator = torch.Generator().manual_seed(0)
    logits, teacher, other = torch.randn(3, 50, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    logp = logits.log_softmax(-1)
    teacher = teacher.log_softmax(-1)
    sampled = (logits.detach() + behind * other).log_softmax(-1)
    advantage = distilled(torch.zeros_like(logp), logp, teacher, 0.7)
    ratio = (logp - sampled).exp()
    (found,) = torch.autograd.grad(-(sampled.exp() * ratio * advantage).sum(), logits, retain_graph=True)
    (expected,) = torch.autograd.grad(0.7 * (logp.exp() * (logp - teacher)).sum(), logits)
    torch.testing.assert_close(found, expected)


def test_equal_log_probs_of_policy_and_teacher_leave_the_advantages_unchanged() -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = distilled(torch.tensor([0.5, 0.0]), logp, logp.detach(), 3.0)
    assert torch.equal(found, torch.tensor([0.5, 0.0]))
    assert not found.requires_grad


def test_the_proximal_policy_of_an_older_token_is_nearer_to_the_current_policy() -> None:
    logp_T = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    behaviour_T = torch.full((4,), -2.0, dtype=torch.float64)
    found_T = loglinear(logp_T, behaviour_T, torch.tensor([0, 1, 3, 9]))
    assert found_T.tolist() == pytest.approx([-2.0, -1.5, -1.25, -1.1])
    assert not found_T.requires_grad


def test_the_proximal_policy_is_interpolated_by_the_age_in_versions() -> None:
    """Check a = (v_proximal − v_behaviour) / (v_θ − v_behaviour), with v_θ = v_proximal + 1."""
    logp_T, behaviour_T = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    version_T, proximal = torch.tensor([7, 6, 5, 4, 2, 0]), 7
    share_T = (proximal - version_T).double() / (proximal + 1 - version_T)
    expected_T = behaviour_T + share_T * (logp_T - behaviour_T)
    torch.testing.assert_close(loglinear(logp_T, behaviour_T, proximal - version_T), expected_T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    found_T = loglinear(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), torch.tensor([1, 2]))
    assert found_T.dtype == dtype
