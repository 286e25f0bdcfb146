"""Runs side by side: what they came to, how far apart their last evaluations are, and how they were configured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from flash.config.load import flat
from flash.errors import ConfigError
from flash.observe.console import summary_rows
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import Summary, by_step, number
from flash.observe.stats import Interval, difference
from flash.observe.text import BLANK, plain, width
from flash.text import one_line

Row = tuple[str, list[str]]
"""A title, and a text for each run."""

UNLIKE = ("run.name", "run.output_dir", "run.resume", "env.folders")
"""Keys that say nothing of what a run does."""


class Compared(msgspec.Struct, frozen=True):
    """One run, as far as it has come."""

    path: Path
    settings: dict[str, Any]
    """By dotted keys."""
    first: Mapping[str, Any]
    """Row of its first evaluation; empty without one."""
    last: Mapping[str, Any]
    """The same of the last."""
    summary: Summary | None
    """None: the run is not over."""


def read_run(path: Path) -> Compared:
    """What a run has left. Raises ConfigError: there is none, or another version of Flash wrote it."""
    directory = RunDirectory(path)
    if not directory.config.is_file():
        raise ConfigError(f"{path} is no run directory: it holds no config.toml")
    try:
        settings = dict(flat(tomllib.loads(directory.config.read_text(encoding="utf-8"))))
        written = directory.summary.read_bytes() if directory.summary.is_file() else None
        summary = None if written is None else msgspec.json.decode(written, type=Summary)
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    evaluations = by_step(directory.read_evaluations())
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    return Compared(path, settings, first, last, summary)


def results(runs: Sequence[Compared]) -> list[Row]:
    """What the runs came to: rows that all have in the same order."""
    measure = "accuracy" if all(number(run.last, "binary") == 1 for run in runs) else "reward"
    rows: list[Row] = [
        ("state", [_state(run.summary) for run in runs]),
        (f"first {measure}", [_evaluated(run.first) for run in runs]),
        (f"last {measure}", [_evaluated(run.last) for run in runs]),
        ("  95% interval", [_limits(run.last) for run in runs]),
        ("  at step", [_whole(run.last, "step") for run in runs]),
        ("  problems", [_whole(run.last, "problems") for run in runs]),
    ]
    if any((number(run.last, "k") or 1) > 1 for run in runs):
        rows.append(("  best of k", [_best_of_k(run.last) for run in runs]))
    if len(runs) > 1:
        rows.append(("  over the first", [BLANK, *(_apart(runs[0], run) for run in runs[1:])]))
    told = [dict(summary_rows(run.summary)) if run.summary is not None else {} for run in runs]
    titles = dict.fromkeys(title for texts in told for title in texts)
    return rows + [(title, [texts.get(title, BLANK) for texts in told]) for title in titles]


def differences(runs: Sequence[Compared]) -> list[Row]:
    """The keys that the runs have otherwise."""
    keys = sorted(set().union(*(run.settings for run in runs)) - {*UNLIKE})
    rows = [(key, [str(run.settings.get(key, BLANK)) for run in runs]) for key in keys]
    return [(key, texts) for key, texts in rows if len(set(texts)) > 1]


def table(rows: Sequence[Row]) -> list[str]:
    """Lines with columns of equal width; the last one ends where its text does."""
    lines = [[one_line(text) for text in (title, *texts)] for title, texts in rows]
    widths = [max(map(width, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(_filled, line, widths)).rstrip() for line in lines]


def _state(summary: Summary | None) -> str:
    if summary is None:
        return "under way, or interrupted"
    return "failed" if summary.error else "ended"


def _filled(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def _interval(row: Mapping[str, Any]) -> Interval | None:
    mean, low, high = (number(row, key) for key in ("mean_reward", "low", "high"))
    return None if mean is None or low is None or high is None else Interval(mean, low, high)


def _evaluated(row: Mapping[str, Any]) -> str:
    return plain(number(row, "mean_reward"), ".3f")


def _limits(row: Mapping[str, Any]) -> str:
    interval = _interval(row)
    return BLANK if interval is None else f"{interval.low:.3f} to {interval.high:.3f}"


def _whole(row: Mapping[str, Any], key: str) -> str:
    return plain(number(row, key), ".0f")


def _best_of_k(row: Mapping[str, Any]) -> str:
    best = number(row, "best_of_k")
    return BLANK if best is None else f"{best:.3f} of {_whole(row, 'k')}"


def _apart(one: Compared, other: Compared) -> str:
    """How far the last evaluation is from the first run's: more than chance alone, where 0 is not in the interval."""
    first, second = _interval(one.last), _interval(other.last)
    if first is None or second is None:
        return BLANK
    apart = difference(first, second)
    return f"{apart.mean:+.3f} ({apart.low:+.3f} to {apart.high:+.3f})"
