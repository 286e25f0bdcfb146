"""`python -m tests.fuzz TARGET COUNT [SEED]`: the fuzzers at full length. Prints what was done; raises at a failure."""

from __future__ import annotations

import sys
from collections.abc import Callable

import anyio

from flash.simulate.clock import run_virtual
from tests.fuzz import config, hub, service, weights

TARGETS: dict[str, Callable[[int, int], dict[str, int]]] = {
    "hub": lambda count, seed: anyio.run(hub.fuzz, count, seed),
    "insider": lambda count, seed: run_virtual(hub.insider, count, seed),
    "weights": weights.fuzz,
    "service": lambda count, seed: anyio.run(service.fuzz, count, seed),
    "config": config.fuzz,
}

if __name__ == "__main__":
    name, count, *seed = sys.argv[1:]
    done = TARGETS[name](int(count), int(seed[0]) if seed else 0)
    sys.stdout.write(f"{name}: {done}\n")
