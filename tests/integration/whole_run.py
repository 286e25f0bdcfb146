"""Whole runs in processes of their own, for tests: their configuration, their files and their processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.forked_command import ForkedCommand
from tests.rows import written_rows

REPOSITORY = Path(__file__).parents[2]
CONFIG = """
[run]
name = "run"
steps = 6
output_dir = "{folder}"

[model]
path = "{model}"
dtype = "float32"
max_length = 32

[tiny_model]
layers = 2
width = 64
warm_start_steps = 40
batch_size = 64

[env]
path = "envs.arithmetic:Arithmetic"
options = {{ digits = 1 }}

[rollout]
group_size = 4
max_new_tokens = 6
breaker = 16

[engine]
max_sequences = 64
enforce_eager = true
kv_cache_gib = 0.25

[train]
batch_size = 32
learning_rate = 1e-4
max_tokens_per_microbatch = 256

[eval]
every = 3
problems = 16

[checkpoint]
every = 2

[cluster]
gpus_per_node = 0
"""

GROUP_SIZE = 4
"""Samples of one group, by `CONFIG`."""

NO_TINY_MODEL = re.sub(r"\[tiny_model\].*?(?=\[env\])", "", CONFIG, flags=re.DOTALL)
"""Configuration for runs with another environment than the one that the model was made for."""

COMMAND = ("-m", "flash", "train")
FROM_PYTHON = (
    "-c",
    """if True:
    import sys, flash
    try:
        summary = flash.train(flash.load(sys.argv[1], sys.argv[2:]))
    except flash.FlashError as error:
        sys.exit(f"from python: {type(error).__name__}: {error}")
    print("from python:", summary.ledger["trained"], "samples")
    """,
)


class Run:
    """A run whose launcher leads a session of its own.

    Args:
        folder: folder for the configuration, the output and the run directory.
        model: folder of the model.
        arguments: further arguments of the command.
        text: the configuration; `{folder}` and `{model}` are replaced.
        command: arguments of Python in front of the configuration's file.
        real: True to start a new Python, like a user. False: the command is forked from a server with all imports.
    """

    def __init__(
        self,
        folder: Path,
        model: Path,
        *arguments: str,
        text: str = CONFIG,
        command: Sequence[str] = COMMAND,
        real: bool = False,
    ) -> None:
        self.folder = folder
        self.directory = folder / "run"
        config = folder / "config.toml"
        config.write_text(text.format(folder=folder, model=model))
        self.output = folder / "output.txt"
        words = [*command, str(config), *arguments]
        variables = os.environ | {"FLASH_TEST_RUN": str(folder)}
        self.process: subprocess.Popen[bytes] | ForkedCommand
        with self.output.open("ab") as file:
            if real:
                self.process = subprocess.Popen(
                    [sys.executable, *words],
                    stdout=file,
                    stderr=file,
                    cwd=REPOSITORY,
                    start_new_session=True,
                    env=variables,
                )
            else:
                self.process = ForkedCommand(words, output=file.fileno(), folder=REPOSITORY, variables=variables)

    def wait(self, seconds: float = 300) -> int:
        return self.process.wait(seconds)

    def text(self) -> str:
        return self.output.read_text()

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return written_rows(self.directory / name)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def processes(self) -> dict[int, str]:
        """Return the command line of each living process of this run, by process id.

        The environment of a process names the run, or the process writes into the run's output file.
        """
        mark = f"FLASH_TEST_RUN={self.folder}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended
                named = mark in (entry / "environ").read_bytes().split(b"\0")
                if named or str(self.output) in (os.readlink(entry / "fd" / number) for number in ("1", "2")):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        return found

    def trainer(self, rank: int = 0) -> int:
        """Return the process id of a trainer rank."""
        return self.process_of("trainer", rank)

    def node_loop(self) -> int:
        """Return the process id of the first node's loop."""
        return self.process_of("hub")

    def process_of(self, role: str, local: int = 0) -> int:
        """Return the process id of the supervised process with this role and number."""
        for pid, line in self.processes().items():
            if line.startswith(f"flash.run.processes.worker {role} {local} "):
                return pid
        raise AssertionError(f"no {role} {local} is running")

    def core(self) -> int:
        """Return the process id of the engine's core, which has started."""
        (core,) = (pid for pid, line in self.processes().items() if line.startswith("VLLM::EngineCore"))
        return core

    def scratch(self) -> Path:
        """Return the scratch folder of the running launch."""
        line = self.processes()[self.trainer()]
        return Path(line.split()[3]).parent

    def until(self, condition: Callable[[], bool], seconds: float = 200, every: float = 0.05) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"it did not happen; output so far:\n{self.text()}"
            assert self.process.poll() is None, f"the run ended early:\n{self.text()}"
            time.sleep(every)

    def nothing_left(self) -> None:
        end = time.monotonic() + 10
        while left := self.processes():
            assert time.monotonic() < end, f"processes left behind: {left}"
            time.sleep(0.1)


def make_model(model: Path, folder: Path) -> None:
    """Make the tiny model by a run of one step in a new folder, unless a run of an earlier test has made it."""
    if not model.exists():
        folder.mkdir()
        first = Run(folder, model, "run.steps=1")
        assert first.wait() == 0, first.text()


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["issued"] == ledger["trained"] + ledger["filtered"] + ledger["given_up"] + ledger["in_flight"]


def all_trained(run: Run, samples: int) -> None:
    """Check that all `samples` samples of a finished run were trained, except late members of groups.

    A group that is nearly complete at the end of its window is trained without the members that are still missing. When
    such a member arrives, it may be too old for every later step, or the run may be over. Then the ledger counts it as
    given up because it is stale, or as cancelled. This happens on a busy machine, and never to all members of a group.
    """
    ledger = run.summary()["ledger"]
    assert balanced(ledger), ledger
    assert given_up(ledger) <= {"stale", "cancelled"}, ledger
    assert ledger["trained"] + ledger["given_up"] == ledger["issued"] == samples, ledger
    trained = {sample["group_id"] for sample in run.rows("samples.jsonl")}
    assert len(trained) == samples // GROUP_SIZE, f"groups without any trained member: {ledger}, {sorted(trained)}"


def given_up(ledger: dict[str, int]) -> set[str]:
    """Return the reasons for which samples were given up."""
    return {name.removeprefix("given_up_") for name, count in ledger.items() if name.startswith("given_up_") and count}
