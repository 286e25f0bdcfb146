"""Commands of Flash, and other programs in Python, in processes that are forked from a server with all imports.

A command that starts as a new Python imports torch and vLLM three times: in the command itself, and in its two fork
servers. That takes most of the time of a short run. `ForkedCommand` is used instead of `subprocess.Popen`: the command
is forked, and so are all of its processes, because a launcher has its processes forked from the server that it was
forked from itself. Some tests must still start real commands, because a user does that.

All workers of a test session share one server, `Imported`. Each command has a fork server of its own, `Serving`, which
is forked from the shared one. Its standard streams are those of the command, and it may be in namespaces of a host.
"""

from __future__ import annotations

import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from fcntl import LOCK_EX, flock
from functools import cache
from multiprocessing import connection, forkserver, reduction, util
from pathlib import Path
from secrets import token_hex
from typing import Any

from flash.config.load import load
from flash.foreign.forking import BLOCKED_SIGNALS, MODULES, ForkedProcess, ForkServer
from flash.rollout.vllm.start import server_variables
from flash.run.processes.forked import ENGINE_MODULE, LOOP_MODULES, PASSIVE, RANK_MODULES, ranks_server

ROOT = Path(__file__).parents[1]
OF_COMMANDS = (
    "flash.cli.train",
    "flash.cli.sampling",
    "flash.cli.runs",
    "flash.run.processes.launcher",
    "matplotlib.figure",
)
"""Modules that the server imports for the commands themselves."""
THREADS = "OMP_NUM_THREADS"
"""Environment variable with the number of threads of OpenMP. A launcher sets it to 1 for its processes."""


class Imported(ForkServer):
    """The server that has imported everything, which all workers of a test session share.

    The first process that needs the server starts it. Each process adds a line to a file, from which later ones learn
    the address of the socket and the end of the pipe that keeps the server alive.
    """

    def __init__(self) -> None:
        # All configurations with an engine on the CPU that compiles nothing have the same variables.
        config = load([ROOT / "examples" / "tiny.toml"], ["engine.enforce_eager=true", "cluster.gpus_per_node=0"])
        variables = ranks_server().variables | server_variables(config, 0) | {PASSIVE: "passive", THREADS: "1"}
        variables.pop(MODULES)
        super().__init__(
            *dict.fromkeys((*OF_COMMANDS, *RANK_MODULES, *LOOP_MODULES, ENGINE_MODULE)), variables=variables
        )
        session = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
        self._file = Path(tempfile.gettempdir()) / f"imported-{session}"
        self._joined = False

    def ensure_running(self) -> None:
        """Start the server, or use the one that another process of the test session has started."""
        own: Any = self
        if self._joined:
            return
        if own._forkserver_pid is not None:
            super().ensure_running()
            return
        with self._file.open("a+") as file:
            flock(file, LOCK_EX)
            file.seek(0)
            if not any(self._join(*line.split()) for line in reversed(file.readlines())):
                super().ensure_running()
                util.Finalize(self, self._file.unlink, kwargs={"missing_ok": True}, exitpriority=0)
            file.write(f"{own._forkserver_address} /proc/{os.getpid()}/fd/{own._forkserver_alive_fd}\n")

    def _join(self, address: str, alive: str) -> bool:
        """Use the server of another process, if that process runs. Return True if it does.

        `address` is the path of the server's socket, `alive` that of the end of the pipe in the other process.
        """
        own: Any = self
        # The other process removes its name of the socket when it ends.
        link = f"{tempfile.gettempdir()}/imported-{os.getpid()}-{token_hex(4)}"
        try:
            own._forkserver_alive_fd = os.open(alive, os.O_WRONLY)
            os.link(address, link)
        except OSError:
            return False
        util.Finalize(self, Path(link).unlink, kwargs={"missing_ok": True}, exitpriority=0)
        own._forkserver_address, self._joined = link, True
        return True


@cache
def imported() -> Imported:
    """Return the server that has imported everything."""
    return Imported()


class Serving(ForkedProcess):
    """Fork server of one command, forked from the server with the imports.

    Args:
        listener: socket on which it gets its orders.
        alive: end of a pipe; the server ends when all other ends of the pipe are closed.
        output: file for the standard output and error of the command and its processes.
        prepare: function that is called in the server first, for example to enter the namespaces of a host.
    """

    def __init__(self, listener: int, alive: int, output: int, prepare: Callable[[], object] | None) -> None:
        super().__init__(name="fork server of a command")
        self.server = imported()
        self._prepare = prepare
        self._descriptors: Any = [listener, alive, output]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that is sent to the new process, which gets copies of the descriptors."""
        state = super().__getstate__()
        state["_descriptors"] = [reduction.DupFd(descriptor) for descriptor in self._descriptors]
        return state

    def enter(self) -> None:
        """Set up the new process, whose target is then to serve until the command and its processes have ended.

        No function of this file calls the target. Otherwise it would be on the stack of each forked process, and Flash
        would name it as the user's code that blocks an event loop.
        """
        super().enter()
        os.setsid()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        listener, alive, output = (one.detach() for one in self._descriptors)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        # The old objects remember properties of the streams that the shared server has.
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - open until the process ends
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        if self._prepare is not None:
            self._prepare()
        own: Any = self
        own._target, own._args = forkserver.main, (listener, alive, [])


class _Served(ForkServer):
    """The fork server of one command, as the process sees it that starts the command."""

    def __init__(self, output: int, prepare: Callable[[], object] | None) -> None:
        super().__init__()
        address = f"{tempfile.gettempdir()}/serving-{os.getpid()}-{token_hex(4)}"
        own: Any = self
        own._forkserver_address = address
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen()
            read, own._forkserver_alive_fd = os.pipe()
            self.process = Serving(listener.fileno(), read, output, prepare)
            self.process.start()
            os.close(read)

    def ensure_running(self) -> None:
        """Do nothing, because the server runs already."""

    def close(self) -> None:
        """Let the server end as soon as the processes that were forked from it have ended."""
        own: Any = self
        os.close(own._forkserver_alive_fd)
        Path(own._forkserver_address).unlink()


class _Program(ForkedProcess):
    """Process that runs a program in Python."""

    def __init__(self, server: ForkServer, words: Sequence[str], folder: Path, variables: Mapping[str, str]) -> None:
        super().__init__(name="command")
        self.server = server
        self.variables = dict(variables)
        self._words = [*words]
        self._folder = folder

    def enter(self) -> None:
        """Set up the new process, whose target is then to do what `python WORDS` does.

        The words begin with `-m MODULE` or `-c CODE`.
        """
        super().enter()
        os.setsid()
        os.chdir(self._folder)
        sys.path[0:0] = [str(self._folder)]
        own: Any = self
        kind, program, *arguments = self._words
        if kind == "-m":
            sys.argv = [program, *arguments]
            own._target, own._args = runpy.run_module, (program, None, "__main__", True)
        else:
            sys.argv = [kind, *arguments]
            own._target, own._args = exec, (compile(program, "<string>", "exec"), {"__name__": "__main__"})


class ForkedCommand:
    """A program in Python that was forked. It has the methods of `subprocess.Popen` that tests of whole runs call.

    The program leads a session of its own.

    Args:
        words: arguments of Python: `-m MODULE …` or `-c CODE …`.
        output: open file that gets the standard output and error.
        folder: working directory.
        variables: all environment variables.
        prepare: function that the program's fork server calls first.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        output: int,
        folder: Path,
        variables: Mapping[str, str],
        prepare: Callable[[], object] | None = None,
    ) -> None:
        self.args = [*words]
        self._server = _Served(output, prepare)
        self._process = _Program(self._server, words, folder, variables)
        self._process.start()
        self.pid: int = self._process.pid or 0
        # Only the server learns the exit code, so it must not end before the program.
        threading.Thread(target=self._close_server, daemon=True).start()

    def _close_server(self) -> None:
        """Wait for the end of the program, and let its server end after that."""
        self._process.join()
        self._server.close()

    def poll(self) -> int | None:
        """Return the exit code; None if the program runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the program, and return its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within `timeout` seconds.
        """
        connection.wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the program, if it runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the program, but not its processes."""
        self.send_signal(signal.SIGKILL)


def run_forked(words: Sequence[str], output: Path, *, folder: Path = ROOT, seconds: float = 200) -> tuple[int, str]:
    """Run a forked program to its end, and return its exit code and its output, which is written to a file.

    Raises:
        subprocess.TimeoutExpired: it has not ended within `seconds`.
    """
    with output.open("wb") as file:
        command = ForkedCommand(words, output=file.fileno(), folder=folder, variables=os.environ)
    return command.wait(seconds), output.read_text()
