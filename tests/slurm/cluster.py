"""A real SLURM of two nodes on this machine, in a temporary folder: Debian's slurm-wlm and munge, started as root.

Both nodes are this machine, under the names `a` and `b`, which only the processes of the cluster know: each is started
with an /etc/hosts of its own. Nothing outside the folder is changed, and all daemons end with the cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.rig.kept import Kept

NEEDED = ("slurmctld", "slurmd", "munged", "sbatch", "unshare")

WITH_HOSTS = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')
"""Runs a command that sees another /etc/hosts, which is the next argument."""

SETTINGS = """
ClusterName=flashtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
ReturnToService=2
KillWait=30
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
NodeName=a NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=1000 State=UNKNOWN
NodeName=b NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=a,b Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
"""


def missing() -> str:
    """Why no cluster can be started here; empty when one can."""
    absent = [name for name in NEEDED if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    return "" if os.geteuid() == 0 else "SLURM's daemons want to be started by root"


class Cluster(Kept):
    """Runs from `with` to its end."""

    def __init__(self) -> None:
        super().__init__("slurm")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FLASH_"))},
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "PATH": f"{os.environ['PATH']}:/usr/sbin",
        }
        self._daemons: list[subprocess.Popen[bytes]] = []

    def begin(self) -> None:
        """Start its daemons, and wait until both nodes take jobs."""
        folder = self.folder
        (folder / "state").mkdir()
        hosts = Path("/etc/hosts").read_text()
        (folder / "hosts").write_text(f"{hosts}\n127.0.0.1 a b {socket.gethostname()}\n")
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o600)
        settings = SETTINGS.format(host=socket.gethostname(), folder=folder, ports=free_ports(3))
        (folder / "slurm.conf").write_text(settings)
        files = ("key-file=munge.key", "socket=munge.socket", "pid-file=munged.pid", "log-file=munged.log")
        places = [f"--{option.replace('=', f'={folder}/', 1)}" for option in (*files, "seed-file=munged.seed")]
        self._daemon("munged", "--foreground", "--force", *places)
        self.until(lambda: (folder / "munge.socket").exists(), "munged")
        self._daemon("slurmctld", "-D", "-c")
        for node in "ab":
            self._daemon("slurmd", "-D", "-N", node)
        self.until(lambda: self.call("sinfo", "-h", "-o", "%t %D").split() == ["idle", "2"], "both nodes to be idle")

    def _daemon(self, *command: str) -> None:
        with (self.folder / f"{command[0]}.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(self._in_here(command), env=self.environment, stdout=output, stderr=output)
            )

    def _in_here(self, command: Sequence[str]) -> list[str]:
        return [*WITH_HOSTS, str(self.folder / "hosts"), *command]

    def close(self) -> None:
        """End all jobs and daemons, and remove the folder."""
        with suppress(subprocess.SubprocessError):
            self.call("scancel", "--full", "--signal=KILL", "--user=root")
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        super().close()  # also the daemons of steps, and tasks of jobs that were still running

    def call(self, *command: str, variables: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """The output of one of SLURM's commands."""
        environment = {**self.environment, **(variables or {})}
        return subprocess.run(
            self._in_here(command), env=environment, cwd=cwd, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start one of SLURM's commands."""
        return subprocess.Popen(
            self._in_here(command), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def submit(self, *command: str, variables: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Submit a batch script with sbatch's options; the number of the job."""
        return self.call("sbatch", "--parsable", *command, variables=variables, cwd=cwd).strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.call("scontrol", "show", "job", number)))

    def begin_now(self, number: str) -> None:
        """Let a requeued job begin soon, which would wait for two minutes.

        Not at once: in the second in which its last life ended, slurmd takes the next one for that, and kills it.
        """
        self.until(lambda: self.job(number)["JobState"] == "PENDING", f"job {number} to be requeued")
        self.call("scontrol", "update", f"JobId={number}", "StartTime=now+5")

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        """Wait for something outside of us, which nothing tells us of."""
        end = time.monotonic() + seconds
        while True:
            with suppress(subprocess.CalledProcessError):
                if condition():
                    return
            assert time.monotonic() < end, f"waited {seconds:g} s for {what}; logs:\n{self.logs()}"
            time.sleep(0.2)

    def logs(self) -> str:
        """The end of each daemon's log."""
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
