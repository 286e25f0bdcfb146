"""What a program may leave behind in a real container, and that none of it meets the next one."""

from __future__ import annotations

import anyio
import pytest

from envs.sandbox.api import Spec
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.local.sandbox import LocalSandbox
from envs.sandbox.reuse.wipe import look, wipe
from tests.envs.sandbox.conftest import IMAGE

_POSIX_QUEUE = "import ctypes; ctypes.CDLL(None).mq_open(b'/x', 0o102, 0o666, None)"
_DAEMON = (
    "import os, time; os.fork() and (time.sleep(0.3), os._exit(0)); "
    "os.setsid(); os.fork() and os._exit(0); time.sleep(99)"
)
_DEAF = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 15)]; " + _DAEMON
GONE = {
    "a POSIX queue": f'python3 -c "{_POSIX_QUEUE}"',
    "files everywhere": "for f in /work /tmp /run /var/tmp /dev/shm; do mkdir -p $f/a/.b; echo x >$f/a/.b/c; done",
    "links, pipes and sockets": "ln -s / /work/l; mkfifo /tmp/p; ln /tmp/p /tmp/q",
    "a program in the place of another": "mkdir bin; echo 'exit 0' >bin/find; cp bin/find /tmp/cat",
}
"""It is removed, and the sandbox used again."""

ENDED = {
    "a daemon": f"python3 -c '{_DAEMON}'",
    "a daemon that ignores what it can, without its mark": f"env -i /usr/bin/python3 -c '{_DEAF}'",
    "a name in the abstract namespace": (
        'python3 -c \'import socket,os\ns=socket.socket(socket.AF_UNIX)\ns.bind("\\0x")\ns.listen()\n'
        "if os.fork()==0: os.setsid(); import time; time.sleep(99)' >/dev/null 2>&1"
    ),
}
"""It is ended before the next command begins, and the sandbox used again."""

_SHARED = "import ctypes; ctypes.CDLL(None).shmget(0x42, 4096, 0o1666)"
_QUEUE = "import ctypes; ctypes.CDLL(None).msgget(0x42, 0o1666)"
_SEMAPHORE = "import ctypes; ctypes.CDLL(None).semget(0x42, 1, 0o1666)"
STAYS = {
    "a folder that nobody may enter": "mkdir -p /tmp/a/b; chmod 0 /tmp/a",
    "System V memory": f'python3 -c "{_SHARED}"',
    "a System V queue": f'python3 -c "{_QUEUE}"',
    "a System V semaphore": f'python3 -c "{_SEMAPHORE}"',
}
"""It is found, and the sandbox is not used again."""


_PLACES = ("/work", "/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/dev/null", "/dev/ptmx")


async def _left(sandbox: LocalSandbox) -> list[str]:
    """Processes beside the agent and our own, and files."""
    found = await sandbox.run(
        "ps -e -o comm=; ls -A /work /tmp /run /var/tmp /dev/shm /dev/mqueue | grep -v :", timeout=10
    )
    return [line for line in found.stdout.decode().split() if line not in ("python3", "bash", "ps")]


@pytest.mark.anyio
@pytest.mark.integration
async def test_a_container_is_clean_after_a_wipe_or_known_not_to_be(containers):
    engine, labels = containers
    wrong: list[str] = []

    async def leave(name: str, command: str, stays: bool, seen: bool) -> None:
        async with LocalSandbox(engine, Spec(image=IMAGE), labels=labels) as sandbox:
            new = await look(sandbox)
            assert new is not None
            assert new == await look(sandbox)
            assert await wipe(sandbox, new)
            await sandbox.run(command, timeout=20)
            changed = await look(sandbox) != new
            clean = await wipe(sandbox, new)
            if changed != seen:
                wrong.append(f"{name}: a difference is {changed}")
            if clean == stays:
                wrong.append(f"{name}: clean is {clean}")
            if clean and (left := await _left(sandbox)):
                wrong.append(f"{name} left {left}")

    for commands, stays, seen in [(GONE, False, True), (ENDED, False, False), (STAYS, True, True)]:
        for name, command in commands.items():
            await leave(name, command, stays, seen)
    assert not wrong


@pytest.mark.anyio
@pytest.mark.integration
async def test_the_times_of_what_stays_tell_nothing_of_the_program_before(containers):
    engine, labels = containers
    async with LocalSandbox(engine, Spec(image=IMAGE), labels=labels) as sandbox:
        new = await look(sandbox)
        assert new is not None
        await sandbox.run("touch x /tmp/x /var/tmp/x /dev/shm/x; cat /dev/mqueue; touch /dev/null", timeout=10)
        await anyio.sleep(1.1)
        begin = int((await sandbox.run(["date", "+%s"], timeout=10)).stdout)
        assert await wipe(sandbox, new)
        times = (await sandbox.run(["stat", "-L", "-c", "%X %Y %Z", *_PLACES], timeout=10)).stdout.decode().split()
        assert len(times) == 3 * len(_PLACES)
        assert min(map(int, times)) >= begin


_ATTRIBUTES = (
    "import os\n"
    "for place in ('/work', '/tmp', '/run', '/var/tmp', '/dev/shm'):\n"
    "    try: os.{}xattr(place, 'user.note'{})\n"
    "    except OSError: continue\n"
    "    print(place)\n"
)


@pytest.mark.anyio
@pytest.mark.integration
async def test_attributes_of_folders_that_stay_tell_nothing_of_the_program_before(containers):
    """Whoever may write to a folder may give it some, unless it is one like /tmp."""
    engine, labels = containers
    async with LocalSandbox(engine, Spec(image=IMAGE, profile="compat"), labels=labels) as origin:
        assert (await origin.run("chmod 777 /work", timeout=20)).ok
        spec = Spec(image=(await origin.snapshot()).spec.image)
        async with LocalSandbox(engine, spec, labels=labels) as sandbox:
            new = await look(sandbox)
            assert new is not None
            noted = await sandbox.run(["python3", "-c", _ATTRIBUTES.format("set", ", b'x'")], timeout=20)
            assert noted.stdout == b"/work\n"
            assert await look(sandbox) != new
            assert await wipe(sandbox, new)
            assert (await sandbox.run(["python3", "-c", _ATTRIBUTES.format("get", "")], timeout=20)).stdout == b""
        await engine.images.remove(spec.image)


@pytest.mark.anyio
@pytest.mark.integration
async def test_nobody_is_left_to_deceive_a_look(containers):
    """A program that turns into many, each of which attacks whatever starts."""
    engine, labels = containers
    swarm = (
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0: os.setsid(); break\n"
        "while os.getppid() != 0:\n"
        "    for pid in [int(name) for name in os.listdir('/proc') if name.isdigit()]:\n"
        "        if pid not in (1, os.getpid()):\n"
        "            try: open(f'/proc/{pid}/mem', 'r+b').close()\n"
        "            except OSError: pass\n"
    )
    async with LocalSandbox(engine, Spec(image=IMAGE), labels=labels) as sandbox:
        new = await look(sandbox)
        assert new is not None
        job = await sandbox.start(["python3", "-c", swarm])
        await sandbox.run("sleep 0.3", timeout=5)
        # A command of ours still runs: then nothing is killed, and nothing called clean.
        assert not await wipe(sandbox, new)
        await job.signal("SIGKILL")
        for _ in range(5):
            await sandbox.run(["bash", "-c", 'python3 -c "$0" & sleep 0.3', swarm], timeout=5)
            # Where many are slow to die it is not clean; it must not be called clean while any of them lives.
            assert not (await wipe(sandbox, new) and await _left(sandbox))


@pytest.mark.anyio
async def test_outside_of_a_container_nothing_is_looked_at_and_nothing_removed(tmp_path):
    async with FakeBackend() as backend, LocalSandbox(backend, Spec(image="any")) as sandbox:
        assert await look(sandbox) is None
        with anyio.fail_after(30):
            assert (await sandbox.run("echo here >file; cat file", timeout=5)).stdout == b"here\n"
