from __future__ import annotations

import datetime
import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from benchmarks.form import Args, Row, machine, main, output_of, run_command, version_of

ROWS = [
    Row("16 tokens", "efficiency", "share", 0.951, at_least=0.95),
    Row("swap", "pause_ms", "ms", 31.0, 29.0, at_most=30.0),
    Row("swap", "tokens_per_s", "tokens/s", 9841.2),
]


def test_the_json_has_the_day_the_machine_and_rows_with_exactly_the_nine_keys(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    main("demo", "Measures nothing.", lambda _: ROWS, ["--json", str(file)])
    recorded = json.loads(file.read_text())
    assert list(recorded) == ["day", "machine", "rows"]
    assert datetime.date.fromisoformat(recorded["day"])
    assert "cpu" in recorded["machine"]
    written = recorded["rows"]
    assert written[0] == {
        "case": "16 tokens",
        "metric": "efficiency",
        "unit": "share",
        "ours": 0.951,
        "reference": None,
        "at_least": 0.95,
        "at_most": None,
        "peer": None,
        "bound": None,
    }
    assert [list(row) for row in written] == [list(written[0])] * 3


def test_the_table_shows_figures_goals_and_whether_they_are_met(capsys: pytest.CaptureFixture[str]) -> None:
    main("demo", "Measures nothing.", lambda _: ROWS, [])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split() == ["16", "tokens", "efficiency", "share", "0.951", "-", ">=", "0.95", "met"]
    assert lines[-2].split() == ["swap", "pause_ms", "ms", "31", "29", "<=", "30", "missed"]
    assert lines[-1].split() == ["swap", "tokens_per_s", "tokens/s", "9,841", "-", "-"]


def test_a_peer_and_a_bound_have_columns_only_where_a_row_has_them(capsys: pytest.CaptureFixture[str]) -> None:
    main("demo", "Measures nothing.", lambda _: ROWS, [])
    assert "peer" not in capsys.readouterr().out
    main(
        "demo",
        "Measures nothing.",
        lambda _: [Row("8x8", "speedup", "x", 3.0, 2.16, at_least=2.1, peer=2.1, bound=4.0)],
        [],
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split() == ["case", "metric", "unit", "ours", "reference", "peer", "bound", "goal"]
    assert lines[-1].split() == ["8x8", "speedup", "x", "3", "2.16", "2.1", "4", ">=", "2.1", "met"]


def test_a_plot_is_drawn_where_it_is_asked_for_and_not_on_a_quick_run_by_itself(tmp_path: Path) -> None:
    drawn: list[Path] = []
    for argv in (["--quick"], ["--quick", "--plot", str(tmp_path / "a.png")]):
        main("demo", "Measures nothing.", lambda _: ROWS, argv, plot=lambda rows, file: drawn.append(file))
    assert drawn == [tmp_path / "a.png"]


@pytest.mark.parametrize(("argv", "quick"), [(["--quick"], True), ([], False)])
def test_quick_reaches_the_benchmark(argv: list[str], quick: bool) -> None:
    seen: list[Args] = []

    def run(args: Args) -> list[Row]:
        seen.append(args)
        return []

    assert main("demo", "Measures nothing.", run, argv) == []
    assert [args.quick for args in seen] == [quick]


def test_a_goal_has_a_direction() -> None:
    assert [Row("case", "gap", "", ours, at_least=1.0).met for ours in (2.0, 1.0, 0.5, math.nan)] == [
        True,
        True,
        False,
        False,
    ]
    assert [Row("case", "gap", "", ours, at_most=1.0).met for ours in (2.0, 1.0, 0.5, math.nan)] == [
        False,
        True,
        True,
        False,
    ]
    assert Row("case", "gap", "", 1.0).met is None


def test_a_folder_that_does_not_exist_is_refused_before_the_benchmark_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main("demo", "Measures nothing.", lambda _: pytest.fail("ran"), ["--json", "missing/rows.json"])
    assert "the folder missing does not exist" in capsys.readouterr().err


def test_a_command_that_does_not_end_is_killed_with_its_children_and_reported_as_too_slow(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    command = f"trap '' TERM; exec >{tmp_path}/pipe; (sleep 10; echo a child was left) & wait; wait"
    with pytest.raises(subprocess.TimeoutExpired) as error:
        run_command(["sh", "-c", command], 0.5, ending_s=0.1)
    assert error.value.timeout == 0.5
    with open(reader, "rb") as pipe:
        assert pipe.read() == b""


def test_the_output_of_a_command_is_read_whatever_it_holds() -> None:
    assert output_of("printf", r"\377.txt") == "\N{REPLACEMENT CHARACTER}.txt"
    assert output_of("false") == ""


def test_the_version_of_a_package_is_also_that_of_its_build_for_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, version in (("engine_cpu", "1.2"), ("other", "3.4"), ("other_cpu", "5.6")):
        (folder := tmp_path / f"{name}-{version}.dist-info").mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [version_of(name) for name in ("engine", "other", "absent")] == ["1.2", "3.4", "-"]


def test_what_it_ran_on_names_processor_memory_software_and_gpus() -> None:
    lines = dict(machine())
    assert {"cpu", "memory", "system", "software", "gpus"} <= set(lines)
    assert "cores usable" in lines["cpu"]
    assert "torch" in lines["software"]
    assert "Python 3." in lines["system"]
