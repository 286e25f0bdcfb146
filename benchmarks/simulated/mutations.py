"""Mutations of the source that `flash simulate --faults` finds, and the number of seeds until the first failing run.

Each mutation replaces one place of a temporary copy of the code. Seeds are played in order until one breaks a law, at
most `SEEDS` of them. Seeds that fail in the code without a mutation do not count. A row has the number of seeds that
were needed; 0 if no seed has found the mutation. `--quick` tries fewer seeds, and `--from SEED` begins at another one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.form import ROOT, Args, Row, main

SEEDS, QUICK_SEEDS = 2000, 20
"""Largest number of seeds for each mutation."""
PACKAGES = ("flash", "algorithms", "envs")
"""Folders that are copied."""
PLAY = "from flash.simulate.faults.play import first_failing; print(first_failing({}, {}))"
"""Program that prints the first failing seed at or after the first number, -1 if there is none."""


class Mutation(NamedTuple):
    """A small change of one place of the code, which makes it wrong."""

    name: str
    """Fault, as a phrase."""
    file: str
    """File below `flash/`."""
    old: str
    """Text that is there once."""
    new: str


MUTATIONS = (
    Mutation(
        "a result is acknowledged before it is written",
        "hub/work.py",
        "        await self._journal.written()\n        return p.Ack()",
        "        return p.Ack()",
    ),
    Mutation(
        "a commit is acknowledged before it is written",
        "hub/steps.py",
        "        self._save_after_next = wish is not None\n        await self._persistence.journal.written()",
        "        self._save_after_next = wish is not None",
    ),
    Mutation(
        "a batch is dealt before it is written",
        "hub/steps.py",
        "                await self._persistence.journal.written()\n                self._observer.batch",
        "                self._observer.batch",
    ),
    Mutation(
        "tokens may be one version older",
        "samples/rules.py",
        "return version_of(self.max_age, step)",
        "return version_of(self.max_age + 1, step)",
    ),
    Mutation(
        "a batch too many is admitted",
        "samples/rules.py",
        "math.ceil(k / self.batch_size - 1 - self",
        "math.ceil(k / self.batch_size - 2 - self",
    ),
    Mutation("leases of a lost node are not given back", "hub/work.py", "        self._buffer.revoke(training)\n", ""),
    Mutation(
        "evaluations of a lost node are not given back",
        "hub/work.py",
        "                self._evaluations.revoke(lease.lease_id)",
        "                pass",
    ),
    Mutation(
        "a silent node keeps its leases",
        "hub/nodes.py",
        "        self._take_leases(node)\n        self._silent",
        "        self._silent",
    ),
    Mutation(
        "unclaimed leases never expire", "hub/work.py", "if left := self.claims.expire():", "if left := list[int]():"
    ),
    Mutation(
        "a moved node does not present its leases",
        "rollout/node.py",
        "seconds, held = self._config.deadlines.request, self._hub.held",
        "seconds, held = self._config.deadlines.request, self._hub.held[:0]",
    ),
    Mutation(
        "a version is announced before all engines have the one before",
        "hub/steps.py",
        "if progress.publisher_alive and not self._fleet.up_to_date(progress.newest):",
        "if progress.publisher_alive and not self._fleet:",
    ),
    Mutation(
        "a version of lost ranks is still announced",
        "hub/trainers.py",
        "        progress.publisher_alive = False\n        progress.stages_ended",
        "        progress.stages_ended",
    ),
    Mutation(
        "a step is counted by each incarnation",
        "hub/trainers.py",
        "        new = not self._progress.trainers_behind\n",
        "        new = True\n",
    ),
    Mutation(
        "the watch of stages never waits",
        "hub/hub.py",
        "(self.progress.stages_ended != ended and stage is not Stage.ENDING)",
        "stage is not Stage.ENDING",
    ),
    Mutation(
        "a restarted run trains the last formed batch anew",
        "samples/journal.py",
        "for formed, oldest in self._counted if formed.step >= until]",
        "for formed, oldest in self._counted if formed.step > until]",
    ),
    Mutation(
        "a restarted hub writes over the last file of the journal",
        "run/journal.py",
        "return JournalPlace(number, events or 0), notes",
        "return JournalPlace(max(number - 1, 0), events or 0), notes",
    ),
    Mutation(
        "finished evaluations are repeated after a restart",
        "hub/hub.py",
        "            recovered.evaluated,\n",
        "            (),\n",
    ),
    Mutation(
        "a node that leaves gets leases",
        "hub/work.py",
        "        self._leaving.add(node)\n        self.grant_leases()",
        "        self.grant_leases()",
    ),
    Mutation("an interrupted streamed step loses its groups", "hub/steps.py", "        self._buffer.put_back()\n", ""),
    Mutation(
        "tokens of late results are not counted",
        "samples/store.py",
        "        self.ledger.generated_tokens += tokens\n        self.ledger.discard",
        "        self.ledger.discard",
    ),
)


def measure(args: Args) -> list[Row]:
    """Try each mutation, print the result, and return a row for each. `benchmarks.form.main` calls this."""
    seeds = QUICK_SEEDS if args.quick else SEEDS
    rows: list[Row] = []
    for mutation in MUTATIONS:
        found = seeds_until_found(mutation, args.own.first, seeds)
        print(f"{mutation.name}: {found or 'not found'}", flush=True)
        rows.append(Row(mutation.name, "needed_seeds", "seeds", found))
    return rows


def seeds_until_found(mutation: Mutation, begin: int, most: int) -> int:
    """Return how many seeds from `begin` on are played until one finds the mutation; 0 if none of `most` does."""
    with tempfile.TemporaryDirectory(prefix="flash-mutation-") as folder:
        copy = Path(folder)
        for package in PACKAGES:
            shutil.copytree(ROOT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
        mutate(copy / "flash" / mutation.file, mutation)
        first = begin
        while (seed := first_failing(copy, first, begin + most - first)) >= 0:
            if first_failing(ROOT, seed, 1) < 0:  # the code without the mutation passes, so the mutation is the cause
                return seed + 1 - begin
            first = seed + 1
        return 0


def mutate(file: Path, mutation: Mutation) -> None:
    """Make the change of a mutation in a copy of its file."""
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.name}: {mutation.file} has its text {text.count(mutation.old)}×"
    file.write_text(text.replace(mutation.old, mutation.new))


def first_failing(root: Path, first: int, count: int) -> int:
    """Return the first of `count` seeds from `first` on that breaks a law in the code of `root`; -1 if none does."""
    command = [sys.executable, "-c", PLAY.format(first, count)]
    variables = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=True)
    return int(done.stdout)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the option that only this benchmark has."""
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="SEED", help="first seed (default: 0)")


if __name__ == "__main__":
    main("mutations", __doc__ or "", measure, add_options=add_options)
