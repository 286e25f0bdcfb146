from __future__ import annotations

import io
import math
import os
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from flash.config.learning import SftConfig
from flash.config.tree import Config
from flash.observe.columns.column import clock, short
from flash.observe.console import HEADER_EVERY, Console, domain_line, evaluation_line
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import summarise
from tests.observe.sample_rows import eval_row, metrics_row


class Terminal(io.StringIO):
    """Stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class NarrowTerminal(io.TextIOWrapper):
    """Terminal with an encoding of its own."""

    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    """Stream whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_plain_output_has_no_control_characters_and_shows_the_numbers(config: Config) -> None:
    stream = io.StringIO()
    console = Console(config, stream)
    console.note("an environment said \x1b[31mred\x1b[0m\r\n[bold]and more[/bold]")
    console.stage("starting engines")
    console.evaluation(eval_row(0, 0.312))
    console.step(metrics_row(0))
    console.close()
    text = stream.getvalue()
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "[bold]and more[/bold]" in text
    header, row = text.splitlines()[-2:]
    cells = dict(zip(header.split(), row.split(), strict=True))
    assert cells == {
        "step": "0",
        "reward": "0.250",
        "eval": "0.312",
        "loss": "-0.0123",
        "entropy": "1.234",
        "ratio": "1.002",
        "clip%": "3.4",
        "ess%": "91.0",
        "kl": "1.5e-06",
        "grad": "0.456",
        "age/max": "0.8/1",
        "old%": "2.0",
        "fail": "3",
        "tok/s": "9.81k",
        "wait%": "25.0",
        "lr": "2.0e-05",
    }


def test_columns_stay_aligned_and_the_header_returns(config: Config) -> None:
    stream = io.StringIO()
    console = Console(config, stream)
    for step in range(2 * HEADER_EVERY + 1):
        console.step(metrics_row(step))
    lines = stream.getvalue().splitlines()
    headers = [place for place, line in enumerate(lines) if line.split()[0] == "step"]
    assert headers == [0, HEADER_EVERY + 1, 2 * (HEADER_EVERY + 1)]
    assert len({len(line) for line in lines}) == 1


def test_an_accuracy_stands_only_in_the_step_line_that_follows_it(config: Config) -> None:
    stream = io.StringIO()
    console = Console(config, stream)
    console.evaluation(eval_row(0, 0.777))
    console.step(metrics_row(0))
    console.step(metrics_row(1))
    first, second = stream.getvalue().splitlines()[-2:]
    assert (first.split()[2], second.split()[2]) == ("0.777", "-")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (math.nan, "nan"), (math.inf, "inf"), (7.0, "7"), (9810.0, "9.81k"), (999_600.0, "1.00M"),
        (5e12, "5.00T"), (-5e12, "-5.00T"), (4e18, "4.00e+18"),
    ],
)  # fmt: skip
def test_a_short_number_has_a_suffix_only_if_it_is_finite(value: float | None, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(59.6, "1:00"), (3600, "1:00:00"), (-1, "0:00"), (-3700, "0:00"), (math.inf, "-")]
)
def test_a_time_has_hours_if_it_needs_them_and_is_never_negative(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def test_missing_numbers_leave_a_dash_and_nan_is_shown(config: Config) -> None:
    stream = io.StringIO()
    console = Console(config, stream)
    console.step({"step": 3.0, "loss": math.nan})
    cells = stream.getvalue().splitlines()[-1].split()
    assert cells[:5] == ["3", "-", "-", "nan", "-"]
    assert evaluation_line({"mean_reward": 10**400, "best_of_k": math.inf, "k": 2}) == "mean reward -"
    assert set(cells[4:]) == {"-", "-/-"}


def test_an_evaluation_line_names_interval_problems_and_versions(config: Config) -> None:
    stream = io.StringIO()
    console = Console(config, stream)
    console.evaluation(eval_row(10, 0.85, version_max=11))
    console.evaluation(eval_row(20, 0.9, k=1))
    mixed, single = stream.getvalue().splitlines()
    assert "accuracy 0.850, 95% interval 0.800 to 0.890, pass@4 0.950, 128 problems, versions 10 to 11" in mixed
    assert "pass@" not in single
    assert single.endswith("version 20")


def test_a_mean_of_rewards_is_called_an_accuracy_only_where_each_is_0_or_1(config: Config) -> None:
    stream = io.StringIO()
    console = Console(config, stream)
    row = eval_row(10, 0.63, binary=0.0, best_of_k=0.71)
    console.evaluation(row)
    assert "mean reward 0.630, 95% interval 0.580 to 0.670, best of 4 0.710" in stream.getvalue()
    console.finish(summarise(config, [metrics_row(0)], [eval_row(0, 0.5), row], ledger={}, restarts=0))
    assert "reward       0.500 -> 0.630 on held-out problems" in stream.getvalue()
    assert "accuracy" not in stream.getvalue()


@pytest.mark.parametrize(
    ("evaluations", "line"),
    [
        ([eval_row(0, 0.387)], "accuracy     0.387 on held-out problems, at step 0"),
        ([eval_row(4, 0.5), eval_row(4, 0.6)], "accuracy     0.600 on held-out problems, at step 4"),
        ([eval_row(0, 0.387), eval_row(9, 0.387)], "accuracy     0.387 -> 0.387 on held-out problems"),
        ([], "reward       no held-out evaluation"),
    ],
)
def test_a_single_evaluation_is_no_change(config: Config, evaluations: list[dict[str, float]], line: str) -> None:
    stream = io.StringIO()
    Console(config, stream).finish(summarise(config, [metrics_row(0)], evaluations, ledger={}, restarts=0))
    assert line in stream.getvalue().splitlines()


def test_the_result_of_fine_tuning_is_bold_in_a_terminal(config: Config) -> None:
    stream = Terminal()
    tuned = msgspec.structs.replace(config, sft=SftConfig(data="rows.jsonl"))
    directory = RunDirectory.open(config.run_dir, "")
    for step, loss in ((0, 2.5), (9, 1.25)):
        directory.append_evaluation({"step": step, "held_out_nll": loss})
    Console(tuned, stream).finish(summarise(tuned, [metrics_row(0)], [], ledger={}, restarts=0))
    assert "\x1b[1mheld out" in stream.getvalue()
    assert "2.5000 -> 1.2500" in stream.getvalue()


def test_a_run_without_a_step_says_so_in_a_sentence(config: Config) -> None:
    stream = io.StringIO()
    Console(config, stream).finish(summarise(config, [], [], ledger={}, restarts=0))
    assert stream.getvalue() == f"the run ended before its first step, in {config.run_dir}\n"


def test_a_stage_is_printed_once_where_nothing_can_be_redrawn(config: Config) -> None:
    stream = io.StringIO()
    console = Console(config, stream)
    for stage in ("waiting", "training", "waiting", "training"):
        console.stage(stage)
    assert stream.getvalue().splitlines() == ["[waiting]", "[training]"]


def test_the_closing_table_says_what_came_of_the_run_and_where_it_lies(config: Config) -> None:
    plots = config.run_dir / "plots"
    plots.mkdir(parents=True)
    (plots / "reward.png").write_bytes(b"")
    evaluations = [eval_row(0, 0.312), eval_row(30, 0.906)]
    metrics = [metrics_row(step, canary_error=5.1e-7) for step in range(30)]
    ledger = {"issued": 1920, "given_up": 0, "trained": 1440, "trained_tokens": 8000, "discarded_tokens_stale": 2000}
    stream = io.StringIO()
    Console(config, stream).finish(summarise(config, metrics, evaluations, ledger=ledger, restarts=2))
    text = stream.getvalue()
    for expected in ("0.312 -> 0.906", "1:10 (9.81k tokens/s)", "25.0%", "4.0%", "5.1e-07"):
        assert expected in text
    for expected in ("1440 samples, 8.00k tokens", "20.0% of the tokens", "90 attempts"):
        assert expected in text
    assert "issued 1920" in text
    assert "given_up" not in text
    assert str(config.run_dir) in text
    assert str(Path(plots, "reward.png")) in text


def test_a_terminal_gets_a_live_line_with_progress_and_time_left(config: Config) -> None:
    stream = Terminal()
    console = Console(config, stream)
    console.stage("training")
    for step in range(10):
        console.step(metrics_row(step))
    console.evaluation(eval_row(10, 0.654))
    console.close()
    console.close()
    text = stream.getvalue()
    assert "\x1b[" in text
    assert "0.340" in text
    assert "step 10/30" in text
    assert "0:40 left" in text


def test_a_run_outlives_the_pipe_it_prints_to(config: Config) -> None:
    console = Console(config, Gone())
    console.note("first")
    console.step(metrics_row(0))


def test_a_narrow_encoding_does_not_stop_the_run(config: Config) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    Console(config, stream).note("ratio α = 1")
    assert raw.getvalue() == b"ratio ? = 1\n"


def test_domains_have_a_line_below_that_of_the_step_and_stand_in_that_of_an_evaluation(config: Config) -> None:
    told = {"domain/code/reward": 0.2, "domain/code/share": 0.25, "domain/math/reward": 0.5, "domain/math/share": 0.75}
    assert domain_line(metrics_row(0, **told)).strip() == "code 0.200 (25 %)  math 0.500 (75 %)"
    assert domain_line(metrics_row(0)) == ""
    assert evaluation_line(eval_row(0, 0.4, **{"domain/code/reward": 0.2})).endswith("code 0.200")


def test_a_run_outlives_the_terminal_of_its_live_line(config: Config) -> None:
    master, slave = os.openpty()
    terminal = os.fdopen(slave, "w", encoding="utf-8")
    console = Console(config, terminal)
    os.close(master)
    console.note("first")
    console.stage("training")
    console.step(metrics_row(0))
    console.close()
    with suppress(OSError):  # it still has text that nobody can read
        terminal.close()


def test_a_terminal_with_a_narrow_encoding_does_not_stop_the_run(config: Config) -> None:
    written = io.BytesIO()
    terminal = NarrowTerminal(written, encoding="latin-1")
    console = Console(config, terminal)
    console.note("ratio α = 1")
    console.close()
    assert b"ratio ? = 1" in written.getvalue()
