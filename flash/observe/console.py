"""The terminal: a live progress line, one line per step, a closing table.

`flash.observe.recorder` owns the `Console` of a run. `flash watch`, `flash compare` and `flash eval` use the
functions that make lines. If the output is a terminal, rich draws the live line below the printed ones. Otherwise the
same lines are written without control characters. In texts from outside (an environment's error, a model's path),
control characters are escaped in both cases. The console only writes: it owns no clock, and estimates the remaining
time from the rows' `wall_s`.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TextIO, cast

from flash.config.tree import Config
from flash.observe.columns.column import BLANK, Column, clock, fixed, formatted, short
from flash.observe.columns.table import named
from flash.observe.rundir.rundir import RunDirectory
from flash.observe.rundir.summary import Summary, domains_of, number
from flash.observe.stats import BestOf
from flash.text import one_line

Row = Mapping[str, Any]
"""A line of `metrics.jsonl` or `evals.jsonl`: numbers by the names of their columns."""

HEADER_EVERY = 20
"""Number of step lines between two headers."""
RECENT_STEPS = 10
"""Number of last steps whose pace predicts the remaining time."""


class LineCell(NamedTuple):
    """Cell in the line of a step: one column, or two with a slash between them."""

    columns: tuple[Column, ...]
    width: int
    """Characters of the cell. Titles and numbers are aligned to the right."""

    @property
    def title(self) -> str:
        """Title of the cell in the header."""
        return "/".join(column.title for column in self.columns).rjust(self.width)

    def text(self, row: Row) -> str:
        """Return the numbers of the cell in a row."""
        return "/".join(column.text(column.value_in(row), "") for column in self.columns).rjust(self.width)


HELD_OUT = named("mean_reward", "evaluation")
"""Column with the result of an evaluation, which is made on problems that are never trained (*held out*)."""
LINE = (
    LineCell((named("step"),), 5),
    LineCell((named("reward_mean"),), 6),
    LineCell((HELD_OUT,), 5),
    LineCell((named("loss"),), 7),
    LineCell((named("entropy"),), 7),
    LineCell((named("ratio_mean"),), 5),
    LineCell((named("clip_fraction"),), 5),
    LineCell((named("ess"),), 5),
    LineCell((named("mismatch_kl"),), 8),
    LineCell((named("grad_norm"),), 6),
    LineCell((named("age_mean"), named("age_max")), 7),
    LineCell((named("stale_share"),), 5),
    LineCell((named("failures"),), 4),
    LineCell((named("tokens_per_second"),), 6),
    LineCell((named("trainer_wait_share"),), 5),
    LineCell((named("learning_rate"),), 7),
)
"""Numbers in the line of a step, in their order."""
HELD_OUT_NLL = named("held_out_nll", "evaluation")
"""Column with the result of an evaluation of `flash sft`: the loss on rows that are never trained."""
SFT_LINE = (
    LineCell((named("step"),), 5),
    LineCell((named("epoch"),), 6),
    LineCell((named("nll"),), 7),
    LineCell((HELD_OUT_NLL,), 7),
    LineCell((named("entropy"),), 7),
    LineCell((named("grad_norm"),), 6),
    LineCell((named("tokens_per_second"),), 6),
    LineCell((named("trainer_wait_share"),), 5),
    LineCell((named("learning_rate"),), 7),
)
"""Numbers in the line of a step of `flash sft`."""


class Console:
    """Terminal output of a run: lines for its events, and on a terminal a live line below them.

    The recorder calls the methods as the events happen, and `close` at last. `close` may be called more than once.
    """

    def __init__(self, config: Config, stream: TextIO | None = None) -> None:
        """Start the live line if the output is a terminal.

        `config` is the run's configuration. `stream` None means the standard output.
        """
        self._config = config
        self._output = cast("TextIO", _Output(sys.stdout if stream is None else stream))
        self._live = _Live(config.run.steps, self._output) if self._output.isatty() else None
        """Live line; None if the output is no terminal."""
        self._line, self._held_out = (LINE, HELD_OUT) if config.sft is None else (SFT_LINE, HELD_OUT_NLL)
        self._stages: set[str] = set()
        """Stages that were printed, if there is no live line."""
        self._unshown_evaluation: float | None = None
        """Result of an evaluation that no step line has shown yet: a mean reward, or the loss in `flash sft`."""
        self._lines = 0
        """Number of step lines so far."""
        self._walls: deque[float] = deque(maxlen=RECENT_STEPS + 1)
        """`wall_s` of the last steps: seconds from the start of the run to the end of each. They give the pace."""

    def note(self, text: str) -> None:
        """Print a line for the person at the terminal."""
        self._print(text, "default")

    def warn(self, text: str) -> None:
        """Print a warning: a line about something that the user should change."""
        self._print(f"warning: {text}", "yellow")

    def stage(self, text: str) -> None:
        """Show what the run is doing now. Without a terminal, each stage is printed only once."""
        if self._live is not None:
            self._live.update(stage=one_line(text))
        elif text not in self._stages:
            self._stages.add(text)
            self._print(f"[{text}]", "dim")

    def step(self, row: Row) -> None:
        """Print the line of a committed step, with a header every HEADER_EVERY lines, and advance the progress bar.

        A row with domains gets a second line.
        """
        if self._lines % HEADER_EVERY == 0:
            self._print(" ".join(cell.title for cell in self._line), "bold")
        self._lines += 1
        shown = {**row} if self._unshown_evaluation is None else {**row, self._held_out.name: self._unshown_evaluation}
        self._unshown_evaluation = None
        self._print(" ".join(cell.text(shown) for cell in self._line), "default")
        if domains := domain_line(row):
            self._print(domains, "dim")
        if (wall := number(row, "wall_s")) is not None:
            self._walls.append(wall)
        if self._live is not None:
            done = int(number(row, "step") or 0) + 1
            self._live.update(
                completed=done,
                reward=fixed(row, "reward_mean", 3),
                rate=short(number(row, "tokens_per_second")),
                left=self._time_left(self._config.run.steps - done),
            )

    def evaluation(self, row: Row) -> None:
        """Print the line of a finished evaluation on held-out problems. The next step line shows its result too.

        If another evaluation finishes before that line, only the newer one is shown there.
        """
        self._unshown_evaluation = number(row, self._held_out.name)
        self._print(f"evaluation at step {_whole(row, 'step')}: {evaluation_line(row)}", "green")
        if self._live is not None:
            self._live.update(accuracy=fixed(row, self._held_out.name, 3))

    def finish(self, summary: Summary) -> None:
        """Remove the live line, and print the closing table, or, for a run without a step, a line that says so."""
        self.close()
        if not summary.steps:
            self._print(f"the run ended before its first step, in {self._config.run_dir}", "default")
            return
        rows = closing_table(self._config, summary)
        width = max(len(title) for title, _ in rows)
        self._print("", "default")
        for title, text in rows:
            result = title in ("accuracy", "reward", "held out")
            self._print(f"{title.ljust(width)}  {text}", "bold" if result else "default")

    def close(self) -> None:
        """Remove the live line."""
        if self._live is not None:
            self._live.stop()

    def _time_left(self, steps: int) -> str:
        """Return the time that `steps` more steps take at the pace of the last ones; `-` before the second step.

        A negative `steps` counts as 0.
        """
        if len(self._walls) < 2:
            return BLANK
        pace = (self._walls[-1] - self._walls[0]) / (len(self._walls) - 1)
        return clock(pace * max(0, steps))

    def _print(self, text: str, style: str) -> None:
        """Print a text as one line. Without a live line, `style` has no effect."""
        text = one_line(text)
        if self._live is not None:
            self._live.print(text, style)
        else:
            self._output.write(f"{text}\n")


def evaluation_line(row: Row) -> str:
    """Return the result of an evaluation as a line. Parts whose numbers the row lacks are left out.

    `row` is a row of evals.jsonl, or the row of `flash eval`. A mean reward is called accuracy only if each reward is 0
    or 1.
    """
    if HELD_OUT_NLL.name in row:
        # In `flash sft`, a problem is a row of the data set.
        return f"{HELD_OUT_NLL.name} {fixed(row, HELD_OUT_NLL.name, 4)}, {_whole(row, 'problems')} rows"
    binary = number(row, "binary") == 1
    parts = [f"{'accuracy' if binary else 'mean reward'} {fixed(row, 'mean_reward', 3)}"]
    if number(row, "low") is not None and number(row, "high") is not None:
        parts.append(f"95% interval {fixed(row, 'low', 3)} to {fixed(row, 'high', 3)}")
    if number(row, "best_of_k") is not None and (number(row, "k") or 1) > 1:
        parts.append(f"{'pass@' if binary else 'best of '}{_whole(row, 'k')} {fixed(row, 'best_of_k', 3)}")
    if number(row, "problems") is not None:
        parts.append(f"{_whole(row, 'problems')} problems")
    if number(row, "missing"):
        parts.append(f"{_whole(row, 'missing')} answers missing")
    if number(row, "version_min") is not None and number(row, "version_max") is not None:
        first, last = _whole(row, "version_min"), _whole(row, "version_max")
        parts.append(f"version {first}" if first == last else f"versions {first} to {last}")
    line = domain_line(row).strip()
    return ", ".join([*parts, line] if line else parts)


def environment_lines(row: Row) -> list[str]:
    """Return a line for each of the environment's own metrics, with its mean, which `row` has under `env/NAME`."""
    names = [name for name in row if name.startswith("env/")]
    width = max(map(len, names), default=0)
    return [f"{name.ljust(width)}  {fixed(row, name, 3)}" for name in names]


def best_of_lines(found: Sequence[BestOf], *, binary: bool) -> list[str]:
    """Return a line for each of `found`: for one k, the mean best reward of k answers and its interval.

    `binary`: True if each reward is 0 or 1; the lines then say pass@k.
    """
    names = [f"{'pass@' if binary else 'best of '}{one.k}" for one in found]
    width = max(map(len, names), default=0)
    return [
        f"{name.ljust(width)}  {one.interval.mean:.3f}, 95% interval {one.interval.low:.3f} to {one.interval.high:.3f}"
        for name, one in zip(names, found, strict=True)
    ]


def domain_line(row: Row) -> str:
    """Return the mean reward and the share of each domain as an indented line; empty if there are no domains.

    A domain is a kind of problems that has its own share of the trained groups. An evaluation has no shares.
    """
    parts: list[str] = []
    for name in domains_of(row):
        share = number(row, f"domain/{name}/share")
        text = f"{name} {fixed(row, f'domain/{name}/reward', 3)}"
        parts.append(text if share is None else f"{text} ({100 * share:.0f} %)")
    return f"      {'  '.join(parts)}" if parts else ""


class _Output:
    """Output of a run: a terminal or another stream. A lost terminal or pipe raises no error, so that the run goes on.

    Characters that the encoding of the stream does not have become question marks.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._gone = False
        """True after an error: the terminal, or the reader of the pipe, is gone. Nothing more is written then."""

    def write(self, text: str) -> None:
        """Write a text at once, unless the stream is gone."""
        if self._gone:
            return
        encoding = self._stream.encoding or "utf-8"
        try:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
        except OSError:
            self._gone = True

    def flush(self) -> None:
        """Do nothing, since `write` flushes."""

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream. rich needs some, to find the width of a terminal for example."""
        return getattr(self._stream, name)


class _Live:
    """Live progress line of a terminal, drawn by rich, and printing above it.

    Args:
        steps: number of steps of the whole run.
        stream: the terminal.
    """

    def __init__(self, steps: int, stream: TextIO) -> None:
        from rich.console import Console as RichConsole
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        self._console = RichConsole(file=stream, highlight=False)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed}/{task.total}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[stage]}", style="cyan", markup=False),
            TextColumn(
                "reward {task.fields[reward]}  held out {task.fields[accuracy]}  "
                "{task.fields[rate]} tok/s  {task.fields[left]} left",
                markup=False,
            ),
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )
        self._task = self._progress.add_task(
            "", total=steps, stage="starting", reward=BLANK, accuracy=BLANK, rate=BLANK, left=BLANK
        )
        self._progress.start()

    def update(self, **fields: Any) -> None:
        """Replace fields of the live line, such as `stage`, or the number of completed steps (`completed`)."""
        self._progress.update(self._task, **fields)

    def print(self, text: str, style: str) -> None:
        """Print a line above the live line. `style` is a style of rich, such as `bold`."""
        from rich.text import Text

        # A `Text` is printed, and no str, in which rich would take square brackets as markup.
        self._console.print(Text(text, style=style), soft_wrap=True)

    def stop(self) -> None:
        """Remove the live line. A second call does nothing."""
        self._progress.stop()


def closing_table(config: Config, summary: Summary) -> list[tuple[str, str]]:
    """Return the closing table of a run, as (title, text) lines. A run of `flash sft` has losses and no rewards.

    `Console.finish` prints it. Losses and plots are read from the run directory, so it is called after their last
    write. The titles are those of `summary_rows`, and more.
    """
    directory = RunDirectory(config.run_dir)
    plots = sorted(directory.plots.glob("*.png"))
    # The ledger counts each sample and token of the run by its fate, such as trained or too old.
    ledger = ", ".join(f"{key} {value}" for key, value in summary.ledger.items() if value)
    first, *rest = summary_rows(summary)
    if config.sft is not None:
        # The other rows are about sampling.
        rest = [row for row in rest if row[0] in ("steps", "trained", "time", "restarts")]
        losses = [fixed(row, HELD_OUT_NLL.name, 4) for row in directory.read_evaluations()]
        # The first and the last loss; only one if there is one evaluation, or if both are equal.
        rest.insert(0, ("held out", " -> ".join(dict.fromkeys([*losses[:1], *losses[-1:]])) or BLANK))
        return [first, *rest, ("directory", str(directory.path)), *(("plot", str(plot)) for plot in plots)]
    return [
        first,
        ("accuracy" if summary.binary else "reward", _held_out_rewards(summary)),
        *rest,
        ("ledger", ledger or BLANK),
        ("directory", str(directory.path)),
        *(("plot", str(plot)) for plot in plots),
    ]


def _held_out_rewards(summary: Summary) -> str:
    """Return the rewards of the first and last evaluation; if both are of one step, its reward and step.

    Without an evaluation, the text says so.
    """
    if summary.final_reward is None:
        return "no held-out evaluation"
    last = f"{summary.final_reward:.3f}"
    if summary.initial_step == summary.final_step:
        return f"{last} on held-out problems, at step {summary.final_step}"
    return f"{formatted(summary.initial_reward, '.3f')} -> {last} on held-out problems"


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the numbers of a run that has ended, without its evaluations, as (title, text) lines.

    `closing_table` and `flash.observe.comparison` call this. They find lines by their titles, each of which is here
    once. The first line is the model, with the objective and the seed. Numbers that were not measured are `-`.
    """
    # The async ratio α is `train.async_ratio`: up to 1 + α batches are in flight, so sampling goes on during a step.
    # The canary is a test text: when an engine has loaded weights, its log-probs of it are compared with the trainer's.
    return [
        ("model", f"{summary.model}, {summary.objective}, seed {summary.seed}"),
        ("steps", str(summary.steps)),
        ("trained", f"{summary.samples} samples, {short(summary.trained_tokens)} tokens"),
        ("too old", f"{formatted(summary.stale_share, '.1%')} of the tokens"),
        ("failures", f"{summary.failures} attempts at a sample"),
        ("time", f"{clock(summary.wall_seconds)} ({short(summary.tokens_per_second)} tokens/s)"),
        ("async ratio", f"{summary.async_ratio:g} (oldest trained token: {formatted(summary.max_age, 'g')} versions)"),
        ("trainer", f"waited {formatted(summary.trainer_wait_share, '.1%')} of the time"),
        ("engines", f"idle {formatted(summary.engine_idle_share, '.1%')} of the time"),
        ("canary", f"mean log-prob difference at most {formatted(summary.canary_error, '.1e')}"),
        (
            "restarts",
            f"{summary.restarts}, {summary.trainer_restarts} of trainers alone, {summary.engine_restarts} of engines",
        ),
    ]


def _whole(row: Row, key: str) -> str:
    """Return the number under `key` without decimals; `-` if the row has none."""
    return formatted(number(row, key), ".0f")
