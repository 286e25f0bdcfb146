"""Copies of a weight version's tensors, with their manifest, their checksums, and their changes between versions.

A *version* is the weights after a training step. The trainer's publisher (`flash.weights.publisher`) copies the
trainer's tensors (`staged_copies`), makes a `WeightImage` of the copies, and serves it. The engines' workers build the
tensors again from the manifest (the list of tensors) and the bytes. With `weights.backend = "tcp_deltas"` only the
elements that differ from the version before are sent (`find_changes`, `apply_changes`).

Invariant: a version is immutable. The trainer goes on updating its own tensors, so a version consists of copies that
nothing writes to after `make_image`.

Invariant: a version carries checksums.
- The manifest has a CRC-32 per tensor (`TensorMeta.crc32`), which detects bytes that were damaged on their way (tcp).
- The announcement has the SHA-256 of the manifest (`WeightImage.digest`), which detects a damaged manifest, or the
  manifest of another trainer.
- The announcement has the `Fingerprint` of all tensors. Workers compare it as the tensors arrive (gloo, nccl), and
  `flash.weights.versions.LoadedWeights` compares it with the parameters that an engine holds after loading.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]
"""A model's tensors by name, one after the other."""
VERSIONS_KEPT = 2
"""Number of versions that a publisher holds: the newest, and the version before, which engines may still be reading."""
FINGERPRINT_ELEMENTS = 1 << 22
"""Number of elements that are added to a fingerprint at a time. This bounds the memory, because each element is widened
to 8 bytes."""
MAX_CHANGED_ELEMENTS = 2**31
"""Number of elements of the largest tensor whose changes are sent, because their places are int32."""
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtype by element size in bytes, for bit patterns that are summed."""
_BITS = {**_SIGNED, 1: torch.uint8}
"""Integer dtype by element size in bytes, for bit patterns that are sent as changes."""


# -- fingerprint -----------------------------------------------------------------------------------------------------


class Fingerprint:
    """Two sums over all elements, modulo 2^64: of their bit patterns as integers, and of the squares of these integers.

    The sums are exact and compared without a tolerance, so that stale weights are found. They do not depend on the
    order of the elements, so fused projections and permuted layouts have the same fingerprint. Zeros add nothing, so
    padding does not matter.
    """

    def __init__(self) -> None:
        self._sums = [0, 0]

    def add(self, tensor: Tensor) -> None:
        """Add all elements of a tensor. A tensor that is not contiguous is copied first."""
        flat = tensor.detach().contiguous().view(-1).view(_SIGNED[tensor.element_size()])
        sums = torch.zeros(2, dtype=torch.int64, device=flat.device)
        for part in flat.split(FINGERPRINT_ELEMENTS):
            wide = part.long()
            sums += torch.stack([wide.sum(), (wide * wide).sum()])
        self.add_sums(sums.tolist())

    def add_sums(self, sums: Sequence[int]) -> None:
        """Add elements that are known only by their fingerprint `sums`."""
        self._sums = [_as_int64(mine + other) for mine, other in zip(self._sums, sums, strict=True)]

    @property
    def sums(self) -> list[int]:
        """The two sums over everything that was added, as int64."""
        return list(self._sums)


def _as_int64(number: int) -> int:
    """Return `number` modulo 2^64, with the sign that int64 gives it."""
    return (number + 2**63) % 2**64 - 2**63


# -- a version's copies, manifest and bytes --------------------------------------------------------------------------


def staged_copies(
    tensors: NamedTensors, dtype: torch.dtype, fingerprint: Fingerprint, device: str | None = "cpu"
) -> Iterator[tuple[str, Tensor]]:
    """Yield contiguous private copies of tensors, in the engines' dtype.

    Args:
        tensors: the trainer's tensors.
        dtype: dtype of the copies of floating-point tensors. Other tensors keep their dtype.
        fingerprint: each copy is added to this fingerprint, which is complete when the iterator has ended.
        device: device of the copies; None: the device of each tensor.
    """
    for name, tensor in tensors:
        target = dtype if tensor.is_floating_point() else tensor.dtype
        cast = tensor.detach().to(dtype=target)
        # The sums are computed on the tensor's own device, because a GPU is faster than the host.
        fingerprint.add(cast)
        yield name, cast.to(device=device or tensor.device, copy=True).contiguous()


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that receivers expect: `torch.bfloat16` → `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a view of the memory of a contiguous host tensor."""
    flat = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)  # pyright: ignore[reportArgumentType]


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """Entry of the manifest for one tensor. The manifest lists a version's tensors in the order of their bytes."""

    name: str
    dtype: str
    """Name of the dtype in torch, such as `bfloat16`."""
    shape: list[int]
    """Number of elements in each dimension; empty for a scalar."""
    nbytes: int
    """Number of bytes of all elements."""
    crc32: int
    """CRC-32 of the bytes; 0 for a backend whose workers do not compare it."""

    def tensor(self, flat: Tensor) -> Tensor:
        """Return `flat`, the tensor's bytes, as a tensor of this dtype and shape. Both share one memory."""
        return flat.view(getattr(torch, self.dtype)).view(self.shape)


@dataclass(frozen=True)
class WeightImage:
    """Bytes and manifest of a version. Nothing writes to an image after it was made."""

    manifest: bytes
    """msgpack of a list of `TensorMeta`."""
    payloads: list[memoryview]
    """Bytes of each tensor."""
    tensors: list[Tensor]
    """Tensors that own the memory of `payloads`."""

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, hexadecimal."""
        return hashlib.sha256(self.manifest).hexdigest()


def make_image(tensors: NamedTensors, *, crc32: bool = True) -> WeightImage:
    """Turn contiguous host tensors into an image. The image owns the tensors; the caller must not change them.

    Args:
        tensors: for example the copies from `staged_copies`.
        crc32: True to put the tensors' checksums into the manifest; False to put zeros.
    """
    lines: list[TensorMeta] = []
    payloads: list[memoryview] = []
    owned: list[Tensor] = []
    for name, tensor in tensors:
        payload = tensor_bytes(tensor)
        checksum = zlib.crc32(payload) if crc32 else 0
        lines.append(TensorMeta(name, dtype_name(tensor.dtype), list(tensor.shape), len(payload), checksum))
        payloads.append(payload)
        owned.append(tensor)
    return WeightImage(msgspec.msgpack.encode(lines), payloads, owned)


# -- changes between versions (`tcp_deltas`) -------------------------------------------------------------------------


@dataclass(frozen=True)
class Changes:
    """Elements of one tensor whose bits differ from the version before.

    At a learning rate of 1e-6, few weights change enough to become another 16-bit number. If the changes have fewer
    bytes than the tensor, the changes are sent instead of the tensor. Elements are numbered in the order of the
    tensor's memory, and bytes are in the host's order.
    """

    places: Tensor
    """(changed,) int32: positions in the flattened tensor."""
    elements: Tensor
    """(changed,) integers: bit patterns of the new elements."""

    @property
    def nbytes(self) -> int:
        """Number of bytes that are sent for these changes."""
        return self.places.nbytes + self.elements.nbytes


def find_changes(before: Tensor, after: Tensor) -> Changes | None:
    """Return the changes between two contiguous tensors of one shape and dtype.

    Returns:
        None if the whole tensor has to be sent: if the changes would be at least as many bytes as `after` itself, or if
        the tensor is empty or too large for int32 places.
    """
    if not 0 < after.numel() <= MAX_CHANGED_ELEMENTS:
        return None
    bits = _BITS[after.itemsize]
    new = after.view(-1).view(bits)
    differs = before.view(-1).view(bits) != new
    # Count before listing the places: torch's places are 64 bits wide, so a list of all places would take several times
    # the tensor's memory.
    if int(differs.count_nonzero()) * (torch.int32.itemsize + after.itemsize) >= after.nbytes:
        return None
    places = differs.nonzero().view(-1)
    return Changes(places.int(), new[places])


def empty_changes(count: int, itemsize: int) -> Changes:
    """Return memory for `count` changes of elements of `itemsize` bytes."""
    return Changes(torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=_BITS[itemsize]))


def apply_changes(flat: Tensor, changes: Changes) -> None:
    """Turn a tensor's bytes of the version before into the bytes of the new version, in place.

    Raises:
        IndexError: a place is outside the tensor.
    """
    flat.view(changes.elements.dtype)[changes.places.long()] = changes.elements


# -- an image in pieces (broadcasts) ---------------------------------------------------------------------------------


def split_image(image: WeightImage, first: int, piece_bytes: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the bytes of an image in pieces of `piece_bytes`, starting with piece number `first`.

    Pieces do not end where tensors end, so `join_pieces` builds the tensors again. The last piece may be shorter.
    """
    # `skip`: bytes before the first piece that are still to be passed. `left`: bytes of pieces that are still to come.
    # Each piece gets memory of its own, because the receiver of a yielded piece may still use it.
    skip = first * piece_bytes
    left = sum(map(len, image.payloads)) - skip
    piece, filled = torch.empty(min(piece_bytes, left), dtype=torch.uint8, device=device), 0
    for payload in image.payloads:
        start = min(skip, len(payload))
        skip -= start
        while start < len(payload):
            count = min(len(payload) - start, len(piece) - filled)
            piece[filled : filled + count] = torch.frombuffer(payload, dtype=torch.uint8, count=count, offset=start)
            start, filled = start + count, filled + count
            if filled == len(piece):
                yield piece
                left -= filled
                piece, filled = torch.empty(min(piece_bytes, left), dtype=torch.uint8, device=device), 0


def join_pieces(
    lines: Iterable[TensorMeta], pieces: Iterator[Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield name and tensor for each line of a manifest, from pieces that hold all bytes in the manifest's order.

    The tensors are on `device`. A piece is requested only when its bytes are needed.
    """
    piece = torch.empty(0, dtype=torch.uint8, device=device)
    for line in lines:
        flat, filled = torch.empty(line.nbytes, dtype=torch.uint8, device=device), 0
        while filled < line.nbytes:
            if not len(piece):
                piece = next(pieces)
            count = min(line.nbytes - filled, len(piece))
            flat[filled : filled + count] = piece[:count]
            filled, piece = filled + count, piece[count:]
        yield line.name, line.tensor(flat)
