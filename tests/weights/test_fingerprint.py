"""The fingerprint of weights: changes that it detects, layouts that it ignores, and the check of loaded engines."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from flash.errors import WeightsError
from flash.weights.broadcast import BroadcastServer
from flash.weights.image import FINGERPRINT_ELEMENTS, Fingerprint, staged_copies
from flash.weights.publisher import HostPublisher, IpcPublisher, Offer
from flash.weights.tcp import WeightServer
from flash.weights.versions import LoadedWeights, decode_update
from tests.weights.test_ipc import FakeExporter

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def weights(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return random weights of queries, keys, values and a norm."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(64, 48), (16, 48), (16, 48), (48,)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def sums(*tensors: Tensor) -> list[int]:
    """Return the fingerprint of these tensors together."""
    fingerprint = Fingerprint()
    for tensor in tensors:
        fingerprint.add(tensor)
    return fingerprint.sums


@DTYPES
def test_the_layout_of_weights_in_an_engine_does_not_matter(dtype: torch.dtype) -> None:
    query, key, value, norm = weights(dtype)
    whole = sums(query, key, value, norm)
    assert sums(norm, torch.cat([query, key, value])) == whole, "fused"
    assert sums(norm, torch.cat([query, key, value]).T) == whole, "transposed, and not contiguous"
    assert sums(norm, torch.cat([query, key, value, torch.zeros(32, 48, dtype=dtype)])) == whole, "padded"
    joined = Fingerprint()
    joined.add_sums(sums(query, key))
    joined.add_sums(sums(norm, value))
    assert joined.sums == whole


@DTYPES
def test_the_smallest_change_of_one_element_is_seen(dtype: torch.dtype) -> None:
    before = weights(dtype)
    after = [tensor.clone() for tensor in before]
    after[0][3, 5] = torch.nextafter(after[0][3, 5], torch.tensor(torch.inf, dtype=dtype))
    assert sums(*after) != sums(*before)
    swapped = [tensor.clone() for tensor in before]
    swapped[3][0] += 1
    swapped[3][1] -= 1
    assert sums(*swapped) != sums(*before), "changes that cancel in a plain sum"


def test_a_tensor_of_many_chunks_has_the_sums_of_its_parts() -> None:
    large = torch.arange(2 * FINGERPRINT_ELEMENTS + 3, dtype=torch.int32).view(torch.float32)
    pieces = Fingerprint()
    for part in large.split(FINGERPRINT_ELEMENTS // 2 + 1):
        pieces.add(part)
    assert sums(large) == pieces.sums


def test_every_backend_announces_the_fingerprint_of_the_published_tensors() -> None:
    tensors = [("a", weights()[0]), ("b", weights()[3])]
    expected = sums(*(tensor.bfloat16() for _, tensor in tensors))
    staged = Fingerprint()
    list(staged_copies(tensors, torch.bfloat16, staged))
    assert staged.sums == expected
    offers: list[Offer | None] = []
    for serve in (WeightServer, partial(BroadcastServer, "gloo")):
        served = HostPublisher(0, "127.0.0.1", torch.bfloat16, 5.0, 5.0, serve)
        offers.append(served.publish(1, iter(tensors)))
        served.close()
    offers.append(IpcPublisher(0, torch.bfloat16, FakeExporter("gpu0", [])).publish(1, iter(tensors)))
    assert [decode_update(one.update_info).fingerprint for one in offers if one is not None] == [expected] * 3


def check(held: LoadedWeights, published: int, *workers: int, version: int = 1) -> None:
    """Check an engine whose workers have these fingerprints, where `published` is the published one."""
    held.check([published, 0], [[one, 0] for one in workers], engine=2, version=version)


def test_an_engine_that_held_the_published_weights_must_hold_each_later_version() -> None:
    held = LoadedWeights()
    check(held, 5, 5)
    check(held, 6, 6)
    check(held, 6, 6)
    with pytest.raises(WeightsError, match=r"engine 2, version 9: after loading it holds the weights of the ver"):
        check(held, 7, 6, version=9)
    with pytest.raises(WeightsError, match="holds other weights than were published"):
        check(held, 7, 8)


def test_the_fingerprints_of_other_engines_must_change_with_the_published_one() -> None:
    held = LoadedWeights()
    check(held, 5, 50, 51)
    check(held, 6, 60, 61)
    check(held, 6, 60, 61)
    with pytest.raises(WeightsError, match="holds other weights than were published"):
        check(held, 7, 70, 61)
    with pytest.raises(WeightsError, match="holds the weights of the version before"):
        check(held, 7, 60, 61)
