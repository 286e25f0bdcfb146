"""Batch jobs of launch.sh: of a real SLURM, or of the stand-in for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from benchmarks.rig.kept import Kept
from tests.slurm.cluster import Cluster

LAUNCH = Path(__file__).parents[2] / "launch.sh"
REAL_FLASH = f"""#!/bin/sh
exec {sys.executable} -m flash "$@"
"""
"""This tree's, for `make_project`; PYTHONPATH leads to it."""


def make_project(folder: Path, flash: str) -> Path:
    """A project as launch.sh finds it, whose environment is made already and has this program as `flash`."""
    project = folder / "project"
    program = project / ".venv" / "bin" / "flash"
    program.parent.mkdir(parents=True)
    program.write_text(flash)
    program.chmod(0o755)
    shutil.copy(LAUNCH, project / "launch.sh")
    (project / "scripts").mkdir()
    (project / "scripts" / "install.py").touch()
    return project


class Job(Protocol):
    """A batch job."""

    def output(self) -> str:
        """What it has written so far."""
        ...

    def signal_script(self) -> None:
        """SIGTERM to the batch script alone, as before the time limit."""
        ...

    def signal_ranks(self) -> None:
        """SIGTERM to the ranks alone, as at the begin of a preemption with a grace time."""
        ...

    def cancel(self) -> None:
        """What `scancel` does: the job is told off, and everything in it gets SIGTERM."""
        ...

    def end(self) -> str:
        """How it ended: `requeued`, `cancelled`, or its exit code."""
        ...


class StandIn(Kept):
    """A batch script that runs here from `with` to its end, with the stand-in's commands on its PATH."""

    def __init__(self, project: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
        super().__init__("standin")
        options, self._arguments = divided(command)
        install_stand_in(self.folder / "bin")
        self._output = self.folder / "output.txt"
        self._project = project
        self._variables = {
            **variables,
            "SLURM_JOB_ID": "20042",
            "SLURM_JOB_NODELIST": "node[7-8]",
            "SLURM_JOB_NUM_NODES": options.get("--nodes", "1"),
            "SLURM_NODEID": "0",
            "SLURM_STAND_IN": str(self.folder),
            "COMMAND": str(project / "launch.sh"),
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
        }

    def begin(self) -> None:
        """Start the script."""
        with self._output.open("wb") as output:
            self._script = subprocess.Popen(
                [self._project / "launch.sh", *self._arguments],
                env={**os.environ, **self._variables},
                cwd=self._project,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def output(self) -> str:
        return self._output.read_text()

    def signal_script(self) -> None:
        self._script.send_signal(signal.SIGTERM)

    def signal_ranks(self) -> None:
        for group in self.folder.glob("group-*"):
            os.killpg(int(group.name.removeprefix("group-")), signal.SIGTERM)

    def cancel(self) -> None:
        (self.folder / "state").write_text("CANCELLED")
        self.signal_ranks()
        self.signal_script()

    def end(self) -> str:
        code = self._script.wait(60)
        if (self.folder / "requeued").exists():
            return "requeued"
        return "cancelled" if (self.folder / "state").exists() else str(code)

    def close(self) -> None:
        """End the job, and all that it has started."""
        super().close()
        self._script.wait()


class Real:
    """A job of a real cluster."""

    def __init__(self, cluster: Cluster, project: Path, command: Sequence[str], variables: Mapping[str, str]) -> None:
        self._cluster = cluster
        self._file = Path(tempfile.mkdtemp(prefix="job-", dir=project.parent)) / "output.txt"
        self.number = cluster.submit(f"--output={self._file}", *command[1:], variables=variables, cwd=project)

    def output(self) -> str:
        return self._file.read_text() if self._file.exists() else ""

    def signal_script(self) -> None:
        self._cluster.call("scancel", "--batch", "--signal=TERM", self.number)

    def signal_ranks(self) -> None:
        self._cluster.call("scancel", "--signal=TERM", self.number)

    def cancel(self) -> None:
        self._cluster.call("scancel", self.number)

    def end(self) -> str:
        self._cluster.until(lambda: self._ended() is not None, "the job to end")
        return self._ended() or ""

    def _ended(self) -> str | None:
        job = self._cluster.job(self.number)
        if job["Restarts"] != "0":
            return "requeued"
        if job["JobState"] == "CANCELLED":
            return "cancelled"
        return job["ExitCode"].partition(":")[0] if job["JobState"] in ("COMPLETED", "FAILED") else None

    def close(self) -> None:
        with suppress(subprocess.CalledProcessError):
            self._cluster.call("scancel", "--full", "--signal=KILL", self.number)
            self._cluster.call("scancel", self.number)


def divided(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options and the arguments of `sbatch OPTION… launch.sh ARGUMENT…`."""
    script = command.index("launch.sh")
    return dict(option.split("=", 1) for option in command[1:script]), list(command[script + 1 :])


def install_stand_in(folder: Path) -> None:
    """Put the stand-in's commands into a folder."""
    folder.mkdir()
    program = (Path(__file__).parent / "stand_in.py").read_text()
    for name in ("srun", "scancel", "scontrol"):
        (folder / name).write_text(f"#!{sys.executable} -S\n{program}")
        (folder / name).chmod(0o755)
