"""One trainer rank: follows the hub until it has no more batches. Only trainer ranks join the process group.

When its hub or another rank of its incarnation is gone, what it still does is of use to nobody: its launcher ends it.
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
from flash.run.processes.hub_place import HubAddress
from flash.run.processes.rendezvous import advertised_host, find_hub
from flash.run.processes.supervisor import End
from flash.run.processes.token import VARIABLE
from flash.text import harmless

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from flash.hub.protocol import IncarnationReply
    from flash.transport.blocking import BlockingClient

log = logging.getLogger("flash")


def run_trainer_rank(order: ProcessOrder, config: Config) -> End:
    """Train until the hub has no more batches.

    Once it has a place, a trainer rank follows the hub and not signals: an interrupt reaches it as the end of batches.
    """
    token = os.environ.pop(VARIABLE, None)
    index = order.node * config.cluster.trainer_ranks + order.local
    store, address = None, ""
    if index == 0:
        store, address = _open_store(config)
    with ExitStack() as stack:
        enter = partial(_enter, index, config, address, stack)
        hub, incarnation = find_hub(config, token, enter, tells=order.node > 0 and order.local == 0)
        if incarnation.checkpoint is None:
            return End.OVER
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        threading.Thread(target=beat, args=(hub, index), name="flash-beat", daemon=True).start()
        try:
            if store is None:
                host, _, port = incarnation.store.rpartition(":")
                store = reach_store(host, int(port), config.deadlines.rendezvous)
            _train(order.local, config, index, store, incarnation, hub, stack)
        except Exception as error:  # supervised boundary: whatever ends a rank is told where people look
            # Told before the other ranks lose this one and have errors of their own.
            tell_end(hub, index, error, config.deadlines.request, others(index, config))
            echo = isinstance(error, PeerLostError) or collective_failed(error)
            return End.WITH_PEER if echo else End.FAILED
    return End.OVER


def _open_store(config: Config) -> tuple[Store, str]:
    """Where the ranks of this incarnation meet. It is open to anyone who reaches the host: nothing in it is secret."""
    if config.trainer_world_size == 1:
        return private_store(), ""
    host = advertised_host(config) if config.cluster.trainer_nodes > 1 else "127.0.0.1"
    store, port = open_store(host, config.deadlines.rendezvous)
    return store, f"{host}:{port}"


def beat(hub: BlockingClient, rank: int) -> None:
    """In a thread of its own: show the hub that this process runs, as long as its incarnation goes on.

    It ends nothing: torch may hold the main thread when an incarnation is over, and then the launcher ends the process.
    """
    from flash.hub.protocol import IncarnationWatch

    with suppress(FlashError):
        while True:
            hub.call(IncarnationWatch(rank), timeout=math.inf)


def _enter(
    index: int, config: Config, store: str, stack: ExitStack, address: HubAddress
) -> tuple[BlockingClient, IncarnationReply]:
    """Connect to a hub, until the stack is closed, and ask what to begin with."""
    from flash.hub import protocol as p
    from flash.transport.blocking import BlockingClient

    with ExitStack() as entered:
        peer = (address.host, address.port, address.token, f"trainer-{index}", config.deadlines.connect)
        hub = entered.enter_context(BlockingClient(*peer))
        # The hub reads a whole checkpoint before it names it.
        request = p.IncarnationRequest(index, os.getpid(), socket.gethostname(), store)
        incarnation = hub.call(request, timeout=config.deadlines.rendezvous)
        stack.push(entered.pop_all())
        return hub, incarnation


def others(index: int, config: Config) -> str:
    """The trainer ranks that one has collectives with, in words."""
    ranks = [rank for rank in range(config.trainer_world_size) if rank != index]
    nodes = [rank // config.cluster.trainer_ranks for rank in ranks]
    if not ranks:
        return "nobody"
    if len(ranks) == 1:
        return f"rank {ranks[0]} on node {nodes[0]}"
    where = f"node {nodes[0]}" if nodes[0] == nodes[-1] else f"nodes {nodes[0]} to {nodes[-1]}"
    return f"{len(ranks)} other ranks on {where}"


def tell_end(hub: BlockingClient, index: int, error: Exception, seconds: float, peers: str) -> None:
    """Have the hub end the run and show the error, once; show it here when the hub cannot be told.

    Neither gloo nor NCCL says for whom a collective has waited: `peers` does.

    Nothing is said of a lost connection: the hub is the only peer of a rank, and shows its own end.
    """
    from flash.hub import protocol as p

    if isinstance(error, PeerLostError):
        log.debug("trainer rank %d: %s", index, error)
        return
    if collective_failed(error):
        error = CollectiveError(f"a collective with {peers} failed, as when one is gone or cut off: {error}")
    message = f"trainer rank {index}: {error}"
    if not isinstance(error, FlashError):
        sys.stderr.write(harmless("".join(traceback.format_exception(error))))
        message = f"trainer rank {index} failed with {type(error).__name__}: {error}"
    try:
        hub.call(p.Fatal(type(error).__name__, message), timeout=seconds)
    except PeerLostError:
        return  # the hub never answers this: it ends the run
    except TransportError as silence:
        log.error("%s: %s (the hub could not be told: %s)", type(error).__name__, message, silence)


def _train(
    local: int,
    config: Config,
    index: int,
    store: Store,
    incarnation: IncarnationReply,
    hub: BlockingClient,
    stack: ExitStack,
) -> None:
    """Train to the end; what is to be closed after that is left on the stack."""
    # Until what stays for good is there: looking for garbage in between takes a fifth of a start.
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
    gc.freeze()
    gc.enable()
    loop.run()


def meet(local: int, config: Config, index: int, store: Store, stack: ExitStack) -> None:
    """Join the process group of the trainer ranks until the stack is closed, on this rank's device, with its seed."""
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
        # On the host, updates are made with all cores.
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
