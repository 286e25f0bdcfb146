"""State that all processes of one launch on this machine share.

A launch is one execution of `flash train`, `flash join` or `flash sft` on a machine. Its first process is the
*launcher*, which starts the node loop and the trainer ranks.

- The environment holds the name of the launch. Each process watches the launcher (`end_with_launcher`), because nothing
  else would end the process after `kill -9` of the launcher. On the first node the end of the launcher counts as an
  interrupt: the run writes a checkpoint and ends in order. On any other node all processes are killed at once, and the
  run goes on without this node. If torchrun started the launcher, the launcher ends with torchrun.
- The scratch folder holds sockets, the configuration, and temporary files of libraries. It is removed at the end of the
  launch. If the launch was killed, the next launch on the machine removes the folder, once the folder's lock shows that
  no process needs it.
- The marker `error.json` holds an error that no restart can fix. A restarted process sees it, and ends at once instead
  of failing again.
"""

from __future__ import annotations

import getpass
import json
import logging
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path

from flash.errors import ConfigError, FlashError, RunDirectoryError
from flash.observe.rundir.rundir import write_atomically
from flash.run.processes.locks import exclusive, is_free, share

LAUNCHER = "FLASH_LAUNCHER"
"""Environment variable that names the launch to all of its processes. The name is made of three numbers with dots
between them: the launcher's process id, its start in clock ticks since boot, and a time in Unix nanoseconds."""

RENDEZVOUS = "FLASH_RDZV_ENDPOINT"
"""Environment variable with HOST:PORT of the first node in a job of several nodes. Each node advertises its address on
the interface that routes to this host."""
RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
"""Environment variables in which launchers, such as srun and mpirun, give the number of a process and the number of all
processes that they have started together."""
SCRATCH_PREFIX = "flash-job-"
"""Beginning of the scratch folder's name, by which the next launch finds folders of killed launches."""
SCRATCH = "FLASH_SCRATCH"
"""Environment variable with the path of the scratch folder, for the processes of the launch."""
LONGEST_SCRATCH = 64
"""Largest length of the scratch folder's path in bytes, so that the paths of sockets in it fit. vLLM adds 37 bytes to
it, and Linux allows 107."""
SCRATCH_LOCK = "lock"
"""Name of the lock file in the scratch folder."""
SHARED_NAME = re.compile(rb" /dev/shm/((?:psm_|sem\.mp-)\S+)$", re.MULTILINE)
"""Pattern of a shared-memory block or semaphore of Python's multiprocessing in a line of /proc/PID/maps. Names of files
in other lines may be no text."""
SHARED_MEMORY = "shared-memory"
"""Name of the file in the scratch folder that lists the names that the engines of this launch use in /dev/shm. Nothing
else distinguishes them from the names of other jobs."""
ERROR_FILE = "error.json"
"""Name of the marker file in the run directory."""

CALLER = "FLASH_CALLER"
"""Environment variable of a command that a Python program has started (`flash.run.command`): the process id of the
program, a colon, and the file in which the command leaves its error."""

log = logging.getLogger("flash")


def begin_launch() -> str:
    """Make this process the launcher of all processes that it starts, and return the name of the launch.

    `launch`, `join` and `launch_sft` of `flash.run.processes.launcher` call this before they start processes. The
    processes inherit the name in their environment variables.
    """
    os.environ[LAUNCHER] = name = f"{os.getpid()}.{start_ticks(os.getpid())}.{time.time_ns()}"
    return name


def start_ticks(pid: int) -> str:
    """Return the start of a process in clock ticks since boot, which distinguishes it from a later one with its id.

    Raises:
        FileNotFoundError, ProcessLookupError: there is no such process, or it has ended just now.
    """
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    # The second field is the name of the program, in parentheses. The name may contain anything, also bytes that are
    # no text.
    return stat.rpartition(b")")[2].split()[19].decode("ascii")


def use_torchrun_variables(environment: MutableMapping[str, str]) -> None:
    """Set this node's number and the number of nodes from torchrun's variables, if torchrun has started this process.

    Every command and `flash.train` call this first, so that the rest of Flash needs to know only the variables FLASH_….
    The function does nothing if FLASH_NNODES is set, because a user's own values take precedence.

    Raises:
        ConfigError: torchrun has started several processes per node.
    """
    if "TORCHELASTIC_RUN_ID" not in environment or "FLASH_NNODES" in environment:
        return
    if environment["LOCAL_WORLD_SIZE"] != "1":
        raise ConfigError("torchrun starts one `flash` per node, which starts the trainer ranks: --nproc-per-node=1")
    environment["FLASH_NNODES"], environment["FLASH_NODE_RANK"] = environment["WORLD_SIZE"], environment["RANK"]
    if environment["WORLD_SIZE"] != "1":
        environment.setdefault(RENDEZVOUS, f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}")


def refuse_several(environment: Mapping[str, str]) -> None:
    """Refuse a command or program that a launcher has started several times, since each would start a whole run.

    `flash.train`, `flash train` and `flash sft` call this before any work. The processes of torchrun are the nodes of
    one run, for which `use_torchrun_variables` has set FLASH_NNODES before. A user may set it too. `srun --pty` gives
    its terminal to the first task alone, so that a command that is typed there runs once.

    Raises:
        ConfigError: another launcher has started the program several times. The message says what to do.
    """
    if "FLASH_NNODES" in environment:
        return
    for rank, size in RANKS:
        # A step that is started from that terminal inherits its variables, so they excuse the first task alone.
        if rank == "SLURM_PROCID" and environment.get(rank) == "0" and "SLURM_PTY_PORT" in environment:
            continue
        if rank in environment and (count := environment.get(size, "")).isdecimal() and int(count) > 1:
            raise ConfigError(
                f"this program was started {count} times ({size} = {count}), and each process would start a whole run. "
                "For a run on several nodes, let torchrun start the program with --nproc-per-node=1 on each node, or "
                "write a configuration file and start it as docs/scaling.md says. If only this process is to train, or "
                "each process a run of its own, set FLASH_NNODES=1"
            )


def caller_file(environment: Mapping[str, str]) -> Path | None:
    """Return the file for the error of this command, if a Python program has started it; else None.

    The command line calls this first. A command that an environment or agent of the run starts inherits the variable,
    but is no child of the program, so it gets None.
    """
    pid, _, file = environment.get(CALLER, "").partition(":")
    return Path(file) if pid == str(os.getppid()) else None


def end_with_torchrun() -> None:
    """Start a thread that sends SIGTERM to this process when torchrun ends, if torchrun started it.

    The launcher calls this just before the launch. torchrun kills its children if it ends in order, but not if it is
    killed itself. The thread watches the direct parent. If a wrapper script lies between torchrun and this process, the
    end of the script is noticed, and that of torchrun is not.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent() -> None:
    """Start a thread that sends SIGTERM to this process when its parent ends.

    The parent is torchrun, or a Python program that has started this command.
    """
    # The end of the parent is not noticed if it has ended already, so that the parent is init or a subreaper. The
    # parent cannot be watched if it ends just now, or if it is outside of this process's PID namespace (id 0).
    with suppress(OSError):
        descriptor = os.pidfd_open(os.getppid())
        threading.Thread(target=_terminate_after, args=(descriptor,), daemon=True).start()


def _terminate_after(descriptor: int) -> None:
    """Wait for the end of the process that the pidfd `descriptor` refers to, and send SIGTERM to this process. Runs in
    a thread."""
    select.select([descriptor], [], [])  # readable when the process ends
    os.kill(os.getpid(), signal.SIGTERM)


def end_with_launcher(grace_s: float, *, speaks: bool) -> None:
    """Interrupt this process when its launcher is gone, and kill its process group `grace_s` seconds later.

    The group holds this process and its children, but neither the launcher nor the engines, which end with the process
    that started them. Node loops and trainer ranks call this at their beginning (`flash.run.processes.worker`). If the
    launcher is gone already, this process exits at once. A thread watches the launcher.

    Args:
        grace_s: seconds that the process has to end in order after SIGTERM; 0: it is killed at once, without SIGTERM.
        speaks: True to print a line about the end of the launcher. True for the node loop only, so that the line
            appears once per node.
    """
    pid, ticks, _ = os.environ[LAUNCHER].split(".")
    launcher = int(pid)
    try:
        descriptor = os.pidfd_open(launcher)
        # Another process may have got the id of the launcher. It would never end because of this run.
        is_launcher = start_ticks(launcher) == ticks
    except (ProcessLookupError, FileNotFoundError):
        os._exit(1)
    # A pidfd is readable when its process has ended, even if nobody has waited for the process yet.
    if not is_launcher or select.select([descriptor], [], [], 0)[0]:
        os._exit(1)
    watcher = threading.Thread(target=_watch_launcher, args=(launcher, descriptor, grace_s, speaks), daemon=True)
    watcher.start()


def _watch_launcher(launcher: int, descriptor: int, grace_s: float, speaks: bool) -> None:
    """Wait for the end of the launcher, then end this process as `end_with_launcher` says. Runs in a thread.

    `launcher` is the launcher's process id, `descriptor` its pidfd.
    """
    # Readable when the process ends. PR_SET_PDEATHSIG of Linux is no replacement: it sends its signal when the thread
    # that started this process ends, which may be earlier, and it prints nothing.
    select.select([descriptor], [], [])
    if speaks:
        action = "leaving a checkpoint for --resume, and ending" if grace_s else "ending this node's part"
        with suppress(OSError):  # the reader of the output may have ended with the launcher
            sys.stderr.write(f"flash: process {launcher}, which started this run, is gone: {action}\n")
            sys.stderr.flush()
    if grace_s:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
    os.killpg(os.getpgrp(), signal.SIGKILL)


@contextmanager
def scratch_folder(parent: Path | None = None) -> Generator[Path]:
    """Create the scratch folder for the processes that are started in the block, and remove it with its contents.

    The launcher calls this, and so do commands that start engines alone, such as `flash eval`. While the block runs,
    TMPDIR and FLASH_SCRATCH name the folder. Folders that killed launches have left are removed first. The folder lies
    in `parent`, or else in Python's folder for temporary files; in /tmp if its path would be too long there.
    """
    base = str(parent or tempfile.gettempdir())
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        user = f"uid_{os.getuid()}"
    short = base if len(os.fsencode(base)) < LONGEST_SCRATCH - 20 else "/tmp"  # 20 bytes for the folder's own name
    remove_abandoned(Path(short))
    # Locked before it gets its final name, under which other launches look for abandoned folders.
    folder = Path(tempfile.mkdtemp(prefix=".flash-new-", dir=short))
    with exclusive(folder / SCRATCH_LOCK, wait_s=0):
        folder = folder.rename(folder.with_name(folder.name.replace(".flash-new-", SCRATCH_PREFIX)))
        variables = {
            SCRATCH: str(folder),
            "TMPDIR": str(folder),
            # Compiled kernels are worth keeping, so their cache stays where torch puts it by default.
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get(
                "TORCHINDUCTOR_CACHE_DIR", os.path.join(base, f"torchinductor_{user}")
            ),
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield folder
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
            _remove(folder)


def join_scratch_folder() -> None:
    """Hold a lock on the scratch folder until this process ends, so that no launch removes it if the launcher dies.

    Each process that the launcher starts calls this.
    """
    share(Path(os.environ[SCRATCH]) / SCRATCH_LOCK)


def remember_shared_memory(core: int) -> None:
    """Record the names in /dev/shm that an engine uses, so that they are removed with the scratch folder.

    An engine that is killed leaves its shared memory behind. So the engine calls this function again and again while it
    starts, and when it serves; each call adds the names that are new. `core` is the process id of the engine's core,
    which leads the engine's process group. If the disk is full, the names are not recorded, and the engine continues.
    """
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process has ended, or belongs to another user
            if os.getpgid(int(process.name)) == core:
                maps = (process / "maps").read_bytes()
                found.update(name.decode("ascii") for name in SHARED_NAME.findall(maps))
    with suppress(OSError), (Path(os.environ[SCRATCH]) / SHARED_MEMORY).open("a+") as file:
        file.seek(0)
        # A single write to a file in append mode, because several engines may start at the same time.
        file.write("".join(f"{name}\n" for name in sorted(found - set(file.read().splitlines()))))


def remove_abandoned(base: Path) -> None:
    """Remove the scratch folders that killed launches of this user have left in the folder `base`.

    `scratch_folder` calls this before it makes a new folder.
    """
    for folder in base.glob(f"{SCRATCH_PREFIX}*"):
        with suppress(OSError):  # another launch removes it at the same time, or we have no permission
            if (
                folder.stat().st_uid == os.getuid()
                and (folder / SCRATCH_LOCK).is_file()
                and is_free(folder / SCRATCH_LOCK)
            ):
                _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a scratch folder, and the shared memory that its launch has left."""
    with suppress(FileNotFoundError):
        for name in (folder / SHARED_MEMORY).read_text().splitlines():
            Path("/dev/shm", Path(name).name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


class ErrorMarker:
    """File `error.json` with the error that ended this launch, so that a restart does not repeat the error.

    Only launchers, and processes of the first node, write it. If the disk of the run directory is full, the file is
    written to the scratch folder.

    Args:
        run_dir: the run directory.
        launch: name of the launch, from `begin_launch`. A marker of another launch does not count.
    """

    def __init__(self, run_dir: Path, launch: str) -> None:
        self._path = run_dir / ERROR_FILE
        self._launch = launch

    def exists(self) -> bool:
        """Return True if a process of this launch has ended with an error that no restart can fix.

        A process that starts then ends at once, and the launcher returns another exit code.
        """
        return self.message() is not None

    def message(self) -> str | None:
        """Return the message of the error that ended this launch; None if there is none."""
        for path in self._places():
            try:
                row = json.loads(path.read_text())
                if row["launch"] == self._launch:
                    return str(row["message"])
            except (OSError, ValueError, KeyError):
                continue  # no marker in this place
        return None

    def _places(self) -> list[Path]:
        """Return the possible paths of the marker, the preferred one first: run directory, then scratch folder."""
        scratch = os.environ.get(SCRATCH)
        return [self._path] if scratch is None else [self._path, Path(scratch) / ERROR_FILE]

    def write(self, error: FlashError) -> None:
        """Write the error to the first place that can be written. Log a warning if none can.

        A process of the first node calls this when it ends with an error that no restart can fix. A launcher calls it
        when a part has no restart left.
        """
        row = {"launch": self._launch, "error": type(error).__name__, "message": str(error), "time": time.time()}
        problems: list[str] = []
        for path in self._places():
            # No exception is raised here: a full disk must not hide the error itself.
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, json.dumps(row, indent=2).encode())
                return
            except (OSError, RunDirectoryError) as problem:
                problems.append(str(problem))
        log.warning("; ".join(problems))
