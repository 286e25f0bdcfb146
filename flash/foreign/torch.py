"""torch beyond what it documents: torchrun as a function, the stores of a rendezvous, CUDA handles and memory."""

from __future__ import annotations

import logging
import os
import secrets
import signal
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

TOUCHED = (
    "torch.distributed.run:run",
    "torch.distributed.run:parse_args",
    "torch.distributed.launcher.api:LocalElasticAgent",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._monitor_workers",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._remaining_restarts",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._exit_barrier_timeout",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._stop_workers",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._shutdown",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._rendezvous",
    "torch.distributed.elastic.agent.server.api:WorkerGroup.store",
    "torch.distributed.elastic.agent.server.api:WorkerGroup.group_rank",
    "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent._pcontext",
    "torch.distributed.elastic.multiprocessing.api:PContext.pids",
    "torch.distributed.elastic.multiprocessing.api:PContext.close",
    "torch.distributed.elastic.agent.server.api:RunResult.failures",
    "torch.distributed.elastic.multiprocessing.errors:ProcessFailure.timestamp",
    "torch.distributed.elastic.rendezvous.api:RendezvousError",
    "torch.distributed.elastic.multiprocessing.api:SignalException",
    "torch.distributed.elastic.multiprocessing.errors:ChildFailedError",
    "torch.distributed:TCPStore",
    "torch.distributed:PrefixStore",
    "torch.distributed:HashStore",
    "torch.distributed:DistError",
    "torch.multiprocessing.reductions:reduce_tensor",
    "torch.cuda.memory:_record_memory_history",
    "torch.cuda.memory:_dump_snapshot",
    "torch.distributed.checkpoint.state_dict_loader:load",
    "torch.distributed.checkpoint.state_dict_saver:save",
    "torch.distributed.checkpoint.api:CheckpointException",
    "torch.distributed.checkpoint.state_dict:get_state_dict",
    "torch.distributed.checkpoint.state_dict:set_state_dict",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


REPEATING = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.distributed.elastic.multiprocessing.errors",
    "torch.distributed.launcher.api",
    "torch.distributed.run",
)
"""Loggers of torchrun that say of each signal and each worker's end what `failed` is told, and our own errors explain.
Each sets a level of its own when it is imported, so that none of those above it counts."""


SAME_MOMENT_S = 5
"""Processes killed within so many seconds were killed by the same hand; torchrun waits longer before it kills."""


ROOM = "FLASH_ROOM"
"""The variable that names, to all processes that torchrun has started together, on whatever node, where they meet: no
others of any time have the same. How often each node's agent has restarted its own says nothing of the others."""

MOST_MEMORY_EVENTS = 100_000
"""Allocations of CUDA memory whose history is kept; older ones are forgotten."""

HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
"""Signals by which torchrun ends its workers. Not SIGHUP, which it would hand on to processes that die of it, even
under `nohup`: a launcher whose terminal is closed ends by it, and what it has started leaves in order, as after any end
of a launcher."""

LINGER_S = 10
"""Seconds in which processes end that are to be started again: they know it already, and who hangs does not end."""


class Interrupted(Exception):
    """A signal ended torchrun."""

    def __init__(self, *, at_once: bool) -> None:
        super().__init__()
        self.at_once = at_once
        """Whether a Ctrl-C after it has killed the workers."""


class NotMet(Exception):
    """The nodes of a job did not meet, or lost each other."""


class Failure(Protocol):
    """torchrun's `ProcessFailure`."""

    @property
    def local_rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def exitcode(self) -> int: ...
    @property
    def timestamp(self) -> int: ...


class Ended(NamedTuple):
    """A process of torchrun's that has failed."""

    local: int
    """Its number among the processes of this node."""
    pid: int
    exit_code: int
    """Below 0: the signal that killed it."""


def unprompted(failures: Sequence[Failure]) -> list[Ended]:
    """The processes that ended by themselves, or were killed by others than torchrun, which lists its own kills too.

    The first one failed, whereupon torchrun tells all others to end, and kills who does not in time.
    """
    first = min(failure.timestamp for failure in failures)
    return [
        Ended(failure.local_rank, failure.pid, failure.exitcode)
        for number, failure in enumerate(failures)
        if number == 0
        or not (
            failure.exitcode == -signal.SIGTERM
            or (failure.exitcode == -signal.SIGKILL and failure.timestamp - first > SAME_MOMENT_S)
        )
    ]


class Overseer(Protocol):
    """Who torchrun's agent asks and tells."""

    def hanging(self, processes: Collection[int]) -> Collection[int]:
        """Which of the living ones are to be killed: by themselves they do not end. Asked ten times a second."""
        ...

    def failed(self, ended: Sequence[Ended], restarts_left: int) -> bool:
        """Which processes have failed, before the others are ended; those that were `hanging` are not among them.

        Returns whether the restart that follows is one of theirs, and counts.
        """
        ...


def torchrun(arguments: Sequence[str], overseer: Overseer, end_s: float) -> bool:
    """Run torchrun in this process, to the end of its workers; whether all of them ended well.

    At its own end it waits up to `end_s` for the other nodes. A signal is passed on to the workers, which are waited
    for; a Ctrl-C after it kills them.

    Raises:
        Interrupted: a signal ended it.
        NotMet: the nodes of the job did not meet, or lost each other.
    """
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError
    from torch.distributed.run import parse_args, run

    for module in REPEATING:
        logging.getLogger(module).setLevel(logging.CRITICAL)
    ending = _Ending()
    try:
        with _handlers_kept(), _overseen(overseer, end_s, ending):
            run(parse_args(list(arguments)))
    except ChildFailedError:
        return False
    except SignalException:
        raise Interrupted(at_once=ending.at_once) from None
    except (DistError, RendezvousError) as error:
        raise NotMet(f"{type(error).__name__}: {error}") from error
    return True


@contextmanager
def _handlers_kept() -> Generator[None]:
    """What torchrun sets for signals raises an error of its own, and would outlast it."""
    before = {number: signal.getsignal(number) for number in HEEDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Ending:
    """The end of workers that were told to end."""

    def __init__(self) -> None:
        self.at_once = False
        """Whether they were killed, by a second Ctrl-C."""

    @contextmanager
    def of(self, workers: Collection[int]) -> Generator[None]:
        """In the block they are waited for. Of other signals, which may be sent again and again, one is enough."""

        def kill(*_: object) -> None:
            self.at_once = True
            for worker in workers:
                with suppress(ProcessLookupError):
                    os.killpg(worker, signal.SIGKILL)

        with _handlers_kept():
            for number in HEEDED:
                signal.signal(number, kill if number == signal.SIGINT else signal.SIG_IGN)
            yield


@contextmanager
def _overseen(overseer: Overseer, end_s: float, ending: _Ending) -> Generator[None]:
    """Have torchrun's agent tell of its workers' ends, which it only logs, and not wait for lost nodes for minutes.

    It kills workers that hang, which to it look healthy, and gives all that it starts together a room.
    """
    from torch.distributed.elastic.agent.server.api import WorkerState
    from torch.distributed.launcher import api

    # Untyped, as its decorators leave no types, and the module names it for itself only.
    launcher: Any = api
    agent: Any = launcher.LocalElasticAgent

    class OverseenAgent(agent):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self._exit_barrier_timeout = end_s
            self._killed: set[int] = set()

        def _rendezvous(self, worker_group: Any) -> None:
            super()._rendezvous(worker_group)
            # The store is seen here below a prefix of the agents' own meeting.
            if worker_group.group_rank == 0:
                worker_group.store.set(ROOM, secrets.token_hex(8))
            os.environ[ROOM] = worker_group.store.get(ROOM).decode()

        def _monitor_workers(self, worker_group: Any) -> Any:
            for process in overseer.hanging(self._pcontext.pids().values()):
                self._killed.add(process)
                os.kill(process, signal.SIGKILL)
            result = super()._monitor_workers(worker_group)
            if result.state == WorkerState.FAILED:
                ended = unprompted(list(result.failures.values()))
                others = [each for each in ended if each.pid not in self._killed]
                if not overseer.failed(others, self._remaining_restarts):
                    self._remaining_restarts += 1
            return result

        def _shutdown(self, *args: Any, **options: Any) -> None:
            with ending.of(list(self._pcontext.pids().values()) if self._pcontext else []):
                super()._shutdown(*args, **options)

        def _stop_workers(self, worker_group: Any) -> None:
            self._pcontext.close(signal.SIGTERM, LINGER_S)
            super()._stop_workers(worker_group)

    launcher.LocalElasticAgent = OverseenAgent
    try:
        yield
    finally:
        launcher.LocalElasticAgent = agent


def collective_failed(error: BaseException) -> bool:
    """Whether an error says that a collective failed, as it does when another rank is gone.

    nccl's have a class; gloo's are a RuntimeError that begins with the place in gloo's sources.
    """
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error))


def connect_store(host: str, port: int, seconds: float, prefix: str) -> Store:
    """torchrun's store, seen below a prefix; reading a key waits for it."""
    from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timedelta(seconds=seconds)))


def private_store() -> Store:
    """A store of this process alone, for a process group of one rank."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

    return HashStore()


@contextmanager
def alone(backend: str) -> Generator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    dist.init_process_group(backend, store=private_store(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def below(store: Store, prefix: str) -> Store:
    """The part of a store below a prefix."""
    from torch.distributed import PrefixStore  # pyright: ignore[reportPrivateImportUsage]

    return PrefixStore(prefix, store)


def ipc_handle(tensor: Tensor) -> tuple[Any, ...]:
    """What another process opens a CUDA tensor of this one with."""
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)[1]


def keep_memory_history(*, on: bool) -> None:
    """Whether CUDA memory remembers who has allocated it."""
    from torch.cuda import memory

    history: Any = memory
    if on:
        history._record_memory_history(max_entries=MOST_MEMORY_EVENTS)
    else:
        history._record_memory_history(enabled=None)


def dump_memory(file: Path) -> None:
    """Write what CUDA memory holds and remembers, for pytorch.org/memory_viz."""
    from torch.cuda import memory

    history: Any = memory
    history._dump_snapshot(str(file))
