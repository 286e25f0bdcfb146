"""A Podman service of a test's own, which can be killed and started again on the same storage.

Its storage is a new folder under /var/tmp, so it shares no container with another engine. An engine does not know a
process that outlives its container. Such a process is found by the name of the folder, in its command line or in the
mount of its root. The service needs root and Debian's `podman` and `runc`.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Self

import msgspec

from flash.errors import ConfigError

ANSWER_S = 60.0
"""Longest wait for a service to answer after its start."""
REMOVE_S = 20.0
"""Longest wait for the storage to be removed."""
LOOK_S = 0.05
"""Seconds between two checks if a service answers or if the storage is removed: no event reports either."""
COMMAND_S = 300.0
"""Longest wait for one Podman command; removing many containers takes a while on a slow disk."""

Kind = Literal["agent", "conmon", "exec conmon", "runtime", "inside", "engine"]
"""Kind of a process of an engine; see `Process.kind`."""


class Process(msgspec.Struct, frozen=True):
    """A process of an engine."""

    pid: int
    kind: Kind
    """`agent`: first process of a container. `inside`: another process in it. `engine`: a Podman command. `runtime`:
    runc, which starts processes in containers. `conmon`: Podman's process that watches a container. `exec conmon`: one
    that watches another process in a container."""
    command: str
    """Beginning of the process's command line."""


class PodmanEngine:
    """A Podman service with its storage; `url` is the value for DOCKER_HOST. Each method blocks its thread.

    Args:
        exec_delay_s: seconds for which the `conmon` of an exec stays after its end; None: Podman's default of 300 s.
        command_s: longest wait for one Podman command, in seconds.
    """

    def __init__(self, exec_delay_s: int | None = None, *, command_s: float = COMMAND_S) -> None:
        self._command_s = command_s
        self.folder = Path(tempfile.mkdtemp(prefix="flash-podman.", dir="/var/tmp"))
        """Folder of the storage, of the socket and of all temporary files."""
        self._socket = self.folder / "podman.sock"
        self.url = f"unix://{self._socket}"
        """Address of the service, the value for DOCKER_HOST."""
        self._options: list[str] = []
        """Options of each Podman command, which name the storage; empty before `open`."""
        self._service: subprocess.Popen[bytes] | None = None
        """Process of the service; None before `start` and after `kill`."""
        # Podman leaves a copy of each imported image in its folder for temporary files.
        self._environment = os.environ | {"TMPDIR": str(self.folder)}
        if exec_delay_s is not None:
            config = self.folder / "containers.conf"
            config.write_text(f"[engine]\nexit_command_delay = {exec_delay_s}\n")
            self._environment["CONTAINERS_CONF"] = str(config)

    def open(self) -> Self:
        """Choose how layers are stored, and start the service. The caller must call `close`, also after an error."""
        options = ["--root", f"{self.folder}/root", "--runroot", f"{self.folder}/run", "--cgroup-manager", "cgroupfs"]
        options += ["--runtime", "runc", "--events-backend", "file", "--storage-driver"]
        # Overlay does not work on every file system, for instance on top of another overlay.
        driver = "overlay" if self._podman([*options, "overlay"], "info").returncode == 0 else "vfs"
        if driver == "vfs":
            for name in ("root", "run"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        self._options = [*options, driver]
        self.start()
        return self

    def start(self) -> None:
        """Start the service, and wait until it answers.

        Raises:
            ConfigError: it does not answer; the message has the end of its log.
        """
        self._socket.unlink(missing_ok=True)
        log, end = self.folder / "podman.log", time.monotonic() + ANSWER_S
        with log.open("ab") as output:
            self._service = subprocess.Popen(
                ["podman", *self._options, "system", "service", "--time=0", self.url],
                stdout=output,
                stderr=output,
                env=self._environment,
                # Podman's conmon leaves a file `oom` in its working folder for a container that ran out of memory.
                cwd=self.folder,
                # ctrl-C reaches every process of the terminal; the service must outlive this process to clean up.
                start_new_session=True,
            )
        while not self._answers():
            if self._service.poll() is not None or time.monotonic() > end:
                output = log.read_text(errors="replace").strip()[-800:]
                raise ConfigError(f"Podman did not answer within {ANSWER_S:g} s; its output: {output or 'none'}")
            time.sleep(LOOK_S)

    def kill(self) -> None:
        """Kill the service with SIGKILL. Its containers live on. `close` and tests of crashes call this."""
        if self._service is not None:
            self._service.send_signal(signal.SIGKILL)
            self._service.wait()
            self._service = None

    def close(self) -> None:
        """Remove the containers, end the service and all other processes of the engine, and remove its files.

        Mounts and files are removed within REMOVE_S. It may be called before `open`.

        Raises:
            RuntimeError: the folder is still there.
        """
        if self._options:
            with suppress(subprocess.TimeoutExpired):  # the lines below end the containers' processes too
                self._podman(self._options, "rm", "--all", "--force", "--time", "0")
        self.kill()
        end = time.monotonic() + REMOVE_S
        # Processes that Podman starts after the end of a container may create the folder again, so this repeats.
        while self.folder.exists() and time.monotonic() < end:
            for each in self.processes():
                send_kill(each.pid)
            mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
            for mount in sorted((each for each in mounts if each.startswith(f"{self.folder}/")), reverse=True):
                subprocess.run(["umount", "--lazy", mount], capture_output=True, check=False)
            shutil.rmtree(self.folder, ignore_errors=True)
            time.sleep(LOOK_S)
        if self.folder.exists():
            raise RuntimeError(f"{self.folder} could not be removed")

    def processes(self) -> list[Process]:
        """Return all processes of the engine, except its service. Processes that Podman has forgotten are included."""
        own = (self._service.pid if self._service is not None else 0, os.getpid())
        found: list[Process] = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                process = _classify(entry, self.folder.name)
            except OSError:
                continue  # It has ended meanwhile.
            if process is not None and process.pid not in own:
                found.append(process)
        return found

    def external(self) -> list[str]:
        """Return the names of containers that the storage has and the engine does not know."""
        listed = self._podman(self._options, "ps", "--all", "--external", "--format", "{{.Names}} {{.Status}}")
        lines = listed.stdout.decode().splitlines()
        return [line.split()[0] for line in lines if line.split()[-1:] == ["Storage"]]

    def _answers(self) -> bool:
        """Return True if the service answers requests."""
        # A ping is cheaper than a request for the version, for which Podman calls the package manager. httpx does not
        # close its socket if the service does not accept the connection, so a socket of our own is used.
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(5.0)
            try:
                connection.connect(str(self._socket))
                connection.sendall(b"GET /_ping HTTP/1.0\r\n\r\n")
                return b" 200 " in connection.recv(64)
            except OSError:
                return False

    def _podman(self, options: Sequence[str], *words: str) -> subprocess.CompletedProcess[bytes]:
        """Run a command of Podman to its end, on the storage that `options` name.

        Raises:
            subprocess.TimeoutExpired: the command took longer than `command_s`.
        """
        return subprocess.run(
            ["podman", *options, *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self._environment,
            timeout=self._command_s,
            check=False,
            start_new_session=True,
        )


def _classify(proc: Path, folder: str) -> Process | None:
    """Return a process as a part of the engine with this folder; None if it is no part of it.

    `proc` is the process's folder under /proc, and `folder` the name of the engine's folder. Raises OSError if the
    process ends meanwhile.
    """
    words = (proc / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    command, pid = " ".join(words).strip(), int(proc.name)
    if not command:
        return None
    if folder in command:  # a process outside of the containers, which has the storage in its arguments
        kinds: dict[str, Kind] = {"conmon": "conmon", "runc": "runtime", "podman": "engine"}
        kind = kinds.get(Path(words[0]).name)
        if kind == "conmon" and ("-e" in words or "--exec-attach" in words):
            kind = "exec conmon"
        return None if kind is None else Process(pid, kind, command[:200])
    root = next((line for line in (proc / "mountinfo").read_text().splitlines() if line.split()[4] == "/"), "")
    if folder not in root:  # the root of a process in a container is a mount from the storage
        return None
    # The last number is the process id inside of the container, where the first process has 1.
    inner = next(line for line in (proc / "status").read_text().splitlines() if line.startswith("NSpid:"))
    return Process(pid, "agent" if inner.split()[-1] == "1" else "inside", command[:200])


def send_kill(pid: int) -> bool:
    """Send SIGKILL to a process. Returns False if the process has ended already."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
