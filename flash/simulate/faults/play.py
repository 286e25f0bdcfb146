"""Plays scenarios: one seed with its faults, and the search for a smaller failing scenario.

`flash simulate --faults` calls `play_seed` for many seeds, in worker processes, and `shrunk` for seeds that fail. A
*law* is a sentence that holds in every run. The bookkeeper checks the laws during a run, and raises `BrokenLaw` at the
first one that is broken. A *launch* is one call of `flash train`; a run may need several, for example after an
interrupt.
"""

from __future__ import annotations

import io
import logging
import shutil
import signal
import tempfile
import tomllib
from collections.abc import Callable, Generator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
from msgspec.structs import replace

from flash.config.load import dump, read_recorded, recorded
from flash.config.resuming import refused
from flash.errors import FlashError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.observe.rundir.rundir import RunDirectory
from flash.simulate.faults.bookkeeper import MARGIN_S, SLOWER, Bookkeeper
from flash.simulate.faults.cluster import FIRST, Cluster
from flash.simulate.faults.loop import FaultLoop, until
from flash.simulate.faults.parts import freeze
from flash.simulate.faults.scenario import Fault, Scenario, configured, draw, smaller
from flash.waiting import first_error

MOST_LAUNCHES = 12
"""Number of launches after which a run that never finishes counts as stuck."""
MOST_S = 3000.0
"""Virtual seconds after which a simulation is ended in any case."""
MOST_CPU_S = 30.0
"""Seconds of processor time after which a simulation is ended in any case. A simulation usually takes less than one."""
STUCK = "every run ends"
"""Law that a run breaks which cannot go on, or does not end."""
LONGEST_LAW = 300
"""Largest number of characters of an error message in the name of a law."""
SLOW_S = 2.0
"""Seconds by which each message of a machine with a slow network is later."""
SLOW_DISK = 50.0
"""Factor of the time of a write to a slow disk."""
SLOW_ENGINES = 4.0
"""Factor of the time of a step of a slow engine."""
PERSON_S = 3.0
"""Seconds between the end of a launch and the next launch by a person."""
ASK_DRAIN_S = 5.0
"""Seconds in which the hub must answer a person who asks a node to leave."""
MOST_TRIES = 100
"""Largest number of smaller scenarios that the search tries."""


class Played(msgspec.Struct, frozen=True):
    """Result of one scenario."""

    seed: int
    law: str
    """First law that was broken, with the numbers that break it after a colon; empty if all hold."""
    faults: dict[str, int]
    """Number of faults that have happened, by kind."""
    seconds: float
    """Virtual seconds that the run took; 0 if the loop has ended it with an error."""
    events: list[dict[str, Any]] = []
    """Events of the run, in order (`Bookkeeper.event`). The last one, `end`, has the broken law."""


def play(
    scenario: Scenario, *, make: type[Cluster] = Cluster, with_reference: bool = True, most_cpu_s: float = MOST_CPU_S
) -> Played:
    """Play a scenario on a virtual clock, in a temporary folder, and return the result. Never raises a broken law.

    Only the main thread of a process may call this, since it uses a signal. Output and warnings of the run are dropped.

    Args:
        scenario: the scenario.
        make: class of the cluster; tests give one with a faulty part.
        with_reference: True to play the scenario without faults, too, if the run was slow after its last fault.
        most_cpu_s: seconds of processor time after which the run counts as one that does not end.
    """
    folder = Path(tempfile.mkdtemp(prefix="flash-faults-", dir=_memory()))
    book = Bookkeeper(anyio.current_time)
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), _limited(book, most_cpu_s):
            options = {"loop_factory": FaultLoop}
            played = anyio.run(partial(_play, scenario, folder, book, make), backend="asyncio", backend_options=options)
    except Exception as error:  # the loop has ended the run: nothing can happen any more, or a callback has failed
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        law = book.broken or f"{STUCK}: {type(cause).__name__}: {' '.join(str(cause).split())[:LONGEST_LAW]}"
        played = Played(scenario.seed, law, book.kinds, 0.0, [*book.events, {"what": "end", "law": law}])
    finally:
        logging.disable(logging.NOTSET)
        shutil.rmtree(folder, ignore_errors=True)
    return _checked_speed(scenario, played) if with_reference else played


@contextmanager
def _limited(book: Bookkeeper, seconds: float) -> Generator[None]:
    """Break the law STUCK if the block uses more than `seconds` of processor time.

    BrokenLaw is then raised at the line that runs, whichever that is. A task that never waits stops the virtual clock,
    and the loop never runs again. Only a signal can end it.
    """

    def give_up(*_: object) -> None:
        """Report the broken law, wherever the simulation is."""
        book.require(False, f"{STUCK}: a task runs without a pause, or the run takes {seconds:g} s of a processor")

    before = signal.signal(signal.SIGVTALRM, give_up)
    # The signal comes again, since a task may catch the first error.
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _memory() -> str | None:
    """Return a folder in memory, where files take the least time; None if there is none."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _checked_speed(scenario: Scenario, played: Played) -> Played:
    """Check that the run was fast again after its last fault. A run without faults shows how fast that is.

    Returns `played`, with a law that is broken in addition if the run was slow, or if the run without faults fails. A
    run that has broken a law already is not checked.
    """
    end = played.events[-1]
    late = end.get("late", 0.0)  # seconds of the run after the recovery from its last fault
    if played.law or late <= MARGIN_S:
        return played
    reference = play(replace(scenario, faults=[]), with_reference=False)
    if reference.law or late <= SLOWER * reference.seconds + MARGIN_S:
        return replace(played, law=reference.law)
    law = f"after the last fault the speed comes back: {late:.0f} s more, {reference.seconds:.0f} s without faults"
    return replace(played, law=law)


async def _play(scenario: Scenario, folder: Path, book: Bookkeeper, make: type[Cluster]) -> Played:
    """Play a scenario on the running virtual clock, with its files in an empty folder.

    Returns the result. Its events end with `end`, which has the broken law and the seconds that the run went on after
    it could not be disturbed any more. Only errors of the loop itself are raised, such as a deadlock of all tasks.
    """
    law, late = "", 0.0
    try:
        async with anyio.create_task_group() as tasks:
            cluster = make(scenario, folder, book, tasks)
            for number in range(1, scenario.nodes + 1):
                tasks.start_soon(cluster.keep_node, number)
            for fault in scenario.faults:
                tasks.start_soon(_befall, cluster, fault)
            with anyio.move_on_after(MOST_S) as limit:
                await _operate(cluster)
            seconds = anyio.current_time()
            late = seconds - book.disturbed_until
            book.require(not limit.cancelled_caught, f"{STUCK}: after {MOST_S:g} s it goes on")
            for process in cluster.processes.values():
                process.kill()
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        error = first_error(group)
        law = book.broken or f"no error but our own ends a process: {type(error).__name__}: {error}"
    # A task may have caught the BrokenLaw, so that the run went on.
    law = book.broken or law
    seconds = anyio.current_time()
    book.event("end", law=law, late=round(late, 3))
    # The name of the temporary folder would differ between two plays of a seed.
    return Played(scenario.seed, law.replace(str(folder), "RUN"), book.kinds, seconds, book.events)


async def _operate(cluster: Cluster) -> None:
    """Launch the run, and launch it again until it has finished, as a person would. Then check its files.

    A person resumes the run, if its run directory exists, maybe with other settings. A full disk is cleared first.
    Raises BrokenLaw if MOST_LAUNCHES launches have not finished the run.
    """
    book, resumes = cluster.book, False
    for _ in range(MOST_LAUNCHES):
        end = await cluster.launch(resumes)
        if isinstance(end, RunEnd):
            book.event("launch ended", end=end.reason, version=end.version)
            if end.reason == "finished":
                book.check_end(cluster.config)
                return
        else:
            book.event("launch ended", end=type(end).__name__)
        await anyio.sleep(PERSON_S)
        await until(lambda: not cluster.disk.full)
        resumes = cluster.config.run_dir.exists()
        if resumes and cluster.next_settings is not None:
            _change_settings(cluster, dict(cluster.next_settings))
        # A launch that failed before it made the run directory begins the run with the settings of the scenario.
        cluster.next_settings = None
    book.require(False, f"{STUCK}: {MOST_LAUNCHES} launches have not finished it")


def _change_settings(cluster: Cluster, settings: dict[str, Any]) -> None:
    """Change the settings with which the run is resumed, unless the real check refuses the change.

    `settings` has the form of `Fault.settings`. Raises BrokenLaw unless the check refuses a change of
    `rollout.group_size` and nothing else.
    """
    book, before = cluster.book, cluster.config
    domains = settings.pop("domains", cluster.domains)
    output = {"run.output_dir": before.run.output_dir}
    config = configured(cluster.scenario.settings | settings | output)
    now = tomllib.loads(dump(recorded(config)))
    problems = [*refused(read_recorded(RunDirectory(before.run_dir).config), now, before.run_dir)]
    book.event("resumed with", settings=settings, domains=domains, refused=[problem.key for problem in problems])
    other_size = config.rollout.group_size != before.rollout.group_size
    book.require(other_size == bool(problems), f"a resume refuses another size of groups, and nothing else: {settings}")
    if not problems:
        cluster.config, cluster.domains = config, domains


# -- faults ------------------------------------------------------------------------------------------------------------


async def _befall(cluster: Cluster, fault: Fault) -> None:
    """Let a fault happen when its moment has come, as the fields of `Fault` describe it. A task for each fault.

    A moment that never comes again leaves the fault out, and so does the end of the launch.
    """
    await anyio.sleep(fault.at)
    if fault.on:
        arrival = anyio.Event()
        cluster.triggers.setdefault(fault.on, []).append(arrival)
        await arrival.wait()
    for _ in range(fault.passes):
        await anyio.lowlevel.checkpoint()
    await anyio.sleep(fault.wait)
    if not cluster.ending:
        await _happen(cluster, fault)


async def _happen(cluster: Cluster, fault: Fault) -> None:
    """Let a fault happen now, and return when it is over. If nobody is there whom it could befall, do nothing.

    While a fault lasts, processes may end and start again, and other faults may happen.
    """
    book, now = cluster.book, anyio.current_time()
    nodes = sorted(name for name, each in cluster.processes.items() if name.startswith("node") and each.alive)
    ranks = sorted(name for name, each in cluster.processes.items() if name.startswith("rank") and each.alive)
    machines = sorted({each.machine for each in cluster.processes.values() if each.alive})
    hub = cluster.processes.get("hub")
    # Names of processes or machines of which `Fault.who` chooses one. The last word of a kind says what it befalls; all
    # other kinds befall a machine. Node 0 is not among the nodes: it is in the process of the hub.
    who = {"node": nodes, "rank": ranks, "hub": ["hub"] * (hub is not None and hub.alive)}.get(
        fault.kind.rpartition(" ")[2], machines
    )
    if fault.kind in ("drain", "drain slowly", "cut one way", "cut both ways"):
        who = nodes
    if not who:
        return
    name = who[fault.who % len(who)]
    until = now + fault.seconds
    book.befalls(fault, until, name)
    process = cluster.processes.get(name)
    match fault.kind:
        case "crash hub" | "crash rank" | "crash node":
            assert process is not None
            if fault.kind == "crash node":  # a launcher restarts the hub and the ranks at once
                cluster.absent[process.machine] = until
            process.kill()
        case "lose machine of hub":
            book.machine_failed()
            cluster.network.vanish(FIRST)  # before the kills, so that no connection is closed in order
            for each in cluster.processes.values():
                if each.machine == FIRST:
                    each.kill()
            cluster.disk.lose_unsynced(synced_journal=cluster.config.checkpoint.journal == "fsync")
        case "lose machine of node":
            assert process is not None
            cluster.absent[process.machine] = until
            cluster.network.vanish(process.machine)
            process.kill()
        case "hang hub" | "hang node" | "hang rank":
            assert process is not None
            await freeze(process, fault.seconds)
            # A launcher may have killed the process meanwhile, because it did not answer.
            if fault.kind == "hang node" and process.alive and not cluster.ending:
                book.node_continues(name, fault.seconds)
        case "slow network":  # `name` is a machine
            cluster.network.slow[name] = SLOW_S
            await anyio.sleep(fault.seconds)
            cluster.network.slow.pop(name, None)
        case "full disk" | "slow disk":
            cluster.disk.full = fault.kind == "full disk"
            cluster.disk.slowness = SLOW_DISK if fault.kind == "slow disk" else 1.0
            await anyio.sleep(fault.seconds)
            cluster.disk.full, cluster.disk.slowness = False, 1.0
        case "engine dies" | "engine hangs" | "engines refuse to start" | "engines are slow":
            await _befall_engines(cluster, fault, name)
        case "environments raise":
            cluster.env_faults.raise_until = until
        case "environments hang":
            cluster.env_faults.hang_until = until
        case "lose connection":
            cluster.network.lose(name, fault.who // 7)  # the connection must not follow from the machine's number
        case "cut one way" | "cut both ways":
            assert process is not None
            routes = [(process.machine, FIRST), (FIRST, process.machine)]
            chosen = routes if fault.kind == "cut both ways" else [routes[fault.who % 2]]
            await cluster.network.cut(chosen, fault.seconds)
        case "join":
            cluster.add_node()
        case "drain" | "drain slowly":
            assert process is not None
            slow = {process.machine: SLOW_S} if fault.kind == "drain slowly" else {}
            cluster.network.slow |= slow
            await _drain(cluster, name)
            await anyio.sleep(fault.seconds)
            for machine in slow:
                cluster.network.slow.pop(machine, None)
        case "interrupt":
            if cluster.hub is not None:
                cluster.next_settings = fault.settings or None
                cluster.hub.interrupt()


async def _befall_engines(cluster: Cluster, fault: Fault, machine: str) -> None:
    """Let a fault befall the engines of a machine. Without engines, do nothing.

    A fault that makes engines slow, or lets them refuse to start, works on engines that start. So it also kills one.
    Slow engines are killed at the end, so that fast ones take their places.
    """
    faults = cluster.engines.get(machine)
    if faults is None or not faults.engines:
        return
    # One of the newest engines, since the older ones are dead.
    engine = faults.engines[-1 - fault.who % min(len(faults.engines), cluster.config.engine.count)]
    if fault.kind == "engine hangs":
        await engine.hang()
        cluster.book.prolong(fault, anyio.current_time())
        return
    if fault.kind == "engines refuse to start":
        faults.refuse_until = anyio.current_time() + fault.seconds
    elif fault.kind == "engines are slow":
        faults.slowness = SLOW_ENGINES
    engine.kill()
    if fault.kind == "engines are slow":
        await anyio.sleep(fault.seconds)
        # The process of the node may have been started again meanwhile, with slow engines.
        faults = cluster.engines[machine]
        faults.slowness = 1.0
        for slow in faults.engines:
            slow.kill()


async def _drain(cluster: Cluster, name: str) -> None:
    """Ask the hub that a node leaves, as `flash drain` does. Its launcher starts it again afterwards.

    `name` is the name of the node's process. A node that has not joined yet has no number, and is not asked. If the hub
    is lost meanwhile, nothing happens, as if the person gave up.
    """
    number = cluster.numbers.get(cluster.processes[name].machine)
    if number is None:
        return
    with suppress(FlashError):
        async with cluster.network.connect(cluster.person, "guest-2", ASK_DRAIN_S) as hub:
            await hub.call(p.DrainRequest(number), ASK_DRAIN_S)


# -- many seeds --------------------------------------------------------------------------------------------------------


def play_seed(seed: int) -> Played:
    """Play the scenario of a seed, and return the result without its events, which are large. Worker processes call
    this."""
    return replace(play(draw(seed)), events=[])


def first_failing(first: int, count: int) -> int:
    """Return the first seed that breaks a law, among `count` seeds from `first` on; -1 if none does.

    `benchmarks/simulated/mutations.py` calls this in copies of the code with an error, which the laws must find.
    """
    return next((seed for seed in range(first, first + count) if play_seed(seed).law), -1)


def shrink(scenario: Scenario, breaks: Callable[[Scenario], bool]) -> Scenario:
    """Return a smaller scenario for which `breaks` is still true, after at most `MOST_TRIES` tries.

    Returns `scenario` itself if `breaks` is false for all smaller ones.
    """
    tries, progress = 0, True
    while progress and tries < MOST_TRIES:
        progress = False
        for candidate in smaller(scenario):
            tries += 1
            if breaks(candidate):
                scenario, progress = candidate, True
                break
            if tries >= MOST_TRIES:
                break
    return scenario


def shrunk(seed: int, law: str) -> Scenario:
    """Return a smaller form of the scenario of a seed that breaks the same law.

    `law` is the law that the seed breaks (`Played.law`). The numbers after its colon may differ.
    """
    name = law.partition(":")[0]
    return shrink(draw(seed), lambda scenario: play(scenario).law.partition(":")[0] == name)
