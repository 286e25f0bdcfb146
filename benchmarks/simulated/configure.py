"""What the benchmarks of the simulator share: configurations by dictionaries, and runs whose world can be looked at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import anyio
import msgspec

from flash.config.tree import Config
from flash.simulate.clock import VirtualLoop
from flash.simulate.report import SimReport
from flash.simulate.world import World

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "benchmark"},
    "model": {"path": "none", "max_length": 1 << 20},
    "env": {"path": "none:None"},
    "rollout": {"max_new_tokens": 1 << 16},
    "train": {},
    "engine": {"stream_interval": 256},
    "simulate": {},
}
"""Every length the workload asks for is possible; deliveries are rare, because nobody reads along."""

STEP_S = 0.02
"""Seconds of a decoding step, whatever the batch, in `TWO_ENGINES`."""
TWO_ENGINES: dict[str, Any] = {
    "gpus": 3,
    "rollout_gpus": 2,
    "step_s": STEP_S,
    "sequence_s": 0.0,
    "context_s": 0.0,
    "prefill_s": 0.0,
    "swap_s": 0.1,
    "train_token_s": 0.0,
}
"""Two engines and one trainer whose work is easily counted: nothing but decoding steps, swaps and training steps."""


def configure(**tables: Mapping[str, Any]) -> Config:
    """`BASE` with changes, table by table."""
    names = {*BASE, *tables}
    return msgspec.convert({name: BASE.get(name, {}) | dict(tables.get(name, {})) for name in names}, Config)


def run_world(config: Config) -> tuple[World, SimReport]:
    """Simulate, and keep what was simulated."""

    async def run() -> tuple[World, SimReport]:
        world = World(config)
        return world, world.report(await world.run())

    return anyio.run(run, backend="asyncio", backend_options={"loop_factory": VirtualLoop})
