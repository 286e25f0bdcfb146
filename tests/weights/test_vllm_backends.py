"""The nccl and ipc publishers, as far as they go without a GPU: messages, ranks, and what happens in which order."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch

from flash.errors import DeadlineError
from flash.weights.update import UpdateInfo, decode_update, place_engine
from flash.weights.vllm_backends import IpcHandles, IpcPublisher, NcclPublisher, StagedTensors, describe

TENSORS = [("a", torch.ones(2, 3)), ("b", torch.arange(4))]


class FakeLink:
    """Records what rank 0 does, in one list with the announcements."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.sent: StagedTensors = []
        self.announced: list[UpdateInfo] = []
        self.release = threading.Event()
        self.release.set()

    def announce(self, info: bytes) -> None:
        self.events.append("announce")
        self.announced.append(decode_update(info))

    def join(self, host: str, port: int, world_size: int) -> None:
        self.events.append(f"join {world_size}")

    def broadcast(self, tensors: StagedTensors) -> None:
        self.release.wait(30)
        self.events.append("broadcast")
        self.sent = tensors

    def close(self) -> None:
        self.events.append("close")


class FakeExporter:
    """One GPU of a shared node; `others` are the handles of the other ranks."""

    def __init__(self, gpu: str, others: list[IpcHandles]) -> None:
        self.gpu = gpu
        self.others = others
        self.exported: list[weakref.ref[torch.Tensor]] = []

    def export(self, tensors: StagedTensors) -> IpcHandles:
        self.exported.append(weakref.ref(tensors[0][1]))
        return [{self.gpu: (name,)} for name, _ in tensors]

    def gather(self, handles: IpcHandles) -> list[IpcHandles]:
        return [handles, *self.others]


def nccl(link: FakeLink, rank: int = 0, first_s: float = 5.0, timeout_s: float = 5.0) -> NcclPublisher:
    return NcclPublisher(rank, "127.0.0.1", torch.bfloat16, first_s, timeout_s, workers=4, link=link)


def test_engines_are_told_before_rank_0_waits_for_them_and_join_once() -> None:
    link = FakeLink()
    publisher = nccl(link)
    publisher.publish(1, TENSORS, link.announce)
    publisher.publish(2, TENSORS, link.announce)
    publisher.close()
    assert link.events == ["announce", "join 5", "broadcast", "announce", "broadcast", "close"]


def test_every_announcement_repeats_the_same_rendezvous() -> None:
    link = FakeLink()
    publisher = nccl(link)
    publisher.publish(1, TENSORS, link.announce)
    publisher.publish(2, TENSORS, link.announce)
    assert link.announced[0].init == link.announced[1].init


def test_what_is_broadcast_is_what_was_described() -> None:
    link = FakeLink()
    nccl(link).publish(1, TENSORS, link.announce)
    assert link.announced[0].update == describe(link.sent)
    assert link.announced[0].update == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "int64"],
        "shapes": [[2, 3], [4]],
    }


def test_the_workers_of_all_engines_and_the_trainer_fill_the_group_without_overlap() -> None:
    link = FakeLink()
    nccl(link).publish(1, TENSORS, link.announce)
    init = link.announced[0].init
    assert init is not None
    ranks = [0] + [place_engine(init, engine, 2)["rank_offset"] + worker for engine in range(2) for worker in range(2)]
    assert ranks == list(range(init["world_size"]))


def test_an_engine_that_does_not_join_is_a_deadline_error() -> None:
    link = FakeLink()
    link.release.clear()
    with pytest.raises(DeadlineError, match="4 engine workers to take version 1"):
        nccl(link, first_s=0.2).publish(1, TENSORS, link.announce)
    link.release.set()


def test_only_the_first_version_waits_for_engines_to_start() -> None:
    link = FakeLink()
    publisher = nccl(link, first_s=30.0, timeout_s=0.2)
    publisher.publish(1, TENSORS, link.announce)
    link.release.clear()
    with pytest.raises(DeadlineError, match=r"waited 0\.2 s for 4 engine workers to take version 2"):
        publisher.publish(2, TENSORS, link.announce)
    link.release.set()


def test_the_other_ranks_only_gather() -> None:
    link = FakeLink()
    gathered = iter(TENSORS)
    nccl(link, rank=1).publish(1, gathered, link.announce)
    assert next(gathered, None) is None
    assert link.events == []


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_vllm_accepts_the_nccl_messages() -> None:
    from vllm.distributed.weight_transfer.nccl_engine import (
        NCCLWeightTransferInitInfo,
        NCCLWeightTransferUpdateInfo,
    )

    link = FakeLink()
    nccl(link).publish(1, TENSORS, link.announce)
    info = link.announced[0]
    assert info.init is not None
    assert NCCLWeightTransferInitInfo(**info.init).packed
    assert NCCLWeightTransferUpdateInfo(**info.update).shapes == [[2, 3], [4]]


@pytest.mark.integration
@pytest.mark.filterwarnings("ignore")
def test_vllm_unpacks_the_merged_ipc_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferInitInfo, IPCWeightTransferUpdateInfo

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    announced: list[UpdateInfo] = []
    exporter = FakeExporter("gpu0", [[{"gpu1": ("a1",)}, {"gpu1": ("b1",)}]])
    IpcPublisher(0, torch.bfloat16, exporter).publish(1, TENSORS, lambda info: announced.append(decode_update(info)))
    assert announced[0].init is not None
    assert not IPCWeightTransferInitInfo(**announced[0].init).packed
    assert IPCWeightTransferUpdateInfo(**announced[0].update).ipc_handles == [
        {"gpu0": ("a",), "gpu1": ("a1",)},
        {"gpu0": ("b",), "gpu1": ("b1",)},
    ]


def test_exported_memory_lives_for_two_versions() -> None:
    exporter = FakeExporter("gpu0", [])
    publisher = IpcPublisher(0, torch.bfloat16, exporter)
    for version in range(3):
        publisher.publish(version, TENSORS, lambda _: None)
    assert [ref() is not None for ref in exporter.exported] == [False, True, True]
    publisher.close()
    assert [ref() is not None for ref in exporter.exported] == [False, False, False]


def test_only_rank_0_announces_handles() -> None:
    announced: list[bytes] = []
    IpcPublisher(1, torch.bfloat16, FakeExporter("gpu1", [])).publish(1, TENSORS, announced.append)
    assert announced == []
