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
    "a daemon": f"python3 -c '{_DAEMON}'",
    "a daemon that ignores what it can, without its mark": f"env -i /usr/bin/python3 -c '{_DEAF}'",
    "a name in the abstract namespace": (
        'python3 -c \'import socket,os\ns=socket.socket(socket.AF_UNIX)\ns.bind("\\0x")\ns.listen()\n'
        "if os.fork()==0: os.setsid(); import time; time.sleep(99)' >/dev/null 2>&1"
    ),
    "a program in the place of another": "mkdir /work/bin; echo 'exit 0' >/work/bin/find; cp /work/bin/find /tmp/cat",
}
"""It is removed, and the sandbox used again."""

_PRLIMIT = "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (99, 4096))"
_NICE = "import os; os.setpriority(os.PRIO_PROCESS, 1, 5)"
_CPU = "import os; os.sched_setaffinity(1, {max(os.sched_getaffinity(0))})"
_BATCH = "import os; os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))"
_SHARED = "import ctypes; ctypes.CDLL(None).shmget(0x42, 4096, 0o1666)"
_QUEUE = "import ctypes; ctypes.CDLL(None).msgget(0x42, 0o1666)"
_SEMAPHORE = "import ctypes; ctypes.CDLL(None).semget(0x42, 1, 0o1666)"
_TIME_WAIT = (
    "import socket; s = socket.create_server(('127.0.0.1', 4567)); c = socket.create_connection(('127.0.0.1', 4567)); "
    "a, _ = s.accept(); a.close(); c.close()"
)
STAYS = {
    "a folder that nobody may enter": "mkdir -p /tmp/a/b; chmod 0 /tmp/a",
    "System V memory": f'python3 -c "{_SHARED}"',
    "a System V queue": f'python3 -c "{_QUEUE}"',
    "a System V semaphore": f'python3 -c "{_SEMAPHORE}"',
    "a limit of the agent": f"python3 -c '{_PRLIMIT}'",
    "the priority of the agent": f"python3 -c '{_NICE}'",
    "the scheduling of the agent": f"python3 -c '{_BATCH}'",
    "the CPUs of the agent": f"python3 -c '{_CPU}'",
    "a port that is not free yet": f'python3 -c "{_TIME_WAIT}"',
}
"""It is found, and the sandbox is not used again."""


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

    async def leave(name: str, command: str, stays: bool) -> None:
        async with LocalSandbox(engine, Spec(image=IMAGE), labels=labels) as sandbox:
            new = await look(sandbox)
            assert new is not None
            assert new == await look(sandbox)
            assert await wipe(sandbox, new)
            await sandbox.run(command, timeout=20)
            changed = await look(sandbox) != new
            clean = await wipe(sandbox, new)
            if not changed:
                wrong.append(f"{name} had no effect")
            if clean == stays:
                wrong.append(f"{name}: clean is {clean}")
            if clean and (left := await _left(sandbox)):
                wrong.append(f"{name} left {left}")

    for commands, stays in [(GONE, False), (STAYS, True)]:
        for name, command in commands.items():
            await leave(name, command, stays)
    assert not wrong


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
