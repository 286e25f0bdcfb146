from __future__ import annotations

import pytest
import torch

from algorithms.references import loglinear


def test_the_older_the_token_the_nearer_its_proximal_policy_is_to_now() -> None:
    logp_T = torch.full((4,), -1.0, dtype=torch.float64, requires_grad=True)
    behaviour_T = torch.full((4,), -2.0, dtype=torch.float64)
    found_T = loglinear(logp_T, behaviour_T, torch.tensor([0, 1, 3, 9]))
    assert found_T.tolist() == pytest.approx([-2.0, -1.5, -1.25, -1.1])
    assert not found_T.requires_grad


def test_it_is_the_share_of_versions_that_lies_behind() -> None:
    """a = (v_proximal − v_behaviour) / (v_θ − v_behaviour), one version ahead of the proximal one."""
    logp_T, behaviour_T = torch.randn(2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    version_T, proximal = torch.tensor([7, 6, 5, 4, 2, 0]), 7
    share_T = (proximal - version_T).double() / (proximal + 1 - version_T)
    expected_T = behaviour_T + share_T * (logp_T - behaviour_T)
    torch.testing.assert_close(loglinear(logp_T, behaviour_T, proximal - version_T), expected_T, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_dtype_is_kept(dtype: torch.dtype) -> None:
    found_T = loglinear(torch.zeros(2, dtype=dtype), torch.ones(2, dtype=dtype), torch.tensor([1, 2]))
    assert found_T.dtype == dtype
