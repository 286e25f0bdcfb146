"""The trainer ranks of a node, under an agent of torchrun's in a process of its own, beside that of the node loop.

So the death of a rank starts the ranks again, on all nodes, and nothing else. The agent and its ranks end with the
launcher. An agent that is killed takes its ranks along, and is started again as often as a rank.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from types import TracebackType
from typing import Self

from flash.config.load import load, split_arguments
from flash.config.objects import take_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import FlashError, RanksGoneError, how_it_ended
from flash.hub import protocol as p
from flash.run.processes.agents import INTERRUPTED, STANDALONE, run_agent, tell
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.locks import run_lock, share
from flash.run.processes.overseer import RanksOverseer
from flash.run.processes.rendezvous import RENDEZVOUS, hub_place
from flash.run.processes.scratch import join_scratch_folder
from flash.run.processes.starter_watch import LAUNCHER, end_with_starter, watch_over_children
from flash.run.processes.token import VARIABLE
from flash.run.processes.worker import begin_logging, complain
from flash.transport.blocking import BlockingClient

RETRY_S = 1.0
"""Before a process that the system would not start is tried again."""


def rendezvous_options(config: Config, environment: Mapping[str, str]) -> list[str]:
    """torchrun's options for the trainer ranks of this node: where those of all nodes meet."""
    node = int(environment.get("FLASH_NODE_RANK", "0"))
    ranks = f"--nproc-per-node={config.trainer_ranks_on(node)}"
    if config.cluster.trainer_nodes == 1:
        return [*STANDALONE, ranks]
    identity = environment.get("SLURM_JOB_ID", config.run.name)
    meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={environment[RENDEZVOUS]}", f"--rdzv-id={identity}"]
    return [f"--nnodes={config.cluster.trainer_nodes}", ranks, *meet]


def run_trainers(config: Config, arguments: Sequence[str], marker: ErrorMarker) -> int:
    """Run this node's trainer ranks, in this process, to their end. As of `run_agent`."""
    overseer = RanksOverseer(partial(tell, config, "trainer", marker), time.monotonic)
    overseer.listen(config)
    return run_agent(config, "trainer", rendezvous_options(config, os.environ), arguments, overseer)


def main(argv: Sequence[str] | None = None) -> int:
    """`python -m flash.run.processes.trainers CONFIG… [key=value…]`, under a launcher."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    begin_logging()
    try:
        take_import_path()
        config = load(*split_arguments(arguments))
        share(run_lock(config.run_dir))
        join_scratch_folder()
        # In order after the launcher's death: the ranks leave a checkpoint. They themselves end with this process.
        end_with_starter(grace_s(config) if os.environ["FLASH_NODE_RANK"] == "0" else 0, speaks=False)
        watch_over_children()
        return run_trainers(config, arguments, ErrorMarker(config.run_dir, os.environ[LAUNCHER]))
    except FlashError as error:
        return complain(error)


class TrainersBeside:
    """The trainer ranks of this node, as long as the block lasts that runs its node loop.

    Args:
        config: the run.
        arguments: what the processes read the configuration from.
        marker: where the error is left that ends the run.
    """

    def __init__(self, config: Config, arguments: Sequence[str], marker: ErrorMarker) -> None:
        self._config = config
        self._arguments = arguments
        self._marker = marker
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._keep, name="flash-trainers", daemon=True)
        self.failed = False
        """Whether they are gone for good, though the run was not over."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End what is left of them. The node loop has ended, and with it the hub, without which they can do nothing."""
        with self._lock:
            self._closing.set()
        process = self._process
        if process is None:
            return
        if kind is KeyboardInterrupt:  # a second one: nothing is waited for any more
            _kill(process)
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            process.wait(grace_s(self._config))
        except BaseException as problem:  # also an impatient second Ctrl-C: nothing may be left behind
            _kill(process)
            if not isinstance(problem, subprocess.TimeoutExpired):
                raise

    def _keep(self) -> None:
        """Consumes ends of the agent. Waits for the next one. Produces the next agent, or the end of the run."""
        most = self._config.cluster.max_restarts
        for restart in count(1):
            words = self._live()
            if words is None:
                return
            if not words:
                break
            if restart > most:
                words += f"; no restart is left of cluster.max_restarts = {most}"
                _say(words)
                if not self._marker.stands():
                    self._marker.write(RanksGoneError(words))
                break
            _say(f"{words}; it starts again, and the trainer ranks with it (restart {restart} of {most})")
        self._end_run()

    def _live(self) -> str | None:
        """One agent, to its end: how it ended; empty when it has said why, None when none is to follow."""
        try:
            process = self._start()
        except OSError as error:
            self._closing.wait(RETRY_S)
            return f"the agent of the trainer ranks cannot be started: {error}"
        if process is None:
            return None
        code = process.wait()
        # A signal that has ended it may have been for all processes of the run, which are ending then.
        if code == 0 or self._closing.wait(grace_s(self._config) if code == INTERRUPTED else 0):
            return None
        return "" if code == 1 else f"the agent of the trainer ranks (process {process.pid}) {how_it_ended(code)}"

    def _start(self) -> subprocess.Popen[bytes] | None:
        command = [sys.executable, "-m", "flash.run.processes.trainers", *self._arguments]
        with self._lock:
            if self._closing.is_set():
                return None
            # A session of its own: a terminal's signals come through the hub, which tells the ranks to save and leave.
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
            return self._process

    def _end_run(self) -> None:
        """Tell the hub, which shows the error; where there is none, end this launch. Why has been said already."""
        self.failed = True
        deadlines, node = self._config.deadlines, os.environ["FLASH_NODE_RANK"]
        message = self._marker.message() or f"the trainer ranks of node {node} cannot go on: their output says why"
        heard = False
        try:
            hub = hub_place(self._config, os.environ).find(os.environ.get(VARIABLE))
            name = f"messenger-{node}"
            with BlockingClient(hub.host, hub.port, hub.token, name, deadlines.connect) as caller:
                heard = True
                caller.call(p.Fatal(RanksGoneError.__name__, message), deadlines.request)
        except FlashError:  # when it was heard, the hub answers with its end
            if not heard and not self._closing.is_set():
                os.kill(os.getpid(), signal.SIGTERM)


def _kill(agent: subprocess.Popen[bytes]) -> None:
    """End the trainer ranks at once, which end with their agent."""
    with suppress(ProcessLookupError):
        os.killpg(agent.pid, signal.SIGKILL)


def _say(words: str) -> None:
    sys.stderr.write(f"flash: {words}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
