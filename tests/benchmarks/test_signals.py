"""A signal to a benchmark ends what it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

WAIT_S = 120

COMMAND = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(print('command ended in order')))"
"""What a benchmark runs: it takes some time to end."""
BENCHMARK = f"""
import sys
from benchmarks.form import main, run_command

command = {COMMAND!r} + "; print('command runs', flush=True); signal.pause()"
main("demo", "Runs a command.", lambda _: run_command([sys.executable, "-c", command], 100), ["--quick"])
"""
ALL = """
import sys
from benchmarks import __main__ as all

all.BENCHMARKS = {name: all.Benchmark("", name) for name in ("first", "second")}
all.command = lambda name: [sys.executable, "-m", "stand_in"]
sys.exit(all.main())
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_benchmark_that_runs_with_what_it_has_started(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "stand_in.py").write_text(BENCHMARK)
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    words = [sys.executable, "-c", f"{path}\n{ALL}"]
    variables = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=variables
    ) as process:
        assert process.stdout is not None
        said = ""
        while "command runs" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        process.send_signal(number)
        # The pipe is open as long as any of the three processes lives.
        rest, _ = process.communicate(timeout=WAIT_S)
    assert rest.splitlines() == ["command ended in order", f"ended by {number.name}"]
    assert process.returncode == 128 + number
    assert "=== second" not in said
