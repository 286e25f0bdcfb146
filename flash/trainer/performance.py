"""Records the steps of one trainer rank with torch's profiler.

The loops of `flash train` and of `flash sft` call `StepProfiler.begin_step` before each step, and `close` once at their
end. Recording does not change any number that a step computes, and a trace that cannot be written does not end the run.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

log = logging.getLogger("flash")

TRACES = "profile"
"""Name of the folder inside the run's folder that holds the traces."""
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Environment variables that keep torch's profiler from printing a line at each start and stop."""


class StepProfiler:
    """Records some steps of one trainer rank, and writes them as one Chrome trace.

    The trace begins when the rank asks for the batch of the first recorded step, and ends when it asks for the batch
    after the last one. A rank that starts again in between records the remaining steps, and its file replaces the
    earlier one.

    Args:
        steps: the steps to record; nothing is recorded if it is empty.
        folder: the run's folder. The trace becomes `profile/rank-N.json.gz` inside it.
        rank: the number of this rank, N.
        cuda: True if the rank computes on a GPU, whose kernels are recorded too.
    """

    def __init__(self, steps: range, folder: Path, rank: int, *, cuda: bool) -> None:
        self._steps = steps
        self._file = folder / TRACES / f"rank-{rank}.json.gz"
        self._rank = rank
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        self._profiler: Any = None
        self._bar: Any = None

    def begin_step(self, step: int) -> None:
        """Start recording if `step` is the first one to record; stop and write the trace if it is beyond the last."""
        self._end_bar()
        if step not in self._steps:
            self.close()
            return
        if self._profiler is None:
            # torch reads these variables when its first profiler starts.
            for name, level in QUIET.items():
                os.environ.setdefault(name, level)
            self._profiler = profile(activities=self._activities, record_shapes=True, profile_memory=True)
            self._profiler.start()
        self._bar = record_function(f"step {step}")
        self._bar.__enter__()

    def close(self) -> None:
        """Stop recording and write the trace. Does nothing if nothing is being recorded."""
        self._end_bar()
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        profiler.stop()
        # A reader never finds half a file: it is written under another name first, whose end tells torch to compress.
        part = self._file.with_name(f".{self._file.name}")
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(part))
            os.replace(part, self._file)
        except (OSError, RuntimeError) as error:
            log.warning("the profile of trainer rank %d was not written to %s: %s", self._rank, self._file, error)
            with suppress(OSError):
                part.unlink()
            return
        if self._rank == 0:
            log.info("the profile is written to %s: open it at https://ui.perfetto.dev", self._file)

    def _end_bar(self) -> None:
        bar, self._bar = self._bar, None
        if bar is not None:
            bar.__exit__(None, None, None)
