"""Launch of `flash sft`: starts the ranks on this machine, and restarts failed ones from the last checkpoint."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

from flash.config.load import dump
from flash.config.objects import share_import_path
from flash.config.tree import Config
from flash.config.waits import grace_s
from flash.run.processes.error_marker import ErrorMarker
from flash.run.processes.launch import Launch
from flash.run.processes.launcher import ON_ONE_MACHINE, counted, leave_in_order, place_in_job
from flash.run.processes.locks import exclusive_run
from flash.run.processes.ranks import run_ranks
from flash.run.processes.scratch import scratch_folder
from flash.run.processes.starter_watch import begin_launch, end_with_torchrun
from flash.run.processes.supervisor import End, SupervisedPart, describe, judge
from flash.run.sft.course import ROWS, CourseTokens


class SftRanks(SupervisedPart):
    """All trainer ranks of a run. The first one writes the run directory."""

    def __init__(self, config: Config, file: Path) -> None:
        super().__init__(config, "the trainer ranks start again", failed="the trainer ranks have failed")
        self._run, self._file = config, file

    async def once(self, restarts: int) -> tuple[End, list[str]]:
        """Run all ranks once. Implements `SupervisedPart.once`."""
        ended = await run_ranks(self, "sft", self._run, 0, self._file, restarts)
        end, silent = await judge(ended, self.processes.killed, self.ending)
        return end, [describe(f"trainer rank {one.local}", one) for one in silent]


def launch(config: Config, tokens: CourseTokens) -> int:
    """Train the rows of `tokens` to the end. Returns the exit code, as `flash.run.processes.launcher.launch` does.

    Raises:
        ConfigError: the environment and the configuration disagree.
        RunDirectoryError: another launch writes the run directory.
    """
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
        tokens.save(folder / ROWS)
        ranks = SftRanks(config, file)
        stack.callback(leave_in_order, config, marker, ranks)
        end_with_torchrun()
        return Launch(ranks, marker=marker, has_hub=True).run()
