"""Hosts on this machine: network namespaces on a wire of our own, each process with the host's name and its folder for
temporary files. Needs root and iproute2. The namespaces, and everything that runs in them, end with the hosts
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

from anyio.from_thread import start_blocking_portal

from benchmarks.rig.kept import Kept, processes_in
from benchmarks.rig.wire import Way, Ways, Wire, mac, open_port

_T = TypeVar("_T")

NEEDED = ("ip", "ss", "nsenter", "unshare")
CLONE_NEWNET = 0x40000000

INSIDE = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'
"""In mount and host name namespaces of the process's own."""


def missing() -> str:
    """Why there can be no hosts here; empty when there can."""
    absent = [name for name in NEEDED if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces want Linux and root"
    try:
        subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], check=True, capture_output=True)
        socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    except (subprocess.CalledProcessError, OSError) as error:
        return f"no new namespaces, or no raw packets, are allowed here: {error}"
    return ""


class Hosts(Kept):
    """Exist from `with` to its end; numbered from 0 on, in the order of their names."""

    def __init__(self, *names: str) -> None:
        super().__init__("hosts")
        self.names = names
        self._switch = f"{self.folder.name}-wire"
        self._spaces = [f"{self.folder.name}-{host}" for host in range(len(names))]
        self._ways = Ways()
        self._started: list[subprocess.Popen[bytes]] = []
        self._wire = ExitStack()

    def begin(self) -> None:
        """Make them, and the wire between them."""
        self._set_up()
        self._begin_carrying()

    def _set_up(self) -> None:
        lines = [f"{self.address(host)} {name}\n" for host, name in enumerate(self.names)]
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        _ip("netns", "add", self._switch)
        for host, space in enumerate(self._spaces):
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
        """In a thread of its own: nobody here waits for the hosts' traffic, nor the other way round."""
        ports = [
            self._wire.enter_context(_in_space(self._switch, lambda host=host: open_port(f"port{host}")))
            for host in range(len(self.names))
        ]
        portal = self._wire.enter_context(start_blocking_portal())
        carrying = portal.start_task_soon(Wire(ports, self._ways).run)
        self._wire.callback(lambda: carrying.result() if carrying.done() else carrying.cancel())

    def close(self) -> None:
        """End what runs on the hosts, and the hosts."""
        for host in range(len(self.names)):
            self.kill_all(host)
        for process in self._started:
            process.kill()
            process.wait()
        try:
            self._wire.close()
        finally:
            super().close()

    # -- what runs on them -------------------------------------------------------------------------------------------

    def address(self, host: int) -> str:
        """Where the others find it; its name leads there too."""
        return f"10.77.0.{host + 1}"

    def scratch(self, host: int) -> Path:
        """Its folder for temporary files."""
        return self.folder / str(host)

    def start(
        self, host: int, command: Sequence[str], *, output: Path, cwd: Path, variables: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host; its output is appended to a file."""
        space = f"--net=/run/netns/{self._spaces[host]}"
        inside = ["nsenter", space, "unshare", "--uts", "--mount", "sh", "-c", INSIDE]
        # Compiled kernels are worth keeping, and nothing that tells hosts apart.
        kernels = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
        own = {"TMPDIR": str(self.scratch(host)), "TORCHINDUCTOR_CACHE_DIR": kernels}
        with output.open("ab") as file:
            process = subprocess.Popen(
                [*inside, str(self.folder / "hosts"), self.names[host], *command],
                env={**os.environ, **own, **variables},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def processes(self, host: int) -> list[int]:
        """The process ids of all that runs there."""
        return processes_in(self._spaces[host])

    def socket(self, host: int) -> socket.socket:
        """A TCP socket of this process that is on a host."""
        return _in_space(self._spaces[host], socket.socket)

    # -- what happens to them ----------------------------------------------------------------------------------------

    def set_way(self, source: int, target: int, way: Way) -> None:
        """What happens from now on to what one host sends another."""
        self._ways.set(source, target, way)

    def cut(self, host: int, *, hears: bool = False, sends: bool = False) -> None:
        """Nothing gets through any more between a host and all others; `hears`, `sends`: but in this direction."""
        for other in range(len(self.names)):
            self._ways.set(other, host, Way(cut=not hears))
            self._ways.set(host, other, Way(cut=not sends))

    def heal(self, host: int) -> None:
        """Everything gets through again, at once."""
        self.cut(host, hears=True, sends=True)

    def reset(self, host: int) -> None:
        """Cut all its connections to others, at both ends; new ones can be made."""
        command = ("ss", "--kill", "--tcp", f"dst 10.77.0.0/24 and not dst {self.address(host)}")
        subprocess.run(["ip", "netns", "exec", self._spaces[host], *command], check=True, capture_output=True)

    def lose_power(self, host: int) -> None:
        """It is gone, and nobody hears of it; `heal` brings its link back."""
        self.cut(host)
        self.kill_all(host)

    def kill_all(self, host: int) -> None:
        """Kill whatever runs on a host; the others hear that its connections end."""
        for pid in self.processes(host):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _in_space(space: str, make: Callable[[], _T]) -> _T:
    """What a function makes in a network namespace: a socket belongs to the one that it was made in."""

    def enter() -> _T:
        with Path("/run/netns", space).open("rb") as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter {space}")
        return make()

    # In a thread that ends: the rest of this process stays where it is.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(enter).result()
