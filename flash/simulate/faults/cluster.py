"""Cluster: the processes of a simulated run, and the launchers that start them again.

The processes are those of a run on several machines: on machine `m0` the process of the hub, which also has node 0, and
the trainer ranks; on the other machines a node that has joined. They run the real hub, gate, transport, journal,
recovery, node and scheduler. Only the code that starts processes, and finds their addresses, is simulated here:
`_first_node` does what `flash.run.node_loop` does, `_rank` what `flash.run.trainer_rank` does, and the launchers what
`flash.run.processes` does.

A *launch* is one call of `flash train`: it ends when the run is finished, interrupted or failed for good, and the next
launch resumes the run. An *incarnation* is all trainer ranks between two of their restarts. A *version* is the weights
after so many steps. A `finally` block of a killed process still runs here, unlike after SIGKILL. So all code that
changes something outside of the process first asks for `process.alive`.
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
NO_TIMEOUT_S = 1e6
"""Seconds of a timeout that never passes: no simulation lasts so long."""


class Tapped:
    """A connection to the hub that reports each message to the bookkeeper. Implements `HubCaller`.

    Args:
        cluster: has the bookkeeper.
        process: process that has the connection. Once it has ended, nothing is reported any more.
        caller: the connection itself.
    """

    def __init__(self, cluster: Cluster, process: Process, caller: p.HubCaller) -> None:
        self._cluster = cluster
        self._process = process
        self._caller = caller

    async def call(self, request: Request[ReplyT], timeout: float) -> ReplyT:
        """Send a request, and return its reply. Reports the request, and then its reply or its failure.

        `timeout` is in seconds. Raises the TransportError of the connection (DeadlineError after the timeout), and
        BrokenLaw if the message breaks a law. A reply that arrives also wakes the faults that wait for it, and the
        reply to a node that joins gives the number of this node, by which a person can drain it.
        """
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

    Rows and totals are small, so the hub's calls write them at once. Batches wait in a queue for `run`, which stands
    for the real recorder's thread. All methods run on one event loop, so no lock is needed. The metrics and batches of
    `MemoryObserver` are not kept in memory.

    Args:
        config: the run's configuration.
        directory: the run directory.
        process: process of the hub. Once it has ended, nothing is written.
        disk: the simulated disk, which may be full.
    """

    def __init__(self, config: Config, directory: RunDirectory, process: Process, disk: Disk) -> None:
        super().__init__()
        self._config = config
        self._directory = directory
        self._process = process
        self._disk = disk
        self._queue: list[Batch] = []
        """Batches that `run` has not begun to write."""
        self._queued = self._done = 0
        """Numbers of batches that were queued, and of batches whose write has ended, even with an error."""
        self._news = anyio.Event()
        """Set when a batch is queued. `run` replaces it before each wait."""
        self._progress = anyio.Event()
        """Set when the write of a batch has ended. `written` replaces it before each wait."""
        self._error: FlashError | None = None
        """First error of the writes of batches; None if there was none."""

    async def run(self) -> None:
        """Write the queued batches one after another, until cancelled, like the thread of the real recorder.

        An error does not end the loop. As in the real recorder, the next call of `batch` or `written` raises it.
        """
        while True:
            while self._queue:
                batch = self._queue.pop(0)
                keep_all = self._config.checkpoint.batches == "all"  # else only those after the oldest checkpoint
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
        """Wait until all batches that are queued now are written, and force the rows to the disk.

        Stands for `Recorder.written`. Raises the first error of a write. Rows were written already, but a machine that
        fails may still lose rows that were not forced to its disk.
        """
        wanted = self._queued
        while self._done < wanted:
            self._progress = anyio.Event()
            await self._progress.wait()
        self._refuse()
        self._do(lambda: self._disk.synced(self._directory.sync_rows()))

    def _refuse(self) -> None:
        """Raise the first error of the writes of batches, if there is one."""
        if self._error is not None:
            raise self._error

    def _do(self, write: Callable[[], object]) -> None:
        """Call a function that writes, unless the process has ended. Raises RunDirectoryError if the disk is full."""
        if self._process.alive:
            self._disk.do(write)

    def step(self, row: Any) -> Wish | None:
        """Append the row of a step to the metrics file. Returns None, since this observer wishes nothing of the hub.

        Like `evaluation` and `ledger`, raises RunDirectoryError if the disk is full.
        """
        self._do(lambda: self._directory.append_metrics(row))
        return None

    def evaluation(self, row: Any) -> None:
        """Append the row of an evaluation to its file."""
        self._do(lambda: self._directory.append_evaluation(row))

    def activities(self, rows: Any) -> None:
        """Discard activities. No recovery needs them."""

    def batch(self, batch: Batch) -> None:
        """Queue the batch of a step for `run`. Raises the first error of the earlier writes, as the recorder does."""
        self._refuse()
        self._queue.append(batch)
        self._queued += 1
        self._news.set()

    def ledger(self, totals: Any) -> None:
        """Write the totals of the ledger, which the bookkeeper compares with the messages at the end."""
        self._do(lambda: self._directory.write_ledger(totals))


class SimHistory:
    """Checkpoints and batches for ranks that start again, as `flash.run.restart.RecordedHistory` gives them.

    The hub calls it when the ranks of the next incarnation start, and for each step that they train again.

    Args:
        run_dir: the run directory.
        recorder: writes the batches. Each method first waits until it has written all of them.
    """

    def __init__(self, run_dir: Path, recorder: SimRecorder) -> None:
        self._run_dir = run_dir
        self._recorder = recorder

    async def choose_start(self, version: int) -> TrainerStart:
        """Return the newest complete checkpoint; without any, version 0 and an empty folder name.

        `version` is the version that the run has reached: the ranks train the steps from the checkpoint up to it again.

        Raises:
            RecordingError: the batch of one of these steps is missing.
            FlashError: a batch or row could not be written, or the checkpoint cannot be read.
        """
        await self._recorder.written()
        chosen, _ = choose_checkpoint(self._run_dir)
        held = read_manifest(chosen).version if chosen is not None else 0
        if missing := sorted({*range(held, version)} - {*recorded_steps(self._run_dir / "batches")}):
            raise RecordingError(f"the newest checkpoint is of version {held}, and steps {missing} are not recorded")
        return TrainerStart(held, str(chosen or ""))

    async def batch(self, step: int) -> Batch:
        """Return the recorded batch of a step. Raises RecordingError if it cannot be read, and the error of a write."""
        await self._recorder.written()
        return read_batch(self._run_dir / "batches", step)

    def same_weights(self, one: Published, other: Published) -> bool:
        """Return True: the simulated ranks have no weights, so two publications of a version cannot differ."""
        return True


class SimJoinedNode(JoinedNode):
    """The real loop of a joined node, over the simulated network and with simulated engines.

    Args:
        cluster: has the network and makes the node.
        process: process of the node.
        config: the run's configuration.
        digest: digest of the configuration, from the hub's description of its run. If a later hub has another one, the
            loop ends with WITH_PEER, and `Cluster.keep_node` starts a new process.
    """

    def __init__(self, cluster: Cluster, process: Process, config: Config, digest: str) -> None:
        # `node` is the machine's number in its job. Machines below `trainer_nodes` have ranks; this is the first number
        # without ranks. All nodes here share it, because the hub gives each its number in the run.
        order = ProcessOrder(node=config.cluster.trainer_nodes, digest=digest)
        super().__init__(config, order, token=None)  # only the real search for a hub uses the token
        self._cluster = cluster
        self._process = process

    async def find_hub(self, wait_s: float, before: p.RunReply | None) -> tuple[HubAddress, p.RunReply] | None:
        """Wait for the hub, like `HubSearch.find`.

        Returns its address, which `connect` does not need here, and its description of the run; None if the launch has
        ended in order since this search began.

        Args:
            wait_s: seconds to wait for a hub; 0: ask once, without a retry.
            before: description of the run, if a hub of it was found before. Without it the result is never None.

        Raises:
            DeadlineError: no hub was found in time.
            FlashError: the hub refuses this node; or, if `wait_s` is 0, there is no hub.
        """
        ended = self._cluster.runs_ended
        with deadline(wait_s or 2 * ASK_S, "the hub of the run", "the network"):
            while True:
                try:
                    async with self._cluster.connected(self._process, "guest-1", ASK_S) as hub:
                        return HubAddress("hub", 1, TOKEN), await hub.call(p.RunRequest(p.dialect()), ASK_S)
                except FlashError as error:
                    # After a TransportError the next hub may be about to start. Other errors are the hub's answer.
                    if wait_s == 0 or not isinstance(error, TransportError):
                        raise
                if before is not None and self._cluster.runs_ended != ended:
                    return None
                await anyio.sleep(RETRY_S)

    @asynccontextmanager
    async def connect(self, address: HubAddress) -> AsyncGenerator[p.HubCaller]:
        """Connect to the hub that serves now, for the time of the block. `address` is always the same here.

        Raises TransportError if no hub accepts the connection within deadlines.request.
        """
        async with self._cluster.connected(self._process, "guest-1", self._config.deadlines.request) as hub:
            yield hub

    async def make_node(self, link: HubLink) -> RolloutNode:
        """Return a node with simulated engines, which are not started yet, for the hub of `link`."""
        return self._cluster.make_node(self._process, link, self.lose_hub)


class Cluster:
    """The machines, processes and launchers of a run.

    `flash.simulate.faults.play` makes it, launches the run, and lets the faults happen. All processes share one event
    loop. During each await any of them may run, be killed, frozen or restarted.

    Args:
        scenario: the scenario that is played.
        folder: empty folder for the files of the run.
        book: the bookkeeper, which gets every message and every end of a process.
        tasks: runs the processes. A BrokenLaw in one of them ends the simulation.
    """

    def __init__(self, scenario: Scenario, folder: Path, book: Bookkeeper, tasks: TaskGroup) -> None:
        self.scenario = scenario
        self.book = book
        self._tasks = tasks
        self.config = scenario.config(str(folder))
        """Configuration of the present launch. A person may resume the run with another one."""
        self.domains = scenario.domains
        """Weight of each domain (kind of problems) in the present launch; empty if there are none."""
        # Each part draws from numbers of its own, so that a draw more in one part changes no other part.
        dice = partial("{} {}".format, scenario.seed)
        self._dice = random.Random(dice("cluster"))
        self.network = Network(random.Random(dice("network")))
        machine_fails = any(fault.kind == "lose machine of hub" for fault in scenario.faults)
        self.disk = Disk(random.Random(dice("disk")), self.config.run_dir, machine_fails=machine_fails)
        self.write_journal: InThread = self.disk.write
        """Awaits a call of the function that writes the journal. Tests replace it with one that skips the call."""
        self.weights = Weights(self.network)
        assert self.config.simulate is not None
        rollout = self.config.rollout
        self._workload = Workload(
            self.config.simulate, scenario.seed, rollout.max_new_tokens, rollout.group_size + rollout.extra_per_group
        )
        self._env_counts: Counter[int] = Counter()
        """Number of environments that were reset with each seed, over all nodes. Each reset with a seed draws anew."""
        self._token_ids = count(1)
        """Token ids for responses, over all nodes: each response has its own, so no two samples look alike."""
        self.env_faults = EnvironmentFaults()
        self.engines: dict[str, EngineFaults] = {}
        """Engines of the newest node process of each machine, and their faults, by machine."""
        self.processes: dict[str, Process] = {}
        """Newest process of each name."""
        self.absent: dict[str, float] = {}
        """Time, in seconds of the loop's clock, until which no process starts on a machine, by machine."""
        self.ending = False
        """True from the end of the hub's work to the next start of a hub. Connections that are lost then are no fault,
        and no more faults happen."""
        self.runs_ended = 0
        """Number of launches that have ended in order. A real node finds out by the run's summary file."""
        self.numbers: dict[str, int] = {}
        """Number that the hub has given to the node of each machine."""
        self.hub: Hub | None = None
        """Hub that serves now, for interrupts, which reach it as a signal."""
        self._collectives: dict[int, Collective] = {}
        """Meeting point of the ranks of each incarnation, by number of the incarnation."""
        self._pids = 0
        """Process id of the newest rank process. Ids are counted from 1."""
        self._ranks: dict[int, Process] = {}
        """All rank processes so far, by process id, with which the hub asks launchers to kill them."""
        self._heard_hub = 0.0
        """Time at which the hub last replied to its launcher, or was started."""
        self.next_settings: dict[str, Any] | None = None
        """Settings with which the next launch resumes the run (`Fault.settings`); None: the settings do not change."""
        self.person = Process("person", "elsewhere")
        """Stands for a person who calls `flash drain`. Its machine has no faults."""
        self._nodes = scenario.nodes
        """Number of the newest joined node, which is also the number of its machine."""
        self.triggers: dict[str, list[anyio.Event]] = {}
        """Events that are set when a moment is reached, by the moment (`Fault.on`). Each waiting fault has one."""

    # -- processes -----------------------------------------------------------------------------------------------------

    async def run_process(self, name: str, machine: str, function: Callable[[Process], Awaitable[Any]]) -> Process:
        """Start a process as soon as its machine is not `absent`, and wait until it has ended or was killed.

        Returns the ended process, with its result or error, which this never raises. If the caller is cancelled, the
        process goes on. `name` names it for faults and in the trace, and `function` is its main function.
        """
        await until(lambda: anyio.current_time() >= self.absent.get(machine, 0.0))
        process = self.processes[name] = Process(name, machine)
        self.network.add(process)
        process.on_end.append(lambda: self.book.process_ended(name))
        self._tasks.start_soon(process.main, partial(function, process))
        await process.ended.wait()
        return process

    @asynccontextmanager
    async def connected(self, process: Process, name: str, seconds: float) -> AsyncGenerator[Tapped]:
        """Connect a process to the hub for the time of the block.

        `name` is the name by which the hub knows the peer, such as `node-0`, `trainer-1`, or `guest-1` for a process
        that has no place in the run yet. Raises TransportError if no hub accepts the connection within `seconds`.
        """
        async with self.network.connect(process, name, seconds) as client:
            yield Tapped(self, process, client)

    async def _handle(self, gate: Gate, process: Process, peer: Peer, request: Request[Any]) -> Any:
        """Answer a request at the hub, whose process is `process`. The handler of its server.

        First wakes the faults that wait for such a request. Reports the reply to the bookkeeper before it is sent.
        Raises the errors of the gate, which refuses requests, and BrokenLaw.
        """
        self.reach(type(request).__name__)
        reply = await gate.handle(peer, request)
        if process.alive:
            self.book.replied(request, reply)
        return reply

    def reach(self, moment: str) -> None:
        """Wake the faults that wait for a moment: the name of a request, or of a request with ANSWERED at its end."""
        for event in self.triggers.pop(moment, ()):
            event.set()

    def make_node(
        self, process: Process, link: HubLink, on_loss: Callable[[TransportError], None] | None
    ) -> RolloutNode:
        """Return a real node with simulated engines and environments, in a process of machine `process.machine`.

        `link` is the node's connection to the hub, with its numbers there. `on_loss` is called when the hub is lost;
        None: the node ends with its hub. Faults of engines that last go on in a new process of the same machine, but
        the engines of the old process are gone.
        """
        config, machine = self.config, process.machine
        before = self.engines.get(machine, EngineFaults())
        faults = self.engines[machine] = EngineFaults()
        faults.refuse_until, faults.slowness = before.refuse_until, before.slowness

        def make_engine(number: int) -> FaultEngine:
            """Return a new engine that is not started. `number`, its number in the run, changes nothing here."""
            start_s = self._dice.uniform(0.2, 3.0)
            tokens, late = self._token_ids, self.book.too_late
            return FaultEngine(config, self._workload, self.weights, faults, tokens, start_s, late)

        engines = [make_engine] * config.engines_on(0)  # without GPUs all machines have the same number
        env = NodeEnvironment(
            lambda kind: FaultEnvironment(self._workload, self._env_counts, self.env_faults),
            problems_of(self.domains, config),
        )
        return RolloutNode(config, link, engines, SimTokenizer(), env, now=anyio.current_time, on_loss=on_loss)

    # -- the process of the hub ----------------------------------------------------------------------------------------

    async def _first_node(self, restarts: int, resumes: bool, process: Process) -> RunEnd:
        """Run the hub and node 0, like `flash.run.node_loop`. Main function of the hub's process.

        Args:
            restarts: number of hub processes that this launch has had before. Each after the first one recovers.
            resumes: True if the launch resumes a run of an earlier launch, so that its first hub recovers, too.
            process: the process of the hub.

        Returns the end of the run. Raises the error that ends the hub, alone or in a group: ConfigError or
        CheckpointError from the recovery, an error of the disk, or an error that the hub itself ends with. On a kill,
        tasks are cancelled, and nothing more is written.
        """
        config = replace(self.config, run=replace(self.config.run, resume=resumes))
        now = anyio.current_time
        await anyio.sleep(self._dice.uniform(0.1, 1.0))  # start of the process
        resume = resumes or restarts > 0
        chosen = choose_checkpoint(config.run_dir) if resume else ChosenCheckpoint(None, [])
        kept = restore_hub_state(chosen.path, config) if resume else NOTHING
        await anyio.sleep(self._dice.uniform(0.0, 0.2))  # here a fault finds a hub that has read the files
        version = kept.state.version if kept.state is not None else 0
        # With a version, the rows of later steps are moved away, since these steps are trained again.
        directory = self.disk.do(
            lambda: RunDirectory.open(config.run_dir, dump(recorded(config)), version if resume else None)
        )
        recorder = SimRecorder(config, directory, process, self.disk)
        evaluated = {int(row["step"]) for row in directory.read_evaluations()}
        hub_number = self.disk.do(directory.hub_numbers.begin)
        self.book.hub_begins(config, version, kept.notes)
        journal = None
        if config.checkpoint.journal != "off":
            synced = config.checkpoint.journal == "fsync"  # "write" survives the process, but not the machine
            journal = FileJournal(
                config.run_dir, version, kept.place, to_disk=synced, note=recorder.note, in_thread=self.write_journal
            )
        hub = Hub(
            config,
            recorder,
            now=now,
            problems=problems_of(self.domains, config),
            recovered=RecoveredState(kept.state, evaluated, kept.start, hub_number),
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
                self.disk.do(lambda: directory.summary.write_text("{}"))  # real nodes only look at the file's time
                self.runs_ended += 1
            writers.cancel_scope.cancel()
            return end
        # Type checkers believe that a task group may swallow an exception of its block.
        raise AssertionError("not reached: the block returns or raises")

    async def _serve(self, hub: Hub, config: Config, process: Process) -> RunEnd:
        """Open the hub's port, and run the hub and node 0 until the end of the run, which is returned.

        The gate checks who sends each request, and passes it to the hub. Raises the errors of the hub and of node 0.
        At the end the port stays open a little: after a finished run until all nodes have left, at most
        deadlines.request; after an interrupt for FAREWELL_S. Nodes that do not learn of the end would wait for the next
        hub.
        """
        gate, port = Gate(hub, config), Listener(process)
        server = ConnectionServer(
            token=TOKEN,
            request_type=p.HubRequest,
            handler=partial(self._handle, gate, process),
            deadline=config.deadlines.request,
            connection_to_replace=gate.connection_to_replace,
            on_connect=gate.arrived,
            on_disconnect=gate.left,
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
                gate.close()  # the connections that end now are no losses
                if process.alive:  # else the next hub may already have announced its own port
                    self.network.hub = self.hub = None
                group.cancel_scope.cancel()
        # Type checkers believe that a task group may swallow an exception of its block.
        raise AssertionError("not reached: the block returns or raises")

    async def _roll_out_here(self, hub: Hub, config: Config, process: Process) -> None:
        """Run node 0 in the process of the hub, until the run is over or the caller cancels it.

        Raises the error of the node, which ends the hub, too. After an interrupt an EngineError is ignored, as in a
        real run.
        """
        with engines_until_interrupted(hub):
            async with self.connected(process, "node-0", config.deadlines.request) as caller:
                await self.make_node(process, HubLink(0, 0, caller), None).run()

    async def _save_state(self, recorder: SimRecorder, version: int, pieces: Generator[bytearray]) -> p.SnapshotReply:
        """Write the hub's state into a checkpoint, like `flash.run.restart.keep_hub_state`. The hub calls this.

        `version` names the checkpoint, whose temporary folder rank 0 has made. `pieces` encodes the state piece by
        piece. Returns the size and checksum of the file, which rank 0 writes into the manifest. Raises CheckpointError
        if the state, and FlashError if a batch or row, cannot be written.
        """
        await recorder.written()  # a checkpoint must not be newer than the rows before it
        data = bytearray()
        for piece in pieces:
            data += piece
            await checkpoint()  # requests are served between two pieces, as in a real hub
        file = temporary_of(step_folder(self.config.run_dir, version)) / "hub.bin"
        try:
            await self.disk.write(lambda: file.write_bytes(data))
        except OSError as error:
            raise CheckpointError(f"the simulated hub cannot write its state: {error.strerror}") from error
        return p.SnapshotReply(len(data), zlib.crc32(data))

    # -- trainer ranks -------------------------------------------------------------------------------------------------

    async def _rank(self, rank: int, process: Process) -> End:
        """Run a trainer rank, like `flash.run.trainer_rank`. Main function of its process.

        Waits until a hub admits the rank to an incarnation, and trains in it. Returns OVER if the hub has no more
        batches, or nothing to train at all.

        Raises:
            DeadlineError: no hub has admitted the rank within deadlines.rendezvous.
            Exception: the error that has ended the training, such as PeerLostError if the hub is lost.
        """
        config = self.config
        self._pids += 1
        pid, begun = self._pids, anyio.current_time()
        self._ranks[pid] = process
        # Rank 0 reports the address of a store in which all ranks meet. The hub waits for it, but nothing uses it here.
        seconds, store = config.deadlines.request, "simulated:1" if rank == 0 else ""
        while True:
            entered = False
            try:
                async with self.connected(process, f"trainer-{rank}", seconds) as hub:
                    request = p.IncarnationRequest(rank, pid, "simulated", store)
                    incarnation = await hub.call(request, config.deadlines.rendezvous)
                    if incarnation.checkpoint is None:  # the run is over
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
        """Train with a hub that has admitted the rank, until it has no more batches. Returns OVER.

        `incarnation` is the hub's reply, with the number of the incarnation and the checkpoint to start from.

        Raises:
            Exception: the error that has ended the training. Unless it is a PeerLostError, it was reported to the hub.
        """
        config, folder = self.config, incarnation.checkpoint
        version = read_manifest(Path(folder)).version if folder else 0  # empty: the model as it is, version 0
        await anyio.sleep(self._dice.uniform(0.2, 1.5))  # load the checkpoint
        # The first rank of the incarnation makes its meeting point. The end of any rank breaks it for all others.
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
                # The hub never replies to `Fatal`: it ends the connection together with the incarnation or the run.
                with suppress(TransportError):
                    await hub.call(
                        p.Fatal(type(error).__name__, f"trainer rank {rank}: {error}"), config.deadlines.request
                    )
            raise error from None
        return End.OVER

    async def _beat(self, hub: Tapped, rank: int) -> None:
        """Send a heartbeat whenever the hub has replied to the one before, until the incarnation is over.

        The hub lets each heartbeat wait for some seconds. A lost connection ends this without an error, because the
        calls of the trainer raise it.
        """
        with suppress(FlashError):
            while True:
                await hub.call(p.RankHeartbeat(rank), NO_TIMEOUT_S)  # other calls notice a hub that hangs

    # -- launchers -----------------------------------------------------------------------------------------------------

    async def launch(self, resumes: bool) -> RunEnd | FlashError:
        """Start the hub and the ranks, and start them again if they fail, until the run has ended.

        `flash.simulate.faults.play` calls this once after another, as a person calls `flash train`. `resumes` is False
        only if the run directory is to be made. Returns the end of the run, or the error that no restart can help. At
        the return, all ranks are dead. Joined nodes are not part of a launch, and go on.
        """
        self.ending = False
        async with anyio.create_task_group() as parts:
            for rank in range(self.config.trainer_world_size):
                parts.start_soon(self._keep_rank, rank)
            parts.start_soon(self._watch_hub)
            end = await self._keep_hub(resumes)
            self.ending = True
            parts.cancel_scope.cancel()
            for process in self._ranks.values():  # the cancelled launchers leave their processes alive
                process.kill()
            return end
        # Type checkers believe that a task group may swallow an exception of its block.
        raise AssertionError("not reached: the block returns or raises")

    async def _keep_hub(self, resumes: bool) -> RunEnd | FlashError:
        """Run the process of the hub until it has ended in order, or with an error that a restart cannot mend.

        Returns the end of the run or that error. A hub that was killed, or has ended with another error, is started
        again, as often as needed. BrokenLaw is raised if nothing explains the error of a hub.
        """
        restarts = 0
        while True:
            self._heard_hub = anyio.current_time()
            process = await self.run_process("hub", FIRST, partial(self._first_node, restarts, resumes))
            error = _error_of(process)
            self.book.hub_ended(error, killed=process.killed)
            if error is None and not process.killed:
                return process.result
            if isinstance(error, FlashError) and error.fatal:  # fatal: no restart can help
                return error
            restarts += 1
            self.ending = False
            await anyio.sleep(RETRY_S)

    async def _keep_rank(self, rank: int) -> None:
        """Run a trainer rank, and start it again whenever it has ended, until the launch cancels this.

        Raises BrokenLaw if nothing explains the error of the rank.
        """
        while True:
            process = await self.run_process(f"rank {rank}", FIRST, partial(self._rank, rank))
            error = _error_of(process)
            # A TransportError only follows from the loss of the hub.
            if error is not None and not isinstance(error, TransportError):
                self.book.process_failed(process.name, error)
            served = self.network.hub
            if process.result is End.OVER:
                # This hub needs no more ranks. A hub that replaces it after a crash at the end of the run needs them.
                await until(lambda served=served: self.network.hub not in (served, None))
            await anyio.sleep(RETRY_S)

    async def _watch_hub(self) -> None:
        """Kill the ranks of incarnations that are over, and a hub that does not answer, like `Ranks.watch_hub`.

        Runs beside `_keep_hub` until the launch cancels it. Asks the hub again and again for news about the ranks of
        its machine, as a *messenger*, a peer that only asks for such news. The hub is killed if it does not answer for
        deadlines.hub, or if no connection to it has succeeded for deadlines.rendezvous. `_keep_hub` then starts the
        next one.
        """
        launcher, patience = Process("launcher", FIRST), self.config.deadlines.hub
        while True:
            living: list[int] = []  # process ids of the ranks in the present incarnation
            try:
                async with self.network.connect(launcher, "messenger-0", patience) as hub:
                    after = -1  # number of the last news; −1: none yet, so the hub replies at once
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
        """Kill the rank processes of an incarnation that is over, whose process ids are `news.ended`.

        The ranks that caused its end (`news.causes`) first get EXIT_S seconds to exit by themselves, with their error.
        """
        for pid in news.ended:
            if pid not in news.causes:
                self._ranks[pid].kill()
        if any(self._ranks[pid].alive for pid in news.causes):
            await anyio.sleep(EXIT_S)
        for pid in news.causes:
            self._ranks[pid].kill()

    async def keep_node(self, number: int) -> None:
        """Run the loop of a joined node on machine `number`, and start it again whenever it has ended.

        Stands for the launcher of `flash join`, which runs until the simulation ends. Each process is started as soon
        as a hub serves. Raises BrokenLaw if nothing explains the error of the node.
        """
        machine = f"m{number}"
        while True:
            await until(lambda: self.network.hub is not None)
            process = await self.run_process(f"node {number}", machine, self._joined)
            if (error := _error_of(process)) is not None:
                self.book.process_failed(process.name, error)
            self.numbers.pop(machine, None)
            await anyio.sleep(RETRY_S)

    def add_node(self) -> None:
        """Let another node join, on a machine of its own. Returns at once."""
        self._nodes += 1
        self._tasks.start_soon(self.keep_node, self._nodes)

    async def _joined(self, process: Process) -> End:
        """Run a joined node for the hubs of the present configuration. Main function of its process.

        Returns OVER if the run is over or the node was drained, and WITH_PEER if it must be replaced by a new process,
        for example because no hub answers. Raises the error that ended the node.
        """
        config = self.config
        try:
            async with self.connected(process, "guest-1", ASK_S) as hub:
                run = await hub.call(p.RunRequest(p.dialect()), ASK_S)
        except TransportError:  # the hub has gone meanwhile
            return End.WITH_PEER
        async with sharing(config.run.name, close_s=config.deadlines.close):
            return await SimJoinedNode(self, process, config, run.digest).run()


def _error_of(process: Process) -> BaseException | None:
    """Return the error that has ended a process; None if it was killed, or has ended without an error.

    Of a group of errors, the one is returned that explains most (`first_error`).
    """
    if process.killed:
        return None
    return first_error(process.error) if isinstance(process.error, BaseExceptionGroup) else process.error
