"""Fork servers: a fork server imports the modules that later processes need, and these processes are forked from it.

The imports of torch and vLLM take seconds of CPU time. A process that is forked from a server needs none of these
imports.

multiprocessing has one fork server per process, for all its users. Here each kind of process has a server of its own,
with its own imports and environment variables. `flash.run.processes` forks node loops, trainer ranks and launchers this
way, and `flash.rollout.vllm.processes` forks the processes of engines.

Lifecycle: the first `ForkedProcess.start` of a server starts the server, which runs `serve`. Each start then sends a
description of the process to the server, which forks. The new process runs `ForkedProcess.enter`, then its target.

A forked process may have processes forked, too. It starts no second server if the server that it was forked from has
imported the same modules with the same environment variables. So a machine needs only one server with the imports of
vLLM for a node loop and its engines.
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

ROOT = Path(__file__).parents[2]
"""Folder that has the packages of Flash."""
MODULES = "FLASH_FORK_MODULES"
"""Environment variable with the names of the modules that `serve` imports, separated by commas."""
BLOCKED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
"""Signals that a server blocks, and that the processes forked from it unblock. Slurm sends them to all processes of a
job, but only the forked processes must react."""
SERVER_GONE = 255
"""Exit code that a process seems to have if its server is gone, because only the server learns the true exit code. The
process may still be running."""

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
"""Attributes of multiprocessing that this module uses, as `module:Class.attribute`. A test looks for each of them."""


class ForkServer(forkserver.ForkServer):
    """A fork server. The server starts when the first process is to be forked from it, and imports some modules before
    that.

    In a process that was itself forked from a server, that server is used if it has imported these modules with these
    environment variables. A new server ends when the process that started it and all processes forked from it have
    ended. If the server was killed, the start of the next process starts it again.

    Args:
        modules: names of the modules that the server imports.
        variables: environment variables of the server, in addition to the variables of the process that starts it.
    """

    def __init__(self, *modules: str, variables: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.variables = {**(variables or {}), MODULES: ",".join(modules)}

    def ensure_running(self) -> None:
        """Start the server if it is not running, with its own variables and a socket in this process's TMPDIR.

        multiprocessing calls this before it forks a process. Replaces its method, whose server has the variables of the
        process that starts it.
        """
        own: Any = self
        if self._is_parent():
            # In a forked process multiprocessing has the address of its server, and the pipe, in this object.
            parent: Any = forkserver._forkserver
            own._forkserver_address = parent._forkserver_address
            own._forkserver_alive_fd = parent._forkserver_alive_fd
            return
        with own._lock:
            resource_tracker.ensure_running()
            # Return if the server runs. If it has ended, forget it.
            if own._forkserver_pid is not None:
                if os.waitpid(own._forkserver_pid, os.WNOHANG) == (0, 0):
                    return
                os.close(own._forkserver_alive_fd)
                own._forkserver_pid = None
            # Make the socket on which the server gets its orders, and a pipe: the server ends when all processes have
            # closed their end of the pipe.
            folder = os.environ.get("TMPDIR") or tempfile.gettempdir()
            address = os.path.join(folder, f"forks-{os.getpid()}-{token_hex(4)}")
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                os.chmod(address, 0o600)  # whoever can connect can run any code in the server
                util.Finalize(self, Path(address).unlink, kwargs={"missing_ok": True}, exitpriority=0)
                listener.listen()
                read, own._forkserver_alive_fd = os.pipe()
                fds = [listener.fileno(), read]
                # Start the server, which runs `serve` and then multiprocessing's main function of fork servers.
                command = python_command(
                    "from flash.foreign.forking import serve; serve(); "
                    f"from multiprocessing.forkserver import main; main(*{fds}, [])"
                )
                try:
                    started = subprocess.Popen(command, pass_fds=fds, env=os.environ | self.variables)
                finally:
                    os.close(read)
            started.returncode = 0  # `Popen` must not wait for the process, because `waitpid` above does
            own._forkserver_address, own._forkserver_pid = address, started.pid

    def _is_parent(self) -> bool:
        """Return True if this process was forked from a running server that has imported at least these modules, with
        at least these variables."""
        wanted = dict(self.variables)
        modules = wanted.pop(MODULES).split(",")
        return (
            Imports.server == os.getppid()
            and Imports.modules.issuperset(filter(None, modules))
            and Imports.variables.items() >= wanted.items()
        )

    def end(self) -> None:
        """Kill the server, but not the processes that were forked from it. Does nothing if it was never started here.

        The supervisor of a launch calls this when it needs no further process, or when a start is cancelled.
        """
        if (pid := cast(Any, self)._forkserver_pid) is not None:
            with suppress(ProcessLookupError):  # it has already ended
                os.kill(pid, signal.SIGKILL)


class Imports:
    """Imports of the server that this process was forked from. Forked processes inherit this class."""

    begun = 0.0
    """Start of the imports, in Unix seconds; 0 in a process that was not forked from a server."""
    seconds = 0.0
    """Duration of the imports in seconds, which a node that joins a run reports."""
    modules: frozenset[str] = frozenset()
    """Names of the modules that the server was asked to import."""
    variables: Mapping[str, str] = {}
    """Environment variables that the server had during the imports."""
    server: int | None = None
    """Process id of the server; None in a process that was not forked from a server."""


def python_command(code: str) -> list[str]:
    """Return the command that runs `code` in a new Python, which imports from the same folders as this process.

    Arguments for `code` may be appended.
    """
    # Without `-P`, Python would search the working directory first. A user's file there may have the name of a module
    # that torch imports, such as `statistics`. PYTHONPATH would put the user's folders before the standard library.
    # The packages of Flash come before the folders of the user: an editable installation is found after them all, so
    # that a clone in the working directory, whose folder is also called `flash`, would hide the package.
    first = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import flash, algorithms, envs"
    return [sys.executable, "-P", "-c", f"{first}; sys.path[:] = {[*map(str, sys.path)]}; {code}"]


def use_own_resource_tracker() -> None:
    """Give this forked process a resource tracker of its own, a helper process of multiprocessing. Called when a
    process of a run has been forked.

    A tracker removes resources, such as the shared memory of engines, when the process that uses it has ended. The
    server's tracker would remove the resources only when the server ends, and with a warning.
    """
    # multiprocessing starts a new tracker when it needs one the next time.
    tracker: Any = resource_tracker._resource_tracker
    os.close(tracker._fd)
    tracker._fd = tracker._pid = None


def serve() -> None:
    """Prepare a server process: import its modules, so that processes can be forked from it.

    This is called once in the server, before multiprocessing's main function of fork servers.
    """
    Imports.begun = time.time()
    Imports.modules, Imports.variables = frozenset(os.environ[MODULES].split(",")), dict(os.environ)
    # The forked processes unblock these signals (`ForkedProcess.enter`).
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    os.setsid()  # the terminal sends signals such as Ctrl-C to the launcher's session only
    # Imported objects are never freed, so garbage collection would only take a fifth of the time of the imports. In a
    # forked process the garbage collector must not visit these objects either (`gc.freeze`), because that would copy
    # their memory pages.
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in filter(None, os.environ[MODULES].split(",")):  # in the order in which they were named
            with suppress(ImportError):  # the process that needs the module will report the error
                import_module(module)
    set_process_title("")
    gc.freeze()
    gc.enable()
    # Nothing has to be cleaned up at the end, which would take another second.
    atexit.register(os._exit, 0)
    Imports.seconds = time.time() - Imports.begun


def set_process_title(title: str) -> None:
    """Set the title of this process in lists of processes, if setproctitle is installed.

    If the title is empty, this only lets setproctitle find the memory of the title. A server calls it with an empty
    title, because later the forked processes change their environment, and then the memory cannot be found any more.
    """
    os.environ["SPT_NOENV"] = "1"  # the environment must stay readable in /proc
    try:
        import setproctitle
    except ImportError:  # setproctitle is installed with vLLM only
        return
    if title:
        setproctitle.setproctitle(title)
    else:
        setproctitle.getproctitle()


class _Popen(popen_forkserver.Popen):
    """Handle of a forked process in the process that started it. Any number of threads may poll it."""

    def __init__(self, process_obj: Any) -> None:
        self._polling = threading.Lock()
        """Lock of `poll`."""
        super().__init__(process_obj)

    def _launch(self, process_obj: Any) -> None:
        """Fork the process from its own server. Replaces a method of multiprocessing, which would use one server for
        all.

        Sends the pickled process to the server, and sets `pid` and `sentinel`, a descriptor from which the exit code
        can be read when the process has ended.
        """
        data, popen, utilities = io.BytesIO(), cast(Any, self), cast(Any, util)
        # Pickle the process. Pickling adds the descriptors that the process needs to `popen._fds`.
        set_spawning_popen(popen)
        try:
            prepared = spawn.get_preparation_data(process_obj._name)
            # Without the entries that are left out, the new process does not import the main script. So a script that
            # starts a run needs no `if __name__ == "__main__"`.
            prepared = {name: value for name, value in prepared.items() if not name.startswith(("init_main", "start_"))}
            reduction.dump(prepared, data)
            reduction.dump(process_obj, data)
        finally:
            set_spawning_popen(None)
        # Let the server fork. The new process reads the pickled data from the pipe `write`.
        self.sentinel, write = process_obj.server.connect_to_new_process(popen._fds)
        self.finalizer = util.Finalize(self, utilities.close_fds, (os.dup(write), self.sentinel))
        with open(write, "wb") as file:
            file.write(data.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        """Return the exit code; None if the process runs. Waits for the end unless `flag` is `os.WNOHANG`.

        multiprocessing calls this for `exitcode` and `join`.
        """
        if self.returncode is None and not connection.wait([self.sentinel], 0 if flag == os.WNOHANG else None):
            # Another thread that is just reading the exit code holds the lock until it has set `returncode`.
            with self._polling:
                return self.returncode
        with self._polling:  # the exit code can be read from the descriptor only once
            return super().poll(flag)


class ForkedProcess(ForkServerProcess):
    """A process forked from `server`, with the environment and the CPU cores of the thread that creates it.

    A subclass sets `server`. The exit code is `SERVER_GONE` if the server was killed.
    """

    server: ForkServer
    """Server that the process is forked from."""
    _start_method: Any = None
    """Start method that multiprocessing uses in the new process for its own children. None: Python's default."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.variables = dict(os.environ)
        """Environment variables of the new process."""
        self._cores = os.sched_getaffinity(0)
        """CPU cores on which the new process may run."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is sent to the new process, without the server, which cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "server"}

    def enter(self) -> None:
        """Set the environment variables, CPU cores, random seeds and signals. `run` calls this first, in the new
        process."""
        Imports.server = os.getppid()
        os.environ.clear()
        os.environ.update(self.variables)
        tempfile.tempdir = None  # Python may have read TMPDIR in the server, where it has another value
        os.sched_setaffinity(0, self._cores)
        # A forked process inherits the state of random generators. Without new seeds all processes of one server would
        # draw the same numbers, also after a restart.
        if (numpy := sys.modules.get("numpy.random")) is not None:
            numpy.seed()
        if (torch := sys.modules.get("torch.random")) is not None:
            torch.default_generator.seed()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_SIGNALS)

    def run(self) -> None:
        """Call `enter` and then the target, in the new process. multiprocessing calls this."""
        self.enter()
        super().run()

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        """Start the process, and return its handle. multiprocessing calls this in `start`."""
        return _Popen(process_obj)
