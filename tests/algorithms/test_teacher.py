"""Distillation over a whole vocabulary, where the expectation over what is sampled can be taken exactly."""

from __future__ import annotations

import pytest
import torch

from algorithms.references import distilled


@pytest.mark.parametrize("behind", [0.0, 1.0])
def test_the_expected_gradient_is_that_of_the_reverse_kl(behind: float) -> None:
    """Whatever policy has sampled, with the importance ratio."""
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


def test_a_policy_that_speaks_as_its_teacher_has_nothing_to_learn() -> None:
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = distilled(torch.tensor([0.5, 0.0]), logp, logp.detach(), 3.0)
    assert torch.equal(found, torch.tensor([0.5, 0.0]))
    assert not found.requires_grad
