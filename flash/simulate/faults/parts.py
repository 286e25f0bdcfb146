"""Simulated parts of a run that faults can befall: its disk, weights, engines, environments and trainer ranks.

The disk is a real folder, which the real journal, recordings and checkpoints are written to and read from. `Disk` adds
time to each write, tears a write whose process is killed meanwhile, fills up, and forgets what was not forced to the
disk when the machine fails. The other parts extend those of `flash.simulate` without faults.

A *version* is the weights after so many training steps. An *incarnation* is all trainer ranks between two of their
restarts. A *process* is a simulated one (`flash.simulate.faults.loop`), which may be killed or frozen at each await.
"""

from __future__ import annotations

import random
import resource
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import anyio
import msgspec

from flash.config import waits
from flash.config.simulate import uniform
from flash.config.tree import Config
from flash.environment.interface import Info, StepResult
from flash.errors import CheckpointError, CollectiveError, EngineDeadError, EngineError, EnvError
from flash.hub import protocol as p
from flash.rollout.engine import Progress, ResponseRequest
from flash.simulate.engine import SimEngine
from flash.simulate.environment import SimEnvironment
from flash.simulate.faults.loop import PROCESS, Process, until
from flash.simulate.faults.network import Network
from flash.simulate.trainer import SimTrainer
from flash.simulate.workload import Workload
from flash.trainer.checkpoint_files import (
    MANIFEST,
    TMP,
    FileEntry,
    Manifest,
    make_empty,
    move_into_place,
    prune,
    step_folder,
    temporary_of,
)
from flash.types import Completion, Observation, Published

T = TypeVar("T")
"""Result of a function that writes."""

WRITE_S = 0.02
"""Largest number of seconds before, and after, the effect of a write on a disk that is not slow."""
FLUSH_S = 5.0
"""Seconds after which the operating system has written appended data to the disk by itself. Short enough that when a
machine fails in a simulated run, some data is older than that, and some is younger."""
ENV_FAULT = 0.4
"""Share of the calls of `reset` and `step` that fail while a fault of environments lasts."""
FETCH_S = 0.05
"""Seconds that an engine takes to fetch a version."""
_IN_RESET, _IN_STEP = 101, 102
"""Numbers of the random draws of an environment's faults. The workload uses smaller ones for its own draws."""


class Disk:
    """The disk of the first machine, which holds the run directory.

    Args:
        dice: draws the seconds of writes, and how much of a write is lost.
        run_dir: the run directory.
        machine_fails: True if `lose_unsynced` may be called, which needs the sizes of files after each write.
    """

    def __init__(self, dice: random.Random, run_dir: Path, *, machine_fails: bool) -> None:
        self._dice = dice
        self._run_dir = run_dir
        self._machine_fails = machine_fails
        self.full = False
        """True while every write fails."""
        self.slowness = 1.0
        """Factor of the time of a write."""
        self._synced: dict[Path, int] = {}
        """Size, in bytes, up to which each file was forced to the disk."""
        self._flushed: list[tuple[float, dict[Path, int]]] = []
        """Time of each write, and the sizes of the growing files after it. By them, `lose_unsynced` finds the data that
        the operating system has written to the disk by itself. Empty unless `machine_fails`."""

    async def write(self, function: Callable[[], T]) -> T:
        """Call a function that writes, in the middle of the time that this takes, and return its result.

        Writes to a full disk raise OSError, or the error that the function makes of it. If the process is killed before
        the call, one time in two a random part of the data that the function appends is written. If it is killed after
        the call, all is written, although the caller does not learn that.
        """
        process = PROCESS.get()
        try:
            await anyio.sleep(self._dice.uniform(0.0, WRITE_S) * self.slowness)
        except BaseException:  # the cancellation by which a process is killed
            if process is not None and process.killed and self._dice.random() < 0.5:
                self._tear(function)
            raise
        result = self.do(function)
        if self._machine_fails:
            self._flushed.append((anyio.current_time(), self._sizes()))
        await anyio.sleep(self._dice.uniform(0.0, WRITE_S) * self.slowness)
        return result

    def do(self, function: Callable[[], T]) -> T:
        """Call a function that writes, at once, and return its result.

        Writes to a full disk raise OSError, or the error that the function makes of it.
        """
        with _file_limit(0 if self.full else None):
            return function()

    def synced(self, files: Iterable[Path]) -> None:
        """Record that all present bytes of these files were forced to the disk just now (by fsync)."""
        self._synced |= {file: file.stat().st_size for file in files}

    def _sizes(self) -> dict[Path, int]:
        """Return the sizes, in bytes, of the files that grow: those of the journal (.log), and the rows (.jsonl).

        All other files are replaced as a whole, and the simulated machine loses no part of them.
        """
        files = sorted([*(self._run_dir / "journal").glob("*.log"), *self._run_dir.glob("*.jsonl")])
        return {file: file.stat().st_size for file in files}

    def _tear(self, function: Callable[[], object]) -> None:
        """Call a function that appends to files that grow, and remove a random part of the data it has appended."""
        before = self._sizes()
        self.do(function)
        self._cut_to(before)

    def lose_unsynced(self, *, synced_journal: bool) -> None:
        """Cut off a random part of the data that was not on the disk yet, as when the machine fails.

        Data is on the disk if it was forced there, or FLUSH_S after its write. `synced_journal`: True if the journal
        forces each write to the disk, so that nothing of it is lost.
        """
        now = anyio.current_time()
        on_disk = dict(self._synced)
        for time, sizes in self._flushed:
            if time <= now - FLUSH_S:
                on_disk |= {file: max(size, on_disk.get(file, 0)) for file, size in sizes.items()}
        kept = {file: size for file, size in self._sizes().items() if synced_journal and file.suffix == ".log"}
        self._cut_to(on_disk | kept)

    def _cut_to(self, least: dict[Path, int]) -> None:
        """Cut each growing file to a random size between its size in `least` (0 without one) and its present size."""
        for file, size in self._sizes().items():
            if (start := min(size, least.get(file, 0))) < size:
                with file.open("r+b") as stream:
                    stream.truncate(self._dice.randint(start, size))


@contextmanager
def _file_limit(size: int | None) -> Generator[None]:
    """Let no file of this process grow beyond `size` bytes inside the block; None: no limit.

    A write beyond it raises OSError, like a write to a full disk. Python ignores the signal that the kernel also sends.
    """
    if size is None:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class Weights:
    """Policy versions that the trainer ranks hold for the engines: rank 0 of each incarnation holds its newest ones.

    Args:
        network: shows which machines reach each other.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._held: dict[int, tuple[Process, set[int]]] = {}
        """Process of rank 0, and the versions that it holds, by number of the incarnation."""

    def hold(self, incarnation: int, process: Process, version: int) -> None:
        """Record that `process`, rank 0 of an incarnation, holds a version, which it is about to announce."""
        self._held.setdefault(incarnation, (process, set()))[1].add(version)

    def drop_before(self, incarnation: int, version: int) -> None:
        """Record that rank 0 of an incarnation does not hold the versions before `version` any more."""
        versions = self._held[incarnation][1]
        versions -= {each for each in versions if each < version}

    async def fetch(self, published: Published, process: Process) -> bool:
        """Let a process fetch a version from the rank that has published it, as soon as the rank can answer.

        Returns False if the rank does not hold this version any more, but newer ones. Raises EngineError if the rank is
        gone. The caller has a deadline for a rank that hangs, or that a cut of the network separates from it.
        """
        publisher, _ = self._held[published.incarnation]
        reaches = partial(self._network.reaches, process.machine, publisher.machine)
        await until(lambda: not publisher.alive or (not publisher.frozen and reaches()), 0.5)
        await anyio.sleep(FETCH_S)
        if not publisher.alive:
            raise EngineError("the trainer rank that holds the weights is gone")
        return published.version in self._held[published.incarnation][1]


class EngineFaults:
    """Faults that befall the engines of one node process. Times are seconds of the loop's clock."""

    def __init__(self) -> None:
        self.engines: list[FaultEngine] = []
        """All engines that were made for this process, in order. A dead engine is replaced by a new one at the end."""
        self.refuse_until = 0.0
        """Time until which no engine starts."""
        self.slowness = 1.0
        """Factor of the time of the steps of engines that are made from now on."""


class FaultEngine(SimEngine):
    """A simulated engine that takes time to start, loads versions from the trainer ranks, refuses to start, and hangs.

    Its methods are those of `flash.rollout.engine.Engine`, which the node calls; `hang` and `kill` are the faults.

    Args:
        config: the run's configuration, with its `[simulate]` table.
        workload: gives the lengths of the responses.
        weights: holds the published versions.
        faults: faults of the node's engines. The engine adds itself to them.
        token_ids: gives each response a token id of its own, so that no two samples have the same tokens.
        start_s: seconds that the start takes.
        too_late: called with the name of the node process and the version if the ranks hold only newer versions.
    """

    def __init__(
        self,
        config: Config,
        workload: Workload,
        weights: Weights,
        faults: EngineFaults,
        token_ids: Iterator[int],
        start_s: float,
        too_late: Callable[[str, int], None],
    ) -> None:
        assert config.simulate is not None
        settings = msgspec.structs.replace(config.simulate, step_s=config.simulate.step_s * faults.slowness)
        super().__init__(settings, config.engine.max_sequences, workload.response_tokens, config.engine.stream_interval)
        self._config = config
        self._weights = weights
        self._faults = faults
        self._token_ids = token_ids
        self._start_s = start_s
        self._too_late = too_late
        self._hung = False
        """True once the engine makes no more steps."""
        faults.engines.append(self)

    async def start(self) -> None:
        """Start, which takes `start_s` seconds. Raises EngineError if the engine refuses to start."""
        await anyio.sleep(self._start_s)
        if anyio.current_time() < self._faults.refuse_until:
            raise EngineError("the simulated engine does not start")

    async def generate(self, request: ResponseRequest) -> AsyncGenerator[Progress | Completion, None]:
        """Stream one response in pieces, like `SimEngine.generate`. All of its tokens have the same new id."""
        token_id = next(self._token_ids)
        async with aclosing(super().generate(request)) as pieces:
            async for piece in pieces:
                yield msgspec.structs.replace(piece, token_ids=[token_id] * len(piece.token_ids))

    async def load(self, published: Published, *, keep_cache: bool) -> float:
        """Fetch a version from the trainer ranks, and load it, like `SimEngine.load`.

        Raises:
            EngineError: the rank that holds the version is gone.
            EngineDeadError: the ranks hold only newer versions. The node then replaces the engine.
        """
        process = PROCESS.get()
        assert process is not None
        if not await self._weights.fetch(published, process):
            if process.alive:
                self._too_late(process.name, published.version)
            raise EngineDeadError(f"the trainer does not hold version {published.version} any more")
        return await super().load(published, keep_cache=keep_cache)

    async def hang(self) -> None:
        """Make no more steps, and die after `waits.hang_s` seconds. A fault calls this, and waits for the death.

        A real engine that makes no step for so long is killed by a watchdog of its own, which a SimEngine lacks.
        """
        self._hung = True
        self._cancel_timer()
        await anyio.sleep(waits.hang_s(self._config))
        self.kill()

    def kill(self) -> None:
        """Die, unless the engine is dead already. All of its requests then fail, and the node replaces it."""
        if self._dead is None:
            super().kill()

    def _end_step_soon(self) -> None:
        """Begin the next step, unless the engine hangs or is dead: a new request must not wake it."""
        if not self._hung and self._dead is None:
            super()._end_step_soon()


class EnvironmentFaults:
    """Times until which the environments of all nodes raise errors or hang, in seconds of the loop's clock."""

    def __init__(self) -> None:
        self.raise_until = 0.0
        """Time until which some calls raise EnvError."""
        self.hang_until = 0.0
        """Time until which some calls begin that never return."""


class FaultEnvironment(SimEnvironment):
    """A simulated environment that raises errors, or never answers, while a fault of environments lasts.

    Args:
        workload: gives rewards and durations.
        env_counts: number of environments that were reset with each seed, shared by all environments of the run.
        faults: times until which calls fail.
    """

    def __init__(self, workload: Workload, env_counts: Counter[int], faults: EnvironmentFaults) -> None:
        super().__init__(workload, env_counts)
        self._faults = faults

    async def reset(self, seed: int) -> tuple[Observation, Info]:
        """Return the first observation of the problem of `seed`, and an empty dict.

        While a fault lasts, the call may raise EnvError, or never return until it is cancelled.
        """
        shown = await super().reset(seed)
        await self._fail(_IN_RESET)
        return shown

    async def step(self, action: str) -> StepResult:
        """Return the result of the step with the response `action`.

        While a fault lasts, the call may raise EnvError, or never return until it is cancelled.
        """
        await self._fail(_IN_STEP)
        return await super().step(action)

    async def _fail(self, call: int) -> None:
        """Raise EnvError, or never return, if a fault befalls this call. Otherwise return at once.

        `call` is the number of the random draw, which differs between `reset` and `step`. The draw follows from the
        environment, the call and the turn, so it is the same in each simulation of a seed.
        """
        now = anyio.current_time()
        if uniform(self._key, call, self._turn) < ENV_FAULT:
            if now < self._faults.hang_until:
                await anyio.sleep_forever()
            if now < self._faults.raise_until:
                raise EnvError("the simulated environment fails")


class Collective:
    """Meeting point of the ranks of one incarnation, for the collectives (operations of all ranks together) of torch.

    It fails as soon as one of the ranks is gone or late, and works never again. The next incarnation has another one.

    Args:
        ranks: number of ranks of the run.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._arrived = 0
        """Number of ranks that wait in the present meeting."""
        self._together = anyio.Event()
        """Set when all ranks are in the present meeting, or when it has failed. Each meeting has a new event."""
        self.broken = False
        """True once a rank was gone or late."""

    def break_(self) -> None:
        """Let the present and all later meetings fail, because a rank is gone or late. May be called again."""
        self.broken = True
        self._together.set()

    async def meet(self, seconds: float) -> None:
        """Wait until all ranks are here. Raises CollectiveError if one is gone, or not here after `seconds`."""
        self._arrived += 1
        together = self._together
        if self._arrived == self._ranks:
            self._arrived, self._together = 0, anyio.Event()
            together.set()
        with anyio.move_on_after(seconds) as scope:
            await together.wait()
        if self.broken or scope.cancelled_caught:
            self.break_()
            raise CollectiveError("a collective of the simulated ranks failed")


class FaultTrainer(SimTrainer):
    """A simulated trainer rank that starts from a checkpoint, writes checkpoints, and trains together with others.

    Rank 0 also announces versions, commits steps and writes the files of checkpoints. The other ranks only take part.

    Args:
        config: the run's configuration, with its `[simulate]` table.
        hub: connection to the hub.
        rank: number of the rank.
        version: version that the rank holds at first.
        incarnation: number of the incarnation.
        collective: meeting point of the ranks of the incarnation.
        weights: holds the published versions.
        disk: the disk of the first machine.
    """

    def __init__(
        self,
        config: Config,
        hub: p.HubCaller,
        rank: int,
        version: int,
        incarnation: int,
        collective: Collective,
        weights: Weights,
        disk: Disk,
    ) -> None:
        assert config.simulate is not None
        super().__init__(config, config.simulate, hub, anyio.current_time, rank=rank, version=version)
        self._incarnation = incarnation
        self._collective = collective
        self._weights = weights
        self._disk = disk
        self._saved = -1
        """Version of the last checkpoint that this incarnation has written; -1 if there is none."""

    async def run(self) -> None:
        """Train until the hub has no more batches, and write checkpoints in between, like `TrainerLoop.run`.

        The hub's reply (`BatchReply`) says if the ranks may write a checkpoint after the step, and if they must write
        one that `checkpoint.every` does not ask for. The last version is saved in any case if the hub permits it.

        Raises:
            CollectiveError: another rank of the incarnation is gone or late.
            CheckpointError: a checkpoint cannot be written.
            TransportError: the hub is lost, or does not answer.
        """
        await self._publish()
        while (reply := await self._train_step()).shard is not None:
            await self._publish()
            if reply.may_save and (reply.must_save or self._version % self._config.checkpoint.every == 0):
                await self._save()
        if reply.may_save and self._saved != self._version:
            await self._save()
        await self._hub.call(p.Goodbye(self._rank, activities=[]), waits.leaving_s(self._config))

    async def _meet(self) -> None:
        """Wait for the other ranks, at most deadlines.collective. Raises CollectiveError if one is gone or late."""
        await self._collective.meet(self._config.deadlines.collective)

    async def _publish(self) -> None:
        """Hold the present version for the engines, and announce it to the hub (rank 0 does).

        The hub replies once every engine has the version before this one, so earlier versions are dropped then.
        """
        await self._meet()  # real ranks gather the weights together
        process = PROCESS.get()
        if self._rank == 0 and process is not None:
            self._weights.hold(self._incarnation, process, self._version)
        await super()._publish()
        if self._rank == 0:
            self._weights.drop_before(self._incarnation, self._version)

    async def _save(self) -> None:
        """Write a checkpoint of the present version, with the hub's state, as `flash.trainer.checkpoint.save` does.

        All ranks return once rank 0 has written it. Raises CheckpointError at rank 0 if the disk is full or the hub
        cannot write its state, and CollectiveError at the other ranks.
        """
        await self._meet()
        if self._rank == 0:
            try:
                await self._write_checkpoint()
            except OSError as error:
                raise CheckpointError(f"the simulated checkpoint cannot be written: {error.strerror}") from error
        await self._meet()
        self._saved = self._version

    async def _write_checkpoint(self) -> None:
        """Write the files of a checkpoint into a temporary folder, which then gets its final name.

        Meanwhile the hub writes `hub.bin`, its state, into the same folder, and returns the size and checksum for the
        manifest. At last, checkpoints beyond `checkpoint.keep` are removed. Raises OSError if the disk is full, and
        CheckpointError.
        """
        run_dir, version, disk = self._config.run_dir, self._version, self._disk
        folder = step_folder(run_dir, version)
        aside = temporary_of(folder)
        leftovers = sorted(folder.parent.glob(f"{TMP}*"))  # temporary folders of killed ranks
        await disk.write(lambda: make_empty(aside, leftovers))
        data = f"weights of version {version}".encode()
        await disk.write(lambda: (aside / "weights").write_bytes(data))
        kept = await self._hub.call(p.SnapshotRequest(), waits.kept_s(self._config))
        if (aside / "hub.bin").stat().st_size != kept.size:
            raise CheckpointError("the hub has written another size of its state than it says")
        files = [FileEntry("weights", len(data), zlib.crc32(data)), FileEntry("hub.bin", kept.size, kept.crc32)]
        manifest = msgspec.json.encode(Manifest(version, 0, files))
        await disk.write(lambda: (aside / MANIFEST).write_bytes(manifest))
        await disk.write(lambda: move_into_place(aside, folder))
        await disk.write(lambda: prune(run_dir, self._config.checkpoint.keep))


async def freeze(process: Process, seconds: float) -> None:
    """Stop a process for some seconds, as SIGSTOP and SIGCONT do. It may be killed meanwhile, which `thaw` ignores."""
    process.freeze()
    await anyio.sleep(seconds)
    process.thaw()
