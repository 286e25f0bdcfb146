"""Hosts on this machine: network namespaces that are connected by a wire, for benchmarks and tests of several machines.

A process on a host sees the host's name, its address and its folder for temporary files. The wire can be cut. Hosts
need root and iproute2. The namespaces, and everything that runs in them, end with the `with` block of `Hosts`
(`benchmarks.rig.kept`).
"""

from __future__ import annotations

import ctypes
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.from_thread import start_blocking_portal

from benchmarks.rig.kept import Kept, processes_in

_T = TypeVar("_T")

NEEDED = ("ip", "ss", "nsenter", "unshare")
"""Commands that making hosts needs."""
CLONE_NEWNET = 0x40000000
"""Flag of Linux for network namespaces, which Python's library does not name before version 3.12."""

# Python's `socket` does not have the next five names.
SOL_PACKET, PACKET_VNET_HDR = 263, 15
"""Level and option of a socket that puts a header before each frame."""
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
"""Options that set the sizes of a socket's buffers beyond the usual limits."""
EVERY_PROTOCOL = 3
"""Protocol number ETH_P_ALL: a socket that receives every frame."""
HEADER_BYTES = 10
"""Bytes of the header before each frame (virtio_net_hdr): checksums and splitting that the kernel has left undone."""
ADDRESS_BYTES = 6
"""Bytes of an Ethernet address. A frame begins with the address of its destination."""
FRAME_BYTES = 1 << 17
"""Bytes of a buffer that holds any frame."""
WAITING_BYTES = 1 << 25
"""Bytes of the buffer of a port's socket, in each direction."""
FRAMES_AT_ONCE = 64
"""Frames that are taken from one host before the others get their turn."""

INSIDE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
"""Shell command that each process runs first, in mount and host name namespaces of its own. Its arguments are the file
with the names of the hosts, the name of its host, and the command to run."""


def mac(host: int) -> str:
    """Return the Ethernet address by which the wire knows a host."""
    return f"02:00:00:00:00:{host + 1:02x}"


def targets(frame: bytes, source: int, hosts: int) -> list[int]:
    """Return the hosts that a frame is for, except its sender. `hosts` is the number of all hosts.

    The last byte of the destination address names one host (`mac`). A broadcast or multicast address, whose first byte
    is odd, is for all hosts.
    """
    address = frame[HEADER_BYTES : HEADER_BYTES + ADDRESS_BYTES]
    if len(address) < ADDRESS_BYTES:
        return []
    if address[0] & 1:
        return [host for host in range(hosts) if host != source]
    host = address[-1] - 1
    return [host] if 0 <= host < hosts and host != source else []


def open_port(device: str) -> socket.socket:
    """Return a socket that receives and sends the frames of a device of this thread's network namespace.

    The caller closes it. Raises OSError without root, or if there is no such device.
    """
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK, 0)
    try:
        port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
        for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
            port.setsockopt(socket.SOL_SOCKET, option, WAITING_BYTES)
        port.bind((device, EVERY_PROTOCOL))
    except BaseException:
        port.close()
        raise
    return port


class Wire:
    """Switch that passes on the frames from one host to another, or stops them. `Hosts` runs it in a thread.

    It carries whole Ethernet frames from one end of a virtual link to another, in the form in which the kernel delivers
    them: up to 64 KiB long, without checksums, behind a header that says which work the kernel has left undone. The
    header is passed on with the frame. TCP sends lost frames again. The hosts need no change for it. Tests have a wire
    that is also slow and lossy. There is one port per host, in the order of the hosts.
    """

    def __init__(self, ports: Sequence[socket.socket]) -> None:
        self._ports = ports
        self.cuts: set[tuple[int, int]] = set()
        """Numbers of a source and a target between which no frame arrives. The way back has an entry of its own."""

    async def run(self) -> None:
        """Carry frames until cancelled.

        It consumes frames. It waits for the next frame of any port; a host that sends one unblocks it. It produces the
        same frames at other ports.
        """
        async with anyio.create_task_group() as tasks:
            for source in range(len(self._ports)):
                tasks.start_soon(self._carry, source, tasks)

    async def _carry(self, source: int, tasks: TaskGroup) -> None:
        """Pass on the frames of the host `source` until cancelled. `tasks` is for wires that give frames later."""
        port = self._ports[source]
        while True:
            await anyio.wait_readable(port)
            with suppress(BlockingIOError):  # no further frame has come
                for _ in range(FRAMES_AT_ONCE):
                    frame, address = port.recvfrom(FRAME_BYTES)
                    # The port also receives the frames that this program has sent through it.
                    if address[2] != socket.PACKET_OUTGOING:
                        self.pass_on(frame, source, tasks)

    def pass_on(self, frame: bytes, source: int, tasks: TaskGroup) -> None:
        """Give a frame to its targets, except where the way is cut. Subclasses may use `tasks` to give it later."""
        for target in targets(frame, source, len(self._ports)):
            if (source, target) not in self.cuts:
                self.give(frame, target)

    def give(self, frame: bytes, target: int) -> None:
        """Give a frame to a host."""
        with suppress(OSError):  # a host that takes no more loses it, as on any network
            self._ports[target].send(frame)


def why_no_hosts() -> str:
    """Return the reason why no hosts can be made here; empty if they can."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    try:
        subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=True, capture_output=True)
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no new namespaces, or no raw packets, are allowed here: {error}"
    return ""


class Hosts(Kept):
    """Hosts that exist from `with` to its end; they are numbered from 0 on, in the order of their names."""

    def __init__(self, *names: str) -> None:
        super().__init__("hosts")
        self.names = names
        self._switch = f"{self.folder.name}-wire"
        """Name of the network namespace of the wire, which holds one end of each link."""
        self.spaces = [f"{self.folder.name}-{host}" for host in range(len(names))]
        """Names of the hosts' network namespaces."""
        self._started: list[subprocess.Popen[bytes]] = []
        """Processes that `start` has started."""
        self._carrying = ExitStack()
        """Closes the wire's ports and ends its thread."""

    def begin(self) -> None:
        """Make a network namespace for each host and one for the wire, connect them with virtual links, and start the
        wire. `Kept` calls this at the beginning of the `with` block."""
        lines = [f"{self.address(host)} {name}\n" for host, name in enumerate(self.names)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        _ip("netns", "add", self._switch)
        for host, space in enumerate(self.spaces):
            self.scratch(host).mkdir()
            _ip("netns", "add", space)
            _ip(
                "-n", self._switch, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", space
            )
            _ip("-n", space, "link", "set", "eth0", "address", mac(host))
            _ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", space, "link", "set", device, "up")
            _ip("-n", self._switch, "link", "set", f"port{host}", "up")
        # The wire has a thread of its own, so that it and the caller do not wait for each other.
        ports = [
            self._carrying.enter_context(in_space(self._switch, lambda host=host: open_port(f"port{host}")))
            for host in range(len(self.names))
        ]
        portal = self._carrying.enter_context(start_blocking_portal())
        self._wire = self.make_wire(ports)
        carrying = portal.start_task_soon(self._wire.run)
        # At the end: a wire that has ended before had an error, which `result` raises.
        self._carrying.callback(lambda: carrying.result() if carrying.done() else carrying.cancel())

    def make_wire(self, ports: Sequence[socket.socket]) -> Wire:
        """Make the wire between the ports of the hosts. Subclasses may make another one."""
        return Wire(ports)

    def close(self) -> None:
        """End the processes on the hosts, and remove the hosts. Raises the error of a wire that failed meanwhile."""
        for host in range(len(self.names)):
            self.kill_all(host)
        for process in self._started:
            process.kill()
            process.wait()
        try:
            self._carrying.close()
        finally:
            super().close()

    # -- their processes ----------------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """Return the address of a host, to which its name resolves, too."""
        return f"10.77.0.{host + 1}"

    def scratch(self, host: int) -> Path:
        """Return a host's folder for temporary files."""
        return self.folder / str(host)

    def start(
        self, host: int, command: Sequence[str], *, output: Path, cwd: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host. Its output is appended to the file `output`.

        `variables` are added to the environment variables of this process and of the host. The process ends with the
        `with` block at the latest.
        """
        space = f"--net=/run/netns/{self.spaces[host]}"
        inside = ["nsenter", space, "unshare", "--uts", "--mount", "sh", "-c", INSIDE]
        with output.open("ab") as file:
            process = subprocess.Popen(
                [*inside, str(self.folder / "hosts"), self.names[host], *command],
                env={**os.environ, **self.variables(host), **variables},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def variables(self, host: int) -> dict[str, str]:
        """Return the environment variables that each process on a host has in addition."""
        # Compiled kernels are the same on all hosts, and take long to make.
        kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        return {"TMPDIR": str(self.scratch(host)), "TORCHINDUCTOR_CACHE_DIR": kernels}

    def processes(self, host: int) -> list[int]:
        """Return the process ids of all processes on a host, also of those that its commands have started."""
        return processes_in(self.spaces[host])

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, host: int, *, hears: bool = False, sends: bool = False) -> None:
        """Stop all frames between a host and the others until `heal`.

        With `hears` it still receives frames, and with `sends` its own frames still arrive.
        """
        for other in range(len(self.names)):
            for way, passes in (((other, host), hears), ((host, other), sends)):
                change = self._wire.cuts.discard if passes else self._wire.cuts.add
                change(way)

    def heal(self, host: int) -> None:
        """Let all frames of a host pass again."""
        self.cut(host, hears=True, sends=True)

    def kill_all(self, host: int) -> None:
        """Kill all processes on a host; the other hosts see that its connections end."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ip(*arguments: str) -> None:
    """Run a command of `ip`. Raises CalledProcessError if it fails."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def enter_network(space: str) -> None:
    """Move this thread into the network namespace `space`, for good. Other threads of the process stay where they are.

    Raises OSError without root, or if there is no such namespace.
    """
    with Path("/run/netns", space).open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {space}")


def in_space(space: str, make: Callable[[], _T]) -> _T:
    """Call a function in a network namespace and return its result. A socket that it makes belongs to the namespace."""

    def enter() -> _T:
        """Move this thread into the namespace, and call the function."""
        enter_network(space)
        return make()

    # In a thread that ends: the rest of this process stays where it is.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()
