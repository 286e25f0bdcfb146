"""What Flash adds to vLLM's workers, for `collective_rpc`; vLLM mixes it into its own class."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from flash.weights.fingerprint import Fingerprint

_loaded: WeakKeyDictionary[nn.Module, list[int]] = WeakKeyDictionary()
"""Fingerprints of what layers of a CPU engine were last given, before its kernels packed it beyond recognition."""

_failures: list[str] = []
"""Why the last version could not be pulled; empty if it could."""


def forget_failure() -> None:
    """A new version comes."""
    _failures.clear()


def remember_failure(reason: str) -> None:
    """Leave the reason for `flash_load_failure`."""
    _failures.append(reason)


def remember(layer: nn.Module) -> None:
    """Take the fingerprint of a layer whose new weights are about to be packed."""
    fingerprint = Fingerprint()
    for parameter in layer.parameters(recurse=False):
        fingerprint.add(parameter)
    _loaded[layer] = fingerprint.sums


def held_fingerprint(model: nn.Module) -> list[int]:
    """Of all weights that a model holds, each counted once."""
    fingerprint, seen = Fingerprint(), set[int]()
    for layer in sorted(model.modules(), key=lambda layer: layer not in _loaded):
        parameters = [one for one in layer.parameters(recurse=False) if id(one) not in seen]
        seen.update(map(id, parameters))
        if layer in _loaded:
            fingerprint.join(_loaded[layer])
            continue
        for parameter in parameters:
            fingerprint.add(parameter)
    return fingerprint.sums


class WorkerExtension:
    """Methods have names of their own: vLLM refuses those that its workers have."""

    def flash_fingerprint(self) -> list[int]:
        """Of the weights that this worker holds."""
        worker: Any = self
        return held_fingerprint(worker.get_model())

    def flash_load_failure(self) -> str | None:
        """Why this worker could not load the last version; None if it could."""
        return _failures[0] if _failures else None
