"""Loop of the first node: one asyncio event loop, which also runs the hub and writes the run directory.

`flash.run.processes.worker` calls `run_node_loop` in a process that the launcher has started. The loop opens the port
of the hub: `flash.transport.server.serve` calls `flash.hub.gate.Gate.handle`, which calls `flash.hub.hub.Hub.handle`.
It also runs a `flash.rollout.node.RolloutNode`, which connects to this hub over TCP, as nodes on other machines do. The
loops of all other nodes are in `flash.run.joined`; they use `make_node` and `explain_engine_start` of this file.

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
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from msgspec.structs import replace

from flash.config.decode import ConfigProblem, refuse
from flash.config.machine import engine_cpus, runs_eagerly
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
from flash.hub.stages import STARTING_ENGINES
from flash.observe.cluster import EVERY_S as OVERVIEW_S
from flash.observe.cluster import HubNow
from flash.observe.recorder import Recorder
from flash.rollout.engine import Engine
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.rollout.node import NodeEnvironment, RolloutNode
from flash.rollout.scheduler import HubLink
from flash.rollout.vllm.engine import VLLMEngine
from flash.rollout.vllm.start import ready_tokenizer
from flash.run.journal import FileJournal
from flash.run.loop_watch import blocked_seconds, run_watched
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.hub_place import TOKEN_VARIABLE, HubAddress, announce, hub_token, withdraw
from flash.run.processes.launch_state import LAUNCHER, remember_shared_memory
from flash.run.processes.rendezvous import advertised_host
from flash.run.processes.supervisor import End, say
from flash.run.restart import NOTHING, RecordedHistory, keep_hub_state, restore_hub_state
from flash.samples.journal import NO_JOURNAL
from flash.samples.rules import ProblemKinds
from flash.trainer.checkpoint_files import ChosenCheckpoint, choose_checkpoint, newest_complete
from flash.transport.client import connect
from flash.transport.server import serve
from flash.waiting import deadline, first_error, rare_garbage_collection

if TYPE_CHECKING:
    from flash.rollout.teacher import ServedTeacher

FAREWELL_S = 0.2
"""Seconds for which the hub of an interrupted run stays, so that the other nodes learn that the run is over."""
SWITCH_S = 0.0005
"""Seconds after which Python takes the interpreter lock from another thread, such as the writer of samples, for the
loop. With Python's default of 5 ms, these threads caused the longest pauses of the loop."""
STARTUP_LINE_S = 10.0
"""Seconds between two lines of a start while its phase stays the same."""
LONG_START_S = 30.0
"""Seconds after which a line explains why the engines take so long to start, since they seem to hang."""
NEAR_DEADLINE = 0.5
"""Share of `deadlines.engine_start` from which the lines name this deadline."""


def run_node_loop(order: ProcessOrder, config: Config) -> End:
    """Run the first node until the end of the run. Raises the error that ended the run, if one did.

    `flash.run.processes.worker` calls this in the process of the node loop, once its configuration is read. `order`
    comes from the launcher; only its `restarts` is used.
    """
    sys.setswitchinterval(SWITCH_S)
    # Removed from the environment variables, so that neither engines nor environments inherit the token.
    token = os.environ.pop(TOKEN_VARIABLE, None)
    try:
        run_watched(say, _first_node, order.restarts, config, token)
    except BaseExceptionGroup as group:  # of the task groups below: show the error with the most information
        raise first_error(group) from None
    return End.OVER


def unix_clock() -> Callable[[], float]:
    """Return a clock of Unix seconds for the times that a node or the hub of this process records.

    It also runs while the event loop is blocked, unlike the clock of the loop (`flash.run.loop_watch`), so durations
    that are measured with it are correct. A change of the machine's time does not change it.
    """
    clock = time.monotonic
    offset = time.time() - clock()
    return lambda: clock() + offset


async def _first_node(restarts: int, config: Config, token: str | None) -> None:
    """Restore the run's state, and run the hub and this node until the end of the run.

    A run that resumes continues from its checkpoint and journal, and so does a restarted loop (`restarts` > 0). `token`
    is the value of FLASH_TOKEN; None if it is not set.

    Raises:
        FlashError: the run has failed, or an alarm has stopped it.
    """
    now = unix_clock()
    # The state that earlier processes of the hub have left in the run directory.
    resume = config.run.resume or restarts > 0
    checkpoint, notes = (
        await anyio.to_thread.run_sync(choose_checkpoint, config.run_dir) if resume else ChosenCheckpoint(None, [])
    )
    kept = NOTHING
    if resume:
        kept = await anyio.to_thread.run_sync(restore_hub_state, checkpoint, config)
    state = kept.state
    version = state.version if state is not None else 0  # the policy version from which the run goes on
    tokenizer = await anyio.to_thread.run_sync(HfTokenizer, config.model)
    with Recorder(config, tokenizer, now=now, resume_at=version if resume else None, restarts=restarts) as recorder:
        ends = await anyio.to_thread.run_sync(tokenizer.missing_ends)
        for note in filter(None, (ends, *notes, *kept.notes)):
            recorder.note(note)
        # The hub needs two facts about the environment: the kinds of problems, and how many problems are held out for
        # evaluations.
        env = LoadedEnvironment(config.env.path, config.env.options)
        problems = ProblemKinds.of(config, env.kind_of, env.domains())
        config = await limit_held_out_problems(config, env, recorder.note)
        # Versions whose evaluations are finished, so that the hub does not repeat them.
        evaluated = {int(row["step"]) for row in recorder.directory.read_evaluations()}
        hub_number = recorder.directory.hub_numbers.begin()
        journal = None
        if config.checkpoint.journal != "off":
            to_disk = config.checkpoint.journal == "fsync"
            journal = FileJournal(config.run_dir, version, kept.place, to_disk=to_disk, note=recorder.note)
        hub = Hub(
            config,
            recorder,
            now=now,
            problems=problems,
            recovered=RecoveredState(state, evaluated, kept.start, hub_number),
            persistence=Persistence(
                save_state=partial(keep_hub_state, config.run_dir, recorder.written),
                journal=journal or NO_JOURNAL,
                history=RecordedHistory(config.run_dir, recorder),
            ),
            # Nodes that join the run use its folder and import path, and recognise the launch by its name.
            origin=RunOrigin(os.getcwd(), tuple(own_folders()), os.environ[LAUNCHER]),
        )
        with _totals_on_failure(hub, recorder):
            async with anyio.create_task_group() as signals:
                # Signals are handled in the outermost group, so that a signal cannot interrupt the orderly end of a
                # failed run and hide its error.
                signals.start_soon(interrupt_on_signal, hub, config, recorder.note)
                if journal is not None:
                    signals.start_soon(journal.run)
                signals.start_soon(report_startup, hub, config, recorder.stage)
                signals.start_soon(report_cluster, hub, recorder.cluster)
                async with _serving(hub, config, token) as address:
                    end = await _run_hub(hub, config, env, address, now, recorder.note)
                    recorder.cluster(hub.overview())
                # The totals of samples are computed again and not taken from `end`: a step that an interrupt seemed to
                # cut short may have ended together with the engines.
                interrupted = end.reason == "interrupted"
                finish = partial(recorder.finish, hub.samples.totals(), hub.late_restarts, interrupted=interrupted)
                await anyio.to_thread.run_sync(finish)
                signals.cancel_scope.cancel()
    if recorder.stopped is not None:
        raise recorder.stopped


@contextmanager
def _totals_on_failure(hub: Hub, recorder: Recorder) -> Generator[None]:
    """Write the totals of samples to the run directory (`ledger.json`) if the run fails in the block.

    The block is the whole life of the hub. A run that ends in order writes the totals in `Recorder.finish`.
    """
    try:
        yield
    except BaseException:
        with suppress(RunDirectoryError):  # a full disk must not hide the error
            recorder.ledger(hub.samples.totals())
        raise


async def interrupt_on_signal(hub: Hub, config: Config, note: Callable[[str], None]) -> None:
    """End the run in order at SIGINT or SIGTERM, and call `note` with a line about the work that is left.

    At a second Ctrl-C the launcher kills all processes (`flash.run.processes.launch`).

    A task from before the start of the engines until the end of the run. Consumes signals, and waits for the next one,
    until cancelled.
    """
    announced = False
    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for received in signals:
            if (doing := hub.interrupt()) and not announced:
                again = "; Ctrl-C again ends it now" if received == signal.SIGINT else ""
                note(f"interrupted: {doing}, for at most {config.deadlines.shutdown:g} s{again}")
                announced = True


def describe_cut(unfinished: str, config: Config) -> str:
    """Return a message for an interrupted run that did not end within deadlines.shutdown. `_run_hub` shows it.

    The message names the work that is lost, and the state from which the run can resume.

    `unfinished`: phrase for the work, from `RunEnd.unfinished`.
    """
    # With the journal and the recorded batches, `--resume` repeats the steps after the newest checkpoint.
    if config.checkpoint.journal != "off" and config.checkpoint.batches != "none":
        kept = "the steps before it are kept with all samples that came in, and --resume goes on there"
    elif (newest := newest_complete(config.run_dir)) is not None:
        kept = f"{newest.name} is kept, and --resume goes on there"
    else:
        kept = "no checkpoint is there yet, and --resume starts from the beginning"
    return f"interrupted: {unfinished} takes more than {config.deadlines.shutdown:g} s (deadlines.shutdown); {kept}"


@asynccontextmanager
async def _serving(hub: Hub, config: Config, users_token: str | None) -> AsyncGenerator[HubAddress]:
    """Open the hub's port while the block runs, and announce its address in the run directory. Yields the address.

    Nodes and trainer ranks find the hub by this announcement. It is withdrawn at the end of the block. `users_token` is
    the value of FLASH_TOKEN; None if it is not set, and a random token is then made.

    Raises:
        ConfigError: the hub cannot listen at the configured address.
        RunDirectoryError: the token or the address cannot be written.
    """
    host, gate = advertised_host(config), Gate(hub, config)
    with hub_token(config.run_dir, users_token) as (token, token_file):
        async with anyio.create_task_group() as group:
            server = partial(
                serve,
                deadline=config.deadlines.request,
                connection_to_replace=gate.connection_to_replace,
                on_connect=gate.arrived,
                on_disconnect=gate.left,
            )
            with naming_the_key():
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
def naming_the_key() -> Generator[None]:
    """Turn a ConfigError of the block, in which the hub starts to listen, into one that names the configuration key."""
    try:
        yield
    except ConfigError as error:
        raise refuse([ConfigProblem("cluster.hub", str(error))]) from None


async def _run_hub(
    hub: Hub,
    config: Config,
    env: LoadedEnvironment,
    address: HubAddress,
    now: Callable[[], float],
    note: Callable[[str], None],
) -> RunEnd:
    """Run the hub, and the engines of this node, until the end of the run. Returns why the run ended.

    The hub answers a little longer than the run lasts, because nodes that do not learn of the end would wait for the
    next hub: after a finished run until all nodes have left, at most deadlines.request; after an interrupt FAREWELL_S,
    if there are other nodes. Raises the error that ended the run, if one did.

    Args:
        hub: the hub.
        config: the run's configuration.
        env: the environment.
        address: address at which the hub serves.
        now: clock of Unix seconds.
        note: called with a line for the user, if an interrupt has cut work short.
    """
    async with anyio.create_task_group() as group:
        if config.engines_on(0):
            group.start_soon(_roll_out_here, hub, config, env, address, now)
        with rare_garbage_collection():
            end = await hub.run()
        if end.unfinished:
            note(describe_cut(end.unfinished, config))
        if end.reason == "finished":
            with anyio.move_on_after(config.deadlines.request):
                await hub.all_nodes_left()
        # Other machines have a node loop that has joined, or trainer ranks.
        elif hub.registry.joined or config.cluster.trainer_nodes > 1:
            await anyio.sleep(FAREWELL_S)
        group.cancel_scope.cancel()
        return end
    # Type checkers believe that a task group may swallow an exception of its block.
    raise AssertionError("not reached: the block returns or raises")


async def _roll_out_here(
    hub: Hub, config: Config, env: LoadedEnvironment, address: HubAddress, now: Callable[[], float]
) -> None:
    """Run the engines and episodes of this node until the hub has no more work. `now`: clock of Unix seconds.

    The node connects to the hub in the same process over TCP, as all other nodes do. An error of the node ends the run,
    except for an engine that ends after an interrupt.
    """
    seconds = config.deadlines.request
    with engines_until_interrupted(hub):
        async with connect(address.host, address.port, address.token, "node-0", seconds) as caller:
            # The first node has number 0, and so has its first engine. The hub numbers all other nodes and engines.
            node = await make_node(0, HubLink(0, 0, caller), config, env, now)
            await node.run()


@contextmanager
def engines_until_interrupted(hub: Hub) -> Generator[None]:
    """Ignore an EngineError of the block if the run was interrupted before. Otherwise the error ends the run."""
    try:
        yield
    except* EngineError:
        # Slurm sends a signal to all processes of a job, so the engines may end before the run does.
        if hub.progress.stopping != "interrupted":
            raise


async def make_node(
    place: int,
    link: HubLink,
    config: Config,
    env: LoadedEnvironment,
    now: Callable[[], float],
    on_loss: Callable[[TransportError], None] | None = None,
) -> RolloutNode:
    """Return a rollout node with vLLM engines, which `RolloutNode.run` or `RolloutNode.work` starts.

    This file calls it for the first node, and `flash.run.joined` for all others, once the hub has numbered the node.

    Args:
        place: number of this machine in its job, from 0, which determines its engines and GPUs.
        link: connection to the hub, with the numbers that the hub has given to the node and to its first engine.
        config: the run's configuration.
        env: the environment.
        now: clock of Unix seconds.
        on_loss: called when the hub is lost; see `RolloutNode`. None: the loss of the hub ends the node.

    Raises:
        FlashError: the tokenizer cannot be loaded, the environment's kinds of problems are invalid, or the teacher's
            server has failed its test.
    """
    cpus = engine_cpus(config, place, sorted(os.sched_getaffinity(0)))
    tokenizer = await anyio.to_thread.run_sync(ready_tokenizer, config)

    def make_engine(gpus: Sequence[int], number: int) -> Engine:
        """Return a new engine on these GPUs. The node calls this for each start; `number` counts engines of the run."""
        return VLLMEngine(config, number, gpus, remember_shared_memory, cpus, tokenizer.ends)

    engines = [partial(make_engine, config.engine_gpus(place, i)) for i in range(config.engines_on(place))]
    problems = ProblemKinds.of(config, env.kind_of, env.domains())
    teacher = await _served_teacher(config, tokenizer)
    # Rehearsed: the node tries the first turn of an episode before the engines start, which takes minutes.
    played = NodeEnvironment(env.make, problems, env.prepare, rehearsed=True)
    return RolloutNode(
        *(config, link, engines, tokenizer, played),
        now=now,
        on_loss=on_loss,
        status_s=OVERVIEW_S,
        teacher=teacher,
        blocked_s=blocked_seconds,
    )


async def _served_teacher(config: Config, tokenizer: HfTokenizer) -> ServedTeacher | None:
    """Return a client of the teacher's server, once a test has shown that the server accepts the longest sequence and
    has the policy's tokens; None if no server holds a teacher.

    A teacher is a model whose log-probs the policy learns from. They count as a part of the reward, so each answer has
    the time of a step with its reward, deadlines.env_step. Raises ConfigError if the test fails.
    """
    if config.algorithm.teacher is None or config.algorithm.teacher.url is None:
        return None
    from flash.rollout.teacher import ServedTeacher

    teacher = ServedTeacher(config.algorithm.teacher.url, config.deadlines.env_step)
    await teacher.check(config.model.max_length, len(tokenizer.inner), tokenizer.token_texts)
    return teacher


async def report_startup(hub: Hub, config: Config, show: Callable[[str], None]) -> None:
    """Report the phase of the run's start and the seconds since the start, until the first step.

    A task beside the hub, in a node loop, `flash eval` and `flash rollout`. Waits at most STARTUP_LINE_S seconds for
    the next phase. Unblocked by the hub's progress. Produces lines, with which it calls `show`.
    """
    begun = anyio.current_time()
    while (phase := hub.stages.startup_phase()) is not None:
        seconds = anyio.current_time() - begun
        progress = f"{phase.doing}, {phase.done}" if phase.done else phase.doing
        reason = explain_engine_start(seconds, config) if phase.doing == STARTING_ENGINES else ""
        show(f"{progress} … {seconds:.0f} s{reason}")
        with anyio.move_on_after(STARTUP_LINE_S):
            await hub.stages.phase_ended(phase.doing)


async def limit_held_out_problems(config: Config, env: LoadedEnvironment, note: Callable[[str], None]) -> Config:
    """Limit eval.problems to the number of held-out problems that the environment has. Returns the configuration.

    Called before the hub is made, and by `flash eval` and the dry run. Held-out problems are those of evaluations,
    which are never trained. A data set may have fewer of them than eval.problems; without the limit an evaluation would
    ask some of them twice. An environment whose class does not know the number has no limit. Calls `note` with a line
    if the number changes.

    Raises:
        DeadlineError: the data set was not read within deadlines.env_step.
        FlashError: the environment's class has failed to count the problems.
    """
    if not env.is_collected:
        return config
    with deadline(config.deadlines.env_step, "the number of held-out problems", "the environment's data set"):
        # This may read or download the data set. The deadline can end only the wait for the thread.
        available = await anyio.to_thread.run_sync(env.held_out_problems, abandon_on_cancel=True)
    wanted = config.eval.problems
    if available is None or available >= wanted:
        return config
    note(f"evaluations ask all {available} held-out problems: there are no more, and eval.problems = {wanted}")
    return replace(config, eval=replace(config.eval, problems=available))


def explain_engine_start(seconds: float, config: Config) -> str:
    """Return the end of a line about engines that have been starting for `seconds`: the reason why it takes so long, or
    the deadline. Empty in the first LONG_START_S seconds.

    Compilation takes minutes without any output, so users think that the run hangs. The lines are those of
    `report_startup` and of joined nodes.
    """
    most = config.deadlines.engine_start
    if seconds >= NEAR_DEADLINE * most:
        return f"; at most {most:g} s (deadlines.engine_start)"
    if seconds < LONG_START_S:
        return ""
    teacher = config.algorithm.teacher
    teacher_wait = "" if teacher is None or teacher.url is None else f", or {teacher.url} does not answer yet"
    if runs_eagerly(config):
        return f"; vLLM loads the model{teacher_wait}"
    return f"; vLLM compiles, for minutes at its first start here{teacher_wait}"


async def report_cluster(hub: Hub, write: Callable[[HubNow], None]) -> None:
    """Call `write` with an overview of the cluster every OVERVIEW_S seconds, until cancelled. Waits only for the clock.

    `write` is a method of the recorder, which writes the overview to the run directory, where `flash view` reads it.
    """
    while True:
        write(hub.overview())
        await anyio.sleep(OVERVIEW_S)
