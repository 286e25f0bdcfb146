"""A whole run in processes of its own: its configuration, what it leaves, and what of it runs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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

NO_TINY_MODEL = re.sub(r"\[tiny_model\].*?(?=\[env\])", "", CONFIG, flags=re.DOTALL)
"""For runs whose environment is another one than the model was made for."""

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
    """One run in a process group of its own."""

    def __init__(
        self, folder: Path, model: Path, *arguments: str, text: str = CONFIG, command: Sequence[str] = COMMAND
    ) -> None:
        self.folder = folder
        self.directory = folder / "run"
        config = folder / "config.toml"
        config.write_text(text.format(folder=folder, model=model))
        self.output = folder / "output.txt"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, *command, str(config), *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=REPOSITORY,
                start_new_session=True,
                env=os.environ | {"FLASH_TEST_RUN": str(folder)},
            )

    def wait(self, seconds: float = 300) -> int:
        return self.process.wait(seconds)

    def text(self) -> str:
        return self.output.read_text()

    def rows(self, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return written_rows(self.directory / name)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def processes(self) -> dict[int, str]:
        """Every living process that was started by this run, by its environment."""
        mark = f"FLASH_TEST_RUN={self.folder}".encode()
        found: dict[int, str] = {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found

    def trainer(self, rank: int = 0) -> int:
        """The process id of a trainer rank."""
        return self.process_of("trainer", rank)

    def node_loop(self) -> int:
        """The process id of the first node's loop."""
        return self.process_of("hub")

    def process_of(self, role: str, local: int = 0) -> int:
        """The process id of the supervised process with this role, and this number."""
        for pid, line in self.processes().items():
            if line.startswith(f"flash.run.processes.worker {role} {local} "):
                return pid
        raise AssertionError(f"no {role} {local} is running")

    def core(self) -> int:
        """The process id of the engine's core, which has started."""
        (core,) = (pid for pid, line in self.processes().items() if line.startswith("VLLM::EngineCore"))
        return core

    def variable(self, pid: int, name: str) -> str:
        """A variable of a process's environment."""
        variables = dict(line.split("=", 1) for line in Path(f"/proc/{pid}/environ").read_text().split("\0") if line)
        return variables[name]

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


def balanced(ledger: dict[str, int]) -> bool:
    return ledger["issued"] == ledger["trained"] + ledger["filtered"] + ledger["given_up"] + ledger["in_flight"]


def given_up(ledger: dict[str, int]) -> set[str]:
    """Why samples were given up."""
    return {name.removeprefix("given_up_") for name, count in ledger.items() if name.startswith("given_up_") and count}
