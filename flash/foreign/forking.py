"""Processes that are forked from one which has imported what they need: multiprocessing's fork server, more of it.

multiprocessing has one such server in each process, for whoever asks. Here each kind of process has its own, with what
that has imported, and the environment in which it was started.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import io
import os
import threading
from multiprocessing import connection, forkserver, popen_forkserver, reduction, spawn, util
from multiprocessing.context import ForkServerProcess, set_spawning_popen
from typing import Any, ClassVar, cast

TOUCHED = (
    "multiprocessing.forkserver:ForkServer.set_forkserver_preload",
    "multiprocessing.forkserver:ForkServer.connect_to_new_process",
    "multiprocessing.forkserver:read_signed",
    "multiprocessing.popen_forkserver:Popen._launch",
    "multiprocessing.popen_forkserver:Popen.poll",
    "multiprocessing.context:ForkServerProcess._Popen",
    "multiprocessing.context:set_spawning_popen",
    "multiprocessing.spawn:get_preparation_data",
    "multiprocessing.util:close_fds",
)
"""In the form of `flash.foreign.vllm.TOUCHED`."""


def server_that_imports(*modules: str) -> Any:
    """A fork server of its own, which begins with the first process that is forked, and imports these first."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*modules])
    return server


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
            reduction.dump(spawn.get_preparation_data(process_obj._name), data)
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
    """A process that is forked by `server`. Its exit code is 255 where that was killed."""

    server: ClassVar[Any]

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        return _Popen(process_obj)
