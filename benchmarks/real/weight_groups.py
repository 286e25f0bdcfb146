"""Engine workers that join, leave and are killed, while versions are broadcast to them over gloo.

The trainer's side is a run's own; the workers are processes with the worker's side of one, and no engine. Before each
version one of them changes: it joins, leaves, or is killed while the version arrives. Every tensor that a worker takes
is held to the fingerprint of what was published. `trainer_cpu_ms` is processor time of the trainer's process for a
version, its copy included; the reference is the same over tcp, with as many workers that stay.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from random import Random
from typing import Any, Literal

from benchmarks.form import Args, Row, main

CHANGES, QUICK_CHANGES = 50, 12
LAYERS, QUICK_LAYERS = 32, 8
WIDTH = 1024
"""A layer has 4 MiB."""
MOST = 6
"""Workers at a time."""
TIMEOUT_S = 60.0


def work(orders: Connection, backend: str) -> None:
    """A worker's process: it pulls what it is told, and dies in the middle where it is told so."""
    import torch

    from flash.weights.broadcast import BroadcastReceiver
    from flash.weights.tcp import WeightSource, pull

    if backend == "nccl":
        torch.cuda.set_device(1)  # the first is the trainer's
    member = BroadcastReceiver(torch.device("cuda", 1) if backend == "nccl" else torch.device("cpu"))
    receive = None if backend == "tcp" else member.receive
    while (order := orders.recv()) is not None:
        source, fatal = order
        taken = 0
        for _ in pull(WeightSource(**source), receive):
            taken += 1
            if taken == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
        orders.send(taken)
    member.leave()


class Workers:
    """Processes, forked from one that has torch."""

    def __init__(self, backend: str) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "flash.weights.broadcast"])
        self._backend = backend
        self.there: list[tuple[Any, Connection]] = []

    def join(self) -> None:
        """One more."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=work, args=(theirs, self._backend), daemon=True)
        process.start()
        theirs.close()
        self.there.append((process, ours))

    def leave(self, number: int) -> None:
        """One goes, in order."""
        process, orders = self.there.pop(number)
        orders.send(None)
        process.join(TIMEOUT_S)

    def take(self, source: dict[str, Any], doomed: int | None, fatal: int) -> list[int]:
        """All pull a version, and one is killed; how many tensors the others got."""
        for number, (_, orders) in enumerate(self.there):
            orders.send((source, fatal if number == doomed else 0))
        if doomed is not None:
            process, _ = self.there.pop(doomed)
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


@contextmanager
def trainer(backend: Literal["gloo", "nccl", "tcp"]) -> Generator[Any]:
    """A publisher as rank 0 of a run has it."""
    import torch

    from flash.weights.broadcast import BroadcastServer
    from flash.weights.publisher import HostPublisher

    serve = None if backend == "tcp" else partial(BroadcastServer, backend)
    publisher = HostPublisher(0, "127.0.0.1", torch.float32, TIMEOUT_S, TIMEOUT_S, serve)
    try:
        yield publisher
    finally:
        publisher.close()


def publish(publisher: Any, version: int, layers: int) -> dict[str, Any]:
    """A version of other weights than the last; what announces it."""
    import torch

    from flash.weights.versions import decode_update

    tensors = ((f"layer {at}", torch.full((WIDTH, WIDTH), version + at / 64)) for at in range(layers))
    return decode_update(publisher.publish(version, tensors).update_info).update


def changing(changes: int, layers: int) -> list[Row]:
    """One change before each version."""
    rng, workers = Random(1), Workers("gloo")
    counts, wanted, whole = dict.fromkeys(("joined", "left", "killed"), 0), 0, 0
    with trainer("gloo") as publisher:
        for _ in range(3):
            workers.join()
        begun = time.process_time()
        for version in range(1, changes + 1):
            many = len(workers.there)
            kind = "joined" if many < 2 else rng.choice(("left", "killed") if many == MOST else tuple(counts))
            counts[kind] += 1
            if kind == "joined":
                workers.join()
            elif kind == "left":
                workers.leave(rng.randrange(many))
            doomed = rng.randrange(many) if kind == "killed" else None
            source = publish(publisher, version, layers)
            got = workers.take(source, doomed, rng.randrange(1, layers))
            wanted, whole = wanted + len(got), whole + got.count(layers)
        cpu_ms = 1e3 * (time.process_time() - begun) / changes
    for number in reversed(range(len(workers.there))):
        workers.leave(number)
    case = f"{changes} changes: {', '.join(f'{count} {kind}' for kind, count in counts.items())}"
    return [
        Row(case, "versions_taken", "versions", wanted),
        Row(case, "versions_lost", "versions", wanted - whole, goal=0),
        Row(case, "trainer_cpu_ms", "ms", cpu_ms, reference=staying("tcp", layers)),
        Row("4 workers that stay", "trainer_cpu_ms", "ms", staying("gloo", layers), reference=staying("tcp", layers)),
    ]


def staying(backend: Literal["gloo", "tcp"], layers: int, versions: int = 8) -> float:
    """Milliseconds of the trainer's processor for a version that four workers take."""
    workers = Workers(backend)
    with trainer(backend) as publisher:
        for _ in range(4):
            workers.join()
        assert workers.take(publish(publisher, 0, layers), None, 0) == [layers] * 4
        begun = time.process_time()
        for version in range(1, versions + 1):
            assert workers.take(publish(publisher, version, layers), None, 0) == [layers] * 4
        cpu_ms = 1e3 * (time.process_time() - begun) / versions
    for number in reversed(range(4)):
        workers.leave(number)
    return cpu_ms


def run(args: Args) -> list[Row]:
    """Changes, and none."""
    return changing(*((QUICK_CHANGES, QUICK_LAYERS) if args.quick else (CHANGES, LAYERS)))


if __name__ == "__main__":
    main("weight_groups", __doc__ or "", run)
