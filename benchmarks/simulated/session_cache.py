"""Session admission: episodes of many turns whose KV caches exceed the engines' memory.

Simulated, generation alone: the same run with `rollout.session_s` over without it, where the contexts of all episodes
alive are as large as the engines' caches, and two and four times as large. `session_s` follows the rule of the docs:
half of the time in which an engine prefills its whole cache. The bound is the same run with caches that never fill.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import change, ours, workload
from benchmarks.simulated.figure import bars
from flash.config.tree import Config

RATIOS = (1, 2, 4)
"""Tokens of all episodes alive over those that the engines' caches hold."""
ENVIRONMENTS_S = (1.5, 4, 15)
"""Mean seconds of an environment's step; its standard deviation is the same."""
CONTEXT = 9_425
"""Mean tokens of an episode at the end of a turn: 3,000, half of the turns with 650 each, and the response."""
GOAL = 1.5
"""At a ratio of two, where environments answer before `session_s`."""


def measure(args: Args) -> list[Row]:
    """The gain in each case, and what it is made of."""
    rows: list[Row] = []
    for seconds in ENVIRONMENTS_S:
        for ratio in RATIOS:
            config = _config(ratio, seconds, steps=3 if args.quick else 12)
            assert config.simulate is not None, "the workload is a simulated one"
            keep_s = config.simulate.kv_tokens * config.simulate.prefill_s / 2
            without, counted = ours(config).samples_per_s, ours(config, session_s=keep_s).samples_per_s
            endless = ours(change(config, simulate={"kv_tokens": 0})).samples_per_s
            goal = GOAL if ratio == 2 and seconds < keep_s else 1.0
            case = f"{ratio}:1, environments {seconds:g} s"
            rows.append(Row(case, "without_samples_per_s", "samples/s", without))
            rows.append(Row(case, "speedup", "x", counted / without, None, goal, None, endless / without))
    return rows


def _config(ratio: int, seconds: float, steps: int) -> Config:
    config = workload("session_cache", run={"steps": steps})
    assert config.simulate is not None, "the workload is a simulated one"
    alive = (1 + config.train.async_ratio) * config.train.batch_size / config.simulate.rollout_gpus
    memory = round(alive * CONTEXT / ratio)
    return change(config, simulate={"kv_tokens": memory, "env_s": f"lognormal({seconds}, {seconds})"})


if __name__ == "__main__":
    main("session_cache", __doc__ or "", measure, plot=bars("Session admission", "speed-up over none"))
