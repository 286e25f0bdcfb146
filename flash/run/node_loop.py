"""Loop of the first node: one asyncio event loop, which also runs the hub and writes the run directory.

The loop opens the port of the hub: `flash.transport.server.serve` calls `flash.hub.gate.Gate.handle`, which calls
`flash.hub.hub.Hub.handle`. It also runs a `flash.rollout.node.RolloutNode`, which connects to this hub over TCP, as
nodes on other machines do. The loops of all other nodes are in `flash.run.joined`.

The loop ends when the hub has no more work, at the first error, or after an interrupt (SIGINT, SIGTERM). After an
interrupt the trainer ranks finish their step and write a checkpoint within deadlines.shutdown.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio

from flash.config.decode import ConfigProblem, refuse
from flash.config.machine import engine_cpus
from flash.config.objects import own_folders
from flash.config.tree import Config
from flash.environment.load import LoadedEnvironment
from flash.errors import ConfigError, EngineError, RunDirectoryError, TransportError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.hub.fleet import RunOrigin
from flash.hub.gate import Gate
from flash.hub.hub import Hub
from flash.hub.recovery import Persistence, RecoveredState
from flash.observe.cluster import EVERY_S
from flash.observe.recorder import Recorder
from flash.rollout.engine import Engine
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.rollout.vllm.engine import VLLMEngine
from flash.rollout.vllm.start import ready_tokenizer
from flash.run.loop_watch import blocked_seconds, run_watched
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.hub_place import HubAddress, announce, withdraw
from flash.run.processes.rendezvous import advertised_host
from flash.run.processes.scratch import remember_shared_memory
from flash.run.processes.starter_watch import LAUNCHER
from flash.run.processes.supervisor import End, say
from flash.run.processes.token import VARIABLE, hub_token
from flash.run.restart.history import RecordedHistory
from flash.run.restart.hub_state import NOTHING, keep_hub_state, restored
from flash.run.restart.journal import FileJournal
from flash.run.startup import tell_beginning, tell_cluster, with_held_out_problems
from flash.samples.journal import NO_JOURNAL
from flash.samples.rules import ProblemKinds
from flash.trainer.checkpoint_files import ChosenCheckpoint, choose_checkpoint, newest_complete
from flash.transport.client import connect
from flash.transport.server import serve
from flash.waiting import first_error, rare_garbage_collection

if TYPE_CHECKING:
    from flash.rollout.teacher import ServedTeacher

FAREWELL_S = 0.2
"""Seconds in which the other nodes learn that an interrupted run is over."""

SWITCH_S = 0.0005
"""Seconds after which Python takes the interpreter lock from another thread, such as the writer of samples, for the
loop. With Python's default of 5 ms, these threads caused the longest pauses of the loop."""


def run_node_loop(order: ProcessOrder, config: Config) -> End:
    """Run the first node until the end of the run."""
    sys.setswitchinterval(SWITCH_S)
    # Removed from the environment, so that neither engines nor environments inherit the token.
    token = os.environ.pop(VARIABLE, None)
    try:
        run_watched(say, _first_node, order.restarts, config, token)
    except BaseExceptionGroup as group:  # of the task groups below: show the error with the most information
        raise first_error(group) from None
    return End.OVER


def unix_clock() -> Callable[[], float]:
    """Return a clock of Unix seconds.

    It also runs while the event loop is blocked, so measured durations are correct.
    """
    clock = time.monotonic
    offset = time.time() - clock()
    return lambda: clock() + offset


async def _first_node(restarts: int, config: Config, token: str | None) -> None:
    """Restore the run's state, and run the hub and this node until the end of the run."""
    now = unix_clock()
    resume = config.run.resume or restarts > 0
    checkpoint, notes = (
        await anyio.to_thread.run_sync(choose_checkpoint, config.run_dir) if resume else ChosenCheckpoint(None, [])
    )
    kept = NOTHING
    if resume:
        kept = await anyio.to_thread.run_sync(restored, checkpoint, config)
    state = kept.state
    version = state.version if state is not None else 0
    tokenizer = await anyio.to_thread.run_sync(HfTokenizer, config.model)
    with Recorder(config, tokenizer, now=now, resume_at=version if resume else None, restarts=restarts) as recorder:
        ends = await anyio.to_thread.run_sync(tokenizer.missing_ends)
        for note in filter(None, (ends, *notes, *kept.notes)):
            recorder.note(note)
        env = LoadedEnvironment(config.env.path, config.env.options)
        problems = ProblemKinds.of(config, env.kind_of, env.domains())
        config = await with_held_out_problems(config, env, recorder.note)
        evaluated = {int(row["step"]) for row in recorder.directory.read_evaluations()}
        home = RunOrigin(os.getcwd(), tuple(own_folders()), os.environ[LAUNCHER])
        incarnation = recorder.directory.incarnations.begin()
        journal = None
        if config.checkpoint.journal != "off":
            to_disk = config.checkpoint.journal == "fsync"
            journal = FileJournal(config.run_dir, version, kept.place, to_disk=to_disk, tell=recorder.note)
        hub = Hub(
            config,
            recorder,
            now=now,
            problems=problems,
            recovered=RecoveredState(state, evaluated, kept.start, incarnation),
            persistence=Persistence(
                save_state=partial(keep_hub_state, config.run_dir, recorder.batches.written),
                journal=journal or NO_JOURNAL,
                history=RecordedHistory(config.run_dir, recorder),
            ),
            origin=home,
        )
        with _books_kept(hub, recorder):
            async with anyio.create_task_group() as signals:
                # Outermost, so that a signal cannot interrupt the orderly end of a failed run and hide its error.
                signals.start_soon(interrupt_on_signal, hub, config, recorder.note)
                if journal is not None:
                    signals.start_soon(journal.run)
                signals.start_soon(tell_beginning, hub, config, recorder.stage)
                signals.start_soon(tell_cluster, hub, recorder.cluster)
                async with _serving(hub, config, token) as address:
                    end = await _run_hub(hub, config, env, address, now, recorder.note)
                    recorder.cluster(hub.overview())
                # Computed again, because steps that an interrupt seemed to cut short may have ended together with the
                # engines.
                interrupted = end.reason == "interrupted"
                finish = partial(recorder.finish, hub.samples.totals(), hub.late_restarts, interrupted=interrupted)
                await anyio.to_thread.run_sync(finish)
                signals.cancel_scope.cancel()
    if recorder.stopped is not None:
        raise recorder.stopped


@contextmanager
def _books_kept(hub: Hub, recorder: Recorder) -> Generator[None]:
    """Write the totals of samples if the run fails in the block."""
    try:
        yield
    except BaseException:
        with suppress(RunDirectoryError):  # a full disk must not hide the error
            recorder.ledger(hub.samples.totals())
        raise


async def interrupt_on_signal(hub: Hub, config: Config, tell: Callable[[str], None]) -> None:
    """End the run in order at a signal, and print at once which work is left.

    At a second Ctrl-C the launcher kills all processes (`flash.run.processes.launch`).
    """
    told = False
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for received in signals:
            if (doing := hub.interrupt()) and not told:
                again = "; Ctrl-C again ends it now" if received == signal.SIGINT else ""
                tell(f"interrupted: {doing}, for at most {config.deadlines.shutdown:g} s{again}")
                told = True


def cut_short(unfinished: str, config: Config) -> str:
    """Return a message about the unfinished work of an interrupted run, and about the state that it keeps."""
    if config.checkpoint.journal != "off" and config.checkpoint.batches != "none":
        kept = "the steps before it are kept with all samples that came in, and --resume goes on there"
    elif (newest := newest_complete(config.run_dir)) is not None:
        kept = f"{newest.name} is kept, and --resume goes on there"
    else:
        kept = "no checkpoint is there yet, and --resume begins anew"
    return f"interrupted: {unfinished} takes more than {config.deadlines.shutdown:g} s (deadlines.shutdown); {kept}"


@asynccontextmanager
async def _serving(hub: Hub, config: Config, given: str | None) -> AsyncGenerator[HubAddress]:
    """Open the hub's port while the block runs, and announce its address."""
    host, gate = advertised_host(config), Gate(hub, config)
    with hub_token(config.run_dir, given) as (token, token_file):
        async with anyio.create_task_group() as group:
            server = partial(
                serve,
                deadline=config.deadlines.connect,
                connection_to_replace=gate.connection_to_replace,
                on_connect=gate.arrived,
                on_disconnect=gate.left,
            )
            with naming_the_key(config.cluster.hub_port):
                port = await group.start(server, host, config.cluster.hub_port, token, p.HubRequest, gate.handle)
            address = HubAddress(host, port, token)
            try:
                await anyio.to_thread.run_sync(announce, config.run_dir, address, token_file)
                yield address
            finally:
                gate.close()
                withdraw(config.run_dir)
            group.cancel_scope.cancel()


@contextmanager
def naming_the_key(port: int) -> Generator[None]:
    """Name the configuration key in the error message if the hub cannot listen."""
    try:
        yield
    except ConfigError as error:
        raise refuse([ConfigProblem("cluster.hub_port" if port else "cluster.hub_host", str(error))]) from None


async def _run_hub(
    hub: Hub,
    config: Config,
    env: LoadedEnvironment,
    address: HubAddress,
    now: Callable[[], float],
    tell: Callable[[str], None],
) -> RunEnd:
    """Run the hub, and the engines of this node, until the end of the run. Returns why the run ended."""
    async with anyio.create_task_group() as group:
        if config.engines_on(0):
            group.start_soon(_roll_out_here, hub, config, env, address, now)
        with rare_garbage_collection():
            end = await hub.run()
        if end.unfinished:
            tell(cut_short(end.unfinished, config))
        if end.reason == "finished":
            with anyio.move_on_after(config.deadlines.request):
                await hub.all_nodes_left()
        elif hub.registry.joined or config.cluster.trainer_nodes > 1:
            await anyio.sleep(FAREWELL_S)
        group.cancel_scope.cancel()
        return end
    raise AssertionError("cancelled from outside, and not told")


async def _roll_out_here(
    hub: Hub, config: Config, env: LoadedEnvironment, address: HubAddress, now: Callable[[], float]
) -> None:
    """Run the engines and episodes of this node."""
    seconds = config.deadlines.connect
    with engines_until_interrupted(hub):
        async with connect(address.host, address.port, address.token, "node-0", seconds) as caller:
            await (await make_node(0, NodeNumbers(0, 0), config, env, caller, now)).run()


@contextmanager
def engines_until_interrupted(hub: Hub) -> Generator[None]:
    """Ignore the failure of engines after the run was interrupted."""
    try:
        yield
    except* EngineError:
        # Slurm sends a signal to all processes of a job, also to the engines.
        if hub.progress.stopping != "interrupted":
            raise


class NodeNumbers(NamedTuple):
    """Numbers of a node and of its first engine, as the hub assigned them."""

    node: int
    first_engine: int


async def make_node(
    place: int,
    numbers: NodeNumbers,
    config: Config,
    env: LoadedEnvironment,
    hub: p.HubCaller,
    now: Callable[[], float],
    on_loss: Callable[[TransportError], None] | None = None,
) -> RolloutNode:
    """Return a node with real engines. Nothing of it is started.

    Args:
        place: number of this machine in its job, which determines its engines and GPUs.
        numbers: numbers of the node and of its first engine.
        config: the run's configuration.
        env: the environment.
        hub: connection to the hub.
        now: clock of Unix seconds.
        on_loss: called when the hub is lost; see `RolloutNode`.
    """
    cpus = engine_cpus(config, place, sorted(os.sched_getaffinity(0)))
    tokenizer = await anyio.to_thread.run_sync(ready_tokenizer, config)

    def make_engine(gpus: Sequence[int], number: int) -> Engine:
        return VLLMEngine(config, number, gpus, remember_shared_memory, cpus, tokenizer.ends)

    engines = [partial(make_engine, config.engine_gpus(place, i)) for i in range(config.engines_on(place))]
    problems = ProblemKinds.of(config, env.kind_of, env.domains())
    link = HubLink(numbers.node, numbers.first_engine, hub)
    teacher = await _served_teacher(config, tokenizer)
    played = NodeEnvironment(env.make, problems, env.prepare, rehearsed=True)
    return RolloutNode(
        *(config, link, engines, tokenizer, played),
        now=now,
        on_loss=on_loss,
        status_s=EVERY_S,
        teacher=teacher,
        blocked_s=blocked_seconds,
    )


async def _served_teacher(config: Config, tokenizer: HfTokenizer) -> ServedTeacher | None:
    """Return the server of the teacher after a test with the longest sequence; None if no server holds a teacher."""
    if config.algorithm.teacher is None or config.algorithm.teacher.url is None:
        return None
    from flash.rollout.teacher import ServedTeacher

    teacher = ServedTeacher(config.algorithm.teacher.url, config.deadlines.env_step)
    await teacher.check(config.model.max_length, len(tokenizer.inner), tokenizer.token_texts)
    return teacher
