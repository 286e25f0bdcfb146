"""The launcher of a node without trainers: it starts one node loop, which joins the run of a hub, and supervises it.

Not part of torchrun's rendezvous: the trainers do not start again with this node, nor this node with them. It asks the
hub what the run is, and starts a node loop for that (`flash.run.joined`). A node loop that dies is started again,
cluster.max_restarts times; one that cannot serve the next hub with the engines that it has is started again for it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

import anyio
import msgspec
from anyio.abc import Process, TaskGroup

from flash.config.advice import advise_on_engines
from flash.config.load import dump, load
from flash.config.objects import import_from, share_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import ConfigError, how_it_ended
from flash.hub import protocol as p
from flash.run.models.models import make_missing_model
from flash.run.processes.hub_place import HubPlace
from flash.run.processes.hub_search import HubSearch
from flash.run.processes.scratch import scratch_folder
from flash.run.processes.starter_watch import begin_launch
from flash.run.processes.token import VARIABLE
from flash.waiting import first_error

OWN_KEYS = (
    *("cluster.gpus_per_node", "cluster.node_cpus", "cluster.trainer_cpus"),
    *("engine.count", "engine.memory_fraction", "engine.kv_cache_gib"),
)
"""What each machine may have of its own."""
LOST = 75
"""Exit code of a launch whose node has failed for good, while the run goes on; launch.sh knows it."""


class LifeEnd(IntEnum):
    """Exit codes of a node loop that has joined."""

    OVER = 0
    """The run is over, or the node was told to leave."""
    FAILED = 1
    """With an error that may not come again."""
    FINAL = 3
    """With an error that will."""
    HUB_LOST = 4


class Order(msgspec.Struct, frozen=True):
    """What a node loop is told by its launcher."""

    place: HubPlace
    digest: str
    """Of the run's configuration."""
    begun: float
    """When the launcher began with this node loop, in Unix seconds."""


def join(place: HubPlace, overrides: Sequence[str] = (), own: Config | None = None) -> int:
    """Run this machine's part of a run, until the run is over or a signal comes; the exit code: 0 or LOST.

    Args:
        place: where the hub is.
        overrides: of this machine's own keys.
        own: the configuration that this machine was started with; None takes that of the hub. With it the hub may
            still have to start.

    Raises:
        FlashError: there is no hub, or this machine cannot join it.
    """
    with scratch_folder() as folder:
        try:
            return anyio.run(Launch(place, overrides, own, folder).run)
        except BaseExceptionGroup as group:  # of the task group around the launch
            raise first_error(group) from None


class Launch:
    """One `flash join`."""

    def __init__(self, place: HubPlace, overrides: Sequence[str], own: Config | None, folder: Path) -> None:
        self._place = place
        self._overrides = overrides
        self._own = own
        self._folder = folder
        self._process: Process | None = None
        self._begun = time.time()
        self._shutdown_s, self._grace_s = 0.0, 0
        self._search = HubSearch(place, os.environ.get(VARIABLE))
        self._told = False
        """Whether a signal has told us to leave."""
        begin_launch()
        os.environ.setdefault("OMP_NUM_THREADS", "1")

    async def run(self) -> int:
        """Until the run is over; see `join`."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._heed_signals, tasks)
            code = await self._lives()
            tasks.cancel_scope.cancel()
            return code
        return 0  # told to leave before anything ran

    async def _heed_signals(self, tasks: TaskGroup) -> None:
        """Pass the first signal on to the node loop, which leaves in order; what does not end in time is killed.

        A Ctrl-C after it kills at once. Others may come again and again without a meaning.
        """
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for received in signals:
                process = self._process
                if process is None:
                    self._told = True
                    tasks.cancel_scope.cancel()
                    return
                if not self._told:
                    self._told = True
                    tasks.start_soon(self._leave, process, signal.Signals(received))
                elif received == signal.SIGINT:
                    _kill(process)

    async def _leave(self, process: Process, received: signal.Signals) -> None:
        again = "; Ctrl-C again ends it now" if received == signal.SIGINT else ""
        within = f"within {self._shutdown_s:g} s{again}"
        _say(f"{received.name}: this node takes no more work, and leaves the run {within}")
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await anyio.sleep(self._grace_s)
        _kill(process)

    async def _lives(self) -> int:
        """Consumes ends of the node loop, and hubs. Waits for the one or the other. Produces the next node loop."""
        run = await self._meet(self._own.deadlines.rendezvous if self._own else 0.0)
        restarts = 0
        while run is not None and not run.ending:
            config, file = self._configure(run)
            self._shutdown_s, self._grace_s = config.deadlines.shutdown, grace_s(config)
            await anyio.to_thread.run_sync(make_missing_model, config, abandon_on_cancel=True)
            end = await self.life(file, run)
            if end == LifeEnd.OVER or self._told:
                return 0
            if end == LifeEnd.HUB_LOST:
                run = await self._meet(config.deadlines.rendezvous, run)
                self._begun = time.time()
                continue
            if end == LifeEnd.FINAL:
                return LOST
            if end != LifeEnd.FAILED:
                _say(f"the node loop {how_it_ended(end)}")
            self._begun = time.time()
            restarts, most = restarts + 1, config.cluster.max_restarts
            if restarts > most:
                _say(f"no restart is left of cluster.max_restarts = {most}; the run goes on without this node")
                return LOST
            _say(f"this node starts again (restart {restarts} of {most}); the run goes on meanwhile")
        if run is not None and self._own is None and restarts == 0:
            raise ConfigError(f"the run of {self._place} is at its end: there is nothing left for a node to do")
        _say("the run is over")
        return 0

    async def _meet(self, wait_s: float, before: p.RunReply | None = None) -> p.RunReply | None:
        found = await self._search.find(wait_s, before)
        return found and found[1]

    async def life(self, file: Path, run: p.RunReply) -> int:
        """One node loop, from its start to its exit code."""
        order = msgspec.json.encode(Order(self._place, run.digest, self._begun)).decode()
        command = [sys.executable, "-m", "flash.run.joined", str(file), order]
        # A group of its own: a terminal's signals come through us.
        async with await anyio.open_process(
            command, stdin=subprocess.DEVNULL, stdout=None, stderr=None, start_new_session=True
        ) as process:
            self._process = process
            try:
                return await process.wait()
            finally:
                self._process = None

    # -- its configuration -------------------------------------------------------------------------------------------

    def _configure(self, run: p.RunReply) -> tuple[Config, Path]:
        """The run's configuration on this machine, and the file that the node loop reads it from.

        Raises:
            ConfigError: this machine was started with another one, or cannot have engines.
        """
        file = self._folder / "config.toml"
        hubs: dict[str, Any] = tomllib.loads(run.config)
        if self._own is not None:
            refuse_another(tomllib.loads(dump(self._own)), hubs)
            config = self._own
        else:
            if Path(run.folder).is_dir():
                os.chdir(run.folder)
            import_from(folder for folder in run.imports if Path(folder).is_dir())
            file.write_text(run.config)
            # None of this is about this machine: whether there is a run to resume, and how many GPUs there are.
            gpus = "auto" if hubs["cluster"]["gpus_per_node"] else "0"
            config = load(file, ["run.resume=false", f"cluster.gpus_per_node={gpus}", *self._overrides])
        share_import_path()
        if hubs["cluster"]["gpus_per_node"] and not config.gpus_per_node:
            raise ConfigError("this machine has no GPU, and the engines of this run have")
        if not config.engines_on(config.cluster.trainer_nodes):
            raise ConfigError(
                f"an engine wants engine.tensor_parallel = {config.engine.tensor_parallel} GPUs, and this machine has "
                f"{config.gpus_per_node}"
            )
        if self._own is None:
            advise_on_engines(config)
        file.write_text(dump(config))
        return config, file


def refuse_another(own: Mapping[str, Any], hubs: Mapping[str, Any]) -> None:
    """Raises ConfigError: two configurations differ in what is not a machine's own."""
    ours, theirs = dict(_leaves(own)), dict(_leaves(hubs))
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in (*OWN_KEYS, "run.resume") and ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"`{key}` is {ours.get(key, 'not set')} on this node and {theirs.get(key, 'not set')} on the hub's: "
                "start all nodes with the same configuration"
            )


def _leaves(table: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in table.items():
        found += _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]
    return found


def _kill(process: Process) -> None:
    """The node loop, and its engines with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _say(words: str) -> None:
    sys.stderr.write(f"flash: {words}\n")
    sys.stderr.flush()
