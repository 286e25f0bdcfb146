"""Processes that are forked from one which has imported what they need: multiprocessing's fork server, more of it.

multiprocessing has one such server in each process, for whoever asks. Here each kind of process has its own, with what
that has imported, and the environment in which it was started.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from multiprocessing import connection, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

MODULES = "FLASH_FORK_MODULES"
"""Variable that tells a server what to import."""
HELD = (signal.SIGTERM, signal.SIGINT)
"""Signals that a server does not heed."""
ALONE = 255
"""Exit code of a process whose server is gone: it may live on."""

TOUCHED = (
    "multiprocessing.forkserver:main",
    "multiprocessing.forkserver:ForkServer.connect_to_new_process",
    "multiprocessing.forkserver:ForkServer.ensure_running",
    "multiprocessing.forkserver:ForkServer._forkserver_address",
    "multiprocessing.forkserver:ForkServer._forkserver_alive_fd",
    "multiprocessing.forkserver:ForkServer._forkserver_pid",
    "multiprocessing.forkserver:_forkserver",
    "multiprocessing.forkserver:read_signed",
    "multiprocessing.popen_forkserver:Popen._launch",
    "multiprocessing.popen_forkserver:Popen.poll",
    "multiprocessing.context:ForkServerProcess._Popen",
    "multiprocessing.context:ForkServerProcess._start_method",
    "multiprocessing.context:set_spawning_popen",
    "multiprocessing.spawn:get_preparation_data",
    "multiprocessing.resource_tracker:_resource_tracker",
    "multiprocessing.resource_tracker:ResourceTracker._fd",
    "multiprocessing.resource_tracker:ResourceTracker._pid",
    "multiprocessing.util:close_fds",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


class Server(forkserver.ForkServer):
    """A fork server of its own, which begins with the first process that is forked, and imports these modules first.

    It ends when the process that has begun it and all that are forked from it have ended.

    Args:
        modules: what it imports.
        variables: of its environment, beside those of the process that begins it.
    """

    def __init__(self, *modules: str, variables: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.variables = {**(variables or {}), MODULES: ",".join(modules)}
        self._of_parent: int | None = None
        """The process id of the server from which this process was forked, where it is this one."""

    def ensure_running(self) -> None:
        """As of `ForkServer`, with variables of its own, and its socket where this process has its temporary files."""
        if self._of_parent == os.getppid():
            return
        own: Any = self
        with own._lock:
            resource_tracker.ensure_running()
            if own._forkserver_pid is not None:
                if os.waitpid(own._forkserver_pid, os.WNOHANG) == (0, 0):
                    return
                os.close(own._forkserver_alive_fd)
                own._forkserver_pid = None
            folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
            address = os.path.join(folder, f"forks-{os.getpid()}-{token_hex(4)}")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                os.chmod(address, 0o600)  # whoever may connect may have anything run here
                util.Finalize(self, Path(address).unlink, kwargs={"missing_ok": True}, exitpriority=0)
                listener.listen()
                read, own._forkserver_alive_fd = os.pipe()
                fds = [listener.fileno(), read]
                command = f"from multiprocessing.forkserver import main; main(*{fds}, ['flash.foreign.fork_server'])"
                try:
                    begun = subprocess.Popen(
                        [sys.executable, "-c", command], pass_fds=fds, env=os.environ | self.variables
                    )
                finally:
                    os.close(read)
            begun.returncode = 0  # it is for us to wait for it
            own._forkserver_address, own._forkserver_pid = address, begun.pid

    def is_of_parent(self) -> None:
        """To be called in a process that was forked by such a server: what it forks comes from there too."""
        own: Any = forkserver._forkserver
        self._forkserver_address, self._forkserver_alive_fd = own._forkserver_address, own._forkserver_alive_fd
        self._of_parent = os.getppid()

    def end(self) -> None:
        """End it at once, but not what was forked from it."""
        if (pid := cast(Any, self)._forkserver_pid) is not None:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(pid, signal.SIGKILL)


class Imports:
    """What a server has imported, for those that are forked from it."""

    begun = 0.0
    """When, in Unix seconds; 0 in a process that was not forked by one."""
    seconds = 0.0
    """How long that took."""


def track_apart() -> None:
    """In a forked process: have what it shares, as engines do their memory, removed at its own end, without a word."""
    tracker: Any = resource_tracker._resource_tracker
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None


def serve() -> None:
    """In a server, before all else: import what it is for, and be ready to fork."""
    Imports.begun = time.time()
    # Slurm sends them to all of a job, which is for what is forked alone; that hears them once it has handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    os.setsid()  # out of reach of what the terminal sends to the launcher
    # What is imported is for good: collecting meanwhile takes a fifth of the time, and no collection of a forked
    # process is to look at it, which would copy it.
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in filter(None, os.environ[MODULES].split(",")):
            with suppress(ImportError):  # who needs it says so
                import_module(module)
    entitle("")
    gc.freeze()
    gc.enable()
    # Nothing is to be tidied up, which would take another second.
    atexit.register(os._exit, 0)
    Imports.seconds = time.time() - Imports.begun


def entitle(title: str) -> None:
    """Name this process in lists of processes, where that can be done; its environment stays to be read there.

    Empty: find where a name may stand, which it could not do once a forked process has changed its environment.
    """
    os.environ["SPT_NOENV"] = "1"
    try:
        import setproctitle
    except ImportError:  # it comes with vLLM
        return
    if title:
        setproctitle.setproctitle(title)
    else:
        setproctitle.getproctitle()


class _Popen(popen_forkserver.Popen):
    """A process of such a server, of which any number of threads may ask how it ended."""

    def __init__(self, process_obj: Any) -> None:
        self._asking = threading.Lock()
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        """As multiprocessing has it, but for its server."""
        data, popen, utilities = io.BytesIO(), cast(Any, self), cast(Any, util)
        set_spawning_popen(popen)
        try:
            prepared = spawn.get_preparation_data(process_obj._name)
            # Whoever begins a run from a script of his own need not guard that: nobody imports it.
            prepared = {name: value for name, value in prepared.items() if not name.startswith(("init_main", "start_"))}
            reduction.dump(prepared, data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        self.sentinel, write = process_obj.server.connect_to_new_process(popen._fds)
        self.finalizer = util.Finalize(self, utilities.close_fds, (os.dup(write), self.sentinel))
        with open(write, "wb") as file:
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if self.returncode is None and not connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            return None
        with self._asking:  # the answer can be read once
            return super().poll(flag)


class ForkedProcess(ForkServerProcess):
    """A process that is forked by `server`, with the environment and the cores of the thread that makes it.

    Its exit code is `ALONE` where its server was killed.
    """

    server: Server
    _start_method: Any = None
    """How the new process starts others: as Python does where nobody says it. Else it would be as it was started."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.variables = dict(os.environ)
        self._cores = os.sched_getaffinity(0)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "server"}

    def enter(self) -> None:
        """The first that is done in the new process."""
        os.environ.clear()
        os.environ.update(self.variables)
        os.sched_setaffinity(0, self._cores)
        # Else all that are forked from one process would draw the same numbers, and so would who starts again.
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed()
        if (torch := sys.modules.get("torch.random")) is not None:
            torch.default_generator.seed()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)

    def run(self) -> None:
        """As of `Process`, in the new process."""
        self.enter()
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)
