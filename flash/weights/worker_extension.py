"""What Flash adds to vLLM's workers, for `collective_rpc`; vLLM mixes it into its own class."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from flash.errors import FlashError
from flash.weights.fingerprint import Fingerprint
from flash.weights.tcp import TcpSource, pull

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

    def flash_fingerprint(self, adapter: int) -> list[int]:
        """Of the weights that this worker holds, or of an adapter as it computes with it."""
        from flash.foreign.vllm_worker import held_adapter

        worker: Any = self
        if not adapter:
            return held_fingerprint(worker.get_model())
        fingerprint = Fingerprint()
        for tensor in held_adapter(worker, adapter):
            fingerprint.add(tensor)
        return fingerprint.sums

    def flash_put_adapter(self, source: dict[str, Any], number: int, dropped: list[int]) -> str | None:
        """Pull a version of the adapters and hold it under a number; why it could not, None: it could."""
        from flash.foreign.vllm_worker import put_adapter

        try:
            tensors = dict(pull(TcpSource(**source)))
        except FlashError as error:
            return str(error)
        put_adapter(self, number, tensors, dropped)
        return None

    def flash_load_failure(self) -> str | None:
        """Why this worker could not load the last version; None if it could."""
        return _failures[0] if _failures else None
