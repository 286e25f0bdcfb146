"""The same code against the local class, the pool and the service."""

from __future__ import annotations

import math
from contextlib import aclosing, asynccontextmanager, suppress

import anyio
import msgspec
import pytest
from anyio.abc import SocketAttribute

from envs.sandbox.api import Chunk, Exec, Result
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.open import Location, check_location
from envs.sandbox.pool.lease import LeaseOrder
from envs.sandbox.pool.local_host import open_maker
from envs.sandbox.protocol import Info, SessionInfo, SessionResult
from envs.sandbox.remote.client import RemoteSession, SandboxClient, certificate_check, service_token
from envs.sandbox.remote.http import REPEAT_S
from flash.errors import (
    ConfigError,
    SandboxBusyError,
    SandboxClosedError,
    SandboxFileError,
    SandboxLimitError,
    SandboxLostError,
    SandboxRefusedError,
    SandboxStartError,
    SandboxTimeoutError,
)
from flash.http.server import HttpAddress
from tests.envs.sandbox.services import SPEC, TOKEN, running
from tests.ordinary_user import as_ordinary_user

pytestmark = pytest.mark.anyio


async def eventually(happened) -> None:
    """Ask until it is so: nothing tells when it happens inside the sandbox."""
    with anyio.fail_after(20):
        while True:
            if await happened():
                return
            await anyio.sleep(0.05)


@asynccontextmanager
async def pooled(folder):
    async with running(folder) as world, world.pool.acquire(SPEC) as sandbox:
        yield sandbox


@asynccontextmanager
async def remote(folder):
    async with running(folder) as world, world.client.acquire(SPEC) as sandbox:
        yield sandbox


@pytest.fixture(params=[pooled, remote])
async def sandbox(request, tmp_path):
    async with request.param(tmp_path) as made:
        yield made


async def test_a_command_and_how_it_ends(sandbox):
    result = await sandbox.run("echo out; echo err >&2; exit 3", timeout=10)
    assert (result.exit_code, result.stdout, result.stderr) == (3, b"out\n", b"err\n")
    assert (await sandbox.run(["cat"], stdin=b"\xff\x00", timeout=10)).stdout == b"\xff\x00"
    assert (await sandbox.run("echo $A", env={"A": "b c"}, timeout=10)).stdout == b"b c\n"
    late = await sandbox.run("echo begun; sleep 60", timeout=0.5)
    assert late.timed_out
    assert late.stdout == b"begun\n"


async def test_a_shell_keeps_its_state(sandbox):
    async with sandbox.session() as session:
        await session.run("x=5; cd /tmp", timeout=10)
        assert (await session.run("echo $x $PWD", timeout=10)).stdout == b"5 /tmp\n"
        assert (await session.run("exit 4", timeout=10)).exit_code == 4
        assert (await session.run("echo again", timeout=10)).stdout == b"again\n"
        assert session.restarts == 1
        with pytest.raises(SandboxBusyError):
            async with sandbox.session():
                pass
    async with sandbox.session():
        pass


async def test_a_shell_is_interrupted(sandbox):
    async with sandbox.session() as session, anyio.create_task_group() as tasks:

        async def interrupt() -> None:
            # More than once: the first one may come before the shell has started its command.
            while True:
                await session.interrupt()
                await anyio.sleep(0.1)

        tasks.start_soon(interrupt)
        assert not (await session.run("sleep 60", timeout=30)).timed_out
        tasks.cancel_scope.cancel()


async def test_background_jobs(sandbox):
    job = await sandbox.start("echo one; sleep 60")
    with pytest.raises(SandboxTimeoutError):
        await job.wait(0.2)
    assert (await job.poll()).running
    await job.signal("SIGTERM")
    assert (await job.wait(10)).signal == "SIGTERM"
    output = await job.output()
    assert (output.data, output.total) == (b"one\n", 4)
    assert (await job.output(offset=2)).data == b"e\n"


async def test_streams(sandbox):
    items = []
    async with aclosing(sandbox.stream("echo one; sleep 0.1; echo two >&2; exit 2", timeout=10)) as stream:
        items = [item async for item in stream]
    assert isinstance(items[-1], Result)
    assert items[-1].exit_code == 2
    chunks = items[:-1]
    assert all(isinstance(chunk, Chunk) for chunk in chunks)
    assert b"".join(c.data for c in chunks if c.stream == "stdout") == b"one\n"
    assert b"".join(c.data for c in chunks if c.stream == "stderr") == b"two\n"


async def test_leaving_a_stream_kills_its_command(sandbox):
    async with aclosing(sandbox.stream("echo $$; exec sleep 60", timeout=60)) as stream:
        async for item in stream:
            pid = int(item.data)
            break

    async def gone() -> bool:
        return (await sandbox.run(f"kill -0 {pid}", timeout=5)).exit_code != 0

    await eventually(gone)


async def test_a_session_takes_only_text_and_a_file_only_permissions(sandbox):
    async with sandbox.session() as session:
        with pytest.raises(SandboxRefusedError, match="a session takes a command as text"):
            await session.run(["echo", "1"], timeout=10)
    with pytest.raises(SandboxRefusedError):
        await sandbox.write("file", b"", mode=0o4755)


async def test_files_and_trees(sandbox, tmp_path):
    await sandbox.write("folder/a.bin", b"\x00\xff" * 100)
    await sandbox.write("folder/a.bin", b"end", append=True)
    assert await sandbox.read("folder/a.bin", offset=198) == b"\x00\xffend"
    assert await sandbox.read("folder/a.bin", limit=1) == b"\x00"
    assert [entry.name for entry in await sandbox.list("folder")] == ["a.bin"]
    tree = tmp_path / "tree"
    (tree / "deep").mkdir(parents=True)
    (tree / "deep" / "b").write_text("b")
    (tree / "link").symlink_to("deep/b")
    await sandbox.upload(tree, "up")
    assert (await sandbox.run("cat up/link", timeout=10)).stdout == b"b"
    await sandbox.download("up", tmp_path / "down")
    assert (tmp_path / "down" / "link").read_text() == "b"
    await sandbox.upload(tree / "deep" / "b", "single")
    await sandbox.download("single", tmp_path / "single")
    assert (tmp_path / "single").read_text() == "b"
    await sandbox.remove("folder")
    with pytest.raises(SandboxFileError):
        await sandbox.read("folder/a.bin")


async def test_a_tree_that_exceeds_a_limit_in_the_middle_is_refused_as_such(sandbox, tmp_path):
    await sandbox.run("mkdir t; head -c 1000000 /dev/urandom > t/a; truncate -s 1T t/b", timeout=10)
    with pytest.raises(SandboxLimitError, match="b"):
        await sandbox.download("t", tmp_path / "down")
    assert sandbox.state == "ready"
    assert not (tmp_path / "down").exists()


async def test_a_connection_that_breaks_during_a_download_is_no_fault_of_the_files(tmp_path):
    async with (
        running(tmp_path, address=HttpAddress(port=0)) as world,
        world.client.acquire(SPEC) as made,
        cutting(world.url) as url,
    ):
        await made.write("f", b"0" * (4 << 20))
        async with SandboxClient(url, TOKEN) as client:
            sandbox = await client.find(made.sandbox_id)
            with pytest.raises(SandboxLostError, match="the connection to the service broke"):
                await sandbox.download("f", tmp_path / "down")
            assert sandbox.state == "ready"


@asynccontextmanager
async def cutting(url):
    """An address that leads to the service, but cuts each connection in the middle of a tree."""

    async def serve(client):
        """Pass the bytes of one connection on until one end closes it, or until the client got a megabyte."""

        async def copy(source, sink, most):
            with suppress(anyio.BrokenResourceError):
                async for piece in source:
                    await sink.send(piece)
                    most -= len(piece)
                    if most < 0:
                        break
            tasks.cancel_scope.cancel()

        host, _, port = url.removeprefix("http://").partition(":")
        async with client, await anyio.connect_tcp(host, int(port)) as upstream, anyio.create_task_group() as tasks:
            tasks.start_soon(copy, upstream, client, 1 << 20)
            tasks.start_soon(copy, client, upstream, math.inf)

    listening = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listening as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield f"http://127.0.0.1:{listener.extra(SocketAttribute.local_port)}"
        tasks.cancel_scope.cancel()


async def test_forks_have_the_files(sandbox):
    await sandbox.write("f", b"1")
    forks = await sandbox.fork(2)
    for number, fork in enumerate(forks):
        await fork.write("f", str(number).encode(), append=True)
    assert [await fork.read("f") for fork in forks] == [b"10", b"11"]
    assert await sandbox.read("f") == b"1"
    await forks[0].close()


async def test_what_is_closed_says_so(sandbox):
    await sandbox.close()
    assert sandbox.state == "closed"
    await sandbox.wait_ended()
    with pytest.raises(SandboxClosedError):
        await sandbox.run("true", timeout=1)


# ---- what only the service has


async def test_a_cancelled_call_kills_its_command(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        with anyio.move_on_after(1):
            await sandbox.run("echo $$ >pid; exec sleep 60", timeout=60)
        pid = int(await sandbox.read("pid"))

        async def gone() -> bool:
            return (await sandbox.run(f"kill -0 {pid}", timeout=5)).exit_code != 0

        await eventually(gone)


async def test_a_lost_sandbox_is_told_and_made_again(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC, on_lost="recreate") as sandbox:
        [id] = world.backend.containers.kept
        async with anyio.create_task_group() as tasks:

            async def kill() -> None:
                await anyio.sleep(0.3)
                await world.backend.containers.kill(id)

            tasks.start_soon(kill)
            with pytest.raises(SandboxLostError):
                await sandbox.run("sleep 60", timeout=60)
        assert (await sandbox.run("echo new", timeout=10)).stdout == b"new\n"


async def test_a_sandbox_that_is_replaced_slowly_does_not_end_for_its_client(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC, on_lost="recreate") as sandbox:
        [id] = world.backend.containers.kept
        world.backend.faults.delete_delay = 2.5
        await world.backend.containers.kill(id)
        with pytest.raises(SandboxLostError):
            await sandbox.run("true", timeout=10)
        assert sandbox.state == "ready"
        world.backend.faults.delete_delay = 0.0
        assert (await sandbox.run("echo new", timeout=10)).stdout == b"new\n"


async def test_a_queued_command_of_a_session_has_its_own_timeout_after_the_wait(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox, sandbox.session() as session:
        results = []

        async def run(command: str) -> None:
            results.append((await session.run(command, timeout=3)).stdout)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "sleep 2; echo first")
            await anyio.sleep(0.3)
            tasks.start_soon(run, "sleep 2.5; echo second")
        assert results == [b"first\n", b"second\n"]


class AskedSeconds:
    """The sandbox of a session, which keeps the seconds that each call to the service may take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def call_once(self, path, answer, body, seconds):
        self.seconds.append(seconds)
        return SessionResult(Result(0, None, False, False, b"", b"", False, False, 0.0, 0.0, 0), restarts=0)


async def test_a_command_of_a_session_may_wait_and_then_run_for_its_timeout():
    sandbox = AskedSeconds()
    await RemoteSession(sandbox, SessionInfo("one", 0)).run("true", timeout=100)
    assert sandbox.seconds == [200]


async def test_a_call_that_was_cancelled_before_it_arrives_is_not_carried_out(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        path, http = f"/v1/sandboxes/{sandbox.sandbox_id}", world.client.http
        await http.ask("DELETE", f"{path}/calls/k", type(None))
        body = Exec(command="touch ran", timeout=10)
        with pytest.raises(SandboxRefusedError, match="was cancelled"):
            await http.ask("POST", f"{path}/run", Result, body=body, key="k")
        assert (await sandbox.run("ls", timeout=10)).stdout == b""


async def test_a_lease_does_not_run_out_while_its_holder_is_held_waiting(tmp_path):
    async with running(tmp_path) as world:
        lease = world.pool.order(LeaseOrder(spec=SPEC, owner="x", token="admin", lease_s=1.0))
        await world.pool.wait_ready(lease, 10)
        for _ in range(3):
            info = await world.client.http.ask("GET", f"/v1/sandboxes/{lease.id}/end", Info, query={"wait": 20})
            assert info.state == "ready"
        await world.pool.release(lease)


async def test_a_client_knows_of_a_loss_when_its_call_has_said_so(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        [id] = world.backend.containers.kept
        await world.backend.containers.kill(id)
        with pytest.raises(SandboxLostError):
            await sandbox.run("true", timeout=10)
        assert sandbox.state == "lost"


async def test_a_client_knows_of_a_loss_when_its_stream_has_reported_it(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        [id] = world.backend.containers.kept

        async def killed_in_the_stream() -> None:
            async with aclosing(sandbox.stream("echo begun; sleep 60", timeout=60)) as stream:
                async for _ in stream:
                    await world.backend.containers.kill(id)

        with pytest.raises(SandboxLostError):
            await killed_in_the_stream()
        assert sandbox.state == "lost"


async def test_an_error_of_a_stream_may_quote_every_line_separator(tmp_path):
    name = "no\u0085such\u2028fol\u2029der"
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        stream = sandbox.stream("true", timeout=10, cwd=name)
        with pytest.raises(SandboxFileError, match=name):
            await anext(stream)


async def test_a_client_learns_that_its_sandbox_ended(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC) as sandbox:
        await world.pool.release(world.pool.state.leases.all()[0])
        with anyio.fail_after(10):
            await sandbox.wait_ended()
        assert sandbox.state == "closed"


async def test_a_client_that_vanishes_loses_its_sandboxes(tmp_path):
    async with running(tmp_path) as world:
        lease = world.pool.order(LeaseOrder(spec=SPEC, owner="x", token="admin", lease_s=1.0))
        await world.pool.wait_ready(lease, 10)
        with anyio.fail_after(10):
            await lease.done.wait()
        assert "not renewed" in lease.reason


async def test_waiting_without_room_keeps_the_deadline(tmp_path):
    huge = msgspec.structs.replace(SPEC, cpus=1000.0)
    async with running(tmp_path) as world:
        with pytest.raises(Exception, match="fits nowhere"):
            async with world.client.acquire(huge):
                pass
        world.backend.faults.create_delay = 2.0
        with pytest.raises(SandboxBusyError, match=r"waited 0\.3 s for a sandbox of any: on here"):
            async with world.client.acquire(SPEC, deadline=0.3):
                pass
        world.backend.faults.create_delay = 0.0
        for lease in world.pool.state.leases.all():
            with anyio.fail_after(10):
                await lease.done.wait()


async def test_a_sandbox_that_is_closed_before_it_is_ready_is_not_handed_out(tmp_path):
    async with running(tmp_path) as world:
        world.backend.faults.create_delay = 2.0

        async def close() -> None:
            state = world.pool.state
            while not (leases := state.leases.all()):
                await state.changed_since(state.version)
            await world.pool.release(leases[0], "an operator closed it")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(close)
            with pytest.raises(SandboxStartError, match="closed before it was ready: an operator closed it"):
                async with world.client.acquire(SPEC, deadline=10.0):
                    pass


async def test_open_maker_removes_what_is_left():
    async with FakeBackend() as backend:
        async with open_maker(backend) as maker:
            await maker.make(SPEC, "flash-x", {"flash.sandbox.service": "s"})
            assert len(backend.containers.kept) == 1
        assert backend.containers.kept == {}


async def test_a_job_of_a_lost_sandbox_is_not_taken_for_one_of_the_next(tmp_path):
    async with running(tmp_path) as world, world.client.acquire(SPEC, on_lost="recreate") as sandbox:
        before = await sandbox.start("echo before", timeout=10)
        [id] = world.backend.containers.kept
        await world.backend.containers.kill(id)
        with pytest.raises(SandboxLostError):
            await sandbox.run("sleep 60", timeout=60)
        after = await sandbox.start("echo after", timeout=10)
        assert (await after.wait(10)).stdout == b"after\n"
        assert after.job_id != before.job_id
        with pytest.raises(SandboxLostError):
            await before.wait(10)


@pytest.mark.virtual
async def test_a_service_that_does_not_run_is_said_to_be_out_of_reach(tmp_path):
    begin = anyio.current_time()
    with pytest.raises(SandboxLostError, match=r"cannot be reached: ConnectError.*does the service run"):
        async with SandboxClient(f"unix:{tmp_path / 'nobody'}", TOKEN):
            pass
    assert anyio.current_time() - begin < REPEAT_S


@pytest.mark.parametrize("url", ["http://[::1", "http://127.0.0.1:99999", "http://", "unix:", "127.0.0.1:8700"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(ConfigError, match=r"address of (the|a) service"):
        SandboxClient(url, TOKEN)


@pytest.mark.parametrize("token", ["", "tokén" * 8, "a token\nof two lines"])
def test_a_token_that_no_header_can_carry_is_refused(token):
    with pytest.raises(ConfigError, match="a header cannot carry") as refused:
        SandboxClient("http://127.0.0.1:8700", token)
    assert not token or token not in str(refused.value)


def test_an_authority_that_is_no_certificate_is_refused(tmp_path):
    (tmp_path / "ca.pem").write_text("junk")
    for path in (tmp_path / "ca.pem", tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="cannot be used as a certificate authority"):
            certificate_check(path)
    assert certificate_check(None) is True


async def test_a_token_file_in_a_folder_that_may_not_be_entered_is_said_to_be_missing(tmp_path):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    try:
        with as_ordinary_user():
            with pytest.raises(ConfigError, match="there is no token file"):
                service_token(closed / "tokens")
            with pytest.raises(ConfigError, match="token_file: there is no file"):
                check_location(Location(at="http://x", token_file=str(closed / "tokens")))
    finally:
        closed.chmod(0o700)
