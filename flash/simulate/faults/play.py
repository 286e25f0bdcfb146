"""Plays scenarios: one seed with its faults, many seeds on all cores, and the search for a smaller failing scenario."""

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
from flash.errors import ContractError, FlashError, TransportError
from flash.hub import protocol as p
from flash.hub.context import RunEnd
from flash.observe.rundir.rundir import RunDirectory
from flash.simulate.faults.bookkeeper import MARGIN_S, SLOWER, Bookkeeper, BrokenLaw
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
MOST_TRIES = 100
"""Largest number of smaller scenarios that the search tries."""


class Played(msgspec.Struct, frozen=True):
    """Result of one scenario."""

    seed: int
    law: str
    """First law that was broken; empty if all hold."""
    faults: dict[str, int]
    """Number of faults that have happened, by kind."""
    seconds: float
    """Virtual seconds of the run."""
    events: list[dict[str, Any]] = []
    """Events of the run."""


def play(
    scenario: Scenario, *, make: type[Cluster] = Cluster, with_reference: bool = True, most_cpu_s: float = MOST_CPU_S
) -> Played:
    """Play a scenario, and return what was found.

    Args:
        scenario: the scenario.
        make: class of the cluster; tests give one with a faulty part.
        with_reference: False skips the comparison with the speed of the same run without faults.
        most_cpu_s: seconds of processor time after which the run counts as one that does not end.
    """
    folder = Path(tempfile.mkdtemp(prefix="flash-faults-", dir=_memory()))
    book = Bookkeeper(scenario, anyio.current_time)
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
    """End a simulation that uses more than so many seconds of processor time inside the block.

    A task that never waits stops the virtual clock, and the loop never runs again. Only a signal can end it.
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
    """Check that the run was fast again after its last fault. A run without faults shows how fast that is."""
    end = played.events[-1]
    late = end.get("late", 0.0)
    if played.law or late <= MARGIN_S:
        return played
    reference = play(replace(scenario, faults=[]), with_reference=False)
    if reference.law or late <= SLOWER * reference.seconds + MARGIN_S:
        return replace(played, law=reference.law)
    law = f"after the last fault the speed comes back: {late:.0f} s more, {reference.seconds:.0f} s without faults"
    return replace(played, law=law)


async def _play(scenario: Scenario, folder: Path, book: Bookkeeper, make: type[Cluster]) -> Played:
    """Play a scenario on the running virtual clock, with its files in an empty folder."""
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
    except (BrokenLaw, ContractError) as error:
        law = book.broken or str(error)
    law = book.broken or law
    seconds = anyio.current_time()
    book.event("end", law=law, late=round(late, 3))
    return Played(scenario.seed, law.replace(str(folder), "RUN"), book.kinds, seconds, book.events)


async def _operate(cluster: Cluster) -> None:
    """Launch the run, and launch it again until it has finished, as a person would."""
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
        await anyio.sleep(3.0)
        await until(lambda: not cluster.disk.full)
        resumes = cluster.config.run_dir.exists()
        if resumes and cluster.next_settings is not None:
            _change_settings(cluster, dict(cluster.next_settings))
        cluster.next_settings = None
    book.require(False, f"{STUCK}: {MOST_LAUNCHES} launches have not finished it")


def _change_settings(cluster: Cluster, settings: dict[str, Any]) -> None:
    """Change the settings with which the run is resumed, unless the real check refuses the change."""
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
    """Let a fault happen when its moment has come."""
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
    """Let a fault happen now."""
    book, now = cluster.book, anyio.current_time()
    nodes = sorted(name for name, each in cluster.processes.items() if name.startswith("node") and each.alive)
    ranks = sorted(name for name, each in cluster.processes.items() if name.startswith("rank") and each.alive)
    machines = sorted({each.machine for each in cluster.processes.values() if each.alive})
    hub = cluster.processes.get("hub")
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
            if fault.kind == "crash node":
                cluster.absent[process.machine] = until
            process.kill()
        case "lose machine of hub":
            book.machine_failed()
            cluster.network.vanish(FIRST)
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
            if fault.kind == "hang node" and process.alive and not cluster.ending:
                book.node_continues(name, fault.seconds)
        case "slow network":
            cluster.network.slow[name] = SLOW_S
            await anyio.sleep(fault.seconds)
            cluster.network.slow.pop(name, None)
        case "full disk" | "slow disk":
            cluster.disk.full = fault.kind == "full disk"
            cluster.disk.slowness = 50.0 if fault.kind == "slow disk" else 1.0
            await anyio.sleep(fault.seconds)
            cluster.disk.full, cluster.disk.slowness = False, 1.0
        case "engine dies" | "engine hangs" | "engines refuse to start" | "engines are slow":
            await _befall_engines(cluster, fault, name)
        case "environments raise":
            cluster.env_faults.raise_until = until
        case "environments hang":
            cluster.env_faults.hang_until = until
        case "lose connection":
            cluster.network.lose(name, fault.who // 7)
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
    """Let a fault befall the engines of a machine."""
    faults = cluster.engines.get(machine)
    if faults is None or not faults.engines:
        return
    engine = faults.engines[-1 - fault.who % min(len(faults.engines), cluster.config.engine.count)]
    if fault.kind == "engine hangs":
        await engine.hang()
        cluster.book.prolong(fault, anyio.current_time())
        return
    if fault.kind == "engines refuse to start":
        faults.refuse_until = anyio.current_time() + fault.seconds
    elif fault.kind == "engines are slow":
        faults.slowness = 4.0
    engine.kill()
    if fault.kind == "engines are slow":
        await anyio.sleep(fault.seconds)
        # The process of the node may have been started again meanwhile, with slow engines.
        faults = cluster.engines[machine]
        faults.slowness = 1.0
        for slow in faults.engines:
            slow.kill()


async def _drain(cluster: Cluster, name: str) -> None:
    """Ask a node to leave, as `flash drain` does. Its launcher starts it again."""
    number = cluster.numbers.get(cluster.processes[name].machine)
    if number is None:
        return
    with suppress(FlashError, TransportError):
        async with cluster.network.connect(cluster.person, "guest-2", 5.0) as hub:
            await hub.call(p.DrainRequest(number), 5.0)


# -- many seeds --------------------------------------------------------------------------------------------------------


def play_seed(seed: int) -> Played:
    """Play the scenario of a seed, and return the result without its events. Worker processes call this."""
    return replace(play(draw(seed)), events=[])


def first_failing(first: int, count: int) -> int:
    """Return the first of `count` seeds that breaks a law; -1 if none does."""
    return next((seed for seed in range(first, first + count) if play_seed(seed).law), -1)


def shrink(scenario: Scenario, breaks: Callable[[Scenario], bool]) -> Scenario:
    """Return a smaller scenario for which `breaks` is still true, after at most `MOST_TRIES` tries."""
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
    """Return a smaller form of the scenario of a seed that breaks the same law. `law`: the law that the seed breaks."""
    name = law.partition(":")[0]
    return shrink(draw(seed), lambda scenario: play(scenario).law.partition(":")[0] == name)
