"""Runs benchmarks by name, all of them by default: `python -m benchmarks [NAME …] [--quick]`.

Full runs leave their rows in benchmarks/results/ and write the tables of docs/figures.md anew. Everything else that a
benchmark can do, it does by its own command, which `--list` shows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks.form import RESULTS, ROOT

MODULES = {
    **{
        name: f"benchmarks.simulated.{name}"
        for name in (
            *("async_ratio", "capacity", "end_to_end", "env_async", "gpu_split", "length_bias", "prompt_replication"),
            *(
                "goodput",
                "hub_scale",
                "journal",
                "nodes",
                "queue_scheduling",
                "redundant_envs",
                "scaling",
                "stragglers",
            ),
        )
    },
    **{
        name: f"benchmarks.real.{name}"
        for name in (
            *("async_vs_sync", "calibration", "chaos", "engine_efficiency"),
            *("join", "loop_load", "objective_cost", "plain_loop", "rhythm_cost"),
        )
    },
    "real_agentic": "benchmarks.real.agentic",
    "real_rlvr": "benchmarks.real.rlvr",
    "offpolicy": "benchmarks.offpolicy",
    "offpolicy_confirm": "benchmarks.offpolicy.confirm",
    "sandbox": "benchmarks.sandbox",
    "sandbox_faults": "benchmarks.sandbox.faults",
    "versus_trl": "benchmarks.versus_trl",
}
"""Where each benchmark is."""


def main() -> int:
    """Run what was asked for, one after the other; 1 when one of them failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--quick", action="store_true", help="smaller versions, whose rows are not kept")
    parser.add_argument("--list", action="store_true", help="show the names and their commands")
    args = parser.parse_args()
    if args.list:
        for name, module in MODULES.items():
            print(f"{name:20s} python -m {module}")
        return 0
    unknown = [name for name in args.names if name not in MODULES]
    if unknown:
        parser.error(f"there is no {', '.join(unknown)}; there are {', '.join(MODULES)}")
    failed = [name for name in args.names or MODULES if not _run(name, quick=args.quick)]
    if failed:
        print(f"failed: {', '.join(failed)}")
        return 1
    if not args.quick:
        subprocess.run([sys.executable, "-m", "benchmarks.simulated.figure"], cwd=ROOT, check=True)
    return 0


def _run(name: str, *, quick: bool) -> bool:
    options = ["--quick"] if quick else ["--json", str(RESULTS / f"{name}.json")]
    print(f"\n=== {name}", flush=True)
    return subprocess.run([sys.executable, "-m", MODULES[name], *options], cwd=ROOT, check=False).returncode == 0


if __name__ == "__main__":
    sys.exit(main())
