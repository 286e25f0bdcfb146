"""What `flash view` takes of a long run: 100,000 readable samples of 8,000 tokens each, as a run stores them.

400 steps of 250 samples (10 steps with `--quick`), with their rows and bars. Their files are made first in TMPDIR, some
13 GB of them, and stay in the system's cache as far as that goes. Then `flash view` is started as a user starts it, and
asked over HTTP what the page asks: until its list of newest samples is there, counted from the start of the command;
then filters, of which one finds many, one few, and one none in the part that one answer looks through; then one group.
Memory is the greatest resident set of the process. The browser's own time is left out.
"""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc

from benchmarks.form import Args, Row, main
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.samples import COMPRESSED, SCHEMA, Sample, SampleTurn, TokenValues, samples_of, write_samples
from flash.types import Activity, Outcome, Span, TokenUse, VersionRun

STEPS, QUICK_STEPS = 400, 10
SAMPLES = 250
"""Readable samples of a step."""
GROUP = 10
TOKENS = 8000
"""Of a response."""
PROMPT = 100
WORDS = ("the", " sum", " of", " 12", " and", " 34", " is", " there", "fore", " 46", ".\n", " wait", ",", " so")
STARTED = 1_700_000_000.0
REPEATS = 5
START_S, MEMORY_MIB, FILTER_S = 2.0, 500.0, 0.3
"""The goals."""
TIMEOUT_S = 120.0
CONFIG = (
    '[run]\nname = "long"\nsteps = 400\n[model]\npath = "models/made-up"\n[env]\npath = "envs.arithmetic:Arithmetic"\n'
)
FILTERS: dict[str, dict[str, Any]] = {
    "by reward, most samples": {"reward_min": 0.5},
    "by outcome, one in a hundred": {"outcome": "truncated"},
    "by text, nowhere": {"text": "a word that no sample has"},
}
"""Questions of the page, by what they look for."""


def rows(args: Args) -> list[Row]:
    """Seconds until the first page, of each filter and of a group; the greatest memory."""
    steps = QUICK_STEPS if args.quick else STEPS
    with tempfile.TemporaryDirectory(prefix="view-load-") as folder:
        directory = make_run(Path(folder) / "long", steps)
        starts = [seconds for _ in range(3) for seconds in [first_page(directory)]]
        with viewing(directory) as (url, process):
            asked = {name: median(url, "samples", **question) for name, question in FILTERS.items()}
            group = median(url, "group", step=steps // 2, group=steps // 2 * (SAMPLES // GROUP))
            timeline = median(url, "timeline")
            memory = peak_mib(process)
    case = f"{steps * SAMPLES:,} samples of {TOKENS} tokens"
    return [
        Row(f"{case}: first page", "start_s", "s", statistics.median(starts), goal=START_S),
        *(Row(f"{case}: {name}", "filter_s", "s", seconds, goal=FILTER_S) for name, seconds in asked.items()),
        Row(f"{case}: a group of {GROUP}", "group_s", "s", group),
        Row(f"{case}: timeline", "timeline_s", "s", timeline),
        Row(f"{case}: greatest memory", "memory_mib", "MiB", memory, goal=MEMORY_MIB),
    ]


def make_run(path: Path, steps: int) -> RunDirectory:
    """A run directory with so many steps of readable samples."""
    directory = RunDirectory.open(path, CONFIG)
    words = [WORDS[place * place % len(WORDS)] for place in range(TOKENS)]
    first = write_samples(directory, 0, [made(member, words) for member in range(SAMPLES)])
    with pa.OSFile(str(first)) as source:
        table = pa.ipc.open_file(source).read_all()
    for step in range(steps):
        directory.append_metrics({"step": step, "version": step + 1, "time": STARTED + 60.0 * step, "reward_mean": 0.5})
        bars = (
            Activity(f"engine {lane}", "generate", STARTED + 60 * step, STARTED + 60 * step + 50) for lane in range(8)
        )
        directory.append_spans(bars)
        write_again(samples_of(directory, step), table, step)
    return directory


def made(member: int, words: list[str]) -> Sample:
    """One sample of step 0: nine of ten are solved, one in a hundred is cut off."""
    rng = np.random.default_rng(member)
    numbers = [rng.normal(size=TOKENS).astype(np.float32).tolist() for _ in range(4)]
    prompt = "What is 12 + 34? " * (PROMPT // 4)
    reward = float(member % 10 > 0)
    return Sample(
        step=0,
        task_id=member,
        group_id=member // GROUP,
        sample_index=member % GROUP,
        seed=member,
        environment="",
        outcome=Outcome.TRUNCATED if member % 100 == 0 else Outcome.OK,
        reward=reward,
        turns=[SampleTurn(prompt, "".join(words), reward, 30.0, 0.1, {"correct": reward}, "")],
        tokens=[prompt, *words],
        branches=[0],
        action_spans=[Span(1, 1 + TOKENS)],
        versions=[VersionRun(0, TOKENS)],
        ages={0: TOKENS},
        values=TokenValues(*numbers, [TokenUse.TRAINED] * TOKENS),
        group_rewards=[1.0] * GROUP,
    )


def write_again(file: Path, table: pa.Table, step: int) -> None:
    """The samples of the first step as those of another one, without making them again."""
    numbers = {"step": np.full(SAMPLES, step), "group_id": step * (SAMPLES // GROUP) + np.arange(SAMPLES) // GROUP}
    for name, values in numbers.items():
        table = table.set_column(table.schema.get_field_index(name), SCHEMA.field(name), pa.array(values))
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, SCHEMA, options=COMPRESSED) as writer:
        writer.write_table(table)


def first_page(directory: RunDirectory) -> float:
    """Seconds from the start of the command until the page has all that it begins with."""
    begun = time.perf_counter()
    with viewing(directory) as (url, _):
        urllib.request.urlopen(url, timeout=TIMEOUT_S).read()
        ask(url, "contents")
        ask(url, "rows", life="", steps=0, evals=0)
        ask(url, "samples")
        return time.perf_counter() - begun


@contextmanager
def viewing(directory: RunDirectory) -> Generator[tuple[str, subprocess.Popen[str]]]:
    """`flash view`, from the start to Ctrl-C."""
    command = [sys.executable, "-m", "flash", "view", str(directory.path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found is not None, "flash view did not say where it is"
            yield found[0], process
        finally:
            os.killpg(process.pid, signal.SIGINT)


def median(url: str, what: str, **question: Any) -> float:
    """Seconds of an answer, in the median of some."""
    seconds: list[float] = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        ask(url, what, **question)
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def ask(url: str, what: str, **question: Any) -> Any:
    """One question of the page."""
    asked = urllib.parse.urlencode({"run": 0, **question})
    with urllib.request.urlopen(f"{url}api/{what}?{asked}", timeout=TIMEOUT_S) as answer:
        return json.loads(answer.read())


def peak_mib(process: subprocess.Popen[str]) -> float:
    """The greatest resident set so far."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path(f"/proc/{process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


if __name__ == "__main__":
    main("view_load", __doc__ or "", rows)
