"""What torchrun starts: local rank 0 becomes the node loop, the others trainer ranks.

Rendezvous goes through torchrun's store, under a prefix of this life of the job: every process says what it is, the
first node loop puts the hub's address and a random token there, and which checkpoint everyone continues from. Only
trainer ranks join the process group. An error ends the process with code 1; one that a restart cannot mend is left as
`error.json` in the run directory, so that restarted processes end at once instead of failing the same way again.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from flash import configfile
from flash.config import Config
from flash.errors import ConfigError, DeadlineError, FlashError, TransportError

if TYPE_CHECKING:
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

    from flash.hub.protocol import Reply
    from flash.transport.blocking import BlockingClient

log = logging.getLogger("flash")


class Place(msgspec.Struct, frozen=True):
    """Where this process stands in the job."""

    node: int
    local_rank: int
    rank: int
    world: int
    life: int
    """How often torchrun has restarted the processes."""

    @staticmethod
    def from_environment() -> Place:
        """Read torchrun's variables. Raises ConfigError when they are missing."""
        try:
            return Place(
                node=int(os.environ["GROUP_RANK"]),
                local_rank=int(os.environ["LOCAL_RANK"]),
                rank=int(os.environ["RANK"]),
                world=int(os.environ["WORLD_SIZE"]),
                life=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            )
        except KeyError as missing:
            raise ConfigError(f"{missing} is not set: start a run with `flash train` or torchrun") from None


class HubAddress(msgspec.Struct, frozen=True):
    """What a peer needs to reach the hub."""

    host: str
    port: int
    token: bytes
    checkpoint: str
    """The checkpoint all processes continue from; empty for a new run."""


class Meeting:
    """The rendezvous of one life of the job, over torchrun's store."""

    def __init__(self, place: Place, seconds: float) -> None:
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._seconds = seconds
        raw = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds))
        self.store: Store = PrefixStore(f"flash/{place.life}", raw)

    def trainer_rank(self, place: Place, config: Config) -> tuple[int, int]:
        """Say what this process is; return (its index among the trainer ranks, their number)."""
        self.store.set(f"role/{place.rank}", "trainer" if place.local_rank > 0 else "node")
        roles = [self._get(f"role/{rank}", "all processes of the job") for rank in range(place.world)]
        trainers = [rank for rank, role in enumerate(roles) if role == b"trainer"]
        if len(trainers) != config.trainer_world_size:
            raise ConfigError(
                f"the config wants {config.trainer_world_size} trainer ranks, but {len(trainers)} were started: "
                "use `flash train`, or torchrun --nproc-per-node = 1 + cluster.trainer_ranks on trainer nodes"
            )
        return sum(rank < place.rank for rank in trainers), len(trainers)

    def announce(self, address: HubAddress) -> None:
        """Tell every process where the hub is."""
        self.store.set("hub", msgspec.json.encode(address).decode())

    def hub(self) -> HubAddress:
        """Wait for the hub's address."""
        return msgspec.json.decode(self._get("hub", "the hub to open its port"), type=HubAddress)

    def _get(self, key: str, waited_for: str) -> bytes:
        from torch.distributed import DistError

        try:
            return self.store.get(key)
        except DistError as error:
            raise DeadlineError(waited_for, self._seconds, f"the other nodes' output ({error})") from None


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flash.worker CONFIG… [key=value…]`, under torchrun."""
    from flash.cli import split_arguments

    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    log.setLevel(logging.INFO)
    logging.getLogger("vllm.triton_utils").setLevel(logging.ERROR)
    try:
        place = Place.from_environment()
        paths, overrides = split_arguments(arguments)
        config = configfile.load(paths, overrides)
    except FlashError as error:
        return _complain(error)
    marker = ErrorMarker(config.run_dir)
    if place.life > 0 and marker.stands():
        return 1
    try:
        return _become(place, config)
    except FlashError as error:
        if error.fatal and place.node == 0:
            marker.write(error)
        return _complain(error)
    except KeyboardInterrupt:
        return 130
    except Exception:  # the process's outermost boundary: show the bug, end with a code torchrun understands
        traceback.print_exc()
        return 1


def _complain(error: FlashError) -> int:
    kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
    sys.stderr.write(f"flash: error: {kind}{error}\n")
    sys.stderr.flush()
    return 1


class ErrorMarker:
    """`error.json`: the error that ended this launch, so that a restart does not repeat it."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "error.json"
        self._launch = f"{os.environ.get('TORCHELASTIC_RUN_ID', '')}/{os.getppid()}"

    def stands(self) -> bool:
        """Whether an earlier life of the same launch ended for good."""
        try:
            return bool(json.loads(self._path.read_text())["launch"] == self._launch)
        except (OSError, ValueError, KeyError):
            return False

    def write(self, error: FlashError) -> None:
        """Leave the error behind. A full disk must not hide the error itself."""
        row = {
            "launch": self._launch,
            "error": type(error).__name__,
            "message": str(error),
            "time": time.time(),
        }
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(row, indent=2))
        except OSError as problem:
            log.warning("cannot write %s: %s", self._path, problem)


def _become(place: Place, config: Config) -> int:
    cpus = config.cluster.node_cpus if place.local_rank == 0 else config.cluster.trainer_cpus
    if cpus is not None:
        os.sched_setaffinity(0, cpus)
    if place.local_rank == 0:
        from flash.nodeloop import run_node_loop

        return run_node_loop(place, config)
    return _run_trainer(place, config)


def _run_trainer(place: Place, config: Config) -> int:
    """Once connected, trainer ranks follow the hub, not signals: an interrupt reaches them as the end of batches."""
    from flash.hub import protocol as p
    from flash.transport.blocking import BlockingClient

    meeting = Meeting(place, config.deadlines.rendezvous)
    rank, world = meeting.trainer_rank(place, config)
    address = meeting.hub()
    with BlockingClient(
        address.host, address.port, address.token, f"trainer-{rank}", p.REPLY, config.deadlines.connect
    ) as hub:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        try:
            _train(place, config, rank, world, meeting, address, hub)
        except TransportError as error:
            # The hub reports its own end; a rank that lost it has nothing to add.
            log.debug("trainer rank %d: %s", rank, error)
            return 1
        except Exception as error:  # supervised boundary: the hub ends the run and shows the error once
            if not isinstance(error, FlashError):
                traceback.print_exc()
            with suppress(TransportError):  # what the hub answers is the end of the connection
                fatal = p.Fatal(type(error).__name__, f"trainer rank {rank}: {error}")
                hub.call(fatal, timeout=config.deadlines.request)
            return 1
    return 0


def _train(
    place: Place,
    config: Config,
    rank: int,
    world: int,
    meeting: Meeting,
    address: HubAddress,
    hub: BlockingClient[Reply],
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
    torch.manual_seed(config.run.seed + rank)
    cuda = config.gpus_per_node > 0
    if cuda:
        torch.cuda.set_device(place.local_rank - 1)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // config.cluster.trainer_ranks))
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.PrefixStore(  # pyright: ignore[reportPrivateImportUsage]
            "trainers", meeting.store
        ),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=config.deadlines.collective),
    )
    try:
        trainer = Trainer(config)
        if address.checkpoint:
            checkpoint.load(Path(address.checkpoint), trainer)
        publisher = make_publisher(config, rank, advertised_host(config))
        try:
            loop = TrainerLoop(config, rank, trainer, publisher, hub, HfTokenizer(config.model).inner)
            gc.freeze()
            loop.run()
        finally:
            publisher.close()
    finally:
        dist.destroy_process_group()


def advertised_host(config: Config) -> str:
    """The address at which other processes of the job reach this machine."""
    if config.cluster.nodes == 1:
        return "127.0.0.1"
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        # Connecting a datagram socket sends nothing: it only chooses the interface that routes to the peer.
        probe.connect((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])))
        host = str(probe.getsockname()[0])
    return socket.gethostbyname(socket.gethostname()) if host.startswith("127.") else host


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of libraries that wait on a dead peer must not keep the process: engines watch it and end with it.
    os._exit(code)
