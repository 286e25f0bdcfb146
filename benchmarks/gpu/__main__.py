"""`python -m benchmarks.gpu [PART …] [--model FOLDER] [--quick] [--json FILE]`: checks that need one NVIDIA GPU.

`mfu`: training steps of a model of the size of Qwen3-0.6B, with random weights. `exact`: a gradient beside that of a
processor in float32. `memory`: the most memory of the card, beside the memory that `flash plan` predicts; also adapters
for a model of eight billion weights. `job-tiny`, `job-model`: a whole run of `flash train` whose engine and trainer
share the card, with weights over `ipc`: the canary over 20 swaps, and the seconds of a swap. The second runs a model of
your own, of --model. `engine`: tokens per second through the whole rollout path, beside a bare vLLM. `lora`,
`speculation`, `filters`, `moved`, `weights-moved`, `deltas`, `fp8`, `routing`: runs with adapters, drafts, top-k and
top-p, parts in the host's memory, only changed weights sent, weights in eight bits, replayed experts.

Without names all parts run, in about a quarter of an hour on one card, `job-model` only with --model. When a part
fails, its error is printed and the other parts run. Rows are written with the versions and the card that they were
measured on. Without a GPU, `--quick` runs each part at a size for two CPU cores, which shows that it works.
"""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from benchmarks.form import Row, installed_version, machine, print_table
from benchmarks.gpu import runs
from benchmarks.gpu.sizes import Part, Sizes, Skipped
from benchmarks.gpu.steps import exact_rows, memory_rows, mfu_rows
from flash.config.machine import count_gpus

RESULT = Path("outputs") / "gpu-check.json"
"""Default file of the report."""
VERSIONS = ("torch", "vllm", "transformers", "triton", "flashinfer-python", "numpy", "msgspec")
"""Packages whose versions are in the report."""


def parts(model: Path | None) -> dict[str, Part]:
    """Return every part by its name, in the order in which they run. `model` is the folder of --model; None: none."""
    known: dict[str, Part] = {"mfu": mfu_rows, "exact": exact_rows, "memory": memory_rows, **runs.PARTS}
    if model is not None:
        known["job-model"] = lambda sizes: runs.job_rows(sizes, model)
    return known


def main(argv: Sequence[str] | None = None, offered: Callable[[Path | None], dict[str, Part]] = parts) -> int:
    """Run the named parts, or all. Returns 1 if a part failed or a named one was skipped. Tests replace `offered`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="by default all, as listed above")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a chat model, for job-model")
    parser.add_argument("--quick", action="store_true", help="small enough for two CPU cores")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE", help=f"default: {RESULT}")
    args = parser.parse_args(argv)
    if args.model is not None and not (args.model / "config.json").is_file():
        parser.error(f"--model: {args.model} is no folder of a model: it has no config.json")
    known = offered(args.model)
    if unknown := [name for name in args.parts if name not in known]:
        why = "; it needs --model FOLDER" if "job-model" in unknown else ""
        parser.error(f"there is no part {', '.join(unknown)}{why}; there are {', '.join(known)}")
    gpu = count_gpus() > 0
    if not gpu and not args.quick:
        parser.error("this machine has no NVIDIA GPU; --quick runs the parts on the CPU, to show that they work")
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--json: cannot make the folder {args.json.parent}: {error.strerror}")
    if args.json.is_dir():
        parser.error(f"--json: {args.json} is a folder; expected the name of a file")
    sizes = Sizes.of(gpu=gpu, quick=args.quick)
    on = [*machine(), ("versions", ", ".join(f"{name} {installed_version(name)}" for name in VERSIONS))]
    for title, text in on:
        print(f"  {title:<8} {text}")
    rows: list[Row] = []
    failed: dict[str, str] = {}
    skipped: dict[str, str] = {}
    for name in args.parts or known:
        print(f"\n=== {name}", flush=True)
        begun = time.perf_counter()
        try:
            found = known[name](sizes)
        except Skipped as why:
            skipped[name] = str(why)
            continue
        except Exception as error:  # a part that fails must not take the others' figures with it
            traceback.print_exc()
            failed[name] = f"{type(error).__name__}: {error}"
            continue
        rows += [*found, Row(name, "part_s", "s", time.perf_counter() - begun)]
        print_table(rows[-len(found) - 1 :])
    report = {"machine": dict(on), "quick": args.quick, "rows": rows, "failed": failed, "skipped": skipped}
    args.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    print(f"\nwritten to {args.json}")
    for how, those in (("failed", failed), ("skipped", skipped)):
        for name, why in those.items():
            print(f"{name} {how}: {why}")
    # A named part that was skipped has no rows either.
    return 1 if failed or (args.parts and skipped) else 0


if __name__ == "__main__":
    sys.exit(main())
