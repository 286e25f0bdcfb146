"""Launcher: starts the processes of `flash train`, `flash join` and `flash sft` on this machine.

A machine runs a node loop, trainer ranks, or both. A node loop is the event loop with the engines and episodes of a
machine. On the first node it also has the hub (`HubLoop`). The node loop of any other node joins the run
(`JoinedLoop`), and so does the node loop of `flash join`. The commands, and `flash.train`, call `launch`, `join` and
`launch_sft` in their own process. These functions make the parts and give them to
`flash.run.processes.launch.Launch`, which runs them to their end.

In a job of several nodes, every node runs the same command with `FLASH_NNODES`, `FLASH_NODE_RANK` and
`FLASH_RDZV_ENDPOINT` set. Under SLURM, launch.sh sets them. Under torchrun with one process per node, they are derived
from torchrun's own variables.

While a launch runs on the first node, no other launch may write its run directory. Each launch owns a folder for
temporary files. The processes of a launch end when its launcher is gone.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import msgspec
from msgspec.structs import replace

from flash.config.check import advise_on_engines
from flash.config.load import dump, flat, load
from flash.config.objects import import_from, share_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.errors import DECODE_ERRORS, ConfigError, RunDirectoryError
from flash.hub import protocol as p
from flash.observe.rundir.rundir import RunDirectory
from flash.run.models import make_missing_models
from flash.run.processes.forked import ProcessOrder, loops_server
from flash.run.processes.hub_place import TOKEN_VARIABLE, HubPlace, parse_token, withdraw
from flash.run.processes.launch import Launch
from flash.run.processes.launch_state import RENDEZVOUS, ErrorMarker, begin_launch, end_with_torchrun, scratch_folder
from flash.run.processes.locks import exclusive_run
from flash.run.processes.ranks import Ranks, run_ranks
from flash.run.processes.rendezvous import HubSearch, advertised_host, hub_place
from flash.run.processes.supervisor import End, SupervisedPart, describe, judge, say
from flash.run.restart import refuse_idle_requeues

if TYPE_CHECKING:
    from flash.run.sft_rows import CourseTokens

SPARE_NODE = "FLASH_SPARE_NODE"
"""Environment variable with the path of a file. The launcher creates the file if the run can go on without this node.
launch.sh looks for it if the launcher was killed."""
ENDPOINT = re.compile(r".+:[0-9]+")
"""Pattern of HOST:PORT."""
ON_ONE_MACHINE = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables of all processes if one node has all trainer ranks. gloo looks up the machine's own name, which
cannot be resolved on some machines, and torch warns of each failed attempt. Values that the user has set are kept."""
OWN_KEYS = (
    *("cluster.gpus_per_node", "cluster.node_cpus", "cluster.trainer_cpus"),
    *("engine.count", "engine.memory_fraction", "engine.kv_cache_gib"),
)
"""Configuration keys that may differ between the machines of a run, because they describe the machine."""


def place_in_job(config: Config, environment: Mapping[str, str]) -> int:
    """Return the number of this node in the job, from 0, as the environment variables give it.

    `launch` and `launch_sft` call this first.

    Raises:
        ConfigError: the environment and cluster.nodes disagree, or a variable has an invalid value.
    """
    nodes, node = _number(environment, "FLASH_NNODES", 1), _number(environment, "FLASH_NODE_RANK", 0)
    if (token := environment.get(TOKEN_VARIABLE)) is not None:
        parse_token(token)
    if nodes != config.cluster.nodes:
        raise ConfigError(
            f"cluster.nodes = {config.cluster.nodes}, but this job has {nodes} node(s): change one of them, or start "
            "every node through launch.sh under sbatch, or through torchrun"
        )
    if not 0 <= node < nodes:
        raise ConfigError(f"FLASH_NODE_RANK = {node}, expected one from 0 to {nodes - 1}, another on each node")
    if nodes > 1 and not ENDPOINT.fullmatch(environment.get(RENDEZVOUS, "")):
        raise ConfigError(f"{RENDEZVOUS} = {environment.get(RENDEZVOUS, '')!r}, expected HOST:PORT of the first node")
    return node


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    """Return the number in an environment variable, or `default` if it is not set. Raises ConfigError if it is not a
    number."""
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r}, expected a number")
    return int(text)


def resume_command(command: Sequence[str]) -> str:
    """Return the command with which a user resumes the run that `command` started or resumed, for messages."""
    kept = [part for part in command if part != "--resume" and not part.startswith("run.resume=")]
    return shlex.join([*kept, "--resume"])


class HubLoop(SupervisedPart):
    """Node loop of the first node, with the hub. When it restarts, its engines and the trainer ranks restart too.

    Args:
        config: the run's configuration.
        file: file from which the process reads the configuration.
    """

    def __init__(self, config: Config, file: Path) -> None:
        super().__init__(config, "the node loop starts again, with its engines and the trainer ranks")
        self._file = file
        self._run_config = config
        """The configuration, which is never None here."""

    async def run_once(self, restarts: int) -> tuple[End, list[str]]:
        """Run the node loop with the hub once. Implements `SupervisedPart.run_once`."""
        self.processes.fork_from(loops_server(self._run_config, 0))
        ended = await self.processes.run("hub", self._file, [ProcessOrder(0, restarts)])
        end, silent = await judge(ended, self.processes.killed, self.ending)
        # `judge` returns WITH_PEER, because it does not count a process that this supervisor has killed. But the hub
        # itself hung, so the restart must count.
        if self.hung and end == End.WITH_PEER:
            return End.FAILED, [f"the node loop hangs, and was killed: {self.hang_reason}"]
        return end, [describe("the node loop", one) for one in silent]


def launch(config: Config) -> int:
    """Run this node's part of the job to its end, for `flash train` and `flash.train`. Returns the exit code.

    The exit code is 0 if the run or this node's part of it ended in order; NAMED (2) if the run failed with an error of
    Flash, else 1; LOST (75) if this node has failed and the run goes on without it; `End.INTERRUPTED` (130) after a
    signal.

    Raises:
        ConfigError: the environment and the configuration disagree.
        RunDirectoryError: another launch writes the run directory.
        RequeueError: SLURM has requeued the job several times without progress.
        FlashError: on a node other than the first: there is no hub, or it has failed.
    """
    node = place_in_job(config, os.environ)
    ranks_here = config.cluster.trainer_ranks_on(node) > 0
    if ranks_here:
        sys.stdout.write(f"[{describe_start(config, node)}]\n")
        sys.stdout.flush()
        if config.algorithm.options or ":" in config.algorithm.objective:  # Flash's own objectives are tested
            from flash.trainer.objective import try_objective  # imports torch

            try_objective(config)  # so that a fault of the user's objective shows before anything starts
        if config.cluster.trainer_nodes == 1:
            for name, value in ON_ONE_MACHINE.items():
                os.environ.setdefault(name, value)
    os.environ.setdefault("FLASH_NODE_RANK", "0")
    # The run can go on without a node that has no trainer ranks. Its exit code says so (LOST), but not if the process
    # is killed with SIGKILL. launch.sh then looks for the file.
    if (file := os.environ.pop(SPARE_NODE, "")) and node > 0 and not ranks_here:
        with suppress(OSError):  # without the file the job ends with this process, and launch.sh names the node
            Path(file).touch()
    if config.cluster.nodes > 1:
        advertised_host(config)  # a wrong name fails here once, and not in every process
    # Each process would otherwise start as many threads as the machine has cores. Processes that compute set their own
    # number.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    share_import_path()
    marker, place = ErrorMarker(config.run_dir, begin_launch()), hub_place(config, os.environ)
    with ExitStack() as stack:
        # SLURM starts a requeued job with the same command. Such a job continues its run.
        requeued = int(os.environ.get("SLURM_RESTART_COUNT", "0")) > 0
        if node == 0:
            stack.enter_context(exclusive_run(config.run_dir, grace_s(config)))
            if requeued:
                refuse_idle_requeues(config)
        if requeued:
            config = replace(config, run=replace(config.run, resume=True))
        folder = stack.enter_context(scratch_folder())
        file = folder / "run.toml"
        file.write_text(dump(config), encoding="utf-8")
        loop: SupervisedPart | None = None
        if node == 0:
            loop = HubLoop(config, file)
            stack.callback(leave_in_order, config, marker, loop)
        elif config.engines_on(node) or not ranks_here:
            loop = JoinedLoop(place, folder, node, own=config)
        ranks = Ranks(config, node, file, place, prints=loop is None) if ranks_here else None
        end_with_torchrun()
        return Launch(loop, ranks, marker, has_hub=node == 0).run()


def leave_in_order(config: Config, marker: ErrorMarker, loop: SupervisedPart) -> None:
    """Withdraw the hub's announcement, and write a summary if the run's processes have not written it themselves.

    They have not after an error, or if they were killed. This is called at the end of each launch that has the hub, or
    that trains rows (`flash sft`).

    Args:
        config: the run's configuration.
        marker: marker with the error that has ended the launch.
        loop: the part that writes the run directory: the node loop with the hub, or the ranks of `flash sft`.
    """
    from flash.observe.recorder import write_summary

    withdraw(config.run_dir)
    directory = RunDirectory(config.run_dir)
    if directory.config.is_file() and not directory.summary.exists():
        # A full disk or a damaged file must not hide the error.
        with suppress(OSError, ValueError, *DECODE_ERRORS, RunDirectoryError):
            ledger = msgspec.json.decode(directory.ledger.read_bytes()) if directory.ledger.is_file() else {}
            write_summary(directory, config, ledger, loop.restarts, error=marker.message() or "")


def describe_start(config: Config, node: int) -> str:
    """Return a line about the processes that node `node` is about to start.

    `launch` prints it first, since it takes seconds until these processes can print anything.
    """
    trainers, engines = config.cluster.trainer_ranks_on(node), config.engines_on(node)
    where = f"node {node}: " if config.cluster.nodes > 1 else ""
    return f"{where}starting processes for {counted(trainers, 'trainer rank')} and {counted(engines, 'engine')}"


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, such as `1 engine` or `2 engines`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def join(place: HubPlace, overrides: Sequence[str] = ()) -> int:
    """Join a run, for `flash join`: run a node loop on this machine until the run is over or a signal arrives.

    Returns the exit code: 0, or LOST if the node loop has failed and the run goes on without it.

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
    """Node loop of a machine that joins a run: every node of a job but the first, and every node of `flash join`.

    Each start asks the hub for the run's configuration first, and starts `flash.run.joined` with it. A node loop that
    dies is restarted up to cluster.max_restarts times. It is also restarted, without being counted, if it cannot serve
    the next hub with its running engines. Trainer ranks do not restart with it, not even those of its own machine.

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
            restart_line="the node loop of this node starts again, and the run goes on meanwhile",
            aftermath="; the run goes on without it",
        )
        self._place = place
        self._folder = folder
        self._node = node
        self._own = own
        self._overrides = overrides
        self._begun = time.time()
        """Time at which the present start of the node loop began, in Unix seconds."""
        self._search = HubSearch(place, os.environ.get(TOKEN_VARIABLE))
        self._run: p.RunReply | None = None
        """Description of the run by the last hub that was found; None before the first one, or if the run is over."""
        self._needs_hub = True
        """True if the next start has to look for a hub first: at the first start, and after a hub was lost."""

    async def run_once(self, restarts: int) -> tuple[End, list[str]]:
        """Find the hub if necessary, and run one node loop. Implements `SupervisedPart.run_once`.

        Raises:
            FlashError: there is no hub, or this machine cannot join it.
        """
        first = self._run is None
        if self._needs_hub:
            # `flash join` has no configuration at first. It asks once (0 seconds), so that its user sees at once that
            # there is no hub.
            seconds = self.config.deadlines.rendezvous if self.config else 0.0
            found = await self._search.find(seconds, self._run)  # the hub's address, and its description of the run
            self._run = None if found is None else found[1]
        run = self._run
        if run is None or run.ending:
            # Here `flash join` has come too late. At a restart, or for a node of a job, the end of the run is no error.
            if run is not None and self._own is None and first:
                raise ConfigError(f"the run of {self._place} is at its end: there is nothing left for a node to do")
            say("the run is over")
            return End.OVER, []
        config, file = self._configure(run)
        self.config = config
        await anyio.to_thread.run_sync(make_missing_models, config, abandon_on_cancel=True)
        node = self._number_in_job(config)
        # The node loop serves only hubs whose configuration has this digest.
        order = ProcessOrder(node, restarts, place=self._place, digest=run.digest, begun=self._begun)
        self.processes.fork_from(loops_server(config, node))
        ended = await self.processes.run("node", file, [order])
        end, silent = await judge(ended, self.processes.killed, self.ending)
        # After a failure of the node loop itself the hub is probably there, and the next node loop looks for it
        # (`HubSearch`).
        self._needs_hub, self._begun = end == End.WITH_PEER, time.time()
        return end, [describe("the node loop", one) for one in silent]

    def _number_in_job(self, config: Config) -> int:
        """Return the number of this machine in its job. `config`: the run's configuration.

        The number determines the engines of the machine. A machine without a job gets the first number of a node that
        has engines only.
        """
        return config.cluster.trainer_nodes if self._node is None else self._node

    def _configure(self, run: p.RunReply) -> tuple[Config, Path]:
        """Return the run's configuration on this machine, and the file from which the node loop reads it.

        `run_once` calls this before it starts the node loop. `run` is the hub's description of the run. A node of a job
        compares its own configuration with the hub's. A node of `flash join` takes the hub's, with its own overrides.
        It also changes to the folder in which the run was started, and uses the run's import path, if this machine has
        these folders: relative paths of the configuration then mean the same files.

        Raises:
            ConfigError: this machine was started with another configuration, or it cannot run an engine.
        """
        file = self._folder / "config.toml"
        hub_table: dict[str, Any] = tomllib.loads(run.config)
        if self._own is not None:
            refuse_another(tomllib.loads(dump(self._own)), hub_table)
            config = self._own
        else:
            if Path(run.folder).is_dir():
                os.chdir(run.folder)
            import_from(folder for folder in run.imports if Path(folder).is_dir())
            file.write_text(run.config, encoding="utf-8")
            # A joining node never resumes the run itself. The number of GPUs depends on the machine.
            gpus = "auto" if hub_table["cluster"]["gpus_per_node"] else "0"
            config = load(file, ["run.resume=false", f"cluster.gpus_per_node={gpus}", *self._overrides])
        share_import_path()
        if hub_table["cluster"]["gpus_per_node"] and not config.gpus_per_node:
            raise ConfigError("this machine has no GPU, and the engines of this run need one")
        if not config.engines_on(self._number_in_job(config)):
            raise ConfigError(
                f"an engine wants engine.tensor_parallel = {config.engine.tensor_parallel} GPUs, and this machine has "
                f"{config.gpus_per_node}"
            )
        if self._own is None:  # the number of engines depends on this machine's GPUs
            advise_on_engines(config)
        file.write_text(dump(config), encoding="utf-8")
        return config, file


def refuse_another(own_table: Mapping[str, Any], hub_table: Mapping[str, Any]) -> None:
    """Raise ConfigError if two configurations differ in keys other than OWN_KEYS and `run.resume`.

    A node of a job calls this when it joins the hub. Each node reads its own configuration files, which may have been
    edited between two starts. `own_table` is this node's configuration, `hub_table` that of the hub, both as nested
    tables.
    """
    ours, theirs = dict(flat(own_table)), dict(flat(hub_table))
    for key in sorted(ours.keys() | theirs.keys()):
        if key not in (*OWN_KEYS, "run.resume") and ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"`{key}` is {ours.get(key, 'not set')} on this node and {theirs.get(key, 'not set')} on the hub's: "
                "start all nodes with the same configuration"
            )


class SftRanks(SupervisedPart):
    """All trainer ranks of `flash sft`, which runs on one machine. The first rank writes the run directory.

    `file` is the file from which the ranks read the configuration.
    """

    def __init__(self, config: Config, file: Path) -> None:
        super().__init__(config, "the trainer ranks start again", failure="the trainer ranks have failed")
        self._file = file
        self._run_config = config
        """The configuration, which is never None here."""

    async def run_once(self, restarts: int) -> tuple[End, list[str]]:
        """Run all ranks of `flash sft` once. Implements `SupervisedPart.run_once`."""
        ended = await run_ranks(self, "sft", self._run_config, 0, self._file, restarts)
        end, silent = await judge(ended, self.processes.killed, self.ending)
        return end, [describe(f"trainer rank {one.local}", one) for one in silent]


def launch_sft(config: Config, tokens: CourseTokens) -> int:
    """Train the rows of `tokens` to the end, for `flash sft`. Returns an exit code of `launch`, but never LOST.

    The ranks need neither a hub nor engines. The launch counts them as the part with the hub (`has_hub`), because their
    end is the end of the run.

    Raises:
        ConfigError: the environment and the configuration disagree.
        RunDirectoryError: another launch writes the run directory.
    """
    from flash.run.sft_rows import SFT_ROWS

    place_in_job(config, os.environ)
    sys.stdout.write(f"[starting {counted(config.cluster.trainer_ranks, 'trainer rank')}]\n")
    sys.stdout.flush()
    for name, value in ON_ONE_MACHINE.items() | {"FLASH_NODE_RANK": "0", "OMP_NUM_THREADS": "1"}.items():
        os.environ.setdefault(name, value)
    share_import_path()
    marker = ErrorMarker(config.run_dir, begin_launch())
    with ExitStack() as stack:
        stack.enter_context(exclusive_run(config.run_dir, grace_s(config)))
        folder = stack.enter_context(scratch_folder())
        file = folder / "run.toml"
        file.write_text(dump(config), encoding="utf-8")
        tokens.save(folder / SFT_ROWS)
        ranks = SftRanks(config, file)
        stack.callback(leave_in_order, config, marker, ranks)
        end_with_torchrun()
        return Launch(ranks, marker=marker, has_hub=True).run()
