"""Whole runs of `flash train` on one card, which engine and trainer share, and an engine beside a bare vLLM.

The canary, a text with the trainer's log-probs, is computed by the engine at every version: `canary_error` is the mean
difference. `mismatch_k3` is the distance of the two log-probs of the tokens that are trained. A swap is the load of a
new version of the weights into the engine, after the trainer has published it.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.form import ROOT, WORKLOADS, Row
from benchmarks.gpu.steps import MIXTURE, MODELS, Part, Sizes, Skipped, random_model
from benchmarks.real.engine_cost import config_for, efficiency_rows
from benchmarks.real.runs import Measured, train
from flash.config.load import load
from flash.run.models import make_missing_models

TINY = WORKLOADS / "gpu_check.toml"
"""Configuration of the runs with the tiny model."""
TINY_MODEL = MODELS / "gpu-check-tiny"
"""Folder of the tiny model, which the first run makes."""
ONE_GPU = ROOT / "examples" / "one_gpu.toml"
"""Configuration of the run with a model of the user."""
SHORTER = ["eval.every=0", "train.batch_size=128", "model.max_length=512", "rollout.max_new_tokens=128"]
"""Overrides that let the example end within minutes."""
NO_GPU = [
    *("cluster.gpus_per_node=0", "engine.share_gpus=false", "weights.backend=tcp", "engine.enforce_eager=true"),
    *("cluster.node_cpus=[0]", "cluster.trainer_cpus=[1]"),
]
"""Overrides for two CPU cores."""
KINDS = {
    "lora": ["lora.rank=8", "weights.backend=tcp"],
    "speculation": [
        'engine.vllm.speculative_config={method = "ngram", num_speculative_tokens = 3, prompt_lookup_max = 3}',
    ],
    "filters": ["rollout.top_k=8", "rollout.top_p=0.9"],
    "moved": ["train.activation_checkpointing=true", 'train.offload=["activations", "moments"]'],
    "weights-moved": ["train.activation_checkpointing=true", 'train.offload=["activations", "weights"]'],
    "deltas": ["weights.backend=tcp_deltas"],
    "fp8": ['engine.vllm.quantization="fp8_per_channel"', "weights.canary_tolerance=1"],
}
"""Kinds of runs: what each adds to the run of the tiny model, which is in bfloat16 here."""
NOT_ON_CPU = ("speculation", "moved", "weights-moved", "fp8", "routing")
"""Kinds of runs that need a GPU, because vLLM's build for CPUs lacks what they test."""


def job_rows(sizes: Sizes, model: Path | None) -> list[Row]:
    """Measure the swaps of a whole run: of the tiny model, or of the model in the folder `model`.

    These are the parts `job-tiny` and `job-model`.

    Raises:
        CalledProcessError: the run failed; its output has the reason. A canary beyond its tolerance fails a run, too.
    """
    workload, name, folder, dtype = TINY, "gpu-check-tiny", TINY_MODEL, "float32"
    overrides = [f"run.steps={sizes.swaps}", *([] if sizes.gpu else NO_GPU)]
    if model is not None:
        workload, name, folder, dtype = ONE_GPU, "gpu-check-model", model, "bfloat16"
        overrides += [f"model.path={model}", *SHORTER]
    run = train(workload, name, overrides)
    bytes_sent = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    # Activities of the timeline, each as [lane, activity, start, stop], and the seconds of those of two kinds.
    spans: list[Any] = [json.loads(line) for line in Path("outputs", name, "spans.jsonl").read_text().splitlines()]
    swaps, publishes = ([stop - start for _, kind, start, stop in spans if kind == one] for one in ("swap", "publish"))
    # The first swap loads into an engine that has just started, and takes longer.
    swap_s, publish_s = statistics.median(swaps[1:] or swaps), statistics.median(publishes[1:] or publishes)
    case = f"{'a model' if model is not None else 'tiny'}, {dtype}, {bytes_sent / 2**20:,.0f} MiB of weights"
    assert run.summary["steps"] == sizes.swaps, run.summary["steps"]
    return [
        Row(case, "swaps", "swaps", len(swaps), at_least=sizes.swaps),
        Row(case, "canary_error", "nats", max(row["canary_error"] for row in run.metrics)),
        Row(case, "publish_s", "s", publish_s),
        Row(case, "swap_s", "s", swap_s),
        Row(case, "transfer_gb_per_s", "GB/s", bytes_sent / 1e9 / (swap_s + publish_s)),
        Row(case, "trainer_step_s", "s", run.mean("trainer_step_s", slice(1, None))),
        Row(case, "tokens_per_s", "tokens/s", run.mean("tokens_per_second", slice(1, None))),
    ]


def kind_rows(kind: str, sizes: Sizes) -> list[Row]:
    """Measure a run with the settings of a kind, which is a key of KINDS and the name of a part."""
    return version_rows(f"tiny, {kind}", run_kind(kind, f"gpu-check-{kind}", sizes, KINDS[kind]), sizes)


def routing_rows(sizes: Sizes) -> list[Row]:
    """Run a mixture of random weights whose trainer replays its engine's experts, and one that does not.

    This is the part `routing`. The experts of a *mixture* are parts of a layer, of which each token uses a few. With
    replay, the trainer uses the experts that the engine has chosen.
    """
    make_missing_models(load(TINY, []))
    model = random_model(MODELS / "gpu-check-mixture", MIXTURE, TINY_MODEL, endless=False)
    replayed, own = (
        run_kind(
            "routing",
            f"gpu-check-routing-{replay}",
            sizes,
            [f"model.path={model}", "tiny_model=none", f"rollout.routing_replay={replay}"],
        )
        for replay in ("true", "false")
    )
    return [
        *version_rows("mixture, routing", replayed, sizes),
        Row("mixture, routing", "mismatch_k3_beside", "nats", replayed.mean("mismatch_k3"), own.mean("mismatch_k3")),
    ]


def run_kind(kind: str, name: str, sizes: Sizes, overrides: list[str]) -> Measured:
    """Run `flash train` with the tiny model's file and these overrides, under the run name `name`.

    Raises:
        Skipped: there is no GPU, and the kind needs one.
    """
    if kind in NOT_ON_CPU and not sizes.gpu:
        raise Skipped("it needs a GPU: vLLM's build for CPUs has none of it")
    place = [] if sizes.gpu else NO_GPU
    return train(TINY, name, [f"run.steps={sizes.swaps}", "model.dtype=bfloat16", *place, *overrides])


def version_rows(case: str, run: Measured, sizes: Sizes) -> list[Row]:
    """Return the rows with the number of versions of a run, and with the differences between engine and trainer."""
    return [
        Row(case, "versions", "versions", run.summary["steps"], at_least=sizes.swaps),
        Row(case, "canary_error", "nats", max(row["canary_error"] for row in run.metrics)),
        Row(case, "mismatch_k3", "nats", run.mean("mismatch_k3")),
    ]


def engine_rows(sizes: Sizes) -> list[Row]:
    """Measure tokens per second through hub, scheduler and proxy, and of a bare vLLM. This is the part `engine`.

    The bare one is the same engine, which gets all requests at once.
    """
    make_missing_models(load(TINY, []))
    name = f"gpu-check-{sizes.shape['num_hidden_layers']}x{sizes.shape['hidden_size']}"
    model = random_model(MODELS / name, sizes.shape, TINY_MODEL, endless=True)
    config = config_for(model, sizes.tokens, sizes.requests)
    if sizes.gpu:
        replace = msgspec.structs.replace
        config = replace(
            config,
            model=replace(config.model, dtype="bfloat16"),
            engine=replace(config.engine, share_gpus=True, memory_fraction=0.5, enforce_eager=False),
            cluster=replace(config.cluster, gpus_per_node=1),
        )
    case = f"{name}, {sizes.requests} × {sizes.tokens} tokens"
    return efficiency_rows(case, config, sizes.tokens, sizes.requests, sizes.rounds)


PARTS: dict[str, Part] = {
    "job-tiny": lambda sizes: job_rows(sizes, None),
    "engine": engine_rows,
    **{kind: partial(kind_rows, kind) for kind in KINDS},
    "routing": routing_rows,
}
"""Parts of the check in this file, by name."""
