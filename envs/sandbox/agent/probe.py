"""Measures a sandbox's permissions from inside, and prints one JSON object.

`envs.sandbox.doctor` copies this file into a sandbox and runs it there as a program: Python 3.6, standard library only.
Its arguments are the working directory and the network of the spec. It is no part of the agent.

`facts` are settings that the kernel reports. `attempts` are actions that must fail: the name of the error that stopped
each, or `worked`. Each attempt is a function that returns if the action worked, and raises OSError if it was stopped;
`attempt` calls it in a child process. No action harms a sandbox that is set up correctly.
"""

import ctypes
import errno
import json
import mmap
import os
import platform
import resource
import socket
import sys

libc = ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWNET = 0x20000, 0x10000000, 0x40000000
"""Flags of `unshare`: new namespaces for mounts, users and networks."""
SYSCALLS = {
    "init_module": (175, 105),
    "kexec_load": (246, 104),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "keyctl": (250, 219),
    "userfaultfd": (323, 282),
    "open_by_handle_at": (304, 265),
    "add_key": (248, 217),
    "io_uring_setup": (425, 425),
    "pivot_root": (155, 41),
    "iopl": (172, None),
    "ioprio_set": (251, 30),
}
"""Numbers of system calls on x86-64 and on ARM; None if ARM has no such call."""
ADDRESSES = {
    "metadata service": ("169.254.169.254", 80),
    "private network": ("10.0.0.1", 80),
    "internet": ("1.1.1.1", 53),
    "engine": ("172.17.0.1", 2375),
}
"""Addresses that a sandbox without a network must not reach: IP address and port."""
AF_ALG, AF_VSOCK = 38, 40
"""Families of sockets of the kernel's ciphers and of the hypervisor, for which Python 3.6 has no names."""
PRIO_PROCESS, PRIO_USER, IOPRIO_PROCESS, IOPRIO_USER = 0, 2, 1, 3
"""Kinds of targets of `setpriority` and `ioprio_set`: one process, or all processes of a user."""
CONTROLS = ("release_agent", "cgroup.procs", "memory.max", "memory.limit_in_bytes", "pids.max")
"""Files of a control group that a sandbox must not write to."""
ENGINE_SOCKETS = (
    "/run/docker.sock",
    "/var/run/docker.sock",
    "/run/podman/podman.sock",
    "/run/containerd/containerd.sock",
)
"""Sockets of engines, which a sandbox must not find: an engine gives root on the machine."""


def call(function: object, *arguments: object) -> None:
    """Call a function of libc that must not succeed. Raises OSError with its error."""
    ctypes.set_errno(0)
    if function(*arguments) == -1:
        raise OSError(ctypes.get_errno(), "")


def system_call(name: str, *arguments: int) -> None:
    """Make a system call that must not succeed. Raises OSError with its error."""
    number = SYSCALLS[name][0 if platform.machine() == "x86_64" else 1]
    if number is None:
        raise OSError(errno.ENOSYS, "")
    call(libc.syscall, number, *(ctypes.c_long(argument) for argument in arguments))


def read(path: str) -> None:
    """Read from a file. Raises OSError if it cannot be read or is empty.

    Engines hide some files behind an empty one, which counts as missing.
    """
    with open(path, "rb") as file:
        if not file.read(16):
            raise OSError(errno.ENOENT, "")


def write(path: str) -> None:
    """Open a file for writing."""
    os.close(os.open(path, os.O_WRONLY))


def create(path: str) -> None:
    """Create a file and remove it."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
    os.unlink(path)


def connect(address: tuple) -> None:
    """Connect to an address (IP address, port) over the network. Raises OSError, also after 2 s without answer."""
    with socket.socket() as connection:
        connection.settimeout(2)
        connection.connect(address)


def exists(paths: tuple) -> None:
    """Find a file of `paths`, none of which may exist. Raises OSError if there is none."""
    if not any(os.path.exists(path) for path in paths):
        raise OSError(errno.ENOENT, "")


def raw(family: int, kind: int) -> None:
    """Open a raw or packet socket, with which a program can read or forge traffic. 255 is the protocol IPPROTO_RAW.

    `family` and `kind` are constants of the module `socket`.
    """
    socket.socket(family, kind, 255 if family == socket.AF_INET else 0).close()


def set_limit(pid: int, which: int) -> None:
    """Set the limit `which` (RLIMIT_…) of a process to the value that it has: an attempt that works changes nothing."""
    resource.prlimit(pid, which, resource.prlimit(pid, which))


def open_socket(family: int, kind: int) -> None:
    """Open a socket that is not connected. `family` and `kind` are constants of the module `socket`."""
    socket.socket(family, kind).close()


def use_32_bits() -> None:
    """Make a 32-bit system call (getpid). The rules of a 64-bit seccomp filter do not cover it.

    Raises OSError if the kernel refuses it, and on other processors. A filter may also kill the process.
    """
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, "")
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    # mov eax, 20; int 0x80; ret
    code.write(b"\xb8\x14\x00\x00\x00\xcd\x80\xc3")
    function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    if function() != os.getpid():
        raise OSError(errno.ENOSYS, "")


def see_processes_of_the_host() -> None:
    """See processes outside the sandbox. Raises OSError if process 1 is the agent."""
    with open("/proc/1/cmdline", "rb") as file:
        # Process 1 of a sandbox is the agent, whose command line has the text of `envs.sandbox.engines.bundle.LOADER`.
        if b"def get(n)" in file.read():
            raise OSError(errno.ESRCH, "")


def kill_the_agent() -> None:
    """Kill the first process of the sandbox. The kernel ignores signals to it that it does not handle.

    Raises OSError if it still runs.
    """
    os.kill(1, 9)
    os.kill(1, 19)
    # The calls succeed although the signals (SIGKILL, SIGSTOP) are ignored. An agent that still runs was not hit.
    with open("/proc/1/stat", "rb") as file:
        if file.read().rpartition(b")")[2].split()[0] in (b"S", b"R"):
            raise OSError(errno.EPERM, "")


def change_control_groups() -> None:
    """Open a file of a control group for writing. With one, a program could lift its limits, or escape: the machine's
    kernel runs the program of `release_agent` when a group is empty. Raises OSError if there is no such file."""
    for folder, _, files in os.walk("/sys/fs/cgroup"):
        for name in files:
            if name in CONTROLS and os.access(os.path.join(folder, name), os.W_OK):
                write(os.path.join(folder, name))
                return
    raise OSError(errno.EROFS, "")


def see_what_others_hold() -> None:
    """Read locks, keys and counters of the whole machine, over which sandboxes could exchange data.

    Raises OSError if all of these files are hidden or empty.
    """
    for path in ("/proc/locks", "/proc/key-users", "/proc/sys/fs/aio-nr", "/proc/sys/kernel/pty/nr"):
        if content(path):
            return
    raise OSError(errno.EACCES, "")


ATTEMPTS = {
    "mount a file system": lambda: call(libc.mount, b"none", b"/tmp", b"tmpfs", 0, None),
    "unmount /proc": lambda: call(libc.umount2, b"/proc", 2),
    "new user namespace": lambda: call(libc.unshare, CLONE_NEWUSER),
    "new mount namespace": lambda: call(libc.unshare, CLONE_NEWNS),
    "new network namespace": lambda: call(libc.unshare, CLONE_NEWNET),
    "enter a namespace": lambda: call(libc.setns, os.open("/proc/self/ns/net", os.O_RDONLY), 0),
    "chroot": lambda: os.chroot("/tmp"),
    "pivot_root": lambda: system_call("pivot_root", 0, 0),
    "make a device": lambda: os.mknod("/tmp/disk", 0o60600, os.makedev(8, 0)),
    "become root": lambda: os.setuid(0),
    "set the host name": lambda: socket.sethostname("escaped"),
    "set the clock": lambda: call(libc.settimeofday, ctypes.create_string_buffer(16), None),
    "load a kernel module": lambda: system_call("init_module", 0, 0, 0),
    "load a kernel": lambda: system_call("kexec_load", 0, 0, 0, 0),
    "load a BPF program": lambda: system_call("bpf", 5, 0, 0),
    "open a performance counter": lambda: system_call("perf_event_open", 0, 0, -1, -1, 0),
    "use the kernel's keys": lambda: system_call("keyctl", 0, -4, 1),
    "handle page faults": lambda: system_call("userfaultfd", 0),
    "open a file by its number": lambda: system_call("open_by_handle_at", -100, 0, 0),
    "reach I/O ports": lambda: system_call("iopl", 3),
    "trace the agent": lambda: call(libc.ptrace, 16, 1, 0, 0),
    "read the agent's memory": lambda: os.close(os.open("/proc/1/mem", os.O_RDONLY)),
    "use the agent's descriptors": lambda: os.close(os.open("/proc/1/fd/1", os.O_WRONLY)),
    "kill the agent": kill_the_agent,
    # These set the values that are already set: an attempt that works changes nothing.
    "limit the agent": lambda: set_limit(1, resource.RLIMIT_CORE),
    "change the agent's priority": lambda: os.setpriority(PRIO_PROCESS, 1, 0),
    "change the priority of all": lambda: os.setpriority(PRIO_USER, os.getuid(), 0),
    "change the agent's I/O priority": lambda: system_call("ioprio_set", IOPRIO_PROCESS, 1, 0),
    "change the I/O priority of all": lambda: system_call("ioprio_set", IOPRIO_USER, os.getuid(), 0),
    "change the agent's scheduling": lambda: os.sched_setscheduler(1, os.SCHED_OTHER, os.sched_param(0)),
    "choose the agent's CPUs": lambda: os.sched_setaffinity(1, os.sched_getaffinity(1)),
    "reach the hypervisor": lambda: open_socket(AF_VSOCK, socket.SOCK_STREAM),
    "use the kernel's ciphers": lambda: open_socket(AF_ALG, socket.SOCK_SEQPACKET),
    "use 32-bit system calls": use_32_bits,
    "see processes of the host": see_processes_of_the_host,
    "see what others hold": see_what_others_hold,
    "read physical memory": lambda: os.close(os.open("/dev/mem", os.O_RDONLY)),
    "read kernel memory": lambda: read("/proc/kcore"),
    "read the kernel's log": lambda: os.close(os.open("/dev/kmsg", os.O_RDONLY)),
    "set the core dump program": lambda: write("/proc/sys/kernel/core_pattern"),
    "send a system request": lambda: write("/proc/sysrq-trigger"),
    "change the kernel": lambda: write("/sys/kernel/uevent_helper"),
    "change control groups": change_control_groups,
    "find the engine's socket": lambda: exists(ENGINE_SOCKETS),
    "open a raw socket": lambda: raw(socket.AF_INET, socket.SOCK_RAW),
    "open a packet socket": lambda: raw(socket.AF_PACKET, socket.SOCK_RAW),
    "write to /usr": lambda: create("/usr/flash-doctor"),
    "write to /etc": lambda: create("/etc/flash-doctor"),
}
"""Attempts that must fail in every sandbox: a function by the name that `doctor` prints."""
NETWORK = {"connect to the " + name: (lambda address=address: connect(address)) for name, address in ADDRESSES.items()}
"""Attempts that must fail in a sandbox without a network, also by name."""


def attempt(function: object) -> str:
    """Return the outcome of an attempt: `worked`, or the name of the error that stopped it.

    `function` is called in a child process, so that it cannot change later attempts. The name of the error is that of
    its errno if it has one; `killed` means that the child was killed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            function()
            text = "worked"
        except OSError as error:
            text = errno.errorcode.get(error.errno, str(error)) if error.errno else str(error) or "refused"
        except BaseException as error:
            text = type(error).__name__
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    text = os.read(reading, 200).decode() or "killed"
    os.close(reading)
    os.waitpid(pid, 0)
    return text


def content(*paths: str) -> str:
    """Return the content of the first readable file, without spaces around it; empty if none can be read."""
    for path in paths:
        try:
            with open(path) as file:
                return file.read().strip()
        except OSError:
            continue
    return ""


def facts() -> dict:
    """Return a `dict` from the name of each setting to its value. `envs.sandbox.doctor` compares them with the profile.

    Settings of control groups and of /proc are texts as the kernel writes them; empty if it does not report them.
    `cpus` is a number of cores, None without a limit. `sizes` has the bytes of each file system by its path.
    `open_files` and `core` are hard limits, in descriptors and bytes.
    """
    status = dict(line.split(":\t", 1) for line in content("/proc/self/status").splitlines() if ":\t" in line)
    sizes = {}
    for path in ("/tmp", "/run", "/var/tmp", "/dev/shm", sys.argv[1]):
        info = os.statvfs(path)
        sizes[path] = info.f_blocks * info.f_frsize
    quota = content("/sys/fs/cgroup/cpu.max").split()
    if not quota:
        group = "/sys/fs/cgroup/cpu/cpu.cfs_"
        quota = [content(group + "quota_us"), content(group + "period_us")]
    return {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "capabilities": status.get("CapEff", "").strip(),
        "bounding": status.get("CapBnd", "").strip(),
        "no_new_privs": status.get("NoNewPrivs", "").strip(),
        "seccomp": status.get("Seccomp", "").strip(),
        "interfaces": sorted(line.split(":")[0].strip() for line in content("/proc/net/dev").splitlines()[2:]),
        "memory": content("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        "swap": content("/sys/fs/cgroup/memory.swap.max"),
        "memory_and_swap": content("/sys/fs/cgroup/memory/memory.memsw.limit_in_bytes"),
        "pids": content("/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/pids/pids.max"),
        "cpus": float(quota[0]) / float(quota[1]) if len(quota) == 2 and quota[0].isdigit() else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        "core": resource.getrlimit(resource.RLIMIT_CORE)[1],
        "sizes": sizes,
        "environment": sorted(os.environ),
        "host_name": socket.gethostname(),
        "kernel": content("/proc/version"),
    }


def probe() -> None:
    """Print facts and attempts as JSON. Attempts over the network, which may wait for an answer, run only if the
    sandbox should have no network."""
    tried = dict(ATTEMPTS)
    if sys.argv[2] == "none":
        tried.update(NETWORK)
    attempts = {name: attempt(function) for name, function in tried.items()}
    print(json.dumps({"facts": facts(), "attempts": attempts}))


if __name__ == "__main__":
    probe()
