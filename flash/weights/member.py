"""The worker's side of `flash.weights.group`: it asks for versions, and is a member of one group after the other.

Law: each piece of a version is taken once, in order, however many groups it takes to get them all.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from uuid import uuid4

import msgspec
import torch

from flash.errors import TransportError, WeightsError
from flash.foreign.torch import Broadcasts, reach_store
from flash.weights.fingerprint import Fingerprint
from flash.weights.group import PARTS, Again, Ask, FromTrainer, Got, Manifest, Order, Refused
from flash.weights.tcp import TcpSource, TensorMeta, check_manifest, receive_frame, refused, send_frame
from flash.weights.update import DAMAGED

Words = SimpleQueue[FromTrainer | Exception]
"""The trainer's, and the end of the connection."""
_FROM_TRAINER: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)
_log = logging.getLogger(__name__)


class Member:
    """An engine worker's side; one for the life of its process.

    Args:
        device: where tensors are wanted; a backend that has its pieces elsewhere leaves them there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name = uuid4().hex
        self._epoch: tuple[str, int] | None = None
        """The token of its trainer, and the number of its group there."""
        self._group: Broadcasts | None = None
        self._receiving = False
        """Whether the end of a connection, or of a group, is not as it should be."""

    def receive(self, connection: socket.socket, source: TcpSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Fetch a version over a proven connection, for `flash.weights.tcp.pull`, whose errors it raises."""
        words: Words = SimpleQueue()
        self._receiving = True
        listener = threading.Thread(target=self._listen, args=(connection, words), daemon=True)
        listener.start()
        try:
            send_frame(connection, Ask(self._name, source.version, 0))
            first = _next(words)
            if not isinstance(first, Manifest):
                raise TransportError(f"{source.host}:{source.port} answers out of turn: {first!r}")
            lines = check_manifest(first.data, source)
            fingerprint = Fingerprint()
            device = self._device if source.backend == "nccl" else torch.device("cpu")
            pieces = self._pieces(connection, words, source, sum(line.nbytes for line in lines), device)
            for name, tensor in assembled(lines, pieces, device):
                fingerprint.add(tensor)
                yield name, tensor
            if fingerprint.sums != source.fingerprint:
                raise WeightsError(
                    f"version {source.version} {DAMAGED}: the fingerprint of what came is {fingerprint.sums}, "
                    f"{source.fingerprint} was published"
                )
            self._receiving = False
            send_frame(connection, Got())
        finally:
            if self._receiving:  # the others are in the middle of a broadcast
                self._receiving = False
                self.leave()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            listener.join()

    def leave(self) -> None:
        """Be of no group."""
        group, self._group, self._epoch = self._group, None, None
        if group is not None:
            group.close()

    def _listen(self, connection: socket.socket, words: Words) -> None:
        """Consumes the trainer's words. Waits for the next one. Unblocked by the end of the pull, or of the trainer.

        Produces what `receive` reads, and ends a broadcast of which nothing comes any more.
        """
        try:
            while True:
                word = receive_frame(connection, _FROM_TRAINER)
                if isinstance(word, Again):
                    self._end_broadcast()
                words.put(word)
        except (OSError, TransportError) as error:
            words.put(error)
            self._end_broadcast()

    def _end_broadcast(self) -> None:
        if self._receiving and (group := self._group) is not None:
            group.abort()

    def _pieces(
        self, connection: socket.socket, words: Words, source: TcpSource, total: int, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """All of a version's bytes, however many groups that takes."""
        held, taken = 0, 0
        while taken < total:
            if not isinstance(order := _next(words), Order):
                continue  # it has left the group before it was told to
            try:
                group = self._join(order, source)
                at = order.first
                while (start := at * order.piece_bytes) < total:
                    piece = torch.empty(min(order.piece_bytes, total - start), dtype=torch.uint8, device=device)
                    group.broadcast(piece)
                    if at == held:
                        held, taken = at + 1, taken + len(piece)
                        yield piece
                    at += 1
            except RuntimeError as error:  # torch's have no other base
                _log.info("version %d is asked for again, its group has ended: %s", source.version, str(error))
                self.leave()
                send_frame(connection, Ask(self._name, source.version, held))

    def _join(self, order: Order, source: TcpSource) -> Broadcasts:
        epoch = source.token, order.epoch
        if self._group is None or self._epoch != epoch:
            self.leave()
            limit_s = source.timeout_s / PARTS
            store = reach_store(source.host, order.port, limit_s)
            self._group = Broadcasts(source.backend, store, order.rank, order.size, limit_s)
            self._epoch = epoch
        return self._group


def _next(words: Words) -> FromTrainer:
    """The trainer's next word, or the end of the connection, raised."""
    word = words.get()
    if isinstance(word, Exception):
        raise word
    if isinstance(word, Refused):
        raise refused(word.error)
    return word


def assembled(
    lines: Iterable[TensorMeta], pieces: Iterator[torch.Tensor], device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a manifest, from the bytes of all of them in pieces."""
    piece = torch.empty(0, dtype=torch.uint8, device=device)
    for line in lines:
        flat, filled = torch.empty(line.nbytes, dtype=torch.uint8, device=device), 0
        while filled < line.nbytes:
            if not len(piece):
                piece = next(pieces)
            count = min(line.nbytes - filled, len(piece))
            flat[filled : filled + count] = piece[:count]
            filled, piece = filled + count, piece[count:]
        yield line.name, flat.view(getattr(torch, line.dtype)).view(line.shape)
