"""Environments that step on their own, compared with environments in lock-step, in a simulation of generation alone.

Latencies are normal(10, σ). In lock-step, each turn waits for the slowest of all environments. On their own, only the
slowest sum over all turns counts.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, ours, workload
from benchmarks.simulated.figure import lines, speedup
from benchmarks.simulated.peers.roll_agentic import Rules, roll_agentic
from benchmarks.simulated.peers.synchronous import Rules as Baseline
from benchmarks.simulated.peers.synchronous import synchronous

PUBLISHED = {10: (892.0, 362.0)}
"""Seconds in lock-step and on their own, by σ."""


def measure(args: Args) -> list[Row]:
    """Return the speed-up by σ, and the seconds where they are published."""
    rows: list[Row] = []
    for sigma in (1, 10) if args.quick else (1, 2, 4, 6, 8, 10):
        steps = 2 if args.quick else 4
        config = workload(
            "env_async", run={"steps": steps}, simulate={"env_s": {"kind": "normal", "mean": 10, "deviation": sigma}}
        )
        case = f"sigma {sigma}"
        locked_s = synchronous(config, Baseline(colocated=False, replicate=True)).step_s
        peer_s = roll_agentic(config, Rules()).step_s
        report = ours(config)
        published = None
        if sigma in PUBLISHED:
            before, after = PUBLISHED[sigma]
            published = before / after
            locked = ours(config, barriers=["turn"]).step_s
            rows.append(Row(f"{case}, lock-step", "step_s", "s", locked, before, peer=locked_s))
            rows.append(Row(f"{case}, on their own", "step_s", "s", report.step_s, after, peer=peer_s))
        rows += speedup(case, locked_s, report.step_s, peer_s, capacity_s(config, report), published)
    return rows


if __name__ == "__main__":
    plot = lines("Environments on their own", "σ of the latency, s", "speed-up over lock-step", "speedup")
    main("env_async", __doc__ or "", measure, plot=plot)
