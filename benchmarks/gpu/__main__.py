"""`python -m benchmarks.gpu [PART …] [--model FOLDER] [--quick] [--json FILE]`: checks that need one NVIDIA GPU.

`mfu`: training steps of a model of the size of Qwen3-0.6B, with random weights. `exact`: a gradient beside that of a
processor in float32. `memory`: the most memory of the card, beside the memory that `flash plan` predicts. `job-tiny`,
`job-model`: a whole run of `flash train` whose engine and trainer share the card, with weights over `ipc`: the canary
over 20 swaps, and the seconds of a swap. The second runs a model of your own, of --model. `engine`: tokens per second
through the whole rollout path, beside a bare vLLM. `lora`, `speculation`, `filters`, `moved`, `weights-moved`,
`deltas`, `fp8`, `routing`: runs with adapters, drafts, top-k and top-p, parts in the host's memory, only changed
weights sent, weights in eight bits, replayed experts.

Without names all parts run, in about a quarter of an hour on one card, `job-model` only with --model. When a part
fails, its error is printed and the other parts run. Rows are written to outputs/gpu-check.json by default. Without a
GPU, `--quick` runs each part at a size for two CPU cores, which shows that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.form import Args, Row, main
from benchmarks.gpu import runs
from benchmarks.gpu.steps import FULL, Part, Sizes, Skipped, exact_rows, memory_rows, mfu_rows
from flash.config.machine import count_gpus

RESULT = Path("outputs") / "gpu-check.json"
"""Default file of the rows."""
PARTS: dict[str, Part] = {"mfu": mfu_rows, "exact": exact_rows, "memory": memory_rows, **runs.PARTS}
"""Every part by its name, in the order in which they run. `job-model` runs last."""


def check(argv: Sequence[str] | None = None, offered: dict[str, Part] = PARTS) -> int:
    """Run the named parts, or all. Returns 1 if a part failed or a named one was skipped. Tests replace `offered`."""
    problems: list[str] = []

    def measure(args: Args) -> list[Row]:
        """Run the parts, one after the other, and return the rows of those that succeed."""
        model: Path | None = args.own.model
        known = dict(offered)
        if model is not None:
            if not (model / "config.json").is_file():
                raise SystemExit(f"--model: {model} is no folder of a model: it has no config.json")
            known["job-model"] = lambda sizes: runs.job_rows(sizes, model)
        if unknown := [name for name in args.own.parts if name not in known]:
            why = "; it needs --model FOLDER" if "job-model" in unknown else ""
            raise SystemExit(f"there is no part {', '.join(unknown)}{why}; there are {', '.join(known)}")
        gpu = count_gpus() > 0
        if not gpu and not args.quick:
            raise SystemExit(
                "this machine has no NVIDIA GPU; --quick runs the parts on the CPU, to show that they work"
            )
        sizes = Sizes(gpu=gpu) if args.quick else FULL
        rows: list[Row] = []
        for name in args.own.parts or known:
            print(f"\n=== {name}", flush=True)
            begun = time.perf_counter()
            try:
                rows += [*known[name](sizes), Row(name, "part_s", "s", time.perf_counter() - begun)]
            except Skipped as why:
                print(f"{name} skipped: {why}")
                problems.extend([name] if name in args.own.parts else [])  # a part that was asked for has no rows
            except Exception:  # a part that fails must not take the others' figures with it
                traceback.print_exc()
                problems.append(name)
        return rows

    def add_options(parser: argparse.ArgumentParser) -> None:
        """Add the options that only this check has."""
        parser.add_argument("parts", nargs="*", metavar="PART", help="by default all, as listed above")
        parser.add_argument("--model", type=Path, metavar="FOLDER", help="a chat model, for job-model")
        parser.set_defaults(json=RESULT)

    RESULT.parent.mkdir(exist_ok=True)
    main("gpu", __doc__ or "", measure, argv, add_options=add_options)
    if problems:
        print(f"without rows: {', '.join(problems)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(check())
