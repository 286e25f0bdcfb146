"""Output of `flash simulate` and `flash calibrate` on the terminal.

A sweep simulates one configuration for each combination of values. A *cell* is one combination with its report and
bounds. The *ledger* of a run counts its samples and tokens by their fate.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import msgspec

from flash.config.simulate import sampler
from flash.config.tree import Config
from flash.observe.timeline import Floats
from flash.simulate.report import SimReport

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from flash.simulate.calibrate import Calibration
    from flash.simulate.faults.scenario import Scenario
    from flash.simulate.report import SweepCell

BAR = 32
"""Width of a full bar, in characters."""
PLAIN_WIDTH = 240
"""Width of the output, in characters, if it is not a terminal. It is large so that no line is cut."""
WASTE = {
    "discarded_tokens_": ("", "tokens"),
    "given_up_": ("given up", "samples"),
    "retried_": ("repeated", "attempts"),
    "filtered": ("filtered", "samples"),
}
"""Waste in the ledger: prefix of the keys, title, and unit. The rest of a key is the reason."""


def print_run(config: Config, cell: SweepCell) -> None:
    """Print the results of one simulated run, and its bounds.

    `config` is the configuration that the user gave. A warning is printed if responses were cut.
    """
    report, console = cell.report, _console()
    simulate = config.simulate
    assert simulate is not None, "flash.config.check.check_simulated_run"
    console.print(
        f"{config.run.name}: {simulate.rollout_gpus} GPUs generate, {simulate.gpus - simulate.rollout_gpus} train; "
        f"{report.steps} steps of {config.train.batch_size} samples, async_ratio {config.train.async_ratio:g}"
    )
    console.print(f"simulated {report.seconds:.4g} s in {report.real_s:.2g} s\n")
    _print_pairs(console, _speed_lines(report))
    _print_shares(console, report)
    _print_ages(console, report)
    _print_waste(console, report)
    _print_bounds(console, cell)
    longest = sampler(simulate.response_tokens).upper()
    if longest > config.rollout.max_new_tokens:
        console.print(
            f"\nresponses of up to {longest:.4g} tokens were cut at rollout.max_new_tokens = "
            f"{config.rollout.max_new_tokens}"
        )


def _speed_lines(report: SimReport) -> list[tuple[str, str]]:
    """Return the lines on times, throughput, places and lengths, each as (title, text)."""
    generated_per_trained = report.generated_tokens / max(report.trained_tokens, 1)
    # Negative if the run prefers short samples.
    bias = report.mean_trained_length / report.mean_issued_length - 1 if report.mean_issued_length else 0.0
    return [
        ("step time", f"{report.step_s:.4g} s"),
        (
            "throughput",
            (
                f"{report.tokens_per_s:,.0f} trained tokens/s, {report.samples_per_s:.4g} trained samples/s, "
                f"{report.tokens_per_s * generated_per_trained:,.0f} generated tokens/s"
            ),
        ),
        (
            "too old",
            f"{report.stale_share:.1%} of the generated tokens, {report.stale_samples:,} samples with all of theirs",
        ),
        ("slot use", f"{report.slot_use:.1%} of the engines' places for sequences"),
        (
            "mean response",
            f"{report.mean_trained_length:.4g} tokens trained, {report.mean_issued_length:.4g} issued ({bias:+.1%})",
        ),
    ]


def _print_shares(console: Console, report: SimReport) -> None:
    """Print the shares of busy and idle time, the latter by cause."""
    table = _table("", "busy", "idle, by cause")
    for name, busy, idle in (
        ("engines", report.engine_busy, report.engine_idle),
        ("trainers", report.trainer_busy, report.trainer_idle),
    ):
        # Shares that would be printed as 0.0 % are left out.
        causes = ", ".join(f"{cause} {share:.1%}" for cause, share in _largest(idle) if share >= 0.0005)
        table.add_row(name, f"{busy:.1%}", causes or "none")
    console.print(table)


def _print_ages(console: Console, report: SimReport) -> None:
    """Print the trained tokens by age, as bars."""
    total = sum(report.ages.values())
    table = _table("\nage", "\nshare", "\ntrained tokens by age, in versions")
    for age, tokens in sorted(report.ages.items()):
        share = tokens / total if total else 0.0
        table.add_row(str(age), f"{share:.1%}", "█" * round(BAR * share) or "▏")
    console.print(table)


def _print_waste(console: Console, report: SimReport) -> None:
    """Print what the run wasted, by reason.

    Discarded tokens are a share of the generated tokens. Samples that were given up or filtered, and repeated attempts,
    are a share of the issued samples. The sample of a repeated attempt may be trained.
    """
    ledger = report.ledger
    generated = max(ledger.get("generated_tokens", 0), 1)
    issued = max(ledger.get("issued", 0), 1)
    rows: list[tuple[str, str, int, float]] = []  # (reason, unit, count, share)
    for key, count in ledger.items():
        for prefix, (title, unit) in WASTE.items():
            if key.startswith(prefix) and count:
                reason = key.removeprefix(prefix).replace("_", " ")
                share = count / (generated if unit == "tokens" else issued)
                rows.append((f"{title} {reason}".strip(), unit, count, share))
    if not rows:
        console.print("\nwaste: none")
        return
    table = _table("\nwaste", "\ncount", "\nshare")
    for reason, unit, count, share in sorted(rows, key=lambda row: (row[1], -row[3])):
        table.add_row(f"{reason} ({unit})", f"{count:,}", f"{share:.1%}")
    console.print(table)


def _print_bounds(console: Console, cell: SweepCell) -> None:
    """Print the bounds on the time of a step, with their quantities, and the ratio of the run's step time to each."""
    table = _table("\nbound on a step", "\nseconds", "\nrun / bound", "\nformula and its quantities")
    for bound in cell.bounds:
        sign = "≥" if bound.lower else "≤"
        ratio = "" if bound.part or not bound.step_s else f"{cell.report.step_s / bound.step_s:.3f}"
        table.add_row(bound.name, f"{sign} {bound.step_s:.4g}", ratio, f"{bound.formula}: {bound.values}")
    console.print(table)


def with_progress(reports: Iterable[SimReport], count: int) -> Iterable[SimReport]:
    """Yield the reports of a sweep as they come, and show how many of `count` are done.

    A terminal shows a bar. Any other output gets one line for each report.
    """
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    if console.is_terminal:
        yield from track(reports, "simulating", total=count, console=console, transient=True)
        return
    begun = time.monotonic()
    for done, report in enumerate(reports, start=1):
        left = (time.monotonic() - begun) / done * (count - done)
        sys.stderr.write(f"simulated {done} of {count}" + (f"; about {left:.0f} s left\n" if left else "\n"))
        yield report


def print_sweep(cells: Sequence[SweepCell], best: SweepCell) -> None:
    """Print a table with one row for each cell, in which the recommended cell is marked, and the recommendation.

    `best` is the recommended cell, one of `cells`.
    """
    console = _console()
    keys = list(cells[0].values)
    titles = ("step s", "tokens/s", "engines busy", "trainers busy", "oldest age", "waste", "")
    table = _table(*(key.rpartition(".")[2] for key in keys), *titles)
    for cell in cells:
        report = cell.report
        table.add_row(
            *cell.values.values(),
            f"{report.step_s:.4g}",
            f"{report.tokens_per_s:,.0f}",
            f"{report.engine_busy:.0%}",
            f"{report.trainer_busy:.0%}",
            str(cell.oldest),
            f"{cell.waste:.1%}",
            "◀ best" if cell is best else "",
            style="bold" if cell is best else None,
        )
    console.print(table)
    console.print(f"\n{recommendation(cells, best)}")


def recommendation(cells: Sequence[SweepCell], best: SweepCell) -> str:
    """Return the recommendation of the cell `best`, one of `cells`, as one sentence."""
    fastest = max(cell.report.tokens_per_s for cell in cells)
    slowest = min(cell.report.tokens_per_s for cell in cells)
    rate = best.report.tokens_per_s
    chosen = ", ".join(f"{key} = {value}" for key, value in best.values.items())
    speed = "the fastest" if rate == fastest else f"{rate / fastest:.1%} of the fastest"
    age = "1 version" if best.oldest == 1 else f"{best.oldest} versions"
    return (
        f"Take {chosen}: {rate:,.0f} trained tokens/s, {speed} and {rate / slowest:.2f}x the slowest, "
        f"with no trained token older than {age} and {best.waste:.1%} of the tokens wasted."
    )


def print_calibration(fitted: Calibration, predicted: Floats, config: Path, file: Path) -> None:
    """Print the fitted constants with their errors, and how well they predict the step time of the measured run.

    The error of a fit is the root mean square of its residuals, as a share of the mean measurement.

    Args:
        fitted: the calibration.
        predicted: simulated seconds of a step, one value for each random draw of the workload.
        config: configuration file of the measured run.
        file: file to which the fitted table was written.
    """
    console = _console()
    table = _table("constants of", "fitted to", "error", "values")
    for part in fitted.parts:
        constants = ", ".join(f"{name} {value:.4g}" for name, value in part.constants.items())
        table.add_row(part.name, f"{part.points:,} points", f"{part.residual:.1%}", constants)
    console.print(table)
    for part in fitted.parts:
        if part.note:
            console.print(f"{part.name}: {part.note}")
    console.print(
        f"\nstep time: measured {fitted.step_s:.4g} s, simulated {predicted.mean():.4g} s "
        f"({predicted.mean() / fitted.step_s - 1:+.1%}; {predicted.min():.4g} to {predicted.max():.4g} s "
        f"over {predicted.size} draws of the workload)"
    )
    console.print(f"written to {file}; use it with: flash simulate {quote(str(config))} {quote(str(file))}")


def _largest(shares: dict[str, float]) -> list[tuple[str, float]]:
    """Return shares with their names, the largest first."""
    return sorted(shares.items(), key=lambda item: -item[1])


def _print_pairs(console: Console, rows: Iterable[tuple[str, str]]) -> None:
    """Print titles and texts in two columns, and an empty line."""
    for title, text in rows:
        console.print(f"{title:<15}{text}")
    console.print()


def _console() -> Console:
    """Return a console for standard output that prints lines as they are. Only cells of a table are wrapped."""
    from rich.console import Console

    class Unwatched(Console):
        """A console that reports a closed pipe as BrokenPipeError."""

        def on_broken_pipe(self) -> None:
            """Raise BrokenPipeError, so that the command ends as if by SIGPIPE. Rich would end it with exit code 1."""
            raise BrokenPipeError

    return Unwatched(
        file=sys.stdout,
        highlight=False,
        markup=False,
        emoji=False,  # else `:key:` in the name of a file becomes a picture
        soft_wrap=True,
        width=None if sys.stdout.isatty() else PLAIN_WIDTH,
    )


def _table(*titles: str) -> Table:
    """Return a table without borders. All columns except the first and the last are aligned right, for numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, title in enumerate(titles):
        table.add_column(title, justify="left" if place in (0, len(titles) - 1) else "right")
    return table


def print_failed_seed(seed: int, law: str) -> None:
    """Print the law that the run of a seed has broken. `flash simulate --faults` calls this for each failing seed."""
    sys.stdout.write(f"seed {seed}: {law}\n")
    sys.stdout.flush()


def print_scenario(scenario: Scenario) -> None:
    """Print a smaller scenario that breaks the same law as the seed that was printed before."""
    sys.stdout.write(f"  smaller: {msgspec.json.encode(scenario).decode()}\n")
    sys.stdout.flush()


def print_faults(seeds: int, befallen: Mapping[str, int], failed: int) -> None:
    """Print the summary of runs with faults: their number, the faults by kind, and the number of failing runs."""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in sorted(befallen.items())) or "none"
    sys.stdout.write(f"{seeds:,} {'seed' if seeds == 1 else 'seeds'}; faults: {kinds}; failed: {failed:,}\n")
