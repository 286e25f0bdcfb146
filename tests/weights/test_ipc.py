"""The ipc publisher, as far as it goes without a GPU: messages, and how long memory is kept."""

from __future__ import annotations

import weakref

import pytest
import torch

from flash.weights.publisher import IpcHandles, IpcPublisher, StagedTensors
from flash.weights.versions import decode_update

TENSORS = [("a", torch.ones(2, 3)), ("b", torch.arange(4))]


class FakeExporter:
    """Exporter of a rank without a GPU: the handle of a tensor is its name."""

    def __init__(self, gpu: str, others: list[IpcHandles]) -> None:
        """Take the id of this rank's GPU, and the handles that the other ranks would give."""
        self.gpu = gpu
        self.others = others
        self.exported: list[weakref.ref[torch.Tensor]] = []
        """Weak reference to the first copy of each exported version."""

    def export(self, tensors: StagedTensors) -> IpcHandles:
        """Return the handles of this rank's tensors."""
        self.exported.append(weakref.ref(tensors[0][1]))
        return [{self.gpu: (name,)} for name, _ in tensors]

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        """Return the handles of all ranks."""
        return [handles, *self.others]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_vllm_unpacks_the_merged_ipc_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    exporter = FakeExporter("gpu0", [[{"gpu1": ("a1",)}, {"gpu1": ("b1",)}]])
    offer = IpcPublisher(0, torch.bfloat16, exporter).publish(1, TENSORS)
    assert offer is not None
    announced = decode_update(offer.update_info)
    assert announced.init is not None
    assert not IPCWeightTransferInitInfo(**announced.init).packed
    assert IPCWeightTransferUpdateInfo(**announced.update).ipc_handles == [
        {"gpu0": ("a",), "gpu1": ("a1",)},
        {"gpu0": ("b",), "gpu1": ("b1",)},
    ]


def test_exported_memory_lives_for_two_versions() -> None:
    exporter = FakeExporter("gpu0", [])
    publisher = IpcPublisher(0, torch.bfloat16, exporter)
    for version in range(3):
        publisher.publish(version, TENSORS)
    assert [ref() is not None for ref in exporter.exported] == [False, True, True]
    publisher.close()
    assert [ref() is not None for ref in exporter.exported] == [False, False, False]


def test_only_rank_0_offers_handles() -> None:
    assert IpcPublisher(1, torch.bfloat16, FakeExporter("gpu1", [])).publish(1, TENSORS) is None
