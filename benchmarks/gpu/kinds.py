"""Runs of other kinds on one card: with adapters, drafts, filters, deltas, what is moved to the host, weights in eight
bits, or experts that are replayed.

Each is a whole run of `flash train` in bfloat16, whose canary holds an engine of that kind to its trainer at every
version; `mismatch_k3` is how far their log-probs are apart on what is trained.
"""

from __future__ import annotations

from functools import partial

from benchmarks.form import Row
from benchmarks.gpu.job import NO_GPU, TINY
from benchmarks.gpu.sizes import MODELS, Part, Sizes, Skipped, mixture_model
from benchmarks.training import Measured, train
from flash.config.load import load
from flash.run.models.models import make_missing_model

KINDS = {
    "lora": ["lora.rank=8", "weights.backend=tcp"],
    "speculation": [
        'engine.vllm.speculative_config={method = "ngram", num_speculative_tokens = 3, prompt_lookup_max = 3}',
    ],
    "filters": ["rollout.top_k=8", "rollout.top_p=0.9"],
    "moved": ["train.activation_checkpointing=true", 'train.offload=["activations", "moments"]'],
    "weights-moved": ["train.activation_checkpointing=true", 'train.offload=["activations", "weights"]'],
    "deltas": ["weights.backend=tcp", "weights.deltas=true"],
    "fp8": ['engine.vllm.quantization="fp8_per_channel"', "weights.canary_tolerance=1"],
}
"""What each adds to the run of the tiny model."""
VOCABULARY = 64
"""Of the mixture: the tiny model's tokens, and some that are none."""
NOT_ON_CPU = ("speculation", "moved", "weights-moved", "fp8", "routing")


def kind_rows(kind: str, sizes: Sizes) -> list[Row]:
    """The run of a kind.

    Raises:
        Skipped: there is no GPU, and it is refused without.
        CalledProcessError: the run failed; its output says why.
    """
    _check(kind, sizes)
    return _rows(f"tiny, {kind}", _run(kind, sizes, KINDS[kind]), sizes)


def routing_rows(sizes: Sizes) -> list[Row]:
    """A mixture of random weights whose trainer is told its engine's experts, beside one that is not.

    Raises:
        Skipped, CalledProcessError: as `kind_rows`.
    """
    _check("routing", sizes)
    make_missing_model(load(TINY, []))
    model = mixture_model(MODELS / "gpu-check-mixture", VOCABULARY, MODELS / "gpu-check-tiny")
    told, own = (
        _run(f"routing-{replay}", sizes, [f"model.path={model}", "tiny_model=none", f"rollout.routing_replay={replay}"])
        for replay in ("true", "false")
    )
    return [
        *_rows("mixture, routing", told, sizes),
        Row("mixture, routing", "mismatch_k3_beside", "nats", told.mean("mismatch_k3"), own.mean("mismatch_k3")),
    ]


def _check(kind: str, sizes: Sizes) -> None:
    if kind in NOT_ON_CPU and not sizes.gpu:
        raise Skipped("it needs a GPU: vLLM's build for CPUs has none of it")


def _run(name: str, sizes: Sizes, overrides: list[str]) -> Measured:
    place = [] if sizes.gpu else NO_GPU
    return train(TINY, f"gpu-check-{name}", [f"run.steps={sizes.swaps}", "model.dtype=bfloat16", *place, *overrides])


def _rows(case: str, run: Measured, sizes: Sizes) -> list[Row]:
    return [
        Row(case, "versions", "versions", run.summary["steps"], None, sizes.swaps),
        Row(case, "canary_error", "nats", max(row["canary_error"] for row in run.metrics)),
        Row(case, "mismatch_k3", "nats", run.mean("mismatch_k3")),
    ]


PARTS: dict[str, Part] = {**{kind: partial(kind_rows, kind) for kind in KINDS}, "routing": routing_rows}
