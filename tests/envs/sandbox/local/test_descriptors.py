"""What a failed start or a call that nobody waits for leaves in the agent: nothing."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import anyio
import pytest

from envs.sandbox.agent.main import BoxAgent, job_wait
from envs.sandbox.agent.process import unreadable_copy
from envs.sandbox.api import Spec
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import SandboxError, SandboxFileError, SandboxLimitError, SandboxTimeoutError

pytestmark = pytest.mark.anyio

LIMIT = 20.0

NO_ROOM = """
import os
_fork = os.fork
def fork():
    if os.path.exists("full"):
        raise BlockingIOError(11, "no room for a process")
    return _fork()
os.fork = fork
"""
"""While there is a file `full`, the agent can start no process."""

NO_DESCRIPTORS = """
import os
_pipe, _left = os.pipe, []
def pipe():
    if os.path.exists("few"):
        if len(_left) == %d:
            _left.clear()
            raise OSError(24, "no descriptor is left")
        _left.append(1)
    return _pipe()
os.pipe = pipe
"""
"""While there is a file `few`, the agent gets so many pipes, and then none."""

NO_TERMINALS = """
import os
def openpty():
    raise OSError(28, "no terminal is left")
os.openpty = openpty
"""
"""The kernel has no pseudo-terminal for the agent."""


def descriptors(backend: FakeBackend, sandbox: LocalSandbox) -> int:
    process = backend.containers.kept[sandbox.container_id].process
    assert process is not None
    return len(os.listdir(f"/proc/{process.pid}/fd"))


async def has(backend: FakeBackend, sandbox: LocalSandbox, number: int) -> None:
    """Wait until the agent has so many descriptors: those of a closed shell are closed when it is reaped."""
    with anyio.fail_after(LIMIT):
        while True:
            if descriptors(backend, sandbox) == number:
                return
            await anyio.sleep(0.02)


async def open_session(sandbox: LocalSandbox) -> None:
    async with sandbox.session("other"):
        pass


async def run(sandbox: LocalSandbox) -> None:
    await sandbox.run(["cat"], stdin=b"x", timeout=LIMIT)


@pytest.mark.parametrize("start", [open_session, run])
async def test_a_process_that_cannot_be_started_leaves_no_descriptor_open(start):
    async with FakeBackend(prelude=NO_ROOM) as backend, LocalSandbox(backend, Spec(image="any")) as sandbox:
        before = descriptors(backend, sandbox)
        await start(sandbox)
        await sandbox.write("full", b"")
        for _ in range(5):
            with pytest.raises(SandboxLimitError, match="can be started"):
                await start(sandbox)
        await has(backend, sandbox, before)


@pytest.mark.parametrize("pipes", range(4))
@pytest.mark.parametrize("start", [open_session, run])
async def test_a_start_for_which_the_descriptors_do_not_suffice_leaves_none_open(start, pipes):
    prelude = NO_DESCRIPTORS % pipes
    async with FakeBackend(prelude=prelude) as backend, LocalSandbox(backend, Spec(image="any")) as sandbox:
        before = descriptors(backend, sandbox)
        await start(sandbox)
        await sandbox.write("few", b"")
        for _ in range(3):
            with pytest.raises(SandboxError):
                await start(sandbox)
        await has(backend, sandbox, before)


async def test_a_terminal_that_the_kernel_does_not_have_is_a_limit_and_no_fault_of_a_folder():
    async with (
        FakeBackend(prelude=NO_TERMINALS) as backend,
        LocalSandbox(backend, Spec(image="any")) as sandbox,
        sandbox.terminal(["true"]) as terminal,
    ):
        with pytest.raises(SandboxLimitError, match="No space left"):
            await terminal.read()


async def test_a_session_is_opened_once_there_is_room_again():
    async with FakeBackend(prelude=NO_ROOM) as backend, LocalSandbox(backend, Spec(image="any")) as sandbox:
        await sandbox.write("full", b"")
        with pytest.raises(SandboxLimitError):
            await open_session(sandbox)
        os.rename(f"{sandbox.hello.workdir}/full", f"{sandbox.hello.workdir}/free")
        async with sandbox.session("other") as session:
            assert (await session.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_a_command_without_its_folder_is_refused_with_the_path_of_the_folder():
    async with FakeBackend() as backend, LocalSandbox(backend, Spec(image="any")) as sandbox:
        os.rmdir(sandbox.hello.workdir)
        with pytest.raises(SandboxFileError, match=sandbox.hello.workdir):
            await run(sandbox)


def test_a_job_does_not_keep_calls_that_nobody_waits_for():
    job: Any = SimpleNamespace(ended_body=None, waiters=set())
    agent: Any = SimpleNamespace(jobs={"a": job}, calls={}, replier=lambda call: None)
    for call in range(1, 4):
        job_wait(agent, call, {"job": "a"})
    assert len(job.waiters) == len(agent.calls) == 3
    for call in (1, 3):
        BoxAgent.abandon(agent, call)
    assert job.waiters == {agent.calls[2]}
    assert [*agent.calls] == [2]


async def test_a_job_is_awaited_as_often_as_one_likes(bench):
    async with bench.sandbox() as sandbox:
        job = await sandbox.start("while [ ! -e go ]; do sleep 0.02; done; exit 5")
        for _ in range(3):
            with pytest.raises(SandboxTimeoutError):
                await job.wait(0.05)
        codes: list[int | None] = []

        async def wait() -> None:
            codes.append((await job.wait(LIMIT)).exit_code)

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(wait)
            await anyio.sleep(0.1)
            await sandbox.write("go", b"")
        assert codes == [5, 5, 5]


@pytest.mark.parametrize("content", [b"#!/bin/sh\n", b"\x7fELF"])
def test_a_copy_of_a_program_leaves_only_the_returned_descriptor_open(tmp_path, content):
    (tmp_path / "bash").write_bytes(content)
    before = set(os.listdir("/proc/self/fd"))
    copy = unreadable_copy(str(tmp_path / "bash"))
    after = set(os.listdir("/proc/self/fd"))
    assert after - before == ({str(copy)} if copy >= 0 else set())
    if copy >= 0:
        os.close(copy)
