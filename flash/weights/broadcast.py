"""Backends nccl and gloo: a version is broadcast to all engine workers that request it, in a process group of torch.

A *version* is the weights after a training step; a *worker* is a process of an engine that holds the model, or a part
of it. A *swap* is the load of a version by an engine; its time limit is `deadlines.swap`. The trainer's rank 0 is rank
0 of each group and sends from immutable copies in host memory. A worker makes a TCP connection for each version, and
both sides prove that they know the run's token. The messages below travel over this connection, and the version's bytes
by broadcast, in pieces. A *round* is one broadcast of a version to some workers; `flash.weights.rounds` chooses them.
An *epoch* is the number of a process group. With nccl the pieces are on GPUs (nccl has not been run on GPUs yet), with
gloo in host memory.

    worker → trainer   BroadcastRequest: asks for a version, and has the number of pieces that the worker holds;
                       the worker sends it again after a failed round
    trainer → worker   VersionManifest, once; or VersionRefused
    trainer → worker   RoundOrder: the group to join or keep, and the pieces that this group sends
    trainer → worker   LeaveGroup: the group failed; leave it and request again
    worker → trainer   VersionReceived

The manifest is checked by its SHA-256, and all tensors by their fingerprint. A round waits at most `GATHER_S` for
expected workers; a broadcast waits for all its members. If a member dies, hangs or leaves during a round, the round
fails for all members. They leave the group and request again, and a new group sends the pieces that some member lacks.
Each worker keeps its pieces, so nothing is lost. A late worker gets the next round. A broadcast cannot deadlock with
the trainer's own collectives, because a broadcast begins only when all its members wait for this broadcast alone.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from queue import SimpleQueue
from typing import Annotated, Literal
from uuid import uuid4

import msgspec
import torch
from msgspec import Meta

from flash.errors import TransportError, WeightsError
from flash.foreign.torch import Broadcasts, open_store, reach_store
from flash.weights.image import Fingerprint, join_pieces, split_image
from flash.weights.rounds import Round, RoundPlanner
from flash.weights.tcp import WeightServer, WeightSource, check_manifest, receive_message, send_message, version_gone

GATHER_S = 2.0
"""Seconds for which a round waits for expected workers. A short wait is enough: a worker that comes later is served by
a second round, which costs no more than the first."""
PIECE_BYTES = 64 << 20
"""Bytes of one broadcast: enough to keep a link busy. A failure loses at most one piece."""
SWAP_SHARE = 8
"""Divisor of the swap's time limit that gives the time limit of one broadcast. So a broadcast can fail and be repeated
within one swap."""
ANSWER_S = 10.0
"""Seconds that a worker has to react to LeaveGroup. The worker may first be loading tensors that it has received."""
PAUSE_S = 0.5
"""Seconds without a new round after a failed round. Without this pause, workers would retry thousands of times while
the cause of the failure lasts."""
MAX_REQUEST_BYTES = 4096
"""Largest number of bytes of a worker's message: far above any `BroadcastRequest`, and small in memory."""

_log = logging.getLogger(__name__)


# -- messages --------------------------------------------------------------------------------------------------------


class BroadcastRequest(msgspec.Struct, frozen=True, tag=True):
    """Request for a version. The worker waits until a round sends it."""

    member: str
    """Name of the worker. It is unique, and the worker keeps it as long as its process lives."""
    version: int
    held: Annotated[int, Meta(ge=0)]
    """Number of pieces of the version that the worker has."""


class VersionReceived(msgspec.Struct, frozen=True, tag=True):
    """Report that the worker has the whole version."""


class VersionManifest(msgspec.Struct, frozen=True, tag=True):
    """Manifest of the version: the tensors whose bytes the rounds send."""

    data: bytes
    """msgpack of a list of `TensorMeta`."""


class VersionRefused(msgspec.Struct, frozen=True, tag=True):
    """Refusal of a request: the trainer does not hold the version any more."""

    error: str
    """Reason, as a sentence for the worker's error message."""


class RoundOrder(msgspec.Struct, frozen=True, tag=True):
    """Order to take part in the broadcast that begins now."""

    epoch: int
    """Number of the group. A worker that belongs to this group already stays in it; any other worker joins it."""
    rank: int
    """Rank of the worker in the group."""
    size: int
    """Number of ranks in the group, including the trainer's."""
    port: int
    """Port on the trainer's host at which the group meets."""
    first: int
    """Number of the first piece that is sent."""
    piece_bytes: int
    """Bytes of each piece except the last one, which may be shorter."""


class LeaveGroup(msgspec.Struct, frozen=True, tag=True):
    """Notice that the group has failed. The worker leaves it and requests the version again."""


FromWorker = BroadcastRequest | VersionReceived
FromTrainer = VersionManifest | VersionRefused | RoundOrder | LeaveGroup
_FROM_WORKER: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)
_FROM_TRAINER: msgspec.msgpack.Decoder[FromTrainer] = msgspec.msgpack.Decoder(FromTrainer)


# -- the trainer's side ----------------------------------------------------------------------------------------------


class BroadcastServer(WeightServer):
    """Broadcasts the newest versions to workers that prove the token.

    Threads: one accepts connections, one for each connected worker reads its messages, and one broadcasts. All end
    after `close`.

    Args:
        backend: torch's name of the backend.
        host: an address of this machine that workers reach.
        prove_s: seconds for a worker to prove the token.
        timeout_s: seconds for which a worker that has proven the token may be silent: the time limit of a swap. A
            broadcast may take 1 / `SWAP_SHARE` of this time.
        gather_s: seconds for which a round waits for expected workers.
        piece_bytes: bytes of one broadcast.

    Raises:
        OSError: `host` is no address of this machine.
    """

    compares_crc32 = False
    """False: workers compare the fingerprint of all tensors, and no CRC-32."""

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
        self._limit_s = timeout_s / SWAP_SHARE
        """Time limit in seconds of forming a group, and of one broadcast."""
        self._device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._changed = threading.Condition()
        """Guards `_planner`, `_connections` and `_closing`; notified when one of them changes."""
        self._planner = RoundPlanner(gather_s)
        self._connections: dict[str, socket.socket] = {}
        """Connection of each worker that has requested a version, by member name."""
        self._closing = False
        self.epoch = 0
        """Number of the newest group, open or closed; 0 before the first group."""
        self._port = 0
        """Port at which the newest group met."""
        self._group: Broadcasts | None = None
        """The open group; None before the first round and after a failed round. Only the thread that broadcasts sets
        it. Other threads may abort it at any time, which does nothing to a closed group."""
        # From here on, threads of connections call `_answer`, which uses the fields above.
        super().__init__(host, prove_s, timeout_s)
        self._rounds = threading.Thread(target=self._run_rounds, name="flash-weights-rounds", daemon=True)
        self._rounds.start()

    def close(self) -> None:
        """Accept no connection any more, end the connections of waiting workers, and leave the group.

        The thread that broadcasts leaves the group when it ends. This method waits for that thread, but no longer than
        a broadcast may take.
        """
        super().close()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            for connection in self._connections.values():
                _shut_down(connection)
        self._rounds.join(timeout=self._limit_s)

    # -- in the threads of the connections -----------------------------------------------------------------------------

    def _answer(self, connection: socket.socket) -> None:
        """Serve one worker, in the thread of its connection, until it reports the whole version or its connection ends.

        The method sends the manifest, or refuses the version. Then it waits for the worker's messages, and passes each
        request to the planner with `request`. At the end it calls `finish` of the planner if the worker has the whole
        version, else `remove`. Like the method of `WeightServer`, it raises OSError or TransportError if the worker is
        lost.
        """
        member: str | None = None
        received = False
        try:
            while isinstance(message := receive_message(connection, _FROM_WORKER, MAX_REQUEST_BYTES), BroadcastRequest):
                if member is None:
                    if (image := self._held_image(message.version)) is None:
                        send_message(connection, VersionRefused(self._not_held(message.version)))
                        return
                    send_message(connection, VersionManifest(image.manifest))
                    member = message.member
                with self._changed:
                    self._connections[member] = connection
                    self._planner.request(member, message.version, message.held, time.monotonic())
                    self._notify()
            received = True
        finally:
            with self._changed:
                # The worker may have connected again meanwhile. Then its newer connection counts, and this thread must
                # not remove the worker from the planner.
                if member is not None and self._connections.get(member) is connection:
                    del self._connections[member]
                    if received:
                        self._planner.finish(member)
                    else:
                        self._planner.remove(member)
                    self._notify()

    def _notify(self) -> None:
        """Wake the thread that broadcasts, after a change of the planner. The caller must hold `_changed`.

        If the running round has failed, the group is aborted, which ends its broadcast. Without this, the thread would
        wait for a missing member until the broadcast's time limit.
        """
        if self._planner.failed and (group := self._group) is not None:
            group.abort()
        self._changed.notify_all()

    # -- in the thread that broadcasts ---------------------------------------------------------------------------------

    def _run_rounds(self) -> None:
        """Wait for the planner's next round and broadcast it, again and again, until `close`.

        The variable `turn` holds a round. Requests of workers and `close` end the wait. If the group of a round fails,
        the round is marked as failed in the planner, and the members' next requests lead to another round.
        """
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # each thread has a current device of its own
        while (turn := self._next_round()) is not None:
            try:
                self._send(turn)
            except (RuntimeError, OSError, TransportError) as error:  # torch raises plain RuntimeErrors
                # Log the error as text: its traceback would keep the group alive.
                _log.warning(
                    "version %d is sent again, because the group of epoch %d failed: %s",
                    turn.version,
                    turn.epoch,
                    str(error),
                )
                with self._changed:
                    self._planner.fail()
                    self._changed.wait_for(lambda: self._closing, PAUSE_S)
            self._end_round()
        self._close_group()

    def _next_round(self) -> Round | None:
        """Wait until a round can begin, begin it in the planner, and return it. Return None if the server closes.

        The caller has to send the round and to end it (`_send`, `_end_round`), because no other round begins before.
        """
        with self._changed:
            while not self._closing:
                wait_s = self._planner.wait_s(time.monotonic())
                # 0: a round can begin. Infinity: only a request, or the end of a round, makes one possible.
                if wait_s <= 0:
                    return self._planner.begin()
                self._changed.wait(None if wait_s == math.inf else wait_s)
        return None

    def _send(self, turn: Round) -> None:
        """Send the members of a round their orders, and broadcast the pieces.

        Raises:
            RuntimeError, OSError, TransportError: the group failed.
        """
        image = self._held_image(turn.version)
        if image is None:  # newer versions have replaced it while its workers waited
            self._send_to(turn.members, VersionRefused(self._not_held(turn.version)))
            return
        size, store = 1 + len(turn.members), None
        if turn.epoch != self.epoch:
            self._close_group()
            store, self._port = open_store(self._host, self._limit_s)
            self.epoch = turn.epoch
        # The orders go out before the group is made, which waits until all members join it.
        for rank, member in enumerate(turn.members, start=1):
            order = RoundOrder(turn.epoch, rank, size, self._port, turn.first, self._piece_bytes)
            self._send_to([member], order)
        if store is not None and not self._planner.failed:
            self._group = Broadcasts(self.backend, store, 0, size, self._limit_s)
        for piece in split_image(image, turn.first, self._piece_bytes, self._device):
            # The threads of connections set `failed`, and abort the group. A stale value costs one more broadcast at
            # most, so no lock is needed to read it.
            if self._planner.failed:
                raise TransportError("an engine's worker is gone, or has left the group")
            assert self._group is not None, "an epoch that has not failed has its group"
            self._group.broadcast(piece)

    def _end_round(self) -> None:
        """Wait until each member has reported that it has the version, for at most the time limit of a broadcast.

        If a member has not reported by then, or the round has failed, the group is closed, and the unfinished members
        have to leave it before the next round. A member that does not leave within `ANSWER_S`, or within the time limit
        of a broadcast if that is shorter, loses its connection. `_run_rounds` calls this after each round.
        """
        planner, answer_s = self._planner, min(ANSWER_S, self._limit_s)
        with self._changed:
            self._changed.wait_for(lambda: planner.failed or not planner.unfinished, self._limit_s)
            if not planner.failed and not planner.unfinished:
                return
            planner.fail()
            unfinished = set(planner.unfinished)
        self._close_group()
        self._send_to(unfinished, LeaveGroup())
        with self._changed:
            self._changed.wait_for(lambda: not planner.unfinished, answer_s)
            for member in set(planner.unfinished):
                _log.warning("a worker did not leave its group within %g s; its connection is ended", answer_s)
                planner.remove(member)
                _shut_down(self._connections[member])

    def _close_group(self) -> None:
        """Leave the open group, if there is one."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _send_to(self, members: Iterable[str], message: FromTrainer) -> None:
        """Send a message to workers. A lost connection is ignored: the thread that reads from it notices the loss."""
        for member in members:
            with self._changed:
                connection = self._connections.get(member)
            if connection is not None:
                with suppress(OSError):
                    send_message(connection, message)


def _shut_down(connection: socket.socket) -> None:
    """End a connection. The thread that reads from it wakes and closes the socket."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


# -- the worker's side -----------------------------------------------------------------------------------------------

Inbox = SimpleQueue[FromTrainer | Exception]
"""Queue of the trainer's messages and, at its end, of the error that ended the connection. The connection's thread
fills the queue, and the main thread reads it."""


class BroadcastReceiver:
    """Worker's side of the broadcasts. It exists as long as the worker's process and is in at most one group at a time.

    Invariant: each piece of a version is used exactly once and in order, even if several groups are needed to receive
    all pieces.

    Args:
        device: the GPU on which pieces and tensors lie with nccl. With gloo, pieces and tensors lie in host memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._name = uuid4().hex
        self._group_id: tuple[str, int] | None = None
        """Token of the trainer and epoch of `_group`. A restarted trainer has another token, so the epochs of two
        trainers are not confused."""
        self._group: Broadcasts | None = None
        """The group that this worker is in; None if it is in none."""
        self._receiving = False
        """True while a version is being received. Only then must the end of the connection abort the broadcast."""

    def receive(self, connection: socket.socket, source: WeightSource) -> Iterator[tuple[str, torch.Tensor]]:
        """Request the version and yield its tensors. `flash.weights.tcp.pull` calls this.

        Raises:
            VersionGoneError: the trainer does not hold the version any more.
            WeightsError: the manifest or the tensors are damaged.
            OSError, TransportError: the connection was lost, or the trainer sent something unexpected.
        """
        inbox: Inbox = SimpleQueue()
        self._receiving = True
        listener = threading.Thread(target=self._listen, args=(connection, inbox), daemon=True)
        listener.start()
        try:
            send_message(connection, BroadcastRequest(self._name, source.version, 0))
            first = _next_message(inbox)
            if not isinstance(first, VersionManifest):
                raise TransportError(f"{source.host}:{source.port} sent another first message than expected: {first!r}")
            lines = check_manifest(first.data, source)
            fingerprint = Fingerprint()
            device = self._device if source.backend == "nccl" else torch.device("cpu")
            pieces = self._pieces(connection, inbox, source, sum(line.nbytes for line in lines), device)
            for name, tensor in join_pieces(lines, pieces, device):
                fingerprint.add(tensor)
                yield name, tensor
            if fingerprint.sums != source.fingerprint:
                raise WeightsError(
                    f"version {source.version} is damaged: the fingerprint of the received tensors is "
                    f"{fingerprint.sums}, {source.fingerprint} was published"
                )
            self._receiving = False
            send_message(connection, VersionReceived())
        finally:
            if self._receiving:  # the transfer ended early: leave, or the other members would wait for this worker
                self._receiving = False
                self.leave()
            _shut_down(connection)
            listener.join()

    def leave(self) -> None:
        """Leave the group, if there is one."""
        group, self._group, self._group_id = self._group, None, None
        if group is not None:
            group.close()

    def _listen(self, connection: socket.socket, inbox: Inbox) -> None:
        """Put the trainer's messages into the inbox, until the connection ends; `receive` ends it at the latest.

        This runs in a thread of its own, because the main thread may be blocked in a broadcast. If the broadcast cannot
        succeed any more, because of LeaveGroup or a lost connection, it is aborted here.
        """
        try:
            while True:
                message = receive_message(connection, _FROM_TRAINER)
                if isinstance(message, LeaveGroup):
                    self._abort_broadcast()
                inbox.put(message)
        except (OSError, TransportError) as error:
            inbox.put(error)
            self._abort_broadcast()

    def _abort_broadcast(self) -> None:
        """Make the main thread's broadcast raise, if a version is being received in a group."""
        if self._receiving and (group := self._group) is not None:
            group.abort()

    def _pieces(
        self, connection: socket.socket, inbox: Inbox, source: WeightSource, total: int, device: torch.device
    ) -> Iterator[torch.Tensor]:
        """Yield all `total` bytes of a version in pieces, in as many groups as are needed.

        If a group fails, this worker leaves it and requests the rest of the version again. Raises the errors of
        `_next_message` if the trainer refuses the version or the connection ends.
        """
        held, received = 0, 0
        while received < total:
            if not isinstance(order := _next_message(inbox), RoundOrder):
                continue  # LeaveGroup for a group that this worker has left already
            try:
                group = self._join(order, source)
                at = order.first
                while (start := at * order.piece_bytes) < total:
                    piece = torch.empty(min(order.piece_bytes, total - start), dtype=torch.uint8, device=device)
                    group.broadcast(piece)
                    # A piece that this worker already has is skipped: it is sent for other members.
                    if at == held:
                        held, received = at + 1, received + len(piece)
                        yield piece
                    at += 1
            except RuntimeError as error:  # torch raises plain RuntimeErrors
                _log.info("version %d is requested again, because its group failed: %s", source.version, str(error))
                self.leave()
                send_message(connection, BroadcastRequest(self._name, source.version, held))

    def _join(self, order: RoundOrder, source: WeightSource) -> Broadcasts:
        """Return the group that an order names. If this worker is not a member yet, join and wait for all members.

        Raises:
            RuntimeError: a member failed or did not come in time. `_pieces` then requests the version again.
        """
        group_id = source.token, order.epoch
        if self._group is None or self._group_id != group_id:
            self.leave()
            limit_s = source.timeout_s / SWAP_SHARE
            store = reach_store(source.host, order.port, limit_s)
            self._group = Broadcasts(source.backend, store, order.rank, order.size, limit_s)
            self._group_id = group_id
        return self._group


def _next_message(inbox: Inbox) -> FromTrainer:
    """Return the trainer's next message.

    Raises:
        VersionGoneError: the trainer refused the version.
        OSError: the connection was lost.
        TransportError: the trainer hung up, or sent something that is not a message.
    """
    message = inbox.get()
    if isinstance(message, Exception):
        raise message
    if isinstance(message, VersionRefused):
        raise version_gone(message.error)
    return message
