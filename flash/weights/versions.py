"""Messages about a weight version, and its verification: an announcement, a report of a failed load, and two checks.

This module imports neither torch nor vLLM, because the node loop (`flash.rollout.vllm.engine`), which runs the engines
of a machine, uses it.

A version is the weights after a training step. It is announced with `UpdateInfo` (trainer → hub → node loop), which
travels as bytes in the field `update_info` of the hub's message `Published`. Each of the engine's workers (processes
that each hold a part of the model) loads it, or reports a `LoadFailure` (worker → node loop). Then the node loop
verifies the engine, before it acknowledges the version to the hub:

- `LoadedWeights` compares fingerprints: the workers hold the weights that were published. This check detects stale
  weights. The canary cannot detect them, because its tolerance has to allow for rounding.
- `check_canary` compares log-probs of a short text: the engine computes with these weights as the trainer does. The
  tolerance follows from the precision of the numbers, which the trainer measures (`flash.trainer.model.canary`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from flash.errors import FlashError, VersionGoneError, WeightsError
from flash.types import Canary


class UpdateInfo(msgspec.Struct, frozen=True):
    """Announcement of a version: how workers get its tensors. The decoded form of `Published.update_info`.

    The dictionaries go unchanged to vLLM's `init_weight_transfer_engine` and `update_weights`.
    """

    update: dict[str, Any]
    """Arguments of `update_weights` for this version."""
    fingerprint: list[int]
    """Fingerprint of the tensors as published (`flash.weights.image.Fingerprint`)."""
    init: dict[str, Any] | None = None
    """Arguments of `init_weight_transfer_engine`, called once for each publisher; None if the backend needs none."""


def encode_update(info: UpdateInfo) -> bytes:
    """Return the msgpack bytes that travel in `Published.update_info`."""
    return msgspec.msgpack.encode(info)


def decode_update(data: bytes) -> UpdateInfo:
    """Decode the bytes of `encode_update`. Raises `msgspec.DecodeError` if `data` is something else."""
    return msgspec.msgpack.decode(data, type=UpdateInfo)


class LoadFailure(msgspec.Struct, frozen=True):
    """Reason for which a worker of an engine could not load a version.

    A worker returns it to the node loop over vLLM's own channel, as plain data (`to_plain`, `from_plain`). The node
    loop decides by `kind` what to do next; the message is for people.
    """

    kind: Literal["gone", "damaged", "failed"]
    """`gone`: the trainer holds only newer versions, so the engine is too late and has to restart. `damaged`: the bytes
    are not the published bytes, so no engine can load this version. `failed`: any other error, such as a lost
    connection, which other engines may not have."""
    message: str
    """Text of the worker's error."""

    @staticmethod
    def of(error: FlashError) -> LoadFailure:
        """Convert an error of `flash.weights.tcp.pull` into a failure, whose kind follows from the error's class."""
        match error:
            case VersionGoneError():
                return LoadFailure("gone", str(error))
            case WeightsError():
                return LoadFailure("damaged", str(error))
            case _:
                return LoadFailure("failed", str(error))

    def to_plain(self) -> dict[str, str]:
        """Return the fields as a dictionary of strings, which vLLM's workers can send without pickle."""
        return msgspec.to_builtins(self)

    @staticmethod
    def from_plain(data: dict[str, str]) -> LoadFailure:
        """Convert a dictionary from `to_plain` back into a failure."""
        return msgspec.convert(data, LoadFailure)


class LoadedWeights:
    """Check of the weights that an engine holds, from version to version, by their fingerprints.

    A fingerprint is a checksum of all elements (`flash.weights.image.Fingerprint`), which each worker computes for the
    weights that it holds.

    Invariant: a loaded version is the published version. If the engine has one worker, and this worker held exactly the
    published tensors at its first version, then it must hold them at each later version. In other engines the
    fingerprints cannot be equal (tensor-parallel shards, quantised or otherwise derived weights, tensors that the
    engine does not load). In such an engine, the fingerprint of each worker has to change whenever the published
    fingerprint changes.

    Args:
        exact: True if the fingerprints must be equal from the first version on. None decides at the first version.
    """

    def __init__(self, *, exact: bool | None = None) -> None:
        self._exact = exact
        # Fingerprints of the last version that passed: as published, and as each worker held it. Empty before that.
        self._published: list[int] = []
        self._held: list[list[int]] = []

    def check(self, published: list[int], held: list[list[int]], *, engine: int, version: int) -> None:
        """Compare the fingerprint of `version` as published with the fingerprints that the engine's workers hold now.

        The node loop calls this after each load. The fingerprints are remembered for the next call, unless the check
        fails.

        Raises:
            WeightsError: the engine holds other weights.
        """
        if self._exact is None:
            self._exact = held == [published]
        if self._exact:
            stale = held != [published]
        else:
            changed = published != self._published
            stale = changed and any(old == new for old, new in zip(self._held, held, strict=False))
        if stale:
            kept = "the weights of the version before" if self._held == held else "other weights than were published"
            raise WeightsError(
                f"engine {engine}, version {version}: after loading it holds {kept} (fingerprint {held}, published "
                f"{published}). vLLM has accepted the tensors and not put them all in place"
            )
        self._published, self._held = published, held


def check_canary(canary: Canary, observed: Sequence[float], *, engine: int, version: int) -> float:
    """Compare an engine's log-probs of the canary with the trainer's.

    Returns the mean of their absolute differences in nats, which metrics show as `canary_error`.

    The mean is compared with the tolerance, not the maximum. Rounding alone can make a few large differences, above all
    if it routes a token to another expert. An engine that computes wrongly differs at most of the tokens.

    Args:
        canary: the text, the trainer's log-probs (one per token after the first), and the tolerance.
        observed: the engine's log-probs at the same positions.
        engine: index of the engine, for the message.
        version: the version just loaded, for the message.

    Raises:
        WeightsError: the mean exceeds the tolerance, a log-prob is NaN, or the numbers of log-probs differ.
    """
    if len(observed) != len(canary.logprobs):
        raise WeightsError(
            f"engine {engine}, version {version}: the canary has {len(canary.logprobs)} positions, "
            f"the engine answered for {len(observed)}"
        )
    pairs = zip(canary.logprobs, observed, strict=True)
    gaps = [math.inf if math.isnan(ours - theirs) else abs(ours - theirs) for ours, theirs in pairs]
    mean, worst = sum(gaps) / len(gaps), gaps.index(max(gaps))
    if mean > canary.tolerance:
        raise WeightsError(
            f"engine {engine}, version {version}: the canary's log-probs differ by {mean:.3g} nats in the mean between "
            f"engine and trainer, by more than {canary.tolerance:.3g}; most at position {worst + 1} (token "
            f"{canary.token_ids[worst + 1]}): {observed[worst]:.6f} in the engine and {canary.logprobs[worst]:.6f} in "
            "the trainer. The engine does not compute with the weights that were published; but if canary_error in "
            "metrics.jsonl has grown slowly over many steps, it is rounding: raise weights.canary_tolerance"
        )
    return mean
