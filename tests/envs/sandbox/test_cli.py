"""`flash sandbox serve` as a process of its own over real containers: killed, restarted, ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from uuid import uuid4

import anyio
import pytest

from envs.sandbox.api import STREAM_INPUT, Spec
from envs.sandbox.cli import FAILED, SILENCE_S
from envs.sandbox.engines.docker import DockerBackend
from envs.sandbox.pool.ownership import PREFIX
from envs.sandbox.protocol import SandboxOrder
from envs.sandbox.remote.client import SandboxClient, service_token
from flash.errors import SandboxError, SandboxLostError
from tests.envs.sandbox.conftest import IMAGE

pytestmark = [pytest.mark.anyio, pytest.mark.integration, pytest.mark.timeout(300)]

SPEC = Spec(image=IMAGE, memory_mib=64)


class Place:
    """A state folder, and the service that runs there."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.folder = folder
        self.url = f"unix:{folder / 's'}"
        self.arguments = ["--listen", self.url, "--state", str(folder), "--engine", engine]

    @asynccontextmanager
    async def serving(self, *more: str, end: int = signal.SIGTERM) -> AsyncIterator[subprocess.Popen[bytes]]:
        process = self.flash("serve", *self.arguments, *more)
        try:
            assert process.stdout is not None
            line = await anyio.to_thread.run_sync(process.stdout.readline)
            assert line.startswith(b"sandboxes at unix:"), line
            yield process
        finally:
            process.send_signal(end)
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(process.wait)
            process.stdout.close()

    def client(self) -> SandboxClient:
        return SandboxClient(self.url, service_token(self.folder / "tokens"))

    def flash(self, *words: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-m", "flash", "sandbox", *words], stdout=subprocess.PIPE)

    async def said(self, *words: str) -> tuple[int, bytes]:
        """Exit code and output of one action of a client."""
        where = ["--url", self.url, "--token-file", str(self.folder / "tokens")]
        process = self.flash(words[0], *where, *words[1:])
        output, _ = await anyio.to_thread.run_sync(process.communicate)
        return process.returncode, output

    async def containers(self, engine: str) -> int:
        label = {f"{PREFIX}service": (self.folder / "service").read_text()}
        async with DockerBackend(engine) as backend:
            return len(await backend.containers.list(label))


@pytest.fixture(scope="module", autouse=True)
def unreachable(tmp_path_factory) -> Iterator[subprocess.Popen[bytes]]:
    """A run whose service cannot be reached. It tries for half a minute, in which the other tests of this file run."""
    command = run_command(tmp_path_factory.mktemp("unreachable"), "--url", "unix:/no/such/socket", "true")
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        yield process
        process.kill()


@pytest.fixture
def place(tmp_path, engine_url) -> Place:
    return Place(tmp_path, engine_url)


async def test_a_person_uses_the_service(place, engine_url):
    async with place.serving():
        assert await place.said("run", "--image", IMAGE, "--memory", "64", "echo hello; exit 3") == (3, b"hello\n")
        async with place.client() as client, client.acquire(SPEC) as sandbox:
            code, listed = await place.said("ls")
            assert code == 0
            assert sandbox.sandbox_id.encode() in listed
            await sandbox.write("f", b"content")
            assert await place.said("run", "--in", sandbox.sandbox_id, "cat", "f") == (0, b"content")
            assert (await place.said("rm", sandbox.sandbox_id))[0] == 0
            with anyio.fail_after(30):
                await sandbox.wait_ended()
    assert await place.containers(engine_url) == 0


async def test_what_is_piped_into_a_run_is_the_input_of_its_command(place):
    async with place.serving():
        where = f"--url {place.url} --token-file {place.folder / 'tokens'} --image {IMAGE} --memory 64"
        line = f"printf 'a b\\n' | {sys.executable} -m flash sandbox run {where} 'read x y; echo $y$x'"
        done = await anyio.run_process(["bash", "-c", line])
        assert (done.stdout, done.stderr) == (b"ba\n", b"")
        line = f"head -c {STREAM_INPUT} /dev/zero | {sys.executable} -m flash sandbox run {where} 'wc -c'"
        done = await anyio.run_process(["bash", "-c", line])
        assert (done.stdout, done.stderr) == (b"%d\n" % STREAM_INPUT, b"")


async def test_an_input_that_is_too_long_is_refused_before_the_service_is_asked(tmp_path):
    command = run_command(tmp_path, "--url", "unix:/no/such/socket", "cat")
    done = await anyio.run_process(command, input=b"0" * (STREAM_INPUT + 1), check=False)
    assert has_no_result(done.returncode, done.stdout, done.stderr)
    assert b"the standard input has more than 65536 bytes" in done.stderr


async def test_an_input_that_pauses_is_reported_once():
    program = "import anyio; from envs.sandbox.cli import standard_input; print(anyio.run(standard_input))"
    process = await anyio.open_process([sys.executable, "-c", program])
    async with process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert (await process.stderr.receive()).startswith(b"flash: reading the standard input")
        await process.stdin.send(b"a")
        await anyio.sleep(SILENCE_S + 1)
        await process.stdin.aclose()
        assert b"".join([piece async for piece in process.stdout]) == b"b'a'\n"
        assert [piece async for piece in process.stderr] == []


async def test_a_run_without_a_result_is_told_from_a_command_that_failed(place):
    async with place.serving():
        assert await place.said("run", "--in", "nothing", "true") == (FAILED, b"")
        assert await place.said("run", "--image", "flash-no-such-image", "true") == (FAILED, b"")


def run_command(folder: Path, *words: str) -> list[str]:
    """Return the command of a run with a token, which is written to a file in the folder."""
    (folder / "tokens").write_text(f"admin {'t' * 32}\n")
    (folder / "tokens").chmod(0o600)
    return [sys.executable, "-m", "flash", "sandbox", "run", "--token-file", str(folder / "tokens"), *words]


def has_no_result(code: int | None, output: bytes, error: bytes) -> bool:
    """Check that a run has failed by itself, with an error message. Returns True."""
    assert (code, output) == (FAILED, b""), error
    assert b"error: " in error
    assert b"Traceback" not in error
    return True


@pytest.mark.parametrize(
    "words",
    [
        ["--token-file", "no-such-file", "true"],
        ["--url", "nowhere", "true"],
        ["--ca", "no-such-file", "true"],
        ["--cpus", "0", "true"],
        ["--memory", "-1", "true"],
        ["--memory", "x", "true"],
        ["--profile", "none", "true"],
        ["--no-such-option", "true"],
        [],
    ],
    ids=" ".join,
)
async def test_a_run_that_cannot_begin_has_no_result_either(tmp_path, words):
    done = await anyio.run_process(run_command(tmp_path, *words), check=False)
    assert has_no_result(done.returncode, done.stdout, done.stderr)


async def test_other_actions_say_that_what_was_typed_is_wrong(tmp_path):
    for words in (["ls", "--token-file", str(tmp_path / "none")], ["ls", "--no-such-option"], ["serve", "--key"]):
        done = await anyio.run_process([sys.executable, "-m", "flash", "sandbox", *words], check=False)
        assert done.returncode == 2


async def test_a_front_checks_the_certificates_of_its_services_by_a_private_authority(place, tmp_path):
    (tmp_path / "ca.pem").write_text("junk")
    (place.folder / "tokens").write_text(f"admin {'t' * 32}\n")
    (place.folder / "tokens").chmod(0o600)
    more = ["--host", f"there=https://127.0.0.1:9={place.folder / 'tokens'}", "--ca", str(tmp_path / "ca.pem")]
    command = [sys.executable, "-m", "flash", "sandbox", "serve", *place.arguments, *more]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 2
    assert b"cannot be used as a certificate authority" in done.stderr


async def test_a_reader_that_leaves_ends_a_run_without_a_traceback(place):
    async with place.serving():
        where = f"--url {place.url} --token-file {place.folder / 'tokens'} --image {IMAGE} --memory 64"
        line = f"{sys.executable} -m flash sandbox run {where} yes | head -1; echo ${{PIPESTATUS[0]}}"
        done = await anyio.run_process(["bash", "-c", line])
        assert (done.stdout, done.stderr) == (b"y\n141\n", b"")


async def test_a_state_folder_that_cannot_be_made_is_told(place):
    blocked = place.folder / "file"
    blocked.touch()
    command = [sys.executable, "-m", "flash", "sandbox", "serve", "--state", str(blocked / "state")]
    done = await anyio.run_process(command, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(b"flash: error: --state ")
    assert done.stderr.count(b"\n") == 1


async def test_kill_9_of_the_service_leaks_nothing_and_loses_nothing(place, engine_url):
    keys = [uuid4().hex for _ in range(3)]
    order = SandboxOrder(spec=SPEC, lease_s=60)
    async with place.serving(end=signal.SIGKILL), place.client() as client:
        first = [await client.order(order, key) for key in keys]
        assert [info.state for info in first] == ["ready"] * 3
        origin = client.attach(first[0])
        await origin.write("kept", b"still here")
        (fork,) = await origin.fork(1)
    assert await place.containers(engine_url) >= 3  # And those that stood ready.
    async with place.serving(), place.client() as client:
        again = [await client.wait_ready(await client.order(order, key), 30, 30) for key in keys]
        assert [info.id for info in again] == [info.id for info in first]
        sandbox = client.attach(again[0])
        assert await sandbox.read("kept") == b"still here"
        assert (await sandbox.run("echo works", timeout=10)).stdout == b"works\n"
        (found,) = [info for info in await client.list() if info.id == fork.sandbox_id]
        assert await client.attach(found).read("kept") == b"still here"
    assert await place.containers(engine_url) == 0


async def test_a_command_that_a_restart_interrupts_is_never_reported_as_done(place, engine_url):
    outcome: list[object] = []
    ended = anyio.Event()

    async def run(sandbox) -> None:
        try:
            outcome.append(await sandbox.run("sleep 3; echo done", timeout=60))
        except SandboxError as error:
            outcome.append(error)
        ended.set()

    async with AsyncExitStack() as stack:
        async with place.serving(end=signal.SIGKILL):
            client = await stack.enter_async_context(place.client())
            key, order = uuid4().hex, SandboxOrder(spec=SPEC, lease_s=60)
            info = await client.order(order, key)
            tasks = await stack.enter_async_context(anyio.create_task_group())
            tasks.start_soon(run, client.attach(info))
            await anyio.sleep(1)
        await stack.enter_async_context(place.serving())
        with anyio.fail_after(60):
            await ended.wait()
            # Ended before it has its sandbox again, the service would leave that to its next start.
            await client.wait_ready(await client.order(order, key), 30, 30)
    [answer] = outcome
    assert isinstance(answer, SandboxLostError)
    assert "may or may not" in str(answer)
    assert await place.containers(engine_url) == 0


async def test_keep_leaves_the_sandboxes_for_the_next_start(place, engine_url):
    key, order = uuid4().hex, SandboxOrder(spec=SPEC, lease_s=60)
    async with place.serving("--keep"), place.client() as client:
        first = await client.order(order, key)
    assert await place.containers(engine_url) >= 1
    async with place.serving(), place.client() as client:
        assert (await client.order(order, key)).id == first.id
    assert await place.containers(engine_url) == 0


async def test_two_services_cannot_share_a_state_folder(place):
    async with place.serving():
        process = place.flash("serve", *place.arguments[:1], f"unix:{place.folder / 't'}", *place.arguments[2:])
        await anyio.to_thread.run_sync(process.communicate)
        assert process.returncode == 2


async def test_a_front_places_sandboxes_on_another_service(place, tmp_path_factory, engine_url):
    folder = tmp_path_factory.mktemp("front")
    front = Place(folder, engine_url)
    async with place.serving():
        host = f"--host=there={place.url}={place.folder / 'tokens'}"
        async with front.serving(host), front.client() as client:
            async with client.acquire(SPEC) as sandbox:
                assert (await sandbox.run("echo through", timeout=10)).stdout == b"through\n"
                assert (await client.list())[0].host == "there"
            assert [info.state for info in await client.list()] == []
    assert await place.containers(engine_url) == 0


async def test_the_removed_shell_says_what_replaces_it():
    done = await anyio.run_process([sys.executable, "-m", "flash", "sandbox", "shell", "--in", "x"], check=False)
    assert done.returncode == 2
    assert b"flash sandbox run --in ID COMMAND" in done.stderr


async def test_a_run_whose_service_cannot_be_reached_has_no_result_either(unreachable):
    output, error = await anyio.to_thread.run_sync(unreachable.communicate)
    assert has_no_result(unreachable.returncode, output, error)
