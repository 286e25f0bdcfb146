"""Configurations for the benchmarks of simulated runs, and functions that simulate Flash's own code on them."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from typing import Any

import msgspec

from benchmarks.form import WORKLOADS
from flash.config.tree import Config
from flash.simulate.bounds import bounds, quantities
from flash.simulate.clock import run_virtual
from flash.simulate.report import SimReport
from flash.simulate.world import World, simulate

NOTHING_REAL: dict[str, dict[str, Any]] = {"model": {"path": "none"}, "env": {"path": "none:None"}}
"""Tables that a configuration must have and a simulation does not use."""

BASE: dict[str, dict[str, Any]] = {
    "run": {"name": "benchmark"},
    "model": NOTHING_REAL["model"] | {"max_length": 1 << 20},
    "env": NOTHING_REAL["env"],
    "rollout": {"max_new_tokens": 1 << 16},
    "train": {},
    "engine": {"stream_interval": 256},
    "simulate": {},
}
"""Tables that allow every length of a workload. Deliveries of tokens are rare, because nothing reads them early."""

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
"""Two engines and one trainer whose time is easily computed: only decoding steps, swaps and training steps."""


GPUS_PER_NODE = 8
"""GPUs of a node, from which the number of nodes follows unless a configuration names it."""


def configure(**tables: Mapping[str, Any]) -> Config:
    """Return the configuration `BASE` with changes: each table of `tables` replaces some keys of the same table."""
    return _changed(BASE, tables)


def workload(name: str, **tables: Mapping[str, Any]) -> Config:
    """Return the configuration benchmarks/workloads/<name>.toml with changes, as in `configure`."""
    return _changed(NOTHING_REAL | tomllib.loads((WORKLOADS / f"{name}.toml").read_text()), tables)


def change(config: Config, **tables: Mapping[str, Any]) -> Config:
    """Return a configuration with changes, as in `configure`."""
    return _changed(msgspec.to_builtins(config), tables)


def _changed(base: Mapping[str, Any], tables: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return a configuration: the tables `base`, changed by `tables`. The GPUs of engines give the number of nodes."""
    changed = {name: base.get(name, {}) | dict(table) for name, table in tables.items()}
    simulated = tables.get("simulate", {})
    if "rollout_gpus" in simulated and "nodes" not in simulated:
        changed["simulate"]["nodes"] = math.ceil(simulated["rollout_gpus"] / GPUS_PER_NODE)
    return msgspec.convert({**base, **changed}, Config)


def decode_s(samples: int, tokens: float, places: int) -> float:
    """Return the seconds in which `TWO_ENGINES`, with `places` places each, decode `samples` samples.

    `tokens` is the mean number of tokens of a sample.
    """
    return samples * tokens * STEP_S / (2 * places)


def ours(config: Config, **rollout: object) -> SimReport:
    """Simulate our own code on a configuration. `rollout` are changes of its table `[rollout]`."""
    return simulate(change(config, rollout=rollout))


def capacity_s(config: Config, report: SimReport) -> float:
    """Return the least seconds of a step under any schedule. `report` is that of a simulated run of `config`."""
    every = bounds(quantities(config, report.ledger), config.train.batch_size)
    return next(bound.step_s for bound in every if bound.lower)


def run_world(config: Config) -> tuple[World, SimReport]:
    """Simulate a run; return its world, which tests look into, and its report."""

    async def run() -> tuple[World, SimReport]:
        """Run the simulation on the virtual clock."""
        world = World(config)
        return world, world.report(await world.run())

    return run_virtual(run)
