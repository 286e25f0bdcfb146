"""A whole run on one card: engine and trainer share it, and weights go over CUDA IPC."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks.form import ROOT, WORKLOADS, Row
from benchmarks.gpu.sizes import MODELS, Sizes, weight_bytes
from benchmarks.training import train

TINY = WORKLOADS / "gpu_check.toml"
ONE_GPU = ROOT / "examples" / "one_gpu.toml"
SHORTER = ["eval.every=0", "train.batch_size=128", "model.max_length=512", "rollout.max_new_tokens=128"]
"""The example, in minutes."""
BYTES = {"float32": 4, "bfloat16": 2}
NO_GPU = [
    *("cluster.gpus_per_node=0", "engine.share_gpus=false", "weights.backend=tcp", "engine.enforce_eager=true"),
    *("cluster.node_cpus=[0]", "cluster.trainer_cpus=[1]"),
]


def job_rows(sizes: Sizes, model: Path | None) -> list[Row]:
    """The run of a tiny model, or of a model of one's own, and what its swaps took.

    Raises:
        CalledProcessError: the run failed; its output says why.
        AssertionError: the engine's log-probs were further from the trainer's than the configuration allows.
    """
    workload, name, folder, dtype = TINY, "gpu-check-tiny", MODELS / "gpu-check-tiny", "float32"
    overrides = [f"run.steps={sizes.swaps}", *([] if sizes.gpu else NO_GPU)]
    if model is not None:
        workload, name, folder, dtype = ONE_GPU, "gpu-check-model", model, "bfloat16"
        overrides += [f"model.path={model}", *SHORTER]
    run = train(workload, name, overrides)
    size = weight_bytes(folder, BYTES[dtype])
    swaps, publishes = (_seconds(Path("outputs") / name / "spans.jsonl", kind) for kind in ("swap", "publish"))
    # The first loads into an engine that has just started.
    swap_s, publish_s = statistics.median(swaps[1:] or swaps), statistics.median(publishes[1:] or publishes)
    case = f"{'a model' if model is not None else 'tiny'}, {dtype}, {size / 2**20:,.0f} MiB of weights"
    canary = max(row["canary_error"] for row in run.metrics)
    assert run.summary["steps"] == sizes.swaps, run.summary["steps"]
    return [
        Row(case, "swaps", "swaps", len(swaps), None, sizes.swaps),
        Row(case, "canary_error", "nats", canary),
        Row(case, "publish_s", "s", publish_s),
        Row(case, "swap_s", "s", swap_s),
        Row(case, "transfer_gb_per_s", "GB/s", size / 1e9 / (swap_s + publish_s)),
        Row(case, "trainer_step_s", "s", run.mean("trainer_step_s", slice(1, None))),
        Row(case, "tokens_per_s", "tokens/s", run.mean("tokens_per_second", slice(1, None))),
    ]


def _seconds(spans: Path, kind: str) -> list[float]:
    rows: list[Any] = [json.loads(line) for line in spans.read_text().splitlines()]
    return [stop - start for _, name, start, stop in rows if name == kind]
