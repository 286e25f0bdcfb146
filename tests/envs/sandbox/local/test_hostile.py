"""Programs that attack what runs and judges them, in real containers: none changes more than its own result."""

from __future__ import annotations

import contextlib
from contextlib import aclosing

import pytest

from envs.sandbox.api import Chunk, Spec
from envs.sandbox.engines import profiles
from envs.sandbox.engines.fake import FakeBackend
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import SandboxFileError, SandboxRefusedError

pytestmark = pytest.mark.anyio

LIMIT = 20.0
"""Seconds for commands that end by themselves; long, because the machine may be busy."""
CONTAINERS = pytest.mark.parametrize("kind", [pytest.param("containers", marks=pytest.mark.integration)])

ON_THE_AGENT = {
    "a CPU limit": "import resource as r; r.prlimit(1, r.RLIMIT_CPU, (0, 0))",
    "a memory limit": "import resource as r; r.prlimit(1, r.RLIMIT_AS, (0, 0))",
    "a limit of descriptors": "import resource as r; r.prlimit(1, r.RLIMIT_NOFILE, (0, 0))",
    "its priority": "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "its user's priority": "import os; os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "its I/O priority": "import ctypes; assert ctypes.CDLL(None).syscall(251, 1, 1, 3 << 13) == 0",
    "its scheduling": "import os; os.sched_setscheduler(1, os.SCHED_IDLE, os.sched_param(0))",
    "its CPUs": "import os; os.sched_setaffinity(1, {max(os.sched_getaffinity(0))})",
    "a hypervisor's socket": "import socket; socket.socket(40, socket.SOCK_STREAM)",
    "a TCP socket": "import socket; socket.socket()",
    "a netlink socket": "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
}
ON_ITSELF = (
    "import os, resource as r, socket; r.setrlimit(r.RLIMIT_CPU, (9, 9)); os.nice(1); "
    "os.sched_setaffinity(0, os.sched_getaffinity(0)); os.setpriority(os.PRIO_PROCESS, 0, 2); "
    "r.prlimit(1, r.RLIMIT_CPU); socket.socketpair(); socket.socket(socket.AF_UNIX)"
)
FILL = "for f in /work /tmp /run /var/tmp /dev/shm; do head -c 1G /dev/zero >$f/x; done; true"

IMPOSTOR = r"""
import os, sys, time
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
shell = int(sys.argv[1])
end = time.monotonic() + 20
while time.monotonic() < end:
    for process in {shell, *(int(name) for name in os.listdir("/proc") if name.isdigit())} - {os.getpid()}:
        try:
            ask = os.open(f"/proc/{process}/fd/0", os.O_RDONLY | os.O_NONBLOCK)
            tell = os.open(f"/proc/{process}/fd/199", os.O_WRONLY)
            text = os.read(ask, 1 << 16)
            token = text.split(b"printf '%s\\0' ")[1].split()[0]
            os.write(tell, token + b"\x000\x00/work\x00\x00")
        except (OSError, IndexError):
            continue
    try: os.write(1, b"ALL TESTS PASSED\n")
    except OSError: pass
    time.sleep(0.001)
"""
"""Stays after its command, takes the next one from the shell, and answers in its place."""


DISGUISE = r"""
import os, resource, time
def arguments(pid):
    try: return open(f"/proc/{pid}/cmdline").read().split("\0")
    except OSError: return []
job = next(pid for pid in os.listdir("/proc") if pid.isdigit() and arguments(pid)[:1] == ["sleep"])
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
for number in range(16):
    try: resource.setrlimit(number, resource.prlimit(int(job), number))
    except (ValueError, OSError): pass
environment = dict(one.partition("=")[::2] for one in open(f"/proc/{job}/environ").read().split("\0") if "=" in one)
os.execve("/bin/sh", ["sh", "-c", "sleep 441; :"], environment)
"""
"""Stays after its command, and makes itself as like a job's process as it can."""


@CONTAINERS
@pytest.mark.parametrize("first", [True, False])
async def test_what_looks_like_a_job_and_is_none_is_ended(bench, first):
    async with bench.sandbox() as sandbox:
        await sandbox.write("disguise.py", DISGUISE.encode())
        job = await sandbox.start("sleep 442") if first else None
        # Where it is later than the command, the command is still there when it begins.
        wait = "until grep -aqz '^442$' /proc/[0-9]*/cmdline; do sleep 0.01; done; python3 disguise.py"
        async with aclosing(sandbox.stream(f"echo begun; {wait}", timeout=LIMIT)) as stream:
            async for chunk in stream:
                if isinstance(chunk, Chunk) and job is None:
                    job = await sandbox.start("sleep 442")
        found = await sandbox.run("sleep 0.2; grep -ahoz '^44[12]$' /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=LIMIT)
        assert found.stdout.split() == [b"442"]
        assert job is not None
        await job.signal("SIGKILL")


@CONTAINERS
async def test_a_program_changes_neither_the_agent_nor_anything_outside(bench):
    async with bench.sandbox(memory_mib=128) as sandbox:
        for what, program in ON_THE_AGENT.items():
            answer = await sandbox.run(["python3", "-c", program], timeout=LIMIT)
            assert answer.exit_code == 1, what
            assert (
                b"Permission" in answer.stderr
                or b"not permitted" in answer.stderr
                or (b"not supported" in answer.stderr or b"AssertionError" in answer.stderr)
            ), (what, answer.stderr)
        assert (await sandbox.run(["python3", "-c", ON_ITSELF], timeout=LIMIT)).stderr == b""
        # Files everywhere leave room to work.
        await sandbox.run(FILL, timeout=LIMIT)
        answer = await sandbox.run(["python3", "-c", "print(len(bytes(8 << 20)))"], timeout=LIMIT)
        assert (answer.stdout, answer.oom_killed) == (b"8388608\n", False)


TAKE_ALL = r"""
import ctypes, itertools
libc = ctypes.CDLL(None)
count = next(n for n in itertools.count() if libc.inotify_init() < 0)
libc.mq_open.argtypes = (ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
queues = next(n for n in range(9999) if libc.mq_open(b"/q%d" % n, 0o102, 0o600, None) < 0)
print(count, queues, flush=True)
"""


WANT_OF_MEMORY = """
import os, time
for score in ("999", "0", "-1000"):
    try: open("/proc/self/oom_score_adj", "w").write(score)
    except OSError: continue
    print("lowered", flush=True)
while True:
    try:
        if os.fork() == 0:
            held = bytearray(3 << 20)
            time.sleep(9)
            os._exit(0)
    except OSError:
        time.sleep(9)
"""
"""Many processes, each smaller than the agent, and worth more to the kernel if that lets them."""


@CONTAINERS
async def test_want_of_memory_ends_the_program_and_not_the_agent(bench):
    async with bench.sandbox(memory_mib=96, pids=64) as sandbox, sandbox.session() as session:
        for runner in (sandbox, session):
            # From the first moment on: what it starts at once has it from there.
            scores = await runner.run(
                "own=$(cat /proc/self/oom_score_adj); sleep 0.2; echo $own $(cat /proc/1/oom_score_adj)", timeout=LIMIT
            )
            assert scores.stdout == b"1000 500\n"
        answer = await sandbox.run(["python3", "-c", WANT_OF_MEMORY], timeout=2)
        assert answer.stdout == b""
        assert answer.oom_killed
        assert (await sandbox.run(["echo", "works"], timeout=LIMIT)).stdout == b"works\n"


@CONTAINERS
async def test_what_the_kernel_counts_by_user_is_not_taken_from_other_sandboxes(bench):
    async with bench.sandbox(memory_mib=128) as greedy, bench.sandbox(memory_mib=128) as other:
        assert greedy.hello.uid != other.hello.uid
        command = ["python3", "-c", f"{TAKE_ALL}import time; time.sleep(60)"]
        async with aclosing(greedy.stream(command, timeout=60)) as stream:
            assert isinstance(await anext(stream), Chunk)
            left = (await other.run(["python3", "-c", TAKE_ALL], timeout=LIMIT)).stdout.split()
        assert int(left[0]) >= 100
        assert int(left[1]) > 0


@CONTAINERS
async def test_nothing_that_a_command_of_a_session_leaves_answers_for_the_next(bench):
    async with bench.sandbox(memory_mib=128) as sandbox, sandbox.session() as session:
        await sandbox.write("impostor.py", IMPOSTOR.encode())
        for _ in range(5):
            await session.run("python3 impostor.py $$ 2>/dev/null", timeout=LIMIT)
            answer = await session.run("sleep 0.1; (exit 7)", timeout=LIMIT)
            assert (answer.exit_code, answer.stdout.replace(b"ALL TESTS PASSED\n", b"")) == (7, b"")
            assert (await session.run("sleep 0.05; echo mine", timeout=LIMIT)).stdout == b"mine\n"
        # Neither does it while it is the shell's own job, or the very command.
        for text in ("python3 impostor.py $$ & sleep 0.3; (exit 7)", "python3 impostor.py $$; sleep 0.3; (exit 7)"):
            assert (await session.run(text, timeout=LIMIT)).exit_code == 7
            assert (await session.run("kill %1 2>/dev/null; true", timeout=LIMIT)).exit_code == 0


@CONTAINERS
async def test_the_shell_shows_its_descriptors_and_its_memory_to_nobody(bench):
    look = 'import os\nfor name in ("fd/0", "mem", "environ"): os.open("/proc/%d/%s" % (os.getppid(), name), 0)'
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        for text in (f"python3 -c '{look}'; :", f"(python3 -c '{look}'; :); :", f"echo $(python3 -c '{look}'; :)"):
            answer = await session.run(text, timeout=LIMIT)
            assert b"PermissionError" in answer.stderr


async def test_jobs_of_a_shell_go_on_and_what_they_lose_does_not(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session, sandbox.session("other") as other:
        job = await sandbox.start("(sleep 331 &); sleep 332")
        await session.run("sleep 333 & (sleep 334 &)", timeout=LIMIT)
        await other.run("(sleep 335 &)", timeout=LIMIT)
        # The shells of those that stay may still be on their way to them.
        there = " && ".join(f"grep -aqz '^{name}$' /proc/[0-9]*/cmdline" for name in (331, 332, 333))
        await session.run(f"until {there}; do sleep 0.01; done", timeout=LIMIT)
        found = await session.run("grep -ahoz '^33[0-9]$' /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=LIMIT)
        assert sorted(found.stdout.split()) == [b"331", b"332", b"333"]
        await job.signal("SIGKILL")
        assert (await session.run("kill %1 && wait %1", timeout=LIMIT)).exit_code == 143


@pytest.mark.parametrize("end", ["exit 3", "sleep 60"])
async def test_jobs_go_on_when_a_later_command_ends_the_shell(bench, end):
    async with bench.sandbox() as sandbox, sandbox.session() as session:

        async def sleepers() -> list[bytes]:
            found = await session.run("grep -ahoz '^34[0-9]$' /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=LIMIT)
            return sorted(found.stdout.split())

        # The second job starts its sleeper only while the last command runs.
        await session.run("sleep 341 & (until [ -e go ]; do sleep 0.01; done; sleep 342) &", timeout=LIMIT)
        there = "until grep -aqz '^342$' /proc/[0-9]*/cmdline; do sleep 0.01; done"
        answer = await session.run(f"sleep 343 & touch go; {there}; {end}", timeout=5)
        assert answer.timed_out == (end == "sleep 60")
        for _ in range(2):
            assert await sleepers() == [b"341", b"342"]
        assert (await sandbox.run("true", timeout=LIMIT)).ok
        assert await sleepers() == [b"341", b"342"]
    async with bench.sandbox() as sandbox:
        async with sandbox.session() as session:
            await session.run("sleep 341 &", timeout=LIMIT)
            await session.run("exit 3", timeout=LIMIT)
            assert (await session.run("true", timeout=LIMIT)).ok
        left = await sandbox.run("cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=LIMIT)
        assert b"sleep 341" not in left.stdout


def test_files_in_memory_leave_room_for_programs():
    for memory in (64, 128, 256, 512, 4096):
        assert sum(profiles.sizes_mib(Spec(image="any", memory_mib=memory)).values()) <= memory - 32
    assert profiles.disk_mib(Spec(image="any")) == 256
    assert profiles.disk_mib(Spec(image="any", memory_mib=64, profile="build")) == 256


@pytest.mark.parametrize("profile", ["strict", "build", "compat"])
def test_file_systems_in_memory_have_so_many_files_where_the_engine_can(profile):
    spec = Spec(image="any", memory_mib=512, profile=profile)
    for able in (True, False):
        config = profiles.container(spec, {}, user=None, owned_tmpfs=able, seccomp=None)["HostConfig"]
        assert all((",nr_inodes=" in options) == able for options in config["Tmpfs"].values())
    # Full of empty files with the longest names they leave room for programs too.
    assert sum(profiles.sizes_mib(spec).values()) * profiles.INODES_PER_MIB * 1024 < (512 - 384) << 20


async def test_more_room_for_files_than_there_is_memory_is_refused_before_anything_starts():
    async with FakeBackend() as backend:
        with pytest.raises(SandboxRefusedError, match=r"memory_mib = 128, disk_mib can be at most 68, not 100"):
            LocalSandbox(backend, Spec(image="any", memory_mib=128, disk_mib=100))


FLOOD = r"""
import os, re, socket, time
name = next(name for name in re.findall(r"@(\S+)", open("/proc/net/unix").read()))
held = []
print("begun", flush=True)
while True:
    try:
        held = held[-40:]
        for _ in range(40):
            held.append(socket.socket(socket.AF_UNIX))
            held[-1].connect("\0" + name)
    except OSError:
        pass
    time.sleep(0.001)
"""
"""Holds all the places of those who might be a host that takes over, and asks for more."""


@CONTAINERS
async def test_a_flood_at_the_socket_for_hosts_keeps_no_host_out(bench):
    async with bench.sandbox() as first:
        await first.start(["python3", "-c", FLOOD])
        full = "until [ $(grep -c @ /proc/net/unix) -gt 16 ]; do sleep 0.01; done"
        assert (await first.run(full, timeout=LIMIT)).ok
        async with LocalSandbox(bench.backend, first.spec, adopt=first.container_id) as second:
            assert (await second.run("echo on", timeout=LIMIT)).stdout == b"on\n"


LEASE = r"""
import fcntl, os, signal
signal.signal(signal.SIGIO, signal.SIG_IGN)
fcntl.fcntl(os.open("program", os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
signal.pause()
"""
"""Whoever opens or runs the program has to wait for as long as the machine lets a lease be broken."""


@CONTAINERS
async def test_a_lease_on_a_program_holds_up_nobody_else(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.write("program", b"#!/bin/sh\necho ran\n", mode=0o755)
        async with aclosing(sandbox.stream(["python3", "-c", LEASE], timeout=60)) as stream:
            assert isinstance(await anext(stream), Chunk)
            assert (await sandbox.run(["./program"], timeout=1)).timed_out
            with pytest.raises(SandboxFileError, match="temporarily unavailable"):
                await sandbox.read("program")


async def test_a_program_that_cannot_begin_fails_as_in_a_shell(bench):
    async with bench.sandbox() as sandbox:
        await sandbox.write("program", b"#!/no/such/shell\n", mode=0o755)
        answer = await sandbox.run(["./program"], timeout=LIMIT)
        assert (answer.exit_code, answer.stderr) == (126, b"./program: No such file or directory\n")


async def test_a_shell_that_shows_what_it_reads_shows_nothing_of_ours(bench):
    async with bench.sandbox() as sandbox, sandbox.session() as session:
        assert (await session.run("set -v; false", timeout=LIMIT)).exit_code == 1
        for _ in range(2):
            answer = await session.run("echo shown\necho $-; (exit 3)", timeout=LIMIT)
            assert answer.exit_code == 3
            assert answer.stdout.startswith(b"shown\n")
            assert b"v" in answer.stdout.splitlines()[1]
            assert answer.stderr == b"echo shown\necho $-; (exit 3)\n"
        assert (await session.run("set +v", timeout=LIMIT)).ok
        assert (await session.run("echo quiet", timeout=LIMIT)).stderr == b""


SIGN = r"""
import fcntl, os, struct
held = os.open("/work/held", os.O_RDWR | os.O_CREAT)
for at in range(0, 200, 2):
    fcntl.fcntl(held, 37, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, at, 1, 0))
print("held", flush=True)
import time; time.sleep(60)
"""
"""Locks that belong to a descriptor and not to a process, by whose places something could be said."""
READ = "cd /proc/sys/fs; cat /proc/locks /proc/key-users /proc/sys/kernel/pty/nr {aio,file,inode}-nr *-state"


@CONTAINERS
async def test_what_one_sandbox_holds_tells_another_one_nothing(bench):
    async with (
        bench.sandbox(memory_mib=128) as first,
        bench.sandbox(memory_mib=128) as second,
        aclosing(first.stream(["python3", "-c", SIGN], timeout=60)) as stream,
    ):
        assert isinstance(await anext(stream), Chunk)
        seen = await second.run(READ, timeout=LIMIT)
        assert (seen.exit_code, seen.stdout) == (0, b"")


def test_an_engine_that_replaces_its_list_of_masked_paths_gets_all_of_them():
    for able in (True, False):
        config = profiles.container(Spec(image="any"), {}, user=None, owned_tmpfs=True, seccomp=None, mask_option=able)[
            "HostConfig"
        ]
        masked = config.get("MaskedPaths") or config["SecurityOpt"][-1].removeprefix("mask=").split(":")
        assert "/proc/locks" in masked
        assert ("/proc/kcore" in masked) != able


TRAPS = ("_flash=xyz", "_flash=999", "_flash=", "_flash=-1", "_flash=' 7'", "_flash=1_0", "printf -v _flash %9999999s")
"""Commands for a trap, each of which is set in a session of its own."""


async def test_a_trap_that_changes_what_the_shell_says_ends_neither_the_agent_nor_the_session(bench):
    async with bench.sandbox(memory_mib=128) as sandbox:
        for trap in TRAPS:
            async with sandbox.session() as session:
                assert (await session.run("x=kept", timeout=LIMIT)).ok
                with contextlib.suppress(SandboxRefusedError):
                    await session.run(f'set -T; trap "{trap}" DEBUG', timeout=LIMIT)
                with contextlib.suppress(SandboxRefusedError):
                    await session.run("true", timeout=LIMIT)
                assert sandbox.state == "ready", trap
                answer = await session.run("trap - DEBUG; echo $x", timeout=LIMIT)
                assert answer.stdout == b"kept\n", trap
                assert (await session.run("(exit 7)", timeout=LIMIT)).exit_code == 7, trap
