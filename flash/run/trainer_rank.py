"""Process of one trainer rank: it connects to the hub, joins the process group, and trains until no batch is left.

`flash.run.processes.worker` calls `run_trainer_rank` in a process that the launcher has started. The rank reports
itself to the hub, gets a checkpoint to start from, and builds the model and the publisher. Then it calls
`flash.trainer.loop.TrainerLoop.run`, which fetches shards from the hub and trains them. Only trainer ranks join torch's
process group.

All trainer ranks between two restarts are an *incarnation*. If the hub or another rank of the incarnation is gone, the
work of this rank cannot be used any more, and the launcher ends this process.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flash.config.machine import trainer_threads
from flash.config.tree import Config
from flash.errors import CollectiveError, FlashError, PeerLostError, TransportError
from flash.foreign.torch import collective_failed, open_store, private_store, reach_store
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.hub_place import TOKEN_VARIABLE, HubAddress
from flash.run.processes.rendezvous import advertised_host, find_hub
from flash.run.processes.supervisor import End
from flash.text import harmless

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from flash.hub.protocol import IncarnationReply
    from flash.transport.client import BlockingClient

log = logging.getLogger("flash")


def run_trainer_rank(order: ProcessOrder, config: Config) -> End:
    """Train until the hub has no more batches. Return the exit code of the process, for its launcher.

    `order` is the launcher's order, with the number of this machine and of the rank on it. After the hub has admitted
    the rank, SIGINT and SIGTERM are ignored: the hub notifies its ranks of an interrupt by giving them no more batches,
    so that all ranks end after the same step.

    Raises:
        FlashError: the store could not be opened, or no hub has admitted the rank in time. After the admission errors
            are reported to the hub, and not raised.
    """
    token = os.environ.pop(TOKEN_VARIABLE, None)  # removed, so that no child process inherits it
    index = order.node * config.cluster.trainer_ranks + order.local
    store, address = None, ""
    if index == 0:
        store, address = _open_store(config)
    with ExitStack() as stack:
        enter = partial(_enter, index, config, address, stack)
        # One rank of each other machine prints that it waits. On the first machine the hub's start prints lines.
        hub, incarnation = find_hub(config, token, enter, prints=order.node > 0 and order.local == 0)
        # The checkpoint is a path; empty: the ranks begin with the model itself.
        if incarnation.checkpoint is None:  # the run is over, so the rank has nothing to do
            return End.OVER
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=send_heartbeats, args=(hub, index), name="flash-beat", daemon=True).start()
        try:
            if store is None:  # this is not rank 0, whose store all others use
                host, _, port = incarnation.store.rpartition(":")
                store = reach_store(host, int(port), config.deadlines.rendezvous)
            _train(order.local, config, index, store, incarnation, hub, stack)
        except Exception as error:  # supervised boundary: any error that ends a rank is reported to the hub
            # The error is reported before this process ends. After that the other ranks lose this rank, and their own
            # errors would hide the cause.
            reported = report_error(hub, index, error, config.deadlines.request, describe_peers(index, config))
            # These errors only follow from the loss of the hub or of another rank, which reports its own error.
            caused_by_peer = isinstance(error, PeerLostError) or collective_failed(error)
            # The hub ends the run with this error. If its disk is read-only, it cannot remove its announcement. Then
            # the launcher would take the hub for alive, and this end for one that needs a restart.
            ends_run = reported and isinstance(error, FlashError) and error.fatal
            return End.WITH_PEER if caused_by_peer or ends_run else End.FAILED
    return End.OVER


def _open_store(config: Config) -> tuple[Store, str]:
    """Open torch's store, in which the ranks of this incarnation meet. Return the store and its HOST:PORT.

    Only rank 0 calls this. A single rank gets a private store without an address. Any process that reaches the host can
    read the store, which is permitted because the store holds nothing secret.
    """
    if config.trainer_world_size == 1:
        return private_store(), ""
    host = advertised_host(config) if config.cluster.trainer_nodes > 1 else "127.0.0.1"
    store, port = open_store(host, config.deadlines.rendezvous)
    return store, f"{host}:{port}"


def send_heartbeats(hub: BlockingClient, rank: int) -> None:
    """Send heartbeats to the hub until the incarnation of this rank is over. Runs in a thread of its own.

    The hub lets each heartbeat wait for some seconds before it replies, and ends the incarnation if a rank sends none.
    The thread does not end the process when the incarnation is over: torch may block the main thread then, so the
    launcher kills the process.
    """
    from flash.hub.protocol import RankHeartbeat

    with suppress(FlashError):  # raised when the incarnation is over or the hub is gone
        while True:
            # No timeout: the main thread notices a hub that does not answer, and reports it.
            hub.call(RankHeartbeat(rank), timeout=math.inf)


def _enter(
    index: int, config: Config, store: str, stack: ExitStack, address: HubAddress
) -> tuple[BlockingClient, IncarnationReply]:
    """Connect to a hub, report this rank, and return the connection and the starting point of the incarnation.

    `find_hub` calls this for each address that it finds, until a call succeeds. Raises FlashError if the process at
    `address` is not the hub, or if the hub does not admit the rank.

    Args:
        index: number of this rank among all trainer ranks.
        config: the run's configuration.
        store: HOST:PORT of rank 0's store; empty for other ranks, and if rank 0 is the only one.
        stack: closes the connection.
        address: address of the hub.
    """
    from flash.hub import protocol as p
    from flash.transport.client import BlockingClient

    with ExitStack() as entered:  # closes the connection if the hub does not admit the rank
        peer = (address.host, address.port, address.token, f"trainer-{index}", config.deadlines.request)
        hub = entered.enter_context(BlockingClient(*peer))
        # The reply may take long: the hub reads a whole checkpoint, and waits for rank 0's store.
        request = p.IncarnationRequest(index, os.getpid(), socket.gethostname(), store)
        incarnation = hub.call(request, timeout=config.deadlines.rendezvous)
        stack.push(entered.pop_all())
        return hub, incarnation


def describe_peers(index: int, config: Config) -> str:
    """Return a phrase for the trainer ranks other than rank `index`, and their machines.

    Error messages about a failed *collective*, an operation in which all ranks take part, contain it.
    """
    ranks = [rank for rank in range(config.trainer_world_size) if rank != index]
    nodes = [rank // config.cluster.trainer_ranks for rank in ranks]
    if not ranks:
        return "nobody"
    if len(ranks) == 1:
        return f"rank {ranks[0]} on node {nodes[0]}"
    where = f"node {nodes[0]}" if nodes[0] == nodes[-1] else f"nodes {nodes[0]} to {nodes[-1]}"
    return f"{len(ranks)} other ranks on {where}"


def report_error(hub: BlockingClient, index: int, error: Exception, seconds: float, peers: str) -> bool:
    """Report the error that ends this rank to the hub, which shows it and ends the run or the incarnation.

    `run_trainer_rank` calls this just before its process ends. Does nothing if the rank has only lost the hub. If the
    hub does not react in time, the error is logged here. Returns True if the hub has ended the connection, which is its
    answer to the error.

    Args:
        hub: connection to the hub.
        index: number of this rank.
        error: the error.
        seconds: time limit for the report.
        peers: phrase for the other ranks of a failed collective (an operation of all ranks). Neither gloo nor NCCL
            names the rank for which the collective has waited.
    """
    from flash.hub import protocol as p

    # The hub is the only peer of a rank, and reports its own end. A second message would hide the cause.
    if isinstance(error, PeerLostError):
        log.debug("trainer rank %d: %s", index, error)
        return False
    if collective_failed(error):
        error = CollectiveError(f"a collective with {peers} failed, as when one is gone or cut off: {error}")
    message = f"trainer rank {index}: {error}"
    if not isinstance(error, FlashError):
        with suppress(OSError):  # the reader of the output may be gone, and the hub must get the error
            sys.stderr.write(harmless("".join(traceback.format_exception(error))))
        message = f"trainer rank {index} failed with {type(error).__name__}: {error}"
    try:
        hub.call(p.Fatal(type(error).__name__, message), timeout=seconds)
    except PeerLostError:
        return True  # the expected end: the hub never answers a `Fatal`, but ends the connection
    except TransportError as failed:
        log.error("%s: %s (the hub could not be notified: %s)", type(error).__name__, message, failed)
    return False


def _train(
    local: int,
    config: Config,
    index: int,
    store: Store,
    incarnation: IncarnationReply,
    hub: BlockingClient,
    stack: ExitStack,
) -> None:
    """Join the process group, build the trainer, and run its loop until no batch is left.

    `run_trainer_rank` calls this once the hub has admitted the rank. Raises any error that ends the rank.

    Args:
        local: number of this rank on its machine, which chooses its GPU.
        config: the run's configuration.
        index: number of this rank among all trainer ranks.
        store: store in which the ranks meet.
        incarnation: the hub's reply, with the checkpoint to start from.
        hub: connection to the hub.
        stack: closes the process group and the files.
    """
    # Garbage collection is off until all long-lived objects exist: it would take a fifth of the time of a start.
    gc.disable()
    from flash.rollout.episode.tokenizer import HfTokenizer
    from flash.trainer import checkpoint
    from flash.trainer.loop import TrainerLoop
    from flash.trainer.performance import StepProfiler
    from flash.trainer.step import Trainer
    from flash.weights.publisher import make_publisher

    meet(local, config, index, store, stack)
    trainer = Trainer(config)
    if incarnation.checkpoint:
        checkpoint.load(Path(incarnation.checkpoint), trainer)
    publisher = make_publisher(config, index, advertised_host(config))
    stack.callback(publisher.close)
    profiler = StepProfiler(config.train.profiled_steps, config.run_dir, index, cuda=config.gpus_per_node > 0)
    # Steps recorded before an error are written too. The stack is closed only after the error is reported.
    stack.callback(profiler.close)
    tokenizer = HfTokenizer(config.model)
    tokenizer.add_ends(trainer.model.generation_config)
    loop = TrainerLoop(config, index, trainer, publisher, hub, tokenizer.inner, profiler)
    gc.freeze()  # later collections skip the objects that exist now
    gc.enable()
    loop.run()


def meet(local: int, config: Config, index: int, store: Store, stack: ExitStack) -> None:
    """Set this rank's device and seed, and join the process group of the trainer ranks until `stack` is closed.

    Ranks that train the same shard get the same seed. Blocks until all ranks have joined, at most deadlines.collective.
    Ranks of runs and of `flash sft` call this before they build the trainer.

    Args:
        local: number of this rank on its machine, which chooses its GPU.
        config: the run's configuration.
        index: number of this rank among all trainer ranks.
        store: store in which the ranks meet.
        stack: leaves the process group when it is closed.
    """
    import torch
    import torch.distributed as dist
    import transformers

    from flash.trainer.mesh import process_group_backend

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(config.run.seed + config.parallel.data_shard(index))
    cuda, offloads = config.gpus_per_node > 0, "weights" in config.train.offload
    if cuda:
        torch.cuda.set_device(local)
    if offloads or not cuda:
        # Updates then run on the host, with all cores that the trainer may use.
        node, cpus = index // config.cluster.trainer_ranks, sorted(os.sched_getaffinity(0))
        torch.set_num_threads(trainer_threads(config, node, cpus))
    dist.init_process_group(
        process_group_backend(cuda=cuda, offloads=offloads),
        store=store,
        rank=index,
        world_size=config.trainer_world_size,
        timeout=timedelta(seconds=config.deadlines.collective),
    )
    stack.callback(dist.destroy_process_group)
