"""Prompt replication in a simulation: n samples of a prompt as n requests, compared with one request of n sequences.

Only generation is simulated. Baseline and peer follow ROLL Flash's rules without and with replication. Flash runs its
own code with its own setting. All requests of a batch fit into the engines, so replication only improves the balance
between engines.
"""

from __future__ import annotations

from benchmarks.form import Args, Row, main
from benchmarks.simulated.configure import capacity_s, ours, workload
from benchmarks.simulated.figure import bars, speedup
from benchmarks.simulated.peers.roll_flash import Rules, roll_flash

CASES = ((32, 16, 116.0, 89.0), (64, 16, 149.0, 81.0), (16, 64, 162.0, 83.0))
"""Prompts, samples of each, published seconds without and with replication."""


def measure(args: Args) -> list[Row]:
    """Return seconds and speed-up of each case."""
    rows: list[Row] = []
    for prompts, samples, before, after in CASES:
        config = workload(
            "prompt_replication",
            run={"steps": 3 if args.quick else 12},
            rollout={"group_size": samples},
            train={"batch_size": prompts * samples},
        )
        case = f"{prompts}x{samples}"
        shared_s = roll_flash(config, Rules(replicate=False)).step_s
        peer_s = roll_flash(config, Rules()).step_s
        off, on = ours(config, barriers=["group"]), ours(config)
        rows.append(Row(f"{case}, one request", "step_s", "s", off.step_s, before, peer=shared_s))
        rows.append(Row(f"{case}, replicated", "step_s", "s", on.step_s, after, peer=peer_s))
        rows += speedup(case, shared_s, on.step_s, peer_s, capacity_s(config, on), before / after)
    return rows


if __name__ == "__main__":
    main("prompt_replication", __doc__ or "", measure, plot=bars("Prompt replication", "speed-up over one request"))
