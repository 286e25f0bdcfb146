"""Comparison of runs for `flash compare`: results, differences of the last evaluations, and settings that differ.

`flash.cli.runs` reads each run with `read_run`, and prints `results` and `differences` as a `table`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flash.config.load import flat, read_toml
from flash.errors import DECODE_ERRORS, ConfigError
from flash.observe.columns.column import BLANK, formatted
from flash.observe.console import HELD_OUT_NLL, summary_rows
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import Summary, by_step, number
from flash.observe.stats import Interval, difference
from flash.text import one_line, width

Row = tuple[str, list[str]]
"""A title, and a text for each run."""

NOT_COMPARED = ("run.name", "run.output_dir", "run.resume", "env.folders")
"""Configuration keys that are not compared, because they do not change the work of a run."""


class Compared(msgspec.Struct, frozen=True):
    """Settings and results of a run so far."""

    path: Path
    """Directory of the run."""
    settings: dict[str, Any]
    """Settings by dotted keys, such as `train.batch_size`, as the run has recorded them."""
    first: Mapping[str, Any]
    """Row of the first evaluation; empty if there is none."""
    last: Mapping[str, Any]
    """Row of the last evaluation; empty if there is none."""
    summary: Summary | None
    """Summary of the run; None if the run has not ended."""


def read_run(path: Path) -> Compared:
    """Return settings and results of the run in the directory `path`.

    Raises:
        ConfigError: there is no run, or its settings or summary cannot be read, for example because another version of
            Flash wrote them.
        RunDirectoryError: its evaluations cannot be read.
    """
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise ConfigError(f"{path} is no run directory: it holds no config.toml")
    try:
        settings = dict(flat(read_toml(directory.config)))
        written = directory.summary.read_bytes() if directory.summary.is_file() else None
        summary = None if written is None else msgspec.json.decode(written, type=Summary)
    except (OSError, ValueError, *DECODE_ERRORS) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    evaluations = by_step(directory.read_evaluations())
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    return Compared(path, settings, first, last, summary)


def results(runs: Sequence[Compared]) -> list[Row]:
    """Return rows with the results of the runs, each with a text for each run: evaluations, then the summaries.

    A result that a run does not have is `-`. Rewards are called accuracies only if they are that in all runs. Runs of
    `flash sft` have held-out losses instead of rewards.
    """
    measure = "accuracy" if all(number(run.last, "binary") == 1 for run in runs) else "reward"
    rows: list[Row] = [
        ("state", [_state(run.summary) for run in runs]),
        (f"first {measure}", [_evaluated(run.first) for run in runs]),
        (f"last {measure}", [_evaluated(run.last) for run in runs]),
        ("  95% interval", [_limits(run.last) for run in runs]),
        ("  at step", [_whole(run.last, "step") for run in runs]),
        ("  problems", [_whole(run.last, "problems") for run in runs]),
    ]
    if any(HELD_OUT_NLL.name in run.last for run in runs):
        for which, evaluations in (("first", [run.first for run in runs]), ("last", [run.last for run in runs])):
            losses = [formatted(number(row, HELD_OUT_NLL.name), ".4f") for row in evaluations]
            rows.append((f"{which} held-out loss", losses))
    if any((number(run.last, "k") or 1) > 1 for run in runs):
        rows.append(("  best of k", [_best_of_k(run.last) for run in runs]))
    if len(runs) > 1:
        rows.append(("  over the first", [BLANK, *(_difference(runs[0], run) for run in runs[1:])]))
    summaries = [dict(summary_rows(run.summary)) if run.summary is not None else {} for run in runs]
    titles = dict.fromkeys(title for texts in summaries for title in texts)
    return rows + [(title, [texts.get(title, BLANK) for texts in summaries]) for title in titles]


def differences(runs: Sequence[Compared]) -> list[Row]:
    """Return a row for each configuration key whose value differs between the runs."""
    keys = sorted(set().union(*(run.settings for run in runs)) - {*NOT_COMPARED})
    rows = [(key, [str(run.settings.get(key, BLANK)) for run in runs]) for key in keys]
    return [(key, texts) for key, texts in rows if len(set(texts)) > 1]


def table(rows: Sequence[Row]) -> list[str]:
    """Return rows as lines for the terminal, with aligned columns and without spaces at their ends."""
    lines = [[one_line(text) for text in (title, *texts)] for title, texts in rows]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    # Python's own alignment counts characters, but some characters take two columns of a terminal.
    filled = ([text + " " * (room - width(text)) for text, room in zip(line, widths, strict=True)] for line in lines)
    return ["  ".join(texts).rstrip() for texts in filled]


# -- texts of one run in the rows of `results` -------------------------------------------------------------------------


def _state(summary: Summary | None) -> str:
    """Return the state of a run for people: under way, failed or ended."""
    if summary is None:
        return "under way, or interrupted"
    return "failed" if summary.error else "ended"


def _interval(row: Mapping[str, Any]) -> Interval | None:
    """Return the mean reward of an evaluation with its interval; None if the row lacks one of the numbers."""
    mean, low, high = (number(row, key) for key in ("mean_reward", "low", "high"))
    return None if mean is None or low is None or high is None else Interval(mean, low, high)


def _evaluated(row: Mapping[str, Any]) -> str:
    """Return the mean reward of an evaluation; `-` if the row has none."""
    return formatted(number(row, "mean_reward"), ".3f")


def _limits(row: Mapping[str, Any]) -> str:
    """Return the ends of the 95 % interval of an evaluation's mean reward; `-` if the row has none."""
    interval = _interval(row)
    return BLANK if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _whole(row: Mapping[str, Any], key: str) -> str:
    """Return the number under `key` without decimals; `-` if the row has none."""
    return formatted(number(row, key), ".0f")


def _best_of_k(row: Mapping[str, Any]) -> str:
    """Return the mean best reward of k answers, and k; `-` if the row has none."""
    best = number(row, "best_of_k")
    return BLANK if best is None else f"{best:.3f} of {_whole(row, 'k')}"


def _difference(one: Compared, other: Compared) -> str:
    """Return the mean reward of `other` minus that of `one`, in their last evaluations, with its 95 % interval.

    The result is `-` if one of them has no evaluation. If the interval excludes 0, the difference is significant.
    """
    first, second = _interval(one.last), _interval(other.last)
    if first is None or second is None:
        return BLANK
    apart = difference(first, second)
    return f"{apart.mean:+.3f} ({apart.low:+.3f} to {apart.high:+.3f})"
