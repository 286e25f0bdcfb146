"""Start, watch, restart and end of processes: real processes of a few lines, and parts without processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from flash.config.tree import Config, DeadlinesConfig
from flash.errors import PeerLostError, RanksGoneError
from flash.foreign.forking import SERVER_GONE, ForkedProcess, ForkServer
from flash.hub import protocol as p
from flash.run.processes.forked import ProcessOrder
from flash.run.processes.hub_place import HUB_FILE, HubAddress, HubPlace, announce, hub_token, withdraw
from flash.run.processes.launch import LOST, NAMED, Launch
from flash.run.processes.launch_state import ErrorMarker
from flash.run.processes.launcher import HubLoop
from flash.run.processes.ranks import Ranks
from flash.run.processes.supervisor import (
    End,
    EndedProcess,
    NotStartedError,
    Processes,
    SupervisedPart,
    judge,
)
from flash.transport.server import Peer, serve
from tests.run.test_join import Job
from tests.run.test_launcher import make_config

pytestmark = pytest.mark.anyio

Do = Callable[[], Awaitable[Sequence[EndedProcess]]]
"""Function that is awaited for the results of processes."""


SERVER = ForkServer(__name__)
"""Server from which the processes of this file are forked."""


class Program(ForkedProcess):
    """Process that runs a few lines of Python."""

    server = SERVER

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def run(self) -> None:
        """Replace the process by an interpreter of the lines, in a session of its own."""
        self.enter()
        os.setsid()
        os.execv(sys.executable, [sys.executable, "-c", self._text])


class Programs(Processes):
    """Processes of a few lines each, which know their number as `n`."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def process(self, role: str, file: Path, order: ProcessOrder, variables: Mapping[str, str]) -> ForkedProcess:
        """Return a process of the lines, with its number as `n`."""
        return Program(f"import os, signal, sys, time\nn = {order.local}\n{self._text}")


class Told(Processes):
    """Processes that end as the test says, and keep the signals that they get. A function is awaited for the ends; a
    `NotStartedError` is raised."""

    def __init__(self, *ends: Sequence[EndedProcess] | Do | NotStartedError) -> None:
        super().__init__()
        self.ends = list(ends)
        self.signals: list[signal.Signals] = []
        self.heard = anyio.Event()

    @property
    def pids(self) -> set[int]:
        return {7}

    async def run(self, *_: Any) -> list[EndedProcess]:
        """Return the next ends. Replaces `Processes.run`."""
        end = self.ends.pop(0)
        if isinstance(end, NotStartedError):
            raise end
        return list(end if not callable(end) else await end())

    def signal(self, number: signal.Signals) -> None:
        """Keep the signal, and set `heard`."""
        self.signals.append(number)
        self.heard.set()

    def kill_all(self) -> None:
        self.signal(signal.SIGKILL)

    def kill(self, pids: Collection[int]) -> None:
        self.kill_all()


def config_of(folder: Path, **cluster: Any) -> Config:
    """Return a configuration whose run directory is in `folder`, with settings of `[cluster]`."""
    return make_config(run={"name": "t", "output_dir": str(folder)}, cluster={"gpus_per_node": 0} | cluster)


def hub_loop(config: Config, processes: Told) -> HubLoop:
    """Return the part of the hub's node loop, with these processes."""
    part = HubLoop(config, Path("run.toml"))
    part.processes = processes
    return part


def ranks_of(config: Config, processes: Processes, node: int = 0) -> Ranks:
    """Return the part of the trainer ranks of a run whose hub is announced."""
    config.run_dir.mkdir(exist_ok=True)
    (config.run_dir / HUB_FILE).touch()
    part = Ranks(config, node, Path("run.toml"), HubPlace(run_dir=str(config.run_dir)))
    part.processes = processes
    return part


async def kept(part: SupervisedPart) -> End:
    """Return how the part ended first. Ranks wait after that for the end of the run."""
    return await SupervisedPart.keep_running(part, anyio.Event())


# -- processes -------------------------------------------------------------------------------------------------------


async def test_the_results_of_processes_that_end_well_are_all_returned() -> None:
    programs = Programs("sys.exit(0)")
    ended = await programs.run("trainer", Path("x"), [ProcessOrder(0, local=n) for n in range(3)])
    assert sorted((one.local, one.code) for one in ended) == [(0, 0), (1, 0), (2, 0)]
    assert programs.pids == set()


async def test_a_process_that_outlives_a_failed_one_is_killed_with_its_children(tmp_path: Path) -> None:
    left = tmp_path / "left"
    text = f"""
if n == 0:
    while not os.path.exists({str(left)!r}): time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGSEGV)
if (child := os.fork()) == 0: time.sleep(1000)
open({str(left)!r} + "+", "w").write(str(child)); os.rename({str(left)!r} + "+", {str(left)!r})
time.sleep(1000)
"""
    programs = Programs(text)
    programs.linger_s = 0.1
    with anyio.fail_after(30):
        ended = await programs.run("trainer", Path("x"), [ProcessOrder(0, local=n) for n in range(2)])
    assert [(one.local, one.code) for one in ended] == [(0, -signal.SIGSEGV), (1, -signal.SIGKILL)]
    assert programs.killed == {ended[1].pid}
    child = int(await anyio.Path(left).read_text())
    with anyio.fail_after(30):
        while runs(child):  # noqa: ASYNC110 - nobody tells of the end of a process that is not ours
            await anyio.sleep(0.01)


def runs(pid: int) -> bool:
    """Return True if a process lives, and is no zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def test_a_process_that_starts_after_a_signal_gets_the_signal_at_once() -> None:
    programs = Programs("time.sleep(1000)")
    programs.signal(signal.SIGTERM)
    with anyio.fail_after(30):
        (one,) = await programs.run("hub", Path("x"), [ProcessOrder(0)])
    assert one.code == -signal.SIGTERM


async def test_a_cancellation_kills_the_processes() -> None:
    programs = Programs("signal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(1000)")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(programs.run, "hub", Path("x"), [ProcessOrder(0)])
        while not programs.pids:  # noqa: ASYNC110 - nobody tells us
            await anyio.sleep(0.01)
        (pid,) = programs.pids
        tasks.cancel_scope.cancel()
    assert programs.pids == set()
    assert not runs(pid)


async def test_an_end_at_once_does_not_wait_for_a_server_that_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    (tmp_path / "endless.py").write_text(f"import time; open({str(here)!r}, 'w').close(); time.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    processes = Processes()
    processes.fork_from(ForkServer("endless"))

    async def kill() -> None:
        """Kill all processes once the server is about to start one."""
        while not here.exists():  # noqa: ASYNC110 - nobody tells us
            await anyio.sleep(0.01)
        processes.kill_all()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with pytest.raises(NotStartedError):
                await processes.run("hub", Path("x"), [ProcessOrder(0)])


async def test_a_start_that_the_system_refuses_is_a_not_started_error() -> None:
    class Nowhere(ForkServer):
        """Fork server that the system cannot start."""

        def ensure_running(self) -> None:
            raise BlockingIOError("Resource temporarily unavailable")

    processes = Processes()
    processes.fork_from(Nowhere())
    with pytest.raises(NotStartedError, match="temporarily unavailable"):
        await processes.run("hub", Path("x"), [ProcessOrder(0)])


@pytest.mark.slow
async def test_where_the_server_is_killed_its_process_is_killed_and_the_next_one_has_another_server(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    programs = Programs(f"open({str(here)!r}, 'w').close(); time.sleep(1000)")

    async def kill_server() -> None:
        """End the server once its process runs."""
        while not here.exists():  # noqa: ASYNC110 - nobody tells us
            await anyio.sleep(0.01)
        SERVER.end()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill_server)
            (one,) = await programs.run("hub", Path("x"), [ProcessOrder(0)])
        assert one.code == SERVER_GONE
        while runs(one.pid):  # noqa: ASYNC110 - as above
            await anyio.sleep(0.01)
        (one,) = await Programs("sys.exit(7)").run("hub", Path("x"), [ProcessOrder(0)])
    assert one.code == 7


# -- what ends mean --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "killed", "end", "silent"),
    [
        ([0, 0], [], End.OVER, []),
        ([0], [1], End.WITH_PEER, []),
        ([75, 75], [], End.WITH_PEER, []),
        ([-9, 75], [], End.FAILED, [-9]),
        ([-11], [-9], End.FAILED, [-11]),
        ([1, 75], [], End.FAILED, []),
        ([7], [], End.FAILED, [7]),
        ([0, -9], [], End.FAILED, [-9]),
        ([3, 1], [], End.FINAL, []),
        ([], [-9, -9], End.WITH_PEER, []),
    ],
)
async def test_a_process_that_ends_with_its_peer_has_not_failed(
    codes: list[int], killed: list[int], end: End, silent: list[int]
) -> None:
    ended = [EndedProcess(number, number, code) for number, code in enumerate([*codes, *killed])]
    found, unheard = await judge(ended, range(len(codes), len(ended)), anyio.Event())
    assert (found, [one.code for one in unheard]) == (end, silent)


# -- restarts --------------------------------------------------------------------------------------------------------


async def test_a_process_that_fails_is_named_with_its_cause_and_starts_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ends = [
        [EndedProcess(0, 7, -9)],
        NotStartedError("a process cannot be started: out of memory"),
        [EndedProcess(0, 8, 1)],
        [EndedProcess(0, 9, 0)],
    ]
    assert await kept(hub_loop(config_of(tmp_path), Told(*ends))) == End.OVER
    again = "flash: the node loop starts again, with its engines and the trainer ranks"
    assert capfd.readouterr().err.splitlines() == [
        "flash: the node loop (process 7) was killed by signal 9 (SIGKILL), perhaps because memory ran out: see dmesg",
        f"{again} (restart 1 of 3)",
        "flash: a process cannot be started: out of memory",
        f"{again} (restart 2 of 3)",
        f"{again} (restart 3 of 3)",
    ]


async def test_ranks_that_end_with_another_process_use_up_no_restart_of_theirs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, max_restarts=1, trainer_ranks=2)
    peers = [EndedProcess(0, 7, End.WITH_PEER), EndedProcess(1, 8, End.WITH_PEER)]
    crash = [EndedProcess(1, 8, -11), EndedProcess(0, 7, End.WITH_PEER)]
    assert await kept(ranks_of(config, Told(peers, peers, crash, peers, [EndedProcess(0, 1, 0)]), 1)) == End.OVER
    assert capfd.readouterr().err.splitlines() == [
        "flash: trainer rank 3 (process 8) was killed by signal 11 (SIGSEGV)",
        "flash: the trainer ranks start again (restart 1 of 1)",
    ]


@pytest.mark.parametrize(
    ("program", "causes", "end", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSTOP)", False, End.WITH_PEER, ""),
        ("os.kill(os.getpid(), signal.SIGSTOP)", True, End.FAILED, "hangs, and is killed"),
        # The hub may see the end of a process before its launcher does.
        ("time.sleep(0.2); os.kill(os.getpid(), signal.SIGKILL)", True, End.FAILED, ""),
    ],
)
async def test_a_rank_whose_incarnation_is_over_is_ended_and_its_restart_counts_where_it_was_the_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], program: str, causes: bool, end: End, words: str
) -> None:
    part = ranks_of(config_of(tmp_path), Programs(program))
    ends: list[tuple[End, list[str]]] = []

    async def once() -> None:
        """Run the part once, and keep its end."""
        ends.append(await part.run_once(0))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(once)
            while not part.processes.pids:  # noqa: ASYNC110 - nobody tells that it has started
                await anyio.sleep(0.01)
            (pid,) = part.processes.pids
            await part.end_incarnation(p.RanksReply(1, living=[], ended=[pid], causes=[pid] * causes))
    signal_9 = "was killed by signal 9 (SIGKILL), perhaps because memory ran out: see dmesg"
    assert ends == [(end, [] if words or not causes else [f"trainer rank 0 (process {pid}) {signal_9}"])]
    assert capfd.readouterr().err == (f"flash: process {pid} of the trainer ranks {words}\n" if words else "")


async def test_a_rank_that_waited_for_a_lost_host_is_not_said_to_hang_and_the_last_error_names_the_host(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    part = ranks_of(config_of(tmp_path, max_restarts=0), Programs("os.kill(os.getpid(), signal.SIGSTOP)"))
    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kept, part)
            while not part.processes.pids:  # noqa: ASYNC110 - nobody tells that it has started
                await anyio.sleep(0.01)
            (pid,) = part.processes.pids
            await part.end_incarnation(
                p.RanksReply(1, living=[], ended=[pid], causes=[pid], missing="node 1 did not come")
            )
    assert part.final_reason == "node 1 did not come; no restart is left of cluster.max_restarts = 0"
    said, *_ = capfd.readouterr().err.splitlines()
    assert said == f"flash: process {pid} of the trainer ranks waited for others, and is killed: node 1 did not come"


async def test_ranks_that_end_with_the_hub_after_an_error_are_not_said_to_start_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = config_of(tmp_path, max_restarts=0)
    part = ranks_of(config, Told([EndedProcess(0, 7, 1)], [EndedProcess(0, 7, 0)]))
    withdraw(config.run_dir)
    assert await kept(part) == End.OVER
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (-11, "trainer rank 0 (process 7) was killed by signal 11 (SIGSEGV); no"),
        (1, "the trainer ranks have failed; no"),
    ],
)
async def test_a_last_restart_that_is_used_up_is_reported(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int, why: str
) -> None:
    part = ranks_of(config_of(tmp_path, max_restarts=0), Told([EndedProcess(0, 7, code)]))
    assert await kept(part) == End.FAILED
    assert part.final_reason == f"{why} restart is left of cluster.max_restarts = 0"
    assert capfd.readouterr().err.splitlines()[-1] == "flash: no restart is left of cluster.max_restarts = 0"


# -- launches --------------------------------------------------------------------------------------------------------


def run_launch(launch: Launch) -> int:
    """Run a launch, and check that it restores the signal handler."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        return launch.run()
    finally:
        assert signal.getsignal(signal.SIGTERM) is before


def test_a_node_loop_that_is_killed_too_often_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    config, marker = config_of(tmp_path, max_restarts=0), ErrorMarker(tmp_path, "7.1")
    processes = Told([EndedProcess(0, 7, -9)])
    assert run_launch(Launch(hub_loop(config, processes), None, marker, has_hub=True)) == NAMED
    assert str(marker.message()).startswith("the node loop (process 7) was killed by signal 9")


def test_an_error_without_a_name_is_another_exit_code(tmp_path: Path) -> None:
    config = config_of(tmp_path, max_restarts=0)
    loop = hub_loop(config, Told([EndedProcess(0, 7, 1)]))
    assert run_launch(Launch(loop, None, ErrorMarker(tmp_path, "7.1"), has_hub=True)) == 1


def test_a_node_that_fails_for_good_ends_no_run(tmp_path: Path) -> None:
    loop = hub_loop(config_of(tmp_path), Told([EndedProcess(0, 7, End.FINAL)]))
    assert run_launch(Launch(loop)) == LOST


@pytest.mark.parametrize("notebook", [False, True])
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_passed_on_and_a_ctrl_c_after_it_kills(
    tmp_path: Path, first: signal.Signals, notebook: bool
) -> None:
    processes = Told()

    async def until_killed() -> Sequence[EndedProcess]:
        """Send three signals to this process, and end as if killed."""
        for number in (first, signal.SIGTERM, signal.SIGINT):
            processes.heard = anyio.Event()
            os.kill(os.getpid(), number)
            with anyio.move_on_after(0.5):
                await processes.heard.wait()
        return [EndedProcess(0, 7, -9)]

    processes.ends = [until_killed]
    config = config_of(tmp_path)
    ranks = Told()

    async def until_told() -> Sequence[EndedProcess]:
        """End at the first signal."""
        await ranks.heard.wait()
        return [EndedProcess(0, 8, -15)]

    ranks.ends = [until_told]
    launch = Launch(hub_loop(config, processes), ranks_of(config, ranks), None, has_hub=True)

    async def cell() -> int:
        """Run the launch while an event loop runs, as in a cell of a notebook."""
        return run_launch(launch)

    code = anyio.run(cell) if notebook else run_launch(launch)
    assert code == End.INTERRUPTED
    assert processes.signals[:2] == [signal.SIGTERM, signal.SIGKILL]


def test_a_launch_under_nohup_goes_on_when_its_terminal_closes(tmp_path: Path) -> None:
    processes = Told()

    async def hung_up() -> Sequence[EndedProcess]:
        """Send SIGHUP to this process, and end in order."""
        os.kill(os.getpid(), signal.SIGHUP)
        with anyio.move_on_after(0.2):
            await processes.heard.wait()
        return [EndedProcess(0, 7, 0)]

    processes.ends = [hung_up]
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run_launch(Launch(hub_loop(config_of(tmp_path), processes), None, None, has_hub=True)) == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert processes.signals == []


def test_ranks_that_cannot_go_on_end_a_run_whose_hub_cannot_be_reached(tmp_path: Path) -> None:
    config, marker = config_of(tmp_path, max_restarts=0), ErrorMarker(tmp_path, "7.1")
    processes = Told()

    async def until_told() -> Sequence[EndedProcess]:
        """End at the first signal."""
        await processes.heard.wait()
        return [EndedProcess(0, 7, -15)]

    processes.ends = [until_told]
    ranks = ranks_of(config, Told([EndedProcess(0, 8, -11)]))
    assert run_launch(Launch(hub_loop(config, processes), ranks, marker, has_hub=True)) == NAMED
    assert processes.signals == [signal.SIGTERM]
    assert str(marker.message()).startswith("trainer rank 0 (process 8) was killed by signal 11")


async def test_ranks_that_cannot_go_on_are_reported_to_the_hub_as_a_fatal_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FLASH_TOKEN", raising=False)
    job = Job(tmp_path, max_restarts=0)
    ranks = Ranks(job.config, 0, Path("run.toml"), job.place)
    ranks.processes = Told([EndedProcess(0, 7, -11)])

    async def lasts() -> Sequence[EndedProcess]:
        """Run without an end."""
        await anyio.sleep_forever()
        return []

    launch = Launch(hub_loop(job.config, Told(lasts)), ranks, ErrorMarker(job.config.run_dir, "7.1"), has_hub=True)
    gone = pytest.RaisesExc(RanksGoneError, match=r"trainer rank 0 .* no restart is left")
    with pytest.RaisesGroup(gone, flatten_subgroups=True):
        async with job.hub() as hub, anyio.create_task_group() as tasks:
            tasks.start_soon(launch.keep_running, anyio.Event())
            with anyio.fail_after(10):
                await hub.run()
    assert RanksGoneError.fatal
    assert not PeerLostError.fatal


async def test_ranks_that_have_left_start_again_for_a_hub_that_starts_after_that(tmp_path: Path) -> None:
    processes = Told([EndedProcess(0, 7, 0)], [EndedProcess(0, 8, 0)])
    ranks, ending = ranks_of(config_of(tmp_path), processes), anyio.Event()
    ends: list[End] = []

    async def keep() -> None:
        """Keep the ranks running, and keep their end."""
        ends.append(await ranks.keep_running(ending))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(keep)
        await anyio.wait_all_tasks_blocked()
        assert (len(processes.ends), ends) == (1, []), "the hub may still be killed before its own end"
        ranks.hub_came.set()
        await anyio.wait_all_tasks_blocked()
        assert (len(processes.ends), ends) == (0, [])
        ending.set()
    assert ends == [End.OVER]


# -- a hub that hangs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (p.RanksRequest, "waited 1 s for the reply to RanksRequest from hub at"),
        (p.RunRequest, "waited 1 s for the reply to RunRequest from hub at"),
        (None, "waited 1 s for hub at 127.0.0.1:{port} to accept us"),
        ("absent", "waited 0.2 s for the hub of"),
    ],
)
async def test_a_hub_that_hangs_is_killed_and_its_restart_counts(tmp_path: Path, first: Any, words: str) -> None:
    """The hub hangs from its second answer on, from the first one on, before it accepts a connection, or before it is
    announced. `first` is the first request without an answer; None: no connection is accepted."""
    deadlines = DeadlinesConfig(request=0.2, rendezvous=0.2 if first == "absent" else 10)
    config = msgspec.structs.replace(config_of(tmp_path), deadlines=deadlines)
    loop_processes, asked = Told(lambda: killed([7])), 0

    async def killed(pids: list[int]) -> list[EndedProcess]:
        """End with SIGKILL once the launcher has killed the processes."""
        await loop_processes.heard.wait()
        loop_processes.killed.update(pids)
        return [EndedProcess(0, pid, -signal.SIGKILL) for pid in pids]

    async def answer(peer: Peer, request: Any) -> Any:
        """Answer like a hub, until it hangs."""
        nonlocal asked
        asked += isinstance(request, p.RanksRequest)
        if asked > 1 or (isinstance(request, p.RunRequest) and first is p.RunRequest):
            await anyio.sleep_forever()
        if isinstance(request, p.RunRequest):
            return p.RunReply("", "", "", [], "", False, 0)
        return p.RanksReply(0, [], [], [])

    part, ranks = hub_loop(config, loop_processes), ranks_of(config, Told())
    ends: list[tuple[End, list[str]]] = []

    async def once() -> None:
        """Run the part once, keep its end, and cancel the watch."""
        ends.append(await part.run_once(0))
        tasks.cancel_scope.cancel()

    with anyio.fail_after(60), hub_token(config.run_dir, None) as (token, file), socket.create_server(("", 0)) as deaf:
        async with anyio.create_task_group() as tasks:
            port = deaf.getsockname()[1]
            if first not in (None, "absent"):
                port = await tasks.start(partial(serve, deadline=10), "127.0.0.1", 0, token, p.HubRequest, answer)
            if first == "absent":
                withdraw(config.run_dir)
            else:
                announce(config.run_dir, HubAddress("127.0.0.1", port, token), file)
            tasks.start_soon(once)
            tasks.start_soon(ranks.watch_hub, lambda why: part.kill_hanging(part.processes.pids, why))
    ((end, (told,)),) = ends
    assert end == End.FAILED
    assert told.startswith(f"the node loop hangs, and was killed: {words.format(port=port)}")
