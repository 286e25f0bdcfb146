"""Hosts on this machine: network namespaces that are connected by a wire, for benchmarks and tests of several machines.

A process on a host sees the host's name, its address and its folder for temporary files. The wire
(`benchmarks.rig.wire`) can be cut. Hosts need root and iproute2. The namespaces, and everything that
runs in them, end with the `with` block of `Hosts` (`benchmarks.rig.kept`).
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

from anyio.from_thread import start_blocking_portal

from benchmarks.rig.kept import Kept, processes_in
from benchmarks.rig.wire import Wire, mac, open_port

_T = TypeVar("_T")

NEEDED = ("ip", "ss", "nsenter", "unshare")
"""Commands that making hosts needs."""
CLONE_NEWNET = 0x40000000
"""Flag of Linux for network namespaces, which Python's library does not name before version 3.12."""

INSIDE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
"""Shell command that each process runs first, in mount and host name namespaces of its own. Its arguments are the file
with the names of the hosts, the name of its host, and the command to run."""


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
        """Make the hosts, and the wire between them. `Kept` calls this at the beginning of the `with` block."""
        self._set_up()
        self._begin_carrying()

    def _set_up(self) -> None:
        """Make a network namespace for each host and one for the wire, and connect them with virtual links."""
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

    def _begin_carrying(self) -> None:
        """Start the wire in a thread of its own, so that it and the caller do not wait for each other."""
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
        """End the processes on the hosts, and remove the hosts."""
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
        """Return the ids of all processes on a host."""
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
    """Move this thread into the network namespace `space`. Other threads of the process stay where they are."""
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
