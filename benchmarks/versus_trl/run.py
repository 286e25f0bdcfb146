"""Wall-clock time to the same held-out accuracy: Flash compared with TRL's GRPOTrainer, on the same two cores.

Both start from the same model and see the same prompts in the same order. Rewards, batch, group size, learning rate,
temperature and objective (GRPO without KL) are the same; `benchmarks.versus_trl.settings` translates the configuration
for TRL. There are three workloads. `short` has answers of 16 tokens of a tiny model, the best case for one large
`generate`. `long` has answers of 24 tokens in the median and up to 20 times as many. `real` is the quickstart, with a
pretrained model in bfloat16; there Flash leaves out groups of equal rewards and samples others, which TRL cannot do.
Flash trains asynchronously. TRL generates with transformers on all cores, because its vLLM modes need a GPU.

The clock runs from the first rollout to the end of a step. Start-up and evaluation are not counted for either system.
Weights are saved during the run, and evaluated after it; TRL's clock stops while they are saved, Flash's does not.

Curves are kept, so that a call may measure a part: `--case real` one workload, `--system TRL` one system, `--seed N`
one seed. TRL has a Python environment of its own under build/trl, which is made once and takes 1.3 GB (6 GB with torch
for GPUs). Only torch, transformers and the packages that Flash's environments need have the same versions there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import msgspec

from benchmarks.form import PIP_INSTALL, RESULTS, ROOT, WORKLOADS, Args, Row, main, make_python, run_command, version_of
from benchmarks.versus_trl import curves
from benchmarks.versus_trl.curves import Case, Curve, Point
from benchmarks.versus_trl.settings import TrlChoices
from flash.config.load import load
from flash.config.tree import Config
from flash.install import commands, packages
from flash.observe.rundir.rundir import RunDirectory
from flash.run.models import make_missing_models
from flash.trainer.checkpoint_files import complete_checkpoints

CASES = {
    "short": Case(title="answers of 16 tokens", accuracy=0.8, goal=1.25),
    "long": Case(title="answers of 24 tokens in the median, up to 480", accuracy=0.75, goal=5.0),
    "real": Case(title="SmolLM2-135M-Instruct, instructions of form", accuracy=0.6, goal=1.25),
}
"""Workloads, with the accuracy that both systems must reach and the goal of the speed-up."""
OTHERS: dict[str, dict[str, TrlChoices | list[str]]] = {
    "short": {"TRL": TrlChoices(micro_batches=4)},
    "long": {"TRL": TrlChoices(micro_batches=8, continuous_batching=True)},
    "real": {
        "TRL": TrlChoices(micro_batches=4),
        "Flash, synchronous": ["train.async_ratio=0", "cluster.node_cpus=[0,1]", "cluster.trainer_cpus=[0,1]"],
    },
}
"""Systems that Flash is compared with: TRL, or Flash with other settings, so that all cores generate and then train.

TRL has the newest weights for each batch. Its settings are those that took the least CPU here. Per batch, on one core:
short answers 0.6 s to generate (continuous batching 5 s) and 1.2 s to train (in one part 1.6 s); long ones 4 s with
continuous batching, 11 s with a static cache, 22 s with the default one, and 6 s to train (in one part 9 s)."""
SYSTEMS = ("Flash", *dict.fromkeys(system for others in OTHERS.values() for system in others))
"""All systems."""
SEEDS = (0, 1, 2)
"""Seeds of full runs: one alone says little, because the time to an accuracy depends on the samples."""
QUICK = ["run.steps=4", "checkpoint.every=2", "eval.problems=64"]
"""Overrides of `--quick`."""

TRL_FOLDER = ROOT / "build" / "trl"
"""Folder of the Python environment of TRL."""
PINNED = ("trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")
"""Packages that only TRL's environment needs."""
SHARED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "msgspec", "anyio", "tomli-w")
"""Packages that are taken in the version that Flash runs with."""
CURVES = RESULTS / "versus_trl_curves.json"
"""File with the recorded curves."""
OUT = Path("outputs") / "versus-trl"
"""Folder of the runs."""
RUN_TIMEOUT_S = 1800
"""Longest wait for one run, or for the installation of torch."""


class Trained(msgspec.Struct, frozen=True):
    """Result of one run of either system, before its evaluation."""

    seconds: list[float]
    """Seconds from the first rollout to the end of each step."""
    saved: list[tuple[int, Path]]
    """Steps whose weights were saved, with their files or folders."""
    software: dict[str, str]
    """Versions of the packages, by name."""


def configured(case: str, seed: int, quick: bool, own: Sequence[str] = ()) -> tuple[Path, list[str], Config]:
    """Return the workload's file, the overrides of this run, and the configuration that both together give.

    TRL and Flash get the same configuration, except for `own`, settings of one run of Flash alone. `case` is a key of
    CASES.
    """
    file = WORKLOADS / f"versus_trl_{case}.toml"
    name = f"versus-trl-{label(case, seed, quick)}{'-own' if own else ''}"
    overrides = [f"run.name={name}", f"run.seed={seed}", *(QUICK if quick else []), *own]
    return file, overrides, load([file], overrides)


def label(case: str, seed: int, quick: bool) -> str:
    """Return a name for the files of a run, without the system: workload, `quick` and seed."""
    return f"{case}{'-quick' if quick else ''}-{seed}"


def requirements() -> list[str]:
    """Return the requirements that pip installs for TRL."""
    # Without the local part of a version: one index calls a release `2.13.0+cpu`, another one `2.13.0`.
    return [*PINNED, *(f"{name}=={metadata.version(name).partition('+')[0]}" for name in SHARED)]


def install_torch(executable: Path) -> None:
    """Install torch's build for CPUs into TRL's environment, on a machine without a GPU. Else do nothing.

    `executable` is the Python of the environment. Raises CalledProcessError if pip fails.
    """
    if not packages.has_nvidia_gpu():
        torch = packages.find_torch(commands.VirtualEnvironment(executable.parents[1]))
        if torch.size == packages.CPU:  # the other one comes with the requirements
            where = commands.variables(dict(torch.variables))
            run_command([executable, *PIP_INSTALL, "--no-deps", torch.requirement], RUN_TIMEOUT_S, where)


def variables(threads: int) -> dict[str, str]:
    """Return the environment variables of TRL's process, which has the repository on its path and no network."""
    return os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }


def train_trl(case: str, seed: int, quick: bool, choices: TrlChoices) -> Trained:
    """Run TRL's GRPOTrainer on a workload, in TRL's Python environment.

    Returns its times and saved weights. The folder of an earlier run is deleted.
    """
    file, overrides, _ = configured(case, seed, quick)
    out = OUT / f"trl-{label(case, seed, quick)}"
    shutil.rmtree(out, ignore_errors=True)
    chosen = msgspec.json.encode(choices).decode()
    python = make_python(TRL_FOLDER, requirements(), install_torch)
    command = [python, "-m", "benchmarks.versus_trl.runner", out, chosen, file, *overrides]
    threads = len(os.sched_getaffinity(0))
    run_command(command, RUN_TIMEOUT_S, variables(threads))
    report = msgspec.json.decode((out / "steps.json").read_bytes())
    saved = [(int(one.stem.removeprefix("step-")), one) for one in sorted((out / "weights").iterdir())]
    return Trained(report["seconds"], saved, report["software"])


def train_flash(case: str, seed: int, quick: bool, own: Sequence[str]) -> Trained:
    """Run `flash train` on a workload, with the settings `own` in addition. Returns its times and checkpoints."""
    file, overrides, config = configured(case, seed, quick, own)
    command = [sys.executable, "-m", "flash", "train", str(file), *overrides]
    run_command(command, RUN_TIMEOUT_S)
    steps = RunDirectory(config.run_dir).read_metrics()
    # The first row counts from the first lease of a training sample.
    start = steps[0]["time"] - steps[0]["interval_s"]
    saved = [(int(folder.name.removeprefix("step-")), folder) for folder in complete_checkpoints(config.run_dir)]
    return Trained(
        [row["time"] - start for row in steps],
        sorted(saved),
        {name: version_of(name) for name in ("torch", "transformers", "vllm")},
    )


def train_and_evaluate(case: str, system: str, seed: int, quick: bool) -> Curve:
    """Train one system on one workload (a key of CASES), and evaluate the weights that it saved."""
    from benchmarks.versus_trl.evaluate import accuracies

    choices = OTHERS[case].get(system, [])  # `Flash` itself is not in OTHERS, and has no settings of its own
    with_trl = isinstance(choices, TrlChoices)
    _, _, config = configured(case, seed, quick, [] if with_trl else choices)
    make_missing_models(config)
    trained = train_trl(case, seed, quick, choices) if with_trl else train_flash(case, seed, quick, choices)
    points: list[Point] = []
    for step, interval in accuracies(config, trained.saved):
        seconds = trained.seconds[step - 1] if step else 0.0  # step 0 is the untrained model
        print(f"{system}, {case}: step {step}, {seconds:.1f} s, held-out accuracy {interval.mean:.3f}", flush=True)
        points.append(Point(step, seconds, interval.mean, interval.low, interval.high))
    return Curve(case=case, system=system, seed=seed, software=trained.software, points=points)


def compare(args: Args, measured: Callable[[str, str, int, bool], Curve] = train_and_evaluate) -> list[Row]:
    """Measure the workloads, systems and seeds of the options, and return the rows of all recorded runs.

    These include runs of earlier calls. `benchmarks.form.main` calls this. Tests replace `measured`.
    """
    seeds = args.own.seed or ([0] if args.quick else SEEDS)
    new = [
        measured(case, system, seed, args.quick)
        for case in args.own.case or CASES
        for seed in seeds
        for system in ("Flash", *OTHERS[case])
        if system in (args.own.system or SYSTEMS)
    ]
    kept = {
        (curve.case, curve.seed, curve.system): curve
        for curve in curves.keep(OUT / "quick.json" if args.quick else CURVES, new)
    }
    rows: list[Row] = []
    for case in sorted({case for case, _, _ in kept}):
        of_case: list[Row] = []
        for seed in sorted({seed for name, seed, _ in kept if name == case}):
            ours, *others = (kept.get((case, seed, system)) for system in ("Flash", *OTHERS[case]))
            if ours is not None:
                of_case += curves.rows(CASES[case], case, ours, [other for other in others if other is not None])
        rows += [*curves.over_seeds(case, of_case), *of_case]
    return rows


def draw(rows: Sequence[Row], picture: Path) -> None:
    """Draw the recorded curves of all full runs into the file `picture`. The rows do not hold them."""
    curves.draw(curves.read(CURVES), CASES, picture)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only this benchmark has. Each of them may be given several times."""
    parser.add_argument("--case", choices=[*CASES], action="append", help="workload; by default all")
    parser.add_argument("--system", choices=SYSTEMS, action="append", help="system; by default all")
    parser.add_argument("--seed", type=int, action="append", help="seed; curves of other seeds are kept")


if __name__ == "__main__":
    main("versus_trl", __doc__ or "", compare, plot=draw, add_options=add_options)
