"""The processes of an engine, in vLLM's arrangement but without vLLM: a core, and workers in its process group."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import threading
from multiprocessing.process import BaseProcess
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest

from flash.foreign import vllm_processes
from flash.foreign.forking import ForkedProcess, ForkServer
from flash.rollout.vllm.processes import WORKER_KILLED, Core, EngineProcesses

pytestmark = pytest.mark.filterwarnings("ignore")


class FakeCore(Core):
    """A core that is forked from a process which has imported nothing, and does what it is given."""

    server = ForkServer()

    def enter(self) -> None:
        ForkedProcess.enter(self)


def core(worker: Any, tells: bool) -> None:
    """Do with processes what vLLM's core does; `tells`: report how the worker ended."""
    os.setpgid(0, 0)
    line = ["VLLM::Worker_0", "-c", "echo begun; while sleep 60; do :; done"]
    process = subprocess.Popen(line, executable="/bin/sh", stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    worker.send(process.pid)
    code = process.wait()
    if tells:
        os._exit(WORKER_KILLED - code)
    signal.pause()


def begin(*, tells: bool = False) -> tuple[BaseProcess, int]:
    """Start a core. Return it, and the process id of its worker."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = FakeCore(target=core, args=(send, tells), name="EngineCore_0", daemon=True)
    process.start()
    assert receive.poll(30), "the core does not start"
    return process, receive.recv()


def unfreeze() -> None:
    """Do with the garbage collector what vLLM does at the end of an engine. Exits with 0 if objects stay frozen."""
    vllm_processes.keep_frozen()
    gc.freeze()
    gc.unfreeze()
    os._exit(gc.get_freeze_count() == 0)


def test_an_engines_process_does_not_scan_the_objects_of_its_fork_server_when_it_ends() -> None:
    process = FakeCore(target=unfreeze)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def ended(pid: int) -> bool:
    """Return True if a process ends within a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("which", "how", "told"),
    [
        ("core", signal.SIGKILL, "its process {core} was killed by signal 9 (SIGKILL), perhaps"),
        ("worker", signal.SIGTERM, "its worker process {worker} has ended"),
        (
            "worker of a core that tells",
            signal.SIGSEGV,
            "its worker process {worker} was killed by signal 11 (SIGSEGV)",
        ),
    ],
)
def test_the_first_process_that_ends_is_told_once_and_the_others_are_ended(which: str, how: int, told: str) -> None:
    causes: list[str] = []

    async def scenario() -> None:
        process, worker = begin(tells=which.endswith("tells"))
        assert process.pid is not None
        died = anyio.Event()

        def tell(cause: str) -> None:
            causes.append(cause)
            died.set()

        processes = EngineProcesses(tell)
        processes.set_core(process)
        processes.watch()
        assert processes.core == process.pid
        os.kill(process.pid if which == "core" else worker, how)
        with anyio.fail_after(10):
            await died.wait()
        assert causes[0].startswith(told.format(core=process.pid, worker=worker))
        await anyio.to_thread.run_sync(processes.end, 10)
        assert not process.is_alive()
        assert ended(worker)

    anyio.run(scenario)
    assert len(causes) == 1


def test_a_stopped_worker_is_ended_and_what_was_closed_tells_nothing() -> None:
    causes: list[str] = []

    async def scenario() -> None:
        process, worker = begin()
        processes = EngineProcesses(causes.append)
        processes.set_core(process)
        processes.watch()
        os.kill(worker, signal.SIGSTOP)
        processes.unwatch()
        processes.unwatch()
        await anyio.to_thread.run_sync(processes.end, 10)
        assert ended(worker)
        await anyio.sleep(0.05)

    anyio.run(scenario)
    assert causes == []


def test_each_start_knows_the_core_of_its_own_thread_and_ends_no_other() -> None:
    starts = {name: EngineProcesses(lambda cause: None) for name in ("given up", "other")}
    cores = {name: FakeCore(target=signal.pause, name="EngineCore_0", daemon=True) for name in starts}

    def start(name: str) -> None:
        with starts[name].starting():
            cores[name].start()

    threads = [threading.Thread(target=start, args=(name,)) for name in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {name: start.core for name, start in starts.items()} == {name: core.pid for name, core in cores.items()}
    starts["given up"].end_starting(10)
    assert not cores["given up"].is_alive()
    assert cores["other"].is_alive()
    starts["other"].end_starting(10)
    assert not cores["other"].is_alive()


def test_a_core_that_begins_after_its_start_was_given_up_is_ended_at_once() -> None:
    processes = EngineProcesses(lambda cause: None)
    processes.end_starting(10)
    process, worker = begin()
    processes.set_core(process)
    assert process.pid is not None
    assert ended(process.pid)
    assert ended(worker)


@pytest.mark.parametrize(
    ("which", "error", "told"),
    [
        (
            "core",
            RuntimeError(f"{vllm_processes.CORE_ENDED}: {{}}"),
            "its process {core} was killed by signal 9 (SIGKILL), perhaps",
        ),
        (
            "worker",
            RuntimeError(f"{vllm_processes.CORE_ENDED}: {{}}"),
            "one of its worker processes was killed by signal 9",
        ),
        # vLLM has given the start up, and killed what it had started.
        ("core", RuntimeError("Message from engine with unexpected rank"), None),
    ],
)
def test_a_start_that_fails_tells_what_has_killed_it(which: str, error: Exception, told: str | None) -> None:
    async def scenario() -> tuple[str | None, int | None]:
        processes = EngineProcesses(lambda cause: None)
        over, has_begun = anyio.Event(), anyio.Event()
        begun: list[tuple[BaseProcess, int]] = []
        told_by: list[str | None] = []
        noted = anyio.Event()

        def remember(core: int) -> None:
            """Note that the start was followed with the process id of its core."""
            if begun and core == begun[0][0].pid:
                anyio.from_thread.run_sync(noted.set)

        def start() -> None:
            """Start a core in a thread, as vLLM's constructor does, and block until the test is over."""
            begun.append(begin(tells=True))
            processes.set_core(begun[0][0])
            anyio.from_thread.run_sync(has_begun.set)
            anyio.from_thread.run(over.wait)

        async with anyio.create_task_group() as group:
            group.start_soon(anyio.to_thread.run_sync, start)
            group.start_soon(processes.follow_start, remember)
            with anyio.fail_after(30):
                await has_begun.wait()
                await noted.wait()  # while it starts: nothing has said that it has
            process, worker = begun[0]
            assert process.pid is not None
            os.kill(process.pid if which == "core" else worker, signal.SIGKILL)
            assert await anyio.to_thread.run_sync(ended, process.pid)
            told_by.append(processes.killed_in_start(error))
            processes.end_starting(10)
            over.set()
            group.cancel_scope.cancel()
        ((process, worker),) = begun
        assert ended(worker)
        return told_by[0], process.pid

    said, pid = anyio.run(scenario)
    if told is None:
        assert said is None
    else:
        assert said is not None
        assert said.startswith(told.format(core=pid))
