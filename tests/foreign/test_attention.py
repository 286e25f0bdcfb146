"""Layouts of the tensors that GPU kernels of attention get, on tensors without data: the kernels check little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flash.foreign.kernels import LSE_MULTIPLE, AttentionOptions, attend, attend_backward

SEQUENCES, QUERY_HEADS, KEY_HEADS, QUERIES, KEYS = 3, 4, 2, 5, 7


@contextmanager
def calls() -> Iterator[dict[str, tuple[Any, ...]]]:
    """Yield the arguments of the last call of each operation of torch inside the block, by its name."""
    seen: dict[str, tuple[Any, ...]] = {}

    class Noted(TorchDispatchMode):
        """Mode of torch that notes the arguments of each operation."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen[func.__name__.removesuffix(".default")] = args
            return func(*args, **kwargs or {})

    with Noted():
        yield seen


def states(heads: int, tokens: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor without data, [S, H, tokens, D]. The heads of a token are adjacent in memory, as in a row."""
    return torch.empty(SEQUENCES, tokens, heads, width, dtype=dtype, device="meta").transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("width", "value_width"), [(8, 8), (12, 12), (24, 16)])
def test_gpu_kernels_get_tensors_in_the_layouts_that_they_require(
    dtype: torch.dtype, masked: bool, width: int, value_width: int
) -> None:
    query, key = states(QUERY_HEADS, QUERIES, width, dtype), states(KEY_HEADS, KEYS, width, dtype)
    value = states(KEY_HEADS, KEYS, value_width, dtype)
    mask = torch.empty(SEQUENCES, 1, QUERIES, KEYS, dtype=torch.bool, device="meta") if masked else None
    options = AttentionOptions(mask, causal=False, scale=0.5)
    with calls() as seen:
        output, lse = attend(query, key, value, options)
        merged = states(QUERY_HEADS, QUERIES, value_width, dtype)  # the output over all parts of the keys
        grads = attend_backward(torch.empty_like(merged), query, key, value, merged, lse, options)
    assert output.shape == (SEQUENCES, QUERY_HEADS, QUERIES, value_width)
    assert (lse.shape, lse.dtype) == ((SEQUENCES, QUERY_HEADS, QUERIES), torch.float32)
    assert [one.shape for one in grads] == [one.shape for one in (query, key, value)]
    flash = dtype == torch.bfloat16 and not masked
    kernel = f"_scaled_dot_product_{'flash' if flash else 'efficient'}_attention"
    assert kernel in seen
    _, *inputs, out, sums = seen[f"{kernel}_backward"][: 6 if flash else 7]
    assert all(one.shape[-1] % 8 == 0 and one.stride(-1) == 1 for one in inputs[:3])
    assert sums.is_contiguous()
    if not flash:
        assert out.transpose(1, 2).is_contiguous(), "the kernel assumes this layout"
        assert sums.shape[-1] == LSE_MULTIPLE
