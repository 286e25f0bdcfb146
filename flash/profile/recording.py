"""torch's profiler around a part of this process's work, and the file that it leaves.

What is recorded changes nothing that is computed. A file that cannot be written costs the profile, not the run.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from flash.foreign.torch import dump_memory, keep_memory_history
from flash.profile.order import ENDING, ProfileOrder, RecordingFacts, resident_peak

log = logging.getLogger("flash")


class Recording:
    """One recording: begun, stopped, written; each once, and in this order.

    Args:
        file: to write.
        who: this process is, for people.
        cuda: whether it computes on a GPU.
    """

    def __init__(self, file: Path, who: str, *, cuda: bool) -> None:
        self._file = file
        self._who = who
        self._cuda = cuda
        self._profiler: Any = None
        self._running = False
        self._begun = 0.0
        self.steps = 0
        """What its owner has counted, for `RecordingFacts`."""

    @property
    def running(self) -> bool:
        """Whether it records at the moment."""
        return self._running

    def begin(self) -> None:
        """Record from here on."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            keep_memory_history(on=True)
        # The memory of a GPU is in the snapshot, which says more.
        self._profiler = profile(activities=kinds, record_shapes=True, profile_memory=not self._cuda)
        self._begun = time.time()
        self._profiler.start()
        self._running = True

    def stop(self) -> None:
        """Record no more. Does nothing where it does not record."""
        if not self._running:
            return
        self._running = False
        facts = RecordingFacts(self._who, self._begun, time.time(), self.steps, resident_peak())
        if self._cuda:
            facts = self._with_device(facts)
        self._profiler.add_metadata_json("flash", msgspec.json.encode(facts).decode())
        self._profiler.stop()

    def write(self) -> None:
        """Write what was recorded, as a whole or not at all."""
        self.stop()
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        part = self._file.with_name(f".{self._file.name}")
        try:
            profiler.export_chrome_trace(str(part))
            os.replace(part, self._file)
        except (OSError, RuntimeError) as error:
            log.warning("the profile of %s was not written to %s: %s", self._who, self._file, error)
            with suppress(OSError):
                part.unlink()

    def _with_device(self, facts: RecordingFacts) -> RecordingFacts:
        import torch

        peak = torch.cuda.max_memory_allocated()
        file = self._file.with_name(self._file.name.removesuffix(ENDING) + ".memory.pickle")
        try:
            dump_memory(file)
        except (OSError, RuntimeError) as error:
            log.warning("the memory of %s was not written to %s: %s", self._who, file, error)
            return msgspec.structs.replace(facts, device=peak)
        finally:
            keep_memory_history(on=False)
        return msgspec.structs.replace(facts, device=peak, snapshot=file.name)


class RankProfile:
    """Records the steps of a trainer rank that are ordered.

    Args:
        order: says which.
        rank: this one's number.
        cuda: whether it computes on a GPU.
    """

    def __init__(self, order: ProfileOrder, rank: int, *, cuda: bool) -> None:
        self._order = order
        self._recording = Recording(order.file(f"trainer-{rank}"), f"trainer {rank}", cuda=cuda)
        self._done = False

    def begins(self, version: int) -> None:
        """A step begins with this version, with the wait for its batch. A rank that starts again in the midst of those
        that are ordered records the rest."""
        if self._recording.running:
            self._recording.steps += 1
        if not self._order.covers(version):
            self.ends()
        elif not self._recording.running and not self._done:
            self._recording.begin()

    def ends(self) -> None:
        """There will be no more steps: write what there is."""
        if self._recording.running:
            self._done = True
            self._recording.write()
