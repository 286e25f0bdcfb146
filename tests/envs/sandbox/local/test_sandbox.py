"""One sandbox: its life and its ends, jobs, terminals, snapshots, taking over."""

from __future__ import annotations

import os
import signal
from contextlib import aclosing

import aiohttp
import anyio
import pytest

from envs.sandbox.api import Chunk, Result
from envs.sandbox.engines.backend import SNAPSHOT_LABEL
from envs.sandbox.local.agent import AgentJob
from envs.sandbox.local.sandbox import LocalSandbox, SandboxSettings
from flash.errors import (
    SandboxBusyError,
    SandboxClosedError,
    SandboxLimitError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    SandboxTimeoutError,
)

pytestmark = pytest.mark.anyio

LIMIT = 20.0
CONTAINERS = pytest.mark.parametrize("kind", [pytest.param("containers", marks=pytest.mark.integration)])
FAKE = pytest.mark.parametrize("kind", ["fake"])


async def test_a_command_is_told_as_it_was(bench):
    async with bench.sandbox() as sandbox:
        answer = await sandbox.run("echo out; echo err >&2; exit 3", timeout=LIMIT)
        assert (answer.exit_code, answer.stdout, answer.stderr, answer.ok) == (3, b"out\n", b"err\n", False)
        assert (answer.signal, answer.timed_out, answer.oom_killed) == (None, False, False)
        assert answer.wall_s > 0
        assert answer.max_rss > 1 << 20
        busy = await sandbox.run("i=0; while [ $i -lt 30000 ]; do i=$((i+1)); done", timeout=LIMIT)
        assert busy.cpu_s > 0.005
        assert (await sandbox.run("kill -SEGV $$", timeout=LIMIT)).signal == "SIGSEGV"
        assert (await sandbox.run(["no-such-program"], timeout=LIMIT)).exit_code == 127
        assert (await sandbox.run(["/etc/passwd"], timeout=LIMIT)).exit_code == 126
        assert (await sandbox.run(["echo", "hi  there", "$HOME"], timeout=LIMIT)).stdout == b"hi  there $HOME\n"
        told = await sandbox.run(
            "pwd; echo $COLOUR; cat", stdin=b"x" * 300_000, env={"COLOUR": "blü"}, cwd="/", timeout=LIMIT
        )
        assert told.stdout == "/\nblü\n".encode() + b"x" * 300_000


async def test_wrong_requests_are_refused_and_the_sandbox_goes_on(bench):
    async with bench.sandbox() as sandbox:
        with pytest.raises(SandboxRefusedError, match="zero byte"):
            await sandbox.run("echo \0", timeout=LIMIT)
        with pytest.raises(SandboxRefusedError, match="above 0 and up to"):
            await sandbox.run("true", timeout=0)
        with pytest.raises(SandboxRefusedError, match="at least one word"):
            await sandbox.run([], timeout=LIMIT)
        for mode in (-1, 0o4755):
            with pytest.raises(SandboxRefusedError, match="from 0 to 0o777"):
                await sandbox.write("file", b"", mode=mode)
        async with sandbox.session() as session:
            with pytest.raises(SandboxRefusedError, match="a session takes a command as text"):
                await session.run(["echo", "1"], timeout=LIMIT)
        with pytest.raises(SandboxLimitError, match="120000 bytes, not 200000"):
            await sandbox.run("#" * 200_000, timeout=LIMIT)
        with pytest.raises(Exception, match="no-such-folder"):
            await sandbox.run("true", cwd="no-such-folder", timeout=LIMIT)
        async with sandbox.session():
            with pytest.raises(SandboxBusyError, match="'main' is open"):
                async with sandbox.session():
                    pass
        assert (await sandbox.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_a_session_whose_name_is_taken_leaves_the_other_one_open(bench):
    async with bench.sandbox() as sandbox, sandbox.session("one") as first:
        with pytest.raises(SandboxBusyError, match="'one' is open"):
            async with sandbox.session("one"):
                pass
        assert (await first.run("echo on", timeout=LIMIT)).stdout == b"on\n"


async def test_a_job_goes_on_in_the_background_and_tells_what_it_wrote(bench):
    async with bench.sandbox(output_limit=4096) as sandbox:
        job = await sandbox.start("echo begin; while [ ! -e go ]; do sleep 0.02; done; seq 2000; exit 5")
        status = await job.poll()
        assert status.running
        with pytest.raises(SandboxTimeoutError):
            await job.wait(0.1)
        await sandbox.write("go", b"")
        result = await job.wait(LIMIT)
        assert (result.exit_code, result.stdout_truncated) == (5, True)
        assert result.stdout.startswith(b"begin\n1\n2\n")
        assert result.stdout.endswith(b"1999\n2000\n")
        status = await job.poll()
        assert (status.running, status.result) == (False, result)
        total = len("begin\n") + sum(len(str(n)) + 1 for n in range(1, 2001))
        assert status.stdout_bytes == total
        part = await job.output(offset=6, limit=4)
        assert (part.offset, part.data, part.total) == (6, b"1\n2\n", total)
        gap = await job.output(offset=3000, limit=4096)
        assert gap.offset == total - 2048
        assert gap.data == result.stdout[-2048:]


async def test_a_job_is_signalled(bench):
    async with bench.sandbox() as sandbox:
        job = await sandbox.start("trap 'echo hup; exit 4' HUP; touch ready; while true; do sleep 0.02; done")
        assert (await sandbox.run("while [ ! -e ready ]; do sleep 0.02; done", timeout=LIMIT)).ok
        await job.signal("SIGHUP")
        assert (await job.wait(LIMIT)).exit_code == 4
        await job.signal("SIGKILL")
        for name in ("SIGNOTHING", "SIG_IGN", "SIG_BLOCK"):
            with pytest.raises(SandboxRefusedError, match="no signal"):
                await job.signal(name)
        timed = await sandbox.start("sleep 100", timeout=0.2)
        assert (await timed.wait(LIMIT)).timed_out


async def test_a_session_is_interrupted_like_by_ctrl_c(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        assert not await session.interrupt()
        answers: list[Result] = []

        async def sleep() -> None:
            answers.append(await session.run("echo on; sleep 100; echo never", timeout=60))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sleep)
            await anyio.sleep(0.3)
            assert await session.interrupt()
        assert answers[0].stdout == b"on\n"
        assert not answers[0].timed_out
        assert (await session.run("echo next", timeout=LIMIT)).stdout == b"next\n"


async def test_a_session_keeps_exit_codes_whatever_separates_words(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        assert (await session.run("IFS=0123456789; (exit 107)", timeout=LIMIT)).exit_code == 107
        answer = await session.run('echo "$?"; cd /tmp', timeout=LIMIT)
        assert (answer.stdout, answer.exit_code) == (b"107\n", 0)


async def test_leaving_a_session_ends_what_it_started(bench):
    async with bench.sandbox() as sandbox:
        async with sandbox.session("other") as session:
            await session.run("sleep 321 & setsid sleep 322 &", timeout=LIMIT)
        left = await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=LIMIT)
        assert b"sleep 321" not in left.stdout
        assert b"sleep 322" not in left.stdout


async def test_a_terminal_is_a_terminal(bench):
    async with (
        bench.sandbox() as sandbox,
        sandbox.terminal("tty >/dev/null && echo begun; read line; echo got $line") as terminal,
    ):
        seen = b""
        while b"begun" not in seen:
            seen += await terminal.read()
        await terminal.write(b"words\n")
        while piece := await terminal.read():
            seen += piece
        assert b"got words" in seen


async def test_cancelling_a_command_kills_it(bench):
    async with bench.sandbox() as sandbox:
        with anyio.move_on_after(0.3):
            await sandbox.run("trap '' TERM; touch started; while true; do sleep 0.1; done", timeout=LIMIT)
        assert (await sandbox.run("test -e started", timeout=LIMIT)).ok
        await anyio.sleep(1.0)
        left = await sandbox.run("grep -lz 'touch starte[d]' /proc/[0-9]*/cmdline", timeout=LIMIT)
        assert left.stdout == b""


async def test_a_deadline_closes_the_sandbox_and_says_so(bench):
    async with bench.sandbox(deadline_s=1.0) as sandbox:
        with pytest.raises(SandboxClosedError, match="deadline of 1 s"):
            await sandbox.run("sleep 100", timeout=60)
        await sandbox.wait_ended()
        assert sandbox.state == "closed"


async def test_closing_ends_calls_in_progress_and_removes_the_container(bench):
    async with bench.sandbox() as sandbox, anyio.create_task_group() as tasks:

        async def call() -> None:
            with pytest.raises(SandboxClosedError):
                await sandbox.run("sleep 100", timeout=60)

        tasks.start_soon(call)
        await anyio.sleep(0.2)
        await sandbox.close()
        assert await bench.backend.containers.inspect(sandbox.container_id) is None
        await sandbox.close()


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3])
async def test_cancelling_the_start_at_any_moment_leaves_nothing(bench, delay):
    with anyio.move_on_after(delay):
        async with bench.sandbox() as sandbox, sandbox.session() as session:
            await session.run("sleep 100", timeout=60)
    assert not await bench.backend.containers.list(bench.labels)


@pytest.mark.parametrize("step", range(40))
@FAKE
async def test_cancelling_at_each_await_leaves_nothing(bench, step):
    """Cancels the owner when it has been resumed `step` times, wherever it then waits."""
    bench.backend.faults.create_delay = bench.backend.faults.start_delay = 0.001

    async def use() -> None:
        async with bench.sandbox() as sandbox, sandbox.session() as session:
            await session.run("true", timeout=LIMIT)
            await sandbox.write("file", b"x" * 100_000)
            await sandbox.run("cat", stdin=b"y" * 100_000, timeout=LIMIT)
            async with bench.copy(sandbox):
                pass

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(use)
        for _ in range(step * step // 2):
            await anyio.lowlevel.checkpoint()
        await anyio.sleep(0.002 * step)
        tasks.cancel_scope.cancel()
    assert not bench.backend.containers.kept
    assert not bench.backend.images.kept


@FAKE
async def test_a_failure_to_start_is_typed_and_leaves_nothing(bench):
    bench.backend.faults.start = SandboxStartError("no room on the disk")
    with pytest.raises(SandboxStartError, match="no room"):
        async with bench.sandbox():
            raise AssertionError
    bench.backend.faults.start = None
    bench.backend.agents.prelude = "import sys; sys.exit('broken image')"
    with pytest.raises(SandboxStartError):
        async with bench.sandbox():
            raise AssertionError
    bench.backend.agents.prelude = "import time; time.sleep(30)"
    with pytest.raises((SandboxStartError, SandboxTimeoutError), match=r"not ready|waited"):
        async with bench.sandbox(settings=SandboxSettings(start=0.5)):
            raise AssertionError


@FAKE
async def test_an_engine_that_cannot_remove_at_first_is_asked_again(bench):
    async with anyio.create_task_group() as tasks:

        async def recover() -> None:
            await anyio.sleep(0.3)
            bench.backend.faults.delete = None

        async with bench.sandbox():
            bench.backend.faults.delete = SandboxLostError("the engine restarts")
            tasks.start_soon(recover)
    assert not bench.backend.containers.kept


@FAKE
async def test_a_silent_agent_is_given_up(bench):
    bench.backend.agents.prelude = "import os\n"
    async with bench.sandbox(settings=SandboxSettings(heartbeat=0.2, silence=0.3)) as sandbox:
        process = bench.backend.containers.kept[sandbox.container_id].process
        process.send_signal(19)
        with pytest.raises(SandboxLostError, match="did not answer"):
            await sandbox.run("true", timeout=LIMIT)


async def test_a_snapshot_has_the_files_and_outlives_its_sandbox(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.run("mkdir -p a/b; echo one > a/b/file; chmod 700 a/b/file; ln -s b/file a/link", timeout=LIMIT)
        snapshot = await sandbox.snapshot()
        await sandbox.write("a/b/file", b"two")
    try:
        async with LocalSandbox(bench.backend, snapshot.spec, labels=bench.labels) as again:
            assert (await again.run("cat a/link; stat -c %a a/b/file", timeout=LIMIT)).stdout == b"one\n700\n"
    finally:
        await bench.backend.images.remove(snapshot.spec.image)


@CONTAINERS
async def test_the_own_layer_of_a_build_sandbox_is_in_its_snapshot_and_limited(bench):
    settings = SandboxSettings(disk_pause=0.2)
    async with bench.sandbox(profile="build", disk_mib=8, settings=settings) as sandbox:
        await sandbox.write("kept", b"data")
        async with bench.copy(sandbox) as copied:
            assert await copied.read("kept") == b"data"
        with pytest.raises(SandboxClosedError, match="more than 8 MiB"):
            await sandbox.run("head -c 20000000 /dev/zero > big; sleep 60", timeout=90)


@CONTAINERS
async def test_another_host_takes_over_with_jobs_and_files_as_they_were(bench):
    async with bench.sandbox() as first:
        job = await first.start("echo working; while [ ! -e go ]; do sleep 0.05; done; echo done")
        await first.write("file", b"kept")
        await first.session("left").__aenter__()
        async with LocalSandbox(bench.backend, first.spec, adopt=first.container_id) as second:
            assert second.sandbox_id == first.sandbox_id
            assert await second.read("file") == b"kept"
            await second.write("go", b"")
            assert (await AgentJob(second, job.job_id).wait(LIMIT)).stdout == b"working\ndone\n"
            assert (await second.run("echo mine", timeout=LIMIT)).stdout == b"mine\n"
            # Killing all of a command leaves the process that joins the new host with the agent.
            assert (await second.run("trap '' TERM; while true; do sleep 1; done", timeout=0.5)).timed_out
            assert (await second.run("echo still", timeout=LIMIT)).stdout == b"still\n"
            # Nobody could close the shell of the host before.
            async with second.session("left") as session:
                assert (await session.run("echo new", timeout=LIMIT)).stdout == b"new\n"


@CONTAINERS
async def test_what_is_made_of_a_sandbox_that_was_taken_over_is_found_by_its_labels(bench):
    async with (
        bench.sandbox() as first,
        LocalSandbox(bench.backend, first.spec, adopt=first.container_id) as second,
        bench.copy(second),
    ):
        (image,) = (await bench.backend.images.list(bench.labels)).values()
        assert image[SNAPSHOT_LABEL] == first.sandbox_id


@CONTAINERS
async def test_a_broken_link_is_replaced(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.write("file", b"kept")
        sandbox._channel._link._stream._resp.connection.transport.abort()
        with anyio.fail_after(LIMIT):
            while True:
                try:
                    assert await sandbox.read("file") == b"kept"
                    break
                except SandboxLostError:
                    assert sandbox.state == "ready"
        # The agent's own descriptors are others now; those of commands must not be.
        assert (await sandbox.run("cat; echo err >&2", stdin=b"in", timeout=LIMIT)).stdout == b"in"
        seen = b""
        async with sandbox.terminal("tty && echo on") as terminal:
            while data := await terminal.read():
                seen += data
        assert seen.startswith(b"/dev/pts/")
        assert seen.endswith(b"on\r\n")


@CONTAINERS
async def test_a_container_that_died_together_with_its_monitor_is_lost_at_once(bench):
    # Long deadlines: nothing but the end of the link, and what the runtime says, may end the calls.
    settings = SandboxSettings(heartbeat=600.0, silence=600.0, reconnect=600.0)
    async with bench.sandbox(settings=settings) as sandbox:
        engine = aiohttp.UnixConnector(bench.backend.url.removeprefix("unix://"))
        async with (
            aiohttp.ClientSession(connector=engine) as http,
            http.get(f"http://engine/v4.0.0/libpod/containers/{sandbox.container_id}/json") as answer,
        ):
            if answer.status == 404:
                pytest.skip("Docker looks after its own monitors")
            state = (await answer.json())["State"]
        with anyio.fail_after(LIMIT):
            async with aclosing(sandbox.stream("echo on; sleep 600", timeout=600)) as pieces:
                assert isinstance(await anext(pieces), Chunk)
                for pid in (state["ConmonPid"], state["Pid"]):
                    os.kill(pid, signal.SIGKILL)
                with pytest.raises(SandboxLostError):
                    await anext(pieces)
            with pytest.raises(SandboxLostError, match="its container ended"):
                await sandbox.run("true", timeout=600)
        assert sandbox.state == "lost"


@CONTAINERS
async def test_an_unknown_image_and_an_unknown_runtime_are_refused(bench):
    with pytest.raises(SandboxStartError, match="no-such-image"):
        async with bench.sandbox(image="localhost/no-such-image"):
            raise AssertionError
    with pytest.raises(SandboxRefusedError, match="no runtime 'nothing'"):
        async with bench.sandbox(runtime="nothing"):
            raise AssertionError
    with pytest.raises(SandboxRefusedError, match="network"):
        bench.sandbox(network="bridge")
    with pytest.raises(SandboxRefusedError, match=r"\$\.runtime"):
        bench.sandbox(runtime="../../bin/sh")


@CONTAINERS
async def test_a_required_runtime_that_the_engine_ignores_fails_closed(bench):
    with pytest.raises((SandboxRefusedError, SandboxStartError)):
        async with bench.sandbox(runtime="runsc"):
            raise AssertionError


@FAKE
async def test_killing_a_command_touches_no_other_sandbox(bench):
    """Agents of these tests see each other's processes; the first call of each has the same number."""
    async with bench.sandbox() as one, bench.sandbox() as other, anyio.create_task_group() as tasks:

        async def late() -> None:
            assert (await one.run("trap '' TERM; while true; do sleep 0.1; done", timeout=0.3)).timed_out

        tasks.start_soon(late)
        assert (await other.run("sleep 3; echo whole", timeout=LIMIT)).stdout == b"whole\n"
