"""The environment of examples/tiny.toml, which times what its node's process records, for `benchmarks.real.recording`.

The node loop imports it, and with that the methods that record are timed, each call by thread: its time and its
processor time. Calls inside of others count once. The sums are in the file that FLASH_RECORDING_PROBE names.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from envs.arithmetic import Arithmetic as Arithmetic
from flash.hub.hub import Hub
from flash.hub.nodes import Nodes
from flash.observe import cluster
from flash.observe.recorder import Recorder
from flash.observe.rundir.batches import Batches
from flash.rollout.reports import NodeReports

FILE = "FLASH_RECORDING_PROBE"
EVERY = 10
"""Steps between two writings of the sums."""
TIMED: tuple[tuple[Any, str], ...] = (
    (Recorder, "step"),
    (Recorder, "evaluation"),
    (Recorder, "activities"),
    (Recorder, "batch"),
    (Recorder, "trained"),
    (Recorder, "ledger"),
    (Recorder, "note"),
    (Recorder, "failure"),
    (Recorder, "cluster"),
    (Batches, "_write_batch"),
    (Batches, "_write_shown"),
    (Hub, "overview"),
    (Nodes, "report_status"),
    (NodeReports, "status"),
    (cluster, "_write"),
)

_inside = threading.local()
sums_of: dict[str, dict[str, float]] = {}
"""By the name of what is timed."""


def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The same call, timed."""
    sums = sums_of[name] = {
        "calls": 0,
        "seconds": 0.0,
        "processor_s": 0.0,
        "longest_s": 0.0,
        "longest_processor_s": 0.0,
    }

    @functools.wraps(call)
    def measured(*args: Any, **more: Any) -> Any:
        if getattr(_inside, "yes", False):
            return call(*args, **more)
        _inside.yes = True
        begun, used = time.perf_counter(), time.thread_time()
        try:
            return call(*args, **more)
        finally:
            seconds, processor = time.perf_counter() - begun, time.thread_time() - used
            _inside.yes = False
            sums["calls"] += 1
            sums["seconds"] += seconds
            sums["processor_s"] += processor
            sums["longest_s"] = max(sums["longest_s"], seconds)
            sums["longest_processor_s"] = max(sums["longest_processor_s"], processor)

    return measured


def saving(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step's recording, after which the sums are written now and then, outside of what is timed."""

    @functools.wraps(step)
    def saved(*args: Any, **more: Any) -> Any:
        wish = step(*args, **more)
        if sums_of["step"]["calls"] % EVERY == 0:
            file = Path(os.environ[FILE])
            aside = file.with_suffix(".tmp")
            told = {"at": time.time(), "process_s": time.process_time(), "calls": sums_of}
            aside.write_text(json.dumps(told))
            aside.replace(file)
        return wish

    return saved


if FILE in os.environ:
    for _owner, _name in TIMED:
        setattr(_owner, _name, timed(_name, getattr(_owner, _name)))
    Recorder.step = saving(Recorder.step)
