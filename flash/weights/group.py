"""The gloo and nccl backends: a version is broadcast to all engine workers that ask for it, in a process group of them.

The trainer's rank 0 is rank 0 of every group, and serves immutable host copies, as over tcp. A worker connects for each
version and proves the token; what is said on the connection is below, the bytes come by broadcast, in pieces. Workers
that come, go or die make a new epoch of the group (`flash.weights.membership`); the connections tell of it:

    worker → trainer   Ask, for a version; again, with the pieces that it has, when its group has failed
    trainer → worker   Manifest, once; or Refused
    trainer → worker   Order: the group to join or to keep, and what comes through it
    trainer → worker   Again: leave the group, and ask again
    worker → trainer   Got: all of it

Nothing of a version is lost with a group, as the trainer holds it and the worker keeps its pieces. The two backends
differ in the name that torch knows them by, and in where pieces lie: nccl's on the GPUs. It was not run on any yet.

No deadlock with the trainer's own collectives: the broadcast begins when all of its members wait for it, and they wait
for nothing else meanwhile.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Literal

import msgspec
import torch
from msgspec import Meta

from flash.errors import TransportError
from flash.foreign.torch import Broadcasts, open_store
from flash.weights.membership import Membership, Round
from flash.weights.tcp import Image, WeightServer, receive_frame, send_frame

GATHER_S = 2.0
"""Seconds for which paused engines wait for others: those come within a step, and a second round costs no more."""
PIECE_BYTES = 64 << 20
"""Bytes of a broadcast: a link is busy with so many, and a failure costs no more."""
PARTS = 8
"""A broadcast may take this part of the time for a swap: it can fail, and the version be sent again, in one swap."""
ANSWER_S = 10.0
"""Seconds in which a worker answers that is told to leave its group: it loads what it has got first."""

PAUSE_S = 0.5
"""Seconds after a failure, so that one that stays does not make engines try again thousands of times."""

_log = logging.getLogger(__name__)


class Ask(msgspec.Struct, frozen=True, tag=True):
    """A worker waits for a version."""

    member: str
    version: int
    held: Annotated[int, Meta(ge=0)]
    """Pieces that it has."""


class Got(msgspec.Struct, frozen=True, tag=True):
    """It has all."""


class Manifest(msgspec.Struct, frozen=True, tag=True):
    """A list of `TensorMeta`, encoded."""

    data: bytes


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is no such version."""

    error: str


class Order(msgspec.Struct, frozen=True, tag=True):
    """Take part in the broadcast that begins now."""

    epoch: int
    rank: int
    size: int
    """Of the group, with the trainer."""
    port: int
    """Where the group meets, on the trainer's host."""
    first: int
    """The first piece that is sent."""
    piece_bytes: int


class Again(msgspec.Struct, frozen=True, tag=True):
    """The group has failed."""


MOST_ASKED = 4096
"""Bytes of a worker's word."""

FromWorker = Ask | Got
FromTrainer = Manifest | Refused | Order | Again
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


class GroupServer(WeightServer):
    """Broadcasts the newest versions to workers that prove the token.

    Threads: one accepts, one per asking worker reads, one broadcasts. They end with `close`.

    Args:
        backend: of torch.
        host: an address of this machine that workers reach.
        prove_s: seconds for a worker to prove the token.
        timeout_s: longest silence of a worker that has; a broadcast has a part of it.
        gather_s: as of `Membership`.
        piece_bytes: of a broadcast.
    """

    summed = False

    def __init__(
        self,
        backend: Literal["gloo", "nccl"],
        host: str,
        prove_s: float,
        timeout_s: float,
        gather_s: float = GATHER_S,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.backend = backend
        self._piece_bytes = piece_bytes
        self._limit_s = timeout_s / PARTS
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._changed = threading.Condition()
        """Holds `_membership`, `_doors` and `_closing`."""
        self._membership = Membership(gather_s)
        self._doors: dict[str, socket.socket] = {}
        self._closing = False
        self.epoch = 0
        """Of the group that stands, or stood last."""
        self._port = 0
        self._group: Broadcasts | None = None
        super().__init__(host, prove_s, timeout_s)
        self._rounds = threading.Thread(target=self._broadcast, name="flash-weights-rounds", daemon=True)
        self._rounds.start()

    def close(self) -> None:
        """Accept no one any more, and leave the group; who still waits is hung up on."""
        super().close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            for door in self._doors.values():
                self._hang_up(door)
        self._rounds.join(timeout=self._limit_s)

    # -- threads of the connections ----------------------------------------------------------------------------------

    def _answer(self, connection: socket.socket) -> None:
        """Consumes a worker's words. Waits for the next one. Unblocked by its end. Produces what rounds are made of."""
        member: str | None = None
        done = False
        try:
            while isinstance(word := receive_frame(connection, _FROM_WORKER, MOST_ASKED), Ask):
                if member is None:
                    if (image := self._held(word.version)) is None:
                        send_frame(connection, Refused(self._not_held(word.version)))
                        return
                    send_frame(connection, Manifest(image.manifest))
                    member = word.member
                with self._changed:
                    self._doors[member] = connection
                    self._membership.asks(member, word.version, word.held, time.monotonic())
                    self._wake()
            done = True
        finally:
            with self._changed:
                if member is not None and self._doors.get(member) is connection:
                    del self._doors[member]
                    if done:
                        self._membership.got(member)
                    else:
                        self._membership.left(member)
                    self._wake()

    def _wake(self) -> None:
        """Let the thread that broadcasts see what has changed, even from within a broadcast that cannot end well."""
        if self._membership.broken and (group := self._group) is not None:
            group.abort()
        self._changed.notify_all()

    # -- the thread that broadcasts ----------------------------------------------------------------------------------

    def _broadcast(self) -> None:
        """Consumes rounds. Waits for the next one. Unblocked by workers that ask, and by `close`."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # which belongs to a thread
        while (turn := self._next_round()) is not None:
            try:
                self._send(turn)
            except (RuntimeError, OSError, TransportError) as error:  # torch's have no base but RuntimeError
                # As text: a traceback would keep the group.
                _log.warning("version %d goes out again, epoch %d has ended: %s", turn.version, turn.epoch, str(error))
                with self._changed:
                    self._membership.breaks()
                    self._changed.wait_for(lambda: self._closing, PAUSE_S)
            self._end_round()
        self._leave()

    def _next_round(self) -> Round | None:
        with self._changed:
            while not self._closing:
                wait_s = self._membership.wait_s(time.monotonic())
                if wait_s <= 0:
                    return self._membership.begin()
                self._changed.wait(None if wait_s == math.inf else wait_s)
        return None

    def _send(self, turn: Round) -> None:
        image = self._held(turn.version)
        if image is None:  # newer ones have come while they waited
            self._tell(turn.members, Refused(self._not_held(turn.version)))
            return
        size, store = 1 + len(turn.members), None
        if turn.epoch != self.epoch:
            self._leave()
            store, self._port = open_store(self._host, self._limit_s)
            self.epoch = turn.epoch
        for rank, member in enumerate(turn.members, start=1):
            self._tell([member], Order(turn.epoch, rank, size, self._port, turn.first, self._piece_bytes))
        if store is not None and not self._membership.broken:
            self._group = Broadcasts(self.backend, store, 0, size, self._limit_s)
        for piece in cut(image, turn.first, self._piece_bytes, self._device):
            if self._membership.broken:
                raise TransportError("an engine's worker is gone, or has left it")
            assert self._group is not None, "an unbroken epoch has its group"
            self._group.broadcast(piece)

    def _end_round(self) -> None:
        """Wait until each member has said how it went. Unless well for all of them, they leave the group."""
        membership, answer_s = self._membership, min(ANSWER_S, self._limit_s)
        with self._changed:
            self._changed.wait_for(lambda: membership.broken or not membership.owing, self._limit_s)
            if not membership.broken and not membership.owing:
                return
            membership.breaks()
            owing = set(membership.owing)
        self._leave()
        self._tell(owing, Again())
        with self._changed:
            self._changed.wait_for(lambda: not membership.owing, answer_s)
            for member in set(membership.owing):
                _log.warning("a worker did not leave its group within %g s: it is hung up on", answer_s)
                membership.left(member)
                self._hang_up(self._doors[member])

    def _leave(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _tell(self, members: Iterable[str], word: FromTrainer) -> None:
        """Who cannot be told is noticed by the thread that reads."""
        for member in members:
            with self._changed:
                door = self._doors.get(member)
            if door is not None:
                with suppress(OSError):
                    send_frame(door, word)

    @staticmethod
    def _hang_up(door: socket.socket) -> None:
        """Its thread reads the end."""
        with suppress(OSError):
            door.shutdown(socket.SHUT_RDWR)


def cut(image: Image, first: int, piece_bytes: int, device: torch.device) -> Iterator[torch.Tensor]:
    """The bytes of an image in pieces, from this one on; the last may be shorter."""
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
