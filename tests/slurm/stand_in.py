"""What launch.sh needs of SLURM, without SLURM: installed as `srun`, `scancel` and `scontrol`, told apart by that name.

It behaves as the real commands do, as tests/slurm/test_batch_script.py holds it to: SIGTERM makes srun kill its tasks,
a task that fails has the others terminated, and scancel --signal reaches the process groups of the tasks.

Needs nothing but Python. `SLURM_STAND_IN` is a folder: it holds the tasks' process groups, the job's state, and what
was requeued.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("SLURM_STAND_IN", ""))
NODES = ("node7", "node8")


def say(text: str) -> None:
    """Print at once: others write into the same pipe."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def srun(arguments: list[str]) -> int:
    """Run the command once per node, each in a process group of its own."""
    command = arguments[next(i for i, argument in enumerate(arguments) if not argument.startswith("--")) :]
    say(f"srun cpus={os.environ.get('SRUN_CPUS_PER_TASK', '')}")
    tasks: list[subprocess.Popen[bytes]] = []
    ending = False

    def signal_all(number: int) -> None:
        for task in tasks:
            with suppress(ProcessLookupError):
                os.killpg(task.pid, number)

    def kill_all(*_: Any) -> None:
        nonlocal ending
        ending = True
        signal_all(signal.SIGKILL)

    signal.signal(signal.SIGTERM, kill_all)
    (nodes,) = (argument.partition("=")[2] for argument in arguments if argument.startswith("--nodes="))
    for node in range(int(nodes)):
        variables = os.environ | {"SLURM_STEP_ID": "0", "SLURM_NODEID": str(node), "SLURMD_NODENAME": NODES[node]}
        tasks.append(subprocess.Popen(command, env=variables, start_new_session=True, preexec_fn=tell_group))
    if ending:  # told so while tasks were still being started
        kill_all()
    worst = 0
    left = {task.pid for task in tasks}
    while left:
        pid, status = os.wait()
        left.discard(pid)
        (FOLDER / f"group-{pid}").unlink(missing_ok=True)
        code = os.waitstatus_to_exitcode(status)
        worst = max(worst, 128 - code if code < 0 else code)
        if code and "--kill-on-bad-exit=1" in arguments:
            signal_all(signal.SIGTERM)
    return worst


def tell_group() -> None:
    """In a task, before its command: who has read its first line may signal it."""
    (FOLDER / f"group-{os.getpid()}").touch()


def scancel(arguments: list[str]) -> int:
    """Signal the tasks of the job, and not its batch script. A job that was cancelled is told nothing any more."""
    if (FOLDER / "state").exists():
        return 1
    (option,) = (argument for argument in arguments if argument.startswith("--signal="))
    for file in FOLDER.glob("group-*"):
        with suppress(ProcessLookupError):
            os.killpg(int(file.name.removeprefix("group-")), signal.Signals[f"SIG{option.removeprefix('--signal=')}"])
    return 0


def scontrol(arguments: list[str]) -> int:
    """Tell of the job's nodes and of the job, or requeue it."""
    match arguments:
        case ["show", "hostnames", _]:
            say("\n".join(NODES))
        case ["show", "job", number]:
            state = (FOLDER / "state").read_text() if (FOLDER / "state").exists() else "RUNNING"
            say(f"JobId={number}\n   JobState={state} Reason=None\n   Command={os.environ['COMMAND']} a.toml")
        case ["requeue", number]:
            (FOLDER / "requeued").write_text(number)
        case _:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit({"srun": srun, "scancel": scancel, "scontrol": scontrol}[Path(sys.argv[0]).name](sys.argv[1:]))
