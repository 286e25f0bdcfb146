"""Attention as GPUs are asked for it, on tensors without data: the kernels check little of what they are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash.foreign.kernels import LSE_MULTIPLE, AttentionOptions, attend, attend_backward

SEQUENCES, HEADS, OF_KEYS, ASKING, ASKED = 3, 4, 2, 5, 7


@contextmanager
def calls() -> Iterator[dict[str, tuple[Any, ...]]]:
    """Kernels by name, with what they were given."""
    seen: dict[str, tuple[Any, ...]] = {}

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func.__name__.removesuffix(".default")] = args
            return func(*args, **kwargs or {})

    with Noted():
        yield seen


def states(heads: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """[S, H, tokens, D], the heads of a token beside each other in memory, as a row has them."""
    return torch.empty(SEQUENCES, tokens, heads, width, dtype=dtype, device="meta").transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("width", "of_values"), [(8, 8), (12, 12), (24, 16)])
def test_kernels_of_gpus_are_given_what_they_take(dtype: torch.dtype, masked: bool, width: int, of_values: int) -> None:
    query, key = states(HEADS, ASKING, width, dtype), states(OF_KEYS, ASKED, width, dtype)
    value = states(OF_KEYS, ASKED, of_values, dtype)
    mask = torch.empty(SEQUENCES, 1, ASKING, ASKED, dtype=torch.bool, device="meta") if masked else None
    how = AttentionOptions(mask, causal=False, scale=0.5)
    with calls() as seen:
        answer, weight = attend(query, key, value, how)
        given = states(HEADS, ASKING, of_values, dtype)
        grads = attend_backward(given, query, key, value, given, weight, how)
    assert answer.shape == (SEQUENCES, HEADS, ASKING, of_values)
    assert (weight.shape, weight.dtype) == ((SEQUENCES, HEADS, ASKING), torch.float32)
    assert [one.shape for one in grads] == [one.shape for one in (query, key, value)]
    flash = dtype == torch.bfloat16 and not masked
    kernel = f"_scaled_dot_product_{'flash' if flash else 'efficient'}_attention"
    assert kernel in seen
    _, *asked, out, sums = seen[f"{kernel}_backward"][: 6 if flash else 7]
    assert all(one.shape[-1] % 8 == 0 and one.stride(-1) == 1 for one in asked[:3])
    assert sums.is_contiguous()
    if not flash:
        assert out.transpose(1, 2).is_contiguous(), "the kernel is told of no other layout"
        assert sums.shape[-1] == LSE_MULTIPLE
