"""Broadcasts to groups of engine workers over gloo, in which workers join, leave, hang or are killed.

A *version* is the weights after a training step. An *epoch* is the number of a process group.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flash.errors import DeadlineError, FlashError, TransportError, VersionGoneError, WeightsError
from flash.weights.broadcast import BroadcastReceiver, BroadcastServer
from flash.weights.image import TensorMeta, join_pieces, make_image, split_image
from flash.weights.publisher import HostPublisher
from flash.weights.tcp import WeightSource, pull
from flash.weights.versions import decode_update

CPU = torch.device("cpu")
TIMEOUT_S = 24.0
"""Time limit of a swap in seconds. A broadcast may take an eighth of it."""
PIECE = 4096
"""Bytes of one broadcast."""
Tensors = dict[str, torch.Tensor]


class Trainer:
    """Rank 0 of a trainer, which publishes another random model for each version."""

    def __init__(self, gather_s: float) -> None:
        """Start the server. `gather_s`: seconds for which a round waits for expected workers."""
        self.server = BroadcastServer("gloo", "127.0.0.1", 5.0, TIMEOUT_S, gather_s, PIECE)
        self._publisher = HostPublisher(0, "", torch.float32, 0.0, 0.0, lambda *_: self.server)
        self.model: Tensors = {}
        """Tensors of the newest version."""

    def publish(self, version: int) -> WeightSource:
        """Publish a version, and return the source that engines would be told."""
        random = torch.Generator().manual_seed(version)
        shapes = [(700 + 13 * layer, 5) for layer in range(8)]
        self.model = {f"layer {at}": torch.randn(shape, generator=random) for at, shape in enumerate(shapes)}
        offer = self._publisher.publish(version, iter(self.model.items()))
        assert offer is not None
        return WeightSource(**decode_update(offer.update_info).update)

    def close(self) -> None:
        self._publisher.close()


@pytest.fixture
def trainers() -> Iterator[Callable[[float], Trainer]]:
    """Yield a function that makes a trainer with this `gather_s`. The trainers are closed at the end of the test."""
    made = list[Trainer]()

    def make(gather_s: float) -> Trainer:
        made.append(Trainer(gather_s))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def pulls(member: BroadcastReceiver, source: WeightSource) -> Tensors:
    """Let one worker pull a version, and return the tensors."""
    return dict(pull(source, member.receive))


def pulled_by(members: Sequence[BroadcastReceiver], source: WeightSource) -> list[Tensors]:
    """Let members pull at the same time, and return what each of them gets."""
    with ThreadPoolExecutor(max(1, len(members))) as pool:
        return list(pool.map(lambda member: pulls(member, source), members))


def equal(found: Tensors, model: Tensors) -> bool:
    """Return True if the tensors are equal, bit for bit."""
    return found.keys() == model.keys() and all(torch.equal(found[name], model[name]) for name in model)


def members(count: int) -> list[BroadcastReceiver]:
    """Return new workers, which have requested no version yet."""
    return [BroadcastReceiver(CPU) for _ in range(count)]


def test_versions_arrive_whole_and_the_same_workers_form_one_group(trainers: Callable[[float], Trainer]) -> None:
    trainer, workers = trainers(5.0), members(3)
    for worker in workers:  # known from now on
        assert equal(pulls(worker, trainer.publish(1)), trainer.model)
    source = trainer.publish(2)
    assert all(equal(found, trainer.model) for found in pulled_by(workers, source))
    epoch = trainer.server.epoch
    for version in (3, 4, 5):
        assert all(equal(found, trainer.model) for found in pulled_by(workers, trainer.publish(version)))
    assert trainer.server.epoch == epoch
    for worker in workers:
        worker.leave()


@pytest.mark.slow
def test_engines_join_and_leave_20_times_and_every_version_arrives_whole(
    trainers: Callable[[float], Trainer],
) -> None:
    trainer, workers, rng = trainers(0.2), members(2), Random(7)
    changes, taken = 0, 0
    for version in range(1, 30):
        if version > 1:
            if len(workers) < 2 or (len(workers) < 5 and rng.random() < 0.5):
                workers.append(BroadcastReceiver(CPU))
            else:
                workers.pop(rng.randrange(len(workers))).leave()
            changes += 1
        source = trainer.publish(version)
        found = pulled_by(workers, source)
        assert all(equal(one, trainer.model) for one in found), f"version {version}"
        taken += len(found)
        if changes == 20:
            break
    assert changes == 20
    assert trainer.server.epoch <= taken
    for worker in workers:
        worker.leave()


DIES = """
import os, signal, sys
import msgspec, torch
from flash.weights.broadcast import BroadcastReceiver
from flash.weights.tcp import WeightSource, pull

member = BroadcastReceiver(torch.device("cpu"))
for line in sys.stdin:
    source = WeightSource(**msgspec.json.decode(line))
    for number, _ in enumerate(pull(source, member.receive)):
        if (source.version, number) == (2, 3):
            os.kill(os.getpid(), signal.SIGKILL)
    print("has it", flush=True)
"""
"""A worker that takes version 1, and is killed in the middle of version 2."""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_worker_killed_during_a_broadcast_does_not_keep_others_from_the_version(
    trainers: Callable[[float], Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer, workers = trainers(30.0), members(3)
    source = trainer.publish(1)
    command, root = [sys.executable, "-c", DIES], Path(__file__).parents[2]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root) as doomed:
        assert doomed.stdin is not None
        assert doomed.stdout is not None

        def give(source: WeightSource) -> None:
            # Make the process pull this version.
            assert doomed.stdin is not None
            doomed.stdin.write(msgspec.json.encode(vars(source)).decode() + "\n")
            doomed.stdin.flush()

        give(source)
        assert doomed.stdout.readline() == "has it\n"
        for worker in workers:
            pulls(worker, source)
        source = trainer.publish(2)
        give(source)
        found = pulled_by(workers, source)
        assert doomed.wait(30) == -9
    assert all(equal(one, trainer.model) for one in found)
    assert "version 2 is sent again" in caplog.text
    assert all(equal(one, trainer.model) for one in pulled_by(workers, trainer.publish(3)))
    for worker in workers:
        worker.leave()


@pytest.mark.timeout(120)
def test_a_worker_that_hangs_in_mid_broadcast_is_left_behind(trainers: Callable[[float], Trainer]) -> None:
    trainer, workers, hangs, go_on = trainers(30.0), members(2), BroadcastReceiver(CPU), threading.Event()
    source = trainer.publish(1)
    for worker in (hangs, *workers):
        pulls(worker, source)
    source = trainer.publish(2)
    ends = list[FlashError]()

    def hang() -> None:
        # Stop after the third tensor, until the others have the version.
        try:
            for number, _ in enumerate(pull(source, hangs.receive)):
                if number == 2:
                    go_on.wait(60)
        except FlashError as error:
            ends.append(error)

    thread = threading.Thread(target=hang)
    thread.start()
    found = pulled_by(workers, source)
    assert all(equal(one, trainer.model) for one in found)
    go_on.set()
    thread.join(60)
    assert [type(error) for error in ends] == [TransportError]
    assert equal(pulls(hangs, source), trainer.model), "it may come back"
    for worker in (hangs, *workers):
        worker.leave()


def test_a_worker_that_gives_up_during_a_broadcast_can_pull_again(
    trainers: Callable[[float], Trainer],
) -> None:
    trainer, workers = trainers(5.0), members(2)
    source = trainer.publish(1)
    for worker in workers:
        pulls(worker, source)
    source = trainer.publish(2)

    def gives_up() -> None:
        # End the pull after its first tensor.
        with contextlib.closing(cast(Generator[Any], pull(source, workers[0].receive))) as half:
            next(half)

    with ThreadPoolExecutor(2) as pool:
        pool.submit(gives_up)
        assert equal(pool.submit(pulls, workers[1], source).result(60), trainer.model)
    assert equal(pulls(workers[0], source), trainer.model)
    for worker in workers:
        worker.leave()


def test_a_version_that_nobody_holds_is_refused(trainers: Callable[[float], Trainer]) -> None:
    trainer = trainers(1.0)
    old = trainer.publish(1)
    trainer.publish(2)
    trainer.publish(3)
    with pytest.raises(VersionGoneError, match=r"version 1 is not held any more; held are \[2, 3\]"):
        pulls(BroadcastReceiver(CPU), old)


def test_received_tensors_are_compared_with_the_fingerprint(trainers: Callable[[float], Trainer]) -> None:
    server = trainers(1.0).server
    source = server.hold(1, make_image([("a", torch.ones(3))], crc32=False), [1, 2])
    with pytest.raises(WeightsError, match="version 1 is damaged: the fingerprint of the received tensors is"):
        pulls(BroadcastReceiver(CPU), source)


def test_a_waiting_worker_gets_an_error_when_the_trainer_closes(trainers: Callable[[float], Trainer]) -> None:
    trainer, worker = trainers(30.0), BroadcastReceiver(CPU)
    for one in (worker, BroadcastReceiver(CPU)):  # the second one is expected, and does not come
        pulls(one, trainer.publish(1))
    source = trainer.publish(2)
    threading.Timer(0.5, trainer.close).start()
    with pytest.raises((TransportError, DeadlineError)):
        pulls(worker, source)


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(1, 64), st.integers(0, 3))
def test_tensors_joined_from_pieces_equal_the_published_ones(sizes: list[int], piece_bytes: int, first: int) -> None:
    tensors = [(str(at), torch.arange(size, dtype=torch.int16) + at) for at, size in enumerate(sizes)]
    image = make_image([(name, tensor.clone()) for name, tensor in tensors])
    whole = list(split_image(image, 0, piece_bytes, CPU))
    first = min(first, max(0, len(whole) - 1))
    assert [one.tolist() for one in split_image(image, first, piece_bytes, CPU)] == [
        one.tolist() for one in whole[first:]
    ]
    lines = msgspec.msgpack.decode(image.manifest, type=list[TensorMeta])
    found = list(join_pieces(lines, iter(whole), CPU))
    assert [name for name, _ in found] == [name for name, _ in tensors]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, tensors, strict=True))
