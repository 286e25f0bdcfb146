"""Job of the chaos run: its faults, its commands on three hosts, and its end.

`benchmarks.real.chaos` plans faults with this module; the plan follows from a seed. It makes a `Job` for the calm run
and for the run with faults. Each command that ends is started again after a few seconds, as the manager of a cluster
would do it. This module repairs nothing else.
"""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Literal

import anyio
import msgspec

from benchmarks.form import ROOT, WORKLOADS
from benchmarks.rig.hosts import Hosts
from flash.foreign.vllm_processes import WORKER_TITLE
from flash.observe.rundir.rundir import RunDirectory

NAMES = ("first", "second", "third")
"""Names of the hosts."""
WORKLOAD = WORKLOADS / "chaos.toml"
"""Configuration of the run."""
RESTART_S = 3.0
"""Seconds from the end of a command to its next start."""
VICTIM_S = 15.0
"""Seconds that a fault waits for a victim, which may be starting again."""
POLL_S = 0.5
"""Seconds between two looks at states that no event announces."""
START_S = 600.0
"""Longest wait for the first step with all engines."""
END_S = 120.0
"""Longest wait for a job to end after an interrupt."""
LAST_STEPS = 20
"""Steps of the last launch, which ends by itself."""
LAST_LAUNCH_S = 300.0
"""Longest wait for the end of the last launch."""
EXPECTED_CODES = (0, 130, -signal.SIGINT, -signal.SIGKILL)
"""Exit codes of a command that has finished, was interrupted, or was killed, which only this benchmark does."""


# -- faults ----------------------------------------------------------------------------------------------------------

Target = Literal["trainer", "hub", "node", "core", "worker", "launcher", "network"]
"""Part of the run that a fault hits; `TARGET_HOSTS` describes them."""
How = Literal["kill", "stop", "cut", "half cut"]
"""`kill`: SIGKILL. `stop`: SIGSTOP and later SIGCONT. `cut` and `half cut`: nothing passes a host's link, in both
directions or in one."""

TARGET_HOSTS: dict[Target, tuple[int, ...]] = {
    "trainer": (0,),
    "hub": (0,),
    "node": (1, 2),
    "core": (0, 1, 2),
    "worker": (0, 1, 2),
    "launcher": (0, 1, 2),
    "network": (0, 1, 2),
}
"""Hosts of each target: a trainer rank, the hub's node loop, another node loop, an engine's core, a worker of it,
`flash train` itself, and a host's link."""

Kind = tuple[How, Target]
"""Kind of a fault: what is done, and to which part of the run."""

KINDS: tuple[Kind, ...] = (
    *product(("kill", "stop"), [target for target in TARGET_HOSTS if target != "network"]),
    *(("cut", "network"), ("half cut", "network")),
)
"""All kinds of faults."""

GAP_S = 20.0
"""Mean seconds between two faults."""
SHORTEST_S, LONGEST_S = 5.0, 90.0
"""Seconds of a stop or a cut. Their logarithm is uniform, so that short times are as frequent as long ones."""
ROLES: tuple[Target, ...] = ("hub", "node", "trainer")
"""Targets that a launcher starts. The command line of such a process has the name of its role."""
CORE_TITLE = b"VLLM::EngineCore"
"""Beginning of the title of an engine's core process, which vLLM sets."""


class Fault(msgspec.Struct, frozen=True):
    """A fault that is planned or has happened."""

    at: float
    """Planned time in seconds from the first step with all engines. After it has happened, the time in Unix seconds."""
    how: How
    target: Target
    host: int
    """Number of the host, counted from 0."""
    seconds: float = 0.0
    """Duration of a stop or a cut; 0 for a kill."""
    deaf: bool = False
    """For a link that is cut in one direction: True if the host receives nothing, False if it sends nothing."""

    @property
    def kind(self) -> str:
        """Name of the fault's kind, such as `kill hub`."""
        return f"{self.how} {self.target}"


def plan(seconds: float, seed: int, longest_s: float = LONGEST_S) -> list[Fault]:
    """Plan faults for `seconds`, one every `GAP_S` on average.

    All kinds come in a random order, then all in another order, and so on. The seed decides the orders, hosts and
    durations. No stop or cut lasts longer than `longest_s`.
    """
    rng = random.Random(seed)
    faults: list[Fault] = []
    remaining: list[Kind] = []  # kinds that have not come since all of them were put into a random order
    at = GAP_S / 2
    while at < seconds:
        remaining = remaining or rng.sample(KINDS, len(KINDS))
        how, target = remaining.pop()
        duration = math.exp(rng.uniform(math.log(SHORTEST_S), math.log(longest_s)))
        host, deaf = rng.choice(TARGET_HOSTS[target]), rng.random() < 0.5
        faults.append(Fault(at, how, target, host, 0.0 if how == "kill" else duration, deaf))
        at += GAP_S * rng.uniform(0.5, 1.5)
    return faults


def one_of_each(seed: int, longest_s: float) -> list[Fault]:
    """Return a plan with each kind once, for `--quick`. The parameters are those of `plan`."""
    # Two gaps per fault are more time than all kinds need, so that the plan is long enough.
    return plan(2 * GAP_S * len(KINDS), seed, longest_s)[: len(KINDS)]


def role(command: bytes) -> Target | None:
    """Return the part of the run that a process is; None if it is none that a fault can hit.

    `command` is the process's command line as /proc shows it, with a zero byte after each word. `Job.victims` calls
    this for each process on a host.
    """
    if command.startswith(CORE_TITLE):
        return "core"
    if command.startswith(WORKER_TITLE):
        return "worker"
    words = command.replace(b"\0", b" ").split()
    if words[:1] == [b"flash.run.processes.worker"]:
        return next((target for target in ROLES if target.encode() == words[1]), None)
    if b"flash" in words and b"train" in words and b"-m" in words:
        return "launcher"
    return None


# -- the job ---------------------------------------------------------------------------------------------------------


class Job:
    """A job on three hosts.

    Args:
        hosts: the hosts.
        name: name of the run.
        folder: folder for the run directory and the output of the commands.
    """

    def __init__(self, hosts: Hosts, name: str, folder: Path) -> None:
        self.directory = RunDirectory(folder / name)
        self.failed: list[str] = []
        """Launches that ended with an error of their own."""
        self._hosts = hosts
        self._folder = folder
        self._name = name
        self._arguments = [str(WORKLOAD), f"run.name={name}", f"run.output_dir={folder}"]
        self._launches: dict[int, subprocess.Popen[bytes]] = {}
        """Last command of each host, by the host's number."""
        self._ending = False
        """True if ended commands are not started again."""

    def _start(self, host: int, *more: str) -> subprocess.Popen[bytes]:
        """Start `flash train` on a host (by its number), with `more` arguments, and return the process."""
        variables = {
            "FLASH_NNODES": str(len(NAMES)),
            "FLASH_NODE_RANK": str(host),
            "FLASH_RDZV_ENDPOINT": f"{NAMES[0]}:29411",
            "PYTHONPATH": str(ROOT),
        }
        # Each host has one engine; on two cores they must not all be pinned to the same one.
        cores = sorted(os.sched_getaffinity(0))
        own = f"cluster.node_cpus=[{cores[host % len(cores)]}]"
        command = [sys.executable, "-m", "flash", "train", *self._arguments, own, *more]
        output = self._folder / f"{self._name}-{NAMES[host]}.txt"
        return self._hosts.start(host, command, output=output, cwd=ROOT, variables=variables)

    async def keep(self, host: int) -> None:
        """Start a host's command, and again each time that it ends, until the job ends."""
        resume: tuple[str, ...] = ()
        while not self._ending:
            launch = self._launches[host] = self._start(host, *resume)
            code = await anyio.to_thread.run_sync(launch.wait, abandon_on_cancel=True)
            if code not in EXPECTED_CODES:
                self.failed.append(f"{time.strftime('%H:%M:%S')} {NAMES[host]} ended with exit code {code}")
            # Only the first host has the hub, which resumes. A launch that was killed before it had made the run
            # directory has left nothing to resume.
            resume = ("--resume",) if host == 0 and self.directory.config.exists() else ()
            await anyio.sleep(RESTART_S)

    # -- engines and processes of the job -----------------------------------------------------------------------------

    async def all_engines(self) -> None:
        """Wait for a step with an engine on each host. Raises TimeoutError if there is none within `START_S`."""
        with anyio.fail_after(START_S):
            while True:
                rows = self.directory.read_metrics() if self.directory.metrics.exists() else []
                if rows and rows[-1]["engines"] == len(NAMES):  # engines that served during the newest step
                    return
                await anyio.sleep(POLL_S)  # no event announces it

    def victims(self, host: int, target: Target) -> list[int]:
        """Return the ids of the processes on a host that `target` names."""
        found: list[int] = []
        for pid in self._hosts.processes(host):
            with suppress(OSError):  # it has ended meanwhile
                process = Path(f"/proc/{pid}")
                if role((process / "cmdline").read_bytes()) == target:
                    found.append(pid)
        return found

    # -- faults -------------------------------------------------------------------------------------------------------

    async def inject(self, fault: Fault) -> Fault | None:
        """Carry out a fault, wait until it is over, and return it with the time at which it happened.

        Returns None if it found no victim within `VICTIM_S`. The plan may ask for a process that has just died, so the
        fault waits for its restart.
        """
        if fault.target == "network":
            return await self._cut(fault)
        pid = 0
        with anyio.move_on_after(VICTIM_S):
            while not (pid := self._send_signal(fault)):  # noqa: ASYNC110  # no event announces a process
                await anyio.sleep(POLL_S)
        if not pid:
            return None
        injected = msgspec.structs.replace(fault, at=time.time())
        if fault.how == "stop":
            try:
                await anyio.sleep(fault.seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        return injected

    def _send_signal(self, fault: Fault) -> int:
        """Send the signal of a fault to the first process that it can hit. Returns its id, or 0 if there is none."""
        for pid in self.victims(fault.host, fault.target):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)
                return pid
        return 0

    async def _cut(self, fault: Fault) -> Fault:
        """Cut the link of a host, in both directions or in one (`Fault.deaf`), for the duration of a fault."""
        half = fault.how == "half cut"
        injected = msgspec.structs.replace(fault, at=time.time())
        self._hosts.cut(fault.host, hears=half and not fault.deaf, sends=half and fault.deaf)
        try:
            await anyio.sleep(fault.seconds)
        finally:  # where two cuts overlap, the first end also restores the way between their hosts
            self._hosts.heal(fault.host)
        return injected

    # -- the end of the job -------------------------------------------------------------------------------------------

    async def end(self) -> list[str]:
        """Interrupt the job when all faults are over. Returns a line for each command that had to be killed, because it
        did not end within `END_S`."""
        self._ending = True
        for launch in self._launches.values():
            launch.send_signal(signal.SIGINT)
        return await self._wait_ended(END_S)

    async def finish(self) -> list[str]:
        """Resume the run on the first host, for `LAST_STEPS` more steps, until it ends by itself.

        Returns a line if the command did not end within `LAST_LAUNCH_S` and was killed. Adds a line to `failed` if its
        exit code is not 0.
        """
        last = int(self.directory.read_metrics()[-1]["version"])
        self._launches = {0: self._start(0, "--resume", f"run.steps={last + LAST_STEPS}")}
        stuck = await self._wait_ended(LAST_LAUNCH_S)
        if (code := self._launches[0].returncode) != 0:
            self.failed.append(f"the last launch ended with exit code {code}")
        return stuck

    async def _wait_ended(self, seconds: float) -> list[str]:
        """Wait until all commands have ended, at most `seconds`.

        Kills all processes of each host whose command has not ended, and returns a line with the name of the host.
        """
        with anyio.move_on_after(seconds):
            while any(launch.poll() is None for launch in self._launches.values()):  # noqa: ASYNC110  # as above
                await anyio.sleep(POLL_S)
        stuck = [host for host, launch in self._launches.items() if launch.poll() is None]
        for host in stuck:
            self._hosts.kill_all(host)
            self._launches[host].wait()
        return [f"{NAMES[host]} did not end within {seconds:g} s" for host in stuck]

    async def orphans(self, seconds: float) -> list[str]:
        """Wait until no process is left on the hosts, at most `seconds`, after all commands have ended.

        Returns a line for each process that is left, and for each of Flash's temporary folders there.
        """
        with anyio.move_on_after(seconds):
            while any(self._hosts.processes(host) for host in range(len(NAMES))):  # noqa: ASYNC110  # as above
                await anyio.sleep(POLL_S)
        return self._remaining()

    def _remaining(self) -> list[str]:
        """Return the lines of `orphans`, as they are now."""
        found: list[str] = []
        for host, name in enumerate(NAMES):
            for pid in self._hosts.processes(host):
                with suppress(OSError):
                    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"process {pid} on {name}: {command}")
            found += [f"folder {folder} on {name}" for folder in self._hosts.scratch(host).glob("flash-*")]
        return found
