"""Tokens per second through hub, scheduler and proxy, beside the same engine given all requests at once."""

from __future__ import annotations

import statistics

import anyio
import msgspec

from benchmarks.form import WORKLOADS, Row
from benchmarks.gpu.sizes import MODELS, Sizes, random_model
from benchmarks.real.engine_efficiency import config_for, measure
from flash.config.load import load
from flash.rollout.episode.tokenizer import HfTokenizer
from flash.run.models.models import make_missing_model

GOAL = 0.95


def engine_rows(sizes: Sizes) -> list[Row]:
    """One model with answers of a fixed length, both ways in turns."""
    tiny = load(WORKLOADS / "gpu_check.toml", [])
    make_missing_model(tiny)
    name = f"gpu-check-{sizes.shape.layers}x{sizes.shape.width}"
    model = random_model(MODELS / name, sizes.shape, tokenizer_of=MODELS / "gpu-check-tiny")
    config = config_for(model, sizes.tokens, sizes.requests)
    if sizes.gpu:
        replace = msgspec.structs.replace
        config = replace(
            config,
            model=replace(config.model, dtype="bfloat16"),
            engine=replace(config.engine, share_gpus=True, memory_fraction=0.5, enforce_eager=False),
            cluster=replace(config.cluster, gpus_per_node=1),
        )
    render = HfTokenizer(config.model).render
    prompts = [render(f"{index % 90 + 10}+{index % 89 + 10}=") for index in range(sizes.requests)]
    ours, bare = (statistics.median(times) for times in anyio.run(measure, config, prompts, sizes.tokens, sizes.rounds))
    total = sizes.requests * sizes.tokens
    case = f"{name}, {sizes.requests} × {sizes.tokens} tokens"
    return [
        Row(case, "efficiency", "share", bare / ours, None, GOAL),
        Row(case, "tokens_per_s", "tokens/s", total / ours, total / bare),
    ]
