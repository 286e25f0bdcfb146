"""One trainer rank: follows the hub until it has no more batches. Only trainer ranks join the process group."""

from __future__ import annotations

import gc
import logging
import os
import signal
import traceback
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from flash.config.tree import Config
from flash.errors import FlashError, TransportError
from flash.foreign.torch import below
from flash.run.rendezvous import HubAddress, Meeting, Rank, advertised_host

if TYPE_CHECKING:
    from flash.transport.blocking import BlockingClient

log = logging.getLogger("flash")


def run_trainer_rank(rank: Rank, config: Config) -> int:
    """Train until the hub has no more batches; the exit code.

    Once connected, a trainer rank follows the hub and not signals: an interrupt reaches it as the end of batches.
    """
    from flash.hub import protocol as p
    from flash.transport.blocking import BlockingClient

    meeting = Meeting(rank, config.deadlines.rendezvous)
    index, world = meeting.declare(rank, config)
    address = meeting.hub()
    with BlockingClient(address.host, address.port, address.token, f"trainer-{index}", config.deadlines.connect) as hub:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            _train(rank, config, index, world, meeting, address, hub)
        except TransportError as error:
            # The hub reports its own end; a rank that lost it has nothing to add.
            log.debug("trainer rank %d: %s", index, error)
            return 1
        except Exception as error:  # supervised boundary: the hub ends the run and shows the error once
            if not isinstance(error, FlashError):
                traceback.print_exc()
            with suppress(TransportError):  # what the hub answers is the end of the connection
                fatal = p.Fatal(type(error).__name__, f"trainer rank {index}: {error}")
                hub.call(fatal, timeout=config.deadlines.request)
            return 1
    return 0


def _train(
    rank: Rank,
    config: Config,
    index: int,
    world: int,
    meeting: Meeting,
    address: HubAddress,
    hub: BlockingClient,
) -> None:
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
        torch.cuda.set_device(rank.local - 1)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // config.cluster.trainer_ranks))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=below(meeting.store, "trainers"),
        rank=index,
        world_size=world,
        timeout=timedelta(seconds=config.deadlines.collective),
    )
    try:
        trainer = Trainer(config)
        if address.checkpoint:
            checkpoint.load(Path(address.checkpoint), trainer)
        publisher = make_publisher(config, index, advertised_host(config))
        try:
            loop = TrainerLoop(config, index, trainer, publisher, hub, HfTokenizer(config.model).inner)
            gc.freeze()
            loop.run()
        finally:
            publisher.close()
    finally:
        dist.destroy_process_group()
