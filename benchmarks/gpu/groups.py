"""Broadcast groups of the weights that form anew when engine workers join, leave or are killed, on two cards."""

from __future__ import annotations

import multiprocessing
import os
import signal
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from benchmarks.form import Row
from benchmarks.gpu.sizes import Sizes, needs_cards

TENSORS = 4
"""Tensors of a version."""
WIDTH = 1024
"""Rows and columns of a tensor, which has 4 MiB."""
TIMEOUT_S = 60.0
"""Longest wait for a version, and for a process to end."""


def groups_rows(sizes: Sizes) -> list[Row]:
    """Broadcast five versions to a worker that leaves, one that is killed during the fourth, and one that follows.

    Raises:
        Skipped: there are fewer than two cards, and nccl refuses two ranks on one.
    """
    import torch

    from flash.weights.broadcast import BroadcastServer
    from flash.weights.publisher import HostPublisher
    from flash.weights.versions import decode_update

    needs_cards(sizes, 2)
    backend: Literal["gloo", "nccl"] = "nccl" if sizes.gpu else "gloo"
    workers, taken, wanted = Workers(backend), 0, 0
    server = partial(BroadcastServer, backend)
    publisher = HostPublisher(0, "127.0.0.1", torch.float32, TIMEOUT_S, TIMEOUT_S, server)
    try:
        for version in range(1, 6):
            if version == 3:
                workers.leave()
            if not workers.there:
                workers.join()
            # Other weights than those of the last version.
            tensors = ((f"layer {at}", torch.full((WIDTH, WIDTH), version + at / 64)) for at in range(TENSORS))
            offer = publisher.publish(version, tensors)
            assert offer is not None, "this is rank 0"
            killed = version == 4
            got = workers.take(decode_update(offer.update_info).update, killed)
            wanted, taken = wanted + (not killed), taken + got.count(TENSORS)
        workers.leave()
    finally:
        publisher.close()
    return [Row(f"groups of {backend}", "versions_taken", "versions", taken, None, wanted)]


class Workers:
    """Processes with an engine worker's side of the broadcast, forked from one that has imported torch."""

    def __init__(self, backend: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "flash.weights.broadcast"])
        self._backend = backend
        self.there: list[tuple[Any, Connection]] = []
        """Each process that runs, with the connection to it."""

    def join(self) -> None:
        """Start a worker."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, self._backend), daemon=True)
        process.start()
        theirs.close()
        self.there.append((process, ours))

    def leave(self) -> None:
        """Let the oldest worker leave its group and end."""
        process, orders = self.there.pop(0)
        orders.send(None)
        process.join(TIMEOUT_S)

    def take(self, source: dict[str, Any], killed: bool) -> list[int]:
        """Let all workers pull a version; return how many tensors each got, -1 if none.

        Where `killed` is true, the oldest worker kills itself after its first tensor, and is not counted.
        """
        for number, (_, orders) in enumerate(self.there):
            orders.send((source, killed and number == 0))
        if killed:
            process, _ = self.there.pop(0)
            process.join(TIMEOUT_S)
            assert process.exitcode == -signal.SIGKILL, process.exitcode
        left, got = {orders for _, orders in self.there}, list[int]()
        while left and (ready := wait(list(left), TIMEOUT_S)):
            for orders in ready:
                assert isinstance(orders, Connection)
                left.discard(orders)
                try:
                    got.append(orders.recv())
                except EOFError:
                    got.append(-1)
        return got + [-1] * len(left)


def work(orders: Connection, backend: str) -> None:
    """Run a worker's process: pull each version that is ordered, or kill itself after the first tensor if told to."""
    import torch

    from flash.weights.broadcast import BroadcastReceiver
    from flash.weights.tcp import WeightSource, pull

    # The first card is the trainer's.
    device = torch.device("cuda", 1) if backend == "nccl" else torch.device("cpu")
    if backend == "nccl":
        torch.cuda.set_device(device)
    receiver = BroadcastReceiver(device)
    while (order := orders.recv()) is not None:
        source, killed = order
        taken = 0
        for _ in pull(WeightSource(**source), receiver.receive):
            taken += 1
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
        orders.send(taken)
    receiver.leave()
