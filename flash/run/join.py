"""Launch of a node that joins a run: for `flash join`, and for every node of a job except the first.

The launch asks the hub for the run's configuration, and starts a node loop with it (`flash.run.joined`). A node loop
that dies is restarted up to cluster.max_restarts times. It is also restarted if it cannot serve the next hub with its
running engines. Trainer ranks do not restart with it, not even those of its own machine.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread

from flash.config.check import advise_on_engines
from flash.config.load import dump, flat, load
from flash.config.objects import import_from, share_import_path
from flash.config.tree import Config
from flash.errors import ConfigError
from flash.hub import protocol as p
from flash.run.models.models import make_missing_model
from flash.run.processes.forked import ProcessOrder, loops_server
from flash.run.processes.hub_place import HubPlace
from flash.run.processes.hub_search import HubSearch
from flash.run.processes.launch import Launch
from flash.run.processes.scratch import scratch_folder
from flash.run.processes.starter_watch import begin_launch
from flash.run.processes.supervisor import End, SupervisedPart, describe, judge, say
from flash.run.processes.token import VARIABLE

OWN_KEYS = (
    *("cluster.gpus_per_node", "cluster.node_cpus", "cluster.trainer_cpus"),
    *("engine.count", "engine.memory_fraction", "engine.kv_cache_gib"),
)
"""Configuration keys that may differ between machines."""


def join(place: HubPlace, overrides: Sequence[str] = ()) -> int:
    """Run this machine's part of a run until the run is over or a signal arrives. Returns the exit code: 0 or LOST.

    Args:
        place: place of the hub.
        overrides: `KEY=VALUE` settings for this machine; see OWN_KEYS.

    Raises:
        FlashError: there is no hub, or this machine cannot join it.
    """
    begin_launch()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with scratch_folder() as folder:
        return Launch(JoinedLoop(place, folder, overrides=overrides)).run()


class JoinedLoop(SupervisedPart):
    """Node loop of a machine that joins a run. It restarts when it fails.

    Args:
        place: place of the hub.
        folder: folder for the file of the configuration.
        node: number of this machine in its job; None if no job has started it.
        own: configuration that this machine was started with. The hub may then still have to start. None: use the hub's
            configuration.
        overrides: `KEY=VALUE` settings for this machine.
    """

    def __init__(
        self,
        place: HubPlace,
        folder: Path,
        node: int | None = None,
        own: Config | None = None,
        overrides: Sequence[str] = (),
    ) -> None:
        super().__init__(
            own,
            follows="the node loop of this node starts again, and the run goes on meanwhile",
            without="; the run goes on without it",
        )
        self._place = place
        self._folder = folder
        self._node = node
        self._own = own
        self._overrides = overrides
        self._begun = time.time()
        self._search = HubSearch(place, os.environ.get(VARIABLE))
        self._run: p.RunReply | None = None
        """Description of the run by the last hub."""
        self._lost = True
        """True if the next start has to look for a hub first."""

    async def once(self, restarts: int) -> tuple[End, list[str]]:
        """Find the hub if necessary, and run one node loop. Implements `SupervisedPart.once`.

        Raises:
            FlashError: there is no hub, or this machine cannot join it.
        """
        first = self._run is None
        if self._lost:
            known = self.config
            found = await self._search.find(known.deadlines.rendezvous if known else 0.0, self._run)
            self._run = found and found[1]
        run = self._run
        if run is None or run.ending:
            if run is not None and self._own is None and first:
                raise ConfigError(f"the run of {self._place} is at its end: there is nothing left for a node to do")
            say("the run is over")
            return End.OVER, []
        config, file = self._configure(run)
        self.config = config
        await anyio.to_thread.run_sync(make_missing_model, config, abandon_on_cancel=True)
        node = config.cluster.trainer_nodes if self._node is None else self._node
        order = ProcessOrder(node, restarts, place=self._place, digest=run.digest, begun=self._begun)
        self.processes.fork_from(loops_server(config, node))
        end, words = await self.loop(file, order)
        self._lost, self._begun = end == End.WITH_PEER, time.time()
        return end, words

    async def loop(self, file: Path, order: ProcessOrder) -> tuple[End, list[str]]:
        """Run one node loop to its end, with the configuration in `file`. Returns how it ended, and messages."""
        ended = await self.processes.run("node", file, [order])
        end, silent = await judge(ended, self.processes.killed, self.ending)
        return end, [describe("the node loop", one) for one in silent]

    # -- its configuration -------------------------------------------------------------------------------------------

    def _configure(self, run: p.RunReply) -> tuple[Config, Path]:
        """Return the run's configuration on this machine, and the file from which the node loop reads it.

        Raises:
            ConfigError: this machine was started with another configuration, or it cannot run an engine.
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
            # These settings depend on the machine: whether there is a run to resume, and the number of GPUs.
            gpus = "auto" if hubs["cluster"]["gpus_per_node"] else "0"
            config = load(file, ["run.resume=false", f"cluster.gpus_per_node={gpus}", *self._overrides])
        share_import_path()
        if hubs["cluster"]["gpus_per_node"] and not config.gpus_per_node:
            raise ConfigError("this machine has no GPU, and the engines of this run have")
        node = config.cluster.trainer_nodes if self._node is None else self._node
        if not config.engines_on(node):
            raise ConfigError(
                f"an engine wants engine.tensor_parallel = {config.engine.tensor_parallel} GPUs, and this machine has "
                f"{config.gpus_per_node}"
            )
        if self._own is None:
            advise_on_engines(config)
        file.write_text(dump(config))
        return config, file


def refuse_another(own: Mapping[str, Any], hubs: Mapping[str, Any]) -> None:
    """Raise ConfigError if two configurations differ in keys other than OWN_KEYS and `run.resume`."""
    ours, theirs = dict(flat(own)), dict(flat(hubs))
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in (*OWN_KEYS, "run.resume") and ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"`{key}` is {ours.get(key, 'not set')} on this node and {theirs.get(key, 'not set')} on the hub's: "
                "start all nodes with the same configuration"
            )
