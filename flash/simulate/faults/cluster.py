"""Cluster: the processes of a simulated run, and the launchers that start them again.

The processes are those of a run on several machines: on machine `m0` the process of the hub, which also has node 0, and
the trainer ranks; on the other machines a node that has joined. They run the real hub, gate, transport, journal,
recovery, node and scheduler. Only the code that starts processes, and finds their addresses, is simulated here:
`_first_node` does what `flash.run.node_loop` does, `_rank` what `flash.run.trainer_rank` does, and the launchers what
`flash.run.processes` does.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import anyio
from anyio.abc import SocketListener, TaskGroup
from anyio.lowlevel import checkpoint
from msgspec.structs import replace

from flash.config.load import dump, recorded
from flash.config.tree import Config
from flash.environment.shared import sharing
from flash.errors import CheckpointError, DeadlineError, FlashError, PeerLostError, RecordingError, TransportError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.hub.gate import Gate
from flash.hub.hub import Hub
from flash.hub.recovery import Persistence, RecoveredState, TrainerStart
from flash.observe.observer import MemoryObserver, Wish
from flash.observe.rundir.recording import read_batch, recorded_steps
from flash.observe.rundir.rundir import RunDirectory
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.run.joined import JoinedNode
from flash.run.journal import FileJournal, InThread
from flash.run.node_loop import FAREWELL_S, engines_until_interrupted
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.hub_place import HubAddress
from flash.run.processes.ranks import EXIT_S
from flash.run.processes.rendezvous import ASK_S, RANK_RETRY_S, RETRY_S
from flash.run.processes.supervisor import End
from flash.run.restart import NOTHING, restore_hub_state
from flash.samples.journal import NO_JOURNAL
from flash.simulate.environment import SimTokenizer
from flash.simulate.faults.bookkeeper import Bookkeeper
from flash.simulate.faults.loop import Process, until
from flash.simulate.faults.network import TOKEN, Listener, Network
from flash.simulate.faults.parts import (
    Collective,
    Disk,
    EngineFaults,
    EnvironmentFaults,
    FaultEngine,
    FaultEnvironment,
    FaultTrainer,
    Weights,
)
from flash.simulate.faults.scenario import ANSWERED, Scenario, problems_of
from flash.simulate.workload import Workload
from flash.trainer.checkpoint_files import (
    ChosenCheckpoint,
    choose_checkpoint,
    read_manifest,
    step_folder,
    temporary_of,
)
from flash.transport.frames import ReplyT, Request
from flash.transport.server import ConnectionServer, Peer
from flash.types import Batch, Published
from flash.waiting import deadline, first_error

FIRST = "m0"
"""Machine with the hub and the trainer ranks."""


class Tapped:
    """A connection to the hub whose messages the bookkeeper sees.

    Args:
        cluster: the cluster.
        process: process that has the connection.
        caller: the connection itself.
    """

    def __init__(self, cluster: Cluster, process: Process, caller: p.HubCaller) -> None:
        self._cluster = cluster
        self._process = process
        self._caller = caller

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request, and report it and its reply to the bookkeeper. Implements `HubCaller.call`."""
        book, process = self._cluster.book, self._process
        if process.alive:
            book.sent(process.name, request)
        try:
            reply = await self._caller.call(request, timeout)
        except TransportError as error:
            if process.alive:
                book.failed(process.name, request, error, over=self._cluster.ending)
            raise
        if process.alive:
            self._cluster.reach(type(request).__name__ + ANSWERED)
            book.answered(process.name, request, reply)
            if isinstance(reply, p.JoinReply) and reply.node is not None:
                self._cluster.numbers[process.machine] = reply.node
        return reply


class SimRecorder(MemoryObserver):
    """An observer that writes the files from which a run is recovered, as `flash.observe.recorder.Recorder` does.

    Args:
        config: the run's configuration.
        directory: the run directory.
        process: process of the hub.
        disk: the disk.
    """

    def __init__(self, config: Config, directory: RunDirectory, process: Process, disk: Disk) -> None:
        super().__init__()
        self._config = config
        self._directory = directory
        self._process = process
        self._disk = disk
        self._queue: list[Batch] = []
        self._queued = self._done = 0
        """Numbers of batches that were queued, and of those that were written."""
        self._news = anyio.Event()
        self._progress = anyio.Event()
        self._error: FlashError | None = None
        """Error of an earlier write in the recorder's thread."""

    async def run(self) -> None:
        """Write the batches one after another, like the thread of the real recorder."""
        while True:
            while self._queue:
                batch = self._queue.pop(0)
                keep_all = self._config.checkpoint.batches == "all"
                if self._config.checkpoint.batches != "none":
                    try:
                        await self._disk.write(partial(self._directory.write_batch, batch, keep_all=keep_all))
                    except FlashError as error:
                        self._error = self._error or error
                self._done += 1
                self._progress.set()
            self._news = anyio.Event()
            await self._news.wait()

    async def written(self) -> None:
        """Wait until all batches and rows are on the disk, like `Recorder.written`. Raises the error of a write."""
        wanted = self._queued
        while self._done < wanted:
            self._progress = anyio.Event()
            await self._progress.wait()
        self._refuse()
        self._do(lambda: self._disk.synced(self._directory.sync_rows()))

    def _refuse(self) -> None:
        """Raise the error of an earlier write."""
        if self._error is not None:
            raise self._error

    def _do(self, write: Callable[[], object]) -> None:
        """Write at once, unless the process was killed."""
        if self._process.alive:
            self._disk.do(write)

    def step(self, row: Any) -> Wish | None:
        """Append the row of a step."""
        self._do(lambda: self._directory.append_metrics(row))
        return None

    def evaluation(self, row: Any) -> None:
        """Append the row of an evaluation."""
        self._do(lambda: self._directory.append_evaluation(row))

    def activities(self, rows: Any) -> None:
        """Discard activities."""

    def batch(self, batch: Batch) -> None:
        """Queue a batch for the thread. Raises the error of an earlier write."""
        self._refuse()
        self._queue.append(batch)
        self._queued += 1
        self._news.set()

    def ledger(self, totals: Any) -> None:
        """Write the totals."""
        self._do(lambda: self._directory.write_ledger(totals))


class SimHistory:
    """Checkpoints and batches for ranks that start again, as `flash.run.restart.RecordedHistory` gives them.

    Args:
        run_dir: the run directory.
        recorder: has the batches.
    """

    def __init__(self, run_dir: Path, recorder: SimRecorder) -> None:
        self._run_dir = run_dir
        self._recorder = recorder

    async def choose_start(self, version: int) -> TrainerStart:
        """Return the newest whole checkpoint. Raises RecordingError if a batch after it is missing."""
        await self._recorder.written()
        chosen, _ = choose_checkpoint(self._run_dir)
        held = read_manifest(chosen).version if chosen is not None else 0
        if missing := sorted({*range(held, version)} - {*recorded_steps(self._run_dir / "batches")}):
            raise RecordingError(f"the newest checkpoint is of version {held}, and steps {missing} are not recorded")
        return TrainerStart(held, str(chosen or ""))

    async def batch(self, step: int) -> Batch:
        """Return the recorded batch of a step."""
        await self._recorder.written()
        return read_batch(self._run_dir / "batches", step)

    def same_weights(self, one: Published, other: Published) -> bool:
        """Return True, since there are no weights that could differ."""
        return True


class SimJoinedNode(JoinedNode):
    """The real loop of a joined node, over the simulated network."""

    def __init__(self, cluster: Cluster, process: Process, config: Config, digest: str) -> None:
        super().__init__(config, ProcessOrder(config.cluster.trainer_nodes, digest=digest), None)
        self._cluster = cluster
        self._process = process

    async def find_hub(self, wait_s: float, before: p.RunReply | None) -> tuple[HubAddress, p.RunReply] | None:
        """Wait for the hub like `HubSearch.find`."""
        ended = self._cluster.runs_ended
        with deadline(wait_s or 2 * ASK_S, "the hub of the run", "the network"):
            while True:
                try:
                    async with self._cluster.connected(self._process, "guest-1", ASK_S) as hub:
                        return HubAddress("hub", 1, TOKEN), await hub.call(p.RunRequest(p.dialect()), ASK_S)
                except FlashError as error:
                    if wait_s == 0 or not isinstance(error, TransportError):
                        raise
                if before is not None and self._cluster.runs_ended != ended:
                    return None
                await anyio.sleep(RETRY_S)

    @asynccontextmanager
    async def connect(self, address: HubAddress) -> AsyncGenerator[p.HubCaller]:
        """Connect to the hub over the simulated network."""
        async with self._cluster.connected(self._process, "guest-1", self._config.deadlines.request) as hub:
            yield hub

    async def make_node(self, link: HubLink) -> RolloutNode:
        """Return a node with simulated engines."""
        return self._cluster.make_node(self._process, link, self.lose_hub)


class Cluster:
    """The machines, processes and launchers of a run.

    Args:
        scenario: the scenario that is played.
        folder: empty folder for the files of the run.
        book: the bookkeeper.
        tasks: runs the processes.
    """

    def __init__(self, scenario: Scenario, folder: Path, book: Bookkeeper, tasks: TaskGroup) -> None:
        self.scenario = scenario
        self.book = book
        self._tasks = tasks
        self.config = scenario.config(str(folder))
        self.domains = scenario.domains
        dice = partial("{} {}".format, scenario.seed)
        self._dice = random.Random(dice("cluster"))
        self.network = Network(random.Random(dice("network")))
        machine_fails = any(fault.kind == "lose machine of hub" for fault in scenario.faults)
        self.disk = Disk(random.Random(dice("disk")), self.config.run_dir, machine_fails=machine_fails)
        self.write_journal: InThread = self.disk.write
        """Calls a function that writes the journal. Tests replace it with one that forgets to."""
        self.weights = Weights(self.network)
        assert self.config.simulate is not None
        rollout = self.config.rollout
        self._workload = Workload(
            self.config.simulate, scenario.seed, rollout.max_new_tokens, rollout.group_size + rollout.extra_per_group
        )
        self._env_counts: Counter[int] = Counter()
        self._token_ids = count(1)
        self.env_faults = EnvironmentFaults()
        self.engines: dict[str, EngineFaults] = {}
        """Engines and their faults, by machine."""
        self.processes: dict[str, Process] = {}
        """Newest process of each name."""
        self.absent: dict[str, float] = {}
        """Time until which the processes of a machine do not start."""
        self.ending = False
        """True while a launch ends, so that lost connections mean nothing."""
        self.runs_ended = 0
        """Number of launches that have ended in order, which a node sees by the run's summary."""
        self.numbers: dict[str, int] = {}
        """Number that the hub has given to the node of each machine."""
        self.hub: Hub | None = None
        """Hub that serves now, for interrupts, which reach it as a signal."""
        self._collectives: dict[int, Collective] = {}
        self._pids = 0
        self._ranks: dict[int, Process] = {}
        """Rank processes by process id."""
        self._heard_hub = 0.0
        self.next_settings: dict[str, Any] | None = None
        """Settings with which the next launch resumes the run; None: those of the scenario."""
        self.person = Process("person", "elsewhere")
        self._nodes = scenario.nodes
        self.triggers: dict[str, list[anyio.Event]] = {}
        """Events that are set when a moment is reached, by the moment (`Fault.on`)."""

    # -- processes -----------------------------------------------------------------------------------------------------

    async def run_process(self, name: str, machine: str, function: Callable[[Process], Awaitable[Any]]) -> Process:
        """Start a process as soon as its machine is not `absent`, and wait until it has ended or was killed."""
        await until(lambda: anyio.current_time() >= self.absent.get(machine, 0.0))
        process = self.processes[name] = Process(name, machine)
        self.network.add(process)
        process.on_end.append(lambda: self.book.process_ended(name))
        self._tasks.start_soon(process.main, partial(function, process))
        await process.ended.wait()
        return process

    @asynccontextmanager
    async def connected(self, process: Process, name: str, seconds: float) -> AsyncGenerator[Tapped]:
        """Connect a process to the hub for the time of the block."""
        async with self.network.connect(process, name, seconds) as client:
            yield Tapped(self, process, client)

    async def _handle(self, gate: Gate, process: Process, peer: Peer, request: Request[Any]) -> Any:
        """Answer a request at the hub, and report the reply to the bookkeeper."""
        self.reach(type(request).__name__)
        reply = await gate.handle(peer, request)
        if process.alive:
            self.book.replied(request, reply)
        return reply

    def reach(self, moment: str) -> None:
        """Wake the faults that wait for a moment (`Fault.on`)."""
        for event in self.triggers.pop(moment, ()):
            event.set()

    def make_node(
        self, process: Process, link: HubLink, on_loss: Callable[[TransportError], None] | None
    ) -> RolloutNode:
        """Return a real node with simulated engines and environments, in a process of machine `process.machine`."""
        config, machine = self.config, process.machine
        before = self.engines.get(machine, EngineFaults())
        faults = self.engines[machine] = EngineFaults()
        faults.refuse_until, faults.slowness = before.refuse_until, before.slowness

        def make_engine(number: int) -> FaultEngine:
            """Return a new engine."""
            start_s = self._dice.uniform(0.2, 3.0)
            tokens, late = self._token_ids, self.book.too_late
            return FaultEngine(config, self._workload, self.weights, faults, tokens, start_s, late)

        engines = [make_engine] * config.engines_on(0)
        env = NodeEnvironment(
            lambda kind: FaultEnvironment(self._workload, self._env_counts, self.env_faults),
            problems_of(self.domains, config),
        )
        return RolloutNode(config, link, engines, SimTokenizer(), env, now=anyio.current_time, on_loss=on_loss)

    # -- the process of the hub ----------------------------------------------------------------------------------------

    async def _first_node(self, restarts: int, resumes: bool, process: Process) -> RunEnd:
        """Run the hub and node 0, like `flash.run.node_loop`."""
        config = replace(self.config, run=replace(self.config.run, resume=resumes))
        now = anyio.current_time
        await anyio.sleep(self._dice.uniform(0.1, 1.0))
        resume = resumes or restarts > 0
        chosen = choose_checkpoint(config.run_dir) if resume else ChosenCheckpoint(None, [])
        kept = restore_hub_state(chosen.path, config) if resume else NOTHING
        await anyio.sleep(self._dice.uniform(0.0, 0.2))
        version = kept.state.version if kept.state is not None else 0
        directory = self.disk.do(
            lambda: RunDirectory.open(config.run_dir, dump(recorded(config)), version if resume else None)
        )
        recorder = SimRecorder(config, directory, process, self.disk)
        evaluated = {int(row["step"]) for row in directory.read_evaluations()}
        number = self.disk.do(directory.hub_numbers.begin)
        self.book.hub_begins(config, version, kept.notes)
        journal = None
        if config.checkpoint.journal != "off":
            synced = config.checkpoint.journal == "fsync"
            journal = FileJournal(
                config.run_dir, version, kept.place, to_disk=synced, note=recorder.note, in_thread=self.write_journal
            )
        hub = Hub(
            config,
            recorder,
            now=now,
            problems=problems_of(self.domains, config),
            recovered=RecoveredState(kept.state, evaluated, kept.start, number),
            persistence=Persistence(
                partial(self._save_state, recorder), journal or NO_JOURNAL, SimHistory(config.run_dir, recorder)
            ),
        )
        async with anyio.create_task_group() as writers:
            writers.start_soon(recorder.run)
            if journal is not None:
                writers.start_soon(journal.run)
            end = await self._serve(hub, config, process)
            await recorder.written()
            recorder.ledger(hub.samples.totals())
            if process.alive:
                self.disk.do(lambda: directory.summary.write_text("{}"))
                self.runs_ended += 1
            writers.cancel_scope.cancel()
            return end
        # Type checkers believe that a task group may swallow an exception of its block.
        raise AssertionError("not reached: the block returns or raises")

    async def _serve(self, hub: Hub, config: Config, process: Process) -> RunEnd:
        """Open the hub's port, and run the hub and node 0 until the end of the run."""
        gate, port = Gate(hub, config), Listener(process)
        server = ConnectionServer(
            TOKEN,
            p.HubRequest,
            partial(self._handle, gate, process),
            config.deadlines.request,
            gate.connection_to_replace,
            gate.arrived,
            gate.left,
        )
        async with anyio.create_task_group() as group:
            group.start_soon(server.accept_all, cast("SocketListener", port), group)
            try:
                self.network.hub, self.hub = port, hub
                async with anyio.create_task_group() as node:
                    node.start_soon(self._roll_out_here, hub, config, process)
                    end = await hub.run()
                    self.ending = self.ending or process.alive
                    if end.reason == "finished":
                        with anyio.move_on_after(config.deadlines.request):
                            await hub.all_nodes_left()
                    else:
                        await anyio.sleep(FAREWELL_S)
                    node.cancel_scope.cancel()
                    return end
            finally:
                gate.close()
                if process.alive:
                    self.network.hub = self.hub = None
                group.cancel_scope.cancel()
        # Type checkers believe that a task group may swallow an exception of its block.
        raise AssertionError("not reached: the block returns or raises")

    async def _roll_out_here(self, hub: Hub, config: Config, process: Process) -> None:
        """Run node 0 in the process of the hub."""
        with engines_until_interrupted(hub):
            async with self.connected(process, "node-0", config.deadlines.request) as caller:
                await self.make_node(process, HubLink(0, 0, caller), None).run()

    async def _save_state(self, recorder: SimRecorder, version: int, pieces: Generator[bytearray]) -> p.SnapshotReply:
        """Write the hub's state into a checkpoint, like `flash.run.restart.keep_hub_state`."""
        await recorder.written()
        data = bytearray()
        for piece in pieces:
            data += piece
            await checkpoint()
        file = temporary_of(step_folder(self.config.run_dir, version)) / "hub.bin"
        try:
            await self.disk.write(lambda: file.write_bytes(data))
        except OSError as error:
            raise CheckpointError(f"the simulated hub cannot write its state: {error.strerror}") from error
        return p.SnapshotReply(len(data), zlib.crc32(data))

    # -- trainer ranks -------------------------------------------------------------------------------------------------

    async def _rank(self, rank: int, process: Process) -> End:
        """Run a trainer rank, like `flash.run.trainer_rank`."""
        config = self.config
        self._pids += 1
        pid, begun = self._pids, anyio.current_time()
        self._ranks[pid] = process
        seconds, store = config.deadlines.request, "simulated:1" if rank == 0 else ""
        while True:
            entered = False
            try:
                async with self.connected(process, f"trainer-{rank}", seconds) as hub:
                    request = p.IncarnationRequest(rank, pid, "simulated", store)
                    incarnation = await hub.call(request, config.deadlines.rendezvous)
                    if incarnation.checkpoint is None:
                        return End.OVER
                    entered = True  # An error before this means that the hub is not ready, so the rank tries again.
                    return await self._train(hub, rank, incarnation, process)
            except FlashError as error:
                if entered:
                    raise
                if anyio.current_time() - begun > config.deadlines.rendezvous:
                    raise DeadlineError("the hub of this run", config.deadlines.rendezvous, "its output") from error
            await anyio.sleep(RANK_RETRY_S)

    async def _train(self, hub: Tapped, rank: int, incarnation: p.IncarnationReply, process: Process) -> End:
        """Train with a hub that has admitted the rank. Errors are reported to it."""
        config, folder = self.config, incarnation.checkpoint
        version = read_manifest(Path(folder)).version if folder else 0
        await anyio.sleep(self._dice.uniform(0.2, 1.5))
        collective = self._collectives.setdefault(incarnation.number, Collective(config.trainer_world_size))
        process.on_end.append(collective.break_)
        args = (incarnation.number, collective, self.weights, self.disk)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._beat, hub, rank)
                await FaultTrainer(config, hub, rank, version, *args).run()
                tasks.cancel_scope.cancel()
        except Exception as group:
            error = first_error(group) if isinstance(group, BaseExceptionGroup) else group
            if not isinstance(error, PeerLostError):
                with suppress(TransportError):
                    await hub.call(
                        p.Fatal(type(error).__name__, f"trainer rank {rank}: {error}"), config.deadlines.request
                    )
            raise error from None
        return End.OVER

    async def _beat(self, hub: Tapped, rank: int) -> None:
        """Send a heartbeat whenever the hub has replied to the one before, until the incarnation is over."""
        with suppress(FlashError):
            while True:
                await hub.call(p.RankHeartbeat(rank), 1e6)  # no timeout: other calls notice a hub that hangs

    # -- launchers -----------------------------------------------------------------------------------------------------

    async def launch(self, resumes: bool) -> RunEnd | FlashError:
        """Start the hub and the ranks, and start them again if they fail, until the run has ended.

        Returns the end of the run, or the error that no restart can help.
        """
        self.ending = False
        async with anyio.create_task_group() as parts:
            for rank in range(self.config.trainer_world_size):
                parts.start_soon(self._keep_rank, rank)
            parts.start_soon(self._watch_hub)
            end = await self._keep_hub(resumes)
            self.ending = True
            parts.cancel_scope.cancel()
            for process in self._ranks.values():
                process.kill()
            return end
        # Type checkers believe that a task group may swallow an exception of its block.
        raise AssertionError("not reached: the block returns or raises")

    async def _keep_hub(self, resumes: bool) -> RunEnd | FlashError:
        """Run the process of the hub until it has ended in order, or with an error that a restart cannot mend."""
        restarts = 0
        while True:
            self._heard_hub = anyio.current_time()
            process = await self.run_process("hub", FIRST, partial(self._first_node, restarts, resumes))
            group = process.error
            error = first_error(group) if isinstance(group, BaseExceptionGroup) else group
            self.book.hub_ended(error, killed=process.killed)
            if error is None and not process.killed:
                return process.result
            if isinstance(error, FlashError) and error.fatal and not process.killed:
                return error
            restarts += 1
            self.ending = False
            await anyio.sleep(RETRY_S)

    async def _keep_rank(self, rank: int) -> None:
        """Run a trainer rank, and start it again whenever it has ended."""
        while True:
            process = await self.run_process(f"rank {rank}", FIRST, partial(self._rank, rank))
            if process.error is not None and not isinstance(process.error, TransportError):
                self.book.process_failed(process.name, process.error)
            ended = self.network.hub
            if process.result is End.OVER:
                # A later hub may need ranks again.
                await until(lambda ended=ended: self.network.hub not in (ended, None))
            await anyio.sleep(RETRY_S)

    async def _watch_hub(self) -> None:
        """Kill the ranks of incarnations that are over, and a hub that does not answer, like `Ranks.watch_hub`."""
        launcher, patience = Process("launcher", FIRST), self.config.deadlines.hub
        while True:
            living: list[int] = []
            try:
                async with self.network.connect(launcher, "messenger-0", patience) as hub:
                    after = -1
                    while True:
                        news = await hub.call(p.RanksRequest(0, after), patience)
                        self._heard_hub = anyio.current_time()
                        if news.number != after:
                            after, living = news.number, news.living
                            await self._end_incarnation(news)
            except FlashError as error:
                silent = anyio.current_time() - self._heard_hub
                if isinstance(error, DeadlineError) or silent > self.config.deadlines.rendezvous:
                    self.processes["hub"].kill()
                await anyio.sleep(EXIT_S)  # the ranks of a lost hub get time to exit by themselves
                for pid in living:
                    self._ranks[pid].kill()

    async def _end_incarnation(self, news: p.RanksReply) -> None:
        """Kill the processes of an incarnation that is over. Those that caused its end get time to exit."""
        for pid in news.ended:
            if pid not in news.causes:
                self._ranks[pid].kill()
        if any(self._ranks[pid].alive for pid in news.causes):
            await anyio.sleep(EXIT_S)
        for pid in news.causes:
            self._ranks[pid].kill()

    async def keep_node(self, number: int) -> None:
        """Run the loop of a joined node on machine `number`, and start it again whenever it has ended."""
        machine = f"m{number}"
        while True:
            await until(lambda: self.network.hub is not None)
            process = await self.run_process(f"node {number}", machine, self._joined)
            group = process.error
            error = first_error(group) if isinstance(group, BaseExceptionGroup) else group
            if error is not None and not process.killed:
                self.book.process_failed(process.name, error)
            self.numbers.pop(machine, None)
            await anyio.sleep(RETRY_S)

    def add_node(self) -> None:
        """Let another node join."""
        self._nodes += 1
        self._tasks.start_soon(self.keep_node, self._nodes)

    async def _joined(self, process: Process) -> End:
        """Run a joined node with the configuration of the hub that serves now."""
        config = self.config
        try:
            async with self.connected(process, "guest-1", ASK_S) as hub:
                run = await hub.call(p.RunRequest(p.dialect()), ASK_S)
        except TransportError:
            return End.WITH_PEER
        async with sharing(config.run.name, close_s=config.deadlines.close):
            return await SimJoinedNode(self, process, config, run.digest).run()
