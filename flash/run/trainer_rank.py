"""One trainer rank: follows the hub until it has no more batches. Only trainer ranks join the process group.

It ends at once when the hub is gone, or another rank of its life: what it still does then is of use to nobody, and the
next life waits for its end.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import threading
import traceback
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from flash.config.tree import Config
from flash.errors import CollectiveError, FlashError, PeerLostError, TransportError
from flash.foreign.torch import below, collective_failed
from flash.run.hub_place import HubAddress
from flash.run.rendezvous import Meeting, Rank, advertised_host, find_hub
from flash.run.token import VARIABLE

if TYPE_CHECKING:
    from flash.hub.protocol import Ack, Fatal, LifeReply
    from flash.transport.blocking import BlockingClient

log = logging.getLogger("flash")


class Teller(Protocol):
    """A rank's connection to the hub, as far as its end goes."""

    def call(self, request: Fatal, timeout: float) -> Ack:
        """Send it; the hub answers with the end of the connection."""
        ...


def run_trainer_rank(rank: Rank, config: Config) -> int:
    """Train until the hub has no more batches; the exit code.

    Once it has a place, a trainer rank follows the hub and not signals: an interrupt reaches it as the end of batches.
    """
    token = os.environ.pop(VARIABLE, None)
    meeting = Meeting(rank, config.deadlines.rendezvous)
    index, _ = meeting.declare(rank, config)
    with ExitStack() as stack:
        hub, life = find_hub(config, token, partial(_enter, index, config, stack))
        if life.checkpoint is None:
            return 0
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        over = threading.Event()
        threading.Thread(target=_end_with_life, args=(hub, index, over), name="flash-life", daemon=True).start()
        try:
            _train(rank, config, index, meeting, life, hub, stack)
        except Exception as error:  # supervised boundary: whatever ends a rank is told where people look
            # Told before the other ranks lose this one and have errors of their own.
            tell_end(hub, index, error, config.deadlines.request, others(index, config))
            return 1
        finally:
            over.set()
    return 0


def _enter(index: int, config: Config, stack: ExitStack, address: HubAddress) -> tuple[BlockingClient, LifeReply]:
    """Connect to a hub, until the stack is closed, and ask what to begin with."""
    from flash.hub import protocol as p
    from flash.transport.blocking import BlockingClient

    with ExitStack() as entered:
        name, seconds = f"trainer-{index}", config.deadlines.connect
        hub = entered.enter_context(BlockingClient(address.host, address.port, address.token, name, seconds))
        # The hub reads a whole checkpoint before it names it.
        life = hub.call(p.LifeRequest(index, os.getpid()), timeout=config.deadlines.rendezvous)
        stack.push(entered.pop_all())
        return hub, life


def _end_with_life(hub: BlockingClient, index: int, over: threading.Event) -> None:
    """End this process when its life is over, unless it ends itself. Runs in a thread: torch may hold the main one.

    Until then the hub hears that the process runs. One that does not even do this is killed by its node's agent.
    """
    from flash.hub import protocol as p

    with suppress(Exception):  # whatever ends the call, and be it this process's own end
        while True:
            hub.call(p.LifeWatch(index), timeout=math.inf)
    if not over.is_set():
        os._exit(1)


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


def tell_end(hub: Teller, index: int, error: Exception, seconds: float, peers: str) -> None:
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
        traceback.print_exception(error)
        message = f"trainer rank {index} failed with {type(error).__name__}: {error}"
    try:
        hub.call(p.Fatal(type(error).__name__, message), timeout=seconds)
    except PeerLostError:
        return  # the hub never answers this: it ends the run
    except TransportError as silence:
        log.error("%s: %s (the hub could not be told: %s)", type(error).__name__, message, silence)


def _train(
    rank: Rank,
    config: Config,
    index: int,
    meeting: Meeting,
    life: LifeReply,
    hub: BlockingClient,
    stack: ExitStack,
) -> None:
    """Train to the end; what is to be closed after that is left on the stack."""
    import torch
    import torch.distributed as dist
    import transformers

    from flash.rollout.tokenizer import HfTokenizer
    from flash.trainer import checkpoint
    from flash.trainer.loop import TrainerLoop
    from flash.trainer.step import Trainer
    from flash.weights.publisher import make_publisher

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(config.run.seed + index)
    cuda = config.gpus_per_node > 0
    if cuda:
        torch.cuda.set_device(rank.local)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // config.cluster.trainer_ranks))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=below(meeting.store, f"life-{life.number}"),
        rank=index,
        world_size=config.trainer_world_size,
        timeout=timedelta(seconds=config.deadlines.collective),
    )
    stack.callback(dist.destroy_process_group)
    trainer = Trainer(config)
    if life.checkpoint:
        checkpoint.load(Path(life.checkpoint), trainer)
    publisher = make_publisher(config, index, advertised_host(config))
    stack.callback(publisher.close)
    loop = TrainerLoop(config, index, trainer, publisher, hub, HfTokenizer(config.model).inner)
    gc.freeze()
    loop.run()
